"""Tokenizers: the byte-level one that needs no download, and what we ask of any other.

The environments only need four things from a tokenizer: ``encode(text, add_special_tokens=False)``, ``decode(ids,
skip_special_tokens=False)``, ``len()`` and a chat template. `load_tokenizer` accepts a Hugging Face name or folder, any
object that has them, or None for the `ByteTokenizer`.

Chat templates are always rendered here, by Jinja's immutable sandbox, for every kind of tokenizer: a template can read
no clock, so the same conversation gives the same tokens on every day.
"""

from __future__ import annotations

import datetime
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

Message = Mapping[str, Any]
"""One chat message: ``role``, ``content``, and for some roles ``tool_calls``, ``name``, ``tool_call_id``."""


@runtime_checkable
class Tokenizer(Protocol):
    """What every tokenizer must offer; Hugging Face tokenizers do."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, ids: Any, *, skip_special_tokens: bool = ...) -> str: ...

    def __len__(self) -> int: ...


# --------------------------------------------------------------------------------------------------------------------
# The tokenizer that is always there

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Tokens of their own that are part of the visible text, as in Qwen's vocabulary: not hidden as special tokens."""

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


class ByteTokenizer:
    """One token per UTF-8 byte (id = byte value), and one per control token of the ChatML family.

    It needs no files and gives up nothing: every text can be written, every id sequence can be read. `encode` parses
    control tokens in the text, as Hugging Face tokenizers do.

    Args:
        tokens: The control tokens; the first has id 256.
        chat_template: A Jinja chat template that uses them.
        eos_token: The one that ends a turn.
        pad_token: The one that fills batches.
        bos_token: The one that begins a conversation, for chat templates that ask for it.

    Raises:
        ValueError: a token that is there twice, or a role for a token that is not there.

    Immutable; it pickles as its arguments, and copies are the object itself.
    """

    name_or_path = "byte"

    def __init__(
        self,
        tokens: Sequence[str] = CONTROL_TOKENS + MARKUP_TOKENS,
        chat_template: str = BYTE_CHAT_TEMPLATE,
        eos_token: str = "<|im_end|>",
        pad_token: str = "<|endoftext|>",
        bos_token: str | None = None,
    ) -> None:
        self._arguments = (tuple(tokens), chat_template, eos_token, pad_token, bos_token)
        self._tokens = tuple(tokens)
        self._ids = {token: 256 + i for i, token in enumerate(tokens)}
        if len(self._ids) != len(self._tokens):
            raise ValueError(f"a control token is there twice: {self._tokens}")
        self.chat_template = chat_template
        self.special_tokens_map = {"eos_token": eos_token, "pad_token": pad_token}
        if bos_token is not None:
            self.special_tokens_map["bos_token"] = bos_token
        for role, token in self.special_tokens_map.items():
            if token not in self._ids:
                raise ValueError(f"{role} {token!r} is none of the control tokens {self._tokens}")
        self.eos_token, self.eos_token_id = eos_token, self._ids[eos_token]
        self.pad_token, self.pad_token_id = pad_token, self._ids[pad_token]
        self.bos_token, self.bos_token_id = bos_token, self._ids.get(bos_token or "")
        longest_first = sorted(self._tokens, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")").split

    @property
    def vocab_size(self) -> int:
        """The number of ids."""
        return len(self)

    def __len__(self) -> int:
        return 256 + len(self._tokens)

    def __repr__(self) -> str:
        return f"ByteTokenizer({len(self)} tokens)"

    def __reduce__(self) -> tuple[Any, ...]:
        if self is _byte_tokenizer():
            return load_tokenizer, (None,)
        return ByteTokenizer, self._arguments

    def __deepcopy__(self, memo: dict[int, Any]) -> ByteTokenizer:
        return self

    def get_added_vocab(self) -> dict[str, int]:
        """The control tokens and their ids."""
        return dict(self._ids)

    def is_special(self, token: str) -> bool:
        """Whether ``skip_special_tokens`` hides this control token."""
        return token not in MARKUP_TOKENS

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The ids of a text. There is nothing to add around it: ``add_special_tokens`` changes nothing.

        Lone surrogates, which no encoding can write, become U+FFFD.
        """
        ids: list[int] = []
        for i, piece in enumerate(self._split(text)):
            if i % 2:
                ids.append(self._ids[piece])
            elif piece:
                ids.extend(utf8(piece))
        return ids

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        """The text of ids (a sequence or array of integers); bytes that are no UTF-8 become U+FFFD.

        Raises:
            ValueError: an id outside ``range(len(self))``.
        """
        data = bytearray()
        for i in ids.tolist() if hasattr(ids, "tolist") else ids:
            if 0 <= i < 256:
                data.append(i)
            elif not 0 <= i < len(self):
                raise ValueError(f"token id {i} is outside the vocabulary of {len(self)} tokens")
            elif not (skip_special_tokens and self.is_special(self._tokens[i - 256])):
                data += self._tokens[i - 256].encode()
        return data.decode("utf-8", errors="replace")

    def render_chat(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, add_generation_prompt: bool
    ) -> str:
        """The conversation as text, by the chat template."""
        return render_chat(self, messages, tools, add_generation_prompt)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the same vocabulary as a Hugging Face tokenizer folder (tokenizer.json, tokenizer_config.json).

        For everything that insists on a folder: inference servers, model uploads. The ids are the same.
        """
        from tokenizers import AddedToken, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Backend

        backend = Backend(models.BPE(vocab=_byte_alphabet(), merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_tokens([AddedToken(t, normalized=False, special=self.is_special(t)) for t in self._tokens])
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        backend.save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 32768,
            "chat_template": self.chat_template,
            **self.special_tokens_map,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def utf8(text: str) -> bytes:
    """UTF-8, with lone surrogates as U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return replace_surrogates(text).encode()


def replace_surrogates(text: str) -> str:
    """The text with every lone surrogate replaced by U+FFFD, so that it can be encoded."""
    return _SURROGATE.sub("\ufffd", text)


_SURROGATE = re.compile("[\ud800-\udfff]")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, mapped to the byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    characters.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return characters


@cache
def _byte_tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


# --------------------------------------------------------------------------------------------------------------------
# Any other tokenizer


def load_tokenizer(tokenizer: Any = None) -> Tokenizer:
    """A tokenizer from a name, a folder, an object or nothing.

    Args:
        tokenizer: None: the shared `ByteTokenizer`. A str or path: ``AutoTokenizer.from_pretrained``, never with
            remote code; kept, so that the environments of a vector share it. Anything else: checked and returned.

    Raises:
        ImportError: transformers is not installed and a name or folder was given.
        FileNotFoundError: a folder without tokenizer files, or a name that cannot be had.
        TypeError: an object that is no tokenizer.
        ValueError: a tokenizer without a chat template.
    """
    if tokenizer is None:
        return _byte_tokenizer()
    if isinstance(tokenizer, (str, os.PathLike)):
        name = os.fspath(tokenizer)
        return _from_pretrained(os.path.realpath(name) if os.path.isdir(name) else name)
    missing = [m for m in ("encode", "decode", "__len__") if not callable(getattr(tokenizer, m, None))]
    if missing or isinstance(tokenizer, type):
        raise TypeError(
            f"tokenizer must be None, a Hugging Face name, a folder or a tokenizer object; got {tokenizer!r:.200}"
            + (f", which has no {', '.join(missing)}" if missing else "")
        )
    chat_template(tokenizer)
    return tokenizer


@cache
def _from_pretrained(name: str) -> Tokenizer:
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "tokenizer.json").exists() and not (folder / "tokenizer_config.json").exists():
            found = sorted(p.name for p in folder.iterdir())[:8]
            raise FileNotFoundError(
                f"{name} is no tokenizer folder: it has neither tokenizer.json nor tokenizer_config.json (it has "
                f"{', '.join(found) or 'no files'}). Save one there with tokenizer.save_pretrained(folder)."
            )
    elif name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise FileNotFoundError(f"there is no folder {name}; a Hugging Face name looks like Qwen/Qwen2.5-3B-Instruct")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ImportError(
            f"loading the tokenizer {name} needs transformers: pip install 'agent-r1[transformers]'"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        if folder.is_dir():
            raise ValueError(f"the tokenizer folder {name} cannot be read: {error}") from error
        raise FileNotFoundError(
            f"the tokenizer {name} cannot be loaded ({str(error).splitlines()[0]:.200}). Check the name and the "
            "network, log in if the model is gated (hf auth login), or give a folder with its tokenizer files."
        ) from error
    chat_template(tokenizer)
    return tokenizer


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
    """The conversation as text, by the tokenizer's chat template in Jinja's immutable sandbox.

    Raises:
        ValueError: the template refuses the conversation, or is no valid template.
    """
    template = chat_template(tokenizer, with_tools=bool(tools))
    try:
        return _compile(template).render(
            messages=[dict(message) for message in messages],
            tools=list(tools) if tools else None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **(getattr(tokenizer, "special_tokens_map", None) or {}),
        )
    except Exception as error:  # a template is foreign code: it may raise anything
        raise ValueError(f"the chat template refuses this conversation: {error or type(error).__name__}") from error


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


def added_tokens(tokenizer: Any) -> dict[str, int]:
    """All added tokens, special or not, with their ids: strings that `encode` makes one token wherever they stand."""
    if callable(getattr(tokenizer, "get_added_vocab", None)):
        return dict(tokenizer.get_added_vocab())
    tokens = getattr(tokenizer, "all_special_tokens", [])
    return {token: tokenizer.encode(token, add_special_tokens=False)[0] for token in tokens}


def control_tokens(tokenizer: Any) -> dict[str, int]:
    """The added tokens that text from tools and data must never become.

    These are all but plain words and runs of white space, which some vocabularies add for compression only.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return added_tokens(tokenizer)
    details = getattr(tokenizer, "added_tokens_decoder", {})
    special = {str(token.content) for token in details.values() if token.special}
    special.update(getattr(tokenizer, "all_special_tokens", []))
    return {t: i for t, i in added_tokens(tokenizer).items() if t in special or not _WORD.fullmatch(t)}


_WORD = re.compile(r"[\w\s\u2581'.-]*")


def fast_codec(tokenizer: Any) -> tuple[Callable[[str], list[int]], Callable[[Sequence[int]], str]]:
    """``(encode, decode)`` without special tokens added or skipped, past Hugging Face's per-call bookkeeping.

    That bookkeeping costs as much as the work itself on short texts, and is not safe in threads ("Already borrowed").
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)

    def encode(text: str) -> list[int]:
        # Asked each time, because a call of the tokenizer with padding=True leaves its backend padding.
        if backend is None or backend.truncation is not None or backend.padding is not None:
            return list(tokenizer.encode(text, add_special_tokens=False))
        return list(backend.encode(text, add_special_tokens=False).ids)

    def decode(ids: Sequence[int]) -> str:
        return str((backend or tokenizer).decode(ids, skip_special_tokens=False))

    return encode, decode
