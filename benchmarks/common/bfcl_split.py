"""BFCL's multi-turn tasks with short prompts, some held out: `AgentR1Split/BFCLMultiTurn-v0`, for evidence.py.

    gym.make_vec("bfcl_split:AgentR1Split/BFCLMultiTurn-v0", num_envs=4, split="test")

They are those of `base`, `miss_func` and `miss_param` with one of four services alone: their prompts take 1,700 to
2,900 tokens of SmolLM2's. The number in a task's id says where it belongs, in every category: what 3 divides is held
out, 66 tasks ("test"), the other 129 are "train".
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import ClassVar

import gymnasium as gym

from agent_r1 import Task
from agent_r1.bridges.bfcl import BFCLMultiTurnEnv, load

CATEGORIES = ("base", "miss_func", "miss_param")
SERVICES = ("GorillaFileSystem", "TradingBot", "TravelAPI", "VehicleControlAPI")


class BFCLSplitEnv(BFCLMultiTurnEnv):
    """BFCL's multi-turn tasks with one service, for training or held out."""

    splits: ClassVar[Mapping[str, str]] = {"train": "train", "test": "test"}

    def __init__(self, *, split: str = "train", **kwargs: object) -> None:
        super().__init__(split=split, **kwargs)

    @property
    def num_tasks(self) -> int:
        return len(tasks_of(self.split))

    def make_task(self, index: int) -> Task:
        return self.task_of(*tasks_of(self.split)[index])


@cache
def tasks_of(split: str) -> list[tuple[str, int]]:
    """The category of each task, and its place in it."""
    return [
        (category, place)
        for category in CATEGORIES
        for place, entry in enumerate(load(category))
        if len(entry["apis"]) == 1 and entry["apis"][0] in SERVICES
        if (int(entry["id"].rpartition("_")[2]) % 3 == 0) == (split == "test")
    ]


gym.register(
    "AgentR1Split/BFCLMultiTurn-v0",
    entry_point="bfcl_split:BFCLSplitEnv",
    vector_entry_point="agent_r1.vector:AgentR1Split/BFCLMultiTurn-v0",
)
