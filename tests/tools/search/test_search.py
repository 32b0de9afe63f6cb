"""Passages, corpus files, BM25 and the search tool."""

import gzip
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import pytest
import Stemmer
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agent_r1_tools import run_batch, run_tool
from agent_r1_tools.search import BM25Retriever, Passage, RetrievalError, SearchTool, load_corpus
from agent_r1_tools.search.bm25 import stems
from agent_r1_tools.search.passages import Hit, passage_from_row

PASSAGES = [
    Passage("Marie Curie", "Marie Curie was a physicist born in Warsaw. She discovered radium."),
    Passage("Pierre Curie", "Pierre Curie was a French physicist and the husband of Marie Curie."),
    Passage("Warsaw", "Warsaw is the capital of Poland."),
    Passage("Radium", "Radium is a chemical element."),
]
WORDS = [
    "the",
    "of",
    "running",
    "runs",
    "ran",
    "Runner",
    "cat",
    "cats",
    "über",
    "x",
    "42",
    "don't",
    "naïve",
    "\n",
    "CAT",
]
TEXT = st.lists(st.sampled_from(WORDS), max_size=8).map(" ".join)


def titles(hits: list[Hit]) -> list[str]:
    return [passage.title for passage, _ in hits]


# --- BM25 -------------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(documents=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=12), query=TEXT, top_k=st.integers(1, 15))
def test_scores_are_those_of_bm25s(documents: list[tuple[str, str]], query: str, top_k: int) -> None:
    """Against bm25s used the plain way: its own tokenizer, its index, all scores. It finds no title of one letter."""
    assume(all(title.strip() != "x" for title, _ in documents))
    passages = [Passage(title, text) for title, text in documents]
    hits = BM25Retriever(passages).search([query], top_k)[0]

    stemmer = Stemmer.Stemmer("english")
    options: dict[str, Any] = {"stopwords": "en", "stemmer": stemmer, "show_progress": False, "return_ids": False}
    corpus = bm25s.tokenize([f"{p.title}\n{p.text}" for p in passages], **options)
    tokens = bm25s.tokenize([query], **options)[0]
    known = {token for document in corpus for token in document}
    if not known & set(tokens):
        assert hits == []
        return
    index = bm25s.BM25(method="lucene", k1=0.9, b=0.4)
    index.index(corpus, show_progress=False)
    scores = index.get_scores(tokens)
    order = [i for i in np.argsort(-scores, kind="stable").tolist() if scores[i] > 0][:top_k]
    assert hits == [(passages[i], float(scores[i])) for i in order]


def test_a_search_finds_the_right_passages() -> None:
    found = BM25Retriever(PASSAGES).search(["Who discovered radium?", "capital of Poland"], 2)
    assert [titles(hits) for hits in found] == [["Marie Curie", "Radium"], ["Warsaw"]]
    assert all(isinstance(score, float) and score > 0 for hits in found for _, score in hits)


def test_equal_scores_keep_the_order_of_the_passages() -> None:
    passages = [Passage(f"{i}", "the same words here") for i in range(50)]
    assert titles(BM25Retriever(passages).search(["same words"], 7)[0]) == [f"{i}" for i in range(7)]


@pytest.mark.parametrize("query", ["", "   ", "the of and", "zebra", "?!", "\ud800", "\0", "a b c"])
def test_a_query_without_a_known_word_finds_nothing(query: str) -> None:
    assert BM25Retriever(PASSAGES).search([query], 5) == [[]]


def test_few_hits_are_not_filled_up() -> None:
    assert titles(BM25Retriever(PASSAGES).search(["element"], 100)[0]) == ["Radium"]
    assert BM25Retriever(PASSAGES).search(["element"], 0) == [[]]


@pytest.mark.parametrize("passages", [[], [Passage("", "")], [Passage("the", "of and")]])
def test_a_corpus_without_words(passages: list[Passage]) -> None:
    assert BM25Retriever(passages).search(["cat", ""], 5) == [[], []]


def test_threads_share_a_retriever() -> None:
    retriever = BM25Retriever(PASSAGES)
    queries = [f"radium physicist capital {i}" for i in range(200)]
    expected = retriever.search(queries, 3)
    stems.cache_clear()
    found: list[Any] = [None] * 8

    def work(i: int) -> None:
        found[i] = retriever.search(queries, 3)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(result == expected for result in found)


# --- the tool ---------------------------------------------------------------------------------------------------------


def test_the_search_tool_shows_passages_one_a_line() -> None:
    tool = SearchTool(BM25Retriever([*PASSAGES, Passage("Two\nlines", "polonium one\r\npolonium two")]), top_k=2)
    result = run_tool(tool, {"query": "polonium"})
    assert result.content == "[1] Two lines: polonium one polonium two"
    result = run_tool(tool, {"query": "physicist"})
    assert result.ok
    assert [line.split(":")[0] for line in result.content.splitlines()] == ["[1] Pierre Curie", "[2] Marie Curie"]
    assert result.data["titles"] == ["Pierre Curie", "Marie Curie"]
    assert result.data["texts"] == [PASSAGES[1].text, PASSAGES[0].text]
    assert result.data["scores"] == sorted(result.data["scores"], reverse=True)
    json.dumps(result.data)


def test_finding_nothing_is_an_answer() -> None:
    result = run_tool(SearchTool(BM25Retriever(PASSAGES)), {"query": ""})
    assert result.ok
    assert result.content == "No passages found."
    assert result.data == {"titles": [], "texts": [], "scores": []}


def test_a_query_of_any_length_and_content_is_answered() -> None:
    class Recorder:
        timeout = 60.0

        def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
            self.queries = queries
            return [[] for _ in queries]

    recorder = Recorder()
    assert run_tool(SearchTool(recorder), {"query": "\ud800" + "a" * 10**6}).ok
    assert recorder.queries == ["\ufffd" + "a" * 2047]


def test_tools_over_the_same_retriever_are_equal() -> None:
    retriever = BM25Retriever(PASSAGES)
    assert SearchTool(retriever, 3) == SearchTool(retriever, 3)
    assert len({SearchTool(retriever, 3), SearchTool(retriever, 3), SearchTool(retriever, 4)}) == 2
    assert SearchTool(retriever, 3) != SearchTool(BM25Retriever(PASSAGES), 3)


def test_a_retriever_that_fails_is_a_fault() -> None:
    class Broken:
        timeout = 20.0

        def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
            raise RetrievalError("the server at 10.0.0.7 is down")

    for result in run_batch(SearchTool(Broken()), [{"query": "a"}, {"query": "b"}]):
        assert not result.ok
        assert result.content == "The search is not available at the moment."
        assert result.data == {"error": "retrieval_unavailable", "message": "the server at 10.0.0.7 is down"}
        assert result.fault == "RetrievalError: the server at 10.0.0.7 is down"


def test_an_index_that_is_gone_is_a_fault() -> None:
    """A query names no file."""

    class Gone:
        timeout = 20.0

        def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
            raise FileNotFoundError("index.faiss")

    result = run_tool(SearchTool(Gone()), {"query": "a"})
    assert result.fault == "FileNotFoundError: index.faiss"


def test_a_retriever_that_hangs_is_a_fault() -> None:
    class Hangs:
        timeout = 0.05

        def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
            time.sleep(5)
            return []

    assert all(result.fault for result in run_batch(SearchTool(Hangs()), [{"query": "a"}, {"query": "b"}]))


def test_top_k_must_be_positive() -> None:
    with pytest.raises(ValueError, match="top_k"):
        SearchTool(BM25Retriever(PASSAGES), 0)


# --- corpus files -----------------------------------------------------------------------------------------------------

ROWS = [
    {"id": "1", "source": "a", "title": "One", "text": "first"},
    {"id": "2", "source": "b", "contents": '"Two"\nsecond\nline'},
    {"id": "3", "source": "a", "title": "Three", "contents": "third"},
    {"id": "4", "source": "a", "contents": '"The "Best" of"\nfourth'},
    {"id": "5", "source": "a", "title": "Five", "contents": '"Five"\nfifth'},
]
READ = [
    Passage("One", "first"),
    Passage("Two", "second\nline"),
    Passage("Three", "third"),
    Passage('The "Best" of', "fourth"),
    Passage("Five", "fifth"),
]


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_corpus_file_is_read_in_all_its_forms(tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in ROWS]
    path = write(tmp_path / "corpus.jsonl", [lines[0], "", *lines[1:]])
    assert load_corpus(path) == READ
    assert load_corpus(str(path), source="b") == [READ[1]]
    packed = tmp_path / "corpus.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert load_corpus(packed) == READ


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"title": "x"}', "field 'text' is missing"),
        ('{"text": "x"}', "field 'title' is missing"),
        ('{"title": 5, "text": "x"}', "field 'title' must be a string, not int"),
        ('{"title": "x", "text": null}', "field 'text' must be a string, not NoneType"),
        ("[1]", "expected an object, found list"),
        ('{"title": ', "Expecting value"),
        ("[" * 100_000, "nested too deeply"),
        ('{"title": "a", "text": "b", "id": ' + "9" * 5_000 + "}", "digits"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = write(tmp_path / "corpus.jsonl", [json.dumps(ROWS[0]), line])
    with pytest.raises(ValueError, match="row 2") as raised:
        load_corpus(path)
    assert str(path) in str(raised.value)
    assert says in str(raised.value)


def test_bytes_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b'{"title": "a", "text": "\xff"}\n')
    with pytest.raises(ValueError, match="row 1"):
        load_corpus(path)


@pytest.mark.parametrize("damage", ["cut", "zeros"])
def test_a_damaged_gzip_file_is_named(tmp_path: Path, damage: str) -> None:
    data = gzip.compress("".join(json.dumps(ROWS[0] | {"id": i * 7919}) + "\n" for i in range(3_000)).encode())
    path = tmp_path / "corpus.jsonl.gz"
    path.write_bytes(data[:-20] if damage == "cut" else data[: len(data) // 2] + bytes(len(data) // 2))
    with pytest.raises(ValueError, match=r"corpus\.jsonl\.gz, (after )?row \d+: "):
        load_corpus(path)


def test_a_source_that_is_no_string_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "corpus.jsonl", [json.dumps(ROWS[0]), json.dumps(ROWS[0] | {"source": ["a"]})])
    assert load_corpus(path) == READ[:1] * 2  # nobody asked
    with pytest.raises(ValueError, match="row 2: field 'source' must be a string"):
        load_corpus(path, source="a")


def test_an_unknown_source_names_the_known_ones(tmp_path: Path) -> None:
    path = write(tmp_path / "corpus.jsonl", [json.dumps(row) for row in ROWS])
    with pytest.raises(ValueError, match="'a', 'b'"):
        load_corpus(path, source="c")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_corpus(tmp_path / "none.jsonl")


@given(title=st.text(max_size=10).filter(lambda t: "\n" not in t and t == t.strip()), text=st.text(max_size=20))
def test_the_contents_form_gives_title_and_text_back(title: str, text: str) -> None:
    assert passage_from_row({"contents": f'"{title}"\n{text}'}) == Passage(title, text)


def test_bm25_leaves_the_gpu_to_others(tmp_path: Path) -> None:
    """bm25s starts JAX when it is installed, and JAX takes three quarters of a GPU's memory."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("print('JAX was imported')")
    (tmp_path / "jax" / "lax.py").write_text("def top_k(scores, k): print('JAX was started')")
    first = "from agent_r1_tools.search.bm25 import require_bm25; require_bm25(); print('bm25 is there')"
    for code, expected in {
        first: ["bm25 is there"],
        f"{first}\nimport jax.lax": ["bm25 is there", "JAX was imported"],
        f"import jax.lax\n{first}\nimport jax.lax; jax.lax.top_k(0, 0)": [
            "JAX was imported", "bm25 is there", "JAX was started",
        ],
    }.items():  # fmt: skip
        paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
        found = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONPATH": paths},
            check=True,
            capture_output=True,
            text=True,
        )
        assert found.stdout.splitlines() == expected


def test_bm25_may_be_asked_for_by_several_threads_at_once() -> None:
    code = """
import threading
from agent_r1_tools.search import BM25Retriever
gate, failed = threading.Barrier(6), []
def build():
    gate.wait()
    try:
        BM25Retriever([])
    except BaseException as error:
        failed.append(error)
threads = [threading.Thread(target=build) for _ in range(6)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(failed)
"""
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout == "[]\n"
