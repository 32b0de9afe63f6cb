"""Dialects: how a model family writes prompts, tool calls and tool results, in tokens.

A dialect connects an environment, which works with messages and calls, to a policy, which writes tokens::

    prompt = dialect.render(messages, tools)       the start of the state
    turn = dialect.parse(span)                     the content of a sampled span: visible text and tool calls
    more = dialect.bridge(closed, results)         the tokens between that span and the policy's next turn

Three rules hold for every family:

- History is never rendered again. `bridge` returns only the tokens after a span. So sampled tokens stay as sampled,
  also with templates that rewrite earlier turns.
- Text from tools and data never becomes a control token, because the string of each control token is cut into parts.
  Text without such strings is encoded exactly as the family does.
- `parse` reads tool calls by token id if the vocabulary has a token for them. It takes time linear in the span, and
  never raises.

To find the bridge, the chat template is rendered once with placeholders for the assistant's text and the tools'
results. The text between the placeholders is the constant text of the family.
"""

from __future__ import annotations

from typing import Any

from agent_r1.arguments import ArgumentError
from agent_r1.dialects.base import Dialect
from agent_r1.dialects.calls import Call, Schema, Turn
from agent_r1.dialects.fenced import Fenced
from agent_r1.dialects.hermes import Hermes
from agent_r1.dialects.json_reader import read_json
from agent_r1.dialects.llama3_json import Llama3JSON
from agent_r1.dialects.qwen_xml import QwenXML
from agent_r1.dialects.react import ReAct
from agent_r1.text.tokenizers import chat_template

__all__ = [
    "DIALECTS", "Call", "Dialect", "Fenced", "Hermes", "Llama3JSON", "QwenXML", "ReAct", "Schema", "Turn",
    "get_dialect", "read_json",
]  # fmt: skip

DIALECTS: dict[str, type[Dialect]] = {dialect.name: dialect for dialect in (Hermes, QwenXML, Llama3JSON, ReAct, Fenced)}
"""The families by name."""

_cache: dict[tuple[str | None, int, int, str], Dialect] = {}


def get_dialect(name: str | None, tokenizer: Any) -> Dialect:
    """Return the dialect of this name over a tokenizer (from `load_tokenizer`).

    None chooses the family whose calls the chat template writes. If it writes no known calls, the dialect is "hermes"
    with the instructions in the system message. Dialects are cached per tokenizer object.

    Raises:
        ValueError: an unknown name (`ArgumentError`), or a chat template that cannot be used (see `Dialect`).
    """
    if name is not None and not (isinstance(name, str) and name in DIALECTS):
        raise ArgumentError(f"unknown dialect {name!r}; there are {', '.join(DIALECTS)}, or None to recognise it")
    key = (name, id(tokenizer), len(tokenizer), chat_template(tokenizer))  # both change when the user changes them
    if key not in _cache:
        if name is None:
            natives = (d for d in DIALECTS if get_dialect(d, tokenizer).native)
            _cache[key] = get_dialect(next(natives, "hermes"), tokenizer)
        else:
            _cache[key] = DIALECTS[name](tokenizer)
    return _cache[key]
