"""Retrieval servers that mean harm to their client, and clients that mean harm to our server."""

import gzip
import os
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from agent_r1_tools.search import HTTPRetriever, Passage, RetrievalError
from agent_r1_tools.search.http import MAX_ANSWER_BYTES, most_bytes

GOOD = b'{"result": [[{"document": {"contents": "\\"A\\"\\ntext"}, "score": 2}]]}'
FOUND = [[(Passage("A", "text"), 2.0)]]


@pytest.fixture(autouse=True, scope="module")
def no_proxy() -> Iterator[None]:
    """A proxy that the machine may use must not see the loopback addresses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        yield


@contextmanager
def talking(talk: Callable[[Callable[[bytes], None]], None]) -> Iterator[str]:
    """A server on loopback that reads a request and then lets `talk(send)` write what it likes; gives its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def serve(connection: socket.socket) -> None:
        def send(data: bytes) -> None:
            if stop.is_set():
                raise ConnectionError
            connection.sendall(data)

        with connection:
            try:
                while connection.recv(1 << 20):
                    talk(send)
            except OSError:
                pass

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        stop.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def answer(body: bytes, *headers: bytes, status: bytes = b"200 OK") -> bytes:
    lines = [b"HTTP/1.1 " + status, b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join([*lines, b"", body])


def ask(address: str, **options: float) -> list[list[tuple[Passage, float]]]:
    retriever = HTTPRetriever(address, **{"retries": 0, "check": False, **options})  # type: ignore[arg-type]
    try:
        return retriever.search(["q"], 1)
    finally:
        retriever.close()


DRIPS = {
    "its status": b"",
    "its headers": b"HTTP/1.1 200 OK\r\n" + b"".join(b"X-%d: a\r\n" % i for i in range(40)),
    "its body": b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b" " * 1_000,
    "chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 100,
    "patience": b"HTTP/1.1 100 Continue\r\n\r\n" * 100,
}


@pytest.mark.parametrize("what", DRIPS)
def test_a_drip_fed_answer_is_given_up_in_time(what: str) -> None:
    """Every byte comes well within the time limit, the answer never."""

    def drip(send: Callable[[bytes], None]) -> None:
        for byte in DRIPS[what] or b"HTTP/1.1 200 " + b"O" * 1_000:
            send(bytes([byte]))
            time.sleep(0.02)

    with talking(drip) as address:
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


@pytest.mark.parametrize("coding", [b"gzip", b"deflate", b"br", b"zstd", b"gzip, gzip"])
def test_a_bomb_is_not_unpacked(coding: bytes) -> None:
    bomb = gzip.compress(bytes(100_000_000), 1)
    with talking(lambda send: send(answer(bomb, b"Content-Encoding: " + coding))) as address:
        said, peak = peak_of(address)
        assert "encoded as" in said
        assert peak < 20_000_000


@pytest.mark.parametrize("status", [b"200 OK", b"500 Oops"])
def test_an_answer_without_end_is_cut_short(status: bytes) -> None:
    def flood(send: Callable[[bytes], None]) -> None:
        send(b"HTTP/1.1 " + status + b"\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            send(b"10000\r\n" + b"x" * 65_536 + b"\r\n")

    with talking(flood) as address:
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
        assert not retriever._connection()[1].cookies
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
