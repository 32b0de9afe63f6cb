"""The environment that `--env-id` names: any registered `ToolEnv`, ours or the user's own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import cache
from typing import Any

import gymnasium as gym
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


def env_kwargs(args: Any) -> dict[str, Any]:
    """Return the environment's arguments that a script's flags name: `--env-kwargs`, `--data-dir`, `--chat-template`.
    Raise SystemExit if `--env-kwargs` is not a JSON object."""
    try:
        kwargs = json.loads(args.env_kwargs or "{}")  # evaluate_llm.py fills it later
    except (ValueError, TypeError):
        kwargs = None
    if not isinstance(kwargs, dict):
        raise SystemExit(f"--env-kwargs takes a JSON object, such as '{{\"max_turns\": 4}}', got {args.env_kwargs}")
    flags = {"data_dir": args.data_dir, "chat_template": args.chat_template}
    return kwargs | {name: value for name, value in flags.items() if value is not None}


def smaller_context(args: Any, tokenizer: str | None, positions: int | None) -> str | None:
    """Return `--env-kwargs` with a `max_context_tokens` of the model's positions, if the environment's default is
    larger. Return None if it fits, or if the user named a value (`check_context` rejects one that is too large)."""
    kwargs = env_kwargs(args)
    if positions is None or kwargs.get("max_context_tokens") is not None:
        return None
    if context_of(args.env_id, args.split, tokenizer, json.dumps(kwargs)) <= positions:
        return None
    return json.dumps({**json.loads(args.env_kwargs or "{}"), "max_context_tokens": positions})


@cache
def context_of(env_id: str, split: str, tokenizer: str | None, kwargs: str) -> int:
    """Return the bound on the state of an environment, in tokens: that of one which is made for this."""
    with plain_errors(env_id):
        made: Any = {"num_envs": 1, "tokenizer": tokenizer, "split": split, **json.loads(kwargs)}
        with closing(gym.make_vec(environment_spec(env_id), **made)) as envs:
            return getattr(envs.single_observation_space, "max_len", 0)  # texts have none, and are rejected later


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
