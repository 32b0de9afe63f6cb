"""learner/llm_utils/branching.py: who branches, who begins, and what a shared turn is worth."""

import arpo_llm
import numpy as np
import pytest
import torch

from llm_utils.branching import (
    Branching,
    branch_probability,
    mean_of_sharers,
    shared_turns,
    tree_baselines,
    tree_weights,
)
from llm_utils.sampling.engine import Span
from llm_utils.trajectory import Trajectory, Turn


def episode(number, turns, branches=()):
    """An episode of `turns` turns of one token."""
    empty = np.zeros(1, np.float32)
    spans = [Turn(i, i + 1, 0.0, empty, empty) for i in range(turns)]
    return Trajectory(number, 0, 0, np.zeros(turns, np.int32), turns=spans, branches=branches)


def span(entropy):
    return Span(0, np.zeros(2, np.int32), np.zeros(2), np.zeros(2), entropies=np.array([entropy, 9.0]))


# Roots 0 and 1. Episode 2 leaves 0 after a turn, 3 leaves 2 after two turns, 4 leaves 0 after two turns.
FOREST = [
    episode(0, 3), episode(1, 2), episode(2, 3, ((0, 1),)), episode(3, 4, ((0, 1), (2, 2))), episode(4, 3, ((0, 2),)),
]  # fmt: skip


def test_normalised_entropy_and_probability_of_a_branch():
    """The numbers of the paper's formulas; entropies of the engine are in nats."""
    for p, expected in ((0.97, 0.01, 0.01, 0.01), 0.1210), ((0.4, 0.3, 0.2, 0.1), 0.9232):
        nats = torch.distributions.Categorical(torch.tensor(p)).entropy().item()
        assert nats / np.log(4) == pytest.approx(expected, abs=5e-5)
    assert [branch_probability(change, 0.5, 0.2) for change in (0.25, -0.05, 3)] == pytest.approx([0.55, 0.49, 1])
    assert branch_probability(-9, 0.5, 0.2) == 0


def test_shared_turns_and_weights():
    shared = shared_turns(FOREST)
    assert shared.tolist() == [
        [3, 0, 1, 1, 2], [0, 2, 0, 0, 0], [1, 0, 3, 2, 1], [1, 0, 2, 4, 1], [2, 0, 1, 1, 3],
    ]  # fmt: skip
    assert tree_weights(shared).tolist() == [0.25, 1, 0.25, 0.25, 0.25]
    three = shared_turns([episode(0, 2), episode(1, 2, ((0, 1),)), episode(2, 2, ((0, 1),))])
    assert tree_weights(three) == pytest.approx([1 / 3] * 3)  # two branches at one tool result


def test_the_baseline_is_the_nearest_others():
    returns = np.array([[1, 5, 3, 0], [7, 8, 0, 0], [2, 6, 4, 0], [9, 1, 2, 3], [4, 4, 4, 0]], float)
    found = tree_baselines(returns, shared_turns(FOREST))
    assert found[0].tolist() == [7, (6 + 1) / 2, 4, 0]  # the other root, the branch (2 and 3), the later branch (4)
    assert found[1].tolist() == [(1 + 2 + 9 + 4) / 4, (5 + 6 + 1 + 4) / 4, 0, 0]
    assert found[3].tolist() == [7, (5 + 4) / 2, 4, 0]


def test_the_published_shared_advantage():
    """The first two of eight episodes share a turn: .1361 (population), .1273 (--credit episode)."""
    outcomes = np.array([[1.0], [0], [0.2], [0.9], [0.1], [0.4], [0.8], [0.2]])
    shared = shared_turns([episode(0, 1), episode(1, 1, ((0, 1),)), *(episode(i, 1) for i in range(2, 8))])
    population = (outcomes - outcomes.mean()) / outcomes.std()
    sample = arpo_llm.group_advantages(outcomes, "episode")
    assert population[:2, 0] == pytest.approx([1.497, -1.225], abs=5e-4)
    for values, expected in (population, 0.1361), (sample, 0.1273):
        turns = np.repeat(values, 2, axis=1)
        found = mean_of_sharers(turns, np.array(shared) + np.eye(8, dtype=int))
        assert found[:2, 0] == pytest.approx([expected] * 2, abs=5e-5)
        assert found[:2, 1] == pytest.approx(values[:2, 0])  # after the branch


def make(roots=2, beam=2, alpha=1.0, beta=0.0, unit=1.0, size=8):
    return Branching(size, roots, beam, alpha, beta, 1, unit, seed=3)


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("roots, beam", [(2, 2), (3, 3), (8, 2)])
def test_a_group_has_exactly_its_episodes(roots, beam, alpha):
    """Whatever branches, and in whatever order episodes play, every number begins once."""
    branching = make(roots, beam, alpha)
    group = [(number, 5, None) for number in range(16, 24)]
    live = [episode(number, 0) for number, *_ in branching.begin(group)]
    assert [row.episode for row in live] == list(range(16, 16 + roots))
    begun, rng = [row.episode for row in live], np.random.default_rng(0)
    while live:
        row = live.pop(int(rng.integers(len(live))))
        for number in branching.branch(row, span(1.0)):
            live.append(episode(number, len(row.turns)))
            begun.append(number)
        row.turns.append(Turn(0, 1, 0.0, np.zeros(1), np.zeros(1)))
        if len(row.turns) < 4:
            live.append(row)
        else:
            more = branching.end(row)
            begun += [number for number, *_ in more]
            live += [episode(number, 0) for number, *_ in more]
    assert sorted(begun) == [number for number, *_ in group]
    assert not branching.spare and not branching.first


def test_entropy_decides_in_its_unit():
    """More entropy than at the first turn branches, less does not; the change is divided by the unit."""
    for unit, expected in (10.0, 0.55), (0.5, 1.0):
        branching = make(alpha=0.5, beta=1.0, unit=unit)
        branching.begin([(number, 0, None) for number in range(8)])
        assert branching.branch(episode(0, 0), span(0.5)) == []
        branching.branch(episode(0, 1), span(1.0))
        assert branching.changes == [0.5] and branching.chances == [expected]


def test_the_rate_of_branches_is_the_probability():
    branching, begun = make(alpha=0.3, size=20_000), 0
    branching.begin([(number, 0, None) for number in range(20_000)])
    branching.branch(episode(0, 0), span(1.0))
    for turn in range(1, 5_000):
        branching.spare[0] = [(7, 0, None)]
        begun += len(branching.branch(episode(0, turn), span(1.0)))
    assert begun / 5_000 == pytest.approx(0.3, abs=0.02)
