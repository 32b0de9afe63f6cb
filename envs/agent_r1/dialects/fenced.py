from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from agent_r1.dialects.base import schema_lines
from agent_r1.dialects.calls import Call, Schema, function_of
from agent_r1.dialects.json_calls import JSONCalls
from agent_r1.fences import PYTHON, language


class Fenced(JSONCalls):
    """Fenced blocks over any chat template: a ```` ```python ```` block is a call of ``python(code)``, a
    ```` ```tool_call ```` or ```` ```json ```` block with ``{"name": ..., "arguments": {...}}`` a call of any tool.
    A block inside ``<answer>...</answer>`` is part of the answer.

    Writes every JSON argument (code that contains control tokens goes into a JSON block).
    """

    name = "fenced"

    def _is_native(self) -> bool:
        return False

    def tool_call(self, name: str, arguments: dict[str, Any]) -> str:
        code = arguments.get("code")
        if name == "python" and len(arguments) == 1 and isinstance(code, str) and self.is_plain(code):
            runs = [len(run) for run in re.findall("`+", code)]
            fence = "`" * max(3, 1 + max(runs, default=0))  # longer than any in the code, so that none of them ends it
            return f"{fence}python\n{code}\n{fence}"
        return super().tool_call(name, arguments)

    def _framed(self, text: str) -> str:
        return f"```tool_call\n{text}\n```"

    def instructions(self, tools: Sequence[Schema]) -> str:
        lines = [f"You may use these tools, given as JSON schemas:\n\n{schema_lines(tools)}\n"]
        if any(function_of(tool).get("name") == "python" for tool in tools):
            lines.append(
                "To run Python, write a block:\n```python\nprint(1 + 1)\n```\nFor another tool, write a block:"
            )
        else:
            lines.append("To use one, write a block:")
        lines.append('```tool_call\n{"name": the tool, "arguments": {...}}\n```')
        lines.append("The result comes back in a block:\n```output\nthe result\n```")
        return "\n".join(lines)

    def result_text(self, content: str) -> str:
        return f"```output\n{content}\n```"

    def read_visible(self, text: str, tools: Sequence[Schema]) -> tuple[str, list[Call]]:
        rest: list[str] = []
        calls: list[Call] = []
        position, opened = 0, None
        for fence in _FENCE.finditer(text):
            if opened is None:
                opened = fence
                rest.append(text[position : fence.start()])
                position = fence.start()
            elif not fence[2].strip() and fence[1].startswith(opened[1]):
                body = text[opened.end() + 1 : max(opened.end() + 1, fence.start() - 1)]
                kind, opened = language(opened[2]), None
                call = self._read_block(kind, body, tools)
                if call is None:
                    rest.append(text[position : fence.end()])
                else:
                    calls.append(call)
                position = fence.end()
        kind, body = (language(opened[2]), text[opened.end() + 1 :]) if opened is not None else ("", "")
        if self._read_block(kind, body, tools, closed=False) is not None:
            name = "python" if PYTHON.fullmatch(kind) else ""
            calls.append(Call(name, None, "the block is never closed with ```", body, closed=False))
        else:
            rest.append(text[position:])
        return "".join(rest), calls

    def _read_block(self, kind: str, body: str, tools: Sequence[Schema], closed: bool = True) -> Call | None:
        if PYTHON.fullmatch(kind):
            return Call("python", {"code": body}, None, body)
        if kind == "json":  # it may be anything
            return self.read_untagged(body, tools, closed)
        return self.read_call(body, tools) if kind == "tool_call" else None


_FENCE = re.compile(r"^(`{3,}|~{3,})([^\n`]*)$", re.MULTILINE)
