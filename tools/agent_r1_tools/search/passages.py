"""Passages and what every retriever has in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Passage:
    """A piece of text with a title: what is indexed, found and shown."""

    title: str
    text: str


Hit = tuple[Passage, float]
"""A passage that was found and its score (higher is better; comparable within one retriever only)."""


class Retriever(Protocol):
    """Finds passages. `timeout` is the longest that a search can take, in seconds: `math.inf` for one that computes
    in process and never blocks."""

    timeout: float

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        """At most `top_k` hits for each query, best first. May raise `RetrievalError`."""
        ...


class RetrievalError(RuntimeError):
    """The retriever could not search: its server is down, slow or speaks another protocol."""


def format_passages(passages: Sequence[Passage]) -> str:
    """Passages as the policy reads them, one a line: `[1] Title: text`."""
    return "\n".join(f"[{i}] {_one_line(p.title)}: {_one_line(p.text)}" for i, p in enumerate(passages, 1))


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())
