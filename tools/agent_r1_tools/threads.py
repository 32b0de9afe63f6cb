"""Threads for calls, and one thread per episode: a connection of sqlite3, say, must not serve another thread."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

Work = tuple[Callable[[], None], threading.Event]  # what is to be done, and what is set when it is


class CallThread(threading.Thread):
    """A thread that makes calls. `left_in` is the tool of an abandoned call while it still runs."""

    def __init__(self, name: str) -> None:
        super().__init__(daemon=True, name=name)
        self.todo: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self.left_in: Any = None
        self.pending = 0  # calls that have not ended
        self._lock = threading.Lock()

    def give(self, function: Callable[[], None]) -> threading.Event:
        """Call a function that must not raise. The event is set when it has returned."""
        finished = threading.Event()
        with self._lock:
            self.pending += 1
        self.todo.put((function, finished))
        return finished

    def run(self) -> None:
        """Run functions from the queue until None arrives."""
        while (work := self.todo.get()) is not None:
            work[0]()
            with self._lock:
                self.left_in = None
                self.pending -= 1
                work[1].set()
            del work  # it may hold what keeps this thread from being told to end

    def leave(self, tool: Any, finished: threading.Event) -> bool:
        """Note that no caller waits any more. Return False if the call has just ended."""
        with self._lock:
            if not finished.is_set():
                self.left_in = tool
        return not finished.is_set()


def start_call(name: str, function: Callable[[], None]) -> tuple[CallThread, threading.Event]:
    """Call a function in a new thread. Raises RuntimeError if the machine has no thread left."""
    thread = CallThread(name)
    thread.start()
    finished = thread.give(function)
    thread.todo.put(None)
    return thread, finished


class OneThread:
    """A daemon thread that calls functions one after the other. It starts when it is needed.

    An abandoned call continues in it. If that call still runs when the next one comes, a new thread takes over. Copies
    and pickles have their own thread.
    """

    def __init__(self) -> None:
        self._thread: CallThread | None = None
        self._end: Any = None

    def start(self, function: Callable[[], None]) -> tuple[CallThread, threading.Event]:
        """Call a function. Raises RuntimeError if the machine has no thread left."""
        thread = self._thread
        if thread is None or thread.left_in is not None or not thread.is_alive():  # of a fork it isn't
            if self._end is not None:
                self._end()
            thread = CallThread("tool-session")
            thread.start()
            self._thread, self._end = thread, weakref.finalize(self, thread.todo.put, None)
        return thread, thread.give(function)

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the function in the thread and wait for it without limit. Return or raise its result."""
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

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the function in the thread, while the event loop runs. It is called even if the caller is cancelled.

        Return or raise its result; StopIteration becomes a RuntimeError, as in every coroutine.
        """
        import asyncio  # every caller has loaded it, and `import agent_r1` does not need it
        from concurrent.futures import Future

        future: Future[tuple[Any, BaseException | None]] = Future()
        future.set_running_or_notify_cancel()  # it cannot be cancelled any more

        def work() -> None:
            try:
                future.set_result((function(*arguments), None))
            except BaseException as error:  # asyncio's futures take no StopIteration: the caller would wait forever
                future.set_result((None, error))

        self.start(work)
        result, error = await asyncio.wrap_future(future)
        if error is not None:
            raise error
        return result

    @property
    def free(self) -> bool:
        """Return True if the thread has no work."""
        return self._thread is None or not self._thread.pending

    def __reduce__(self) -> tuple[Any, ...]:
        return OneThread, ()


def call_on(thread: OneThread | None, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a thread, or here if the thread is None."""
    return function(*arguments) if thread is None else thread.run(function, *arguments)
