"""Chat templates: how a model family writes a conversation, as a program in Jinja that comes with its tokenizer.

Such a program is foreign code. It runs in Jinja's immutable sandbox, which keeps it from everything but its
conversation, and, except for our own, in a process that may use `CPU_SECONDS` and `MEMORY` and no more: a template
needs a line to write a gigabyte or to count for ever, and nothing inside Python can stop that. One process renders for
all; a conversation costs it some tenths of a millisecond more. It can read no clock, so the same conversation gives the
same tokens on every day.

This file is also the program of that process, so it imports nothing of this package.
"""

from __future__ import annotations

import atexit
import datetime
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

Message = Mapping[str, Any]
"""One chat message: ``role``, ``content``, and for some roles ``tool_calls``, ``name``, ``tool_call_id``."""

CPU_SECONDS = 5.0
"""Processor time that a template may use for one conversation; a usual one needs a thousandth of it."""
WALL_SECONDS = 120.0
MEMORY = 512 << 20
"""Bytes of address space that the process may have."""
MAX_TEMPLATE_CHARS = 1_000_000
"""The longest one that is known has 50,000."""

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


def chat_template(tokenizer: Any, with_tools: bool = False) -> str:
    """The text of the tokenizer's chat template.

    Raises:
        ValueError: it has none.
    """
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):  # several, by name: Hugging Face's convention
        template = template.get("tool_use" if with_tools and "tool_use" in template else "default")
    if not isinstance(template, str) or not template:
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise ValueError(
            f"the tokenizer {name} has no chat template, so it cannot write a conversation (is it a base model?). "
            "Take the instruct model's tokenizer, or set tokenizer.chat_template to a template's text"
        )
    return template


def render_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] | None = None,
    add_generation_prompt: bool = False,
) -> str:
    """The conversation as text, by the tokenizer's chat template.

    Raises:
        ValueError: the template refuses the conversation, is no valid template, or takes too much time or memory; one
            that did so once isn't tried again.
        OSError: the process that renders is ended from outside again and again, or cannot be started.
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
        raise ValueError(f"the chat template refuses this conversation: {error or type(error).__name__}") from error


class TooCostly(ValueError):
    """A chat template that takes too much time or memory."""


def _render(template: str, values: dict[str, Any]) -> str:
    return _compile(template).render(values)


class _Generation(jinja2.ext.Extension):
    """Hugging Face's ``{% generation %}`` tag, which marks assistant text and prints nothing of its own."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


@lru_cache(maxsize=64)
def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    # A fixed date (Llama 3's own fallback): with a clock, the same task would give other tokens tomorrow.
    environment.globals["strftime_now"] = datetime.datetime(2024, 7, 26).strftime
    return environment.from_string(template)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes ``<`` for web pages, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


# --------------------------------------------------------------------------------------------------------------------
# The process that renders
#
# A request is a line of JSON. A reply is a letter, the number of bytes that follow, in 8 bytes, and these.

_TEXT, _ERROR, _MEMORY = b"T", b"E", b"M"


class _Renderer:
    """Asks the process, which is started when it is needed and again when it is gone."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.costly: dict[str, str] = {}  # template -> why it isn't tried again

    def render(self, template: str, values: dict[str, Any]) -> str:
        if template in self.costly:
            raise TooCostly(self.costly[template])
        if len(template) > MAX_TEMPLATE_CHARS:
            raise TooCostly(f"the chat template has more than {MAX_TEMPLATE_CHARS} characters")
        request = json.dumps([template, values, CPU_SECONDS, WALL_SECONDS, MEMORY], default=str).encode() + b"\n"
        with self.lock:
            kind, data, ended = self._ask(request)
            if ended == -signal.SIGKILL:  # by something from outside
                kind, data, ended = self._ask(request)
        text = data.decode("utf-8", "surrogatepass")
        if kind == _TEXT:
            return text
        if kind == _ERROR:
            raise ValueError(text)
        if kind == _MEMORY:
            problem = f"more than {MEMORY >> 20} MiB of memory"
        elif ended in (-signal.SIGPROF, -signal.SIGALRM):
            problem = f"more than {CPU_SECONDS:g} seconds of processor time"
        elif ended == -signal.SIGKILL:
            raise ConnectionError("the process that renders chat templates is killed again and again")
        else:
            problem = f"the process down that renders it (exit status {ended})"
        self.costly[template] = f"the chat template takes {problem} to write a conversation; use another one"
        raise TooCostly(self.costly[template])

    def _ask(self, request: bytes) -> tuple[bytes, bytes, int]:
        """The reply's letter and text, and how the process ended: 0 if it lives."""
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        try:
            rest = memoryview(request)
            while rest:
                rest = rest[os.write(process.stdin.fileno(), rest) :]
            head = _read(process.stdout.fileno(), 9)
            data = _read(process.stdout.fileno(), int.from_bytes(head[1:], "big"))
            if head[:1] == _MEMORY:
                self.close()
            return head[:1], data, 0
        except (OSError, EOFError):  # it is gone
            pass
        except BaseException:  # its reply must not be taken for the next one's
            self.close()
            raise
        self.process = None
        process.stdin.close()
        process.stdout.close()
        return b"", b"", process.wait()

    def _running(self) -> subprocess.Popen[bytes]:
        if self.process is None:
            # -P: this folder has modules named like others (datasets, tokenizers) and must not be on the path.
            command = [sys.executable, "-P", __file__]
            pipe, null = subprocess.PIPE, subprocess.DEVNULL
            # Unbuffered: buffers have locks, and a fork may find them locked.
            self.process = subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, stderr=null)
        return self.process

    def close(self) -> None:
        """End the process."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.communicate()

    def forget(self) -> None:
        """In a fork of this process: the lock and the process are its parent's."""
        self.lock = threading.Lock()
        process, self.process = self.process, None
        if process is not None and process.stdin is not None and process.stdout is not None:
            process.stdin.close()  # or the process would not see its parent end
            process.stdout.close()
            process.returncode = 0  # not this process's child: nothing to wait for or to warn of


def _read(file: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        more = os.read(file, size - len(data))
        if not more:
            raise EOFError
        data += more
    return bytes(data)


_renderer = _Renderer()
atexit.register(_renderer.close)
os.register_at_fork(after_in_child=_renderer.forget)


def _serve() -> None:
    """Answer requests until the pipe is closed."""
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    replies = os.fdopen(os.dup(1), "wb")
    for line in sys.stdin.buffer:
        template, values, cpu_seconds, wall_seconds, memory = json.loads(line)
        try:
            resource.setrlimit(resource.RLIMIT_AS, (memory, resource.getrlimit(resource.RLIMIT_AS)[1]))
        except (ValueError, OSError):  # not every system has this
            pass
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # its signals end this process
        signal.setitimer(signal.ITIMER_REAL, wall_seconds)
        kind, text = _reply(template, values, 1_000_000 + 16 * len(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        data = text.encode("utf-8", "surrogatepass")
        replies.write(kind + len(data).to_bytes(8, "big") + data)
        replies.flush()


def _reply(template: str, values: dict[str, Any], most: int) -> tuple[bytes, str]:
    try:
        text = _render(template, values)
    except MemoryError:
        return _MEMORY, ""
    except Exception as error:
        return _ERROR, (str(error) or type(error).__name__)[:2_000]
    if len(text) > most:
        return _ERROR, f"it writes {len(text)} characters of a conversation that has less than {most // 16}"
    return _TEXT, text


if __name__ == "__main__":
    _serve()
