"""A chat API for tests that is as strict as the strictest: what it doesn't know it refuses, as status 400.

`ChatServer(policy)` answers POST /v1/chat/completions with `policy(body)`, a message; `asked` has all bodies.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "a-key-of-tests"
FIELDS = {"model", "messages", "tools", "temperature", "top_p", "max_tokens", "stream"}
ROLES = {
    "system": {"content"},
    "user": {"content"},
    "assistant": {"content", "tool_calls"},
    "tool": {"content", "tool_call_id", "name"},
}


def refusal(body: dict[str, Any]) -> str | None:
    """What is wrong with a request; None where nothing is."""
    if extra := body.keys() - FIELDS:
        return f"unknown fields {extra}"
    if body.get("stream"):
        return "no streams here"
    waiting: list[str] = []  # ids of calls without a result
    seen: set[str] = set()
    for number, message in enumerate(body["messages"]):
        role, content = message["role"], message.get("content")
        where = f"messages.{number} ({role})"
        if extra := message.keys() - {"role"} - ROLES[role]:
            return f"{where}: unknown fields {extra}"
        if role == "tool":
            if message["tool_call_id"] not in waiting:
                return f"{where}: answers no call of the turn before"
            waiting.remove(message["tool_call_id"])
        elif waiting:
            return f"{where}: results of {waiting} are missing"
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            return f"{where}: content is {content!r}"
        for call in message.get("tool_calls", ()):
            if call.keys() != {"id", "type", "function"} or call["type"] != "function" or call["id"] in seen:
                return f"{where}: the call {call}"
            if call["function"].keys() != {"name", "arguments"} or not isinstance(call["function"]["arguments"], str):
                return f"{where}: the function {call['function']}"
            if not re.fullmatch("[a-zA-Z0-9_-]{1,64}", call["function"]["name"]):
                return f"{where}: the name {call['function']['name']!r}"
            if not isinstance(json.loads(call["function"]["arguments"]), dict):
                return f"{where}: arguments that are no object"
            waiting.append(call["id"])
            seen.add(call["id"])
        if "tool_calls" in message and not message["tool_calls"]:
            return f"{where}: tool_calls is empty"
    if body["messages"][-1]["role"] not in ("user", "tool") or waiting:
        return "the last message is no user's and no tool's"
    for tool in body.get("tools", [{}])[: None if "tools" in body else 0]:
        if tool.keys() != {"type", "function"} or not tool["function"].keys() >= {"name", "parameters"}:
            return f"the tool {tool}"
    if "tools" in body and not body["tools"]:
        return "tools is empty"
    return None


def called(*calls: tuple[str, Any], content: str | None = None) -> dict[str, Any]:
    """The message of an assistant that makes these calls; arguments that are text stay as they are."""
    made = [
        {"id": f"chatcmpl-tool-{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(
            (name, given if isinstance(given, str) else json.dumps(given)) for name, given in calls
        )
    ]
    return {"role": "assistant", "content": content} | ({"tool_calls": made} if made else {})


def expert(env: Any, num_tasks: int = 20) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A policy that knows how the first tasks of a `ToolEnv` with demonstrations are solved, by their questions."""
    known = {env.make_task(index).question: index for index in range(num_tasks)}

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        with lock:
            env.reset(options={"task_index": known[body["messages"][1]["content"]]})
            turn = env.demonstration()[sum(message["role"] == "assistant" for message in body["messages"])]
        said = env.dialect.parse(env.tokenizer.encode(turn + env.dialect.end_of_turn))
        return called(*((call.name, call.arguments) for call in said.calls), content=said.content)

    lock = threading.Lock()
    return reply


class ChatServer(ThreadingHTTPServer):
    """Listens on a free port of this machine until `shutdown`. `broken` is asked first: (status, body) or None."""

    daemon_threads = True

    def __init__(self, policy: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.policy = policy
        self.broken: Callable[[dict[str, Any]], tuple[int, Any] | None] = lambda body: None
        self.asked: list[dict[str, Any]] = []
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    server: ChatServer

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        wrong = refusal(body)
        if self.path != "/v1/chat/completions":
            self.answer(404, {"error": {"message": f"no {self.path} here"}})
        elif self.headers.get("Authorization") != f"Bearer {KEY}":
            self.answer(401, {"error": {"message": "wrong key"}})
        elif broken := self.server.broken(body):
            self.answer(*broken)
        elif wrong:
            self.answer(400, {"error": {"message": wrong, "type": "invalid_request_error"}})
        else:
            message = self.server.policy(body)
            reason = "tool_calls" if message.get("tool_calls") else "stop"
            choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
            reply = {"id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": body["model"]}
            self.answer(200, reply | {"choices": [choice]})

    def answer(self, status: int, content: Any) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
