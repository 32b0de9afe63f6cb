"""The number of calls of a task's expert, with which `process/extra_call` compares an episode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent_r1.arguments import ArgumentError
from agent_r1.text.chat import encode_turn

if TYPE_CHECKING:
    from agent_r1.tool_env import ToolEnv


def require_expert(env: ToolEnv) -> None:
    """Raise ArgumentError if the class of an environment defines no demonstration."""
    from agent_r1.baselines import has_demonstration  # it imports ToolEnv

    if not has_demonstration(env):
        remedy = "define demonstration(), or leave the weight 0"
        raise ArgumentError(f"extra_call needs an expert, and {type(env).__name__} has none; {remedy}")


def expert_calls(env: ToolEnv) -> int | None:
    """Return the number of calls in the expert's demonstration of the current task; None if it has no solution.

    Call it at the beginning of an episode.
    """
    from agent_r1.baselines import baselines_of

    try:
        turns = baselines_of(env).demonstration()
    except ValueError:  # this task has none
        return None
    spans = [encode_turn(env, turn, env.room).tolist() for turn in turns]
    return sum(len(env.dialect.parse(span, env.schemas).calls) for span in spans)
