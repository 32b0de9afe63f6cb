"""The tool calls of many episodes, run together: in the caller's thread, in one batch, or in threads.

Calls of equal tools go to `batch_execute` together, and equal calls are answered once. A turn that calls a tool with a
session makes its calls one after the other, and such a tool serves one episode at a time.
"""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from agent_r1.episode import OpenTurn, PendingCall
from agent_r1.faults import Calls
from agent_r1.tool_env import ToolEnv
from agent_r1_tools import Tool, ToolResult, run_batch
from agent_r1_tools.running import is_strict

MAX_THREADS = 512  # started when needed; most of them wait


@dataclass(eq=False)
class InFlight:
    """An episode, and the results so far of the calls of its open turn."""

    number: int
    env: ToolEnv
    turn: OpenTurn = field(default_factory=OpenTurn)
    results: list[ToolResult | None] = field(default_factory=list)
    missing: int = 0


@dataclass(eq=False)
class _Job:
    """Tool calls that one thread makes. Result i goes to all `places[i]`: (episode, number of the call in its turn)."""

    run: Callable[[], Sequence[ToolResult]]
    places: list[list[tuple[InFlight, int]]] = field(default_factory=list)
    calls: Sequence[PendingCall] = ()  # calls that fault are repeated one by one
    key: Any = None  # equal calls that arrive while this one runs wait for its result
    alone: frozenset[int] = frozenset()  # ids of the tools that no other job may use meanwhile
    judge: InFlight | None = None  # the episode whose turn is judged after this
    results: Sequence[ToolResult] = ()
    error: BaseException | None = None  # the exception that stopped the job


class VectorCalls:
    """The running calls of open turns. An episode whose calls all have results is in `answered`.

    Only the thread that made this object ends turns. The other threads run tools, slow judges and users, and pauses.

    Args:
        env: one of the environments, whose `strict` holds for all.
    """

    def __init__(self, env: ToolEnv) -> None:
        self._env = env
        self._threads = _Threads(MAX_THREADS)
        self._waiting: list[_Job] = []  # jobs that wait for a tool in use by another job
        self._occupied: set[int] = set()  # ids of those tools
        self._equal: dict[Any, _Job] = {}  # jobs under way that equal calls can join
        self.answered: deque[InFlight] = deque()  # all calls have results, the turn is not yet judged
        self.bug: BaseException | None = None  # a raised exception of a tool, judge or user

    def start(self, episodes: Iterable[InFlight]) -> None:
        """Run the calls of these new turns. A slow judge or user begins at once, and the turn's calls after it."""
        ready = []
        for episode in episodes:
            calls = episode.turn.waiting
            episode.results, episode.missing = [None] * len(calls), len(calls)
            if episode.env._needs_thread(episode.turn):
                self._start_judging(episode)
            else:
                ready.append(episode)
        self._start_calls(ready)

    def _start_calls(self, episodes: Iterable[InFlight]) -> None:
        """Run the calls that these turns lack the results of."""
        free: dict[Any, list[tuple[PendingCall, InFlight, int]]] = {}  # calls by tool, of all episodes
        for episode in episodes:
            calls = episode.turn.waiting if episode.missing else []
            if not calls:
                self.answered.append(episode)
            elif all(_tool(call).concurrency_safe for call in calls):
                for number, call in enumerate(calls):
                    free.setdefault(_tool_key(_tool(call)), []).append((call, episode, number))
            else:
                self._start_in_order(episode, calls)
        for group in free.values():
            self._start_together(group)

    def judge_again(self, episode: InFlight, seconds: float) -> None:
        """Put an episode into `answered` again, after a pause."""
        self._threads.start(_Job(partial(_sleep, seconds), judge=episode))

    def wait(self, timeout: float | None) -> bool:
        """Wait until a job returns from its thread, and deliver its results. Return False after the timeout."""
        try:
            job = self._threads.done.get(timeout=timeout)
        except queue.Empty:
            return False
        if job.error is not None and is_strict(self._env.strict):
            self.bug = job.error
            raise job.error
        self._equal.pop(job.key, None)
        self._deliver(job)
        if job.alone:
            self._occupied -= job.alone
            still_waiting: list[_Job] = []
            for other in self._waiting:
                if other.alone & self._occupied or any(other.alone & earlier.alone for earlier in still_waiting):
                    still_waiting.append(other)
                else:
                    self._occupied |= other.alone
                    self._threads.start(other)
            self._waiting = still_waiting
        return True

    def stop(self) -> None:
        """End the threads. Calls that are still running are abandoned."""
        self._threads.stop()

    # ------------------------------------------------------------------ jobs

    def _start_in_order(self, episode: InFlight, calls: Sequence[PendingCall]) -> None:
        """Make the calls of one turn one after the other, because one of its tools has a session."""
        in_order = episode.env._in_order(calls)
        alone = frozenset(id(call.tool) for call in calls if not _tool(call).concurrency_safe)
        places = [[(episode, number)] for number in range(len(calls))]
        job = _Job(lambda: in_order.run() or [], places, alone=alone)
        if alone & self._occupied or any(alone & other.alone for other in self._waiting):
            self._waiting.append(job)
            return
        if all(_tool(call).timeout == math.inf for call in calls):
            results = self._raising(partial(in_order.run, wait=False))
            if results is not None:
                job.results = results
                self._deliver(job)
                return
        self._occupied |= alone
        self._threads.start(job)

    def _start_judging(self, episode: InFlight) -> None:
        """Judge an answer, or ask the user, in a thread, which delays this episode only.

        Exceptions are raised when the turn ends; with `strict` at once.
        """

        def run() -> list[ToolResult]:
            with nullcontext() if is_strict(episode.env.strict) else suppress(Exception):
                episode.env._judge_early(episode.turn)
            return []

        self._threads.start(_Job(run, judge=episode))

    def _start_together(self, calls: list[tuple[PendingCall, InFlight, int]]) -> None:
        """Make calls of equal tools from all episodes. The calls do not influence each other."""
        tool = _tool(calls[0][0])
        if tool.timeout == math.inf or type(tool).batch_execute is not Tool.batch_execute:
            batch = [call.arguments for call, _, _ in calls]
            job = _Job(
                partial(run_batch, tool, batch, strict=self._env.strict),
                [[(episode, number)] for _, episode, number in calls],
                [call for call, _, _ in calls],
            )
            if tool.timeout == math.inf:
                job.results = self._raising(job.run)
                self._deliver(job)
            else:
                self._threads.start(job)
            return
        for call, episode, number in calls:
            key = (_tool_key(_tool(call)), _arguments_key(call.call.arguments))
            if key in self._equal:
                self._equal[key].places[0].append((episode, number))
            else:
                run = partial(run_batch, _tool(call), [call.arguments], strict=episode.env.strict)
                job = self._equal[key] = _Job(run, [[(episode, number)]], [call], key)
                self._threads.start(job)

    def _start_again(self, call: PendingCall, result: ToolResult, places: list[tuple[InFlight, int]]) -> bool:
        """Repeat a failed call, by itself. Return False if it must not be repeated."""
        retry: Calls = places[0][0].env._in_order([call])
        if not retry.faulted(_tool(call), result):
            return False
        self._threads.start(_Job(lambda: retry.run() or [], [places]))
        return True

    def _raising(self, run: Callable[[], Any]) -> Any:
        """Make calls in this thread, and note an exception: a tool's own bug, which only `strict` raises."""
        try:
            return run()
        except Exception as error:
            self.bug = error
            raise

    def _deliver(self, job: _Job) -> None:
        if job.judge is not None:
            self._start_calls([job.judge])
        for index, (result, places) in enumerate(zip(job.results, job.places, strict=True)):
            if result.fault is not None and job.calls and self._start_again(job.calls[index], result, places):
                continue
            for episode, number in places:
                episode.results[number] = result
                episode.missing -= 1
                if not episode.missing:
                    self.answered.append(episode)


class _Threads:
    """Daemon threads that run jobs. A ThreadPoolExecutor would keep the program from ending while a tool is stuck."""

    def __init__(self, limit: int) -> None:
        self.done: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._limit = limit
        self._todo: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._count = 0

    def start(self, job: _Job) -> None:
        self._todo.put(job)
        if not self._idle.acquire(blocking=False) and self._count < self._limit:
            self._count += 1
            arguments = (self._todo, self.done, self._idle)
            threading.Thread(target=_work, args=arguments, name=f"tool-calls-{self._count}", daemon=True).start()

    def stop(self) -> None:
        while True:
            try:
                self._todo.get(block=False)
            except queue.Empty:
                break
        for _ in range(self._count):
            self._todo.put(None)


def _work(
    todo: queue.SimpleQueue[_Job | None], done: queue.SimpleQueue[_Job], idle: threading.Semaphore
) -> None:
    while (job := todo.get()) is not None:
        try:
            job.results = job.run()
        except BaseException as error:  # run_tool and run_batch always return; a lost job would hang its episode
            job.error, fault = error, f"{type(error).__name__}: {error}"
            failure = ToolResult(f"Error: {fault}", ok=False, data={"error": "exception"}, fault=fault, ran=True)
            job.results = [failure] * len(job.places)
        done.put(job)
        del job
        idle.release()


def _sleep(seconds: float) -> list[ToolResult]:
    time.sleep(seconds)
    return []


def _tool(call: PendingCall) -> Tool:
    """Return the tool of a call that has one."""
    assert call.tool is not None
    return call.tool


def _tool_key(tool: Tool) -> Any:
    """Return a key: equal tools share batches and results. A tool that cannot be hashed is equal to itself only."""
    try:
        hash(tool)
    except TypeError:
        return id(tool)
    return tool


def _arguments_key(arguments: Any) -> Any:
    try:
        return json.dumps(arguments, sort_keys=True)
    except (TypeError, ValueError):  # not JSON, so it cannot be compared
        return object()
