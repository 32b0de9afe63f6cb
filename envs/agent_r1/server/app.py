"""The routes of the server; docs/server.md lists them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, HTTPException, Request, Response

import agent_r1
from agent_r1.server import wire
from agent_r1.server.guard import Guard
from agent_r1.server.sessions import CLOSE_SECONDS, Sessions, run
from agent_r1.server.snapshots import Snapshots
from agent_r1.server.wire import respond, to_json
from agent_r1.tool_env import ToolEnv
from agent_r1_tools.http_limits import Form, read_form
from agent_r1_tools.threads import OneThread

Asked = TypeVar("Asked", bound=wire.Numbered)


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

    Every id is made once, with these arguments. Raises ArgumentError if that fails, for an unknown id and for a
    tokenizer that cannot be loaded, and ImportError without an extra.
    """
    sessions = Sessions(env_ids, env_kwargs or {}, tokenizers, max_sessions, idle_seconds)
    snapshots = Snapshots(lambda name: name in sessions.open)
    mounts: list[tuple[str, Any]] = []
    if openenv:
        from agent_r1.adapters.openenv import openenv_app

        mounts.append(("/openenv", openenv_app(env_ids[0], dict(env_kwargs or {}), max_sessions=max_sessions)))
    if mcp:
        from agent_r1.adapters.mcp import mcp_app  # first: without the SDK it names the extra

        from mcp.server.transport_security import TransportSecuritySettings  # isort: skip

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
            if ending := {sessions.close(name) for name in list(sessions.open)} | sessions.ending:
                await asyncio.wait(ending, timeout=CLOSE_SECONDS)

    app = FastAPI(title="agent_r1 environment server", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False

    @app.get("/health")
    async def health() -> Response:
        about = {"ids": list(sessions.ids), "sessions": sessions.count, "max_sessions": max_sessions}
        return respond(to_json(about))

    @app.get("/splits")
    async def splits(env_id: str) -> Response:
        if env_id not in sessions.ids:
            raise HTTPException(404, f"this server has no {env_id!r:.100}; it has {', '.join(sessions.ids)}")
        fixed = {name: value for name, value in sessions.env_kwargs.items() if name != "split"}
        counts = await run(OneThread(), lambda: agent_r1.task_counts(env_id, fixed))
        return respond(to_json({"splits": counts}))

    @app.post("/sessions", status_code=201)
    async def create(request: Request) -> Response:
        name, _, about = await sessions.create(await read(request, wire.NewSession))
        return respond(to_json({"session": name, **about}), 201)

    @app.delete("/sessions/{name}")
    async def close(name: str) -> Response:
        sessions.find(name)
        await asyncio.wait({sessions.close(name)}, timeout=CLOSE_SECONDS)
        return respond("{}")

    @app.get("/sessions/{name}")
    async def state(name: str) -> Response:
        async with sessions.turn(name) as session:
            return respond(await session.call(lambda: to_json(wire.state_of(session.env))))

    @app.post("/sessions/{name}/reset")
    async def reset(name: str, request: Request) -> Response:
        return await answer(name, request, wire.Reset, wire.reset)

    @app.post("/sessions/{name}/step")
    async def step(name: str, request: Request) -> Response:
        return await answer(name, request, wire.Step, wire.step)

    @app.post("/sessions/{name}/cut_off")
    async def cut_off(name: str, request: Request) -> Response:
        return await answer(name, request, wire.Numbered, lambda env, _: env.cut_off())

    @app.post("/sessions/{name}/snapshot")
    async def snapshot(name: str, request: Request) -> Response:
        kind = sessions.find(name).kind

        def act(env: ToolEnv, _: wire.Numbered) -> dict[str, Any]:
            return {"snapshot": snapshots.keep(name, kind, env.get_state())}

        return await answer(name, request, wire.Numbered, act)

    @app.post("/sessions/{name}/restore")
    async def restore(name: str, request: Request) -> Response:
        kind = sessions.find(name).kind

        def act(env: ToolEnv, asked: wire.Restore) -> dict[str, Any]:
            env.set_state(snapshots.get(kind, asked.snapshot))
            return wire.state_of(env)

        return await answer(name, request, wire.Restore, act)

    @app.post("/sessions/{name}/fork", status_code=201)
    async def fork(name: str, request: Request) -> Response:
        kind = sessions.find(name).kind
        await read(request, wire.Empty)
        async with sessions.turn(name) as session:
            state = await session.call(session.env.get_state)
        other_name, other, about = await sessions.open_session(kind)
        try:
            await other.call(lambda: other.env.set_state(state))
        except BaseException:
            if other_name in sessions.open:
                sessions.close(other_name)
            raise
        return respond(to_json({"session": other_name, **about}), 201)

    async def answer(name: str, request: Request, form: type[Asked], act: Callable[[ToolEnv, Asked], Any]) -> Response:
        """Act in the session's thread, once for each number."""
        sessions.find(name)
        asked, body = await read(request, form), await request.body()
        digest = hashlib.sha256(request.scope["path"].encode() + b"\n" + body).digest()
        async with sessions.turn(name) as session:
            status, text = await session.once(asked.number, digest, lambda: to_json(act(session.env, asked)))
        return respond(text, status)

    for path, mounted in mounts:
        app.mount(path, mounted)
    return Guard(app, token)
