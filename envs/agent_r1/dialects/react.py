from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from agent_r1.dialects.base import Call, schema_lines
from agent_r1.dialects.json_calls import JSONCalls
from agent_r1.dialects.json_reader import read_json
from agent_r1.dialects.template import Schema


class ReAct(JSONCalls):
    """ReAct's text over any chat template: ``Thought:``, ``Action: tool``, ``Action Input: {...}``, ``Observation:``.

    Writes every JSON argument; a tool's name must be one line. What the policy writes after an ``Observation:`` of its
    own is not read: observations are the environment's.
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
        position, name, action_at = 0, "", -1  # action_at: where an Action without an Action Input yet stands
        while match := _REACT.search(text, position):
            word = match[1]
            if action_at >= 0 and word != "Action Input":
                calls.append(Call(name, None, "the Action has no Action Input", text[action_at : match.start()]))
            elif action_at < 0:
                rest.append(text[position : match.start()])
            if word == "Observation":
                return "".join(rest), calls
            if word == "Action":
                line_end = text.find("\n", match.end())
                position = len(text) if line_end < 0 else line_end
                name, action_at = text[match.end() : position].strip(), match.start()
                continue
            start = action_at if action_at >= 0 else match.start()
            try:
                arguments, position = read_json(text, match.end())
                error = None if isinstance(arguments, dict) else "the Action Input is not a JSON object"
            except ValueError as problem:
                following = _REACT.search(text, match.end())
                position = following.start() if following else len(text)
                arguments, error = None, f"the Action Input is not valid JSON ({problem})"
            if action_at < 0 or not name:
                error = "an Action Input without an Action: tool before it"
            calls.append(
                Call(name if action_at >= 0 else "", None if error else arguments, error, text[start:position])
            )
            action_at = -1
        if action_at >= 0:
            calls.append(Call(name, None, "the Action has no Action Input", text[action_at:]))
        else:
            rest.append(text[position:])
        return "".join(rest), calls


_REACT = re.compile(r"^[ \t]*(Action Input|Action|Observation)[ \t]*:[ \t]*", re.MULTILINE)
