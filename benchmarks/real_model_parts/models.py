"""Models and adapters: which ones they are, and one in the other's weights."""

from __future__ import annotations

from pathlib import Path

import torch

from llm_utils.checkpoint import save_model
from llm_utils.loading import load_policy, merge_adapters
from real_model_parts.questions import hash_of_files


def hash_of_adapters(adapters: Path) -> str:
    """Of their weights."""
    file = adapters / "adapter_model.safetensors"
    if not file.is_file():
        raise SystemExit(f"--adapters {adapters}: there is no {file.name}; give a folder that peft saved")
    return hash_of_files([file])


def hash_of_model(model: str) -> str:
    """Of a folder's weights; a name on a hub stands for itself."""
    weights = list(Path(model).glob("*.safetensors"))
    return hash_of_files(weights) if weights else model


def merge(model: str, adapters: Path, folder: Path) -> None:
    """Write the model with LoRA adapters added to its weights, as learners begin with it."""
    save_model(merge_adapters(load_policy(model, torch.device("cpu"), whole=True), str(adapters)), folder, model)
