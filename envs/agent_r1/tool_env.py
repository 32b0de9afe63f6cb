"""ToolEnv: tool use by a language model as a Markov decision process over tokens (Agent-R1, arXiv 2511.14460).

    policy -- token span (one assistant turn) --> ToolEnv.step
        1 append the span to the state, untouched
        2 read the tool calls in it                  (Dialect)
        3 run them: what happened                    (Tool)
        4 decide what it means: reward terms, end    (ToolEnv)
        5 append the rendered results                (Dialect)

This file knows no task and no model family. A task subclasses `ToolEnv` and says what its tasks are, which tools
there are, what a tool's result means (`judge_result`) and what an answer is worth (`judge_answer`).
"""

from __future__ import annotations

import copy
import json
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from agent_r1.dialects import Call, Dialect, get_dialect
from agent_r1.rewards import find_answers, paper_outcome, process_weights
from agent_r1.spaces import TokenSpan
from agent_r1.tokenizers import load_tokenizer
from agent_r1_tools import Tool, ToolResult, run_tool

Tokens = NDArray[np.int32]

MAX_CALLS = 8  # tool calls that are run in one turn
CUT = "... [cut to fit the context]"
NO_ACTION_HINT = "Neither a tool call nor an answer was found. Call a tool, or answer as <answer>your answer</answer>."
# What a terminal would obey or cannot write: control characters but tab and newline, lone surrogates.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass(frozen=True)
class Task:
    """One task: what is asked, which answers are right, and what the judges need to know beyond that."""

    id: str
    question: str
    answers: list[str]
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class PendingCall:
    """A call that the policy wrote. `tool` is None where nothing can be run; `error` then says why."""

    call: Call
    tool: Tool | None
    error: str | None = None

    @property
    def arguments(self) -> Any:
        """A copy of the arguments, for the tool: it may change them, and what the policy wrote stays."""
        return copy.deepcopy(self.call.arguments)


@dataclass
class OpenTurn:
    """A turn between `begin_turn` and `end_turn`: its calls are waiting for their results."""

    closed: bool = True
    overflow: bool = False
    calls: list[PendingCall] = field(default_factory=list)
    skipped_calls: int = 0
    answers: list[str] = field(default_factory=list)
    judged: tuple[float, dict[str, float]] | None = None  # what `judge_answer` said, where it was asked early


@dataclass
class Episode:
    """Everything that changes while an episode runs; a snapshot is a copy of it."""

    task_index: int
    max_turns: int
    buffer: Tokens
    length: int = 0
    turn: int = 0
    malformed: bool = False
    over: bool = False
    seen_calls: set[str] = field(default_factory=set)
    messages: list[dict[str, Any]] = field(default_factory=list)
    rewards: list[dict[str, float]] = field(default_factory=list)
    memory: dict[str, Any] = field(default_factory=dict)  # a task's own notes, e.g. the supports found so far


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
        render_mode: None, "ansi" (render() returns the conversation) or "human" (it is printed as it goes).

    Raises (from `step`): RuntimeError after the end; ValueError for something that is no 1-D array of token ids.
    What a policy writes never raises.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "human"], "render_fps": 4}

    instructions: ClassVar[str] = "Solve the task. Give the final answer as <answer>your answer</answer>."
    outcome_term: ClassVar[str] = "outcome/score"
    slow_judge: ClassVar[bool] = False  # True: `judge_answer` takes its time, so many episodes ask it in threads
    splits: ClassVar[Mapping[str, str]] = {"train": "train"}  # name -> canonical name; aliases are rows too
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
        render_mode: str | None = None,
    ) -> None:
        if split not in self.splits:
            raise ValueError(f"{type(self).__name__} has no split {split!r}; it has {', '.join(self.splits)}")
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ValueError(f"render_mode must be None, 'ansi' or 'human', got {render_mode!r}")
        for name, bound in (
            ("max_turns", max_turns),
            ("max_context_tokens", max_context_tokens),
            ("max_action_tokens", max_action_tokens),
        ):
            if bound is not None and bound < 1:
                raise ValueError(f"{name} must be at least 1, got {bound}")
        names = [tool.name for tool in tools]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"two tools are named {', '.join(map(repr, sorted(twice)))}; give each a name of its own")
        self.split = self.splits[split]
        self.tokenizer = load_tokenizer(tokenizer)
        self.dialect = get_dialect(dialect, self.tokenizer)
        self.tools = {tool.name: tool for tool in tools}
        self.max_turns = max_turns
        self.max_context_tokens = max_context_tokens or min(
            32_768, int(getattr(self.tokenizer, "model_max_length", 32_768))
        )
        self.max_action_tokens = max_action_tokens or min(2_048, self.max_context_tokens)
        self.process_weights = process_weights(process_reward, self.PROCESS_WEIGHTS)
        self.unfinished_reward = unfinished_reward
        self.render_mode = render_mode
        vocab_size = len(self.tokenizer)
        self.action_space = TokenSpan(vocab_size, self.max_action_tokens)
        self.observation_space = TokenSpan(vocab_size, self.max_context_tokens)
        self._schemas = [tool.schema for tool in self.tools.values()]
        self._stop = frozenset(self.dialect.stop_token_ids)
        # The room that every turn has: where the results would leave less they are cut, or the episode ends.
        self._reserve = max(1, min(self.max_action_tokens, 256, self.max_context_tokens // 8))
        self._episode: Episode | None = None
        self._task: Task | None = None

    # ------------------------------------------------------------------ what a task says

    @property
    def num_tasks(self) -> int:
        """How many tasks the split has; a task is a function of (split, index)."""
        raise NotImplementedError

    def make_task(self, index: int) -> Task:
        """Task number `index` of the split."""
        raise NotImplementedError

    def start_episode(self, task: Task) -> None:
        """Hand the tools what they need for this task (a corpus, say). Also called before a snapshot continues."""

    def judge_result(self, call: Call, result: ToolResult) -> dict[str, float]:
        """What a tool's result means: amounts of process terms, before their weights. Notes go into `memory`."""
        return {}

    def judge_answer(self, answer: str) -> tuple[float, dict[str, float]]:
        """What an answer is worth: a score from 0 to 1 (1 is success), and metrics for `info["metrics"]`.

        Where it cannot be judged, `memory["judge_error"]` says why, and `info["judge_error"]` shows it.
        """
        raise NotImplementedError

    def judge_end(self, answer: str) -> dict[str, float]:
        """What the episode as a whole means, at its end ("" for no answer): amounts of process terms."""
        return {}

    def final_metrics(self) -> dict[str, float]:
        """Metrics of an episode that ended without an answer."""
        return self.judge_answer("")[1]

    # ------------------------------------------------------------------ gymnasium

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Tokens, dict[str, Any]]:
        """Begin an episode: `seed` draws its task, options `task_index` names it and `max_turns` bounds it.

        Raises ValueError for other options or values, and for a prompt that leaves no room in the context.
        """
        super().reset(seed=seed)
        options = dict(options or {})
        index = options.pop("task_index", None)
        max_turns = options.pop("max_turns", None)
        if options:
            raise ValueError(f"reset options are 'task_index' and 'max_turns', got {', '.join(map(repr, options))}")
        index = self.np_random.integers(self.num_tasks) if index is None else _integer("task_index", index)
        if not 0 <= index < self.num_tasks:
            raise ValueError(f"task_index must be in [0, {self.num_tasks}) in split {self.split!r}, got {index}")
        horizon = self.max_turns if max_turns is None else _integer("max_turns", max_turns)
        if horizon < 1:
            raise ValueError(f"max_turns must be at least 1, got {horizon}")
        task = self.make_task(int(index))
        prompt = _prompt(self.dialect, self.instructions, task.question, json.dumps(self._schemas))
        if len(prompt) + self._reserve > self.max_context_tokens:
            raise ValueError(
                f"the prompt of task {task.id!r} has {len(prompt)} tokens and leaves no room in "
                f"max_context_tokens={self.max_context_tokens}; make that larger"
            )
        self._task = task
        self._episode = Episode(int(index), horizon, np.empty(max(256, 2 * len(prompt)), np.int32))
        self._episode.messages = _messages(self.instructions, task.question)
        self._append(prompt)
        for tool in self.tools.values():
            tool.set_state(None)
        self.start_episode(task)
        if self.render_mode == "human":
            print(self._transcript(0))
        return self._observation(), self._info({}, [])

    def step(self, action: Any) -> tuple[Tokens, float, bool, bool, dict[str, Any]]:
        """One assistant turn: a span of sampled tokens in; the new state, its reward, flags and info out."""
        turn = self.begin_turn(action)
        results = [run_tool(c.tool, c.arguments) for c in turn.calls if c.tool is not None]
        return self.end_turn(turn, results)

    def begin_turn(self, action: Any) -> OpenTurn:
        """Append a span and read it. `turn.calls` with a tool wait to be run, in order (see `end_turn`)."""
        episode = self.episode
        if episode.over:
            raise RuntimeError("step() after the end of the episode; call reset() first")
        span = self._check(action)
        room = min(self.max_action_tokens, self.max_context_tokens - episode.length)
        self._append(span[:room])
        episode.turn += 1
        if span.size > room:
            text = self.tokenizer.decode(span[:room].tolist())
            episode.messages.append({"role": "assistant", "content": text})
            return OpenTurn(overflow=True)
        ids = span.tolist()
        parsed = self.dialect.parse(ids, self._schemas)
        turn = OpenTurn(closed=bool(ids) and ids[-1] in self._stop)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.raw}
        if parsed.calls:
            turn.calls = [self._pending(call) for call in parsed.calls[:MAX_CALLS]]
            turn.skipped_calls = len(parsed.calls) - len(turn.calls)
            episode.malformed |= any(call.error is not None for call in parsed.calls)
            readable = [c.call for c in turn.calls if c.call.error is None]
            if len(readable) == len(parsed.calls):  # otherwise the raw text is the only faithful record
                message["content"] = parsed.content
                message["tool_calls"] = [
                    {"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in readable
                ]
        else:
            turn.answers = find_answers(parsed.content)
        episode.messages.append(message)
        return turn

    def judge_early(self, turn: OpenTurn) -> None:
        """Judge the answer of an open turn, so that `end_turn` need not. May be called in another thread."""
        if turn.answers and (answer := turn.answers[-1].strip()):
            turn.judged = self.judge_answer(answer)

    def end_turn(
        self, turn: OpenTurn, results: Sequence[ToolResult]
    ) -> tuple[Tokens, float, bool, bool, dict[str, Any]]:
        """Decide what the results mean. `results` has one entry for each call that has a tool, in order.

        Raises ValueError for another number of results, or if a judge names a term without a weight.
        """
        episode = self.episode
        called = sum(pending.tool is not None for pending in turn.calls)
        if len(results) != called:
            raise ValueError(f"{called} calls wait for their results, got {len(results)} results; give one for each")
        first_message = len(episode.messages) - 1
        amounts: dict[str, float] = {}
        records: list[dict[str, Any]] = []
        responses: list[tuple[str, str]] = []
        waiting = iter(results)
        for pending in turn.calls:
            call = pending.call
            if pending.tool is None:
                result = ToolResult(pending.error or "", ok=False)
            else:
                result = next(waiting)
            self._judge_call(call, result, amounts)
            error = call.error or (None if result.ok else result.content)
            record = {"name": call.name, "arguments": pending.arguments, "ok": result.ok}
            records.append(record | ({"error": error} if error else {}))
            responses.append((call.name, result.content))
        if turn.skipped_calls:
            responses.append(("", f"{turn.skipped_calls} more calls were not run: at most {MAX_CALLS} in one turn."))
            _add(amounts, "failed_call", 1)
        answered = bool(turn.answers)
        if not (turn.calls or answered or turn.overflow):
            _add(amounts, "no_action", 1)

        # The end comes before the text: a terminated episode gets no results appended, a truncated one does.
        terminated = answered
        reason = "context" if turn.overflow else None
        if not answered and reason is None:
            if not self._append_responses(turn, responses):
                reason = "context"
            if episode.turn >= episode.max_turns:
                reason = "turns"
                terminated = episode.max_turns == 1  # a one-turn task ends by itself: nothing was cut short
        elif answered and not turn.closed:
            self._append_if_room(self.dialect.close())
        truncated = reason is not None and not terminated
        if terminated or truncated:
            self._add_judged(self.judge_end(turn.answers[-1].strip() if answered else ""), amounts)
        terms = {
            f"process/{name}": self.process_weights[name] * amount
            for name, amount in amounts.items()
            if name in self.process_weights
        }
        outcome: dict[str, Any] = {}
        if terminated or truncated:
            episode.over = True
            outcome = self._outcome(turn, terms)
            if truncated:
                outcome["truncation_reason"] = reason
        episode.rewards.append(terms)
        if self.render_mode == "human":
            print(self._transcript(first_message))
        info = self._info(terms, records) | outcome
        return self._observation(), float(sum(terms.values())), terminated, truncated, info

    def get_state(self) -> dict[str, Any]:
        """A snapshot from which the episode can be continued, here or in another environment of the same kind.

        It holds the tokens, the conversation, the random state and the tools' sessions, and can be pickled.
        """
        return {
            "episode": copy.deepcopy(self.episode),
            "task_id": self.task.id,
            "random_state": copy.deepcopy(self.np_random.bit_generator.state),
            "tools": {name: tool.get_state() for name, tool in self.tools.items()},
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a snapshot of `get_state`; the snapshot itself stays as it is.

        Raises ValueError for a snapshot of an environment with other tasks or a larger context.
        """
        episode: Episode = copy.deepcopy(state["episode"])
        if episode.length > self.max_context_tokens:
            raise ValueError(
                f"the snapshot has {episode.length} tokens, more than max_context_tokens={self.max_context_tokens}"
            )
        task = self.make_task(episode.task_index) if episode.task_index < self.num_tasks else None
        if task is None or task.id != state["task_id"]:
            raise ValueError(
                f"the snapshot is of task {state['task_id']!r}, but task {episode.task_index} is "
                f"{task.id if task else None!r} here; make both environments with the same arguments"
            )
        self._episode, self._task = episode, task
        self.np_random.bit_generator.state = copy.deepcopy(state["random_state"])
        self.start_episode(task)
        for name, tool in self.tools.items():
            tool.set_state(copy.deepcopy(state["tools"].get(name)))

    def render(self) -> str | None:
        """The conversation so far as text (mode "ansi"); in mode "human" it was printed as it went."""
        if self.render_mode != "ansi":
            if self.render_mode is None:
                gym.logger.warn("render() without a render_mode; make the environment with render_mode='ansi'")
            return None
        return self._transcript(0)

    def close(self) -> None:
        """End what runs for the tools' sessions."""
        for tool in self.tools.values():
            tool.close()

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
    def messages(self) -> list[dict[str, Any]]:
        """The conversation in chat form (a copy): what chat-style trainers and chat APIs take."""
        return copy.deepcopy(self.episode.messages)

    # ------------------------------------------------------------------ inside

    def _check(self, action: Any) -> Tokens:
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

    def _append(self, tokens: Sequence[int] | Tokens) -> None:
        episode = self.episode
        end = episode.length + len(tokens)
        if end > episode.buffer.size:
            grown = np.empty(max(end, 2 * episode.buffer.size), np.int32)
            grown[: episode.length] = episode.buffer[: episode.length]
            episode.buffer = grown
        episode.buffer[episode.length : end] = tokens
        episode.length = end

    def _append_if_room(self, tokens: Sequence[int], reserve: int = 0) -> bool:
        if self.episode.length + len(tokens) + reserve > self.max_context_tokens:
            return False
        self._append(tokens)
        return True

    def _append_responses(self, turn: OpenTurn, responses: list[tuple[str, str]]) -> bool:
        """Append what the environment says next, cut to the room left; False where not even that fits."""
        episode = self.episode
        reserve = self._reserve if episode.turn < episode.max_turns else 0
        if not responses:
            if not self._append_if_room(self.dialect.hint(turn.closed, NO_ACTION_HINT), reserve):
                return False
            episode.messages.append({"role": "user", "content": NO_ACTION_HINT})
            return True
        shown = responses
        if not self._append_if_room(self.dialect.bridge(turn.closed, responses), reserve):
            room = self.max_context_tokens - episode.length - reserve
            shortest, longest, bridge = 0, max(len(content) for _, content in responses), []
            while shortest <= longest:  # the most characters of each result with which the bridge fits
                middle = (shortest + longest) // 2
                cut = [(name, text if len(text) <= middle else text[:middle] + CUT) for name, text in responses]
                tokens = self.dialect.bridge(turn.closed, cut)
                if len(tokens) <= room:
                    bridge, shown, shortest = tokens, cut, middle + 1
                else:
                    longest = middle - 1
            if not bridge:
                return False
            self._append(bridge)
        episode.messages.extend({"role": "tool", "name": name, "content": content} for name, content in shown)
        return True

    def _pending(self, call: Call) -> PendingCall:
        if call.error is not None:
            return PendingCall(call, None, f"Error: {call.error}")
        if call.name not in self.tools:
            names = ", ".join(self.tools) or "none"
            return PendingCall(call, None, f"Error: there is no tool named {call.name[:64]!r}. Tools: {names}.")
        return PendingCall(call, self.tools[call.name])

    def _judge_call(self, call: Call, result: ToolResult, amounts: dict[str, float]) -> None:
        if call.error is not None:
            _add(amounts, "malformed_call", 1)
            return
        key = json.dumps([call.name, call.arguments], sort_keys=True)
        if key in self.episode.seen_calls:
            _add(amounts, "repeated_call", 1)
        self.episode.seen_calls.add(key)
        if not result.ok:
            _add(amounts, "failed_call", 1)
        self._add_judged(self.judge_result(call, result), amounts)

    def _add_judged(self, judged: Mapping[str, float], amounts: dict[str, float]) -> None:
        for name, amount in judged.items():
            if name not in self.PROCESS_WEIGHTS:
                raise ValueError(
                    f"a judge names the term {name!r}, but {type(self).__name__}.PROCESS_WEIGHTS has only "
                    f"{', '.join(self.PROCESS_WEIGHTS)}; give it a weight there"
                )
            _add(amounts, name, amount)

    def _outcome(self, turn: OpenTurn, terms: dict[str, float]) -> dict[str, Any]:
        """Equation 6 of the paper: the score where the format is right, format score - 1 otherwise."""
        answers = turn.answers
        right = sum(bool(answer.strip()) for answer in answers) == len(answers) == 1
        answer = answers[-1].strip() if answers else None
        if turn.judged is None:
            turn.judged = self.judge_answer(answer) if answer else (0.0, self.final_metrics())
        score, metrics = turn.judged
        value = paper_outcome(score, answer_ok=right, calls_ok=not self.episode.malformed)
        if answers:
            well_formed = right and not self.episode.malformed
            terms[self.outcome_term if well_formed else "outcome/format"] = value
        else:
            terms["outcome/unfinished"] = value if self.unfinished_reward is None else float(self.unfinished_reward)
        error = {"judge_error": self.memory["judge_error"]} if "judge_error" in self.memory else {}
        return {"is_success": bool(score >= 1), "answer": answer, "metrics": metrics} | error

    def _observation(self) -> Tokens:
        return self.episode.buffer[: self.episode.length].copy()

    def _info(self, terms: dict[str, float], calls: list[dict[str, Any]]) -> dict[str, Any]:
        episode = self.episode
        return {
            "turn": episode.turn,
            "task_id": self.task.id,
            "reward_terms": dict(terms),
            "tool_calls": calls,
            "stop_token_ids": list(self.dialect.stop_token_ids),
            "max_new_tokens": min(self.max_action_tokens, self.max_context_tokens - episode.length),
        }

    def _transcript(self, first: int) -> str:
        episode = self.episode
        lines, turn = [], sum(m["role"] == "assistant" for m in episode.messages[:first])
        for message in episode.messages[first:]:
            role = message["role"]
            lines.append(f"[{role}{' ' + message['name'] if message.get('name') else ''}]")
            if message["content"]:
                lines.append(message["content"])
            lines += [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
            if role == "assistant":
                if turn < len(episode.rewards):
                    terms = episode.rewards[turn]
                    named = ", ".join(f"{name} {value:+.2f}" for name, value in terms.items())
                    lines.append(f"    reward {sum(terms.values()):+.2f}" + (f"  ({named})" if named else ""))
                turn += 1
        return _UNPRINTABLE.sub(lambda match: f"\\x{ord(match[0]):02x}", "\n".join(lines))


def _messages(instructions: str, question: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": instructions}, {"role": "user", "content": question}]


@lru_cache(maxsize=256)  # the episodes of a group begin alike
def _prompt(dialect: Dialect, instructions: str, question: str, schemas: str) -> Tokens:
    prompt = np.array(dialect.render(_messages(instructions, question), json.loads(schemas)), np.int32)
    prompt.flags.writeable = False
    return prompt


def _add(amounts: dict[str, float], name: str, amount: float) -> None:
    amounts[name] = amounts.get(name, 0.0) + amount


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {value!r}") from None
