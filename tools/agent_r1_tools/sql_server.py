"""The program that runs SQL which a model wrote, for `sql.py`: a line of JSON in, one out.

It is a separate process, because SQLite cannot limit memory per connection, and some of its functions run long without
a check. The limits of a query: `CPU_SECONDS` and `MEMORY` end the process. Before that, `STEPS` of SQLite's virtual
machine end the query, always at the same place. It is started by its path, and imports only `sql_clock` beside it.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    from agent_r1_tools import sql_clock
else:  # by its bare name: this process has no package, and only Python's own folders
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    import sql_clock

CPU_SECONDS = 1.0
"""The processor time of a query: a backstop for work that `STEPS` cannot see. A gold query may use ten times as much,
and an answer twice as much as the gold query."""
MEMORY = 256 << 20
"""Bytes of address space."""
STEPS = 10_000_000
"""Instructions of SQLite's virtual machine for a query: some tenths of a second. A gold query may use ten times as
many, and an answer twice as many as the gold query."""
EVERY = 10_000
KEPT = 32
"""The number of databases that stay open."""
MUTANTS = 8
"""The number of parts of a database that are tried, to find one on which the gold query's result differs."""
GOLDS = 64
"""Results of gold queries that are kept."""
GOLD_BYTES = 500_000
"""The size of the largest result that is kept. Up to `CHOSEN` numbers of parts are kept, too."""
CHOSEN = 1_000
COPIED = 4 << 20
"""Bytes of the largest file of which a part is made by deleting rows from a copy in memory."""
MAX_ROWS = 100_000
"""Rows of the largest result that is compared."""

LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 1_000_000,  # bytes of a text, a blob or a row
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 20_000,
    sqlite3.SQLITE_LIMIT_COLUMN: 500,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 200,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 50,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 50_000,
    sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 64,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 200,
    sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
ACTIONS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
"""The actions of a query, besides calls of the functions below. SQLite rejects all others when it prepares the query.
FUNCTIONS has no random numbers, and no running clock (`serve`), so that a query has one result. No function reaches
files or the library itself."""
FUNCTIONS = set(
    """abs char coalesce concat concat_ws format glob hex ifnull iif if instr length like likelihood likely unlikely
    lower ltrim max min nullif octet_length printf quote replace round rtrim sign substr substring trim typeof unhex
    unicode upper zeroblob avg count group_concat string_agg sum total median percentile date time datetime julianday
    unixepoch strftime timediff current_date current_time current_timestamp row_number rank dense_rank percent_rank
    cume_dist ntile lag lead first_value last_value nth_value acos acosh asin asinh atan atan2 atanh ceil ceiling cos
    cosh degrees exp floor ln log log10 log2 mod pi pow power radians sin sinh sqrt tan tanh trunc json json_array
    json_array_length json_error_position json_extract json_insert json_object json_patch json_quote json_remove
    json_replace json_set json_type json_valid json_group_array json_group_object -> ->>""".split()
)

Rows = list[tuple[Any, ...]]
_open: dict[str, sqlite3.Connection] = {}
_chosen: dict[str, int | None] = {}
_golds: dict[tuple[sqlite3.Connection, str], tuple[Rows, int, float]] = {}
_steps_left = 0


class Refused(Exception):
    """A query without a result; the message says why."""


def _authorize(action: int, first: str | None, second: str | None, *_: Any) -> int:
    allowed = action in ACTIONS or (action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in FUNCTIONS)
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def _progress() -> bool:
    global _steps_left
    _steps_left -= EVERY
    return _steps_left < 0


def connect(database: dict[str, str], mutant: int | None = None) -> sqlite3.Connection:
    """Open the database of a script or a file, or a part of it.

    `database` is {"script": SQL} or {"file": path}. The connection stays open without its statements: each takes up to
    megabytes, which the next request would lack.

    Raises sqlite3.Error if there is no such database.
    """
    key = json.dumps([database, mutant])
    if key in _open:
        _open[key] = _open.pop(key)  # the last ones used stay
        return _open[key]
    in_file = "file" in database
    if not in_file:
        connection = sqlite3.connect(":memory:", isolation_level=None, cached_statements=0)
        connection.executescript(database["script"])
    else:
        # Immutable: no lock, no journal, not even a file beside it.
        address = f"file:{quote(database['file'])}?mode=ro&immutable=1"
        connection = sqlite3.connect(address, uri=True, cached_statements=0)
        connection.execute("SELECT COUNT(*) FROM sqlite_master")
        if mutant is not None and os.path.getsize(database["file"]) <= COPIED:
            copy = sqlite3.connect(":memory:", isolation_level=None, cached_statements=0)
            connection.backup(copy)
            connection.close()
            connection, in_file = copy, False
    connection.text_factory = lambda data: data.decode("utf-8", "replace")
    connection.execute("PRAGMA temp_store=MEMORY")
    if mutant is not None:
        _lessen(connection, mutant, in_file)
    # Trusted: views may read virtual tables, such as those of full text. What is authorized is so in views, too.
    for pragma in ("query_only=ON", "trusted_schema=ON"):
        connection.execute(f"PRAGMA {pragma}")
    for limit, value in LIMITS.items():
        connection.setlimit(limit, value)
    connection.set_progress_handler(_progress, EVERY)
    connection.set_authorizer(_authorize)
    _open[key] = connection
    while len(_open) > KEPT:
        oldest = _open.pop(next(iter(_open)))
        for gold in [gold for gold in _golds if gold[0] is oldest]:
            del _golds[gold]
        oldest.close()
    return connection


def _lessen(connection: sqlite3.Connection, mutant: int, in_file: bool) -> None:
    """Take some rows out of every table: a fifth of them, or half if the number is odd. Hide the rows behind views if
    they cannot be deleted: in a file, or with virtual tables. Then a query that names `main.` sees all rows, and one
    that names a rowid fails, so neither result equals that of the gold query."""
    tables = "SELECT name FROM main.sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'"
    hide = in_file or connection.execute(f"{tables} AND sql LIKE 'CREATE VIRTUAL%'").fetchone() is not None
    if not hide:
        connection.execute("PRAGMA foreign_keys=OFF")
        for (trigger,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            connection.execute(f"DROP TRIGGER {_name(trigger)}")
    share = 50 if mutant % 2 else 20
    for (table,) in connection.execute(tables).fetchall():
        name = _name(table)
        condition = f"(rowid * 37 + {17 * mutant}) * 61 % 101 >= {share}"
        try:
            if hide:
                connection.execute(f"CREATE TEMP VIEW {name} AS SELECT * FROM main.{name} WHERE {condition}")
                connection.execute(f"SELECT 1 FROM {name} LIMIT 1")
            else:
                connection.execute(f"DELETE FROM {name} WHERE NOT ({condition})")
        except sqlite3.Error:  # a table without rowid stays as it is
            connection.execute(f"DROP VIEW IF EXISTS temp.{name}")


def _name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


@contextmanager
def budget(steps: int, seconds: float) -> Iterator[None]:
    """Limit the steps of SQLite's machine, and the processor seconds of this process, inside this context."""
    global _steps_left
    _steps_left = steps
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def run(
    connection: sqlite3.Connection, query: str, rows: int, steps: int = STEPS, seconds: float = CPU_SECONDS
) -> tuple[list[str], Rows, bool]:
    """Return columns, rows up to a maximum, and True if there are more. Raises Refused or MemoryError."""
    try:
        with budget(steps, seconds):
            cursor = connection.execute(query)
            if cursor.description is None:
                raise Refused("there is no SELECT in it")
            fetched = cursor.fetchmany(rows + 1)
            columns = [column[0] for column in cursor.description]
            cursor.close()
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        text = str(error)
        if text == "out of memory":
            raise MemoryError from None
        if text == "interrupted":
            text = "it takes too long; ask for less"
        elif "prohibited" in text or "not authorized" in text:
            text = f"{text}: only SELECT on the tables that schema shows, without PRAGMA or random numbers"
        raise Refused(text) from None
    return columns, fetched[:rows], len(fetched) > rows


def schema(connection: sqlite3.Connection) -> list[dict[str, Any]]:
    """Return tables and views with their columns and keys. The limits are those of a gold query."""
    connection.set_authorizer(None)
    try:
        query = "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite%'"
        tables = []
        with budget(10 * STEPS, 10 * CPU_SECONDS):
            for (name,) in connection.execute(query).fetchall():
                columns = connection.execute(f"PRAGMA table_info({_name(name)})").fetchall()
                keys = connection.execute(f"PRAGMA foreign_key_list({_name(name)})").fetchall()
                tables.append(
                    {
                        "name": name,
                        "columns": [[column[1], column[2], bool(column[5])] for column in columns],
                        "keys": [[key[3], key[2], key[4]] for key in keys],
                    }
                )
        return tables
    finally:
        connection.set_authorizer(_authorize)


def plain(value: Any) -> Any:
    """Convert a cell for comparison: round a number to nine digits, so that sums in another order are equal, and write
    equal numbers alike."""
    if not isinstance(value, float) or value - value != 0:
        return value
    value = float(f"{value:.9g}")
    return int(value) if value.is_integer() and abs(value) < 2**63 else value


def equal(gold: Rows, rows: Rows, mode: str) -> bool:
    """Return True if two results are equal.

    Args:
        mode: "ordered"; "rows", in any order (as Spider's official script); "set", in any order and each once (BIRD's).
            With up to four columns the order of columns does not matter, except in "set", as in these scripts.
    """
    width = len(gold[0]) if gold else 0
    if any(len(row) != width for row in rows) or (mode != "set" and len(gold) != len(rows)):
        return False
    gold, rows = ([tuple(map(plain, row)) for row in one] for one in (gold, rows))
    orders = itertools.permutations(range(width)) if width <= 4 and mode != "set" else [tuple(range(width))]
    if mode == "ordered":
        return any([tuple(row[place] for place in order) for row in rows] == gold for order in orders)
    # Compare as text: a policy can choose numbers with colliding tuple hashes, which makes a set slow.
    collect: Any = {"rows": Counter, "set": set}[mode]
    wanted = collect(map(repr, gold))
    return any(collect(repr(tuple(row[place] for place in order)) for row in rows) == wanted for order in orders)


def same(database: dict[str, str], others: list[dict[str, str]], gold: str, answer: str, mode: str) -> dict[str, Any]:
    """Compare a query with the gold query, on the database and on others (without others, on a part of it)."""
    places = [connect(one) for one in (database, *others)]
    first, *_ = _gold(places[0], gold)
    if not others:
        key = json.dumps([database, gold, mode])
        if key not in _chosen:
            _chosen[key] = _choose(database, gold, first, mode)
            if len(_chosen) > CHOSEN:
                del _chosen[next(iter(_chosen))]
        if (chosen := _chosen[key]) is not None:
            places.append(connect(database, chosen))
    for place in places:
        wanted, steps, seconds = _gold(place, gold)
        most = MAX_ROWS if mode == "set" else len(wanted)
        try:
            _, rows, more = run(place, answer, most, max(STEPS, 2 * steps), max(CPU_SECONDS, 2 * seconds))
        except Refused as refused:
            return {"same": False, "why": str(refused)}
        if more or not equal(wanted, rows, mode):
            return {"same": False, "why": "another result"}
    return {"same": True, "copies": len(places) - 1}


def _choose(database: dict[str, str], gold: str, first: Rows, mode: str) -> int | None:
    """Return the copy on which the gold query's result differs, if possible not empty; None if there is none."""
    empty = None
    for mutant in range(MUTANTS):
        try:
            result, *_ = _gold(connect(database, mutant), gold)
        except Refused:  # it asks for a rowid, say
            continue
        if not equal(first, result, mode):
            if result:
                return mutant
            empty = mutant if empty is None else empty
    return empty


def _gold(connection: sqlite3.Connection, query: str) -> tuple[Rows, int, float]:
    """Return the gold query's result, steps and processor seconds. A small result is cached."""
    key = (connection, query)
    if key in _golds:
        _golds[key] = _golds.pop(key)
        return _golds[key]
    began = time.process_time()
    try:
        _, rows, more = run(connection, query, MAX_ROWS, 10 * STEPS, 10 * CPU_SECONDS)
    except Refused as refused:
        raise Refused(f"gold: {refused}") from None
    if more:
        raise Refused(f"gold: more than {MAX_ROWS} rows")
    used = 10 * STEPS - _steps_left
    result = rows, used, max(used * CPU_SECONDS / STEPS, time.process_time() - began)
    if sum(map(sys.getsizeof, itertools.chain(rows, *rows))) <= GOLD_BYTES:
        _golds[key] = result
        if len(_golds) > GOLDS:
            del _golds[next(iter(_golds))]
    return result


def answer(request: list[Any]) -> dict[str, Any]:
    """Answer a request: {"columns", "rows", "more"}, {"tables"}, {"same"}, or {"error"}."""
    kind, *arguments = request
    try:
        if kind == "same":
            return same(*arguments)
        connection = connect(arguments[0])
        if kind == "schema":
            return {"tables": schema(connection)}
        _, query, most, chars = arguments
        columns, rows, more = run(connection, query, most)
        cells = [[shown(cell, chars) for cell in row] for row in (columns, *rows)]
        return {"columns": cells[0], "rows": cells[1:], "more": more}
    except (Refused, sqlite3.Error, OSError, MemoryError) as error:
        if isinstance(error, MemoryError) or str(error) == "out of memory":
            return {"error": "it takes too much memory; ask for less", "memory": True}
        return {"error": str(error)[:500]}


def shown(cell: Any, chars: int) -> str:
    """Format a cell for the policy."""
    text = "NULL" if cell is None else f"x'{cell[:chars].hex()}'" if isinstance(cell, bytes) else str(cell)
    text = re.sub(r"\s", " ", text[: chars + 1])
    return text if len(text) <= chars else text[:chars] + "..."


def serve() -> None:
    """Answer requests until the pipe is closed."""
    if hasattr(time, "tzset"):  # what 'localtime' means is the same everywhere, too
        os.environ["TZ"] = "UTC"
        time.tzset()
    if not sql_clock.stop():
        FUNCTIONS.difference_update(sql_clock.READERS)
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, ValueError, OSError):  # not every system has this
        pass
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    replies = os.fdopen(os.dup(1), "wb")
    for line in sys.stdin.buffer:
        request = json.loads(line)
        replies.write(json.dumps(answer(request)).encode() + b"\n")
        replies.flush()


if __name__ == "__main__":
    serve()
