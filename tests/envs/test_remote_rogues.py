"""Servers that want to harm the client of AgentR1/Remote-v0; `test_remote.py` has odd answers within an episode."""

import json
import os
import threading
import time
import tracemalloc
from contextlib import ExitStack

import gymnasium as gym
import pytest
from environment_server import Server
from hostile_server import DRIPS, answer, drip, talking

import agent_r1
from agent_r1 import ArgumentError, remote
from agent_r1.remote_answers import ANSWER_BYTES, END, FORMS, MAX_INT, problem_of, read_json
from agent_r1_tools import exchange

HEALTH = {"sessions": 0, "max_sessions": 9_999}
ABOUT = {
    "session": "name", "num_tasks": 5, "splits": {"train": "train"}, "split": "train", "dialect": "hermes",
    "schemas": [], "max_turns": 6, "max_context_tokens": 3_000, "max_action_tokens": 99, "unfinished_reward": None,
}  # fmt: skip
ENV_ID = "AgentR1/CraftWorld-v0"


def saying(*answers):
    """Give an answer to each request, the last one to all further ones."""
    left = list(answers)
    return talking(lambda send: send(answer(left.pop(0) if len(left) > 1 else left[0])))


def asked(content, status=b"200 OK", form="cut_off"):
    """Make a request of a session; its answer has this content."""
    client = exchange.Exchange(30.0)
    try:
        with talking(lambda send: send(answer(content, status=status))) as url:
            return remote._request(client, "POST", f"{url}/sessions/name/{form}", form)
    finally:
        client.close()


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


@pytest.mark.parametrize("large", [1e308, -1e308, 1_000_001, float("nan"), float("inf"), 10**400])
def test_no_reward_or_metric_can_make_a_sum_infinite(large):
    end = {"is_success": True, "answer": "", "metrics": {"score": 1e6}}
    assert problem_of(end, END) is None and problem_of({**end, "metrics": {"score": large}}, END)
    assert problem_of(ABOUT | {"unfinished_reward": -1e6}, FORMS["sessions"]) is None
    assert problem_of(ABOUT | {"unfinished_reward": large}, FORMS["sessions"])
    assert FORMS["step"]["reward"](1e6) and not FORMS["step"]["reward"](large)
    info = {"turn": 1, "task_id": "", "max_new_tokens": 1, "stop_token_ids": [], "tool_calls": []}
    for value, is_right in ((1.0, True), (large, False)):
        assert FORMS["step"]["info"](info | {"reward_terms": {"outcome/score": value}}) is is_right


@pytest.fixture(scope="module")
def server():
    server = Server([ENV_ID], max_sessions=9)
    yield server
    server.stop()


@pytest.mark.parametrize(
    "name, value",
    [
        ("num_tasks", 10**30), ("max_turns", 10**30), ("max_context_tokens", 10**30), ("max_action_tokens", 2**31),
        ("unfinished_reward", 1e308), ("split", "other"), ("splits", {}), ("dialect", "other"),
    ],
)  # fmt: skip
def test_a_server_with_wrong_limits_is_skipped(name, value, server):
    about = json.dumps(ABOUT | {name: value}).encode()
    with saying(json.dumps(HEALTH).encode(), about, b"{}") as bad:
        with pytest.warns(RuntimeWarning, match=f"a server was skipped: {bad}: the server's answer cannot be used"):
            env = gym.make("AgentR1/Remote-v0", url=[bad, server.url], env_id=ENV_ID).unwrapped
    assert env.url == server.url
    env.close()


def test_a_session_whose_answer_cannot_be_used_is_closed(server):
    with pytest.raises(ArgumentError, match="its max_action_tokens is"):
        gym.make("AgentR1/Remote-v0", url=server.url, env_id=ENV_ID, max_action_tokens=2**31)
    deadline = time.monotonic() + 5
    while server.sessions and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.sessions == 0


def test_an_environment_without_end_is_accepted():
    for name in ("num_tasks", "max_turns"):
        assert problem_of(ABOUT | {name: MAX_INT}, FORMS["sessions"]) is None


@pytest.mark.parametrize("splits", [{}, {"train": 10**30}, {"train": 0}])
def test_splits_are_those_of_the_first_good_server(splits, server):
    with saying(json.dumps({"splits": splits}).encode()) as bad:
        counts = agent_r1.task_counts("AgentR1/Remote-v0", {"url": [bad, server.url], "env_id": ENV_ID})
    assert counts == agent_r1.task_counts(ENV_ID)


def test_lone_surrogates_are_replaced():
    end = {"is_success": True, "answer": "\ud800 \U0001f600 \\ud800", "metrics": {"\udfff": 1.0}}
    found = asked(json.dumps(end).encode())
    assert found == {"is_success": True, "answer": "\ufffd \U0001f600 \\ud800", "metrics": {"\ufffd": 1.0}}
    assert read_json(json.dumps(end, ensure_ascii=False).encode(errors="surrogatepass")) is None


@pytest.mark.parametrize("status", [b"404 a", b"409 a", b"418 a", b"422 a", b"500 a", b"503 a"])
def test_an_explanation_is_short_and_printable(status):
    said = "\x1b[2J\x07\u202e" + 20_000 * "a"
    for detail in (said, {"fault": said}):
        with pytest.raises((agent_r1.ToolFault, ValueError, RuntimeError)) as raised:
            asked(json.dumps({"detail": detail}).encode(), status)
        message = str(raised.value)
        assert "\x1b" not in message and "\x07" not in message and len(message) < 2_100


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


@pytest.mark.parametrize("piece", [b"[]", b"{}"])
def test_small_bytes_do_not_become_large_objects(piece):
    content = b"[" + b",".join([piece] * (ANSWER_BYTES // 3 - 2)) + b"]"
    tracemalloc.start()
    with pytest.raises(agent_r1.ToolFault, match="commas and brackets"):
        asked(content)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 * ANSWER_BYTES


def test_the_ids_and_text_of_the_longest_state_are_read():
    tokens = list(range(262_144))
    assert read_json(json.dumps({"tokens": tokens, "text": 5 * 262_144 * ","}).encode())["tokens"] == tokens
