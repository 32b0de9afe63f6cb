"""What is missing is named when it is needed, with the extra that brings it."""

import importlib
import runpy
import sys
from collections.abc import Callable
from typing import Any

import pytest

from agent_r1_tools.mcp import MCPServer, server
from agent_r1_tools.search import BM25Retriever, DenseRetriever, HTTPRetriever, Passage, bm25


@pytest.mark.parametrize(
    ("module", "extra", "use"),
    [
        ("bm25s", "search", lambda: BM25Retriever([Passage("a", "b")])),
        ("Stemmer", "search", lambda: BM25Retriever([Passage("a", "b")])),
        ("faiss", "dense", lambda: DenseRetriever([Passage("a", "b")])),
        ("sentence_transformers", "dense", lambda: DenseRetriever([Passage("a", "b")])),
        ("httpx", "http", lambda: HTTPRetriever("http://127.0.0.1:1")),
        ("fastapi", "server", lambda: importlib.import_module("agent_r1_tools.search.server")),
        ("mcp", "mcp", lambda: MCPServer(["server"])),
        ("mcp_types", "mcp", lambda: MCPServer(["server"])),  # version 1
        ("uvicorn", "server", lambda: importlib.import_module("agent_r1_tools.search.server")),
    ],
)
def test_a_missing_package_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, module: str, extra: str, use: Callable[[], Any]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # Python's own way to say: not there
    monkeypatch.delitem(sys.modules, "agent_r1_tools.search.server", raising=False)
    bm25._libraries.cache_clear()
    bm25.stems.cache_clear()
    server._check_sdk.cache_clear()
    with pytest.raises(ImportError) as raised:
        use()
    assert f'pip install "agent-r1[{extra}]"' in str(raised.value)


def test_a_server_without_its_packages_ends_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.delitem(sys.modules, "agent_r1_tools.search.server", raising=False)
    with pytest.raises(SystemExit, match="agent-r1.server."):
        runpy.run_module("agent_r1_tools.search.server", run_name="__main__")
