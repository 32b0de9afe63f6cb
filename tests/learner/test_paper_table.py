"""The statistics behind the benchmarks' tables."""

import numpy as np
import pytest

pytest.importorskip("tyro")
paper_table = pytest.importorskip("paper_table")
gradient_noise = pytest.importorskip("gradient_noise")


def test_an_interval_covers_seeds_and_tasks():
    rng = np.random.default_rng(0)
    same = {"a": np.tile(rng.random(400) < 0.7, (3, 1)).astype(float)}  # seeds agree: tasks are all the noise
    value, low, high = paper_table.interval(same)
    assert value == same["a"].mean()
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(0.7 * 0.3 / 400), rel=0.15)
    apart = {"a": np.repeat([[0.0], [0.5], [1.0]], 400, axis=1)}  # tasks agree: seeds are all the noise
    assert paper_table.interval(apart)[1:] == pytest.approx((0, 1), abs=0.2)


def test_an_effect_compares_the_same_tasks():
    tasks = (np.random.default_rng(0).random(200) < 0.5).astype(float)
    one, other = {"a": np.tile(tasks, (3, 1)), "b": np.ones((3, 50))}, {"a": np.zeros((3, 200)), "b": np.ones((3, 50))}
    assert paper_table.interval(one, one) == (0, 0, 0)
    assert paper_table.interval(one, other, ["b"]) == (0, 0, 0)
    value, low, high = paper_table.interval(one, other)
    assert value == pytest.approx(tasks.mean() / 2) and 0 < low < value < high


def test_noise_to_signal_of_known_noise():
    rng = np.random.default_rng(0)
    gradients = 1.0 + 2.0 * rng.normal(size=(200, 500))  # |mean|^2 = 500, trace of the covariance = 4 * 500
    ratio = gradient_noise.noise_to_signal(gradients @ gradients.T, np.ones(200))
    assert ratio == pytest.approx(4, rel=0.1)
    values = gradient_noise.bootstrap({"process + outcome": gradients @ gradients.T,
                                       "outcome only": (g := 1.0 + 4.0 * rng.normal(size=(200, 500))) @ g.T}, 200)
    assert values["outcome only"][0] == pytest.approx(16, rel=0.1)
    value, low, high = values["reduction"]
    assert value == pytest.approx(0.75, abs=0.05) and low < value < high
