"""The figures logged for an optimizer step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from llm_utils import distributed
from llm_utils.trajectory import Trajectory

BEYOND = math.log(1.05)  # limit of a gap between log-probabilities


def sampler_gap(rows: Sequence[Trajectory]) -> dict[str, float]:
    """Compute the distances between sampler's and trainer's log-probabilities over all tokens sampled for this
    iteration.

    `old_logprobs` must be the trainer's. Replayed rows are left out, because an older policy sampled them.
    """
    gaps = [np.abs(row.old_logprobs - row.logprobs)[row.action_mask] for row in rows if not row.replayed]
    gap = np.concatenate([*gaps, np.zeros(0, np.float32)])
    if not len(gap):
        return {}
    figures = {"mean": gap.mean(), "max": gap.max(), "beyond": (gap > BEYOND).mean()}
    return {f"sampler/gap_{name}": float(value) for name, value in figures.items()}


def explained_variance(rows: Sequence[Trajectory]) -> float:
    """Return the share of the returns' variance that the values explain; NaN if there are no returns."""
    returns = np.concatenate([row.returns[row.value_mask] for row in rows] or [np.zeros(0)])
    values = np.concatenate([row.values[row.value_mask] for row in rows] or [np.zeros(0)])
    return 1 - float((returns - values).var()) / max(float(returns.var()), 1e-8) if len(returns) else float("nan")


class TokenMeans:
    """Means over the trained tokens of an optimizer step, independent of the loss weights, and the loss itself.

    The step may be split into microbatches and processes in any way. All processes must add the same names.
    """

    def __init__(self) -> None:
        self.sums: defaultdict[str, float] = defaultdict(float)
        self.losses: defaultdict[str, float] = defaultdict(float)
        self.largest: dict[str, float] = {}
        self.tokens = 0

    def add(self, figures: Mapping[str, torch.Tensor]) -> None:
        """Add a microbatch: each figure has an entry per trained token [N]."""
        self.tokens += max(map(len, figures.values()), default=0)
        for name, values in figures.items():
            self.sums[name] += float(values.detach().sum())

    def add_loss(self, name: str, loss: torch.Tensor) -> None:
        """Add a microbatch's part of a loss, with its training weights."""
        self.losses[name] += loss.item()

    def add_gap(self, gaps: torch.Tensor) -> None:
        """Add the distances [N] between the sampler's and the trainer's log-probabilities of sampled tokens."""
        gaps = gaps.detach().abs()
        beyond = (gaps > BEYOND).float()
        figures = {"gap_mean": float(gaps.sum()), "gap_beyond": float(beyond.sum()), "gap_tokens": len(gaps)}
        for name, value in figures.items():
            self.sums[name] += value
        self.largest["gap_max"] = max(self.largest.get("gap_max", 0.0), float(gaps.max()) if len(gaps) else 0.0)

    def result(self) -> dict[str, float]:
        """Return the means over all processes; `gap_beyond` is the share of ratios beyond 1.05 (or 1/1.05)."""
        both = [(kind, name) for kind in (self.sums, self.losses) for name in sorted(kind)]
        tokens, *totals = distributed.all_reduce_sum(self.tokens, *(kind[name] for kind, name in both))
        sums = dict(zip(sorted(self.sums), totals, strict=False))
        losses = dict(zip(sorted(self.losses), totals[len(sums) :], strict=True))
        gap_tokens = sums.pop("gap_tokens", 0.0)
        means = {k: v / max(1.0, gap_tokens if k.startswith("gap_") else tokens) for k, v in sums.items()}
        largest = {name: distributed.all_reduce_max(value) for name, value in sorted(self.largest.items())}
        return means | losses | largest
