"""Deterministic versions of operations whose GPU kernels would raise under --deterministic."""

from __future__ import annotations

import torch


def cumulative_sum(probabilities: torch.Tensor) -> torch.Tensor:
    """Return cumulative sums over the last dimension, in the same dtype. The numbers are in [0, 1] and sum to about
    1."""
    if probabilities.is_cuda and torch.are_deterministic_algorithms_enabled():
        return fixed_point_sum(probabilities)
    return probabilities.cumsum(-1)


def fixed_point_sum(probabilities: torch.Tensor) -> torch.Tensor:
    """Return the same sums, computed with integers of unit 2^-40. They are exact in any order of addition.

    The sum does not move where a probability is 0, so inverting it never chooses a token without probability.
    """
    whole = (probabilities.double() * 2**40).round().long().cumsum(-1)
    return (whole.double() / 2**40).to(probabilities.dtype)
