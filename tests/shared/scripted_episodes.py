"""Episodes for the tests of adapters, played in the `ToolEnv` alone; and an environment that breaks when told to."""

import math
import sqlite3
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np

from agent_r1 import Task, Tool, ToolEnv, tiny_policy

WORLDS = ["AgentR1/MultihopWorld-v0", "AgentR1/ArithmeticWorld-v0"]
KINDS = ["expert", "sloppy", "malformed", "unclosed", "turns", "context"]
SMALL = 700  # tokens of context, of which "context" runs out


@dataclass
class Played:
    """One episode: states (one more than turns), spans, rewards and infos."""

    states: list[list[int]]
    texts: list[str]
    spans: list[list[int]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    infos: list[dict[str, Any]] = field(default_factory=list)
    terminated: bool = False
    truncated: bool = False

    @property
    def info(self) -> dict[str, Any]:
        return self.infos[-1]


def make(env_id: str, **kwargs: Any) -> ToolEnv:
    return gym.make(env_id, **kwargs).unwrapped


def world(env_id: str, **kwargs: Any) -> dict[str, Any]:
    """Arguments of an environment with the tokenizer of its tiny policy."""
    return {"tokenizer": tiny_policy(env_id), "max_context_tokens": SMALL, **kwargs}


def write(env: ToolEnv, kind: str) -> list[str]:
    """The turns of one kind of episode, for the task at hand, end of turn included."""
    end = env.dialect.end_of_turn
    expert = [turn + end for turn in env.demonstration()]
    if kind == "expert":
        return expert
    if kind == "sloppy":
        return [turn + end for turn in env.demonstration(np.random.default_rng(env.episode.task_index))]
    if kind == "malformed":
        return ["<tool_call>\n{oops\n</tool_call>" + end, *expert]
    if kind == "unclosed":  # the sampler stopped for length
        return ["So: " + expert[0].removesuffix(end), *expert[1:]]
    if kind == "turns":
        return ["Let me see." + end] * env.max_turns
    return ["word " * SMALL] * env.max_turns


def play(env: ToolEnv, index: int, kind: str, **options: Any) -> Played:
    """Play one kind of episode of a task. Spans are cut to the room there is, as a sampler would."""
    state, info = env.reset(options={"task_index": index, **options})
    played = Played([state.tolist()], write(env, kind))
    for text in played.texts:
        span = env.tokenizer.encode(text, add_special_tokens=False)[: info["max_new_tokens"]]
        state, reward, played.terminated, played.truncated, info = env.step(np.array(span, np.int32))
        played.states.append(state.tolist())
        played.spans.append(span)
        played.rewards.append(reward)
        played.infos.append(info)
        if played.terminated or played.truncated:
            return played
    raise AssertionError("the episode has no end")


class Desk(ToolEnv):
    """A data base that belongs to the thread in which the episode begins. `faults` says how often a call breaks."""

    num_tasks = 5
    faults = 0
    broken_start = False
    open = 0  # desks that were not closed

    def __init__(self, **kwargs: Any) -> None:
        tool = Tool.from_function(self.query, timeout=math.inf)  # such a tool is called by the thread that steps
        super().__init__([tool], fault_deadline=0, **kwargs)

    def query(self, sql: str) -> list:
        """Ask the data base."""
        if Desk.faults:
            Desk.faults -= 1
            raise ConnectionError("no line")
        return self.base.execute(sql).fetchall()

    def make_task(self, index: int) -> Task:
        return Task(f"desk-{index}", "How many?", ["2"])

    def start_episode(self, task: Task) -> None:
        if Desk.broken_start:
            raise ConnectionError("no line")
        self.base = sqlite3.connect(":memory:")
        Desk.open += 1

    def close(self) -> None:
        if hasattr(self, "base"):
            self.base.close()
            Desk.open -= 1
        super().close()

    def judge_answer(self, answer: str) -> tuple[float, dict[str, float]]:
        return float(answer == "2"), {}

    def demonstration(self, rng: Any = None) -> list[str]:
        return [self.dialect.tool_call("query", {"sql": "select 1 + 1"}), "<answer>2</answer>"]


class BrokenDesk(Desk):
    """A desk whose calls always break, also in another process."""

    def query(self, sql: str) -> list:
        """Ask the data base."""
        raise ConnectionError("no line")


gym.register("Desk-v0", entry_point=Desk)
gym.register("BrokenDesk-v0", entry_point=BrokenDesk)
