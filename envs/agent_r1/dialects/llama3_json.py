from __future__ import annotations

import re
from collections.abc import Sequence

from agent_r1.dialects.base import schema_lines
from agent_r1.dialects.calls import Call, Schema
from agent_r1.dialects.json_calls import JSONCalls, is_broken_call, is_call
from agent_r1.dialects.json_reader import JSONError, read_json


class Llama3JSON(JSONCalls):
    """Llama 3.1 to 3.3: ``{"name": ..., "parameters": {...}}`` at the start of a line, ``<|python_tag|>`` optional.

    Writes every JSON argument. Several calls are on separate lines. Calls on one line, with or without ``;`` between
    them, are read, too. No tag marks an object as a call. So it is a call only if it has a name and arguments, or
    nothing but the name of a tool. Any other object is text.
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
        position, failed = 0, 0
        match = _START.search(text)
        while match:
            rest.append(text[position : match.start()])
            start, tagged = match.end(), "|" in match[0]
            try:
                value, position = read_json(text, start)
            except JSONError as error:
                following = _START.search(text, start + 1)
                body = text[start : following.start() if following else len(text)]
                if tagged or is_broken_call(body, None if following else error.stopped - start):
                    # The call has no end: all text that follows is part of it.
                    problem = f"the call is not valid JSON ({error})"
                    return "".join(rest), [*calls, Call("", None, problem, text[match.start() :], closed=False)]
                if (failed := failed + 1) > MOST_FAILED:
                    position = match.start()
                    break
                value, line_end = None, text.find("\n", start)
                position = max(start + 1, min(error.stopped, line_end if line_end >= 0 else len(text)))
            if tagged or is_call(value, tools):
                calls.append(self._read_object(value, text[start:position], tools))
                match = _NEXT.match(text, position) or _START.search(text, position)
            else:
                rest.append(text[match.start() : position])
                match = _START.search(text, position)
        return "".join([*rest, text[position:]]), calls


MOST_FAILED = 256
"""The maximum number of lines that begin like JSON and fail; after that, the rest of a turn is text."""
_START = re.compile(r"<\|python_tag\|>\s*|^[ \t]*(?=\{\s*[\"'])", re.MULTILINE)
_NEXT = re.compile(r'\s*;\s*(?=\{)|[ \t]*(?=\{\s*")')
