from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from agent_r1.dialects.base import Call, Dialect, function_of, schema_lines
from agent_r1.dialects.json_reader import read_json
from agent_r1.dialects.template import Schema


class QwenXML(Dialect):
    """Qwen3-Coder, Qwen3.5: ``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``.

    Values carry no types: strings stand as they are, everything else as JSON. `parse` needs the tools' schemas to tell
    the string "5" from the number 5; without one, a value that reads as JSON (and not as a string) is JSON.

    Cannot write: a name with white space or ``>`` in it; a string that contains ``</parameter>``, a control token, or
    characters that the tokenizer changes.
    """

    name = "qwen_xml"
    call_tags = ("<tool_call>", "</tool_call>")

    def tool_call(self, name: str, arguments: dict[str, Any]) -> str:
        lines = [f"<function={name}>"]
        for key, value in arguments.items():
            if isinstance(value, str):
                text = value
            else:
                text = self._json(value).replace("</parameter>", "\\u003c/parameter>")
            if "</parameter>" in text:
                raise ValueError(f"Qwen's XML cannot write a string that contains </parameter>: {text!r:.200}")
            lines.append(f"<parameter={key}>\n{text}\n</parameter>")
        for word in (name, *arguments):
            if not re.fullmatch(r"[^\s>]+", word):
                raise ValueError(f"Qwen's XML cannot write the name {word!r:.200}: it is empty or has white space or >")
        text = "\n".join([*lines, "</function>"])
        if not self.is_plain(text):
            raise ValueError(f"Qwen's XML cannot escape the control tokens or characters in this call: {text!r:.200}")
        return f"<tool_call>\n{text}\n</tool_call>"

    def instructions(self, tools: Sequence[Schema]) -> str:
        return (
            "# Tools\n\nYou may call these functions, given as JSON schemas:\n"
            f"<tools>\n{schema_lines(tools)}\n</tools>\n\n"
            "To call one, write its name and parameters so, each tag on a line of its own:\n<tool_call>\n"
            "<function=function_name>\n<parameter=parameter_name>\nvalue\n</parameter>\n</function>\n</tool_call>\n"
            "The result comes back between <tool_response> and </tool_response>."
        )

    def read_call(self, text: str, tools: Sequence[Schema]) -> Call:
        form = "write <function=name>, then <parameter=key>value</parameter> for each argument, then </function>"
        name, bracket, rest = text.removeprefix("<function=").partition(">")
        name = name.strip()
        if not text.startswith("<function=") or not bracket or not name:
            return Call("", None, f"the call does not begin with <function=name>; {form}", text)
        functions = [f for f in map(function_of, tools) if f.get("name") == name]
        types = _parameter_types(functions[0]) if functions else {}
        arguments: dict[str, Any] = {}
        rest = rest.strip()
        position = 0
        while rest.startswith("<parameter=", position):
            bracket_at = rest.find(">", position)
            end = rest.find("</parameter>", bracket_at)
            if bracket_at < 0 or end < 0:
                return Call(name, None, f"a <parameter=...> is not closed; {form}", text)
            key = rest[position + len("<parameter=") : bracket_at].strip()
            if key in arguments:
                return Call(name, None, f"the parameter {key[:100]} is there twice", text)
            value = rest[bracket_at + 1 : end].removeprefix("\n").removesuffix("\n")
            arguments[key] = _read_untyped(value, types.get(key, frozenset()))
            position = end + len("</parameter>")
            position += len(_SPACE.match(rest, position)[0])  # type: ignore[index]
        if rest[position:] != "</function>":
            return Call(name, None, f"{rest[position : position + 50]!r} stands where </function> should; {form}", text)
        return Call(name, arguments, None, text)


_SPACE = re.compile(r"\s*")
_PYTHON_LITERALS = {"True": True, "False": False, "None": None}


def _parameter_types(function: dict[str, Any]) -> dict[str, frozenset[str]]:
    """The JSON types that a tool's schema allows for each parameter; empty where it does not say."""
    types: dict[str, frozenset[str]] = {}
    properties = (function.get("parameters") or {}).get("properties") or {}
    for key, schema in properties.items():
        branches = [schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())]
        named = [branch.get("type", ()) for branch in branches]
        types[key] = frozenset(t for names in named for t in ([names] if isinstance(names, str) else names))
    return types


def _read_untyped(text: str, types: frozenset[str]) -> Any:
    """The value of a text that may be a string as it is or JSON of another type, given the allowed JSON types."""
    if "string" not in types and types and text in _PYTHON_LITERALS:  # as some of Qwen's templates write them
        return _PYTHON_LITERALS[text]
    try:
        value = read_json(text)
    except ValueError:
        return text
    if isinstance(value, str) or ("string" in types and not _json_types(value) & types):
        return text
    return value


def _json_types(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, (int, float)):
        return {"number", "integer"} if isinstance(value, int) else {"number"}
    return {{dict: "object", list: "array", type(None): "null"}.get(type(value), "string")}
