"""Records of an earlier run, for programs that continue from its model or evaluate it."""

from __future__ import annotations

import json
import os
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

import agent_r1
from agent_r1_tools.text import printable
from llm_utils.setup.code_names import check_names
from llm_utils.setup.environments import ONE_OR_EACH, evaluation_split, quoted
from llm_utils.setup.foreign import read_object

CHECKPOINT = ("checkpoint", "policy")  # in a run's folder


def folder_of_run(source: str) -> Path | None:
    """Return the folder of the run that a model folder belongs to (it may be the run's folder itself), or None."""
    path = Path(source).expanduser()
    folders = (path, *path.parents[:2], *path.resolve().parents[:2]) if path.is_dir() else ()
    return next((folder for folder in folders if (folder / "summary.json").is_file()), None)


def summary_of_run(source: str) -> dict[str, Any]:
    """Return the summary of such a run; {} for other folders, and for a summary.json of another program, which may have
    values of other types."""
    folder = folder_of_run(source)
    try:
        summary = read_object(folder / "summary.json") if folder else {}
    except ValueError:
        return {}
    return summary if isinstance(summary.get("args"), dict) and _has_types(summary["args"]) else {}


def _has_types(args: dict[str, Any]) -> bool:
    """Return True if the arguments that are read here have the types of a run's."""
    texts = (*ONE_OR_EACH, "data_dir", "data", "model", "tokenizer", "chat_template")
    given = {name: args[name] for name in texts if args.get(name) is not None}
    lists = {name: given.pop(name) for name in ONE_OR_EACH if isinstance(given.get(name), list)}
    of_texts = all(isinstance(one, str) for one in sum(lists.values(), [*given.values()]))
    ids = lists.get("env_id", [])
    return of_texts and all(len(value) == len(ids) for value in lists.values())


def arguments_of_run(source: str) -> dict[str, str | None]:
    """Return the arguments of such a run."""
    return summary_of_run(source).get("args", {})


def beginning_of_run(source: str) -> str | None:
    """Return the run's initial model as a value of `--model` that is valid for any environment; None for other
    folders."""
    folder, args = folder_of_run(source), arguments_of_run(source)
    model, env_id = args.get("model"), args.get("env_id")
    if folder is not None and model == "scratch":
        return f"{folder}/scratch"  # made by sft_llm.py; a path cannot be confused with a name on a hub
    if model == "tiny" and isinstance(env_id, str):
        with suppress(ValueError):  # the policy is no longer shipped
            return agent_r1.tiny_policy(env_id)
    return model


def places(folder: str | Path) -> list[Path]:
    """Return the folders that may hold the model of a folder: itself, a run's saved model, and its checkpoint."""
    return [Path(folder), Path(folder, "model"), Path(folder, *CHECKPOINT)]


def other_environment(args: Any) -> str:
    """Return a warning if a script starts from a run's model on the same environment with other arguments, else ""."""
    run = arguments_of_run(args.model)
    run_kwargs = run.get("env_kwargs") or "{}"
    comparable = run.get("env_id") == args.env_id and not run.get("data") and not getattr(args, "data", None)
    if not comparable or _same_json(run_kwargs, args.env_kwargs):
        return ""
    theirs, ours = quoted(run_kwargs), quoted(args.env_kwargs)
    return f"--model {args.model} was trained with --env-kwargs {theirs}, but this run has {ours}"


PLAYED = [  # arguments that an evaluation may leave open: name, name in a run, default without a run
    ("env_id", "env_id", "AgentR1/MultihopWorld-v0"),
    ("split", "eval_split", None),
    ("env_kwargs", "env_kwargs", "{}"),
    ("data_dir", "data_dir", None),
]


def _same(first: str, second: str) -> bool:
    """Return True if two values of `--model` name the same model."""
    resolved = []
    for name in (first, second):
        with_config = [place for place in places(Path(name).expanduser()) if (place / "config.json").is_file()]
        resolved.append(with_config[0].resolve() if with_config else name)
    return resolved[0] == resolved[1]


def _same_json(first: Any, second: Any) -> bool:
    """Return True if two texts are equal as JSON, or two lists of them are equal."""
    try:
        return bool(json.loads(first) == json.loads(second))
    except (TypeError, ValueError):
        return first == second


def _noted_base(folder: str | Path) -> str | None:
    """Return the base model that peft recorded for adapters."""
    with suppress(OSError, ValueError):
        base = read_object(Path(folder, "adapter_config.json")).get("base_model_name_or_path")
        return base if isinstance(base, str) and base else None
    return None


def stack_of_adapters(folder: str) -> list[str]:
    """Return the folders of all adapters to add to a model, in order; `folder` is the last.

    If the base model contains other adapters, adapter_config.json names their folder as the base, relative to its own
    folder ("../sft"). Raise SystemExit for a cycle.
    """
    stack = [folder]
    while (base := _noted_base(stack[0])) and (below := Path(stack[0], base)).joinpath("adapter_config.json").is_file():
        if any(below.samefile(other) for other in stack):
            raise SystemExit(printable(f"--adapter {folder}: adapter_config.json makes {below} its own base"))
        near = os.path.relpath(below.resolve())
        stack.insert(0, str(below.resolve()) if near.startswith("..") else near)
    return stack


def base_of_adapters(folder: str) -> str | None:
    """Return the model below LoRA adapters, as `--model` names it: their run's initial model, or peft's record."""
    return beginning_of_run(folder) or _noted_base(stack_of_adapters(folder)[0])


def of_one_environment(run: dict[str, Any], env_id: str | None) -> dict[str, Any]:
    """Return the arguments of a run on several environments as those of a run on `env_id` alone. Raise SystemExit if
    no id is given."""
    ids = run.get("env_id")
    if not isinstance(ids, list):
        return run
    if env_id is None:
        raise SystemExit(printable(f"--env-id is missing: the run was trained on {', '.join(ids)}; name one of them"))
    if env_id not in ids:
        return {**run, "env_id": ", ".join(ids)}  # the caller reports the difference
    lists = {name: run[name] for name in ONE_OR_EACH if isinstance(run.get(name), list)}
    return {**run, **{name: value[ids.index(env_id)] for name, value in lists.items()}}


def fill_environment(args: Any) -> list[str]:
    """Fill the arguments that an evaluation leaves open: the environment of the run of `--model`, the model below
    adapters ("tiny", the default, counts as open), and the tokenizer of their run.

    The run's split and other arguments are used only with its environment. Return lines that report the values taken
    from the run, and the differences from it. Raise SystemExit if these name code that is not the user's own.
    """
    warnings, taken = [], []
    adapted = arguments_of_run(args.adapter) if args.adapter else {}
    beginning = arguments_of_run(args.model) if args.mode == "base_tool_call" else adapted  # whose tokenizer is used
    base = base_of_adapters(args.adapter) if args.adapter and args.api is None else None
    if base is not None and args.model == "tiny":
        args.model = base
        taken.append(f"--model {shlex.quote(base)}")
    elif base is not None and not _same(args.model, base):
        warnings.append(f"the adapters were trained on --model {base}, but are evaluated on {args.model}")
    elif args.adapter and args.model == "tiny":
        warnings.append(f"--adapter {args.adapter} names no model; it is evaluated on --model tiny, the shipped policy")
    if args.adapter and (below := stack_of_adapters(args.adapter)[:-1]):
        bases = " and ".join(below)
        warnings.append(f"--adapter {args.adapter} is applied on top of {bases}; --model does not contain these")
    if args.tokenizer is None:
        for name in ("tokenizer", "chat_template"):
            if getattr(args, name) is None and isinstance(value := beginning.get(name), str):
                setattr(args, name, value)
                taken.append(f"--{name.replace('_', '-')} {shlex.quote(value)}")
    run = adapted or arguments_of_run(args.model)
    path = Path(args.model).expanduser()
    saved = (path / "model" / "config.json").is_file() or not path.joinpath(*CHECKPOINT).is_dir()
    if not saved and not summary_of_run(args.model).get("finished", True):
        warnings.append(f"--model {args.model}: this run is not finished; its last checkpoint is evaluated")
    if args.adapter and not summary_of_run(args.adapter).get("finished", True):
        warnings.append(f"--adapter {args.adapter}: this run is not finished; a checkpoint is evaluated")
    run = of_one_environment(run, args.env_id)
    if args.env_id not in (None, run.get("env_id", args.env_id)):
        warnings.append(f"the run was trained on {run['env_id']}, but is evaluated on {args.env_id} (--env-id)")
        run = {}
    source = args.adapter if adapted else args.model
    names = {name: run.get(name) for name in ("env_id", "env_kwargs") if getattr(args, name) is None}
    check_names(folder_of_run(source) or source, **names)
    for name, name_in_run, default in PLAYED:
        value, run_value, flag = getattr(args, name), run.get(name_in_run), f"--{name.replace('_', '-')}"
        if value is None:
            setattr(args, name, default if run_value is None else run_value)
            taken += [] if run_value is None else [f"{flag} {shlex.quote(run_value)}"]
        elif name == "env_kwargs" and run_value is not None and not _same_json(str(run_value), value):
            theirs = shlex.quote(str(run_value))
            warnings.append(f"the run was trained with --env-kwargs {theirs}, but this evaluation uses its own")
    if args.split is None:
        args.split = evaluation_split(args, "train")
        if args.split == "train":
            warnings.append("--split train: this environment has no known held-out split, so these are training tasks")
    lines = warnings + ([f"taken from the run: {' '.join(taken)}"] if taken else [])
    return [printable(line) for line in lines]  # the run may come from a stranger
