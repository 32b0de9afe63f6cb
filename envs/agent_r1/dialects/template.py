"""The text of a chat template between a turn and the next one, found by probing it.

The template is rendered once with placeholders for the assistant's text and the tools' results. The text between the
placeholders is the constant text of the family.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_r1.dialects.calls import Schema
from agent_r1.dialects.codec import SPLIT, Codec
from agent_r1.text.tokenizers import render_chat

PROBE_TOOL: Schema = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}


def template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat message in the form of chat templates.

    Chat APIs have arguments as JSON text and null contents. Templates need objects and empty texts.
    """
    changed = dict(message)
    if "content" in message and message["content"] is None:
        changed["content"] = ""
    if message.get("tool_calls"):
        functions = [call.get("function", call) for call in message["tool_calls"]]
        given = [json.loads(f["arguments"]) if isinstance(f["arguments"], str) else f["arguments"] for f in functions]
        changed["tool_calls"] = [
            {"type": "function", **call, "function": {**function, "arguments": arguments}}
            for call, function, arguments in zip(message["tool_calls"], functions, given, strict=True)
        ]
    return changed


@dataclass(frozen=True)
class _Frame:
    """The constant text between a turn and the next one, with slots for values."""

    chunks: tuple[str, ...]
    """One more chunk than slots; the first starts right after the end-of-turn token."""
    slots: tuple[int, ...]
    """The index of the value that follows each chunk but the last."""
    controls: tuple[int, ...]
    """The control tokens of a filled frame, which are exactly those of the chunks."""


class ChatTemplate:
    """A tokenizer's chat template, as `Dialect` needs it: the text after a turn, with values filled in."""

    native: bool = False
    """True if the chat template itself explains tools and writes calls in this family's notation."""
    end_of_turn: str
    """The text of the usual token that ends a turn."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.codec = Codec(tokenizer)
        self._frames: dict[tuple[str, int], _Frame] = {}
        self._filters: dict[str, Callable[[str], str]] = {}
        self.end_of_turn = self._find_end_of_turn()

    def result_messages(self, results: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
        """Return tool results as messages for the chat template."""
        raise NotImplementedError

    def _after_assistant(self, messages: Sequence[dict[str, Any]], calls: int = 0) -> str:
        """Return the template's text after an assistant's turn that these messages follow."""
        assistant: dict[str, Any] = {"role": "assistant", "content": _ASSISTANT}
        if calls:  # some templates require a call before a result
            assistant["tool_calls"] = [
                {"type": "function", "id": f"{i:09d}", "function": {"name": "probe_tool", "arguments": {"text": "x"}}}
                for i in range(calls)
            ]
        conversation = [{"role": "user", "content": "Hello."}, assistant, *messages]
        text = render_chat(self.tokenizer, conversation, [PROBE_TOOL] if self.native else [], True)
        if text.count(_ASSISTANT) != 1:
            raise ValueError(
                f"the chat template shows an assistant's text {text.count(_ASSISTANT)} times instead of once, so what "
                "follows a turn cannot be found; use another chat template"
            )
        return text.partition(_ASSISTANT)[2]

    def _find_end_of_turn(self) -> str:
        tail = self._after_assistant([{"role": "user", "content": "Go on."}]).lstrip()
        tokens = [t for t, i in self.codec.controls.items() if tail.startswith(t) and self.codec.encode_text(t) == [i]]
        if not tokens:
            raise ValueError(
                f"the chat template puts {tail[:20]!r} after an assistant's text, which does not begin with a control "
                "token: no token ends a turn, so a sampler cannot stop; use an instruct model's tokenizer"
            )
        return max(tokens, key=len)

    def _frame(self, role: str, count: int) -> _Frame:
        """Return the frame around ``count`` tool results or a user's message."""
        frame = self._frames.get((role, count))
        if frame is None:
            values = [_placeholder(i) for i in range(2 * count)]
            text = self._fill_template(role, values)
            pieces = _PLACEHOLDER.split(text)
            slots = tuple(int(i) for i in pieces[1::2])
            contents = [i for i in slots if i % 2]
            if contents != list(range(1, 2 * count, 2)):
                contents_name = "the tools' results" if role == "tool" else "a user's message"
                raise ValueError(
                    f"the chat template does not show {contents_name} once each and in order after a turn; use another "
                    "dialect (dialect=...) or another chat template"
                )
            chunks = tuple(pieces[0::2])
            controls = tuple(i for chunk in chunks for i in self.codec.controls_in(self.codec.encode_text(chunk)))
            frame = self._frames[role, count] = _Frame(chunks, slots, controls)
        return frame

    def _fill_template(self, role: str, values: Sequence[str]) -> str:
        """Return the template's text after the end of turn, filled with ``name, content, name, content ...``."""
        if role == "user":
            messages: list[dict[str, Any]] = [{"role": "user", "content": values[1]}]
        else:
            messages = self.result_messages(list(zip(values[::2], values[1::2], strict=True)))
        try:
            tail = self._after_assistant(messages)
        except ValueError:
            tail = self._after_assistant(messages, calls=len(values) // 2)
        before, end, after = tail.partition(self.end_of_turn)
        if not end:
            raise ValueError(f"the chat template does not write {self.end_of_turn!r} after a turn with tool calls")
        return after

    def _filter(self, role: str) -> Callable[[str], str]:
        """Return the template's change of a content (trimming, JSON quoting), found by a probe."""
        if role not in self._filters:
            frame = self._frame(role, 1)
            probe = " \n\"Probe\" \\ <b> & 'c' \u00e9 \n "
            text = self._fill_template(role, ["probe_tool", probe])
            for candidate in _FILTERS:
                values = ["probe_tool", candidate(probe)]
                if text == _join(frame, values):
                    self._filters[role] = candidate
                    break
            else:
                raise ValueError(
                    f"the chat template changes the content of a {role} message in an unknown way: it turned {probe!r} "
                    f"into {text!r}; use another dialect (dialect=...) or another chat template"
                )
        return self._filters[role]

    def _fill(self, role: str, count: int, values: Sequence[str]) -> list[int]:
        """Return the tokens after the end of turn, with these values in the frame."""
        frame = self._frame(role, count)
        change = self._filter(role) if count else str
        guarded = [self.codec.guard(change(value) if i % 2 else value) for i, value in enumerate(values)]
        # With the end-of-turn token in front, as in the state: some tokenizers treat the start of a text differently.
        ids = self.codec.encode(self.end_of_turn + _join(frame, guarded))[1:]
        if tuple(self.codec.controls_in(ids)) == frame.controls:
            return ids
        apart = [f"{SPLIT}{value}{SPLIT}" for value in guarded]  # a control token formed across an edge
        return self.codec.encode(self.end_of_turn + _join(frame, apart))[1:]

    def _accepts_system_role(self) -> bool:
        messages = [{"role": "system", "content": _ASSISTANT}, {"role": "user", "content": "Hello."}]
        try:
            return _ASSISTANT in render_chat(self.tokenizer, messages, None, True)
        except ValueError:
            return False


_ASSISTANT = "ZQassistantQZ"
_PLACEHOLDER = re.compile(r"ZQ(\d+)QZ")


def _placeholder(index: int) -> str:
    return f"ZQ{index}QZ"


def _join(frame: _Frame, values: Sequence[str]) -> str:
    parts = [frame.chunks[0]]
    for chunk, slot in zip(frame.chunks[1:], frame.slots, strict=True):
        parts += values[slot], chunk
    return "".join(parts)


def _json_inside(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_ascii_inside(text: str) -> str:
    return json.dumps(text)[1:-1]


def _filters() -> list[Callable[[str], str]]:
    """Return the known changes of a content by chat templates: none, trimming, JSON quoting, or both."""
    trims: list[Callable[[str], str]] = [str, str.strip, str.lstrip, str.rstrip]
    quotes: list[Callable[[str], str]] = [str, _json_inside, _json_ascii_inside]

    def both(trim: Callable[[str], str], quote: Callable[[str], str]) -> Callable[[str], str]:
        return lambda text: quote(trim(text))

    return [both(trim, quote) for quote in quotes for trim in trims]


_FILTERS = _filters()
