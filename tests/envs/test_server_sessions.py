"""The environment server when environments hang or break, and when requests come twice; docs/server.md."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import gymnasium as gym
import httpx
import pytest
from environment_server import Server

from agent_r1 import ArgumentError, Task, ToolEnv
from agent_r1.server import snapshots
from agent_r1.server.guard import Guard
from agent_r1.server.sessions import Sessions
from agent_r1_tools import http_limits

ODD = "Test/Odd-v0"
HANGS, STOPS, EXITS, INTERRUPTS = 1, 2, 3, 4
ERRORS = {STOPS: StopIteration("x"), EXITS: SystemExit(0), INTERRUPTS: KeyboardInterrupt()}


class Odd(ToolEnv):
    """Some of its tasks hang or raise, and one split has no data."""

    num_tasks = 5
    splits = {"train": "train", "test": "test"}
    made = 0
    hanging, open_gate = threading.Event(), threading.Event()
    broken_states = False

    def __init__(self, split="train", **kwargs):
        super().__init__(split=split, **kwargs)
        if split == "test":
            raise FileNotFoundError("no data: set AGENT_R1_DATA")

    def make_task(self, index):
        Odd.made += 1
        if index == HANGS:
            Odd.hanging.set()
            Odd.open_gate.wait(20)
        if index in ERRORS:
            raise ERRORS[index]
        return Task(str(index), "What?", ["1"])

    def set_state(self, state):
        if Odd.broken_states:
            raise ValueError("no such state")
        super().set_state(state)

    def judge_answer(self, answer):
        return 1.0, {}


@pytest.fixture(scope="module", autouse=True)
def registered():
    gym.register(ODD, Odd)
    yield
    del gym.registry[ODD]


@pytest.fixture
def client(request):
    Odd.hanging.clear(), Odd.open_gate.clear()
    server = Server([ODD], max_sessions=2, **getattr(request, "param", {}))
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client
    Odd.open_gate.set()
    server.stop()


def open_session(client):
    return "/sessions/" + client.post("/sessions", json={"env_id": ODD}).json()["session"]


def sessions(client):
    return client.get("/health").json()["sessions"]


def becomes(client, count):
    """Whether the server has this number of sessions within seconds."""
    deadline = time.monotonic() + 10
    while sessions(client) != count and time.monotonic() < deadline:
        time.sleep(0.02)
    return sessions(client) == count


def test_a_number_belongs_to_one_request(client):
    path = open_session(client)
    post = lambda what, **body: client.post(f"{path}/{what}", json=body)  # noqa: E731
    first = post("reset", number=1, task_index=0).json()
    second = post("step", number=2, text="Hm.").json()
    assert post("step", number=2, text="Hm.").json() == second
    made = Odd.made
    for answer in [
        post("reset", number=1, task_index=0),  # older
        post("step", number=2, text="Other."),
        post("reset", number=2, task_index=0),
        post("cut_off", number=2),
    ]:
        assert answer.status_code == 409 and "continue with 3" in answer.text
    assert Odd.made == made and client.get(path).json()["turn"] == 1
    assert post("step", number=-1, text="x").status_code == post("step", number=10**30, text="x").status_code == 422
    assert post("step", text="Hm.").status_code == 200  # a request without a number changes nothing
    assert post("step", number=2, text="Hm.").json() == second and first["task_index"] == 0


def test_a_request_that_failed_is_not_acted_on_again(client):
    path = open_session(client)
    made = Odd.made
    answers = [client.post(f"{path}/reset", json={"number": 1, "task_index": STOPS}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [500, 500] and Odd.made == made + 1
    assert answers[0].json() == answers[1].json()


def test_a_turn_that_takes_long_to_encode_is_rejected(client):
    path = open_session(client)
    client.post(f"{path}/reset", json={"task_index": 0})
    step = lambda **body: client.post(f"{path}/step", json=body)  # noqa: E731
    calls = [{"function": {"name": "search", "arguments": {}}}] * 5_000
    long = {"role": "assistant", "content": "x" * 300_000}
    for body, words in [
        ({"text": "x" * 300_000}, "characters"), ({"message": long}, "characters"),
        ({"message": {"role": "assistant", "tool_calls": [{}] * 50_000}}, "send fewer calls"),
        ({"message": {"role": "assistant", "tool_calls": calls[:600]}}, "send fewer calls"),
    ]:  # fmt: skip
        answer = step(**body)
        assert answer.status_code == 422 and words in answer.text
    assert step(message={"role": "assistant", "tool_calls": calls[:8]}).status_code == 200


@pytest.mark.parametrize("index", ERRORS)
def test_any_exception_of_an_environment_is_answered(client, index):
    path = open_session(client)
    answer = client.post(f"{path}/reset", json={"task_index": index}, timeout=5)
    assert answer.status_code == 500 and type(ERRORS[index]).__name__ in answer.json()["detail"]
    assert client.post(f"{path}/reset", json={"task_index": 0}).status_code == 200


def test_a_closed_session_counts_until_its_call_has_ended(client):
    path = open_session(client)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(client.post, f"{path}/reset", json={"task_index": HANGS})
        assert Odd.hanging.wait(5)
        waiting = pool.submit(client.post, f"{path}/reset", json={"task_index": 0})
        time.sleep(0.1)
        made = Odd.made
        assert client.delete(path).status_code == 200
        assert running.result(5).status_code == waiting.result(5).status_code == 404
    assert Odd.made == made and sessions(client) == 1
    Odd.open_gate.set()
    assert becomes(client, 0)


@pytest.mark.parametrize("client", [{"idle_seconds": 0.3}], indirect=True)
def test_a_session_that_hangs_is_closed_when_it_is_idle(client):
    path = open_session(client)
    assert client.post(f"{path}/reset", json={"task_index": HANGS}, timeout=5).status_code == 404
    assert sessions(client) == 1
    Odd.open_gate.set()
    assert becomes(client, 0)


def test_a_fork_that_fails_leaves_no_session(client, monkeypatch):
    path = open_session(client)
    client.post(f"{path}/reset", json={"task_index": 0})
    monkeypatch.setattr(Odd, "broken_states", True)
    assert client.post(f"{path}/fork").status_code == 422
    assert becomes(client, 1)
    assert client.post(f"{path}/fork", json={"number": 1}).status_code == 422  # it has no number


def test_missing_data_and_wrong_seeds_are_mistakes_of_the_client(client):
    for answer in [
        client.post("/sessions", json={"env_id": ODD, "kwargs": {"split": "test"}}),
        client.get("/splits", params={"env_id": ODD}),
    ]:
        assert answer.status_code == 422 and "no data: set AGENT_R1_DATA" in answer.text
    path = open_session(client)
    assert client.post(f"{path}/reset", json={"seed": -1}).status_code == 422
    assert sessions(client) == 1


def test_snapshots_are_bounded_and_a_session_loses_its_own(monkeypatch):
    monkeypatch.setattr(snapshots, "MAX_SNAPSHOTS", 8)
    monkeypatch.setattr(snapshots, "MAX_BYTES", 40_000)
    kept = snapshots.Snapshots(lambda session: True)
    other = kept.keep("other", "kind", "a" * 5_000)
    mine = [kept.keep("greedy", "kind", "b" * 9_000) for _ in range(6)]
    assert kept.get("kind", other) == "a" * 5_000
    assert [name for name in mine if name in kept._kept] == mine[3:] and kept._size < 40_000
    small = [kept.keep("small", "kind", i) for i in range(20)]
    assert len(kept._kept) == 8 and {other, mine[-1], small[-1]} <= kept._kept.keys()
    for name, kind, status in [(other, "other kind", 422), (mine[0], "kind", 410)]:
        with pytest.raises(http_limits.HTTPException) as error:
            kept.get(kind, name)
        assert error.value.status_code == status
    with pytest.raises(http_limits.HTTPException):
        kept.keep("greedy", "kind", "c" * 20_000)


def test_closed_sessions_push_out_no_snapshot_of_an_open_one(client, monkeypatch):
    monkeypatch.setattr(snapshots, "MAX_SNAPSHOTS", 4)

    def snapshot(path):
        return client.post(f"{path}/snapshot").json()["snapshot"]

    def restored(name):
        return client.post(f"{mine}/restore", json={"snapshot": name}).status_code

    mine = open_session(client)
    client.post(f"{mine}/reset", json={"task_index": 0})
    held, theirs = [snapshot(mine) for _ in range(2)], []
    for _ in range(6):
        path = open_session(client)
        client.post(f"{path}/reset", json={"task_index": 0})
        theirs.append(snapshot(path))
        client.delete(path)
    assert [restored(name) for name in held] == [200, 200]
    assert [restored(name) for name in theirs] == [410] * 4 + [200] * 2  # others may use them while there is room


def test_a_body_is_held_until_it_is_used(monkeypatch):
    monkeypatch.setattr(http_limits, "MAX_HELD_BYTES", 150)

    async def play():
        used = asyncio.Event()

        async def app(scope, receive, send):
            await receive()
            await used.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        transport = httpx.ASGITransport(Guard(app, None))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            first = asyncio.create_task(client.post("/", content=b"x" * 100))
            await asyncio.sleep(0.05)
            second = asyncio.create_task(client.post("/", content=b"x" * 100))
            await asyncio.sleep(0.05)
            used.set()
            return (await first).status_code, (await second).status_code, (await client.post("/")).status_code

    assert asyncio.run(play()) == (200, 429, 200)


def test_the_tokenizer_is_agreed_with_the_client():
    with pytest.raises(ArgumentError, match="--env-kwargs must not contain tokenizer: a client chooses one"):
        Sessions([ODD], {"tokenizer": "byte"}, [], 1, 1.0)
