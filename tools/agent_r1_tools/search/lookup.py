"""The `lookup` tool: open a passage by its title."""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from agent_r1_tools.search.passages import Passage, one_line
from agent_r1_tools.search.words import fold_title, words
from agent_r1_tools.tool import Tool, ToolResult

MAX_SUGGESTIONS = 3
MAX_COMPARED = 200
"""The most titles that are compared letter by letter; in larger corpora, those that share most words."""
MAX_TITLE_CHARS = 300


class LookupTool(Tool):
    """Opens passages by title: the exact title first, else the same without regard to case, spacing, and how accents,
    ligatures and widths are encoded (see `words.py`).

    Passages that share the title are all shown, one a line: `Title: text`. `ToolResult.data` is
    `{"titles": [...], "texts": [...]}`. An unknown title is a failed call that names the nearest titles, and `data` is
    `{"error": "not_found", "suggestions": [...]}`.

    Args:
        passages: what can be opened; may be empty.
    """

    name = "lookup"
    description = "Read the passage that has exactly this title."
    parameters = {
        "type": "object",
        "properties": {"title": {"type": "string", "description": "The title of a passage."}},
        "required": ["title"],
        "additionalProperties": False,
    }
    timeout = math.inf

    def __init__(self, passages: Iterable[Passage]) -> None:
        self._by_title: defaultdict[str, list[Passage]] = defaultdict(list)
        self._by_key: defaultdict[str, list[Passage]] = defaultdict(list)
        for passage in passages:
            self._by_title[passage.title].append(passage)
            self._by_key[fold_title(passage.title)].append(passage)
        self._by_word: dict[str, list[str]] | None = None  # made when the first suggestion is needed

    def execute(self, arguments: dict[str, Any]) -> ToolResult:
        title: str = arguments["title"]
        passages = self._by_title.get(title) or self._by_key.get(fold_title(title))
        if passages:
            data = {"titles": [p.title for p in passages], "texts": [p.text for p in passages]}
            return ToolResult("\n".join(f"{one_line(p.title)}: {one_line(p.text)}" for p in passages), data=data)
        suggestions = self._suggest(fold_title(title[:MAX_TITLE_CHARS]))
        hint = f" Titles like it: {'; '.join(one_line(s) for s in suggestions)}." if suggestions else ""
        content = f"There is no passage with the title {one_line(title[:MAX_TITLE_CHARS])!r}.{hint}"
        return ToolResult(content, ok=False, data={"error": "not_found", "suggestions": suggestions})

    def _suggest(self, key: str) -> list[str]:
        """Return the nearest titles."""
        near = difflib.get_close_matches(key, self._candidates(key), n=MAX_SUGGESTIONS, cutoff=0.5)
        return [self._by_key[match][0].title for match in near]

    def _candidates(self, key: str) -> list[str]:
        if len(self._by_key) <= MAX_COMPARED:
            return list(self._by_key)
        if self._by_word is None:
            self._by_word = defaultdict(list)
            for other in self._by_key:
                for word in sorted(set(_words(other))):
                    self._by_word[word].append(other)
        shared = Counter(other for word in sorted(set(_words(key))) for other in self._by_word.get(word, ()))
        return [other for other, _ in shared.most_common(MAX_COMPARED)]


def _words(key: str) -> list[str]:
    """Return the words that near titles share: letters that stand alone count, too."""
    return [*re.findall(r"\w+", key), *words(key, inside=True)[1]]
