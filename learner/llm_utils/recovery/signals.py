"""Ctrl-C and SIGTERM: the interrupted program ends by itself and leaves its files complete."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


@contextmanager
def interrupting(noted: Callable[[int], Any], ignored: bool = False) -> Iterator[None]:
    """Make Ctrl-C and SIGTERM call `noted(number)` and raise KeyboardInterrupt; with `ignored` they do nothing.

    Python drops a signal's exception in some places, such as finalizers, so callers must check `noted`. An ignored
    signal (Ctrl-C in a shell's background jobs) stays ignored.
    """
    process = os.getpid()
    previous: dict[int, Any] = {number: signal.getsignal(number) or signal.SIG_DFL for number in SIGNALS}

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # a forked child, which does not own the run
            signal.signal(number, previous[number])
            os.kill(os.getpid(), number)
            return
        noted(number)
        if not _held:
            raise KeyboardInterrupt

    for number, handler in previous.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, signal.SIG_IGN if ignored else stop)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def ending(remedy: str) -> Iterator[None]:
    """Make Ctrl-C and SIGTERM end the program with the line `remedy`, which tells how to continue."""
    caught: list[int] = []
    with interrupting(caught.append):
        try:
            yield
            if caught:  # Python dropped the exception
                raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            end(error, remedy, caught[-1] if caught else None)


_held: list[bool] = []


@contextmanager
def held() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM so that a step is completed. The caller must check for a noted signal at the end."""
    _held.append(True)
    try:
        yield
    finally:
        _held.pop()


def ignore() -> None:
    """Ignore further signals until the end of `interrupting`, while files are written."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end(error: BaseException, remedy: str, number: int | None) -> None:
    """Report the `remedy` for `error`, which the caller raises again. `number` is that of the signal, if any.

    Raise SystemExit with status 130 or 143 for Ctrl-C or SIGTERM.
    """
    if number is not None or isinstance(error, KeyboardInterrupt):
        caught = signal.Signals(number or signal.SIGINT)
        print(f"\n{SIGNALS[caught]}; {remedy}", file=sys.stderr)
        sys.exit(128 + caught)
    if remedy and isinstance(error, SystemExit):
        print(remedy, file=sys.stderr)
    elif remedy:
        error.add_note(remedy)  # printed below the traceback
