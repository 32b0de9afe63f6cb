"""The bodies of requests, and what an environment answers to them."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Response
from pydantic import BaseModel, ConfigDict, Field

from agent_r1.loops import new_messages
from agent_r1.text.chat import action_span
from agent_r1.tool_env import ToolEnv

MAX_CHARACTERS = 262_144
"""The length of a text, and of a message as JSON. Longer ones fit into no turn."""
MAX_OBJECTS = 1024
"""The number of JSON objects in a message: its calls, parts and arguments."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class NewSession(_Body):
    """The body of POST /sessions."""

    env_id: str
    kwargs: dict[str, Any] = {}
    tokenizer: str | None = None  # a fingerprint; None for a session of texts or messages


class Empty(_Body):
    """The body of POST /sessions/NAME/fork."""


class Numbered(_Body):
    """A request that must not act twice: a client that lost the answer sends it again under the same number."""

    number: int | None = Field(None, ge=0, lt=2**53)


class Reset(Numbered):
    """The body of POST /sessions/NAME/reset."""

    seed: int | None = Field(None, ge=0)
    task_index: int | None = None
    max_turns: int | None = None


class Step(Numbered):
    """The body of POST /sessions/NAME/step: one of the three."""

    tokens: list[int] | None = None
    text: str | None = None
    message: dict[str, Any] | None = None


class Restore(Numbered):
    """The body of POST /sessions/NAME/restore."""

    snapshot: str


def to_json(content: Any) -> str:
    """Write numbers so that Python reads the same ones, NaN and infinity included. NumPy's become Python's."""
    return json.dumps(content, separators=(",", ":"), default=_plain)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"the environment's answer has a {type(value).__name__}, which JSON cannot write")


def respond(text: str, status: int = 200) -> Response:
    """Return an answer whose text is JSON."""
    return Response(text, status, media_type="application/json")


def about(env: ToolEnv) -> dict[str, Any]:
    return {
        "num_tasks": env.num_tasks,
        "splits": dict(env.splits),
        "split": env.split,
        "dialect": env.dialect.name,
        "schemas": env.schemas,
        "max_turns": env.max_turns,
        "max_context_tokens": env.max_context_tokens,
        "max_action_tokens": env.max_action_tokens,
        "unfinished_reward": env.unfinished_reward,
    }


def state_of(env: ToolEnv) -> dict[str, Any]:
    episode = env.episode
    return {
        "tokens": env._observation().tolist(),
        "messages": env.messages,
        "turn": episode.turn,
        "over": episode.over,
        "max_new_tokens": env.room,
    }


def reset(env: ToolEnv, asked: Reset) -> dict[str, Any]:
    options = {"task_index": asked.task_index, "max_turns": asked.max_turns}
    state, info = env.reset(
        seed=asked.seed, options={name: value for name, value in options.items() if value is not None}
    )
    return {
        "tokens": state.tolist(),
        "info": info,
        "schemas": env.schemas,
        "messages": env.episode.messages,
        "chat": env.messages,
        "task_index": env.episode.task_index,
        "max_turns": env.episode.max_turns,
        "question": env.task.question,
        "instructions": env.instructions if env.task.instructions is None else env.task.instructions,
    }


def check_size(text: str | None, message: dict[str, Any] | None) -> None:
    """Raise ValueError for a turn whose encoding would take long. Tokens are bounded by the request."""
    length = len(text or "") if message is None else len(json.dumps(message))
    if length > MAX_CHARACTERS:
        raise ValueError(f"the turn has {length} characters, and the server reads {MAX_CHARACTERS}; send less")
    waiting, objects = [message], 0
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            objects += 1
        waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if objects > MAX_OBJECTS:
        raise ValueError(f"the message has {objects} objects, and the server reads {MAX_OBJECTS}; send fewer calls")


def step(env: ToolEnv, asked: Step) -> dict[str, Any]:
    check_size(asked.text, asked.message)
    span = action_span(env, text=asked.text, message=asked.message, tokens=asked.tokens)
    start, messages = env.episode.length, len(env.episode.messages)
    state, reward, terminated, truncated, info = env.step(span)
    end = env.episode.turns[-1][1]
    return {
        "span": state[start:end].tolist() if asked.tokens is None else end - start,
        "new": state[end:].tolist(),
        "reward": reward,
        "terminated": terminated,
        "truncated": truncated,
        "info": info,
        "schemas": env.schemas,
        "messages": env.episode.messages[messages:],
        "chat": new_messages(env),
    }
