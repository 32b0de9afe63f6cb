"""Folding of texts for comparison, and the words of a text, in any script.

These spellings count as equal: upper and lower case, composed and decomposed accents, ligatures, full-width letters,
digits of any script, soft hyphens, and the vowel points of Arabic and Hebrew, which are mostly left out. Accents
stay: "resume" is not "résumé".

Words are two or more letters, digits and marks in a row. Scripts that put no spaces between words (Chinese, Japanese,
Thai, ...) and Korean, which joins particles to words, are read in pairs of neighbouring characters.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Iterator
from functools import cache
from typing import Any

_IGNORED = re.compile(
    "[\xad\u034f\u061c\u0640\u064b-\u0652\u0670\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u180b-\u180f\u200c-\u200f"
    "\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff\U000e0000-\U000e0fff]"
)
"""Soft hyphens and other invisible characters; vowel points and stretched lines of Arabic and Hebrew."""
_COMPATIBLE = re.compile(
    "[\u0132\u0133\u0149\u01c4-\u01cc\u01f1-\u01f3\u2160-\u217f\u3131-\u318e\ufb00-\ufdff\ufe70-\ufefc\uff10-\uffdc"
    "\U0001d400-\U0001d7ff]+"
)
"""Letters and digits in another form: ligatures, Roman numerals, full and half width, mathematical alphabets."""
_DIGIT = re.compile(r"[^\D0-9]")
_WORD = re.compile(r"\w\w+")

# Each of these is read by itself, so that a word in Chinese characters ends where Japanese endings begin.
_JOINED = (
    "\u3005\u3007\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff",  # Chinese characters
    "\u3041-\u3096\u309d-\u309f",  # Hiragana
    "\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff",  # Katakana
    "\u1100-\u11ff\ua960-\ua97c\uac00-\ud7fb",  # Korean
    "\u0e01-\u0e30\u0e32\u0e33\u0e40-\u0e46\u0e81-\u0eb0\u0eb2\u0eb3\u0ebd-\u0ec6\u0edc-\u0edf",  # Thai, Lao
    "\u1000-\u102a\u103f\u1050-\u1055\u106e-\u1070\u1075-\u1081\u1780-\u17b3\u17d7\u17dc",  # Burmese, Khmer
)
_STOP = frozenset("的是了") | frozenset(map(chr, range(0x3041, 0x3097)))
"""Characters that are no words by themselves: "of", "is", and the particles and endings of Japanese."""


def fold(text: str) -> str:
    """Fold a text for comparison: texts that look equal mostly become equal."""
    if text.isascii():
        return text.lower()
    text = _long_runs().sub(r"\1", _IGNORED.sub("", text))
    text = _COMPATIBLE.sub(lambda match: unicodedata.normalize("NFKC", match[0]), text)
    text = _DIGIT.sub(lambda match: str(unicodedata.decimal(match[0])), text)
    # Composed before, because case needs it ("\u0345" is a letter in capitals), and after, because case decomposes.
    text = unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold())
    return _IGNORED.sub("", text).replace("i\u0307", "i")  # the small form of the Turkish "İ"


def fold_title(title: str) -> str:
    """Fold a title for comparison, also without regard to spacing."""
    return " ".join(fold(title).split())


def words(text: str, inside: bool = False) -> tuple[list[str], list[str]]:
    """Return the words of a text, in order: plain words (letters and digits only), and all others.

    The others are pairs, words with marks, emojis, and the plain words directly beside these. With `inside` also the
    single characters of scripts that are read in pairs, so that a query of one character finds them.
    """
    text = fold(text)
    if text.isascii() or not _special().search(text):
        return _WORD.findall(text), []
    plain: list[str] = []
    others: list[str] = []
    for run in _run().finditer(text):
        if _special().search(run[0]):
            others += _others(run[0], inside)
        elif len(run[0]) > 1:
            plain.append(run[0])
    return plain, others


def all_words(text: str) -> list[str]:
    """Return all that Python's `\\w\\w+` finds. Their number is the length of a text."""
    return _WORD.findall(fold(text))


def only_letter(text: str) -> str | None:
    """Return the letter or digit, folded, of a text that is nothing else: "Q" is a title. None for other texts."""
    text = fold(text).strip()
    return text if len(text) == 1 and text.isalnum() else None


def letters(text: str) -> list[str]:
    """Return single letters and digits, folded, except initials ("F.") and letters that an apostrophe cuts off."""
    return re.findall(r"(?<![\w'’.])\w(?![\w'’.])", fold(text))


def _others(run: str, inside: bool) -> Iterator[str]:
    for match in _pattern().finditer(run):
        word = match[0]
        if match.lastindex is None:
            if len(word) > 1 or not word.isalnum():  # an emoji is a word, a letter is none
                yield word
            continue
        units = [sys.intern(unit) for unit in _unit().findall(word)]
        for start, end in _pieces(units):
            if end - start == 1:
                yield units[start]
                continue
            if inside:
                yield from units[start:end]
            for first, second in zip(units[start : end - 1], units[start + 1 : end], strict=True):
                yield sys.intern(first + second)


def _pieces(units: list[str]) -> Iterator[tuple[int, int]]:
    """Yield start and end of the pieces between Chinese stop words; a piece is no stop word by itself."""
    start = 0
    for place in range(len(units) + 1):
        if place == len(units) or units[place] in "的是了":
            if place - start > 1 or (place - start == 1 and units[start] not in _STOP):
                yield start, place
            start = place + 1


@cache
def _marks() -> str:
    """Return all combining marks that are part of a letter, for a character class. Python's `\\w` leaves them out."""
    ranges: list[list[int]] = []
    for code in (*range(0x300, 0x20000), *range(0xE0100, 0xE01F0)):
        if unicodedata.category(chr(code)) in ("Mn", "Mc"):
            if ranges and ranges[-1][1] == code - 1:
                ranges[-1][1] = code
            else:
                ranges.append([code, code])
    return "".join(f"{chr(first)}-{chr(last)}" for first, last in ranges)


@cache
def _long_runs() -> Any:
    """Compile the pattern of more marks on a letter than any script writes. Composing them takes quadratic time.
    Unicode's stream-safe form ends at 30, too."""
    return re.compile(f"([{_marks()}]{{30}})[{_marks()}]+")


_EMOJI = "\U0001f000-\U0001faff\u2600-\u27bf"


@cache
def _run() -> Any:
    """Compile the pattern of a run: letters, digits and marks in a row, or an emoji."""
    return re.compile(f"[\\w{_marks()}]+|[{_EMOJI}]")


@cache
def _special() -> Any:
    """Compile the pattern of a character that plain words do not have."""
    return re.compile(f"[{''.join(_JOINED)}{_marks()}{_EMOJI}]")


@cache
def _pattern() -> Any:
    """Compile the pattern of the parts of a run: pieces of a script read in pairs (groups), other words, emojis."""
    marks = _marks()
    joined = "|".join(f"((?:[{script}][{marks}]*)+)" for script in _JOINED)
    return re.compile(f"{joined}|(?:[^\\W{''.join(_JOINED)}][{marks}]*)+|[{_EMOJI}]")


@cache
def _unit() -> Any:
    return re.compile(f".[{_marks()}]*", re.DOTALL)
