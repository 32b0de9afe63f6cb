"""The environment that an id names, for programs that are told one: `--env-id` of the learners, `agent_r1.validate`."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec, load_env_creator

from agent_r1.arguments import ArgumentError
from agent_r1.tool_env import ToolEnv

HELD_OUT = ("test", "validation", "dev")  # on the first of these that there is programs evaluate where none is named


def find_environment(env_id: str) -> EnvSpec:
    """The registration of an id. "module:id" imports the module first, also from the folder that the program was
    started in. Raises ArgumentError where there is no such module or environment, and where it is no `ToolEnv` or one
    that doesn't take what every program gives it."""
    module, _, name = env_id.rpartition(":")
    if (module or name).endswith(".py"):
        file = Path(module or name)
        place = "" if file.parent.resolve() == Path.cwd() else f", with {file.parent} in PYTHONPATH"
        given = f"{file.stem}:{name if module else 'ID'}"
        raise ArgumentError(f"a module is named as in import, without .py: give {given}{place}")
    if module and name not in gym.registry:
        own = _import(module)
        if own is None:
            raise ArgumentError(f"there is no module {module} here, nor among what is installed")
        if name not in gym.registry:
            raise ArgumentError(f"there is no such environment; {_registers(module, own)}")
    if name not in gym.registry:
        raise ArgumentError(f"there is no such environment; {_remedy(name)}")
    _check_maker(name)
    return gym.spec(name)


def creator(name: str) -> Any:
    """What makes the environment of a registered id: its class, or a function."""
    entry_point = gym.spec(name).entry_point
    return load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point


def _check_maker(env_id: str) -> None:
    if gym.spec(env_id).entry_point is None:  # a vector environment alone
        return
    try:
        maker = creator(env_id)
    except ImportError:  # what it needs isn't there: who makes one says so
        return
    except (AttributeError, ValueError) as error:
        raise ArgumentError(f"its entry point can't be found: {error}") from error
    if not callable(maker):
        raise ArgumentError(f"its entry point is {maker!r:.200}, which makes no environment")
    name, is_class = getattr(maker, "__name__", str(maker)), isinstance(maker, type)
    if is_class and not issubclass(maker, ToolEnv):
        raise ArgumentError(f"{name} is no ToolEnv, so there are no tokens to learn from")
    takes = inspect.signature(maker).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values()):
        return
    for argument in ("split", "tokenizer"):
        if argument not in takes:
            way = "__init__ take **kwargs and hand them to super().__init__" if is_class else "it take **kwargs"
            raise ArgumentError(f"{name} takes no {argument}; let {way}")


def _import(module: str) -> list[str] | None:
    """Import a module. Which ids it registers, by their class or by the import itself; None where there is none."""
    _look_here()
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # of a package that isn't there; of ".name"
        found = None
    if found is None:
        return None
    before = set(gym.registry)
    importlib.import_module(module)
    return sorted(name for name, spec in gym.registry.items() if name not in before or is_of(spec, module))


def _look_here() -> None:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _registers(module: str, own: list[str]) -> str:
    return f"{module} registers {', '.join(own) or 'none'}"


def _remedy(name: str) -> str:
    ours = ", ".join(sorted(name for name in gym.registry if name.startswith("AgentR1/")))
    if name.startswith("AgentR1/"):
        return f"there are {ours}"
    _look_here()
    if _is_module(name):
        return f"{name} is a module: give {name}:ID"
    return f"give the module that registers it: MODULE:{name}. Without a module there are {ours}"


def _is_module(name: str) -> bool:
    """Is there a module of that name? Nothing is imported: it may be a script."""
    first, *others = name.split(".")
    if first == "__main__" or not all(part.isidentifier() for part in (first, *others)):
        return False
    found = importlib.util.find_spec(first)
    for part in others:
        if found is None or not found.submodule_search_locations:
            return False
        found = PathFinder.find_spec(part, list(found.submodule_search_locations))  # a list asks for no parent
    return found is not None


def is_of(spec: EnvSpec, module: str) -> bool:
    """Is it an environment of the module, or of one in it, as far as its registration shows?"""
    made_by = getattr(spec.entry_point, "__module__", None) or str(spec.entry_point)
    return re.match(rf"{re.escape(module)}(?=[.:]|$)", made_by) is not None
