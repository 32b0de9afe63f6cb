"""Arguments that somebody gives to an environment: what is no number is refused by name, before it does harm."""

from __future__ import annotations

import importlib
import math
import operator
import sys
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

from agent_r1_tools.text import PrintableMessage


class ArgumentError(PrintableMessage, ValueError):
    """An argument of an environment that isn't there, or is out of range: the mistake of who gave it, and no bug. An
    environment of your own may raise it, too: the learners then say what it says, without a traceback.

    It is no TypeError, not even for an unknown keyword: to those `gym.make` adds all arguments, data included. What a
    terminal would obey in it is escaped: it may quote what somebody else wrote.
    """


def named_function(name: str, value: str) -> Any:
    """The function that "module:function" names.

    Raises ArgumentError where it isn't found, and for one of Python's own modules: a run's folder or a row that
    somebody else made may name it (`builtins:exec` for a reward function would run what a policy answers).
    """
    module, _, attribute = value.partition(":")
    if not attribute:
        raise ArgumentError(f"{name} is a function, or module:function; got {value!r}")
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise ArgumentError(f"{name} {value!r}: one of Python's own functions is refused; name one of yours")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:  # the last two: ".name", ""
        raise ArgumentError(f"{name} {value!r}: {error}; the module must be found (PYTHONPATH=.)") from None


def integer(name: str, value: Any, least: int | None = None) -> int:
    """`value` as an int. Raises ArgumentError where it is none, or below `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ArgumentError(f"{name} must be an integer, got {value!r}")
    if least is not None and number < least:
        raise ArgumentError(f"{name} must be at least {least}, got {number}")
    return number


def finite(name: str, value: Any) -> float:
    """`value` as a float. Raises ArgumentError where it is none, NaN or infinite."""
    number = _real(name, value)
    if not math.isfinite(number):
        raise ArgumentError(f"{name} must be a number, got {value!r}")
    return number


def share(name: str, value: Any) -> float:
    """`value` as a float from 0 to 1. Raises ArgumentError where it is none."""
    number = _real(name, value)
    if not 0 <= number <= 1:
        raise ArgumentError(f"{name} must be from 0 to 1, got {value!r}")
    return number


def duration(name: str, value: Any) -> float:
    """`value` in seconds as a float; infinity is one. Raises ArgumentError where it is none, or below 0."""
    number = _real(name, value)
    if not number >= 0:
        raise ArgumentError(f"{name} must be a number of seconds, 0 or more, got {value!r}")
    return number


def some_of(name: str, value: Any, there: Iterable[str]) -> tuple[str, ...]:
    """The names in `value`, None for all. Raises ArgumentError where it is no list of some that are `there`."""
    known = tuple(there)
    if value is None:
        return known
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ArgumentError(f"{name} must be a list of names, got {value!r}")
    chosen = tuple(value)
    if not chosen or not all(isinstance(one, str) and one in known for one in chosen):
        raise ArgumentError(f"{name} must be some of {', '.join(known)}, got {value!r}")
    return chosen


def _real(name: str, value: Any) -> float:
    """`value` as a float, NaN where it is no number. Raises ArgumentError where no float holds it."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        raise ArgumentError(f"{name} must be a number, got one that is too large") from None
