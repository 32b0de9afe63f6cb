"""The client of vLLM servers over real connections, some of which break. Real vLLM is tried in tests/vllm."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

pytest.importorskip("httpx")
from llm_utils import vllm_client
from llm_utils.engine import EngineDied
from llm_utils.vllm_client import ROUTES, VLLMClient
from llm_utils.vllm_engine import entropy_bound

GENERATE = "/inference/v1/generate"
LOGPROBS = np.log([0.5, 0.25, 0.125])  # of the tokens 7, 8 and 9; the others share what is left


class Server(ThreadingHTTPServer):
    """Answers as `vllm serve` does, always with the tokens 8 and 9, and remembers what it was asked for.

    `dropped[path]` requests lose their connection, by a reset or by being closed; `failing` paths answer with an error.
    """

    daemon_threads = True

    def __init__(self, model: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.asked: list[tuple[str, dict]] = []
        self.dropped: dict[str, int] = {}
        self.failing: set[str] = set()
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
        return {"choices": [choice | {"weight_versions": [{"version": "3", "start": 0, "end": 2}]}]}

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
    with pytest.raises(EngineDied, match=f"server {server.url} gave no answer: .* it says that it is well. Look for"):
        sample(engine)
    server.dropped["/pause"] = 3
    with pytest.raises(EngineDied, match="doesn't answer /pause"):
        engine.update([], 4)


def test_a_server_that_is_gone_ends_the_engine(server, connect):
    engine = connect()
    server.shutdown()
    server.server_close()
    with pytest.raises(EngineDied, match="gave no answer: ConnectError.* Now it can't be reached .* own log"):
        sample(engine)


def test_what_the_server_says_is_in_the_message(server, connect):
    engine = connect()
    server.failing |= {GENERATE, "/health", "/collective_rpc"}
    message = "failed with 500: EngineCore encountered an issue. Now it answers /health with 500. .* server's own log"
    with pytest.raises(EngineDied, match=message):
        sample(engine)
    assert len(server.sampling()) == 1, "an error is an answer, and nothing is repeated"
    with pytest.raises(EngineDied, match="answers /collective_rpc with 500: EngineCore encountered an issue"):
        engine.update([], 4)


@pytest.mark.parametrize(
    "device, in_parts, seeded", [("cuda", True, True), ("cpu", False, True), ("cpu", True, False)]
)
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
        with pytest.raises(ValueError, match=f"slot {slot} is being sampled"):
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
