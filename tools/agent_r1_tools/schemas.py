"""JSON schemas: checking arguments against them, and writing them for a function."""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, Union

from agent_r1_tools.text import clean_text


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
def _checker(key: _SchemaKey) -> Checker:
    return Checker(key.schema)


def checker(schema: dict[str, Any]) -> Checker:
    """The checker of a schema; made once for each schema object, which must not change afterwards."""
    return _checker(_SchemaKey(schema))


class Checker:
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
        text = f"must be {' or '.join(wanted)}, not {json_type(error.instance)}"
    else:
        text = error.message
    text = clean_text(text, 200)
    return f"'{where}' {text}" if where else text


def kind(schema: Any) -> str:
    """What a property may be, in a word or two."""
    if isinstance(schema, dict) and isinstance(schema.get("enum"), list):
        return " or ".join(json.dumps(value) for value in schema["enum"][:8])
    types = schema.get("type", "any") if isinstance(schema, dict) else "any"
    return " or ".join(types) if isinstance(types, list) else str(types)


def json_type(value: Any) -> str:
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


# --- functions --------------------------------------------------------------------------------------------------------


def function_schema(function: Callable[..., Any], name: str, texts: dict[str, str]) -> dict[str, Any]:
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


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
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
