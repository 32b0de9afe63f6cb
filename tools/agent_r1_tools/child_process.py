"""A program of ours in a process of its own, which answers requests over pipes: what a hostile request can make slow,
large or fatal is kept out of this process."""

from __future__ import annotations

import atexit
import os
import subprocess
import threading
from collections.abc import Callable
from typing import IO, TypeVar

Answer = TypeVar("Answer")


class Ended(ConnectionError):
    """The process ended before it had answered.

    Attributes:
        status: its exit status; -n where signal n ended it.
    """

    def __init__(self, status: int) -> None:
        super().__init__(f"the process ended with exit status {status}")
        self.status = status


class ChildProcess:
    """A process that is started by the first request, and by the next one after it has ended; it ends with this one.

    Threads ask in turn, and a fork of this process starts a process of its own. A subclass says what runs, in
    `command`. Made once for a program, when its module is imported: it is closed at exit and never collected.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self.forget)

    def command(self) -> list[str]:
        """The program and its arguments."""
        raise NotImplementedError

    def exchange(self, request: bytes, read: Callable[[IO[bytes]], Answer]) -> Answer:
        """Write a request; `read` gets the pipe of answers, unbuffered, and raises EOFError where it ends too early.

        Raises: Ended; another OSError where the process cannot be started; what `read` raises, after which the process
            is ended, because the rest of the answer would be taken for the next one's.
        """
        with self.lock:
            if self.process is None:
                self.process = start(self.command())
            try:
                return exchange(self.process, request, read)
            except BaseException:  # also an interruption
                self.process = None
                raise

    def close(self) -> None:
        """End the process."""
        process, self.process = self.process, None
        if process is not None:
            end(process)

    def forget(self) -> None:
        """In a fork of this process: the lock and the process are its parent's."""
        self.lock = threading.Lock()
        process, self.process = self.process, None
        if process is not None:
            disown(process)


def start(command: list[str]) -> subprocess.Popen[bytes]:
    """A process whose pipes are unbuffered: a fork must find no lock of a buffer locked, and write no half request
    once more."""
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, stderr=null)


def exchange(process: subprocess.Popen[bytes], request: bytes, read: Callable[[IO[bytes]], Answer]) -> Answer:
    """As `ChildProcess.exchange`; whatever is raised, the process has ended."""
    assert process.stdin is not None and process.stdout is not None
    try:
        rest = memoryview(request)
        while rest:
            rest = rest[os.write(process.stdin.fileno(), rest) :]
        return read(process.stdout)
    except (OSError, EOFError):  # it is gone
        process.stdin.close()
        process.stdout.close()
        raise Ended(process.wait()) from None
    except BaseException:
        end(process)
        raise


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and wait for it."""
    process.kill()
    process.communicate()


def disown(process: subprocess.Popen[bytes]) -> None:
    """In a fork: a process of the parent's is nothing to wait for or to warn of."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()  # or it would not see its parent end
    process.stdout.close()
    process.returncode = 0
