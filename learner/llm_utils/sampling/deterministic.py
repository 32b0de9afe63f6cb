"""Operations that torch has no deterministic kernel for on a GPU: under --deterministic they would raise."""

from __future__ import annotations

import torch


def cumulative_sum(probabilities: torch.Tensor) -> torch.Tensor:
    """Cumulative sums over the last dimension, in the same dtype, of numbers from 0 to 1 that sum to about 1."""
    if probabilities.is_cuda and torch.are_deterministic_algorithms_enabled():
        return fixed_point_sum(probabilities)
    return probabilities.cumsum(-1)


def fixed_point_sum(probabilities: torch.Tensor) -> torch.Tensor:
    """The same in whole numbers of 2^-40: their sums are exact in any order, so a GPU may add them in any.

    Where a probability is 0 the sum doesn't move, so that inverting it never chooses a token without probability.
    """
    whole = (probabilities.double() * 2**40).round().long().cumsum(-1)
    return (whole.double() / 2**40).to(probabilities.dtype)
