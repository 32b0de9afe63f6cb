"""The environments for tinker-cookbook, tokens in and tokens out; docs/tinker.md shows a whole program.

    config = train.Config(
        ...,
        dataset_builder=TinkerDatasetBuilder(env_id="AgentR1/MultihopWorld-v0", tokenizer=model_name),
        rollout_error_tolerance=True,
    )

The observation is the state of the `ToolEnv`. It only grows by appending, so tinker-cookbook makes one training
sequence of each episode. Made for tinker-cookbook 0.6.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, cast

import gymnasium as gym
import numpy as np

import agent_r1
from agent_r1.rewards import known
from agent_r1.tool_env import ToolEnv
from agent_r1_tools import ToolFault

try:
    import chz
    from tinker import ModelInput
    from tinker_cookbook.rl.rollout_limits import RolloutLimits
    from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult
except ImportError as error:
    raise ImportError(f'{error}: agent_r1.adapters.tinker needs pip install "agent-r1[tinker]"') from error

_ = agent_r1  # registers the environments, also in a process that has only unpickled a builder
_STOPS = {None: "completed", "turns": "max_turns", "context": "max_tokens"}  # tinker-cookbook's words


class TinkerEnv(Env):
    """One episode of a `ToolEnv`, in its own thread, so that a tool that blocks delays this episode only.

    Args:
        env: the environment; no one else may step it.
        task_index: the task.

    Raises: ToolFault, from `initial_observation` and `step`, for an infrastructure error that persists. Such an episode
    is not a training signal; `rollout_error_tolerance` decides how it is treated.
    """

    def __init__(self, env: ToolEnv, task_index: int) -> None:
        self.env, self.task_index = env, task_index
        # tinker-cookbook reads these limits, and samples no span without room.
        self.rollout_limits = RolloutLimits(
            max_turn_tokens=env.max_action_tokens, max_trajectory_tokens=env.max_context_tokens
        )
        self._thread, self._closed = ThreadPoolExecutor(1), False

    async def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self._closed:  # the group ended by another episode's error, and this one's rollout continues
            raise RuntimeError("the episode was closed")
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def close(self) -> None:
        """Close the environment, wherever its episode stands. A second call does nothing."""
        if not self._closed:
            closing = asyncio.get_running_loop().run_in_executor(self._thread, self.env.close)
            self._closed = True
            await closing

    async def initial_observation(self) -> tuple[ModelInput, list[int]]:
        """Return the prompt, and the tokens that end a turn."""
        state, info = await self._run(lambda: self.env.reset(options={"task_index": self.task_index}))
        return ModelInput.from_ints(state.tolist()), info["stop_token_ids"]

    async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
        """Run one turn of sampled tokens. Return its reward and the next state. The last turn closes everything."""
        state, reward, terminated, truncated, info = await self._run(self.env.step, np.array(action, np.int32))
        done, metrics = terminated or truncated, {}
        if done:
            await self.close()
            if "fault" in info:
                raise ToolFault(info["fault"])
            reason = info.get("truncation_reason")
            stop, known_metrics = _STOPS.get(reason, reason), known(info["metrics"])
            metrics = {**known_metrics, "success": float(info["is_success"]), f"stop/{stop}": 1.0}
        return StepResult(
            reward=reward,
            episode_done=done,
            next_observation=ModelInput.from_ints(state.tolist()),
            next_stop_condition=info["stop_token_ids"],
            metrics=metrics,
            logs={"task_id": info["task_id"], **info["reward_terms"]},
        )


@dataclass(frozen=True)
class TinkerGroupBuilder(EnvGroupBuilder):
    """`group_size` episodes of one task. It can be pickled if its arguments can: see `TinkerDatasetBuilder`."""

    env_id: str
    task_index: int
    group_size: int
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    _made: list[TinkerEnv] = field(default_factory=list, init=False, repr=False, compare=False)

    async def make_envs(self) -> Sequence[TinkerEnv]:
        """Make the environments, which share tokenizer and data."""
        envs = [gym.make(self.env_id, **self.env_kwargs).unwrapped for _ in range(self.group_size)]
        made = [TinkerEnv(cast(ToolEnv, env), self.task_index) for env in envs]
        self._made.extend(made)
        return made

    async def cleanup(self) -> None:
        """Close the environments, also of episodes that broke; tinker-cookbook calls it after a group."""
        while self._made:
            await self._made.pop().close()

    def logging_tags(self) -> list[str]:
        """Return the id, under which tinker-cookbook logs this environment if there are several."""
        return [self.env_id.replace("/", "_")]


@dataclass(frozen=True)
class TinkerDataset(RLDataset):
    """Batches of groups, a group for each of `tasks`, in order; the last batch may be smaller."""

    env_id: str
    tasks: Sequence[int]
    groups_per_batch: int
    group_size: int
    env_kwargs: dict[str, Any] = field(default_factory=dict)

    def get_batch(self, index: int) -> list[TinkerGroupBuilder]:
        """Return batch number `index`."""
        tasks = self.tasks[index * self.groups_per_batch : (index + 1) * self.groups_per_batch]
        return [TinkerGroupBuilder(self.env_id, task, self.group_size, self.env_kwargs) for task in tasks]

    def __len__(self) -> int:
        return math.ceil(len(self.tasks) / self.groups_per_batch)


@chz.chz
class TinkerDatasetBuilder(RLDatasetBuilder):
    """A `dataset_builder` for `train.Config`: tasks of one split for training, of another for tests."""

    env_id: str
    tokenizer: Any  # the model's: a Hugging Face name or folder, or a tokenizer object that pickles
    groups_per_batch: int = 32  # tasks
    group_size: int = 8  # episodes of each
    num_batches: int = 100  # fewer if the split has fewer tasks; no task is repeated
    split: str = "train"
    test_split: str | None = "test"  # None: no test set
    num_test_tasks: int = 64  # the first tasks, one episode each
    seed: int = 0  # of the order of the tasks
    env_kwargs: dict[str, Any] = chz.field(default_factory=dict)  # further arguments of the environment

    async def __call__(self) -> tuple[TinkerDataset, TinkerDataset | None]:
        kwargs = {**self.env_kwargs, "tokenizer": self.tokenizer, "split": self.split}
        total = self._num_tasks(kwargs)
        count = min(total, self.groups_per_batch * self.num_batches)
        tasks = np.random.default_rng(self.seed).choice(total, count, replace=False).tolist()
        train = TinkerDataset(self.env_id, tasks, self.groups_per_batch, self.group_size, kwargs)
        if self.test_split is None:
            return train, None
        kwargs = {**kwargs, "split": self.test_split}
        test = range(min(self._num_tasks(kwargs), self.num_test_tasks))
        return train, TinkerDataset(self.env_id, test, self.groups_per_batch, 1, kwargs)

    def _num_tasks(self, kwargs: dict[str, Any]) -> int:
        return cast(ToolEnv, gym.make(self.env_id, **kwargs).unwrapped).num_tasks
