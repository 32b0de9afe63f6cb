"""The shared part of all dialects: prompts, bridges, thinking, and the reading of a span up to its calls."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

from agent_r1.dialects.calls import Call, Schema, Turn, fit_arguments, function_of, read_arguments
from agent_r1.dialects.codec import RESERVED, SPLIT
from agent_r1.dialects.template import PROBE_TOOL, ChatTemplate, template_message
from agent_r1.rewards import ANSWER
from agent_r1.text.tokenizers import render_chat

# Private-use characters for tags, once recognised; see `RESERVED`.
_THINK, _UNTHINK, _CALL, _UNCALL = "\U0010f8a1", "\U0010f8a2", "\U0010f8a3", "\U0010f8a4"
_TAG_MARKS = (_THINK, _UNTHINK, _CALL, _UNCALL)
_MARK = re.compile("[" + "".join(_TAG_MARKS) + "]|</?answer>")
_HIDDEN = re.compile("\U0010f8a5(\\d+);")
MOST_READINGS = 8
"""The maximum number of readings of a turn for calls that contain answers; each reading may find only one more."""
HIDDEN_ANSWER = "\U0010f8a5"  # an answer, while the text around it is searched for calls
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_STOP_NAMES = ("<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")


class Dialect(ChatTemplate):
    """The notation of a model family, over one tokenizer. Use `get_dialect`; subclasses are the families.

    Args:
        tokenizer: see `agent_r1.text.tokenizers.load_tokenizer`.

    Raises:
        ValueError: the chat template cannot be used: it drops or repeats the assistant's text or the tools' results, or
            does not end an assistant's turn with one control token.
    """

    name: ClassVar[str] = ""
    call_tags: ClassVar[tuple[str, str] | None] = None
    """The tags around a tool call, if the family has them."""
    think_tags: ClassVar[tuple[str, str]] = ("<think>", "</think>")

    stop_token_ids: list[int]
    """The tokens that end a turn, the family's usual one first."""
    starts_thinking: bool = False
    """True if the prompt opens the policy's thinking, so that a span starts inside it."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        controls = self.codec.controls
        stops = [self.end_of_turn, getattr(tokenizer, "eos_token", None) or self.end_of_turn, *_STOP_NAMES]
        self.stop_token_ids = list(dict.fromkeys(controls[s] for s in stops if s in controls))
        self._stop_ids = frozenset(self.stop_token_ids)

        tags = [*self.think_tags, *(self.call_tags or ())]
        self._tag_ids = [(tag, mark, controls.get(tag)) for tag, mark in zip(tags, _TAG_MARKS, strict=False)]
        self._written = {ord(mark): tag for tag, mark, _ in self._tag_ids}
        self._call_texts = re.compile("|".join(map(re.escape, sorted({*controls, *tags}, key=len, reverse=True))))

        self.native = self._is_native()
        self._system_role = self._accepts_system_role()
        generation_prompt = self._frame("user", 1).chunks[-1]
        thinking, answering = (generation_prompt.rfind(tag) for tag in self.think_tags)
        self.starts_thinking = thinking > answering

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.tokenizer!r:.60})"

    def __reduce__(self) -> tuple[Any, ...]:
        from agent_r1.dialects import get_dialect

        return get_dialect, (self.name, self.tokenizer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Dialect:
        return self  # only caches change

    # ---------------------------------------------------------------------------------------------- writing

    def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[Schema] = ()) -> list[int]:
        """Render the prompt: the conversation, the tools' schemas and the start of the policy's turn.

        Args:
            messages: chat messages in the form of chat APIs or chat templates. All strings in them are plain text.
            tools: schemas of the tools; explained in the system message if the chat template has no tools.

        Returns:
            The token ids.

        Raises:
            ValueError: the chat template rejects the conversation.
        """
        ids = self.codec.encode(self._render_guarded(messages, tools, self.codec.guard))
        if any(self.codec.touches_edge(message.get("content")) for message in messages):
            # A content may have completed a control token that the text beside it began ("<|im_" + "end|>").
            safe = self.codec.encode(self._render_guarded(messages, tools, self.codec.guard_edges))
            if self.codec.controls_in(ids) != self.codec.controls_in(safe):
                return safe
        return ids

    def bridge(self, closed: bool, results: Sequence[tuple[str, str]]) -> list[int]:
        """Return the tokens after a sampled span: the tools' results and the start of the next turn.

        Args:
            closed: True if the span ended with a stop token. Otherwise the end of turn comes first.
            results: ``(tool name, content)`` in call order.

        Returns:
            The token ids; they belong to the environment, never to the policy.
        """
        values = [text for pair in results for text in pair]
        return self.close() * (not closed) + self._fill("tool", len(results), values)

    def hint(self, closed: bool, text: str) -> list[int]:
        """Return the same as `bridge`, with a user's message instead of tool results."""
        return self.close() * (not closed) + self._fill("user", 1, ["", text])

    def close(self) -> list[int]:
        """Return the tokens that end a turn which the policy left open."""
        return self.stop_token_ids[:1]

    def tool_call(self, name: str, arguments: dict[str, Any]) -> str:
        """Write one call as text: ``parse(encode(tool_call(name, arguments) + end_of_turn))`` reads it back.

        Raises:
            ValueError: the family cannot write these arguments (its docstring says which).
        """
        raise NotImplementedError

    def broken_call(self, name: str, arguments: str) -> str:
        """Write a call whose arguments are not a JSON object, as a chat API may return. `parse` finds it malformed."""
        opened, closed = self.call_tags or ("", "")
        return f"{opened}{self.spell(f'{name} {arguments}')}{closed}"

    def write_turn(self, content: str = "", calls: Iterable[tuple[str, dict[str, Any] | str]] = ()) -> str:
        """Write a turn as text, without its end: its content, then its calls, each on separate lines.

        ``parse(encode(write_turn(content, calls) + end_of_turn))`` reads back the calls, and a content without tags.

        Args:
            content: the visible text; its tags are the policy's.
            calls: names and arguments; a text that is not a JSON object is written as a `broken_call`.

        Raises:
            ValueError: the family cannot write these arguments (see `tool_call`).
        """
        texts = []
        for name, given in calls:
            arguments = read_arguments(given)
            texts.append(self.broken_call(name, str(given)) if arguments is None else self.tool_call(name, arguments))
        thought = f"{self.think_tags[1]}\n\n" if self._is_in_thought(content) else ""
        return thought + _lines(content, texts)

    def spoken(self, text: str) -> str:
        """Adapt a prepared turn: if the template has opened a thought before it, the text closes or continues it."""
        if self._is_in_thought(text):
            return f"{self.think_tags[1]}\n\n{text}"
        return text.removeprefix(self.think_tags[0]) if self.starts_thinking else text

    def _is_in_thought(self, text: str) -> bool:
        """Return whether the text would be in a thought that the template has opened, and never close it."""
        return self.starts_thinking and self.think_tags[1] not in text

    def instructions(self, tools: Sequence[Schema]) -> str:
        """Return instructions for calling the tools, for a chat template without them."""
        raise NotImplementedError

    def result_messages(self, results: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
        """Return tool results as messages for the chat template."""
        if self.native:
            return [
                {"role": "tool", "name": name, "content": content, "tool_call_id": f"{i:09d}"}
                for i, (name, content) in enumerate(results)
            ]
        return [{"role": "user", "content": "\n".join(self.result_text(content) for _, content in results)}]

    def result_text(self, content: str) -> str:
        """Format one tool result inside a user's message, for a chat template without a tool role."""
        return f"<tool_response>\n{content}\n</tool_response>"

    def is_plain(self, text: str) -> bool:
        """Return whether a call can hold a text as it is: no tags, no control tokens, unchanged by the tokenizer."""
        if self._call_texts.search(text) or RESERVED.search(text):
            return False
        ids = self.codec.encode_text(text)
        return not self.codec.controls_in(ids) and self.codec.decode(ids) == text

    # ---------------------------------------------------------------------------------------------- reading

    def parse(self, span: Sequence[int], tools: Sequence[Schema] = ()) -> Turn:
        """Read a sampled span up to its first stop token. Never raises on ids of the vocabulary.

        Text in ``<think>...</think>`` and in ``<answer>...</answer>`` is not searched for calls; an open ``<think>``
        hides everything after it.

        Args:
            span: token ids, a sequence or a 1-D integer array.
            tools: the tools' schemas, for families that write arguments without types (`QwenXML`).
        """
        raw, text = self._read(span)
        visible: list[str] = []
        thoughts: list[str] = []
        calls: list[Call] = []
        for kind, piece, closed in self._regions(text):
            if kind != "call":
                (visible if kind == "text" else thoughts).append(piece)
                continue
            piece = piece.translate(self._written)
            call = self.read_call(piece.strip(), tools)
            if not closed:
                call = Call(call.name, None, "the call is never closed", piece, closed=False)
            calls.append(call)
        content, more = self._read_around_answers("".join(visible).translate(self._written), tools)
        calls += more
        for call in calls:
            fit_arguments(call, tools)
        thought = "\n".join(map(str.strip, thoughts)).translate(self._written).strip()
        return Turn(content.strip(), calls, raw, thought)

    def read_call(self, text: str, tools: Sequence[Schema]) -> Call:
        """Read the text between the call tags."""
        raise NotImplementedError

    def read_visible(self, text: str, tools: Sequence[Schema]) -> tuple[str, list[Call]]:
        """Read calls that are written as plain text. Return the rest of the text, and the calls."""
        return text, []

    def _read_around_answers(self, text: str, tools: Sequence[Schema]) -> tuple[str, list[Call]]:
        """Run `read_visible` with a mark instead of each answer, so that no call is read inside an answer.

        An answer inside a call, for example in a program's string, is part of the call. The text is then read again
        with this answer restored.
        """
        answers = [answer[0] for answer in ANSWER.finditer(text)]
        between = ANSWER.split(text)[::2]
        inside: set[int] = set()  # numbers of the answers inside a call
        for reading in range(MOST_READINGS):
            shown = [answer if i in inside else f"{HIDDEN_ANSWER}{i};" for i, answer in enumerate(answers)]
            pairs = itertools.zip_longest(between, shown, fillvalue="")
            rest, calls = self.read_visible("".join(itertools.chain.from_iterable(pairs)), tools)
            hidden = {int(i) for call in calls for i in _HIDDEN.findall(call.text)}
            if not hidden or reading == MOST_READINGS - 1:
                break
            inside |= hidden
        if hidden:
            problem = "it has parts of too many answers in it"
            calls = [Call("", None, problem, c.text) if _HIDDEN.search(c.text) else c for c in calls]
        return _HIDDEN.sub(lambda mark: answers[int(mark[1])], rest), calls

    def _read(self, span: Any) -> tuple[str, str]:
        """Return the text of a span up to its stop token: as it is, and with each tag as one private character.

        If a tag is a token of the vocabulary, only that token counts, not its letters.
        """
        ids: list[int] = span.tolist() if hasattr(span, "tolist") else list(span)
        stop = next((i for i, token in enumerate(ids) if token in self._stop_ids), len(ids))
        del ids[stop:]
        raw = text = self.codec.decode(ids)
        if not text.isascii():
            text = RESERVED.sub("\ufffd", text)
        if any(token is not None and text.count(tag) != ids.count(token) for tag, _, token in self._tag_ids):
            return raw, self._read_exactly(ids)
        for tag, mark, _ in self._tag_ids:
            text = text.replace(tag, mark)
        return raw, text

    def _read_exactly(self, ids: list[int]) -> str:
        """Return the text with tags as private characters, for a span that also spells some tag with letters."""
        marks = {token: mark for _, mark, token in self._tag_ids if token is not None}
        pieces: list[str] = []
        start = 0
        for i, token in enumerate([*ids, -1]):
            if token in marks or token == -1:
                piece = RESERVED.sub("\ufffd", self.codec.decode(ids[start:i]))
                for tag, mark, tag_id in self._tag_ids:
                    if tag_id is None:
                        piece = piece.replace(tag, mark)
                pieces += piece, marks.get(token, "")
                start = i + 1
        return "".join(pieces)

    def _regions(self, text: str) -> Iterator[tuple[str, str, bool]]:
        """Cut a marked text into ``(kind, text, closed)``. The kind is text, call or thought."""
        start, thinking, calling, answering = 0, self.starts_thinking, False, False
        marks = list(_MARK.finditer(text))
        for match, next_tag in zip(marks, _next_answer_tags([match[0] for match in marks]), strict=True):
            mark = match[0]
            if thinking:
                if mark == _UNTHINK:
                    yield "thought", text[start : match.start()], True
                    thinking, start = False, match.end()
            elif calling:
                if mark in (_CALL, _UNCALL):  # a call that opens inside a call: the outer one was never closed
                    yield "call", text[start : match.start()], mark == _UNCALL
                    calling, start = mark == _CALL, match.end()
            elif len(mark) > 1:
                answering = mark == "<answer>" and next_tag == "</answer>"
            elif mark == _THINK or (mark == _CALL and not answering):
                yield "text", text[start : match.start()], True
                thinking, calling, start = mark == _THINK, mark == _CALL, match.end()
        yield "thought" if thinking else "call" if calling else "text", text[start:], False

    def _json(self, value: Any) -> str:
        """Write JSON on one line, without tags and control tokens, which no tokenizer changes."""
        text = self._escape(json.dumps(value, ensure_ascii=False, allow_nan=False))
        return text if self.is_plain(text) else self._escape(json.dumps(value, allow_nan=False))

    def spell(self, text: str) -> str:
        """Return the text on one line, with a space inside every tag and control token, which disables it."""
        return self._call_texts.sub(lambda tag: f"{tag[0][0]} {tag[0][1:]}", " ".join(text.split()))

    def _escape(self, text: str) -> str:
        """Write the first character of every tag and control token inside JSON strings as ``\\uXXXX``."""
        if not self._call_texts.search(text):
            return text

        def escape(token: re.Match[str]) -> str:
            first = json.dumps(token[0][0])[1:-1]
            return (first if len(first) > 1 else f"\\u{ord(first):04x}") + token[0][1:]

        return _JSON_STRING.sub(lambda string: self._call_texts.sub(escape, string[0]), text)

    def _render_guarded(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Schema], guard: Callable[[str], str]
    ) -> str:
        """Render the prompt as text; ``guard`` protects message contents, whose edges touch the template's text."""
        guarded = []
        for message in map(template_message, messages):
            strings = {key: map_strings(value, self.codec.guard) for key, value in message.items()}
            if isinstance(message.get("content"), str):
                strings["content"] = guard(message["content"])
            guarded.append({**strings, "role": message["role"]})
        schemas = [map_strings(tool, self.codec.guard) for tool in tools]
        if not self.native:
            guarded = self._without_tool_roles(guarded)
            text = self.instructions(schemas) if schemas else ""
            guarded, schemas = self.with_instructions(guarded, text), []
        return render_chat(self.tokenizer, guarded, schemas, add_generation_prompt=True)

    def _without_tool_roles(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the conversation for a chat template without tools: calls and results as text."""
        plain: list[dict[str, Any]] = []
        for is_tool, group in itertools.groupby(messages, key=lambda m: m["role"] == "tool"):
            if is_tool:
                plain += self.result_messages([(m.get("name", ""), m["content"]) for m in group])
                continue
            for message in group:
                functions = [function_of(call) for call in message.get("tool_calls") or ()]
                texts = [self.tool_call(f["name"], map_strings(f["arguments"], _uncut)) for f in functions]
                content = message.get("content") or ""
                plain.append({"role": message["role"], "content": _lines(content, texts)})
        return plain

    def with_instructions(self, messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
        """Return the conversation with this text in the system message, or in the user's if the family has none."""
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

    def _is_native(self) -> bool:
        """Return whether the chat template explains tools, and writes calls that this family's parser fully reads."""
        call = {"type": "function", "id": "0" * 9, "function": {"name": "probe_tool", "arguments": {"text": "a b"}}}
        user = {"role": "user", "content": "Hello."}
        assistant = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            before = render_chat(self.tokenizer, [user], [PROBE_TOOL])
            opened = render_chat(self.tokenizer, [user], [PROBE_TOOL], True)
            after = render_chat(self.tokenizer, [user, assistant], [PROBE_TOOL])
        except ValueError:
            return False
        if "probe_tool" not in before or not (opened.startswith(before) and after.startswith(before)):
            return False
        header = self.parse(self.codec.encode_text(opened[len(before) :]))
        turn = self.parse(self.codec.encode_text(after[len(before) :].rpartition(self.end_of_turn)[0]), [PROBE_TOOL])
        calls = [(call.name, call.arguments) for call in turn.calls]
        return calls == [("probe_tool", {"text": "a b"})] and turn.content == header.content


def _next_answer_tags(marks: list[str]) -> list[str]:
    """Return the next answer tag after each mark outside calls. Tags in a thought do not count."""
    tags: list[str] = []
    following = behind_thought = ""  # the next tag from here on, and from the next end of a thought on
    for mark in reversed(marks):
        tags.append(following)
        if mark == _UNTHINK:
            behind_thought = following
        elif mark == _THINK:
            following = behind_thought
        elif len(mark) > 1:
            following = mark
    return tags[::-1]


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return the value with every string in it changed, keys of dicts included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {map_strings(key, change): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_strings(item, change) for item in value]
    return value


def _lines(content: str, calls: list[str]) -> str:
    """Join the content of a turn and its calls. Every family reads a call on separate lines."""
    return "\n".join([content] * bool(content) + calls)


def _uncut(text: str) -> str:
    return text.replace(SPLIT, "")


def schema_lines(tools: Sequence[Schema]) -> str:
    """Format the tools' schemas as JSON, one a line, for instructions."""
    return "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
