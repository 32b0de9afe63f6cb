"""The advantage estimators, against golden vectors and a definition that is too slow to use."""

import itertools

import gigpo_llm
import grpo_llm
import numpy as np
import ppo_llm
import pytest
import reinforce_pp_llm
import rloo_llm
import torch
from hypothesis import given
from hypothesis import strategies as st

from llm_utils.trajectory import make_groups

# Two turns: three action tokens, four of the environment, two action tokens. Turn rewards 0.2 and 1.
MASK = np.array([1, 1, 1, 0, 0, 0, 0, 1, 1], bool)
REWARDS = np.array([0, 0, 0.2, 0, 0, 0, 0, 0, 1.0])
VALUES = np.array([0.5, 0.4, 0.3, 0.9, 0.9, 0.9, 0.9, 0.6, 0.7])
TURN_END = np.array([0, 0, 1, 0, 0, 0, 0, 0, 1], bool)


def fill(script, rows, args):
    """Fill the advantages as this learner does."""
    in_groups = script in (grpo_llm, rloo_llm, gigpo_llm)
    script.compute_advantages(make_groups(rows, args.group_size, args.gamma) if in_groups else rows, args)


@pytest.fixture
def trajectory(make_row):
    """trajectory(...): a row with these arrays after `prompt` further tokens."""

    def make(mask=MASK, rewards=REWARDS, values=VALUES, prompt=0, **kwargs):
        mask = np.concatenate([np.zeros(prompt, bool), mask])
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
        earned = np.concatenate([np.zeros(prompt), rewards])
        turns = [(a, b, earned[a:b].sum()) for a, b in zip(edges[::2], edges[1::2], strict=True)]
        row = make_row(turns, len(mask), prompt, **kwargs)
        row.values[prompt:] = values
        return row

    return make


def test_golden_vectors_of_token_gae():
    advantages, returns = ppo_llm.gae_tokens(REWARDS, VALUES, MASK, 1.0, 0.95)
    np.testing.assert_allclose(advantages, [0.5863, 0.7225, 0.8658, 0, 0, 0, 0, 0.385, 0.3], atol=5e-5)
    np.testing.assert_allclose(returns, (advantages + VALUES) * MASK)


def test_golden_vectors_of_a_truncated_row():
    advantages, _ = ppo_llm.gae_tokens(REWARDS, VALUES, MASK, 1.0, 0.95, done=False, v_last=0.8)
    np.testing.assert_allclose(advantages, [1.2379, 1.4084, 1.5877, 0, 0, 0, 0, 1.145, 1.1], atol=5e-5)


def test_golden_vectors_of_turn_gae():
    advantages, returns = ppo_llm.gae_turns([0.2, 1.0], [0.5, 0.6], 1.0, 0.95)
    np.testing.assert_allclose(advantages, [0.68, 0.4])
    np.testing.assert_allclose(returns, [1.18, 1.0])


def test_golden_vectors_of_bilevel_gae():
    advantages, _ = ppo_llm.gae_bilevel(REWARDS, VALUES, MASK, TURN_END, 1.0, 1.0, 0.95)
    np.testing.assert_allclose(advantages, [0.65, 0.75, 0.85, 0, 0, 0, 0, 0.4, 0.3])


def test_bilevel_gae_of_tokens_after_the_last_turn_begins_at_the_end():
    """They are in it with --no-advantage-mask only."""
    r, v, end = np.array([0.0, 1.0, 0.0]), np.array([0.5, 0.6, 0.3]), np.array([False, True, False])
    for done, v_last, expected in ((True, 0.0, -0.3), (False, 0.7, 0.4)):
        advantages, _ = ppo_llm.gae_bilevel(r, v, np.ones(3, bool), end, done=done, v_last=v_last)
        np.testing.assert_allclose(advantages[2], expected)


numbers = st.floats(-2, 2)
rates = st.floats(0, 1)
tokens = st.lists(st.tuples(numbers, numbers, st.booleans()), max_size=25)


@given(tokens, rates, rates, st.booleans(), numbers)
def test_token_gae_is_the_sum_of_its_definition(tokens, gamma, lam, done, v_last):
    r, v, m = (np.array([token[i] for token in tokens]) for i in range(3))
    advantages, returns = ppo_llm.gae_tokens(r, v, m, gamma, lam, done, v_last)
    at = np.flatnonzero(m) if len(m) else []
    after = [v[t] for t in at[1:]] + [0.0 if done else v_last]
    deltas = [r[t] + gamma * after[j] - v[t] for j, t in enumerate(at)]
    expected = np.zeros(len(r))
    for j, t in enumerate(at):
        expected[t] = sum((gamma * lam) ** (i - j) * deltas[i] for i in range(j, len(at)))
    np.testing.assert_allclose(advantages, expected, atol=1e-9)
    np.testing.assert_allclose(returns, np.where(m, expected + v, 0) if len(m) else [], atol=1e-9)


@given(tokens, rates, rates, st.integers(0, 300))
def test_what_the_environment_writes_changes_no_advantage(tokens, gamma, lam, more):
    r, v, m = (np.array([token[i] for token in tokens]) for i in range(3))
    r = np.where(m, r, 0.0) if len(m) else r
    at = len(r) // 2
    noise = np.random.default_rng(more).normal(size=more)
    longer = [np.insert(r, at, np.zeros(more)), np.insert(v, at, noise), np.insert(m, at, np.zeros(more, bool))]
    short = ppo_llm.gae_tokens(r, v, m, gamma, lam)[0]
    long = ppo_llm.gae_tokens(*longer, gamma, lam)[0]
    np.testing.assert_allclose(np.delete(long, slice(at, at + more)), short)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 1000))
def test_without_discounts_all_estimators_agree_on_the_return(lengths, seed):
    rng = np.random.default_rng(seed)
    mask = np.concatenate([[True] * n + [False] * int(rng.integers(4)) for n in lengths])
    ends = np.array([bool(m) and not (i + 1 < len(mask) and mask[i + 1]) for i, m in enumerate(mask)])
    rewards, values = rng.normal(size=len(mask)) * ends, rng.normal(size=len(mask))
    to_go = np.cumsum(rewards[::-1])[::-1]
    for advantages, returns in (
        ppo_llm.gae_tokens(rewards, values, mask, 1.0, 1.0),
        ppo_llm.gae_bilevel(rewards, values, mask, ends, 1.0, 1.0, 1.0),
    ):
        np.testing.assert_allclose(returns, to_go * mask, atol=1e-9)
        np.testing.assert_allclose(advantages, (to_go - values) * mask, atol=1e-9)


@pytest.mark.parametrize("advantage", ["tokens", "turns", "bilevel"])
@pytest.mark.parametrize("adv_norm", ["others", "token", "turn", "none"])
def test_advantages_stand_on_sampled_tokens_only_and_are_whitened_over_the_batch(trajectory, advantage, adv_norm):
    rows = [trajectory(prompt=3), trajectory(rewards=-REWARDS, prompt=5), trajectory(rewards=0 * REWARDS)]
    ppo_llm.compute_advantages(rows, ppo_llm.Args(advantage=advantage, adv_norm=adv_norm))
    for row in rows:
        assert not row.advantages[~row.action_mask].any()
        assert not row.returns[~row.action_mask].any()
    if adv_norm in ("others", "none"):
        return
    everything = np.concatenate([row.advantages[row.action_mask] for row in rows])
    share = np.tile([1, 1, 1, 1, 1] if adv_norm == "token" else [1 / 3, 1 / 3, 1 / 3, 1 / 2, 1 / 2], 3)
    assert np.average(everything, weights=share) == pytest.approx(0, abs=1e-6)
    assert np.average(everything**2, weights=share) == pytest.approx(1, abs=1e-6)


def test_turn_advantages_are_those_of_turn_gae(trajectory):
    row = trajectory(prompt=2)
    ppo_llm.compute_advantages([row], ppo_llm.Args(advantage="turns", gae_lambda=0.95, adv_norm="none"))
    np.testing.assert_allclose(row.advantages[2:], np.array([0.68] * 3 + [0] * 4 + [0.4] * 2), atol=1e-6)
    starts = ppo_llm.value_positions(row, ppo_llm.Args(advantage="turns"))
    assert np.flatnonzero(starts).tolist() == [2, 9]  # a turn begins in one state


@pytest.mark.parametrize("advantage", ["tokens", "turns", "bilevel"])
def test_only_a_truncated_row_bootstraps_and_only_if_asked(trajectory, advantage):
    def first(truncation, **kwargs):
        row = trajectory(value_last=5.0, **kwargs)
        ppo_llm.compute_advantages([row], ppo_llm.Args(advantage=advantage, adv_norm="none", truncation=truncation))
        return row.advantages[-1]

    paid = first("outcome", truncated=True)
    assert first("bootstrap", terminated=True) == paid
    assert first("bootstrap", terminated=True, truncated=True) == paid  # it answered at the last turn allowed
    assert first("bootstrap", truncated=True) > paid + 1


def test_table_4_without_the_advantage_mask_runs_over_the_tools_tokens_too(trajectory):
    row = trajectory(prompt=2)
    ppo_llm.compute_advantages([row], ppo_llm.Args(advantage_mask=False, gae_lambda=0.95, adv_norm="none"))
    plain = ppo_llm.gae_tokens(REWARDS, VALUES, np.ones(9), 1.0, 0.95)[0]
    np.testing.assert_allclose(row.advantages, np.concatenate([[0, 0], plain]), atol=1e-6)
    np.testing.assert_allclose(row.advantages[2:5], [0.5753, 0.7109, 0.8536], atol=5e-5)  # what walking over them does


def test_the_noise_of_a_kl_divergence_is_not_scaled_up_in_a_solved_group(make_row):
    """All episodes of the group succeed: what is left is the KL divergence, as small as it is."""
    for script in (grpo_llm, rloo_llm, gigpo_llm, reinforce_pp_llm, ppo_llm):
        rng, rows = np.random.default_rng(0), []
        for episode in range(8):
            row = make_row([(1, 3, 0.0), (4, 6, 1.0)], 6, episode=episode)
            row.old_logprobs[row.action_mask] = rng.normal(size=4) * 0.1
            rows.append(row)
        fill(script, rows, script.Args(kl_coef=0.01, kl_in="reward"))
        largest = max(np.abs(row.advantages).max() for row in rows)
        if script is ppo_llm:  # its critic knows nothing yet: 1 is subtracted as the others' mean
            assert all(np.ptp(row.advantages[row.action_mask]) < 0.02 for row in rows)
        assert 0 < largest < 0.02, script


@pytest.mark.parametrize("rewards", [1.0, 100.0])
@pytest.mark.parametrize(
    ("script", "kwargs", "of_others"),
    [
        (rloo_llm, {"group_size": 4}, -1 / 3),  # what an episode costs is its own, and a third of the others' baseline
        (reinforce_pp_llm, {}, 0),  # no baseline: its own alone
        (reinforce_pp_llm, {"adv_norm": "batch"}, 0),
        (reinforce_pp_llm, {"baseline": True, "group_size": 4}, -1 / 3),
    ],
)
def test_a_kl_divergence_in_the_reward_is_taken_after_scaling(make_row, script, kwargs, of_others, rewards):
    """The same numbers whatever the rewards' size: 0.1 x 0.4 nats of the first episode's second turn, so of both its
    turns, and nothing of what was left before."""

    def advantages(**more):
        rows = [make_row([(1, 2, 0.0), (3, 4, rewards * (i % 2))], 4, episode=i) for i in range(8)]
        rows[0].old_logprobs[3] = 0.4
        fill(script, rows, script.Args(**kwargs, **more))
        return np.array([row.advantages[[1, 3]] for row in rows])

    without = advantages()
    scale = np.abs(without).max()
    assert scale > 0.6 * rewards if script is rloo_llm else 0.6 < scale < 2
    expected = np.zeros((8, 2))
    expected[:4] = -0.04 * of_others
    expected[0] = -0.04
    np.testing.assert_allclose(advantages(kl_coef=0.1, kl_in="reward") - without, expected, atol=1e-5)


@pytest.mark.parametrize("advantage", ["tokens", "turns", "bilevel"])
@pytest.mark.parametrize("gae_lambda", [1.0, 0.5])
def test_a_kl_divergence_in_the_reward_has_its_own_gradient(make_row, advantage, gae_lambda):
    """Summed over all episodes of a game of one or two turns of two tokens, in which every token depends on those
    before it. The divergence is not discounted, whatever rewards are."""
    rng, sequences = np.random.default_rng(0), []
    for tokens in itertools.product((0, 1), repeat=4):
        if tokens[1] == 1 or tokens[2:] == (0, 0):  # the second token decides whether there is a second turn
            sequences.append(tokens if tokens[1] == 1 else tokens[:2])
    prefixes = sorted({tokens[:t] for tokens in sequences for t in range(len(tokens))})
    logits, others = torch.from_numpy(rng.normal(size=(2, len(prefixes), 2)))
    policy, reference = torch.log_softmax(logits.requires_grad_(), -1), torch.log_softmax(others, -1)
    divergence, found = torch.zeros(()), torch.zeros(())
    args = ppo_llm.Args(kl_coef=0.3, kl_in="reward", advantage=advantage, gae_lambda=gae_lambda, gamma=0.9)
    for tokens in sequences:
        at = [prefixes.index(tokens[:t]) for t in range(len(tokens))]
        new, old = policy[at, tokens], reference[at, tokens]
        probability = new.sum().exp()
        divergence = divergence + probability * (new - old).sum()
        row = make_row([(2, 4, 0.0), (6, 8, 0.0)][: len(tokens) // 2], 9)
        row.old_logprobs[row.action_mask], row.ref_logprobs[row.action_mask] = new.detach(), old
        ppo_llm.compute_advantages([row], args)
        found = found + probability.detach() * (torch.from_numpy(row.advantages[row.action_mask]) * new).sum()
    (expected,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    (gradient,) = torch.autograd.grad(found, logits)
    torch.testing.assert_close(gradient, -0.3 * expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("turns", "rewards"),
    [
        ([(2, 4, 1.0), (6, 7, 2.0)], [0, 0, 0, 1, 0, 0, 2, 0]),
        ([(2, 4, 1.0), (6, 6, 2.0)], [0, 0, 0, 3, 0, 0, 0, 0]),  # nothing sampled: to the token sampled before it
        ([(2, 2, 1.0), (4, 4, 0.5), (6, 8, 2.0)], [0, 0, 0, 0, 0, 0, 0, 3.5]),  # or to the end of the next span
        ([(2, 2, 1.0)], [0] * 8),  # an episode in which nothing was sampled trains nothing
    ],
)
def test_a_turns_reward_sits_on_its_last_sampled_token_and_none_is_lost(make_row, turns, rewards):
    row = make_row(turns, 8, 2, logprobs=np.full(8, -1.0))
    np.testing.assert_array_equal(row.rewards, rewards)
    assert not row.rewards[~row.action_mask].any()
    assert [(turn.start, turn.end) for turn in row.turns] == [turn[:2] for turn in turns if turn[1] > turn[0]]
    np.testing.assert_array_equal(row.logprobs, -1.0 * row.action_mask)
    row.truncated = True
    for advantage in ("tokens", "turns", "bilevel"):
        ppo_llm.compute_advantages([row], ppo_llm.Args(advantage=advantage))
