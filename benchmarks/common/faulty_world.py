"""MultihopWorld with machinery that breaks: `AgentR1Faulty/MultihopWorld-v0`, for benchmarks/learning/faults.py.

    gym.make_vec("faulty_world:AgentR1Faulty/MultihopWorld-v0", num_envs=4, kind="call", rate=0.3)
"""

from __future__ import annotations

import itertools
from typing import Any

import gymnasium as gym
import numpy as np

from agent_r1 import Task
from agent_r1.tasks.multihop_world import MultihopWorldEnv
from agent_r1_tools import Tool, ToolFault, ToolResult

KINDS = ("none", "once", "episode", "call")


class Unreliable(Tool):
    """Another tool, of whose calls some fail."""

    def __init__(self, tool: Tool, env: FaultyWorldEnv) -> None:
        self.tool, self.env = tool, env
        self.name, self.description, self.parameters = tool.name, tool.description, tool.parameters
        self.concurrency_safe, self.repeatable = False, True  # equal calls fail one by one; nothing is done twice

    def execute(self, arguments: dict[str, Any]) -> ToolResult:
        if self.env.next_call_fails():
            raise ConnectionError("the search server is down")
        return self.tool.execute(arguments)


class FaultyWorldEnv(MultihopWorldEnv):
    """MultihopWorld of which some calls or episodes break, whatever the policy does.

    `kind`: "once", a share `rate` of the calls fails and succeeds when it is made again; "call", it fails for good;
    "episode", that share of the episodes is broken from the reset on; "none".
    """

    numbers = itertools.count()  # of the environments of this process: each has random numbers of its own

    def __init__(self, *, kind: str = "none", rate: float = 0.3, **kwargs: Any) -> None:
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        kwargs.setdefault("fault_deadline", 60.0 if kind == "once" else 0.0)
        super().__init__(**kwargs)
        self.kind, self.rate = kind, rate
        self.draws = np.random.default_rng([20_261_121, next(self.numbers)])
        self.tools["search"] = Unreliable(self.tools["search"], self)
        self.failed = False

    def start_episode(self, task: Task) -> None:
        if self.kind == "episode" and self.draws.random() < self.rate:
            raise ToolFault("the corpus server is down")
        search = self.tools["search"]
        super().start_episode(task)  # makes a tool over the passages of this task
        search.tool = self.tools["search"]
        self.tools["search"] = search

    def next_call_fails(self) -> bool:
        """Does the call that begins now fail?"""
        if self.kind == "once" and self.failed:  # it failed before, and is made again
            self.failed = False
            return False
        self.failed = self.kind in ("once", "call") and self.draws.random() < self.rate
        return self.failed


gym.register(
    "AgentR1Faulty/MultihopWorld-v0",
    entry_point=FaultyWorldEnv,
    vector_entry_point="agent_r1.vector:AgentR1Faulty/MultihopWorld-v0",
)
