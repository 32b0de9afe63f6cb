"""Threads for calls, and one for an episode: what it opens, a connection of sqlite3 say, may serve no other."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

Work = tuple[Callable[[], None], threading.Event]  # what is to be done, and what is set when it is


class CallThread(threading.Thread):
    """Makes calls. `left_in` is the tool of a call that nobody waits for any more, as long as it is at work."""

    def __init__(self, name: str) -> None:
        super().__init__(daemon=True, name=name)
        self.todo: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self.left_in: Any = None
        self.pending = 0  # calls that have not ended
        self._lock = threading.Lock()

    def give(self, function: Callable[[], None]) -> threading.Event:
        """Have a function called, which must not raise. The event is set when it has returned."""
        finished = threading.Event()
        with self._lock:
            self.pending += 1
        self.todo.put((function, finished))
        return finished

    def run(self) -> None:
        """Do what there is, until None comes."""
        while (work := self.todo.get()) is not None:
            work[0]()
            with self._lock:
                self.left_in = None
                self.pending -= 1
                work[1].set()
            del work  # it may hold what keeps this thread from being told to end

    def leave(self, tool: Any, finished: threading.Event) -> bool:
        """Note that nobody waits any more. False where the call has just ended."""
        with self._lock:
            if not finished.is_set():
                self.left_in = tool
        return not finished.is_set()


def start_call(name: str, function: Callable[[], None]) -> tuple[CallThread, threading.Event]:
    """Have a function called in a thread that ends with it. RuntimeError where the machine has no thread left."""
    thread = CallThread(name)
    thread.start()
    finished = thread.give(function)
    thread.todo.put(None)
    return thread, finished


class OneThread:
    """Calls functions one after the other, in one daemon thread, which begins when it is needed.

    A call that was left goes on in it. Where it has not ended when the next one comes, that one gets a new thread,
    which is then the one. Copies and pickles have a thread of their own.
    """

    def __init__(self) -> None:
        self._thread: CallThread | None = None
        self._end: Any = None

    def start(self, function: Callable[[], None]) -> tuple[CallThread, threading.Event]:
        """Have a function called. RuntimeError where the machine has no thread left."""
        thread = self._thread
        if thread is None or thread.left_in is not None or not thread.is_alive():  # of a fork it isn't
            if self._end is not None:
                self._end()
            thread = CallThread("tool-session")
            thread.start()
            self._thread, self._end = thread, weakref.finalize(self, thread.todo.put, None)
        return thread, thread.give(function)

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns, or raises, in the thread. Waits for it as long as it takes."""
        if threading.current_thread() is self._thread:
            return function(*arguments)
        returned: list[Any] = []
        raised: list[BaseException] = []

        def work() -> None:
            try:
                returned.append(function(*arguments))
            except BaseException as error:
                raised.append(error)

        self.start(work)[1].wait()
        if raised:
            raise raised.pop()
        return returned[0]

    @property
    def free(self) -> bool:
        """Whether nothing is under way in the thread."""
        return self._thread is None or not self._thread.pending

    def __reduce__(self) -> tuple[Any, ...]:
        return OneThread, ()


def call_on(thread: OneThread | None, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a thread, or here where that is None."""
    return function(*arguments) if thread is None else thread.run(function, *arguments)
