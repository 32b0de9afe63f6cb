"""The interface of tools: a `Tool` takes JSON arguments and reports what happened in a `ToolResult`.

A tool knows nothing of environments, rewards or tokens: it says what happened, and the environment decides what
that means. A tool may raise, hang or return nonsense; `run_tool` and `run_batch` (in `running.py`) are the way to call
it, and they always answer.

There are two kinds of failure. A failed call is the policy's: bad arguments, an unknown title, code that raises, a
missing path, and any exception that is not named here. An infrastructure error (`fault`: a server that is down, a lost
sandbox) never costs the policy anything. A tool reports it by raising `ToolFault`, ConnectionError, TimeoutError or
another OSError that arguments do not cause, or by a result with `fault`; see `is_fault`.
"""

from __future__ import annotations

import errno
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from typing import Any

from agent_r1_tools.schemas import checker, json_type, kind
from agent_r1_tools.text import clean_text, encodable

__all__ = ["Tool", "ToolFault", "ToolResult", "clean_text", "encodable"]

DEFAULT_TIMEOUT = 30.0
DEFAULT_MAX_RESULT_CHARS = 8192


class ToolFault(Exception):
    """An infrastructure error: a part that a tool depends on is down, lost or broken. The arguments are not the cause.

    The message goes to whoever runs the experiment.

    Args:
        ran: whether the call may have had an effect. None: the same call may be made again, in the session as it was
            before. True: it may have had one, and only a `repeatable` tool makes it again. False: it did not run, and
            is made again even if the state of the session is unknown.
    """

    def __init__(self, *args: object, ran: bool | None = None) -> None:
        super().__init__(*args)
        self.ran = ran


# OSErrors that a policy can cause by its arguments. As faults they would let a policy exclude its bad episodes. Errors
# of a broken machine are left out: EIO, EBADF, ENOSPC, ENOMEM, EMFILE, ESRCH, and an OSError without a number.
POLICY_ERRORS = (FileNotFoundError, NotADirectoryError, IsADirectoryError, FileExistsError, PermissionError)
"""Errors about a path."""
POLICY_NUMBERS = frozenset(
    [
        errno.ENAMETOOLONG, errno.ELOOP, errno.EILSEQ,  # a path that cannot be
        errno.ENOTEMPTY, errno.EXDEV,  # a folder to remove that is full, a place where a file cannot be moved
        errno.EBUSY, errno.ETXTBSY, errno.EROFS,  # what is mounted, running, or not to be written
        errno.ENXIO, errno.ENODEV, errno.ENOTTY, errno.ESPIPE, errno.EOPNOTSUPP,  # a socket, a device, a pipe
        errno.ENOEXEC, errno.E2BIG,  # a program that is none, arguments that are too long
        errno.EINVAL, errno.EDOM, errno.ERANGE, errno.EOVERFLOW, errno.EFBIG,  # seek(-1), a date too far off
    ]
)  # fmt: skip
"""`errno` of a plain OSError; its subclasses (of ssl and socket, for example) may have their own numbers."""
POLICY_NAMES = frozenset(
    [
        "gzip.BadGzipFile",
        "shutil.Error",  # SameFileError too
        "shutil.ReadError",
        "shutil.SpecialFileError",
        "PIL.UnidentifiedImageError",
    ]
)
"""Errors about a file's content, by name, so that their packages are not imported."""


def is_fault(error: BaseException) -> bool:
    """Return True if the error is an infrastructure error and not caused by the policy's arguments.

    These are `ToolFault`, and OSErrors outside POLICY_ERRORS, POLICY_NUMBERS and POLICY_NAMES that are not a ValueError
    too, such as io.UnsupportedOperation. A tool whose arguments never cause OSErrors turns them into `ToolFault`."""
    if not isinstance(error, OSError):
        return isinstance(error, ToolFault)
    if isinstance(error, POLICY_ERRORS) or (type(error) is OSError and error.errno in POLICY_NUMBERS):
        return False
    if isinstance(error, ValueError) and error.errno is None:  # a certificate that cannot be verified has a number
        return False
    return not any(f"{kind.__module__}.{kind.__qualname__}" in POLICY_NAMES for kind in type(error).__mro__)


def may_have_run(error: BaseException) -> bool | None:
    """Return the attribute `ran` of a `ToolFault`.

    Other exceptions do not say what happened before them: a refused connection may be the second one of a call."""
    return error.ran if isinstance(error, ToolFault) else True


def check_limits(tool: Tool) -> None:
    """Raise ValueError if the bounds of a tool would break every call."""
    seconds: Any = tool.timeout
    longest: Any = tool.max_result_chars
    is_number = isinstance(seconds, Real) and not isinstance(seconds, bool)
    if not is_number or not seconds > 0:  # NaN isn't
        form = "a number of seconds above 0 (math.inf for a tool that never blocks)"
        raise ValueError(f"timeout of the tool {tool.name} must be {form}, got {seconds!r}")
    if isinstance(longest, bool) or not isinstance(longest, Integral) or longest < 1:
        raise ValueError(f"max_result_chars of the tool {tool.name} must be an integer, at least 1, got {longest!r}")


def inner(function: Any) -> Any:
    """Return the function inside a `functools.partial`; any other function unchanged."""
    while isinstance(function, partial):
        function = function.func
    return function


class _Missing:
    """A placeholder for an attribute that a subclass must set. Reading it raises an error."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, tool: Tool | None, kind: type) -> Any:
        problem = f"the tool {kind.__name__} has no {self.name}; a Tool sets name, description and parameters"
        raise AttributeError(problem, name=self.name, obj=tool)


def _missing() -> Any:
    return _Missing()


@dataclass(frozen=True)
class ToolResult:
    """The result of one call.

    Attributes:
        content: the text that the policy reads.
        ok: True if the call did its work. A search without hits is ok; a search that could not run is not.
        data: the same information for programs. Failures made by `run_tool` carry `{"error": kind}` with the kind
            "bad_arguments", "timeout", "exception" or "bad_result".
        done: the tool has nothing more to do, such as a game that is over. The environment decides what that
            means.
        fault: the infrastructure error, in a line for people; None if there was none. `run_tool` makes such a
            result not ok.
        ran: for an infrastructure error, True if the call may have had an effect; see `ToolFault`.
    """

    content: str
    ok: bool = True
    data: Any = None
    done: bool = False
    fault: str | None = None
    ran: bool | None = None

    def __repr__(self) -> str:
        rest = ", done=True" * self.done + (f", fault={self.fault!r}" if self.fault is not None else "")
        return f"ToolResult(content={self.content!r}, ok={self.ok!r}, data={self.data!r}{rest})"


class Tool(ABC):
    """A tool that an agent calls by `name` with arguments that fit `parameters`.

    Attributes:
        name: the name by which the policy calls it.
        description: its description for the policy.
        parameters: the JSON schema (type "object") of the arguments; not to be changed after the first call.
        timeout: seconds that one call (or one `batch_execute`) may take. `math.inf`: the tool never blocks. It then
            runs in the caller's thread, which is much cheaper.
        concurrency_safe: True if calls do not influence each other. They may run at the same time in any threads, and
            equal calls in a batch may share one execution. False for a tool with a session: every call is executed in
            order, and an environment makes all calls of an episode in one thread.
        max_result_chars: the length to which `run_tool` cuts the content, marker included.
        timeout_is_fault: the meaning of a call beyond `timeout`. False: the call was too costly and failed. True: an
            infrastructure error, for a tool that itself bounds the cost of its arguments.
        repeatable: whether a call that faulted may be made again although it may have run: it has no effect (a search),
            or none beyond what `set_state` takes back. None: True where `concurrency_safe`, or where the class has its
            own `get_state`.
    """

    name: str = _missing()
    description: str = _missing()
    parameters: dict[str, Any] = _missing()
    timeout: float = DEFAULT_TIMEOUT
    concurrency_safe: bool = True
    max_result_chars: int = DEFAULT_MAX_RESULT_CHARS
    timeout_is_fault: bool = False
    repeatable: bool | None = None

    @abstractmethod
    def execute(self, arguments: dict[str, Any]) -> ToolResult:
        """Make one call. `arguments` fit `parameters`.

        May raise: `ToolFault`, or an OSError that arguments do not cause, reports an infrastructure error (see
        `is_fault`). The policy reads any other exception as a failed call.
        """

    def batch_execute(self, batch: list[dict[str, Any]]) -> list[ToolResult]:
        """Make many calls, one result each, in order. Override it where many at once are cheaper than one by one.

        When an override raises or returns the wrong number of results, `run_batch` makes the calls one by one
        instead where the tool is `repeatable`: some may have been made. An override shares one `timeout` among its
        calls.
        """
        return [self.execute(arguments) for arguments in batch]

    @property
    def schema(self) -> dict[str, Any]:
        """Return the tool in the form that chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    def validate(self, arguments: Any) -> str | None:
        """Return an error in a line that the policy can act on, or None if the arguments are right."""
        if not isinstance(arguments, dict):
            return f"arguments must be a JSON object, not {json_type(arguments)}. {self.expected()}"
        check = checker(self.parameters)
        if check.surely_valid(arguments):
            return None
        problems = check.problems(arguments)
        return f"{'; '.join(problems)}. {self.expected()}" if problems else None

    def may_repeat(self, ran: bool | None = True) -> bool:
        """Return whether a call that faulted may be made again. `ran`: see `ToolFault`."""
        if not ran:
            return True
        if self.repeatable is not None:
            return self.repeatable
        return self.concurrency_safe or type(self).get_state is not Tool.get_state

    def expected(self) -> str:
        """Return one line that lists the parameters."""
        required = self.parameters.get("required", [])
        parts = [
            f"{name} ({kind(schema)}{'' if name in required else ', optional'})"
            for name, schema in self.parameters.get("properties", {}).items()
        ]
        return f"Expected: {', '.join(parts) or 'no arguments'}."

    def get_state(self) -> Any:
        """Return the state of the tool's session, from which `set_state` can branch; None for a tool without one.

        A session that does not know its state raises. A call that may have run is then made once, and its
        infrastructure error ends the episode.
        """
        return None

    def set_state(self, state: Any) -> None:
        """Return to a state of `get_state`. A tool without a session does nothing."""
        return None

    def new_session(self) -> bool:
        """Leave the session to a call that ran out of time and may still run, and begin one that it cannot reach.

        Return False if that is not possible. The next episode then waits until the call has ended. This default is
        enough for a tool without a session.
        """
        return type(self).set_state is Tool.set_state

    def lane(self) -> AbstractContextManager[Any]:
        """Return a context that a call waits for and holds, such as one of a few processors. Its time begins then.

        It is not used for a tool with `timeout=math.inf`.
        """
        return nullcontext()

    def close(self) -> None:
        """End the tool's session, such as a process. A tool without one does nothing."""
        return None

    @classmethod
    def from_function(
        cls,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        parameters: dict[str, Any] | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        concurrency_safe: bool | None = None,
        max_result_chars: int = DEFAULT_MAX_RESULT_CHARS,
        timeout_is_fault: bool = False,
        repeatable: bool | None = False,
    ) -> Tool:
        """Make a tool of a function: a typed one with a Google-style docstring, or any with a JSON schema.

        The schema comes from the type hints (str, int, float, bool, list, dict, Optional, Union, Literal, Any,
        Annotated with a description and bounds; where pydantic is there its models, dataclasses, TypedDicts and Enums),
        the descriptions from Annotated or else the docstring, and parameters with a default are optional. Whole numbers
        come as an int where the schema says integer. `parameters` takes its place; the function is then called with the
        arguments by name. Async functions run on one shared event loop, in its own thread.

        The function may return a `ToolResult`. Any other value becomes the `content`: text unchanged, everything else
        as JSON; `data` is the value itself. A function that fetches something the policy names, such as a host, must
        catch its OSErrors: an OSError counts as an infrastructure error, except if arguments cause it, such as a
        missing path (see `is_fault`).

        Args:
            concurrency_safe: None: True, but False for an object that is called, or a method of one: it has its state.
            repeatable: True for a function without effects, such as a search. Otherwise a call that raised an OSError
                (also for a refused connection) or ran out of time is not made again, because its effect is
                unknown. `ToolFault` allows it.

        Raises:
            TypeError: `function` can't be called, its signature cannot be written as a JSON schema (*args, other
                types), or `parameters` is none.
            ValueError: the function has no usable name (a lambda) and none was given; `timeout` isn't above 0, or
                `max_result_chars` below 1.
        """
        from agent_r1_tools.functions import FunctionTool  # it is a Tool

        tool_class = cls if issubclass(cls, FunctionTool) else FunctionTool
        tool = tool_class(function, name, description, parameters)
        if concurrency_safe is None:
            called = inner(function)
            own: Any = getattr(called, "__self__", None) if inspect.isroutine(called) else called
            concurrency_safe = inspect.isclass(called) or own is None or inspect.isclass(own) or inspect.ismodule(own)
        tool.timeout, tool.concurrency_safe = timeout, concurrency_safe
        tool.max_result_chars, tool.timeout_is_fault = max_result_chars, timeout_is_fault
        tool.repeatable = repeatable
        check_limits(tool)
        return tool
