"""An environment as an MCP server: real clients play episodes over stdio and HTTP."""

import asyncio
import socket
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import gymnasium as gym
import pytest

pytest.importorskip("mcp")
types = pytest.importorskip("mcp_types")

import other_loops  # noqa: E402
import uvicorn  # noqa: E402
from mcp import Client, MCPError  # noqa: E402

import agent_r1  # noqa: E402
from agent_r1 import Task, ToolEnv  # noqa: E402
from agent_r1.adapters.mcp import main, mcp_app, mcp_server  # noqa: E402
from agent_r1_tools import ToolFault  # noqa: E402
from agent_r1_tools.mcp import MCPServer  # noqa: E402

ROOT = Path(__file__).parents[3]
PLACES = {"PYTHONPATH": ":".join(str(ROOT / folder) for folder in ("envs", "tools"))}


def turns(task_index=3):
    """The expert's calls, and its return."""
    env = gym.make(other_loops.ENV_ID).unwrapped
    env.reset(options={"task_index": task_index})
    total, calls = 0.0, []
    for turn in env.demonstration():
        said = env.dialect.parse(env.tokenizer.encode(turn + env.dialect.end_of_turn))
        calls += [(call.name, call.arguments) for call in said.calls]
        total += env.step_message({"content": turn})[1]
    return env.task.question, calls, env.task.answers[0], total


def test_a_client_plays_an_episode_over_stdio():
    question, calls, answer, total = turns()
    command = [sys.executable, "-m", "agent_r1.adapters.mcp", other_loops.ENV_ID]
    server = MCPServer([*command, "--task-index", "3", "--split", "train"], env=PLACES)
    try:
        assert [tool.name for tool in server.tools()] == ["calculator", "question", "submit"]
        assert question in server.call("question").content
        for name, arguments in calls:
            assert server.call(name, arguments).data is None
        end = {"return": pytest.approx(total), "success": True, "truncation_reason": None}
        assert server.call("submit", {"answer": answer}).data == end
        for name in ("submit", "question", "calculator", "nothing"):
            assert server.call(name, {"answer": "0"}).data == end
    finally:
        server.close()


def test_the_end_of_stdio_closes_the_environment(tmp_path):
    told = tmp_path / "closed"
    (tmp_path / "noted.py").write_text(
        "import pathlib, gymnasium as gym, agent_r1\n"
        "from agent_r1.tasks.arithmetic_world import ArithmeticWorldEnv\n"
        "class Noted(ArithmeticWorldEnv):\n"
        "    def close(self):\n"
        f"        pathlib.Path({str(told)!r}).touch()\n"
        "        super().close()\n"
        "gym.register('Noted-v0', Noted)\n"
    )
    places = {"PYTHONPATH": f"{tmp_path}:{PLACES['PYTHONPATH']}"}
    server = MCPServer([sys.executable, "-m", "agent_r1.adapters.mcp", "noted:Noted-v0"], env=places)
    server.tools()
    assert not told.exists()
    server.close()
    deadline = time.monotonic() + 10
    while not told.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert told.exists()


@contextmanager
def served(**options):
    """The address of an app that listens on this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(mcp_app(other_loops.ENV_ID, **options), log_level="error", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
        server.should_exit = True
        thread.join(10)


def test_every_session_has_an_episode_of_its_own():
    _, calls, answer, total = turns()
    with served(task_index=3, max_sessions=2) as url:
        one, other, third = (MCPServer(url=url) for _ in range(3))
        assert other.call("submit", {"answer": "wrong"}).data["success"] is False
        for name, arguments in calls:
            assert one.call(name, arguments).data is None
        assert "2 sessions are open" in third.call("question").content
        assert one.call("submit", {"answer": answer}).data["return"] == pytest.approx(total)
        assert other.call("question").data["success"] is False
        one.close()
        assert third.call("submit", {"answer": answer}).data["success"] is True
        other.close(), third.close()


def test_the_sdks_client_begins_a_session_although_it_knows_a_newer_protocol():
    async def play(url):
        async with Client(url) as client:
            await client.call_tool("calculator", {"expression": "1"})
            return await client.call_tool("submit", {"answer": "0"})

    with served(task_index=3) as url:
        result = asyncio.run(play(url))
    assert result.structured_content["success"] is False and result.structured_content["return"] < 1


class Shop(ToolEnv):
    """Somebody to talk to, and a tool that breaks."""

    num_tasks = 1

    def __init__(self, name="order", **kwargs):
        def order(what: str) -> str:
            """Order something."""
            raise ToolFault("the shop is gone", ran=True)

        order.__name__ = name
        super().__init__([order], **{"fault_deadline": 0.1, **kwargs})

    def make_task(self, index):
        return Task("shop", "Order tea.", [])

    def user_turn(self, text):
        return f"You said {text}."

    def judge_answer(self, answer):
        return 0.0, {}


def play(env_id, calls, **kwargs):
    """The results of calls in one connection: a result, or an error's text."""

    async def run():
        results = []
        async with Client(mcp_server(env_id, kwargs)) as client:
            for name, arguments in calls:
                try:
                    results.append(await client.call_tool(name, arguments))
                except MCPError as error:
                    results.append(error.error.message)
        return results

    return asyncio.run(run())


@pytest.fixture
def shop():
    gym.register("Test/Shop-v0", entry_point=Shop)
    yield "Test/Shop-v0"
    del gym.registry["Test/Shop-v0"]


def test_a_fault_is_an_error_and_no_result(shop):
    calls = [("order", {"what": "tea"}), ("submit", {"answer": "a"}), ("question", {})]
    results = play(shop, calls)
    assert len(results) == 3 and all("infrastructure error" in text and "the shop is gone" in text for text in results)


def test_a_user_is_spoken_to(shop):
    said, wrong = play(shop, [("say", {"message": "hello"}), ("say", {"text": 1})])
    assert said.content[0].text == "You said hello." and "message (string)" in wrong


def test_names_do_not_clash(shop):
    asked, ended = play(shop, [("episode_question", {}), ("submit", {"answer": "a"})], name="question")
    assert "Order tea." in asked.content[0].text and ended.structured_content["success"] is False
    (fault,) = play(shop, [("submit", {"what": "tea"})], name="submit")
    assert "the shop is gone" in fault


def test_an_episode_that_cannot_begin_is_an_error(shop, monkeypatch):
    def fail(env, task):
        raise ToolFault("no shop today")

    monkeypatch.setattr(Shop, "start_episode", fail)
    (text,) = play(shop, [("question", {})])
    assert "infrastructure error" in text and "no shop today" in text


def test_an_episode_begins_at_a_later_call_after_a_fault(shop, monkeypatch):
    faults = [ToolFault("no shop today"), ToolFault("nor now")]

    def fail_twice(env, task):
        if faults:
            raise faults.pop(0)

    monkeypatch.setattr(Shop, "start_episode", fail_twice)
    first, second, third = play(shop, [("question", {})] * 3, fault_deadline=0.0)
    assert "no shop today" in first and "nor now" in second and "Order tea." in third.content[0].text


def test_an_unknown_environment_is_refused_at_once():
    with pytest.raises(agent_r1.ArgumentError):
        mcp_server("Nobody/Knows-v0")


def test_wrong_command_lines_end_in_one_line(capsys):
    for words, said in [(["--task-index", "-1"], "task_index must be from 0"), (["--split", "x"], "no split 'x'")]:
        with pytest.raises(SystemExit, match=said):
            main([other_loops.ENV_ID, *words])
    with pytest.raises(SystemExit):
        main([other_loops.ENV_ID, "--env-kwargs", "[1]"])
    assert "--env-kwargs: must be a JSON object" in capsys.readouterr().err
