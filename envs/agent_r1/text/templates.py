"""Chat templates: Jinja programs that come with a tokenizer and write a conversation in the notation of its family.

Such a program is foreign code. It runs in Jinja's immutable sandbox, which gives it nothing but its conversation.
Except for our own template, it also runs in a process with the limits `CPU_SECONDS` and `MEMORY`. One line of a
template can write a gigabyte or count for ever, and nothing inside Python can stop that. One process renders all
conversations, which costs some tenths of a millisecond each. It has no clock, so the same conversation has the same
tokens every day.

`template_server` is the program of that process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

from agent_r1.arguments import ArgumentError
from agent_r1.text import template_server
from agent_r1.text.template_server import render as _render
from agent_r1_tools.child_process import ChildProcess, Ended

Message = Mapping[str, Any]
"""One chat message: ``role``, ``content``, and for some roles ``tool_calls``, ``name``, ``tool_call_id``."""

CPU_SECONDS = 5.0
"""The limit of processor time for one conversation; a usual template needs a thousandth of it."""
WALL_SECONDS = 120.0
MEMORY = 512 << 20
"""The limit of the process's address space, in bytes."""
MAX_TEMPLATE_CHARS = 1_000_000
"""The longest known template has 50,000 characters."""

BYTE_CHAT_TEMPLATE = """\
{%- if tools or messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}
    {%- if tools %}
        {%- if messages[0].role == 'system' %}{{- '\\n\\n' }}{%- endif %}
        {{- 'Tools:' }}
        {%- for tool in tools %}
            {%- set function = tool.function if tool.function is defined else tool %}
            {{- '\\n' + function.name + '(' + (function.parameters.properties or {}) | join(', ') + '): ' }}
            {{- function.description }}
        {%- endfor %}
        {{- '\\nCall one so:\\n<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function is defined else call %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": ' + call.name | tojson + ', "arguments": ' + call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def read_template(path: str | os.PathLike[str]) -> str:
    """Return the text of a chat template's file.

    Raises:
        ArgumentError: the file is missing, empty, not a text, or longer than any template.
    """
    try:
        with open(os.fspath(path), encoding="utf-8") as file:
            text = file.read(MAX_TEMPLATE_CHARS + 1)
    except (OSError, TypeError, ValueError) as error:  # the last one: it is not UTF-8
        cause = error.strerror if isinstance(error, OSError) else "it is not a text in UTF-8"
        raise ArgumentError(f"chat_template {path}: {cause}; give a file with a Jinja template") from None
    if not text.strip():
        raise ArgumentError(f"chat_template {path}: the file is empty; give a file with a Jinja template")
    if len(text) > MAX_TEMPLATE_CHARS:
        raise ArgumentError(f"chat_template {path}: more than {MAX_TEMPLATE_CHARS} characters; this is no template")
    return text


def chat_template(tokenizer: Any, with_tools: bool = False) -> str:
    """Return the text of the tokenizer's chat template.

    Raises:
        ArgumentError: the tokenizer has no chat template.
    """
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):  # several, by name: Hugging Face's convention
        template = template.get("tool_use" if with_tools and "tool_use" in template else "default")
    if not isinstance(template, str) or not template:
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise ArgumentError(
            f"the tokenizer {name} has no chat template, so it cannot write a conversation (is it a base model?). "
            "Give a template's file: --chat-template FILE (chat_template= of an environment), or use the instruct "
            "model's tokenizer"
        )
    return template


def render_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] | None = None,
    add_generation_prompt: bool = False,
) -> str:
    """Render the conversation as text with the tokenizer's chat template.

    Raises:
        ValueError: the template rejects the conversation, is not valid, or takes too much time or memory. A template
            that is too costly once is not tried again.
        OSError: something outside repeatedly ends the process that renders, or it cannot be started.
    """
    template = chat_template(tokenizer, with_tools=bool(tools))
    values = {
        "messages": [dict(message) for message in messages],
        "tools": list(tools) if tools else None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        **(getattr(tokenizer, "special_tokens_map", None) or {}),
    }
    try:
        return _render(template, values) if template == BYTE_CHAT_TEMPLATE else _renderer.render(template, values)
    except (TooCostly, OSError):
        raise
    except Exception as error:  # a template is foreign code: it may raise anything
        raise ValueError(f"the chat template rejects this conversation: {error or type(error).__name__}") from error


class TooCostly(ValueError):
    """A chat template that takes too much time or memory."""


class _Renderer(ChildProcess):
    """The process that renders chat templates."""

    def __init__(self) -> None:
        super().__init__()
        self.costly: dict[str, str] = {}  # template -> the reason why it is not tried again

    def command(self) -> list[str]:
        # -P: modules of this folder have the names of other packages (tokenizers), so it must not be on the path.
        return [sys.executable, "-P", template_server.__file__]

    def render(self, template: str, values: dict[str, Any]) -> str:
        if template in self.costly:
            raise TooCostly(self.costly[template])
        if len(template) > MAX_TEMPLATE_CHARS:
            raise TooCostly(f"the chat template has more than {MAX_TEMPLATE_CHARS} characters")
        request = json.dumps([template, values, CPU_SECONDS, WALL_SECONDS, MEMORY], default=str).encode() + b"\n"
        kind, data, ended = self._ask(request)
        if ended == -signal.SIGKILL:  # killed from outside
            kind, data, ended = self._ask(request)
        text = data.decode("utf-8", "surrogatepass")
        if kind == template_server.TEXT:
            return text
        if kind == template_server.ERROR:
            raise ValueError(text)
        if kind == template_server.NO_MEMORY:
            problem = f"more than {MEMORY >> 20} MiB of memory"
        elif ended in (-signal.SIGPROF, -signal.SIGALRM):
            problem = f"more than {CPU_SECONDS:g} seconds of processor time"
        elif ended == -signal.SIGKILL:
            raise ConnectionError("the process that renders chat templates is killed repeatedly")
        else:
            problem = f"the process down that renders it (exit status {ended})"
        self.costly[template] = f"the chat template takes {problem} to write a conversation; use another one"
        raise TooCostly(self.costly[template])

    def _ask(self, request: bytes) -> tuple[bytes, bytes, int]:
        """Return the reply's letter and text, and the exit status of the process: 0 if it still runs."""
        try:
            return *self.exchange(request, self._read), 0
        except Ended as end:
            return b"", b"", end.status

    def _read(self, pipe: IO[bytes]) -> tuple[bytes, bytes]:
        head = _exactly(pipe, 9)
        data = _exactly(pipe, int.from_bytes(head[1:], "big"))
        if head[:1] == template_server.NO_MEMORY:
            self.close()  # it has hardly any memory left
        return head[:1], data


def _exactly(pipe: IO[bytes], size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        more = pipe.read(size - len(data))
        if not more:
            raise EOFError
        data += more
    return bytes(data)


_renderer = _Renderer()
