"""Calls to MCP servers that may have had an effect are made once, whatever becomes of the server."""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_r1 import Task, ToolEnv
from agent_r1_tools.mcp import MCPServer, MCPTool

pytest.importorskip("mcp")


@pytest.fixture
def make() -> Iterator[Callable[..., dict[str, MCPTool]]]:
    """The tools of a server, by name; it is closed afterwards."""
    servers = []

    def tools(command: Any, **kwargs: Any) -> dict[str, MCPTool]:
        servers.append(MCPServer(command, **kwargs))
        return {tool.name: tool for tool in servers[-1].tools()}

    yield tools
    for server in servers:
        server.close()


def plain(what: str) -> list[str]:
    return [sys.executable, "-S", str(Path(__file__).parents[2] / "shared" / "plain_mcp_server.py"), what]


class Shop(ToolEnv):
    num_tasks = 1

    def make_task(self, index: int) -> Task:
        return Task("shop", "Order tea.", [])

    def judge_answer(self, answer: str) -> tuple[float, dict[str, float]]:
        return 0.0, {}


def play(env: ToolEnv, text: str) -> Any:
    return env.step(np.array(env.tokenizer.encode(text + env.dialect.end_of_turn)))


def order(tmp_path: Path, turns: list[list[str]], name: str = "order", **kwargs: Any) -> tuple[list[str], Any]:
    """What was ordered in these turns, in a shop where some words end the process; and the last info."""
    orders = tmp_path / "orders"
    orders.touch()
    env = Shop(MCPServer(plain("orders"), env={"ORDERS": str(orders)}, **kwargs).tools(), fault_deadline=2)
    env.reset(seed=1)
    for texts in turns:
        step = play(env, "".join(env.dialect.tool_call(name, {"text": text}) + "\n" for text in texts))
    env.close()
    return orders.read_text().split(), step[-1]


@pytest.mark.parametrize("session", ["episode", "replay", "shared"])
@pytest.mark.parametrize(
    ("turns", "made"),
    [
        ([["die"]], ["die"]),
        ([["killed"]], ["killed"]),
        ([["close"]], ["close"]),
        ([["early"]], []),
        ([["tea"], ["die"]], ["tea", "die"]),
        ([["tea", "die"]], ["tea", "die"]),
        ([["tea", "milk", "die", "jam"]], ["tea", "milk", "die"]),
        ([["die", "tea"]], ["die"]),
    ],
)
def test_an_order_is_placed_once_whatever_becomes_of_the_server(tmp_path, turns, made, session) -> None:
    ordered, info = order(tmp_path, turns, session=session)
    assert ordered[: len(made)] == made and ordered.count("die") <= 1 and ordered.count("tea") <= 1
    assert info["truncation_reason"] == "fault" and info["reward_terms"] == {}


@pytest.mark.parametrize("session", ["episode", "shared"])
def test_an_order_that_takes_too_long_is_placed_once(tmp_path: Path, session: str) -> None:
    ordered, info = order(tmp_path, [["hang"]], session=session, timeout=1)
    assert ordered == ["hang"] and "fault" not in info and "within 1 seconds" in info["tool_calls"][0]["error"]


@pytest.mark.parametrize(("name", "again"), [("order", False), ("add", False), ("read", True), ("put", True)])
def test_a_tool_that_changes_nothing_more_is_called_again(tmp_path: Path, name: str, again: bool) -> None:
    ordered, info = order(tmp_path, [["die"]], name, session="shared")
    assert (len(ordered) > 1) == again and info["truncation_reason"] == "fault"


def test_a_server_that_cannot_be_reached_for_a_while_is_tried_again(tmp_path: Path) -> None:
    """The call has surely not run."""
    program, orders = tmp_path / "server", tmp_path / "orders"
    words = plain("orders")
    program.write_text(f"#!/bin/sh\nexec {' '.join(words)}\n")
    program.chmod(0o755)
    env = Shop(MCPServer([str(program)], env={"ORDERS": str(orders)}).tools(), fault_deadline=20)
    env.reset(seed=1)
    program.rename(tmp_path / "away")
    timer = threading.Timer(0.5, lambda: (tmp_path / "away").rename(program))
    timer.start()
    info = play(env, env.dialect.tool_call("order", {"text": "tea"}))[-1]
    assert "fault" not in info and orders.read_text().split() == ["tea"]
    env.close()


@pytest.mark.parametrize("session", ["episode", "shared"])
@pytest.mark.parametrize(
    ("status", "reached"), [(None, 2), (429, 2), (500, 1), (502, 1), (503, 1), (504, 1)], ids=str
)
def test_a_call_over_http_is_made_again_only_where_it_was_turned_away(
    make: Any, session: str, status: int | None, reached: int
) -> None:
    """None: nobody takes the connection, and a session in which something was done is lost with it."""
    earlier = status is not None or session == "shared"
    with OneTool(status) as server:
        env = Shop(list(make(None, url=server.url, session=session, timeout=5).values()), fault_deadline=5)
        env.reset(seed=1)
        if earlier:
            play(env, env.dialect.tool_call("say", {}))
        server.turn_away()
        info = play(env, env.dialect.tool_call("say", {}))[-1]
    assert ("fault" in info) == (reached == 1)
    assert server.calls == earlier + (1 if status is None else reached)


class OneTool:
    """A server over HTTP with a tool, which answers the next call with a status, or takes no connection for a while."""

    def __init__(self, status: int | None) -> None:
        self.status, self.next, self.calls = status, 200, 0
        self.http = self._open(0)
        self.port = self.http.server_port
        self.url = f"http://127.0.0.1:{self.port}/"

    def _open(self, port: int) -> Any:
        import http.server

        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.0"

            def do_POST(self) -> None:
                message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, body = 202, b""
                if message.get("method") == "tools/call":
                    outer.calls += 1
                    status, outer.next = outer.next, 200
                if "id" in message and status in (200, 202):
                    about = {"name": "a", "version": "1"}
                    results = {
                        "initialize": {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": about},
                        "tools/list": {"tools": [{"name": "say", "inputSchema": {"type": "object"}}]},
                        "tools/call": {"content": [{"type": "text", "text": "said"}]},
                    }
                    result = results.get(message["method"], {})
                    status = 200
                    body = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: Any) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    def turn_away(self) -> None:
        if self.status is not None:
            self.next = self.status
            return
        self.http.shutdown()
        self.http.server_close()
        threading.Timer(0.5, lambda: setattr(self, "http", self._open(self.port))).start()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: object) -> None:
        self.http.shutdown()
        self.http.server_close()
