"""Text that is encodable and bounded, or printable, as tools and environments pass it on."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Set
from enum import Enum
from typing import Any


def as_text(value: Any) -> str:
    """Return a value as text for the policy: text unchanged, anything else as JSON. Raises TypeError otherwise."""
    if isinstance(value, bytes | bytearray):
        return value.decode(errors="replace")
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain)
    except TypeError:  # keys have no `default`
        return json.dumps(_with_plain_keys(value), ensure_ascii=False, default=_plain)


def _with_plain_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_key(key): _with_plain_keys(inside) for key, inside in value.items()}
    return [_with_plain_keys(inside) for inside in value] if isinstance(value, list | tuple) else value


def _key(key: Any) -> Any:
    if key is None or isinstance(key, str | int | float):
        return key
    plain = _plain(key)
    return plain if isinstance(plain, str) else as_text(plain)


def _plain(value: Any) -> Any:
    """Convert a value that Python's json does not know."""
    if hasattr(value, "model_dump"):  # pydantic
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if hasattr(value, "to_dict") and hasattr(value, "columns"):  # a table of pandas: its rows
        return value.to_dict(orient="records")
    if hasattr(value, "tolist"):  # NumPy, torch
        return value.tolist()
    if hasattr(value, "isoformat"):  # dates and times
        return value.isoformat()
    if isinstance(value, bytes | bytearray):
        return value.decode(errors="replace")
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Set):  # in an order that is the same in every process
        return sorted(value, key=as_text)
    says: Any = type(value).__str__
    if says is not object.__str__:  # paths, decimals, exceptions ...: they say what they are
        return str(value)
    if isinstance(value, Iterable):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no JSON form; return text, or what json.dumps takes")


def clean_text(text: str, max_chars: int) -> str:
    """Return encodable text of at most `max_chars` characters. A marker at the end counts the cut characters."""
    if len(text) > max_chars:
        room = max_chars - len(f"... [{len(text)} characters cut]")
        text = f"{text[:room]}... [{len(text) - room} characters cut]" if room > 0 else text[:max_chars]
    return encodable(text)


def encodable(text: str) -> str:
    """Return the text with U+FFFD for lone surrogates (UTF-8 cannot encode them) and for NUL (it ends strings in C)."""
    if not text.isascii():
        text = _SURROGATES.sub("\ufffd", text)
    return text.replace("\0", "\ufffd") if "\0" in text else text


def printable(text: str) -> str:
    """Return the text with escapes such as \\x1b for characters that a terminal obeys, hides or cannot write.

    It obeys control characters (except tab and newline) and those that turn the direction of writing. It hides spaces
    without width, tags and line separators. It cannot write lone surrogates.
    """
    return _UNPRINTABLE.sub(_escaped, text)


class PrintableMessage(Exception):
    """A base of errors that quote what a stranger wrote: their message is `printable`."""

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message)))


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return ("\\x%02x" if code < 0x100 else "\\u%04x" if code < 0x10000 else "\\U%08x") % code


_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
_SURROGATES = re.compile("[\ud800-\udfff]")
