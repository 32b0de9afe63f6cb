"""The baseline "naive RAG" of Agent-R1: one retrieval with the question itself, one answer, no tools.

The prompt is a system message, `INSTRUCTIONS`, and a user message, `question_with_passages(question, passages)`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agent_r1.tool_env import Task, ToolEnv
from agent_r1_tools import ToolFault, run_tool

INSTRUCTIONS = (
    "Answer the question from the passages. "
    "Give the answer in as few words as possible as <answer>your answer</answer>."
)


def question_with_passages(question: str, passages: str) -> str:
    """The user message: what the environment's search tool answered, a blank line, the question."""
    return f"{passages}\n\n{question}"


def naive_rag(env_class: type[ToolEnv]) -> type[ToolEnv]:
    """An environment with the tasks and judgements of `env_class`, whose prompt holds the passages and no tools.

    An episode is one turn. A search that faults is a fault of `reset`. The class raises ValueError where `env_class`
    has no tool named search.
    """

    class NaiveRAG(env_class):  # type: ignore[valid-type, misc]
        instructions = INSTRUCTIONS

        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**{**kwargs, "max_turns": 1})
            if "search" not in self.tools:
                raise ValueError(f"naive RAG needs a tool named search, {env_class.__name__} has {list(self.tools)}")

        @property
        def schemas(self) -> list[dict[str, Any]]:
            """None: the policy is told of no tools."""
            return []

        def make_task(self, index: int) -> Task:
            task = super().make_task(index)
            self.start_episode(task)  # gives the tools this task's corpus
            found = run_tool(self.tools["search"], {"query": task.question})
            if found.fault is not None:
                raise ToolFault(found.fault)
            return replace(task, question=question_with_passages(task.question, found.content))

    return NaiveRAG
