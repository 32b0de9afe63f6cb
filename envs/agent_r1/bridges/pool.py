"""Simulators in separate processes: each is lent to one episode after the other."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from agent_r1_tools import ToolFault


class Simulator(Protocol):
    """A simulator with its own process."""

    def alive(self) -> bool:
        """Return True if the process runs."""

    def end(self) -> None:
        """Kill the process in any state, and free its resources."""


S = TypeVar("S", bound=Simulator)


class Pool(Generic[S]):
    """A pool of simulators that wait for another episode. A forked child does not touch those of its parent.

    Args:
        make: starts a simulator.
        most_idle: maximum number of waiting simulators; others end when they are returned.
    """

    def __init__(self, make: Callable[[], S], most_idle: int) -> None:
        self.make, self.most_idle = make, most_idle
        self._idle: list[S] = []
        self._forgotten: deque[S] = deque()  # simulators of loans that were never closed
        self._all: weakref.WeakSet[S] = weakref.WeakSet()
        self._lock = threading.Lock()  # never held while a simulator starts or ends
        os.register_at_fork(
            before=self._lock.acquire, after_in_parent=self._lock.release, after_in_child=self._begin_in_child
        )

    def lend(self) -> Loan[S]:
        """Lend an idle simulator, or a new one. Raises the exceptions of `make`."""
        self._end_forgotten()
        while True:
            with self._lock:
                simulator = self._idle.pop() if self._idle else None
            if simulator is None:
                simulator = self.make()
                with self._lock:
                    self._all.add(simulator)
                return Loan(self, simulator)
            if simulator.alive():
                return Loan(self, simulator)
            simulator.end()  # its process died; it may hold pipes and files

    def take_back(self, simulator: S) -> None:
        """Keep a simulator, or end it if the pool is full or its process has died."""
        alive = simulator.alive()
        with self._lock:
            keep = alive and len(self._idle) < self.most_idle
            if keep:
                self._idle.append(simulator)
        if not keep:
            simulator.end()

    def clear(self) -> None:
        """End the waiting simulators."""
        with self._lock:
            waiting, self._idle = self._idle, []
        for simulator in waiting:
            simulator.end()
        self._end_forgotten()

    def __len__(self) -> int:
        """Return the number of waiting simulators."""
        return len(self._idle)

    def _end_forgotten(self) -> None:
        while True:
            try:
                simulator = self._forgotten.pop()
            except IndexError:
                return
            simulator.end()

    def _begin_in_child(self) -> None:
        for simulator in self._all:  # never freed here, not even at exit: a destructor may end the parent's process
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(simulator))
        self._idle, self._forgotten, self._all = [], deque(), weakref.WeakSet()
        self._lock.release()


class Loan(Generic[S]):
    """The loan of a simulator, which no one else uses meanwhile.

    `held` is None after its end; `busy` is True if a call is running in it, or was broken off.
    """

    def __init__(self, pool: Pool[S], simulator: S) -> None:
        self.pool, self.owner = pool, os.getpid()
        self.held: S | None = simulator
        self.busy = False
        self._forget = weakref.finalize(self, _forget, pool, simulator, self.owner)
        self._forget.atexit = False  # processes end with this one

    @contextlib.contextmanager
    def at_work(self, *lost: type[Exception]) -> Iterator[S]:
        """Yield the simulator for a call. It is ended if the call breaks off.

        Raises ToolFault for the exceptions in `lost`, and without a simulator: after its end, and in a forked child.
        """
        if self.held is None or self.owner != os.getpid():
            raise ToolFault("the simulator has ended, or belongs to the parent process")
        self.busy = True
        try:
            yield self.held
            self.busy = False
        except BaseException as error:
            self.close()
            if isinstance(error, lost):
                raise ToolFault(f"the simulator was lost: {error!r:.300}") from error
            raise

    def close(self) -> None:
        """Return the simulator, or end it if it is busy: a call that timed out is still running in it."""
        simulator, self.held = self.held, None
        forgotten = self._forget.detach() is None  # in garbage collection `_forget` runs first
        if simulator is None or forgotten or self.owner != os.getpid():
            return
        if self.busy:
            simulator.end()
        else:
            self.pool.take_back(simulator)


def _forget(pool: Pool[S], simulator: S, owner: int) -> None:
    """Record the simulator without ending it: this may run anywhere, also in the code that ends it."""
    if owner == os.getpid():
        pool._forgotten.append(simulator)
