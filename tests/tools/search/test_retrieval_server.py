"""The retrieval server as a process of its own, and the client that asks it."""

import asyncio
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from agent_r1_tools import run_batch, run_tool
from agent_r1_tools.search import BM25Retriever, HTTPRetriever, Passage, RetrievalError, SearchTool
from agent_r1_tools.search.passages import Hit, QueryRefused
from agent_r1_tools.search.server import MAX_BODY_BYTES, Batcher

PASSAGES = [
    Passage("Marie Curie", "A physicist born in Warsaw."),
    Passage('The "Best" of', "A record with\ntwo lines of text."),
    Passage("Warsaw", "The capital of Poland, émigrés and all."),
    Passage("Curie", "A unit of radioactivity."),
]
QUERIES = ["who is a physicist", "", "record", "capital of Poland", "curie", "zebra"]


@pytest.fixture(autouse=True, scope="module")
def no_proxy() -> Iterator[None]:
    """A proxy that the machine may use must not see the loopback addresses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        yield


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_server(corpus: Path, port: int, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "agent_r1_tools.search.server", "--corpus", str(corpus), "--port", str(port)]
    process = subprocess.Popen([*command, *options])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                return process
        except httpx.TransportError:
            time.sleep(0.05)
    process.kill()
    raise AssertionError(f"the server did not start; exit status {process.wait()}")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    rows = [{"title": p.title, "text": p.text, "source": "here"} for p in PASSAGES]
    rows.append({"title": "Zebra", "text": "From elsewhere.", "source": "there"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def address(corpus: Path) -> Iterator[str]:
    port = free_port()
    process = start_server(corpus, port, "--source", "here")
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


# --- the server's protocols -------------------------------------------------------------------------------------------


def test_retrieve_speaks_search_r1s_protocol(address: str) -> None:
    body = {"queries": ["record", "zebra"], "topk": 2, "return_scores": True}
    answer = httpx.post(f"{address}/retrieve", json=body).json()
    best = answer["result"][0][0]
    assert best["document"]["contents"] == '"The "Best" of"\nA record with\ntwo lines of text.'
    assert best["score"] > 0
    assert answer["result"][1] == []
    bare = httpx.post(f"{address}/retrieve", json={"queries": ["curie"]}).json()
    assert {document["title"] for document in bare["result"][0]} == {"Curie", "Marie Curie"}


def test_search_speaks_agent_r1s_protocol(address: str) -> None:
    answer = httpx.post(f"{address}/search", json={"queries": ["record", "zebra"], "top_k": 2}).json()
    assert [result["query"] for result in answer["query_results"]] == ["record", "zebra"]
    assert answer["query_results"][0]["results"][0]["document"]["title"] == 'The "Best" of'
    one = httpx.get(f"{address}/search", params={"query": "record", "top_k": 2}).json()
    assert one["query_results"] == answer["query_results"][:1]


def test_health(address: str) -> None:
    assert httpx.get(f"{address}/health").json() == {"status": "healthy", "retriever": "BM25Retriever"}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"queries": []},
        {"queries": "record"},
        {"queries": [5]},
        {"queries": ["a"], "topk": 0},
        {"queries": ["a"], "topk": 101},
        {"queries": ["a"], "topk": "many"},
        {"queries": ["a"] * 257},
        {"queries": ["a" * 8193]},
        ["a"],
    ],
)
def test_a_request_out_of_bounds_gets_422(address: str, body: Any) -> None:
    response = httpx.post(f"{address}/retrieve", json=body)
    assert response.status_code == 422
    assert response.json()["detail"]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"queries": ["\\ud800"]}', b'{"queries": ' + b"[" * 9_999])
def test_a_body_that_cannot_be_read_gets_422(address: str, content: bytes) -> None:
    assert httpx.post(f"{address}/search", content=content).status_code == 422
    assert httpx.post(f"{address}/search", content=b" " * (MAX_BODY_BYTES + 1)).status_code == 413
    assert httpx.get(f"{address}/search", params={"top_k": 3}).status_code == 422


def test_the_command_line_says_what_it_needs() -> None:
    command = [sys.executable, "-m", "agent_r1_tools.search.server"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "either --corpus or --index" in done.stderr


# --- the client -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["retrieve", "search"])
def test_over_http_comes_what_comes_in_process(address: str, protocol: Literal["retrieve", "search"]) -> None:
    local, remote = BM25Retriever(PASSAGES), HTTPRetriever(address, protocol)
    assert remote.search(QUERIES, 3) == local.search(QUERIES, 3)
    assert remote.search(QUERIES * 100, 1) == local.search(QUERIES * 100, 1)  # more than one request may hold
    assert remote.search([], 3) == []
    assert HTTPRetriever(f"{address}/{protocol}/", protocol).search(["record"], 1) == local.search(["record"], 1)
    assert remote.faults == 0
    remote.close()


def test_many_clients_at_once_get_their_own_answers(address: str) -> None:
    local, remote = BM25Retriever(PASSAGES), HTTPRetriever(address)
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda i: remote.search([QUERIES[i % 6]], 1 + i % 4), range(96)))
    assert found == [local.search([QUERIES[i % 6]], 1 + i % 4) for i in range(96)]
    remote.close()


def test_requests_that_come_together_are_searched_together() -> None:
    class Counting:
        timeout = 60.0
        batches: list[int] = []

        def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
            self.batches.append(len(queries))
            if "broken" in queries:
                raise ValueError("broken")
            return [[(Passage(query, ""), float(i)) for i in range(top_k)] for query in queries]

    async def ask() -> list[Any]:
        batcher = Batcher(Counting())
        task = asyncio.create_task(batcher.run())
        found = await asyncio.gather(*(batcher.search([f"{i}", "x"], 1 + i % 3) for i in range(20)))
        failed = await asyncio.gather(batcher.search(["broken"], 1), return_exceptions=True)
        again = await batcher.search(["fine"], 1)
        task.cancel()
        return [found, failed, again]

    found, failed, again = asyncio.run(ask())
    assert Counting.batches[0] == 40
    for i, lists in enumerate(found):
        assert [[p.title for p, _ in hits] for hits in lists] == [[f"{i}"] * (1 + i % 3), ["x"] * (1 + i % 3)]
    assert "ValueError: broken" in str(failed[0])
    assert again[0][0][0].title == "fine"


def test_a_server_that_dies_is_a_fault_and_nothing_worse(corpus: Path) -> None:
    port = free_port()
    process = start_server(corpus, port)
    try:
        retriever = HTTPRetriever(f"http://127.0.0.1:{port}", retries=1, backoff=0.01)
        tool = SearchTool(retriever)
        before = run_tool(tool, {"query": "physicist"})
        assert before.ok
    finally:
        process.kill()
        process.wait()
    result = run_tool(tool, {"query": "physicist"})
    assert not result.ok and result.fault is not None and "RetrievalError" in result.fault
    assert result.content == "The search is not available at the moment."
    assert result.data["error"] == "retrieval_unavailable"
    assert retriever.faults == 1
    process = start_server(corpus, port)  # and it comes back
    try:
        assert run_tool(tool, {"query": "physicist"}) == before
        assert retriever.faults == 1
    finally:
        process.kill()
        process.wait()
        retriever.close()


def test_no_server_is_said_at_once() -> None:
    with pytest.raises(RetrievalError, match="agent_r1_tools.search.server"):
        HTTPRetriever(f"http://127.0.0.1:{free_port()}")
    HTTPRetriever(f"http://127.0.0.1:{free_port()}", check=False).close()


def test_an_address_and_a_protocol_are_checked() -> None:
    with pytest.raises(ValueError, match="not an address"):
        HTTPRetriever("127.0.0.1:8000")
    with pytest.raises(ValueError, match="unknown protocol"):
        HTTPRetriever("http://127.0.0.1:8000", "grpc")  # type: ignore[arg-type]


def test_the_timeout_covers_all_attempts() -> None:
    retriever = HTTPRetriever("http://x", request_timeout=2.0, retries=6, backoff=1.0, check=False)
    # Seven attempts, then a query of ours, and one more attempt.
    assert retriever.timeout == (7 + 1 + 1) * 2.0 + (1 + 2 + 4 + 8 + 8 + 8) + 1.0
    assert SearchTool(retriever).timeout == retriever.timeout
    retriever.close()


# --- servers that misbehave -------------------------------------------------------------------------------------------

GOOD = {"result": [[{"document": {"contents": '"A"\ntext'}, "score": 2}]]}


@contextmanager
def answering(answer: Callable[[int], tuple[int, bytes]]) -> Iterator[tuple[str, list[bytes]]]:
    """A server on loopback whose n-th answer is `answer(n)`; gives its address and the requests that it has got.
    It hangs up instead of a status 0."""
    requests: list[bytes] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append(self.rfile.read(int(self.headers["Content-Length"])))
            status, body = answer(len(requests))
            if status == 0:
                self.close_connection = True
                return
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def client(address: str, **options: Any) -> HTTPRetriever:
    return HTTPRetriever(address, **{"retries": 3, "backoff": 0.01, "check": False, **options})


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_passing_failure_is_tried_again(status: int) -> None:
    with answering(lambda n: (200, json.dumps(GOOD).encode()) if n > 2 else (status, b"busy")) as (address, requests):
        retriever = client(address)
        assert retriever.search(["q"], 1) == [[(Passage("A", "text"), 2.0)]]
        assert retriever.faults == 0
        assert len(requests) == 3
        assert json.loads(requests[0]) == {"queries": ["q"], "topk": 1, "return_scores": True}
        retriever.close()


def test_a_lasting_failure_is_counted_once() -> None:
    with answering(lambda n: (500, b"the index is broken")) as (address, requests):
        retriever = client(address)
        with pytest.raises(RetrievalError, match="status 500: the index is broken"):
            retriever.search(["q"], 1)
        assert (retriever.faults, len(requests)) == (1, 5)  # the fifth asks whether it is the query
        retriever.close()


def test_a_refusal_is_not_repeated() -> None:
    with answering(lambda n: (422, b"too long")) as (address, requests):
        retriever = client(address)
        with pytest.raises(RetrievalError, match="status 422: too long"):
            retriever.search(["q"], 1)
        assert len(requests) == 2  # the second asks whether it is the query
        retriever.close()


def test_a_server_that_hangs_is_given_up() -> None:
    done = threading.Event()

    def hang(n: int) -> tuple[int, bytes]:
        done.wait(30)
        return 200, b"{}"

    with answering(hang) as (address, _):
        retriever = client(address, request_timeout=0.1, retries=1)
        with pytest.raises(RetrievalError, match="ReadTimeout"):
            retriever.search(["q"], 1)
        retriever.close()
        done.set()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"<html>", "JSON"),
        (b"[]", "protocol"),
        (b"{}", "field 'result' is missing"),
        (b'{"result": null}', "protocol"),
        (b'{"result": [5]}', "protocol"),
        (b'{"result": [[{"document": {"title": "A"}, "score": 1}]]}', "field 'text' is missing"),
        (b'{"result": [[{"document": {"contents": "A"}, "score": "high"}]]}', "protocol"),
        (b'{"result": []}', "0 results for 1 queries"),
    ],
)
def test_nonsense_is_an_error_that_says_what_is_wrong(body: bytes, says: str) -> None:
    with answering(lambda n: (200, body)) as (address, requests):
        retriever = client(address)
        with pytest.raises(RetrievalError, match=says):
            retriever.search(["q"], 1)
        assert (retriever.faults, len(requests)) == (1, 2)  # the second asks whether it is the query
        retriever.close()


def test_documents_without_scores_are_read_too() -> None:
    body = json.dumps({"result": [[{"title": "A", "text": "text"}, {"contents": '"B"\nmore'}]]}).encode()
    with answering(lambda n: (200, body)) as (address, _):
        retriever = client(address)
        assert retriever.search(["q"], 5) == [[(Passage("A", "text"), 0.0), (Passage("B", "more"), 0.0)]]
        retriever.close()


def test_proxy_settings_are_left_alone(address: str) -> None:
    before = dict(os.environ)
    HTTPRetriever(address).close()
    assert dict(os.environ) == before


@pytest.mark.parametrize("status", [400, 403, 422, 500, 503])
def test_a_query_that_the_server_refuses_is_the_policys(status: int) -> None:
    """But only if the server takes other queries."""
    good = json.dumps(GOOD).encode()
    with answering(lambda n: (200, good) if b"bad" not in requests[n - 1] else (status, b"no")) as (address, requests):
        retriever = client(address)
        bad, fine = run_batch(SearchTool(retriever, 1), [{"query": "bad"}, {"query": "fine"}])
        assert (bad.ok, bad.fault, bad.data) == (False, None, {"error": "query_refused"})
        assert fine.ok and retriever.faults == 0
        retriever.close()
    with answering(lambda n: (status, b"no")) as (address, _):
        retriever = client(address)
        assert "RetrievalError" in str(run_tool(SearchTool(retriever, 1), {"query": "bad"}).fault)
        retriever.close()


SILENCE = [(0, b""), (200, b"<html>"), (200, b'{"result": [[{"document": {"contents": "A"}, "score": null}]]}')]
"""A server that breaks at a query."""


@pytest.mark.parametrize("broken", [*SILENCE, (200, b'{"result": []}')])
def test_a_query_that_silences_the_server_is_the_policys(broken: tuple[int, bytes]) -> None:
    """But only if the server answers other queries."""

    def answer(n: int) -> tuple[int, bytes]:
        queries = json.loads(requests[n - 1])["queries"]
        return broken if "bad" in queries else (200, json.dumps({"result": GOOD["result"] * len(queries)}).encode())

    with answering(answer) as (address, requests):
        retriever = client(address)
        tool = SearchTool(retriever, 1)
        calls = [{"query": query} for query in ("a", "bad", "b")]
        assert [result.fault for result in run_batch(tool, calls)] == [None] * 3
        bad = run_tool(tool, {"query": "bad"})
        assert (bad.ok, bad.fault, bad.data) == (False, None, {"error": "query_refused"})
        assert run_tool(tool, {"query": "fine"}).ok and retriever.faults == 0
        retriever.close()


def test_a_query_that_hangs_the_server_is_refused_within_the_timeout() -> None:
    done = threading.Event()

    def answer(n: int) -> tuple[int, bytes]:
        if b"bad" in requests[n - 1]:
            done.wait(20)
        return 200, json.dumps(GOOD).encode()

    with answering(answer) as (address, requests):
        retriever = client(address, request_timeout=0.3, retries=1)
        result = run_tool(SearchTool(retriever, 1), {"query": "bad"})
        done.set()
        assert (result.ok, result.data) == (False, {"error": "query_refused"})
        assert [json.loads(request)["queries"] for request in requests] == [["bad"], ["bad"], ["test"], ["bad"]]
        retriever.close()


@pytest.mark.parametrize("down", [(503, b"starting"), *SILENCE])
def test_a_server_that_comes_back_while_it_is_checked_refuses_nothing(down: tuple[int, bytes]) -> None:
    """Down for the query and all its repetitions (nonsense isn't asked for again), up for the check."""
    attempts = 1 if down[0] == 200 else 4
    with answering(lambda n: down if n <= attempts else (200, json.dumps(GOOD).encode())) as (address, requests):
        retriever = client(address)
        assert retriever.search(["q"], 1) == [[(Passage("A", "text"), 2.0)]]
        assert len(requests) == attempts + 2 and retriever.faults == 0
        retriever.close()


def test_one_query_that_fails_is_looked_for_at_once() -> None:
    """The batch is not repeated as a whole, and the other queries wait for no pauses."""
    good = json.dumps(GOOD).encode()
    with answering(lambda n: (500, b"no") if b"boom" in requests[n - 1] else (200, good)) as (address, requests):
        retriever = client(address)
        results = run_batch(SearchTool(retriever, 1), [{"query": query} for query in ("a", "boom", "b")])
        assert [result.ok for result in results] == [True, False, True] and results[1].fault is None
        assert [json.loads(request)["queries"] for request in requests[:3]] == [["a", "boom", "b"], ["test"], ["a"]]
        assert len(requests) == 2 + 2 + 6 and retriever.faults == 0
        retriever.close()


def test_a_query_that_breaks_the_retriever_breaks_no_other_request() -> None:
    class Picky:
        timeout = 60.0

        def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
            if "refused" in queries:
                raise QueryRefused("no such language")
            if "broken" in queries:
                raise ValueError("broken")
            return [[(Passage(query, ""), 1.0)] for query in queries]

    async def ask() -> list[Any]:
        batcher = Batcher(Picky())
        task = asyncio.create_task(batcher.run())
        asked = [["a"], ["broken"], ["b", "c"], ["refused"]]
        found = await asyncio.gather(*(batcher.search(queries, 1) for queries in asked), return_exceptions=True)
        task.cancel()
        return found

    a, broken, bc, refused = asyncio.run(ask())
    assert [[p.title for p, _ in hits] for hits in [*a, *bc]] == [["a"], ["b"], ["c"]]
    assert (broken.status_code, refused.status_code) == (500, 422)
    assert "ValueError: broken" in str(broken) and "no such language" in str(refused)


@pytest.mark.parametrize(
    "body", [b"<html>", b"[" * 100_000, b"{}", b'{"result": [[{"contents": 5}]]}', b'{"result": []}']
)
def test_a_server_that_talks_nonsense_is_at_fault(body: bytes) -> None:
    with answering(lambda n: (200, body)) as (address, _):
        retriever = client(address)
        assert "RetrievalError" in str(run_tool(SearchTool(retriever, 1), {"query": "q"}).fault)
        retriever.close()
