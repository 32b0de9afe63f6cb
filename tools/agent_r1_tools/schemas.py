"""JSON schemas: check arguments, and write the schema of a function."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Collection
from enum import Enum
from functools import lru_cache
from typing import Annotated, Any, Literal, Union

from agent_r1_tools.text import clean_text


class _SchemaKey:
    """A key that makes a schema hashable by identity. It holds the schema, so that the identity stays unique."""

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
    """Return the checker of a schema. It is made once per schema object, which must not change afterwards."""
    return _checker(_SchemaKey(schema))


class Checker:
    """A check of arguments against a JSON schema.

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
        """Return True only if jsonschema would agree. False means nothing."""
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
        """Return the first three errors; an empty list if the arguments are valid."""
        if not all(isinstance(name, str) for name in arguments):
            return ["argument names must be strings"]
        if self._validator is None:
            from jsonschema import Draft202012Validator

            Draft202012Validator.check_schema(self._schema)
            self._validator = Draft202012Validator(self._schema)
        errors = [e for e, _ in zip(self._validator.iter_errors(arguments), range(3), strict=False)]
        return [_problem(e) for e in errors]


def _problem(error: Any) -> str:
    """Describe a jsonschema error, without the value if it is long."""
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
    elif error.validator == "anyOf" and error.context:
        deepest = max(error.context, key=lambda inside: len(inside.absolute_path))  # of the form that fits best
        if len(deepest.absolute_path) > len(error.absolute_path):
            return _problem(deepest)
        text = f"must be {' or '.join(map(kind, error.validator_value))}, not {json_type(error.instance)}"
    else:
        text = error.message
    text = clean_text(text, 200)
    return f"'{where}' {text}" if where else text


def kind(schema: Any) -> str:
    """Describe the type of a property in a word or two."""
    if isinstance(schema, dict) and isinstance(schema.get("enum"), list):
        return " or ".join(json.dumps(value) for value in schema["enum"][:8])
    types = schema.get("type", "any") if isinstance(schema, dict) else "any"
    return " or ".join(types) if isinstance(types, list) else str(types)


def json_type(value: Any) -> str:
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


SAYING = frozenset(
    "$ref type properties required additionalProperties patternProperties propertyNames allOf anyOf oneOf not if "
    "enum const dependentRequired dependentSchemas unevaluatedProperties minProperties maxProperties".split()
)


def check_schema(schema: Any, name: str) -> None:
    """Raise TypeError unless this is the JSON schema of an object, such as the arguments of the tool `name`."""
    from jsonschema import Draft202012Validator, SchemaError

    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise TypeError(f"the parameters of {name} must be the JSON schema of an object, got {schema!r}")
    if schema and not SAYING & schema.keys():  # unknown words check nothing
        form = '{"type": "object", "properties": {...}, "required": [...]}'
        raise TypeError(f"the parameters of {name} must be the JSON schema of an object, {form}; got {schema!r:.200}")
    try:
        text = json.dumps(schema)
    except (TypeError, ValueError):
        text = None
    if text in _CHECKED:  # many environments with many tools: 2 ms each
        return
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise TypeError(f"the parameters of {name} are not a JSON schema: {error.message}") from None
    if text is not None:
        _CHECKED.add(text)


_CHECKED: set[str | None] = set()


# --- functions --------------------------------------------------------------------------------------------------------


def function_schema(
    function: Callable[..., Any], name: str, texts: dict[str, str], hidden: Collection[str] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the JSON schema of a function's arguments, and pydantic's `TypeAdapter` of each that holds a model.

    `texts` has descriptions of arguments; those of `Annotated` come first. `hidden` parameters are not in the schema.
    TypeError where there is no schema.
    """
    try:
        hinted = function if inspect.isroutine(function) or inspect.isclass(function) else type(function).__call__
        hints = typing.get_type_hints(getattr(function, "func", hinted), include_extras=True)
    except NameError as error:
        problem = f"a type hint of {name} cannot be resolved ({error}); use types that its module imports"
        raise TypeError(problem) from error
    properties: dict[str, Any] = {}
    required: list[str] = []
    models: dict[str, Any] = {}
    definitions: dict[str, Any] = {}  # of models, which refer to them as to the root's
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in hidden:
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{name}({parameter}): a tool's parameters must be plain ones that can be given by name")
        hint, default = hints.get(parameter.name, Any), parameter.default
        try:
            if type(default).__name__ == "FieldInfo":  # the function would be given it as a value
                raise TypeError("its default is a pydantic Field; write Annotated[..., Field(...)] = value")
            if _holds_model(hint):
                models[parameter.name], schema = _model_schema(hint, definitions)
            else:
                schema = _type_schema(hint)
        except TypeError as error:
            raise TypeError(f"parameter {parameter.name!r} of {name}: {error}") from None
        notes = [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, str)]  # pydantic skips them
        if notes or (parameter.name in texts and (parameter.name in models or "description" not in schema)):
            schema["description"] = notes[-1] if notes else texts[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        elif isinstance(parameter.default, str | int | float | bool):
            schema["default"] = parameter.default
        properties[parameter.name] = schema
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return schema | ({"$defs": definitions} if definitions else {}), models


def _holds_model(hint: Any) -> bool:
    """Return True if a type hint names a model, a dataclass, an Enum or a TypedDict, which pydantic makes.

    pydantic itself is not needed to see that."""
    if hasattr(hint, "__pydantic_core_schema__") or hasattr(hint, "__required_keys__"):  # typing_extensions' TypedDict
        return True
    if isinstance(hint, type) and (issubclass(hint, Enum) or dataclasses.is_dataclass(hint)):
        return True
    return typing.get_origin(hint) is not Literal and any(map(_holds_model, typing.get_args(hint)))


def _model_schema(hint: Any, definitions: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return pydantic's adapter and schema of a type hint. Referenced schemas are added to `definitions`."""
    try:
        from pydantic import TypeAdapter
        from pydantic.errors import PydanticUserError
    except ImportError:
        raise TypeError("dataclasses, Enums and TypedDicts need pydantic: pip install pydantic") from None
    try:
        adapter: Any = TypeAdapter(hint)
        schema: dict[str, Any] = adapter.json_schema()
    except PydanticUserError as error:  # a TypedDict of typing, before Python 3.12
        raise TypeError(f"pydantic does not accept {hint!r}: {error.message}") from error
    for name, definition in schema.pop("$defs", {}).items():
        if definitions.setdefault(name, definition) != definition:
            raise TypeError(f"two models are named {name}; rename one of them")
    return adapter, schema


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
    """Return the JSON schema of a type hint."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if origin is Annotated:
        schema = _type_schema(arguments[0])
        for extra in arguments[1:]:
            inside = getattr(extra, "metadata", None)  # pydantic's Field holds others
            for part in (extra, *(inside if isinstance(inside, list) else ())):
                schema |= _annotation(part, schema)
        return schema
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
    raise TypeError(
        f"{hint!r} has no schema here; use str, int, float, bool, list, dict, Optional, Union, Literal, Annotated, an "
        "Enum, a dataclass, a TypedDict or a pydantic model, or give the JSON schema: from_function(..., "
        "parameters={...})"
    )


_BOUNDS = {
    "ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum", "multiple_of": "multipleOf",
}  # fmt: skip
_LENGTHS = {"string": "Length", "array": "Items", "object": "Properties"}


def _annotation(extra: Any, schema: dict[str, Any]) -> dict[str, Any]:
    """Read an entry of `Annotated`. A text is the description.

    Other entries (of annotated_types, pydantic, msgspec) have attributes by the same names. Unknown entries are
    ignored, as typing asks for."""
    if isinstance(extra, str):
        return {"description": extra}
    annotation: dict[str, Any] = {}
    for name in ("description", "documentation", "pattern"):
        if isinstance(text := getattr(extra, name, None), str):
            annotation["pattern" if name == "pattern" else "description"] = text
    for name, keyword in _BOUNDS.items():
        if isinstance(bound := getattr(extra, name, None), int | float):
            annotation[keyword] = bound
    types = [option.get("type") for option in (schema, *schema.get("anyOf", ()))]
    for kind, word in _LENGTHS.items():
        if any(kind == of or isinstance(of, list) and kind in of for of in types):
            for name, prefix in (("min_length", "min"), ("max_length", "max")):
                if isinstance(bound := getattr(extra, name, None), int):
                    annotation[prefix + word] = bound
    return annotation


_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Yields|Raises|Examples?|Notes?|Attributes):\s*$")


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the text before the first section of a Google-style docstring, and each argument's description."""
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
