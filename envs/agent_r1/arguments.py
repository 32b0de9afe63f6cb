"""Checks of an environment's arguments: a wrong one is rejected by name, before it does harm."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import math
import operator
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from numbers import Real
from typing import TYPE_CHECKING, Any

from agent_r1_tools import Tool
from agent_r1_tools.running import is_strict
from agent_r1_tools.text import PrintableMessage
from agent_r1_tools.tool import check_limits

if TYPE_CHECKING:
    from agent_r1.tool_env import ToolEnv


class ArgumentError(PrintableMessage, ValueError):
    """An unknown argument of an environment, or one that is out of range: a mistake of the caller and not a bug.

    Your own environment may raise it, too: the learners then print its message without a traceback.

    It is not a TypeError, not even for an unknown keyword, because `gym.make` adds all arguments to the message of a
    TypeError, data included. Its message may quote foreign text, so terminal control characters are escaped.
    """


class FunctionError(ArgumentError):
    """A function of the user's failed, or returned something else than it must. The scripts print it in one line."""


def json_object(text: str) -> dict[str, Any]:
    """Return the JSON object that a flag of a command line names. Raises ArgumentTypeError, which argparse prints."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        example = """'{"split": "test"}'"""
        raise argparse.ArgumentTypeError(f"must be a JSON object, such as {example}, got {text!r:.200}")
    return value


def add_current_folder() -> None:
    """Let modules of the current folder be imported, after all others."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def named_function(name: str, value: str) -> Any:
    """Return the function or class that "module:function" names. The module may be in the current folder.

    Raises ArgumentError if it is not found, is neither, or is one of Python itself, under whatever name: the name may
    come from a row that someone else made, and `builtins:exec` as a reward function would execute the policy's answers.
    """
    module, _, attribute = value.partition(":")
    if not attribute:
        raise ArgumentError(f"{name} must be a function or module:function, got {value!r}")
    add_current_folder()
    try:
        function = None if _of_python(module) else getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:  # the last two: ".name", ""
        places = "modules are imported from this folder, from PYTHONPATH and from installed packages"
        raise ArgumentError(f"{name} {value!r}: {error}; {places}") from None
    own = function is not None and not attribute.startswith("__")
    if own and not callable(function) and not isinstance(function, Tool):
        raise ArgumentError(f"{name} {value!r}: this is no function, but {function!r:.200}")
    if not own or _is_of_python(function):
        raise ArgumentError(f"{name} {value!r}: functions of Python itself are rejected; name one of your own")
    return function


def _is_of_python(function: Any) -> bool:
    """Return True if a function, a class or another callable is one of Python's, also inside of a `partial`."""
    while isinstance(function, partial):
        function = function.func
    owner = getattr(function, "__self__", None)  # a method in C has no module
    return _of_python(getattr(function, "__module__", None) or type(owner).__module__)


def _of_python(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


def integer(name: str, value: Any, least: int | None = None) -> int:
    """Return `value` as an int. Raises ArgumentError if it is not an integer, or below `least`."""
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
    """Return `value` as a float. Raises ArgumentError if it is not a number, NaN or infinite."""
    number = _real(name, value)
    if not math.isfinite(number):
        raise ArgumentError(f"{name} must be a number, got {value!r}")
    return number


def share(name: str, value: Any) -> float:
    """Return `value` as a float from 0 to 1. Raises ArgumentError for any other value."""
    number = _real(name, value)
    if not 0 <= number <= 1:
        raise ArgumentError(f"{name} must be from 0 to 1, got {value!r}")
    return number


def duration(name: str, value: Any) -> float:
    """Return `value` in seconds as a float, which may be infinite. Raises ArgumentError for any other value."""
    number = _real(name, value)
    if not number >= 0:
        raise ArgumentError(f"{name} must be a number of seconds, 0 or more, got {value!r}")
    return number


def some_of(name: str, value: Any, names: Iterable[str]) -> tuple[str, ...]:
    """Return the names in `value`; None means all. Raises ArgumentError unless it is a list of some of `names`."""
    known = tuple(names)
    if value is None:
        return known
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ArgumentError(f"{name} must be a list of names, got {value!r}")
    chosen = tuple(value)
    if not chosen or not all(isinstance(item, str) and item in known for item in chosen):
        raise ArgumentError(f"{name} must be some of {', '.join(known)}, got {value!r}")
    return chosen


def check_class(env: ToolEnv, base: type[ToolEnv], unknown: Mapping[str, Any]) -> None:
    """Raise ArgumentError for an argument that no class up to `base` takes, or a class member of a wrong type."""
    name = type(env).__name__
    if unknown:
        known = ", ".join(_argument_names(type(env), base))
        raise ArgumentError(f"{name} got an unexpected keyword argument {next(iter(unknown))!r}; it has {known}")
    if not isinstance(env.splits, Mapping) or not env.splits:
        example = "{'train': 'train'}"
        raise ArgumentError(f"{name}.splits must be a dict of names, such as {example}, got {env.splits!r:.200}")
    for member in ("instructions", "outcome_term"):
        value = vars(env).get(member, inspect.getattr_static(type(env), member))
        is_computed = isinstance(value, property | cached_property)  # it may need attributes that do not exist yet
        if not isinstance(value, str) and not is_computed:
            raise ArgumentError(f"{name}.{member} must be a text, got {value!r:.200}")
    if not isinstance(env.PROCESS_WEIGHTS, Mapping):
        raise ArgumentError(f"{name}.PROCESS_WEIGHTS must be a dict of numbers, got {env.PROCESS_WEIGHTS!r:.200}")
    for term, weight in env.PROCESS_WEIGHTS.items():
        finite(f"{name}.PROCESS_WEIGHTS[{term!r}]", weight)


def read_tools(name: str, tools: Any) -> list[Tool]:
    """Return the tools of an environment's class: Tools, and plain functions, which become some.

    Raises ArgumentError for anything else, and for a function that cannot be a tool.
    """
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ArgumentError(f"the tools of {name} must be a list of Tools and functions, got {tools!r:.200}")
    return [function_tool(tool, f"the tools of {name}", Tool.from_function) for tool in tools]


def function_tool(tool: Any, where: str, make: Callable[[Any], Tool]) -> Tool:
    """Return a tool, or the one that `make` makes of a function. Raises ArgumentError, which begins with `where`."""
    if isinstance(tool, Tool):
        return tool
    if not callable(tool) or (isinstance(tool, type) and issubclass(tool, Tool)):
        raise ArgumentError(f"{where} must be Tools (objects, no classes) and functions, got {tool!r:.200}")
    try:
        return make(tool)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{where}: {error}") from None


_undescribed: set[str] = set()  # names of tools that were warned about


def check_constructor(
    env: ToolEnv, tools: Sequence[Tool], split: Any, strict: Any, render_mode: Any, bounds: Mapping[str, Any]
) -> None:
    """Raise ArgumentError for a wrong argument of `ToolEnv`. `bounds` must be None or integers of at least 1."""
    name = type(env).__name__
    if not isinstance(strict, bool | None):
        raise ArgumentError(f"strict must be True, False or None, got {strict!r}")
    try:
        is_strict(strict)
    except ValueError as error:  # AGENT_R1_STRICT has an unknown value
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
        if not str(tool.description or "").strip() and tool.name not in _undescribed:
            _undescribed.add(tool.name)
            remedy = "write a docstring in its function, or set its description"
            warnings.warn(f"the tool {tool.name} of {name} has no description for the policy; {remedy}", stacklevel=3)
    names = [tool.name for tool in tools]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        same = ", ".join(map(repr, sorted(twice)))
        raise ArgumentError(f"two tools are named {same}; give each its own name")


def _argument_names(env_class: type, base: type) -> list[str]:
    """Return the keyword arguments of the constructor, its own first, without `tools`, which a task sets itself."""
    names: dict[str, None] = {}
    for cls in env_class.__mro__[: env_class.__mro__.index(base) + 1]:
        init = cls.__dict__.get("__init__")
        for parameter in list(inspect.signature(init).parameters.values())[1:] if init else ():
            by_name = parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            if by_name and (cls is not base or parameter.name != "tools"):
                names[parameter.name] = None
    return list(names)


def _real(name: str, value: Any) -> float:
    """Return `value` as a float, and NaN if it is not a number. Raises ArgumentError if it is too large."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        raise ArgumentError(f"{name} must be a number, got one that is too large") from None
