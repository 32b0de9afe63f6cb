"""Faults: what the environment's own machinery does wrong, and how it is tried again.

A fault (a retrieval server that is down, a judge that broke, a lost sandbox) says nothing about the policy. What
faulted is tried again in the same state, after pauses that double, until `fault_deadline` seconds have passed since it
first went wrong. A fault that lasts ends its episode: see `ToolEnv`. So does one of a call that may have had an effect,
at once: an order that is placed again is a second order (see `ToolFault` and `Tool.repeatable`).
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
"""The end of a fault's line where that is why its call was made once."""


def fault_line(where: str, what: str | BaseException, end: str = "") -> str:
    """What `info["fault"]` says, such as "tool search: ConnectionError: refused": one short printable line, of which
    `end` is never cut."""
    text = describe(what) if isinstance(what, BaseException) else what
    return clean_text(printable(" ".join(f"{where}: {text}".split())), MAX_FAULT_CHARS - len(end)) + end


def may_have_acted(error: BaseException) -> bool:
    """Return whether a fault of a hook (a judge, a user, `start_episode`) is of a call that may have had an effect.
    After any other fault the hook is asked again."""
    return isinstance(error, ToolFault) and error.ran is True


def begin_sessions(tools: Mapping[str, Tool], states: Mapping[str, Any]) -> None:
    """Put the sessions of the tools into these states (None: its beginning), out of reach of calls of other episodes.

    Raises ToolFault where a call that ran out of time is still at work in a session that its tool cannot leave to it.
    """
    for name, tool in tools.items():
        if not tool.concurrency_safe and at_work(tool) and not tool.new_session():
            raise ToolFault(f"a call of {name} that ran out of time is still at work in its session")
        tool.set_state(copy.deepcopy(states.get(name)))


class Patience:
    """The pauses between attempts at one thing: 0.1 s, 0.2 s, 0.4 s, ... The last ends at the deadline.

    Args:
        seconds: the deadline, from the first failed attempt on; 0 for a single attempt.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end: float | None = None
        self._pause = FIRST_PAUSE

    def next(self) -> float | None:
        """An attempt failed: the seconds until the next one, or None where time is up."""
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
        """An attempt failed: sleep until the next one, or return False where time is up."""
        pause = self.next()
        if pause is not None:
            time.sleep(pause)
        return pause is not None


class Calls:
    """Calls that are made in order, each once; one that faults is made again, in the session as it was before, unless
    it may have had an effect.

    Args:
        calls: those of a turn that have a tool.
        seconds: the deadline of each call's fault.
        thread: the episode's, in which tools with a session are called.
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
        self._pause: float | None = None  # before the call that faulted is made again
        self._session: Any = None  # the session before that call
        self._can_return = True

    def run(self, wait: bool = True) -> list[ToolResult] | None:
        """The results, in order; a fault that lasts is the last one that counts, and calls after it are not made.

        With `wait=False` None where a call has to be made again after a pause: call `run` again, in a thread.
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
        """Note that the next call was made and faulted. False where it isn't to be made again."""
        if not tool.may_repeat(result.ran):
            return False
        stuck = isinstance(result.data, dict) and result.data.get("error") == "timeout"
        unknown = not self._can_return and result.ran is not False
        # A call that is stuck may still be at work in the session, and a session of unknown state can't go back.
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
        """The state of a tool's session to go back to (None: it has none, or needs none), and whether it is known."""
        if tool.concurrency_safe or self._seconds <= 0:
            return None, True
        try:
            return call_on(self.thread, tool.get_state), True
        except Exception:
            return None, False
