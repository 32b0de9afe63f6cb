from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Sequence
from typing import Any

from agent_r1.dialects.base import Dialect, schema_lines
from agent_r1.dialects.calls import Call, Problems, Schema, function_of_tool, make_call, parameter_types
from agent_r1.dialects.json_reader import read_json


class QwenXML(Dialect):
    """Qwen3-Coder, Qwen3.5: ``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``.

    Values carry no types: strings are written as they are, everything else as JSON. `parse` needs the tools' schemas to
    tell the string "5" from the number 5. Without a schema, a value that is valid JSON (but not a string) is JSON.

    Cannot write: a name with white space or ``>`` in it; a string that contains ``</parameter>``, ``<parameter=``, a
    control token, or characters that the tokenizer changes.
    """

    name = "qwen_xml"
    call_tags = ("<tool_call>", "</tool_call>")

    def tool_call(self, name: str, arguments: dict[str, Any]) -> str:
        lines = [f"<function={name}>"]
        for key, value in arguments.items():
            if isinstance(value, str):
                text = value
            else:
                text = _PARAMETER.sub(lambda tag: f"\\u003c{tag[0][1:]}", self._json(value))
            if tag := _PARAMETER.search(text):
                raise ValueError(f"Qwen's XML cannot write a string that contains {tag[0]}: {text!r:.200}")
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
        types = parameter_types(function_of_tool(name, tools) or {})
        arguments: dict[str, Any] = {}
        rest = rest.strip()
        position = 0
        while rest.startswith("<parameter=", position):
            bracket_at = rest.find(">", position)
            end = rest.find("</parameter>", bracket_at)
            if bracket_at < 0 or end < 0 or "<parameter=" in rest[bracket_at:end]:  # the next one would be its value
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
        return make_call(name, arguments, text, tools, Problems())


_SPACE = re.compile(r"\s*")
_PARAMETER = re.compile("<parameter=|</parameter>")


def _read_untyped(text: str, types: frozenset[str]) -> Any:
    """Return the value of a text that may be a plain string or JSON of another type, given the allowed JSON types.

    If the types exclude a string, the text may also be a Python literal, such as ``['a', None]``.
    """
    no_string = bool(types) and "string" not in types
    try:
        value = read_json(text, python_words=no_string)
    except ValueError:
        return _read_python(text) if no_string else text
    if isinstance(value, str) or ("string" in types and not _json_types(value) & types):
        return text
    return value


def _read_python(text: str) -> Any:
    """Return the value of a Python literal that JSON can also write; otherwise the text itself."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in strings
            tree = ast.parse(text.strip(), mode="eval")
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict):
                keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
                if len(set(keys)) < len(keys) or not all(isinstance(key, str) for key in keys):
                    return text
        return read_json(json.dumps(ast.literal_eval(tree), allow_nan=False))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text


def _json_types(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, (int, float)):
        return {"number", "integer"} if isinstance(value, int) else {"number"}
    return {{dict: "object", list: "array", type(None): "null"}.get(type(value), "string")}
