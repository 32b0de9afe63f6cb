"""learner/grpo_llm.py: advantages within groups, and its losses against plain loops. Its runs: test_grpo_runs.py."""

import itertools
import math
from dataclasses import replace

import grpo_llm
import numpy as np
import pytest
import rloo_llm
import torch

from llm_utils import trajectory
from llm_utils.ratio import segment_numbers
from llm_utils.returns import returns_to_go
from llm_utils.training.forward import policy_forward
from llm_utils.trajectory import make_batch, make_groups, token_weights

# ------------------------------------------------------------------------------------------------------- advantages


def group(*rewards, gamma=1.0, **kwargs):
    """Advantages of the turns of episodes with these rewards."""
    returns = returns_to_go([np.array(r, float) for r in rewards], gamma)
    table = grpo_llm.group_advantages(returns, **kwargs)
    return [row[: len(turns)].tolist() for row, turns in zip(table, rewards, strict=True)]


def fill(rows, args, script=grpo_llm):
    """Fill the advantages of these episodes."""
    script.compute_advantages(make_groups(rows, args.group_size, args.gamma), args)


def test_golden_vectors_of_group_advantages():
    outcomes = [[1], [0], [0], [0]]
    assert sum(group(*outcomes), []) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert sum(group(*outcomes, scale=False), []) == pytest.approx([0.75, -0.25, -0.25, -0.25])  # Dr. GRPO
    assert group([1], [1], [1]) == [[0], [0], [0]]


def test_golden_vectors_of_turn_credit():
    # rewards to go: [3 2 2], [1 0 .], [-1 . .]; means over all three episodes: 1, 2/3, 2/3
    episodes = [1, 0, 2], [1, 0], [-1]
    assert group(*episodes, scale=False, credit="episode") == [[2, 2, 2], [0, 0], [-2]]
    expected = [[2, 4 / 3, 4 / 3], [0, -2 / 3], [-2]]
    for got, values in zip(group(*episodes, scale=False, credit="turn"), expected, strict=True):
        assert got == pytest.approx(values)
    # the deviations of the others' returns, (1, -1), (3, -1), (3, 1), and three halves of the advantages: no own share
    for got, values, spread in zip(group(*episodes, credit="turn"), expected, np.sqrt([2, 8, 2]), strict=True):
        assert got == pytest.approx([1.5 * value / spread for value in values])
    spread = np.std([3, 1, -1], ddof=1)  # as published, of the whole group
    for got, values in zip(group(*episodes, credit="turn", scale_by="group"), expected, strict=True):
        assert got == pytest.approx([value / spread for value in values], abs=1e-5)
    # gamma 1/2: to go [1.5 1 2], [1 0 .], [-1 . .]; means 0.5, 1/3, 2/3
    halved = group(*episodes, scale=False, credit="turn", gamma=0.5)
    for got, values in zip(halved, [[1, 2 / 3, 4 / 3], [0.5, -1 / 3], [-1.5]], strict=True):
        assert got == pytest.approx(values)


def test_equal_returns_earned_at_different_times_give_no_huge_advantages():
    assert sum(group([1, 0], [0, 1], credit="turn"), []) == pytest.approx([0, -2**0.5, 0, 2**0.5], abs=1e-5)
    lone = sum(group([1], *[[0]] * 15, credit="turn"), [])  # the others are all equal: their deviation says nothing
    assert lone[0] == pytest.approx(4) and max(np.abs(lone[1:])) < 0.3
    assert group([1, 0], [0, 1], credit="episode") == [[0, 0], [0, 0]]


def test_a_group_may_have_episodes_in_which_nothing_was_sampled():
    assert group([2.0, 0.0], [], scale=False, credit="turn") == [[1.0, 0.0], []]
    assert group([], []) == [[], []]


# A process of at most three turns in which the policy decides when to stop. In turns 0 and 1 action 0 stops and action
# 1 goes on; in turn 2 both end the episode. Rewards are paid on the way and at the end.
ACTIONS = [(0,), (1, 0), (1, 1, 0), (1, 1, 1)]
REWARDS = [(0.3,), (0.5, -1.0), (0.5, 0.25, 2.0), (0.5, 0.25, -0.7)]
CHANCE_OF_1 = [0.7, 0.4, 0.2]


def slopes(actions):
    """Gradients of the log-probabilities of the turns' actions with respect to the three logits."""
    out = np.zeros((len(actions), 3))
    for turn, action in enumerate(actions):
        out[turn, turn] = action - CHANCE_OF_1[turn]
    return out


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("credit", ["turn", "episode"])
def test_credit_is_unbiased_when_the_policy_decides_when_to_stop(credit, size):
    """Summed over every possible group: the expected gradient is (G - 1) / G times the true one."""
    chances = [math.prod(p if a else 1 - p for a, p in zip(acts, CHANCE_OF_1, strict=False)) for acts in ACTIONS]
    assert sum(chances) == pytest.approx(1)
    true = sum(p * sum(r) * slopes(acts).sum(0) for p, r, acts in zip(chances, REWARDS, ACTIONS, strict=True))
    expected = np.zeros(3)
    for drawn in itertools.product(range(4), repeat=size):
        advantages = group(*(REWARDS[i] for i in drawn), credit=credit, scale=False)
        gradient = sum(a @ slopes(ACTIONS[i]) for a, i in zip(advantages, drawn, strict=True)) / size
        expected += math.prod(chances[i] for i in drawn) * gradient
    np.testing.assert_allclose(expected, (size - 1) / size * true, atol=1e-12)
    assert np.abs(true).min() > 0.01


def test_advantages_stand_on_the_tokens_of_their_turns(make_row):
    def pair():
        return [make_row([(2, 4, 1.0), (6, 8, 2.0)], 9), make_row([(2, 3, 0.0)], 5, episode=1)]

    args = grpo_llm.Args(group_size=2, scale_rewards=False)
    rows = pair()
    fill(rows, args)
    assert rows[0].advantages.tolist() == [0, 0, 1.5, 1.5, 0, 0, 1, 1, 0]
    assert rows[1].advantages.tolist() == [0, 0, -1.5, 0, 0]
    rows = pair()
    fill(rows, replace(args, credit="episode"))
    assert rows[0].advantages.tolist() == [0, 0, 1.5, 1.5, 0, 0, 1.5, 1.5, 0]
    rows = pair()
    fill(rows, replace(args, advantage_mask=False))  # also on what a turn was answered
    assert rows[0].advantages.tolist() == [0, 0, 1.5, 1.5, 1.5, 1.5, 1, 1, 1]
    assert rows[1].advantages.tolist() == [0, 0, -1.5, -1.5, -1.5]


def test_groups_are_told_apart_by_the_number_of_the_episode(make_row):
    rows = [make_row([(1, 2, reward)], 2, episode=i) for i, reward in enumerate((1, 0, 5, 5, 7, 9))]
    fill(rows, grpo_llm.Args(group_size=2, scale_rewards=False))
    assert [row.advantages[1] for row in rows] == [0.5, -0.5, 0, 0, -1, 1]
    assert [group.rows for group in make_groups(rows[::-1], 2, 1.0)] == [rows[:2], rows[2:4], rows[4:]]
    assert [group.has_signal("turn") for group in make_groups(rows, 2, 1.0)] == [True, False, True]
    late, early = make_row([(1, 2, 0.0), (2, 3, 1.0)], 3), make_row([(1, 2, 1.0), (2, 3, 0.0)], 3)
    (pair,) = make_groups([late, early], 2, 1.0)
    assert pair.returns.tolist() == [[1, 1], [1, 0]] and pair.has_signal("turn") and not pair.has_signal("episode")


@pytest.mark.parametrize("script", [grpo_llm, rloo_llm])
@pytest.mark.parametrize("credit", ["turn", "episode"])
@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_groups_with_signal_are_those_that_have_advantages(make_row, script, credit, gamma):
    """Discounted as the advantages are: the same reward a turn later is less."""
    rewards = [(0, 1), (1, 0)], [(1, 1), (1, 1)], [(0, 1), (1, -1)], [(0,), (0, 0)], [(0.5,), (0, 1)]
    rows = [
        make_row([(1 + 2 * k, 2 + 2 * k, reward) for k, reward in enumerate(turns)], 6, episode=i)
        for i, turns in enumerate(itertools.chain(*rewards))
    ]
    groups = make_groups(rows, 2, gamma)
    script.compute_advantages(groups, script.Args(group_size=2, credit=credit, gamma=gamma))
    for pair in groups:
        assert pair.has_signal(credit) == any(row.advantages.any() for row in pair.rows)


@pytest.mark.parametrize("script", [grpo_llm, rloo_llm])
def test_returns_are_computed_once_for_each_group(make_row, script, monkeypatch):
    """What says whether a group has a signal is what its advantages are made from."""
    calls = []
    for module in (trajectory, script):
        monkeypatch.setattr(module, "returns_to_go", lambda *given: calls.append(given) or returns_to_go(*given))
    rows = [make_row([(1, 2, reward)], 2, episode=i) for i, reward in enumerate((1, 0, 5, 5))]
    groups = make_groups(rows, 2, 1.0)
    assert [group.has_signal("turn") for group in groups] == [True, False]
    script.compute_advantages(groups, script.Args(group_size=2))
    assert len(calls) == 2 and rows[0].advantages[1] > 0


@pytest.mark.parametrize("size", [2, 8])
def test_a_kl_divergence_in_the_reward_is_compared_as_rewards_are(make_row, size):
    """With the mean of the others it is all of it, as RLOO's; with the mean of the group it is (G - 1) / G of that."""

    def of_kl(script, **kwargs):
        rows = [make_row([(1, 2, 0.0)], 2, episode=i) for i in range(size)]
        rows[0].old_logprobs[1] = 1.0
        fill(rows, script.Args(group_size=size, kl_in="reward", kl_coef=0.1, **kwargs), script)
        return rows[0].advantages[1]

    assert of_kl(rloo_llm) == pytest.approx(-0.1)
    for kwargs in ({}, {"scale_by": "others"}, {"scale_by": "others", "credit": "episode"}):
        assert of_kl(grpo_llm, **kwargs) == pytest.approx(-0.1)
    for kwargs in ({"scale_rewards": False}, {"scale_by": "group"}, {"credit": "episode"}):
        assert of_kl(grpo_llm, **kwargs) == pytest.approx(-0.1 * (size - 1) / size)


def test_dropped_episodes_leave_smaller_groups(make_row):
    """Without the second, which a fault ended, the other episodes are compared; one that is left alone gets nothing."""
    rewards = {0: 1.0, 2: 0.0, 3: 0.0, 6: 1.0}  # of the first group of four, and of the second
    rows = [make_row([(1, 2, reward)], 2, episode=i) for i, reward in rewards.items()]
    fill(rows, grpo_llm.Args(group_size=4))
    of_three = group([1], [0], [0], credit="turn")
    assert [row.advantages[1] for row in rows] == pytest.approx([*sum(of_three, []), 0.0])


# ------------------------------------------------------------------------------------------------------------- loss


def test_a_batch_holds_what_the_loss_reads_of_every_segment(make_row):
    """Entries of trained tokens alone, in the order of the rows, whatever part of its episode a row is."""
    row = make_row([(2, 4, 0.0), (6, 7, 1.0)], 8, logprobs=-np.arange(8, dtype=np.float32))
    other = make_row([(1, 2, 0.0)], 3, episode=1)
    row.segment_starts = [0, 5]
    row.train_mask = np.array([0, 0, 1, 1, 1, 0, 1, 1], bool)
    row.old_logprobs, row.ref_logprobs = row.logprobs - 10, row.logprobs - 20
    row.advantages = np.arange(8, dtype=np.float32)
    row.values, row.returns = row.advantages + 30, row.advantages + 40
    batch = make_batch([*row.segments()[::-1], *other.segments()], "cpu")
    assert batch.advantages.tolist() == [6, 7, 2, 3, 4, 0]
    assert batch.sampler.tolist() == [-6, 0, -2, -3, 0, 0]
    assert batch.old.tolist() == [-16, -10, -12, -13, -10, 0]
    assert batch.reference.tolist() == [-26, -20, -22, -23, -20, 0]
    assert batch.sampled.tolist() == [True, False, True, True, False, True]
    assert batch.importance(2.0).tolist() == pytest.approx([math.exp(-10), 1, math.exp(-10), math.exp(-10), 1, 1])
    assert batch.values.tolist() == [36, 32, 33, 0] and batch.returns.tolist() == [46, 42, 43, 0]  # of sampled tokens
    assert {batch.advantages.dtype, batch.old.dtype, batch.reference.dtype} == {torch.float32}


CASES = [
    *({"ratio": r, "loss_aggregation": a} for r in ("token", "turn", "sequence") for a in ("sequence", "constant")),
    *({"ratio": r} for r in ("token", "turn", "sequence")),
    {"loss_mask": False, "ratio": "turn"},
    {"loss_mask": False, "importance_cap": 1.05},
    {"kl_coef": 0.3, "kl_estimator": "k1"},
    {"kl_coef": 0.3, "kl_estimator": "k2", "loss_aggregation": "sequence"},
    {"kl_coef": 0.3, "kl_estimator": "k3", "temperature": 0.8},
    {"kl_coef": 0.3, "kl_in": "reward"},  # already in the advantages
    {"ent_coef": 0.3, "loss_aggregation": "sequence", "temperature": 0.8},
    {"clip_coef": 0.05, "clip_coef_high": 0.3, "importance_cap": 0.9},
    *({"ratio": r, "dual_clip": 1.1} for r in ("token", "turn", "sequence")),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: ",".join(f"{k}={v}" for k, v in case.items()))
def test_the_loss_and_its_gradient_are_those_of_plain_loops(compare_with_loops, case):
    """However the step is cut into microbatches."""
    compare_with_loops(grpo_llm, **case)


def test_segments_are_numbered_over_all_rows(make_row):
    rows = [make_row([(2, 4, 0), (6, 7, 0)], 9), make_row([(1, 3, 0)], 4), make_row([(2, 3, 0), (3, 5, 0)], 5)]
    segments = [segment for row in rows for segment in row.segments()]
    assert segment_numbers(segments, "turn").tolist() == [0, 0, 1, 2, 2, 3, 4, 4]
    assert segment_numbers(segments, "sequence").tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert segment_numbers(segments, "token") is None
    rows[1].train_mask = np.zeros(4, bool)
    assert segment_numbers(rows[1].segments(), "turn") is None
    assert segment_numbers(segments, "turn").tolist() == [0, 0, 1, 2, 3, 3]


def test_an_episode_of_several_segments_counts_as_one(make_row):
    """A wrapper that rewrites the context cuts an episode; that is no more episodes."""
    rows = [make_row([(1, 3, 0), (6, 9, 0)], 9, segment_starts=[0, 4]), make_row([(1, 5, 0)], 5)]
    segments = [segment for row in rows for segment in row.segments()]
    assert len(segments) == 3
    weights = token_weights(segments, "sequence", 9, 2, 30)
    assert weights.tolist() == pytest.approx([1 / 10] * 5 + [1 / 8] * 4)
    assert token_weights(segments, "token", 9, 2, 30).tolist() == pytest.approx([1 / 9] * 9)
    assert token_weights(segments, "constant", 9, 2, 30).tolist() == pytest.approx([1 / 60] * 9)


def test_tokens_of_a_segment_keep_their_own_advantages():
    """Credit by turn survives a ratio over the whole episode (GSPO-token, equation 14)."""
    new = torch.zeros(4, requires_grad=True)
    loss, _ = grpo_llm.policy_loss(
        new, torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, -1.0]), 0.2, 0.2, torch.zeros(4, dtype=torch.int64)
    )
    loss.sum().backward()
    assert new.grad.tolist() == [-1, -1, 1, 1]


def test_a_ratio_over_a_segment_is_a_geometric_mean():
    """With the gradient of GSPO (equation 7), where the segment has one advantage."""
    new = torch.tensor([0.1, 0.3, -0.4, 0.2], requires_grad=True)
    segments = torch.tensor([0, 0, 1, 1])
    advantages = torch.tensor([1.0, 1.0, -2.0, -2.0])
    loss, figures = grpo_llm.policy_loss(new, torch.zeros(4), advantages, 0.5, 0.5, segments)
    ratios = np.exp([0.2, 0.2, -0.1, -0.1])
    np.testing.assert_allclose(loss.detach(), [-ratios[0], -ratios[1], 2 * ratios[2], 2 * ratios[3]], rtol=1e-6)
    assert figures["clipfrac"].sum() == 0
    loss.sum().backward()
    np.testing.assert_allclose(new.grad, [-ratios[0], -ratios[1], 2 * ratios[2], 2 * ratios[3]], rtol=1e-6)


def test_dual_clipping_bounds_the_loss_of_a_negative_advantage():
    """Ratios 4, 2, 4 and advantages -1, -1, 1: with c = 3 the losses 4, 2, -1.28 become 3, 2, -1.28. A token beyond the
    bound has no gradient."""
    new = torch.log(torch.tensor([4.0, 2.0, 4.0])).requires_grad_()
    advantages = torch.tensor([-1.0, -1.0, 1.0])
    loss, _ = grpo_llm.policy_loss(new, torch.zeros(3), advantages, 0.2, 0.28, None, 3.0)
    torch.testing.assert_close(loss.detach(), torch.tensor([3.0, 2.0, -1.28]))
    loss.sum().backward()
    torch.testing.assert_close(new.grad, torch.tensor([0.0, 2.0, 0.0]))


def test_a_loss_that_is_not_finite_raises_and_names_the_rows(small_model, made_up_rows, as_run):
    rows = made_up_rows()
    rows[3].advantages[:] = np.nan
    with pytest.raises(FloatingPointError, match="loss is nan") as error:
        args = grpo_llm.Args(microbatch_tokens=1)
        grpo_llm.backward(rows, args, as_run(args, small_model("qwen2")))
    assert error.value.args[1] == [rows[3]]


def test_random_streams_have_nothing_in_common():
    """Tasks, minibatches, sampling and environments of the same number are drawn from different streams."""
    from llm_utils.streams import Stream, episode_seed

    drawn = [np.random.default_rng([1, stream, 7]).random(4) for stream in Stream]
    assert len({round(float(x), 9) for numbers in drawn for x in numbers}) == 4 * len(Stream)
    others = [stream for stream in Stream if stream is not Stream.ENVIRONMENT]
    assert episode_seed(1, 7) not in [np.random.SeedSequence([1, tag, 7]).generate_state(1)[0] for tag in others]
    values = {"TASKS": 1, "SAMPLING": 2, "ORDER": 3, "ENVIRONMENT": 4, "CANDIDATES": 5, "REPLAY": 6, "BRANCHES": 7}
    assert {stream.name: stream.value for stream in Stream} == values
    assert (episode_seed(1, 7), episode_seed(0, 0)) == (1355455352, 1874364848)  # as in runs on record


def test_rows_far_from_the_trainer_are_rejected(make_row):
    from llm_utils.run import reject_far_rows

    rows = [make_row([(1, 4, 1.0)], 5, episode=i) for i in range(3)]
    for row, gap in zip(rows, (0.0, 0.05, -0.2), strict=True):
        row.old_logprobs = row.logprobs + np.float32(gap) * row.action_mask
    assert reject_far_rows(rows, 1.1) == pytest.approx(1 / 3)
    assert [row.train_mask.sum() for row in rows] == [3, 3, 0]


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_figures_are_means_over_tokens_whatever_the_aggregation(small_model, made_up_rows, as_run, aggregation):
    """Only the loss itself is weighted: entropy, KL divergence and clip fraction are what they are."""
    rows = made_up_rows()
    args = grpo_llm.Args(loss_aggregation=aggregation, constant_length=7, microbatch_tokens=120)
    run = as_run(args, small_model("qwen2"))
    found = grpo_llm.backward(rows, args, run)
    with torch.no_grad():
        new, entropy = policy_forward(run.policy, [s for row in rows for s in row.segments()], run.vocab_size, 1.0)
    old = np.concatenate([row.old_logprobs[row.action_mask] for row in rows])
    ratio = (new - torch.from_numpy(old)).exp()
    assert found["entropy"] == pytest.approx(entropy.mean().item(), rel=1e-4)
    assert found["old_approx_kl"] == pytest.approx(-ratio.log().mean().item(), rel=1e-3)
    assert found["clipfrac"] == pytest.approx(((ratio < 0.8) | (ratio > 1.28)).float().mean().item())
