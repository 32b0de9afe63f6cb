"""What an earlier run wrote about itself, for programs that go on from its model or play it."""

from __future__ import annotations

import json
import os
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

import agent_r1
from agent_r1_tools.text import printable
from llm_utils.setup.environments import evaluation_split
from llm_utils.setup.foreign import read_object

CHECKPOINT = ("checkpoint", "policy")  # of a run


def folder_of_run(source: str) -> Path | None:
    """That of the run to which a model folder (or the run's folder itself) belongs; None for other folders."""
    path = Path(source).expanduser()
    folders = (path, *path.parents[:2], *path.resolve().parents[:2]) if path.is_dir() else ()
    return next((folder for folder in folders if (folder / "summary.json").is_file()), None)


def summary_of_run(source: str) -> dict[str, Any]:
    """What such a run wrote; {} for other folders, also those whose summary.json is somebody else's."""
    folder = folder_of_run(source)
    try:
        found = read_object(folder / "summary.json") if folder else {}
    except ValueError:
        return {}
    return found if isinstance(found.get("args"), dict) else {}


def arguments_of_run(source: str) -> dict[str, str | None]:
    """The arguments of such a run."""
    return summary_of_run(source).get("args", {})


def beginning_of_run(source: str) -> str | None:
    """What such a run began with, as `--model` names it in any environment; None for other folders."""
    folder, args = folder_of_run(source), arguments_of_run(source)
    model, env_id = args.get("model"), args.get("env_id")
    if folder is not None and model == "scratch":
        return f"{folder}/scratch"  # sft_llm.py made it; in "." no word that a hub may have
    if model == "tiny" and env_id is not None:
        with suppress(ValueError):  # none is shipped any more
            return agent_r1.tiny_policy(env_id)
    return model


def places(folder: str | Path) -> list[Path]:
    """Where a model may lie that a folder stands for: it itself, a run's saved model, or its checkpoint."""
    return [Path(folder), Path(folder, "model"), Path(folder, *CHECKPOINT)]


def other_environment(args: Any) -> str:
    """What a script says that begins with the model of a run, on its environment with other arguments; "" if not so."""
    start = arguments_of_run(args.model)
    own = start.get("env_kwargs") or "{}"
    played = start.get("env_id") == args.env_id and not start.get("data") and not getattr(args, "data", None)
    if not played or not isinstance(own, str) or _same_json(own, args.env_kwargs):
        return ""
    here = shlex.quote(args.env_kwargs)
    return f"--model {args.model} was trained with --env-kwargs {shlex.quote(own)}, this run has {here}"


PLAYED = [  # what an evaluation may leave open: its argument, that of a run, and what it is without a run
    ("env_id", "env_id", "AgentR1/MultihopWorld-v0"),
    ("split", "eval_split", None),
    ("env_kwargs", "env_kwargs", "{}"),
    ("data_dir", "data_dir", None),
]


def _same(one: str, other: str) -> bool:
    """Do two arguments `--model` name the same model?"""
    found = []
    for name in (one, other):
        there = [place for place in places(Path(name).expanduser()) if (place / "config.json").is_file()]
        found.append(there[0].resolve() if there else name)
    return found[0] == found[1]


def _same_json(one: str, other: str) -> bool:
    """Do two texts say the same in JSON?"""
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return one == other


def _noted_base(folder: str | Path) -> str | None:
    """What peft noted as the base of adapters."""
    with suppress(OSError, ValueError):
        base = read_object(Path(folder, "adapter_config.json")).get("base_model_name_or_path")
        return base if isinstance(base, str) and base else None
    return None


def stack_of_adapters(folder: str) -> list[str]:
    """The folders of adapters to add to a model, in order; these are the last.

    Where their base model had other adapters in its weights, their adapter_config.json names the folder of those as the
    base, as seen from its own folder ("../sft"). SystemExit for a circle.
    """
    stack = [folder]
    while (base := _noted_base(stack[0])) and (below := Path(stack[0], base)).joinpath("adapter_config.json").is_file():
        if any(below.samefile(other) for other in stack):
            raise SystemExit(printable(f"--adapter {folder}: {below} is below itself, says its adapter_config.json"))
        near = os.path.relpath(below.resolve())
        stack.insert(0, str(below.resolve()) if near.startswith("..") else near)
    return stack


def base_of_adapters(folder: str) -> str | None:
    """The model below LoRA adapters, as `--model` names it: what their run began with; else what peft noted."""
    return beginning_of_run(folder) or _noted_base(stack_of_adapters(folder)[0])


def fill_environment(args: Any) -> list[str]:
    """Put in what an evaluation's arguments leave open: the environment that the run of `--model` was trained on; the
    model below adapters ("tiny", the default, counts as open), and the tokenizer of their run.

    The run's split and further arguments go with its environment only. Returns lines that say what was taken over, and
    where the evaluation differs from the run.
    """
    said, taken = [], []
    adapted = arguments_of_run(args.adapter) if args.adapter else {}
    base = base_of_adapters(args.adapter) if args.adapter and args.api is None else None
    if base is not None and args.model == "tiny":
        args.model = base
        taken.append(f"--model {shlex.quote(base)}")
    elif base is not None and not _same(args.model, base):
        said.append(f"the adapters were trained on --model {base}; they are played on {args.model}")
    elif args.adapter and args.model == "tiny":
        said.append(f"--adapter {args.adapter} names no model; it is played on --model tiny, the shipped policy")
    if args.adapter and (below := stack_of_adapters(args.adapter)[:-1]):
        said.append(f"--adapter {args.adapter} goes on top of {' and '.join(below)}; --model is without these")
    if args.tokenizer is None and (tokenizer := adapted.get("tokenizer")):
        args.tokenizer = tokenizer
        taken.append(f"--tokenizer {shlex.quote(tokenizer)}")
    run = adapted or arguments_of_run(args.model)
    path = Path(args.model).expanduser()
    saved = (path / "model" / "config.json").is_file() or not path.joinpath(*CHECKPOINT).is_dir()
    if not saved and not summary_of_run(args.model).get("finished", True):
        said.append(f"--model {args.model}: this run isn't finished; what is played is its last checkpoint")
    if args.adapter and not summary_of_run(args.adapter).get("finished", True):
        said.append(f"--adapter {args.adapter}: this run isn't finished; what is played is a checkpoint")
    if args.env_id not in (None, run.get("env_id", args.env_id)):
        said.append(f"the run was trained on {run['env_id']}; it is played on {args.env_id}, as --env-id says")
        run = {}
    for name, name_in_run, default in PLAYED:
        given, own, flag = getattr(args, name), run.get(name_in_run), f"--{name.replace('_', '-')}"
        if given is None:
            setattr(args, name, default if own is None else own)
            taken += [] if own is None else [f"{flag} {shlex.quote(own)}"]
        elif name == "env_kwargs" and own is not None and not _same_json(str(own), given):
            said.append(f"the run was trained with --env-kwargs {shlex.quote(str(own))}, which isn't taken over")
    if args.split is None:
        args.split = evaluation_split(args, "train")
        if args.split == "train":
            said.append("--split train: nothing held out is known here, so these are training tasks")
    lines = said + ([f"as the run was trained: {' '.join(taken)}"] if taken else [])
    return [printable(line) for line in lines]  # the run may be a stranger's
