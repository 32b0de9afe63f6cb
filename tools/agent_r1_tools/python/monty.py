"""Pydantic's Monty: a Python interpreter written in Rust, without a way out.

By far the fastest backend: a session is a few kilobytes that are loaded into whichever worker is free. It knows the
core of the language and a few modules: no numpy, no `yield`, no `del`. Programs that need more get the status
"exception" with a NotImplementedError, ModuleNotFoundError or the like; `backend="auto"` then goes on elsewhere.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agent_r1_tools.python import guest
from agent_r1_tools.python.process import START_SECONDS, check_arguments, encodable, invoke
from agent_r1_tools.python.sandbox import (
    ENDED,
    LOST,
    OUT_OF_TIME,
    UNCHANGED,
    CallError,
    Cell,
    Functions,
    Limits,
    Run,
    Sandbox,
    SandboxError,
    Session,
    State,
    Status,
    shown,
)

if TYPE_CHECKING:
    import pydantic_monty

MAX_WORKERS = 256
"""The most runs at the same time; workers start when they are needed."""
MAX_MEMORY = 64 << 20
"""The most bytes a session can use, whatever the limits say: what it holds is kept in this process between runs."""


class Monty(Sandbox):
    """Sessions in Monty's worker processes, which all such sandboxes of this process share.

    Raises:
        SandboxError: pydantic-monty is not installed, or the limits ask for network.
    """

    backend = "monty"

    def __init__(self, limits: Limits) -> None:
        if limits.network:
            raise SandboxError("monty cannot allow network; use backend='bubblewrap'")
        self.limits = limits
        _pool()

    def session(self) -> MontySession:
        return MontySession(self.limits)


class MontySession(Session):
    """A session is a snapshot, which is loaded, run and taken again; it has no process between runs."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._state = State()

    def run(self, code: str, functions: Functions | None = None) -> Run:
        begun = time.monotonic()
        note = self._restore()
        printed, failure, kept = self._run(Cell(code, tuple(functions or ())), functions or {})
        seconds = time.monotonic() - begun
        if failure is None:
            return Run(shown(note + printed, self._limits.output, ""), "ok", None, "monty", seconds)
        ending = failure.shown if kept else UNCHANGED.format(failure.line)
        output = shown(note + printed, self._limits.output, ending)
        return Run(output, failure.status, failure.line, "monty", seconds)

    def call(self, name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        check_arguments(args, kwargs)
        self._restore()
        if not name.isidentifier():
            raise CallError("NameError", f"name {name[:100]!r} is not defined")
        code = f"{name}(*_args, **_kwargs)"
        value, failure, _ = self._feed(code, _Printed(0), inputs={"_args": tuple(args), "_kwargs": dict(kwargs or {})})
        if failure is not None:
            raise CallError({"timeout": "Timeout", "died": "Died"}.get(failure.status, failure.kind), failure.message)
        try:
            return guest.decode(guest.encode(value))
        except (guest.NotLiteral, RecursionError) as error:
            raise CallError("NotLiteral", str(error)) from None

    def get_state(self) -> State:
        return self._state

    def set_state(self, state: State | None) -> None:
        self._state = state if state is not None else State()

    def close(self) -> None:
        pass

    def _restore(self) -> str:
        """Have a snapshot, also where the state comes from another backend; a note where that fails."""
        if self._state.dump is not None or not self._state.cells:
            return ""
        cells, self._state = self._state.cells, State()
        for cell in cells:
            if not self._run(cell, {}, cell.answers)[2]:
                self._state = State()
                return LOST
        return ""

    def _run(
        self, cell: Cell, functions: Functions, recorded: Sequence[dict[str, Any]] = ()
    ) -> tuple[str, _Failure | None, bool]:
        """Run a cell and take a snapshot: what it printed, what went wrong, and whether there is a snapshot."""
        answers: list[dict[str, Any]] = []
        known = iter(recorded)
        lookup = {name: _proxy(functions.get(name), answers, known) for name in cell.functions}
        printed = _Printed(self._limits.output + 1)
        code = encodable(cell.code)
        value, failure, dump = self._feed(code, printed, external_lookup=lookup)
        if failure is None and value is not None:
            try:
                guest.encode(value)  # else it is a stand-in, and what it looks like inside isn't known here
                printed("", repr(value) + "\n")
            except (guest.NotLiteral, RecursionError):
                failure = _Failure("NotImplementedError", "monty cannot show the value of the last expression")
            except ValueError as error:  # a number of more digits than Python writes
                failure = _Failure("ValueError", str(error))
        if dump is not None:
            ran = Cell(code, cell.functions, tuple(answers))
            self._state = State((*self._state.cells, ran), dump)
        return printed.text, failure, dump is not None

    def _feed(self, code: str, printed: _Printed, **options: Any) -> tuple[Any, _Failure | None, bytes | None]:
        """Run code in a worker that has loaded the session: its value, what went wrong, the snapshot after it."""
        import pydantic_monty

        limits = self._limits
        bounds: pydantic_monty.ResourceLimits = {
            "max_feed_duration_secs": min(limits.wall_seconds, limits.cpu_seconds),
            "max_total_sleep_secs": limits.wall_seconds,
            "max_memory": min(limits.memory, MAX_MEMORY),
            "max_suspensions": 1 << 30,
        }
        # The same numbers in every session: an episode can be repeated.
        policy: pydantic_monty.OSPolicy = {"random_start": {"seed": 0}, "sleep_system_max": math.inf}
        value, failure = None, None
        try:
            with _pool().checkout(limits=bounds, os_policy=policy) as session:
                if self._state.dump is not None:
                    session.load_session(self._state.dump)
                try:
                    value = session.feed_run(code, print_callback=printed, **options)
                except (pydantic_monty.MontyRuntimeError, pydantic_monty.MontySyntaxError) as error:
                    failure = _failure(error, limits)
                    if failure.status == "timeout":
                        return None, failure, None
                except pydantic_monty.MontyCrashedError:
                    raise
                except Exception as error:  # the value, or an argument, doesn't fit into this Python
                    failure = _Failure(type(error).__name__, str(error)[:1000])
                return value, failure, session.dump()
        except (pydantic_monty.MontyError, RuntimeError) as error:  # the worker is gone, or its session
            if getattr(error, "timed_out", False):
                return None, _Failure("", OUT_OF_TIME.format(limits.wall_seconds), "timeout"), None
            return None, _Failure("", ENDED, "died"), None
        except TimeoutError as error:
            raise SandboxError(f"no worker of monty was free within {START_SECONDS:g} seconds") from error


_TIMEOUTS = ("feed time limit exceeded", "turn time limit exceeded", "sleep limit exceeded")


class _Printed:
    """Collects what is printed, up to a length."""

    def __init__(self, limit: int) -> None:
        self._parts: list[str] = []
        self._left = limit

    def __call__(self, stream: str, text: str) -> None:
        if self._left > 0:
            self._parts.append(text[: self._left])
            self._left -= len(text)

    @property
    def text(self) -> str:
        return "".join(self._parts)


class _Failure:
    """What went wrong, in the forms that are asked for."""

    def __init__(self, kind: str, message: str, status: Status = "exception") -> None:
        self.kind = kind
        self.message = message
        self.status: Status = status
        self.line = f"{kind}: {message}" if kind and message else kind or message
        self.shown = self.line


def _failure(error: Any, limits: Limits) -> _Failure:
    """An exception of Monty, shown as `guest.py` shows it: the last lines of the program that led there."""
    kind, _, message = str(error.display("type-msg")).partition(": ")
    message = message[:1000]
    if kind == "TimeoutError" and message.startswith(_TIMEOUTS):
        return _Failure("", OUT_OF_TIME.format(limits.wall_seconds), "timeout")
    frames = error.traceback()
    lines = []
    for frame in frames:
        where = f", in {frame.function_name or '<module>'}" if kind != "SyntaxError" else ""
        lines.append(f"  line {frame.line}{where}\n    {(frame.source_line or '').strip()[:200]}")
    if len(lines) > guest.MAX_FRAMES:
        lines[1 : 1 - guest.MAX_FRAMES] = [f"  ... {len(lines) - guest.MAX_FRAMES} more"]
    failure = _Failure(kind, message)
    head = ["Traceback (most recent call last):"] if lines else []
    failure.shown = "\n".join([*head, *lines, failure.line])
    return failure


def _proxy(
    function: Callable[..., Any] | None, answers: list[dict[str, Any]], known: Iterator[dict[str, Any]]
) -> Callable[..., Any]:
    """A function of ours as Monty may call it: only literals cross, and what it answers is written down."""

    def call(*args: Any, **kwargs: Any) -> Any:
        reply = next(known, None) or invoke(function, args, kwargs)
        answers.append(reply)
        if "value" in reply:
            return guest.decode(reply["value"])
        raise guest.exception(*reply["raise"])

    return call


# --- the pool of workers ----------------------------------------------------------------------------------------------

_pools: list[Any] = []
_lock = threading.Lock()


def _pool() -> pydantic_monty.Monty:
    """The pool of this process."""
    if _abandoned:
        raise SandboxError(
            "monty doesn't work in a fork of a process that has used it; start processes with 'spawn', or use another "
            "backend"
        )
    with _lock:
        if not _pools:
            try:
                import pydantic_monty
            except ImportError as error:
                raise SandboxError('monty is not installed: pip install "agent-r1[python]"') from error
            pool = pydantic_monty.Monty(max_processes=MAX_WORKERS, checkout_timeout=START_SECONDS)
            pool.__enter__()
            _pools.append(pool)
        found: pydantic_monty.Monty = _pools[0]
        return found


@atexit.register
def _close_pool() -> None:
    while _pools:
        _pools.pop().__exit__(None, None, None)


def _forget_pool() -> None:
    """In a fork of this process: the workers are its parent's, and so are the threads that would start others."""
    global _lock
    _lock = threading.Lock()
    _abandoned.extend(_pools)
    _pools.clear()


_abandoned: list[Any] = []  # never collected, because that would end the parent's workers
os.register_at_fork(after_in_child=_forget_pool)
