"""The server: a `ToolEnv` as OpenEnv's `Environment`, with its Task API."""

from __future__ import annotations

import json
import secrets
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import agent_r1
from agent_r1.adapters.openenv.client import OpenEnvAction, OpenEnvObservation, OpenEnvState
from agent_r1.episode import Tokens
from agent_r1.ids import creator, factory, find_environment
from agent_r1.loops import new_messages
from agent_r1.server.wire import check_size
from agent_r1.text.chat import action_span
from agent_r1.tool_env import ToolEnv
from agent_r1_tools import ToolFault
from agent_r1_tools.threads import OneThread

try:
    from fastapi import FastAPI, HTTPException
    from openenv.core.env_server.http_server import create_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import ConcurrencyConfig, EnvironmentMetadata
    from pydantic import BaseModel, ConfigDict, NonNegativeInt
except ImportError as error:
    raise ImportError(f'{error}: agent_r1.adapters.openenv needs pip install "agent-r1[openenv]"') from error

MAX_LISTED = 10_000  # tasks in one answer of the Task API
MAX_IDLE = 3600.0  # seconds after which a silent session is closed


class _Start(BaseModel):
    """The beginning of an episode: its task, its seed, and the actions that were played already."""

    model_config = ConfigDict(extra="forbid")

    split: str | None = None
    index: NonNegativeInt | None = None
    seed: NonNegativeInt | None = None
    actions: list[OpenEnvAction] = []


class OpenEnvEnvironment(Environment):
    """A `ToolEnv` behind OpenEnv's interface, in its own thread. It is made when an episode begins.

    Args:
        env_id: a registered environment, or "module:ID".
        env_kwargs: its arguments. `split` is the default of `reset`.
        counts: the number of tasks by split.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, env_id: str, env_kwargs: Mapping[str, Any], counts: Mapping[str, int]) -> None:
        super().__init__()
        self._id, self._kwargs, self._counts = env_id, env_kwargs, counts
        self._thread = OneThread()
        self._env: ToolEnv | None = None
        self._split: str | None = None  # with which it was made; None: the default
        self._start: dict[str, Any] | None = None  # split, index and seed of the running episode
        self._spans: list[list[int]] = []  # its turns
        self._episode_id: str | None = None
        self._steps = 0
        self._closed = False

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        split: str | None = None,
        index: int | None = None,
        injected_state: dict[str, Any] | None = None,
        **unknown: Any,
    ) -> OpenEnvObservation:
        """Begin an episode: `seed` draws its task, or `index` chooses it.

        `injected_state` replaces these arguments by its own entries, and plays its `actions` first. The observation
        then has the conversation, the state, and the reward of the last of them. Tools run again.

        Raises ValueError for other arguments, for an unknown split and for a task that does not exist. Raises ToolFault
        if the episode cannot begin because of an infrastructure error.
        """
        if self._closed:
            raise RuntimeError(f"the session was silent for {MAX_IDLE:.0f} seconds and is closed; connect again")
        if unknown:
            names = ", ".join(map(repr, unknown))
            raise ValueError(f"reset takes seed, episode_id, split, index and injected_state, not {names:.200}")
        start = _Start(**{"split": split, "index": index, "seed": seed, **(injected_state or {})})
        self._start, self._spans = None, []
        env = self._open(start.split)
        options = {} if start.index is None else {"task_index": start.index}
        drawn = secrets.randbelow(2**31) if start.seed is None else start.seed  # so that `state` can always be replayed
        state, info = self._thread.run(partial(env.reset, seed=drawn, options=options))
        seen = _observation(info, truncated=False)
        for action in start.actions:
            state, seen = self._play(env, action)
        self._start = {"split": env.split, "index": start.index, "seed": drawn}
        self._episode_id, self._steps = episode_id or uuid.uuid4().hex, 0
        begun = {"messages": env.messages, "tools": env.schemas, "tokens": state.tolist(), "num_action_tokens": 0}
        return seen.model_copy(update=begun)

    def step(self, action: OpenEnvAction, timeout_s: float | None = None, **kwargs: Any) -> OpenEnvObservation:
        """Play one turn of the policy.

        Raises ValueError for an action that is not one turn, and RuntimeError without a running episode. Raises
        ToolFault for an infrastructure error that persists: the episode is over then, and has no reward.
        """
        if self._env is None or self._start is None:
            raise RuntimeError("no episode is running: reset first, in the same WebSocket (POST /step has no session)")
        _, seen = self._play(self._env, action)
        self._steps += 1
        return seen

    def _play(self, env: ToolEnv, action: OpenEnvAction) -> tuple[Tokens, OpenEnvObservation]:
        if (action.message is None) is (action.tokens is None):
            raise ValueError("an action has either `message` or `tokens`")
        text, message = (action.message, None) if isinstance(action.message, str) else (None, action.message)
        check_size(None, message)  # a text of any length is read fast
        span = action_span(env, text=text, message=message, tokens=action.tokens).tolist()
        span = span[: env.room + 1]  # a longer turn is cut the same
        state, reward, terminated, truncated, info = self._thread.run(env.step, span)
        if "fault" in info:
            raise ToolFault(f"infrastructure error: {info['fault']}")
        self._spans.append(span)
        begin, end = env.episode.turns[-1]
        return state, _observation(
            info,
            truncated,
            messages=new_messages(env),
            tokens=state[begin:].tolist(),
            num_action_tokens=end - begin,
            reward=reward,
            done=terminated or truncated,
        )

    def _open(self, split: str | None) -> ToolEnv:
        """Return the environment of a split, and close that of another one."""
        if split is not None and split not in self._counts:
            raise ValueError(f"there is no split {split!r}; there are {', '.join(self._counts)}")
        if self._env is None or self._split != split:
            self._end()
            kwargs = self._kwargs if split is None else {**self._kwargs, "split": split}
            self._env, self._split = cast(ToolEnv, self._thread.run(factory(self._id, kwargs)).unwrapped), split
        return self._env

    def _end(self) -> None:
        env, self._env, self._start = self._env, None, None
        if env is not None:
            self._thread.run(env.close)

    def close(self) -> None:
        """End the tools' sessions. The session cannot be used again."""
        self._closed = True
        self._end()

    @property
    def state(self) -> OpenEnvState:
        """The episode and its steps since `reset`."""
        state = OpenEnvState(episode_id=self._episode_id, step_count=self._steps)
        if self._start is not None and self._env is not None:
            state.task_id = self._env.task.id
            state.injected_state = {**self._start, "actions": [{"tokens": span} for span in self._spans]}
        return state

    def get_metadata(self) -> EnvironmentMetadata:
        """Return the id and the first line of the class's docstring."""
        doc = (creator(find_environment(self._id).id).__doc__ or self._id).strip().splitlines()[0]
        return EnvironmentMetadata(name=self._id, description=doc, version=agent_r1.__version__)

    # ------------------------------------------------------------------ the Task API

    def list_splits(self) -> list[str]:
        """Return the names of the splits."""
        return list(self._counts)

    def num_tasks(self, split: str) -> int:
        """Return the number of tasks of a split."""
        if split not in self._counts:
            raise HTTPException(404, f"there is no split {split!r}; there are {', '.join(self._counts)}")
        return self._counts[split]

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        """Return the arguments of `reset` that choose a task."""
        if not 0 <= index < self.num_tasks(split):
            raise HTTPException(400, f"split {split!r} has tasks 0 to {self.num_tasks(split) - 1}, got {index}")
        return {"split": split, "index": index}

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[dict[str, Any]]:
        """Return the tasks of a slice, at most 10,000 of them."""
        indexes = range(*slice(start, stop).indices(self.num_tasks(split)))
        if len(indexes) > MAX_LISTED:
            remedy = f"ask for at most {MAX_LISTED} of them with task_range"
            raise HTTPException(400, f"{len(indexes)} tasks of split {split!r} are too many for one answer; {remedy}")
        return [{"split": split, "index": index} for index in indexes]

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        """Return all tasks of a split that has at most 10,000 of them."""
        return self.get_task_range(split)


def _observation(info: dict[str, Any], truncated: bool, **fields: Any) -> OpenEnvObservation:
    room, stops = info["max_new_tokens"], info["stop_token_ids"]
    rest = {key: value for key, value in info.items() if key not in ("max_new_tokens", "stop_token_ids")}
    metadata = json.loads(json.dumps(rest | {"truncated": truncated}, default=_plain))
    return OpenEnvObservation(metadata=metadata, max_new_tokens=room, stop_token_ids=stops, **fields)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)  # NumPy's numbers


def openenv_app(env_id: str, env_kwargs: dict[str, Any] | None = None, *, max_sessions: int = 64) -> FastAPI:
    """Return OpenEnv's FastAPI application for an environment.

    Args:
        env_id: a registered environment, or "module:ID".
        env_kwargs: its arguments.
        max_sessions: the maximum number of concurrent sessions; a further one is rejected.

    Raises: ArgumentError if there is no such environment.
    """
    kwargs = dict(env_kwargs or {})
    return create_app(
        partial(OpenEnvEnvironment, env_id, kwargs, counts_of(env_id, kwargs)),
        OpenEnvAction,
        OpenEnvObservation,
        env_name=public_name(env_id),
        concurrency_config=ConcurrencyConfig(max_concurrent_envs=max_sessions, session_timeout=MAX_IDLE),
        state_cls=OpenEnvState,
    )


def counts_of(env_id: str, kwargs: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of tasks of each split. A `split` among the arguments is only the default of `reset`."""
    return agent_r1.task_counts(env_id, {name: value for name, value in kwargs.items() if name != "split"})


def public_name(env_id: str) -> str:
    """Return the name of an environment in the addresses of the Task API, which must not have a slash."""
    return env_id.rpartition(":")[2].rpartition("/")[2]
