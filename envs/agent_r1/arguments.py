"""Arguments that somebody gives to an environment: what is no number is refused by name, before it does harm."""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any


def integer(name: str, value: Any, least: int | None = None) -> int:
    """`value` as an int. Raises ValueError where it is none, or below `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


def finite(name: str, value: Any) -> float:
    """`value` as a float. Raises ValueError where it is none, NaN or infinite."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(value)
