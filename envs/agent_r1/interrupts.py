"""Ctrl-C in `python -m agent_r1.show` and `.validate`: one line and status 130, also while packages are imported."""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # typing takes time
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def end_in_a_line(number: int, frame: object) -> None:
    """Handle SIGINT during imports. KeyboardInterrupt would end in a traceback, or become an error of the package."""
    os.write(2, b"\ninterrupted\n")
    os._exit(130)


def guard_imports() -> None:
    """Use `end_in_a_line` for the imports of these programs, if Ctrl-C has its usual meaning."""
    programs = {"agent_r1.show", "agent_r1.validate"}
    if sys.argv[:1] == ["-m"] and programs & set(sys.orig_argv) and is_default():
        signal.signal(signal.SIGINT, end_in_a_line)


def is_default() -> bool:
    """Return True if SIGINT raises KeyboardInterrupt."""
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


def run(main: Callable[[], Any]) -> Any:
    """Return `main()`. Raise SystemExit with status 130 for Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is end_in_a_line:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return main()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        raise SystemExit(130) from None
