"""Event loops in threads of their own, for callers that may have a loop themselves. Imported where one is needed: it
brings asyncio."""

from __future__ import annotations

import asyncio
import os
import threading

_loops: dict[tuple[int, str], asyncio.AbstractEventLoop] = {}  # by process, as a fork has none, and name
_lock = threading.Lock()


def event_loop(name: str) -> asyncio.AbstractEventLoop:
    """This process's loop of that name. What blocks one doesn't hold up another."""
    key = os.getpid(), name
    if key not in _loops:  # without the lock otherwise: a fork may find it locked for ever
        with _lock:
            if key not in _loops:
                loop = asyncio.new_event_loop()
                threading.Thread(target=loop.run_forever, name=name, daemon=True).start()
                _loops[key] = loop
    return _loops[key]
