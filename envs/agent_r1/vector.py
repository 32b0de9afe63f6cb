"""ToolVectorEnv: many episodes, their tool calls run together.

    send ──► read every span (ToolEnv.begin_turn) ──► run the calls: inline, in one batch, or in threads
    recv ◄── judge each turn (ToolEnv.end_turn) as soon as its own calls are answered

Episodes are only touched by the thread that calls the vector environment, or at its word by their own (see `ToolEnv`);
the other threads run tools and nothing else (slow judges, and retries of what faulted, run there too). `step` is `send`
to all, then `recv` from all.
"""

from __future__ import annotations

import copy
import json
import math
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from agent_r1.chat import encode_turn
from agent_r1.episode import OpenTurn, PendingCall
from agent_r1.faults import Calls, Patience
from agent_r1.tool_env import ToolEnv
from agent_r1.wrappers import Tokens, UnicodeText, decode_state
from agent_r1_tools import Tool, ToolFault, ToolResult, run_batch
from agent_r1_tools.running import is_strict

MAX_THREADS = 512  # they are started when they are needed, and mostly wait

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


class Phase(Enum):
    """Where an episode stands."""

    OVER = "over"  # or not begun: it needs a reset
    READY = "ready for an action"
    IN_FLIGHT = "in flight"


@dataclass(eq=False)
class _Slot:
    """One episode and its environment."""

    number: int
    env: ToolEnv
    phase: Phase = Phase.OVER
    observation: Any = None
    known: int = 0  # tokens that the policy has seen or written
    room: int = 0  # info["max_new_tokens"]
    steps: int = 0
    turn: OpenTurn = field(default_factory=OpenTurn)
    results: list[ToolResult | None] = field(default_factory=list)
    missing: int = 0
    patience: Patience = field(default_factory=lambda: Patience(0))  # with a judge that faults


@dataclass(eq=False)
class _Job:
    """Tool calls that one thread makes. Answer i goes to all `places[i]`: (slot, number of the call in its turn)."""

    run: Callable[[], Sequence[ToolResult]]
    places: list[list[tuple[_Slot, int]]] = field(default_factory=list)
    calls: Sequence[PendingCall] = ()  # to be made again, each by itself, where they fault
    key: Any = None  # equal calls that come while this one is under way wait for its answer
    alone: frozenset[int] = frozenset()  # ids of the tools that nobody else may use meanwhile
    judge: _Slot | None = None  # whose turn is judged after this
    results: Sequence[ToolResult] = ()
    error: BaseException | None = None  # that stopped it


class ToolVectorEnv(gym.vector.VectorEnv[tuple[Any, ...], Sequence[Any], NDArray[Any]]):
    """Many episodes of a `ToolEnv` at once. `gym.make_vec("AgentR1/...", num_envs=n)` makes one.

    Args:
        env: an id, a subclass of `ToolEnv`, or a function that makes a `ToolEnv`.
        num_envs: how many episodes.
        max_episode_steps: truncate episodes after so many turns, as Gymnasium's TimeLimit does (the environment's own
            `max_turns` also pays for the unfinished episode, so prefer that).
        autoreset_mode: "Disabled" (default: finished episodes wait for `reset(options={"reset_mask": mask})`) or
            "SameStep" (a finished episode begins anew at once; its end is in `final_obs` and `final_info`). "NextStep"
            would throw away one generated turn in every episode, so it isn't offered.
        observation: "state" for all tokens so far, "new" for what the environment added (see `NewTokens`).
        text: text instead of tokens, both ways (see `TextInterface`).
        kwargs: the arguments of the environment.

    Observations are a tuple (`recv`: a list) of arrays or strings, rewards float64, flags bool. `step` and `reset` give
    infos as Gymnasium does, a dict of arrays with masks; `recv` gives a list of dicts, one for each episode.

    What faults (see `ToolEnv`) is tried again in threads, where it delays its own episode only. An episode that cannot
    begin is tried again while `reset` waits, for `fault_deadline` seconds in all; it then ends with its first turn, and
    `info["fault"]` says so at once. After that each `reset` makes one attempt and waits for nothing, until `num_envs`
    episodes in a row have begun: broken tasks among others cost one such wait, not one each.

    Calls of a tool with `timeout=inf` run at once, in the caller's thread; other calls run in threads, where a slow
    or failing one delays its own episode only. Calls of equal tools go to `batch_execute` together where the tool has
    one, and equal calls are answered once. A turn that calls a tool with `concurrency_safe=False` makes its calls one
    after the other, in the episode's thread (see `ToolEnv`), and such a tool serves one episode at a time.

    Raises: ValueError and RuntimeError where it is used wrongly, with what to do; nothing a policy writes raises.
    """

    def __init__(
        self,
        env: str | Callable[..., ToolEnv],
        num_envs: int = 1,
        *,
        max_episode_steps: int | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.DISABLED,
        observation: Literal["state", "new"] = "state",
        text: bool = False,
        **kwargs: Any,
    ) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs must be at least 1, got {num_envs}")
        if observation not in ("state", "new"):
            raise ValueError(f"observation must be 'state' or 'new', got {observation!r}")
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        if self.autoreset_mode is AutoresetMode.NEXT_STEP:
            raise ValueError(
                "autoreset_mode 'NextStep' would discard one generated turn in every episode; "
                "use 'Disabled' with options={'reset_mask': mask}, or 'SameStep'"
            )
        make: Any = env
        if isinstance(env, str):
            spec = gym.spec(env)
            kwargs = {**spec.kwargs, **kwargs}
            max_episode_steps = spec.max_episode_steps if max_episode_steps is None else max_episode_steps
            make = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
        self.num_envs = num_envs
        self.max_episode_steps = max_episode_steps
        self.observe_new = observation == "new"
        self.text = text
        self.envs: tuple[ToolEnv, ...] = tuple(make(**kwargs) for _ in range(num_envs))
        first = self.envs[0]
        self.render_mode = first.render_mode
        self.metadata = {**first.metadata, "autoreset_mode": self.autoreset_mode}
        self.single_observation_space = UnicodeText() if text else first.observation_space
        self.single_action_space = UnicodeText() if text else first.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._slots = [_Slot(number, one) for number, one in enumerate(self.envs)]
        self._threads = _Threads(MAX_THREADS)
        self._stop_threads = weakref.finalize(self, self._threads.stop)  # for who forgets to close
        self._waiting: list[_Job] = []  # for a tool that another job uses alone
        self._occupied: set[int] = set()  # ids of those tools
        self._equal: dict[Any, _Job] = {}  # jobs under way that equal calls can join
        self._distrust = 0  # so many episodes must begin in a row until a reset waits for one again
        self._answered: deque[_Slot] = deque()  # all calls answered, the turn not yet judged
        self._outcomes: dict[int, tuple[Any, float, bool, bool, dict[str, Any]]] = {}  # judged, not yet received
        # Called with (environment, info, terminated, truncated) when an episode ends, before the next one begins.
        self.on_end: list[Callable[[ToolEnv, dict[str, Any], bool, bool], None]] = []
        self._bug: BaseException | None = None  # a tool's own, which was raised

    # ------------------------------------------------------------------ gymnasium

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Begin episodes: all, or those of `options["reset_mask"]` while the others go on.

        Args:
            seed: one for each episode (equal seeds give equal tasks: a group for GRPO), or an int for n, n + 1 ...
            options: `reset_mask`, a bool array of shape (num_envs,); the others are options of the environment, the
                same for all episodes or a list with one entry for each of the `num_envs` episodes (what stands
                outside the mask is ignored). The dict is left as it is.

        Returns the observations of all episodes, and the infos of those that began.
        """
        self._check_open()
        options = dict(options or {})
        chosen = self._chosen(options.pop("reset_mask", None))
        seeds = self._seeds(seed)
        per_env = self._per_env(options)
        busy = [i for i in chosen if self._slots[i].phase is Phase.IN_FLIGHT]
        if busy:
            raise RuntimeError(f"episodes {busy} are in flight; recv() them before the reset")
        infos: dict[str, Any] = {}
        patience = Patience(self.envs[0].fault_deadline)  # one for all: they mostly need the same machinery
        for i in chosen:
            info = self._reset(self._slots[i], seeds[i], per_env[i], patience)
            infos = self._add_info(infos, info, i)
        return tuple(slot.observation for slot in self._slots), infos

    def step(self, actions: Sequence[Any]) -> tuple[tuple[Any, ...], Floats, Bools, Bools, dict[str, Any]]:
        """One turn in every episode; returns when the slowest is done."""
        self.send(actions)
        _, observations, rewards, terminations, truncations, all_infos = self.recv(self.num_envs)
        infos: dict[str, Any] = {}
        for i, info in enumerate(all_infos):
            infos = self._add_info(infos, info, i)
        return tuple(observations), rewards, terminations, truncations, infos

    def render(self) -> tuple[Any, ...] | None:
        """What each environment renders."""
        return tuple(env.render() for env in self.envs)

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environments. Calls still under way are left behind: nobody waits for a tool that is stuck."""
        self._stop_threads()
        for env in self.envs:
            env.close()

    # ------------------------------------------------------------------ without a barrier

    def send(self, actions: Iterable[Any], env_ids: Iterable[int] | None = None) -> None:
        """Take one turn in some episodes (default: in all). `recv` gives the results as they come.

        Args:
            actions: a span, or with `text=True` a str, for each of `env_ids`.
            env_ids: numbers of episodes that are ready for an action, each once.

        Raises (before anything has begun): ValueError for wrong numbers of actions, wrong ids or actions that are no
        spans; RuntimeError for an episode that is over or in flight.
        """
        self._check_open()
        actions = list(actions)
        ids = list(range(self.num_envs)) if env_ids is None else [int(i) for i in env_ids]
        if len(actions) != len(ids):
            raise ValueError(f"{len(actions)} actions for {len(ids)} episodes; send one action for each episode")
        if len(set(ids)) < len(ids) or any(not 0 <= i < self.num_envs for i in ids):
            raise ValueError(f"env_ids must be different numbers in [0, {self.num_envs}), got {ids}")
        for phase, remedy in (
            (Phase.IN_FLIGHT, "recv() their results first"),
            (Phase.OVER, "begin new ones with reset(options={'reset_mask': mask})"),
        ):
            wrong = [i for i in ids if self._slots[i].phase is phase]
            if wrong:
                raise RuntimeError(f"episodes {wrong} are {phase.value}; {remedy}")
        slots = [self._slots[i] for i in ids]
        spans = [self._span(slot, action) for slot, action in zip(slots, actions, strict=True)]

        free: dict[Any, list[tuple[PendingCall, _Slot, int]]] = {}  # calls by tool, of all episodes
        for slot, span in zip(slots, spans, strict=True):
            slot.turn = slot.env.begin_turn(span)
            slot.phase = Phase.IN_FLIGHT
            slot.known = slot.env.episode.length
            slot.patience = Patience(slot.env.fault_deadline)
            calls = slot.turn.waiting
            slot.results, slot.missing = [None] * len(calls), len(calls)
            if slot.turn.answers and slot.env.slow_judge:
                self._start_judging(slot)
            elif not calls:
                self._answered.append(slot)
            elif all(_tool(call).concurrency_safe for call in calls):
                for number, call in enumerate(calls):
                    free.setdefault(_tool_key(_tool(call)), []).append((call, slot, number))
            else:
                self._start_in_order(slot, calls)
        for group in free.values():
            self._start_together(group)

    def recv(
        self, min_batch: int = 1, timeout: float | None = None
    ) -> tuple[NDArray[np.int64], list[Any], Floats, Bools, Bools, list[dict[str, Any]]]:
        """The turns that are done: (env_ids, observations, rewards, terminations, truncations, infos).

        Waits until at least `min_batch` episodes (or all that are in flight, if those are fewer) are done, but no
        longer than `timeout` seconds; after that it returns what there is, possibly nothing. Env ids are in rising
        order, and everything else is in their order.

        Raises: RuntimeError where nothing is in flight.
        """
        self._check_open()
        in_flight = sum(slot.phase is Phase.IN_FLIGHT for slot in self._slots)
        if not in_flight:
            raise RuntimeError("no episode is in flight; send() actions before recv()")
        wanted = min(min_batch, in_flight)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            while self._answered:
                self._judge(self._answered.popleft())
            if len(self._outcomes) >= wanted:
                wait: float | None = 0.0  # take what else is done, but wait for nothing
            else:
                wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                job = self._threads.done.get(timeout=wait)
            except queue.Empty:
                break
            self._finish(job)
        ids = sorted(self._outcomes)
        outcomes = [self._outcomes.pop(i) for i in ids]
        for i, (_, _, terminated, truncated, _) in zip(ids, outcomes, strict=True):
            over = (terminated or truncated) and self.autoreset_mode is AutoresetMode.DISABLED
            self._slots[i].phase = Phase.OVER if over else Phase.READY
        return (
            np.array(ids, np.int64),
            [outcome[0] for outcome in outcomes],
            np.array([outcome[1] for outcome in outcomes], np.float64),
            np.array([outcome[2] for outcome in outcomes], np.bool_),
            np.array([outcome[3] for outcome in outcomes], np.bool_),
            [outcome[4] for outcome in outcomes],
        )

    # ------------------------------------------------------------------ episodes

    def _reset(
        self, slot: _Slot, seed: int | None, options: dict[str, Any], patience: Patience
    ) -> dict[str, Any]:
        slot.phase = Phase.OVER  # should the reset fail
        options = options | {"patience": Patience(0) if self._distrust else patience}
        state, info = slot.env.reset(seed=seed, options=options)
        self._distrust = self.num_envs if "fault" in info else max(0, self._distrust - 1)
        slot.phase, slot.steps, slot.known = Phase.READY, 0, 0
        slot.room = info["max_new_tokens"]
        slot.observation = self._view(slot, state)
        return info

    def _span(self, slot: _Slot, action: Any) -> Tokens:
        if self.text:
            return encode_turn(slot.env, action, slot.room)
        return slot.env.check_action(action)

    def _view(self, slot: _Slot, state: Tokens) -> Any:
        tokens = state[slot.known :] if self.observe_new else state
        return decode_state(slot.env, tokens) if self.text else tokens

    def _judge(self, slot: _Slot) -> None:
        """End a turn whose calls are all answered, and note its outcome for `recv`."""
        slot.phase = Phase.OVER  # should the environment's judgement fail
        results = [result for result in slot.results if result is not None]
        try:
            state, reward, terminated, truncated, info = slot.env.try_turn(slot.turn, results)
        except ToolFault as fault:
            slot.phase = Phase.IN_FLIGHT
            pause = slot.patience.next()
            if pause is None:
                slot.turn.fault = str(fault)
                self._answered.append(slot)
            else:
                self._threads.start(_Job(partial(_sleep, pause), judge=slot))
            return
        slot.steps += 1
        truncated = truncated or slot.steps == self.max_episode_steps
        slot.room = info["max_new_tokens"]
        slot.observation = self._view(slot, state)
        if terminated or truncated:
            for hook in self.on_end:
                hook(slot.env, info, terminated, truncated)
        if (terminated or truncated) and self.autoreset_mode is AutoresetMode.SAME_STEP:
            end = {"final_obs": slot.observation, "final_info": info}
            info = end | self._reset(slot, None, {}, Patience(slot.env.fault_deadline))
        slot.phase = Phase.IN_FLIGHT  # until it is received
        self._outcomes[slot.number] = slot.observation, reward, terminated, truncated, info

    # ------------------------------------------------------------------ tool calls

    def _start_in_order(self, slot: _Slot, calls: Sequence[PendingCall]) -> None:
        """The calls of one turn, one after the other, because a tool among them has a session."""
        in_order = slot.env.in_order(calls)
        alone = frozenset(id(call.tool) for call in calls if not _tool(call).concurrency_safe)
        places = [[(slot, number)] for number in range(len(calls))]
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

    def _start_judging(self, slot: _Slot) -> None:
        """Judge an answer in a thread: it delays its own episode only. What it raises shows when the turn ends."""

        def run() -> list[ToolResult]:
            with suppress(Exception):
                slot.env.judge_early(slot.turn)
            return []

        self._threads.start(_Job(run, judge=slot))

    def _start_together(self, calls: list[tuple[PendingCall, _Slot, int]]) -> None:
        """Calls of equal tools from all episodes; they don't influence each other."""
        tool = _tool(calls[0][0])
        if tool.timeout == math.inf or type(tool).batch_execute is not Tool.batch_execute:
            batch = [call.arguments for call, _, _ in calls]
            job = _Job(
                partial(run_batch, tool, batch, strict=self.envs[0].strict),
                [[(slot, number)] for _, slot, number in calls],
                [call for call, _, _ in calls],
            )
            if tool.timeout == math.inf:
                job.results = self._raising(job.run)
                self._deliver(job)
            else:
                self._threads.start(job)
            return
        for call, slot, number in calls:
            key = (_tool_key(_tool(call)), _arguments_key(call.call.arguments))
            if key in self._equal:
                self._equal[key].places[0].append((slot, number))
            else:
                run = partial(run_batch, _tool(call), [call.arguments], strict=slot.env.strict)
                job = self._equal[key] = _Job(run, [[(slot, number)]], [call], key)
                self._threads.start(job)

    def _start_again(self, call: PendingCall, result: ToolResult, places: list[tuple[_Slot, int]]) -> bool:
        """Make a call that faulted again, by itself; False where it has had its chances."""
        again: Calls = places[0][0].env.in_order([call])
        if not again.faulted(_tool(call), result):
            return False
        self._threads.start(_Job(lambda: again.run() or [], [places]))
        return True

    def _finish(self, job: _Job) -> None:
        """A job came back from its thread: hand out the answers, and let the next one have its tools."""
        if job.error is not None and is_strict(self.envs[0].strict):
            self._bug = job.error
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

    def _raising(self, run: Callable[[], Any]) -> Any:
        """Calls in this thread. They raise only a tool's own bug, where that is asked for."""
        try:
            return run()
        except Exception as error:
            self._bug = error
            raise

    def _deliver(self, job: _Job) -> None:
        if job.judge is not None:
            self._answered.append(job.judge)
        for index, (result, places) in enumerate(zip(job.results, job.places, strict=True)):
            if result.fault is not None and job.calls and self._start_again(job.calls[index], result, places):
                continue
            for slot, number in places:
                slot.results[number] = result
                slot.missing -= 1
                if not slot.missing:
                    self._answered.append(slot)

    # ------------------------------------------------------------------ arguments

    def _check_open(self) -> None:
        if self.closed:
            raise RuntimeError("this vector environment is closed; make a new one")
        if self._bug is not None:
            raise RuntimeError("a tool's own bug was raised in the middle of turns; make a new one") from self._bug

    def _chosen(self, mask: Any) -> list[int]:
        if mask is None:
            return list(range(self.num_envs))
        mask = np.asarray(mask)
        if mask.shape != (self.num_envs,) or mask.dtype != np.bool_ or not mask.any():
            raise ValueError(
                f"reset_mask must be a bool array of shape ({self.num_envs},) with at least one True, "
                f"got shape {mask.shape}, dtype {mask.dtype}"
            )
        return [int(i) for i in np.flatnonzero(mask)]

    def _seeds(self, seed: int | Sequence[int | None] | None) -> list[int | None]:
        if seed is None:
            return [None] * self.num_envs
        if isinstance(seed, int | np.integer):
            super().reset(seed=int(seed))
            return [int(seed) + i for i in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise ValueError(f"{len(seed)} seeds for num_envs={self.num_envs}; pass one for each, or a single int")
        return [None if one is None else int(one) for one in seed]

    def _per_env(self, options: dict[str, Any]) -> list[dict[str, Any]]:
        each: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for key, value in options.items():
            values = value if isinstance(value, list | tuple | np.ndarray) else [value] * self.num_envs
            if len(values) != self.num_envs:
                raise ValueError(
                    f"options[{key!r}] has {len(values)} entries for num_envs={self.num_envs}; "
                    "pass one for each episode (those outside reset_mask are ignored), or one value for all"
                )
            for own, one in zip(each, values, strict=True):
                own[key] = one
        return each


class _Threads:
    """Daemon threads that run jobs; a ThreadPoolExecutor would keep the program from ending while a tool is stuck."""

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
        except BaseException as error:  # run_tool and run_batch answer always; a lost job would hang its episode
            job.error, fault = error, f"{type(error).__name__}: {error}"
            failure = ToolResult(f"Error: {fault}", ok=False, data={"error": "exception"}, fault=fault)
            job.results = [failure] * len(job.places)
        done.put(job)
        del job
        idle.release()


def _sleep(seconds: float) -> list[ToolResult]:
    time.sleep(seconds)
    return []


def _tool(call: PendingCall) -> Tool:
    """The tool of a call that has one."""
    assert call.tool is not None
    return call.tool


def _tool_key(tool: Tool) -> Any:
    """Equal tools share batches and answers; a tool that cannot be hashed is equal to itself only."""
    try:
        hash(tool)
    except TypeError:
        return id(tool)
    return tool


def _arguments_key(arguments: Any) -> Any:
    try:
        return json.dumps(arguments, sort_keys=True)
    except (TypeError, ValueError):  # not JSON: nothing that could be compared
        return object()


def vector_spec(env_id: str) -> EnvSpec:
    """The spec of a registered `ToolEnv` for `gym.make_vec`, with `ToolVectorEnv` where it names no vector environment.

    (`gym.make_vec(env_id)` alone makes those `SyncVectorEnv`s, whose tool calls wait for each other.)
    """
    spec = copy.deepcopy(gym.spec(env_id))
    if spec.vector_entry_point is None:
        spec.vector_entry_point = f"{__name__}:{env_id}"
    return spec


def __getattr__(name: str) -> Any:
    """`vector_entry_point="agent_r1.vector:SOME_ID"` stands for a `ToolVectorEnv` of the environment with that id."""
    if name in gym.registry:
        return partial(ToolVectorEnv, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
