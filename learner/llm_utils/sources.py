"""Where models and tokenizers come from, and what is checked about them before any work is done."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

import agent_r1
from llm_utils.environments import evaluation_split
from llm_utils.slots import attends_to_less

CHECKPOINT = ("checkpoint", "policy")  # of a run


def model_source(name: str, env_id: str) -> str:
    """The Hugging Face name or the folder of the weights that `--model` means.

    "tiny" is the policy shipped for the environment; a run's folder stands for its saved model, or its checkpoint.
    """
    try:
        folder = agent_r1.tiny_policy(env_id) if name == "tiny" else os.path.expanduser(name)
    except ValueError as error:
        raise SystemExit(f"--model {name}: {error}") from None
    if os.path.isdir(folder):
        for candidate in (folder, os.path.join(folder, "model"), os.path.join(folder, *CHECKPOINT)):
            if os.path.isfile(os.path.join(candidate, "config.json")):
                return candidate
            if os.path.isfile(os.path.join(candidate, "adapter_config.json")):
                raise SystemExit(
                    f"--model {name}: {candidate} holds only adapters. Go on with that run with --resume, give its "
                    "model/ (--save-model), or merge the adapters with peft's merge_and_unload()"
                )
        raise SystemExit(f"--model {name}: the folder holds no config.json; give one that save_pretrained() made")
    if os.path.isabs(folder) or folder.startswith((".", "~", "runs/")) or folder.count("/") > 1:
        raise SystemExit(f"--model {name}: there is no such folder")
    return folder


def folder_of_run(source: str) -> Path | None:
    """That of the run to which a model folder (or the run's folder itself) belongs; None for other folders."""
    path = Path(source).expanduser()
    folders = (path, *path.parents[:2]) if path.is_dir() else ()
    return next((folder for folder in folders if (folder / "summary.json").is_file()), None)


def summary_of_run(source: str) -> dict[str, Any]:
    """What such a run wrote; {} for other folders."""
    folder = folder_of_run(source)
    return json.loads((folder / "summary.json").read_text()) if folder else {}


def arguments_of_run(source: str) -> dict[str, str | None]:
    """The arguments of such a run."""
    return summary_of_run(source).get("args", {})


def beginning_of_run(source: str) -> str | None:
    """What such a run began with, as `--model` names it; None for other folders."""
    folder, model = folder_of_run(source), arguments_of_run(source).get("model")
    return str(folder / "scratch") if folder is not None and model == "scratch" else model  # sft_llm.py made it


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
    """Of the files in the folders of a model and its adapter, by their names, sizes and times; None where there is no
    folder, but a name on a hub or behind an API."""
    folders = [Path(source) for source in sources if source and Path(source).is_dir()]
    paths = [sorted(path for path in folder.iterdir() if path.is_file()) for folder in folders]
    files = [[(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in group] for group in paths]
    return hashlib.sha256(json.dumps(files).encode()).hexdigest() if files else None


def model_files(args: Any) -> str | None:
    """The fingerprint of the model that a script's arguments name; None where it has no files, or none yet."""
    return None if args.model == "scratch" else fingerprint(source_of(args), getattr(args, "adapter", None))


PLAYED = [  # what an evaluation may leave open: its argument, that of a run, and what it is without a run
    ("env_id", "env_id", "AgentR1/MultihopWorld-v0"),
    ("split", "eval_split", None),
    ("env_kwargs", "env_kwargs", "{}"),
    ("data_dir", "data_dir", None),
]


def fill_environment(args: Any) -> list[str]:
    """Put in what an evaluation's arguments leave open: the environment that the run of `--model` was trained on.

    The run's split and further arguments go with its environment only. Returns lines that say what was taken over, and
    where the evaluation differs from the run.
    """
    run = (arguments_of_run(args.adapter) if args.adapter else {}) or arguments_of_run(args.model)
    said, taken = [], []
    path = Path(args.model).expanduser()
    saved = (path / "model" / "config.json").is_file() or not path.joinpath(*CHECKPOINT).is_dir()
    if not saved and not summary_of_run(args.model).get("finished", True):
        said.append(f"--model {args.model}: this run isn't finished; what is played is its last checkpoint")
    if args.env_id not in (None, run.get("env_id", args.env_id)):
        said.append(f"the run was trained on {run['env_id']}; it is played on {args.env_id}, as --env-id says")
        run = {}
    for name, name_in_run, default in PLAYED:
        given, own, flag = getattr(args, name), run.get(name_in_run), f"--{name.replace('_', '-')}"
        if given is None:
            setattr(args, name, default if own is None else own)
            taken += [] if own is None else [f"{flag} {shlex.quote(own)}"]
        elif name == "env_kwargs" and own not in (None, given):
            said.append(f"the run was trained with --env-kwargs {shlex.quote(str(own))}, which isn't taken over")
    if args.split is None:
        args.split = evaluation_split(args, "train")
        if args.split == "train":
            said.append("--split train: nothing held out is known here, so these are training tasks")
    return said + ([f"as the run was trained: {' '.join(taken)}"] if taken else [])


def tokenizer_source(name: str | None, source: str, env_id: str) -> str | None:
    """What the environment gets as its tokenizer: None for "byte", the name given, or else the model's own."""
    if name == "byte":
        return None
    if name is None and os.path.isdir(source) and not any(Path(source).glob("tokenizer*.json")):
        began = beginning_of_run(source)  # a checkpoint holds no tokenizer
        if began is None:
            raise SystemExit(f"the folder {source} holds no tokenizer; name one with --tokenizer")
        return tokenizer_source(arguments_of_run(source)["tokenizer"], model_source(began, env_id), env_id)
    return name or source


def check_vocabulary(model: PreTrainedModel, vocab_size: int) -> None:
    """A tokenizer may be shorter than the embedding (the rows beyond it are never sampled), but not longer."""
    rows = model.get_input_embeddings().num_embeddings
    if vocab_size > rows:
        raise SystemExit(
            f"the tokenizer has {vocab_size} tokens, the model's embedding only {rows} rows: they don't fit. "
            "Give the model's own tokenizer, or resize the embedding and train it first"
        )


def check_context(config: Any, max_context_tokens: int) -> None:
    """The environment's longest state, in tokens, must have positions in the model.

    `config` is the model's, `max_context_tokens` the `max_len` of the environment's observation space. SystemExit
    otherwise.
    """
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and max_context_tokens > positions:
        raise SystemExit(
            f"the environment's states have up to {max_context_tokens} tokens, the model has {positions} positions: "
            f"give the environment fewer, --env-kwargs '{{\"max_context_tokens\": {positions}}}'"
        )


def check_attention(config: Any, longest_row: float) -> None:
    """The transformers engine samples right only where every layer attends to all of a row. SystemExit otherwise."""
    if less := attends_to_less(config, longest_row):
        raise SystemExit(
            f"--engine transformers needs full attention in every layer, and this model ({config.model_type}) has "
            f"{less}, with rows of up to {longest_row} tokens: sample with --engine vllm or vllm-server"
            + (", or give the environment a shorter max_context_tokens" if "window" in less else "")
        )


def default_learning_rates(model: str, lora_rank: int) -> tuple[float, float]:
    """Learning rates of policy and critic that suit `--model` and `--lora-rank`.

    The shipped policies are small and can take large steps; a pretrained model forgets under them.
    """
    if model == "tiny":
        return 3e-4, 1e-3
    return (1e-5 if lora_rank else 1e-6), 1e-5
