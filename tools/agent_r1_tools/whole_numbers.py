"""Conversion of 2.0 to 2 for a schema's integer: equal in JSON, but different for range() and isinstance().

Nothing is validated here: a schema may be a stranger's, and its patterns or branches may take for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote

MOST_REFERENCES = 20  # one after the other
MOST_LOOKS = 1_000_000  # at schemas, of one value: some two seconds
KINDS: dict[type, set[str]] = {
    bool: {"boolean"}, int: {"integer", "number"}, float: {"integer", "number"}, str: {"string"}, list: {"array"},
    dict: {"object"}, type(None): {"null"},
}  # fmt: skip


def whole_numbers(schema: dict[str, Any], value: Any) -> Any:
    """Return a value that fits a schema, with an int for a whole float if the schema requires an integer.

    It does so by the type integer, or by naming the int in `enum` or `const`, unless the type number is allowed. The
    function follows `allOf`, the parts of `anyOf` and `oneOf` with the value's type and form, and `$ref` inside the
    schema. Other keywords do not count.
    """
    try:
        return _Reader(schema).whole([schema], value) if _any_whole(value) else value
    except (RecursionError, TypeError, AttributeError, LookupError):  # too deep, too much; or no schema
        return value


def _any_whole(value: Any) -> bool:
    todo = [value]  # as deep as a policy likes, where the schema says nothing
    while todo:
        one = todo.pop()
        if type(one) is float and one.is_integer():
            return True
        if isinstance(one, list | dict):
            todo += one.values() if isinstance(one, dict) else one
    return False


class _Reader:
    """A reader of values by their schema that counts its steps."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.root, self.looks = root, 0

    def whole(self, schemas: Iterable[Any], value: Any) -> Any:
        """Convert `value`, for which all of `schemas` hold."""
        if not isinstance(value, list | dict | float) or (isinstance(value, float) and not value.is_integer()):
            return value
        same_value = list(self.holding(schemas, value))
        if not same_value:
            return value
        if isinstance(value, list):
            return [self.whole([_item(one, place) for one in same_value], item) for place, item in enumerate(value)]
        if isinstance(value, dict):
            return {name: self.whole([_property(one, name) for one in same_value], one) for name, one in value.items()}
        kinds = {name for one in same_value for name in _kinds(one, value)}
        return int(value) if "integer" in kinds and "number" not in kinds else value

    def holding(self, schemas: Iterable[Any], value: Any) -> Iterator[dict[str, Any]]:
        """Return these schemas and all that they reference for the same value, each once, even in a cycle."""
        todo, seen = list(schemas), set()
        while todo:
            self.look()
            schema = todo.pop()
            if not isinstance(schema, dict) or id(schema) in seen:
                continue
            seen.add(id(schema))
            self.look(len(schema.get("enum", ())) // 16)
            yield schema
            todo += schema.get("allOf", ())
            options = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
            todo += [option for option in options if self.may_be(option, value)]
            if "$ref" in schema:
                todo.append(self.referred(schema["$ref"]))

    def may_be(self, option: Any, value: Any) -> bool:
        """Return True if a value has a branch's type and, for an object, its fields and their named values."""
        for _ in range(MOST_REFERENCES):
            self.look()
            if not isinstance(option, dict):
                return False
            if "$ref" not in option:
                break
            option = self.referred(option["$ref"])
        else:
            return False
        types = option.get("type", ())
        if types and KINDS.get(type(value), set()).isdisjoint([types] if isinstance(types, str) else types):
            return False
        if not self.named(option, value):
            return False
        if not isinstance(value, dict):
            return True
        fields, required = option.get("properties", {}), option.get("required", ())
        self.look(len(fields) + len(required))
        stated = {name: field for name, field in fields.items() if name in value and isinstance(field, dict)}
        return all(name in value for name in required) and all(self.named(stated[name], value[name]) for name in stated)

    def named(self, schema: dict[str, Any], value: Any) -> bool:
        """Return True if `enum` and `const` of a schema allow a value. Lists and objects are not compared."""
        if isinstance(value, list | dict):
            return True
        self.look(len(schema.get("enum", ())) // 16)
        return ("const" not in schema or schema["const"] == value) and ("enum" not in schema or value in schema["enum"])

    def referred(self, reference: str) -> Any:
        """Return the target of a JSON pointer; None for another kind of reference."""
        self.look(len(reference) // 16)
        if reference != "#" and not reference.startswith("#/"):
            return None
        target: Any = self.root
        try:
            for part in unquote(reference).split("/")[1:]:
                part = part.replace("~1", "/").replace("~0", "~")
                target = target[int(part)] if isinstance(target, list) else target[part]
        except (KeyError, IndexError, TypeError, ValueError):
            return None
        return target

    def look(self, times: int = 1) -> None:
        self.looks += times
        if self.looks > MOST_LOOKS:
            raise RecursionError("a schema of too many branches")


def _item(schema: dict[str, Any], place: int) -> Any:
    first = schema.get("prefixItems", ())
    return first[place] if place < len(first) else schema.get("items")


def _property(schema: dict[str, Any], name: str) -> Any:
    if "patternProperties" in schema:  # who knows which of them the name is
        return schema.get("properties", {}).get(name)
    return schema.get("properties", {}).get(name, schema.get("additionalProperties"))


def _kinds(schema: dict[str, Any], value: float) -> list[str]:
    """Return the type that a schema gives to a number. Its named values say more than its type."""
    named = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]
    equal = [one for one in named if type(one) in (int, float) and one == value]
    if equal:
        return ["integer" if int in map(type, equal) else "number"]
    names = schema.get("type", ())
    return [names] if isinstance(names, str) else list(names)
