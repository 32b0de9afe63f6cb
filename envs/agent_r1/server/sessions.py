"""Sessions: environments on their threads, and snapshots of their episodes."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, cast

import gymnasium as gym
from fastapi import HTTPException

import agent_r1
from agent_r1.ids import find_environment
from agent_r1.server.wire import NewSession
from agent_r1.text.tokenizers import fingerprint, load_tokenizer
from agent_r1.tool_env import ToolEnv
from agent_r1_tools import ToolFault
from agent_r1_tools.threads import OneThread

MAX_SNAPSHOTS = 1024
"""Snapshots of all sessions. The one that was not used for the longest time is dropped for a new one."""
MAX_CONTEXT_TOKENS = 262_144
ALLOWED = (
    "split", "dialect", "max_turns", "max_context_tokens", "max_action_tokens", "process_reward", "unfinished_reward",
)  # fmt: skip
"""The arguments of an environment that a client may give."""


@dataclass(eq=False)
class Session:
    """An environment, its thread, and the last answer."""

    kind: tuple[Any, ...]  # equal for sessions that can continue each other's snapshots
    env: ToolEnv
    thread: OneThread
    used: float = field(default_factory=time.monotonic)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    number: int | None = None
    answer: Any = None


class Sessions:
    """All sessions of a server.

    Args:
        env_ids: the served ids.
        env_kwargs: arguments of every environment, which no client can change.
        tokenizers: names or folders of the tokenizers that clients may use, besides bytes and the shipped policies'.
        max_sessions: bound on open sessions.
        idle_seconds: a session without a request for so long is closed.

    Raises ArgumentError if there is no such environment, or if it cannot be made.
    """

    def __init__(
        self, env_ids: Sequence[str], env_kwargs: Mapping[str, Any], tokenizers: Sequence[str], max_sessions: int,
        idle_seconds: float,
    ) -> None:  # fmt: skip
        self.env_kwargs, self.max_sessions, self.idle_seconds = dict(env_kwargs), max_sessions, idle_seconds
        self.ids = {name: find_environment(name).id for name in env_ids}
        self.open: dict[str, Session] = {}
        self.opening = 0  # sessions whose environment is being made
        self.snapshots: OrderedDict[str, tuple[tuple[Any, ...], Any]] = OrderedDict()
        self.tokenizers: dict[str, Any] = {}
        for name in [None, *tokenizers, *self._policies()]:
            tokenizer = load_tokenizer(name)
            self.tokenizers.setdefault(fingerprint(tokenizer), tokenizer)

    def _policies(self) -> list[str]:
        found: list[str] = []
        if find_spec("transformers") is None:  # which reads their tokenizers
            return found
        for env_id in self.ids.values():
            try:
                found.append(agent_r1.tiny_policy(env_id))
            except ValueError:
                continue
        return found

    async def create(self, asked: NewSession) -> tuple[str, Session]:
        """Open a session. Raises HTTPException if something is not served, or without room."""
        if asked.env_id not in self.ids:
            raise HTTPException(404, f"this server has no {asked.env_id!r:.100}; it has {', '.join(self.ids)}")
        if unknown := sorted(asked.kwargs.keys() - set(ALLOWED)):
            raise HTTPException(
                422, f"only whoever starts the server sets {', '.join(unknown)[:200]}; you can set {', '.join(ALLOWED)}"
            )
        if fixed := sorted(asked.kwargs.keys() & self.env_kwargs.keys()):
            raise HTTPException(422, f"this server sets {', '.join(fixed)}; leave it out")
        context = asked.kwargs.get("max_context_tokens")
        if isinstance(context, int) and context > MAX_CONTEXT_TOKENS:
            raise HTTPException(422, f"max_context_tokens is at most {MAX_CONTEXT_TOKENS} here, got {context}")
        if asked.tokenizer is not None and asked.tokenizer not in self.tokenizers:
            names = ", ".join(str(getattr(t, "name_or_path", "bytes")) for t in self.tokenizers.values())
            raise HTTPException(
                422, f"no tokenizer here equals yours; there are {names}; start the server with --tokenizer NAME"
            )
        tokenizer = asked.tokenizer or next(iter(self.tokenizers))
        kind = (asked.env_id, tokenizer, json.dumps(asked.kwargs, sort_keys=True))
        return await self.open_session(kind)

    async def open_session(self, kind: tuple[Any, ...]) -> tuple[str, Session]:
        """Make the environment of a session, in the session's thread."""
        if len(self.open) + self.opening >= self.max_sessions:
            raise HTTPException(429, f"all {self.max_sessions} sessions are in use; try another server, or later")
        env_id, tokenizer, kwargs = kind
        thread = OneThread()

        def make() -> ToolEnv:
            given = {"tokenizer": self.tokenizers[tokenizer], **self.env_kwargs, **json.loads(kwargs)}
            env = cast(ToolEnv, gym.make(self.ids[env_id], **given).unwrapped)
            env._count_tasks()
            return env

        self.opening += 1
        try:
            session = Session(kind, await thread.call(make), thread)
        except (ValueError, TypeError) as error:  # ArgumentError, missing data
            raise HTTPException(422, f"{env_id}: {error}"[:2000]) from None
        finally:
            self.opening -= 1
        name = secrets.token_urlsafe(24)
        self.open[name] = session
        return name, session

    def find(self, name: str) -> Session:
        """Return an open session. Raises HTTPException 404."""
        session = self.open.get(name)
        if session is None:
            raise HTTPException(404, "there is no such session: it was closed, was idle for too long, or never opened")
        session.used = time.monotonic()
        return session

    async def close(self, name: str) -> None:
        """Close a session, if it is open. An environment that is busy ends when it is done."""
        session = self.open.pop(name, None)
        if session is not None:
            session.thread.start(session.env.close)

    async def close_idle(self) -> None:
        """Close sessions without a request for too long, forever."""
        while True:
            await asyncio.sleep(min(10.0, self.idle_seconds / 4))
            oldest = time.monotonic() - self.idle_seconds
            for name in [name for name, one in self.open.items() if one.used < oldest and not one.lock.locked()]:
                await self.close(name)

    def keep(self, kind: tuple[Any, ...], state: Any) -> str:
        """Keep a snapshot and return its name."""
        while len(self.snapshots) >= MAX_SNAPSHOTS:
            self.snapshots.popitem(last=False)
        name = secrets.token_urlsafe(24)
        self.snapshots[name] = (kind, state)
        return name

    def kept(self, kind: tuple[Any, ...], name: str) -> Any:
        """Return a snapshot of a session of the same kind. Raises HTTPException 410 or 422."""
        if name not in self.snapshots:
            raise HTTPException(410, f"there is no such snapshot: the server keeps the last {MAX_SNAPSHOTS}")
        self.snapshots.move_to_end(name)
        of, state = self.snapshots[name]
        if of != kind:
            raise HTTPException(422, "the snapshot is of an environment with other arguments")
        return state


async def outcome(session: Session, function: Callable[[], Any]) -> Any:
    """Call a function in a session's thread. Errors of the client become status 409 or 422, faults 503."""
    try:
        return await session.thread.call(function)
    except ToolFault as fault:
        raise HTTPException(503, {"fault": str(fault), "ran": fault.ran}) from None
    except RuntimeError as error:
        raise HTTPException(409, str(error)) from None
    except (ValueError, TypeError, OverflowError) as error:
        raise HTTPException(422, str(error)[:2000]) from None
    except HTTPException:
        raise
    except Exception as error:  # a bug of an environment or a tool: this session is lost, and no other
        raise HTTPException(500, f"{type(error).__name__}: {error}"[:2000]) from None
