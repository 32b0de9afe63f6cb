"""Question answering with search: the judgements that every question answering environment shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from agent_r1.dialects import Call
from agent_r1.rewards import exact_match, f1
from agent_r1.tool_env import Task, ToolEnv
from agent_r1_tools import ToolResult
from agent_r1_tools.search import BM25Retriever, SearchTool


class QuestionAnsweringEnv(ToolEnv):
    """Answer a question by searching. Subclasses say where questions and passages come from."""

    instructions: ClassVar[str] = (
        "Answer the question. Look facts up with the tools, one step at a time. "
        "When you know the answer, give it in as few words as possible as <answer>your answer</answer>."
    )
    outcome_term: ClassVar[str] = "outcome/exact_match"
    PROCESS_WEIGHTS: ClassVar[Mapping[str, float]] = {"support_found": 0.3, **ToolEnv.PROCESS_WEIGHTS}
    yes_no_rule: ClassVar[bool] = True  # the official F1 of HotpotQA and 2WikiMultihopQA; MuSiQue has no such rule

    def __init__(self, *, corpus: str = "own", top_k: int = 5, tools: Sequence[str] = ("search",), **kwargs: Any):
        self.search_tool = SearchTool(BM25Retriever([]), top_k=top_k)
        super().__init__([self.search_tool], **kwargs)
        self.corpus = corpus

    def own_retriever(self, task: Task) -> BM25Retriever:
        """An index over the task's own paragraphs."""
        raise NotImplementedError

    def start_episode(self, task: Task) -> None:
        """Point the search tool at the task's corpus."""
        self.search_tool.retriever = self.own_retriever(task)

    def judge_result(self, call: Call, result: ToolResult) -> dict[str, float]:
        """The share of the gold supports that this result shows for the first time."""
        titles = set((result.data or {}).get("titles", ()))
        supports = self.task.metadata["supports"]
        found = self.memory.setdefault("found", [])
        new = [title for title in supports if title in titles and title not in found]
        found.extend(new)
        return {"support_found": len(new) / len(supports)} if new else {}

    def judge_answer(self, answer: str) -> tuple[float, dict[str, float]]:
        """Strict exact match; F1 is reported."""
        em = exact_match(answer, self.task.answers)
        recall = len(self.memory.get("found", ())) / max(1, len(self.task.metadata["supports"]))
        return em, {"em": em, "f1": f1(answer, self.task.answers, self.yes_no_rule), "support_recall": recall}
