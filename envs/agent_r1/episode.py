"""What an episode is made of: its task, its turns, and everything that changes while it runs."""

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
from agent_r1_tools import Tool

Tokens = NDArray[np.int32]
MAX_CALLS = 8  # tool calls that are run in one turn


@dataclass(frozen=True)
class Task:
    """One task: what is asked, which answers are right, and what the judges need to know beyond that.

    Raises TypeError where one of them is of another type, also where `answers` is a text: its letters would be the
    answers.
    """

    id: str
    question: str
    answers: list[str]
    metadata: dict[str, Any] = field(default_factory=dict)
    instructions: str | None = None  # the system message; None: that of the environment

    def __post_init__(self) -> None:
        said: dict[str, object] = vars(self)
        for name in ("id", "question"):
            if not isinstance(said[name], str):
                raise TypeError(f"Task: {name} is a text, got {said[name]!r:.200}")
        answers = said["answers"]
        if isinstance(answers, str | bytes) or not (
            isinstance(answers, Sequence) and all(isinstance(answer, str) for answer in answers)
        ):
            raise TypeError(f"Task: answers is a list of texts, got {said['answers']!r:.200}")
        if not isinstance(said["metadata"], Mapping):
            raise TypeError(f"Task: metadata is a dict, got {said['metadata']!r:.200}")
        if not isinstance(said["instructions"], str | None):
            raise TypeError(f"Task: instructions is a text or None, got {said['instructions']!r:.200}")


@dataclass(frozen=True)
class End:
    """What `judge_result` or `user_turn` returns where the task ends without an answer, such as a game that is over.

    Attributes:
        score: what the end is worth, from 0 to 1, as `judge_answer` says it of an answer; see `judge_end`.
        amounts: amounts of process terms, before their weights.
        metrics: for `info["metrics"]`.
        truncation_reason: None for an end of the task itself; else the name of what cut it short, such as a game's own
            time limit: the episode is then truncated and not terminated.
    """

    score: float
    amounts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    truncation_reason: str | None = None


@dataclass(frozen=True)
class UserTurn:
    """What `user_turn` returns where what was said to the user is worth something by itself.

    Attributes:
        reply: what the user says.
        amounts: amounts of process terms, before their weights.
    """

    reply: str
    amounts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What `judge_end` returns where the end of an episode pays more than one number.

    Attributes:
        value: what the end pays.
        amounts: amounts of process terms for the episode as a whole, before their weights.
        besides: what it pays besides, as terms `outcome/NAME`, for harm that was done, say.
    """

    value: float
    amounts: Mapping[str, float] = field(default_factory=dict)
    besides: Mapping[str, float] = field(default_factory=dict)


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
    """A turn that was read and isn't over: its calls are waiting for their results."""

    closed: bool = True
    overflow: bool = False
    calls: list[PendingCall] = field(default_factory=list)
    skipped: list[Call] = field(default_factory=list)  # beyond `MAX_CALLS`
    answers: list[str] = field(default_factory=list)
    said: str = ""  # the visible text of a turn without calls
    judged: tuple[float, dict[str, float]] | None = None  # what `judge_answer` said, where it was asked early
    heard: tuple[Any] | None = None  # what `user_turn` said, where it was asked early
    fault: str | None = None  # what broke, and stayed broken: the episode ends with this turn

    @classmethod
    def read(cls, parsed: Turn, tools: Mapping[str, Tool], closed: bool) -> OpenTurn:
        """A turn as the dialect read it: its first `MAX_CALLS` calls, or else its answers and its text."""
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
        """Whether the turn is plain speech: neither a call nor an answer."""
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
    turns: list[tuple[int, int]] = field(default_factory=list)  # each span's first token, and one past its last
    rewards: list[dict[str, float]] = field(default_factory=list)
    tool_calls: list[list[dict[str, Any]]] = field(default_factory=list)  # of each turn, as in its info
    memory: dict[str, Any] = field(default_factory=dict)  # a task's own notes, e.g. the supports found so far
    fault: str | None = None  # why it could not begin; its first turn ends it
    seed: int | None = None  # of its reset

    def append(self, tokens: Sequence[int] | Tokens) -> None:
        """Add tokens to the state; the buffer grows where it has to."""
        end = self.length + len(tokens)
        if end > self.buffer.size:
            grown = np.empty(max(end, 2 * self.buffer.size), np.int32)
            grown[: self.length] = self.buffer[: self.length]
            self.buffer = grown
        self.buffer[self.length : end] = tokens
        self.length = end

    def add_message(self, parsed: Turn) -> None:
        """Add a turn to the messages: as raw text where a call is malformed or not run, which no other form says."""
        if not parsed.calls or len(parsed.calls) > MAX_CALLS or any(call.error is not None for call in parsed.calls):
            self.messages.append({"role": "assistant", "content": parsed.raw})
            return
        functions = [{"name": call.name, "arguments": call.arguments} for call in parsed.calls]
        calls = [{"type": "function", "function": function} for function in functions]
        self.messages.append({"role": "assistant", "content": parsed.content, "tool_calls": calls})

    def mark(self) -> tuple[Any, ...]:
        """What a judge may change, for `return_to` if it faults.

        Notes are pickled, not copied: every turn is marked, few are taken back, and this is much the cheaper half.
        """
        memory: bytes | dict[str, Any]
        try:
            memory = pickle.dumps(self.memory)
        except Exception:  # an object of a task's own
            memory = copy.deepcopy(self.memory)
        return self.length, len(self.messages), set(self.seen_calls), memory

    def return_to(self, mark: tuple[Any, ...]) -> None:
        """Take back what has changed since `mark`, once."""
        self.length, messages, self.seen_calls, memory = mark
        self.memory = pickle.loads(memory) if isinstance(memory, bytes) else memory
        del self.messages[messages:]
