"""The shared part of text games: one tool, `act(command)`, and a score."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from agent_r1.bridges.bridge import BridgeEnv, call_schema
from agent_r1.dialects import Call
from agent_r1.tool_env import End
from agent_r1_tools import ToolResult


class TextGameEnv(BridgeEnv):
    """A game of texts: `act(command)` is its step, and `World.act` gives `data={"reward": ...}`, what the step earned,
    and "truncation_reason" where the game cuts itself short.

    The episode ends when the game does; its score is the sum of the rewards divided by `full_score()`, from 0 to 1.
    With `process_reward={"game": 1.0}` each reward, so divided, is paid at its turn, too.
    """

    command: str = "a command of the game"
    """The meaning of a command, for the tool's description."""
    PROCESS_WEIGHTS: ClassVar[Mapping[str, float]] = {**BridgeEnv.PROCESS_WEIGHTS, "game": 0.0}

    def __init__(self, **kwargs: Any) -> None:
        act = call_schema("act", "Do something.", command={"type": "string", "description": self.command})
        super().__init__([act], **kwargs)

    def full_score(self) -> float:
        """Return the sum of rewards of a won game."""
        raise NotImplementedError(f"{type(self).__name__} has no full_score, the sum of rewards of a won game")

    def judge_result(self, call: Call, result: ToolResult) -> dict[str, float] | End:
        """Record the game's rewards, and end the episode with the game."""
        if not result.ok:
            return {}
        rewards: list[float] = self.memory.setdefault("rewards", [])
        rewards.append(result.data["reward"])
        amounts = {"game": rewards[-1] / self.full_score()}
        if not result.done:
            return amounts
        score, metrics = self._earned()
        return End(score, amounts, metrics, result.data.get("truncation_reason"))

    def judge_end(self, score: float, *, answer: str, answer_ok: bool, calls_ok: bool) -> float:
        """Pay the earned rewards, for any end of the episode."""
        return self._earned()[0]

    def judge_answer(self, answer: str) -> tuple[float, dict[str, float]]:
        """Score an answer, which gives the game up; the earned rewards stay."""
        return self._earned()

    def act(self, *commands: str) -> list[str]:
        """Return the texts of turns that give these commands."""
        return [self.dialect.tool_call("act", {"command": command}) for command in commands]

    def _earned(self) -> tuple[float, dict[str, float]]:
        earned = math.fsum(self.memory.get("rewards", ()))  # exact: ten times 0.1 is 1
        return min(max(earned / self.full_score(), 0.0), 1.0), {"return": earned}
