"""Pydantic's Monty: a Python interpreter written in Rust, without a way out.

By far the fastest backend: a session is a few kilobytes that any free worker loads. It knows the core of the language
and a few modules: no numpy, no `yield`, no `del`. Programs that need more get the status "exception" with a
NotImplementedError, ModuleNotFoundError or the like; `backend="auto"` then continues in another sandbox.

Values of a program cross as text only, which the worker makes within its limits. A value that contains itself many
times is small in the worker, but endless in this process.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agent_r1_tools.python import guest
from agent_r1_tools.python.launch import START_SECONDS
from agent_r1_tools.python.monty_code import FIRST, MARK, OURS, PRELUDE, SHOW, SOME_ROOM, mark_value
from agent_r1_tools.python.monty_workers import pool_of_workers
from agent_r1_tools.python.process import (
    BROKEN,
    FLOOD_BYTES,
    MAX_ASKED,
    MAX_CROSSED,
    REPLAY_RUNS,
    check_arguments,
    encodable,
    invoke,
    parsed,
)
from agent_r1_tools.python.sandbox import (
    ASKED,
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

MAX_MEMORY = 64 << 20
"""The most bytes a session can use, whatever the limits say: what it holds is kept in this process between runs."""
MAX_UNTRIED = 1 << 18
"""Bytes of the largest snapshot that is kept untried: loading one takes more memory than making it."""

MAX_STEPS = 20_000
"""The maximum number of a run's requests that call none of our functions: names, sleeps, files. Each costs time."""
SMALLEST_PIECE = 1 << 10
"""Bytes that a piece of output counts as at least, until there are `FLOOD_BYTES`; a message to us has one piece."""


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
        pool_of_workers()

    def session(self) -> MontySession:
        return MontySession(self.limits)


class MontySession(Session):
    """A session as a snapshot. Each run loads it and takes it again; there is no process between runs."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._state = State()

    def run(self, code: str, functions: Functions | None = None) -> Run:
        begun = time.monotonic()
        note = self._restore()
        printed, failure, saved = self._run(Cell(code, tuple(functions or ())), functions or {})
        seconds = time.monotonic() - begun
        if failure is None:
            return Run(shown(note + printed, self._limits.output, ""), "ok", None, "monty", seconds)
        ending = failure.shown if saved else UNCHANGED.format(failure.line)
        output = shown(note + printed, self._limits.output, ending)
        return Run(output, failure.status, failure.line, "monty", seconds)

    def call(self, name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        check_arguments(args, kwargs)
        self._restore()
        if not name.isidentifier():
            raise CallError("NameError", f"name {name[:100]!r} is not defined")
        code = f'f"{{_answer_({name}(*_args, **_kwargs))}}"'
        inputs = {"_args": tuple(args), "_kwargs": dict(kwargs or {})}
        text, failure, _ = self._feed([PRELUDE], code, _Printed(0), inputs=inputs)
        if failure is not None:
            raise CallError({"timeout": "Timeout", "died": "Died"}.get(failure.status, failure.kind), failure.message)
        try:
            reply = parsed(text or "")
            if "error" not in reply:
                return guest.decode(reply["value"])
            message = str(reply["error"])
        except BROKEN as error:
            message = str(error)
        raise CallError("NotLiteral", message[:200])

    def get_state(self) -> State:
        return self._state

    def set_state(self, state: State | None) -> None:
        self._state = state if state is not None else State()

    def close(self) -> None:
        pass

    def _restore(self) -> str:
        """Make a snapshot if the state comes from another backend. Return a note if that fails."""
        if self._state.dump is not None or not self._state.cells:
            return ""
        cells, self._state = self._state.cells, State()
        latest = time.monotonic() + REPLAY_RUNS * self._limits.wall_seconds
        for cell in cells:
            if not self._run(cell, {}, cell.answers, latest)[2]:
                self._state = State()
                return LOST
        return ""

    def _run(
        self,
        cell: Cell,
        functions: Functions,
        recorded: Sequence[dict[str, Any]] = (),
        latest: float = float("inf"),
    ) -> tuple[str, _Failure | None, bool]:
        """Run a cell and take a snapshot. Return its output, its failure, and True if there is a snapshot."""
        answers: list[dict[str, Any]] = []
        known = iter(recorded)
        left = MAX_CROSSED

        def ask(message: str) -> Any:
            """Call one of our functions for a program. Only literals cross, and the answer is recorded."""
            nonlocal left
            left -= len(message)
            if len(answers) >= MAX_ASKED or left < 0:
                raise _Ended("died", ASKED)
            try:
                name, args, kwargs = guest.decode(parsed(message))
                if name not in cell.functions:
                    raise NameError(f"name {name!r} is not defined")
            except BROKEN as error:
                raise ValueError(str(error)[:200]) from None
            reply = next(known, None) or invoke(functions.get(name), args, kwargs)
            answers.append(reply)
            if "value" in reply:
                left -= len(json.dumps(reply["value"], ensure_ascii=False).encode())  # Monty has no lone surrogates
                return guest.decode(reply["value"])
            kind, message = reply["raise"]
            raise guest.exception(kind, encodable(message))

        printed = _Printed(self._limits.output + 1)
        code = encodable(cell.code)
        first = [PRELUDE] if cell.functions and not any(before.functions for before in self._state.cells) else []
        names = "".join(f"{name} = _proxy_({name!r})\n" for name in cell.functions)
        marked = mark_value(code)
        cells = [*first, names] if marked else [*first, names, code]
        ending = f"{marked}\n{SHOW.format(self._limits.output + 1)}" if marked else ""
        value, failure, dump = self._feed(cells, ending, printed, ask if cell.functions else None, latest=latest)
        if value is not None:
            printed("", f"{value}\n")
        if dump is not None:
            ran = Cell(code, cell.functions, tuple(answers))
            self._state = State((*self._state.cells, ran), dump)
        return printed.text, failure, dump is not None

    def _feed(
        self,
        cells: Sequence[str],
        ending: str,
        printed: _Printed,
        ask: Callable[[str], Any] | None = None,
        inputs: dict[str, Any] | None = None,
        latest: float = float("inf"),
    ) -> tuple[str | None, _Failure | None, bytes | None]:
        """Run cells in a worker that has loaded the session, and then code of ours that ends with a text or None.

        Returns:
            That text, what went wrong, the snapshot after it.
        """
        import pydantic_monty

        limits = self._limits
        bounds: pydantic_monty.ResourceLimits = {
            "max_feed_duration_secs": min(limits.wall_seconds, limits.cpu_seconds),
            "max_memory": min(limits.memory, MAX_MEMORY),
            "max_suspensions": 1 << 30,
        }
        # The same numbers in every session: an episode can be repeated.
        policy: pydantic_monty.OSPolicy = {"random_start": {"seed": 0}}
        text, failure = None, None
        pool = pool_of_workers()
        try:
            with pool.checkout(limits=bounds, os_policy=policy) as session:
                if self._state.dump is not None:
                    session.load_session(self._state.dump)
                else:
                    session.feed_run(FIRST)
                printed.worker = session.worker_pid
                deadline = min(latest, time.monotonic() + limits.wall_seconds)
                try:
                    for cell in filter(None, cells):
                        _drive(session, cell, deadline, printed, ask)
                    if ending:
                        text = _drive(session, ending, deadline, printed, ask, inputs).output
                except (pydantic_monty.MontyRuntimeError, pydantic_monty.MontySyntaxError) as error:
                    failure = _failure(error, limits)
                    if failure.status == "timeout":
                        return None, failure, None
                except pydantic_monty.MontyCrashedError:
                    raise
                except _Ended as ended:
                    return None, _Failure("", ended.line.format(limits.wall_seconds), ended.status), None
                except Exception as error:  # an argument, or what a function of ours said, doesn't fit into Monty
                    return None, _Failure(type(error).__name__, str(error)[:1000]), None
                dump = session.dump()
            if len(dump) > MAX_UNTRIED:
                with pool.checkout(limits=bounds, os_policy=policy) as session:
                    session.load_session(dump)
                    session.feed_run(SOME_ROOM)
            return text, failure, dump
        except (pydantic_monty.MontyError, RuntimeError) as error:  # the worker is gone, or its session
            if getattr(error, "timed_out", False):
                return None, _Failure("", OUT_OF_TIME.format(limits.wall_seconds), "timeout"), None
            return None, _Failure("", ENDED, "died"), None
        except TimeoutError as error:
            raise SandboxError(f"no worker of monty was free within {START_SECONDS:g} seconds") from error


def _drive(
    session: pydantic_monty.MontySession,
    code: str,
    deadline: float,
    printed: _Printed,
    ask: Callable[[str], Any] | None = None,
    inputs: dict[str, Any] | None = None,
) -> pydantic_monty.MontyComplete:
    """Run code to its end. Its value, and the arguments of what it calls, become objects here only when read.

    Raises:
        _Ended: time is up, ours included: Monty's clock stands still while it waits for us. Or it asks for too much.
    """
    import pydantic_monty as monty

    step = session.feed_start(code, print_callback=printed, inputs=inputs)
    steps = {True: 0, False: 0}
    while not isinstance(step, monty.MontyComplete):
        if time.monotonic() > deadline:
            raise _Ended("timeout", OUT_OF_TIME)
        own = isinstance(step, monty.FunctionSnapshot) and step.function_name in ("_tell_", "_ask_")
        steps[own] += 1
        if steps[True] > 2 * MAX_ASKED or steps[False] > MAX_STEPS:
            raise _Ended("died", ASKED if own else ENDED)
        if isinstance(step, monty.NameLookupSnapshot):
            step = step.resume()
        elif isinstance(step, monty.FutureSnapshot):
            raise RuntimeError("monty waits for a result that never arrives")
        elif step.is_os_function and step.function_name in ("system.sleep", "system.async_sleep"):
            seconds = float(step.args[0])  # Monty has made sure that it is a number
            time.sleep(max(0.0, min(seconds, deadline - time.monotonic())))
            step = step.resume({"return_value": None})
        elif step.is_os_function:
            step = step.resume_not_handled()
        elif step.function_name == "_tell_" and ask is not None:
            printed.listen()
            step = step.resume({"return_value": None})
        elif step.function_name == "_ask_" and ask is not None:
            try:
                reply: Any = {"return_value": ask(printed.heard())}
            except _Ended:
                raise
            except Exception as error:
                reply = {"exception": error}
            step = step.resume(reply)
        else:
            step = step.resume({"exception": NameError(f"name {step.function_name!r} is not defined")})
    printed.heard()
    return step


_TIMEOUTS = ("feed time limit exceeded", "turn time limit exceeded", "sleep limit exceeded")


class _Printed:
    """A collector of printed text, up to a length. Text that is printed while it listens is a message to us.

    Attributes:
        worker: the process that prints, which is killed once it has printed `FLOOD_BYTES`. An exception here would not
            end it: it would print on until its time is over, and this process would read all of it.
    """

    def __init__(self, limit: int) -> None:
        self.worker: int | None = None
        self._flood = FLOOD_BYTES
        self._parts: list[str] = []
        self._left = limit
        self._message: list[str] | None = None
        self._room = 0

    def listen(self) -> None:
        self._message, self._room = [], guest.MAX_MESSAGE + 1

    def heard(self) -> str:
        message, self._message = "".join(self._message or ()), None
        return message

    def __call__(self, stream: str, text: str) -> None:
        self._flood -= len(text) if self._message == [] else max(len(text), SMALLEST_PIECE)
        if self._flood < 0 and self.worker is not None:  # it is ours until this call returns, and its number with it
            os.kill(self.worker, signal.SIGKILL)
            self.worker = None
        if self._message is not None:
            if self._room > 0:
                self._message.append(text[: self._room])
                self._room -= len(text)
        elif self._left > 0:
            self._parts.append(text[: self._left])
            self._left -= len(text)

    @property
    def text(self) -> str:
        return "".join(self._parts)


class _Ended(Exception):
    """A program that must stop."""

    def __init__(self, status: Status, line: str) -> None:
        super().__init__(line)
        self.status = status
        self.line = line


class _Failure:
    """A failure, in the forms that callers need."""

    def __init__(self, kind: str, message: str, status: Status = "exception") -> None:
        self.kind = kind
        self.message = message
        self.status: Status = status
        self.line = f"{kind}: {message}" if kind and message else kind or message
        self.shown = self.line


def _failure(error: Any, limits: Limits) -> _Failure:
    """Describe an exception of Monty as `guest.py` does: with the program's last lines before it."""
    kind, _, message = str(error.display("type-msg")).partition(": ")
    message = message[:1000]
    if kind == "TimeoutError" and message.startswith(_TIMEOUTS):
        return _Failure("", OUT_OF_TIME.format(limits.wall_seconds), "timeout")
    frames = error.traceback()
    lines = []
    for frame in frames:
        source = (frame.source_line or "").replace(MARK, "")
        if frame.function_name in OURS or source.startswith("None if _shown_"):  # not the program's own
            continue
        where = f", in {frame.function_name or '<module>'}" if kind != "SyntaxError" else ""
        lines.append(f"  line {frame.line}{where}\n    {source.strip()[:200]}")
    if len(lines) > guest.MAX_FRAMES:
        lines[1 : 1 - guest.MAX_FRAMES] = [f"  ... {len(lines) - guest.MAX_FRAMES} more"]
    failure = _Failure(kind, message)
    head = ["Traceback (most recent call last):"] if lines else []
    failure.shown = "\n".join([*head, *lines, failure.line])
    return failure
