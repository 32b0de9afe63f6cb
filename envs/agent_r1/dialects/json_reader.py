"""JSON as policies write it."""

from __future__ import annotations

import json
import math
from typing import Any

from agent_r1.tokenizers import replace_surrogates

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
