"""Pages, and the tool that searches them: it shows title, year and first line of what can be opened by its id."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from agent_r1.task_data import Question
from agent_r1.tool_env import Task
from agent_r1_tools.search import BM25Retriever, Passage, Retriever, SearchTool
from agent_r1_tools.search.passages import one_line
from agent_r1_tools.search.words import fold_title
from agent_r1_tools.tool import ToolResult

SNIPPET_CHARS = 100
LINE_CHARS = 400
_ID_CHARS = 120


@dataclass(frozen=True)
class Page:
    """A page of a web: its id, by which it is opened and cited, and its text."""

    id: str
    title: str
    text: str
    year: int | None = None

    @property
    def heading(self) -> str:
        """The heading `[id] title (year)`; the title is omitted if it equals the id."""
        title = "" if self.title == self.id else f" {one_line(self.title)}"
        return f"[{self.id}]{title}" + (f" ({self.year})" if self.year is not None else "")

    @property
    def lines(self) -> list[str]:
        """The text in lines, or in sentences if it has one line."""
        pieces = self.text.splitlines() if "\n" in self.text.strip() else re.split(r"(?<=[.!?]) ", self.text)
        return [line[start : start + LINE_CHARS] for line in pieces for start in range(0, len(line), LINE_CHARS)]


class Web:
    """Pages with an index. The search uses the `passage` of each page: its title and text."""

    def __init__(self, pages: Iterable[Page]) -> None:
        self.pages = {key(page.id): page for page in pages}
        self.by_passage: dict[Passage, Page] = {}
        for page in self.pages.values():
            self.by_passage.setdefault(Passage(page.title, page.text), page)
        self.retriever = BM25Retriever(self.by_passage)


@lru_cache(maxsize=256)
def generated_web(pages: tuple[Page, ...]) -> Web:
    """Return the web of a generated task; the episodes of a group share it."""
    return Web(pages)


def task_pages(task: Task) -> tuple[Page, ...]:
    """Return the pages of a task."""
    return tuple(Page(page, title, text, year) for page, title, year, text in task.metadata["pages"])


def passage_pages(passages: Iterable[Passage]) -> list[Page]:
    """Return passages as pages, each once. The id is the title, with a number if another passage has it already."""
    pages: list[Page] = []
    taken: set[str] = set()
    count: dict[str, int] = {}
    for passage in dict.fromkeys(passages):
        name = first = page_id(passage.title)
        number = count.get(key(first), 0)
        while key(name) in taken or not number:
            number += 1
            name = first if number == 1 else f"{first} ({number})"
        count[key(first)] = number
        taken.add(key(name))
        pages.append(Page(name, passage.title, passage.text))
    return pages


def question_task(question: Question) -> Task:
    """Return the task of a question with its paragraphs as pages; missing gold pages are named by title."""
    pages = passage_pages(question.paragraphs)
    ids = {Passage(page.title, page.text): page.id for page in pages}
    gold = [question.paragraphs[index] for index in question.supports]
    missing = set(question.support_titles) - {passage.title for passage in gold}
    metadata = {
        **question.metadata,
        "pages": [[page.id, page.title, None, page.text] for page in pages],
        "supports": [ids[passage] for passage in gold] + [page_id(title) for title in sorted(missing)],
        "gold": [[passage.title, passage.text] for passage in gold] + [[title, None] for title in sorted(missing)],
    }
    return Task(question.id, question.question, list(question.answers), metadata)


def gold_passages(task: Task) -> list[Passage]:
    """Return the gold pages of a task as passages, without text if the task does not include the page."""
    pages = {page.id: [page.title, page.text] for page in task_pages(task)}
    gold = task.metadata.get("gold") or [pages[page] for page in task.metadata["supports"]]
    return [Passage(title, text or "") for title, text in gold]


def page_id(title: str) -> str:
    """Turn a title into an id: one line, no square brackets, not too long."""
    return one_line(title).replace("[", "(").replace("]", ")").strip()[:_ID_CHARS].strip() or "untitled"


def key(name: str) -> str:
    """Return the normal form of an id, equal for all of its spellings."""
    return fold_title(name)


class PageSearch(SearchTool):
    """A `SearchTool` that shows the pages found, one a line: `[id] title (year): first line`.

    `data` also has the ids (`pages`). Without a web, over a retriever or a server, a page's id is its title.
    """

    description = "Search the web for a query. Shows the best pages: [page] title (year): how it begins."

    def __init__(self, retriever: Retriever, top_k: int, web: Web | None) -> None:
        super().__init__(retriever, top_k)
        self.web = web

    def batch_execute(self, batch: list[dict[str, Any]]) -> list[ToolResult]:
        return [self._shown(result) for result in super().batch_execute(batch)]

    def _shown(self, result: ToolResult) -> ToolResult:
        if not result.ok:
            return result
        pages = [self.page(Passage(*hit)) for hit in zip(result.data["titles"], result.data["texts"], strict=True)]
        lines = [f"{page.heading}: {page.lines[0][:SNIPPET_CHARS] if page.lines else ''}" for page in pages]
        content = "\n".join(lines) or "No pages found."
        return replace(result, content=content, data={**result.data, "pages": [page.id for page in pages]})

    def page(self, passage: Passage) -> Page:
        """Return the page of a hit."""
        if self.web is not None:
            return self.web.by_passage[passage]
        return Page(page_id(passage.title), passage.title, passage.text)
