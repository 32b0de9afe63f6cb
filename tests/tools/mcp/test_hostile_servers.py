"""Retrieval servers that mean harm to their client, and clients that mean harm to our server."""

import asyncio
import contextlib
import gc
import gzip
import json
import os
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from hostile_server import DRIPS, answer, drip, flood, talking

from agent_r1_tools import run_batch
from agent_r1_tools.exchange import Exchange
from agent_r1_tools.search import BM25Retriever, HTTPRetriever, Passage, RetrievalError, SearchTool, server
from agent_r1_tools.search.bm25 import query_stems
from agent_r1_tools.search.http import MAX_ANSWER_BYTES, MAX_QUERIES, most_bytes
from agent_r1_tools.search.passages import Hit

GOOD = b'{"result": [[{"document": {"contents": "\\"A\\"\\ntext"}, "score": 2}]]}'
FOUND = [[(Passage("A", "text"), 2.0)]]


@pytest.fixture(autouse=True, scope="module")
def no_proxy() -> Iterator[None]:
    """A proxy that the machine may use must not see the loopback addresses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        yield


def ask(address: str, **options: float) -> list[list[tuple[Passage, float]]]:
    retriever = HTTPRetriever(address, **{"retries": 0, "check": False, **options})  # type: ignore[arg-type]
    try:
        return retriever.search(["q"], 1)
    finally:
        retriever.close()


@pytest.mark.parametrize("what", DRIPS)
def test_a_drip_fed_answer_is_given_up_in_time(what: str) -> None:
    """Every byte comes well within the time limit, the answer never."""

    with talking(drip(DRIPS[what])) as address:
        began = time.monotonic()
        with pytest.raises(RetrievalError, match="ReadTimeout"):
            HTTPRetriever(address, request_timeout=0.3)
        assert time.monotonic() - began < 6


def peak_of(address: str) -> tuple[str, int]:
    """What is said of an answer, and the memory that it took, in bytes."""
    tracemalloc.start()
    try:
        with pytest.raises(RetrievalError) as raised:
            ask(address)
        return str(raised.value), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def bomb() -> bytes:
    return gzip.compress(bytes(100_000_000), 1)


@pytest.mark.parametrize("coding", [b"gzip", b"zstd", b"gzip, gzip"])
def test_a_bomb_is_not_unpacked(bomb: bytes, coding: bytes) -> None:
    with talking(lambda send: send(answer(bomb, b"Content-Encoding: " + coding))) as address:
        said, peak = peak_of(address)
        assert "encoded as" in said
        assert peak < 20_000_000


@pytest.mark.parametrize("status", [b"200 OK", b"500 Oops"])
def test_an_answer_without_end_is_cut_short(status: bytes) -> None:
    with talking(flood(status)) as address:
        said, peak = peak_of(address)
        assert ("more than 1310720 bytes" if status == b"200 OK" else "status 500: xxx") in said
        assert peak < 20_000_000


def test_the_room_for_an_answer_grows_with_the_question() -> None:
    assert most_bytes(1, 1) == 1_310_720
    assert most_bytes(256, 3) == MAX_ANSWER_BYTES


@pytest.mark.parametrize("score", ["9" * 400, "9" * 5_000, "NaN", "-Infinity", "1e999", '"high"', "null", "[1]"])
def test_a_score_that_is_no_number(score: str) -> None:
    body = GOOD.replace(b": 2}", b": " + score.encode() + b"}")
    with talking(lambda send: send(answer(body))) as address, pytest.raises(RetrievalError):
        ask(address)


@pytest.mark.parametrize("opening", ["[", '{"result":', '{"result": [[', '{"result": [[{"document": '])
def test_json_nested_too_deeply(opening: str) -> None:
    body = opening.encode() + b"[" * 100_000
    with talking(lambda send: send(answer(body))) as address, pytest.raises(RetrievalError, match="JSON"):
        ask(address)


@pytest.mark.parametrize("charset", ["utf-16", "latin-1", "rot13", "base64", "no-such", "\xff"])
def test_only_utf8_is_read(charset: str) -> None:
    """Whatever the headers say; the bytes decide."""
    header = b"Content-Type: application/json; charset=" + charset.encode("latin-1")
    for status in (b"200 OK", b"500 Oops"):
        body = '{"result": [[{"contents": "\xe9"}]]}'.encode("utf-16" if charset == "utf-16" else "latin-1")
        said = answer(body, header, status=status)
        with talking(lambda send, said=said: send(said)) as address, pytest.raises(RetrievalError):  # type: ignore[misc]
            ask(address)
    with talking(lambda send: send(answer(GOOD, header))) as address:
        assert ask(address) == FOUND


@pytest.mark.parametrize("address", ["http://[", "http://127.0.0.1:99999999", "http://", "http://a:b", "http://\ud800"])
def test_an_address_that_is_none_is_said(address: str) -> None:
    with pytest.raises(ValueError, match="not an address"):
        HTTPRetriever(address, check=False)


def test_a_redirection_is_not_followed() -> None:
    header = b"Location: http://127.0.0.1:1/"
    with talking(lambda send: send(answer(b"", header, status=b"307 Elsewhere"))) as address:
        with pytest.raises(RetrievalError, match="status 307"):
            ask(address)


def test_cookies_are_not_kept() -> None:
    cookies = [b"Set-Cookie: c%d=%s" % (i, b"x" * 900) for i in range(60)]
    with talking(lambda send: send(answer(GOOD, *cookies))) as address:
        retriever = HTTPRetriever(address)
        for _ in range(3):
            assert retriever.search(["q"], 1) == FOUND
        assert not retriever._exchange._client().cookies
        retriever.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_asks_by_itself() -> None:
    with talking(lambda send: send(answer(GOOD))) as address:
        retriever = HTTPRetriever(address, request_timeout=20)
        child = os.fork()
        if child == 0:
            try:
                os._exit(retriever.search(["q"], 1) != FOUND)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        assert retriever.search(["q"], 1) == FOUND
        retriever.close()


# --- clients that mean harm to our server -----------------------------------------------------------------------------


def test_a_large_request_does_not_make_others_wait() -> None:
    """What is large is searched for in slices, between which others have their turn."""

    class Slow:
        timeout = 60.0
        asked: list[str] = []

        def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
            self.asked += queries
            time.sleep(0.001)
            return [[(Passage(query, ""), 1.0)] for query in queries]

    large = [f"{i} ".ljust(server.MAX_QUERY_CHARS, "x") for i in range(MAX_QUERIES)]

    async def ask_both() -> tuple[list[list[Hit]], int, list[list[Hit]]]:
        batcher = server.Batcher(Slow())
        task = asyncio.create_task(batcher.run())
        first = asyncio.create_task(batcher.search(large, 1))
        while not Slow.asked:
            await asyncio.sleep(0.001)
        small = await batcher.search(["small"] * 3, 1)
        asked = len(Slow.asked)
        found = await first
        task.cancel()
        return small, asked, found

    small, asked, found = asyncio.run(ask_both())
    assert [[p.title for p, _ in hits] for hits in small] == [["small"]] * 3
    assert asked < 60
    assert [[p.title for p, _ in hits] for hits in found] == [[query] for query in large]


def test_more_than_can_wait_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_WAITING_CHARS", 1_000)

    async def ask_thrice() -> list[object]:
        batcher = server.Batcher(BM25Retriever([Passage("A", "text")]))
        asked = [batcher.search(["x" * length], 1) for length in (5_000, 10, 10)]  # the first has room, always
        waiting = asyncio.gather(*asked, return_exceptions=True)
        await asyncio.sleep(0)
        task = asyncio.create_task(batcher.run())
        found = await waiting
        found.append(await batcher.search(["text"], 1))
        task.cancel()
        return found

    first, *others, last = asyncio.run(ask_thrice())
    assert first == [[]] and last
    assert [getattr(other, "status_code", None) for other in others] == [429, 429]


def test_passages_that_are_asked_for_take_room_while_they_wait() -> None:
    async def ask_often() -> list[object]:
        batcher = server.Batcher(BM25Retriever([Passage("A", "text")]))
        waiting = asyncio.gather(*(batcher.search(["x"] * 25, 100) for _ in range(90)), return_exceptions=True)
        await asyncio.sleep(0)
        task = asyncio.create_task(batcher.run())
        found = await waiting
        task.cancel()
        return found

    found = asyncio.run(ask_often())
    refused = [error for error in found if getattr(error, "status_code", None) == 429]
    assert 10 < len(refused) < 60 and len([hits for hits in found if hits == [[]] * 25]) == 90 - len(refused)


def test_a_client_that_nobody_closed_closes_its_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        exchange = Exchange(30.0)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(exchange.post, f"http://127.0.0.1:{listener.getsockname()[1]}/retrieve", b"{}", 99)
            connection, _ = listener.accept()
            with connection:
                asked = b""
                while not asked.endswith(b"{}"):
                    asked += connection.recv(1 << 20)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]")
                assert waiting.result() == (200, "identity", b"[]")
                connection.settimeout(30)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    del exchange, waiting
                    gc.collect()
                    assert connection.recv(1) == b""
                    gc.collect()
                port = str(listener.getsockname()[1])
                assert not [w for w in caught if port in str(w.message)]  # a socket closed by the collector alone


def test_long_queries_are_not_kept() -> None:
    query_stems.cache_clear()  # other tests may have filled it
    retriever = BM25Retriever([Passage("A", "text")])
    kept = query_stems.cache_info().currsize
    retriever.search([f"{i} word".ljust(8_192, "x") for i in range(20)], 1)
    assert query_stems.cache_info().currsize == kept
    retriever.search(["a short one, of nobody else"], 1)
    assert query_stems.cache_info().currsize == kept + 1


QUICK = "http_limits.BODY_SECONDS = http_limits.HEADER_SECONDS = 0.5; http_limits.TAKE_SECONDS = 1.5"
QUICK += "; http_limits.MAX_HELD_BYTES = 1_000_000; server.MAX_UNSENT_BYTES = 30_000_000"


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Of a server of ours that has little patience and little room."""
    corpus = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    corpus.write_text('{"title": "A", "text": "text %s"}\n' % ("x" * 100_000))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = int(probe.getsockname()[1])
    imports = "from agent_r1_tools import http_limits; from agent_r1_tools.search import server"
    code = f"{imports}; {QUICK}; server.main()"
    process = subprocess.Popen([sys.executable, "-c", code, "--corpus", str(corpus), "--port", str(number)])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            httpx.get(f"http://127.0.0.1:{number}/health")
            break
        except httpx.TransportError:
            time.sleep(0.05)
    yield number
    process.kill()
    process.wait()


def post(port: int) -> list[list[tuple[Passage, float]]]:
    return ask(f"http://127.0.0.1:{port}", retries=2)


HEAD = b"POST /retrieve HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 600000\r\n"
HALF = {"nothing": b"", "half a line": b"POST /retr", "half its headers": HEAD, "no body": HEAD + b"\r\n"}
HALF["half a body"] = HALF["no body"] + b'{"queries": ["'
HALF["half of the next"] = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\nPOST /retr"


@pytest.mark.parametrize("drip", [False, True], ids=["silent", "drip"])
@pytest.mark.parametrize("what", HALF)
def test_a_half_open_connection_is_closed(port: int, what: str, drip: bool) -> None:
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(HALF[what])
        client.settimeout(0.1)
        heard, end = b"", time.monotonic() + 20
        while time.monotonic() < end:
            try:
                if drip and what != "nothing":
                    client.sendall(b"x")
                data = client.recv(65_536)
                heard += data
                if not data:
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        assert time.monotonic() < end, "it is still open"
        if "body" in what:
            assert b" 408 " in heard or drip  # a reset may swallow what was said
    assert post(port) == [[]]


def asked(port: int, queries: int, top_k: int = 1) -> socket.socket:
    """A connection on which so many passages of 200 kB have been asked for, and nothing is taken yet."""
    body = json.dumps({"queries": ["text"] * queries, "topk": top_k}).encode()
    client = socket.create_connection(("127.0.0.1", port), 30)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
    client.sendall(b"POST /retrieve HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    return client


def test_an_answer_that_nobody_takes_is_dropped(port: int) -> None:
    """Long before the time is over in which one may be found."""
    with asked(port, 70) as client:
        time.sleep(5)
        taken = 0
        with contextlib.suppress(ConnectionError):
            while data := client.recv(1 << 20):
                taken += len(data)
    assert taken < 10_000_000  # of 14
    assert post(port) == [[]]


def test_answers_that_nobody_takes_have_one_room(port: int) -> None:
    with contextlib.ExitStack() as clients:
        opened = [clients.enter_context(asked(port, 70)) for _ in range(4)]
        said = [client.recv(20).split(b"\r\n")[0] for client in opened]
        assert sorted(line.split()[1] for line in said) == [b"200", b"200", b"429", b"429"]
    found = HTTPRetriever(f"http://127.0.0.1:{port}").search(["text"] * 70, 1)  # there is room again
    assert [len(hits) for hits in found] == [1] * 70


def test_who_asks_for_too_much_hears_why(port: int) -> None:
    for queries, top_k, why in ((256, 100, b"more than 2560 passages"), (100, 1, b"larger than 16777216 bytes")):
        with asked(port, queries, top_k) as client:
            said = client.recv(65_536)
            while why not in said and (more := client.recv(65_536)) and len(said) < 65_536:
                said += more
            assert said.startswith(b"HTTP/1.1 422 ") and why in said
    assert len(HTTPRetriever(f"http://127.0.0.1:{port}").search(["nothing"] * 256, 100)) == 256  # in parts
    tool = SearchTool(HTTPRetriever(f"http://127.0.0.1:{port}"), 1)
    assert [result.ok for result in run_batch(tool, [{"query": "text"}] * 100)] == [True] * 100  # one by one


def test_what_a_client_asked_for_that_has_gone_is_searched_for_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        timeout = 60.0
        asked: list[str] = []

        def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
            self.asked += queries
            time.sleep(0.02)
            return [[] for _ in queries]

    monkeypatch.setattr(server, "SLICE_CHARS", 1)  # a query at a time
    monkeypatch.setattr(server, "MAX_WAITING_CHARS", 150_000)  # one of these, and no more

    async def leave(app: Any, method: str) -> None:
        body = json.dumps({"queries": ["q" * 100] * 100, "topk": 10}).encode()
        leaving = iter([{"type": "http.request", "body": body, "more_body": False}])
        before = len(Slow.asked)

        async def receive() -> dict[str, Any]:
            for message in leaving:
                return message
            while len(Slow.asked) == before:
                await asyncio.sleep(0.001)
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            assert message.get("status", 499) == 499

        query = b"query=q" if method == "GET" else b""
        path = "/search" if method == "GET" else "/retrieve"
        await app({"type": "http", "method": method, "path": path, "query_string": query, "headers": []}, receive, send)

    async def ask_all() -> None:
        app = server.create_app(Slow())
        async with app.router.lifespan_context(app):
            for method in ("POST", "POST", "GET"):  # each has all the room
                await asyncio.wait_for(leave(app, method), 20)
        assert len(Slow.asked) < 20

    asyncio.run(ask_all())


def test_a_small_answer_has_room_beside_those_that_nobody_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_UNSENT_BYTES", 200_000)

    async def write() -> None:
        answers = server._Answers()
        large = await answers.write("result", ["x" * 265_521])  # fills the room to the last byte
        assert answers.unsent == 200_000
        for _ in range(3):
            assert (await answers.write("result", [["x"]])).status_code == 200
        with pytest.raises(server.HTTPException, match="429"):
            await answers.write("result", ["x" * 65_536])

        async def send(message: object) -> None: ...

        await large({}, None, send)  # type: ignore[arg-type]
        assert answers.unsent == 0 and len((await answers.write("result", ["x" * 65_536])).body) > 65_536

    asyncio.run(write())


@pytest.mark.parametrize("path", ["/retrieve", "/search"])
def test_an_answer_is_written_in_another_thread(path: str) -> None:
    """On the event loop it made everyone wait."""
    readers = set()

    class Watched(Passage):
        @property
        def text(self) -> str:  # type: ignore[override]
            readers.add(threading.get_ident())
            return "text"

    class Found:
        timeout = 60.0

        def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
            return [[(watched, 1.0)] for _ in queries]

    watched = Watched.__new__(Watched)
    object.__setattr__(watched, "title", "A")

    async def get() -> httpx.Response:
        app = server.create_app(Found())
        transport = httpx.ASGITransport(app)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://a") as it:
            return await it.post(path, json={"queries": ["a", "b"]})

    said = asyncio.run(get())
    document = {"title": "A", "text": "text", "contents": '"A"\ntext'}
    hit = {"score": 1.0, "document": document}
    searched = {"query_results": [{"query": "a", "results": [hit]}, {"query": "b", "results": [hit]}]}
    assert said.json() == ({"result": [[document], [document]]} if path == "/retrieve" else searched)
    assert said.headers["content-type"] == "application/json"
    assert readers and threading.get_ident() not in readers


def test_bodies_that_are_held_have_one_room(port: int) -> None:
    clients = [socket.create_connection(("127.0.0.1", port), 20) for _ in range(4)]
    try:
        for client in clients:
            client.sendall(HALF["no body"] + b" " * 599_000)
        said = [client.recv(65_536).split(b"\r\n")[0] for client in clients]
        assert sorted(line.split()[1] for line in said) == [b"408", b"429", b"429", b"429"]
    finally:
        for client in clients:
            client.close()
    assert post(port) == [[]]


@pytest.mark.parametrize("body", [b"[" * 900_000, b'{"queries": ' + b"[" * 900_000, b'{"queries": [' + b"5," * 400_000])
def test_a_body_that_is_costly_to_read_gets_422(port: int, body: bytes) -> None:
    assert httpx.post(f"http://127.0.0.1:{port}/retrieve", content=body, timeout=30).status_code == 422


def test_an_idle_connection_can_be_used_until_it_is_closed(port: int) -> None:
    with httpx.Client() as client:
        for _ in range(3):
            assert client.get(f"http://127.0.0.1:{port}/health").status_code == 200
            time.sleep(0.2)
