"""Sessions: environments on their threads, and snapshots of their episodes."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, cast

import gymnasium as gym
from fastapi import HTTPException

import agent_r1
from agent_r1.arguments import ArgumentError
from agent_r1.ids import find_environment
from agent_r1.remote_answers import MAX_REWARD
from agent_r1.server.wire import NewSession, about, to_json
from agent_r1.text.tokenizers import fingerprint, load_tokenizer
from agent_r1.tool_env import ToolEnv
from agent_r1_tools import ToolFault
from agent_r1_tools.threads import OneThread

MAX_CONTEXT_TOKENS = 262_144
CLOSE_SECONDS = 2.0
"""The time for which an answer waits until an environment is closed."""
GONE = "there is no such session: it was closed, was idle for too long, or never opened"
ALLOWED = (
    "split", "dialect", "max_turns", "max_context_tokens", "max_action_tokens", "process_reward", "unfinished_reward",
)  # fmt: skip
"""The arguments of an environment that a client may give."""


@dataclass(eq=False)
class Session:
    """An environment, its thread, and the last numbered request with its answer."""

    kind: tuple[Any, ...]  # equal for sessions that can continue each other's snapshots
    env: ToolEnv
    thread: OneThread
    used: float = field(default_factory=time.monotonic)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    number: int | None = None
    request: bytes = b""  # a digest of its route and body
    answer: tuple[int, str] = (200, "{}")

    async def call(self, function: Callable[[], Any]) -> Any:
        """Call a function in the thread; see `run`."""
        return await run(self.thread, function, self.closed)

    async def once(self, number: int | None, request: bytes, function: Callable[[], str]) -> tuple[int, str]:
        """Return the status and the text of an answer. Under a number, the function is called the first time only.

        Raises HTTPException 409 for an older number, or one of another request, and 404 if the session is closed.
        """
        if number is not None and self.number is not None and number <= self.number:
            if (number, request) == (self.number, self.request):
                return self.answer
            problem = f"number {number} belongs to an earlier request with another route or body"
            raise HTTPException(409, f"{problem}; continue with {self.number + 1}")
        try:
            answer = 200, await self.call(function)
        except HTTPException as error:
            if self.closed.is_set():
                raise
            answer = error.status_code, to_json({"detail": error.detail})
        if number is not None:
            self.number, self.request, self.answer = number, request, answer
        return answer


class Sessions:
    """All sessions of a server.

    Args:
        env_ids: the served ids.
        env_kwargs: arguments of every environment, which no client can change.
        tokenizers: names or folders of the tokenizers that clients may use, besides bytes and the shipped policies'.
        max_sessions: bound on open sessions.
        idle_seconds: a session without a request for so long is closed.

    Every id is made once. Raises ArgumentError if that fails, for an unknown id and for a tokenizer that cannot be
    loaded, and ImportError without an extra.
    """

    def __init__(
        self, env_ids: Sequence[str], env_kwargs: Mapping[str, Any], tokenizers: Sequence[str], max_sessions: int,
        idle_seconds: float,
    ) -> None:  # fmt: skip
        self.env_kwargs, self.max_sessions, self.idle_seconds = dict(env_kwargs), max_sessions, idle_seconds
        if "tokenizer" in env_kwargs:
            raise ArgumentError("--env-kwargs must not contain tokenizer: a client chooses one of --tokenizer")
        self.ids = {name: find_environment(name).id for name in env_ids}
        self.open: dict[str, Session] = {}
        self.opening = 0  # sessions whose environment is being made
        self.ending: set[asyncio.Task[None]] = set()  # of closed sessions, until their environment is closed
        self.tokenizers: dict[str, Any] = {}
        for name in [None, *tokenizers, *self._policies()]:
            try:
                tokenizer = load_tokenizer(name)
            except (OSError, ValueError) as error:
                raise ArgumentError(f"--tokenizer {name}: {error}") from None
            self.tokenizers.setdefault(fingerprint(tokenizer), tokenizer)
        for env_id in self.ids:
            try:
                self._make((env_id, next(iter(self.tokenizers)), "{}"))[0].close()
            except (ValueError, TypeError, OSError) as error:
                raise ArgumentError(f"{env_id}: {error}"[:2000]) from None

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

    @property
    def count(self) -> int:
        """The number of environments: of open sessions, and of those that are being made or closed."""
        return len(self.open) + self.opening + len(self.ending)

    async def create(self, asked: NewSession) -> tuple[str, Session, dict[str, Any]]:
        """Open a session. Return its name, itself and its limits.

        Raises HTTPException if something is not served, or without room.
        """
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
        _check_rewards(asked.kwargs)
        if asked.tokenizer is not None and asked.tokenizer not in self.tokenizers:
            names = ", ".join(str(getattr(t, "name_or_path", "bytes")) for t in self.tokenizers.values())
            raise HTTPException(
                422, f"no tokenizer here equals yours; there are {names}; start the server with --tokenizer NAME"
            )
        tokenizer = asked.tokenizer or next(iter(self.tokenizers))
        kind = (asked.env_id, tokenizer, json.dumps(asked.kwargs, sort_keys=True))
        return await self.open_session(kind)

    async def open_session(self, kind: tuple[Any, ...]) -> tuple[str, Session, dict[str, Any]]:
        """Make the environment of a session, in the session's thread."""
        if self.count >= self.max_sessions:
            remedy = "start the server with a larger --max-sessions, or try another server, or later"
            raise HTTPException(429, f"all {self.max_sessions} sessions are in use; {remedy}")
        thread = OneThread()
        self.opening += 1
        try:
            env, limits = await run(thread, lambda: self._make(kind))
        except HTTPException as error:
            if error.status_code == 422:  # ArgumentError, missing data or package
                raise HTTPException(422, f"{kind[0]}: {error.detail}") from None
            raise
        finally:
            self.opening -= 1
        name = secrets.token_urlsafe(24)
        self.open[name] = session = Session(kind, env, thread)
        return name, session, limits

    def _make(self, kind: tuple[Any, ...]) -> tuple[ToolEnv, dict[str, Any]]:
        """Make an environment. Return it and its limits."""
        env_id, tokenizer, kwargs = kind
        given = {"tokenizer": self.tokenizers[tokenizer], **self.env_kwargs, **json.loads(kwargs)}
        env = cast(ToolEnv, gym.make(self.ids[env_id], **given).unwrapped)
        try:
            env._count_tasks()
            return env, about(env)
        except BaseException:
            env.close()
            raise

    def find(self, name: str) -> Session:
        """Return an open session. Raises HTTPException 404."""
        session = self.open.get(name)
        if session is None:
            raise HTTPException(404, GONE)
        session.used = time.monotonic()
        return session

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[Session]:
        """Wait for the earlier requests of an open session. Raises HTTPException 404, also if it closes meanwhile."""
        session = self.find(name)
        async with session.lock:
            if session.closed.is_set():
                raise HTTPException(404, GONE)
            try:
                yield session
            finally:
                session.used = time.monotonic()

    def close(self, name: str) -> asyncio.Task[None]:
        """Close an open session: its requests get status 404.

        It counts until the returned task has closed its environment, after a call that still runs.
        """
        session = self.open.pop(name)
        session.closed.set()
        task = asyncio.create_task(_end(session))
        self.ending.add(task)
        task.add_done_callback(self.ending.discard)
        return task

    async def close_idle(self) -> None:
        """Close sessions without a request for too long, forever. One whose tool hangs is no exception."""
        while True:
            await asyncio.sleep(min(10.0, self.idle_seconds / 4))
            oldest = time.monotonic() - self.idle_seconds
            for name in [name for name, session in self.open.items() if session.used < oldest]:
                self.close(name)


async def _end(session: Session) -> None:
    with suppress(HTTPException):  # a bug of the environment: the session is over anyway
        await run(session.thread, session.env.close)


def _check_rewards(kwargs: Mapping[str, Any]) -> None:
    """Raise HTTPException 422 for a reward that could make a sum infinite."""
    weights = kwargs.get("process_reward")
    given = list(weights.values()) if isinstance(weights, dict) else [weights]
    for value in [*given, kwargs.get("unfinished_reward")]:
        if isinstance(value, int | float) and not abs(value) <= MAX_REWARD:
            limit = f"numbers from -{MAX_REWARD:g} to {MAX_REWARD:g}"
            raise HTTPException(422, f"process_reward and unfinished_reward must be {limit}, got {value!r:.40}")


async def run(thread: OneThread, function: Callable[[], Any], closed: asyncio.Event | None = None) -> Any:
    """Call a function in a thread.

    Raises HTTPException for every error of the function (see `refusal`), and 404 as soon as `closed` is set, although
    the function still runs then.
    """

    def caught() -> tuple[Any, BaseException | None]:
        try:
            return function(), None
        except BaseException as error:  # asyncio takes no StopIteration, and SystemExit would end the server
            return None, error

    running = asyncio.ensure_future(thread.call(caught))
    waiting: list[asyncio.Future[Any]] = [running]
    if closed is not None:
        waiting.append(asyncio.ensure_future(closed.wait()))
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise HTTPException(404, GONE)
        result, error = running.result()
    finally:
        for future in waiting:
            future.cancel()
    if error is not None:
        raise refusal(error) from None
    return result


def refusal(error: BaseException) -> HTTPException:
    """Return the answer for an error: 409 or 422 for mistakes of the client, 503 for faults, 500 for bugs."""
    if isinstance(error, HTTPException):
        return error
    if isinstance(error, ToolFault):
        return HTTPException(503, {"fault": str(error), "ran": error.ran})
    if isinstance(error, RuntimeError):
        return HTTPException(409, str(error)[:2000])
    if isinstance(error, ValueError | TypeError | OverflowError | ImportError | FileNotFoundError):
        return HTTPException(422, str(error)[:2000])
    return HTTPException(500, f"{type(error).__name__}: {error}"[:2000])  # this session is lost, and no other
