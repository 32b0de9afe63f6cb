from __future__ import annotations

from collections.abc import Sequence

from agent_r1.dialects.base import schema_lines
from agent_r1.dialects.calls import Schema
from agent_r1.dialects.json_calls import JSONCalls


class Hermes(JSONCalls):
    """Hermes, Qwen2.5, Qwen3: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

    Writes every JSON argument.
    """

    name = "hermes"
    call_tags = ("<tool_call>", "</tool_call>")

    def _framed(self, text: str) -> str:
        return f"<tool_call>\n{text}\n</tool_call>"

    def instructions(self, tools: Sequence[Schema]) -> str:
        return (
            "# Tools\n\nYou may call these functions, given as JSON schemas:\n"
            f"<tools>\n{schema_lines(tools)}\n</tools>\n\n"
            "To call one, write a JSON object with its name and arguments between <tool_call> and </tool_call>:\n"
            '<tool_call>\n{"name": <function-name>, "arguments": <arguments-object>}\n</tool_call>\n'
            "The result comes back between <tool_response> and </tool_response>."
        )
