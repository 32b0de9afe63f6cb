"""What an earlier run wrote about itself, for programs that go on from its model or play it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from llm_utils.environments import evaluation_split

CHECKPOINT = ("checkpoint", "policy")  # of a run


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


PLAYED = [  # what an evaluation may leave open: its argument, that of a run, and what it is without a run
    ("env_id", "env_id", "AgentR1/MultihopWorld-v0"),
    ("split", "eval_split", None),
    ("env_kwargs", "env_kwargs", "{}"),
    ("data_dir", "data_dir", None),
]


def _same(one: str, other: str) -> bool:
    """Do two arguments `--model` name the same model?"""
    folders = [folder_of_run(name) or Path(name).expanduser() for name in (one, other)]
    return one == other or len({folder.resolve() for folder in folders}) == 1


def fill_environment(args: Any) -> list[str]:
    """Put in what an evaluation's arguments leave open: the environment that the run of `--model` was trained on, and
    the model below the adapters of a run ("tiny", the default, counts as open).

    The run's split and further arguments go with its environment only. Returns lines that say what was taken over, and
    where the evaluation differs from the run.
    """
    said, taken = [], []
    adapted = arguments_of_run(args.adapter) if args.adapter else {}
    if base := beginning_of_run(args.adapter) if adapted else None:
        if args.model == "tiny" != base:
            args.model = base
            taken.append(f"--model {shlex.quote(base)}")
        elif not _same(args.model, base):
            said.append(f"the adapters were trained on --model {base}; they are played on {args.model}")
    run = adapted or arguments_of_run(args.model)
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
