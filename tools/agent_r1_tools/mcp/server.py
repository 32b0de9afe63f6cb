"""MCP servers, and their tools as `Tool`s: through the official SDK, `mcp`.

A server is a process that is started for every episode (stdio), or a URL (streamable HTTP), where an episode has a
session. A lost server, a broken connection and a missing answer are infrastructure errors. The server's answer to the
call itself, also an error, is the tool result.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shlex
import threading
import time
import warnings
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import metadata
from typing import Any, Literal

from agent_r1_tools.mcp.connection import Connection, Late, Lost
from agent_r1_tools.mcp.offers import Offer, read_offer, result_text
from agent_r1_tools.mcp.transports import TOO_LARGE, Address
from agent_r1_tools.schemas import checker
from agent_r1_tools.text import as_text, clean_text, encodable, printable
from agent_r1_tools.tool import DEFAULT_MAX_RESULT_CHARS, DEFAULT_TIMEOUT, Tool, ToolFault, ToolResult

CHECKED = ("2.0", "2.1", "2.2", "2.3")
"""The series of the SDK that this was checked with."""
MAX_TOOLS = 128
END_SECONDS = 15.0
MISSING = 'tools of MCP servers need version 2 of the package mcp: pip install "agent-r1[mcp]"'
SESSIONS = ("episode", "replay", "shared")


class MCPServer:
    """A server of the Model Context Protocol: `tools()` are what a policy can call.

    Args:
        command: starts it, as a list or as one line; it talks over its standard input and output. A word `{folder}`,
            here or in `env` or `cwd`, stands for an empty folder which every session has for itself.
        url: where it is, for streamable HTTP. One of `command` and `url`.
        env: environment variables of the process, beside a few harmless ones such as PATH: no keys of this process.
        cwd: the folder in which it starts.
        headers: sent with every request over HTTP.
        session: "episode": every episode has its own session (and process), whose state is not known: there are no
            snapshots, and a fault ends the episode. "replay": its calls are made again in a new session, and answered
            as before: for a server that does the same again, and nothing outside of itself. "shared": the server keeps
            nothing between calls: one session serves all episodes.
        fixed: arguments that the policy neither sees nor chooses, by name. May be changed between calls.
        timeout: seconds that a call may take. One that takes longer is a failed call where the server still answers, or
            a new session does; else a fault.
        start_timeout: seconds to begin a session, and for calls that are made again in it.
        max_result_chars: where results are cut.

    Raises:
        ImportError: the SDK is missing.
        TypeError, ValueError: arguments that make no server.
    """

    def __init__(
        self,
        command: str | Sequence[str] | None = None,
        *,
        url: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        headers: Mapping[str, str] | None = None,
        session: Literal["episode", "replay", "shared"] = "episode",
        fixed: Mapping[str, Any] | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        start_timeout: float = 30.0,
        max_result_chars: int = DEFAULT_MAX_RESULT_CHARS,
    ) -> None:
        _check_sdk()
        if (command is None) == (url is None):
            raise ValueError("an MCP server needs exactly one of command and url")
        if url is not None and (not url.startswith(("http://", "https://")) or env or cwd):
            raise ValueError(f"an MCP server's url begins with http:// or https://, without env or cwd; got {url!r}")
        words = shlex.split(command) if isinstance(command, str) else list(command or ())
        if url is None and (not words or headers or not all(isinstance(word, str) and word for word in words)):
            raise ValueError(f"an MCP server's command is a program with its arguments, without headers; got {command}")
        if session not in SESSIONS:
            raise ValueError(f"session must be one of {', '.join(map(repr, SESSIONS))}, got {session!r}")
        for name, seconds in (("timeout", timeout), ("start_timeout", start_timeout)):
            if not 0 < seconds < math.inf:
                raise ValueError(f"{name} must be a positive number of seconds, got {seconds!r}")
        place = None if cwd is None else os.fspath(cwd)
        self.address = Address(tuple(words), _frozen(env), place, url, _frozen(headers))
        self.session = session
        self.fixed = dict(fixed or {})
        self.timeout, self.start_timeout, self.max_result_chars = float(timeout), float(start_timeout), max_result_chars
        self._known: dict[str, frozenset[str]] = {}  # the arguments of each tool
        self._connection: Connection | None = None
        self._log: list[Any] = []  # the calls of the session, with digests of the results
        self._abandon: Any = None  # called when this object is no longer in use
        self._locks: dict[int, threading.RLock] = {}

    def tools(
        self, only: Collection[str] | None = None, *, skip: Collection[str] = (), prefix: str = ""
    ) -> list[MCPTool]:
        """Return the server's tools in its order. The server is asked once per process.

        Args:
            only: the names of those to take, as the server knows them. None: all.
            skip: the names of those to leave out.
            prefix: put before every name, so that two servers don't offer the same one.

        Raises:
            ToolFault: the server doesn't start, or doesn't answer.
            ValueError: it has no such tools, or too many, or some that can't be taken; the message names them.
        """
        listed = self._listed()
        names = [tool.name for tool in listed]
        shown = clean_text(printable(" ".join(", ".join(names).split())), 1000)
        unknown = [name for name in (*(only or ()), *skip) if name not in names]
        if unknown:
            raise ValueError(f"{self} has no tool {', '.join(map(repr, unknown))}; it has {shown or 'none'}")
        taken = [tool for tool in listed if (only is None or tool.name in only) and tool.name not in skip]
        if len(taken) > MAX_TOOLS:
            problem = f"{self} offers {len(taken)} tools, more than {MAX_TOOLS}"
            raise ValueError(f"{problem}; choose some with only=[...]: {shown}")
        tools: list[MCPTool] = []
        problems: list[str] = []
        for tool in taken:
            try:
                offer = read_offer(tool, prefix, self.fixed)
                if any(offer.name == other.name for other in tools):
                    raise ValueError("another tool has this name too")
                tools.append(MCPTool(self, offer))
            except (TypeError, ValueError, RecursionError) as error:
                problems.append(clean_text(printable(f"{tool.name!r} ({error})"), 300))
        if problems:
            shown = clean_text("; ".join(problems), 2000)
            raise ValueError(f"these tools of {self} cannot be used; leave them out with skip=[...]: {shown}")
        self._known = {tool.name: frozenset(tool.input_schema.get("properties", {})) for tool in listed}
        return tools

    def call(self, name: str, arguments: Mapping[str, Any] | None = None) -> ToolResult:
        """Call a tool of the server in the running session, also one that the policy doesn't have: to set up an
        episode, say, or to judge it.

        The result's `content` are its texts, `data` is its structured content, or {"error": kind}. Raises ToolFault.
        """
        fixed = {key: value for key, value in self.fixed.items() if key in self._known.get(name, (key,))}
        try:
            sent = json.loads(encodable(json.dumps(dict(arguments or {}) | fixed, ensure_ascii=False, allow_nan=False)))
        except (TypeError, ValueError, RecursionError) as error:
            return _failed("bad_arguments", f"the arguments can't be sent: {error}")
        if self.session == "shared":
            with self._lock:
                connection = self._connected()
            return self._exchange(connection, name, sent, [])
        with self._lock:
            return self._exchange(self._connected(), name, sent, self._log)

    def close(self) -> None:
        """End the session and the process. A later call starts a new one."""
        with self._lock:
            self._end()
            self._log = []

    def __str__(self) -> str:
        return f"the MCP server {clean_text(str(self.address), 200)!r}"

    # ------------------------------------------------------------------ for its tools

    def get_state(self) -> Any:
        """Return the calls of the session, which are its state. Raises RuntimeError if they cannot be made again."""
        if self.session == "shared":
            return None
        if self.session == "episode" and self._log:
            raise RuntimeError(f"the state of {self} isn't known; session='replay' makes its calls again")
        return list(self._log)

    def set_state(self, state: Any) -> None:
        """Return to a session in which these calls were made (None: no calls). They are made when they are needed."""
        if self.session != "shared" and self._log != (state or []):
            with self._lock:
                self._end()
                self._log = list(state or [])

    def renew(self) -> None:
        """Leave the session to a call that still runs in it."""
        connection, self._connection = self._connection, None
        self._locks, self._log = {}, []
        if connection is not None:
            self._abandon()

    # ------------------------------------------------------------------ inside

    @property
    def _lock(self) -> threading.RLock:
        return self._locks.setdefault(os.getpid(), threading.RLock())  # of a fork it may be locked for ever

    def _listed(self) -> list[Any]:
        if self.address not in _LISTS:
            try:
                with self._lock:
                    _LISTS[self.address] = self._connected().list_tools(self.start_timeout)
            except (Lost, Late) as error:
                late = f"it didn't list its tools within {self.start_timeout:g} seconds"
                raise ToolFault(f"{self}: {late if isinstance(error, Late) else error}") from None
            except (ValueError, _mcp_error()) as error:
                raise ValueError(f"{self} doesn't list its tools: {clean_text(printable(str(error)), 500)}") from None
        return _LISTS[self.address]

    def _connected(self) -> Connection:
        """Return the session, after the calls of the log were made in it."""
        if self._connection is not None and self._connection.alive:
            return self._connection
        if self._log and self.session == "episode":
            raise ToolFault(f"{self}: its session is lost")
        self._end()
        connection = self._start()
        end = time.monotonic() + self.start_timeout
        for name, sent, digest in self._log:
            if time.monotonic() > end:
                connection.end()
                raise ToolFault(f"{self}: its calls were not made again within {self.start_timeout:g} seconds")
            if self._digest(connection, name, sent) != digest:
                connection.end()
                raise ToolFault(f"{self} answered {printable(name)} otherwise when the call was made again")
        self._connection = connection
        self._abandon = weakref.finalize(self, connection.abandon)
        return connection

    def _start(self) -> Connection:
        try:
            return Connection(self.address, self.start_timeout)
        except Lost as error:
            raise ToolFault(f"{self} doesn't start: {error}", ran=False) from None

    def _digest(self, connection: Connection, name: str, sent: dict[str, Any]) -> str:
        try:
            return _digest(self._ask(connection, name, sent))
        except (Lost, Late) as error:
            connection.end()
            raise ToolFault(f"{self}: lost while calls were made again: {error}") from None

    def _exchange(self, connection: Connection, name: str, sent: dict[str, Any], log: list[Any]) -> ToolResult:
        if self.session == "episode":
            log.append(name)  # from now on its state isn't known
        try:
            result = self._ask(connection, name, sent)
        except Lost as error:
            with self._lock:
                if self.session != "episode" and self._connection is connection:
                    self._end()  # there it may have been half done, or the session may be gone for good
            raise ToolFault(f"{self}: {error}", ran=error.ran) from None
        except Late as late:
            result = _failed("timeout", f"no result within {self.timeout:g} seconds")
            if not late.args[0] or self.session == "replay":
                return self._anew(connection, result)
            return result
        if connection.notes.too_large and not connection.alive:
            return self._anew(connection, result)
        if self.session == "replay":
            log.append([name, sent, _digest(result)])
        return result

    def _anew(self, connection: Connection, failed: ToolResult) -> ToolResult:
        """Return the result of a call that the server could not finish, and begin a new session.

        Raises ToolFault if no new session begins: then the server is down, and the call is not the cause."""
        with self._lock:
            if self._connection is connection:  # or others have seen it, too
                connection.abandon()
                self._end()
                if self.session == "episode":
                    self._log = []
                try:
                    self._connected()
                except ToolFault as fault:
                    raise ToolFault(str(fault), ran=True) from None
        outcome = {"episode": "; what it kept is lost", "replay": "; all is as it was before the call", "shared": ""}
        return replace(failed, content=f"{failed.content}. The server was started anew{outcome[self.session]}")

    def _ask(self, connection: Connection, name: str, sent: dict[str, Any]) -> ToolResult:
        """Make a call and return its result. Raises Lost and Late."""
        from mcp_types import INVALID_PARAMS

        too_large = f"the result is larger than {connection.notes.limit >> 20} MiB; ask for less"
        try:
            result = connection.call(name, sent, self.timeout)
        except Lost:
            if connection.notes.too_large:  # an SDK before 2.3 ends the session there
                return _failed("exception", too_large)
            raise
        except _mcp_error() as error:
            if error.code == TOO_LARGE or connection.notes.too_large:
                return _failed("exception", too_large)
            return _failed("bad_arguments" if error.code == INVALID_PARAMS else "exception", str(error))
        except ValueError as error:
            return _failed("bad_result", f"the server's answer can't be read: {clean_text(str(error), 500)}")
        content = result_text(result.content, result.structured_content)
        return ToolResult(content, ok=not result.is_error, data=result.structured_content)

    def _end(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.end()
            self._abandon.detach()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_connection": None, "_locks": {}, "_abandon": None}


class MCPTool(Tool):
    """A tool of an `MCPServer`, which makes it; all tools of a server share its session."""

    timeout_is_fault = True  # the server has its own time limit

    def __init__(self, server: MCPServer, offer: Offer) -> None:
        self.server, self.offer = server, offer
        self.name, self.description, self.parameters = offer.name, offer.description, offer.parameters
        self.concurrency_safe, self.repeatable = server.session == "shared", offer.repeatable
        self.max_result_chars = server.max_result_chars
        self.timeout = 3 * server.timeout + 4 * (server.start_timeout + END_SECONDS)

    def validate(self, arguments: Any) -> str | None:
        """Return an error for arguments that are clearly wrong, else None. The server checks the rest."""
        if not isinstance(arguments, dict):
            return super().validate(arguments)
        problems = checker(self.offer.checked).problems(arguments)
        return f"{'; '.join(problems)}. {self.expected()}" if problems else None

    def execute(self, arguments: dict[str, Any]) -> ToolResult:
        return self.server.call(self.offer.remote, arguments)

    def get_state(self) -> Any:
        return self.server.get_state()

    def set_state(self, state: Any) -> None:
        self.server.set_state(state)

    def new_session(self) -> bool:
        self.server.renew()
        return True

    def close(self) -> None:
        self.server.close()


def _failed(kind: str, problem: str) -> ToolResult:
    return ToolResult(f"Error: {problem}", ok=False, data={"error": kind})


def _digest(result: ToolResult) -> str:
    return hashlib.sha256(as_text([result.content, result.ok, result.data]).encode(errors="replace")).hexdigest()


def _frozen(pairs: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((str(name), str(text)) for name, text in (pairs or {}).items()))


@cache
def _check_sdk() -> None:
    try:
        import mcp  # noqa: F401
        import mcp_types  # noqa: F401  # since version 2
    except ImportError as error:
        raise ImportError(MISSING) from error
    logging.getLogger("mcp").addHandler(logging.NullHandler())  # it prints tracebacks of what we report
    version = metadata.version("mcp")
    if version.rpartition(".")[0] not in CHECKED:
        warnings.warn(f"mcp {version} wasn't checked; {CHECKED[0]} to {CHECKED[-1]} were", stacklevel=3)


def _mcp_error() -> Any:
    from mcp import MCPError

    return MCPError


_LISTS: dict[Address, list[Any]] = {}
