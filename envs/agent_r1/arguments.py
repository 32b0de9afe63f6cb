"""Arguments that somebody gives to an environment: a wrong one is refused by name, before it does harm."""

from __future__ import annotations

import importlib
import inspect
import math
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Any

from agent_r1_tools import Tool
from agent_r1_tools.running import is_strict
from agent_r1_tools.text import PrintableMessage
from agent_r1_tools.tool import check_limits

if TYPE_CHECKING:
    from agent_r1.tool_env import ToolEnv


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


def check_class(env: ToolEnv, base: type[ToolEnv], unknown: Mapping[str, Any]) -> None:
    """Raise ArgumentError for arguments that neither the class nor one above it up to `base` takes, and where a member
    of the class has a wrong type."""
    name = type(env).__name__
    if unknown:
        there = ", ".join(_argument_names(type(env), base))
        raise ArgumentError(f"{name} got an unexpected keyword argument {next(iter(unknown))!r}; it has {there}")
    if not isinstance(env.splits, Mapping) or not env.splits:
        example = "{'train': 'train'}"
        raise ArgumentError(f"{name}.splits is a dict of names, such as {example}, got {env.splits!r:.200}")
    for member in ("instructions", "outcome_term"):
        said = vars(env).get(member, inspect.getattr_static(type(env), member))
        later = isinstance(said, property | cached_property)  # it may need what isn't there yet
        if not isinstance(said, str) and not later:
            raise ArgumentError(f"{name}.{member} is a text, got {said!r:.200}")
    if not isinstance(env.PROCESS_WEIGHTS, Mapping):
        raise ArgumentError(f"{name}.PROCESS_WEIGHTS is a dict of numbers, got {env.PROCESS_WEIGHTS!r:.200}")
    for term, weight in env.PROCESS_WEIGHTS.items():
        finite(f"{name}.PROCESS_WEIGHTS[{term!r}]", weight)


def check_constructor(
    env: ToolEnv, tools: Any, split: Any, strict: Any, render_mode: Any, bounds: Mapping[str, Any]
) -> None:
    """Raise ArgumentError for an argument of `ToolEnv` that is wrong. `bounds`: None, or an integer of at least 1."""
    name = type(env).__name__
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Tool) for tool in tools):
        remedy = "a function becomes one by Tool.from_function(function)"
        raise ArgumentError(f"the tools of {name} are a list of Tools, got {tools!r:.200}; {remedy}")
    if not isinstance(strict, bool | None):
        raise ArgumentError(f"strict must be True, False or None, got {strict!r}")
    try:
        is_strict(strict)
    except ValueError as error:  # AGENT_R1_STRICT says what nobody knows
        raise ArgumentError(str(error)) from None
    if not isinstance(split, str) or split not in env.splits:
        raise ArgumentError(f"{name} has no split {split!r}; it has {', '.join(env.splits)}")
    if render_mode is not None and render_mode not in env.metadata["render_modes"]:
        raise ArgumentError(f"render_mode must be None, 'ansi' or 'human', got {render_mode!r}")
    for bound, value in bounds.items():
        if value is not None:
            integer(bound, value, least=1)
    for tool in tools:
        check_limits(tool)
    names = [tool.name for tool in tools]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        same = ", ".join(map(repr, sorted(twice)))
        raise ArgumentError(f"two tools are named {same}; give each a name of its own")


def _argument_names(env_class: type, base: type) -> list[str]:
    """What the constructor takes by name, its own ones first; without `tools`, which a task gives itself."""
    names: dict[str, None] = {}
    for one in env_class.__mro__[: env_class.__mro__.index(base) + 1]:
        init = one.__dict__.get("__init__")
        for parameter in list(inspect.signature(init).parameters.values())[1:] if init else ():
            by_name = parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            if by_name and (one is not base or parameter.name != "tools"):
                names[parameter.name] = None
    return list(names)


def _real(name: str, value: Any) -> float:
    """`value` as a float, NaN where it is no number. Raises ArgumentError where no float holds it."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        raise ArgumentError(f"{name} must be a number, got one that is too large") from None
