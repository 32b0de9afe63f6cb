"""The engine and the rollout: what it samples, what it says about it, and what it refuses."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
rollout = pytest.importorskip("llm_utils.rollout")

from llm_utils.forward import policy_forward, score  # noqa: E402
from llm_utils.transformers_engine import TransformersEngine, sample  # noqa: E402

EPISODES = [(i, 7 * i) for i in range(10)]


def play(policy, envs, vocab_size, episodes=EPISODES, seed=1, **kwargs):
    engine = TransformersEngine(policy, envs.num_envs, vocab_size, **kwargs)
    return rollout.rollout(envs, engine, episodes, seed)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "gpt2", "gemma2"])
def test_the_trainer_finds_the_samplers_log_probabilities(
    policy, small_model, make_envs, vocab_size, kind, temperature
):
    if kind != "qwen2":
        policy = small_model(kind)
    rows = play(policy, make_envs(4), vocab_size, EPISODES[:6], temperature=temperature)
    assert any(len(row.turns) > 1 for row in rows)
    with torch.no_grad():
        for row in rows:  # alone, and then all at once
            logprobs, _ = policy_forward(policy, row.segments(), vocab_size, temperature)
            np.testing.assert_allclose(row.logprobs[row.action_mask], logprobs.numpy(), atol=1e-4)
    batch = [segment for row in rows for segment in row.segments()]
    score([(batch, 1)], "ref_logprobs", policy, vocab_size, temperature)
    for row in rows:
        np.testing.assert_allclose(row.logprobs, row.ref_logprobs, atol=1e-4)
        np.testing.assert_array_equal(row.old_logprobs, row.logprobs)


def test_rows_are_laid_out_as_they_were_played(policy, make_envs, vocab_size):
    envs = make_envs(3)
    rows = play(policy, envs, vocab_size)
    assert [(row.episode, row.task_index) for row in rows] == EPISODES
    env = make_envs(1).envs[0]
    for row in rows:  # play the spans again, in one environment
        state, _ = env.reset(seed=row.task_index, options={"task_index": row.task_index})
        assert len(state) == row.prompt_length
        total = 0.0
        for turn in row.turns:
            assert len(state) == turn.start and row.action_mask[turn.start : turn.end].all()
            state, again, terminated, truncated, _ = env.step(row.tokens[turn.start : turn.end])
            assert turn.reward == again == pytest.approx(row.rewards[turn.end - 1])
            total += turn.reward
        np.testing.assert_array_equal(state, row.tokens)
        assert (row.terminated, row.truncated) == (terminated, truncated)
        assert row.stats["return"] == pytest.approx(total) and row.stats["turns"] == len(row.turns)
        assert row.action_mask.sum() == sum(turn.end - turn.start for turn in row.turns)


def same(one, two):
    return sum(np.array_equal(a.tokens, b.tokens) for a, b in zip(one, two, strict=True))


def test_the_same_seed_gives_the_same_episodes(policy, make_envs, vocab_size):
    once, again = (play(policy, make_envs(4), vocab_size) for _ in range(2))
    assert same(once, again) == len(EPISODES)
    assert same(once, play(policy, make_envs(4), vocab_size, seed=2)) < 2


def test_an_episode_does_not_depend_on_its_neighbours(policy, make_envs, vocab_size):
    """Whatever runs beside it and in whichever slot; but for rounding, which may move a draw over an edge."""
    many = play(policy, make_envs(8), vocab_size)
    few = play(policy, make_envs(3), vocab_size, EPISODES[::-1])
    assert same(many, few[::-1]) >= len(EPISODES) - 1


def test_greedy_spans_are_those_of_generate(policy, make_envs, vocab_size):
    for row in play(policy, make_envs(4), vocab_size, EPISODES[:4], temperature=0.0):
        for turn in row.turns:
            ids = torch.from_numpy(row.tokens[None, : turn.start]).long()
            with torch.no_grad():
                for token in row.tokens[turn.start : turn.end]:
                    best = policy(input_ids=ids).logits[0, -1, :vocab_size].argmax()
                    assert best == token
                    ids = torch.cat([ids, best.view(1, 1)], 1)


def test_nothing_beyond_the_tokenizer_is_sampled(policy, make_envs, vocab_size):
    with torch.no_grad():  # a model that would love to
        policy.get_output_embeddings().weight[vocab_size:] = 50 * policy.get_output_embeddings().weight[:7]
    for row in play(policy, make_envs(4), vocab_size):
        assert row.tokens.max() < vocab_size


def test_spans_end_at_the_bound_or_at_a_stop_token(policy, make_envs, vocab_size):
    envs = make_envs(4)
    stops = envs.envs[0].dialect.stop_token_ids
    with torch.no_grad():
        policy.get_output_embeddings().weight[stops[0]] += 0.5
    lengths = set()
    for row in play(policy, envs, vocab_size):
        for turn in row.turns:
            span = row.tokens[turn.start : turn.end]
            assert not np.isin(span[:-1], stops).any()
            assert len(span) == 12 or span[-1] in stops
            lengths.add(len(span))
    assert 12 in lengths and len(lengths) > 1


def test_a_long_span_grows_the_buffers(policy, make_envs, vocab_size):
    (row,) = play(policy, make_envs(2, max_turns=1, max_action_tokens=150), vocab_size, [(5, 5)])
    assert row.action_mask.sum() > 64
    assert row.logprobs[row.action_mask].all()


def test_sampling_follows_the_distribution():
    logprobs = torch.log(torch.tensor([0.5, 0.0, 0.3, 0.2]))
    noise = torch.linspace(0, 1, 10_001)
    drawn = sample(logprobs.expand(len(noise), 4), noise)
    shares = torch.bincount(drawn, minlength=4) / len(noise)
    torch.testing.assert_close(shares, logprobs.exp(), atol=1e-3, rtol=0)
    kept = sample(logprobs.expand(len(noise), 4), noise, top_p=0.7)
    assert set(kept.tolist()) == {0, 2}
    assert (kept == 0).float().mean() == pytest.approx(0.5 / 0.8, abs=1e-3)


class Editing:
    """A vector environment whose states forget their first token: what cannot be trained as one row."""

    def __init__(self, envs):
        self.envs, self.num_envs, self.reset, self.send = envs, envs.num_envs, envs.reset, envs.send

    def recv(self, *args, **kwargs):
        ids, states, *rest = self.envs.recv(*args, **kwargs)
        return ids, [state[1:] for state in states], *rest


def test_an_environment_that_edits_its_context_is_refused(policy, make_envs, vocab_size):
    with pytest.raises(RuntimeError, match="does.*n.t begin with the old state"):
        play(policy, Editing(make_envs(2)), vocab_size)


def test_layers_that_are_no_full_attention_are_refused(policy, vocab_size):
    policy.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match="full attention in every layer"):
        TransformersEngine(policy, 2, vocab_size)


def test_logits_that_are_not_finite_are_reported(policy, make_envs, vocab_size):
    with torch.no_grad():
        policy.get_output_embeddings().weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="logits"):
        play(policy, make_envs(2), vocab_size)
