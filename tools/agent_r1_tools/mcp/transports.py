"""Bounded transports to an MCP server and back: the pipes of a process, or HTTP.

The SDK's own transports keep a message of any size in memory, and a server may write without end.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from agent_r1_tools.text import printable

MAX_MESSAGE = 4 << 20
"""Bytes of one message of a server."""
MAX_TRAFFIC = 16 * MAX_MESSAGE
"""Bytes that a process may write between two requests."""
MAX_STDERR = 1000
GRACE_SECONDS = 2.0
"""For a server to end by itself, when its input has ended."""
KILL_SECONDS = 1.0
FOLDER = "{folder}"
TOO_LARGE = -31999
"""The code of an error that stands for a result which was dropped; none of JSON-RPC's or MCP's."""


@dataclass(frozen=True)
class Address:
    """The address of a server: a command or a URL."""

    command: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    cwd: str | None = None
    url: str | None = None
    headers: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        parts = urlsplit(self.url or "")  # without what is secret
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}" if self.url else " ".join(self.command)


LOST_STATUS = frozenset([401, 403, 404, 405, 407, 408, 429])
"""HTTP statuses, besides 5xx, that no argument causes and before which no tool has run."""


@dataclass
class Fate:
    """The outcome of one request. `ran`: True if the server may have done what it was asked, as in `ToolFault`."""

    ran: bool | None = True


FATE: ContextVar[Fate] = ContextVar("FATE")
"""The fate of the request that this context makes."""


@dataclass
class Notes:
    """Facts that a transport knows about a connection and the session does not."""

    group: int | None = None  # of the server's processes
    folder: str = ""
    ended: bool = False  # the server writes nothing any more
    problem: str = ""
    stderr: str = ""
    status: int = 0  # of the last request that HTTP refused
    too_large: bool = False
    limit: int = MAX_MESSAGE  # bytes of one message over HTTP
    waiting: set[Any] = field(default_factory=set)  # ids of requests
    traffic: int = 0

    def forget(self) -> None:
        """Note that a call begins."""
        self.status, self.too_large = 0, False

    def why(self) -> str:
        """Return the reason for the loss of the server, if it is known."""
        stderr_note = f"; it wrote: {printable(self.stderr[-MAX_STDERR:].strip())}" if self.stderr.strip() else ""
        status = f"HTTP {self.status}" if self.status else ""
        return (self.problem or status or "it ended or closed the connection") + stderr_note


@asynccontextmanager
async def open_transport(address: Address, notes: Notes) -> AsyncIterator[Any]:
    """Open the two message streams that a session of the SDK takes. Both have ended when the context ends."""
    if address.url is None:
        async with _stdio(address, notes) as streams:
            yield streams
    else:
        from mcp.client.streamable_http import streamable_http_client

        async with _http_client(address, notes) as client:
            options = {"max_sse_event_size": 2 * MAX_MESSAGE}  # our bound comes first
            if "max_sse_event_size" not in inspect.signature(streamable_http_client).parameters:  # before 2.3
                notes.limit, options = 1 << 20, {}
            async with streamable_http_client(address.url, http_client=client, **options) as streams:
                yield streams


# --- a process --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _stdio(address: Address, notes: Notes) -> AsyncIterator[Any]:
    import anyio
    from mcp.client.stdio import get_default_environment

    folder = ""
    if any(FOLDER in word for word in (*address.command, *dict(address.env).values(), address.cwd or "")):
        notes.folder = folder = tempfile.mkdtemp(prefix="agent_r1_mcp_")
    try:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *(word.replace(FOLDER, folder) for word in address.command),
            env=get_default_environment() | {name: text.replace(FOLDER, folder) for name, text in address.env},
            cwd=address.cwd.replace(FOLDER, folder) if address.cwd else None,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            limit=MAX_MESSAGE,
            start_new_session=True,
        )
        notes.group = process.pid
        into, read = anyio.create_memory_object_stream[Any](0)
        write, out = anyio.create_memory_object_stream[Any](0)
        async with anyio.create_task_group() as tasks, into, read, write, out:
            tasks.start_soon(_read, process, into, notes)
            tasks.start_soon(_write, process, out, into, notes)
            tasks.start_soon(_read_stderr, process, notes)
            try:
                yield read, write
            finally:
                with anyio.CancelScope(shield=True):
                    await _end(process)
                    notes.group = None
                tasks.cancel_scope.cancel()
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


async def _read(process: Any, into: Any, notes: Notes) -> None:
    import anyio
    import mcp_types
    from mcp.shared.message import SessionMessage

    try:
        while (line := await _line(process.stdout, notes)) is not None:
            messages: list[Any] = []
            if line == b"":  # it was too long
                error = mcp_types.ErrorData(code=TOO_LARGE, message="the result is too large")
                messages = [mcp_types.JSONRPCError(jsonrpc="2.0", id=id, error=error) for id in notes.waiting]
                notes.waiting.clear()
            else:
                with suppress(ValueError, RecursionError):  # no message: something that it prints
                    messages = [mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False)]
                    if not hasattr(messages[0], "method"):
                        notes.waiting.discard(messages[0].id)
            for message in messages:
                await into.send(SessionMessage(message))
    except (anyio.ClosedResourceError, anyio.BrokenResourceError, OSError):
        pass  # the session is over
    finally:
        notes.ended = True
        await into.aclose()


async def _line(stream: asyncio.StreamReader, notes: Notes) -> bytes | None:
    """Read the next line with its end. Return b"" if it is too long, None at the end or for an endless line."""
    dropped = False
    while notes.traffic <= MAX_TRAFFIC:
        try:
            line = await stream.readuntil(b"\n")
            notes.traffic += len(line)
            return b"" if dropped else line
        except asyncio.LimitOverrunError as error:
            dropped = True
            notes.traffic += len(await stream.readexactly(max(1, error.consumed)))
        except asyncio.IncompleteReadError:
            return None
    notes.problem, notes.too_large = f"it wrote more than {MAX_TRAFFIC >> 20} MiB at one request", True
    return None


async def _write(process: Any, out: Any, into: Any, notes: Notes) -> None:
    try:
        async for message in out:
            line = message.message.model_dump_json(by_alias=True, exclude_unset=True) + "\n"
            if hasattr(message.message, "method") and getattr(message.message, "id", None) is not None:
                notes.waiting.add(message.message.id)
                notes.traffic = 0
            process.stdin.write(line.encode())
            await process.stdin.drain()
    except OSError:
        notes.ended = True
        await into.aclose()  # or its requests would wait for ever


async def _read_stderr(process: Any, notes: Notes) -> None:
    while piece := await process.stderr.read(1 << 16):
        notes.stderr = (notes.stderr + piece.decode(errors="replace"))[-MAX_STDERR:]


async def _end(process: Any) -> None:
    """Let a server end by itself. Then end it and the processes that it started."""
    process.stdin.close()
    for seconds, number in ((GRACE_SECONDS, signal.SIGTERM), (KILL_SECONDS, signal.SIGKILL)):
        await _ended(process, seconds)
        signal_group(process.pid, number)
        if process.returncode is not None:
            signal_group(process.pid, signal.SIGKILL)  # what it has left behind
            break
    await _ended(process, GRACE_SECONDS)
    process._transport.close()  # its pipes, which a process that survived might hold open; there is no public way


async def _ended(process: Any, seconds: float) -> None:
    """Wait for the end of a process. `wait` would also wait for the end of its pipes."""
    end = asyncio.get_running_loop().time() + seconds
    while process.returncode is None and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(0.01)


def signal_group(group: int, number: int) -> None:
    """Send a signal to a server's processes."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


# --- HTTP -------------------------------------------------------------------------------------------------------------


def _http_client(address: Address, notes: Notes) -> Any:
    """Make a client that stops reading at a bound. It rejects compressed answers: they can unpack to any length."""
    import httpx2

    class Stream(httpx2.AsyncByteStream):
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for piece in self.inner:
                size += len(piece)
                if size > notes.limit:
                    notes.too_large = True
                    raise httpx2.StreamError("the result is too large")
                yield piece

        async def aclose(self) -> None:
            await self.inner.aclose()

    class Bounded(httpx2.AsyncHTTPTransport):
        async def handle_async_request(self, request: Any) -> Any:
            fate = FATE.get(None) or Fate()  # the SDK hands the caller's context on
            if request.method == "DELETE":  # the end of a session, for which a server that hangs isn't waited
                request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), GRACE_SECONDS)
            try:
                response = await super().handle_async_request(request)
            except (httpx2.ConnectError, httpx2.ConnectTimeout):
                fate.ran = False
                raise
            if request.method == "POST" and response.status_code >= 400:
                notes.status = response.status_code
                if response.status_code in LOST_STATUS:
                    fate.ran = None if response.status_code != 429 else False
            if response.headers.get("content-encoding", "identity") != "identity":
                raise httpx2.DecodingError("a compressed answer, which was not asked for")
            response.stream = Stream(response.stream)
            return response

    headers: Mapping[str, str] = dict(address.headers) | {"accept-encoding": "identity"}
    return httpx2.AsyncClient(transport=Bounded(), headers=headers, timeout=httpx2.Timeout(30.0, read=None))
