"""An environment server: other machines and programs play the environments over HTTP; docs/server.md has the routes.

    python -m agent_r1.serve AgentR1/MultihopWorld-v0 --port 8080

Every session is one environment on its own thread. A client chooses among the served ids and changes their limits and
rewards. What could read files or import code is fixed by whoever starts the server. Nothing from the network is
unpickled: snapshots stay here, under names that cannot be guessed.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import ipaddress
import json
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import gymnasium as gym
import numpy as np

import agent_r1
from agent_r1.arguments import ArgumentError
from agent_r1.ids import find_environment
from agent_r1.loops import new_messages
from agent_r1.remote import TOKEN_VARIABLE
from agent_r1.text.chat import encode_turn
from agent_r1.text.tokenizers import fingerprint, load_tokenizer
from agent_r1.tool_env import ToolEnv
from agent_r1_tools import ToolFault
from agent_r1_tools.threads import OneThread

try:
    import uvicorn
    from fastapi import FastAPI, HTTPException, Request, Response
    from pydantic import BaseModel, ConfigDict, ValidationError

    from agent_r1_tools.http_limits import Impatient
except ImportError as missing:
    needed = 'the environment server needs fastapi and uvicorn: pip install "agent-r1[server]"'
    if __name__ == "__main__":
        raise SystemExit(needed) from None
    raise ImportError(needed) from missing

MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_HELD_BYTES = 64 * 1024 * 1024
"""The maximum of all bodies that are being read."""
BODY_SECONDS = 30.0
"""The time in which a body must arrive."""
MAX_SNAPSHOTS = 1024
"""Snapshots of all sessions. The one that was not used for the longest time is dropped for a new one."""
MAX_CONTEXT_TOKENS = 262_144
ALLOWED = (
    "split", "dialect", "max_turns", "max_context_tokens", "max_action_tokens", "process_reward", "unfinished_reward",
)  # fmt: skip
"""The arguments of an environment that a client may give."""

Form = TypeVar("Form", bound=BaseModel)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class NewSession(_Body):
    """The body of POST /sessions."""

    env_id: str
    kwargs: dict[str, Any] = {}
    tokenizer: str | None = None  # a fingerprint; None for a session of texts or messages


class Numbered(_Body):
    """A request that must not act twice: a client that lost the answer sends it again under the same number."""

    number: int | None = None


class Reset(Numbered):
    """The body of POST /sessions/NAME/reset."""

    seed: int | None = None
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


# ------------------------------------------------------------------ sessions


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


# ------------------------------------------------------------------ the application


def create_app(
    env_ids: Sequence[str],
    env_kwargs: Mapping[str, Any] | None = None,
    *,
    tokenizers: Sequence[str] = (),
    token: str | None = None,
    max_sessions: int = 64,
    idle_seconds: float = 600.0,
    openenv: bool = False,
    mcp: bool = False,
) -> Any:
    """Create the server as an ASGI application.

    Args:
        env_ids: the served ids, or "module:id".
        env_kwargs: arguments of every environment, which no client can change.
        tokenizers: names or folders of tokenizers that clients may use.
        token: clients must send it; None: only clients of this machine, no browsers.
        max_sessions: bound on open sessions.
        idle_seconds: a session without a request for so long is closed.
        openenv: also serve the first id to OpenEnv's clients, under /openenv.
        mcp: also serve the first id's tools to MCP clients, at /mcp.

    Raises ArgumentError for an id or arguments that are none, and ImportError without an extra.
    """
    sessions = Sessions(env_ids, env_kwargs or {}, tokenizers, max_sessions, idle_seconds)
    mounts: list[tuple[str, Any]] = []
    if openenv:
        from agent_r1.adapters.openenv import openenv_app

        mounts.append(("/openenv", openenv_app(env_ids[0], dict(env_kwargs or {}), max_sessions=max_sessions)))
    if mcp:
        from mcp.server.transport_security import TransportSecuritySettings

        from agent_r1.adapters.mcp import mcp_app

        open_to_all = TransportSecuritySettings(enable_dns_rebinding_protection=False)  # `Guard` checks every request
        kwargs = dict(env_kwargs or {})
        mounts.append(("", mcp_app(env_ids[0], kwargs, max_sessions=max_sessions, transport_security=open_to_all)))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for _, mounted in mounts:
                await stack.enter_async_context(mounted.router.lifespan_context(mounted))
            task = asyncio.create_task(sessions.close_idle())
            yield
            task.cancel()
            for name in list(sessions.open):
                await sessions.close(name)

    app = FastAPI(title="agent_r1 environment server", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False

    @app.get("/health")
    async def health() -> Response:
        used = len(sessions.open) + sessions.opening
        return _json({"ids": list(sessions.ids), "sessions": used, "max_sessions": max_sessions})

    @app.get("/splits")
    async def splits(env_id: str) -> Response:
        if env_id not in sessions.ids:
            raise HTTPException(404, f"this server has no {env_id!r:.100}; it has {', '.join(sessions.ids)}")
        fixed = {name: value for name, value in sessions.env_kwargs.items() if name != "split"}
        counts = await asyncio.to_thread(agent_r1.task_counts, env_id, fixed)
        return _json({"splits": counts})

    @app.post("/sessions", status_code=201)
    async def create(request: Request) -> Response:
        name, session = await sessions.create(await _read(request, NewSession))
        return _json({"session": name, **_about(session.env)}, 201)

    @app.delete("/sessions/{name}")
    async def close(name: str) -> Response:
        sessions.find(name)
        await sessions.close(name)
        return _json({})

    @app.get("/sessions/{name}")
    async def state(name: str) -> Response:
        session = sessions.find(name)
        async with session.lock:
            return _json(await _outcome(session, lambda: _state(session.env)))

    @app.post("/sessions/{name}/reset")
    async def reset(name: str, request: Request) -> Response:
        return await answer(name, await _read(request, Reset), lambda env, asked: _reset(env, asked))

    @app.post("/sessions/{name}/step")
    async def step(name: str, request: Request) -> Response:
        return await answer(name, await _read(request, Step), lambda env, asked: _step(env, asked))

    @app.post("/sessions/{name}/cut_off")
    async def cut_off(name: str, request: Request) -> Response:
        return await answer(name, await _read(request, Numbered), lambda env, _: env.cut_off())

    @app.post("/sessions/{name}/snapshot")
    async def snapshot(name: str, request: Request) -> Response:
        kind = sessions.find(name).kind
        asked = await _read(request, Numbered)
        return await answer(name, asked, lambda env, _: {"snapshot": sessions.keep(kind, env.get_state())})

    @app.post("/sessions/{name}/restore")
    async def restore(name: str, request: Request) -> Response:
        asked, session = await _read(request, Restore), sessions.find(name)
        kept = sessions.kept(session.kind, asked.snapshot)

        def act(env: ToolEnv, _: Restore) -> dict[str, Any]:
            env.set_state(kept)
            return _state(env)

        return await answer(name, asked, act)

    @app.post("/sessions/{name}/fork", status_code=201)
    async def fork(name: str) -> Response:
        session = sessions.find(name)
        async with session.lock:
            state = await _outcome(session, session.env.get_state)
        other_name, other = await sessions.open_session(session.kind)
        await _outcome(other, lambda: other.env.set_state(state))
        return _json({"session": other_name, **_about(other.env)}, 201)

    async def answer(name: str, asked: Form, act: Callable[[ToolEnv, Form], Any]) -> Response:
        """Act once for each number, in the session's thread."""
        session = sessions.find(name)
        number = getattr(asked, "number", None)
        async with session.lock:
            if number is None or number != session.number:
                session.answer = await _outcome(session, lambda: act(session.env, asked))
                session.number = number
            session.used = time.monotonic()
            return _json(session.answer)

    for path, mounted in mounts:
        app.mount(path, mounted)
    return Guard(app, token)


def _about(env: ToolEnv) -> dict[str, Any]:
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


def _state(env: ToolEnv) -> dict[str, Any]:
    episode = env.episode
    return {
        "tokens": env._observation().tolist(),
        "messages": env.messages,
        "turn": episode.turn,
        "over": episode.over,
        "max_new_tokens": env.room,
    }


def _reset(env: ToolEnv, asked: Reset) -> dict[str, Any]:
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


def _step(env: ToolEnv, asked: Step) -> dict[str, Any]:
    given = [value for value in (asked.tokens, asked.text, asked.message) if value is not None]
    if len(given) != 1:
        raise ValueError("give one of tokens, text and message")
    if asked.text is not None:
        span = encode_turn(env, asked.text, env.room)
    elif asked.message is not None:
        span = env.encode_reply(asked.message)
    else:
        span = env.action_space.read(np.array(asked.tokens, np.int64))  # type: ignore[attr-defined]
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


async def _outcome(session: Session, function: Callable[[], Any]) -> Any:
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


async def _read(request: Request, form: type[Form]) -> Form:
    try:
        return form.model_validate_json(await request.body() or b"{}")
    except (ValidationError, RecursionError) as error:
        detail: Any = "the body is nested too deeply"
        if isinstance(error, ValidationError):
            detail = error.errors(include_url=False, include_input=False, include_context=False)[:5]
        raise HTTPException(422, detail) from None


def _json(content: Any, status: int = 200) -> Response:
    """Write numbers so that Python reads the same ones, NaN and infinity included."""
    return Response(json.dumps(content, separators=(",", ":")), status, media_type="application/json")


class Guard:
    """The checks before every request of an application: who asks, and how large the body is.

    Args:
        app: an ASGI application.
        token: what a client must send as `Authorization: Bearer TOKEN`. None: the client must name a loopback host, and
            must not be a page in a browser, which sends its origin.
    """

    def __init__(self, app: Any, token: str | None) -> None:
        self._app, self._token = app, token
        self._held = 0  # bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        if problem := self._refusal(headers):
            await self._refuse(scope, send, *problem)
        elif scope["type"] == "websocket":
            await self._app(scope, receive, send)
        else:
            await self._with_body(scope, receive, send)

    def _refusal(self, headers: Mapping[bytes, bytes]) -> tuple[int, str] | None:
        if self._token is not None:
            given = headers.get(b"authorization", b"")
            right = hmac.compare_digest(given, b"Bearer " + self._token.encode())
            return None if right else (401, f"wrong or missing token: send Authorization: Bearer ${TOKEN_VARIABLE}")
        if b"origin" in headers:
            return 403, "pages in browsers are not served without a token"
        if not is_loopback(headers.get(b"host", b"").decode("latin-1")):
            return 403, "without a token only this machine is served: ask for 127.0.0.1"
        return None

    async def _refuse(self, scope: Any, send: Any, status: int, problem: str) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": problem})
            return
        body = json.dumps({"detail": problem}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"connection", b"close")]})
        await send({"type": "http.response.body", "body": body})

    async def _with_body(self, scope: Any, receive: Any, send: Any) -> None:
        """Read the whole body within its limits, then let the application answer."""
        data = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        return  # the client has gone
                    data += message.get("body", b"")
                    self._held += len(message.get("body", b""))
                    if len(data) > MAX_BODY_BYTES:
                        await self._refuse(scope, send, 413, f"the body is larger than {MAX_BODY_BYTES} bytes")
                        return
                    if self._held > MAX_HELD_BYTES:
                        await self._refuse(scope, send, 429, "too many bodies are being read")
                        return
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            await self._refuse(scope, send, 408, f"the body did not come within {BODY_SECONDS:g} seconds")
            return
        finally:
            self._held -= len(data)
        read = False

        async def receive_again() -> Any:
            nonlocal read
            if read:
                return await receive()
            read = True
            return {"type": "http.request", "body": bytes(data), "more_body": False}

        await self._app(scope, receive_again, send)


def is_loopback(host: str) -> bool:
    """Return whether a host, with or without port, is this machine itself, by name or address."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def main(words: Sequence[str] | None = None) -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(prog="python -m agent_r1.serve", description="Serve environments over HTTP.")
    parser.add_argument("env_ids", nargs="+", metavar="ENV_ID", help='an id, or "module:id"')
    parser.add_argument("--env-kwargs", type=json.loads, default={}, help="arguments of all environments, as JSON")
    parser.add_argument("--tokenizer", nargs="+", default=[], help="names or folders that clients may use")
    parser.add_argument("--host", default="127.0.0.1", help="another address than loopback needs a token")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--token-file", type=Path, help=f"its first line is the token; default: ${TOKEN_VARIABLE}")
    parser.add_argument("--max-sessions", type=int, default=64)
    parser.add_argument("--idle-seconds", type=float, default=600.0, help="after which a silent session is closed")
    parser.add_argument("--openenv", action="store_true", help="also serve the first id to OpenEnv's clients")
    parser.add_argument("--mcp", action="store_true", help="also serve the first id's tools to MCP clients")
    args = parser.parse_args(words)
    token = os.environ.get(TOKEN_VARIABLE) or None
    if args.token_file is not None:
        token = args.token_file.read_text(encoding="utf-8").partition("\n")[0].strip()
        if not token:
            raise SystemExit(f"--token-file {args.token_file} is empty")
    if token is None and not is_loopback(f"[{args.host}]" if ":" in args.host else args.host):
        raise SystemExit(f"--host {args.host} is reached by others: set {TOKEN_VARIABLE}, or --token-file")
    if args.max_sessions < 1 or args.idle_seconds <= 0:
        raise SystemExit("--max-sessions must be at least 1, and --idle-seconds above 0")
    try:
        app = create_app(
            args.env_ids, args.env_kwargs, tokenizers=args.tokenizer, token=token, max_sessions=args.max_sessions,
            idle_seconds=args.idle_seconds, openenv=args.openenv, mcp=args.mcp,
        )  # fmt: skip
    except (ArgumentError, ImportError) as error:
        raise SystemExit(str(error)) from None
    print(f"http://{args.host}:{args.port} serves {', '.join(args.env_ids)}", flush=True)
    uvicorn.run(app, host=args.host, port=args.port, log_level="warning", http=Impatient)


if __name__ == "__main__":
    main()
