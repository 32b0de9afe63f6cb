"""The statistics behind the benchmarks' tables."""

import importlib

import gradient_noise
import numpy as np
import paper_table
import pytest
import tyro

from llm_utils import arguments


@pytest.mark.parametrize("label", [*paper_table.ALGORITHMS, *paper_table.ABLATIONS])
def test_a_learner_accepts_the_flags_of_every_row(label):
    script, flags = paper_table.learner_flags(paper_table.MULTIHOP, "tiny", label)
    learner = importlib.import_module(script.removesuffix(".py"))
    getattr(learner, "check", arguments.check)(tyro.cli(learner.Args, args=flags))


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
