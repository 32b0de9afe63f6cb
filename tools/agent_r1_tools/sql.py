"""`schema` and `query`: SQLite databases for a policy to read.

Queries run in separate processes (`sql_server.py`), which can only read. Rows, characters,
time and memory are limited. A database is a script that makes it, or a file, which is opened read-only.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from agent_r1_tools import child_process
from agent_r1_tools.tool import Tool, ToolFault, ToolResult

SERVER = Path(__file__).with_name("sql_server.py")
MAX_QUERY_CHARS = 10_000
SHOWN_ROWS = 30
SHOWN_CELL = 100
"""Characters of the longest cell that is shown whole."""
LONG = 600.0
"""Seconds after which a process hangs. It bounds its own processor time, which may take long on a busy machine."""
TOO_LONG = f"the query is longer than {MAX_QUERY_CHARS} characters"


@dataclass(frozen=True)
class Database:
    """A database: the SQL that makes it, in memory, or the path of a file. One of the two."""

    script: str | None = None
    file: str | None = None

    def __post_init__(self) -> None:
        if (self.script is None) == (self.file is None):
            raise ValueError("a database needs exactly one of script and file")

    @property
    def request(self) -> dict[str, str]:
        return {"script": self.script} if self.script is not None else {"file": str(self.file)}


def same_result(
    database: Database, gold: str, answer: str, mode: str = "rows", others: Sequence[Database] = ()
) -> tuple[bool, str]:
    """Compare a query with the gold query, on the database and on all others. Return the verdict and the reason.

    Without others it has to do so on a part of the database too, on which the gold query gives another result (the
    first found of eight that lack some rows of every table): a constant is no answer. "why" is then "", or "no copy"
    where the gold query gives the same on all of them.

    Args:
        mode: "ordered": rows in this order; "rows": in any; "set": in any, and each once. Columns may come in any order
            where there are at most four, but not in "set". Numbers are compared to nine digits.

    Raises:
        ToolFault: the gold query or a database doesn't work, or the process that runs them.
    """
    if len(answer) > MAX_QUERY_CHARS:
        return False, TOO_LONG
    reply = ask(["same", database.request, [other.request for other in others], gold, answer, mode])
    if "error" in reply:
        if answer != gold:  # whose doing is it?
            same_result(database, gold, gold, mode, others)
            return False, reply["error"]
        raise ToolFault(reply["error"])
    return reply["same"], reply.get("why", "" if reply.get("copies") else "no copy")


class SchemaTool(Tool):
    """Shows the tables of `database`, or one of them: columns, types, keys."""

    name = "schema"
    description = "List the tables of the database with their columns, types and keys, or one table."
    parameters = {
        "type": "object",
        "properties": {"table": {"type": "string", "description": "The name of one table; all where it is left out."}},
        "additionalProperties": False,
    }
    timeout = LONG
    timeout_is_fault = True

    def __init__(self, database: Database | None = None) -> None:
        self.database = database

    def execute(self, arguments: dict[str, Any]) -> ToolResult:
        tables = _answer(ask(["schema", _known(self.database).request]))["tables"]
        wanted = arguments.get("table")
        names = [table["name"] for table in tables]
        shown = [table for table in tables if wanted is None or table["name"].lower() == wanted.lower()]
        if wanted is not None and not shown:
            return ToolResult(f"There is no table {wanted[:64]!r}. Tables: {', '.join(names) or 'none'}.", ok=False)
        return ToolResult("\n".join(map(_line, shown)), data={"tables": [table["name"] for table in shown]})


class QueryTool(Tool):
    """Runs a SELECT on `database` and shows the first rows."""

    name = "query"
    description = f"Run a SELECT in SQLite's dialect and read the result, at most {SHOWN_ROWS} rows of it."
    parameters = {
        "type": "object",
        "properties": {"sql": {"type": "string", "description": "One SELECT statement."}},
        "required": ["sql"],
        "additionalProperties": False,
    }
    timeout = LONG
    timeout_is_fault = True

    def __init__(self, database: Database | None = None) -> None:
        self.database = database

    def execute(self, arguments: dict[str, Any]) -> ToolResult:
        sql = arguments["sql"]
        if len(sql) > MAX_QUERY_CHARS:
            return ToolResult(f"The query was not run: {TOO_LONG}.", ok=False)
        reply = ask(["query", _known(self.database).request, sql, SHOWN_ROWS, SHOWN_CELL])
        if "error" in reply:
            return ToolResult(f"Error: {reply['error']}.", ok=False)
        rows = [" | ".join(row) for row in (reply["columns"], *reply["rows"])]
        count = f"{'more than ' * reply['more']}{len(reply['rows'])} row{'s' * (len(reply['rows']) != 1)}"
        return ToolResult("\n".join([*rows, f"({count})"]), data={"rows": reply["rows"], "more": reply["more"]})


def _known(database: Database | None) -> Database:
    if database is None:
        raise ToolFault("no database was given to the tool")
    return database


def _answer(reply: dict[str, Any]) -> dict[str, Any]:
    """Return the reply to a request that the policy does not influence."""
    if "error" in reply:
        raise ToolFault(reply["error"])
    return reply


def _line(table: dict[str, Any]) -> str:
    keys = {column: f" -> {other}.{to}" if to else f" -> {other}" for column, other, to in table["keys"]}
    columns = [
        " ".join([name, kind, "PRIMARY KEY" if primary else ""]).strip().replace("  ", " ") + keys.get(name, "")
        for name, kind, primary in table["columns"]
    ]
    return f"{table['name']}({', '.join(columns)})"


# --- the processes ----------------------------------------------------------------------------------------------------

_idle: list[subprocess.Popen[bytes]] = []
_lanes = threading.BoundedSemaphore(os.cpu_count() or 1)


def ask(request: list[Any]) -> dict[str, Any]:
    """Let an idle process answer a request, or a new one: what `sql_server.answer` returns.

    A request that ends its process, by time or memory or a bug of SQLite, has {"error"}. Memory counts only in a new
    process: in another one earlier requests may have taken it. Raises ToolFault where the process is killed from
    outside twice.
    """
    line = json.dumps(request).encode() + b"\n"
    killed = 0
    with _lanes:
        process = _idle_one()
        while killed < 2:
            new = process is None
            process = process or child_process.start([sys.executable, "-I", "-S", str(SERVER)])
            reply, status = None, 0
            try:
                reply = child_process.exchange(process, line, _read)
                if not reply.get("memory"):
                    _idle.append(process)
                    return reply
                child_process.end(process)  # what it has taken it doesn't give back
            except child_process.Ended as ended:
                status = ended.status
            if status == -signal.SIGPROF:
                return {"error": "it takes too long; ask for less"}
            if status in (-signal.SIGKILL, -signal.SIGTERM):
                killed += 1
            elif new:
                return reply or {"error": f"it ended SQLite (status {status})"}
            process = None
    raise ToolFault("the process that runs SQL was killed twice")


def _idle_one() -> subprocess.Popen[bytes] | None:
    with suppress(IndexError):  # there is no idle one; a test before would be another thread's chance
        while True:
            process = _idle.pop()
            if process.poll() is None:
                return process
            child_process.end(process)
    return None


def _read(pipe: IO[bytes]) -> dict[str, Any]:
    reply = bytearray()
    while not reply.endswith(b"\n"):
        part = os.read(pipe.fileno(), 1 << 16)
        if not part:
            raise EOFError
        reply += part
    parsed: dict[str, Any] = json.loads(reply)
    return parsed


def _end_all() -> None:
    while _idle:
        child_process.end(_idle.pop())


def _forget() -> None:
    """Forget the processes after a fork: they are the parent's."""
    global _lanes
    _lanes = threading.BoundedSemaphore(os.cpu_count() or 1)
    for process in _idle:
        child_process.disown(process)
    _idle.clear()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_forget)
