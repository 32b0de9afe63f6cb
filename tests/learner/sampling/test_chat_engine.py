"""evaluate_llm.py --api, against a chat API that refuses what it doesn't know."""

import json
import re
import runpy
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

import evaluate_llm
import gymnasium as gym
import pytest
from chat_server import KEY, ChatServer, expert
from learners import filled

pytest.importorskip("httpx")
from llm_utils import arguments
from llm_utils.sampling import chat_engine
from llm_utils.sampling.chat_engine import ChatEngine
from llm_utils.sampling.engine import EngineDied

SCRIPT = Path(evaluate_llm.__file__)
ENV_ID = "AgentR1/ArithmeticWorld-v0"


@pytest.fixture
def server(monkeypatch):
    server = ChatServer(expert(gym.make(ENV_ID, split="test").unwrapped))
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(chat_engine, "PAUSES", (0.0, 0.01))
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def evaluate(monkeypatch, tmp_path, server):
    def run(*words):
        given = ["--api", server.url, "--api-model", "expert", "--env-id", ENV_ID, "--num-envs", "3", "--episodes", "5"]
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *given, "--num-threads", "1", *words])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        folder = max(Path("runs").iterdir(), key=lambda folder: folder.stat().st_mtime)
        rows = [json.loads(line) for line in (folder / "trajectories.jsonl").read_text().splitlines()]
        return json.loads((folder / "evaluation.json").read_text()), rows

    return run


def test_an_expert_behind_an_api_solves_all(evaluate, server):
    """Other temperatures are sent as they are, and what fails for the moment is asked again."""
    failing = [(503, b"busy"), (429, {"error": {"message": "slowly"}})]
    server.broken = lambda body: failing.pop() if failing and len(server.asked) > 2 else None
    result, rows = evaluate("--temperature", "0.5")
    assert not failing and result["model"] == "expert" and result["episodes"] == 5
    assert result["metrics"]["success"]["mean"] == 1.0 and result["metrics"]["tool_calls"]["mean"] > 1
    assert [row["task_index"] for row in rows] == list(range(5))
    assert all(body["temperature"] == 0.5 and "top_p" not in body for body in server.asked)
    assert KEY not in json.dumps([result, rows])
    tokenizer = gym.make(ENV_ID).unwrapped.tokenizer
    text = tokenizer.decode(rows[0]["tokens"][rows[0]["turns"][0][0] : rows[0]["turns"][0][1]])
    assert re.fullmatch(r"(?s).*<tool_call>\n\{.*\}\n</tool_call><\|im_end\|>", text)


def test_a_baseline_has_no_tools(evaluate, server):
    server.policy = lambda body: {"role": "assistant", "content": "<answer>nobody</answer>"}
    result, rows = evaluate("--mode", "closed_book", "--temperature", "1", "--samples", "2")
    assert [row["task_index"] for row in rows] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert result["metrics"]["pass@2"]["mean"] == 0.0 and result["metrics"]["pass@2"]["tasks"] == 5
    assert result["metrics"]["turns"]["mean"] == 1.0 and result["metrics"]["success"]["mean"] == 0.0
    assert all(body.keys() == {"model", "messages", "max_tokens", "temperature"} for body in server.asked)


@pytest.mark.parametrize(
    ("words", "sent"),
    [
        ([], {"temperature": 0.0}),
        (["--temperature", "1"], {"temperature": 1.0}),
        (["--temperature", "1.0", "--top-p", "1"], {"temperature": 1.0, "top_p": 1.0}),
        (["--top-p", "1.0"], {"temperature": 0.0, "top_p": 1.0}),
        (["--temperature", "0.7", "--top-p", "0.8"], {"temperature": 0.7, "top_p": 0.8}),
        (["--temperature", "1", "--top-p", "0.8"], {"temperature": 1.0, "top_p": 0.8}),
    ],
)
def test_what_was_typed_is_sent(evaluate, server, words, sent):
    """A server fills what is missing from the model's own folder."""
    evaluate("--episodes", "1", *words)
    for body in server.asked:
        assert {name: body[name] for name in ("temperature", "top_p") if name in body} == sent


def test_a_newer_name_of_the_limit(evaluate, server, monkeypatch):
    monkeypatch.setattr("chat_server.FIELDS", {"model", "messages", "tools", "temperature", "max_completion_tokens"})
    message = "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead."
    server.broken = lambda body: (400, {"error": {"message": message}}) if "max_tokens" in body else None
    assert evaluate()[0]["metrics"]["success"]["mean"] == 1.0
    assert 1 <= sum("max_tokens" in body for body in server.asked) <= 3  # the first ones, of three episodes at once


@pytest.mark.parametrize(
    "message",
    [
        {"message": "This model's maximum context length is 10 tokens", "code": "context_length_exceeded"},
        {"message": "refused", "code": "content_filter"},
    ],
)
def test_a_conversation_that_is_not_taken_ends_without_an_answer(evaluate, server, message):
    """It is too long, or a tool's result brought up what a filter of the API's refuses."""
    server.broken = lambda body: (400, {"error": message}) if len(body["messages"]) > 3 else None
    result, rows = evaluate()
    assert result["metrics"]["truncated"]["mean"] == 1.0 and result["faults"] == 0
    assert all(any("process/no_action" in terms for terms in row["reward_terms"]) for row in rows)


@pytest.mark.parametrize(
    ("status", "content", "said"),
    [
        (401, {"error": {"message": "wrong key"}}, "answers with 401: .*wrong key.*; check the key in OPENAI_API_KEY"),
        (403, b"not\nyou", "answers with 403: not you; check the key in OPENAI_API_KEY$"),
        (404, {"error": {"message": "no such model"}}, "answers with 404: .*no such model.*; check --api, .*"),
        (503, b"busy", "answers with 503: busy"),
        (400, b"it said \x1b[2J", r"answers with 400: it said \\x1b\[2J"),
        (200, b"{", "an unreadable reply"),
        (200, b"[" * 100_000, "an unreadable reply"),
        (200, {"choices": []}, "an unreadable reply"),
        (200, {"choices": [{"message": {"content": "", "tool_calls": ["x"]}}]}, "a call in a reply must have"),
        (200, {"choices": [{"message": {"text": "x"}}]}, "a reply must be a message"),
    ],
)
def test_what_an_api_gets_wrong_is_said(evaluate, server, status, content, said):
    server.broken = lambda body: (status, content)
    with pytest.raises(SystemExit, match=f"^{re.escape(server.url)}.*{said}"):
        evaluate()
    assert len(server.asked) <= (9 if status == 503 else 3)  # only what is busy is asked again


@pytest.fixture
def envs():
    envs = gym.make_vec(ENV_ID, num_envs=1)
    yield envs
    envs.close()


def reply(engine, envs):
    """The text of one turn."""
    spans = []
    engine.feed(0, *envs.reset(seed=0)[0], 10, [])
    while engine.busy:
        spans += engine.step()
    return envs.envs[0].tokenizer.decode(spans[0].tokens)


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.mark.parametrize(
    ("host", "cause"), [("127.0.0.1", "Connection refused"), ("nobody.invalid", r"\[Errno -\d\] \w.*")]
)
def test_an_address_where_nobody_is_ends_it_at_once(monkeypatch, tmp_path, capsys, host, cause):
    url = f"http://{host}:{closed_port()}/v1"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(chat_engine, "PAUSES", (0.2, 0.3))
    words = ["--api", url, "--api-model", "m", "--env-id", ENV_ID, "--num-envs", "3", "--num-threads", "1"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    message = rf"^{url}/chat/completions cannot be reached \(.*{cause}\): start its server, or correct --api$"
    with pytest.raises(SystemExit, match=message):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    said = capsys.readouterr().err
    assert "retrying" not in said and "--resume" not in said  # there is nothing to resume


def test_a_server_that_does_not_speak_http_ends_it_at_once(monkeypatch, envs, capsys):
    monkeypatch.setattr(chat_engine, "PAUSES", (0.0, 0.0))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n{}")
                    connection.close()

        threading.Thread(target=answer, daemon=True).start()
        engine = ChatEngine(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", "m", envs)
        with pytest.raises(EngineDied, match="does not answer as HTTP .*: correct --api"):
            reply(engine, envs)
        listener.shutdown(socket.SHUT_RDWR)
    assert "retrying" not in capsys.readouterr().err


def test_a_server_that_is_lost_later_is_asked_again(server, monkeypatch, capsys, envs):
    """The same engine, after a first reply."""
    server.policy = lambda body: {"role": "assistant", "content": "yes"}
    engine = ChatEngine(server.url, "m", envs)
    assert reply(engine, envs).startswith("yes")
    server.shutdown()
    server.server_close()
    with pytest.raises(EngineDied, match=f"^{server.url}/chat/completions does not answer: Connect"):
        reply(engine, envs)
    engine.close()
    (line,) = capsys.readouterr().err.splitlines()  # at the first time, not after minutes
    assert re.search(r"does not answer: .*; retrying for 0 s$", line)


def test_a_long_reply_is_cut(server, envs):
    server.policy = lambda body: {"role": "assistant", "content": "x" * 100}
    engine = ChatEngine(server.url, "m", envs)
    engine.feed(0, *envs.reset(seed=0)[0], 10, [])
    spans = []
    while engine.busy:
        spans += engine.step()
    assert envs.envs[0].tokenizer.decode(spans[0].tokens) == "x" * 10 and server.asked[0]["max_tokens"] == 10
    assert spans[0].logprobs.shape == spans[0].versions.shape == (10,)
    engine.close()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"api": "http://x"}, "--api needs --api-model"),
        ({"api_model": "m"}, "--api-model does nothing without --api"),
        ({"api": "http://x", "api_model": "m", "model": "runs/x"}, "--model does nothing with --api"),
        ({"api": "http://x", "api_model": "m", "engine": "vllm"}, "--engine does nothing with --api"),
        ({"api": "http://x", "api_model": "m", "mode": "base_tool_call"}, "--mode base_tool_call"),
    ],
)
def test_flags_that_go_together(given, said):
    with pytest.raises(SystemExit, match=f"^{said}"):
        args = evaluate_llm.Args(**{"env_id": ENV_ID, **given})
        evaluate_llm.check_api(args)
        evaluate_llm.check(filled(args))


def test_adapters_beside_an_api_are_refused_before_anything_is_said_of_them(monkeypatch, capsys):
    words = ["evaluate_llm.py", "--api", "http://localhost:9/v1", "--api-model", "m", "--adapter", "foo"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="^--adapter does nothing with --api$"):
        runpy.run_path(evaluate_llm.__file__, run_name="__main__")
    assert capsys.readouterr().err == ""


def test_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llm_utils.sampling.chat_engine", None)
    with pytest.raises(SystemExit, match="--api needs .*agent-r1\\[http\\]"):
        evaluate_llm.make_chat_engine(evaluate_llm.Args(api="http://x", api_model="m"), None)
    assert arguments.flag("api_model") == "--api-model"
