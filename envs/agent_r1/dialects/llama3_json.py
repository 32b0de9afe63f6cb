from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from agent_r1.dialects.base import HIDDEN_ANSWER, schema_lines
from agent_r1.dialects.calls import Call, Schema, function_of_tool
from agent_r1.dialects.json_calls import ARGUMENT_KEYS, JSONCalls
from agent_r1.dialects.json_reader import JSONError, read_json


class Llama3JSON(JSONCalls):
    """Llama 3.1 to 3.3: ``{"name": ..., "parameters": {...}}`` at the start of a line, ``<|python_tag|>`` optional.

    Writes every JSON argument. Several calls stand on lines of their own; calls that follow one another on a line, with
    or without ``;`` in between, are read, too. No tag says that an object is a call, so it is one only with a name and
    arguments, or where all it has is the name of a tool; any other is text.
    """

    name = "llama3_json"
    argument_key = "parameters"

    def instructions(self, tools: Sequence[Schema]) -> str:
        return (
            f"You may call these functions, given as JSON schemas:\n\n{schema_lines(tools)}\n\n"
            "To call one, answer with a JSON object on a line of its own and nothing else:\n"
            '{"name": function name, "parameters": {argument name: value}}\nDo not use variables.'
        )

    def result_text(self, content: str) -> str:
        return f"Result:\n{content}"

    def read_visible(self, text: str, tools: Sequence[Schema]) -> tuple[str, list[Call]]:
        rest: list[str] = []
        calls: list[Call] = []
        position = 0
        match = _START.search(text)
        while match:
            rest.append(text[position : match.start()])
            start, tagged = match.end(), "|" in match[0]
            try:
                value, position = read_json(text, start)
            except JSONError as error:
                if tagged or _is_broken_call(text, start, error):  # it has no end: all that follows is part of it
                    problem = f"the call is not valid JSON ({error})"
                    return "".join(rest), [*calls, Call("", None, problem, text[match.start() :], closed=False)]
                value, line_end = None, text.find("\n", start)
                position = max(start + 1, min(error.stopped, line_end if line_end >= 0 else len(text)))
            if tagged or _is_call(value, tools):
                calls.append(self._read_object(value, text[start:position], tools))
                match = _NEXT.match(text, position) or _START.search(text, position)
            else:
                rest.append(text[match.start() : position])
                match = _START.search(text, position)
        return "".join([*rest, text[position:]]), calls


def _is_call(value: Any, tools: Sequence[Schema]) -> bool:
    """Whether an object that no tag says to be a call is meant as one."""
    if not isinstance(value, dict) or "name" not in value:
        return False
    if not value.keys().isdisjoint(ARGUMENT_KEYS):
        return True
    name = value["name"]
    return value.keys() <= {"name", "type"} and isinstance(name, str) and bool(function_of_tool(name, tools))


def _is_broken_call(text: str, start: int, error: JSONError) -> bool:
    """Whether what begins here and is no JSON is meant as a call: it has a name and arguments, or it begins as a call
    and the turn ends in it."""
    following = _START.search(text, start + 1)
    body = text[start : following.start() if following else len(text)]
    if _NAME.search(body):
        if _ARGUMENTS.search(body):
            return True
    elif not (key := _FIRST_KEY.match(body)) or not any(word.startswith(key[1]) for word in ("name", *ARGUMENT_KEYS)):
        return False
    return HIDDEN_ANSWER not in body and bool(_LAST_WORD.fullmatch(text, error.stopped))


_START = re.compile(r"<\|python_tag\|>\s*|^[ \t]*(?=\{\s*[\"'])", re.MULTILINE)
_NEXT = re.compile(r'\s*;\s*(?=\{)|[ \t]*(?=\{\s*")')
_NAME = re.compile(r"[\"']name[\"']\s*:")
_ARGUMENTS = re.compile(rf"[\"'](?:{'|'.join(ARGUMENT_KEYS)})[\"']\s*:")
_FIRST_KEY = re.compile(r"\{\s*[\"'](\w*)")
_LAST_WORD = re.compile(r"[\w.+\\-]*\s*")  # it is no JSON only because the text ends there
