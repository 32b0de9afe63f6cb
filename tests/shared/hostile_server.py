"""A server on loopback that answers with whatever bytes a test wants to see its client survive."""

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Send = Callable[[bytes], None]


@contextmanager
def talking(talk: Callable[[Send], None]) -> Iterator[str]:
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
                while _request(connection):
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


def _request(connection: socket.socket) -> bytes:
    """A whole request; nothing where the client has gone."""
    data, length = b"", 0
    while b"\r\n\r\n" not in data or len(data.partition(b"\r\n\r\n")[2]) < length:
        chunk = connection.recv(1 << 20)
        if not chunk:
            return b""
        data += chunk
        if found := re.search(rb"(?i)content-length: *(\d+)", data):
            length = int(found[1])
    return data


def answer(body: bytes, *headers: bytes, status: bytes = b"200 OK") -> bytes:
    lines = [b"HTTP/1.1 " + status, b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join([*lines, b"", body])


DRIPS = {
    "its status": b"HTTP/1.1 200 " + b"O" * 1_000,
    "its headers": b"HTTP/1.1 200 OK\r\n" + b"".join(b"X-%d: a\r\n" % i for i in range(40)),
    "its body": b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b" " * 1_000,
    "chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 100,
    "patience": b"HTTP/1.1 100 Continue\r\n\r\n" * 100,
}


def drip(what: bytes) -> Callable[[Send], None]:
    """Send an answer byte by byte, each well within any time limit of a single read."""

    def talk(send: Send) -> None:
        for byte in what:
            send(bytes([byte]))
            time.sleep(0.02)

    return talk


def flood(status: bytes) -> Callable[[Send], None]:
    """Send an answer without end."""

    def talk(send: Send) -> None:
        send(b"HTTP/1.1 " + status + b"\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            send(b"10000\r\n" + b"x" * 65_536 + b"\r\n")

    return talk
