"""Expected gradients by enumeration: who claims the truth's direction has it, on games drawn from a seed."""

import re
from itertools import product

import estimators
import grpo_llm
import numpy as np
import ppo_llm
import pytest
import reinforce_pp_llm
import rloo_llm
import stale_ratios
from estimators import AUDITED, ESTIMATORS, cosine, expected_gradient, true_gradient

from llm_utils.returns import others_deviation, others_mean, returns_to_go, whiten

BY_NAME = {entry.name: entry for entry in ESTIMATORS}
DEFAULT, OLD = "GRPO turn, scale of the others (default)", "GRPO turn, scale of the columns (old default)"
UNBIASED = [entry for entry in ESTIMATORS if not entry.bias]


@pytest.fixture(scope="module")
def games():
    """200 games: 100 with one parameter, 100 trees, each with the number of episodes to compare."""
    rng = np.random.default_rng(7)
    one = [estimators.one_parameter_game(rng) for _ in range(100)]
    trees = [estimators.tree_game(rng, most=6) for _ in range(100)]
    return [(game, {2: 8, 3: 6, 4: 5}.get(len(game), 3)) for game in one + trees]


def test_games_are_games(games):
    """Probabilities add up, and a score has mean 0 at every turn (what makes any baseline of others harmless)."""
    kinds = [{len(e.rewards) for e in game} for game, _ in games]
    assert sum(len(kind) > 1 for kind in kinds) > 150  # unequal horizons
    for game, _ in games:
        assert sum(e.probability for e in game) == pytest.approx(1)
        for k in range(max(len(e.rewards) for e in game)):
            mean = sum(e.probability * e.scores[k] for e in game if len(e.scores) > k)
            np.testing.assert_allclose(mean, 0, atol=1e-12)


def test_the_truth_is_the_derivative_of_the_expected_return():
    def value(logit: float) -> float:
        game = estimators.stopping_game(1 / (1 + np.exp(-logit)), (0.7, 0.9, 0.6), (0, 2, 1))
        return sum(e.probability * e.rewards.sum() for e in game)

    truth = true_gradient(estimators.stopping_game(1 / (1 + np.exp(-0.3)), (0.7, 0.9, 0.6), (0, 2, 1)))
    assert truth[0] == pytest.approx((value(0.3 + 1e-5) - value(0.3 - 1e-5)) / 2e-5, rel=1e-6)


def test_exact_values_are_those_of_the_game():
    """Stopping pays .4 on average, going on .5; after the choice of a turn its later tokens know it."""
    game = estimators.stopping_game(0.2, (0.4, 0.5), (0, 1), lengths=(2, 1, 1))
    for e in game:
        expected = [0.42, 0.4] if len(e.rewards) == 1 else [0.42, 0.5]
        np.testing.assert_allclose(e.values["exact"], expected)


@pytest.mark.parametrize("name", [DEFAULT, "REINFORCE++ turn, by the batch"])
def test_multisets_give_what_all_tuples_give(name):
    rng = np.random.default_rng(3)
    game = estimators.tree_game(rng, most=5)
    found = expected_gradient(game, BY_NAME[name], 3)
    mean = sum(e.probability * e.lengths.sum() for e in game)
    slow = dict.fromkeys(found, 0.0)
    for batch in product(game, repeat=3):
        probability = np.prod([e.probability for e in batch])
        total = sum(e.lengths.sum() for e in batch)
        for e, advantages in zip(batch, BY_NAME[name].estimator([batch]), strict=True):
            gradient = probability * advantages @ e.scores
            slow["sum"] += gradient / 3
            slow["token"] += gradient * mean / total
            slow["sequence"] += gradient * mean / (3 * e.lengths.sum())
    for kind in found:
        np.testing.assert_allclose(found[kind], slow[kind], atol=1e-12)


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("entry", UNBIASED, ids=lambda entry: entry.name)
def test_direction(entry, games, first):
    """Under sum aggregation the expected gradient is a positive multiple of the truth. Every second game is slow."""
    games = games[first::2]
    for game, episodes in games if entry.groups == 1 else [(g, 4) for g, _ in games if len(g) < 5]:
        truth, found = true_gradient(game), expected_gradient(game, entry, episodes)["sum"]
        assert cosine(truth, found) > 1 - 1e-9


def test_a_baseline_carries_the_own_return_into_the_others(monkeypatch):
    """Why REINFORCE++-baseline takes its statistics from the other groups."""
    entry = BY_NAME["REINFORCE++-baseline turn, by the others (default)"]
    game = estimators.tree_game(np.random.default_rng(7), most=5)
    truth = true_gradient(game)
    assert cosine(truth, expected_gradient(game, entry, 4)["sum"]) > 1 - 1e-9
    without_groups = lambda values, weights, by_others, groups: whiten(values, weights)  # noqa: E731
    monkeypatch.setattr(reinforce_pp_llm, "whiten", without_groups)
    assert cosine(truth, expected_gradient(game, entry, 4)["sum"]) < 1 - 1e-4


@pytest.mark.slow
def test_prompts_drawn_at_random_keep_the_direction_if_the_scale_is_of_other_groups():
    """A scale of the prompt's own weighs prompts differently, and may turn their sum.

    Over the four pairs of two prompts: (b, a) gives what (a, b) gives, and a group alone the same in every pair.
    """
    rng, alike = np.random.default_rng(3), 0
    own = BY_NAME["GRPO turn, scale of the group's others"]
    for _ in range(20):
        a, b = (estimators.one_parameter_game(rng) for _ in range(2))
        truth = sum(true_gradient(game)[0] for game in (a, b))
        pairs = [(1, (a, a)), (2, (a, b)), (1, (b, b))]
        of_pairs = (n * sum(estimators.expected_gradients(p, BY_NAME[DEFAULT].estimator, 3)["sum"]) for n, p in pairs)
        found, alone = sum(of_pairs)[0], sum(2 * expected_gradient(game, own, 3)["sum"][0] for game in (a, b))
        assert found * truth > 0
        alike += alone / found == pytest.approx(1, rel=0.02)
    assert alike < 10


def test_leave_one_out_has_the_truth_itself(games):
    for game, episodes in games[::4]:
        truth = true_gradient(game)
        for name, factor in (("RLOO turn (default)", 1), ("GRPO turn, unscaled", (episodes - 1) / episodes)):
            found = expected_gradient(game, BY_NAME[name], episodes)["sum"]
            np.testing.assert_allclose(found, factor * truth, rtol=1e-5, atol=1e-7)  # advantages are float32


@pytest.mark.parametrize("entry", ESTIMATORS, ids=lambda entry: entry.name)
def test_a_row_is_what_its_flags_say(entry):
    """The learner accepts them, a default has none, and the name says what the arguments say."""
    entry.learner.check(entry.args)
    args, name = vars(entry.args), entry.name
    if "(default)" in name:
        assert entry.flags == "--baseline" * ("baseline" in name)
    assert args.get("credit", "turn") == ("episode" if " episode" in name else "turn")
    assert args.get("gae_lambda", 1.0) == float((re.search(r"λ ([.\d]+)", name) or [0, 1])[1])
    if entry.learner is ppo_llm:
        assert f"PPO {args['advantage']}" in name
        assert args["gamma"] == 1 and (args["gamma_turn"] == 1 or entry.bias)
        assert (args["adv_norm"] == "none") == ("not whitened" in name)
        assert (args["adv_norm"] in ("token", "turn")) == ("by the batch" in name)
    if entry.learner is reinforce_pp_llm:
        assert args["adv_norm"] == ("batch" if "by the batch" in name else "others")
        assert args["baseline"] == ("baseline" in name)
    if entry.learner is grpo_llm:
        assert args["scale_rewards"] == ("unscaled" not in name)


def test_the_audited_game():
    """Stopping pays 1 with chance .4, going on to turn 6 with .5: the columns' scale turns the gradient around."""
    assert true_gradient(AUDITED)[0] == pytest.approx(0.016)
    found = {name: expected_gradient(AUDITED, BY_NAME[name], 8)["sum"][0] for name in BY_NAME}
    assert found["GRPO turn, unscaled"] == pytest.approx(0.0140, abs=5e-5)
    assert found[OLD] == pytest.approx(-0.0075, abs=5e-5)
    assert min(found[entry.name] for entry in UNBIASED) > 0.01


@pytest.mark.parametrize("values", ["exact", "zero", "wrong"])
def test_bilevel_as_it_ships_has_the_sign_of_the_audited_game(values):
    """--advantage bilevel and nothing else; VAGEN's discount per turn turns the gradient around."""
    shipped, discounted = (
        expected_gradient(AUDITED, estimators.Entry("", ppo_llm, f"--advantage bilevel {flags}", values), 8)
        for flags in ("", "--gamma-turn 0.95")
    )
    for kind in ("sum", "token"):
        assert shipped[kind] > 0.02 and discounted[kind] < 0


def test_one_failure_of_any_length_counts_the_same():
    """An episode of reward 0 with 1 to 12 turns beside a 0/1 group: the scale must not follow its turns."""
    group = [np.array([1.0]), np.array([0.0]), np.array([1.0]), np.array([0.0])]
    found = {n: grpo_llm.group_advantages(returns_to_go([*group, np.zeros(n)]), "turn") for n in (1, 3, 6, 12)}
    for n in (3, 6, 12):
        np.testing.assert_allclose([a[0] for a in found[n]], [a[0] for a in found[1]])


def test_biased_forms_err_and_are_named():
    """The table would be worthless if it could not tell: each form named as biased leaves the direction somewhere."""
    rng = np.random.default_rng(1)
    trees = [estimators.tree_game(rng, most=6) for _ in range(10)]
    for entry in ESTIMATORS:
        if entry.bias:
            found = [cosine(true_gradient(game), expected_gradient(game, entry, 4)["sum"]) for game in trees]
            assert min(found) < 1 - 1e-6, entry.name


@pytest.mark.parametrize("scale_by", ["others", "group"])
def test_equal_returns_at_different_turns_are_not_blown_up(scale_by):
    """All earned 1, in one turn or in three: the returns don't deviate, but what is left of them at turn 2 does."""
    rewards = [np.array([1.0]), np.array([1.0]), np.array([0, 0, 1.0]), np.array([1.0])]
    found = grpo_llm.group_advantages(returns_to_go(rewards), "turn", scale_by=scale_by)
    assert 1 < np.abs(found).max() <= 2


@pytest.mark.slow
def test_a_bandit_learns_to_go_on():
    assert estimators.train_bandit(BY_NAME[DEFAULT], seed=0) > 0.95
    assert estimators.train_bandit(BY_NAME[OLD], seed=0) < 0.05


def test_prompts_by_batch_statistics_keep_the_sum():
    """Two games that share a parameter: unscaled and whitened by other groups the sum of both has the truth's sign."""
    rng = np.random.default_rng(2)
    games = [g for g in (estimators.one_parameter_game(rng, most=2) for _ in range(12)) if len(g) < 5]
    found = estimators.prompts(list(zip(games[::2], games[1::2], strict=False)), group_size=2)
    assert found["RLOO turn (default)"] == found["REINFORCE++-baseline turn, by the others (default)"] == 0


def test_the_token_mean_tends_to_the_sum_in_large_batches():
    rng = np.random.default_rng(4)
    for game in [estimators.tree_game(rng, most=5) for _ in range(5)]:
        truth, estimator = true_gradient(game), BY_NAME[DEFAULT].estimator
        one = expected_gradient(game, BY_NAME[DEFAULT], 4)["token"]
        np.testing.assert_allclose(estimators.token_mean_gradient(game, estimator, 4, 1), one, atol=1e-12)
        errors = [1 - cosine(truth, estimators.token_mean_gradient(game, estimator, 4, n)) for n in (1, 8, 64)]
        assert errors[2] < 1e-4 and errors[2] <= errors[0]


def test_dropped_faults_favour_what_makes_few_calls():
    """Truth -.05; at 30 % of calls that fail for good, what is left says to take the chance."""
    rows = {row["rate"]: row for row in estimators.faults((0.0, 0.01, 0.3))}
    assert rows[0.0]["truth"] == pytest.approx(-0.05)
    assert rows[0.0]["RLOO turn (default)"] == pytest.approx(-0.05)
    assert rows[0.3]["GRPO episode, scale of the group (published)"] == pytest.approx(0.24, abs=0.001)
    for name in estimators.FAULT_ESTIMATORS:
        assert rows[0.0][name] < rows[0.01][name] < 0 < rows[0.3][name]


def test_older_weights_belong_into_the_importance_weight_not_into_the_clipped_ratio():
    """Why --max-staleness takes the trainer's log-probabilities: the sampler's point backwards in some games."""
    rng = np.random.default_rng(0)
    games = [estimators.tree_game(rng) for _ in range(60)]
    (row,) = stale_ratios.measure(games, [0.6]).values()
    assert row["sampler"]["backwards"] >= 3 and row["trainer"]["backwards"] == 0
    assert row["trainer"]["mean"] > 0.9 > row["sampler"]["mean"]


def test_without_drift_the_denominator_makes_no_difference():
    game = estimators.tree_game(np.random.default_rng(5), most=6)
    same, _ = stale_ratios.drifted(game, 0.0, np.random.default_rng(0))
    for name in stale_ratios.DENOMINATORS:
        found = stale_ratios.gradient(game, same, same, name, grpo_llm.Args())
        np.testing.assert_allclose(found, true_gradient(game), atol=1e-6)


# ------------------------------------------------------------------------------------ learner/llm_utils/returns.py


def batch(rng, sizes):
    values = [rng.normal(size=n) for n in sizes]
    return values, [rng.integers(0, 3, n).astype(float) for n in sizes]


@pytest.mark.parametrize("groups", [None, [0, 0, 1, 1, 2, 2]])
def test_whiten_takes_statistics_from_the_others(groups):
    rng = np.random.default_rng(0)
    values, weights = batch(rng, (3, 1, 4, 2, 5, 3))
    weights[2][0] = 1
    labels = range(6) if groups is None else groups
    for i, found in enumerate(whiten(values, weights, groups=groups)):
        rest = [j for j in range(6) if labels[j] != labels[i]]
        v, w = (np.concatenate([x[j] for j in rest]) for x in (values, weights))
        mean = np.average(v, weights=w)
        deviation = max(np.average((v - mean) ** 2, weights=w) ** 0.5, 6**-0.5)
        np.testing.assert_allclose(found, np.where(weights[i] > 0, (values[i] - mean) / deviation, 0))


def test_whiten_by_the_batch_has_mean_0_and_variance_1():
    values, weights = batch(np.random.default_rng(1), (3, 1, 4, 2))
    white, w = np.concatenate(whiten(values, weights, by_others=False)), np.concatenate(weights)
    assert np.average(white, weights=w) == pytest.approx(0)
    assert np.average(white**2, weights=w) == pytest.approx(1)


@pytest.mark.parametrize("groups", [None, [3]])
def test_whiten_leaves_what_has_no_others(groups):
    """One episode, or one group: its own mean would take its own advantage away."""
    values = [np.array([2.0, 3.0])]
    np.testing.assert_allclose(whiten(values, [np.array([1.0, 0.0])], groups=groups), [[2.0, 0.0]])
    assert whiten([], []) == []
    np.testing.assert_array_equal(whiten(values, [np.zeros(2)]), [[0.0, 0.0]])
    found = whiten([np.array([5.0]), np.array([7.0])], [np.ones(1), np.zeros(1)])  # nothing was sampled in the other
    np.testing.assert_allclose(found, [[5.0], [0.0]])


def test_whiten_of_large_equal_values_is_0():
    found = whiten([np.full(3, 1e6)] * 4, [np.ones(3)] * 4)
    np.testing.assert_allclose(found, np.zeros((4, 3)))


def test_others_of_one_episode():
    """What is left of a group when the others were dropped: no baseline, no scale, and no NaN."""
    np.testing.assert_array_equal(others_mean(np.array([[2.0, 1.0]])), [[0.0, 0.0]])
    np.testing.assert_array_equal(others_deviation(np.array([2.0])), [1.0])
    for credit in ("turn", "episode"):
        assert np.isfinite(grpo_llm.group_advantages(np.ones((1, 2)), credit)).all()
        assert np.isfinite(rloo_llm.leave_one_out_advantages(np.ones((1, 2)), credit)).all()


def test_others_deviation_ignores_the_own_value():
    values = np.array([0.0, 1.0, 3.0, 10.0])
    found = others_deviation(values)
    np.testing.assert_allclose(found, [np.delete(values, i).std(ddof=1) for i in range(4)])
    values[3] = -100
    assert others_deviation(values)[3] == found[3]
    np.testing.assert_allclose(others_deviation(np.zeros(4)), 0.5)  # the least
