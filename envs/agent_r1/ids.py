"""Lookup of environments by id, for programs that take an id: `--env-id` of the learners, `agent_r1.validate`."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, cast

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec, load_env_creator

from agent_r1.arguments import ArgumentError, add_current_folder
from agent_r1.remote import RemoteEnv, server_task_counts
from agent_r1.tool_env import ToolEnv

HELD_OUT = ("test", "validation", "dev")  # programs evaluate on the first of these that exists, if no split is named


def find_environment(env_id: str) -> EnvSpec:
    """Return the registration of an id. "module:id" imports the module first, also from the current folder.

    Raises ArgumentError if the module or the environment does not exist, if it is not a `ToolEnv`, or if it lacks an
    argument that every program passes.
    """
    module, _, name = env_id.rpartition(":")
    if (module or name).endswith(".py"):
        file = Path(module or name)
        path_hint = "" if file.parent.resolve() == Path.cwd() else f", with {file.parent} in PYTHONPATH"
        module_id = f"{file.stem}:{name if module else 'ID'}"
        raise ArgumentError(f"name the module as in an import, without .py: give {module_id}{path_hint}")
    if module and name not in gym.registry:
        own = _import(module)
        if own is None:
            problem = f"there is no module {module} in this folder, and none is installed"
            raise ArgumentError(f"{problem}; set PYTHONPATH to its folder")
        if name not in gym.registry:
            raise ArgumentError(f"there is no such environment; {_registers(module, own)}")
    if name not in gym.registry:
        raise ArgumentError(f"there is no such environment; {_remedy(name)}")
    _check_maker(name)
    return gym.spec(name)


def factory(env_id: str, kwargs: Mapping[str, Any] | None = None) -> Callable[[], gym.Env[Any, Any]]:
    """Return a function without arguments that makes an environment, as vector environments take it.

    It pickles, also for a process that is started by `spawn`, if the values of `kwargs` do. "module:id" imports the
    module first, also from the current folder. Raises ArgumentError if there is no such environment.
    """
    find_environment(env_id)
    return partial(_make, env_id, dict(kwargs or {}))


def _make(env_id: str, kwargs: dict[str, Any]) -> gym.Env[Any, Any]:
    return gym.make(find_environment(env_id).id, **kwargs)


def task_counts(env_id: str, kwargs: Mapping[str, Any] | None = None) -> dict[str, int]:
    """Return the number of tasks of each split of an id; splits whose data is missing are left out.

    `kwargs` are arguments of the environment, without `split`. "module:id" imports the module first. Of a remote
    environment, the server counts them. Raises ArgumentError if there is no such environment, if no split can be made,
    or if no server answers.
    """
    spec, kwargs = find_environment(env_id), dict(kwargs or {})
    if "split" in kwargs:
        raise ArgumentError("task_counts counts the tasks of every split; leave out the argument split")
    maker = creator(spec.id)
    if isinstance(maker, type) and issubclass(maker, RemoteEnv):
        return server_task_counts(**kwargs)
    if not isinstance(maker, type):  # a function: its environments know their splits
        maker = type(cast(ToolEnv, gym.make(spec.id, **kwargs).unwrapped))
    counts = {}
    for split in dict.fromkeys(maker.splits.values()):
        if maker.has_split(split, **kwargs):
            env = cast(ToolEnv, gym.make(spec.id, split=split, **kwargs).unwrapped)
            counts[split] = env._count_tasks()
            env.close()
    if not counts:
        gym.make(spec.id, **kwargs)  # it names what is missing
        raise ArgumentError(f"{spec.id} has none of its splits {', '.join(maker.splits)} with these arguments")
    return counts


def creator(name: str) -> Any:
    """Return the maker of a registered environment: its class, or a function."""
    entry_point = gym.spec(name).entry_point
    return load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point


def _check_maker(env_id: str) -> None:
    if gym.spec(env_id).entry_point is None:  # only a vector environment
        return
    try:
        maker = creator(env_id)
    except ImportError:  # a package is missing: making the environment reports it
        return
    except (AttributeError, ValueError) as error:
        raise ArgumentError(f"its entry point can't be found: {error}") from error
    if not callable(maker):
        raise ArgumentError(f"its entry point is {maker!r:.200}, which cannot be called to make an environment")
    name, is_class = getattr(maker, "__name__", str(maker)), isinstance(maker, type)
    if is_class and not issubclass(maker, ToolEnv):
        raise ArgumentError(f"{name} is not a ToolEnv, so there are no tokens to learn from")
    parameters = inspect.signature(maker).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for argument in ("split", "tokenizer"):
        if argument not in parameters:
            remedy = "__init__ take **kwargs and hand them to super().__init__" if is_class else "it take **kwargs"
            raise ArgumentError(f"{name} takes no {argument}; let {remedy}")


def _import(module: str) -> list[str] | None:
    """Import a module and return the ids that it registers, by their class or by the import; None without a module."""
    add_current_folder()
    try:
        spec_found = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # a missing package; ".name"
        spec_found = None
    if spec_found is None:
        return None
    before = set(gym.registry)
    importlib.import_module(module)
    return sorted(name for name, spec in gym.registry.items() if name not in before or is_of(spec, module))


def _registers(module: str, own: list[str]) -> str:
    return f"{module} registers {', '.join(own) or 'none'}"


def _remedy(name: str) -> str:
    near = ", ".join(_nearest(name))
    if name.startswith("AgentR1/"):
        return f"similar ids: {near}; agent_r1.ENVIRONMENTS and agent_r1.BRIDGES have all"
    add_current_folder()
    if _is_module(name):
        return f"{name} is a module: give {name}:ID"
    return f"give the module that registers it: MODULE:{name}. Similar ids without a module: {near}"


def _nearest(name: str) -> list[str]:
    """Return the three registered ids of this package whose names are most similar."""

    def plain(env_id: str) -> str:
        return re.sub(r"-v\d+$", "", env_id.rpartition("/")[2]).lower()

    ours = {plain(env_id): env_id for env_id in gym.registry if env_id.startswith("AgentR1/")}
    return [ours[near] for near in get_close_matches(plain(name), ours, 3, cutoff=0.0)]


def _is_module(name: str) -> bool:
    """Return whether a module has that name. Nothing is imported: the module may be a script."""
    first, *others = name.split(".")
    if first == "__main__" or not all(part.isidentifier() for part in (first, *others)):
        return False
    spec = importlib.util.find_spec(first)
    for part in others:
        if spec is None or not spec.submodule_search_locations:
            return False
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))  # a list needs no import of the parent
    return spec is not None


def is_of(spec: EnvSpec, module: str) -> bool:
    """Return whether an environment belongs to the module or one in it, as far as its registration shows."""
    made_by = getattr(spec.entry_point, "__module__", None) or str(spec.entry_point)
    return re.match(rf"{re.escape(module)}(?=[.:]|$)", made_by) is not None
