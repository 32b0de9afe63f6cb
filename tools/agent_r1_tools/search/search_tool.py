"""The `search` tool: a retriever that the policy can ask."""

from __future__ import annotations

import unicodedata
from typing import Any

from agent_r1_tools.running import describe
from agent_r1_tools.search.passages import Hit, QueryRefused, RetrievalError, Retriever, format_passages
from agent_r1_tools.tool import Tool, ToolResult, encodable

MAX_QUERY_CHARS = 2048


class SearchTool(Tool):
    """Asks a retriever and shows what it found, one passage a line: `[1] Title: text`.

    `ToolResult.data` is `{"titles": [...], "texts": [...], "scores": [...]}`. Finding nothing is ok. A retriever that
    fails or hangs is a fault, and `data` is `{"error": "retrieval_unavailable", "message": why}`. A query that it
    refuses is a failed call: `{"error": "query_refused"}`. Two search tools over the same retriever with the same
    `top_k` are equal, so calls of many episodes can share a batch. Of a query count the first `MAX_QUERY_CHARS`
    characters.

    Args:
        retriever: any object with `search(queries, top_k)` and `timeout`, like `BM25Retriever`.
        top_k: the most passages in one result.
    """

    name = "search"
    description = "Search the passages for a query and read the best ones."
    parameters = {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "What to search for, in a few words."}},
        "required": ["query"],
        "additionalProperties": False,
    }
    timeout_is_fault = True  # a query has a bounded length, so it is the retriever that hangs

    def __init__(self, retriever: Retriever, top_k: int = 5) -> None:
        if top_k < 1:
            raise ValueError(f"top_k must be at least 1, not {top_k}")
        self.retriever = retriever
        self.top_k = top_k
        self.timeout = retriever.timeout

    def execute(self, arguments: dict[str, Any]) -> ToolResult:
        return self.batch_execute([arguments])[0]

    def batch_execute(self, batch: list[dict[str, Any]]) -> list[ToolResult]:
        try:
            results = self.retriever.search([_clean(arguments["query"]) for arguments in batch], self.top_k)
        except (RetrievalError, OSError) as error:  # a query names no path
            data = {"error": "retrieval_unavailable", "message": str(error)}
            content = "The search is not available at the moment."
            return [ToolResult(content, ok=False, data=data, fault=describe(error))] * len(batch)
        except QueryRefused:
            if len(batch) > 1:  # which one?
                return [self.execute(arguments) for arguments in batch]
            return [ToolResult("The search does not take this query.", ok=False, data={"error": "query_refused"})]
        return [_result(hits) for hits in results]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SearchTool) and (other.retriever is self.retriever) and other.top_k == self.top_k

    def __hash__(self) -> int:
        return hash((id(self.retriever), self.top_k))


def _clean(query: str) -> str:
    return unicodedata.normalize("NFC", encodable(query[:MAX_QUERY_CHARS]))  # encoders and servers may not do it


def _result(hits: list[Hit]) -> ToolResult:
    data = {
        "titles": [passage.title for passage, _ in hits],
        "texts": [passage.text for passage, _ in hits],
        "scores": [score for _, score in hits],
    }
    return ToolResult(format_passages([passage for passage, _ in hits]) or "No passages found.", data=data)
