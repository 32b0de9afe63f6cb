"""ToolEnv: tool use by a language model as a Markov decision process over tokens (Agent-R1, arXiv 2511.14460).

    policy -- token span (one assistant turn) --> ToolEnv.step
        1 append the span to the state, untouched
        2 read the tool calls in it                  (Dialect)
        3 run them: what happened                    (Tool)
        4 decide what it means: reward terms, end    (TurnEnd asks the task's hooks)
        5 append the rendered results                (Dialect)

This file knows no task and no model family. A task subclasses `ToolEnv`. The subclass defines the tasks and the tools,
judges tool results (`judge_result`) and scores answers (`judge_answer`).
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

from agent_r1.arguments import ArgumentError, check_class, check_constructor, duration, finite, integer, read_tools
from agent_r1.dialects import Call, Dialect, get_dialect
from agent_r1.episode import MAX_CALLS, End, Episode, OpenTurn, Outcome, PendingCall, Task, Tokens, UserTurn
from agent_r1.experts import expert_calls, require_expert
from agent_r1.faults import Calls, Patience, begin_sessions, fault_line, may_have_acted
from agent_r1.judges.models import is_sound, read_judge
from agent_r1.potentials import OUTER_LIMIT, discount, potential_of
from agent_r1.rewards import paper_outcome, process_weights, shaping_term
from agent_r1.spaces import TokenSpan
from agent_r1.text.chat import chat_messages, encode_turn, reply_text
from agent_r1.text.tokenizers import load_tokenizer
from agent_r1.trajectories import say, transcript
from agent_r1.turn_end import CUT, NO_ACTION_HINT, TurnEnd, judged
from agent_r1_tools import Tool, ToolFault, ToolResult
from agent_r1_tools.running import describe
from agent_r1_tools.threads import OneThread, call_on
from agent_r1_tools.tool import is_fault

__all__ = [
    "CUT", "End", "Episode", "MAX_CALLS", "NO_ACTION_HINT", "OpenTurn", "Outcome", "PendingCall", "Task", "Tokens",
    "ToolEnv", "UserTurn",
]  # fmt: skip


Step = tuple[Tokens, float, bool, bool, dict[str, Any]]
"""The return value of `step`: state, reward, terminated, truncated, info."""


class PromptTooLong(ArgumentError):
    """A task's prompt leaves no room in the context."""


class ToolEnv(gym.Env[Tokens, Tokens]):
    """A Gymnasium environment whose actions are token spans and whose observation is the whole token state.

    Args:
        tools: the tools that the policy can call; functions become tools by `Tool.from_function`. Later arguments are
            keyword-only.
        tokenizer: a Hugging Face name or folder, a tokenizer object, or None for the built-in byte tokenizer.
        chat_template: a Jinja file that replaces the chat template of a named tokenizer. A base model needs one.
        dialect: the notation of calls and results ("hermes", "qwen_xml", ...); None: that of the chat template.
        split: the part of the tasks.
        max_turns: turns before the episode is truncated; with 1 it terminates instead.
        max_context_tokens: bound on the state, in tokens (default 32,768, or the tokenizer's own limit if smaller).
        max_action_tokens: bound on one span, in tokens (default 2,048).
        process_reward: True for the class's `PROCESS_WEIGHTS`, a dict to change some of them, False for none.
        unfinished_reward: reward of an episode without an answer; None: that of a wrong format (equation 6).
        shaping: the learner's discount per turn, gamma, from 0 to 1. Each turn then also pays `shaping`, which is
            gamma * Phi(s') - Phi(s) with the task's `potential()` as Phi, and 0 as Phi at every end. None: not paid.
        think_judge: {"url": ..., "model": ...}: a model behind an OpenAI-compatible API, which reads the thought of
            each turn. `process/unsound_thought` counts those that it rejects. A judge that fails is a fault.
        fault_deadline: seconds for which an infrastructure error is retried; 0: no retry. A fault that persists ends
            the episode: reward 0, truncated, `info["truncation_reason"] == "fault"`, and `info["fault"]` names it.
        strict: raise the exceptions of a tool, except faults, with their traceback. The policy does not read them then.
            This finds bugs of a tool. None: the value of AGENT_R1_STRICT (1 or true for True).
        render_mode: None, "ansi" (render() returns the conversation) or "human" (turns are printed as they happen).

    An episode has its own thread if a tool has a session (`concurrency_safe=False`) and a tool or judge may block.
    `start_episode`, the judges, and the calls, states and `close` of such tools run there, one after the other. So a
    connection made in `start_episode` may work in that thread only. In other cases everything runs in the thread that
    steps. Async functions run on an event loop in a separate thread.

    Raises (from `step`): RuntimeError after the end; ValueError for an action that is not a 1-D array of token ids.
    The text of a policy never raises. From `reset`: ToolFault if the episode cannot begin within `fault_deadline`.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "human"], "render_fps": 4}

    instructions: str = "Solve the task. Give the final answer as <answer>your answer</answer>."
    outcome_term: ClassVar[str] = "outcome/score"
    slow_judge: bool = False  # True: `judge_answer` and `user_turn` are slow; vector environments use threads
    splits: ClassVar[Mapping[str, str]] = {"train": "train"}  # name -> canonical name; aliases are entries too
    depends_on: ClassVar[Mapping[str, str]] = {}  # tool -> the note in `memory` on which its result depends
    PROCESS_WEIGHTS: ClassVar[Mapping[str, float]] = {
        "malformed_call": -0.1,
        "failed_call": -0.05,
        "repeated_call": -0.05,
        "no_action": 0.0,
        "unsound_thought": -0.05,  # thoughts that the model of `think_judge` rejects
        "extra_call": 0.0,  # calls beyond the expert's number, in a success
    }

    def __init__(
        self,
        tools: Sequence[Tool | Callable[..., Any]] = (),
        *,
        tokenizer: Any = None,
        chat_template: str | None = None,
        dialect: str | None = None,
        split: str = "train",
        max_turns: int = 6,
        max_context_tokens: int | None = None,
        max_action_tokens: int | None = None,
        process_reward: bool | Mapping[str, float] = True,
        unfinished_reward: float | None = None,
        shaping: float | None = None,
        think_judge: Mapping[str, str] | None = None,
        fault_deadline: float = 60.0,
        strict: bool | None = None,
        render_mode: str | None = None,
        **unknown: Any,
    ) -> None:
        check_class(self, ToolEnv, unknown)
        bounds = {
            "max_turns": max_turns, "max_context_tokens": max_context_tokens, "max_action_tokens": max_action_tokens,
        }  # fmt: skip
        tools = read_tools(type(self).__name__, tools)
        check_constructor(self, tools, split, strict, render_mode, bounds)
        self.split = self.splits[split]
        self.tokenizer = load_tokenizer(tokenizer, chat_template)
        try:
            self.dialect = get_dialect(dialect, self.tokenizer)
            if chat_template is not None and tools:
                self.dialect.bridge(True, [("tool", "result")])  # some templates reject only this
        except ArgumentError:
            raise
        except ValueError as error:
            raise ArgumentError(f"{chat_template and f'chat_template {chat_template}: ' or ''}{error}") from error
        self.tools = {tool.name: tool for tool in tools}
        self._all_tools = dict(self.tools)  # a task may remove some from an episode
        self.max_turns = max_turns
        self.max_context_tokens = max_context_tokens or min(
            32_768, int(getattr(self.tokenizer, "model_max_length", 32_768))
        )
        self.max_action_tokens = max_action_tokens or min(2_048, self.max_context_tokens)
        self.process_weights = process_weights(process_reward, self.PROCESS_WEIGHTS)
        if self.process_weights.get("extra_call"):
            require_expert(self)
        self.unfinished_reward = None if unfinished_reward is None else finite("unfinished_reward", unfinished_reward)
        self.shaping = None if shaping is None else discount(self, shaping)
        self.think_judge = None if think_judge is None else read_judge("think_judge", think_judge)
        if self.think_judge is not None and not self.process_weights.get("unsound_thought"):
            remedy = "give process_reward={'unsound_thought': -0.05}, and PROCESS_WEIGHTS of an own class this name"
            raise ArgumentError(f"think_judge pays process/unsound_thought, which has no weight here: {remedy}")
        self.fault_deadline = duration("fault_deadline", fault_deadline)
        self.strict = strict
        self.render_mode = render_mode
        vocab_size = len(self.tokenizer)
        self.action_space = TokenSpan(vocab_size, self.max_action_tokens)
        self.observation_space = TokenSpan(vocab_size, self.max_context_tokens)
        self._schemas = [tool.schema for tool in self.tools.values()]
        self._stop = frozenset(self.dialect.stop_token_ids)
        # The minimum room of every turn. Results that would leave less are cut, or the episode ends.
        self._reserve = max(1, min(self.max_action_tokens, 256, self.max_context_tokens // 8))
        self._thread = OneThread()
        self._episode: Episode | None = None
        self._task: Task | None = None

    def _check_built(self) -> None:
        """Raise ArgumentError if the class has its own constructor that never calls ToolEnv's."""
        if "_task" not in vars(self):
            raise ArgumentError(f"{type(self).__name__}.__init__ must call super().__init__(tools, **kwargs)")

    @property
    def unwrapped(self) -> ToolEnv:
        """The environment itself. `gym.make` reads it first, so it reports a constructor that skips ToolEnv's."""
        self._check_built()
        return self

    # ------------------------------------------------------------------ hooks of a task

    @classmethod
    def has_split(cls, split: str, **kwargs: Any) -> bool:
        """Return whether the constructor accepts this split with these arguments.

        A folder of data may lack some of `splits`. Programs call this to choose a split to evaluate on.
        """
        return split in cls.splits

    @property
    def num_tasks(self) -> int:
        """The number of tasks of the split; a task is a function of (split, index). The default is 2**31 - 1."""
        return 2**31 - 1

    def make_task(self, index: int) -> Task:
        """Return task number `index` of the split."""
        raise NotImplementedError(f"{type(self).__name__} must define make_task(index), which returns a Task")

    def start_episode(self, task: Task) -> None:
        """Give the tools the data of this task (a corpus, for example).

        Also called before a snapshot continues, with its notes in `memory`. The notes are restored afterwards.
        """

    def judge_result(self, call: Call, result: ToolResult) -> dict[str, float] | End:
        """Return amounts of process terms for a tool result, before their weights. Keep notes in `memory`.

        An `End` ends the episode here, as an answer would. Later calls in the same turn do not count. A result with
        `done=True` needs an `End`.
        """
        return {}

    def judge_answer(self, answer: str) -> tuple[float, dict[str, float]]:
        """Return the score of an answer, from 0 to 1 (1 is success), and metrics for `info["metrics"]`.

        "" means no answer, or an empty one. The episode then keeps the metrics, and its score is 0.

        A judge that is itself broken raises `ToolFault` or an OSError, or writes the reason into
        `memory["judge_error"]`. That is a fault: it is retried and never paid. This holds for all judges, and their
        notes in `memory` are taken back. An error that an answer can cause is not a fault (it names no file, it is not
        a number). The judge must catch such an error and return 0.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define judge_answer(answer), which returns (score, metrics)"
        )

    def user_turn(self, text: str) -> str | UserTurn | End | None:
        """Return the reply of the task's user to a turn with neither a call nor an answer; `text` is its visible text.

        None, the default, means that the task has no user: the policy then reads a hint and `no_action` counts. A
        `UserTurn` pays for the turn, an `End` ends the episode. Keep the notes of the user in `memory`. Set
        `slow_judge` for a slow user (a model, an address); otherwise a vector environment waits for it.
        """
        return None

    def judge_end(self, score: float, *, answer: str, answer_ok: bool, calls_ok: bool) -> float | Outcome:
        """Return the outcome reward, by default equation 6 of the paper (`paper_outcome`). Called once, last.

        `score` is the score of the answer or of an `End`, and 0 without either. `answer` is "" without an answer.
        `answer_ok`: the last turn has exactly one answer that is not empty, or there was an `End`. `calls_ok`: no call
        of the episode was malformed. An `Outcome` pays more than one number. For an unfinished episode,
        `unfinished_reward` replaces the value, if it is given.
        """
        return paper_outcome(score, answer_ok=answer_ok, calls_ok=calls_ok)

    # ------------------------------------------------------------------ gymnasium

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Tokens, dict[str, Any]]:
        """Begin an episode: `seed` draws its task, option `task_index` chooses it, option `max_turns` bounds it.

        A vector environment adds the option `patience`, a `Patience` that the episodes which begin together share. If
        an episode then cannot begin, or its question leaves no room in the context, it ends with a fault at its first
        turn.

        Raises ValueError for other options or values, and for a prompt that leaves no room in the context. With
        `patience`, only if the prompt leaves none even without its question. Raises ToolFault for a fault that
        persists. Other exceptions of `make_task` and `start_episode` are raised as they are (see `is_fault`).
        """
        super().reset(seed=seed)
        options = dict(options or {})
        shared: Patience | None = options.pop("patience", None)
        index = options.pop("task_index", None)
        max_turns = options.pop("max_turns", None)
        if options:
            raise ValueError(f"reset options are 'task_index' and 'max_turns', got {', '.join(map(repr, options))}")
        count = self._count_tasks()
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
                with suppress(PromptTooLong):  # if all prompts are too long, no question is the cause
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
        """Run one assistant turn: a span of sampled tokens in; the new state, its reward, flags and info out."""
        turn = self._begin_turn(self._check_action(action))
        try:
            results = self._in_order(turn.waiting).run()
            assert results is not None
            return self._end_turn(turn, results)
        except Exception:  # a bug of a tool or judge: the turn has no end
            self.episode.over = True
            raise

    def step_message(self, reply: Any) -> tuple[Tokens, float, bool, bool, dict[str, Any]]:
        """Call `step` with the reply of a chat API, in any dialect: a message with `content` and `tool_calls`.

        A reply that is longer than the room left is cut. Raises TypeError for anything that is not such a message.
        """
        return self.step(self.encode_reply(reply))

    def encode_reply(self, reply: Any) -> Tokens:
        """Return the span that `step_message` would step with, for wrapped environments and vector environments."""
        return encode_turn(self, reply_text(self.dialect, reply, self.schemas), self.room)

    def cut_off(self) -> dict[str, Any]:
        """Return the final info entries of an episode that something else cuts off, such as Gymnasium's TimeLimit.

        The episode is not a success, and nothing is paid. Its metrics are empty if the judge faults.

        Raises ArgumentError with `shaping`: the reward of the last turn has a potential, which must be 0 at an end.
        """
        if self.shaping is not None:
            raise ArgumentError(OUTER_LIMIT)
        metrics: dict[str, float] = {}
        try:
            _, metrics = judged(self, call_on(self._session_thread, self.judge_answer, ""))
        except Exception as error:
            if not is_fault(error):
                raise
        return {"is_success": False, "answer": None, "metrics": metrics}

    def get_state(self) -> dict[str, Any]:
        """Return a snapshot from which the episode can continue, here or in another environment of the same kind.

        It holds the tokens, the conversation, the random state and the tools' sessions, and can be pickled.
        Raises RuntimeError in the middle of a turn.
        """
        if len(self.episode.turns) > len(self.episode.rewards):
            raise RuntimeError("get_state() in the middle of a turn; call it after the turn has its results")
        return {
            "episode": copy.deepcopy(self.episode),
            "task_id": self.task.id,
            "random_state": copy.deepcopy(self.np_random.bit_generator.state),
            "tools": {name: call_on(self._session_thread, tool.get_state) for name, tool in self.tools.items()},
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a snapshot of `get_state`. The snapshot is not changed.

        Raises ValueError for a snapshot of an environment with other tasks or a larger context. This environment then
        stays as it is. Raises ToolFault if a call that timed out is still running in a tool's session.
        """
        episode: Episode = copy.deepcopy(state["episode"])
        if episode.length > self.max_context_tokens:
            raise ValueError(
                f"the snapshot has {episode.length} tokens, more than max_context_tokens={self.max_context_tokens}"
            )
        if episode.fault is not None:  # the episode never began: the tools need nothing
            task: Task | None = Task(state["task_id"], "", [])
        else:
            task = self._make_task(episode.task_index) if episode.task_index < self._count_tasks() else None
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
        self.memory.update(copy.deepcopy(state["episode"].memory))  # start_episode may have reset its notes
        call_on(self._session_thread, begin_sessions, self._with_others, state["tools"])

    def render(self) -> str | None:
        """Return the conversation so far as text (mode "ansi"). In mode "human" each turn is already printed."""
        if self.render_mode != "ansi":
            if self.render_mode is None:
                gym.logger.warn("render() needs a render_mode; make the environment with render_mode='ansi'")
            return None
        return transcript(self.episode.messages, self.episode.rewards)

    def close(self) -> None:
        """End the tools' sessions."""
        thread = self._session_thread if self._thread.free else None  # do not wait for a tool that is stuck
        for tool in self._with_others.values():
            call_on(thread, tool.close)
        self._thread = OneThread()  # the old one ends

    # ------------------------------------------------------------------ properties

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
        """The maximum number of tokens of the next span."""
        return min(self.max_action_tokens, self.max_context_tokens - self.episode.length)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools as the prompt shows them and as calls are read. Override it to show others, or none."""
        return self._schemas

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation as chat APIs take it (a copy): calls with ids, their arguments as JSON text."""
        return chat_messages(self.episode.messages)

    # ------------------------------------------------------------------ a turn, also for the vector environment

    def _check_action(self, action: Any) -> Tokens:
        """Return the span of an action.

        Raises RuntimeError after the end, and ValueError for an action that is not an array of token ids.
        """
        if self.episode.over:
            raise RuntimeError("step() after the end of the episode; call reset() first")
        return self.action_space.read(action)  # type: ignore[attr-defined]

    def _begin_turn(self, span: Tokens) -> OpenTurn:
        """Append a span and read it. The calls with a tool in `turn.calls` then wait to be run (see `_end_turn`)."""
        episode, room = self.episode, self.room
        episode.turns.append((episode.length, episode.length + len(span[:room])))
        episode.append(span[:room])
        episode.turn += 1
        ids = span[:room].tolist()
        parsed = self.dialect.parse(ids, self.schemas)
        # A sampler cuts at the bound. A span that ends in the middle of a call or an answer did not fit.
        overflow = span.size > room or (span.size == room and self._stop.isdisjoint(ids) and parsed.is_open)
        episode.thought = ""
        if overflow or episode.fault is not None:
            episode.messages.append({"role": "assistant", "content": self.tokenizer.decode(ids)})
            return OpenTurn(overflow=overflow, fault=episode.fault)
        episode.thought = parsed.thought
        episode.add_message(parsed)
        return OpenTurn.read(parsed, self.tools, closed=bool(ids) and ids[-1] in self._stop)

    def _in_order(self, calls: Sequence[PendingCall]) -> Calls:
        """Return calls of this episode to be made one after the other: `_in_order(turn.waiting).run()` runs them."""
        return Calls(calls, self.fault_deadline, self._session_thread, self.strict)

    def _needs_thread(self, turn: OpenTurn) -> bool:
        """Return whether `_judge_early` should run in a thread: a judge or user reads the turn, and is slow."""
        if self.think_judge is not None and self.episode.thought:
            return True
        return self.slow_judge and (bool(turn.answers) or (turn.speaks and self._has_user))

    @property
    def _has_user(self) -> bool:
        return type(self).user_turn is not ToolEnv.user_turn

    def _judge_early(self, turn: OpenTurn) -> None:
        """Judge the thought and the answer of an open turn, or ask the user about plain speech, before `_end_turn`.

        May be called in another thread. Faults are retried here; a fault that persists is noted in the turn.
        """
        answer = turn.answers[-1].strip() if turn.answers else ""
        patience = Patience(self.fault_deadline)
        while turn.fault is None:
            mark, who = self.episode.mark(), "judge"
            try:
                if turn.sound is None and self.think_judge is not None and self.episode.thought:
                    turn.sound = self._judge_thought()
                elif not self.slow_judge:  # only the thought needs a thread
                    return
                elif answer and turn.judged is None:
                    turn.judged = judged(self, call_on(self._session_thread, self.judge_answer, answer))
                elif turn.speaks and turn.heard is None:
                    who = "user"
                    turn.heard = (call_on(self._session_thread, self.user_turn, turn.said),)
                else:
                    return
                who = "judge"
                self._check_judge()
            except Exception as error:
                self.episode.return_to(mark)
                turn.judged = turn.heard = None
                if not is_fault(error):
                    raise
                if may_have_acted(error) or not patience.wait():
                    turn.fault = fault_line(who, error)

    def _end_turn(self, turn: OpenTurn, results: Sequence[ToolResult]) -> Step:
        """Judge the results. `results` has one entry for each call that has a tool, in order.

        A result that is a fault has been retried already: it ends the episode. A judge that faults is called again.

        Raises ValueError for another number of results, and the exceptions of `TurnEnd`.
        """
        patience = Patience(self.fault_deadline)
        while True:
            try:
                return self._try_turn(turn, results)
            except ToolFault as fault:
                if fault.ran or not patience.wait():
                    turn.fault = str(fault)

    def _try_turn(self, turn: OpenTurn, results: Sequence[ToolResult]) -> Step:
        """Run `_end_turn` without retries. If a judge faults, restore the state and raise `ToolFault`."""
        if len(results) != len(turn.waiting):
            raise ValueError(
                f"{len(turn.waiting)} calls wait for results, got {len(results)} results; pass one for each call"
            )
        episode, end = self.episode, TurnEnd(self, turn, self._reserve)
        first_message = len(episode.messages) - 1
        mark = episode.mark()
        before = 0.0 if self.shaping is None or end.fault is not None else potential_of(self)
        try:
            call_on(self._session_thread, end.judge_turn, results)
            if end.fault is None:
                episode.append(end.tokens)
                episode.messages += end.messages
                episode.seen_calls |= end.keys
                episode.malformed |= end.malformed
                if end.terminated or end.truncated:
                    call_on(self._session_thread, end.judge_episode)
                if self.shaping is not None:
                    end.terms["shaping"] = shaping_term(
                        self.shaping, before, potential_of(self), end.terminated or end.truncated
                    )
                self._check_judge()
        except Exception as error:
            if not is_fault(error):
                raise
            episode.return_to(mark)
            raise ToolFault(fault_line(end.asked, error), ran=may_have_acted(error)) from error
        if end.fault is not None:  # nothing is judged
            episode.return_to(mark)
        episode.over = end.terminated or end.truncated
        episode.rewards.append(end.terms)
        episode.tool_calls.append(end.calls)
        info = self._info(end.terms, end.calls) | end.outcome
        if self.render_mode == "human":
            say(transcript(episode.messages, episode.rewards, first_message))
        return self._observation(), float(sum(end.terms.values())), end.terminated, end.truncated, info

    def _judge_thought(self) -> bool:
        """Return whether the thought of the newest turn follows from the messages before it."""
        assert self.think_judge is not None
        return is_sound(self.think_judge, self.episode.messages[:-1], self.episode.thought)

    def _check_judge(self) -> None:
        """Raise ToolFault if a judge has noted that it could not judge."""
        if "judge_error" in self.memory:
            raise ToolFault(str(self.memory["judge_error"]))

    # ------------------------------------------------------------------ private

    def _count_tasks(self) -> int:
        """Return `num_tasks`. Raises ArgumentError if it is not a positive integer."""
        self._check_built()
        return integer(f"{type(self).__name__}.num_tasks", self.num_tasks, least=1)

    @property
    def _with_others(self) -> dict[str, Tool]:
        """All tools: those of the episode, and those it lacks, whose sessions end as well."""
        return self._all_tools | self.tools

    @property
    def _session_thread(self) -> OneThread | None:
        """The episode's thread, if a tool with a session may block; None: the caller's thread."""
        sessions = [tool for tool in self._with_others.values() if not tool.concurrency_safe]
        may_block = any(tool.timeout < math.inf for tool in sessions) or self.slow_judge
        return self._thread if sessions and may_block else None

    def _begin(self, index: int, max_turns: int) -> None:
        """Begin task `index`. May raise an infrastructure error, and can then be called again."""
        self._task = None
        self._task = task = self._make_task(index)
        self._open(task, index, max_turns)
        call_on(self._session_thread, begin_sessions, self._with_others, {})
        call_on(self._session_thread, self.start_episode, task)
        if self.process_weights.get("extra_call"):
            self.episode.expert_calls = call_on(self._session_thread, expert_calls, self)

    def _make_task(self, index: int) -> Task:
        task: Any = self.make_task(index)
        if not isinstance(task, Task):
            raise TypeError(f"{type(self).__name__}.make_task({index}) must return a Task, got {task!r:.200}")
        return task

    def _begin_broken(self, index: int, max_turns: int, fault: str, shorter: bool = False) -> None:
        """Open an episode for a task that cannot begin: it has a prompt, and its first turn ends it.

        With `shorter` the prompt has no question, and no instructions of the task.
        """
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
                f"max_context_tokens={self.max_context_tokens}; increase max_context_tokens"
            )
        self._episode = Episode(index, max_turns, np.empty(max(256, 2 * len(prompt)), np.int32))
        self._episode.messages = _messages(instructions, task.question)
        self._episode.append(prompt)

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
