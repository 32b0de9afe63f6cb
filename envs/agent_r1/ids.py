"""The environment that an id names, for programs that are told one: `--env-id` of the learners, `agent_r1.validate`."""

from __future__ import annotations

import importlib.util
import os
import re
import sys

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from agent_r1.arguments import ArgumentError


def find_environment(env_id: str) -> EnvSpec:
    """The registration of an id. "module:id" imports the module first, also from the folder that the program was
    started in. Raises ArgumentError where there is no such module or environment."""
    module, _, name = env_id.rpartition(":")
    if (module or name).endswith(".py"):
        given = (module or name).removesuffix(".py").replace(os.sep, ".")
        raise ArgumentError(
            f"a module is named as in import, without .py: give {given}:{name if module else 'ID'}"
        )
    if module and name not in gym.registry:
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            found = importlib.util.find_spec(module)
        except (ImportError, ValueError):  # of a package that isn't there; of ".name"
            found = None
        if found is None:
            raise ArgumentError(f"there is no module {module} here, nor among what is installed")
        importlib.import_module(module)
    if name not in gym.registry:
        raise ArgumentError(f"there is no such environment; {_remedy(module, name)}")
    return gym.spec(name)


def _remedy(module: str, name: str) -> str:
    if module:
        own = sorted(name for name, spec in gym.registry.items() if is_of(spec, module))
        return f"{module} registers {', '.join(own) or 'none'}"
    ours = ", ".join(sorted(name for name in gym.registry if name.startswith("AgentR1/")))
    if name.startswith("AgentR1/"):
        return f"there are {ours}"
    return f"give the module that registers it: MODULE:{name}. Without a module there are {ours}"


def is_of(spec: EnvSpec, module: str) -> bool:
    """Is it an environment of the module, or of one in it, as far as its registration shows?"""
    made_by = getattr(spec.entry_point, "__module__", None) or str(spec.entry_point)
    return re.match(rf"{re.escape(module)}(?=[.:]|$)", made_by) is not None
