"""Importance ratios over turns and sequences (GSPO, arXiv 2507.18071), instead of single tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from llm_utils.trajectory import Segment


def segment_numbers(rows: Sequence[Segment], ratio: str, device: Any = None) -> torch.Tensor | None:
    """Number each trained token's turn (`ratio` "turn") or row ("sequence") among those of all rows: int64 [N].

    Return None for "token", and if no token is trained on.
    """
    numbers: list[np.ndarray] = []
    for row in rows:
        if ratio != "token" and row.train_mask.any():
            first = numbers[-1][-1] + 1 if numbers else 0
            starts = row.turn_starts[1:] if ratio == "turn" else []
            numbers.append(first + np.searchsorted(starts, np.flatnonzero(row.train_mask), side="right"))
    return torch.from_numpy(np.concatenate(numbers)).to(device) if numbers else None


def mean_over_segments(logratio: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
    """Replace each token's log-ratio [N] by the mean over its segment. `segments` [N] numbers the segments.

    The exponential is the geometric mean of the segment's ratios (eq. 7). Every token keeps its own gradient, so it can
    have its own advantage (GSPO-token, eq. 14).
    """
    zeros = logratio.new_zeros(int(segments[-1]) + 1)
    sums, counts = zeros.index_add(0, segments, logratio), zeros.index_add(0, segments, torch.ones_like(logratio))
    return (sums / counts)[segments].detach() + logratio - logratio.detach()
