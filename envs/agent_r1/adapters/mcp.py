"""An environment as an MCP server: a client plays an episode with its tools; docs/agent_loops.md shows whole programs.

    python -m agent_r1.adapters.mcp AgentR1/ArithmeticWorld-v0 --task-index 3

Besides the environment's tools there are `question`, which returns the task, and `submit`, which takes the answer and
returns the return of the episode. `say` is for tasks with a user. If the environment has a tool of that name, ours has
the prefix `episode_`. Made for mcp 2.0 to 2.3.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import agent_r1
from agent_r1.arguments import ArgumentError, json_object
from agent_r1.loops import new_messages, prompt_messages
from agent_r1.rewards import find_answers
from agent_r1.tool_env import ToolEnv
from agent_r1_tools import ToolFault

try:
    import mcp_types as types
    from mcp import MCPError
    from mcp.server.lowlevel import Server
    from mcp.server.stdio import stdio_server
    from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
except ImportError as error:
    raise ImportError(f'{error}: agent_r1.adapters.mcp needs pip install "agent-r1[mcp]", with mcp 2') from error

OWN = {
    "question": ("Return the task. Call this first.", None),
    "submit": ("Give the final answer. This ends the episode.", "answer"),
    "say": ("Say something to the user, and return the reply.", "message"),
}
"""Tools besides the environment's: description, and the name of the argument, which is a text."""
OVER = "The episode is over."
SESSION_ID = "mcp-session-id"


def mcp_server(
    env_id: str, env_kwargs: dict[str, Any] | None = None, *, task_index: int | None = None, max_sessions: int = 64
) -> Server[Any]:
    """Return a low-level server of the SDK with the tools of an environment.

    Over HTTP every session of a client has its own episode. Over stdio there is one episode.

    Args:
        env_id: a `ToolEnv`, also as "module:id".
        env_kwargs: its arguments, for example `split`.
        task_index: the task of every episode. None: each has a random one.
        max_sessions: episodes at the same time; calls of a further session fail.

    Raises:
        ArgumentError: there is no such environment, or no such task.
    """
    make = agent_r1.factory(env_id, env_kwargs)
    first = cast(ToolEnv, make().unwrapped)
    count = first._count_tasks()
    if task_index is not None and not 0 <= task_index < count:
        raise ArgumentError(f"task_index must be from 0 to {count - 1} in split {first.split!r}, got {task_index}")
    ready = [first]
    episodes: dict[str | None, _Episode] = {}

    def episode_of(context: Any) -> _Episode:
        key = None
        if context.request is not None:  # HTTP
            key = context.request.headers.get(SESSION_ID)
            if key is None or context.protocol_version not in HANDSHAKE_PROTOCOL_VERSIONS:
                problem = "an episode needs a session: use version 2025-11-25 of the protocol, or an earlier one"
                raise MCPError(types.INVALID_REQUEST, problem)
        if key not in episodes:
            if len(episodes) >= max_sessions:
                raise MCPError(types.INTERNAL_ERROR, f"{max_sessions} sessions are open; end one, or come back later")
            episodes[key] = _Episode(make, ready.pop() if ready else None, task_index)
            if key is not None:  # the SDK's place for the end of a session
                context.session._connection.exit_stack.push_async_callback(partial(end, key))
        return episodes[key]

    async def end(key: str | None) -> None:
        episodes.pop(key).close()

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        yield
        if None in episodes:  # over stdio
            await end(None)

    async def list_tools(context: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=await episode_of(context).run(_tools))

    async def call_tool(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        episode = episode_of(context)
        return await episode.run(lambda env: episode.call(env, params.name, params.arguments or {}))

    version = agent_r1.__version__
    return Server("agent-r1", version=version, lifespan=lifespan, on_list_tools=list_tools, on_call_tool=call_tool)


def mcp_app(
    env_id: str,
    env_kwargs: dict[str, Any] | None = None,
    *,
    task_index: int | None = None,
    max_sessions: int = 64,
    **options: Any,
) -> Any:
    """Return the server as a Starlette app with streamable HTTP under /mcp; see `mcp_server` for the arguments.

    An app that mounts it must also enter its `router.lifespan_context(app)`. `options` are those of the SDK's
    `streamable_http_app`, such as `host` and `transport_security`. A session ends when its client ends it, and with mcp
    2.3 after half an hour without a request.
    """
    server = mcp_server(env_id, env_kwargs, task_index=task_index, max_sessions=max_sessions)
    server.add_request_handler("server/discover", types.RequestParams, _no_discovery)
    return server.streamable_http_app(**options)


async def _no_discovery(context: Any, params: Any) -> Any:
    """Refuse the protocol without sessions, so that clients begin a session instead."""
    raise MCPError(types.METHOD_NOT_FOUND, "this server has sessions; begin with initialize")


class _Episode:
    """An episode and its return so far. Its environment is made, used and closed in one thread."""

    def __init__(self, make: Callable[[], Any], env: ToolEnv | None, task_index: int | None) -> None:
        self.make, self.env, self.task_index = make, env, task_index
        self.begun = False
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="agent_r1-mcp")
        self.total = 0.0
        self.last: dict[str, Any] = {}
        self.over = False

    async def run(self, function: Callable[[ToolEnv], Any]) -> Any:
        """Call a function with the environment, without holding up other sessions."""

        def called() -> Any:
            if self.env is None:
                self.env = cast(ToolEnv, self.make().unwrapped)
            if not self.begun:  # after a fault, the next call tries again
                try:
                    self.env.reset(options={} if self.task_index is None else {"task_index": self.task_index})
                except ToolFault as fault:
                    raise MCPError(types.INTERNAL_ERROR, f"infrastructure error: {fault}") from None
                self.begun = True
            return function(self.env)

        return await asyncio.get_running_loop().run_in_executor(self.thread, called)

    def close(self) -> None:
        """Close the environment after the calls that run or wait."""

        def closed() -> None:
            if self.env is not None:
                self.env.close()

        self.thread.submit(closed)  # the environment may be made there at this moment
        self.thread.shutdown(wait=False)

    def call(self, env: ToolEnv, name: str, arguments: dict[str, Any]) -> types.CallToolResult:
        """Play a turn with this call. Raises MCPError for an infrastructure error, also at every later call."""
        ok, text = True, OVER
        own = _own(env).get(name)
        if own == "question":
            text = "\n\n".join(message["content"] for message in prompt_messages(env))
        elif not self.over:
            _, reward, terminated, truncated, info = env.step_message(_reply(name, own, arguments))
            self.total, self.last, self.over = self.total + reward, info, terminated or truncated
            ok = all(call["ok"] for call in info["tool_calls"])
            text = "\n\n".join(message["content"] for message in new_messages(env))
        if "fault" in self.last:
            raise MCPError(types.INTERNAL_ERROR, f"infrastructure error: {self.last['fault']}")
        structured = None
        if self.over:
            success, reason = bool(self.last["is_success"]), self.last.get("truncation_reason")
            structured = {"return": self.total, "success": success, "truncation_reason": reason}
            text = f"{text}\n\n{OVER} " if text not in ("", OVER) else f"{OVER} "
            text += f"Return: {self.total:g}. Success: {success}."
        content: list[Any] = [types.TextContent(text=text)]
        return types.CallToolResult(content=content, structured_content=structured, is_error=not ok)


def _tools(env: ToolEnv) -> list[types.Tool]:
    """Return the tools of the environment, and the server's own."""
    tools = [
        types.Tool(name=f["name"], description=f["description"], input_schema=f["parameters"])
        for f in (schema["function"] for schema in env.schemas)
    ]
    for name, own in _own(env).items():
        description, argument = OWN[own]
        schema: dict[str, Any] = {"type": "object", "properties": {}}
        if argument is not None:
            schema |= {"properties": {argument: {"type": "string"}}, "required": [argument]}
        tools.append(types.Tool(name=name, description=description, input_schema=schema))
    return tools


def _own(env: ToolEnv) -> dict[str, str]:
    """Return the keys of `OWN` by the names that they have beside the tools of this environment."""
    own = [name for name in OWN if name != "say" or env._has_user]
    return {f"episode_{name}" if name in env.tools else name: name for name in own}


def _reply(name: str, own: str | None, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the turn of a policy that makes this call. Raises MCPError if an own tool gets no text."""
    if own is None:
        function = {"name": name, "arguments": json.dumps(arguments)}
        return {"role": "assistant", "tool_calls": [{"type": "function", "id": "call", "function": function}]}
    argument = OWN[own][1]
    text = arguments.get(str(argument))
    if not isinstance(text, str) or len(arguments) > 1:
        raise MCPError(types.INVALID_PARAMS, f"{name} takes one argument: {argument} (string)")
    if own == "submit" and not find_answers(text):
        text = f"<answer>{text}</answer>"
    return {"role": "assistant", "content": text}


async def _serve(server: Server[Any]) -> None:
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line: serve one episode over standard input and output."""
    parser = argparse.ArgumentParser(prog="python -m agent_r1.adapters.mcp", description="Serve an episode over stdio.")
    parser.add_argument("env_id", metavar="ENV_ID", help='an id, or "module:id"')
    parser.add_argument("--task-index", type=int, metavar="N", help="the task (default: a random one)")
    parser.add_argument("--split", metavar="S", help="the split of the tasks (default: the environment's)")
    parser.add_argument("--env-kwargs", type=json_object, default={}, metavar="JSON", help="arguments, as JSON")
    args = parser.parse_args(words)
    kwargs = args.env_kwargs | ({"split": args.split} if args.split else {})
    try:
        server = mcp_server(args.env_id, kwargs, task_index=args.task_index)
    except (ValueError, TypeError, OSError, ImportError) as error:  # ArgumentError, missing data or package
        raise SystemExit(str(error)) from None
    asyncio.run(_serve(server))


if __name__ == "__main__":
    main()
