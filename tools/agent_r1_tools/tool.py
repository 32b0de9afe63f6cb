"""What an agent can call: a `Tool` takes JSON arguments and reports what happened in a `ToolResult`.

A tool knows nothing of environments, rewards or tokens: it says what happened, and the environment decides what
that means. A tool may raise, hang or return nonsense; `run_tool` and `run_batch` are the way to call it, and they
always answer.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import threading
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Union

DEFAULT_TIMEOUT = 30.0
DEFAULT_MAX_RESULT_CHARS = 8192
# The most calls of one batch that run at the same time; a call counts its timeout from its own start.
MAX_PARALLEL_CALLS = min(32, (os.cpu_count() or 1) + 4)


@dataclass(frozen=True)
class ToolResult:
    """What happened in one call.

    Attributes:
        content: what the policy reads.
        ok: whether the call did what it is for. A search that finds nothing is ok, one that could not be made is not.
        data: the same for programs. Failures made by `run_tool` carry `{"error": kind}` with the kind
            "bad_arguments", "timeout", "exception" or "bad_result".
    """

    content: str
    ok: bool = True
    data: Any = None


class Tool(ABC):
    """Something that an agent can call by `name` with arguments that fit `parameters`.

    Attributes:
        name: what the policy writes to call it.
        description: what the policy reads about it.
        parameters: the JSON schema (type "object") of the arguments; not to be changed after the first call.
        timeout: seconds that one call (or one `batch_execute`) may take; `math.inf` says that the tool never blocks,
            and it then runs in the caller's thread, which is much cheaper.
        concurrency_safe: calls don't influence each other: they may run at the same time, and equal calls in a batch
            may share one execution. False for a tool with a session: every call is executed, in order.
        max_result_chars: the length to which `run_tool` cuts the content, marker included.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    timeout: float = DEFAULT_TIMEOUT
    concurrency_safe: bool = True
    max_result_chars: int = DEFAULT_MAX_RESULT_CHARS

    @abstractmethod
    def execute(self, arguments: dict[str, Any]) -> ToolResult:
        """Make one call. `arguments` fit `parameters`. May raise: `run_tool` reports it to the policy."""

    def batch_execute(self, batch: list[dict[str, Any]]) -> list[ToolResult]:
        """Make many calls, one result each, in order. Override it where many at once are cheaper than one by one.

        When an override raises or returns the wrong number of results, `run_batch` makes the calls one by one
        instead, so calls that were already made may be made again. An override shares one `timeout` among its calls.
        """
        return [self.execute(arguments) for arguments in batch]

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in the form that chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    def validate(self, arguments: Any) -> str | None:
        """Say what is wrong with the arguments, in a line that the policy can act on, or None where they are right."""
        if not isinstance(arguments, dict):
            return f"arguments must be a JSON object, not {_json_type(arguments)}. {self._expected()}"
        checker = _checker(_SchemaKey(self.parameters))
        if checker.surely_valid(arguments):
            return None
        problems = checker.problems(arguments)
        return f"{'; '.join(problems)}. {self._expected()}" if problems else None

    def _expected(self) -> str:
        """One line that lists the parameters."""
        required = self.parameters.get("required", [])
        parts = [
            f"{name} ({_kind(schema)}{'' if name in required else ', optional'})"
            for name, schema in self.parameters.get("properties", {}).items()
        ]
        return f"Expected: {', '.join(parts) or 'no arguments'}."

    def get_state(self) -> Any:
        """The state of the tool's session, from which `set_state` can branch; None for a tool without one."""
        return None

    def set_state(self, state: Any) -> None:
        """Go back to what `get_state` gave; nothing to do for a tool without a session."""
        return None

    def close(self) -> None:
        """End what runs for the tool's session, such as a process; nothing to do for a tool without one."""
        return None

    @classmethod
    def from_function(
        cls,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        concurrency_safe: bool = True,
        max_result_chars: int = DEFAULT_MAX_RESULT_CHARS,
    ) -> Tool:
        """Make a tool of a typed function with a Google-style docstring.

        The schema comes from the type hints (str, int, float, bool, list, dict, Optional, Union, Literal, Any), the
        descriptions from the docstring, and parameters with a default are optional. The function may return a
        `ToolResult`; any other value becomes `ToolResult(content=str(value), data=value)`.

        Raises:
            TypeError: the signature cannot be written as a JSON schema (*args, other types, an async function).
            ValueError: the function has no usable name (a lambda) and none was given.
        """
        return _FunctionTool(function, name, description, timeout, concurrency_safe, max_result_chars)


def run_tool(tool: Tool, arguments: Any) -> ToolResult:
    """Make one call and always answer.

    Whatever goes wrong (arguments that don't fit, an exception, a timeout, a result of the wrong type) becomes a
    `ToolResult(ok=False)` whose content the policy can read. The content is bounded by `tool.max_result_chars` and is
    always encodable: lone surrogates and NUL become U+FFFD. After a timeout the call goes on in a daemon thread,
    which keeps nobody from exiting. Only KeyboardInterrupt and SystemExit in the main thread pass through.
    """
    failure = _reject(tool, arguments)
    return _execute(tool, arguments) if failure is None else failure


def run_batch(tool: Tool, batch: Iterable[Any]) -> list[ToolResult]:
    """Make many calls of one tool, with the guarantees of `run_tool`, results in order.

    Calls with equal arguments are executed once (if the tool is `concurrency_safe`); one bad call does not fail the
    others.
    """
    calls = list(batch)
    results: list[ToolResult | None] = [_reject(tool, arguments) for arguments in calls]
    groups: dict[Any, list[int]] = {}  # equal calls together
    for index, arguments in enumerate(calls):
        if results[index] is None:
            groups.setdefault(_call_key(tool, arguments, index), []).append(index)
    answers = _execute_all(tool, [calls[indexes[0]] for indexes in groups.values()])
    for indexes, answer in zip(groups.values(), answers, strict=True):
        for index in indexes:
            results[index] = answer
    return [result for result in results if result is not None]


# --- running ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Failed:
    """An outcome that is not a result: the kind of the error and a line for the policy."""

    kind: str
    message: str


def _execute(tool: Tool, arguments: dict[str, Any]) -> ToolResult:
    return _finish(tool, _attempt(tool, tool.execute, arguments))


def _execute_all(tool: Tool, batch: list[dict[str, Any]]) -> list[ToolResult]:
    if len(batch) > 1 and type(tool).batch_execute is not Tool.batch_execute:
        outcome = _attempt(tool, tool.batch_execute, batch)
        if isinstance(outcome, list | tuple) and len(outcome) == len(batch):
            return [_finish(tool, result) for result in outcome]
        if isinstance(outcome, _Failed) and outcome.kind == "timeout":  # trying again would only take as long again
            return [_finish(tool, outcome) for _ in batch]
    lanes = min(len(batch), MAX_PARALLEL_CALLS)
    if tool.timeout == math.inf or not tool.concurrency_safe or lanes < 2:
        return [_execute(tool, arguments) for arguments in batch]
    results: list[ToolResult | None] = [None] * len(batch)
    todo = iter(range(len(batch)))  # next() on a range iterator is atomic

    def work() -> None:
        for index in todo:
            results[index] = _execute(tool, batch[index])

    threads = [threading.Thread(target=work, daemon=True, name=f"tool-{tool.name}-lane") for _ in range(lanes - 1)]
    started = [thread for thread in threads if _start(thread)]
    work()  # the caller is a lane too, so that this ends even where no thread can be started
    for thread in started:
        thread.join()
    return [result for result in results if result is not None]


def _attempt(tool: Tool, function: Callable[[Any], Any], argument: Any) -> Any:
    """The outcome of a call: whatever the tool returned, or `_Failed`."""
    if tool.timeout == math.inf:
        return _guarded(function, argument)
    outcomes: list[Any] = []
    finished = threading.Event()

    def work() -> None:
        outcomes.append(_guarded(function, argument))
        finished.set()

    if not _start(threading.Thread(target=work, daemon=True, name=f"tool-{tool.name}")):
        return _Failed("exception", "no thread could be started")
    if not finished.wait(min(tool.timeout, threading.TIMEOUT_MAX)):
        return _Failed("timeout", f"no result within {tool.timeout:g} seconds")
    return outcomes[0]


def _guarded(function: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return function(argument)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit) and threading.current_thread() is threading.main_thread():
            raise
        return _Failed("exception", _describe(error))


def _start(thread: threading.Thread) -> bool:
    try:
        thread.start()
    except RuntimeError:  # the machine has no thread left
        return False
    return True


def _reject(tool: Tool, arguments: Any) -> ToolResult | None:
    try:
        problem = tool.validate(arguments)
    except Exception as error:
        return _failure(tool, _Failed("exception", f"the arguments could not be checked: {_describe(error)}"))
    return None if problem is None else _failure(tool, _Failed("bad_arguments", problem))


def _finish(tool: Tool, outcome: Any) -> ToolResult:
    """A result that is safe to hand on: right types, clean and bounded content."""
    if isinstance(outcome, str):
        outcome = ToolResult(outcome)
    if isinstance(outcome, _Failed):
        return _failure(tool, outcome)
    if not isinstance(outcome, ToolResult):
        problem = f"the tool returned {type(outcome).__name__} instead of a ToolResult"
        return _failure(tool, _Failed("bad_result", problem))
    content, ok = outcome.content, outcome.ok
    try:
        text = clean_text(content if type(content) is str else str(content), tool.max_result_chars)
        ok = bool(ok)
    except Exception as error:
        return _failure(tool, _Failed("bad_result", f"the tool's result is not readable: {_describe(error)}"))
    return outcome if text is content and ok is outcome.ok else ToolResult(text, ok, outcome.data)


def _failure(tool: Tool, failed: _Failed) -> ToolResult:
    content = clean_text(f"Error in {tool.name}: {failed.message}", tool.max_result_chars)
    return ToolResult(content, ok=False, data={"error": failed.kind})


def _describe(error: BaseException) -> str:
    try:
        message = str(error)
    except Exception:  # the exception's own __str__ is broken
        message = ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _call_key(tool: Tool, arguments: dict[str, Any], index: int) -> Any:
    if not tool.concurrency_safe:
        return index
    try:
        return json.dumps(arguments, sort_keys=True)  # unlike ==, tells 1 from 1.0 and True
    except Exception:  # not JSON: nothing that we could compare
        return index


def clean_text(text: str, max_chars: int) -> str:
    """Text of at most `max_chars` characters that can be encoded; what was cut is counted in a marker at the end."""
    if len(text) > max_chars:
        room = max_chars - len(f"... [{len(text)} characters cut]")
        text = f"{text[:room]}... [{len(text) - room} characters cut]" if room > 0 else text[:max_chars]
    return encodable(text)


def encodable(text: str) -> str:
    """The text with U+FFFD for lone surrogates, which UTF-8 cannot encode, and for NUL, which ends strings in C."""
    if not text.isascii():
        text = _SURROGATES.sub("\ufffd", text)
    return text.replace("\0", "\ufffd") if "\0" in text else text


_SURROGATES = re.compile("[\ud800-\udfff]")


# --- checking arguments -----------------------------------------------------------------------------------------------


class _SchemaKey:
    """Makes a schema hashable by identity; it holds the schema, so that the identity stays its own."""

    __slots__ = ("schema",)

    def __init__(self, schema: dict[str, Any]) -> None:
        self.schema = schema

    def __hash__(self) -> int:
        return id(self.schema)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SchemaKey) and other.schema is self.schema


@lru_cache(maxsize=256)
def _checker(key: _SchemaKey) -> _Checker:
    return _Checker(key.schema)


class _Checker:
    """Checks arguments against a JSON schema.

    jsonschema decides. For flat schemas (properties that have a plain type and nothing else to say) a check by hand
    comes first; it accepts less than jsonschema does and never more, so it only saves the time of asking.
    """

    _PLAIN_TYPES = {"string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,)}
    _ANNOTATIONS = {"type", "description", "title", "default", "examples"}
    _FLAT_KEYS = {"type", "description", "title", "properties", "required", "additionalProperties"}

    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema = schema
        self._validator: Any = None
        self._types: dict[str, tuple[type, ...]] | None = None
        self._required: list[str] = schema.get("required", [])
        properties = schema.get("properties", {})
        if schema.get("type") == "object" and schema.keys() <= self._FLAT_KEYS:
            if all(self._is_plain(p) for p in properties.values()):
                self._types = {name: self._PLAIN_TYPES[p["type"]] for name, p in properties.items()}

    def _is_plain(self, schema: Any) -> bool:
        if not isinstance(schema, dict) or not isinstance(schema.get("type"), str):
            return False
        return schema["type"] in self._PLAIN_TYPES and schema.keys() <= self._ANNOTATIONS

    def surely_valid(self, arguments: dict[str, Any]) -> bool:
        """True only where jsonschema would agree; False means nothing."""
        types_of = self._types
        if types_of is None:
            return False
        for name, value in arguments.items():
            allowed = types_of.get(name)
            if allowed is None or type(value) not in allowed:
                return False
        for name in self._required:
            if name not in arguments:
                return False
        return True

    def problems(self, arguments: dict[str, Any]) -> list[str]:
        """The first three things that are wrong; empty where the arguments are valid."""
        if not all(isinstance(name, str) for name in arguments):
            return ["argument names must be strings"]
        if self._validator is None:
            from jsonschema import Draft202012Validator

            Draft202012Validator.check_schema(self._schema)
            self._validator = Draft202012Validator(self._schema)
        errors = [e for e, _ in zip(self._validator.iter_errors(arguments), range(3), strict=False)]
        return [_problem(e) for e in errors]


def _problem(error: Any) -> str:
    """A jsonschema error in words, without the value where that would be long."""
    where = ".".join(str(part) for part in error.absolute_path)
    if error.validator == "required":
        missing = [name for name in error.validator_value if name not in error.instance]
        text = f"missing {', '.join(repr(name) for name in missing)}"
    elif error.validator == "additionalProperties" and error.validator_value is False:
        known = error.schema.get("properties", {})
        extra = [name for name in error.instance if name not in known]
        text = f"unknown {', '.join(repr(name) for name in extra)}"
    elif error.validator == "type":
        wanted = error.validator_value if isinstance(error.validator_value, list) else [error.validator_value]
        text = f"must be {' or '.join(wanted)}, not {_json_type(error.instance)}"
    else:
        text = error.message
    text = clean_text(text, 200)
    return f"'{where}' {text}" if where else text


def _kind(schema: Any) -> str:
    """What a property may be, in a word or two."""
    if isinstance(schema, dict) and isinstance(schema.get("enum"), list):
        return " or ".join(json.dumps(value) for value in schema["enum"][:8])
    kind = schema.get("type", "any") if isinstance(schema, dict) else "any"
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def _json_type(value: Any) -> str:
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


# --- functions as tools -----------------------------------------------------------------------------------------------


class _FunctionTool(Tool):
    def __init__(
        self,
        function: Callable[..., Any],
        name: str | None,
        description: str | None,
        timeout: float,
        concurrency_safe: bool,
        max_result_chars: int,
    ) -> None:
        self.function = function
        self.name = name if name is not None else getattr(function, "__name__", "")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", self.name):
            raise ValueError(f"{self.name!r} cannot be a tool's name; pass from_function(..., name='my_tool')")
        if inspect.iscoroutinefunction(function):
            raise TypeError(f"{self.name} is async; wrap it in a plain function that calls asyncio.run")
        text, argument_texts = _read_docstring(inspect.getdoc(function) or "")
        self.description = description if description is not None else text
        self.parameters = _function_schema(function, self.name, argument_texts)
        self.timeout = timeout
        self.concurrency_safe = concurrency_safe
        self.max_result_chars = max_result_chars

    def execute(self, arguments: dict[str, Any]) -> ToolResult:
        value = self.function(**arguments)
        return value if isinstance(value, ToolResult) else ToolResult(str(value), data=value)


def _function_schema(function: Callable[..., Any], name: str, texts: dict[str, str]) -> dict[str, Any]:
    try:
        hinted = function if inspect.isroutine(function) or inspect.isclass(function) else type(function).__call__
        hints = typing.get_type_hints(getattr(function, "func", hinted))
    except NameError as error:
        problem = f"a type hint of {name} cannot be resolved ({error}); use types that its module imports"
        raise TypeError(problem) from error
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{name}({parameter}): a tool's parameters must be plain ones that can be given by name")
        try:
            schema = _type_schema(hints.get(parameter.name, Any))
        except TypeError as error:
            raise TypeError(f"parameter {parameter.name!r} of {name}: {error}") from None
        if parameter.name in texts:
            schema["description"] = texts[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        elif isinstance(parameter.default, str | int | float | bool):
            schema["default"] = parameter.default
        properties[parameter.name] = schema
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_TYPE_NAMES: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
    type(None): "null",
}


def _type_schema(hint: Any) -> dict[str, Any]:
    """The JSON schema of a type hint."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if hint in _TYPE_NAMES:
        return {"type": _TYPE_NAMES[hint]}
    if origin is list:
        return {"type": "array", "items": _type_schema(arguments[0])}
    if origin is dict and arguments[0] is str:
        return {"type": "object", "additionalProperties": _type_schema(arguments[1])}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is Union or origin is types.UnionType:
        options = [_type_schema(argument) for argument in arguments]
        if all(option.keys() == {"type"} for option in options):
            return {"type": [option["type"] for option in options]}
        return {"anyOf": options}
    raise TypeError(f"{hint!r} has no schema here; use str, int, float, bool, list, dict, Optional, Union or Literal")


_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Yields|Raises|Examples?|Notes?|Attributes):\s*$")


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The text before the first section of a Google-style docstring, and the description of each argument."""
    lead: list[str] = []
    texts: dict[str, str] = {}
    section, current, margin = "", "", 0
    for line in text.splitlines():
        heading = _SECTION.match(line)
        if heading:
            section, current, margin = heading[1], "", 0
        elif not section:
            lead.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            indent = len(line) - len(line.lstrip())
            margin = margin or indent
            entry = re.match(r"\s+\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)", line)
            if entry and indent <= margin:
                current = entry[1]
                texts[current] = entry[2].strip()
            elif current:
                texts[current] = f"{texts[current]} {line.strip()}".strip()
    paragraphs = re.split(r"\n\s*\n", "\n".join(lead).strip())
    return "\n\n".join(" ".join(p.split()) for p in paragraphs), texts
