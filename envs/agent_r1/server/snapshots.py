"""Snapshots of episodes. They stay on the server: a client knows their names only."""

from __future__ import annotations

import pickle
import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from fastapi import HTTPException

MAX_SNAPSHOTS = 1024
"""The number of snapshots of all sessions."""
MAX_BYTES = 256 * 1024 * 1024
"""The size of all snapshots. One of them has at most a quarter."""


class Snapshots:
    """Pickled states within `MAX_SNAPSHOTS` and `MAX_BYTES`. Threads may share the object.

    For a new one, those of closed sessions are dropped first. Then the session that uses the most room loses one. In
    both cases it is the one that was not used for the longest time. So no client pushes out the snapshots of other open
    sessions, with one session or with many that it closes.

    Args:
        is_open: returns True for the name of an open session.
    """

    def __init__(self, is_open: Callable[[str], bool]) -> None:
        self._is_open = is_open
        self._kept: OrderedDict[str, tuple[str, Any, bytes]] = OrderedDict()  # session, kind, state
        self._size = 0
        self._lock = threading.Lock()

    def keep(self, session: str, kind: Any, state: Any) -> str:
        """Keep a state of a session and return its name. Raises HTTPException 413 for one that is too large."""
        data = pickle.dumps(state)
        if len(data) > MAX_BYTES // 4:
            raise HTTPException(413, f"the snapshot has {len(data)} bytes, and the server keeps {MAX_BYTES // 4}")
        name = secrets.token_urlsafe(24)
        with self._lock:
            while len(self._kept) >= MAX_SNAPSHOTS or self._size + len(data) > MAX_BYTES:
                self._drop()
            self._kept[name] = session, kind, data
            self._size += len(data)
        return name

    def get(self, kind: Any, name: str) -> Any:
        """Return a copy of a state, for a session of the same kind. Raises HTTPException 410 or 422."""
        with self._lock:
            if name not in self._kept:
                raise HTTPException(410, f"there is no such snapshot: the server keeps the last {MAX_SNAPSHOTS}")
            self._kept.move_to_end(name)
            _, of, data = self._kept[name]
        if of != kind:
            raise HTTPException(422, "the snapshot is of an environment with other arguments")
        return pickle.loads(data)  # which this process wrote

    def _drop(self) -> None:
        droppable = [name for name, (session, _, _) in self._kept.items() if not self._is_open(session)]
        if not droppable:
            sizes: Counter[str] = Counter()
            for session, _, data in self._kept.values():
                sizes[session] += max(len(data), MAX_BYTES // MAX_SNAPSHOTS)  # small ones use up the number
            ((greedy, _),) = sizes.most_common(1)
            droppable = [name for name, (session, _, _) in self._kept.items() if session == greedy]
        self._size -= len(self._kept.pop(droppable[0])[2])
