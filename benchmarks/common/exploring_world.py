"""Questions of four hops with a training split of their own: `AgentR1Exploring/MultihopWorld-v0`, for evidence.py.

    gym.make_vec("exploring_world:AgentR1Exploring/MultihopWorld-v0", num_envs=4, process_reward={"new_query": 0.1})
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import gymnasium as gym

from agent_r1 import Task, ToolResult
from agent_r1.dialects import Call
from agent_r1.tasks.multihop_world import MOST_HOPS, MultihopWorldEnv, generate_task

SIZES = {"train": 8_000, "test": 2_000}  # the first and the last tasks of MultihopWorld's `more_hops`


class ExploringWorldEnv(MultihopWorldEnv):
    """MultihopWorld's questions of four hops. `new_query`, of weight 0, is 1 for each new query, at most four."""

    PROCESS_WEIGHTS: ClassVar[Mapping[str, float]] = {**MultihopWorldEnv.PROCESS_WEIGHTS, "new_query": 0.0}
    splits: ClassVar[Mapping[str, str]] = {"train": "train", "test": "test"}

    @property
    def num_tasks(self) -> int:
        return SIZES[self.split]

    def make_task(self, index: int) -> Task:
        first = SIZES["train"] if self.split == "test" else 0
        return generate_task(self.world_seed, "more_hops", first + index)

    def judge_result(self, call: Call, result: ToolResult) -> dict[str, float]:
        terms = super().judge_result(call, result)
        asked: list[str] = self.memory.setdefault("asked", [])
        query = str((call.arguments or {}).get("query", "")).strip().lower()
        if result.ok and query and query not in asked and len(asked) < MOST_HOPS:
            asked.append(query)
            terms = {**terms, "new_query": 1.0}
        return terms


gym.register(
    "AgentR1Exploring/MultihopWorld-v0",
    entry_point="exploring_world:ExploringWorldEnv",
    vector_entry_point="agent_r1.vector:AgentR1Exploring/MultihopWorld-v0",
)
