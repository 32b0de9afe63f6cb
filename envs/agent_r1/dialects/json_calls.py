"""The shared part of the families that write calls as JSON objects."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

from agent_r1.dialects.base import HIDDEN_ANSWER, Dialect
from agent_r1.dialects.calls import MISSING, Call, Problems, Schema, function_of_tool, make_call
from agent_r1.dialects.json_reader import JSONError, read_json

ARGUMENT_KEYS = ("arguments", "parameters")


class JSONCalls(Dialect):
    """Base class of the families that write calls as JSON objects."""

    argument_key: ClassVar[str] = "arguments"
    """The key of the arguments in this family; all of `ARGUMENT_KEYS` are read."""

    def _read_object(self, value: Any, text: str, tools: Sequence[Schema]) -> Call:
        """Read the call in a decoded JSON value."""
        form = f'write {{"name": "a tool", "{self.argument_key}": {{...}}}}'
        if not isinstance(value, dict):
            return Call("", None, f"a call is a JSON object; {form}", text)
        keys = [key for key in ARGUMENT_KEYS if key in value]
        if len(keys) > 1:
            return Call("", None, f'the call has both "{keys[0]}" and "{keys[1]}"; {form}', text)
        key = keys[0] if keys else self.argument_key
        problems = Problems(
            f'the call has no "name" that is a string; {form}',
            f'the call has no "{key}"; {form}',
            f'"{key}" is not a JSON object; {form}',
        )
        return make_call(value.get("name"), value.get(key, MISSING), text, tools, problems)

    def read_call(self, text: str, tools: Sequence[Schema]) -> Call:
        try:
            return self._read_object(read_json(text), text, tools)
        except ValueError as error:
            return Call("", None, f"the call is not valid JSON ({error})", text)

    def read_untagged(self, text: str, tools: Sequence[Schema], closed: bool = True) -> Call | None:
        """Read JSON that no tag marks as a call; None if it is not one. `closed`: the turn does not end inside it."""
        try:
            is_meant = is_call(read_json(text), tools)
        except JSONError as error:
            is_meant = is_broken_call(text, None if closed else error.stopped)
        return self.read_call(text, tools) if is_meant else None

    def tool_call(self, name: str, arguments: dict[str, Any]) -> str:
        return self._framed(self._json_call(name, arguments))

    def broken_call(self, name: str, arguments: str) -> str:
        return self._framed(self._json_call(name, arguments))  # a string instead of an object

    def _framed(self, text: str) -> str:
        """Put the family's tags around the JSON of a call."""
        return text

    def _json_call(self, name: str, arguments: dict[str, Any] | str) -> str:
        return self._json({"name": name, self.argument_key: arguments})


def is_call(value: Any, tools: Sequence[Schema]) -> bool:
    """Return whether untagged JSON is meant as a call.

    A call has a name and arguments, or the name of a tool and nothing else.
    """
    if not isinstance(value, dict) or "name" not in value:
        return False
    if not value.keys().isdisjoint(ARGUMENT_KEYS):
        return True
    name = value["name"]
    return value.keys() <= {"name", "type"} and isinstance(name, str) and bool(function_of_tool(name, tools))


def is_broken_call(text: str, stopped: int | None) -> bool:
    """Return whether broken JSON is meant as a call.

    A call has a name and arguments, or it begins as a call and the turn ends inside it. `stopped` is the position where
    reading stopped, if the turn ends with this text.
    """
    has_name = _NAME.search(text)
    if has_name and _ARGUMENTS.search(text):
        return True
    if stopped is None or HIDDEN_ANSWER in text or not _LAST_WORD.fullmatch(text, stopped):
        return False
    key = _FIRST_KEY.match(text)  # with its closing quotation mark, if there is one
    return bool(has_name or (key and any(f'{word}"'.startswith(key[1]) for word in ("name", *ARGUMENT_KEYS))))


_NAME = re.compile(r"[\"']name[\"']\s*:")
_ARGUMENTS = re.compile(rf"[\"'](?:{'|'.join(ARGUMENT_KEYS)})[\"']\s*:")
_FIRST_KEY = re.compile(r"\s*\{\s*[\"'](\w*\"?)")
_LAST_WORD = re.compile(r"[\w.+\\-]*\s*")  # invalid JSON only because the text ends there
