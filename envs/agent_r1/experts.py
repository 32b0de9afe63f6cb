"""The number of calls of a task's expert, with which `process/extra_call` compares an episode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agent_r1.arguments import ArgumentError
from agent_r1.text.chat import encode_turn

if TYPE_CHECKING:
    from agent_r1.tool_env import ToolEnv


def require_expert(env: ToolEnv) -> None:
    """Raise ArgumentError if the class of an environment defines no demonstration."""
    demonstration = getattr(type(env), "demonstration", None)
    # By name, because the module of `Baselines` imports `ToolEnv`: its own demonstration only raises.
    if demonstration is None or getattr(demonstration, "__qualname__", "") == "Baselines.demonstration":
        remedy = "define demonstration(), or leave the weight 0"
        raise ArgumentError(f"extra_call needs an expert, and {type(env).__name__} has none; {remedy}")


def expert_calls(env: Any) -> int | None:
    """Return the number of calls in the expert's demonstration of the current task; None if it has no solution.

    Call it at the beginning of an episode.
    """
    try:
        turns = env.demonstration()
    except ValueError:  # this task has none
        return None
    spans = [encode_turn(env, turn, env.room).tolist() for turn in turns]
    return sum(len(env.dialect.parse(span, env.schemas).calls) for span in spans)
