r"""Detection of answers that are copied from the question of a mathematics problem.

Tokens are compared, without braces and mere notation: `\dfrac{1}{2}` is `1/2`, `1,200` is `1200.0`. The left side of an
equals sign does not count, unless the gold answer has one, too: `y = 2x + 3` is compared as a whole.
"""

from __future__ import annotations

import re
from functools import lru_cache

from agent_r1.judges.math_notation import (
    balanced,
    clean,
    is_in_brackets,
    one_space,
    one_way,
    places,
    powers_of_ten,
    tokens,
    tokens_at,
    unwrap,
)
from agent_r1.judges.math_text import APPROXIMATES, EQUALS, bare, has_no_noun, statements

MOST_PIECES = 4  # maximum number of pieces of an answer that are compared
MOST_PLACES = 200  # maximum number of positions of a token in a question, for questions with thousands of pluses
_NO_OPERATION = frozenset("()[]{}.,;:$%")


def stands_in(question: str, gold: str, answer: str) -> bool:
    """Return whether the answer is copied: it occurs in the question, and is not the gold answer."""
    if not question:
        return False
    value = _value(question, answer, gold)
    part = tokens(value)
    return bool(part) and _row(value) not in _gold(question, gold) and bool(places(_question(question), part))


def copied_pieces(question: str, gold: str, answer: str) -> list[str]:
    """Return the pieces of an answer that occur in the question and contain an operation, the longest first.

    If such a piece alone is right, the rest of the answer adds nothing: `99^2+99+1+0`. The gold answer does not count.
    """
    if not question:
        return []
    text = one_way(_value(question, answer, gold))
    asked, written, wanted = _question(question), tokens_at(text), _gold(question, gold)
    row = [token for token, _, _ in written]
    at: dict[str, list[int]] = {token: [] for token in row}
    for start, token in enumerate(asked):
        if token in at and len(at[token]) < MOST_PLACES:
            at[token].append(start)
    lengths: dict[str, int] = {}
    for first, token in enumerate(row):
        for start in at[token]:
            if first and start and row[first - 1] == asked[start - 1]:
                continue  # a part of a longer one
            length = 1
            for token_here, other in zip(row[first + 1 :], asked[start + 1 : start + len(row)], strict=False):
                if token_here != other:
                    break
                length += 1
            piece = _trimmed(written[first : first + length])
            whole = _text(text, piece) if len(piece) > 1 and _computes(piece) else ""
            if whole and balanced(whole) and _row(whole) not in wanted:
                lengths[whole] = length
    return sorted(lengths, key=lambda piece: -lengths[piece])[:MOST_PIECES]


def _trimmed(row: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Return the tokens without operators that lack an operand."""
    while row and row[-1][0] in set("+-*/^"):
        row = row[:-1]
    while row and row[0][0] in set("+*/^"):
        row = row[1:]
    return row


def _computes(row: list[tuple[str, int, int]]) -> bool:
    """Return whether a sequence of tokens contains an operation."""
    return any(not token[0].isalnum() and token not in _NO_OPERATION for token, _, _ in row)


def _text(text: str, row: list[tuple[str, int, int]]) -> str:
    """Return the text from the first token to the last, and the braces that close its open ones."""
    start, end = row[0][1], row[-1][2]
    while not balanced(text[start:end]) and (brace := re.match(r"\s*\}", text[end:])):
        end += brace.end()
    return re.sub(r"(?<= )(-?\d+/\d+)(?![\S])", r"(\1)", text[start:end])  # a \div 12/20 is not (a \div 12)/20


def _value(question: str, answer: str, gold: str) -> str:
    """Return the text of an answer's value; a whole equation if the gold answer is an equation with other sides."""
    gold = clean(powers_of_ten(unwrap(gold)))
    asked = question if has_no_noun(gold) else None
    parts = statements(clean(powers_of_ten(unwrap(answer))))
    if len(parts) > 1:
        return ",".join(bare(part, asked) for part in parts)
    exact = APPROXIMATES.split(parts[0])[0]
    sides, wanted = EQUALS.split(exact), EQUALS.split(gold)
    if len(wanted) == 1:
        return bare(sides[-1], asked)
    others = [side for side in sides if _row(side) not in map(_row, wanted)]
    return bare(others[0] if len(sides) == 2 and len(others) == 1 else exact if others else gold, asked)


@lru_cache(maxsize=1024)
def _gold(question: str, gold: str) -> list[list[str]]:
    """Return the tokens of the gold answer and of each of its sides: an answer equal to one of them is not a copy."""
    value = _value(question, gold, gold)
    return [_row(side) for side in (value, *EQUALS.split(value))]


def _row(text: str) -> list[str]:
    """Return the tokens of a text without brackets around the whole: `9, 11` equals the gold answer `(9, 11)`."""
    row = tokens(text)
    while is_in_brackets(row):
        row = row[1:-1]
    return row


@lru_cache(maxsize=1024)
def _question(question: str) -> tuple[str, ...]:
    return tuple(tokens(clean(powers_of_ten(one_space(question)))))
