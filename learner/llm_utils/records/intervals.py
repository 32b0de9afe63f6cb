"""95 % intervals of proportions, of their differences, and of means over seeds.

A proportion has Wilson's interval. A difference of proportions of the same tasks has Newcombe's, the square-and-add
form with the correlation of the pairs (Newcombe 1998, Statistics in Medicine 17, 873-890 and 2635-2650, methods 10).
Both generalise over tasks. With several seeds, a Student t interval over seeds and a bootstrap over seeds and tasks
generalise over seeds too. The interval then covers all three.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

Array = np.ndarray
Interval = tuple[float, float, float]  # value, low, high
Z = 1.959964  # the 97.5 % quantile of the normal distribution


@lru_cache
def student(df: float) -> float:
    """Return the 97.5 % quantile of Student's t with `df` degrees of freedom, at least 1.

    With t = sqrt(df) tan(a) the density becomes cos(a) ** (df - 1), which is integrated.
    """
    angles = np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(angles) ** (df - 1)
    area = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return float(df**0.5 * np.tan(np.interp(0.95 * area[-1], area, angles)))


def wilson(share: float, n: float) -> tuple[float, float]:
    """Return Wilson's score interval of a proportion of `n` tasks."""
    center = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z * (share * (1 - share) / n + Z * Z / (4 * n * n)) ** 0.5 / (1 + Z * Z / n)
    return max(0.0, min(center - half, share)), min(1.0, max(center + half, share))


def proportion(tables: Array | Sequence[Array], seed: int = 0, resamples: int = 2000) -> Interval:
    """Return the mean success over tables, with its interval.

    A table is [tasks] or [seeds, tasks], from 0 to 1. All tables have the same seeds.
    """
    return _interval([tables], seed, resamples)


def difference(
    first: Array | Sequence[Array], second: Array | Sequence[Array], seed: int = 0, resamples: int = 2000
) -> Interval:
    """Return the difference of two means over tables, with its interval. Tables as in `proportion`, of the same tasks.

    A side with a single seed counts as this one policy. Raise ValueError if the sides have different tasks.
    """
    return _interval([first, second], seed, resamples)


def mean(values: Sequence[float], seed: int = 0, resamples: int = 10_000) -> Interval:
    """Return the mean of any numbers, of seeds or tasks, with the wider of a bootstrap and Student's t interval.

    For shares (0 to 1) the interval stays within 0 and 1. A single number has an interval of width 0: it tells nothing
    about others.
    """
    array, rng = np.asarray(values, float), np.random.default_rng(seed)
    if not len(array):
        raise ValueError("an interval needs at least one number")
    drawn = [array[rng.integers(len(array), size=len(array))].mean() for _ in range(resamples)]
    (low, high), half = np.percentile(drawn, [2.5, 97.5]), _half(array)
    value = float(array.mean())
    low, high = min(float(low), value - half), max(float(high), value + half)
    return (value, max(0.0, low), min(1.0, high)) if ((array >= 0) & (array <= 1)).all() else (value, low, high)


def ratio(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Return the ratio of the geometric means of positive numbers, such as seconds of several runs, with Welch's
    interval of their logarithms."""
    logs = [[np.log(np.asarray(side, float))[:, None]] for side in (first, second)]
    value, (low, high) = _value(logs), _over_seeds(logs)
    return float(np.exp(value)), float(np.exp(low)), float(np.exp(high))


def of_seeds(shares: Sequence[float], tasks: int) -> Interval:
    """Return a proportion with its interval, given each seed's share of the same `tasks`: the wider of Student's t and
    Wilson's."""
    value, half = float(np.mean(shares)), _half(np.asarray(shares, float))
    low, high = wilson(value, tasks)
    return value, max(0.0, min(low, value - half)), min(1.0, max(high, value + half))


def _half(values: Array) -> float:
    """Return half the width of Student's t interval of the mean; 0 for a single value, which tells nothing about
    others."""
    n = len(values)
    return student(n - 1) * float(values.std(ddof=1)) / n**0.5 if n > 1 else 0.0


def _interval(sides: Sequence[Array | Sequence[Array]], seed: int, resamples: int) -> Interval:
    """Return the interval of one side, or of the difference of two."""
    columns = [[np.atleast_2d(np.asarray(table, float)) for table in ([side] if isinstance(side, Array) else side)]
               for side in sides]  # fmt: skip
    tasks = [[table.shape[1] for table in side] for side in columns]
    if not tasks[0] or 0 in tasks[0]:
        raise ValueError("an interval needs at least one task")
    if tasks[0] != tasks[-1]:
        raise ValueError("a difference needs the same tasks on both sides, but one side has more than the other")
    value = _value(columns)
    bounds = [_over_tasks(columns)]
    if any(len(side[0]) > 1 for side in columns):
        bounds += [_over_seeds(columns), _bootstrap(columns, seed, resamples)]
    minimum = 0.0 if len(columns) == 1 else -1.0
    low, high = min(low for low, _ in bounds), max(high for _, high in bounds)
    return value, float(max(minimum, low)), float(min(1.0, high))


def _value(columns: Sequence[Sequence[Array]]) -> float:
    means = [float(np.mean([table.mean() for table in side])) for side in columns]
    return means[0] if len(means) == 1 else means[0] - means[1]


def _effective(means: Array) -> float:
    """Return the number of single-episode tasks with the same information as these tasks, given the mean over seeds.

    Seeds that agree on a task count once: n p (1 - p) / variance. Two tasks on which all seeds agree are added, one
    solved and one not, so that a few zeros do not count as certain.
    """
    n, total, squares = len(means), means.sum() + 1, (means**2).sum() + 1
    share = total / (n + 2)
    return n * share * (1 - share) / (squares / (n + 2) - share**2)


def _over_tasks(columns: Sequence[Sequence[Array]]) -> tuple[float, float]:
    """Return Wilson's and Newcombe's limits: distances to the limits, squared and added over sides and columns."""
    below = above = 0.0
    for tables in zip(*columns, strict=True):
        means = [table.mean(0) for table in tables]
        ends = [(m.mean(), *wilson(m.mean(), _effective(m))) for m in means]
        downs, ups = [share - low for share, low, _ in ends], [high - share for share, _, high in ends]
        if len(tables) == 1:
            below, above = below + downs[0] ** 2, above + ups[0] ** 2
            continue
        both = float(np.mean((means[0] - means[0].mean()) * (means[1] - means[1].mean())))
        if both > 0:
            both = max(0.0, both - 1 / (2 * len(means[0])))  # Newcombe's correction for continuity
        scale = float(means[0].std() * means[1].std())
        phi = both / scale if scale > 0 else 0.0
        below += downs[0] ** 2 - 2 * phi * downs[0] * ups[1] + ups[1] ** 2
        above += ups[0] ** 2 - 2 * phi * ups[0] * downs[1] + downs[1] ** 2
    value, count = _value(columns), len(columns[0])
    return value - max(0.0, below) ** 0.5 / count, value + max(0.0, above) ** 0.5 / count


def _over_seeds(columns: Sequence[Sequence[Array]]) -> tuple[float, float]:
    """Return Student's t interval over the means of seeds; Welch's for two sides."""
    variances = []  # variance of each side's mean, and its degrees of freedom
    for side in columns:
        means = np.mean([table.mean(1) for table in side], axis=0)
        if len(means) > 1:
            variances.append((float(means.var(ddof=1)) / len(means), len(means) - 1))
    value, total = _value(columns), sum(variance for variance, _ in variances)
    if total < 1e-12:
        return value, value
    half = student(total**2 / sum(variance**2 / df for variance, df in variances)) * total**0.5
    return value - half, value + half


def _bootstrap(columns: Sequence[Sequence[Array]], seed: int, resamples: int) -> tuple[float, float]:
    """Resample seeds and tasks; both sides use the same tasks."""
    rng, values = np.random.default_rng(seed), []
    for _ in range(resamples):
        tasks = [rng.integers(table.shape[1], size=table.shape[1]) for table in columns[0]]
        drawn = []
        for side in columns:
            seeds = rng.integers(len(side[0]), size=len(side[0]))
            drawn.append([table[seeds][:, of] for table, of in zip(side, tasks, strict=True)])
        values.append(_value(drawn))
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)
