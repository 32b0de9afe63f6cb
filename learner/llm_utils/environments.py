"""The environment that `--env-id` names: any registered `ToolEnv`, ours or the user's own."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec, load_env_creator

from agent_r1 import ToolEnv
from agent_r1.vector import vector_spec


def environment_spec(env_id: str) -> EnvSpec:
    """What `gym.make_vec` takes for `--env-id`, registered with a vector environment or without.

    "module:id" imports the module first, also from the folder that the program was started in. SystemExit where there
    is no such module or environment, or none of tokens.
    """
    module, _, name = env_id.rpartition(":")
    if module and name not in gym.registry:
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            found = importlib.util.find_spec(module)
        except (ImportError, ValueError):  # of a package that isn't there; of ".name"
            found = None
        if found is None:
            raise SystemExit(f"--env-id {env_id}: there is no module {module} here, nor among what is installed")
        importlib.import_module(module)
    if name not in gym.registry:
        known = ", ".join(sorted(name for name, spec in gym.registry.items() if is_known(spec, module)))
        raise SystemExit(f"--env-id {env_id}: there is no such environment; there are {known}")
    if isinstance(creator := make_class(name), type) and not issubclass(creator, ToolEnv):
        raise SystemExit(f"--env-id {env_id}: {creator.__name__} is no ToolEnv, so there are no tokens to learn from")
    return vector_spec(name)


def is_known(spec: EnvSpec, module: str) -> bool:
    """Is it an environment of tokens, as far as its registration shows, or one of the user's module?"""
    made_by = getattr(spec.entry_point, "__module__", None) or str(spec.entry_point)
    of_module = bool(module) and re.match(rf"{re.escape(module)}(?=[.:]|$)", made_by) is not None
    return str(spec.vector_entry_point).startswith("agent_r1.") or of_module


def make_class(name: str) -> Any:
    """What makes the environment: its class, or a function."""
    entry_point = gym.spec(name).entry_point
    return load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point


def evaluation_split(env_id: str, split: str) -> str:
    """The split to evaluate on where none is named: test, validation or dev if there is one, else `split`."""
    splits = getattr(make_class(environment_spec(env_id).id), "splits", {})
    return next((name for name in ("test", "validation", "dev") if name in splits), split)


def env_kwargs(args: Any) -> dict[str, Any]:
    """The arguments of the environment that a script's flags name: `--env-kwargs`, and `--data-dir`."""
    kwargs = json.loads(args.env_kwargs)
    return kwargs if args.data_dir is None else {**kwargs, "data_dir": args.data_dir}


@contextmanager
def plain_errors(env_id: str) -> Iterator[None]:
    """Inside, what the flags get wrong about an environment (a split, an argument) and what isn't there (its data, a
    package) ends the program with the message alone. Other errors of the user's own environment keep their traceback.
    """
    try:
        yield
    except (ImportError, OSError, TypeError, ValueError) as error:
        if not env_id.startswith("AgentR1/") and "keyword argument" not in str(error):
            raise
        raise SystemExit(f"--env-id {env_id}: {error}") from None
