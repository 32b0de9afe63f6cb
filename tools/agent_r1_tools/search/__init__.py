"""Search: passages, retrievers, and the tool by which a policy calls a retriever."""

from agent_r1_tools.search.bm25 import BM25Retriever
from agent_r1_tools.search.dense import DenseRetriever
from agent_r1_tools.search.http import HTTPRetriever
from agent_r1_tools.search.lookup import LookupTool
from agent_r1_tools.search.passages import (
    Passage,
    QueryRefused,
    RetrievalError,
    Retriever,
    format_passages,
    load_corpus,
)
from agent_r1_tools.search.search_tool import SearchTool

__all__ = [
    "BM25Retriever",
    "DenseRetriever",
    "HTTPRetriever",
    "LookupTool",
    "Passage",
    "QueryRefused",
    "RetrievalError",
    "Retriever",
    "SearchTool",
    "format_passages",
    "load_corpus",
]
