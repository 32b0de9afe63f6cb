r"""Normalisation of mathematical notation: the characters, brackets and commands that people and models write.

Nothing here decides what is right. `math_text` reads answers in this normal form.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from decimal import Decimal

# `\text{}` and its like, which math-verify takes for a unit and drops.
TEXT_COMMAND = r"\\(?:text[a-z]*|mbox|hbox|math(?:rm|bf|it|sf|tt)|boldsymbol|bm|operatorname)(?![a-zA-Z])"
TEXT = re.compile(TEXT_COMMAND + r"\s*\{([^{}]*)\}")
NUMBER = r"\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+"
TOKEN = re.compile(rf"{NUMBER}|\\[a-zA-Z]+|\\.|[a-zA-Z]+|\S")
_DASHES = dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe58\ufe63", "-")
_VULGAR = {"¼": "1/4", "½": "1/2", "¾": "3/4", "⅓": "1/3", "⅔": "2/3", "⅕": "1/5", "⅙": "1/6", "⅛": "1/8"}
_CHARACTERS = str.maketrans({
    **_DASHES, **{sign: r"\frac{{{}}}{{{}}}".format(*value.split("/")) for sign, value in _VULGAR.items()},
    "\u2044": "/", "\u2215": "/", "\u2217": "*", "\u22c5": "·", "\u3000": " ", "。": ".", "｡": ".",
})  # fmt: skip
_INVISIBLE = "\u200b\u200e\u200f\u2060\ufeff"
_SUPERSCRIPT = re.compile("[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_UNICODE = str.maketrans({
    "π": r"\pi ", "∞": r"\infty ", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "≤": r"\le ", "≥": r"\ge ",
    "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "°": r"^\circ ",
})  # fmt: skip
_SPACES = re.compile(r"(?<!\\)\\[ ,;:]|\\q?quad(?![a-zA-Z])|~(?!=)")
# The thin spaces of thousands: 12\,000.
_THIN = re.compile(r"(?<![\d.,_^a-zA-Z])[1-9]\d{0,2}(?:(?:\\,|[\u2009\u202f])\d{3})+(?!,?\d)")
_BRACKETS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("\\boxed{", "}"), ("\\fbox{", "}"))
_MARKS = (("**", "**"), ("__", "__"), ("*", "*"), ("`", "`"), ("<b>", "</b>"), ("<strong>", "</strong>"))
_BOLD = tuple((f"\\{bold}{{", "}") for bold in ("mathbf", "textbf", "boldsymbol", "bm"))
# **12** where no number, letter or bracket stands before it: there the asterisks would be a power.
_BOLD_PART = re.compile(r"(?<![\w)\]}!*])(?<![\w)\]}!*]\s)\*\*(?!\s)([^*]+)(?<!\s)\*\*(?![\w(\[{\\*])")
_POWER_OF_TEN = re.compile(r"(?<![\w.\\}])(\d+(?:\.\d+)?|\.\d+)[eE]([+-]?)(\d+)(?![\w.])")
_TIMES_TEN = re.compile(
    r"(?<![\d.])(\d+\.\d+|\.\d+)\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*"
    r"(?:\{\s*([+-]?\d+)\s*\}|(-?\d))(?!\s*[\d^!.])"
)
_FUNCTION = r"\\?(?:arc)?(?:sin|cos|tan|cot|sec|csc|log|ln|exp)\s*(?:[_^]\s*(?:\{[^{}]*\}|.)\s*)*"
# Allowed text before it: not a division, a power or a function, to which only the decimal would belong.
_BEFORE_TEN = re.compile(
    r"(?:^|[=<>≈~(\[{,;|&$*]|\\\\|(?<![a-zA-Z\\])(?:and|or)"
    r"|\\text\s*\{\s*(?:and|or)\s*\}|\\(?:approx|leq?|geq?|lt|gt|neq?|in|times|cdot))\s*$"
)
_SIGN_BEFORE = re.compile(r"(?:[+-]|\\pm|\\mp)\s*$")
_NO_SIGN_BEHIND = re.compile(rf"(?:[/^_÷]|\\div|{_FUNCTION})\s*$")
_OPENING, _CLOSING = frozenset(("(", "[", "\\{", "{")), frozenset((")", "]", "\\}", "}"))
_MOST_DIGITS = 40
# 2e+1 is twice e and one more, 2e+10 a power of ten: programs write two digits.
_NUMBER_E = re.compile(r"(?<![a-zA-Z\\])e(?![a-zA-Z])")


def plain_characters(text: str) -> str:
    """Replace characters that look like digits, dashes, signs and bold letters by their ASCII form."""
    return "".join(map(_plain_character, text)).translate(_CHARACTERS) if not text.isascii() else text


def _plain_character(character: str) -> str:
    code = ord(character)
    if code < 128:
        return character
    digit = unicodedata.decimal(character, None)
    if digit is not None:
        return str(digit)
    if 0xFF01 <= code <= 0xFF5E or 0x1D400 <= code <= 0x1D7FF:  # full-width; bold and italic letters of mathematics
        return unicodedata.normalize("NFKC", character)
    return character


def products_with_ten(text: str) -> str:
    r"""Write products such as `1.15 \times 10^2` as digits: math-verify would multiply them to 114.99999999999999."""

    def product(found: re.Match[str]) -> str:
        before = found.string[: found.start()].rstrip()
        if sign := _SIGN_BEFORE.search(before):
            is_joined = not _NO_SIGN_BEHIND.search(before[: sign.start()].rstrip())
        else:
            is_joined = bool(_BEFORE_TEN.search(before))
        return is_joined and _digits(found[1], found[2] or found[3]) or found[0]

    return _TIMES_TEN.sub(product, text)


def _digits(number: str, exponent: str) -> str:
    """Return the digits of a number times a power of ten; "" for too many digits. Large decimals count as rounded."""
    if len(exponent) > 4 or abs(int(exponent)) > _MOST_DIGITS:
        return ""
    digits = format(Decimal(f"{number}e{exponent}"), "f")
    rounded = "." in number and "." not in digits and len(digits) > 15
    return f"{digits}.0" if rounded else digits


def has_number_e(text: str) -> bool:
    """Return whether the number e occurs in a text after `powers_of_ten`."""
    return bool(_NUMBER_E.search(text))


def powers_of_ten(text: str, also_short: bool = False) -> str:
    r"""Write `3e+20` as digits, or as `(3 \cdot 10^{300})`, unless the text also contains the number e.

    `2e+1` may mean twice e and one more: it is a power of ten only with `also_short`.
    """

    def power(found: re.Match[str]) -> str:
        number, sign, exponent = found.groups()
        if sign and len(exponent) < 2 and "." not in number and not also_short:
            return found[0]
        digits = _digits(number, f"{sign}{exponent}")
        return digits or rf"({number} \cdot 10^{{{sign.strip('+')}{exponent}}})"

    changed = _POWER_OF_TEN.sub(power, text)
    return text if has_number_e(changed) else changed


def last_boxed(solution: str) -> str | None:
    r"""Return the content of the last `\boxed{}` or `\fbox{}` of a solution, MATH's gold answer; None without a box."""
    start = max(solution.rfind("\\boxed"), solution.rfind("\\fbox"))
    if start < 0:
        return None
    content = re.sub(r"^\\(boxed|fbox)\s*", "", solution[start:])
    if not content.startswith("{"):  # \boxed 7
        return re.split(r"[\s$]", content, maxsplit=1)[0] or None
    depth = 0
    for position, character in enumerate(content):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return content[1:position]
    return None


def unwrap(answer: str) -> str:
    r"""Remove everything around an answer: blanks, a full stop, `$...$`, `\(...\)`, `\boxed{}`, `**...**`."""
    answer = plain_characters(answer).strip().strip(_INVISIBLE).strip()
    while True:
        bare = answer.removesuffix(".").strip()
        for opening, closing in (*_BRACKETS, *_MARKS, *_BOLD):
            inside = bare[len(opening) : len(bare) - len(closing)]
            if not (inside and bare.startswith(opening) and bare.endswith(closing) and balanced(inside)):
                continue
            if (opening, closing) in _MARKS and opening[0] in inside:  # 2**3, or two of them
                continue
            if (opening, closing) in _BOLD and not any(map(str.isdigit, inside)):  # words
                continue
            bare = inside.strip()
            break
        if bare == answer:
            return answer
        answer = bare


def clean(text: str) -> str:
    r"""Convert the notation of Python or sympy to LaTeX, and remove spacing commands."""
    text = _BOLD_PART.sub(r"\1", plain_characters(text))
    text = _SUPERSCRIPT.sub(_superscript, text)
    text = text.replace("**", "^").replace("==", "=").replace("{,}", ",").translate(_UNICODE)
    text = _THIN.sub(lambda number: re.sub(r"\D", "", number[0]), text)
    text = re.sub(r"√\s*(\d+|[a-z])", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<!\\)\\!\s*|\\displaystyle(?![a-zA-Z])", "", text)
    text = re.sub(r"\\(?:left|right|[bB]igg?[lr]?)(?=\s*(?:[()\[\]|]|\\[{}|]))", "", text)
    text = _SPACES.sub(" ", text)
    text = re.sub(r"(?<![\\a-zA-Z])(?:infinity|inf|oo)(?![a-zA-Z])", r"\\infty ", text, flags=re.IGNORECASE)
    text = re.sub(r"(?<=[)\]}])\s*U\s*(?=\(|\[|\\\{)", r" \\cup ", text)
    text = re.sub(r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi ", text)
    text = re.sub(r"(\\[dtc]?frac)\s*\\pi(?=\s*[\d{])", r"\1{\\pi}", text)
    text = re.sub(r"\^\s*(\\[dtc]?frac\s*\{[^{}]*\}\s*\{[^{}]*\})", r"^{\1}", text)
    # math-verify adds numbers that stand side by side, and takes 7 1/2 for (7 + 1)/2.
    number = r"(?<![_^\d.])(?<!_\{)(?<!\^\{)\d+(?:\.\d+)?"
    text = re.sub(rf"(\)|{number})\s*(?=\(|\[|\\\{{|\\[dt]?binom)", r"\1 \\cdot ", text)
    text = re.sub(r"\)\s*(?=\d|\\[dtc]?frac)", r") \\cdot ", text)
    return re.sub(r"(?<![\d./^_])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])", r"\1\\frac{\2}{\3}", text)


def _superscript(found: re.Match[str]) -> str:
    raised = unicodedata.normalize("NFKC", found[0]).replace("\u2212", "-")
    return f"^{raised}" if len(raised) == 1 else f"^{{{raised}}}"


def balanced(text: str) -> bool:
    """Return whether every brace has its partner: otherwise one would close the box around the answer."""
    depth = 0
    for brace in re.findall(r"(?<!\\)(?:\\\\)*([{}])", text):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            return False
    return depth == 0


def tokens(text: str) -> list[str]:
    """Return the tokens, one for each meaning, without braces and spaces."""
    found = [_number(token) for token in TOKEN.findall(one_way(text)) if token not in "{}"]
    while is_in_brackets(found) and found[0] == "(" and found[-1] == ")" and "," not in found:
        found = found[1:-1]
    return found


def is_in_brackets(row: Sequence[str]) -> bool:
    r"""Return whether one pair of brackets encloses all tokens: `(1/4)`, `[1, 2)`, `\{3\}`, but not `(1)(2)`."""
    depth = 0
    for place, token in enumerate(row):
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth == 0:
            return 1 < place == len(row) - 1
    return False


def tokens_at(text: str) -> list[tuple[str, int, int]]:
    """Return the tokens of a text in the form of `one_way`, each with start and end; outer brackets are kept."""
    found = [(found[0], *found.span()) for found in TOKEN.finditer(text)]
    return [(_number(token), start, end) for token, start, end in found if token not in "{}"]


def one_way(text: str) -> str:
    r"""Normalise fractions and products, and drop degrees, percent and currency: `\dfrac{1}{2}` becomes `1/2`."""
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])|°|\\?[$%]", "", TEXT.sub(r" \1 ", text))
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = re.sub(r"\\frac\s*(?:\{(-?\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))", r" \1\2/\3\4 ", text)
    return re.sub(r"\\(?:cdot|times)(?![a-zA-Z])|×", "*", text)


def _number(token: str) -> str:
    """Return a token in small letters; a number without commas and needless zeros."""
    if not token[0].isdigit() and (token[0] != "." or len(token) == 1):
        return token.lower()
    whole, _, fraction = token.replace(",", "").partition(".")
    return (whole.lstrip("0") or "0") + (f".{fraction.rstrip('0')}" if fraction.rstrip("0") else "")


def one_space(text: str) -> str:
    """Collapse white space. Patterns would try every number of spaces, and a data file may contain thousands."""
    return re.sub(r"\s+", " ", text)


def places(row: Sequence[str], part: Sequence[str]) -> list[int]:
    """Return the positions at which a sequence of tokens occurs in another."""
    return [start for start in range(len(row) - len(part) + 1) if list(row[start : start + len(part)]) == [*part]]
