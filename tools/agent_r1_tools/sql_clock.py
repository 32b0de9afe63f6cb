"""The clock of the SQL that a model wrote, which stands still: for `sql_server.py`, so it imports nothing of ours."""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable
from typing import Any

NOW = "2024-07-26 00:00:00"
"""What the clock says, always: else the same query would give something else tomorrow."""
CLOCKS = {
    "date": -1, "time": -1, "datetime": -1, "julianday": -1, "unixepoch": -1, "strftime": -1, "timediff": 2,
    "current_date": 0, "current_time": 0, "current_timestamp": 0,
}  # fmt: skip
"""SQLite's functions that read the clock, and how many arguments they take (-1: any number)."""


def stop_clock(connection: sqlite3.Connection, most_arguments: int) -> None:
    """Put functions in the place of SQLite's own for which it is always `NOW`. Calls have at most so many arguments."""
    there = {name for (name,) in _aside().execute("SELECT name FROM pragma_function_list")}
    for name, count in CLOCKS.items():
        if name in there:
            connection.create_function(name, count, _at_now(name, most_arguments), deterministic=True)


@functools.cache
def _aside() -> sqlite3.Connection:
    """A connection that has SQLite's own functions."""
    return sqlite3.connect(":memory:")


@functools.cache
def _at_now(name: str, most: int) -> Callable[..., Any]:
    """The function that gives what SQLite's gives at that moment."""
    execute, place = _aside().execute, int(name == "strftime")  # of the time, among the arguments
    at_now = {"current_date": "date", "current_time": "time", "current_timestamp": "datetime"}.get(name, name)
    calls = [f"SELECT {at_now}({', '.join('?' * count)})" for count in range(most + 2)]

    def compute(*arguments: Any) -> Any:
        given = list(arguments) if len(arguments) != place else [*arguments, NOW]
        for index, one in enumerate(given):
            if index < place or not isinstance(one, str | bytes):
                continue
            # A blob counts as its text, and a text ends at a zero.
            word = (one if isinstance(one, str) else one.decode("latin-1")).partition("\0")[0].lower()
            if word == "now":
                given[index] = NOW
            elif word in ("subsec", "subsecond") and index == place:
                given[index : index + 1] = [NOW, word]
        return execute(calls[len(given)], given).fetchone()[0]

    kept = functools.lru_cache(4096, typed=True)(compute)  # many rows have few days

    def function(*arguments: Any) -> Any:
        for one in arguments:
            if isinstance(one, str | bytes) and len(one) > 100:
                return compute(*arguments)
        return kept(*arguments)

    return function
