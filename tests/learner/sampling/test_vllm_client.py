"""The client of vLLM servers over real connections, some of which break. Real vLLM is tried in tests/vllm."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

pytest.importorskip("httpx")
from llm_utils.sampling import vllm_client
from llm_utils.sampling.engine import EngineDied
from llm_utils.sampling.vllm_client import ROUTES, VLLMClient
from llm_utils.sampling.vllm_engine import entropy_bound

GENERATE = "/inference/v1/generate"
LOGPROBS = np.log([0.5, 0.25, 0.125])  # of the tokens 7, 8 and 9; the others share what is left


class Server(ThreadingHTTPServer):
    """Answers as `vllm serve` does, always with the tokens 8 and 9, and remembers what it was asked for.

    `dropped[path]` requests lose their connection, by a reset or by being closed; `failing` paths answer with an error;
    `wrong` changes a span, `raw[path]` writes an answer itself.
    """

    daemon_threads = True

    def __init__(self, model: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.asked: list[tuple[str, dict]] = []
        self.dropped: dict[str, int] = {}
        self.failing: set[str] = set()
        self.wrong: Callable[[dict], object] = lambda answer: None
        self.raw: dict[str, Callable[[Handler], None]] = {}
        self.version = ""
        self.reset = False
        self.config = {
            "model_config": {
                "model": model,
                "max_model_len": 512,
                "max_logprobs": 20,
                "logprobs_mode": "processed_logprobs",
                "skip_tokenizer_init": True,
            },
            "device_config": {"device": "cuda"},
            "scheduler_config": {"enable_chunked_prefill": True},
            "weight_transfer_config": None,
        }
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def handle_error(self, *_: object) -> None:
        """A client that hangs up is what some tests are about."""

    def sampling(self) -> list[dict]:
        """The sampling parameters of all requests for a span, in order."""
        return [body["sampling_params"] for path, body in self.asked if path == GENERATE]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if self.server.dropped.get(path, 0) > 0:
            self.server.dropped[path] -= 1
            if not self.server.reset:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.connection.shutdown(socket.SHUT_RDWR)  # what was not read makes it a reset
            return
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        self.server.asked.append((path, body))
        self.server.version = body.get("new_version", self.server.version)
        if path in self.server.raw:
            self.server.raw[path](self)
            return
        answers = {
            "/openapi.json": {"paths": dict.fromkeys(ROUTES)},
            "/version": {"version": "0.32.0"},
            "/server_info": {"vllm_config": self.server.config},
        }
        answer = self.span(body["sampling_params"]["logprobs"]) if path == GENERATE else answers.get(path, {})
        if path in self.server.failing:
            answer = {"error": {"message": "EngineCore encountered an issue.", "code": 500}}
        self.send_response(500 if path in self.server.failing else 200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    do_POST = do_GET

    def span(self, most: int) -> dict:
        likeliest = [{"token_id": 7 + i, "logprob": float(value)} for i, value in enumerate(LOGPROBS)]
        content = []
        for sampled in (1, 2):  # the sampled token comes first, and takes one of the places
            others = [one for one in likeliest if one is not likeliest[sampled]]
            top = [likeliest[sampled], *others][: max(most, 1)]
            content.append(likeliest[sampled] | {"top_logprobs": top})
        choice = {"token_ids": [8, 9], "finish_reason": "length", "logprobs": {"content": content}}
        choice |= {"weight_versions": [{"version": self.server.version, "start": 0, "end": 2}]}
        answer = {"choices": [choice]}
        self.server.wrong(answer)
        return answer

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(policy_folder, monkeypatch):
    monkeypatch.setattr(vllm_client, "PAUSES", (0.01, 0.02))
    server = Server(str(policy_folder))
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def connect(server, policy_folder, vocab_size):
    """connect(**options): an engine with four slots; it is closed after the test."""
    engines = []

    def make(**options):
        engines.append(VLLMClient(server.url, str(policy_folder), 4, vocab_size, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def sample(engine, slot=0, seed=5):
    engine.feed(slot, np.arange(4), 2, [], seed=seed)
    while engine.busy:
        for span in engine.step():
            return span


@pytest.mark.parametrize("reset", [True, False])
def test_a_dropped_request_is_sent_again(server, connect, reset):
    engine = connect()
    engine.update([], 3)
    server.reset, server.dropped[GENERATE] = reset, 2
    span = sample(engine)
    assert (span.slot, span.tokens.tolist(), span.versions.tolist()) == (0, [8, 9], [3, 3])
    np.testing.assert_allclose(span.logprobs, LOGPROBS[1:], rtol=1e-6)
    assert not server.dropped[GENERATE] and len(server.sampling()) == 1
    server.dropped |= {"/pause": 1, "/collective_rpc": 2, "/update_weight_version": 1, "/resume": 1}
    engine.update([], 4)
    order = ["/pause", "/collective_rpc", "/update_weight_version", "/resume"]
    assert [path for path, _ in server.asked][-4:] == order and not any(server.dropped.values())


def test_a_request_that_is_always_dropped_ends_the_engine(server, connect):
    engine = connect()
    server.dropped[GENERATE] = 3
    with pytest.raises(EngineDied, match=f"server {server.url} did not answer: .* reports that it is healthy. Look"):
        sample(engine)
    server.dropped["/pause"] = 3
    with pytest.raises(EngineDied, match="does not answer /pause"):
        engine.update([], 4)


def test_a_server_that_is_gone_ends_the_engine(server, connect):
    engine = connect()
    server.shutdown()
    server.server_close()
    with pytest.raises(EngineDied, match="did not answer: ConnectError.* Now it cannot be reached .* own log"):
        sample(engine)


def test_what_the_server_says_is_in_the_message(server, connect):
    engine = connect()
    server.failing |= {GENERATE, "/health", "/collective_rpc"}
    message = "failed with 500: EngineCore encountered an issue. Now it answers /health with 500. .* server's own log"
    with pytest.raises(EngineDied, match=message):
        sample(engine)
    assert len(server.sampling()) == 1, "an error is an answer, and nothing is repeated"
    with pytest.raises(EngineDied, match="answered /collective_rpc with 500: EngineCore encountered an issue"):
        engine.update([], 4)


@pytest.mark.parametrize("device, in_parts, seeded", [("cuda", True, True), ("cpu", False, True), ("cpu", True, False)])
def test_requests_are_seeded_where_that_does_not_stop_the_server(server, connect, capsys, device, in_parts, seeded):
    server.config["device_config"]["device"] = device
    server.config["scheduler_config"]["enable_chunked_prefill"] = in_parts
    engine = connect()
    assert ("--no-enable-chunked-prefill" in capsys.readouterr().err) != seeded
    for slot, seed in [(0, 5), (1, 5), (2, 6)]:
        sample(engine, slot, seed)
    seeds = [params["seed"] for params in server.sampling()]
    if seeded:
        assert seeds[0] == seeds[1] != seeds[2]
    else:
        assert seeds == [None] * 3


def test_likeliest_tokens_and_entropies(server, connect):
    span = sample(connect())
    assert span.entropies is None and span.top_tokens is None and span.top_logprobs is None
    span = sample(connect(top_logprobs=2))
    assert span.entropies is None and span.top_tokens.tolist() == [[7, 8]] * 2
    np.testing.assert_allclose(span.top_logprobs, [LOGPROBS[:2]] * 2, rtol=1e-6)
    span = sample(connect(entropies=True, top_logprobs=1))
    assert span.top_tokens.tolist() == [[7]] * 2
    np.testing.assert_allclose(span.entropies, [1.75 * np.log(2)] * 2, rtol=1e-6)  # of 1/2, 1/4, 1/8 and the rest, 1/8
    assert [params["logprobs"] for params in server.sampling()] == [0, 3, 20]


def test_entropies_are_lower_bounds():
    logits = np.random.default_rng(0).normal(0, 3, (50, 200))
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    exact = -(np.exp(logprobs) * logprobs).sum(1)
    ordered = -np.sort(-logprobs, axis=1)
    bounds = [entropy_bound(ordered[:, :k]) for k in (1, 5, 20, 200)]
    assert all((a <= b + 1e-6).all() for a, b in zip(bounds, bounds[1:], strict=False))
    np.testing.assert_allclose(bounds[-1], exact, rtol=1e-5)
    assert entropy_bound(np.array([[0.0, -np.inf]])) == 0  # top-p left one token


def test_too_many_log_probabilities_are_refused(server, connect):
    with pytest.raises(SystemExit, match="at most 20"):
        connect(top_logprobs=21)
    with pytest.raises(SystemExit, match="--max-logprobs 21"):
        connect(top_logprobs=20)
    server.config["model_config"]["max_logprobs"] = 21
    assert connect(top_logprobs=20).known == 20


def test_fork_copies_the_row(server, connect):
    engine = connect()
    sample(engine)
    engine.fork(0, 2, seed=9)
    for slot in (0, 2):
        engine.feed(slot, np.array([1]), 2, [])
        with pytest.raises(RuntimeError, match=f"slot {slot} is being sampled"):
            engine.fork(slot, 3, seed=1)
        while engine.busy:
            engine.step()
    rows = [body["token_ids"] for path, body in server.asked if path == GENERATE]
    assert rows[1] == rows[2] == [0, 1, 2, 3, 8, 9, 1]
    first, second = server.sampling()[1:]
    assert first["seed"] != second["seed"]


def test_a_refused_row_stays_as_it_was(server, connect):
    engine = connect()
    sample(engine)
    with pytest.raises(ValueError, match="max_model_len 512"):
        engine.feed(0, np.arange(510), 4, [])
    engine.feed(0, np.array([1]), 2, [])
    while engine.busy:
        engine.step()
    assert server.asked[-1][1]["token_ids"] == [0, 1, 2, 3, 8, 9, 1]


# ------------------------------------------------------------------------------------------- answers that are wrong


def changed(**fields):
    return lambda answer: answer["choices"][0].update(fields)


def content(answer):
    return answer["choices"][0]["logprobs"]["content"]


def top(answer):
    return content(answer)[0]["top_logprobs"]


def versions(**fields):
    return lambda answer: answer["choices"][0]["weight_versions"][0].update(fields)


WRONG = {  # what is done to a span, and the field that is named
    "one log-probability for two tokens": (lambda a: content(a).pop(), "logprobs has 1 entries for 2 tokens"),
    "three for two tokens": (lambda a: content(a).append(content(a)[0]), "logprobs has 3 entries"),
    "above 0": (lambda a: content(a)[0].update(logprob=50.0), "logprob is 50.0"),
    "text": (lambda a: content(a)[0].update(logprob="-1"), "logprob is '-1'"),
    "no log-probabilities": (changed(logprobs=None), "logprobs is 'None'"),
    "no tokens": (changed(token_ids=[]), "token_ids has 0 entries"),
    "more tokens than asked for": (changed(token_ids=[8] * 5000), "token_ids has 5000 entries, but at most 2 were"),
    "an unknown token": (changed(token_ids=[8, 10**6]), "token_ids"),
    "a token of 32 bits": (changed(token_ids=[8, 2**31]), "token_ids"),
    "a negative token": (changed(token_ids=[8, -1]), "token_ids"),
    "tokens as text": (changed(token_ids=["8", "9"]), "token_ids"),
    "tokens as fractions": (changed(token_ids=[8.0, 9.0]), "token_ids"),
    "a version that was never sent": (versions(version="99"), "weight_versions has 99 from 0 to 2"),
    "a version that is none": (versions(version="v1"), "weight_versions has v1"),
    "a version before the first": (versions(version=-1), "weight_versions has -1"),
    "no versions": (changed(weight_versions=[]), "weight_versions do not cover 2 tokens"),
    "a gap": (versions(start=1), "weight_versions do not cover 1 token"),
    "a version beyond the end": (versions(end=3), "weight_versions has 0 from 0 to 3"),
    "fewer likeliest": (lambda a: top(a).pop(), "top_logprobs has 2 to 3 entries"),
    "a likeliest above 0": (lambda a: top(a)[1].update(logprob=1), "logprob is 1"),
    "no likeliest token": (lambda a: top(a)[1].update(token_id=-1), "token_id in top_logprobs"),
    "another end": (changed(finish_reason="abort"), "finish_reason is 'abort'"),
    "no choices": (lambda a: a.update(choices=[]), "finish_reason is 'None'"),
    "null": (lambda a: a.update(choices=None), "choices is 'None'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_span_that_cannot_be_right_ends_the_engine(server, connect, name):
    """What is wrong is named; a wrong figure would be trained on."""
    server.wrong, words = WRONG[name]
    engine = connect(top_logprobs=2)
    with pytest.raises(EngineDied, match=f"sent an invalid span: .*{words}"):
        sample(engine)


def test_a_span_that_is_no_json_ends_the_engine(server, connect):
    engine = connect()
    for text in (b"", b"<html>", b"[1]", b"[" * 10**5):
        server.raw[GENERATE] = lambda handler, text=text: answer(handler, text)
        with pytest.raises(EngineDied, match="sent an invalid span"):
            sample(engine)


def answer(handler, content, status=200, **headers):
    handler.send_response(status)
    for name, value in {"Content-Length": len(content), **headers}.items():
        handler.send_header(name.replace("_", "-"), str(value))
    handler.end_headers()
    handler.wfile.write(content)


@pytest.mark.parametrize("path", ["/pause", "/collective_rpc", "/update_weight_version", "/resume"])
@pytest.mark.parametrize("status", [302, 307, 304])
def test_a_redirect_is_no_success(server, connect, path, status):
    """Old weights would be sampled from under a new version."""
    engine = connect()
    server.raw[path] = lambda handler: answer(handler, b"", status, Location="https://login.example/")
    with pytest.raises(EngineDied, match=f"answered {path} with {status}"):
        engine.update([], 1)
    server.raw = {GENERATE: server.raw[path]}
    with pytest.raises(EngineDied, match=f"failed with {status}"):
        sample(engine)


def test_nothing_is_asked_for_or_read_compressed(server, connect, monkeypatch):
    asked = []

    def bomb(handler):
        asked.append(handler.headers["Accept-Encoding"])
        answer(handler, gzip.compress(b'{"paths": "' + b"a" * 2**22 + b'"}'), Content_Encoding="gzip")

    def unpack(*args, **kwargs):
        raise AssertionError

    monkeypatch.setattr("httpx._decoders.GZipDecoder.decode", unpack)
    engine = connect()
    server.raw["/openapi.json"] = bomb
    with pytest.raises(SystemExit, match="no vLLM server answers at this address"):
        connect()
    server.raw = {GENERATE: bomb, "/pause": bomb}
    with pytest.raises(EngineDied, match="sent an invalid span"):
        sample(engine)
    with pytest.raises(EngineDied, match="answered /pause without JSON"):
        engine.update([], 1)
    assert asked == ["identity"] * 3


def test_an_answer_that_does_not_end_is_cut_off(server, connect, monkeypatch):
    """In time, where it comes in drops, and in size."""

    def drip(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000000")
        handler.end_headers()
        for _ in range(100):
            handler.wfile.write(b" ")
            time.sleep(0.05)

    def flood(handler):
        answer(handler, b" " * 10**6)

    engine, started = connect(), time.monotonic()
    for flow, words in ((drip, "is not complete after 0.3 s"), (flood, "is longer than 1000 bytes")):
        monkeypatch.setattr(vllm_client, "PAGE_SECONDS", 0.3 if flow is drip else 60)
        monkeypatch.setattr(vllm_client, "UPDATE_SECONDS", 0.3 if flow is drip else 60)
        monkeypatch.setattr(vllm_client, "PAGE_BYTES", 1000)
        monkeypatch.setattr(vllm_client, "TOKEN_BYTES", 0)
        server.raw = {"/openapi.json": flow, GENERATE: flow, "/pause": flow}
        with pytest.raises(SystemExit, match=words):
            connect()
        with pytest.raises(EngineDied, match=words):
            sample(engine)
        with pytest.raises(EngineDied, match=words):
            engine.update([], 1)
    assert time.monotonic() - started < 10


def test_a_long_wait_is_said(server, connect, monkeypatch, capsys):
    monkeypatch.setattr(vllm_client, "SILENCE", 0.1)
    released = threading.Event()
    server.raw[GENERATE] = lambda handler: (released.wait(20), answer(handler, json.dumps(handler.span(1)).encode()))
    engine = connect()
    engine.feed(0, np.arange(4), 2, [], seed=5)
    while "waiting for 1 spans for 0 minutes; vLLM at " not in capsys.readouterr().err:
        assert not engine.step()
    released.set()
    while engine.busy:
        spans = engine.step()
    assert len(spans) == 1


def test_what_a_server_names_is_compared_and_not_loaded(server, connect, policy_folder, tmp_path, monkeypatch):
    """A folder with code of its own, which transformers would ask to run."""
    config = json.loads((policy_folder / "config.json").read_text())
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    own = {"model_type": "own", "auto_map": {"AutoConfig": "code.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config | own))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    server.config["model_config"]["model"] = str(tmp_path)
    with pytest.raises(SystemExit, match=f"it runs {tmp_path}, whose model_type is own, but the trainer's"):
        connect()
    assert not (tmp_path / "ran").exists()
    (tmp_path / "config.json").write_text(json.dumps(config))
    connect()
    server.config["model_config"]["model"] = "some/name-of-the-hub"
    connect()


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [("model_config", "max_model_len", None), ("model_config", "model", 7), ("model_config", "max_logprobs", "20"),
     ("", "model_config", []), ("", "device_config", None), ("", "weight_transfer_config", "nccl")],
)  # fmt: skip
def test_a_server_that_describes_itself_otherwise_is_refused(server, connect, group, name, value):
    (server.config[group] if group else server.config)[name] = value
    with pytest.raises(SystemExit, match="has an unknown form"):
        connect()
