"""Tool calls: whatever a tool does, `run_tool` and `run_batch` return a result."""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from agent_r1_tools.text import as_text, clean_text
from agent_r1_tools.threads import OneThread, start_call
from agent_r1_tools.tool import Tool, ToolResult, inner, is_fault, may_have_run
from agent_r1_tools.whole_numbers import whole_numbers

# The most calls of one batch that run at the same time; a call counts its timeout from its own start.
MAX_PARALLEL_CALLS = min(32, (os.cpu_count() or 1) + 4)
MAX_FAULT_CHARS = 300
WATCHED_CALLS = 10  # the last calls of a tool, of which most must not fail


def run_tool(tool: Tool, arguments: Any, *, strict: bool | None = None, thread: OneThread | None = None) -> ToolResult:
    """Make one call and always answer.

    Every failure (wrong arguments, an exception, a timeout, a result of the wrong type) becomes a
    `ToolResult(ok=False)` whose content the policy can read. Infrastructure errors set `fault` as well: `ToolFault`,
    OSError (except those that arguments cause, see `is_fault`), a result with `fault`, and a timeout of a tool with
    `timeout_is_fault`. The content is bounded by `tool.max_result_chars` and always encodable: lone surrogates and NUL
    become U+FFFD. After a timeout the call continues in a daemon thread (see `at_work`), which does not block exit.
    Only KeyboardInterrupt and SystemExit in the main thread pass through.

    A tool that fails in most of its last ten calls (raises, runs out of time, returns nonsense) is warned about, once.

    Args:
        strict: raise what the tool raises, instead of telling it to the policy, where it is no fault; and a TypeError
            for a result of the wrong type. None: what AGENT_R1_STRICT says (1 or true for True).
        thread: makes the calls of a tool that is not `concurrency_safe`, so that its session stays in one thread. None:
            a call with a timeout has its own thread.
    """
    failure, arguments = _checked(tool, arguments, strict)
    return _finish(tool, _attempt(tool, tool.execute, arguments, thread), strict) if failure is None else failure


def run_batch(tool: Tool, batch: Iterable[Any], *, strict: bool | None = None) -> list[ToolResult]:
    """Make many calls of one tool, with the guarantees of `run_tool`, results in order.

    Calls with equal arguments are executed once (if the tool is `concurrency_safe`); one bad call does not fail the
    others.
    """
    checked = [_checked(tool, arguments, strict) for arguments in batch]
    results, calls = [failure for failure, _ in checked], [arguments for _, arguments in checked]
    groups: dict[Any, list[int]] = {}  # equal calls together
    for index, arguments in enumerate(calls):
        if results[index] is None:
            groups.setdefault(_call_key(tool, arguments, index), []).append(index)
    answers = _execute_all(tool, [calls[indexes[0]] for indexes in groups.values()], strict)
    for indexes, answer in zip(groups.values(), answers, strict=True):
        for index in indexes:
            results[index] = answer
    return [result for result in results if result is not None]


def at_work(tool: Tool) -> bool:
    """Return True if a call that ran out of time still runs in the tool."""
    return any(getattr(thread, "left_in", None) is tool for thread in threading.enumerate())


def is_strict(strict: bool | None) -> bool:
    """Return True if a tool's own bug is raised: `strict` decides, or else AGENT_R1_STRICT.

    Raises ValueError for an unknown value of AGENT_R1_STRICT."""
    if strict is not None:
        return strict
    setting = os.environ.get("AGENT_R1_STRICT", "")
    if setting.lower() not in ("", "0", "1", "false", "true"):
        raise ValueError(f"AGENT_R1_STRICT must be 0, 1, true or false, got {setting!r}")
    return setting.lower() in ("1", "true")


def describe(error: BaseException) -> str:
    """Describe an exception, even if its `__str__` is broken."""
    try:
        message = str(error)
    except Exception:
        message = ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


# --- inside -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Failed:
    """An outcome that is not a result: the kind of the error, a line for the policy, whose fault it is, what was
    raised, and whether the call may have had an effect."""

    kind: str
    message: str
    fault: bool = False
    error: BaseException | None = None
    ran: bool | None = True


def _execute_all(tool: Tool, batch: list[dict[str, Any]], strict: bool | None) -> list[ToolResult]:
    if len(batch) > 1 and type(tool).batch_execute is not Tool.batch_execute:
        outcome = _attempt(tool, tool.batch_execute, batch)
        if isinstance(outcome, list | tuple) and len(outcome) == len(batch):
            return [_finish(tool, result, strict) for result in outcome]
        if not isinstance(outcome, _Failed):
            problem = f"{tool.name}.batch_execute must return a list of {len(batch)} results, got {outcome!r:.200}"
            outcome = _Failed("bad_result", problem, error=TypeError(problem))
        # Trying again would take as long again, or do what was done again.
        if outcome.kind == "timeout" or not tool.may_repeat(outcome.ran):
            return [_finish(tool, outcome, strict) for _ in batch]
        _raise_bug(tool, outcome, strict)
    lanes = min(len(batch), MAX_PARALLEL_CALLS)
    if tool.timeout == math.inf or not tool.concurrency_safe or lanes < 2:
        return [_finish(tool, _attempt(tool, tool.execute, arguments), strict) for arguments in batch]
    outcomes: list[Any] = [None] * len(batch)
    todo = iter(range(len(batch)))  # next() on a range iterator is atomic

    def work() -> None:
        for index in todo:
            outcomes[index] = _attempt(tool, tool.execute, batch[index])

    threads = [threading.Thread(target=work, daemon=True, name=f"tool-{tool.name}-lane") for _ in range(lanes - 1)]
    started = [thread for thread in threads if _start(thread)]
    work()  # the caller is a lane too, so that this ends even where no thread can be started
    for thread in started:
        thread.join()
    return [_finish(tool, outcome, strict) for outcome in outcomes]


def _attempt(tool: Tool, function: Callable[[Any], Any], argument: Any, thread: OneThread | None = None) -> Any:
    """Make a call and return its outcome: the tool's result, or `_Failed`."""
    thread = None if tool.concurrency_safe else thread
    if tool.timeout == math.inf:
        return _guarded(function if thread is None else partial(thread.run, function), argument)

    def in_lane(argument: Any) -> Any:
        with tool.lane():  # waiting for it is no part of the call's time
            return _in_time(tool, function, argument, thread)

    return _guarded(in_lane, argument)


def _in_time(tool: Tool, function: Callable[[Any], Any], argument: Any, one: OneThread | None) -> Any:
    outcomes: list[Any] = []

    def work() -> None:
        outcomes.append(_guarded(function, argument))

    try:
        thread, finished = start_call(f"tool-{tool.name}", work) if one is None else one.start(work)
    except RuntimeError:
        return _Failed("exception", "no thread could be started", fault=True, ran=False)
    if not finished.wait(float(min(tool.timeout, threading.TIMEOUT_MAX))) and thread.leave(tool, finished):
        return _Failed("timeout", f"no result within {float(tool.timeout):g} seconds", fault=tool.timeout_is_fault)
    return outcomes[0]


def _guarded(function: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return function(argument)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit) and threading.current_thread() is threading.main_thread():
            raise
        return _Failed("exception", describe(error), is_fault(error), error, may_have_run(error))


def _start(thread: threading.Thread) -> bool:
    try:
        thread.start()
    except RuntimeError:  # the machine has no thread left
        return False
    return True


def _checked(tool: Tool, arguments: Any, strict: bool | None) -> tuple[ToolResult | None, Any]:
    """Check the arguments. Return the error or None, and the arguments with ints where the schema requires them."""
    try:
        problem = tool.validate(arguments)
        if problem is None:
            return None, whole_numbers(tool.parameters, arguments)
    except Exception as error:
        if is_strict(strict):
            raise
        return _failure(tool, _Failed("exception", f"the arguments could not be checked: {describe(error)}")), None
    return _failure(tool, _Failed("bad_arguments", problem)), None


def _finish(tool: Tool, outcome: Any, strict: bool | None) -> ToolResult:
    """Return a safe result: right types, clean and bounded content."""
    if isinstance(outcome, str):
        outcome = ToolResult(outcome)
    if not isinstance(outcome, ToolResult | _Failed):
        problem = f"the tool returned {type(outcome).__name__} instead of a ToolResult"
        outcome = _Failed("bad_result", problem, error=TypeError(problem))
    if isinstance(outcome, ToolResult):
        content, ok, fault = outcome.content, outcome.ok, outcome.fault
        try:
            text = clean_text(content if type(content) is str else as_text(content), tool.max_result_chars)
            fault = None if fault is None else clean_text(str(fault), MAX_FAULT_CHARS)
            ok = bool(ok) and fault is None
        except Exception as error:
            outcome = _Failed("bad_result", f"the tool's result is not readable: {describe(error)}", error=error)
    _watch(tool, outcome)
    if isinstance(outcome, _Failed):
        _raise_bug(tool, outcome, strict)
        return _failure(tool, outcome)
    same = text is content and ok is outcome.ok and fault == outcome.fault
    return outcome if same else replace(outcome, content=text, ok=ok, fault=fault)


def _raise_bug(tool: Tool, failed: _Failed, strict: bool | None) -> None:
    """Raise a tool's exception if it is not an infrastructure error and `strict` asks for it."""
    if failed.error is not None and not failed.fault and is_strict(strict):
        failed.error.add_note(f"raised in a call of the tool {tool.name}, which is strict")
        raise failed.error


_last_calls: dict[tuple[type, str], deque[bool]] = {}  # did they fail? By class and name: every episode has its own
_warned: set[tuple[type, str]] = set()


def _watch(tool: Tool, outcome: Any) -> None:
    """Warn once about a tool that fails in most of its last calls. Otherwise only a policy would see it."""
    key = type(tool), tool.name
    calls = _last_calls.get(key) or _last_calls.setdefault(key, deque(maxlen=WATCHED_CALLS))
    failed = isinstance(outcome, _Failed) and not outcome.fault
    calls.append(failed)
    if not failed or len(calls) < WATCHED_CALLS or sum(calls) <= WATCHED_CALLS / 2 or key in _warned:
        return
    _warned.add(key)
    code = inspect.unwrap(inner(getattr(tool, "function", tool.execute)))
    module = getattr(code, "__module__", None) or type(tool).__module__
    file = getattr(sys.modules.get(module), "__file__", None) or module
    line = getattr(getattr(code, "__code__", None), "co_firstlineno", 1)
    message = (
        f"the tool {tool.name} failed in {sum(calls)} of its last {WATCHED_CALLS} calls, and only the policy reads why "
        f"(now: {outcome.message}). strict=True or AGENT_R1_STRICT=1 raises it with its traceback"
    )
    warnings.warn_explicit(message, RuntimeWarning, file, line, module)  # the place is the tool's, not ours


def _failure(tool: Tool, failed: _Failed) -> ToolResult:
    message = failed.message
    hides = bool(getattr(tool, "hidden", None))
    if hides and failed.error is not None and not failed.fault:
        message = type(failed.error).__name__  # its text may quote what is hidden from the policy
    content = clean_text(f"Error in {tool.name}: {message}", tool.max_result_chars)
    fault = clean_text(failed.message, MAX_FAULT_CHARS) if failed.fault else None
    return ToolResult(content, False, {"error": failed.kind}, fault=fault, ran=failed.ran if failed.fault else None)


def _call_key(tool: Tool, arguments: dict[str, Any], index: int) -> Any:
    if not tool.concurrency_safe:
        return index
    try:
        return json.dumps(arguments, sort_keys=True)  # unlike ==, tells 1 from 1.0 and True
    except Exception:  # not JSON: nothing that we could compare
        return index
