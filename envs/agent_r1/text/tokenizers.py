"""Tokenizers: a byte-level one that needs no download, and the requirements for any other.

The environments need four things from a tokenizer: ``encode(text, add_special_tokens=False)``, ``decode(ids,
skip_special_tokens=False)``, ``len()`` and a chat template. `load_tokenizer` accepts a Hugging Face name or folder, any
object that has these four, or None for the `ByteTokenizer`.

`agent_r1.text.templates` renders the chat templates of all tokenizers, in a sandbox.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from agent_r1.arguments import ArgumentError
from agent_r1.text.templates import BYTE_CHAT_TEMPLATE, Message, chat_template, read_template, render_chat

__all__ = [
    "BYTE_CHAT_TEMPLATE",
    "CONTROL_TOKENS",
    "MARKUP_TOKENS",
    "ByteTokenizer",
    "Message",
    "Tokenizer",
    "added_tokens",
    "chat_template",
    "control_tokens",
    "fast_codec",
    "load_tokenizer",
    "render_chat",
    "replace_surrogates",
    "utf8",
]


@runtime_checkable
class Tokenizer(Protocol):
    """The interface of a tokenizer; Hugging Face tokenizers have it."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, ids: Any, *, skip_special_tokens: bool = ...) -> str: ...

    def __len__(self) -> int: ...


# --------------------------------------------------------------------------------------------------------------------
# The built-in tokenizer

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Tokens that are part of the visible text, as in Qwen's vocabulary: they are not hidden as special tokens."""


class ByteTokenizer:
    """One token per UTF-8 byte (id = byte value), and one per control token of the ChatML family.

    It needs no files, can write every text and can read every id sequence. `encode` parses control tokens in the text,
    as Hugging Face tokenizers do.

    Args:
        tokens: The control tokens; the first has id 256.
        chat_template: A Jinja chat template that uses them.
        eos_token: The token that ends a turn.
        pad_token: The token that fills batches.
        bos_token: The token that begins a conversation, for chat templates that need it.

    Raises:
        ValueError: a token occurs twice, or a role names an unknown token.

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
            raise ValueError(f"a control token occurs twice: {self._tokens}")
        self.chat_template = chat_template
        self.special_tokens_map = {"eos_token": eos_token, "pad_token": pad_token}
        if bos_token is not None:
            self.special_tokens_map["bos_token"] = bos_token
        for role, token in self.special_tokens_map.items():
            if token not in self._ids:
                raise ValueError(f"{role} {token!r} is not one of the control tokens {self._tokens}")
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
        """Return the control tokens and their ids."""
        return dict(self._ids)

    def is_special(self, token: str) -> bool:
        """Return whether ``skip_special_tokens`` hides this control token."""
        return token not in MARKUP_TOKENS

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text. ``add_special_tokens`` has no effect, because there is nothing to add.

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
        """Return the text of ids (a sequence or array of integers). Bytes that are not UTF-8 become U+FFFD.

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
        """Render the conversation as text with the chat template."""
        return render_chat(self, messages, tools, add_generation_prompt)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the same vocabulary as a Hugging Face tokenizer folder (tokenizer.json, tokenizer_config.json).

        It is for programs that need a folder: inference servers, model uploads. The ids are the same.
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
    """Encode as UTF-8, with lone surrogates as U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return replace_surrogates(text).encode()


def replace_surrogates(text: str) -> str:
    """Replace every lone surrogate by U+FFFD, so that the text can be encoded."""
    return _SURROGATE.sub("\ufffd", text)


_SURROGATE = re.compile("[\ud800-\udfff]")


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable character for each byte, mapped to the byte."""
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


def load_tokenizer(tokenizer: Any = None, chat_template_file: str | os.PathLike[str] | None = None) -> Tokenizer:
    """Load a tokenizer from a name, a folder, an object or None.

    Args:
        tokenizer: None: the shared `ByteTokenizer`. A str or path: ``AutoTokenizer.from_pretrained``, never with
            remote code; cached, so that the environments of a vector share it. Anything else: checked and returned.
        chat_template_file: a Jinja file whose text replaces the chat template of a tokenizer with a name or folder.
            The tokenizer without the file's template stays unchanged.

    Raises:
        ImportError: transformers is not installed and a name or folder was given.
        FileNotFoundError: a folder without tokenizer files, or a name that cannot be loaded.
        ArgumentError: an object that is not a tokenizer; a tokenizer without a chat template; a template's file that
            cannot be read, or is given with None or an object.
        ValueError: a folder that is damaged, larger than any tokenizer, or made to expand short text enormously.
    """
    template = None if chat_template_file is None else read_template(chat_template_file)
    if isinstance(tokenizer, (str, os.PathLike)):
        name = os.fspath(tokenizer)
        return _from_pretrained(os.path.realpath(name) if os.path.isdir(name) else name, template)
    if template is not None:
        owner, remedy = "this tokenizer", "set the tokenizer's own chat_template instead"
        if tokenizer is None or isinstance(tokenizer, ByteTokenizer):
            owner, remedy = "the byte tokenizer", "leave the file out, or name another tokenizer"
        raise ArgumentError(f"chat_template {chat_template_file}: {owner} has its own template; {remedy}")
    if tokenizer is None:
        return _byte_tokenizer()
    missing = [m for m in ("encode", "decode", "__len__") if not callable(getattr(tokenizer, m, None))]
    if missing or isinstance(tokenizer, type):
        raise ArgumentError(
            f"tokenizer must be None, a Hugging Face name, a folder or a tokenizer object; got {tokenizer!r:.200}"
            + (f", which has no {', '.join(missing)}" if missing else "")
        )
    chat_template(tokenizer)
    return tokenizer


class TokenizerNotFoundError(FileNotFoundError):
    """A missing tokenizer: nothing was found under its name or in its folder."""


class DamagedTokenizerError(ValueError):
    """A tokenizer that exists and cannot be read."""


@cache
def _from_pretrained(name: str, template: str | None) -> Tokenizer:
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "tokenizer.json").exists() and not (folder / "tokenizer_config.json").exists():
            names = sorted(p.name for p in folder.iterdir())[:8]
            raise TokenizerNotFoundError(
                f"{name} is not a tokenizer folder: it has neither tokenizer.json nor tokenizer_config.json (it has "
                f"{', '.join(names) or 'no files'}). Save one there with tokenizer.save_pretrained(folder)."
            )
        for file in _FILES:
            if (folder / file).is_file() and (folder / file).stat().st_size > MAX_FILE_BYTES:
                raise ValueError(f"the tokenizer folder {name} cannot be read: {file} is larger than any tokenizer's")
    elif name.startswith(("/", ".", "~")) or name.count("/") > 1:
        like = "a Hugging Face name looks like Qwen/Qwen2.5-3B-Instruct"
        raise TokenizerNotFoundError(f"there is no folder {name}; {like}")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ImportError(
            f"loading the tokenizer {name} needs transformers: pip install 'agent-r1[transformers]'"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (KeyboardInterrupt, SystemExit, ImportError):
        raise
    except BaseException as error:  # also Rust's panics, and any error of damaged files
        if isinstance(error, (OSError, ValueError)) and not folder.is_dir():
            first = (str(error) or repr(error)).splitlines()[0]
            raise TokenizerNotFoundError(
                f"the tokenizer {name} cannot be loaded ({first:.200}). Check the name and the network, log in if the "
                "model is gated (hf auth login), or give a folder with its tokenizer files."
            ) from error
        kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
        source = "tokenizer folder" if folder.is_dir() else "tokenizer"
        reason = " ".join(str(error).split())
        raise DamagedTokenizerError(f"the {source} {name} cannot be read: {kind}{reason}") from error
    _reject_growth(tokenizer)
    if template is not None:
        tokenizer.chat_template = template
    chat_template(tokenizer)
    return tokenizer


MAX_FILE_BYTES = 128 << 20
MAX_TOKEN_CHARS = 10_000
MAX_GROWTH = 1_000
_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json", "config.json"),
)


def _reject_growth(tokenizer: Any) -> None:
    """Raise ValueError if a few characters or tokens become a text that fills the memory."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        step = getattr(backend, part, None)
        if step is not None and _growth(json.loads(step.__getstate__())) > MAX_GROWTH:
            raise ValueError(f"the tokenizer's {part} turns one character into more than {MAX_GROWTH}")
    longest = max(map(len, tokenizer.get_vocab()), default=0)
    if longest > MAX_TOKEN_CHARS:
        raise ValueError(f"the tokenizer has a token of {longest} characters; the maximum is {MAX_TOKEN_CHARS}")


def _growth(step: Any) -> int:
    """Return the maximum number of characters that a tokenizer's step writes for one, as a product over its steps."""
    if not isinstance(step, dict):
        return 1
    growth = max([1, *(len(text) for key in ("content", "prepend") if isinstance(text := step.get(key), str))])
    for key in ("normalizers", "pretokenizers", "decoders"):
        for inner in step.get(key) or ():
            growth *= _growth(inner)
    return growth


def added_tokens(tokenizer: Any) -> dict[str, int]:
    """Return all added tokens, special or not, with their ids: strings that `encode` always turns into one token."""
    if callable(getattr(tokenizer, "get_added_vocab", None)):
        return dict(tokenizer.get_added_vocab())
    tokens = getattr(tokenizer, "all_special_tokens", [])
    return {token: tokenizer.encode(token, add_special_tokens=False)[0] for token in tokens}


def control_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the added tokens that text from tools and data must never become.

    Plain words and runs of white space are excluded: some vocabularies add them for compression only.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return added_tokens(tokenizer)
    details = getattr(tokenizer, "added_tokens_decoder", {})
    special = {str(token.content) for token in details.values() if token.special}
    special.update(getattr(tokenizer, "all_special_tokens", []))
    return {t: i for t, i in added_tokens(tokenizer).items() if t in special or not _WORD.fullmatch(t)}


_WORD = re.compile(r"[\w\s\u2581'.-]*")


def fast_codec(tokenizer: Any) -> tuple[Callable[[str], list[int]], Callable[[Sequence[int]], str]]:
    """Return ``(encode, decode)`` without special tokens added or skipped, and without Hugging Face's bookkeeping.

    That bookkeeping costs as much as the work itself on short texts, and is not safe in threads ("Already borrowed").
    Both raise ValueError if the tokenizer's own code panics, for example over a pattern in a damaged folder. Such a
    panic is not an Exception.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)

    @contextmanager
    def no_panic() -> Iterator[None]:
        try:
            yield
        except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
            raise ValueError(f"the tokenizer {name} cannot process this text: {error!s:.200}") from error

    def encode(text: str) -> list[int]:
        # Checked each time, because a call of the tokenizer with padding=True leaves its backend padding.
        if backend is None or backend.truncation is not None or backend.padding is not None:
            return list(tokenizer.encode(text, add_special_tokens=False))
        with no_panic():
            return list(backend.encode(text, add_special_tokens=False).ids)

    def decode(ids: Sequence[int]) -> str:
        with no_panic():
            return str((backend or tokenizer).decode(ids, skip_special_tokens=False))

    return encode, decode


def same_tokens(one: Tokenizer, other: Tokenizer) -> bool:
    """Return True if two tokenizers make the same tokens of a text, whatever their chat templates are."""
    if len(one) != len(other) or control_tokens(one) != control_tokens(other):
        return False
    return one.encode(PROBE, add_special_tokens=False) == other.encode(PROBE, add_special_tokens=False)


PROBE = "".join(map(chr, [*range(9, 0x3000), *range(0x4E00, 0x5200), *range(0x1F300, 0x1F600)])) + (
    "def f(x): return x ** 2  # The quick brown fox, 1,234.5 and \n\n    <tag attribute='value'>"
)
"""A text with letters of many scripts, for `same_tokens`."""


def fingerprint(tokenizer: Any) -> str:
    """Return a hash of a tokenizer: equal ones make the same tokens of a text, and the same prompt of messages."""
    template = getattr(tokenizer, "chat_template", None)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content = json.loads(backend.to_str())
        content.pop("padding", None), content.pop("truncation", None)
    else:
        content = [type(tokenizer).__name__, len(tokenizer), getattr(tokenizer, "get_added_vocab", dict)()]
    text = json.dumps([content, template], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
