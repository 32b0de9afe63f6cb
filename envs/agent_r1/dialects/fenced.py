from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from agent_r1.dialects.base import schema_lines
from agent_r1.dialects.calls import Call, Schema, function_of
from agent_r1.dialects.json_calls import JSONCalls
from agent_r1.text.fences import PYTHON, Block, blocks


class Fenced(JSONCalls):
    """Fenced blocks over any chat template: a ```` ```python ```` block is a call of ``python(code)``, a
    ```` ```tool_call ```` or ```` ```json ```` block with ``{"name": ..., "arguments": {...}}`` a call of any tool.
    A block inside ``<answer>...</answer>`` is part of the answer. Blocks are those of `agent_r1.text.fences.blocks`.

    Writes every JSON argument (code that contains control tokens, or would not be read back, goes into a JSON block).
    """

    name = "fenced"

    def _is_native(self) -> bool:
        return False

    def tool_call(self, name: str, arguments: dict[str, Any]) -> str:
        code = arguments.get("code")
        if name == "python" and len(arguments) == 1 and isinstance(code, str) and self.is_plain(code):
            runs = [len(run) for run in re.findall("`+", code)]
            fence = "`" * max(3, 1 + max(runs, default=0))  # longer than any fence in the code
            block = f"{fence}python\n{code}\n{fence}"
            # Open quotes in the code would be closed after the block, and hide its end.
            if [found.code for found in blocks(f"{block}\n\"\"\"'''\n'''\"\"\"", PYTHON)] == [code]:
                return block
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
        position = 0
        for block in blocks(text, _LANGUAGES):
            call = self._read_block(block, tools)
            if call is not None:
                rest.append(text[position : block.start])
                calls.append(call)
                position = block.end
        return "".join([*rest, text[position:]]), calls

    def _read_block(self, block: Block, tools: Sequence[Schema]) -> Call | None:
        is_python = PYTHON.fullmatch(block.language)
        if is_python and block.closed:
            return Call("python", {"code": block.code}, None, block.body)
        if block.language == "json" and self.read_untagged(block.body, tools, block.closed) is None:  # not a call
            return None
        if block.closed:
            return self.read_call(block.body, tools)
        name = "python" if is_python else ""
        return Call(name, None, "the block is never closed with ```", block.body, closed=False)


_LANGUAGES = re.compile(f"tool_call|json|{PYTHON.pattern}")
