"""The interface of all sandboxes: limits, runs, sessions. The backends are in the files next to this one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agent_r1_tools.tool import ToolFault

Status = Literal["ok", "exception", "timeout", "died"]
Functions = Mapping[str, Callable[..., Any]]

MAX_ENDING = 4000
"""Characters of the longest traceback."""
LOST = "[the session could not be restored; it starts anew]\n"
UNCHANGED = "[{}; the session is as it was before]"
OUT_OF_TIME = "no result within {:g} seconds"
ASKED = "it asked our functions too often, or for too much"
ENDED = "the process ended: it left by itself, crashed, or used too much memory"


class SandboxError(ToolFault, RuntimeError):
    """An error of the sandbox and not of the code: it is missing or broke. The message names a remedy."""


class CallError(Exception):
    """A function inside a sandbox that returned no value.

    Attributes:
        kind: the name of the exception that it raised; or "Timeout", "Died" (the process ended or was killed),
            "NotLiteral" (it returned something that is not made of built-in literals), "Missing" (the interpreter
            lacks what it needs), "Refused" (a server takes other programs, but not this one).
        message: the message of the exception.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


@dataclass(frozen=True)
class Limits:
    """Limits of a program, the same for every backend. Time and output count for each run of a session.

    Attributes:
        wall_seconds: time until the process is killed.
        cpu_seconds: processor time of the session's process.
        memory: bytes of address space, for each of its processes.
        output: characters that are kept of what it prints.
        processes: processes and threads at a time, its own included.
        files: bytes that it may write to the files of its `/tmp`, some 1,000 at most, which end with the session.
        network: whether it may open internet sockets. Only bubblewrap can allow it.
    """

    wall_seconds: float = 10.0
    cpu_seconds: float = 10.0
    memory: int = 1 << 30
    output: int = 8192
    processes: int = 1
    files: int = 16 << 20
    network: bool = False

    def __post_init__(self) -> None:
        for name in ("wall_seconds", "cpu_seconds", "memory", "output", "processes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.files < 0:
            raise ValueError(f"files must not be negative, not {self.files}")
        if self.memory < 64 << 20:
            raise ValueError(f"memory must be at least 64 MiB, or Python itself doesn't start; got {self.memory} bytes")


@dataclass(frozen=True)
class Run:
    """The result of one run.

    Attributes:
        output: what a notebook would show: prints and the value of a last expression, cut with a marker, and a short
            traceback.
        status: "ok"; "exception"; "timeout" (wall or processor time); "died" (the process ended or was killed:
            os._exit, a crash, too much memory). After the last two the session is as it was before the run.
        error: one line that says what went wrong, or None.
        backend: where it ran.
        seconds: how long it took, in wall time.
    """

    output: str
    status: Status = "ok"
    error: str | None = None
    backend: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.status == "ok"


@dataclass(frozen=True)
class Cell:
    """Code that a session ran, with the answers of outside functions, so that it can run again unchanged."""

    code: str
    functions: tuple[str, ...] = ()
    answers: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class State:
    """A snapshot of a session: the cells that led to it, and the backend's own data."""

    cells: tuple[Cell, ...] = ()
    dump: bytes | None = None


class Session(ABC):
    """A session that keeps names between runs. Only one thread may use it at a time."""

    @abstractmethod
    def run(self, code: str, functions: Functions | None = None) -> Run:
        """Run a cell. Whatever the code does is in the `Run`.

        Args:
            code: what to run.
            functions: functions of this process that the code may call, by name. Arguments and results cross as
                literals; an exception is raised again inside, under the same name where that is a built-in one.

        Raises:
            SandboxError: the sandbox is at fault.
        """

    @abstractmethod
    def call(self, name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call a function that a cell has defined.

        What comes back is made of None, bool, int, float, complex, str, bytes, list, tuple, dict, set and frozenset,
        exactly these, whatever the function returned: comparing it can't be tricked. What calls change in the session
        is not part of `get_state`.

        Raises:
            CallError: there is no value; says why.
            SandboxError: the sandbox is at fault.
            ValueError: an argument is not made of literals.
        """

    @abstractmethod
    def get_state(self) -> State:
        """Return a snapshot, which can be pickled."""

    @abstractmethod
    def set_state(self, state: State | None) -> None:
        """Restore a snapshot of this or another session. None: begin again."""

    @abstractmethod
    def close(self) -> None:
        """End what runs for this session. It may be used again: it then continues from its state."""

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Sandbox(ABC):
    """A place where code runs.

    Attributes:
        backend: which one, as a person would say it.
        limits: what holds for every run.
    """

    backend: str
    limits: Limits

    @abstractmethod
    def session(self) -> Session:
        """Return a new session. Its process starts with its first run."""

    def run(self, code: str) -> Run:
        """Run a program by itself."""
        with self.session() as session:
            return session.run(code)


def cut(text: str, limit: int) -> str:
    """Return the text, cut to the limit with a marker."""
    if len(text) <= limit:
        return text
    marker = f"\n... [cut: longer than {limit} characters]"
    return text[: max(0, limit - len(marker))] + marker


def shown(printed: str, limit: int, ending: str) -> str:
    """Return the output, cut, followed by its ending, such as a traceback. The ending is short and never cut."""
    text = cut(printed, limit)
    newline = "\n" if ending and text and not text.endswith("\n") else ""
    return text + newline + cut(ending, MAX_ENDING)
