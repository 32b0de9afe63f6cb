"""What the families that write calls as JSON objects share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from agent_r1.dialects.base import Call, Dialect
from agent_r1.dialects.json_reader import read_json
from agent_r1.dialects.template import Schema


class JSONCalls(Dialect):
    """What the families that write calls as JSON objects share."""

    argument_keys: ClassVar[tuple[str, ...]] = ("arguments",)

    def _read_object(self, value: Any, text: str) -> Call:
        """The call in a decoded JSON value."""
        key = self.argument_keys[0]
        form = f'write {{"name": "a tool", "{key}": {{...}}}}'
        if not isinstance(value, dict):
            return Call("", None, f"a call is a JSON object; {form}", text)
        name = value.get("name")
        if not isinstance(name, str) or not name:
            return Call("", None, f'the call has no "name" that is a string; {form}', text)
        given = next((k for k in self.argument_keys if k in value), None)
        if given is None:
            return Call(name, None, f'the call has no "{key}"; {form}', text)
        arguments = value[given]
        if isinstance(arguments, str):  # some models quote the object; its meaning is plain
            try:
                arguments = read_json(arguments)
            except ValueError:
                pass
        if not isinstance(arguments, dict):
            return Call(name, None, f'"{given}" is not a JSON object; {form}', text)
        return Call(name, arguments, None, text)

    def read_call(self, text: str, tools: Sequence[Schema]) -> Call:
        try:
            return self._read_object(read_json(text), text)
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
        return self._json({"name": name, self.argument_keys[0]: arguments})
