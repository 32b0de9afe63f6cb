"""Faults: infrastructure errors of the environment, and their retries.

A fault says nothing about the policy. Examples: a retrieval server that is down, a broken judge, a lost sandbox. The
failed operation is retried in the same state, after pauses that double. The retries end `fault_deadline` seconds after
the first failure. A fault that persists ends its episode: see `ToolEnv`. A call that may have had an effect is not
retried, because an order that is placed again is a second order (see `ToolFault` and `Tool.repeatable`).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agent_r1_tools import Tool, ToolFault, ToolResult, run_tool
from agent_r1_tools.running import MAX_FAULT_CHARS, at_work, describe
from agent_r1_tools.text import clean_text, printable
from agent_r1_tools.threads import OneThread, call_on

if TYPE_CHECKING:
    from agent_r1.episode import PendingCall

FIRST_PAUSE = 0.1  # seconds
LONGEST_PAUSE = 5.0
MADE_ONCE = "; not made again, as it may have had an effect (say repeatable=True where it has none)"
"""The end of the line of a fault whose call was not repeated because it may have had an effect."""


def fault_line(where: str, problem: str | BaseException, end: str = "") -> str:
    """Return the text of `info["fault"]`: one short printable line whose `end` is never cut.

    Example: "tool search: ConnectionError: refused".
    """
    text = describe(problem) if isinstance(problem, BaseException) else problem
    return clean_text(printable(" ".join(f"{where}: {text}".split())), MAX_FAULT_CHARS - len(end)) + end


def may_have_acted(error: BaseException) -> bool:
    """Return whether a fault of a hook comes from a call that may have had an effect.

    A hook is a judge, a user or `start_episode`. It is called again after any other fault.
    """
    return isinstance(error, ToolFault) and error.ran is True


def begin_sessions(tools: Mapping[str, Tool], states: Mapping[str, Any]) -> None:
    """Set the session of each tool to its state (None: the initial one), isolated from calls of other episodes.

    Raises ToolFault if a call that timed out is still running in a session, and the tool cannot start a new one.
    """
    for name, tool in tools.items():
        if not tool.concurrency_safe and at_work(tool) and not tool.new_session():
            raise ToolFault(f"a call of {name} that ran out of time is still at work in its session")
        tool.set_state(copy.deepcopy(states.get(name)))


class Patience:
    """The pauses between attempts at one operation: 0.1 s, 0.2 s, 0.4 s, ... The last one ends at the deadline.

    Args:
        seconds: the deadline, counted from the first failed attempt; 0 for a single attempt.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end: float | None = None
        self._pause = FIRST_PAUSE

    def next(self) -> float | None:
        """Return the seconds to wait after a failed attempt, or None after the deadline."""
        now = time.monotonic()
        if self._end is None:
            self._end = now + self._seconds
        left = self._end - now
        if left <= 0:
            return None
        pause = min(self._pause, left)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        return pause

    def wait(self) -> bool:
        """Sleep after a failed attempt until the next one is due. Return False after the deadline."""
        pause = self.next()
        if pause is not None:
            time.sleep(pause)
        return pause is not None


class Calls:
    """Calls that are made in order, each once.

    A call that faults is repeated in the restored session, unless it may have had an effect.

    Args:
        calls: the calls of a turn that have a tool.
        seconds: the retry deadline of each call.
        thread: the episode's thread, in which tools with a session are called.
        strict: raise a tool's own bug (see `run_tool`).
    """

    def __init__(
        self,
        calls: Sequence[PendingCall],
        seconds: float,
        thread: OneThread | None = None,
        strict: bool | None = None,
    ) -> None:
        self.calls, self.thread, self.strict = calls, thread, strict
        self.results: list[ToolResult] = []
        self._seconds = seconds
        self._patience = Patience(seconds)
        self._pause: float | None = None  # before the failed call is repeated
        self._session: Any = None  # the session before that call
        self._can_return = True

    def run(self, wait: bool = True) -> list[ToolResult] | None:
        """Return the results, in order. After a fault that persists, no further calls are made.

        With `wait=False` the result is None if a call must be repeated after a pause: call `run` again, in a thread.
        """
        for pending in self.calls[len(self.results) :]:
            assert pending.tool is not None
            if self._pause is None:
                self._session, self._can_return = self._get_session(pending.tool)
            while True:
                result = self._attempt(pending.tool, pending.arguments)
                if result.fault is None:
                    break
                if not self.faulted(pending.tool, result):
                    self.results += [result] * (len(self.calls) - len(self.results))
                    return self.results
                if not wait:
                    return None
            self.results.append(result)
            self._patience = Patience(self._seconds)
        return self.results

    def faulted(self, tool: Tool, result: ToolResult) -> bool:
        """Record that the next call was made and faulted. Return False if it must not be repeated."""
        if not tool.may_repeat(result.ran):
            return False
        stuck = isinstance(result.data, dict) and result.data.get("error") == "timeout"
        unknown = not self._can_return and result.ran is not False
        # A stuck call may still be running in the session, and a session of unknown state cannot be restored.
        if not tool.concurrency_safe and (stuck or at_work(tool) or unknown):
            return False
        self._pause = self._patience.next()
        return self._pause is not None

    def _attempt(self, tool: Tool, arguments: Any) -> ToolResult:
        if self._pause is not None:
            time.sleep(self._pause)
            self._pause = None
            if self._session is not None:
                try:
                    call_on(self.thread, tool.set_state, copy.deepcopy(self._session))
                except Exception as error:
                    return ToolResult("The session is lost.", ok=False, fault=describe(error), ran=True)
        return run_tool(tool, arguments, strict=self.strict, thread=self.thread)

    def _get_session(self, tool: Tool) -> tuple[Any, bool]:
        """Return the session state to restore (None: not needed), and whether that state is known."""
        if tool.concurrency_safe or self._seconds <= 0:
            return None, True
        try:
            return call_on(self.thread, tool.get_state), True
        except Exception:
            return None, False
