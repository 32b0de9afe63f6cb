"""SQLite's clock, stopped, so that its own date functions give the same tomorrow, at their own speed.

SQLite asks its "VFS" for the time, a struct of function pointers; two of them are replaced here, for every connection
of this process. `sql_server.py` calls `stop` in its process; no other should.
"""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from typing import Any

NOW = "2024-07-26 00:00:00"
"""The time of the clock, in UTC."""
DAY = 2460517.5
"""`NOW` as SQLite counts, in days (julianday)."""
READERS = frozenset(
    """date time datetime julianday unixepoch strftime timediff current_date current_time current_timestamp""".split()
)
"""SQLite's functions that read the clock."""

_kept: list[Any] = []  # what SQLite has the addresses of


def stop() -> bool:
    """Stop the clock. Return False if it still runs: Python lacks ctypes, or SQLite's VFS is not found."""
    for find in WAYS:
        try:
            _replace(find())
        except (ImportError, OSError, AttributeError, ValueError, MemoryError):
            continue
        with closing(sqlite3.connect(":memory:")) as connection:
            if connection.execute("SELECT datetime('now')").fetchone() == (NOW,):
                return True
    return False


def _replace(address: int) -> None:
    """Put stopped clocks into the VFS at an address (its fields: sqlite.org/c3ref/vfs.html).

    Raises ValueError if there is no VFS."""
    import ctypes

    class VFS(ctypes.Structure):
        _fields_ = [
            *((name, ctypes.c_int) for name in ("version", "file_size", "path_size")),
            *((name, ctypes.c_void_p) for name in ("next", "name", "data")),
            *((name, ctypes.c_void_p) for name in ("open", "delete", "access", "full_path")),
            *((name, ctypes.c_void_p) for name in ("dl_open", "dl_error", "dl_symbol", "dl_close")),
            *((name, ctypes.c_void_p) for name in ("randomness", "sleep", "time", "last_error")),
            ("time_int64", ctypes.c_void_p),  # from version 2 on
        ]

    vfs = VFS.from_address(address)
    if not (1 <= vfs.version <= 3 and 0 < vfs.path_size < 1 << 20):
        raise ValueError

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_double))
    def days(_: int, result: Any) -> int:
        result[0] = DAY
        return 0

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64))
    def milliseconds(_: int, result: Any) -> int:
        result[0] = int(DAY * 86_400_000)
        return 0

    _kept.extend((days, milliseconds))
    vfs.time = ctypes.cast(days, ctypes.c_void_p)
    if vfs.version >= 2:
        vfs.time_int64 = ctypes.cast(milliseconds, ctypes.c_void_p)


def by_symbol() -> int:
    """Return the address of the default VFS, from the library that Python's module is linked to."""
    import _sqlite3
    import ctypes

    # A module without a file is part of the program.
    find = ctypes.CDLL(getattr(_sqlite3, "__file__", None)).sqlite3_vfs_find
    find.argtypes, find.restype = [ctypes.c_char_p], ctypes.c_void_p
    address: int = find(None) or 0
    return _sound(address)


def by_connection() -> int:
    """Return the same address if the library is linked statically and its names are hidden.

    The first field of Python's connection is SQLite's connection (Modules/_sqlite/connection.h). The first field of
    that is its VFS (sqliteInt.h)."""
    import ctypes

    if sys.implementation.name != "cpython":
        raise ValueError
    with closing(sqlite3.connect(":memory:")) as connection:
        inner = ctypes.c_void_p.from_address(id(connection) + object.__basicsize__).value
        return _sound(ctypes.c_void_p.from_address(_sound(inner)).value)


def _sound(address: int | None) -> int:
    if not address or address % 8:
        raise ValueError
    return address


WAYS = [by_symbol, by_connection]
