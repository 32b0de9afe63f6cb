"""AgentR1/Remote-v0 equals the environment on its server; docs/server.md."""

import gc
import gzip
import json
import signal
import subprocess
import sys
import threading
import time
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import gymnasium as gym
import httpx
import numpy as np
import pytest
import scripted_episodes as scripted
from environment_server import Server, free_port
from gymnasium.utils.env_checker import check_env

import agent_r1
from agent_r1 import ArgumentError, ToolFault
from agent_r1.remote import RemoteEnv
from agent_r1.tasks.shop_world import ShopWorldEnv

WORLDS = ["AgentR1/CraftWorld-v0", "AgentR1/MultihopWorld-v0", "AgentR1/ArithmeticWorld-v0", "AgentR1/ShopWorld-v0"]


@pytest.fixture(scope="module")
def server():
    server = Server(WORLDS, max_sessions=12)
    yield server
    server.stop()


@pytest.fixture
def remote(server):
    made = []

    def make(env_id, **kwargs):
        made.append(gym.make("AgentR1/Remote-v0", url=server.url, env_id=env_id, **kwargs).unwrapped)
        return made[-1]

    yield make
    for env in made:
        env.close()


def random_span(env, rng):
    """A turn: of the expert, a wrong call, a text, an answer, random tokens, one without end, or one without room."""
    kind = rng.integers(8)
    expert = env.demonstration()
    turn = expert[min(env.episode.turn, len(expert) - 1)]
    if kind < 3:
        return env.encode_reply({"content": turn})
    if kind == 3:
        return env.encode_reply({"content": '<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call>'})
    if kind == 4:
        return env.encode_reply({"content": "<answer>5</answer>" if rng.random() < 0.3 else "Hm."})
    if kind == 5:
        return rng.integers(0, env.action_space.vocab_size, rng.integers(0, 40)).astype(np.int32)
    if kind == 6:
        return env.encode_reply({"content": turn})[:-1]
    return np.full(env.room + rng.integers(0, 3), 65, np.int32) if rng.random() < 0.2 else np.zeros(0, np.int32)


def plays_the_same(local, remote, episodes, seed):
    """Play random episodes in both; return the number of those that were continued from a snapshot."""
    rng, restored = np.random.default_rng(seed), 0
    for number in range(episodes):
        options = {"max_turns": int(rng.integers(1, 6))} if rng.random() < 0.5 else {}
        options |= {"task_index": int(rng.integers(50))} if rng.random() < 0.5 else {}
        begin = int(rng.integers(1000)) if number == 0 or rng.random() < 0.5 else None
        (state, info), (other, about) = (env.reset(seed=begin, options=options) for env in (local, remote))
        assert state.tolist() == other.tolist() and info == about
        assert local.schemas == remote.schemas and local.task.question == remote.task.question
        done = False
        while not done:
            span = random_span(local, rng)
            if rng.random() < 0.2:
                kept = local.get_state(), remote.get_state()
                local.step(span), remote.step(span)
                local.set_state(kept[0]), remote.set_state(kept[1])
                restored += 1
            mine, theirs = local.step(span), remote.step(span)
            assert mine[0].tolist() == theirs[0].tolist() and mine[1:] == theirs[1:]
            assert local.messages == remote.messages and agent_r1.new_messages(local) == agent_r1.new_messages(remote)
            assert local.episode.turns == remote.episode.turns and local.room == remote.room
            done = mine[2] or mine[3]
    return restored


@pytest.mark.parametrize("env_id", WORLDS[:2])
def test_a_remote_environment_equals_the_local_one(env_id, remote):
    kwargs = {"max_context_tokens": 3000}
    assert plays_the_same(gym.make(env_id, **kwargs).unwrapped, remote(env_id, **kwargs), 8, 0) > 0


@pytest.mark.slow
@pytest.mark.parametrize("env_id", WORLDS)
def test_500_random_episodes_are_equal(env_id, remote):
    for seed, kwargs in enumerate([{}, {"max_context_tokens": 2500, "process_reward": False}, {"split": "test"}]):
        plays_the_same(gym.make(env_id, **kwargs).unwrapped, remote(env_id, **kwargs), 42, seed)


def test_the_tokenizer_of_a_policy_is_found_by_its_content(remote):
    policy = agent_r1.tiny_policy(WORLDS[1])
    local = gym.make(WORLDS[1], tokenizer=policy, max_context_tokens=700).unwrapped
    env = remote(WORLDS[1], tokenizer=policy, max_context_tokens=700)
    for kind in scripted.KINDS:
        local.reset(options={"task_index": 1}), env.reset(options={"task_index": 1})
        for turn in scripted.write(local, kind):
            span = np.array(local.tokenizer.encode(turn, add_special_tokens=False), np.int32)
            mine, theirs = local.step(span), env.step(span)
            assert mine[0].tolist() == theirs[0].tolist() and mine[1:] == theirs[1:]
            if mine[2] or mine[3]:
                break


def test_gymnasium_accepts_it(remote):
    check_env(remote(WORLDS[0]), skip_render_check=True)


def test_a_vector_environment_spreads_over_servers_and_equals_the_local_one(server):
    other = Server(WORLDS, max_sessions=12)
    urls = [server.url, other.url]
    envs = gym.make_vec("AgentR1/Remote-v0", num_envs=6, url=urls, env_id=WORLDS[0])
    local = gym.make_vec(WORLDS[0], num_envs=6)
    assert sorted(env.url for env in envs.envs) == sorted(3 * urls)
    states, others = envs.reset(seed=3)[0], local.reset(seed=3)[0]
    for _ in range(3):
        assert all(np.array_equal(a, b) for a, b in zip(states, others, strict=True))
        spans = [env.encode_reply({"content": env.demonstration()[0]}) for env in local.envs]
        states, *rest = envs.step(spans)
        others, *mine = local.step(spans)
        assert all(np.array_equal(a, b) for a, b in zip(rest[:3], mine[:3], strict=True))
        if mine[1].any() or mine[2].any():
            break
    envs.close(), local.close()
    assert other.sessions == 0
    other.stop()


def test_a_snapshot_is_continued_at_the_server_that_keeps_it(server):
    other = Server(WORLDS[:1], max_sessions=12)
    kwargs = {"url": [server.url, other.url], "env_id": WORLDS[0]}
    envs = gym.make_vec("AgentR1/Remote-v0", num_envs=2, **kwargs)
    envs.reset(seed=0)
    one, two = envs.envs
    assert one.url != two.url
    envs.fork(0, 1)
    assert two.url == one.url and waits_for(other, 2 if one.url == other.url else 0)
    turn = [one.encode_reply({"content": "Hm."})] * 2
    states = envs.step(turn)[0]
    assert np.array_equal(states[0], states[1]) and two.episode.messages == one.episode.messages
    state = one.get_state()
    with pytest.raises(ValueError, match="the snapshot is kept by http://elsewhere, this environment has http://127"):
        two.set_state(state | {"url": "http://elsewhere"})
    with pytest.raises(ToolFault, match="there is no such snapshot: the server keeps the last"):
        two.set_state(state | {"snapshot": "dropped"})
    two._shown = []
    two.set_state(state)
    assert two.schemas == one.schemas != []
    envs.close(), other.stop()


def test_a_snapshot_that_is_too_large_does_not_cost_the_episode(remote, monkeypatch):
    env = remote(WORLDS[0])
    env.reset(seed=0)
    monkeypatch.setattr("agent_r1.server.snapshots.MAX_BYTES", 8)
    begun = time.monotonic()
    with pytest.raises(ToolFault, match="and the server keeps 2"):
        env.get_state()
    assert time.monotonic() - begun < 10 and "fault" not in env.step_message({"content": "Hm."})[4]


def test_a_full_server_names_its_bound():
    small = Server(WORLDS[:1], max_sessions=1)
    one = gym.make("AgentR1/Remote-v0", url=small.url, env_id=WORLDS[0])
    with pytest.raises(ArgumentError, match="all 1 sessions are in use; start one with .* --max-sessions N"):
        gym.make("AgentR1/Remote-v0", url=small.url, env_id=WORLDS[0])
    one.close(), small.stop()


@pytest.mark.parametrize("token", ["geheimß", "two\nlines"])
def test_a_token_that_cannot_be_sent_is_not_quoted(server, token):
    with pytest.raises(ArgumentError, match="must consist of printable ASCII") as caught:
        gym.make("AgentR1/Remote-v0", url=server.url, env_id=WORLDS[0], token=token)
    assert token not in str(caught.value)
    gym.make("AgentR1/Remote-v0", url=server.url, env_id=WORLDS[0], token="of a file\n").close()


def test_a_server_that_is_gone_is_a_fault_and_the_next_episode_is_elsewhere(server):
    dying = Server(WORLDS[:1], max_sessions=1000)  # the freest
    env = gym.make("AgentR1/Remote-v0", url=f"{dying.url},{server.url}", env_id=WORLDS[0], fault_deadline=0.3).unwrapped
    assert env.url == dying.url
    env.reset(seed=0)
    env.step_message({"content": "Hm."})
    dying.stop()
    _, reward, terminated, truncated, info = env.step_message({"content": "<answer>1</answer>"})
    assert reward == 0 and truncated and not terminated and not info["is_success"]
    assert info["truncation_reason"] == "fault" and dying.url in info["fault"]
    with pytest.warns(RuntimeWarning, match=f"a server was skipped: {dying.url}: ConnectError"):
        state, info = env.reset(seed=0)
    assert "fault" not in info and env.url == server.url
    assert state.tolist() == gym.make(WORLDS[0]).unwrapped.reset(seed=0)[0].tolist()
    env.close()


def test_a_vector_environment_goes_on_without_a_dead_server(server):
    dying = Server(WORLDS[:1], max_sessions=12)
    kwargs = {"url": [server.url, dying.url], "env_id": WORLDS[0], "fault_deadline": 0.3}
    envs = gym.make_vec("AgentR1/Remote-v0", num_envs=4, **kwargs)
    envs.reset(seed=0)
    lost = np.array([env.url == dying.url for env in envs.envs])
    assert lost.sum() == 2
    dying.stop()
    turn = [env.encode_reply({"content": "Hm."}) for env in envs.envs]
    _, rewards, _, truncations, infos = envs.step(turn)
    assert (truncations == lost).all() and (rewards[lost] == 0).all() and (infos["_fault"] == lost).all()
    with pytest.warns(RuntimeWarning, match=f"a server was skipped: {dying.url}"):
        _, infos = envs.reset(options={"reset_mask": lost})
    assert "fault" not in infos and all(env.url == server.url for env in envs.envs)
    envs.close()


def test_a_session_that_was_closed_is_a_fault_of_one_episode(remote, server):
    env, other = remote(WORLDS[0]), remote(WORLDS[0])
    env.reset(seed=0), other.reset(seed=0)
    httpx.delete(f"{server.url}/sessions/{env._session}")
    assert "no such session" in env.step_message({"content": "Hm."})[4]["fault"]
    assert "fault" not in other.step_message({"content": "Hm."})[4]
    assert "fault" not in env.reset(seed=0)[1]


def test_wrong_arguments_name_the_remedy(server, remote):
    make = lambda **kwargs: gym.make("AgentR1/Remote-v0", **kwargs)  # noqa: E731
    for kwargs, said in [
        ({"url": "127.0.0.1:80"}, "http://HOST:PORT"),
        ({"url": f"http://127.0.0.1:{free_port()}"}, "no environment server has a session"),
        ({"url": server.url, "env_id": "AgentR1/Nothing-v0"}, "it has AgentR1/CraftWorld-v0"),
        ({"url": server.url, "env_id": WORLDS[0], "data_dir": "/etc"}, "only whoever starts the server sets data_dir"),
        ({"url": server.url, "env_id": WORLDS[0], "split": "nothing"}, "split"),
        ({"url": server.url, "env_id": WORLDS[0], "max_context_tokens": 10**9}, "at most 262144"),
    ]:
        with pytest.raises((ArgumentError, ValueError), match=said):
            make(**kwargs)
    env = remote(WORLDS[0])
    env.reset(seed=0)
    with pytest.raises(RuntimeError, match="tools, which run elsewhere"):
        agent_r1.call_tool(env, "craft", {})
    with pytest.raises(ValueError, match=r"task_index must be in \[0"):
        env.reset(options={"task_index": -1})
    assert agent_r1.task_counts("AgentR1/Remote-v0", {"url": server.url, "env_id": WORLDS[0]})


class Rogue:
    """A server between a client and the real one. `spoil(method, path, answer, send)` may `send` other bytes."""

    def __init__(self, real):
        rogue, self.spoil, self.seen, self.client = self, lambda *_: False, [], httpx.Client(base_url=real.url)

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                rogue.seen.append((self.command, self.path))
                answer = rogue.client.request(self.command, self.path, content=body)
                try:
                    if not rogue.spoil(self.command, self.path, answer, self.wfile.write):
                        self.wfile.write(whole(answer.content, answer.status_code))
                    else:
                        self.close_connection = True
                except OSError:
                    self.close_connection = True

            do_GET = do_POST = do_DELETE = handle_one

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self):
        self.server.shutdown(), self.server.server_close(), self.client.close()


@pytest.fixture
def rogue(server):
    rogue = Rogue(server)
    yield rogue
    rogue.stop()


def whole(body, status=200, headers=""):
    return f"HTTP/1.1 {status} -\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


def always(*parts, pause=0.0):
    def talk(answer, send):
        for part in parts:
            send(part)
            time.sleep(pause)

    return talk


def changed(**entries):
    """Change entries of an answer; "info" changes some in it."""

    def talk(answer, send):
        found = answer.json()
        info = found["info"] | entries.pop("info", {})
        send(whole(json.dumps(found | {"info": info} | entries).encode()))

    return talk


def flood(answer, send):
    send(b"HTTP/1.1 200 -\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        send(b"100000\r\n" + b" " * 2**20 + b"\r\n")


ODD = {
    "409 without detail": always(whole(b"{}", 409)),
    "409 with a list": always(whole(b'{"detail": [1]}', 409)),
    "422 of HTML": always(whole(b"<html>", 422)),
    "a redirection": always(whole(b"", 302, "Location: /elsewhere\r\n")),
    "HTML": always(whole(b"<html>hello</html>")),
    "half of JSON": always(whole(b'{"new": [1')),
    "a list": always(whole(b"[]")),
    "nested JSON": always(whole(b"[" * 100_000)),
    "no info": always(whole(b'{"new": [], "reward": 1}')),
    "a bomb": always(whole(gzip.compress(bytes(10**6)), headers="Content-Encoding: gzip\r\n")),
    "a flood": flood,
    "a drip": always(b"HTTP/1.1 200 -\r\nContent-Length: 999\r\n\r\n", *100 * [b" "], pause=0.1),
    "NaN": changed(reward=float("nan")),
    "infinity": changed(reward=float("inf")),
    "a reward of text": changed(reward="1"),
    "a large reward": changed(reward=10**400),
    "NaN in terms": changed(info={"reward_terms": {"outcome/score": float("nan")}}),
    "an unknown token": changed(new=[10**6]),
    "a negative token": changed(new=[-1]),
    "a token of text": changed(new=["a"]),
    "too many tokens": changed(new=40_000 * [65]),
    "no tool calls": changed(info={"tool_calls": 1}),
    "another turn": changed(info={"turn": 5}),
    "no outcome": changed(info={"is_success": None}, terminated=True),
    "messages without role": changed(messages=[{"content": "a"}]),
}


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_answer_is_a_fault(kind, rogue):
    """Its episode ends, nothing is paid, and the next one begins."""
    kwargs = {"url": rogue.url, "env_id": WORLDS[0], "fault_deadline": 0}
    env = gym.make("AgentR1/Remote-v0", **kwargs, timeout=1.0 if kind == "a drip" else 30.0).unwrapped
    env.reset(seed=0)
    rogue.spoil = lambda method, path, answer, send: path.endswith("/step") and (ODD[kind](answer, send) or True)
    started = time.monotonic()
    _, reward, terminated, truncated, info = env.step_message({"content": "Hm."})
    assert time.monotonic() - started < 5
    assert (reward, terminated, truncated, info["truncation_reason"]) == (0, False, True, "fault"), info
    rogue.spoil = lambda *_: False
    assert "fault" not in env.reset(seed=0)[1]
    assert "fault" not in env.step_message({"content": "Hm."})[4]
    env.close()


@pytest.mark.parametrize("status, kind", [(409, RuntimeError), (500, RuntimeError), (422, ValueError)])
def test_an_error_of_the_environment_there_is_raised_here(status, kind, rogue):
    env = gym.make("AgentR1/Remote-v0", url=rogue.url, env_id=WORLDS[0]).unwrapped
    env.reset(seed=0)
    body = whole(b'{"detail": "a bug of the judge"}', status)
    rogue.spoil = lambda method, path, answer, send: path.endswith("/step") and (send(body) or True)
    with pytest.raises(kind, match="^a bug of the judge$"):
        env.step_message({"content": "Hm."})
    env.close()


def test_odd_answers_of_a_reset_are_a_fault_and_another_server_comes_next(rogue, server):
    odd = {"/reset": whole(b'{"tokens": [1]}'), "/health": whole(b'{"sessions": 0, "max_sessions": 999}')}  # the freest

    def spoil(method, path, answer, send):
        end = path[path.rindex("/") :]
        return end in odd and (send(odd[end]) or True)

    rogue.spoil = spoil
    env = gym.make("AgentR1/Remote-v0", url=rogue.url, env_id=WORLDS[0], fault_deadline=0).unwrapped
    with pytest.raises(ToolFault, match="it has no info"):
        env.reset(seed=0)
    env.close()
    env = gym.make("AgentR1/Remote-v0", url=[rogue.url, server.url], env_id=WORLDS[0], fault_deadline=0).unwrapped
    assert env.url == rogue.url
    assert "fault" not in env.reset(seed=0)[1] and env.url == server.url
    env.close()


def waits_for(server, sessions):
    deadline = time.monotonic() + 5
    while server.sessions != sessions and time.monotonic() < deadline:
        time.sleep(0.02)
    return server.sessions == sessions


def test_a_connection_that_is_lost_at_reset_does_not_cost_the_session(rogue, server):
    begun = server.sessions
    env = gym.make("AgentR1/Remote-v0", url=rogue.url, env_id=WORLDS[0]).unwrapped
    first, lost = env._session, []

    def lose(method, path, answer, send):
        if path.endswith("/reset") and first in path and len(lost) < rogue.often:
            return lost.append(answer.json()) or True
        return False

    rogue.spoil, rogue.often = lose, 1
    state = env.reset(seed=0)[0]
    assert env._session == first and len(lost) == 1 and state.tolist() == lost[0]["tokens"]
    rogue.often = 10  # now the session cannot be reached
    assert env.reset(seed=0)[0].tolist() == state.tolist()
    assert env._session != first and len(lost) == 3
    assert ("DELETE", f"/sessions/{first}") in rogue.seen and waits_for(server, begun + 1)
    env.close()


def test_no_session_is_left_behind(server):
    """Not by an environment that is dropped, by half a vector environment, or at the end of a program."""
    other = Server(WORLDS[:1], max_sessions=2)
    kwargs = {"url": other.url, "env_id": WORLDS[0]}
    env = gym.make("AgentR1/Remote-v0", **kwargs).unwrapped
    env.reset(seed=0)
    assert other.sessions == 1
    del env
    gc.collect()
    assert waits_for(other, 0)
    with pytest.raises(ArgumentError, match="all 2 sessions are in use") as kept:
        gym.make_vec("AgentR1/Remote-v0", num_envs=3, **kwargs)
    assert waits_for(other, 0), kept
    url = other.url.replace("127.0.0.1", "localhost")
    code = f"""
import gymnasium as gym, agent_r1
dropped, env = [gym.make("AgentR1/Remote-v0", url="{url}", env_id="{WORLDS[0]}") for _ in range(2)]
print(env.reset(seed=0)[1]["turn"])
del dropped
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("0\n", "") and other.sessions == 0
    other.stop()


def test_what_cannot_be_played_here_names_the_way(remote):
    env = remote(WORLDS[0])
    env.reset(seed=0)
    with pytest.raises(RuntimeError, match=r"play with step\(\) or step_message\(\)"):
        agent_r1.score_messages(env, [{"role": "assistant", "content": "<answer>1</answer>"}])
    assert env.episode.turns == []


def test_splits_are_those_of_the_server(server):
    for env_id in WORLDS:
        kwargs = {"url": server.url, "env_id": env_id}
        assert agent_r1.task_counts("AgentR1/Remote-v0", kwargs) == agent_r1.task_counts(env_id)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for split in ("train", "test", "nothing"):
            assert RemoteEnv.has_split(split, **kwargs) == ShopWorldEnv.has_split(split)
        gc.collect()
    assert not [w for w in caught if issubclass(w.category, ResourceWarning)]  # of a client that nobody closed
    with pytest.raises(ArgumentError, match="python -m agent_r1.serve AgentR1/ShopWorld-v0"):
        RemoteEnv.has_split("test", **kwargs | {"url": f"http://127.0.0.1:{free_port()}"})


def test_a_bad_server_of_several_is_skipped(server, rogue):
    html = always(whole(b"<html>"))
    rogue.spoil = lambda method, path, answer, send: html(answer, send) or True
    foreign = Server(WORLDS[1:2], max_sessions=99)
    kwargs = {"env_id": WORLDS[0]}
    for bad in (rogue.url, foreign.url, f"http://127.0.0.1:{free_port()}"):
        with pytest.warns(RuntimeWarning, match=f"a server was skipped: {bad}: "):
            env = gym.make("AgentR1/Remote-v0", url=[bad, server.url], **kwargs).unwrapped
        assert env.url == server.url
        env.close()
        with pytest.raises(ArgumentError, match=f"{bad}: .* python -m agent_r1.serve {WORLDS[0]}"):
            gym.make("AgentR1/Remote-v0", url=bad, **kwargs)
    foreign.stop()


@pytest.mark.slow
def test_a_client_that_dies_costs_one_session(server):
    """Sessions of a killed process are closed when they have been idle; others go on."""
    other = Server(WORLDS[:1], max_sessions=3, idle_seconds=2.0)
    code = f"""
import gymnasium as gym, agent_r1, time
env = gym.make("AgentR1/Remote-v0", url="{other.url}", env_id="{WORLDS[0]}")
env.reset(seed=0)
print("ready", flush=True)
time.sleep(100)
"""
    client = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert client.stdout.readline() == "ready\n"
    env = gym.make("AgentR1/Remote-v0", url=other.url, env_id=WORLDS[0]).unwrapped
    env.reset(seed=0)
    assert other.sessions == 2
    client.send_signal(signal.SIGKILL)
    client.wait()
    deadline = time.monotonic() + 15
    while other.sessions > 1 and time.monotonic() < deadline:
        assert not env.reset(seed=0)[1].get("fault")
        time.sleep(0.3)
    assert other.sessions == 1
    env.close(), other.stop()
