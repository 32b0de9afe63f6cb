"""The rollout: runs episodes with an engine and a vector environment, without a barrier."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from gymnasium.vector import AutoresetMode

from agent_r1.arguments import ArgumentError
from agent_r1.trajectories import episode_record
from agent_r1_tools import ToolFault
from llm_utils.sampling.engine import Engine, Span
from llm_utils.setup import threads
from llm_utils.streams import Stream, episode_seed
from llm_utils.trajectory import Trajectory, Turn

Array = np.ndarray
Tasks = int | Array | Sequence[tuple[float, range]]
"""The number of tasks; the probability of drawing each; or the share and the task numbers of each environment."""
Queued = tuple[int, int, int | None]
"""The number of an episode that has not begun, its task, and its limit of turns."""


class Branching(Protocol):
    """Decides which episodes begin with a copy of a running one. `llm_utils.branching` has ARPO's rule."""

    def begin(self, episodes: Sequence[Queued]) -> Sequence[Queued]:
        """Return the episodes that begin at the prompt, of those that were added. The others are kept."""

    def branch(self, row: Trajectory, span: Span) -> Sequence[int]:
        """Return the numbers of the kept episodes that begin before `span`, with a copy of `row`. The span is complete
        and has not been sent, so the environment still stands at the last tool result."""

    def end(self, row: Trajectory) -> Sequence[Queued]:
        """Return kept episodes that begin at the prompt now that `row` is over."""


class Sampler:
    """A sampler of episodes without a barrier. A span is sent as soon as it ends, and a slot whose episode ended begins
    the next waiting one. Episodes in flight stay so between iterations (`--max-staleness`)."""

    def __init__(self, envs: Any, engine: Engine, seed: int, in_order: bool = False) -> None:
        """Take `envs`, a `ToolVectorEnv` with observation="new" and as many episodes as the engine has slots.

        With `in_order`, tool results are taken in the order of the calls, so that a run is reproducible to the bit.
        """
        check_playable(envs)
        self.envs, self.engine, self.seed, self.in_order = envs, engine, seed, in_order
        self.on_done: Callable[[], Any] = lambda: None  # called when an episode ends
        self.queue: deque[Queued] = deque()
        self.free = list(range(envs.num_envs))
        self.live: dict[int, Trajectory] = {}  # slot -> its episode
        self.acting: dict[int, Span] = {}  # slot -> the span sent to the environment, in the order of sending
        self.done: dict[int, Trajectory] = {}  # episode number -> its trajectory
        # Called before each span of a running episode. Returns the tokens that the span begins with, which are not
        # sampled: they are part of the state and of the action, but not of the mask. At least one token is sampled, so
        # more than the room for the span are cut.
        self.force: Callable[[Trajectory], Array | Sequence[int]] = lambda row: ()
        self.forced: dict[int, Array] = {}  # slot -> those of the span that is being sampled, or acted on
        self.branching: Branching | None = None  # decides which episodes begin with a copy of a running one
        self.branches: deque[tuple[Trajectory, Any]] = deque()  # those that wait for a slot, with their snapshots

    def add(self, episodes: Iterable[tuple[int, int]], max_turns: int | None = None) -> None:
        """Queue episodes, given as pairs (episode number, task index). `max_turns` limits their turns (None: the
        environment's limit)."""
        queued = [(number, task, max_turns) for number, task in episodes]
        self.queue.extend(queued if self.branching is None else self.branching.begin(queued))

    def collect(self, numbers: Sequence[int]) -> list[Trajectory]:
        """Run until these queued episodes have ended. Return them in this order."""
        missing = set(numbers) - self.done.keys()
        while missing:
            self.advance()
            missing -= self.done.keys()
        if not self.live:  # the state at the start of a run, so that a resumed run is the same to the bit
            self.free.sort()
            self.engine.release()
        return [self.done.pop(number) for number in numbers]

    def stream(self) -> Iterator[Trajectory]:
        """Run all queued episodes. Yield each when it ends."""
        while self.queue or self.branches or self.live or self.done:
            self.advance()
            while self.done:
                yield self.done.popitem()[1]

    def advance(self, write: bool = True) -> None:
        """Do one round: begin episodes, sample (one engine step), act. With `write` False, wait for nothing."""
        threads.follow()
        if write and self.branches and self.free:
            self._begin_branches()
        if write and self.queue and self.free:
            self._begin()
        spans = self.engine.step() if self.engine.busy and (write or self.engine.overlaps) else []
        for span in spans:
            self._branch(span)
        if spans:
            self.envs.send([self._action(span) for span in spans], [span.slot for span in spans])
            self.acting |= {span.slot: span for span in spans}
        if not self.acting:
            return
        if self.in_order:  # all results, as else the engine's next batch would depend on the tools' speed
            results = self.envs.recv(len(self.acting))
        else:
            wait = write and not self.engine.busy
            results = self.envs.recv(int(wait), timeout=None if wait else 0.0)
        order = list(self.acting)
        for result in sorted(zip(*results, strict=True), key=lambda result: order.index(result[0])):
            self._act(*result)

    def _begin(self) -> None:
        mask, tasks, begun = np.zeros(self.envs.num_envs, bool), [0] * self.envs.num_envs, {}
        seeds: list[Any] = list(tasks)
        horizons: list[int | None] = [None] * self.envs.num_envs
        while self.queue and self.free:
            slot, (episode, task, horizons[slot]) = self.free.pop(), self.queue.popleft()
            mask[slot], tasks[slot], begun[slot] = True, task, episode
            seeds[slot] = episode_seed(self.seed, episode)
        options = {"reset_mask": mask, "task_index": tasks, "max_turns": horizons}
        try:
            states, infos = self.envs.reset(seed=seeds, options=options)
        except ArgumentError as error:
            raise SystemExit(f"an episode cannot begin: {error}") from None
        faults = infos.get("fault", [None] * self.envs.num_envs)
        for slot, episode in begun.items():
            self.live[slot] = Trajectory(episode, tasks[slot], len(states[slot]), states[slot])
            if "env_id" in infos:  # there are several
                self.live[slot].record["env_id"] = infos["env_id"][slot]
            if faults[slot]:  # it could not begin, so there is nothing to sample
                self.live[slot].fault = faults[slot]
                self._end(slot, {}, episode_record(self.envs.envs[slot], {}))
                continue
            info = {name: infos[name][slot] for name in ("max_new_tokens", "stop_token_ids")}
            self._feed(slot, states[slot], info, seed=[self.seed, Stream.SAMPLING, episode])

    def _feed(self, slot: int, tokens: Array, info: Mapping[str, Any], seed: Any = None) -> None:
        """Request the next span of a slot: append `tokens`, and those that the span begins with."""
        room, stops = info["max_new_tokens"], info["stop_token_ids"]
        self.forced[slot] = forced = np.asarray(self.force(self.live[slot]), np.int32)[: room - 1]
        if ends := sorted(set(stops).intersection(forced.tolist())):
            raise ValueError(f"forced token {ends[0]} ends the turn, so nothing would be sampled; leave it out")
        tokens = np.concatenate([tokens, forced]) if len(forced) else tokens
        self.engine.feed(slot, tokens, max_new_tokens=room - len(forced), stop_token_ids=stops, seed=seed)

    def _action(self, span: Span) -> Array:
        return np.concatenate([self.forced[span.slot], span.tokens])

    def _branch(self, span: Span) -> None:
        """Begin branches of an episode whose span is complete. Its environment still waits for this span."""
        row = self.live[span.slot]
        if self.branching is None or not (numbers := self.branching.branch(row, span)):
            return
        record = episode_record(self.envs.envs[span.slot], {})  # until the branch ends, if it can begin
        try:
            state = self.envs.get_state(span.slot)
        except ToolFault as fault:
            state = fault
        for number in numbers:
            child = row.upto(len(row.turns), number)
            child.record |= record
            self.branches.append((child, state))

    def _begin_branches(self) -> None:
        while self.branches and self.free:
            slot, (row, state) = self.free.pop(), self.branches.popleft()
            self.live[slot] = row
            try:
                if isinstance(state, ToolFault):
                    raise state
                _, info = self.envs.set_state(slot, state)
            except ToolFault as fault:
                row.fault = str(fault)
                self._end(slot, {}, {"fault": row.fault})
                continue
            seed = [self.seed, Stream.SAMPLING, row.episode]
            read = row.tokens[row.segment_starts[-1] :]
            self._feed(slot, read, info, seed=seed)

    def _act(self, slot: int, new: Array, reward: float, terminated: bool, truncated: bool, info: Any) -> None:
        """Finish the turn of a slot. `new` holds the tokens after its span, or a context that replaces everything
        before."""
        row, span, rewritten = self.live[slot], self.acting.pop(slot), info.get("context_rewritten", False)
        action, forced = self._action(span), len(self.forced.pop(slot))
        if not rewritten:
            self._check_added(slot, action, new, info)
        start, end = len(row.tokens) + forced, len(row.tokens) + len(action)
        calls, terms = info.get("tool_calls", []), info.get("reward_terms", {})
        errors = sum(not call["ok"] for call in calls)
        row.add(Turn(start, end, float(reward), span.logprobs, span.versions, len(calls), errors, terms, forced))
        row.tokens = np.concatenate([row.tokens, action] if rewritten else [row.tokens, action, new])
        if span.candidate_tokens is not None:
            row.stats["candidate_tokens"] = row.stats.get("candidate_tokens", 0) + span.candidate_tokens
        if terminated or truncated:
            row.terminated, row.truncated, row.fault = bool(terminated), bool(truncated), info.get("fault")
            row.answers = self.envs.envs[slot].task.answers
            self._end(slot, info, episode_record(self.envs.envs[slot], info))
            return
        seed = None
        if rewritten:  # the model must read the new context from its beginning
            row.segment_starts.append(len(row.tokens))
            row.tokens = np.concatenate([row.tokens, new])
            seed = [self.seed, Stream.SAMPLING, row.episode, len(row.segment_starts)]
        self._feed(slot, new, info, seed=seed)

    def _check_added(self, slot: int, action: Array, new: Array, info: Any) -> None:
        """Raise RuntimeError if the environment's own state grew by other tokens than `action` and `new`."""
        episode = self.envs.envs[slot].episode
        start, end = episode.turns[-1]
        if not np.array_equal(episode.buffer[start : episode.length], np.concatenate([action, new])):
            raise RuntimeError(
                f"task {info.get('task_id')!r}: the turn's tokens differ from the environment's own state, "
                f"which took {end - start} tokens of a span of {len(action)} and added {episode.length - end}. "
                f"The observation has {len(new)} new tokens. Make the environment with observation='new'. A wrapper "
                "that rewrites the context on purpose must return all of it and set info['context_rewritten']"
            )

    def _end(self, slot: int, info: Any, record: Mapping[str, Any]) -> None:
        """End the slot's episode: compute its statistics and free the slot."""
        row = self.live.pop(slot)
        row.truncated |= row.fault is not None
        row.finalize()
        row.stats |= {"success": float(info.get("is_success", False)), "truncated": float(row.truncated)}
        row.stats |= {"sampled_tokens": int(row.action_mask.sum()), "tokens": len(row.tokens)}
        row.stats |= task_metrics(info.get("metrics", {}), row.stats)
        row.record |= record
        self.done[row.episode] = row
        self.free.append(slot)
        if self.branching is not None:
            self.queue.extend(self.branching.end(row))
        self.on_done()


def check_playable(envs: Any) -> None:
    """Raise SystemExit if a vector environment resets episodes by itself, or uses text."""
    inner = getattr(envs, "unwrapped", envs)
    if (mode := getattr(inner, "autoreset_mode", AutoresetMode.DISABLED)) != AutoresetMode.DISABLED:
        cause = f"the environment has autoreset_mode {mode.value}, but the sampler resets episodes itself"
        raise SystemExit(f"{cause}: leave autoreset_mode out")
    if getattr(inner, "text", False):
        raise SystemExit("the environment has text=True, but the sampler uses tokens: leave text out")


def task_metrics(metrics: Mapping[str, Any], statistics: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers among a task's metrics. One with the name of our statistic is called task_NAME.

    None and other values that are not numbers mean that an episode has no such figure. It is then left out of the
    means.
    """
    numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
    return {f"task_{name}" if name in statistics else name: float(value) for name, value in numbers.items()}


def rollout(
    envs: Any, engine: Engine, episodes: Sequence[tuple[int, int]], seed: int, in_order: bool = False
) -> list[Trajectory]:
    """Run `episodes`, pairs (episode number, task index), and return them in this order.

    `in_order` is the argument of `Sampler`.
    """
    sampler = Sampler(envs, engine, seed, in_order)
    sampler.add(episodes)
    return sampler.collect([episode for episode, _ in episodes])


def all_tasks(envs: Any) -> Tasks:
    """Return the tasks of a vector environment to draw from: their number, or those of each of its environments."""
    return envs.kinds[0].num_tasks if len(envs.kinds) == 1 else list(zip(envs.shares, envs.tasks, strict=True))


def first_tasks(envs: Any, count: int) -> list[tuple[int, int]]:
    """Return the first `count` tasks of each environment (fewer if it has fewer), as numbered episodes."""
    numbers = [range(envs.kinds[0].num_tasks)] if len(envs.kinds) == 1 else envs.tasks
    return list(enumerate(task for of_environment in numbers for task in of_environment[:count]))


def most_turns(envs: Any) -> int:
    """Return the turns of the environment that allows most."""
    return max(env.max_turns for env in envs.kinds)


def draw_episodes(
    seed: int, iteration: int, count: int, tasks: Tasks, group_size: int = 1, first: int = 0, attempt: int = 0
) -> list[tuple[int, int]]:
    """Return the numbers (from `first` on) and tasks of an iteration's episodes, groups side by side. They depend only
    on the arguments.

    With several environments, each group draws its environment first. The groups are independent of each other, so the
    scale of other groups does not depend on a group's environment.
    """
    rng, size = np.random.default_rng([seed, Stream.TASKS, iteration, attempt]), count // group_size
    if isinstance(tasks, int):
        drawn = rng.integers(tasks, size=size)
    elif isinstance(tasks, np.ndarray):
        drawn = rng.choice(len(tasks), size, p=tasks)
    else:
        shares, numbers = zip(*tasks, strict=True)
        places = rng.choice(len(tasks), size, p=shares)
        drawn = np.array([rng.integers(numbers[place].start, numbers[place].stop) for place in places], int)
    return list(enumerate(np.repeat(drawn, group_size).tolist(), first))
