"""ToolVectorEnv: many episodes whose tool calls run together.

    send ──► read every span (ToolEnv._begin_turn) ──► run the calls: inline, in one batch, or in threads (VectorCalls)
    recv ◄── judge each turn (ToolEnv._try_turn) as soon as its own calls are answered

Only the thread that calls the vector environment changes episodes, or their own threads on its behalf (see `ToolEnv`).
The other threads run tools, slow judges and retries after faults. `step` is `send` to all, then `recv` from all.
"""

from __future__ import annotations

import copy
import time
import weakref
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

from agent_r1.episode import Tokens
from agent_r1.faults import Patience, fault_line, may_have_acted
from agent_r1.spaces import UnicodeText
from agent_r1.text.chat import decode_state, encode_turn
from agent_r1.tool_env import ToolEnv
from agent_r1.vector_calls import InFlight, VectorCalls
from agent_r1_tools import ToolFault
from agent_r1_tools.tool import is_fault

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


class Phase(Enum):
    """The phase of an episode."""

    OVER = "over"  # or not begun: the episode needs a reset
    READY = "ready for an action"
    IN_FLIGHT = "in flight"


@dataclass(eq=False)
class _Slot(InFlight):
    """One episode and its environment."""

    phase: Phase = Phase.OVER
    observation: Any = None
    known: int = 0  # tokens that the policy has seen or written
    room: int = 0  # info["max_new_tokens"]
    steps: int = 0
    max_steps: int | None = None  # of Gymnasium's TimeLimit
    patience: Patience = field(default_factory=lambda: Patience(0))  # the retries of a judge that faults


class ToolVectorEnv(gym.vector.VectorEnv[tuple[Any, ...], Sequence[Any], NDArray[Any]]):
    """Many episodes of a `ToolEnv` at once. `gym.make_vec("AgentR1/...", num_envs=n)` makes one.

    Args:
        env: an id, a subclass of `ToolEnv`, or a function that makes a `ToolEnv`.
        num_envs: the number of episodes.
        max_episode_steps: truncate episodes after this number of turns, as Gymnasium's TimeLimit does. Prefer the
            environment's own `max_turns`, which also pays for the unfinished episode.
        autoreset_mode: "Disabled" (default: finished episodes wait for `reset(options={"reset_mask": mask})`) or
            "SameStep" (a finished episode begins again at once; its end is in `final_obs` and `final_info`). "NextStep"
            is not offered, because it would discard one generated turn in every episode.
        observation: "state" for all tokens so far, "new" for the tokens that the environment added (see `NewTokens`).
        text: text instead of tokens, for actions and observations (see `TextInterface`).
        kwargs: the arguments of the environment.

    Observations are a tuple (`recv`: a list) of arrays or strings, rewards float64, flags bool. `step` and `reset`
    return infos as Gymnasium does, a dict of arrays with masks. `recv` returns a list of dicts, one for each episode.

    Faults (see `ToolEnv`) are retried in threads, and delay their own episode only. If an episode cannot begin, `reset`
    retries and waits, for `fault_deadline` seconds in all. The episode then ends with its first turn, and
    `info["fault"]` reports it at once. After that each `reset` makes one attempt and does not wait, until `num_envs`
    episodes in a row have begun. So a set with some broken tasks costs one wait, not one for each task.

    Calls of a tool with `timeout=inf` run at once, in the caller's thread. Other calls run in threads, where a slow or
    failing call delays its own episode only. Calls of equal tools go to `batch_execute` together if the tool has it,
    and equal calls run once. A turn that calls a tool with `concurrency_safe=False` makes its calls one after the
    other, in the episode's thread (see `ToolEnv`). Such a tool serves one episode at a time.

    Raises: ValueError and RuntimeError for wrong use, with the remedy. The text of a policy never raises.
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
        self.closed = True  # until the constructor is done: older versions of Gymnasium close collected objects
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
        self.envs: tuple[ToolEnv, ...] = ()
        try:
            for _ in range(num_envs):
                self.envs = (*self.envs, make(**kwargs))
            first = self.envs[0]
            first._count_tasks()  # raises if there is no valid number: learners read it before the first reset
        except BaseException:
            for made in self.envs:
                with suppress(Exception):
                    made.close()
            raise
        self.render_mode = first.render_mode
        self.metadata = {**first.metadata, "autoreset_mode": self.autoreset_mode}
        self.single_observation_space = UnicodeText() if text else first.observation_space
        self.single_action_space = UnicodeText() if text else first.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.kinds: tuple[ToolEnv, ...] = self.envs[:1]  # one for each id: all slots have the same
        self._slots = [_Slot(i, tool_env, max_steps=max_episode_steps) for i, tool_env in enumerate(self.envs)]
        self._calls = VectorCalls(first)
        self._stop_threads = weakref.finalize(self, self._calls.stop)  # if the user does not call close
        self._distrust = 0  # number of episodes that must begin in a row until a reset waits again
        self._outcomes: dict[int, tuple[Any, float, bool, bool, dict[str, Any]]] = {}  # judged, not yet received
        # Called with (environment, info, terminated, truncated) when an episode ends, before the next one begins.
        self.on_end: list[Callable[[ToolEnv, dict[str, Any], bool, bool], None]] = []
        self.closed = False

    # ------------------------------------------------------------------ gymnasium

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Begin all episodes, or those of `options["reset_mask"]` while the others continue.

        Args:
            seed: one for each episode (equal seeds give equal tasks: a group for GRPO), or an int for n, n + 1 ...
            options: `reset_mask`, a bool array of shape (num_envs,), and options of the environment. The latter are
                one value for all episodes, or a list with one entry for each of the `num_envs` episodes. Entries
                outside the mask are ignored. The dict is not changed.

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
        deadline = max(env.fault_deadline for env in self.kinds)
        patience = Patience(deadline)  # shared: the episodes mostly need the same infrastructure
        for i in chosen:
            info = self._reset(self._slots[i], seeds[i], per_env[i], patience)
            infos = self._add_info(infos, info, i)
        return tuple(slot.observation for slot in self._slots), infos

    def step(self, actions: Sequence[Any]) -> tuple[tuple[Any, ...], Floats, Bools, Bools, dict[str, Any]]:
        """Run one turn in every episode; return when the slowest is done."""
        self.send(actions)
        _, observations, rewards, terminations, truncations, all_infos = self.recv(self.num_envs)
        infos: dict[str, Any] = {}
        for i, info in enumerate(all_infos):
            infos = self._add_info(infos, info, i)
        return tuple(observations), rewards, terminations, truncations, infos

    def render(self) -> tuple[Any, ...] | None:
        """Return the rendering of each environment."""
        return tuple(env.render() for env in self.envs)

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environments. Running calls are abandoned, so a stuck tool does not delay the end."""
        self._stop_threads()
        for env in self.envs:
            env.close()

    # ------------------------------------------------------------------ without a barrier

    def send(self, actions: Iterable[Any], env_ids: Iterable[int] | None = None) -> None:
        """Take one turn in some episodes (default: in all). `recv` returns the results as they arrive.

        Args:
            actions: a span, or with `text=True` a str, for each of `env_ids`.
            env_ids: numbers of episodes that are ready for an action, each once.

        Raises (before any turn begins): ValueError for a wrong number of actions, wrong ids, or actions that are not
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
            rejected = [i for i in ids if self._slots[i].phase is phase]
            if rejected:
                raise RuntimeError(f"episodes {rejected} are {phase.value}; {remedy}")
        slots = [self._slots[i] for i in ids]
        spans = [self._span(slot, action) for slot, action in zip(slots, actions, strict=True)]

        for slot, span in zip(slots, spans, strict=True):
            slot.turn = slot.env._begin_turn(span)
            slot.phase = Phase.IN_FLIGHT
            slot.known = slot.env.episode.length
            slot.patience = Patience(slot.env.fault_deadline)
        self._calls.start(slots)

    def recv(
        self, min_batch: int = 1, timeout: float | None = None
    ) -> tuple[NDArray[np.int64], list[Any], Floats, Bools, Bools, list[dict[str, Any]]]:
        """Return the finished turns: (env_ids, observations, rewards, terminations, truncations, infos).

        Waits until at least `min_batch` episodes (or all that are in flight, if fewer) are done, but at most `timeout`
        seconds. Then it returns the finished turns, possibly none. Env ids are in rising order, and everything else is
        in their order.

        Raises: RuntimeError if nothing is in flight.
        """
        self._check_open()
        in_flight = sum(slot.phase is Phase.IN_FLIGHT for slot in self._slots)
        if not in_flight:
            raise RuntimeError("no episode is in flight; send() actions before recv()")
        wanted = min(min_batch, in_flight)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            while self._calls.answered:
                self._judge(self._slots[self._calls.answered.popleft().number])
            if len(self._outcomes) >= wanted:
                wait: float | None = 0.0  # collect other finished turns without waiting
            else:
                wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._calls.wait(wait):
                break
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

    def fork(self, source: int, target: int) -> tuple[Any, dict[str, Any]]:
        """Continue the episode of `source` in `target`, too: `set_state(target, get_state(source))`.

        Returns the observation and info of `target`. Raises ValueError for equal ids, and the errors of both.
        """
        if source == target:
            raise ValueError(f"source and target are both {source}; an episode is forked into another slot")
        return self.set_state(target, self.get_state(source))

    def get_state(self, source: int) -> dict[str, Any]:
        """Return a snapshot from which the episode of `source` can continue, in any slot.

        It can be pickled. A wrapper with its own notes on each episode must add them here and in `set_state`.

        Raises: ValueError for an id out of range; RuntimeError for an episode that is over or in flight; ToolFault for
        an infrastructure error that persists for `fault_deadline` seconds.
        """
        slot = self._slot(source)
        if slot.phase is not Phase.READY:
            remedy = "recv() its result" if slot.phase is Phase.IN_FLIGHT else "take the snapshot before its last turn"
            raise RuntimeError(f"episode {source} is {slot.phase.value}; {remedy}")
        state = {name: copy.copy(getattr(slot, name)) for name in _COPIED}
        return state | {"class": type(slot.env).__name__, "env": _retried(slot.env, slot.env.get_state)}

    def set_state(self, target: int, state: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Continue from a snapshot of `get_state` in `target`, whose episode is lost. The snapshot is not changed.

        Equal actions then give equal episodes: the random state, the turns so far and the limits are those of the
        snapshot. A `target` that never began needs no reset.

        Returns the observation and info of `target`, as a reset does.

        Raises: ValueError for an id out of range, and for a snapshot of other tasks; RuntimeError for a `target` in
        flight; ToolFault for an infrastructure error that persists for `fault_deadline` seconds. After an error of the
        environment, `target` is over.
        """
        slot = self._slot(target)
        if slot.phase is Phase.IN_FLIGHT:
            raise RuntimeError(f"episode {target} is in flight; recv() its result before another one replaces it")
        more = self._prepare(slot, state)
        if type(slot.env).__name__ != state["class"]:
            raise ValueError(
                f"the snapshot is of {state['class']}, but episode {target} is of {type(slot.env).__name__}; "
                "make both by one function"
            )
        slot.phase = Phase.OVER  # if the environment cannot continue
        _retried(slot.env, partial(slot.env.set_state, state["env"]))
        for name in _COPIED:
            setattr(slot, name, copy.copy(state[name]))
        slot.phase = Phase.READY
        return slot.observation, slot.env._info({}, []) | more

    def _slot(self, number: int) -> _Slot:
        self._check_open()
        if not 0 <= number < self.num_envs:
            raise ValueError(f"an episode's number must be in [0, {self.num_envs}), got {number}")
        return self._slots[number]

    def _prepare(self, slot: _Slot, state: dict[str, Any]) -> dict[str, Any]:
        """Give a slot the kind of environment that a snapshot is of. Return further entries of its info."""
        return {}  # here all slots have the same kind

    def _reset(
        self, slot: _Slot, seed: int | None, options: dict[str, Any], patience: Patience
    ) -> dict[str, Any]:
        slot.phase = Phase.OVER  # if the reset fails
        options = options | {"patience": Patience(0) if self._distrust else patience}
        state, info = slot.env.reset(seed=seed, options=options)
        self._distrust = self.num_envs if "fault" in info else max(0, self._distrust - 1)
        slot.phase, slot.steps, slot.known = Phase.READY, 0, 0
        slot.room = info["max_new_tokens"]
        slot.observation = self._view(slot, state)
        return info

    def _span(self, slot: _Slot, action: Any) -> Tokens:
        return slot.env._check_action(encode_turn(slot.env, action, slot.room) if self.text else action)

    def _view(self, slot: _Slot, state: Tokens) -> Any:
        tokens = state[slot.known :] if self.observe_new else state
        return decode_state(slot.env, tokens) if self.text else tokens

    def _judge(self, slot: _Slot) -> None:
        """End a turn whose calls are all answered, and note its outcome for `recv`."""
        slot.phase = Phase.OVER  # if the judgement fails
        results = [result for result in slot.results if result is not None]
        try:
            state, reward, terminated, truncated, info = slot.env._try_turn(slot.turn, results)
        except ToolFault as fault:
            slot.phase = Phase.IN_FLIGHT
            pause = None if fault.ran else slot.patience.next()
            if pause is None:
                slot.turn.fault = str(fault)
                self._calls.answered.append(slot)
            else:
                self._calls.judge_again(slot, pause)
            return
        slot.steps += 1
        if slot.steps == slot.max_steps:
            info = info if terminated or truncated else info | slot.env.cut_off()
            truncated = True
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

    # ------------------------------------------------------------------ arguments

    def _check_open(self) -> None:
        if self.closed:
            raise RuntimeError("this vector environment is closed; make a new one")
        if self._calls.bug is not None:
            error_message = "a tool raised an exception during a turn; make a new vector environment"
            raise RuntimeError(error_message) from self._calls.bug

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
        return [None if number is None else int(number) for number in seed]

    def _per_env(self, options: dict[str, Any]) -> list[dict[str, Any]]:
        each: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for key, value in options.items():
            values = value if isinstance(value, list | tuple | np.ndarray) else [value] * self.num_envs
            if len(values) != self.num_envs:
                raise ValueError(
                    f"options[{key!r}] has {len(values)} entries for num_envs={self.num_envs}; "
                    "pass one for each episode (those outside reset_mask are ignored), or one value for all"
                )
            for own_options, own_value in zip(each, values, strict=True):
                own_options[key] = own_value
        return each


_COPIED = ("observation", "known", "room", "steps")  # entries of a slot that are part of a snapshot


def _retried(env: ToolEnv, act: Callable[[], Any]) -> Any:
    """Return `act()`; retry infrastructure errors. Raises ToolFault for one that persists."""
    patience = Patience(env.fault_deadline)
    while True:
        try:
            return act()
        except Exception as error:
            if not is_fault(error):
                raise
            if may_have_acted(error) or not patience.wait():
                raise ToolFault(fault_line("snapshot", error)) from error


def vector_spec(env_id: str) -> EnvSpec:
    """Return the spec of a registered `ToolEnv` for `gym.make_vec`, with `ToolVectorEnv` as default vector environment.

    Without it, `gym.make_vec(env_id)` makes a `SyncVectorEnv`, whose tool calls wait for each other.
    """
    spec = copy.deepcopy(gym.spec(env_id))
    if spec.vector_entry_point is None:
        spec.vector_entry_point = f"{__name__}:{env_id}"
    return spec


def __getattr__(name: str) -> Any:
    """Return a maker of `ToolVectorEnv`s for the attribute SOME_ID: `vector_entry_point="agent_r1.vector:SOME_ID"`."""
    if name in gym.registry:
        return partial(ToolVectorEnv, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
