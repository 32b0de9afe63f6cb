"""agent_r1.adapters.openenv against the OpenEnv package: the same episodes through its server, protocol and client."""

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import scripted_episodes as scripted

pytest.importorskip("openenv")

import uvicorn
from fastapi.testclient import TestClient
from openenv.core import GenericEnvClient
from openenv.validation import run_validation
from openenv.validation.providers import ProviderCapability

from agent_r1 import ArgumentError, Task, Tool, ToolEnv, new_messages
from agent_r1.adapters import openenv as adapter
from agent_r1.adapters.openenv import OpenEnvAction, OpenEnvClient, openenv_app
from agent_r1.adapters.openenv.folder import main, write_folder
from agent_r1.text.chat import encode_turn

CRAFT = "AgentR1/CraftWorld-v0"


class Gate(ToolEnv):
    """A tool that waits until the test opens the gate."""

    opened = threading.Event()

    def __init__(self, **kwargs) -> None:
        super().__init__([Tool.from_function(self.wait, timeout=60)], **kwargs)

    def wait(self) -> str:
        """Wait."""
        return str(Gate.opened.wait(30))

    def make_task(self, index: int) -> Task:
        return Task(f"gate-{index}", "Wait.", [""])

    def judge_answer(self, answer: str) -> tuple[float, dict[str, float]]:
        return 0.0, {}


gym.register("Gate-v0", entry_point=Gate)


def serve(env_id, kwargs=None, **options):
    return run(openenv_app(env_id, kwargs, **options))


@contextlib.contextmanager
def run(app):
    """A server on a free port of this machine; its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


def until(condition):
    """Wait for what a server does a moment after its answer."""
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# ---------------------------------------------------------------------------------------------- the same as the ToolEnv


def actions(env, kind, form):
    """The turns of one kind of episode as a client sends them, each with the span that it stands for."""
    for text in scripted.write(env, kind):
        if form == "tokens":
            span = env.tokenizer.encode(text, add_special_tokens=False)
            yield OpenEnvAction(tokens=span), span
        elif form == "text":
            yield OpenEnvAction(message=text), encode_turn(env, text, env.room)
        else:
            parsed = env.dialect.parse(env.tokenizer.encode(text, add_special_tokens=False), env.schemas)
            calls = [{"function": {"name": c.name, "arguments": json.dumps(c.arguments)}} for c in parsed.calls]
            reply = {"role": "assistant", "content": parsed.content, "tool_calls": calls}
            yield OpenEnvAction(message=reply), env.encode_reply(reply)


@pytest.mark.parametrize("env_id", [CRAFT, "AgentR1/MultihopWorld-v0"])
def test_fifty_episodes_are_those_of_the_environment(env_id):
    kwargs = {"max_context_tokens": 1500, "max_turns": 8} if env_id == CRAFT else scripted.world(env_id)
    env = scripted.make(env_id, **kwargs)
    kinds = [kind for kind in scripted.KINDS if env_id != CRAFT or kind != "sloppy"]
    ends = set()
    with serve(env_id, kwargs) as url, OpenEnvClient(url) as client:
        for index in range(50):
            state, info = env.reset(options={"task_index": index})
            seen = client.reset(split="train", index=index).observation
            assert (seen.messages, seen.tools, seen.tokens) == (env.messages, env.schemas, state.tolist())
            tokens, total = list(seen.tokens), 0.0
            for action, span in actions(env, kinds[index % len(kinds)], ("tokens", "text", "chat")[index % 3]):
                assert (seen.max_new_tokens, seen.stop_token_ids) == (info["max_new_tokens"], info["stop_token_ids"])
                state, reward, terminated, truncated, info = env.step(np.array(span, np.int32))
                result = client.step(action)
                seen = result.observation
                assert (result.reward, result.done) == (reward, terminated or truncated)
                assert seen.messages == new_messages(env) and not seen.tools
                begin, end = env.episode.turns[-1]
                assert (len(tokens), seen.num_action_tokens) == (begin, end - begin)
                tokens, total = tokens + seen.tokens, total + result.reward
                assert tokens == state.tolist()
                expected = {k: v for k, v in info.items() if k not in ("max_new_tokens", "stop_token_ids")}
                assert result.metadata == json.loads(json.dumps(expected | {"truncated": truncated}))
                if result.done:
                    break
            assert result.done and total == sum(sum(terms.values()) for terms in env.episode.rewards)
            ends.add(info.get("truncation_reason"))
    assert ends == {None, "turns", "context"}


def test_seeds_draw_the_task_of_the_environment():
    env = scripted.make(CRAFT, split="test")
    with serve(CRAFT, {"split": "test"}) as url, OpenEnvClient(url) as client:
        for seed in range(3):
            _, info = env.reset(seed=seed)
            assert client.reset(seed=seed).metadata["task_id"] == info["task_id"]
        assert client.reset(seed=0, split="train").metadata["task_id"].startswith("train")


@pytest.mark.parametrize("chosen", [{"seed": 3}, {"index": 3}, {"split": "test"}])
def test_a_state_continues_in_another_session(chosen):
    """Its actions are played again; `reset(injected_state=...)` gives the conversation, and the episode goes on."""
    env = scripted.make(CRAFT, split=chosen.get("split", "train"))
    with serve(CRAFT) as url, OpenEnvClient(url) as first, OpenEnvClient(url) as second:
        begun = first.reset(**chosen, episode_id="mine")
        env.reset(options={"task_index": int(begun.metadata["task_id"].rpartition("-")[2])})
        turns, tokens = env.demonstration(), begun.observation.tokens
        for turn in turns[:2]:
            tokens = tokens + first.step(OpenEnvAction(message=turn)).observation.tokens
        state = first.state()
        assert (state.episode_id, state.step_count) == ("mine", 2)
        copied = second.reset(injected_state=state.injected_state)
        assert copied.observation.tokens == tokens and copied.reward is not None
        assert second.state().injected_state == state.injected_state
        assert second.state().step_count == 0  # `openenv validate` counts from the reset
        for turn in turns[2:]:
            one, other = (client.step(OpenEnvAction(message=turn)) for client in (first, second))
            assert one == other
        assert one.done and one.metadata["is_success"]
        with pytest.raises(RuntimeError, match="after the end of the episode"):
            first.step(OpenEnvAction(message="more"))


def test_any_text_of_a_policy_is_answered():
    """Also one that JSON in UTF-8 cannot hold, or that is longer than the room."""
    with serve(CRAFT, {"max_context_tokens": 1500}) as url, OpenEnvClient(url) as client:
        for text in ["\ud800", '<tool_call>{"name": "get", "arguments": {"item": "\\ud800"}}</tool_call>', "a" * 10**6]:
            client.reset(index=0)
            result = client.step(OpenEnvAction(message=text))
            state = client.state().injected_state
            assert client.reset(injected_state=state).reward == result.reward
            client.reset(index=0)
            long = client.step(OpenEnvAction(tokens=[97] * 10**4))
            assert long.metadata["truncation_reason"] == "context"
            assert client.reset(injected_state=client.state().injected_state).metadata == long.metadata


# ------------------------------------------------------------------------------------------------------------- refusals


def test_a_refused_message_changes_nothing():
    with serve("Desk-v0") as url, GenericEnvClient(url) as client:  # it sends what it is given
        with pytest.raises(RuntimeError, match="reset first"):
            client.step({"message": "hi"})
        for arguments, problem in [
            ({"idx": 1}, "not 'idx'"), ({"split": "night"}, "no split 'night'"), ({"index": 5}, r"in \[0, 5\)"),
            ({"index": -1}, "Invalid message"), ({"injected_state": {"pickle": "gASV"}}, "Invalid message"),
            ({"injected_state": {"actions": [{}]}}, "either `message` or `tokens`"),
        ]:  # fmt: skip
            with pytest.raises(RuntimeError, match=problem):
                client.reset(**arguments)
        client.reset(index=0)
        for action, problem in [
            ({"message": {"tool_calls": 2_000 * [{}]}}, "the server reads 1024"),
            ({}, "either"), ({"message": "a", "tokens": [1]}, "either"), ({"tokens": [10**30]}, "token ids"),
            ({"tokens": [-1]}, "outside the vocabulary"), ({"tokens": [1.5]}, "Invalid message"),
            ({"message": {"role": "assistant"}}, "a reply must be a message"), ({"text": "a"}, "Invalid message"),
        ]:  # fmt: skip
            with pytest.raises(RuntimeError, match=problem):
                client.step(action)
        assert client.state()["step_count"] == 0
        for turn in scripted.Desk().demonstration():
            result = client.step({"message": turn})
        assert result.reward == 1


def test_a_fault_is_an_error_and_no_reward():
    with serve("Desk-v0") as url, OpenEnvClient(url) as client:
        call, answer = scripted.Desk().demonstration()
        client.reset(index=0)
        scripted.Desk.faults = 1
        with pytest.raises(RuntimeError, match="infrastructure error: tool query: ConnectionError: no line"):
            client.step(OpenEnvAction(message=call))
        with pytest.raises(RuntimeError, match="after the end of the episode"):
            client.step(OpenEnvAction(message=answer))
        scripted.Desk.broken_start = True
        with pytest.raises(RuntimeError, match="could not begin"):
            client.reset(index=0)
        scripted.Desk.broken_start = False
        client.reset(index=0)
        assert client.step(OpenEnvAction(message=call)).metadata["tool_calls"][0]["ok"]


def test_the_task_api_lists_no_two_billion_tasks():
    with TestClient(openenv_app("Gate-v0")) as http:

        def ask(route, **body):
            answer = http.post(f"/Gate-v0/{route}", json=body)
            return answer.status_code, answer.json()

        assert http.get("/Gate-v0/splits").json() == [{"name": "train", "type": "train"}]
        assert ask("num_tasks", split="train") == (200, {"num_tasks": 2**31 - 1})
        assert ask("task", split="train", index=7) == (200, {"task": {"split": "train", "index": 7}})
        status, answer = ask("tasks", split="train")
        assert status == 400 and "at most 10000 of them with task_range" in answer["detail"]
        assert ask("task_range", split="train", start=2**31 - 11_000)[0] == 400
        assert len(ask("task_range", split="train", start=2**31 - 9_000)[1]["tasks"]) == 8_999
        assert ask("task", split="train", index=-1)[0] == 400 and ask("num_tasks", split="night")[0] == 404
    with TestClient(openenv_app("Desk-v0")) as http:
        tasks = http.post("/Desk-v0/tasks", json={"split": "train"}).json()["tasks"]
        assert tasks == [{"split": "train", "index": index} for index in range(5)]


# ------------------------------------------------------------------------------------------------------------- sessions


def test_sessions_wait_for_their_own_tools_only():
    Gate.opened.clear()
    call = OpenEnvAction(message=Gate().dialect.tool_call("wait", {}))
    with serve("Gate-v0") as url, ThreadPoolExecutor(1) as pool:
        with OpenEnvClient(url) as slow, OpenEnvClient(url) as fast:
            slow.reset(index=0)
            waiting = pool.submit(slow.step, call)
            fast.reset(index=0)
            assert fast.step(OpenEnvAction(message="Hm.")).done is False and not waiting.done()
            Gate.opened.set()
            assert waiting.result().observation.messages[0]["content"] == "True"


def test_sixteen_sessions_at_once():
    async def play(url, index):
        async with OpenEnvClient(url) as client:
            await client.reset(index=index % 5)
            results = [await client.step(OpenEnvAction(message=turn)) for turn in scripted.Desk().demonstration()]
            return results[-1].reward

    async def play_all(url):
        return await asyncio.gather(*(play(url, index) for index in range(16)))

    scripted.Desk.open = 0
    with serve("Desk-v0") as url:
        assert asyncio.run(play_all(url)) == [1] * 16
        until(lambda: scripted.Desk.open == 0)


def test_a_session_ends_with_its_socket():
    scripted.Desk.open = 0
    with serve("Desk-v0", max_sessions=1) as url:
        with OpenEnvClient(url) as client:
            client.reset(index=0)
            assert scripted.Desk.open == 1
            with pytest.raises(RuntimeError, match="CAPACITY_REACHED"), OpenEnvClient(url) as second:
                second.reset()
        until(lambda: scripted.Desk.open == 0)
        with contextlib.suppress(RuntimeError), GenericEnvClient(url).sync() as dying:
            dying.reset(index=0)
            dying._async._ws.transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)  # no goodbye
        until(lambda: scripted.Desk.open == 0)


def test_a_closed_session_says_so():
    """OpenEnv closes silent sessions; their sockets may still be open."""
    env = adapter.OpenEnvEnvironment("Desk-v0", {}, {"train": 5})
    env.reset(index=0)
    env.close()
    env.close()
    with pytest.raises(RuntimeError, match="connect again"):
        env.reset(index=0)


# ----------------------------------------------------------------------------------------------------- openenv validate


class LocalProvider:
    """Runs a folder's server in a process of this machine. OpenEnv's own provider needs Docker."""

    name = "local"
    capabilities = frozenset({ProviderCapability.IMAGE_BUILD})
    supported_network_modes = frozenset({"public"})

    def build(self, root, execution):
        self.root = root
        assert (root / execution.dockerfile).is_file()
        return "sha256:" + "0" * 64

    def start(self, spec):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.base_url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "uvicorn", "server.app:app", "--port", str(port), "--log-level", "error"]
        self.process = subprocess.Popen(command, cwd=self.root)
        while True:
            assert self.process.poll() is None
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.base_url}/health"):
                return self
            time.sleep(0.05)

    def inspect(self):
        return {}

    def stop(self):
        self.process.terminate()
        self.process.wait()


def openenv(*words):
    command = [str(Path(sys.executable).with_name("openenv")), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True)


def test_openenv_validates_the_folder_and_its_oracle(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # a changed folder is an error
    folder = tmp_path / "craft"
    command = [sys.executable, "-m", "agent_r1.adapters.openenv", CRAFT, "--out", str(folder)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.count("\n") == 6
    static = openenv("validate", folder, "--level", "static")
    assert static.returncode == 0 and "Verdict: PASS" in static.stdout, static.stdout

    report = run_validation(folder, provider=LocalProvider(), artifacts_dir=tmp_path / "artifacts")
    results = {result.check_id: result for result in report.results}
    passed = {name for name, result in results.items() if result.status.value == "pass"}
    assert passed == {
        "static.manifest", "runtime.startup", "runtime.reward_well_formed", "runtime.observation_schema",
        "runtime.state_contract",
    }  # fmt: skip
    # OpenEnv 0.10 names further checks and has no code for them; the network is measured by its Docker provider.
    others = {name: result.evidence for name, result in results.items() if name not in passed}
    assert report.verdict.value == "warn" and others.pop("runtime.network_policy")
    assert set(map(tuple, others.values())) == {("grader not implemented in this build",)}

    manifest = report.manifest
    last = json.loads((tmp_path / "artifacts" / "collector-trace.json").read_text())[-2]["response_json"]["data"]
    best = manifest.reward.range[1] - manifest.reward.oracle_tolerance
    assert last["done"] and last["reward"] >= best
    oracle = json.loads((folder / manifest.capabilities.oracle.location).read_text())
    provider = LocalProvider()
    provider.build(folder, manifest.execution)
    provider.start(None)
    try:
        running = openenv("validate", "--url", provider.base_url)
        assert running.returncode == 0 and "Verdict: PASS" in running.stdout, running.stdout
        with OpenEnvClient(provider.base_url) as client:
            result = client.reset(injected_state=oracle)
            assert result.done and result.reward >= best and result.metadata["is_success"]
    finally:
        provider.stop()
    assert manifest.capabilities.declared_task_count["train"] == scripted.make(CRAFT).num_tasks


def test_an_environment_without_an_oracle_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="no oracle"):
        write_folder("Gate-v0", tmp_path)
    with pytest.raises(ArgumentError, match="leave out process_reward"):
        write_folder(CRAFT, tmp_path, {"process_reward": True})
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------------- the page


def test_the_page_runs(capsys):
    page = (Path(__file__).parents[3] / "docs" / "openenv.md").read_text(encoding="utf-8")
    server, client = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    names = {"__name__": "docs"}
    exec(compile(server, "server", "exec"), names)
    with run(names["app"]) as url:
        assert "http://localhost:8000" in client
        exec(compile(client.replace("http://localhost:8000", url), "client", "exec"), names)
    printed = capsys.readouterr().out
    assert "'inventory'" in printed and "You have" in printed and printed.endswith("True False\n")
    wanted = "python -m agent_r1.adapters.openenv AgentR1/CraftWorld-v0 --out craft_world"  # as in the test above
    assert wanted in page and "openenv validate craft_world --level static" in page


def test_wrong_arguments_on_the_command_line_end_in_one_line(tmp_path, monkeypatch, capsys):
    for text, said in [("[1]", "--env-kwargs: must be a JSON object"), ('{"split": "x"}', "no split 'x'")]:
        words = ["AgentR1/CraftWorld-v0", "--out", str(tmp_path), "--env-kwargs", text]
        monkeypatch.setattr("sys.argv", ["openenv", *words])
        with pytest.raises(SystemExit):
            main()
        assert said in capsys.readouterr().err
