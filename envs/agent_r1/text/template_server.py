"""A program that renders chat templates, for `templates`: a line of JSON for each conversation.

It is started by its path and imports nothing of this package. A request is the template, its values, and its limits:
processor seconds, seconds, bytes of memory. A reply is a letter, the number of bytes that follow (in 8 bytes), and
these bytes.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

TEXT, ERROR, NO_MEMORY = b"T", b"E", b"M"


def render(template: str, values: dict[str, Any]) -> str:
    """Render a template. It may raise anything."""
    return _compile(template).render(values)


class _Generation(jinja2.ext.Extension):
    """Hugging Face's ``{% generation %}`` tag, which marks assistant text and prints nothing itself."""

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
    # A fixed date (Llama 3's own fallback): with a clock, the same task would have other tokens tomorrow.
    environment.globals["strftime_now"] = datetime.datetime(2024, 7, 26).strftime
    return environment.from_string(template)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Write JSON. Jinja's own filter would escape ``<`` for web pages, and no model was trained on that."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def serve() -> None:
    """Answer requests until the pipe is closed."""
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    replies = os.fdopen(os.dup(1), "wb")
    for line in sys.stdin.buffer:
        template, values, cpu_seconds, wall_seconds, memory = json.loads(line)
        try:
            resource.setrlimit(resource.RLIMIT_AS, (memory, resource.getrlimit(resource.RLIMIT_AS)[1]))
        except (ValueError, OSError):  # not on every system
            pass
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # the signal ends this process
        signal.setitimer(signal.ITIMER_REAL, wall_seconds)
        kind, text = _reply(template, values, 1_000_000 + 16 * len(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        data = text.encode("utf-8", "surrogatepass")
        replies.write(kind + len(data).to_bytes(8, "big") + data)
        replies.flush()


def _reply(template: str, values: dict[str, Any], max_chars: int) -> tuple[bytes, str]:
    try:
        text = render(template, values)
    except MemoryError:
        return NO_MEMORY, ""
    except Exception as error:
        return ERROR, (str(error) or type(error).__name__)[:2_000]
    if len(text) > max_chars:
        return ERROR, f"it writes {len(text)} characters of a conversation that has less than {max_chars // 16}"
    return TEXT, text


if __name__ == "__main__":
    serve()
