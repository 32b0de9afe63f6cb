"""Making calls: whatever a tool does, `run_tool` and `run_batch` answer."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from agent_r1_tools.text import clean_text
from agent_r1_tools.tool import Tool, ToolResult, is_fault

# The most calls of one batch that run at the same time; a call counts its timeout from its own start.
MAX_PARALLEL_CALLS = min(32, (os.cpu_count() or 1) + 4)
MAX_FAULT_CHARS = 300


def run_tool(tool: Tool, arguments: Any) -> ToolResult:
    """Make one call and always answer.

    Whatever goes wrong (arguments that don't fit, an exception, a timeout, a result of the wrong type) becomes a
    `ToolResult(ok=False)` whose content the policy can read. What is the machinery's fault has `fault` set as well:
    `ToolFault`, OSError (but for those that arguments cause, see `is_fault`), a result that says so, and a timeout of a
    tool with `timeout_is_fault`. The content is bounded by `tool.max_result_chars` and is always encodable: lone
    surrogates and NUL become U+FFFD. After a timeout the call goes on in a daemon thread (see `at_work`), which keeps
    nobody from exiting. Only KeyboardInterrupt and SystemExit in the main thread pass through.
    """
    failure = _reject(tool, arguments)
    return _execute(tool, arguments) if failure is None else failure


def run_batch(tool: Tool, batch: Iterable[Any]) -> list[ToolResult]:
    """Make many calls of one tool, with the guarantees of `run_tool`, results in order.

    Calls with equal arguments are executed once (if the tool is `concurrency_safe`); one bad call does not fail the
    others.
    """
    calls = list(batch)
    results: list[ToolResult | None] = [_reject(tool, arguments) for arguments in calls]
    groups: dict[Any, list[int]] = {}  # equal calls together
    for index, arguments in enumerate(calls):
        if results[index] is None:
            groups.setdefault(_call_key(tool, arguments, index), []).append(index)
    answers = _execute_all(tool, [calls[indexes[0]] for indexes in groups.values()])
    for indexes, answer in zip(groups.values(), answers, strict=True):
        for index in indexes:
            results[index] = answer
    return [result for result in results if result is not None]


def at_work(tool: Tool) -> bool:
    """Whether a call that ran out of time is still at work in the tool."""
    return any(getattr(thread, "left_in", None) is tool for thread in threading.enumerate())


def describe(error: BaseException) -> str:
    """An exception in words, also where its own `__str__` is broken."""
    try:
        message = str(error)
    except Exception:
        message = ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


# --- inside -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Failed:
    """An outcome that is not a result: the kind of the error, a line for the policy, and whose fault it is."""

    kind: str
    message: str
    fault: bool = False


def _execute(tool: Tool, arguments: dict[str, Any]) -> ToolResult:
    return _finish(tool, _attempt(tool, tool.execute, arguments))


def _execute_all(tool: Tool, batch: list[dict[str, Any]]) -> list[ToolResult]:
    if len(batch) > 1 and type(tool).batch_execute is not Tool.batch_execute:
        outcome = _attempt(tool, tool.batch_execute, batch)
        if isinstance(outcome, list | tuple) and len(outcome) == len(batch):
            return [_finish(tool, result) for result in outcome]
        if isinstance(outcome, _Failed) and outcome.kind == "timeout":  # trying again would only take as long again
            return [_finish(tool, outcome) for _ in batch]
    lanes = min(len(batch), MAX_PARALLEL_CALLS)
    if tool.timeout == math.inf or not tool.concurrency_safe or lanes < 2:
        return [_execute(tool, arguments) for arguments in batch]
    results: list[ToolResult | None] = [None] * len(batch)
    todo = iter(range(len(batch)))  # next() on a range iterator is atomic

    def work() -> None:
        for index in todo:
            results[index] = _execute(tool, batch[index])

    threads = [threading.Thread(target=work, daemon=True, name=f"tool-{tool.name}-lane") for _ in range(lanes - 1)]
    started = [thread for thread in threads if _start(thread)]
    work()  # the caller is a lane too, so that this ends even where no thread can be started
    for thread in started:
        thread.join()
    return [result for result in results if result is not None]


class _Call(threading.Thread):
    """Makes a call. `left_in` is its tool once nobody waits for it any more."""

    left_in: Tool | None = None


def _attempt(tool: Tool, function: Callable[[Any], Any], argument: Any) -> Any:
    """The outcome of a call: whatever the tool returned, or `_Failed`."""
    if tool.timeout == math.inf:
        return _guarded(function, argument)

    def in_lane(argument: Any) -> Any:
        with tool.lane():  # waiting for it is no part of the call's time
            return _in_time(tool, function, argument)

    return _guarded(in_lane, argument)


def _in_time(tool: Tool, function: Callable[[Any], Any], argument: Any) -> Any:
    outcomes: list[Any] = []
    finished = threading.Event()

    def work() -> None:
        outcomes.append(_guarded(function, argument))
        finished.set()

    thread = _Call(target=work, daemon=True, name=f"tool-{tool.name}")
    if not _start(thread):
        return _Failed("exception", "no thread could be started", fault=True)
    if not finished.wait(min(tool.timeout, threading.TIMEOUT_MAX)):
        thread.left_in = tool
        return _Failed("timeout", f"no result within {tool.timeout:g} seconds", fault=tool.timeout_is_fault)
    return outcomes[0]


def _guarded(function: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return function(argument)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit) and threading.current_thread() is threading.main_thread():
            raise
        return _Failed("exception", describe(error), fault=is_fault(error))


def _start(thread: threading.Thread) -> bool:
    try:
        thread.start()
    except RuntimeError:  # the machine has no thread left
        return False
    return True


def _reject(tool: Tool, arguments: Any) -> ToolResult | None:
    try:
        problem = tool.validate(arguments)
    except Exception as error:
        return _failure(tool, _Failed("exception", f"the arguments could not be checked: {describe(error)}"))
    return None if problem is None else _failure(tool, _Failed("bad_arguments", problem))


def _finish(tool: Tool, outcome: Any) -> ToolResult:
    """A result that is safe to hand on: right types, clean and bounded content."""
    if isinstance(outcome, str):
        outcome = ToolResult(outcome)
    if isinstance(outcome, _Failed):
        return _failure(tool, outcome)
    if not isinstance(outcome, ToolResult):
        problem = f"the tool returned {type(outcome).__name__} instead of a ToolResult"
        return _failure(tool, _Failed("bad_result", problem))
    content, ok, fault = outcome.content, outcome.ok, outcome.fault
    try:
        text = clean_text(content if type(content) is str else str(content), tool.max_result_chars)
        fault = None if fault is None else clean_text(str(fault), MAX_FAULT_CHARS)
        ok = bool(ok) and fault is None
    except Exception as error:
        return _failure(tool, _Failed("bad_result", f"the tool's result is not readable: {describe(error)}"))
    same = text is content and ok is outcome.ok and fault == outcome.fault
    return outcome if same else replace(outcome, content=text, ok=ok, fault=fault)


def _failure(tool: Tool, failed: _Failed) -> ToolResult:
    content = clean_text(f"Error in {tool.name}: {failed.message}", tool.max_result_chars)
    fault = clean_text(failed.message, MAX_FAULT_CHARS) if failed.fault else None
    return ToolResult(content, ok=False, data={"error": failed.kind}, fault=fault)


def _call_key(tool: Tool, arguments: dict[str, Any], index: int) -> Any:
    if not tool.concurrency_safe:
        return index
    try:
        return json.dumps(arguments, sort_keys=True)  # unlike ==, tells 1 from 1.0 and True
    except Exception:  # not JSON: nothing that we could compare
        return index
