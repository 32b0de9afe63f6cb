"""The routes of the server; docs/server.md lists them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response

import agent_r1
from agent_r1.server import wire
from agent_r1.server.guard import Guard
from agent_r1.server.sessions import Sessions, outcome
from agent_r1.server.wire import json_response
from agent_r1.tool_env import ToolEnv
from agent_r1_tools.http_limits import Form, read_form


async def read(request: Request, form: type[Form]) -> Form:
    """Read the body of a request; none is an empty object. Raises HTTPException 422."""
    return read_form(form, await request.body() or b"{}")


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
        return json_response({"ids": list(sessions.ids), "sessions": used, "max_sessions": max_sessions})

    @app.get("/splits")
    async def splits(env_id: str) -> Response:
        if env_id not in sessions.ids:
            raise HTTPException(404, f"this server has no {env_id!r:.100}; it has {', '.join(sessions.ids)}")
        fixed = {name: value for name, value in sessions.env_kwargs.items() if name != "split"}
        counts = await asyncio.to_thread(agent_r1.task_counts, env_id, fixed)
        return json_response({"splits": counts})

    @app.post("/sessions", status_code=201)
    async def create(request: Request) -> Response:
        name, session = await sessions.create(await read(request, wire.NewSession))
        return json_response({"session": name, **wire.about(session.env)}, 201)

    @app.delete("/sessions/{name}")
    async def close(name: str) -> Response:
        sessions.find(name)
        await sessions.close(name)
        return json_response({})

    @app.get("/sessions/{name}")
    async def state(name: str) -> Response:
        session = sessions.find(name)
        async with session.lock:
            return json_response(await outcome(session, lambda: wire.state_of(session.env)))

    @app.post("/sessions/{name}/reset")
    async def reset(name: str, request: Request) -> Response:
        return await answer(name, await read(request, wire.Reset), lambda env, asked: wire.reset(env, asked))

    @app.post("/sessions/{name}/step")
    async def step(name: str, request: Request) -> Response:
        return await answer(name, await read(request, wire.Step), lambda env, asked: wire.step(env, asked))

    @app.post("/sessions/{name}/cut_off")
    async def cut_off(name: str, request: Request) -> Response:
        return await answer(name, await read(request, wire.Numbered), lambda env, _: env.cut_off())

    @app.post("/sessions/{name}/snapshot")
    async def snapshot(name: str, request: Request) -> Response:
        kind = sessions.find(name).kind
        asked = await read(request, wire.Numbered)
        return await answer(name, asked, lambda env, _: {"snapshot": sessions.keep(kind, env.get_state())})

    @app.post("/sessions/{name}/restore")
    async def restore(name: str, request: Request) -> Response:
        asked, session = await read(request, wire.Restore), sessions.find(name)
        kept = sessions.kept(session.kind, asked.snapshot)

        def act(env: ToolEnv, _: wire.Restore) -> dict[str, Any]:
            env.set_state(kept)
            return wire.state_of(env)

        return await answer(name, asked, act)

    @app.post("/sessions/{name}/fork", status_code=201)
    async def fork(name: str) -> Response:
        session = sessions.find(name)
        async with session.lock:
            state = await outcome(session, session.env.get_state)
        other_name, other = await sessions.open_session(session.kind)
        await outcome(other, lambda: other.env.set_state(state))
        return json_response({"session": other_name, **wire.about(other.env)}, 201)

    async def answer(name: str, asked: Form, act: Callable[[ToolEnv, Form], Any]) -> Response:
        """Act once for each number, in the session's thread."""
        session = sessions.find(name)
        number = getattr(asked, "number", None)
        async with session.lock:
            if number is None or number != session.number:
                session.answer = await outcome(session, lambda: act(session.env, asked))
                session.number = number
            session.used = time.monotonic()
            return json_response(session.answer)

    for path, mounted in mounts:
        app.mount(path, mounted)
    return Guard(app, token)
