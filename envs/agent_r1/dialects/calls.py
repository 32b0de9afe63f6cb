"""The definition of a tool call, the same for every dialect and for the replies of chat APIs.

- A call has a name, which is a text that is not empty, and arguments.
- The arguments are a JSON object, or a text that holds one, under "arguments" or "parameters".
- Null and an empty text mean no arguments, like `{}`. Only tools without required arguments may be called by name only.
- An optional argument is dropped if it is null or empty, and its schema allows neither.
- Any other call is malformed: no tool runs.

docs/dialects.md explains the same rule to users.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_r1.dialects.json_reader import read_json
from agent_r1.rewards import ANSWER

Schema = dict[str, Any]
"""A tool for the chat template: ``{"type": "function", "function": {"name", "description", "parameters"}}``."""

MISSING = object()
"""A marker for missing arguments."""


@dataclass
class Call:
    """One tool call as the policy wrote it."""

    name: str
    """The tool's name; may be empty in a malformed call."""
    arguments: dict[str, Any] | None
    """The arguments, or None in a malformed call."""
    error: str | None = None
    """Why the call is malformed, in words for the policy; None if it is well formed."""
    text: str = ""
    """The call as written, without its tags."""
    closed: bool = True
    """False if the span ends before the call does."""


@dataclass
class Turn:
    """A span, read: its visible text and its calls."""

    content: str
    """The visible text up to the first stop token: without thinking, without calls, without white space around it."""
    calls: list[Call] = field(default_factory=list)
    """The tool calls in the order written."""
    raw: str = ""
    """Everything up to the first stop token, thinking and calls included."""
    thought: str = ""
    """The text inside the thinking tags, one line a thought, without white space around it."""

    @property
    def is_open(self) -> bool:
        """True if the span ends inside a call or inside its only answer: a sampler's bound may have cut it there."""
        if self.calls:
            return not self.calls[-1].closed
        return self.content.rfind("<answer>") > self.content.rfind("</answer>") and not ANSWER.search(self.content)


@dataclass(frozen=True)
class Problems:
    """The error texts of a family that a policy reads after a malformed call."""

    name: str = "the call has no name"
    missing: str = "the call has no arguments"
    no_object: str = "the arguments are not a JSON object"


def make_call(name: Any, given: Any, text: str, tools: Sequence[Schema], problems: Problems) -> Call:
    """Make the call that a policy wrote, well formed or malformed.

    Args:
        name: the value of the name.
        given: the value of the arguments; MISSING if there is none.
        text: the call as written.
        tools: the tools' schemas; a call of an unknown name is still a call.
        problems: the error texts for a malformed call.
    """
    if not isinstance(name, str) or not name:
        return Call("", None, problems.name, text)
    if given is MISSING and not needs_nothing(name, tools):
        return Call(name, None, problems.missing, text)
    arguments = read_arguments(None if given is MISSING else given)
    return Call(name, arguments, problems.no_object if arguments is None else None, text)


def read_arguments(given: Any) -> dict[str, Any] | None:
    """Return the arguments of a call from an object, a JSON text of one, or nothing; None for any other value."""
    if isinstance(given, str) and given.strip():  # some models quote the object; its meaning is plain
        try:
            given = read_json(given)
        except ValueError:
            return None
        if isinstance(given, str):  # quoted twice
            return None
    if given is None or isinstance(given, str):
        return {}
    return given if isinstance(given, dict) else None


def fit_arguments(call: Call, tools: Sequence[Schema]) -> None:
    """Drop optional arguments that are null or empty, if their schema does not allow this."""
    function = function_of_tool(call.name, tools)
    if function is None or not call.arguments:
        return
    required, types = _required(function), parameter_types(function)
    for key, value in list(call.arguments.items()):
        allowed = types.get(key)
        if not allowed or key in required or not (value is None or (isinstance(value, str) and not value.strip())):
            continue
        if "null" not in allowed if value is None else "string" not in allowed:
            del call.arguments[key]


def function_of(schema: Schema) -> dict[str, Any]:
    """Return the name, description and parameters in a schema, with or without the outer object."""
    function: dict[str, Any] = schema.get("function", schema)
    return function


def function_of_tool(name: str, tools: Sequence[Schema]) -> dict[str, Any] | None:
    """Return the function in the schema of the tool with this name; None without such a tool."""
    return next((function for function in map(function_of, tools) if function.get("name") == name), None)


def needs_nothing(name: str, tools: Sequence[Schema]) -> bool:
    """Return whether there is a tool with this name that requires no arguments."""
    function = function_of_tool(name, tools)
    return function is not None and not _required(function)


def parameter_types(function: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """Return the JSON types that a tool's schema allows for each parameter; an empty set if it has no type."""
    types: dict[str, frozenset[str]] = {}
    for key, schema in ((function.get("parameters") or {}).get("properties") or {}).items():
        branches = (schema.get("anyOf") or schema.get("oneOf") or [schema]) if isinstance(schema, dict) else []
        named = [branch.get("type") if isinstance(branch, dict) else None for branch in branches]
        known = [[names] if isinstance(names, str) else names for names in named if names]
        types[key] = frozenset(t for names in known for t in names) if len(known) == len(branches) else frozenset()
    return types


def _required(function: Mapping[str, Any]) -> Sequence[str]:
    return (function.get("parameters") or {}).get("required") or ()
