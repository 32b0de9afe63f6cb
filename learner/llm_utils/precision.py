"""In which precision a model computes."""

from __future__ import annotations

import subprocess
import sys

import torch


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """What `--dtype` means: "auto" is float32 on a CPU and bf16 on a GPU.

    SystemExit where bf16 is asked for on a CPU that dies of it.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name == "bfloat16" and device.type == "cpu" and not computes_bfloat16():
        raise SystemExit("--dtype bfloat16: this processor can't multiply bf16 matrices; use --dtype float32")
    return getattr(torch, name)


def computes_bfloat16() -> bool:
    """Does a bf16 product work on this CPU? A child process tries: some processors die of the instruction."""
    product = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); assert (x @ x)[0, 0] == 64"
    return subprocess.run([sys.executable, "-c", product], capture_output=True).returncode == 0
