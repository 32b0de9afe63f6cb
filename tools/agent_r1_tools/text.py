"""Text that can be encoded and has a bounded length, or can be shown: what tools and environments hand on."""

from __future__ import annotations

import re


def clean_text(text: str, max_chars: int) -> str:
    """Text of at most `max_chars` characters that can be encoded; what was cut is counted in a marker at the end."""
    if len(text) > max_chars:
        room = max_chars - len(f"... [{len(text)} characters cut]")
        text = f"{text[:room]}... [{len(text) - room} characters cut]" if room > 0 else text[:max_chars]
    return encodable(text)


def encodable(text: str) -> str:
    """The text with U+FFFD for lone surrogates, which UTF-8 cannot encode, and for NUL, which ends strings in C."""
    if not text.isascii():
        text = _SURROGATES.sub("\ufffd", text)
    return text.replace("\0", "\ufffd") if "\0" in text else text


def printable(text: str) -> str:
    """Text with escapes such as \\x1b for what a terminal would obey: control characters (but tab and newline), and
    those that turn the direction of writing; and for lone surrogates, which it cannot write."""
    return _UNPRINTABLE.sub(lambda match: ("\\x%02x" if match[0] < "\u0100" else "\\u%04x") % ord(match[0]), text)


_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_SURROGATES = re.compile("[\ud800-\udfff]")
