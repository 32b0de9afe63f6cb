"""What the learners check about a model before any work is done."""

from __future__ import annotations

import os

from transformers import PreTrainedModel

import agent_r1


def model_source(name: str, env_id: str) -> str:
    """The name or folder behind `--model`; "tiny" is the policy shipped for the environment."""
    folder = agent_r1.tiny_policy(env_id) if name == "tiny" else name
    if os.path.isdir(folder):
        if not os.path.isfile(os.path.join(folder, "config.json")):
            raise SystemExit(f"--model {name}: the folder holds no config.json; give one that save_pretrained() made")
    elif os.path.isabs(folder) or folder.startswith(".") or folder.count("/") > 1:
        raise SystemExit(f"--model {name}: there is no such folder")
    return folder


def check_vocabulary(model: PreTrainedModel, vocab_size: int) -> None:
    """A tokenizer may be shorter than the embedding (the rows beyond it are never sampled), but not longer."""
    rows = model.get_input_embeddings().num_embeddings
    if vocab_size > rows:
        raise SystemExit(
            f"the tokenizer has {vocab_size} tokens, the model's embedding only {rows} rows: they don't fit. "
            "Give the model's own tokenizer, or resize the embedding and train it first"
        )
