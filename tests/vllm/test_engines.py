"""Both vLLM engines against the trainer's own forward: what they sample, under which weights, and how they end."""

import re
import time

import gymnasium as gym
import numpy as np
import psutil
import pytest
import torch

from llm_utils import distributed
from llm_utils.sampling import vllm_client
from llm_utils.sampling.engine import EngineDied
from llm_utils.sampling.rollout import rollout
from llm_utils.sampling.vllm_client import VLLMClient
from llm_utils.sampling.vllm_engine import VLLMEngine

pytestmark = pytest.mark.timeout(600)

ENV_ID = "AgentR1/MultihopWorld-v0"
SLOTS, TEMPERATURE = 6, 0.7
CLOSE = 2e-4  # of log-probabilities, in float32
CLOSE_IN_LONG_ROWS = 5e-4  # of about 1,000 tokens
REPORTED = {"entropies": True, "top_logprobs": 3}


@pytest.fixture(scope="session")
def vocab_size(policy_folder) -> int:
    return gym.make(ENV_ID, tokenizer=str(policy_folder)).action_space.vocab_size


@pytest.fixture(scope="session")
def in_process(policy_folder, vocab_size):
    engine = VLLMEngine(str(policy_folder), SLOTS, vocab_size, TEMPERATURE, max_model_len=8192, **REPORTED)
    yield engine
    engine.close()


@pytest.fixture
def over_http(server, policy_folder, vocab_size):
    folder = str(policy_folder)
    engine = VLLMClient(server.url, folder, SLOTS, vocab_size, TEMPERATURE, tokenizer=folder, **REPORTED)
    yield engine
    engine.close()


@pytest.fixture
def over_http_in_parts(server_in_parts, policy_folder, vocab_size):
    engine = VLLMClient(server_in_parts.url, str(policy_folder), SLOTS, vocab_size, TEMPERATURE)
    yield engine
    engine.close()


@pytest.fixture(params=["in_process", "over_http"])
def engine(request, policy):
    """An engine with the policy's first weights, version 0."""
    engine = request.getfixturevalue(request.param)
    engine.update(distributed.weights(policy), 0)
    return engine


@pytest.fixture
def trainer_logprobs(policy, vocab_size):
    """trainer_logprobs(row, start, temperature): of every token of the vocabulary, at positions `start` and on."""

    @torch.no_grad()
    def compute(row, start, temperature=TEMPERATURE, model=policy):
        logits = model(torch.tensor([list(row)])).logits[0, start - 1 : -1, :vocab_size]
        return torch.log_softmax(logits / temperature, -1)

    return compute


def prompt(number, length=30):
    return np.random.default_rng(number).integers(5, 1500, length + number).astype(np.int32)


def finish(engine):
    """The spans that are being sampled, by slot."""
    spans = {}
    while engine.busy:
        spans |= {span.slot: span for span in engine.step()}
    return spans


def play(engine, number=SLOTS, turns=3, length=16, seed=1):
    """Episodes of several turns; returns (row, start, span) of every turn."""
    rows, left, spans = {}, dict.fromkeys(range(number), turns), []
    for slot in range(number):
        rows[slot] = prompt(slot)
        engine.feed(slot, rows[slot], length, [], seed=[seed, slot])
    while engine.busy:
        for span in engine.step():
            start, slot = len(rows[span.slot]), span.slot
            rows[slot] = np.concatenate([rows[slot], span.tokens])
            spans.append((rows[slot], start, span))
            left[slot] -= 1
            if left[slot]:
                answer = prompt(slot, 4)
                rows[slot] = np.concatenate([rows[slot], answer])
                engine.feed(slot, answer, length, [])
    engine.release()
    assert len(spans) == number * turns
    return spans


def difference(row, start, span, trainer_logprobs, **options):
    """By how much the engine's log-probabilities differ from the trainer's, token for token."""
    ours = trainer_logprobs(row, start, **options).numpy()[np.arange(len(span.tokens)), span.tokens]
    return np.abs(ours - span.logprobs)


def worst(spans, trainer_logprobs, **options):
    return max(difference(*turn, trainer_logprobs, **options).max() for turn in spans)


def train(policy, scale=0.003):
    """Move all weights a little, as an optimizer step would."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)


def metric(engine, name):
    """A figure of the server behind the engine: what its processes report, added up."""
    server = engine.servers[0]
    text = server.http.get(server.url + "/metrics").text
    return sum(float(value) for value in re.findall(rf"^vllm:{name}{{.*}} (.*)$", text, re.MULTILINE))


def test_logprobs_are_the_trainers_before_and_after_an_update(engine, policy, trainer_logprobs, vocab_size):
    spans = play(engine)
    assert worst(spans, trainer_logprobs) < CLOSE
    for _, _, span in spans:
        assert (span.tokens.dtype, span.logprobs.dtype, span.versions.dtype) == (np.int32, np.float32, np.int32)
        assert len(span.tokens) == len(span.logprobs) == len(span.versions) == 16 and not span.versions.any()
        assert span.tokens.max() < vocab_size, "a row of the embedding that is no token was sampled"
    train(policy)
    assert worst(spans, trainer_logprobs) > 100 * CLOSE  # or the update would show nothing
    engine.update(distributed.weights(policy), 7)  # without the head, which is tied to the embedding
    spans = play(engine)
    assert worst(spans, trainer_logprobs) < CLOSE
    assert {int(version) for *_, span in spans for version in span.versions} == {7}


@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_entropies_and_the_likeliest_tokens(engine, trainer_logprobs, monkeypatch, top_p):
    """Against the trainer's whole distribution: a lower bound, exactly that of the tokens that vLLM reports."""
    monkeypatch.setattr(engine, "temperature", 1.5)
    monkeypatch.setattr(engine, "top_p", top_p)
    for row, start, span in play(engine, 2):
        logprobs = trainer_logprobs(row, start, 1.5).double()
        ordered = logprobs.sort(-1, descending=True)
        left_out = ordered.values.exp().cumsum(-1) - ordered.values.exp() >= top_p
        logprobs.scatter_(-1, ordered.indices, ordered.values.masked_fill(left_out, -torch.inf))
        logprobs = torch.log_softmax(logprobs, -1)
        probs = logprobs.exp()
        exact = torch.special.entr(probs).sum(-1).numpy()
        known = probs.topk(engine.known).values
        bound = torch.special.entr(known).sum(-1) + torch.special.entr((1 - known.sum(-1)).clamp(min=0))
        assert span.entropies.dtype == np.float32 and np.abs(span.entropies - bound.numpy()).max() < 10 * CLOSE
        assert (span.entropies < exact + 10 * CLOSE).all()
        assert (span.top_tokens.dtype, span.top_logprobs.dtype) == (np.int32, np.float32)
        assert span.top_tokens.shape == span.top_logprobs.shape == (len(span.tokens), 3)
        assert (span.top_logprobs[:, 1:] <= span.top_logprobs[:, :-1]).all()
        likeliest = logprobs.topk(3).values.numpy()
        named = logprobs.gather(-1, torch.tensor(span.top_tokens).long()).numpy()
        for ours in (likeliest, named):  # what top-p leaves out is minus infinity in both
            np.testing.assert_allclose(span.top_logprobs, ours, rtol=0, atol=CLOSE)
    for *_, span in play(engine.twin(temperature=1.0), 1):
        assert span.entropies is None and span.top_tokens is None and span.top_logprobs is None


def test_merged_adapters_arrive(engine, policy, trainer_logprobs):
    peft = pytest.importorskip("peft")
    policy = peft.get_peft_model(policy, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    spans = play(engine, 2)
    assert worst(spans, trainer_logprobs, model=policy) > 100 * CLOSE
    engine.update(distributed.weights(policy), 1)
    spans = play(engine, 2)
    assert worst(spans, trainer_logprobs, model=policy) < CLOSE


@pytest.mark.parametrize("engine", ["in_process", "over_http", "over_http_in_parts"], indirect=True)
def test_running_requests_go_on_under_new_weights(engine, policy, trainer_logprobs, monkeypatch):
    """Every token knows its version, and its log-probability is that of these weights alone: no key or value stays.

    Everything is computed again: more than 4,096 tokens in process, more than a server's 256 at a time in parts, which
    stops vLLM on a CPU where requests have seeds. A server's spans are too long to end, however late the update comes:
    they are cut off.
    """
    read_span = vllm_client.read_span

    def read_cut_span(content, **limits):
        return read_span(content.replace(b'"abort"', b'"length"'), **limits)

    monkeypatch.setattr(vllm_client, "read_span", read_cut_span)
    old = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    train(policy)
    rows = {slot: prompt(slot, 200 if engine.overlaps else 700) for slot in range(SLOTS)}

    def sample(tokens):
        """Wait until every span has about so many tokens more."""
        if not engine.overlaps:
            for _ in range(tokens):
                assert not engine.step()
            return
        while metric(engine, "num_requests_running") < SLOTS:
            assert not engine.step()
        before = metric(engine, "generation_tokens_total")
        while metric(engine, "generation_tokens_total") < before + tokens * SLOTS:
            assert not engine.step()

    for slot, row in rows.items():
        engine.feed(slot, row, 7900 if engine.overlaps else 60, [], seed=[3, slot])
    sample(20)
    engine.update(distributed.weights(policy), 1)
    sample(20)
    if engine.overlaps:
        engine.servers[0].call("POST", "/pause", params={"mode": "abort"})
        engine.servers[0].call("POST", "/resume")
    spans = finish(engine)
    engine.release()
    turns = [(np.concatenate([row, spans[slot].tokens]), len(row), spans[slot]) for slot, row in rows.items()]
    cuts = []
    for turn in turns:
        versions = turn[-1].versions
        (cut,) = np.flatnonzero(np.diff(versions)) + 1
        assert versions[0] == 0 and versions[-1] == 1
        assert difference(*turn, trainer_logprobs)[cut:].max() < CLOSE_IN_LONG_ROWS
        cuts.append(cut)
    policy.load_state_dict(old)
    for turn, cut in zip(turns, cuts, strict=True):
        assert difference(*turn, trainer_logprobs)[:cut].max() < CLOSE_IN_LONG_ROWS


def test_a_twin_has_its_own_rows_and_temperature(engine, trainer_logprobs):
    twin = engine.twin(temperature=0.0)
    rows = {view: prompt(2 + (view is twin)) for view in (engine, twin)}
    for view, row in rows.items():
        view.feed(0, row, 24, [], seed=[1, 0])
    spans = {}
    while engine.busy or twin.busy:
        for view in rows:
            for span in view.step():
                assert span.slot == 0 and view not in spans
                spans[view] = span
    twin.release()
    row = np.concatenate([rows[twin], spans[twin].tokens])
    assert (trainer_logprobs(row, len(rows[twin])).argmax(-1).numpy() == spans[twin].tokens).all()
    hot = engine.twin(temperature=1.5)
    assert worst(play(hot, 2), trainer_logprobs, temperature=1.5) < CLOSE
    engine.feed(0, prompt(5), 8, [])  # a further turn: its row is still there
    span = finish(engine)[0]
    row = np.concatenate([rows[engine], spans[engine].tokens, prompt(5), span.tokens])
    engine.release()
    assert worst([(row, len(row) - len(span.tokens), span)], trainer_logprobs) < CLOSE


def test_a_fork_goes_on_from_the_same_row(engine, trainer_logprobs):
    engine, row = engine.twin(temperature=1.5), prompt(0)
    engine.feed(0, row, 12, [], seed=[1, 0])
    with pytest.raises(RuntimeError, match="slot 0 is being sampled"):
        engine.fork(0, 1, seed=[1, 1])
    row = np.concatenate([row, finish(engine)[0].tokens])
    for new, seed in [(1, 1), (2, 2), (3, 2)]:
        engine.fork(0, new, seed=[1, seed])
    for slot in range(4):
        engine.feed(slot, prompt(3, 4), 12, [])
    spans = finish(engine)
    row = np.concatenate([row, prompt(3, 4)])
    for span in spans.values():
        longer = np.concatenate([row, span.tokens])
        assert difference(longer, len(row), span, trainer_logprobs, temperature=1.5).max() < CLOSE
    assert len({tuple(spans[slot].tokens) for slot in range(3)}) == 3, "each has random numbers of its own"
    assert (spans[2].tokens == spans[3].tokens).all(), "which its seed decides"
    engine.feed(3, prompt(1, 4), 8, [])  # each row ends with its own span
    engine.feed(1, prompt(1, 4), 8, [])
    for slot, span in finish(engine).items():
        longer = np.concatenate([row, spans[slot].tokens, prompt(1, 4), span.tokens])
        assert difference(longer, len(longer) - 8, span, trainer_logprobs, temperature=1.5).max() < CLOSE
    engine.release()


def test_the_seed_decides_whatever_the_slot(engine):
    samples = []
    for slots, seed in [((0, 1), 5), ((3, 2), 5), ((0, 1), 6)]:
        for episode, slot in enumerate(slots):
            engine.feed(slot, prompt(0), 24, [], seed=[seed, episode])
        spans = finish(engine)
        engine.release()
        samples.append([spans[slot].tokens.tolist() for slot in slots])
    first, again, other = samples
    assert first == again
    assert first[0] != first[1] and first[0] != other[0]


def test_a_span_ends_with_a_stop_token(engine):
    (row, start, span) = play(engine, 1, turns=1)[0]
    stop = int(span.tokens[5])
    engine.feed(0, row[:start], 16, [stop], seed=[1, 0])
    ended = finish(engine)[0]
    engine.release()
    first = span.tokens.tolist().index(stop)
    assert ended.tokens.tolist() == span.tokens[: first + 1].tolist()


def test_release_forgets_what_is_being_sampled(engine, trainer_logprobs):
    for slot in range(SLOTS):
        engine.feed(slot, prompt(slot), 4000, [], seed=[1, slot])
    engine.step()
    engine.release()
    assert not engine.busy
    assert worst(play(engine, 2), trainer_logprobs) < CLOSE
    while engine.overlaps and metric(engine, "num_requests_running"):  # the figure may come late
        time.sleep(0.1)


def test_a_row_that_does_not_fit_is_refused(engine):
    with pytest.raises(ValueError, match="max_model_len 8192"):
        engine.feed(0, prompt(0, 5000), 4000, [], seed=[1, 0])
    assert not engine.busy


def test_episodes_of_multihop_world(engine, policy_folder, trainer_logprobs):
    envs = gym.make_vec(ENV_ID, num_envs=SLOTS, observation="new", split="train", tokenizer=str(policy_folder))
    rows = rollout(envs, engine, [(100 + task, task) for task in range(12)], seed=1)
    envs.close()
    assert [row.episode for row in rows] == list(range(100, 112))
    assert np.mean([row.stats["turns"] for row in rows]) > 1.5, "the policy calls tools"
    assert np.mean([row.stats["tool_calls"] - row.stats["tool_errors"] for row in rows]) > 0.5, "as they are meant"
    for row in rows:
        for turn in row.turns:
            ours = trainer_logprobs(row.tokens[: turn.end], turn.start).numpy()
            ours = ours[np.arange(turn.end - turn.start), row.tokens[turn.start : turn.end]]
            assert np.abs(ours - turn.logprobs).max() < CLOSE
            assert not turn.versions.any()


def test_the_tokenizer_may_not_be_larger_than_the_model(server, policy, policy_folder):
    with pytest.raises(SystemExit, match="but vLLM's model has only"):
        VLLMClient(server.url, str(policy_folder), SLOTS, policy.config.vocab_size + 1)


def test_a_server_that_breaks_says_so(over_http, server):
    """The engine's process is gone; whoever needs the server next gets one that is started anew."""
    over_http.feed(0, prompt(0), 4000, [], seed=[1, 0])
    (core,) = (one for one in psutil.Process(server.process.pid).children() if "EngineCore" in " ".join(one.cmdline()))
    core.kill()
    with pytest.raises(EngineDied, match=f"the vLLM server {server.url} .* Look for the cause in the server's own log"):
        while over_http.busy:
            over_http.step()


def test_an_engine_that_breaks_says_so(in_process):
    """Last in this file: the engine does not survive it. The forward really fails, as it would with broken weights."""
    in_process.feed(0, prompt(0), 16, [], seed=[1, 0])
    in_process.step()
    model = in_process.host.llm.llm_engine.model_executor.driver_worker.worker.get_model()
    del model.model.layers[1].mlp
    with pytest.raises(EngineDied, match="vLLM stopped with .*mlp"):
        while in_process.busy:
            in_process.step()
