"""Locations of models and tokenizers."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import agent_r1
from agent_r1_tools.text import printable
from llm_utils import distributed
from llm_utils.records.earlier_runs import arguments_of_run, beginning_of_run, places, stack_of_adapters
from llm_utils.setup import foreign
from llm_utils.setup.environments import smaller_context
from llm_utils.setup.loading import read_config
from llm_utils.setup.model_checks import positions_of


def model_source(name: str, env_id: str | list[str], flag: str = "--model") -> str:
    """Return the Hugging Face name or the folder of the weights that a `flag` means.

    "tiny" is the policy shipped for the environment. A run's folder means its saved model, or its checkpoint.
    """
    ids = [env_id] if isinstance(env_id, str) else env_id
    if name == "tiny" and len(ids) > 1:
        raise SystemExit(f"{flag} tiny is the policy of one environment: for several, give {flag} NAME_OR_FOLDER")
    try:
        folder = agent_r1.tiny_policy(ids[0]) if name == "tiny" else os.path.expanduser(name)
    except ValueError as error:
        raise SystemExit(printable(f"{flag} {name}: {error}")) from None
    if os.path.isdir(folder):
        for candidate in places(folder):
            if (candidate / "config.json").is_file():
                return str(candidate)
            if (candidate / "adapter_config.json").is_file():
                raise SystemExit(
                    f"{flag} {name}: {candidate} holds only adapters. Evaluate them with evaluate_llm.py --adapter "
                    f"{candidate}, continue that run with --resume, use its model/, which it has without "
                    "--no-save-model, or merge the adapters with peft's merge_and_unload()"
                )
        cause = "the folder has no config.json; use a folder made by save_pretrained()"
        raise SystemExit(printable(f"{flag} {name}: {cause}"))
    if os.path.isfile(folder):
        raise SystemExit(printable(f"{flag} {name}: this is a file; give its folder, as made by save_pretrained()"))
    if os.path.isabs(folder) or folder.startswith((".", "~", "runs/")) or folder.count("/") > 1:
        raise SystemExit(printable(f"{flag} {name}: there is no such folder"))
    return folder


def source_of(args: Any) -> str:
    """Return the source of the weights that a script's arguments name. Learners start from them; an evaluation runs
    them."""
    if getattr(args, "api", None) is not None:
        return args.api_model
    name = args.model
    if getattr(args, "mode", None) == "base_tool_call":  # the model that the run started from
        name = beginning_of_run(name) or name
    return model_source(name, args.env_id)


def fingerprint(*sources: str | None) -> str | None:
    """Hash the names, sizes and times of files, and of the files in the folders of a model and its adapters. Return
    None if there is neither, but a name on a hub or behind an API."""
    places = [Path(source) for source in sources if source and Path(source).exists()]
    paths = [sorted(path for path in ([place] if place.is_file() else place.iterdir()) if path.is_file())
             for place in places]  # fmt: skip
    files = [[(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in group] for group in paths]
    return hashlib.sha256(json.dumps(files).encode()).hexdigest() if files else None


def config_files(*sources: str | None) -> str | None:
    """Hash the files of a model and its tokenizer in the folders, except the weights, and single files (a chat
    template). The hash is by content, so copies are equal. Return None if there is neither."""
    kinds = ("config.json", "tokenizer*", "vocab*", "merges*", "special_tokens*", "added_tokens*", "chat_template*")
    folders = dict.fromkeys(source for source in sources if source and Path(source).is_dir())
    paths = [path for folder in folders for kind in kinds for path in sorted(Path(folder).glob(kind)) if path.is_file()]
    paths += [Path(source) for source in dict.fromkeys(sources) if source and Path(source).is_file()]
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16] if paths else None


def model_files(args: Any, *more: str | None) -> str | None:
    """Return the fingerprint of the model that a script's arguments name, and of `more` files; None if it has no files
    (yet)."""
    adapter = getattr(args, "adapter", None)
    adapters = stack_of_adapters(adapter) if adapter else []
    critic = getattr(args, "critic", None)  # of an evaluation that decodes with one
    critics = [str(Path(critic, "critic"))] if critic else []
    return None if args.model == "scratch" else fingerprint(source_of(args), *adapters, *critics, *more)


def tokenizer_source(name: str | None, source: str, env_id: str) -> str | None:
    """Return the environment's tokenizer: None for "byte", the given name, or else the model's own. Raise SystemExit if
    the configs beside it are damaged, as transformers reads them before the tokenizer."""
    if name == "byte" or (name is None and arguments_of_run(source).get("tokenizer") == "byte"):  # saved as another one
        return None
    if name is not None and os.path.isfile(name):
        cause = "this is a file; give its folder, as made by save_pretrained()"
        raise SystemExit(printable(f"--tokenizer {name}: {cause}"))
    if name is None and os.path.isdir(source) and not any(Path(source).glob("tokenizer*.json")):
        initial_model = beginning_of_run(source)  # a checkpoint holds no tokenizer
        if initial_model is None:
            raise SystemExit(f"the folder {source} has no tokenizer; name one with --tokenizer")
        return tokenizer_source(arguments_of_run(source).get("tokenizer"), model_source(initial_model, env_id), env_id)
    if name is None and os.path.isdir(source):
        read_config(source)
    elif name is not None:
        try:
            foreign.check_configs(Path(name))
        except (OSError, foreign.RefusedError) as error:
            raise SystemExit(printable(f"--tokenizer {name}: {error}")) from None
    return name or source


def template_source(chat_template: str | None, tokenizer: str | None, source: str, env_id: str) -> str | None:
    """Return the file of the chat template: the given one, or else that of the run whose checkpoint is in `source`. A
    checkpoint holds no tokenizer; a saved model has one, with its template."""
    if chat_template is not None or tokenizer is not None or any(Path(source).glob("tokenizer*.json")):
        return chat_template
    initial_model, run = beginning_of_run(source), arguments_of_run(source)
    if initial_model is None:
        return None
    return template_source(run.get("chat_template"), run.get("tokenizer"), model_source(initial_model, env_id), env_id)


def fit_environment(args: Any) -> dict[str, Any]:
    """Fill the environment's arguments that depend on the model, and return them: the chat template of the run that it
    comes from, and `max_context_tokens` if the model has fewer positions than the environment's default."""
    if args.model == "scratch" or getattr(args, "api", None) is not None:
        return {}
    source = source_of(args)
    filled: dict[str, Any] = {}
    template = template_source(args.chat_template, args.tokenizer, source, args.env_id)
    if template != args.chat_template:
        args.chat_template = filled["chat_template"] = template
    if args.resume is None and not getattr(args, "data", "") and distributed.launched_rank() == 0:
        tokenizer = tokenizer_source(args.tokenizer, source, args.env_id)
        context = smaller_context(args, tokenizer, positions_of(read_config(source)))
        if context is not None:
            args.env_kwargs = filled["env_kwargs"] = context
    return filled
