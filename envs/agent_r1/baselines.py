"""Baselines of a task: its demonstrators and heuristic baselines (`Baselines`), and two environments without tools.

    env_class = naive_rag(HotpotQAEnv)      # the prompt has the passages of one search for the question
    env_class = closed_book(HotpotQAEnv)    # the prompt has the question only

An episode of these environments has one turn. The prompt has a system message and a user message. The first is the
class's `instructions`. The second is the question, in naive RAG `question_with_passages(question, passages)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import getattr_static, signature
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

from agent_r1.arguments import ArgumentError
from agent_r1.ids import creator
from agent_r1.tool_env import Task, ToolEnv
from agent_r1_tools import Tool, ToolFault, run_tool

INSTRUCTIONS = (
    "Answer the question from the passages. "
    "Give the answer in as few words as possible as <answer>your answer</answer>."
)
CLOSED_BOOK_INSTRUCTIONS = (
    "Answer the question. Give the answer in as few words as possible as <answer>your answer</answer>."
)


ONLY_EXPERTS = "{name} has no demonstrator that makes mistakes; use the expert's demonstrations (--expert-share 1)"


class UnwrittenError(ValueError):
    """A demonstration in the user's data cannot be written as turns: a mistake in the data, unlike a missing one."""


class Baselines:
    """Mixin for a `ToolEnv`: its demonstrators, heuristic baselines and chance levels.

    Deriving from it is optional: a class that defines some of these members has the defaults of the others, see
    `baselines_of`. Heuristic baselines are methods `shortcut_NAME(rng)`, which return the texts of turns.
    """

    floor: float = 0.0  # the share of tasks that chance and heuristics may solve (python -m agent_r1.validate)
    floors: ClassVar[Mapping[str, float]] = {}  # of heuristic baselines that may solve more, by name
    teachers: ClassVar[tuple[str, ...]] = ()  # names for `demonstration(rng, teacher=NAME)`
    choices: ClassVar[tuple[int, int] | None] = None  # (most candidates, features of each), see `candidates`

    def demonstration(self, rng: np.random.Generator | None = None) -> list[str]:
        """Return an expert's turns on the current task, as texts without the end of turn.

        With `rng` the demonstrator makes mistakes. Raises ValueError if the expert has no solution, and for an unknown
        demonstrator.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define demonstration(rng), which returns an expert's turns"
        )

    @staticmethod
    def vocabulary() -> list[str]:
        """Return words that a small tokenizer for this task should keep whole."""
        return []

    def candidates(self) -> Sequence[tuple[str, Sequence[float]]]:
        """Return turns as text, each with its features, among which a policy of `ChoiceInterface` chooses now.

        There is at least one, and at most the number in `choices`. They should use only text that the policy has read.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define candidates(), which returns the turns to choose among"
        )


def baselines_of(env: Any) -> Any:
    """Return the baselines of an environment: itself if it derives from `Baselines`, else its members and the defaults.

    Raises ArgumentError if `teachers` is not a list or tuple of names.
    """
    baselines = env
    if not isinstance(env, Baselines):
        public = (name for name in vars(Baselines) if not name.startswith("_"))
        members = {name: _member_of(env, name) for name in public if getattr_static(env, name, None) is not None}
        baselines = type(type(env).__name__, (Baselines,), members)()
    name, teachers = type(env).__name__, baselines.teachers
    if not isinstance(teachers, list | tuple) or not all(isinstance(teacher, str) for teacher in teachers):
        example = "('fallible_50',)"
        raise ArgumentError(f"{name}.teachers must be a tuple of names, such as {example}, got {teachers!r:.200}")
    return baselines


def _member_of(env: Any, name: str) -> property:
    return property(lambda _: getattr(env, name))  # read on access only: a task may not have begun


def has_demonstration(env: Any) -> bool:
    """Return whether the class of an environment defines a demonstration."""
    return getattr(type(env), "demonstration", Baselines.demonstration) is not Baselines.demonstration


def careless_demonstration(env: Any, rng: np.random.Generator) -> list[str]:
    """Return the turns of the demonstrator who makes mistakes, on the current task.

    Raises ValueError if there are only experts, also for your own class with `demonstration(self)`.
    """
    show = baselines_of(env).demonstration
    try:
        signature(show).bind(rng)
    except TypeError:  # it does not take a generator
        raise ValueError(ONLY_EXPERTS.format(name=type(env).__name__)) from None
    turns: list[str] = show(rng)
    return turns


def question_with_passages(question: str, passages: str) -> str:
    """Return the user message: the result of the environment's search tool, a blank line, the question."""
    return f"{passages}\n\n{question}"


def closed_book(env_class: type[ToolEnv]) -> type[ToolEnv]:
    """Return an environment class with the tasks and judges of `env_class`, but one turn and no tools."""

    class ClosedBook(env_class):  # type: ignore[valid-type, misc]
        instructions = CLOSED_BOOK_INSTRUCTIONS

        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**{**kwargs, "max_turns": 1})
            self.own_tools: dict[str, Tool] = self.tools

        def start_episode(self, task: Task) -> None:
            """Begin the task with its tools, then remove them for the turn of the policy."""
            self.tools = self.own_tools
            super().start_episode(task)
            self.own_tools, self.tools = self.tools, {}

        @property
        def schemas(self) -> list[dict[str, Any]]:
            """No tools, so the prompt shows none."""
            return []

        def demonstration(self, rng: Any = None) -> list[str]:
            """Return the gold answer."""
            return [f"<answer>{self.task.answers[0]}</answer>"]

    return ClosedBook


def naive_rag(env_class: type[ToolEnv]) -> type[ToolEnv]:
    """Return an environment class with the tasks and judges of `env_class`, with passages in the prompt and no tools.

    An episode is one turn. A search that faults is a fault of `reset`. The class raises ArgumentError if `env_class`
    has no tool named search.
    """

    class NaiveRAG(closed_book(env_class)):  # type: ignore[misc]
        instructions = INSTRUCTIONS
        _episode: Any

        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            if "search" not in self.own_tools:
                names = list(self.own_tools)
                raise ArgumentError(f"naive RAG needs a tool named search, but {env_class.__name__} has {names}")

        def make_task(self, index: int) -> Task:
            task = super().make_task(index)
            self.start_episode(task)  # gives the tools this task's corpus
            running, self._episode = self._episode, None  # a search must not use notes of an earlier episode
            try:
                result = run_tool(self.own_tools["search"], {"query": task.question})
            finally:
                self._episode = running
            if result.fault is not None or not result.ok:
                raise ToolFault(result.fault or f"the search before the episode failed: {result.content}")
            return replace(task, question=question_with_passages(task.question, result.content))

        def demonstration(self, rng: Any = None) -> list[str]:
            """Return the environment's answer from passages (`rag_demonstration`), else the gold answer."""
            from_passages = getattr(self, "rag_demonstration", None)
            return from_passages() if from_passages else super().demonstration(rng)

    return NaiveRAG


BASELINES = {"naive_rag": naive_rag, "closed_book": closed_book}
"""The baselines by the names that evaluate_llm.py and sft_llm.py use."""


def baseline(env_id: str, mode: str) -> Callable[..., ToolEnv]:
    """Return the maker of a baseline (a key of `BASELINES`) of a registered environment, with its registered arguments.

    Raises ArgumentError if the id is registered with a function: a baseline needs a class to derive from.
    """
    maker = creator(env_id)
    if not isinstance(maker, type):
        name = getattr(maker, "__name__", str(maker))
        raise ArgumentError(f"{mode} needs a class to derive from: register {env_id} with its class, not with {name}")
    return partial(BASELINES[mode](maker), **gym.spec(env_id).kwargs)
