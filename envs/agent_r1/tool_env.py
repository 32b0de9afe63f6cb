"""ToolEnv: tool use by a language model as a Markov decision process over tokens (Agent-R1, arXiv 2511.14460).

    policy -- token span (one assistant turn) --> ToolEnv.step
        1 append the span to the state, untouched
        2 read the tool calls in it                  (Dialect)
        3 run them: what happened                    (Tool)
        4 decide what it means: reward terms, end    (ToolEnv, turn_end)
        5 append the rendered results                (Dialect)

This file knows no task and no model family. A task subclasses `ToolEnv` and says what its tasks are, which tools
there are, what a tool's result means (`judge_result`) and what an answer is worth (`judge_answer`).
"""

from __future__ import annotations

import copy
import inspect
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

from agent_r1.arguments import ArgumentError, duration, finite, integer
from agent_r1.dialects import Call, Dialect, get_dialect
from agent_r1.episode import End, Episode, OpenTurn, PendingCall, Task, Tokens, UserTurn
from agent_r1.faults import Calls, Patience, begin_sessions, fault_line, may_have_acted
from agent_r1.rewards import find_answers, paper_outcome, process_weights
from agent_r1.spaces import TokenSpan
from agent_r1.text.chat import chat_messages, encode_turn, reply_text
from agent_r1.text.tokenizers import load_tokenizer
from agent_r1.trajectories import say, transcript
from agent_r1.turn_end import CUT, MAX_CALLS, NO_ACTION_HINT, TurnEnd, judged, settle
from agent_r1_tools import Tool, ToolFault, ToolResult
from agent_r1_tools.running import describe, is_strict
from agent_r1_tools.threads import OneThread, call_on
from agent_r1_tools.tool import check_limits, is_fault

__all__ = [
    "CUT", "End", "Episode", "MAX_CALLS", "NO_ACTION_HINT", "OpenTurn", "PendingCall", "Task", "Tokens", "ToolEnv",
    "UserTurn",
]  # fmt: skip

ONLY_EXPERTS = "{name} has no demonstrator that makes mistakes; take the expert's demonstrations (--expert-share 1)"


class PromptTooLong(ArgumentError):
    """A task's prompt leaves no room in the context."""


class ToolEnv(gym.Env[Tokens, Tokens]):
    """A Gymnasium environment whose actions are token spans and whose observation is the whole token state.

    Args:
        tools: what the policy can call. Later arguments are keyword-only.
        tokenizer: a Hugging Face name or folder, a tokenizer object, or None for the built-in byte tokenizer.
        dialect: how calls and results are written ("hermes", "qwen_xml", ...); None reads it off the chat template.
        split: which part of the tasks.
        max_turns: turns before the episode is truncated; with 1 it terminates instead.
        max_context_tokens: bound on the state, in tokens (default 32,768, or the tokenizer's own limit if smaller).
        max_action_tokens: bound on one span, in tokens (default 2,048).
        process_reward: True for the class's `PROCESS_WEIGHTS`, a dict to change some of them, False for none.
        unfinished_reward: what an episode without an answer pays; None: what a wrong format pays (equation 6).
        fault_deadline: seconds for which what the machinery does wrong is tried again; 0 for never. A fault that lasts
            ends the episode: reward 0, truncated, `info["truncation_reason"] == "fault"`, and `info["fault"]` names it.
        strict: raise what a tool raises that is no fault, with its traceback, instead of telling it to the policy: for
            finding a tool's bugs. None: what AGENT_R1_STRICT says (1 or true for True).
        render_mode: None, "ansi" (render() returns the conversation) or "human" (it is printed as it goes).

    Where a tool has a session (`concurrency_safe=False`) and tool or judge may block, an episode has a thread:
    `start_episode`, the judges, and the calls, states and `close` of such tools run there, one after the other, so a
    connection made in `start_episode` may be of use to that thread only. Elsewhere the thread is the one that steps.
    Async functions run on an event loop in a thread of its own.

    Raises (from `step`): RuntimeError after the end; ValueError for something that is no 1-D array of token ids.
    What a policy writes never raises. From `reset`: ToolFault where the episode cannot begin within `fault_deadline`.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "human"], "render_fps": 4}

    instructions: str = "Solve the task. Give the final answer as <answer>your answer</answer>."
    outcome_term: ClassVar[str] = "outcome/score"
    slow_judge: bool = False  # True: `judge_answer` and `user_turn` take their time: many ask them in threads
    floor: float = 0.0  # the share of tasks that chance and tricks may solve (python -m agent_r1.validate)
    floors: ClassVar[Mapping[str, float]] = {}  # of tricks (`shortcut_NAME`) that may solve more
    splits: ClassVar[Mapping[str, str]] = {"train": "train"}  # name -> canonical name; aliases are rows too
    teachers: ClassVar[tuple[str, ...]] = ()  # names for `demonstration(rng, teacher=NAME)`
    choices: ClassVar[tuple[int, int] | None] = None  # (most candidates, features of each), see `candidates`
    PROCESS_WEIGHTS: ClassVar[Mapping[str, float]] = {
        "malformed_call": -0.1,
        "failed_call": -0.05,
        "repeated_call": -0.05,
        "no_action": 0.0,
    }

    def __init__(
        self,
        tools: Sequence[Tool] = (),
        *,
        tokenizer: Any = None,
        dialect: str | None = None,
        split: str = "train",
        max_turns: int = 6,
        max_context_tokens: int | None = None,
        max_action_tokens: int | None = None,
        process_reward: bool | Mapping[str, float] = True,
        unfinished_reward: float | None = None,
        fault_deadline: float = 60.0,
        strict: bool | None = None,
        render_mode: str | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            name, there = type(self).__name__, ", ".join(self._argument_names())
            raise ArgumentError(f"{name} got an unexpected keyword argument {next(iter(unknown))!r}; it has {there}")
        self._check_class()
        if not isinstance(tools, Sequence) or not all(isinstance(tool, Tool) for tool in tools):
            remedy = "a function becomes one by Tool.from_function(function)"
            raise ArgumentError(f"the tools of {type(self).__name__} are a list of Tools, got {tools!r:.200}; {remedy}")
        if not isinstance(strict, bool | None):
            raise ArgumentError(f"strict must be True, False or None, got {strict!r}")
        try:
            is_strict(strict)
        except ValueError as error:  # AGENT_R1_STRICT says what nobody knows
            raise ArgumentError(str(error)) from None
        if not isinstance(split, str) or split not in self.splits:
            raise ArgumentError(f"{type(self).__name__} has no split {split!r}; it has {', '.join(self.splits)}")
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ArgumentError(f"render_mode must be None, 'ansi' or 'human', got {render_mode!r}")
        for name, bound in (
            ("max_turns", max_turns),
            ("max_context_tokens", max_context_tokens),
            ("max_action_tokens", max_action_tokens),
        ):
            if bound is not None:
                integer(name, bound, least=1)
        for tool in tools:
            check_limits(tool)
        names = [tool.name for tool in tools]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            same = ", ".join(map(repr, sorted(twice)))
            raise ArgumentError(f"two tools are named {same}; give each a name of its own")
        self.split = self.splits[split]
        self.tokenizer = load_tokenizer(tokenizer)
        self.dialect = get_dialect(dialect, self.tokenizer)
        self.tools = {tool.name: tool for tool in tools}
        self._all_tools = dict(self.tools)  # a task may leave some out of an episode
        self.max_turns = max_turns
        self.max_context_tokens = max_context_tokens or min(
            32_768, int(getattr(self.tokenizer, "model_max_length", 32_768))
        )
        self.max_action_tokens = max_action_tokens or min(2_048, self.max_context_tokens)
        self.process_weights = process_weights(process_reward, self.PROCESS_WEIGHTS)
        self.unfinished_reward = None if unfinished_reward is None else finite("unfinished_reward", unfinished_reward)
        self.fault_deadline = duration("fault_deadline", fault_deadline)
        self.strict = strict
        self.render_mode = render_mode
        vocab_size = len(self.tokenizer)
        self.action_space = TokenSpan(vocab_size, self.max_action_tokens)
        self.observation_space = TokenSpan(vocab_size, self.max_context_tokens)
        self._schemas = [tool.schema for tool in self.tools.values()]
        self._stop = frozenset(self.dialect.stop_token_ids)
        # The room that every turn has: where the results would leave less they are cut, or the episode ends.
        self._reserve = max(1, min(self.max_action_tokens, 256, self.max_context_tokens // 8))
        self._thread = OneThread()
        self._episode: Episode | None = None
        self._task: Task | None = None

    @classmethod
    def _argument_names(cls) -> list[str]:
        """What the constructor takes by name, its own ones first; without `tools`, which a task gives itself."""
        names: dict[str, None] = {}
        for one in cls.__mro__[: cls.__mro__.index(ToolEnv) + 1]:
            init = one.__dict__.get("__init__")
            for parameter in list(inspect.signature(init).parameters.values())[1:] if init else ():
                by_name = parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
                if by_name and (one is not ToolEnv or parameter.name != "tools"):
                    names[parameter.name] = None
        return list(names)

    def _check_class(self) -> None:
        """Raise where what the class says has a wrong type."""
        name = type(self).__name__
        if not isinstance(self.splits, Mapping) or not self.splits:
            example = "{'train': 'train'}"
            raise ArgumentError(f"{name}.splits is a dict of names, such as {example}, got {self.splits!r:.200}")
        for member in ("instructions", "outcome_term"):
            said = vars(self).get(member, inspect.getattr_static(type(self), member))
            later = isinstance(said, property | cached_property)  # it may need what isn't there yet
            if not isinstance(said, str) and not later:
                raise ArgumentError(f"{name}.{member} is a text, got {said!r:.200}")
        if not isinstance(self.teachers, list | tuple) or not all(isinstance(one, str) for one in self.teachers):
            example = "('fallible_50',)"
            raise ArgumentError(f"{name}.teachers is a tuple of names, such as {example}, got {self.teachers!r:.200}")
        if not isinstance(self.PROCESS_WEIGHTS, Mapping):
            raise ArgumentError(f"{name}.PROCESS_WEIGHTS is a dict of numbers, got {self.PROCESS_WEIGHTS!r:.200}")
        for term, weight in self.PROCESS_WEIGHTS.items():
            finite(f"{name}.PROCESS_WEIGHTS[{term!r}]", weight)

    def _check_built(self) -> None:
        """Raise where the class has its own constructor and ToolEnv's was never run."""
        if "_task" not in vars(self):
            raise ArgumentError(f"{type(self).__name__}.__init__ must call super().__init__(tools, **kwargs)")

    @property
    def unwrapped(self) -> ToolEnv:
        """Itself: `gym.make` asks for it first, so a constructor that forgot ToolEnv's is said there."""
        self._check_built()
        return self

    # ------------------------------------------------------------------ what a task says

    @classmethod
    def has_split(cls, split: str, **kwargs: Any) -> bool:
        """Whether the constructor takes this split with these arguments: a folder of data may lack some of `splits`.

        Programs ask it where they choose a split to evaluate on.
        """
        return split in cls.splits

    @property
    def num_tasks(self) -> int:
        """How many tasks the split has; a task is a function of (split, index). Without end where nothing says so."""
        return 2**31 - 1

    def make_task(self, index: int) -> Task:
        """Task number `index` of the split."""
        raise NotImplementedError(f"{type(self).__name__} has no make_task: which task has a number")

    def count_tasks(self) -> int:
        """`num_tasks`. Raises ArgumentError where the class gives no number of tasks."""
        self._check_built()
        return integer(f"{type(self).__name__}.num_tasks", self.num_tasks, least=1)

    def start_episode(self, task: Task) -> None:
        """Hand the tools what they need for this task (a corpus, say).

        Also called before a snapshot continues, with its notes in `memory`; they are put back afterwards.
        """

    def judge_result(self, call: Call, result: ToolResult) -> dict[str, float] | End:
        """What a tool's result means: amounts of process terms, before their weights. Notes go into `memory`.

        An `End` ends the episode here, as an answer would; calls after it in the same turn don't count.
        """
        return {}

    def call_key(self, call: Call) -> list[Any]:
        """What JSON a call is known by: `repeated_call` counts one whose key was there before in the episode. A task in
        which the same call answers anew adds what has changed."""
        return [call.name, call.arguments]

    def judge_answer(self, answer: str) -> tuple[float, dict[str, float]]:
        """What an answer is worth: a score from 0 to 1 (1 is success), and metrics for `info["metrics"]`.

        A judge that is itself broken raises `ToolFault` or an OSError, or says why in `memory["judge_error"]`: a fault,
        which is tried again and never paid. That holds for all judges; what they noted in `memory` is taken back. What
        an answer can bring about (it names no file, it is no number) is no fault: a judge catches that and pays 0.
        """
        raise NotImplementedError(f"{type(self).__name__} has no judge_answer: what an answer is worth")

    def user_turn(self, text: str) -> str | UserTurn | End | None:
        """What the task's user says to a turn with neither a call nor an answer in it, whose visible text is `text`.

        None, the default, is for a task without a user: the policy then reads a hint and `no_action` counts. A
        `UserTurn` pays for what was said, an `End` ends the episode. What the user remembers belongs into `memory`. One
        that takes its time (a model, an address) says so with `slow_judge`, or a vector environment waits for it.
        """
        return None

    def judge_outcome(self, score: float, *, answer_ok: bool, calls_ok: bool) -> float:
        """What the end of an episode pays, by default equation 6 of the paper (`paper_outcome`).

        `score` is that of the answer or of an `End`, 0 where there is neither. `answer_ok`: the last turn has exactly
        one answer, which isn't empty, or there was an `End`. `calls_ok`: no call of the episode was malformed. For an
        unfinished episode `unfinished_reward` comes first, if it is given.
        """
        return paper_outcome(score, answer_ok=answer_ok, calls_ok=calls_ok)

    def judge_besides(self) -> dict[str, float]:
        """What the end of an episode pays besides `judge_outcome`, as terms `outcome/NAME`: for harm that was done,
        say. It is asked last, for an unfinished episode, too."""
        return {}

    def judge_end(self, answer: str) -> dict[str, float]:
        """What the episode as a whole means, at its end ("" for no answer): amounts of process terms."""
        return {}

    def final_metrics(self) -> dict[str, float]:
        """Metrics of an episode that ended without an answer."""
        return judged(self, self.judge_answer(""))[1]

    def demonstration(self, rng: np.random.Generator | None = None) -> list[str]:
        """The turns of an expert on the current task, texts without the end of turn; with `rng` of one who errs.

        Raises: ValueError where the expert knows no way, and for a demonstrator that there isn't.
        """
        raise NotImplementedError(f"{type(self).__name__} has no demonstration: the turns of an expert")

    @staticmethod
    def vocabulary() -> list[str]:
        """Words that a small tokenizer made for this task should keep whole."""
        return []

    def candidates(self) -> Sequence[tuple[str, Sequence[float]]]:
        """Turns as text among which a policy of `ChoiceInterface` chooses in this state, each with its features.

        There is at least one and at most `choices` says. They should come from what the policy has read.
        """
        raise NotImplementedError(f"{type(self).__name__} has no candidates: the turns to choose among")

    # ------------------------------------------------------------------ gymnasium

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Tokens, dict[str, Any]]:
        """Begin an episode: `seed` draws its task, options `task_index` names it and `max_turns` bounds it.

        A vector environment adds `patience`, a `Patience` which it shares among the episodes that it begins together:
        one that cannot begin, or whose question leaves no room in the context, is then handed out as an episode that
        ends with a fault at its first turn.

        Raises ValueError for other options or values, and for a prompt that leaves no room even without its question
        (alone: for any that leaves none); ToolFault for a fault that lasts; and what `make_task` and `start_episode`
        raise that is no fault (see `is_fault`).
        """
        super().reset(seed=seed)
        options = dict(options or {})
        shared: Patience | None = options.pop("patience", None)
        index = options.pop("task_index", None)
        max_turns = options.pop("max_turns", None)
        if options:
            raise ValueError(f"reset options are 'task_index' and 'max_turns', got {', '.join(map(repr, options))}")
        count = self.count_tasks()
        index = self.np_random.integers(count) if index is None else integer("task_index", index)
        if not 0 <= index < count:
            raise ValueError(f"task_index must be in [0, {count}) in split {self.split!r}, got {index}")
        horizon = self.max_turns if max_turns is None else integer("max_turns", max_turns, least=1)
        patience = shared or Patience(self.fault_deadline)
        while True:
            try:
                self._begin(int(index), horizon)
                break
            except PromptTooLong as error:
                if shared is None:
                    raise
                with suppress(PromptTooLong):  # all prompts are: no question is at fault
                    self._begin_broken(int(index), horizon, fault_line("reset", str(error)), shorter=True)
                    break
                raise
            except Exception as error:
                if not is_fault(error):
                    raise
                if not may_have_acted(error) and patience.wait():
                    continue
                if shared is None:
                    raise ToolFault(f"task {index} of {self.split!r} could not begin: {describe(error)}") from error
                self._begin_broken(int(index), horizon, fault_line("reset", error))
                break
        self.episode.seed = seed
        if self.render_mode == "human":
            say(transcript(self.episode.messages, []))
        return self._observation(), self._info({}, [])

    def step(self, action: Any) -> tuple[Tokens, float, bool, bool, dict[str, Any]]:
        """One assistant turn: a span of sampled tokens in; the new state, its reward, flags and info out."""
        turn = self.begin_turn(action)
        try:
            results = self.in_order(turn.waiting).run()
        except Exception:  # a tool's own bug, where that is raised: the turn has no end
            self.episode.over = True
            raise
        assert results is not None
        return self.end_turn(turn, results)

    def step_message(self, reply: Any) -> tuple[Tokens, float, bool, bool, dict[str, Any]]:
        """`step` with the reply of a chat API, whatever the dialect: a message with `content` and `tool_calls`.

        What doesn't fit into the room left is cut off. Raises TypeError for what is no such message.
        """
        return self.step(self.encode_reply(reply))

    def encode_reply(self, reply: Any) -> Tokens:
        """The span that `step_message` steps with, for an environment with wrappers or one of many."""
        return encode_turn(self, reply_text(self.dialect, reply, self.schemas), self.room)

    def in_order(self, calls: Sequence[PendingCall]) -> Calls:
        """Makes calls of this episode one after the other: `in_order(turn.waiting).run()` gives their results."""
        return Calls(calls, self.fault_deadline, self._session_thread, self.strict)

    def begin_turn(self, action: Any) -> OpenTurn:
        """Append a span and read it. `turn.calls` with a tool wait to be run, in order (see `end_turn`)."""
        episode = self.episode
        if episode.over:
            raise RuntimeError("step() after the end of the episode; call reset() first")
        span, room = self.check_action(action), self.room
        episode.turns.append((episode.length, episode.length + len(span[:room])))
        episode.append(span[:room])
        episode.turn += 1
        ids = span[:room].tolist()
        parsed = self.dialect.parse(ids, self.schemas)
        # A sampler cuts at the bound: in the middle of a call or an answer that is a span which doesn't fit.
        overflow = span.size > room or (span.size == room and self._stop.isdisjoint(ids) and parsed.is_open)
        if overflow or episode.fault is not None:
            episode.messages.append({"role": "assistant", "content": self.tokenizer.decode(ids)})
            return OpenTurn(overflow=overflow, fault=episode.fault)
        turn = OpenTurn(closed=bool(ids) and ids[-1] in self._stop)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.raw}
        if parsed.calls:
            turn.calls = [self._pending(call) for call in parsed.calls[:MAX_CALLS]]
            turn.skipped = parsed.calls[MAX_CALLS:]
            readable = [c.call for c in turn.calls if c.call.error is None]
            if len(readable) == len(parsed.calls):  # otherwise the raw text is the only faithful record
                message["content"] = parsed.content
                message["tool_calls"] = [
                    {"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in readable
                ]
        else:
            turn.answers, turn.said = find_answers(parsed.content), parsed.content
        episode.messages.append(message)
        return turn

    def takes_time(self, turn: OpenTurn) -> bool:
        """Whether `judge_early` is worth a thread: the turn is judged, or heard by a user, and that is slow."""
        heard = turn.speaks and type(self).user_turn is not ToolEnv.user_turn
        return self.slow_judge and (bool(turn.answers) or heard)

    def judge_early(self, turn: OpenTurn) -> None:
        """Judge the answer of an open turn, or ask the user about plain speech, so that `end_turn` need not. May be
        called in another thread.

        Who faults is asked again here; what lasts is noted in the turn.
        """
        answer = turn.answers[-1].strip() if turn.answers else ""
        patience = Patience(self.fault_deadline)
        while turn.fault is None:
            mark = self.episode.mark()
            try:
                if answer and turn.judged is None:
                    turn.judged = judged(self, call_on(self._session_thread, self.judge_answer, answer))
                elif turn.speaks and turn.heard is None:
                    turn.asked = "user"
                    turn.heard = (call_on(self._session_thread, self.user_turn, turn.said),)
                else:
                    return
                turn.asked = "judge"
                self._check_judge()
            except Exception as error:
                self.episode.return_to(mark)
                turn.judged = turn.heard = None
                if not is_fault(error):
                    raise
                if may_have_acted(error) or not patience.wait():
                    turn.fault = fault_line(turn.asked, error)

    def end_turn(
        self, turn: OpenTurn, results: Sequence[ToolResult]
    ) -> tuple[Tokens, float, bool, bool, dict[str, Any]]:
        """Decide what the results mean. `results` has one entry for each call that has a tool, in order.

        A result that is a fault has had its chances: it ends the episode. A judge that faults is asked again.

        Raises ValueError for another number of results, or if a judge names a term without a weight.
        """
        patience = Patience(self.fault_deadline)
        while True:
            try:
                return self.try_turn(turn, results)
            except ToolFault as fault:
                if fault.ran or not patience.wait():
                    turn.fault = str(fault)

    def try_turn(
        self, turn: OpenTurn, results: Sequence[ToolResult]
    ) -> tuple[Tokens, float, bool, bool, dict[str, Any]]:
        """`end_turn` without patience: raises `ToolFault` where a judge faults, and leaves all as it was before."""
        if len(results) != len(turn.waiting):
            raise ValueError(
                f"{len(turn.waiting)} calls wait for their results, got {len(results)} results; give one for each"
            )
        first_message = len(self.episode.messages) - 1
        mark, before = self.episode.mark(), turn.judged
        try:
            end: TurnEnd = call_on(self._session_thread, self._settle, turn, results)
        except Exception as error:
            if not is_fault(error):
                raise
            self.episode.return_to(mark)
            turn.judged = before
            raise ToolFault(fault_line(turn.asked, error), ran=may_have_acted(error)) from error
        if turn.fault is not None:  # nothing is judged
            self.episode.return_to(mark)
        self.episode.over = end.terminated or end.truncated
        self.episode.rewards.append(end.terms)
        self.episode.tool_calls.append(end.calls)
        info = self._info(end.terms, end.calls) | end.outcome
        if self.render_mode == "human":
            say(transcript(self.episode.messages, self.episode.rewards, first_message))
        return self._observation(), float(sum(end.terms.values())), end.terminated, end.truncated, info

    def _settle(self, turn: OpenTurn, results: Sequence[ToolResult]) -> TurnEnd:
        end = settle(self, turn, results, self._reserve)
        if turn.fault is None:
            self._check_judge()
        return end

    def cut_off(self) -> dict[str, Any]:
        """What the final info says of an episode that something else cuts off, such as Gymnasium's TimeLimit: that it
        is no success, and its metrics (none where the judge faults). Nothing is paid for it."""
        metrics: dict[str, float] = {}
        try:
            _, metrics = judged(self, (0.0, call_on(self._session_thread, self.final_metrics)))
        except Exception as error:
            if not is_fault(error):
                raise
        return {"is_success": False, "answer": None, "metrics": metrics}

    def get_state(self) -> dict[str, Any]:
        """A snapshot from which the episode can be continued, here or in another environment of the same kind.

        It holds the tokens, the conversation, the random state and the tools' sessions, and can be pickled.
        Raises RuntimeError in the middle of a turn.
        """
        if len(self.episode.turns) > len(self.episode.rewards):
            raise RuntimeError("get_state() in the middle of a turn; call it after its results have come")
        return {
            "episode": copy.deepcopy(self.episode),
            "task_id": self.task.id,
            "random_state": copy.deepcopy(self.np_random.bit_generator.state),
            "tools": {name: call_on(self._session_thread, tool.get_state) for name, tool in self.tools.items()},
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a snapshot of `get_state`; the snapshot itself stays as it is, and so does this environment
        where it is refused.

        Raises ValueError for a snapshot of an environment with other tasks or a larger context, and ToolFault where a
        call that ran out of time is still at work in a tool's session.
        """
        episode: Episode = copy.deepcopy(state["episode"])
        if episode.length > self.max_context_tokens:
            raise ValueError(
                f"the snapshot has {episode.length} tokens, more than max_context_tokens={self.max_context_tokens}"
            )
        if episode.fault is not None:  # it never began: there is nothing to hand to the tools
            task: Task | None = Task(state["task_id"], "", [])
        else:
            task = self._make_task(episode.task_index) if episode.task_index < self.count_tasks() else None
        if task is None or task.id != state["task_id"]:
            raise ValueError(
                f"the snapshot is of task {state['task_id']!r}, but task {episode.task_index} is "
                f"{task.id if task else None!r} here; make both environments with the same arguments"
            )
        self.np_random.bit_generator.state = copy.deepcopy(state["random_state"])
        self._episode, self._task = episode, task
        if episode.fault is not None:
            return
        call_on(self._session_thread, self.start_episode, task)
        self.memory.update(copy.deepcopy(state["episode"].memory))  # start_episode may have begun its notes anew
        call_on(self._session_thread, begin_sessions, self._with_others, state["tools"])

    def render(self) -> str | None:
        """The conversation so far as text (mode "ansi"); in mode "human" it was printed as it went."""
        if self.render_mode != "ansi":
            if self.render_mode is None:
                gym.logger.warn("render() without a render_mode; make the environment with render_mode='ansi'")
            return None
        return transcript(self.episode.messages, self.episode.rewards)

    def close(self) -> None:
        """End what runs for the tools' sessions."""
        thread = self._session_thread if self._thread.free else None  # nobody waits for a tool that is stuck
        for tool in self._with_others.values():
            call_on(thread, tool.close)
        self._thread = OneThread()  # the old one ends

    # ------------------------------------------------------------------ what other code reads

    @property
    def episode(self) -> Episode:
        """The running episode."""
        if self._episode is None:
            raise RuntimeError("the episode has not begun; call reset() first")
        return self._episode

    @property
    def memory(self) -> dict[str, Any]:
        """A task's own notes on this episode; part of every snapshot."""
        return self.episode.memory

    @property
    def task(self) -> Task:
        """The task of this episode."""
        if self._task is None:
            raise RuntimeError("there is no task yet; call reset() first")
        return self._task

    @property
    def room(self) -> int:
        """How many tokens the next span may have."""
        return min(self.max_action_tokens, self.max_context_tokens - self.episode.length)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools as the prompt shows them and as calls are read. Override it to show others, or none."""
        return self._schemas

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation as chat APIs take it (a copy): calls with ids, their arguments as JSON text."""
        return chat_messages(self.episode.messages)

    # ------------------------------------------------------------------ inside

    @property
    def _with_others(self) -> dict[str, Tool]:
        """The episode's tools, and those that it lacks, whose sessions end all the same."""
        return self._all_tools | self.tools

    @property
    def _session_thread(self) -> OneThread | None:
        """The episode's thread, where a tool with a session may block; None: the thread that calls us."""
        sessions = [tool for tool in self._with_others.values() if not tool.concurrency_safe]
        leaves = any(tool.timeout < math.inf for tool in sessions) or self.slow_judge
        return self._thread if sessions and leaves else None

    def _begin(self, index: int, max_turns: int) -> None:
        """Task `index` from its beginning. May raise what the machinery raises, and can then be called again."""
        self._task = None
        self._task = task = self._make_task(index)
        self._open(task, index, max_turns)
        call_on(self._session_thread, begin_sessions, self._with_others, {})
        call_on(self._session_thread, self.start_episode, task)

    def _make_task(self, index: int) -> Task:
        task: Any = self.make_task(index)
        what = f"{type(self).__name__}.make_task({index})"
        if not isinstance(task, Task):
            raise TypeError(f"{what} must give a Task, got {task!r:.200}")
        return task

    def _begin_broken(self, index: int, max_turns: int, fault: str, shorter: bool = False) -> None:
        """An episode for a task that cannot begin: it has a prompt (if that is to be shorter, without question and
        system text of the task's own), and its first turn ends it."""
        self._task = self._task or Task(f"task {index}", "", [])
        if shorter:
            self._task = replace(self._task, question="", instructions=None)
        self._open(self._task, index, max_turns)
        self.episode.fault = fault

    def _open(self, task: Task, index: int, max_turns: int) -> None:
        instructions = self.instructions if task.instructions is None else task.instructions
        prompt = _prompt(self.dialect, instructions, task.question, json.dumps(self.schemas))
        if len(prompt) + self._reserve > self.max_context_tokens:
            raise PromptTooLong(
                f"the prompt of task {task.id!r} has {len(prompt)} tokens and leaves no room in "
                f"max_context_tokens={self.max_context_tokens}; make that larger"
            )
        self._episode = Episode(index, max_turns, np.empty(max(256, 2 * len(prompt)), np.int32))
        self._episode.messages = _messages(instructions, task.question)
        self._episode.append(prompt)

    def _check_judge(self) -> None:
        """Raise where a judge has noted that it could not judge."""
        if "judge_error" in self.memory:
            raise ToolFault(str(self.memory["judge_error"]))

    def check_action(self, action: Any) -> Tokens:
        """The action as int32. Raises ValueError for what is no 1-D array of ids of the vocabulary."""
        try:
            span = np.asarray(action)
        except ValueError:  # nested lists of different lengths
            span = np.empty((), object)
        if span.size == 0 and span.ndim == 1:
            return np.empty(0, np.int32)
        if span.ndim != 1 or not np.issubdtype(span.dtype, np.integer):
            raise ValueError(
                f"an action is a 1-D array of token ids, got shape {span.shape} and dtype {span.dtype}; "
                "encode text with env.unwrapped.tokenizer, or wrap the environment in TextInterface"
            )
        low, high = int(span.min()), int(span.max())
        if low < 0 or high >= self.action_space.vocab_size:  # type: ignore[attr-defined]
            raise ValueError(
                f"token id {low if low < 0 else high} is outside the vocabulary of {len(self.tokenizer)}; "
                "mask logits beyond action_space.vocab_size when sampling"
            )
        return span.astype(np.int32, copy=False)

    def _pending(self, call: Call) -> PendingCall:
        if call.error is not None:
            return PendingCall(call, None, f"Error: {call.error}")
        if call.name not in self.tools:
            names = ", ".join(self.tools) or "none"
            return PendingCall(call, None, f"Error: there is no tool named {call.name[:64]!r}. Tools: {names}.")
        return PendingCall(call, self.tools[call.name])

    def _observation(self) -> Tokens:
        return self.episode.buffer[: self.episode.length].copy()

    def _info(self, terms: dict[str, float], calls: list[dict[str, Any]]) -> dict[str, Any]:
        episode = self.episode
        fault = {"fault": episode.fault} if episode.fault is not None else {}
        return {
            "turn": episode.turn,
            "task_id": self.task.id,
            "reward_terms": dict(terms),
            "tool_calls": calls,
            "stop_token_ids": list(self.dialect.stop_token_ids),
            "max_new_tokens": self.room,
        } | fault


def _messages(instructions: str, question: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": instructions}, {"role": "user", "content": question}]


@lru_cache(maxsize=256)  # the episodes of a group begin alike
def _prompt(dialect: Dialect, instructions: str, question: str, schemas: str) -> Tokens:
    prompt = np.array(dialect.render(_messages(instructions, question), json.loads(schemas)), np.int32)
    prompt.flags.writeable = False
    return prompt
