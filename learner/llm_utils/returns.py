"""Returns of turns, and statistics of other episodes as baselines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Array = np.ndarray


def returns_to_go(rewards: Sequence[Array], gamma: float = 1.0) -> Array:
    """Return discounted sums of rewards from each turn on, [episodes, turns]; 0 after an episode's end."""
    table = np.zeros((len(rewards), max(map(len, rewards), default=0)))
    for row, values in zip(table, rewards, strict=True):
        for k in reversed(range(len(values))):
            row[k] = values[k] + gamma * (row[k + 1] if k + 1 < len(values) else 0.0)
    return table


def others_mean(table: Array) -> Array:
    """Return for each episode (row) the mean of the others, column by column; 0 if there is no other."""
    return (table.sum(0) - table) / max(1, len(table) - 1)


def others_deviation(values: Array) -> Array:
    """Return for each episode the standard deviation (Bessel's correction) of the others' values, at least 1 /
    sqrt(episodes).

    The minimum is about what one different outcome among them would cause, for rewards of order 1. Without it, one
    episode among equal ones would have an unbounded advantage.
    """
    n = len(values)
    minimum = n**-0.5
    if n < 3:
        return np.full(n, minimum)
    rest = np.array([np.delete(values, i).std(ddof=1) for i in range(n)])
    return np.maximum(rest, minimum)


def other_groups_deviation(groups: Sequence[Array]) -> list[float | None]:
    """Return for each group the deviation of returns from their group's mean, over all *other* groups.

    It is at least 1 / sqrt(episodes), as in `others_deviation`. The result is None for a single group.
    """
    if len(groups) < 2:
        return [None] * len(groups)
    squares = np.array([((group - group.mean()) ** 2).sum() for group in groups])
    free = np.array([len(group) - 1 for group in groups])  # degrees of freedom
    minimum = sum(map(len, groups)) ** -0.5
    variance = (squares.sum() - squares) / np.maximum(free.sum() - free, 1)
    return [max(minimum, float(x) ** 0.5) for x in variance]


def whiten(
    values: Sequence[Array], weights: Sequence[Array], by_others: bool = True, groups: Sequence[int] | None = None
) -> list[Array]:
    """Subtract a mean from the values of each episode's tokens and divide by a deviation; 0 where the weight is 0.

    Mean and deviation are computed over the *other* episodes under `weights`. Neither depends on the episode's own
    actions, so the expected gradient keeps its direction. `groups` [episodes] numbers groups whose values contain each
    other's returns (a baseline); then the others are the episodes of other groups. The deviation is at least 1 /
    sqrt(episodes), as in `others_deviation`. If there are no others, the mean is 0 and the deviation 1.

    With by_others=False, they are computed over the whole batch (as published). This is biased, because an episode with
    many tokens moves its own mean and scale.
    """
    if not values:
        return []
    weight = np.array([np.sum(w) for w in weights], float)
    if not weight.any():
        return [np.zeros(len(v)) for v in values]
    center = sum(float(v @ w) for v, w in zip(values, weights, strict=True)) / weight.sum()
    centered = [np.asarray(v, float) - center for v in values]  # keeps the digits of the differences of sums below
    first = np.array([v @ w for v, w in zip(centered, weights, strict=True)])
    second = np.array([v**2 @ w for v, w in zip(centered, weights, strict=True)])
    if by_others:
        label = np.unique(groups, return_inverse=True)[1] if groups is not None else np.arange(len(values))
        rest, first, second = (x.sum() - np.bincount(label, x)[label] for x in (weight, first, second))
        alone = rest < 1e-9 * weight.sum()
        mean, square = (np.where(alone, 0.0, x / np.where(alone, 1.0, rest)) for x in (first, second))
        deviation = np.sqrt(np.maximum(square - mean**2, 1 / len(values)))
        mean, deviation = np.where(alone, -center, mean), np.where(alone, 1.0, deviation)
    else:
        mean = np.zeros(len(values))
        deviation = np.full(len(values), np.sqrt(second.sum() / weight.sum() + 1e-8))
    white = zip(centered, weights, mean, deviation, strict=True)
    return [np.where(np.asarray(w) > 0, (v - m) / s, 0.0) for v, w, m, s in white]
