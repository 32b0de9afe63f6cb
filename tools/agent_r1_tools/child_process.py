"""A program of this package in its own process. It answers requests over pipes.

A hostile request may make that process slow, large or end it. This process is not affected."""

from __future__ import annotations

import atexit
import os
import subprocess
import threading
from collections.abc import Callable
from typing import IO, TypeVar

Answer = TypeVar("Answer")


class Ended(ConnectionError):
    """The process ended before it answered.

    Attributes:
        status: its exit status; -n where signal n ended it.
    """

    def __init__(self, status: int) -> None:
        super().__init__(f"the process ended with exit status {status}")
        self.status = status


class ChildProcess:
    """A process that starts with the first request, and again with the next request after it has ended.

    It ends with this process.

    Threads ask in turn. A fork of this process starts its own process. A subclass names the program in
    `command`. Made once for a program, when its module is imported: it is closed at exit and never collected.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self.forget)

    def command(self) -> list[str]:
        """Return the program and its arguments."""
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
        """Forget the lock and the process after a fork: they are the parent's."""
        self.lock = threading.Lock()
        process, self.process = self.process, None
        if process is not None:
            disown(process)


def start(command: list[str]) -> subprocess.Popen[bytes]:
    """Start a process with unbuffered pipes.

    A fork must not find the lock of a buffer locked, and must not write half a request a second time."""
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, stderr=null)


def exchange(process: subprocess.Popen[bytes], request: bytes, read: Callable[[IO[bytes]], Answer]) -> Answer:
    """Exchange as `ChildProcess.exchange` does. After any exception the process has ended."""
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
    """Forget a process of the parent after a fork: do not wait for it or warn about it."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()  # or it would not see its parent end
    process.stdout.close()
    process.returncode = 0
