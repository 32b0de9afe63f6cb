"""A reader of JSON as policies write it."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from agent_r1.text.tokenizers import replace_surrogates

MAX_DEPTH = 64
"""The deepest nesting of JSON that a policy may write."""


class JSONError(ValueError):
    """An error in JSON; the message is for the policy.

    Attributes:
        stopped: the position of the first character that cannot be read, or the length of the text.
    """

    def __init__(self, message: str, stopped: int) -> None:
        super().__init__(message)
        self.stopped = stopped


def read_json(text: str, start: int | None = None, python_words: bool = True) -> Any:
    """Read JSON that a policy wrote.

    It is more lenient than `json.loads` in two ways, because models write this and the meaning is clear. A string may
    contain line breaks, tabs and other control characters. True, False and None are true, false and null. It is
    stricter in another way: it rejects values that could not be written again, or that other readers read differently.

    Args:
        text: the JSON.
        start: read one value from here and return ``(value, end)``; None: the text is one value.
        python_words: read True, False and None.

    Raises:
        JSONError: with a message for the policy: no valid JSON, an object with a key twice, NaN, infinity, an integer
            of thousands of digits, half a surrogate pair, nesting deeper than 64.
    """
    first = _space(text, 0) if start is None else start
    try:
        value, end = _read(text, first, python_words)
        if start is None and (rest := _space(text, end)) < len(text):
            raise json.JSONDecodeError("Extra data", text, rest)
    except RecursionError:
        raise JSONError(f"nested deeper than {MAX_DEPTH}", len(text)) from None
    except json.JSONDecodeError as error:
        stopped = len(text) if error.msg.startswith("Unterminated string") else error.pos
        raise JSONError(f"{error.msg} at character {error.pos - (start or 0)}", stopped) from None
    except ValueError as error:
        message = "an integer has too many digits" if "digits" in str(error) else str(error)
        raise JSONError(message, _end_of_shape(text, first)) from None
    source = text[first:end]
    if source.count("[") + source.count("{") > MAX_DEPTH and is_too_deep(value):
        raise JSONError(f"nested deeper than {MAX_DEPTH}", end)
    if "\\u" in source and replace_surrogates(plain := json.dumps(value, ensure_ascii=False)) != plain:
        raise JSONError("half a surrogate pair (\\ud800 to \\udfff) is no character", end)
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


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_float=_finite, parse_constant=_no_constant, strict=False
)
_SHAPES = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str, strict=False)
_SPACES = re.compile(r"[ \t\n\r]*")
_WORDS: dict[str, bool | None] = {"True": True, "False": False, "None": None}
_WORD = re.compile(r"(?:True|False|None)\b")


def _read(text: str, start: int, python_words: bool) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        if not (python_words and _WORD.match(text, error.pos)):
            raise
    return _read_with_words(text, start, 0)


def _read_with_words(text: str, start: int, depth: int) -> tuple[Any, int]:
    """Read the value at `start`, which may contain True, False and None. This is slower than the decoder."""
    if word := _WORD.match(text, start):
        return _WORDS[word[0]], word.end()
    if text[start : start + 1] not in ("{", "["):
        return _DECODER.raw_decode(text, start)
    if depth > MAX_DEPTH:
        raise RecursionError

    def expect(mark: str, position: int) -> int:
        if not text.startswith(mark, position):
            raise json.JSONDecodeError(f"Expecting {mark!r} delimiter", text, position)
        return _space(text, position + 1)

    is_object = text[start] == "{"
    items: list[Any] = []
    position = _space(text, start + 1)
    while not text.startswith("}" if is_object else "]", position):
        if items:
            position = expect(",", position)
        if is_object:
            if not text.startswith('"', position):
                raise json.JSONDecodeError("Expecting property name enclosed in double quotes", text, position)
            key, position = _DECODER.raw_decode(text, position)
            position = expect(":", _space(text, position))
        value, position = _read_with_words(text, position, depth + 1)
        items.append((key, value) if is_object else value)
        position = _space(text, position)
    return (_unique(items) if is_object else items), position + 1


def _space(text: str, position: int) -> int:
    """Return the end of the white space that begins here."""
    return _SPACES.match(text, position).end()  # type: ignore[union-attr]


def _end_of_shape(text: str, start: int) -> int:
    """Return the end of a value with the shape of JSON, even if its numbers and keys are wrong."""
    try:
        return _SHAPES.raw_decode(text, start)[1]
    except (json.JSONDecodeError, RecursionError):
        return len(text)


def is_too_deep(value: Any) -> bool:
    """Return True if lists and objects are nested deeper than `MAX_DEPTH`."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for node in level
            if isinstance(node, (dict, list))
            for item in (node.values() if isinstance(node, dict) else node)
        ]
    return bool(level)
