"""Event loops in their own threads, for callers that may already run a loop.

Import it only where a loop is needed: it imports asyncio."""

from __future__ import annotations

import asyncio
import os
import threading

_loops: dict[tuple[int, str], asyncio.AbstractEventLoop] = {}  # by process, as a fork has none, and name
_lock = threading.Lock()


def event_loop(name: str) -> asyncio.AbstractEventLoop:
    """Return this process's loop of that name. A call that blocks one loop does not block another."""
    key = os.getpid(), name
    if key not in _loops:  # without the lock otherwise: a fork may find it locked for ever
        with _lock:
            if key not in _loops:
                loop = asyncio.new_event_loop()
                threading.Thread(target=loop.run_forever, name=name, daemon=True).start()
                _loops[key] = loop
    return _loops[key]
