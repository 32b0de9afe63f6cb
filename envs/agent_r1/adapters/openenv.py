"""The environments as OpenEnv servers, and a client; docs/openenv.md shows both.

    app = openenv_app("AgentR1/CraftWorld-v0")                        # uvicorn module:app --port 8000
    with OpenEnvClient("http://localhost:8000") as env:
        seen = env.reset(split="test", index=3).observation           # messages, tools, tokens
        result = env.step(OpenEnvAction(message="..."))               # or tokens=[...]
    python -m agent_r1.adapters.openenv AgentR1/CraftWorld-v0 --out FOLDER    # a folder for `openenv validate`

A session is one WebSocket and one environment. An infrastructure error is an error of the protocol, never a reward.
A state is sent as the actions that lead to it (`injected_state`), so nothing from the network is unpickled. Made for
OpenEnv 0.10.
"""

from __future__ import annotations

import argparse
import json
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import agent_r1
from agent_r1.arguments import ArgumentError
from agent_r1.baselines import baselines_of
from agent_r1.episode import MAX_CALLS
from agent_r1.ids import creator, factory, find_environment
from agent_r1.text.chat import encode_turn
from agent_r1.tool_env import ToolEnv
from agent_r1_tools import ToolFault
from agent_r1_tools.threads import OneThread

try:
    import yaml
    from fastapi import FastAPI, HTTPException
    from openenv.core.client_types import StepResult
    from openenv.core.env_client import EnvClient
    from openenv.core.env_server.http_server import create_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, ConcurrencyConfig, EnvironmentMetadata, Observation, State
    from pydantic import BaseModel, ConfigDict, NonNegativeInt, StrictInt
except ImportError as error:
    raise ImportError(f'{error}: agent_r1.adapters.openenv needs pip install "agent-r1[openenv]"') from error

MAX_LISTED = 10_000  # tasks in one answer of the Task API
MAX_IDLE = 3600.0  # seconds after which a silent session is closed


class OpenEnvAction(Action):
    """One turn of the policy: either `message` or `tokens`.

    Attributes:
        message: the turn as text in the environment's dialect, or a chat API's reply with `content` and `tool_calls`.
        tokens: the sampled token ids, end of turn included.
    """

    message: str | dict[str, Any] | None = None
    tokens: list[StrictInt] | None = None


class OpenEnvObservation(Observation):
    """The prompt after `reset`, or what a step added to the conversation.

    `metadata` has the environment's `info`: `task_id`, `reward_terms`, `tool_calls`, and at the end `is_success`,
    `metrics` and `truncation_reason`. Its entry `truncated` separates a cut episode from a finished one.

    Attributes:
        messages: after `reset` the conversation so far, afterwards the messages that follow the policy's turn.
        tools: the schemas of the tools, after `reset` only.
        tokens: the ids that are new in the state: all of them after `reset`, afterwards the turn and what follows it.
            The state is the concatenation of all `tokens`.
        num_action_tokens: how many of `tokens`, from the first, are the policy's turn.
        max_new_tokens: the room of the next turn, in tokens. A longer turn is cut.
        stop_token_ids: the tokens that end a turn.
    """

    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] = []
    tokens: list[int] = []
    num_action_tokens: int = 0
    max_new_tokens: int = 0
    stop_token_ids: list[int] = []


class OpenEnvState(State):
    """The state of a session. `reset(injected_state=state.injected_state)` plays the episode again up to here."""

    task_id: str | None = None
    injected_state: dict[str, Any] | None = None


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
        self._start: _Start | None = None  # of the running episode, with its actions so far
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
            raise ValueError(f"reset takes seed, episode_id, split, index and injected_state, not {', '.join(unknown)}")
        start = _Start(**{"split": split, "index": index, "seed": seed, **(injected_state or {})})
        self._start = None
        env = self._open(start.split)
        options = {} if start.index is None else {"task_index": start.index}
        state, info = self._thread.run(partial(env.reset, seed=start.seed, options=options))
        index = env.episode.task_index if start.seed is None else start.index
        self._start = _Start(split=env.split, index=index, seed=start.seed)
        self._episode_id, self._steps = episode_id or uuid.uuid4().hex, 0
        seen = _observation(info, messages=env.messages, tokens=state.tolist())
        for action in start.actions:
            seen = self._play(env, action)
        if start.actions:
            seen.messages, seen.tokens = env.messages, env.episode.buffer[: env.episode.length].tolist()
            seen.num_action_tokens = 0
        seen.tools = env.schemas
        return seen

    def step(self, action: OpenEnvAction, timeout_s: float | None = None, **kwargs: Any) -> OpenEnvObservation:
        """Play one turn of the policy.

        Raises ValueError for an action that is not one turn, and RuntimeError without a running episode. Raises
        ToolFault for an infrastructure error that persists: the episode is over then, and has no reward.
        """
        if self._env is None or self._start is None:
            raise RuntimeError("no episode is running: reset first, in the same WebSocket (POST /step has no session)")
        seen = self._play(self._env, action)
        self._steps += 1
        return seen

    def _play(self, env: ToolEnv, action: OpenEnvAction) -> OpenEnvObservation:
        if (action.message is None) is (action.tokens is None):
            raise ValueError("an action has either `message` or `tokens`")
        span: Any = action.tokens
        if isinstance(action.message, str):
            span = encode_turn(env, action.message, env.room)
        elif action.message is not None:
            span = env.encode_reply(action.message)
        state, reward, terminated, truncated, info = self._thread.run(env.step, span)
        if "fault" in info:
            self._start = None
            raise ToolFault(f"infrastructure error: {info['fault']}")
        assert self._start is not None
        self._start.actions.append(action)
        begin, end = env.episode.turns[-1]
        return _observation(
            info | {"truncated": truncated},
            messages=env.new_messages(),
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
        if self._start is None or self._env is None:
            return OpenEnvState(episode_id=self._episode_id, step_count=self._steps)
        return OpenEnvState(
            episode_id=self._episode_id,
            step_count=self._steps,
            task_id=self._env.task.id,
            injected_state=self._start.model_dump(exclude_defaults=True),
        )

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


def _observation(info: dict[str, Any], **fields: Any) -> OpenEnvObservation:
    room, stops = info["max_new_tokens"], info["stop_token_ids"]
    rest = {key: value for key, value in info.items() if key not in ("max_new_tokens", "stop_token_ids")}
    metadata = json.loads(json.dumps(rest, default=_plain))
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
        partial(OpenEnvEnvironment, env_id, kwargs, _counts(env_id, kwargs)),
        OpenEnvAction,
        OpenEnvObservation,
        env_name=_name(env_id),
        concurrency_config=ConcurrencyConfig(max_concurrent_envs=max_sessions, session_timeout=MAX_IDLE),
        state_cls=OpenEnvState,
    )


def _counts(env_id: str, kwargs: Mapping[str, Any]) -> dict[str, int]:
    return agent_r1.task_counts(env_id, {name: value for name, value in kwargs.items() if name != "split"})


def _name(env_id: str) -> str:
    """Return the name of an environment in the addresses of the Task API, which must not have a slash."""
    return env_id.rpartition(":")[2].rpartition("/")[2]


class OpenEnvClient(EnvClient[OpenEnvAction, OpenEnvObservation, OpenEnvState]):
    """A session on such a server: `reset`, `step` and `state`, to be awaited in async code (see OpenEnv's `EnvClient`).

    `message_timeout_s` (60) is the patience for an answer in seconds. It must exceed the duration of a turn's tools,
    retries included (`fault_deadline`). Raises RuntimeError with the server's message for an error of the server, and
    so for an infrastructure error.
    """

    def _step_payload(self, action: OpenEnvAction) -> dict[str, Any]:
        return action.model_dump(exclude_defaults=True)

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[OpenEnvObservation]:
        reward, done = payload["reward"], payload["done"]
        seen = OpenEnvObservation(**payload["observation"], reward=reward, done=done)
        return StepResult(seen, reward, done, seen.metadata)

    def _parse_state(self, payload: dict[str, Any]) -> OpenEnvState:
        return OpenEnvState(**payload)


# ---------------------------------------------------------------------------------------------- a folder for `openenv`

_APP = '''"""{env_id} as an OpenEnv server: `uvicorn server.app:app --port 8000` in the folder above."""

from agent_r1.adapters.openenv import openenv_app

app = openenv_app({env_id!r}, {kwargs!r})


def main() -> None:
    import uvicorn

    uvicorn.run(app, host="0.0.0.0", port=8000)


if __name__ == "__main__":
    main()
'''

_DOCKERFILE = """\
FROM python:3.12-slim
WORKDIR /app
# agent-r1 is not on PyPI: copy its wheel (`make wheel`, dist/*.whl) beside this file.
COPY . .
RUN pip install --no-cache-dir "$(ls ./*.whl)[{extras}]"
EXPOSE 8000
CMD ["uvicorn", "server.app:app", "--host", "0.0.0.0", "--port", "8000"]
"""


def write_package(env_id: str, folder: str | Path, env_kwargs: dict[str, Any] | None = None) -> list[Path]:
    """Write the folder that `openenv validate` and `docker build` take, and return its files.

    The oracle is the expert's episode on the first task of the default split. OpenEnv declares one range of the reward
    of all steps, and the oracle must reach its maximum. So the server pays no process rewards, unless `env_kwargs` has
    `process_reward`.

    Raises: ArgumentError if the environment has no demonstration, or if the expert does not reach the maximum.
    """
    kwargs, folder = {"process_reward": False, **(env_kwargs or {})}, Path(folder)
    env = cast(ToolEnv, factory(env_id, kwargs)().unwrapped)
    env.reset(options={"task_index": 0})
    try:
        turns = baselines_of(env).demonstration()
    except (NotImplementedError, ValueError) as error:
        raise ArgumentError(f"{env_id} has no oracle to write: {error}") from error
    reward = [env.step(encode_turn(env, turn, env.room))[1] for turn in turns][-1]
    weights, unfinished = env.process_weights.values(), env.unfinished_reward or 0.0
    high = 1.0 + sum(max(weight, 0.0) for weight in weights)
    low = min(-1.0, unfinished) + MAX_CALLS * sum(min(weight, 0.0) for weight in weights)
    if not high - 0.1 <= reward <= high:  # OpenEnv's largest tolerance
        remedy = "leave out process_reward" if kwargs["process_reward"] else "it must solve task 0"
        raise ArgumentError(f"the expert's last turn pays {reward:.3f}, but a turn can pay {high:.3f}; {remedy}")
    split, actions = env.split, [{"message": turn} for turn in turns]
    env.close()
    begun = {"split": split, "index": 0, "actions": actions[: len(actions) // 2]}
    entry = (agent_r1.ENVIRONMENTS | agent_r1.BRIDGES).get(env_id)
    manifest = {
        "spec_version": 1,
        "name": _name(env_id),
        "version": agent_r1.__version__,
        "type": "space",
        "runtime": "fastapi",
        "app": "server.app:app",
        "port": 8000,
        "validation": {
            "reward": {"range": [low, high], "oracle_tolerance": round(high - reward, 6), "floor_margin": 0.1},
            "resources": {"cpu": 1.0, "memory_mb": 1024, "disk_mb": 512, "episode_timeout_s": 300.0},
            "capabilities": {
                "oracle": {"form": "injected_state", "location": "validation/oracle.json"},
                "verifier": {"kind": "reward_channel"},
                "set_state": True,
                "task_api": True,
                "declared_task_count": _counts(env_id, kwargs),
            },
            "types": {"tags": ["tool-use"]},
            "execution": {"probe_path": "validation/runtime.json", "dockerfile": "Dockerfile", "context": "."},
        },
    }
    plan = {
        "plan_schema_version": "1",
        "reset": {"episode_id": "probe", "seed": 0, "options": {"injected_state": begun}},
        "actions": actions[len(actions) // 2 :],
    }
    oracle = {"split": split, "index": 0, "actions": actions}
    extras = ",".join(["openenv", *([entry.extra] if entry and entry.extra else [])])
    texts = {
        "openenv.yaml": yaml.safe_dump(manifest, sort_keys=False),
        "server/app.py": _APP.format(env_id=env_id, kwargs=kwargs),
        "Dockerfile": _DOCKERFILE.format(extras=extras),
        ".dockerignore": "validation\n",  # the image must not hold the oracle
        "validation/runtime.json": json.dumps(plan, indent=2) + "\n",
        "validation/oracle.json": json.dumps(oracle, indent=2) + "\n",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def main() -> None:
    """Write the folder of an environment, from the command line."""
    parser = argparse.ArgumentParser(prog="python -m agent_r1.adapters.openenv", description=main.__doc__)
    parser.add_argument("env_id", help="an id, or MODULE:ID for your own environment")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="the folder to write")
    parser.add_argument("--env-kwargs", default="{}", help="arguments of the environment, as JSON")
    args = parser.parse_args()
    try:
        for path in write_package(args.env_id, args.out, json.loads(args.env_kwargs)):
            print(path)
    except (ArgumentError, json.JSONDecodeError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
