"""Where models and tokenizers come from."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import agent_r1
from llm_utils.records.earlier_runs import arguments_of_run, beginning_of_run, places, stack_of_adapters
from llm_utils.setup import foreign
from llm_utils.setup.loading import read_config


def model_source(name: str, env_id: str) -> str:
    """The Hugging Face name or the folder of the weights that `--model` means.

    "tiny" is the policy shipped for the environment; a run's folder stands for its saved model, or its checkpoint.
    """
    try:
        folder = agent_r1.tiny_policy(env_id) if name == "tiny" else os.path.expanduser(name)
    except ValueError as error:
        raise SystemExit(f"--model {name}: {error}") from None
    if os.path.isdir(folder):
        for candidate in places(folder):
            if (candidate / "config.json").is_file():
                return str(candidate)
            if (candidate / "adapter_config.json").is_file():
                raise SystemExit(
                    f"--model {name}: {candidate} holds only adapters. Play them with evaluate_llm.py --adapter "
                    f"{candidate}, go on with that run with --resume, give its model/ (--save-model), or merge the "
                    "adapters with peft's merge_and_unload()"
                )
        raise SystemExit(f"--model {name}: the folder holds no config.json; give one that save_pretrained() made")
    if os.path.isabs(folder) or folder.startswith((".", "~", "runs/")) or folder.count("/") > 1:
        raise SystemExit(f"--model {name}: there is no such folder")
    return folder


def source_of(args: Any) -> str:
    """Where the weights come from that a script's arguments name: learners begin with them, an evaluation plays them.
    """
    if getattr(args, "api", None) is not None:
        return args.api_model
    name = args.model
    if getattr(args, "mode", None) == "base_tool_call":  # of the model that the run began with
        name = beginning_of_run(name) or name
    return model_source(name, args.env_id)


def fingerprint(*sources: str | None) -> str | None:
    """Of the files in the folders of a model and its adapters, by their names, sizes and times; None where there is no
    folder, but a name on a hub or behind an API."""
    folders = [Path(source) for source in sources if source and Path(source).is_dir()]
    paths = [sorted(path for path in folder.iterdir() if path.is_file()) for folder in folders]
    files = [[(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in group] for group in paths]
    return hashlib.sha256(json.dumps(files).encode()).hexdigest() if files else None


def config_files(*sources: str | None) -> str | None:
    """Of what the files in folders say of a model and its tokenizer, all but the weights: by content, so that copies
    are the same. None where there is no folder."""
    kinds = ("config.json", "tokenizer*", "vocab*", "merges*", "special_tokens*", "added_tokens*", "chat_template*")
    folders = dict.fromkeys(source for source in sources if source and Path(source).is_dir())
    paths = [path for folder in folders for kind in kinds for path in sorted(Path(folder).glob(kind)) if path.is_file()]
    found = hashlib.sha256()
    for path in paths:
        found.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return found.hexdigest()[:16] if paths else None


def model_files(args: Any) -> str | None:
    """The fingerprint of the model that a script's arguments name; None where it has no files, or none yet."""
    adapter = getattr(args, "adapter", None)
    adapters = stack_of_adapters(adapter) if adapter else []
    return None if args.model == "scratch" else fingerprint(source_of(args), *adapters)


def tokenizer_source(name: str | None, source: str, env_id: str) -> str | None:
    """What the environment gets as its tokenizer: None for "byte", the name given, or else the model's own. SystemExit
    where transformers would stumble over the configs beside it, which it reads before a tokenizer."""
    if name == "byte":
        return None
    if name is None and os.path.isdir(source) and not any(Path(source).glob("tokenizer*.json")):
        began = beginning_of_run(source)  # a checkpoint holds no tokenizer
        if began is None:
            raise SystemExit(f"the folder {source} holds no tokenizer; name one with --tokenizer")
        return tokenizer_source(arguments_of_run(source)["tokenizer"], model_source(began, env_id), env_id)
    if name is None and os.path.isdir(source):
        read_config(source)
    elif name is not None:
        try:
            foreign.check_configs(Path(name))
        except (OSError, foreign.RefusedError) as error:
            raise SystemExit(f"--tokenizer {name}: {error}") from None
    return name or source
