"""Episodes that branch (ARPO, arXiv 2507.19849): when they do, who follows, and what their turns are worth.

A group of M episodes of one task begins with N roots. At a tool result an episode may branch: a second one continues
from the same state. So the group is a forest, and a turn before a branch belongs to several episodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from llm_utils.sampling.engine import Span
from llm_utils.sampling.rollout import Queued
from llm_utils.streams import Stream
from llm_utils.trajectory import Trajectory

Array = np.ndarray


class Branching:
    """Decides where the episodes of groups branch, for a `Sampler`.

    A group has `group_size` numbers. The first `roots` of them begin at the prompt. The others are shared out among
    the roots. Whoever branches gives half of what it has left to the branch, and an episode that ends begins the rest
    at the prompt. So a group has exactly `group_size` episodes, and a decision depends on the episode's own past alone:
    not on which episode was faster.

    Args:
        roots: episodes of a group that begin at the prompt.
        beam: most paths that leave one tool result.
        alpha, beta: a branch has the probability alpha + beta * change, the change of the entropy since the first turn.
        window: first tokens of a turn whose mean entropy counts.
        unit: of the change, in nats; published: the logarithm of the vocabulary.
    """

    def __init__(
        self, group_size: int, roots: int, beam: int, alpha: float, beta: float, window: int, unit: float, seed: int
    ) -> None:
        self.group_size, self.roots, self.beam, self.seed = group_size, roots, beam, seed
        self.alpha, self.beta, self.window, self.unit = alpha, beta, window, unit
        self.spare: dict[int, list[Queued]] = {}  # episode -> those that may branch off it
        self.first: dict[int, float] = {}  # episode -> entropy of its first turn
        self.changes: list[float] = []  # of the entropy at each decision, in nats
        self.chances: list[float] = []  # the probability of a branch at each decision

    def begin(self, episodes: Sequence[Queued]) -> list[Queued]:
        """Return the episodes of whole groups that begin at the prompt, and keep the others for branches."""
        roots: list[Queued] = []
        for at in range(0, len(episodes), self.group_size):
            group = list(episodes[at : at + self.group_size])
            for i, (number, *_) in enumerate(group[: self.roots]):
                self.spare[number] = group[self.roots + i :: self.roots]
            roots += group[: self.roots]
        return roots

    def branch(self, row: Trajectory, span: Span) -> list[int]:
        """Return the numbers of the episodes that begin at the state before `span`, the next turn of `row`."""
        assert span.entropies is not None
        if not len(span.tokens):
            return []
        entropy = float(span.entropies[: self.window].mean())
        if not row.turns:
            self.first[row.episode] = entropy
            return []
        spare = self.spare.get(row.episode, [])
        if not spare:
            return []
        rng = np.random.default_rng([self.seed, Stream.BRANCHES, row.episode, len(row.turns)])
        change = entropy - self.first[row.episode]
        chance = branch_probability(change / self.unit, self.alpha, self.beta)
        self.changes.append(change)
        self.chances.append(chance)
        begun = []
        for _ in range(min(self.beam - 1, len(spare))):
            if rng.random() < chance:
                begun.append(spare.pop(0)[0])
        for i, number in enumerate(begun):
            self.first[number] = self.first[row.episode]
            self.spare[number] = spare[i + 1 :: len(begun) + 1]
        self.spare[row.episode] = spare[:: len(begun) + 1]
        return begun

    def figures(self) -> tuple[float, dict[str, float]]:
        """Return the deviation of the changes since the last call, in nats, and charts of them; begin again.

        The deviation is infinite without two different changes: then no change counts.
        """
        changes, chances = np.array(self.changes), np.array(self.chances)
        self.changes, self.chances = [], []
        if not len(changes):
            return math.inf, {}
        charts = {"entropy_change": changes.mean(), "branch_probability": chances.mean()}
        charts |= {"branch_probability_min": chances.min(), "branch_probability_max": chances.max()}
        return float(changes.std()) or math.inf, {f"charts/{name}": float(value) for name, value in charts.items()}

    def end(self, row: Trajectory) -> list[Queued]:
        """Return the episodes that begin at the prompt because `row` ended without branching so often."""
        self.first.pop(row.episode, None)
        return self.spare.pop(row.episode, [])


def own_work(rows: Sequence[Trajectory]) -> dict[str, float]:
    """Return charts of what these episodes played themselves: a branch did not play the turns that it copied."""
    turns = sum(turn.start >= row.copied for row in rows for turn in row.turns)
    tokens = sum(int(row.action_mask[row.copied :].sum()) for row in rows)
    branched = sum(bool(row.branches) for row in rows) / max(1, len(rows))
    return {"charts/own_turns": turns, "charts/own_tokens": tokens, "charts/branched": branched}


def branch_probability(change: float, alpha: float, beta: float) -> float:
    """Return the probability of a branch, for a `change` of entropy since the episode's first turn."""
    return float(np.clip(alpha + beta * change, 0.0, 1.0))


def shared_turns(rows: Sequence[Trajectory]) -> Array:
    """Return the number of turns that each two episodes of a group share, int [episodes, episodes].

    It is their own number of turns on the diagonal, and 0 for two roots.
    """
    paths = [[*row.branches, (row.episode, len(row.turns))] for row in rows]
    table = np.zeros((len(rows), len(rows)), int)
    for i, one in enumerate(paths):
        for j, two in enumerate(paths):
            for (a, left), (b, right) in zip(one, two, strict=False):
                if a != b:
                    break
                table[i, j] = min(left, right)  # where they left their last common ancestor
    return table


def tree_weights(shared: Array) -> Array:
    """Return the weight of each episode in its group, float64 [episodes]: 1 for a root, shared equally at each branch.

    `shared` comes from `shared_turns`. The weights of a tree's episodes have the sum 1, whatever was branched.
    """
    weights = np.ones(len(shared))
    for i, row in enumerate(shared):
        others = np.delete(np.arange(len(shared)), i)
        for turn in set(row[others]) - {0}:
            at = [j for j in others if row[j] == turn]
            parts = {min(k for k in at if shared[j, k] > turn or j == k) for j in at}
            weights[i] /= 1 + len(parts)
    return weights


def tree_baselines(returns: Array, shared: Array) -> Array:
    """Return the baseline of each turn, [episodes, turns]: what the nearest episodes without the turn earn from there.

    After a branch these are the episodes of the other branch. Before any, they are those of other roots. Each counts
    with its weight in its tree. So neither a turn's own outcome nor its later branches move its baseline.
    """
    weights, baselines = tree_weights(shared), np.zeros_like(returns)
    for i, row in enumerate(shared):
        for turn in range(row[i]):
            without = np.flatnonzero(row <= turn)
            if len(without):
                nearest = without[row[without] == row[without].max()]
                baselines[i, turn] = np.average(returns[nearest, turn], weights=weights[nearest])
    return baselines


def mean_of_sharers(values: Array, shared: Array) -> Array:
    """Return for each turn the mean of `values` [episodes, turns] over the episodes that share it (ARPO's "hard")."""
    means = values.copy()
    for i, row in enumerate(shared):
        for turn in range(row[i]):
            means[i, turn] = values[row > turn, turn].mean()
    return means
