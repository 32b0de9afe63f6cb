"""Servers that want to harm the client of AgentR1/Remote-v0; `test_remote.py` has odd answers within an episode."""

import os
import threading
import time
from contextlib import ExitStack

import pytest
from hostile_server import DRIPS, answer, drip, talking

from agent_r1 import remote
from agent_r1.remote import ANSWER_BYTES
from agent_r1_tools import exchange


@pytest.mark.parametrize("what", [*DRIPS, "nothing"])
def test_the_end_of_a_program_waits_once_for_all_servers(what, monkeypatch):
    """Whatever they drip. A good server is told, too."""
    monkeypatch.setattr(remote, "LEAVE_SECONDS", 0.5)
    told, over = threading.Event(), threading.Event()

    def good(send):
        told.set()
        send(answer(b"{}"))

    slow = drip(DRIPS[what]) if what in DRIPS else lambda send: over.wait(20)
    with ExitStack() as stack:
        stack.callback(over.set)
        urls = [stack.enter_context(talking(talk)) for talk in (slow, slow, good)]
        monkeypatch.setattr(remote, "_open_sessions", {url: (os.getpid(), {}) for url in urls})
        started = time.monotonic()
        remote._leave_all()
        assert time.monotonic() - started < 2
        assert told.is_set()


def test_the_end_of_a_program_reads_no_long_answer(monkeypatch):
    sent = []

    def flood(send):
        send(b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n")
        for _ in range(100):
            send(bytes(10**6))
            sent.append(10**6)

    with talking(flood) as url:
        monkeypatch.setattr(remote, "_open_sessions", {url: (os.getpid(), {})})
        remote._leave_all()
        time.sleep(0.1)
        assert sum(sent) < 20 * 10**6  # the buffers of both sockets


def test_many_chunks_are_given_up():
    chunks = b"1\r\n \r\n" * 10_000
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    client = exchange.Exchange(30.0)
    with talking(lambda send: [send(head), *(send(chunks) for _ in range(40))]) as url:
        began = time.process_time()
        with pytest.raises(exchange.ExchangeError, match=r"^the answer has 65537 bytes in more than 65536 chunks$"):
            client.post(url, b"{}", ANSWER_BYTES)
        assert time.process_time() - began < 5  # the whole answer costs six times as much
    client.close()
