from __future__ import annotations

import re
from collections.abc import Sequence

from agent_r1.dialects.base import Call, schema_lines
from agent_r1.dialects.json_calls import JSONCalls
from agent_r1.dialects.json_reader import read_json
from agent_r1.dialects.template import Schema


class Llama3JSON(JSONCalls):
    """Llama 3.1 to 3.3: ``{"name": ..., "parameters": {...}}`` at the start of a line, ``<|python_tag|>`` optional.

    Writes every JSON argument. Several calls stand on lines of their own; calls that follow one another on a line, with
    or without ``;`` in between, are read, too.
    """

    name = "llama3_json"
    argument_keys = ("parameters", "arguments")

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
        match = _LLAMA_START.search(text)
        while match:
            rest.append(text[position : match.start()])
            start = match.end()
            try:
                value, position = read_json(text, start)
            except ValueError as error:
                calls.append(Call("", None, f"the call is not valid JSON ({error})", text[match.start() :]))
                return "".join(rest), calls
            if isinstance(value, dict) and not value.keys().isdisjoint(("name", *self.argument_keys)):
                calls.append(self._read_object(value, text[start:position]))
                match = _LLAMA_NEXT.match(text, position) or _LLAMA_START.search(text, position)
            else:
                rest.append(text[match.start() : position])
                match = _LLAMA_START.search(text, position)
        return "".join([*rest, text[position:]]), calls


_LLAMA_START = re.compile(r'<\|python_tag\|>\s*|^[ \t]*(?=\{\s*")', re.MULTILINE)
_LLAMA_NEXT = re.compile(r'\s*;\s*(?=\{)|[ \t]*(?=\{\s*")')
