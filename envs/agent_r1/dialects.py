"""Dialects: how a model family writes prompts, tool calls and tool results, in tokens.

A dialect stands between an environment, which thinks in messages and calls, and a policy, which writes tokens::

    prompt = dialect.render(messages, tools)       the start of the state
    turn = dialect.parse(span)                     what a sampled span says: visible text and tool calls
    more = dialect.bridge(closed, results)         the tokens between that span and the policy's next turn

Three rules hold for every family:

- History is never rendered again. `bridge` gives only what comes after a span, so what the policy sampled stays as
  sampled, also with templates that rewrite earlier turns.
- Text from tools and data never becomes a control token: a cut inside each of their strings keeps them apart. Text
  without such strings is encoded exactly as the family does.
- `parse` reads tool calls by token id where the vocabulary has a token for them, takes time linear in the span, and
  never raises.

How the bridge is found: the chat template is rendered once with placeholders for the assistant's text and the tools'
results; what stands between the placeholders is the constant text of the family.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .tokenizers import chat_template, control_tokens, fast_codec, render_chat, replace_surrogates

Schema = dict[str, Any]
"""A tool for the chat template: ``{"type": "function", "function": {"name", "description", "parameters"}}``."""


@dataclass
class Call:
    """One tool call as the policy wrote it."""

    name: str
    """The tool's name; may be empty in a malformed call."""
    arguments: dict[str, Any] | None
    """The arguments, or None in a malformed call."""
    error: str | None = None
    """Why the call is malformed, in words for the policy; None if it is well formed."""
    text: str = ""
    """The call as written, without its tags."""


@dataclass
class Turn:
    """What a span says."""

    content: str
    """The visible text up to the first stop token: without thinking, without calls, without white space around it."""
    calls: list[Call] = field(default_factory=list)
    """The tool calls in the order written."""
    raw: str = ""
    """Everything up to the first stop token, thinking and calls included."""


# Private-use characters that stand for things that are not text. None of them survives in a text given to a dialect.
_CUT = "\U0010f8a0"  # cuts a rendered text into pieces that are encoded apart
_THINK, _UNTHINK, _CALL, _UNCALL = "\U0010f8a1", "\U0010f8a2", "\U0010f8a3", "\U0010f8a4"  # tags, once recognised
_RESERVED = re.compile("[\U0010f8a0-\U0010f8af]")

_STOP_NAMES = ("<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
_PROBE_TOOL: Schema = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}


@dataclass(frozen=True)
class _Frame:
    """The constant text between a turn and the next one, around the values that fill it."""

    chunks: tuple[str, ...]
    """One more than slots; the first starts right after the end-of-turn token."""
    slots: tuple[int, ...]
    """The index of the value that follows each chunk but the last."""
    controls: tuple[int, ...]
    """The control tokens of a filled frame: those of the chunks, nothing else."""


class Dialect:
    """A family's way of writing, over one tokenizer. Use `get_dialect`; subclasses are the families.

    Args:
        tokenizer: see `agent_r1.tokenizers.load_tokenizer`.

    Raises:
        ValueError: the chat template cannot be used: it drops or repeats the assistant's text or the tools' results, or
            does not end an assistant's turn with one control token.
    """

    name: ClassVar[str] = ""
    call_tags: ClassVar[tuple[str, str] | None] = None
    """The tags around a tool call, where the family has them."""
    think_tags: ClassVar[tuple[str, str]] = ("<think>", "</think>")

    native: bool = False
    """Whether the chat template itself explains tools and writes calls in this family's way."""
    stop_token_ids: list[int]
    """The tokens that end a turn, the family's usual one first."""
    end_of_turn: str
    """The text of the usual one."""
    starts_thinking: bool = False
    """Whether the prompt opens the policy's thinking, so that a span starts inside it."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._encode_text, self._decode = fast_codec(tokenizer)
        self._controls = control_tokens(tokenizer)
        self._control_ids = frozenset(self._controls.values())
        self._cut, self._edges = _occurrences(self._controls)
        self._normalize = _normalizer(tokenizer) if self._controls else None
        self._frames: dict[tuple[str, int], _Frame] = {}
        self._filters: dict[str, Callable[[str], str]] = {}

        self.end_of_turn = self._find_end_of_turn()
        stops = [self.end_of_turn, getattr(tokenizer, "eos_token", None) or self.end_of_turn, *_STOP_NAMES]
        self.stop_token_ids = list(dict.fromkeys(self._controls[s] for s in stops if s in self._controls))
        self._stop_ids = frozenset(self.stop_token_ids)

        tags = [*self.think_tags, *(self.call_tags or ())]
        self._tag_ids = [(tag, mark, self._controls.get(tag)) for tag, mark in zip(tags, _TAG_MARKS, strict=False)]
        self._written = {ord(mark): tag for tag, mark, _ in self._tag_ids}
        self._call_texts = re.compile("|".join(map(re.escape, sorted({*self._controls, *tags}, key=len, reverse=True))))

        self.native = self._is_native()
        self._system_role = self._accepts_system_role()
        generation_prompt = self._frame("user", 1).chunks[-1]
        thinking, answering = (generation_prompt.rfind(tag) for tag in self.think_tags)
        self.starts_thinking = thinking > answering

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.tokenizer!r:.60})"

    def __reduce__(self) -> tuple[Any, ...]:
        return get_dialect, (self.name, self.tokenizer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Dialect:
        return self  # nothing in it changes, but caches

    # ---------------------------------------------------------------------------------------------- writing

    def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[Schema] = ()) -> list[int]:
        """The prompt: the conversation, the tools' schemas and the start of the policy's turn.

        Args:
            messages: chat messages; strings in them are plain text, whatever they contain.
            tools: schemas of the tools; explained in the system message where the chat template knows no tools.

        Returns:
            The token ids.

        Raises:
            ValueError: the chat template refuses the conversation.
        """
        ids = self._encode(self._render_guarded(messages, tools, self._guard))
        if any(self._touches_edge(message.get("content")) for message in messages):
            # A content may have completed a control token that the text beside it began ("<|im_" + "end|>").
            safe = self._encode(self._render_guarded(messages, tools, self._guard_edges))
            if self._controls_in(ids) != self._controls_in(safe):
                return safe
        return ids

    def bridge(self, closed: bool, results: Sequence[tuple[str, str]]) -> list[int]:
        """The tokens after a sampled span: the tools' results and the start of the next turn.

        Args:
            closed: whether the span ended with a stop token; if not, the end of turn comes first.
            results: ``(tool name, content)`` in call order.

        Returns:
            The token ids; they are the environment's, never the policy's.
        """
        values = [text for pair in results for text in pair]
        return self.close() * (not closed) + self._fill("tool", len(results), values)

    def hint(self, closed: bool, text: str) -> list[int]:
        """Like `bridge`, with a user's message instead of tools' results."""
        return self.close() * (not closed) + self._fill("user", 1, ["", text])

    def close(self) -> list[int]:
        """The tokens that end a turn which the policy left open."""
        return self.stop_token_ids[:1]

    def tool_call(self, name: str, arguments: dict[str, Any]) -> str:
        """The text of one call: ``parse(encode(tool_call(name, arguments) + end_of_turn))`` gives it back.

        Raises:
            ValueError: the family cannot write these arguments (its docstring says which).
        """
        raise NotImplementedError

    def instructions(self, tools: Sequence[Schema]) -> str:
        """How to call the tools, for a chat template that does not say so itself."""
        raise NotImplementedError

    def result_messages(self, results: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
        """Tools' results as messages for the chat template."""
        if self.native:
            return [
                {"role": "tool", "name": name, "content": content, "tool_call_id": f"{i:09d}"}
                for i, (name, content) in enumerate(results)
            ]
        return [{"role": "user", "content": "\n".join(self.result_text(content) for _, content in results)}]

    def result_text(self, content: str) -> str:
        """One tool's result inside a user's message, for a chat template without a tool role."""
        return f"<tool_response>\n{content}\n</tool_response>"

    def is_plain(self, text: str) -> bool:
        """Whether a text can stand in a call as it is: no tag or control token in it, nothing the tokenizer changes."""
        if self._call_texts.search(text) or _RESERVED.search(text):
            return False
        ids = self._encode_text(text)
        return not self._controls_in(ids) and self._decode(ids) == text

    # ---------------------------------------------------------------------------------------------- reading

    def parse(self, span: Sequence[int], tools: Sequence[Schema] = ()) -> Turn:
        """What a sampled span says, up to its first stop token. Never raises on ids of the vocabulary.

        Text in ``<think>...</think>`` is not searched for calls; an open ``<think>`` hides everything after it.

        Args:
            span: token ids, a sequence or a 1-D integer array.
            tools: the tools' schemas, for families that write arguments without types (`QwenXML`).
        """
        raw, text = self._read(span)
        visible: list[str] = []
        calls: list[Call] = []
        for is_call, piece, closed in self._regions(text):
            if not is_call:
                visible.append(piece)
                continue
            piece = piece.translate(self._written)
            call = self.read_call(piece.strip(), tools)
            if not closed:
                call = Call(call.name, None, "the call is never closed", piece)
            calls.append(call)
        content, more = self.read_visible("".join(visible).translate(self._written), tools)
        return Turn(content.strip(), calls + more, raw)

    def read_call(self, text: str, tools: Sequence[Schema]) -> Call:
        """Read what stands between the call tags."""
        raise NotImplementedError

    def read_visible(self, text: str, tools: Sequence[Schema]) -> tuple[str, list[Call]]:
        """Read calls that are written as plain text: the rest of the text, and the calls."""
        return text, []

    def _read(self, span: Any) -> tuple[str, str]:
        """The text of a span up to its stop token: as it is, and with each tag as one private character.

        Where a tag is a token of the vocabulary, only that token counts, not its letters.
        """
        ids: list[int] = span.tolist() if hasattr(span, "tolist") else list(span)
        stop = next((i for i, token in enumerate(ids) if token in self._stop_ids), len(ids))
        del ids[stop:]
        raw = text = self._decode(ids)
        if not text.isascii():
            text = _RESERVED.sub("\ufffd", text)
        if any(token is not None and text.count(tag) != ids.count(token) for tag, _, token in self._tag_ids):
            return raw, self._read_exactly(ids)
        for tag, mark, _ in self._tag_ids:
            text = text.replace(tag, mark)
        return raw, text

    def _read_exactly(self, ids: list[int]) -> str:
        """The text with tags as private characters, for a span in which some tag is also spelled with letters."""
        marks = {token: mark for _, mark, token in self._tag_ids if token is not None}
        pieces: list[str] = []
        start = 0
        for i, token in enumerate([*ids, -1]):
            if token in marks or token == -1:
                piece = _RESERVED.sub("\ufffd", self._decode(ids[start:i]))
                for tag, mark, tag_id in self._tag_ids:
                    if tag_id is None:
                        piece = piece.replace(tag, mark)
                pieces += piece, marks.get(token, "")
                start = i + 1
        return "".join(pieces)

    def _regions(self, text: str) -> Iterator[tuple[bool, str, bool]]:
        """Cut a marked text into ``(is a call, text, closed)``; thinking is left out."""
        start, thinking, calling = 0, self.starts_thinking, False
        for match in _MARK.finditer(text):
            mark = match[0]
            if thinking:
                if mark == _UNTHINK:
                    thinking, start = False, match.end()
            elif calling:
                if mark in (_CALL, _UNCALL):  # a call that opens inside a call: the outer one was never closed
                    yield True, text[start : match.start()], mark == _UNCALL
                    calling, start = mark == _CALL, match.end()
            elif mark in (_THINK, _CALL):
                yield False, text[start : match.start()], True
                thinking, calling, start = mark == _THINK, mark == _CALL, match.end()
        if not thinking:
            yield calling, text[start:], False

    # ---------------------------------------------------------------------------------------------- text to tokens

    def _guard(self, text: str) -> str:
        """The text with a cut inside every control token's string, so that `_encode` makes no control token of it."""
        if not text.isascii():
            text = _RESERVED.sub("\ufffd", replace_surrogates(text))
            if self._normalize:
                text = self._normalize(text)
        return self._cut(text)

    def _guard_edges(self, text: str) -> str:
        """`_guard`, and cuts at both ends, so that nothing forms across them either."""
        text = self._guard(text)
        inner = text.strip()
        if not inner:
            return text
        start = text.index(inner)
        return f"{text[:start]}{_CUT}{inner}{_CUT}{text[start + len(inner) :]}"

    def _touches_edge(self, content: Any) -> bool:
        """Whether a text begins or ends with a part of a control token's string, or is such a part."""
        if not isinstance(content, str) or not content:
            return False
        starts, ends, inside = self._edges
        content = content.strip()
        return content.startswith(starts) or content.endswith(ends) or content in inside

    def _json(self, value: Any) -> str:
        """JSON on one line that no tokenizer changes and that contains no tag and no control token."""
        text = self._escape(json.dumps(value, ensure_ascii=False, allow_nan=False))
        return text if self.is_plain(text) else self._escape(json.dumps(value, allow_nan=False))

    def _escape(self, text: str) -> str:
        """Write the first character of every tag and control token inside JSON strings as ``\\uXXXX``."""
        if not self._call_texts.search(text):
            return text

        def escape(token: re.Match[str]) -> str:
            first = json.dumps(token[0][0])[1:-1]
            return (first if len(first) > 1 else f"\\u{ord(first):04x}") + token[0][1:]

        return _JSON_STRING.sub(lambda string: self._call_texts.sub(escape, string[0]), text)

    def _encode(self, text: str) -> list[int]:
        """Encode the pieces between cuts."""
        if _CUT not in text:
            return self._encode_text(text)
        return [token for piece in text.split(_CUT) if piece for token in self._encode_text(piece)]

    def _controls_in(self, ids: list[int]) -> list[int]:
        return [token for token in ids if token in self._control_ids]

    def _render_guarded(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Schema], guard: Callable[[str], str]
    ) -> str:
        """The prompt's text; ``guard`` is for the contents of messages, whose edges touch the template's text."""
        guarded = []
        for message in messages:
            strings = {key: _map_strings(value, self._guard) for key, value in message.items()}
            if isinstance(message.get("content"), str):
                strings["content"] = guard(message["content"])
            guarded.append({**strings, "role": message["role"]})
        schemas = [_map_strings(tool, self._guard) for tool in tools]
        if not self.native:
            guarded = self._without_tool_roles(guarded)
            text = self.instructions(schemas) if schemas else ""
            guarded, schemas = self._with_instructions(guarded, text), []
        return render_chat(self.tokenizer, guarded, schemas, add_generation_prompt=True)

    def _without_tool_roles(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The conversation for a chat template without tools: calls and results as text."""
        plain: list[dict[str, Any]] = []
        for is_tool, group in itertools.groupby(messages, key=lambda m: m["role"] == "tool"):
            if is_tool:
                plain += self.result_messages([(m.get("name", ""), m["content"]) for m in group])
                continue
            for message in group:
                functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
                texts = [self.tool_call(f["name"], _map_strings(f["arguments"], _uncut)) for f in functions]
                content = message.get("content") or ""
                plain.append({"role": message["role"], "content": "\n".join([content] * bool(content) + texts)})
        return plain

    def _with_instructions(self, messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
        """The conversation with this text added to the system message, or where the family has none, to the user's."""
        if messages and messages[0]["role"] == "system":
            text = "\n\n".join(filter(None, (messages[0]["content"], text)))
            messages = messages[1:]
        if not text:
            return messages
        if self._system_role:
            return [{"role": "system", "content": text}, *messages]
        if not messages or messages[0]["role"] != "user":
            return [{"role": "user", "content": text}, *messages]
        return [{**messages[0], "content": f"{text}\n\n{messages[0]['content']}"}, *messages[1:]]

    # ------------------------------------------------------------------------------------- probing the chat template

    def _after_assistant(self, messages: Sequence[dict[str, Any]], calls: int = 0) -> str:
        """The template's text after an assistant's turn that is followed by these messages."""
        assistant: dict[str, Any] = {"role": "assistant", "content": _ASSISTANT}
        if calls:  # some templates want a call before a result
            assistant["tool_calls"] = [
                {"type": "function", "id": f"{i:09d}", "function": {"name": "probe_tool", "arguments": {"text": "x"}}}
                for i in range(calls)
            ]
        conversation = [{"role": "user", "content": "Hello."}, assistant, *messages]
        text = render_chat(self.tokenizer, conversation, [_PROBE_TOOL] if self.native else [], True)
        if text.count(_ASSISTANT) != 1:
            raise ValueError(
                f"the chat template shows an assistant's text {text.count(_ASSISTANT)} times instead of once, so what "
                "follows a turn cannot be told; use another chat template"
            )
        return text.partition(_ASSISTANT)[2]

    def _find_end_of_turn(self) -> str:
        tail = self._after_assistant([{"role": "user", "content": "Go on."}]).lstrip()
        tokens = [t for t, i in self._controls.items() if tail.startswith(t) and self._encode_text(t) == [i]]
        if not tokens:
            raise ValueError(
                f"the chat template puts {tail[:20]!r} after an assistant's text, which does not begin with a control "
                "token: no token ends a turn, so a sampler cannot stop; use an instruct model's tokenizer"
            )
        return max(tokens, key=len)

    def _frame(self, role: str, count: int) -> _Frame:
        """The frame around ``count`` tools' results or a user's message."""
        frame = self._frames.get((role, count))
        if frame is None:
            values = [_placeholder(i) for i in range(2 * count)]
            text = self._fill_template(role, values)
            pieces = _PLACEHOLDER.split(text)
            slots = tuple(int(i) for i in pieces[1::2])
            contents = [i for i in slots if i % 2]
            if contents != list(range(1, 2 * count, 2)):
                what = "the tools' results" if role == "tool" else "a user's message"
                raise ValueError(
                    f"the chat template does not show {what} once each and in order after a turn; use another dialect "
                    "(dialect=...) or another chat template"
                )
            chunks = tuple(pieces[0::2])
            controls = tuple(i for chunk in chunks for i in self._controls_in(self._encode_text(chunk)))
            frame = self._frames[role, count] = _Frame(chunks, slots, controls)
        return frame

    def _fill_template(self, role: str, values: Sequence[str]) -> str:
        """The template's own text after the end of turn, filled with ``name, content, name, content ...``."""
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
        """What the template does to a content: trimming, JSON quoting. Found by a probe."""
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
                    f"the chat template changes the content of a {role} message in a way that is not known here: it "
                    f"made {text!r} of {probe!r}; use another dialect (dialect=...) or another chat template"
                )
        return self._filters[role]

    def _fill(self, role: str, count: int, values: Sequence[str]) -> list[int]:
        """The tokens after the end of turn, with these values in the frame."""
        frame = self._frame(role, count)
        change = self._filter(role) if count else str
        guarded = [self._guard(change(value) if i % 2 else value) for i, value in enumerate(values)]
        # With the end-of-turn token in front, as in the state: some tokenizers treat the start of a text differently.
        ids = self._encode(self.end_of_turn + _join(frame, guarded))[1:]
        if tuple(self._controls_in(ids)) == frame.controls:
            return ids
        apart = [f"{_CUT}{value}{_CUT}" for value in guarded]  # a control token formed across an edge: encode apart
        return self._encode(self.end_of_turn + _join(frame, apart))[1:]

    def _is_native(self) -> bool:
        """Whether the chat template explains tools, and writes a call so that this family's parser reads all of it."""
        call = {"type": "function", "id": "0" * 9, "function": {"name": "probe_tool", "arguments": {"text": "a b"}}}
        user = {"role": "user", "content": "Hello."}
        assistant = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            before = render_chat(self.tokenizer, [user], [_PROBE_TOOL])
            opened = render_chat(self.tokenizer, [user], [_PROBE_TOOL], True)
            after = render_chat(self.tokenizer, [user, assistant], [_PROBE_TOOL])
        except ValueError:
            return False
        if "probe_tool" not in before or not (opened.startswith(before) and after.startswith(before)):
            return False
        header = self.parse(self._encode_text(opened[len(before) :]))
        turn = self.parse(self._encode_text(after[len(before) :].rpartition(self.end_of_turn)[0]), [_PROBE_TOOL])
        calls = [(call.name, call.arguments) for call in turn.calls]
        return calls == [("probe_tool", {"text": "a b"})] and turn.content == header.content

    def _accepts_system_role(self) -> bool:
        messages = [{"role": "system", "content": _ASSISTANT}, {"role": "user", "content": "Hello."}]
        try:
            return _ASSISTANT in render_chat(self.tokenizer, messages, None, True)
        except ValueError:
            return False


_ASSISTANT = "ZQassistantQZ"
_PLACEHOLDER = re.compile(r"ZQ(\d+)QZ")
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_TAG_MARKS = (_THINK, _UNTHINK, _CALL, _UNCALL)
_MARK = re.compile("[" + "".join(_TAG_MARKS) + "]")


def _placeholder(index: int) -> str:
    return f"ZQ{index}QZ"


def _join(frame: _Frame, values: Sequence[str]) -> str:
    parts = [frame.chunks[0]]
    for chunk, slot in zip(frame.chunks[1:], frame.slots, strict=True):
        parts += values[slot], chunk
    return "".join(parts)


def _occurrences(
    controls: dict[str, int],
) -> tuple[Callable[[str], str], tuple[tuple[str, ...], tuple[str, ...], frozenset[str]]]:
    """A function that cuts every occurrence of these strings, overlapping ones too; and the parts of them that matter
    at the edges of a text: proper suffixes (at its start), prefixes (at its end) and inner parts (the whole of it)."""
    by_first: dict[str, list[str]] = {}
    for token in controls:
        by_first.setdefault(token[0], []).append(re.escape(token[1:]))
    # "<(?=...)" and not "(?=<...)": with a literal in front the search skips through text at memory speed.
    pattern = re.compile("|".join(f"{re.escape(c)}(?={'|'.join(rests)})" for c, rests in by_first.items()) or r"(?!)")

    def cut(match: re.Match[str]) -> str:
        return "\ufffd" if match[0] in controls else match[0] + _CUT  # a token of one character cannot be cut

    starts = tuple({token[i:] for token in controls for i in range(1, len(token))})
    ends = tuple({token[:i] for token in controls for i in range(1, len(token))})
    inside = frozenset(t[i:j] for t in controls for i in range(1, len(t)) for j in range(i + 1, len(t)))
    return lambda text: pattern.sub(cut, text), (starts, ends, inside)


def _normalizer(tokenizer: Any) -> Callable[[str], str] | None:
    """The tokenizer's own normalisation, where it happens before control tokens are looked for."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    details = getattr(tokenizer, "added_tokens_decoder", {})
    if backend is None or backend.normalizer is None or not any(token.normalized for token in details.values()):
        return None

    def normalize(text: str) -> str:
        once: str = backend.normalizer.normalize_str(text)
        return once if backend.normalizer.normalize_str(once) == once else text

    return normalize


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """The value with every string in it changed, keys of dicts included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map_strings(key, change): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_strings(item, change) for item in value]
    return value


def _uncut(text: str) -> str:
    return text.replace(_CUT, "")


def _json_inside(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_ascii_inside(text: str) -> str:
    return json.dumps(text)[1:-1]


def _filters() -> list[Callable[[str], str]]:
    """What chat templates do to a content: nothing, trimming, JSON quoting, or both."""
    trims: list[Callable[[str], str]] = [str, str.strip, str.lstrip, str.rstrip]
    quotes: list[Callable[[str], str]] = [str, _json_inside, _json_ascii_inside]

    def both(trim: Callable[[str], str], quote: Callable[[str], str]) -> Callable[[str], str]:
        return lambda text: quote(trim(text))

    return [both(trim, quote) for quote in quotes for trim in trims]


_FILTERS = _filters()


# --------------------------------------------------------------------------------------------------------------------
# JSON as policies write it

_MAX_DEPTH = 64


def read_json(text: str, start: int | None = None) -> Any:
    """Read JSON that a policy wrote.

    Stricter than `json.loads`: what could not be written out again, or would be read differently elsewhere, is refused.

    Args:
        text: the JSON.
        start: read one value from here and return ``(value, end)``; None: the text is one value.

    Raises:
        ValueError: with a message for the policy: no valid JSON, an object with a key twice, NaN, infinity, an integer
            of thousands of digits, half a surrogate pair, nesting deeper than 64.
    """
    try:
        if start is None:
            value, end = _DECODER.decode(text), len(text)
        else:
            value, end = _DECODER.raw_decode(text, start)
    except RecursionError:
        raise ValueError(f"nested deeper than {_MAX_DEPTH}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos - (start or 0)}") from None
    except ValueError as error:
        raise ValueError("an integer has too many digits" if "digits" in str(error) else str(error)) from None
    source = text[start or 0 : end]
    if source.count("[") + source.count("{") > _MAX_DEPTH and _depth(value) > _MAX_DEPTH:
        raise ValueError(f"nested deeper than {_MAX_DEPTH}")
    if "\\u" in source and replace_surrogates(plain := json.dumps(value, ensure_ascii=False)) != plain:
        raise ValueError("half a surrogate pair (\\ud800 to \\udfff) is no character")
    return value if start is None else (value, end)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("an object has the same key twice")
    return result


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number is too large")
    return number


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_no_constant)


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            item
            for node in level
            if isinstance(node, (dict, list))
            for item in (node.values() if isinstance(node, dict) else node)
        ]
    return depth


def _function(schema: Schema) -> dict[str, Any]:
    function: dict[str, Any] = schema.get("function", schema)
    return function


# --------------------------------------------------------------------------------------------------------------------
# The families


class _JSONCalls(Dialect):
    """What the families that write calls as JSON objects share."""

    argument_keys: ClassVar[tuple[str, ...]] = ("arguments",)

    def _read_object(self, value: Any, text: str) -> Call:
        """The call in a decoded JSON value."""
        key = self.argument_keys[0]
        form = f'write {{"name": "a tool", "{key}": {{...}}}}'
        if not isinstance(value, dict):
            return Call("", None, f"a call is a JSON object; {form}", text)
        name = value.get("name")
        if not isinstance(name, str) or not name:
            return Call("", None, f'the call has no "name" that is a string; {form}', text)
        given = next((k for k in self.argument_keys if k in value), None)
        if given is None:
            return Call(name, None, f'the call has no "{key}"; {form}', text)
        arguments = value[given]
        if isinstance(arguments, str):  # some models quote the object; its meaning is plain
            try:
                arguments = read_json(arguments)
            except ValueError:
                pass
        if not isinstance(arguments, dict):
            return Call(name, None, f'"{given}" is not a JSON object; {form}', text)
        return Call(name, arguments, None, text)

    def read_call(self, text: str, tools: Sequence[Schema]) -> Call:
        try:
            return self._read_object(read_json(text), text)
        except ValueError as error:
            return Call("", None, f"the call is not valid JSON ({error})", text)

    def _json_call(self, name: str, arguments: dict[str, Any]) -> str:
        return self._json({"name": name, self.argument_keys[0]: arguments})


class Hermes(_JSONCalls):
    """Hermes, Qwen2.5, Qwen3: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

    Writes every JSON argument.
    """

    name = "hermes"
    call_tags = ("<tool_call>", "</tool_call>")

    def tool_call(self, name: str, arguments: dict[str, Any]) -> str:
        return f"<tool_call>\n{self._json_call(name, arguments)}\n</tool_call>"

    def instructions(self, tools: Sequence[Schema]) -> str:
        return (
            f"# Tools\n\nYou may call these functions, given as JSON schemas:\n<tools>\n{_schemas(tools)}\n</tools>\n\n"
            "To call one, write a JSON object with its name and arguments between <tool_call> and </tool_call>:\n"
            '<tool_call>\n{"name": <function-name>, "arguments": <arguments-object>}\n</tool_call>\n'
            "The result comes back between <tool_response> and </tool_response>."
        )


class QwenXML(Dialect):
    """Qwen3-Coder, Qwen3.5: ``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``.

    Values carry no types: strings stand as they are, everything else as JSON. `parse` needs the tools' schemas to tell
    the string "5" from the number 5; without one, a value that reads as JSON (and not as a string) is JSON.

    Cannot write: a name with white space or ``>`` in it; a string that contains ``</parameter>``, a control token, or
    characters that the tokenizer changes.
    """

    name = "qwen_xml"
    call_tags = ("<tool_call>", "</tool_call>")

    def tool_call(self, name: str, arguments: dict[str, Any]) -> str:
        lines = [f"<function={name}>"]
        for key, value in arguments.items():
            if isinstance(value, str):
                text = value
            else:
                text = self._json(value).replace("</parameter>", "\\u003c/parameter>")
            if "</parameter>" in text:
                raise ValueError(f"Qwen's XML cannot write a string that contains </parameter>: {text!r:.200}")
            lines.append(f"<parameter={key}>\n{text}\n</parameter>")
        for word in (name, *arguments):
            if not re.fullmatch(r"[^\s>]+", word):
                raise ValueError(f"Qwen's XML cannot write the name {word!r:.200}: it is empty or has white space or >")
        text = "\n".join([*lines, "</function>"])
        if not self.is_plain(text):
            raise ValueError(f"Qwen's XML cannot escape the control tokens or characters in this call: {text!r:.200}")
        return f"<tool_call>\n{text}\n</tool_call>"

    def instructions(self, tools: Sequence[Schema]) -> str:
        return (
            f"# Tools\n\nYou may call these functions, given as JSON schemas:\n<tools>\n{_schemas(tools)}\n</tools>\n\n"
            "To call one, write its name and parameters so, each tag on a line of its own:\n<tool_call>\n"
            "<function=function_name>\n<parameter=parameter_name>\nvalue\n</parameter>\n</function>\n</tool_call>\n"
            "The result comes back between <tool_response> and </tool_response>."
        )

    def read_call(self, text: str, tools: Sequence[Schema]) -> Call:
        form = "write <function=name>, then <parameter=key>value</parameter> for each argument, then </function>"
        name, bracket, rest = text.removeprefix("<function=").partition(">")
        name = name.strip()
        if not text.startswith("<function=") or not bracket or not name:
            return Call("", None, f"the call does not begin with <function=name>; {form}", text)
        functions = [f for f in map(_function, tools) if f.get("name") == name]
        types = _parameter_types(functions[0]) if functions else {}
        arguments: dict[str, Any] = {}
        rest = rest.strip()
        position = 0
        while rest.startswith("<parameter=", position):
            bracket_at = rest.find(">", position)
            end = rest.find("</parameter>", bracket_at)
            if bracket_at < 0 or end < 0:
                return Call(name, None, f"a <parameter=...> is not closed; {form}", text)
            key = rest[position + len("<parameter=") : bracket_at].strip()
            if key in arguments:
                return Call(name, None, f"the parameter {key[:100]} is there twice", text)
            value = rest[bracket_at + 1 : end].removeprefix("\n").removesuffix("\n")
            arguments[key] = _read_untyped(value, types.get(key, frozenset()))
            position = end + len("</parameter>")
            position += len(_SPACE.match(rest, position)[0])  # type: ignore[index]
        if rest[position:] != "</function>":
            return Call(name, None, f"{rest[position : position + 50]!r} stands where </function> should; {form}", text)
        return Call(name, arguments, None, text)


_SPACE = re.compile(r"\s*")
_PYTHON_LITERALS = {"True": True, "False": False, "None": None}


def _parameter_types(function: dict[str, Any]) -> dict[str, frozenset[str]]:
    """The JSON types that a tool's schema allows for each parameter; empty where it does not say."""
    types: dict[str, frozenset[str]] = {}
    properties = (function.get("parameters") or {}).get("properties") or {}
    for key, schema in properties.items():
        branches = [schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())]
        named = [branch.get("type", ()) for branch in branches]
        types[key] = frozenset(t for names in named for t in ([names] if isinstance(names, str) else names))
    return types


def _read_untyped(text: str, types: frozenset[str]) -> Any:
    """The value of a text that may be a string as it is or JSON of another type, given the allowed JSON types."""
    if "string" not in types and types and text in _PYTHON_LITERALS:  # as some of Qwen's templates write them
        return _PYTHON_LITERALS[text]
    try:
        value = read_json(text)
    except ValueError:
        return text
    if isinstance(value, str) or ("string" in types and not _json_types(value) & types):
        return text
    return value


def _json_types(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, (int, float)):
        return {"number", "integer"} if isinstance(value, int) else {"number"}
    return {{dict: "object", list: "array", type(None): "null"}.get(type(value), "string")}


class Llama3JSON(_JSONCalls):
    """Llama 3.1 to 3.3: ``{"name": ..., "parameters": {...}}`` at the start of a line, ``<|python_tag|>`` optional.

    Writes every JSON argument. Several calls stand on lines of their own or are separated by ``;``.
    """

    name = "llama3_json"
    argument_keys = ("parameters", "arguments")

    def tool_call(self, name: str, arguments: dict[str, Any]) -> str:
        return self._json_call(name, arguments)

    def instructions(self, tools: Sequence[Schema]) -> str:
        return (
            f"You may call these functions, given as JSON schemas:\n\n{_schemas(tools)}\n\n"
            "To call one, answer with a JSON object on a line of its own and nothing else:\n"
            '{"name": function name, "parameters": {argument name: value}}\nDo not use variables.'
        )

    def result_text(self, content: str) -> str:
        return f"Result:\n{content}"

    def read_visible(self, text: str, tools: Sequence[Schema]) -> tuple[str, list[Call]]:
        rest: list[str] = []
        calls: list[Call] = []
        position = 0
        match = _LLAMA_START.search(text)
        while match:
            rest.append(text[position : match.start()])
            start = match.end()
            try:
                value, position = read_json(text, start)
            except ValueError as error:
                calls.append(Call("", None, f"the call is not valid JSON ({error})", text[match.start() :]))
                return "".join(rest), calls
            if isinstance(value, dict) and not value.keys().isdisjoint(("name", *self.argument_keys)):
                calls.append(self._read_object(value, text[start:position]))
                match = _LLAMA_NEXT.match(text, position) or _LLAMA_START.search(text, position)
            else:
                rest.append(text[match.start() : position])
                match = _LLAMA_START.search(text, position)
        return "".join([*rest, text[position:]]), calls


_LLAMA_START = re.compile(r'<\|python_tag\|>\s*|^[ \t]*(?=\{\s*")', re.MULTILINE)
_LLAMA_NEXT = re.compile(r"\s*;\s*(?=\{)")


class ReAct(_JSONCalls):
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

    def instructions(self, tools: Sequence[Schema]) -> str:
        return (
            f"You may use these tools, given as JSON schemas:\n\n{_schemas(tools)}\n\n"
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


class Fenced(_JSONCalls):
    """Fenced blocks over any chat template: a ```` ```python ```` block is a call of ``python(code)``, a
    ```` ```tool_call ```` or ```` ```json ```` block with ``{"name": ..., "arguments": {...}}`` a call of any tool.

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
        return f"```tool_call\n{self._json_call(name, arguments)}\n```"

    def instructions(self, tools: Sequence[Schema]) -> str:
        lines = [f"You may use these tools, given as JSON schemas:\n\n{_schemas(tools)}\n"]
        if any(_function(tool).get("name") == "python" for tool in tools):
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
            info = fence[2].strip()
            if opened is None:
                opened = fence
                rest.append(text[position : fence.start()])
                position = fence.start()
            elif not info and len(fence[1]) >= len(opened[1]):
                body = text[opened.end() + 1 : max(opened.end() + 1, fence.start() - 1)]
                kind, opened = opened[2].strip().lower(), None
                call = self._read_block(kind, body, tools)
                if call is None:
                    rest.append(text[position : fence.end()])
                else:
                    calls.append(call)
                position = fence.end()
        if opened is not None and self._read_block(kind := opened[2].strip().lower(), "", tools) is not None:
            name = "python" if kind in _PYTHON_FENCES else ""
            calls.append(Call(name, None, "the block is never closed with ```", text[opened.end() + 1 :]))
        else:
            rest.append(text[position:])
        return "".join(rest), calls

    def _read_block(self, kind: str, body: str, tools: Sequence[Schema]) -> Call | None:
        if kind in _PYTHON_FENCES:
            return Call("python", {"code": body}, None, body)
        return self.read_call(body, tools) if kind in ("tool_call", "json") else None


_FENCE = re.compile(r"^(`{3,})([^\n`]*)$", re.MULTILINE)
_PYTHON_FENCES = ("python", "py", "python3")


def _schemas(tools: Sequence[Schema]) -> str:
    return "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)


DIALECTS: dict[str, type[Dialect]] = {dialect.name: dialect for dialect in (Hermes, QwenXML, Llama3JSON, ReAct, Fenced)}
"""The families by name."""

_cache: dict[tuple[str | None, int, int, str], Dialect] = {}


def get_dialect(name: str | None, tokenizer: Any) -> Dialect:
    """The dialect of this name over a tokenizer (from `load_tokenizer`).

    None takes the family whose calls the chat template writes, and if it writes none that is known here, "hermes" with
    the instructions in the system message. Dialects are kept per tokenizer object.

    Raises:
        ValueError: an unknown name, or a chat template that cannot be used (see `Dialect`).
    """
    if name is not None and name not in DIALECTS:
        raise ValueError(f"unknown dialect {name!r}; there are {', '.join(DIALECTS)}, or None to recognise it")
    key = (name, id(tokenizer), len(tokenizer), chat_template(tokenizer))  # both change when the user changes them
    if key not in _cache:
        if name is None:
            natives = (d for d in DIALECTS if get_dialect(d, tokenizer).native)
            _cache[key] = get_dialect(next(natives, "hermes"), tokenizer)
        else:
            _cache[key] = DIALECTS[name](tokenizer)
    return _cache[key]
