"""95 % intervals: published values, coverage where the truth is known, and no certainty from a few equal results."""

import numpy as np
import pytest

from llm_utils.records import intervals


def pairs(both, first, second, neither):
    """Two rows of zeros and ones: solved by both, by the first alone, by the second alone, by none."""
    one = np.array([1] * (both + first) + [0] * (second + neither))
    return one, np.array([1] * both + [0] * first + [1] * second + [0] * neither)


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [  # Newcombe 1998, Statistics in Medicine 17, 857-872, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (29, 29, 0.8830, 1.0),
        (0, 66, 0.0, 0.0550),
        (0, 100, 0.0, 0.0370),
        (0, 500, 0.0, 0.0076),
    ],
)
def test_one_proportion_is_wilsons(right, n, low, high):
    found = intervals.proportion(np.array([1] * right + [0] * (n - right)))
    assert found == pytest.approx((right / n, low, high), abs=1e-4)
    assert intervals.wilson(right / n, n) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(
    ("table", "low", "high"),
    [
        ((36, 12, 2, 0), 0.0569, 0.3404),  # Newcombe 1998, Statistics in Medicine 17, 2635-2650, method 10
        ((1, 1, 7, 12), -0.5069, -0.0256),  # Fagerland, Lydersen & Laake 2014, airways before and after
        ((0, 0, 0, 66), -0.0550, 0.0550),
        ((66, 0, 0, 0), -0.0550, 0.0550),
    ],
)
def test_a_difference_of_the_same_tasks_is_newcombes(table, low, high):
    one, other = pairs(*table)
    assert intervals.difference(one, other)[1:] == pytest.approx((low, high), abs=1e-4)
    assert intervals.difference(other, one)[1:] == pytest.approx((-high, -low), abs=1e-4)


@pytest.mark.parametrize("df", [1, 2, 2.5, 4, 30, 1000])
def test_students_quantile(df):
    stats = pytest.importorskip("scipy.stats")
    assert intervals.student(df) == pytest.approx(stats.t.ppf(0.975, df), rel=1e-5)


def test_students_quantile_of_a_printed_table():
    assert [round(intervals.student(df), 3) for df in (1, 2, 3, 4, 9)] == [12.706, 4.303, 3.182, 2.776, 2.262]


def test_welchs_interval_over_seeds():
    """Two sides of three seeds whose tasks all agree: seeds are all that differ, and Welch's is the widest."""
    one, other = ([[x] * 50 for x in side] for side in ((0.5, 0.6, 0.7), (0.3, 0.35, 0.4)))
    stats = pytest.importorskip("scipy.stats")
    welch = stats.ttest_ind((0.5, 0.6, 0.7), (0.3, 0.35, 0.4), equal_var=False).confidence_interval()
    found = intervals.difference(np.array(one), np.array(other), resamples=200)
    assert found == pytest.approx((0.25, welch.low, welch.high), abs=1e-3)


@pytest.mark.parametrize("deviation", [0.05, 0.1])
def test_seeds_that_differ_raise_no_more_false_alarms_than_they_may(deviation):
    """3 + 3 seeds, 200 shared tasks, no true difference: at most one in twenty, and chance. The bootstrap alone has
    one in six where seeds deviate by .1."""
    rng, alarms, games = np.random.default_rng(0), 0, 100
    for _ in range(games):
        chance = rng.uniform(0.2, 0.8, 200)
        one, other = (rng.random((3, 200)) < chance + deviation * rng.normal(size=(3, 1)) for _ in range(2))
        _, low, high = intervals.difference(one, other, resamples=20)
        alarms += not low <= 0 <= high
    assert alarms <= 0.05 * games + 2 * (0.05 * 0.95 * games) ** 0.5


def test_tasks_of_one_run_are_covered():
    rng, games = np.random.default_rng(1), 1000
    shares = rng.uniform(0.02, 0.98, games)
    found = [intervals.proportion(rng.random(100) < share) for share in shares]
    assert sum(low <= share <= high for share, (_, low, high) in zip(shares, found, strict=True)) >= 0.93 * games
    differences = [intervals.difference(*(rng.random((2, 100)) < share)) for share in shares]
    assert sum(low <= 0 <= high for _, low, high in differences) >= 0.93 * games


@pytest.mark.parametrize("seeds", [1, 2, 3])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_nothing_is_certain_because_all_results_agree(seeds, value):
    table = np.full((seeds, 66), value)
    _, low, high = intervals.proportion(table, resamples=50)
    assert high - low == pytest.approx(0.055, abs=1e-3)  # seeds that agree count once
    _, low, high = intervals.difference(table, table, resamples=50)
    assert high - low == pytest.approx(0.11, abs=1e-3)
    _, low, high = intervals.of_seeds([value] * seeds, 66)
    assert high - low == pytest.approx(0.055, abs=1e-3)


def test_one_success_more_does_not_make_an_interval_narrower():
    """0, 1, 2, ... successes of 3 seeds x 200 tasks: the upper end never falls."""
    highs = []
    for right in range(5):
        table = np.zeros((3, 200))
        table[0, :right] = 1
        highs.append(intervals.proportion(table, resamples=50)[2])
    assert highs == sorted(highs)


def test_more_tasks_and_more_seeds_narrow_it():
    rng = np.random.default_rng(2)

    def width(seeds, tasks):
        _, low, high = intervals.proportion(rng.random((seeds, tasks)) < 0.5, resamples=100)
        return high - low

    assert width(1, 100) > width(1, 400) > width(1, 1600)
    assert width(3, 100) > width(30, 100)


def test_a_mean_over_sets_counts_each_set_once():
    large, small = np.zeros(400), np.ones(10)
    value, low, high = intervals.proportion([large, small])
    assert value == 0.5 and 0.35 < low < 0.5 < high < 0.51
    assert intervals.difference([large, small], [large, large[:10]])[0] == 0.5


def test_a_ratio_of_seconds():
    """Welch's interval of the logarithms; without a second run there is none."""
    stats = pytest.importorskip("scipy.stats")
    one, other = (1.0, 1.1, 1.3), (2.0, 2.6, 2.1)
    welch = stats.ttest_ind(np.log(one), np.log(other), equal_var=False).confidence_interval()
    value, low, high = intervals.ratio(one, other)
    assert value == pytest.approx((1.43 / 10.92) ** (1 / 3))
    assert (low, high) == pytest.approx((np.exp(welch.low), np.exp(welch.high)), rel=1e-4)
    assert intervals.ratio([1.0], [2.0]) == pytest.approx((0.5, 0.5, 0.5))


def test_a_single_policy_counts_as_this_one_policy():
    """Differences to a start of one seed: the t interval is over the seeds of the other side."""
    tasks = np.zeros((1, 300))
    seeds = np.zeros((3, 300))
    for row, share in zip(seeds, (0.1, 0.2, 0.3), strict=True):
        row[: int(300 * share)] = 1
    value, low, high = intervals.difference(seeds, tasks, resamples=50)
    assert value == pytest.approx(0.2)
    assert (low, high) == pytest.approx((0.2 - 4.3027 * 0.1 / 3**0.5, 0.2 + 4.3027 * 0.1 / 3**0.5), abs=1e-3)


def test_bounds_stay_where_a_share_can_be():
    apart = np.repeat([[0.0], [1.0]], 50, 1)
    assert intervals.proportion(apart, resamples=50)[1:] == (0, 1)
    assert intervals.difference(apart, np.zeros((1, 50)), resamples=50)[1:] == (-1, 1)
    assert intervals.of_seeds([0.0, 1.0], 50)[1:] == (0, 1)


def test_other_tasks_are_refused():
    with pytest.raises(ValueError, match="the same tasks"):
        intervals.difference(np.ones(3), np.ones(5))


def test_a_mean_of_any_numbers():
    values = np.random.default_rng(0).normal(3, 2, size=400)
    value, low, high = intervals.mean(values, seed=1)
    assert (value, low, high) == intervals.mean(values, seed=1)
    assert high - low == pytest.approx(2 * 1.96 * 2 / 20, rel=0.1) and low < value == values.mean() < high
    assert intervals.mean([0.5] * 4) == (0.5, 0.5, 0.5) and intervals.mean([0.5]) == (0.5, 0.5, 0.5)
    few = intervals.mean([0.4, 0.5, 0.6])
    assert few == pytest.approx((0.5, 0.5 - 4.3027 * 0.1 / 3**0.5, 0.5 + 4.3027 * 0.1 / 3**0.5), abs=1e-4)
