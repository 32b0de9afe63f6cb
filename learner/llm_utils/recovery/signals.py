"""Ctrl-C and SIGTERM: what they interrupt ends by itself, and leaves its files whole."""

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
    """Inside, Ctrl-C and SIGTERM call `noted(number)` and raise KeyboardInterrupt; with `ignored` they do nothing.

    Python drops what a signal raises where nothing can be raised, as in a finalizer, so `noted` is what counts. A
    signal that is ignored, as Ctrl-C in a shell's background jobs, stays so.
    """
    process = os.getpid()
    previous: dict[int, Any] = {number: signal.getsignal(number) or signal.SIG_DFL for number in SIGNALS}

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # one that was forked from this: the run is not its own
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
def ending(how: str) -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM end the program with a line that says `how` to go on."""
    caught: list[int] = []
    with interrupting(caught.append):
        try:
            yield
            if caught:  # Python dropped what it raised
                raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            end(error, how, caught[-1] if caught else None)


_held: list[bool] = []


@contextmanager
def held() -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM are only noted, so that no step is cut in half: look for what was noted at the end."""
    _held.append(True)
    try:
        yield
    finally:
        _held.pop()


def ignore() -> None:
    """From here to the end of `interrupting` further signals change nothing: files are being written."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end(error: BaseException, how: str, number: int | None) -> None:
    """Say `how` to go on after `error`, which the caller raises again. `number` is that of the signal, if one came.

    SystemExit with 130 or 143 where it was Ctrl-C or SIGTERM.
    """
    if number is not None or isinstance(error, KeyboardInterrupt):
        caught = signal.Signals(number or signal.SIGINT)
        print(f"\n{SIGNALS[caught]}; {how}", file=sys.stderr)
        sys.exit(128 + caught)
    if how and isinstance(error, SystemExit):
        print(how, file=sys.stderr)
    elif how:
        error.add_note(how)  # is printed below the traceback
