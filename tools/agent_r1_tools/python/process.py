"""Sessions in their own process, which runs `guest.py`. All backends with CPython share this code."""

from __future__ import annotations

import json
import marshal
import os
import select
import signal
import socket
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent_r1_tools.python import guest
from agent_r1_tools.python.launch import START_SECONDS
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

END_SECONDS = 5.0
"""The time to wait until the processes of a killed sandbox are gone."""
REPLAY_RUNS = 3
"""A session that is replayed gets the wall time of so many runs, all its cells together; else it is lost."""
MAX_ASKED = 100_000
"""The maximum number of calls of our functions in a run."""
MAX_CROSSED = 16 << 20
"""Bytes that may cross in one run: what our functions answer is kept, as objects, so that it can be replayed."""
MAX_STRAY = 1 << 20
"""Bytes of messages of no exchange, in one run, after which a program is stopped; each counts as an eighth at least."""
FLOOD_BYTES = 64 << 20
"""A program that writes more than this past Python's own print, in one run, is stopped."""
BROKEN = (ValueError, TypeError, KeyError, OverflowError, RecursionError, AttributeError, IndexError)


class Died(Exception):
    """A guest whose process is gone or sends nonsense."""


class OutOfTime(Exception):
    """A guest that did not answer in time."""


class GuestProcess:
    """The outside end of a guest: its socket, its output, and how to end it.

    Args:
        control: the socket to the guest.
        output: the reading end of the pipe that is its standard output and error.
        end: ends all its processes; returns when they are gone.
        settings: what the guest is told first, or None where it knows already.

    Attributes:
        pidfd: its process, which is stopped between runs; None: it is not.
    """

    pidfd: int | None = None

    def __init__(
        self, control: socket.socket, output: int, end: Callable[[], None], settings: dict[str, Any] | None
    ) -> None:
        self._control = control
        self._output = output
        os.set_blocking(output, False)
        control.setblocking(False)
        self.text = bytearray()
        self._received = bytearray()
        self._kept = 1000
        self._stray = 0
        self._flood = FLOOD_BYTES
        self.crossed = 0
        self.close = weakref.finalize(self, _close, control, output, end, os.getpid())
        self._exchange = 0
        try:
            deadline = time.monotonic() + START_SECONDS
            if settings is not None:
                self.send(settings, deadline)
            self.receive(deadline)
        except (Died, OutOfTime) as error:
            self.drain()
            self.close()
            last_output = self.text.decode("utf-8", "replace").strip()[-500:]
            reason = "it took too long" if isinstance(error, OutOfTime) else last_output or "its process ended"
            raise SandboxError(f"the sandbox did not start: {reason}") from None

    def alive(self) -> bool:
        """Return True if its process seems to run."""
        if self.pidfd is None:
            return True
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)  # readable when the process has ended
        return not poll.poll(0)

    def begin(self, keep: int) -> None:
        """Start an exchange: forget the printed output, and keep at most `keep` bytes of it from now on."""
        self.drain()
        self.text.clear()
        self._exchange += 1
        self._kept, self._flood, self._stray, self.crossed = keep, FLOOD_BYTES, 0, 0
        self._signal(signal.SIGCONT)

    def rest(self) -> None:
        """Stop until the next exchange, whatever timers, threads or a forged answer would have it do."""
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        if self.pidfd is not None:
            try:
                signal.pidfd_send_signal(self.pidfd, number)
            except ProcessLookupError:  # whoever talks to it is going to see
                pass

    def send(self, message: dict[str, Any], deadline: float) -> None:
        data = marshal.dumps(message | {"id": self._exchange})
        if len(data) > guest.MAX_MESSAGE:
            raise ValueError(f"the code or the arguments are larger than {guest.MAX_MESSAGE} bytes")
        data = len(data).to_bytes(4, "big") + data
        self.crossed += len(data)
        view = memoryview(data)
        while view:
            self._wait(deadline, writing=True)
            try:
                view = view[self._control.send(view) :]
            except BlockingIOError:
                pass
            except OSError:
                raise Died from None

    def receive(self, deadline: float) -> dict[str, Any]:
        """Return the next message of this exchange; nothing else about it is checked."""
        while self._stray <= MAX_STRAY:
            before = self.crossed
            message = self._receive(deadline)
            if message.get("id") == self._exchange:  # a program may have sent others
                self.drain()
                return message
            self._stray += max(self.crossed - before, MAX_STRAY // 8)
        raise Died

    def _receive(self, deadline: float) -> dict[str, Any]:
        while True:
            size = int.from_bytes(self._received[:4], "big")
            if size > guest.MAX_MESSAGE:
                raise Died
            if len(self._received) >= 4 + size:
                break
            self._wait(deadline)
            try:
                part = self._control.recv(1 << 16)
            except BlockingIOError:
                continue
            except OSError:
                raise Died from None
            if not part:
                raise Died
            self._received += part
        self.crossed += 4 + size
        body = bytes(self._received[4 : 4 + size])
        del self._received[: 4 + size]
        try:
            message = parsed(body.decode())
        except (ValueError, RecursionError, guest.NotLiteral):
            raise Died from None
        if not isinstance(message, dict):
            raise Died
        return message

    def _wait(self, deadline: float, writing: bool = False) -> None:
        """Wait until the socket is ready; meanwhile, keep the printed output."""
        poll = select.poll()
        poll.register(self._control, select.POLLOUT if writing else select.POLLIN)
        poll.register(self._output, select.POLLIN)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise OutOfTime
            ready = dict(poll.poll(left * 1000))
            if self._output in ready:
                self._flood -= self.drain(1 << 20)
                if self._flood < 0:
                    raise Died
                if ready[self._output] & select.POLLHUP:
                    poll.unregister(self._output)
            if self._control.fileno() in ready:
                return

    def drain(self, at_most: int = FLOOD_BYTES) -> int:
        """Take what is in the output pipe, and keep the beginning; how much was taken."""
        taken = 0
        while taken < at_most:
            try:
                part = os.read(self._output, 1 << 16)
            except OSError:  # nothing there
                break
            if not part:
                break
            self.text += part[: max(0, self._kept - len(self.text))]
            taken += len(part)
        return taken


def _close(control: socket.socket, output: int, end: Callable[[], None], owner: int) -> None:
    control.close()
    if os.getpid() == owner:  # in a fork of this process, the sandbox is the parent's
        end()
        poll = select.poll()
        poll.register(output, 0)  # POLLHUP comes always: when the last process that could write is gone
        poll.poll(END_SECONDS * 1000)
    os.close(output)


class ProcessSandbox(Sandbox):
    """A sandbox whose sessions are processes that run `guest.py`."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    @abstractmethod
    def start(self, code: str) -> GuestProcess:
        """Start a guest, of which we know that it is going to run this code."""

    def session(self) -> ProcessSession:
        return ProcessSession(self)


class ProcessSession(Session):
    """A session in a guest. When its process is gone, the next run starts another one and replays the cells."""

    def __init__(self, sandbox: ProcessSandbox) -> None:
        self._sandbox = sandbox
        self._limits = sandbox.limits
        self._cells: list[Cell] = []
        self._guest: GuestProcess | None = None
        self._owner = os.getpid()

    def run(self, code: str, functions: Functions | None = None) -> Run:
        begun = time.monotonic()
        note = self._prepare(code)
        answers: list[dict[str, Any]] = []
        status, error, ending = self._run(code, functions or {}, answers)
        assert self._guest is not None
        printed = note + self._guest.text.decode("utf-8", "replace")
        if status in ("timeout", "died"):
            self.close()
            ending = UNCHANGED.format(error)
        else:
            self._cells.append(Cell(code, tuple(functions or ()), tuple(answers)))
        output = shown(printed, self._limits.output, ending)
        seconds = time.monotonic() - begun
        return Run(output, status, error, self._sandbox.backend, seconds)

    def call(self, name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        message = {"call": name, "arguments": check_arguments(args, kwargs)}
        self._prepare("")
        assert self._guest is not None
        deadline = time.monotonic() + self._limits.wall_seconds
        try:
            self._guest.begin(0)
            self._guest.send(message, deadline)
            answer = self._guest.receive(deadline)
            self._guest.rest()
            return call_result(answer)
        except OutOfTime:
            self.close()
            raise CallError("Timeout", OUT_OF_TIME.format(self._limits.wall_seconds)) from None
        except Died:
            self.close()
            raise CallError("Died", "the process ended") from None

    def alive(self) -> bool:
        """Return True if there is a guest and it runs."""
        return self._guest is not None and self._guest.alive()

    def get_state(self) -> State:
        return State(tuple(self._cells))

    def set_state(self, state: State | None) -> None:
        self.close()
        self._cells = list(state.cells) if state is not None else []

    def close(self) -> None:
        if self._guest is not None:
            self._guest.close()
            self._guest = None

    def _prepare(self, code: str) -> str:
        """Prepare a guest with the names of this session. Return a note if they could not be made again."""
        if self._owner != os.getpid():  # in a fork of the process that began the session, the guest is the parent's
            self.close()
            self._owner = os.getpid()
        if self._guest is not None:
            return ""
        everything = "\n".join([*(cell.code for cell in self._cells), code])
        self._guest = self._sandbox.start(everything)
        deadline = time.monotonic() + REPLAY_RUNS * self._limits.wall_seconds
        for cell in self._cells:
            status, _, _ = self._run(cell.code, dict.fromkeys(cell.functions), [], cell.answers, deadline)
            if status in ("timeout", "died"):
                self.close()
                self._guest = self._sandbox.start(code)
                self._cells.clear()
                return LOST
        return ""

    def _run(
        self,
        code: str,
        functions: Mapping[str, Callable[..., Any] | None],
        answers: list[dict[str, Any]],
        recorded: Sequence[dict[str, Any]] = (),
        latest: float = float("inf"),
    ) -> tuple[Status, str | None, str]:
        """Run one cell in the guest. Return its status, and its error in one line and in several. Append the answers of
        functions to `answers`, unless they are `recorded` already."""
        process, limits = self._guest, self._limits
        assert process is not None
        deadline = min(latest, time.monotonic() + limits.wall_seconds)
        known = iter(recorded)
        try:
            process.begin(4 * limits.output + 4)  # a character has at most four bytes
            process.send({"run": encodable(code), "functions": list(functions)}, deadline)
            answer = process.receive(deadline)
            while "invoke" in answer:
                if len(answers) >= MAX_ASKED or process.crossed > MAX_CROSSED:
                    return "died", ASKED, ""
                args, kwargs = guest.decode(answer["arguments"])
                reply = next(known, None) or invoke(functions[answer["invoke"]], args, kwargs)
                answers.append(reply)
                process.send(reply, deadline)
                answer = process.receive(deadline)
            process.rest()
            return outcome(answer)
        except OutOfTime:
            return "timeout", OUT_OF_TIME.format(limits.wall_seconds), ""
        except (Died, *BROKEN):
            process.drain()
            return "died", ENDED, ""


def parsed(text: str) -> Any:
    """Parse a guest's message.

    Raises:
        NotLiteral, ValueError or RecursionError: it is too much, or no JSON.
    """
    guest.check_size(text)
    return json.loads(text)


def outcome(answer: dict[str, Any]) -> tuple[Status, str | None, str]:
    """Return status, error and traceback from a guest's answer to a run. Raises one of BROKEN if they are invalid."""
    if answer["error"] is None:
        return "ok", None, ""
    kind, message = (str(part)[:1000] for part in answer["error"])
    if answer.get("timeout"):
        return "timeout", message, ""
    return "exception", f"{kind}: {message}" if message else kind, str(answer.get("shown", ""))


def call_result(answer: Any) -> Any:
    """Return the value in a guest's answer to a call.

    Raises:
        CallError: there is none.
    """
    try:
        if "value" in answer:
            return guest.decode(answer["value"])
        kind, message = (str(part)[:1000] for part in answer["error"])
    except BROKEN:
        raise CallError("Died", "the process gave no answer that makes sense") from None
    raise CallError(kind if kind != "Died" else "Exception", message)  # a program's own class may have that name


def check_arguments(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    """Return the arguments as they are sent to the guest.

    Raises:
        ValueError: they are not made of literals.
    """
    try:
        return guest.encode((tuple(args), dict(kwargs or {})))
    except (guest.NotLiteral, RecursionError) as error:
        raise ValueError(f"an argument cannot cross into the sandbox: {error}") from None


def invoke(function: Callable[..., Any] | None, args: Any, kwargs: Any) -> dict[str, Any]:
    """Run one of our functions for a program; the answer as it crosses. Arguments must be made of literals."""
    if function is None:
        return {"raise": ["RuntimeError", "a replayed cell called a function more often than before"]}
    try:
        args, kwargs = guest.decode(guest.encode((tuple(args), dict(kwargs))))
        return {"value": guest.encode(function(*args, **kwargs))}
    except CallError as error:
        return {"raise": [error.kind, error.message]}
    except Exception as error:
        return {"raise": [type(error).__name__, str(error)[:1000]]}


def encodable(text: str) -> str:
    """Return the text without lone surrogates, which cannot be encoded."""
    return text.encode("utf-8", "replace").decode("utf-8")


def guest_settings(limits: Limits) -> dict[str, Any]:
    """Return the limits that a guest needs to know."""
    names = ("cpu_seconds", "memory", "output", "processes", "files")
    others: dict[str, Any] = {"uid": None, "path": [], "mounts": [], "child": False}
    return {name: getattr(limits, name) for name in names} | others
