"""Potentials: the states' values that `shaping` pays the differences of.

A task has a potential if its class defines `potential(self) -> float`. It must depend only on the task and on what the
hooks note in `memory`, not on a tool's session: in the loop of another program all calls are made before the first turn
is judged.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from agent_r1.arguments import ArgumentError, share

if TYPE_CHECKING:
    from agent_r1.tool_env import ToolEnv

HAVE_ONE = ("CraftWorld", "MultihopWorld", "HotpotQA", "2WikiMultihopQA", "MuSiQue")
"""The environments of this package whose tasks have a potential."""
OUTER_LIMIT = (
    "with shaping the environment must know the end of an episode, where its potential is 0: bound episodes by the "
    "argument max_turns instead of max_episode_steps or TimeLimit"
)


def discount(env: ToolEnv, shaping: Any) -> float:
    """Return the argument `shaping` as a float.

    Raises ArgumentError if it is not from 0 to 1, and for an environment without a potential.
    """
    if not callable(getattr(type(env), "potential", None)):
        remedy = f"define potential(self), or take one that has it: {', '.join(HAVE_ONE)}"
        raise ArgumentError(f"shaping needs a potential, and {type(env).__name__} has none; {remedy}")
    return share("shaping", shaping)


def potential_of(env: Any) -> float:
    """Return the potential of the state. Raises ValueError if it is not a finite number."""
    value = env.potential()
    try:
        if math.isfinite(value):
            return float(value)
    except (TypeError, OverflowError):
        pass
    raise ValueError(f"{type(env).__name__}.potential() must return a finite number, got {value!r}")
