"""MultihopWorld with a search that misses: one search in four finds nothing. Asked again, it finds the passage.

    python learner/ppo_llm.py --env-id missing_world:MissingWorld-v0 --model FOLDER   # with benchmarks/ in PYTHONPATH

In MultihopWorld itself a few demonstrations of the expert teach all that there is to learn. Here a policy has to search
again after a miss, and the scripted expert, who knows the chain from the beginning and never looks at a result, doesn't
show that.
"""

from collections.abc import Iterator, Sequence
from typing import Any
from zlib import crc32

import gymnasium as gym
import numpy as np

from agent_r1.tasks.multihop_world import MultihopWorldEnv, expert
from agent_r1.tool_env import OpenTurn
from agent_r1_tools import ToolResult

MISS_RATE = 0.25
MISSED = ToolResult("No passages found.", data={"titles": [], "texts": [], "scores": []})
REPEATS, STOPS = 0.3, 0.55  # how often the clumsy worker repeats a search that missed, and answers at a hop


class MissingWorldEnv(MultihopWorldEnv):
    """MultihopWorld whose search misses; which searches do is a function of (task, turn).

    `demonstration(rng)` is a clumsy worker, who answers too early at random and repeats some of the searches that
    missed: what he does right now and then is what reinforcement learning can find. `demonstration()` is the scripted
    expert, or, with `careful_expert=True`, one who looks at the results and repeats every search that missed.
    """

    def __init__(self, *, careful_expert: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.careful_expert = careful_expert

    def end_turn(self, turn: OpenTurn, results: Sequence[ToolResult]) -> Any:
        rng = np.random.default_rng([crc32(self.task.id.encode()), self.episode.turn])
        return super().end_turn(turn, [MISSED if rng.random() < MISS_RATE else result for result in results])

    def demonstration(self, rng: np.random.Generator | None = None) -> Iterator[str]:
        """Turns as text, made one by one, since they may depend on what the search has shown."""
        if rng is None and not self.careful_expert:
            return iter(super().demonstration())
        return self._work(rng or np.random.default_rng(0), *((REPEATS, STOPS) if rng else (1.0, 0.0)))

    def _work(self, rng: np.random.Generator, repeats: float, stops: float) -> Iterator[str]:
        *searches, (note, _, answer) = expert(self.task)
        chain = self.task.metadata["chain"]
        for (thought, _, query), entity, found in zip(searches, chain[:-1], chain[1:], strict=True):
            search = self.dialect.tool_call("search", {"query": query})
            turn = f"<think>{thought}</think>{search}" if thought else search
            yield turn
            while self._missed() and rng.random() < repeats:
                yield turn
            if self._missed() or rng.random() < stops:
                guess = entity if self._missed() else found
                yield f"<think>{query.split()[0]} {guess}</think><answer>{guess}</answer>"
                return
        yield f"<think>{note}</think><answer>{answer}</answer>"

    def _missed(self) -> bool:
        return self.messages[-1]["content"] == MISSED.content


ID = "MissingWorld-v0"
gym.register(ID, "missing_world:MissingWorldEnv", vector_entry_point=f"agent_r1.vector:{ID}")
