"""Any `gymnasium.Env` of texts as a ToolEnv: its actions are the commands of one tool."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym

from agent_r1.arguments import ArgumentError, finite
from agent_r1.bridges.bridge import World, call_seconds, close, no_exit
from agent_r1.bridges.text_game import TextGameEnv
from agent_r1.tool_env import Task
from agent_r1_tools import ToolFault, ToolResult

Env = gym.Env[str, str]


class GymToolEnv(TextGameEnv):
    """A game that is played in texts: task i is `env.reset(seed=i)`, and `act(command)` is `env.step(command)`.

    The first observation is what the policy is asked. The episode ends when the game does. It is truncated (reason
    "game") if the game truncates; its score is the sum of the game's rewards divided by `max_return`, from 0 to 1. With
    `process_reward={"game": 1.0}` each reward, so divided, is paid at its turn, too.

    Args:
        make_env: makes a game. Observations and actions are texts.
        instructions: the system message: what the game is about, and which commands there are.
        max_return: the sum of rewards of a game that is won.
        seeds: the tasks of each split, as numbers for `reset(seed=...)`.
        command: what a command is, for the tool's description.
        timeout: seconds of a step, for a game that blocks; with all steps before it where the game was lost.
    """

    def __init__(
        self,
        *,
        make_env: Callable[[], Env],
        instructions: str = "Play the game: give one command at a time with the tool act, and read what happens.",
        max_return: float = 1.0,
        seeds: Mapping[str, Sequence[int]] | None = None,
        command: str = "a command of the game",
        timeout: float = math.inf,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("max_turns", 30)
        for name, text in (("instructions", instructions), ("command", command)):
            if not isinstance(text, str):
                raise ArgumentError(f"{name} must be a text, got {text!r}")
        if not callable(make_env):
            raise ArgumentError(f"make_env must be a function that makes a game, got {make_env!r}")
        if finite("max_return", max_return) <= 0:
            raise ArgumentError(f"max_return must be above 0, got {max_return!r}")
        self.instructions, self.make_env, self.max_return = instructions, make_env, max_return
        if seeds is None:
            seeds = {"train": range(1_000_000), "test": range(1_000_000, 1_001_000)}
        self.seeds = seeds
        named = isinstance(seeds, Mapping) and seeds.keys() == self.splits.keys()
        if not named or not all(map(are_seeds, seeds.values())):
            raise ArgumentError(f"seeds must have tasks for {' and '.join(self.splits)}, got {seeds!r}")
        self.command, self.timeout = command, call_seconds(timeout)
        super().__init__(**kwargs)
        self._first: dict[int, str] = {}

    @property
    def num_tasks(self) -> int:
        """The number of seeds of the split."""
        return len(self.seeds[self.split])

    def make_task(self, index: int) -> Task:
        """Return the game of seed number `index`."""
        seed = self.seeds[self.split][index]
        if seed not in self._first:  # only the last view is kept: episodes of a group and snapshots need it again
            with no_exit():
                game = Game(self.make_env(), seed)
            game.close()
            self._first = {seed: game.observation}
        return Task(f"{self.split}-{seed}", self._first[seed], [], {"seed": seed})

    def make_world(self, task: Task) -> World:
        """Make the game at its beginning."""
        return Game(self.make_env(), task.metadata["seed"])

    def full_score(self) -> float:
        """Return the sum of rewards of a won game."""
        return self.max_return


def are_seeds(some: Any) -> bool:
    """Return whether these are numbers for `reset(seed=...)`, at least one."""
    if isinstance(some, range):
        return bool(some) and min(some[0], some[-1]) >= 0
    if not isinstance(some, Sequence) or isinstance(some, str | bytes) or not some:
        return False
    return all(isinstance(seed, int) and seed >= 0 for seed in some)


class Game:
    """A running `gymnasium.Env` of texts: `act` is its step."""

    def __init__(self, env: Env, seed: int) -> None:
        self.env = env
        try:
            self.observation = self._read("reset", env.reset(seed=seed), 2)[0]
        except BaseException as error:
            close(self, error)
            raise

    def act(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        found = self._read("step", self.env.step(arguments["command"]), 5)
        observation, reward, terminated, truncated, _ = found
        cut = "game" if truncated and not terminated else None
        data = {"reward": finite("the game's reward", float(reward)), "truncation_reason": cut}
        return ToolResult(observation, data=data, done=bool(terminated or truncated))

    def _read(self, method: str, found: Any, count: int) -> tuple[Any, ...]:
        """Return the result of a game's method. Raises ToolFault for a result that no text game returns."""
        if not isinstance(found, tuple) or len(found) != count or not isinstance(found[0], str):
            wanted = f"{count} values, of which the first is a text"
            raise ToolFault(f"{type(self.env).__name__}.{method} returned {found!r:.100}; it must return {wanted}")
        return found

    def close(self) -> None:
        self.env.close()
