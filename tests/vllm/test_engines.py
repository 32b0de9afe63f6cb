"""Both vLLM engines against the trainer's own forward: what they sample, under which weights, and how they end."""

import re

import gymnasium as gym
import httpx
import numpy as np
import pytest
import torch
from grpo_llm import rollout

from llm_utils import distributed
from llm_utils.models import EngineDied
from llm_utils.vllm_engine import VLLMEngine
from llm_utils.vllm_server import VLLMServerEngine

pytestmark = pytest.mark.timeout(600)

ENV_ID = "AgentR1/MultihopWorld-v0"
SLOTS, TEMPERATURE = 6, 0.7
CLOSE = 2e-4  # of log-probabilities, in float32


@pytest.fixture(scope="session")
def vocab_size(policy_folder) -> int:
    return gym.make(ENV_ID, tokenizer=str(policy_folder)).action_space.vocab_size


@pytest.fixture(scope="session")
def in_process(policy_folder, vocab_size):
    engine = VLLMEngine(str(policy_folder), SLOTS, vocab_size, TEMPERATURE, max_model_len=8192)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def over_http(server, policy_folder, vocab_size):
    folder = str(policy_folder)
    engine = VLLMServerEngine(server.url, folder, SLOTS, vocab_size, TEMPERATURE, tokenizer=folder)
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


def play(engine, number=SLOTS, turns=3, length=16, seed=1):
    """Episodes of several turns; returns (row, start, span, logprobs, versions) of every turn."""
    rows, left, spans = {}, dict.fromkeys(range(number), turns), []
    for slot in range(number):
        rows[slot] = prompt(slot)
        engine.feed(slot, rows[slot], length, [], seed=[seed, slot])
    while engine.busy:
        for slot, span, logprobs, versions in engine.step():
            start = len(rows[slot])
            rows[slot] = np.concatenate([rows[slot], span])
            spans.append((rows[slot], start, span, logprobs, versions))
            left[slot] -= 1
            if left[slot]:
                answer = prompt(slot, 4)
                rows[slot] = np.concatenate([rows[slot], answer])
                engine.feed(slot, answer, length, [])
    engine.release()
    assert len(spans) == number * turns
    return spans


def worst(spans, trainer_logprobs, **options):
    """The largest difference between the engine's log-probabilities and the trainer's."""
    differences = []
    for row, start, span, logprobs, _ in spans:
        ours = trainer_logprobs(row, start, **options).numpy()[np.arange(len(span)), span]
        differences.append(np.abs(ours - logprobs).max())
    return max(differences)


def train(policy, scale=0.003):
    """Move all weights a little, as an optimizer step would."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)


def running(server):
    """The number of requests that the server is sampling for."""
    metrics = httpx.get(server.url + "/metrics").text
    return sum(float(value) for value in re.findall(r"^vllm:num_requests_running{.*} (.*)$", metrics, re.MULTILINE))


def test_logprobs_are_the_trainers_before_and_after_an_update(engine, policy, trainer_logprobs, vocab_size):
    spans = play(engine)
    assert worst(spans, trainer_logprobs) < CLOSE
    for _, _, span, logprobs, versions in spans:
        assert (span.dtype, logprobs.dtype, versions.dtype) == (np.int32, np.float32, np.int32)
        assert len(span) == len(logprobs) == len(versions) == 16 and not versions.any()
        assert span.max() < vocab_size, "a row of the embedding that is no token was sampled"
    train(policy)
    assert worst(spans, trainer_logprobs) > 100 * CLOSE  # or the update would show nothing
    engine.update(distributed.weights(policy), 7)  # without the head, which is tied to the embedding
    spans = play(engine)
    assert worst(spans, trainer_logprobs) < CLOSE
    assert {int(version) for *_, versions in spans for version in versions} == {7}


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


def test_running_requests_go_on_under_new_weights(engine, server, policy, trainer_logprobs):
    """Every token knows its version, and its log-probability is that of these weights alone: no key or value stays."""
    rows = {slot: prompt(slot, 200) for slot in range(SLOTS)}
    for slot, row in rows.items():
        engine.feed(slot, row, 800 if engine.overlaps else 60, [], seed=[3, slot])
    while engine.overlaps and running(server) < SLOTS:  # the server has to begin
        pass
    for _ in range(20):  # in process that many tokens
        assert not engine.step()
    old = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    train(policy)
    engine.update(distributed.weights(policy), 1)
    spans = []
    while engine.busy:
        for slot, *span in engine.step():
            spans.append((np.concatenate([rows[slot], span[0]]), len(rows[slot]), *span))
    engine.release()
    assert len(spans) == SLOTS
    cut = {}
    for row, start, span, logprobs, versions in spans:
        (cut[start],) = np.flatnonzero(np.diff(versions)) + 1
        assert versions[0] == 0 and versions[-1] == 1
        ours = trainer_logprobs(row, start).numpy()[np.arange(len(span)), span]
        assert np.abs(ours - logprobs)[cut[start] :].max() < CLOSE
    policy.load_state_dict(old)
    for row, start, span, logprobs, _ in spans:
        ours = trainer_logprobs(row, start).numpy()[np.arange(len(span)), span]
        assert np.abs(ours - logprobs)[: cut[start]].max() < CLOSE


def test_a_twin_has_its_own_episodes_and_temperature(engine, trainer_logprobs):
    twin = engine.twin(temperature=0.0)
    rows = {view: prompt(2 + (view is twin)) for view in (engine, twin)}
    for view, row in rows.items():
        view.feed(0, row, 24, [], seed=[1, 0])
    spans = {}
    while engine.busy or twin.busy:
        for view in rows:
            for slot, *span in view.step():
                assert slot == 0 and view not in spans
                spans[view] = span
    twin.release()
    greedy, row = spans[twin][0], np.concatenate([rows[twin], spans[twin][0]])
    assert (trainer_logprobs(row, len(rows[twin])).argmax(-1).numpy() == greedy).all()
    hot = engine.twin(temperature=1.5)
    assert worst(play(hot, 2), trainer_logprobs, temperature=1.5) < CLOSE
    engine.feed(0, prompt(5), 8, [])  # a further turn: its episode is still there
    while engine.busy:
        ((slot, span, logprobs, _),) = engine.step() or [(0, None, None, None)]
    row = np.concatenate([rows[engine], spans[engine][0], prompt(5), span])
    engine.release()
    assert worst([(row, len(row) - len(span), span, logprobs, None)], trainer_logprobs) < CLOSE


def test_top_p_keeps_to_the_nucleus(engine, trainer_logprobs):
    narrow = engine.twin(temperature=1.5)
    narrow.top_p = 0.6
    for row, start, span, logprobs, _ in play(narrow, 2):
        probs = trainer_logprobs(row, start, 1.5).exp()
        ordered = probs.sort(-1, descending=True).values
        mass = (ordered * (ordered.cumsum(-1) - ordered < 0.6)).sum(-1)
        ours = (probs[torch.arange(len(span)), torch.tensor(span).long()] / mass).log().numpy()
        assert np.abs(ours - logprobs).max() < CLOSE


def test_the_seed_decides_whatever_the_slot(engine):
    samples = []
    for slots, seed in [((0, 1), 5), ((3, 2), 5), ((0, 1), 6)]:
        for episode, slot in enumerate(slots):
            engine.feed(slot, prompt(0), 24, [], seed=[seed, episode])
        spans = {}
        while engine.busy:
            spans |= {slot: span.tolist() for slot, span, *_ in engine.step()}
        engine.release()
        samples.append([spans[slot] for slot in slots])
    first, again, other = samples
    assert first == again
    assert first[0] != first[1] and first[0] != other[0]


def test_a_span_ends_with_a_stop_token(engine, trainer_logprobs):
    (row, start, span, *_) = play(engine, 1, turns=1)[0]
    engine.feed(0, row[:start], 16, [int(span[5])], seed=[1, 0])
    ended = []
    while engine.busy:
        ended += engine.step()
    engine.release()
    first = span.tolist().index(span[5])
    assert ended[0][1].tolist() == span[: first + 1].tolist()


def test_release_forgets_what_is_being_sampled(engine, server, trainer_logprobs):
    for slot in range(SLOTS):
        engine.feed(slot, prompt(slot), 4000, [], seed=[1, slot])
    engine.step()
    engine.release()
    assert not engine.busy
    assert worst(play(engine, 2), trainer_logprobs) < CLOSE
    assert running(server) == 0


def test_a_row_that_does_not_fit_is_refused(engine):
    with pytest.raises(ValueError, match="max_model_len 8192"):
        engine.feed(0, prompt(0, 5000), 4000, [], seed=[1, 0])
    engine.release()


def test_episodes_of_multihop_world(engine, policy_folder, trainer_logprobs):
    envs = gym.make_vec(ENV_ID, num_envs=SLOTS, split="train", tokenizer=str(policy_folder))
    rows = rollout(envs, engine, [(100 + task, task) for task in range(12)], seed=1)
    envs.close()
    assert [row.episode for row in rows] == list(range(100, 112))
    assert np.mean([row.stats["turns"] for row in rows]) > 1.5, "the policy calls tools"
    assert np.mean([row.stats["tool_calls"] - row.stats["tool_errors"] for row in rows]) > 0.5, "as they are meant"
    for row in rows:
        for (start, end, _), logprobs, versions in zip(row.turns, row.span_logprobs, row.span_versions, strict=True):
            ours = trainer_logprobs(row.tokens[:end], start).numpy()
            assert np.abs(ours[np.arange(end - start), row.tokens[start:end]] - logprobs).max() < CLOSE
            assert not versions.any()


def test_the_tokenizer_may_not_be_larger_than_the_model(server, policy, policy_folder):
    with pytest.raises(SystemExit, match="they don't fit"):
        VLLMServerEngine(server.url, str(policy_folder), SLOTS, policy.config.vocab_size + 1)


def test_an_engine_that_breaks_says_so(in_process):
    """Last in this file: the engine does not survive it. The forward really fails, as it would with broken weights."""
    in_process.feed(0, prompt(0), 16, [], seed=[1, 0])
    in_process.step()
    model = in_process.host.llm.llm_engine.model_executor.driver_worker.worker.get_model()
    del model.model.layers[1].mlp
    with pytest.raises(EngineDied, match="vLLM stopped with .*mlp"):
        while in_process.busy:
            in_process.step()
