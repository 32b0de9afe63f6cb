"""Draws from sequences of any kind of values; numpy's own would turn them into arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def pick(rng: np.random.Generator, options: Sequence[Any]) -> Any:
    """Draw one of the options."""
    return options[int(rng.integers(len(options)))]


def sample(rng: np.random.Generator, options: Sequence[Any], count: int) -> list[Any]:
    """Draw `count` different options, in a random order."""
    return [options[i] for i in rng.choice(len(options), count, replace=False)]
