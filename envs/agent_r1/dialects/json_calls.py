"""What the families that write calls as JSON objects share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from agent_r1.dialects.base import Dialect
from agent_r1.dialects.calls import MISSING, Call, Problems, Schema, make_call
from agent_r1.dialects.json_reader import read_json

ARGUMENT_KEYS = ("arguments", "parameters")


class JSONCalls(Dialect):
    """What the families that write calls as JSON objects share."""

    argument_key: ClassVar[str] = "arguments"
    """What the family itself calls the arguments; all of `ARGUMENT_KEYS` are read."""

    def _read_object(self, value: Any, text: str, tools: Sequence[Schema]) -> Call:
        """The call in a decoded JSON value."""
        form = f'write {{"name": "a tool", "{self.argument_key}": {{...}}}}'
        if not isinstance(value, dict):
            return Call("", None, f"a call is a JSON object; {form}", text)
        given = [key for key in ARGUMENT_KEYS if key in value]
        if len(given) > 1:
            return Call("", None, f'the call has both "{given[0]}" and "{given[1]}"; {form}', text)
        key = given[0] if given else self.argument_key
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

    def tool_call(self, name: str, arguments: dict[str, Any]) -> str:
        return self._framed(self._json_call(name, arguments))

    def broken_call(self, name: str, arguments: str) -> str:
        return self._framed(self._json_call(name, arguments))  # a string stands where an object should

    def _framed(self, text: str) -> str:
        """The JSON of a call with what stands around it."""
        return text

    def _json_call(self, name: str, arguments: dict[str, Any] | str) -> str:
        return self._json({"name": name, self.argument_key: arguments})
