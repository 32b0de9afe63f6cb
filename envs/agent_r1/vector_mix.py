"""MixedVectorEnv: episodes of several environments in one vector environment, for one policy that learns them all.

    environments    A, A, A, B, B      the tasks of all, numbered in order
    task numbers    0, 1, 2, 3, 4
    slots           each plays the environment that its next task belongs to; it makes it when it first needs it

Calls, threads and autoreset are those of `ToolVectorEnv`.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.vector.utils import batch_space

from agent_r1.arguments import ArgumentError, finite, integer
from agent_r1.faults import Patience
from agent_r1.spaces import TokenSpan
from agent_r1.tool_env import ToolEnv
from agent_r1.vector import ToolVectorEnv, _Slot

_STREAM = 1  # the environment of an episode is drawn from another stream than its task


class MixedVectorEnv(ToolVectorEnv):
    """Episodes of several environments at once: `gym.make_vec(mixed_spec(ids), num_envs=n)` makes one.

    Args:
        env_ids: the ids of registered environments, each once.
        num_envs: the number of episodes.
        share: a positive weight of each environment, for episodes that are reset without a task (None: equal weights).
        each: further arguments of each environment.
        split: a split that all environments have, or a list with one for each.
        kwargs: arguments of all environments, and of `ToolVectorEnv`.

    Task numbers count the tasks of all environments in the order of `env_ids`. The option `task_index` of `reset` is
    such a number. `tasks` holds the numbers of each environment. Without a task, the seed draws the environment by its
    share; the environment then draws the task, as it would alone. The option `max_turns` only lowers an environment's
    own limit. `info["env_id"]` of a reset names the environment.

    All environments have the same vocabulary and the same `strict`. The spaces are those of the longest. A slot keeps
    an environment of each id that it has played, with the sessions of its tools.

    Raises: ArgumentError for arguments that contradict each other. Errors of an environment's constructor have a note
    with its id.
    """

    def __init__(
        self,
        env_ids: Sequence[str],
        num_envs: int = 1,
        *,
        share: Sequence[float] | None = None,
        each: Sequence[Mapping[str, Any]] | None = None,
        split: str | Sequence[str] = "train",
        max_episode_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.closed = True  # as in the base class
        self.env_ids = tuple(env_ids)
        count = len(self.env_ids)
        if twice := sorted({name for name in self.env_ids if self.env_ids.count(name) > 1}):
            raise ArgumentError(f"{twice[0]} is named twice; register it under a second id to mix two forms of it")
        self.shares = environment_shares(share, count)
        each, splits = [{}] * count if each is None else each, [split] * count if isinstance(split, str) else split
        for name, values in (("each", each), ("split", splits)):
            if len(values) != count:
                raise ArgumentError(f"{name} has {len(values)} entries for {count} environments; give one for each")
        if any("strict" in own for own in each):
            raise ArgumentError("strict holds for all environments; give it beside each, not in it")
        of_vector = ("autoreset_mode", "observation", "text")
        given = {name: kwargs.pop(name) for name in of_vector if name in kwargs}
        self._specs = [gym.spec(name) for name in self.env_ids]
        self._arguments = [
            spec.kwargs | kwargs | {"split": own_split} | dict(own)
            for spec, own_split, own in zip(self._specs, splits, each, strict=True)
        ]
        limits = [spec.max_episode_steps for spec in self._specs]
        self._limits = limits if max_episode_steps is None else [max_episode_steps] * count
        self._made: list[dict[int, ToolEnv]] = []  # of each slot: the environments that it has, by their place
        super().__init__(lambda: self._made_for(len(self._made), len(self._made) % count), num_envs, **given)
        self.closed = True  # until the constructor is done
        try:
            self.kinds = tuple(self._made_for(0, place) for place in range(count))
        except BaseException:
            self.close_extras()
            raise
        sizes = [len(env.tokenizer) for env in self.kinds]
        if len(set(sizes)) > 1:
            self.close_extras()
            listed = ", ".join(f"{name} {size}" for name, size in zip(self.env_ids, sizes, strict=True))
            raise ArgumentError(f"the environments differ in their number of tokens ({listed}); give all one tokenizer")
        ends = list(accumulate((env._count_tasks() for env in self.kinds), initial=0))
        self.tasks = [range(first, end) for first, end in zip(ends, ends[1:], strict=False)]
        if not self.text:
            self.single_observation_space = TokenSpan(sizes[0], max(env.max_context_tokens for env in self.kinds))
            self.single_action_space = TokenSpan(sizes[0], max(env.max_action_tokens for env in self.kinds))
            self.observation_space = batch_space(self.single_observation_space, num_envs)
            self.action_space = batch_space(self.single_action_space, num_envs)
        self._generators: list[np.random.Generator] = [np.random.default_rng() for _ in range(num_envs)]
        self.closed = False

    def _made_for(self, slot: int, place: int) -> ToolEnv:
        """Return a slot's environment of the id at `place`; make it if the slot has none yet."""
        if slot == len(self._made):
            self._made.append({})
        if place not in self._made[slot]:
            entry_point: Any = self._specs[place].entry_point
            make: Any = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
            try:
                self._made[slot][place] = make(**self._arguments[place])
            except Exception as error:
                error.add_note(f"this is the environment {self.env_ids[place]}")
                raise
        return self._made[slot][place]

    def _reset(
        self, slot: _Slot, seed: int | None, options: dict[str, Any], patience: Patience
    ) -> dict[str, Any]:
        number = options.get("task_index")
        if seed is not None:
            self._generators[slot.number] = np.random.default_rng([seed, _STREAM])
        if number is None:
            generator = self._generators[slot.number]
            place = int(generator.choice(len(self.env_ids), p=self.shares))
            seed = int(generator.integers(2**31)) if seed is None else seed
        else:
            count, number = self.tasks[-1].stop, integer("task_index", number)
            if not 0 <= number < count:
                raise ValueError(f"task_index must be in [0, {count}) for these environments, got {number}")
            place = bisect_right(self.tasks, number, key=lambda numbers: numbers.start) - 1
            options = options | {"task_index": number - self.tasks[place].start}
        self._play(slot, place)
        if options.get("max_turns") is not None:
            options = options | {"max_turns": min(options["max_turns"], slot.env.max_turns)}
        return super()._reset(slot, seed, options, patience) | {"env_id": self.env_ids[place]}

    def _play(self, slot: _Slot, place: int) -> None:
        """Give a slot its environment of the id at `place`."""
        slot.env, slot.max_steps = self._made_for(slot.number, place), self._limits[place]
        self.envs = (*self.envs[: slot.number], slot.env, *self.envs[slot.number + 1 :])

    def get_state(self, source: int) -> dict[str, Any]:
        """Return a snapshot from which the episode of `source` can continue, in any slot."""
        state = super().get_state(source)
        place = next(place for place, env in self._made[source].items() if env is self.envs[source])
        return state | {"place": place, "generator": copy.deepcopy(self._generators[source])}

    def _prepare(self, slot: _Slot, state: dict[str, Any]) -> dict[str, Any]:
        self._play(slot, state["place"])
        self._generators[slot.number] = copy.deepcopy(state["generator"])
        return {"env_id": self.env_ids[state["place"]]}

    def close_extras(self, **kwargs: Any) -> None:
        """Close all environments that were made. Running calls are abandoned."""
        self._stop_threads()
        for environments in self._made:
            for env in environments.values():
                env.close()


def environment_shares(share: Sequence[float] | None, count: int) -> list[float]:
    """Return the share of each of `count` environments, with a sum of 1, for positive weights (None: equal ones).

    Raises ArgumentError for other weights, or another number of them.
    """
    if share is None or len(share) == 0:
        return [1 / count] * count
    if len(share) != count:
        raise ArgumentError(f"there are {len(share)} shares for {count} environments; give one for each")
    weights = [finite("a share", weight) for weight in share]
    if min(weights) <= 0:
        raise ArgumentError(f"a share must be above 0, got {min(weights)}; leave out an environment without a share")
    return [weight / sum(weights) for weight in weights]


def mixed_spec(env_ids: Sequence[str]) -> EnvSpec:
    """Return the spec of several registered environments for `gym.make_vec`, which makes a `MixedVectorEnv`."""
    entry_point = f"{__name__}:{MixedVectorEnv.__name__}"
    return EnvSpec("AgentR1/Mixed", vector_entry_point=entry_point, kwargs={"env_ids": list(env_ids)})
