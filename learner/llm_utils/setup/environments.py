"""The environment that `--env-id` names: any registered `ToolEnv`, ours or the user's own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gymnasium.envs.registration import EnvSpec

from agent_r1 import ArgumentError, ToolEnv
from agent_r1.ids import HELD_OUT, creator, find_environment
from agent_r1.task_data import DataFormatError, DataNotFoundError
from agent_r1.text.tokenizers import DamagedTokenizerError, TokenizerNotFoundError
from agent_r1.vector import vector_spec
from agent_r1_tools.text import printable


def environment_spec(env_id: str) -> EnvSpec:
    """Return the spec that `gym.make_vec` takes for `--env-id`, whether or not it was registered with a vector
    environment.

    "module:id" imports the module first; the working directory is searched too. Raise SystemExit if the module or the
    environment does not exist, if it is not an environment of tokens, or if it rejects the learners' arguments.
    """
    try:
        name = find_environment(env_id).id
    except ArgumentError as error:
        raise SystemExit(f"--env-id {env_id}: {printable(str(error))}") from None
    return vector_spec(name)


def evaluation_split(args: Any, split: str) -> str:
    """Return the split to evaluate on if none is named: test, validation or dev if the environment has one of them,
    else `split`, else its first split."""
    spec = environment_spec(args.env_id)
    maker, kwargs = creator(spec.id), {**spec.kwargs, **env_kwargs(args)}
    kwargs.pop("split", None)  # the registered split; this function looks for another one
    if not isinstance(maker, type) or not issubclass(maker, ToolEnv) or not isinstance(maker.splits, Mapping):
        return split  # a function, or a property of the instance: unknown before it is made
    with plain_errors(args.env_id):
        wanted = (*HELD_OUT, split, *maker.splits)
        return next((name for name in wanted if maker.has_split(name, **kwargs)), split)


def check_splits(args: Any) -> None:
    """Raise SystemExit for a split that one of our environments does not have, under its flag. The user's own
    environment may make its splits when it is made."""
    if not args.env_id or getattr(args, "data", None):  # with --data sft_llm.py makes no environment
        return
    try:
        maker = creator(environment_spec(args.env_id).id)
    except ImportError:  # making the environment reports it
        return
    splits = getattr(maker, "splits", None)
    if not maker.__module__.startswith("agent_r1.") or not isinstance(splits, Mapping):
        return
    for flag, split in (("--split", args.split), ("--eval-split", getattr(args, "eval_split", None))):
        if split is not None and split not in splits:
            raise SystemExit(f"{flag} {split}: {args.env_id} has no split {split!r}; it has {', '.join(splits)}")


def env_kwargs(args: Any) -> dict[str, Any]:
    """Return the environment's arguments that a script's flags name: `--env-kwargs` and `--data-dir`. Raise SystemExit
    if `--env-kwargs` is not a JSON object."""
    try:
        kwargs = json.loads(args.env_kwargs or "{}")  # evaluate_llm.py fills it later
    except (ValueError, TypeError):
        kwargs = None
    if not isinstance(kwargs, dict):
        raise SystemExit(f"--env-kwargs takes a JSON object, such as '{{\"max_turns\": 4}}', got {args.env_kwargs}")
    return kwargs if args.data_dir is None else {**kwargs, "data_dir": args.data_dir}


@contextmanager
def plain_errors(env_id: str) -> Iterator[None]:
    """Turn configuration errors (unknown split or argument, missing data) into a one-line SystemExit.

    Other errors of the user's own environment keep their traceback. For our environments, missing packages and rejected
    arguments are one-liners too.
    """
    try:
        yield
    except (TokenizerNotFoundError, DamagedTokenizerError) as error:
        raise SystemExit(f"--model, or --tokenizer: {printable(str(error))}") from None
    except (ImportError, OSError, TypeError, ValueError) as error:
        maker_module = getattr(creator(env_id.rpartition(":")[2]), "__module__", "")
        explains_itself = isinstance(error, ArgumentError | DataFormatError | DataNotFoundError)
        if not explains_itself and not maker_module.startswith("agent_r1."):
            raise
        raise SystemExit(f"--env-id {env_id}: {printable(str(error))}") from None
