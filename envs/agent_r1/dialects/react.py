from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agent_r1.dialects.base import schema_lines
from agent_r1.dialects.calls import MISSING, Call, Problems, Schema, make_call
from agent_r1.dialects.json_calls import JSONCalls
from agent_r1.dialects.json_reader import read_json


class ReAct(JSONCalls):
    """ReAct's text over any chat template: ``Thought:``, ``Action: tool``, ``Action Input: {...}``, ``Observation:``.

    Writes every JSON argument; a tool's name must be one line. Text after an ``Observation:`` that the policy writes is
    not read: observations belong to the environment.
    """

    name = "react"

    def _is_native(self) -> bool:
        return False

    def tool_call(self, name: str, arguments: dict[str, Any]) -> str:
        if name != name.strip() or not name or "\n" in name or not self.is_plain(name):
            raise ValueError(f"ReAct cannot write the tool name {name!r:.200}: it must be one line of plain text")
        return f"Action: {name}\nAction Input: {self._json(arguments)}"

    def broken_call(self, name: str, arguments: str) -> str:
        return f"Action: {self.spell(name)}\nAction Input: {self._json(arguments)}"

    def instructions(self, tools: Sequence[Schema]) -> str:
        return (
            f"You may use these tools, given as JSON schemas:\n\n{schema_lines(tools)}\n\n"
            "To use one, end your turn with these lines:\n"
            "Thought: what you need and why\nAction: the tool's name\nAction Input: its arguments as a JSON object\n"
            "The result comes back as:\nObservation: the result"
        )

    def result_text(self, content: str) -> str:
        return f"Observation: {content}"

    def read_visible(self, text: str, tools: Sequence[Schema]) -> tuple[str, list[Call]]:
        rest: list[str] = []
        calls: list[Call] = []
        position = 0
        action: tuple[int, str] | None = None  # the start of an Action that has no Action Input yet, and its tool
        while match := _REACT.search(text, position):
            if action is None:
                rest.append(text[position : match.start()])
            elif match[1] != "Action Input":
                start, name = action
                calls.append(make_call(name, MISSING, text[start : match.start()], tools, _PROBLEMS))
                action = None
            if match[1] == "Observation":
                return "".join(rest), calls
            if match[1] == "Action":
                line_end = text.find("\n", match.end())
                position = len(text) if line_end < 0 else line_end
                action = match.start(), text[match.end() : position].strip()
                continue
            start, name = action or (match.start(), "")
            call, position = _read_input(name, text, start, match.end(), tools)
            calls.append(call)
            action = None
        if action is None:
            rest.append(text[position:])
        else:
            start, name = action
            calls.append(replace(make_call(name, MISSING, text[start:], tools, _PROBLEMS), closed=False))
        return "".join(rest), calls


def _read_input(name: str, text: str, start: int, position: int, tools: Sequence[Schema]) -> tuple[Call, int]:
    """Read the call whose Action begins at `start` and whose arguments begin at `position`. Return it with its end."""
    following = _REACT.search(text, position)
    end, closed = (following.start(), True) if following else (len(text), False)
    given: Any = ""  # no arguments
    problem = None
    if text[position:end].strip():
        try:
            given, end = read_json(text, _SPACE.match(text, position).end())  # type: ignore[union-attr]
            closed = True
        except ValueError as error:
            problem = f"the Action Input is not valid JSON ({error})"
    call = make_call(name, given, text[start:end], tools, _PROBLEMS)
    if problem and name:
        call = Call(name, None, problem, call.text)
    return replace(call, closed=closed), end


_REACT = re.compile(r"^[ \t]*(Action Input|Action|Observation)[ \t]*:[ \t]*", re.MULTILINE)
_SPACE = re.compile(r"\s*")
_PROBLEMS = Problems(
    "an Action Input without an Action: tool before it",
    "the Action has no Action Input",
    "the Action Input is not a JSON object",
)
