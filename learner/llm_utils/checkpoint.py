"""Checkpoint files of the learners: weights as safetensors, the rest loaded with `weights_only`, written atomically.

    runs/{run_name}/checkpoint/policy/             save_pretrained() of the policy
                               critic.safetensors  where the algorithm has one
                               optimizer.pt        state of the optimizer, and its float32 weights where they differ
                               state.json          algorithm, arguments, iteration, counters

There are no random states in it: everything random in a run is a function of (seed, iteration, episode).
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import nn

MOST_BYTES = 2**31  # models up to this size (with optimizer state) are copied at every boundary, for Ctrl-C

ArgsT = TypeVar("ArgsT")


def write_json(path: Path, content: Any) -> None:
    """Write a file that is either the old one or the new one, whatever happens meanwhile."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(temporary, path)


class Checkpointer:
    """Writes the state that a run had at its last iteration boundary.

    `boundary(state)` is called when an iteration is complete. A small model is copied there, so that the boundary can be
    written at any moment after it; of a large one only what is in memory can be written, until `dirty()` says that an
    update has begun.
    """

    def __init__(
        self, run_dir: Path, policy: Any, critic: nn.Module | None, optimizer: Any, masters: list[list[torch.Tensor]]
    ) -> None:
        self.folder = run_dir / "checkpoint"
        self.policy, self.critic, self.optimizer, self.masters = policy, critic, optimizer, masters
        sizes = [p.numel() * p.element_size() for module in (policy, critic) if module for p in module.parameters()]
        self.in_memory = 3 * sum(sizes) <= MOST_BYTES
        self.state: dict[str, Any] | None = None
        self.kept: dict[str, Any] | None = None

    def boundary(self, state: dict[str, Any]) -> None:
        """An iteration is complete: remember it."""
        self.state = copy.deepcopy(state)
        self.kept = copy.deepcopy(self._collect()) if self.in_memory else None
        self.clean = True

    def dirty(self) -> None:
        """From here on the weights are no longer those of the boundary."""
        self.clean = False

    def _collect(self) -> dict[str, Any]:
        float32 = all(p.dtype == torch.float32 for p in self.policy.parameters())
        return {
            "policy": self.policy.state_dict(),
            "critic": self.critic.state_dict() if self.critic else None,
            "optimizer": {"optimizer": self.optimizer.state_dict(), "masters": None if float32 else self.masters},
        }

    def save(self) -> bool:
        """Write the last boundary. False where that is no longer possible (then the last file on disk stands)."""
        content = self.kept or (self._collect() if self.state and self.clean else None)
        if content is None:
            return False
        new, old = self.folder.with_suffix(".new"), self.folder.with_suffix(".old")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        self.policy.save_pretrained(new / "policy", state_dict=content["policy"])
        if content["critic"]:
            save_file({k: v.contiguous() for k, v in content["critic"].items()}, new / "critic.safetensors")
        torch.save(content["optimizer"], new / "optimizer.pt")
        write_json(new / "state.json", self.state)
        shutil.rmtree(old, ignore_errors=True)
        if self.folder.exists():
            self.folder.rename(old)
        new.rename(self.folder)
        shutil.rmtree(old, ignore_errors=True)
        return True


def find(run_dir: str | Path) -> Path:
    """The checkpoint folder of a run; SystemExit with the reason where there is none."""
    folder = Path(run_dir) / "checkpoint"
    if not folder.is_dir() and folder.with_suffix(".old").is_dir():  # interrupted between two renames
        folder.with_suffix(".old").rename(folder)
    if not (folder / "state.json").is_file():
        raise SystemExit(
            f"--resume {run_dir}: no checkpoint there. Give the run's folder (runs/...); checkpoints are written with "
            "--checkpoint-every and at Ctrl-C"
        )
    return folder


def load_args(run_dir: str | Path, args: ArgsT) -> ArgsT:
    """The arguments of the run that is resumed. They must be those of the same script."""
    saved = json.loads((find(run_dir) / "state.json").read_text())
    script = Path(str(type(args).__dict__.get("exp_name", ""))).name
    if saved["algorithm"] != script:
        raise SystemExit(f"--resume {run_dir}: the checkpoint is of {saved['algorithm']}.py, this is {script}.py")
    return type(args)(**{**saved["args"], "resume": str(run_dir)})


def load(run_dir: str | Path, critic: nn.Module | None, optimizer: Any, masters: list[list[torch.Tensor]]) -> dict:
    """Put critic, optimizer and float32 weights back and return the state. The policy is loaded by the caller."""
    folder = find(run_dir)
    if critic is not None:
        try:
            critic.load_state_dict(load_file(folder / "critic.safetensors"))
        except (RuntimeError, FileNotFoundError) as error:
            raise SystemExit(f"--resume {run_dir}: the checkpoint's critic is of another model: {error}") from error
    saved = torch.load(folder / "optimizer.pt", weights_only=True, map_location="cpu")
    optimizer.load_state_dict(saved["optimizer"])
    if saved["masters"] is not None:
        with torch.no_grad():
            for new, old in zip(sum(masters, []), sum(saved["masters"], []), strict=True):
                new.copy_(old)
    return json.loads((folder / "state.json").read_text())


def drop_later_rows(path: Path, iteration: int) -> None:
    """Remove rows of iterations after `iteration` from a JSONL file: a resumed run plays them again."""
    if path.is_file():
        rows = [line for line in path.read_text().splitlines(True) if json.loads(line)["iteration"] <= iteration]
        path.write_text("".join(rows))
