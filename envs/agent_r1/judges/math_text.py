r"""The reading of an answer to a mathematics problem as text; `mathematics` computes its score.

An answer must be one expression as a whole, in known notation: everything in it is read, or nothing is. math-verify
ignores much that states a second value (`7\text{, 8, 9}`, `6 \equiv 7`, `7_2`). It adds adjacent numbers (`7 6` is 13).
If it cannot read all formulas, it takes the last one. So this module checks for these cases.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from agent_r1.judges.math_notation import (
    NUMBER,
    TEXT,
    TEXT_COMMAND,
    TOKEN,
    balanced,
    clean,
    has_number_e,
    one_space,
    places,
    powers_of_ten,
    products_with_ten,
    tokens,
)
from agent_r1.judges.math_nouns import LATIN, MOST_WORDS, NO_NOUNS, changes_number, is_noun

_LAST_TEXT = re.compile(
    r"(?<=[\d)}\]a-zA-Z!])\s*(?:(?:/|\\cdot|\\[ ,;])\s*)?" + TEXT.pattern + r"(?:\^[23]|\^\{[23]\})?\s*$"
)
_UNIT = re.compile(r"(?:[a-zA-Z°µ](?:\^[23])?|[\s~./()'-])*")
_NO_SYMBOLS = re.compile(r"\\mathbb\s*\{?[A-Z]\}?|\\(?:begin|end)\{[a-z]+\}|_\s*\{?\w+")
# Words that may be on the left of "= 7", besides letters such as x and AB.
_QUANTITIES = frozenset(
    "answer ans result value number total sum difference product quotient ratio remainder average mean median mode "
    "area perimeter circumference volume surface length width height depth radius diameter distance angle slope time "
    "speed rate age weight cost price profit change money amount probability max min maximum minimum gcd lcm "
    "sin cos tan log ln det".split()
)
_OPERATIONS = frozenset("sin cos tan log ln".split())
# Notation that math-verify reads and that has one meaning. The gold answer's notation is allowed, too.
_COMMANDS = frozenset(
    r"\frac \dfrac \tfrac \cfrac \sqrt \pi \infty \cdot \times \div \pm \cup \cap \circ \degree \binom \dbinom \tbinom "
    r"\le \leq \ge \geq \lt \gt \in \mathbb \emptyset \varnothing \sin \cos \tan \cot \sec \csc \arcsin \arccos "
    r"\arctan \log \ln \exp \lfloor \rfloor \lceil \rceil \{ \} \%".split()
)
# Words behind a number that are perhaps a noun: 12 books, 12 US dollars.
_WORDS = re.compile(rf"(?<=[\d)}}])\s+({LATIN}(?:[-'\s]\s*{LATIN})*)\s*$")
_GREEK = frozenset(r"\alpha \beta \gamma \delta \theta \lambda \mu \phi \varphi \omega \sigma \tau \rho".split())
_FUNCTIONS = frozenset("sqrt sin cos tan cot sec csc arcsin arccos arctan log ln exp pi".split())
_NAME_COMMANDS = frozenset(r"\angle \triangle \overline \vec \Delta \cap \cup \mid \ell \circ".split())
_QUANTITY = re.compile(rf"(?<![\\a-zA-Z])(?:{'|'.join(_QUANTITIES - _OPERATIONS)})(?![a-zA-Z])", re.IGNORECASE)
# x, AB, \angle ABC, f(6), y(6); but x(6), n(n + 1) are products.
_NAME = re.compile(
    r"(?:m\s*(?=\\angle))?(?:\\(?:angle|triangle|overline|vec|Delta)(?![a-zA-Z])\s*)*(?![xz]\s*\()"
    r"(?!y\s*\((?!\s*(?:x|-?\d+(?:\.\d+)?)\s*\)))"
    rf"\{{?\s*([A-Z](?:\s*[A-Z])*|[a-z]|(?:\\ell|{'|'.join(map(re.escape, _GREEK))})(?![a-zA-Z]))\s*\}}?\s*"
    r"(?:_\s*(?:\{[^{}]*\}|.)\s*)?(?:\((?![^()]*\1)[^()]*\))?"
)
_CHARACTERS = frozenset("+-*/^()[]{}|!<>.:,;_")
# Not between digits, also with a point or the comma of thousands.
_BLANK = re.compile(r" (?!(?<=\d )\.?\d|(?<=\d\. )\d|(?<=\d, )\d{3}|(?<=\d ), ?\d{3})")
_BASE = re.compile(r"(?<=[\d)}!])\s*_\s*\{?(\d+|.)\}?")
# In the brackets behind a quantity: area(ABC), gcd(6, 9).
_ARGUMENT = (
    r"(?:\\(?:angle|triangle|overline|vec)(?![a-zA-Z])\s*)?"
    rf"\{{?\s*(?:[A-Z](?:\s*[A-Z])*|[a-z]|-?(?:{NUMBER}))\s*\}}?"
)
_ARGUMENTS = re.compile(rf"(?:\(\s*{_ARGUMENT}(?:\s*,\s*{_ARGUMENT})*\s*\))?")
_PLAIN = re.compile(rf"{NUMBER}|[a-zA-Z]+")
EQUALS = re.compile(r"(?<![\\<>!=])=|\\in(?![a-zA-Z])")
APPROXIMATES = re.compile(r"\\approx(?![a-zA-Z])|≈|~=")
_CLOSED_AT_INFINITY = r"\[\s*[-+]?\s*\\infty|\\infty\s*\]"
_EDGE = "#"  # of a formula in a question


class Reading(NamedTuple):
    """The computations that an answer needs.

    Attributes:
        gold: the gold answer, without its unit.
        value: the value of the answer, without its unit.
        equal: pairs that the answer states to be equal (`\\sqrt{49} = 7`).
        rounded: pairs of a value and its rounded form in the answer (`\\frac{14}{3} \\approx 4.67`).
        members: start and end of each member of a point or interval in `value`; empty for anything else.
        changed: for each number in `value`, its start and end, and other numbers.
    """

    gold: str
    value: str
    equal: list[tuple[str, str]]
    rounded: list[tuple[str, str]]
    members: list[tuple[int, int]]
    changed: list[tuple[int, int, list[str]]]


def same_text(gold: str, answer: str) -> bool:
    """Return whether two unwrapped texts are equal, except for blanks and capitals."""
    return _plain_text(answer) == _plain_text(gold)


def is_words(gold: str) -> bool:
    r"""Return whether a gold answer is text (`\text{Evelyn}`, `(\text{E})`): then there is nothing to compute."""
    return bool(TEXT.search(gold)) and not TEXT.sub("", gold).strip("() ")


def same_words(gold: str, answer: str) -> bool:
    r"""Compare a gold answer of words like `same_text`, with or without parentheses: `\text{(C)}`, `C`."""
    return _plain_text(answer).strip("().") == _plain_text(gold).strip("().")


def read(gold: str, answer: str, question: str = "") -> Reading | None:
    """Read an unwrapped answer to a question; None if it is not one expression as a whole."""
    gold = products_with_ten(clean(powers_of_ten(gold)))
    answer = products_with_ten(clean(answer if has_number_e(gold) else powers_of_ten(answer, also_short=True)))
    if (whole := TEXT.fullmatch(answer)) and answer != gold:  # \mathbf{7}
        answer = whole[1]
    if not balanced(answer.replace("\\", "")) or not _texts_are_units(gold, answer):
        return None
    if not _same_notation(gold, answer):
        return None
    # If the gold answer is an equation, it is compared as a whole.
    compare_sides = not re.search(r"=|≈|≡|\\(?:in|equiv|approx)(?![a-zA-Z])", gold)
    asked = question if has_no_noun(gold) else None
    values: list[str] = []
    equal: list[tuple[str, str]] = []
    rounded: list[tuple[str, str]] = []
    for statement in statements(answer):
        exact, *approximate = map(str.strip, APPROXIMATES.split(statement))
        if compare_sides:
            *left, value = (bare(side, asked) for side in EQUALS.split(exact))
            if _is_name(value, question) and len(approximate) == 1 and not left:  # x \approx 7
                value = bare(approximate.pop(), asked)
            left = [side for side in left if not _is_name(side, question)]
        else:
            left, value = [], bare(exact)
            if approximate or len(EQUALS.findall(value)) > max(len(EQUALS.findall(s)) for s in statements(gold)):
                return None
        approximate = [bare(side, asked) for side in approximate]
        if not all(_is_known(piece, gold, not compare_sides) for piece in [*left, value]):
            return None
        if not all(re.fullmatch(rf"-?(?:{NUMBER})", side) for side in approximate):
            return None
        values.append(value)
        equal += [(side, value) for side in left]
        rounded += [(value, side.replace(",", "")) for side in approximate]
    value = ", ".join(values)
    return Reading(bare(gold), value, equal, rounded, _members(value), _changed(value))


def has_other_symbols(gold: str, value: str) -> bool:
    """Return whether a value has variables that the gold answer lacks: then it is wrong, and nothing is computed."""
    value = re.sub(r"(?<=[\d)}\s])[a-zA-Z\s.]*$", "", value)  # perhaps a unit
    return not _symbols(value) <= _symbols(gold)


# --- notation ---------------------------------------------------------------------------------------------------------


def has_no_noun(gold: str) -> bool:
    """Return whether a gold answer has numbers only: then a noun after a number of the answer does not matter."""
    return not _symbols(gold) and not TEXT.search(gold)


def bare(text: str, asked: str | None = None) -> str:
    r"""Remove currency, percent, unit and base from a value; with a question, which may be "", also a noun.

    Percent is read as in the official grader: `50\%` is 50 and not .5.
    """
    text = re.sub(r"^\s*(-?)\s*\\?[$€£]\s*", r"\1", text)
    text = re.sub(r"(?<=[\d)}])\s*(?:\\?%|percent|" + TEXT_COMMAND + r"\s*\{\s*(?:percent|\\?%)\s*\})\s*$", "", text)
    # math-verify would drop all from the first unit on: 7\text{ cm} or 6\text{ cm}.
    while (shorter := _LAST_TEXT.sub("", text)) != text:
        text = shorter
    if asked is not None and (words := _WORDS.search(text)) and is_noun(words[1], asked):
        text = text[: words.start()]
    return _BASE.sub("", text).strip()


def _plain_text(text: str) -> str:
    r"""Normalise answers that are words, `\text{Evelyn}`: drop `\text{}`, capitals, and blanks not between numbers.

    `7 1/2` is not `71/2`, and `1, 200` are two numbers.
    """
    text = re.sub(r"(?:(?<!\\)\\[ ,;]|\s)+", " ", re.sub(r"(?<!\\)\\!\s*", "", TEXT.sub(r"\1", text)))
    return _BLANK.sub("", text).lower()


def _texts_are_units(gold: str, answer: str) -> bool:
    r"""Return whether every `\text{}` of the answer is a unit, the gold answer's, the whole answer, or and/or."""
    known = {_plain_text(text) for text in TEXT.findall(gold)}
    rest = re.sub(r"\\text\s*\{\s*(?:and|or)\s*\}", "", answer)  # a comma, to math-verify
    texts = [text for text in TEXT.findall(rest) if _plain_text(text) not in known]
    if len(re.findall(TEXT_COMMAND, rest)) != len(TEXT.findall(rest)):  # nested, or without braces
        return False
    # 5\text{ cm}^2\text{ cm}, 5\text{ cm}^{10}
    if re.search(TEXT.pattern + r"\s*\^\s*(?!\{?[23](?!\d)\}?(?!\s*" + TEXT_COMMAND + "))", rest):
        return False
    if texts and _symbols(EQUALS.split(gold)[-1]):  # the unit of a letter may be another letter
        return False
    words = [word.lower() for text in texts for word in re.findall("[a-zA-Z]+", text)]
    joined = re.findall("[a-z]+", "".join(texts).lower())  # \text{o}\text{r}
    return (
        len(words) <= MOST_WORDS
        and not any(map(changes_number, [*words, *joined]))
        and all(_UNIT.fullmatch(text) for text in texts)
    )


def _same_notation(gold: str, answer: str) -> bool:
    r"""Return whether the answer has no `\equiv`, base (`7_8`) or `[-\infty` that the gold answer lacks.

    math-verify ignores them.
    """

    def bases(text: str) -> set[str]:
        return set(_BASE.findall(text))

    def count(pattern: str, text: str) -> int:
        return len(re.findall(pattern, text))

    few = all(count(pattern, answer) <= count(pattern, gold) for pattern in (r"\\equiv|≡", _CLOSED_AT_INFINITY))
    return few and bases(answer) <= (bases(gold) or {"10"})


def statements(answer: str) -> list[str]:
    """Split an answer at commas (and, or, semicolons) outside brackets that do not separate thousands."""
    parts, depth = [""], 0
    answer = re.sub(r"\\text\s*\{\s*(?:and|or)\s*\}|(?<![a-zA-Z])(?:and|or)(?![a-zA-Z])", ";", answer)
    for piece in re.split(r"([(\[{)\]};]|(?<!\\),(?!\d{3}(?!\d)))", answer):
        depth += (piece in ("(", "[", "{")) - (piece in (")", "]", "}"))
        if depth == 0 and piece in (",", ";"):
            parts.append("")
        else:
            parts[-1] += piece
    return parts


def _is_known(text: str, gold: str, relations: bool) -> bool:
    """Return whether all of a piece is known notation, without two adjacent numbers."""
    allowed = _COMMANDS | _GREEK | _CHARACTERS | set(TOKEN.findall(gold)) | ({"="} if relations else set())
    words = {token.lower() for token in TOKEN.findall(text) if token not in allowed}
    if not text or not all(map(_PLAIN.fullmatch, words)) or any(len(word) > 2 for word in words & NO_NOUNS):
        return False
    part = r"\s*(?:\{[^{}]*\}|\d|[a-zA-Z])"
    arguments = rf"\\(?:[dtc]?frac|[dt]?binom){part}{part}|\\log\s*_{part}|\\sqrt(?:\s*\[[^\]]*\])?{part}"
    while (shorter := re.sub(rf"\^{part}", " ", re.sub(arguments, "F", text))) != text:
        text = shorter
    return not re.search(r"\d[\s{}]+[\d.]", text)


def _symbols(text: str) -> set[str]:
    """Return the letters of a value that are not part of a function, number or set."""
    tokens = TOKEN.findall(_NO_SYMBOLS.sub(" ", TEXT.sub(" ", text)))
    words = [token for token in tokens if token.isalpha() and token not in _FUNCTIONS]
    greek = {token for token in tokens if token in _GREEK}
    return {letter for word in words for letter in word.lower() if letter not in "ei"} | greek


def _is_name(side: str, question: str) -> bool:
    r"""Return whether a side names the requested quantity: `x`, `f(6)`, `(x, y)`, `\angle ABC`, `\text{area}`.

    An expression of names (`x^2 + y^2`, `\sin A`) counts only if the question contains it, in any notation. An
    expression that begins with a sign or contains a root never counts: `-x = 7` states another x.
    """
    side = TEXT.sub(r"\1", side).strip()
    if re.fullmatch(r"\(\s*[a-zA-Z](?:\s*,\s*[a-zA-Z])*\s*\)", side):
        return True
    if not NO_NOUNS.isdisjoint(re.findall(r"(?<![\\a-z])[a-z]+", side.lower())):
        return False
    rest = _QUANTITY.sub("", side).strip()
    if rest != side and _ARGUMENTS.fullmatch(rest):
        return True
    rest = re.sub(r"^\|([^|]*[A-Z]\s*[A-Z]\s*\}?\s*)\|$", r"\1", rest)  # |AB|
    if name := _NAME.fullmatch(rest):
        return name[1].lower() not in NO_NOUNS
    if side.startswith("-") or not (_is_expression(side) or _is_expression(_one_form(side))):
        return False
    return _is_asked(side, question)


def _is_expression(side: str) -> bool:
    """Return whether a side consists of names, without numbers and roots."""
    side = re.sub(r"_(?:\{[^{}]*\}|.)|\([^()]*\)|\^\s*\{?[23]\}?", " ", side)
    commands = set(re.findall(r"\\[a-zA-Z]+", side))
    if not commands <= (_COMMANDS | _GREEK | _NAME_COMMANDS) - {r"\sqrt"}:
        return False
    side = re.sub(r"\\[a-zA-Z]+", " ", side)
    words = re.findall("[a-zA-Z]+", side)
    return (
        bool(words or commands & _GREEK)
        and bool(re.fullmatch(r"[a-zA-Z\s{}|+*/.-]*", side))
        and all(
            len(word) == 1 or word.lower() in _QUANTITIES or word.isupper() and word.lower() not in NO_NOUNS
            for word in words
        )
    )


def _is_asked(side: str, question: str) -> bool:
    """Return whether an expression occurs in the question as a whole, not as a part of another or of an equation."""
    asked, part = _asked(question), tokens(_one_form(side))

    def continues(place: int) -> bool:
        token = asked[place] if 0 <= place < len(asked) else ";"
        if len(token) == 1 and token.isalpha():  # a factor, or the article
            return asked[: max(place, 0)].count(_EDGE) % 2 == 1
        return token[0].isdigit() or token[0] == "\\" and token[1:].isalpha() or token in set("+-*/^_=<>()[]|!'")

    return any(not continues(start - 1) and not continues(start + len(part)) for start in places(asked, part))


@lru_cache(maxsize=1024)
def _asked(question: str) -> tuple[str, ...]:
    """Return the tokens of a question in the form of `_one_form`, with the edges of its formulas."""
    question = re.sub(r"(?<!\\)(?:\$+|\\[()\[\]])", f" {_EDGE} ", one_space(question))
    return tuple(tokens(_one_form(clean(question))))


def _one_form(text: str) -> str:
    r"""Normalise notation: `a/b` for `\frac{a}{b}`, `ab` for `a \cdot b`, `\sin x` for `\sin(x)`."""

    def fraction(parts: re.Match[str]) -> str:
        over, under = (part.strip() for part in parts.groups())
        over = f"({over})" if re.search("[-+/]", over) else over
        return f" {over}/{under if TOKEN.fullmatch(under) else f'({under})'} "

    while (shorter := re.sub(r"\\[dtc]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", fraction, text)) != text:
        text = shorter
    letter = r"(?<![a-zA-Z\\])([a-zA-Z])\s*"
    text = re.sub(letter + r"(?:\\(?:cdot|times)(?![a-zA-Z])|\*)\s*(?=[a-zA-Z](?![a-zA-Z]))", r"\1", text)
    functions = "|".join(sorted(_FUNCTIONS - {"pi", "sqrt"}))
    power = r"(?:\s*\^\s*(?:\d|\{\d+\}))?"
    argument = rf"(?:\\angle\s*)?[A-Z]+|[a-zA-Z]|\\(?:{'|'.join(greek[1:] for greek in _GREEK)})"
    return re.sub(rf"(\\(?:{functions}){power})\s*\(\s*({argument})\s*\)", r"\1 \2 ", text)


def _members(value: str) -> list[tuple[int, int]]:
    """Return start and end of each member of a point or interval; [] for any other value."""
    spans, depth, start = [], 0, 1
    for bracket in re.finditer(r"[(\[{)\]},]", value):
        depth += (bracket[0] in "([{") - (bracket[0] in ")]}")
        if (depth == 1 and bracket[0] == ",") or depth == 0:
            spans.append((start, bracket.start()))
            start = bracket.end()
        if depth == 0:
            break
    return spans if value[:1] in ("(", "[") and start == len(value) and len(spans) > 1 else []


def _changed(value: str) -> list[tuple[int, int, list[str]]]:
    """Return start and end of each number of a value, and two other numbers to replace it."""
    numbers = []
    for number in re.finditer(NUMBER, value):
        if number[0] in ("2", "3") and re.search(r"(?<![\d.])1\^\{?$", value[: number.start()]):
            continue  # 1^2 + 4^2
        whole, point, fraction = number[0].replace(",", "").partition(".")
        others = [f"{int(whole or '0') + more}{point}{fraction}" for more in (1, 3)]
        numbers.append((number.start(), number.end(), others))
    return numbers
