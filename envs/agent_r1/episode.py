"""The parts of an episode: its task, its turns, and everything that changes while it runs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_r1.dialects import Call, Turn
from agent_r1.rewards import find_answers
from agent_r1_tools import Tool, ToolResult

Tokens = NDArray[np.int32]
Made = tuple[str, Any, ToolResult]
"""A call that the loop of another program made: name, arguments, result."""
MAX_CALLS = 8  # tool calls that are run in one turn


@dataclass(frozen=True)
class Task:
    """One task: the question, the right answers, and further data for the judges.

    Raises TypeError if a field has another type, also if `answers` is a text: its letters would be the answers.
    """

    id: str
    question: str
    answers: list[str]
    metadata: dict[str, Any] = field(default_factory=dict)
    instructions: str | None = None  # the system message; None: that of the environment

    def __post_init__(self) -> None:
        fields: dict[str, object] = vars(self)
        for name in ("id", "question"):
            if not isinstance(fields[name], str):
                raise TypeError(f"Task: {name} must be a text, got {fields[name]!r:.200}")
        answers = fields["answers"]
        if isinstance(answers, str | bytes) or not (
            isinstance(answers, Sequence) and all(isinstance(answer, str) for answer in answers)
        ):
            raise TypeError(f"Task: answers must be a list of texts, got {fields['answers']!r:.200}")
        if not isinstance(fields["metadata"], Mapping):
            raise TypeError(f"Task: metadata must be a dict, got {fields['metadata']!r:.200}")
        if not isinstance(fields["instructions"], str | None):
            raise TypeError(f"Task: instructions must be a text or None, got {fields['instructions']!r:.200}")


@dataclass(frozen=True)
class End:
    """The return value of `judge_result` or `user_turn` if the task ends without an answer, such as a finished game.

    Attributes:
        score: the score of the end, from 0 to 1, like the score of `judge_answer`; see `judge_end`.
        amounts: amounts of process terms, before their weights.
        metrics: for `info["metrics"]`.
        truncation_reason: None if the task itself ended. Otherwise the name of the limit that cut it short, such as a
            game's time limit. The episode is then truncated and not terminated.
    """

    score: float
    amounts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    truncation_reason: str | None = None


@dataclass(frozen=True)
class UserTurn:
    """The return value of `user_turn` if the turn itself earns process terms.

    Attributes:
        reply: the user's reply.
        amounts: amounts of process terms, before their weights.
    """

    reply: str
    amounts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The return value of `judge_end` if the end of an episode pays more than one number.

    Attributes:
        value: the outcome reward.
        amounts: amounts of process terms for the episode as a whole, before their weights.
        besides: further outcome rewards, as terms `outcome/NAME`, for harm that was done, for example.
    """

    value: float
    amounts: Mapping[str, float] = field(default_factory=dict)
    besides: Mapping[str, float] = field(default_factory=dict)


@dataclass
class PendingCall:
    """A call that the policy wrote. `tool` is None if nothing can be run; `error` then holds the reason.

    `shown` is the text that the policy read if another loop replaced the result's. Judges never see it.
    """

    call: Call
    tool: Tool | None
    error: str | None = None
    shown: str | None = None

    @property
    def arguments(self) -> Any:
        """A copy of the arguments for the tool, which may change them. The policy's arguments stay."""
        return copy.deepcopy(self.call.arguments)


@dataclass
class OpenTurn:
    """A turn that was read and is not over: its calls wait for their results."""

    closed: bool = True
    overflow: bool = False
    calls: list[PendingCall] = field(default_factory=list)
    skipped: list[Call] = field(default_factory=list)  # beyond `MAX_CALLS`
    answers: list[str] = field(default_factory=list)
    said: str = ""  # the visible text of a turn without calls
    judged: tuple[float, dict[str, float]] | None = None  # result of `judge_answer`, if it was called early
    heard: tuple[Any] | None = None  # result of `user_turn`, if it was called early
    fault: str | None = None  # a fault that persists: the episode ends with this turn

    @classmethod
    def read(cls, parsed: Turn, tools: Mapping[str, Tool], closed: bool) -> OpenTurn:
        """Build a turn from the dialect's reading: its first `MAX_CALLS` calls, or else its answers and its text."""
        if not parsed.calls:
            return cls(closed, answers=find_answers(parsed.content), said=parsed.content)
        calls = [_pending(call, tools) for call in parsed.calls[:MAX_CALLS]]
        return cls(closed, calls=calls, skipped=parsed.calls[MAX_CALLS:])

    @property
    def waiting(self) -> list[PendingCall]:
        """The calls that have a tool and wait to be run."""
        return [pending for pending in self.calls if pending.tool is not None]

    @property
    def speaks(self) -> bool:
        """True if the turn is plain speech: neither a call nor an answer."""
        return bool(self.said) and not (self.calls or self.answers or self.overflow)


def _pending(call: Call, tools: Mapping[str, Tool]) -> PendingCall:
    if call.error is not None:
        return PendingCall(call, None, f"Error: {call.error}")
    if call.name not in tools:
        names = ", ".join(tools) or "none"
        return PendingCall(call, None, f"Error: there is no tool named {call.name[:64]!r}. Tools: {names}.")
    return PendingCall(call, tools[call.name])


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
    turns: list[tuple[int, int]] = field(default_factory=list)  # (first token, one past the last) of each span
    rewards: list[dict[str, float]] = field(default_factory=list)
    tool_calls: list[list[dict[str, Any]]] = field(default_factory=list)  # of each turn, as in its info
    memory: dict[str, Any] = field(default_factory=dict)  # a task's own notes, e.g. the supports found so far
    fault: str | None = None  # the reason why the episode could not begin; its first turn ends it
    seed: int | None = None  # of its reset
    made: list[Made] = field(default_factory=list)  # calls of another loop (see `loops`)

    def append(self, tokens: Sequence[int] | Tokens) -> None:
        """Add tokens to the state; the buffer grows if needed."""
        end = self.length + len(tokens)
        if end > self.buffer.size:
            grown = np.empty(max(end, 2 * self.buffer.size), np.int32)
            grown[: self.length] = self.buffer[: self.length]
            self.buffer = grown
        self.buffer[self.length : end] = tokens
        self.length = end

    def add_message(self, parsed: Turn) -> None:
        """Add a turn to the messages, as raw text if a call is malformed or not run: no other form shows that."""
        if not parsed.calls or len(parsed.calls) > MAX_CALLS or any(call.error is not None for call in parsed.calls):
            self.messages.append({"role": "assistant", "content": parsed.raw})
            return
        functions = [{"name": call.name, "arguments": call.arguments} for call in parsed.calls]
        calls = [{"type": "function", "function": function} for function in functions]
        self.messages.append({"role": "assistant", "content": parsed.content, "tool_calls": calls})

    def mark(self) -> tuple[Any, ...]:
        """Return a copy of everything a judge may change, for `return_to` if it faults.

        Notes are pickled, not copied. Every turn is marked and few are taken back, so the mark must be cheap.
        """
        memory: bytes | dict[str, Any]
        try:
            memory = pickle.dumps(self.memory)
        except Exception:  # an object that cannot be pickled
            memory = copy.deepcopy(self.memory)
        return self.length, len(self.messages), set(self.seen_calls), memory

    def return_to(self, mark: tuple[Any, ...]) -> None:
        """Undo the changes since `mark`. A mark can be used once."""
        self.length, messages, self.seen_calls, memory = mark
        self.memory = pickle.loads(memory) if isinstance(memory, bytes) else memory
        del self.messages[messages:]
