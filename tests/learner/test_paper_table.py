"""The statistics behind the benchmarks' tables."""

import importlib

import gradient_noise
import numpy as np
import paper_table
import pytest
import tyro
from evidence_parts import noise

from llm_utils import arguments


@pytest.mark.parametrize("label", [*paper_table.ALGORITHMS, *paper_table.ABLATIONS])
def test_a_learner_accepts_the_flags_of_every_row(label):
    script, flags = paper_table.learner_flags(paper_table.MULTIHOP, "tiny", label)
    learner = importlib.import_module(script.removesuffix(".py"))
    getattr(learner, "check", arguments.check)(tyro.cli(learner.Args, args=flags))


def test_an_outcome_is_paid_at_the_end_alone(make_row):
    row = make_row([(2, 4, 0.3), (5, 7, -0.1), (8, 9, 1.2)], 9, reward_terms={"process/a": 0.4, "outcome/em": 1.0})
    noise.outcome_only(row)
    assert row.turn_rewards().tolist() == [0.0, 0.0, 1.0]


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
    found = {kind: 1.0 + noise * rng.normal(size=(200, 500))  # |mean|^2 = 500, trace of the covariance 500 noise^2
             for kind, noise in (("process + outcome", 2.0), ("outcome only", 4.0))}  # fmt: skip
    values = gradient_noise.noise_to_signal({kind: g @ g.T for kind, g in found.items()}, 200)
    assert values["process + outcome"][0] == pytest.approx(4, rel=0.1)
    value, low, high = values["outcome only"]
    assert value == pytest.approx(16, rel=0.1) and low < value < high
    value, low, high = values["reduction"]
    assert value == pytest.approx(0.75, abs=0.05) and low < value < high
    silent = {kind: (g := rng.normal(size=(40, 2000))) @ g.T for kind in found}
    values = gradient_noise.noise_to_signal(silent, 200)
    assert [gradient_noise.shown(one, ".1f") for one in values.values()] == ["no signal"] * 3
