"""Baselines of a task: its own demonstrators and tricks (`Baselines`), and two environments without tools.

    env_class = naive_rag(HotpotQAEnv)      # the passages of one search with the question stand in the prompt
    env_class = closed_book(HotpotQAEnv)    # the question alone

An episode of these has one turn. The prompt is a system message, the class's `instructions`, and a user message: the
question, in naive RAG `question_with_passages(question, passages)`.
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


ONLY_EXPERTS = "{name} has no demonstrator that makes mistakes; take the expert's demonstrations (--expert-share 1)"


class Baselines:
    """Mixin for a `ToolEnv`: who shows the task, and what it pays to know nothing.

    Nobody has to derive from it: a class that defines some of these members has the defaults of the others, see
    `baselines_of`. Tricks are methods `shortcut_NAME(rng)`, which give the texts of turns.
    """

    floor: float = 0.0  # the share of tasks that chance and tricks may solve (python -m agent_r1.validate)
    floors: ClassVar[Mapping[str, float]] = {}  # of tricks that may solve more, by name
    teachers: ClassVar[tuple[str, ...]] = ()  # names for `demonstration(rng, teacher=NAME)`
    choices: ClassVar[tuple[int, int] | None] = None  # (most candidates, features of each), see `candidates`

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


def baselines_of(env: Any) -> Any:
    """The baselines of an environment: itself where it is one of `Baselines`, else what it defines of them, and the
    defaults. Raises ArgumentError where `teachers` are no names."""
    found = env
    if not isinstance(env, Baselines):
        public = (name for name in vars(Baselines) if not name.startswith("_"))
        there = {name: _asks(env, name) for name in public if getattr_static(env, name, None) is not None}
        found = type(type(env).__name__, (Baselines,), there)()
    name, teachers = type(env).__name__, found.teachers
    if not isinstance(teachers, list | tuple) or not all(isinstance(one, str) for one in teachers):
        example = "('fallible_50',)"
        raise ArgumentError(f"{name}.teachers is a tuple of names, such as {example}, got {teachers!r:.200}")
    return found


def _asks(env: Any, name: str) -> property:
    return property(lambda _: getattr(env, name))  # only when it is asked for: a task may not have begun


def has_demonstration(env: Any) -> bool:
    """Whether the class of an environment defines a demonstration."""
    return getattr(type(env), "demonstration", Baselines.demonstration) is not Baselines.demonstration


def careless_demonstration(env: Any, rng: np.random.Generator) -> list[str]:
    """Return the turns of the demonstrator who makes mistakes, on the current task.

    Raises ValueError where there are only experts, also where a class of your own has `demonstration(self)`.
    """
    show = baselines_of(env).demonstration
    try:
        signature(show).bind(rng)
    except TypeError:  # it takes no generator
        raise ValueError(ONLY_EXPERTS.format(name=type(env).__name__)) from None
    turns: list[str] = show(rng)
    return turns


def question_with_passages(question: str, passages: str) -> str:
    """The user message: what the environment's search tool answered, a blank line, the question."""
    return f"{passages}\n\n{question}"


def closed_book(env_class: type[ToolEnv]) -> type[ToolEnv]:
    """An environment with the tasks and judgements of `env_class` in which there is one turn and no tools."""

    class ClosedBook(env_class):  # type: ignore[valid-type, misc]
        instructions = CLOSED_BOOK_INSTRUCTIONS

        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**{**kwargs, "max_turns": 1})
            self.own_tools: dict[str, Tool] = self.tools

        def start_episode(self, task: Task) -> None:
            """The task's tools are there while it begins, and gone when it is played."""
            self.tools = self.own_tools
            super().start_episode(task)
            self.own_tools, self.tools = self.tools, {}

        @property
        def schemas(self) -> list[dict[str, Any]]:
            """None: the policy is told of no tools."""
            return []

        def demonstration(self, rng: Any = None) -> list[str]:
            """The gold answer."""
            return [f"<answer>{self.task.answers[0]}</answer>"]

    return ClosedBook


def naive_rag(env_class: type[ToolEnv]) -> type[ToolEnv]:
    """An environment with the tasks and judgements of `env_class`, whose prompt holds the passages and no tools.

    An episode is one turn. A search that faults is a fault of `reset`. The class raises ArgumentError where
    `env_class` has no tool named search.
    """

    class NaiveRAG(closed_book(env_class)):  # type: ignore[misc]
        instructions = INSTRUCTIONS
        _episode: Any

        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            if "search" not in self.own_tools:
                there = list(self.own_tools)
                raise ArgumentError(f"naive RAG needs a tool named search, {env_class.__name__} has {there}")

        def make_task(self, index: int) -> Task:
            task = super().make_task(index)
            self.start_episode(task)  # gives the tools this task's corpus
            running, self._episode = self._episode, None  # a search has no notes of an episode before this one
            try:
                found = run_tool(self.own_tools["search"], {"query": task.question})
            finally:
                self._episode = running
            if found.fault is not None or not found.ok:
                raise ToolFault(found.fault or f"the search before the episode failed: {found.content}")
            return replace(task, question=question_with_passages(task.question, found.content))

        def demonstration(self, rng: Any = None) -> list[str]:
            """What the environment says can be answered from passages (`rag_demonstration`), else the gold answer."""
            from_passages = getattr(self, "rag_demonstration", None)
            return from_passages() if from_passages else super().demonstration(rng)

    return NaiveRAG


BASELINES = {"naive_rag": naive_rag, "closed_book": closed_book}
"""How evaluate_llm.py and sft_llm.py name them."""


def baseline(env_id: str, mode: str) -> Callable[..., ToolEnv]:
    """What makes a baseline (a key of `BASELINES`) of a registered environment, with its registration's arguments.

    Raises ArgumentError where the id stands for a function: a baseline is a subclass.
    """
    maker = creator(env_id)
    if not isinstance(maker, type):
        name = getattr(maker, "__name__", str(maker))
        raise ArgumentError(f"{mode} needs a class to derive from: register {env_id} with its class, not with {name}")
    return partial(BASELINES[mode](maker), **gym.spec(env_id).kwargs)
