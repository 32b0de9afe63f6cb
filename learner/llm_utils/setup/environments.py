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
    """What `gym.make_vec` takes for `--env-id`, registered with a vector environment or without.

    "module:id" imports the module first, also from the folder that the program was started in. SystemExit where there
    is no such module or environment, none of tokens, or one that doesn't take what the learners give it.
    """
    try:
        name = find_environment(env_id).id
    except ArgumentError as error:
        raise SystemExit(f"--env-id {env_id}: {printable(str(error))}") from None
    return vector_spec(name)


def evaluation_split(args: Any, split: str) -> str:
    """The split to evaluate on where none is named: test, validation or dev if the environment that the flags name has
    such a one, else `split`, else the first that it has."""
    spec = environment_spec(args.env_id)
    maker, kwargs = creator(spec.id), {**spec.kwargs, **env_kwargs(args)}
    kwargs.pop("split", None)  # of the registration: the split is what is asked for
    if not isinstance(maker, type) or not issubclass(maker, ToolEnv) or not isinstance(maker.splits, Mapping):
        return split  # a function, or a property of what is made: nobody knows
    with plain_errors(args.env_id):
        wanted = (*HELD_OUT, split, *maker.splits)
        return next((name for name in wanted if maker.has_split(name, **kwargs)), split)


def env_kwargs(args: Any) -> dict[str, Any]:
    """The arguments of the environment that a script's flags name: `--env-kwargs`, and `--data-dir`. SystemExit where
    the first are no JSON object."""
    try:
        kwargs = json.loads(args.env_kwargs or "{}")  # evaluate_llm.py fills it later
    except (ValueError, TypeError):
        kwargs = None
    if not isinstance(kwargs, dict):
        raise SystemExit(f"--env-kwargs takes a JSON object, such as '{{\"max_turns\": 4}}', got {args.env_kwargs}")
    return kwargs if args.data_dir is None else {**kwargs, "data_dir": args.data_dir}


@contextmanager
def plain_errors(env_id: str) -> Iterator[None]:
    """Inside, what the flags get wrong about an environment (a split, an argument) and what isn't there (its data)
    ends the program with the message alone. Other errors of the user's own environment keep their traceback; of ours
    also a package that is missing, and an argument that one of them refuses, are messages.
    """
    try:
        yield
    except (TokenizerNotFoundError, DamagedTokenizerError) as error:
        raise SystemExit(f"--model, or --tokenizer: {printable(str(error))}") from None
    except (ImportError, OSError, TypeError, ValueError) as error:
        maker = getattr(creator(env_id.rpartition(":")[2]), "__module__", "")
        said = isinstance(error, ArgumentError | DataFormatError | DataNotFoundError)
        if not said and not maker.startswith("agent_r1."):
            raise
        raise SystemExit(f"--env-id {env_id}: {printable(str(error))}") from None
