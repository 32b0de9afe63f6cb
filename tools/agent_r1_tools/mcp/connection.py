"""A session with an MCP server. All sessions share one event loop."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from agent_r1_tools.event_loop import event_loop
from agent_r1_tools.mcp.transports import FATE, LOST_STATUS, Address, Fate, Notes, open_transport, signal_group
from agent_r1_tools.running import describe
from agent_r1_tools.text import printable

PING_SECONDS = 3.0
MAX_PAGES = 100
MAX_LISTED = 10_000


class Lost(Exception):
    """A server that is gone or never answered. `ran`: True if it may have executed the request, as in `ToolFault`."""

    def __init__(self, reason: str, ran: bool | None = True) -> None:
        super().__init__(reason)
        self.ran = ran


class Late(Exception):
    """A result that did not arrive in time. `args[0]`: True if the session continues."""


class Connection:
    """A session with one server, from beginning to end. Any thread may make its calls.

    Raises Lost where it doesn't begin within `seconds`.
    """

    def __init__(self, address: Address, seconds: float) -> None:
        self.address, self.pid = address, os.getpid()
        self.notes = Notes()
        self._session: Any = None
        self._problem = ""
        self._stop = asyncio.Event()
        self._loop = event_loop("mcp-sessions")
        self._task: asyncio.Task[None] | None = None
        self._wait(self._begin(seconds))

    @property
    def alive(self) -> bool:
        """True if the session belongs to this process and the server seems to run."""
        running = self._task is not None and not self._task.done() and not self.notes.ended
        return running and self.pid == os.getpid()

    def call(self, name: str, arguments: dict[str, Any], seconds: float) -> Any:
        """Call a tool of the server and return its answer, a `CallToolResult` of the SDK.

        Raises: Lost; Late; `MCPError`, the server's own; ValueError for an answer that can't be read.
        """
        return self._wait(self._call(name, arguments, seconds))

    def list_tools(self, seconds: float) -> list[Any]:
        """Return the tools that the server offers. Raises as `call` does."""
        return self._wait(self._list(seconds))

    def end(self) -> None:
        """End the session, and the server where it is a process of ours. Waits for that."""
        if self._task is not None and self.pid == os.getpid():
            self._wait(self._finish(self._task))

    def abandon(self) -> None:
        """End it at once without waiting: when it is garbage, or at exit."""
        if self.pid == os.getpid():
            if self.notes.group is not None:
                signal_group(self.notes.group, signal.SIGKILL)
            if self.notes.folder:
                shutil.rmtree(self.notes.folder, ignore_errors=True)
            with suppress(RuntimeError):  # there is no loop any more
                self._loop.call_soon_threadsafe(self._stop.set)

    def _wait(self, coroutine: Any) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result()

    # ------------------------------------------------------------------ on the loop

    async def _begin(self, seconds: float) -> None:
        self._task = asyncio.create_task(self._live(begun := asyncio.Event()))
        beginning = asyncio.create_task(begun.wait())
        await asyncio.wait({self._task, beginning}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        beginning.cancel()
        if self._session is None:
            if not self._task.done():
                self.notes.problem = f"it didn't begin within {seconds:g} seconds"
            await self._finish(self._task)
            raise Lost(self._why())

    async def _live(self, begun: asyncio.Event) -> None:
        """Run the session in one task: the scopes of anyio must be left in the task that entered them."""
        from mcp import Client
        from mcp_types import METHOD_NOT_FOUND, UNSUPPORTED_PROTOCOL_VERSION

        for mode in ("legacy", "auto"):  # the newest protocol has no sessions: it is taken where there is no other
            try:
                transport = open_transport(self.address, self.notes)
                async with Client(transport, mode=mode, cache=None) as client:
                    self._session = client.session
                    begun.set()
                    await self._stop.wait()
                return
            except BaseException as error:
                self._problem = _words(error)
                if self._session is not None or mode == "auto" or self._stop.is_set():
                    return
                if _code(error) not in (METHOD_NOT_FOUND, UNSUPPORTED_PROTOCOL_VERSION):
                    return
                self.notes = Notes()

    async def _finish(self, task: asyncio.Task[None]) -> None:
        self._stop.set()
        if self._session is None:
            task.cancel()
        _, late = await asyncio.wait({task}, timeout=10)
        if late:
            self.abandon()
            task.cancel()

    async def _call(self, name: str, arguments: dict[str, Any], seconds: float) -> Any:
        from mcp_types import CallToolRequest, CallToolRequestParams, CallToolResult

        self.notes.forget()
        request = CallToolRequest(params=CallToolRequestParams(name=name, arguments=arguments))
        return await self._ask(request, CallToolResult, seconds)

    async def _ask(self, request: Any, kind: Any, seconds: float, ping: bool = True) -> Any:
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        if not self.alive:
            raise Lost(self._why(), ran=None)
        assert self._task is not None
        FATE.set(fate := Fate())
        asked = asyncio.create_task(self._session.send_request(request, kind, request_read_timeout_seconds=seconds))
        # The SDK's time begins when the request is written, which it may never be.
        await asyncio.wait({asked, self._task}, timeout=seconds + 1, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            asked.cancel()
            if self._task.done():
                raise Lost(self._why())
            raise Late(ping and await self._answers())
        try:
            return asked.result()
        except MCPError as error:
            if error.code == REQUEST_TIMEOUT:
                raise Late(ping and await self._answers()) from None
            lost = error.code == CONNECTION_CLOSED and not self.notes.too_large
            if lost or fate.ran is not True or self.notes.status >= 500 or self.notes.status in LOST_STATUS:
                raise Lost(self._why(), fate.ran) from None
            raise
        except asyncio.CancelledError:
            raise Lost(self._why(), fate.ran) from None
        except (ConnectionError, RuntimeError, OSError) as error:
            raise Lost(describe(error), fate.ran) from None

    async def _answers(self) -> bool:
        """Return True if the server still answers."""
        from mcp import MCPError
        from mcp_types import EmptyResult, PingRequest

        try:
            await self._ask(PingRequest(), EmptyResult, PING_SECONDS, ping=False)
        except MCPError:
            return True  # it doesn't know pings
        except (Lost, Late, ValueError):
            return False
        return True

    async def _list(self, seconds: float) -> list[Any]:
        from mcp_types import ListToolsRequest, ListToolsResult, PaginatedRequestParams

        tools: list[Any] = []
        cursor: str | None = None
        end = self._loop.time() + seconds
        for _ in range(MAX_PAGES):
            params = None if cursor is None else PaginatedRequestParams(cursor=cursor)
            left = max(0.1, end - self._loop.time())
            page = await self._ask(ListToolsRequest(params=params), ListToolsResult, left)
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                return tools
            if len(tools) > MAX_LISTED:
                break
        raise ValueError(f"its list of tools has no end: {len(tools)} so far")

    def _why(self) -> str:
        return self.notes.why() if self.notes.problem or not self._problem else f"{self._problem}; {self.notes.why()}"


def _leaves(error: BaseException) -> list[BaseException]:
    inside = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return [leaf for one in inside for leaf in _leaves(one)] or [error]


def _words(error: BaseException) -> str:
    return printable(describe(_leaves(error)[0]))


def _code(error: BaseException) -> Any:
    """Return the number of the server's error."""
    return next((leaf.code for leaf in _leaves(error) if hasattr(leaf, "code")), None)
