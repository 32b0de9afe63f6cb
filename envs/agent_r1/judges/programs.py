"""The judge of programs: it runs a program and its tests in sandboxes, where neither can harm us or the other.

The candidate runs in one sandbox and the test in another, where a proxy replaces the candidate. Arguments and results
cross as built-in literals. So an object whose `__eq__` is always true gains nothing, and neither does a candidate that
searches its own process for the test.
"""

from __future__ import annotations

import ast
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from agent_r1_tools import Tool, ToolFault, ToolResult
from agent_r1_tools.running import describe
from agent_r1_tools.tool import is_fault

if TYPE_CHECKING:
    from agent_r1_tools.python import CallError, Run, Sandbox, Session

PROGRAM_SECONDS = 5.0  # of processor time, for the program to load and for each call
NOT_MAIN = '__name__ = "builtins"'  # as in the official `exec`: `if __name__ == "__main__"` does not run
_lanes = threading.BoundedSemaphore(os.cpu_count() or 1)  # more programs at once would slow each other down


def _renew_lanes() -> None:
    """Make new lanes in a fork of this process: the holders of the old ones are in the parent."""
    global _lanes
    _lanes = threading.BoundedSemaphore(os.cpu_count() or 1)


os.register_at_fork(after_in_child=_renew_lanes)


@dataclass(frozen=True)
class Suite:
    """Tests and their requirements.

    Attributes:
        names: functions (or classes) of the candidate that the tests call.
        setup: code that runs before the tests.
        tests: pieces of code; each raises if it fails.
        one_process: the tests pass objects or types, which cannot cross from sandbox to sandbox. They run in the
            candidate's process, so a candidate could cheat (MBPP 367, 533, 601 and 927).
    """

    names: tuple[str, ...]
    setup: str
    tests: tuple[str, ...]
    one_process: bool = False


@dataclass(frozen=True)
class Outcome:
    """The result of tests: `load_error` if the program does not load, else an error (None: passed) for each test.

    `died` is True if a process ended early, because of the program or because something outside killed it.
    """

    load_error: str | None
    errors: tuple[str | None, ...]
    died: bool = False

    @property
    def passed(self) -> bool:
        return self.load_error is None and not any(self.errors)


def check_program(sandbox: Sandbox, program: str, tests: Suite, explained: int | None = None) -> Outcome:
    """Run tests against a program, up to the first that fails; later tests count as failed, too.

    With `explained` all tests run, until one times out. Among the first `explained` tests, a failed `assert f(x) == y`
    reports the value of f(x). If a process died, everything runs a second time: a second death is the program's.

    Raises ToolFault, or an OSError that is a fault (see `is_fault`), if the sandbox fails.
    """
    try:
        outcome = _check_once(sandbox, program, tests, explained)
        return _check_once(sandbox, program, tests, explained) if outcome.died else outcome
    except OSError as error:  # an error of the sandbox: a program cannot name a path out here
        raise error if is_fault(error) else ToolFault(describe(error)) from error


def _check_once(sandbox: Sandbox, program: str, tests: Suite, explained: int | None) -> Outcome:
    with ExitStack() as stack:
        candidate = stack.enter_context(sandbox.session())
        candidate.run(NOT_MAIN)
        loaded = candidate.run(program)
        if not loaded.ok:
            return Outcome(loaded.output.strip() or loaded.error or loaded.status, (), loaded.status == "died")
        tester: Session = candidate
        functions: dict[str, Callable[..., Any]] = {}
        faults: list[Exception] = []  # faults of the candidate's sandbox, while a test called it
        deaths: list[CallError] = []  # deaths of its process
        if not tests.one_process:
            tester = stack.enter_context(sandbox.session())
            functions = {name: _proxy(candidate, name, faults, deaths) for name in tests.names}

        def run_in_tester(code: str) -> Run:
            run = tester.run(code, functions)
            if faults:
                raise faults[0]
            return run

        died = run_in_tester(tests.setup).status == "died"
        errors: list[str | None] = []
        for number, test in enumerate(tests.tests):
            run = run_in_tester(test)
            error = None if run.ok else run.error or run.status
            died = died or run.status == "died"
            is_wrong = error is not None and error.startswith("AssertionError")
            if is_wrong and number < (explained or 0) and (left := left_side(test)):
                error = f"{left} is {run_in_tester(left).output.strip()}"
            errors.append(error)
            if error and (explained is None or run.status in ("timeout", "died") or "Timeout" in error):
                break
        not_run = len(tests.tests) - len(errors)
        return Outcome(None, (*errors, *errors[-1:] * not_run), died or bool(deaths))


def _proxy(candidate: Session, name: str, faults: list[Exception], deaths: list[CallError]) -> Callable[..., Any]:
    """Return the candidate's function, for a test. It records faults and deaths: the test sees only an exception."""
    from agent_r1_tools.python import CallError

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return candidate.call(name, args, kwargs)
        except (ToolFault, OSError) as error:
            faults.append(error)
            raise
        except CallError as error:
            if error.kind == "Died":
                deaths.append(error)
            raise

    return call


def left_side(test: str) -> str | None:
    """Return f(x) of `assert f(x) == y`. Tests come from the data set, never from a policy."""
    match ast.parse(test).body:
        case [ast.Assert(test=ast.Compare(left=left))]:
            try:
                return ast.unparse(left)
            except RecursionError:  # nested too deeply to be written out
                return None
    return None


class RunTests(Tool):
    """A tool that runs a program against the tests of the prompt, and silently against those of `progress`.

    `ToolResult.data` is `{"passed": [indexes], "progress": [indexes], "error": str | None}`: the tests of each kind
    that pass, and the reason if the program did not load.
    """

    name = "run_tests"
    description = "Run a whole program against the tests of the task and report which of them fail."
    parameters = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The whole program."}},
        "required": ["code"],
        "additionalProperties": False,
    }
    timeout = 3600.0  # without waiting for other programs; the sandbox bounds every run
    timeout_is_fault = True
    concurrency_safe = False  # each episode has its own tests
    repeatable = True  # everything runs in sandboxes

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.tests = Suite((), "", ())
        self.progress: Suite | None = None  # the tests of the prompt
        self.complete: Callable[[str], str] = str

    def lane(self) -> AbstractContextManager[Any]:
        return _lanes

    def execute(self, arguments: dict[str, Any]) -> ToolResult:
        shown, progress = len(self.tests.tests), self.progress or self.tests
        more = () if progress == self.tests else progress.tests
        both = replace(progress, tests=self.tests.tests + more)
        outcome = check_program(self.sandbox, self.complete(arguments["code"]), both, explained=shown)
        if outcome.load_error is not None:
            return ToolResult(
                f"The program does not run:\n{outcome.load_error}",
                ok=False,
                data={"passed": [], "progress": [], "error": outcome.load_error},
            )
        passed = [index for index, error in enumerate(outcome.errors[:shown]) if error is None]
        unseen = [index for index, error in enumerate(outcome.errors[shown:]) if error is None]
        data = {"passed": passed, "progress": unseen if more else passed, "error": None}
        if not shown:
            return ToolResult("The program runs. The prompt has no tests.", data=data)
        lines = [f"{len(passed)} of {shown} tests pass."]
        lines += [
            f"Failed: {test}\n  {error}"
            for test, error in zip(self.tests.tests, outcome.errors, strict=False)
            if error is not None
        ]
        return ToolResult("\n".join(lines), data=data)


@lru_cache(maxsize=8)
def judge_sandbox(backend: str) -> Sandbox:
    """Return the sandbox for judging programs: for "auto" the first available one with all of CPython."""
    from agent_r1_tools.python import Limits, SandboxError, open_sandbox
    from agent_r1_tools.python.choose import LOCAL

    limits = Limits(wall_seconds=2 * PROGRAM_SECONDS, cpu_seconds=PROGRAM_SECONDS)
    for full in [name for name, local in LOCAL.items() if local.all_of_python] if backend == "auto" else []:
        try:
            return open_sandbox(full, limits)
        except SandboxError:
            pass
    return open_sandbox(backend, limits)
