"""The `calculator` tool: arithmetic, and nothing else.

An expression is first tidied up (`×`, `÷`, `^`, thousands separators, percent signs ...), then parsed by Python's `ast`
and evaluated node by node; nothing is ever handed to `eval`. Lengths and sizes are bounded before anything is computed,
so that no expression takes longer than a few milliseconds.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any

from agent_r1_tools.tool import Tool, ToolResult

Number = int | float

MAX_CHARS = 1000
MAX_DEPTH = 50
MAX_DIGITS = 1000
"""The most digits that a whole number may have, in the result and on the way."""
MAX_BITS = int(MAX_DIGITS * math.log2(10))
SIGNIFICANT_DIGITS = 12
"""Digits that a decimal number is shown with, which hides that 0.1 + 0.2 is 0.30000000000000004."""


class CalculatorError(ValueError):
    """An expression that cannot be computed; the message says why."""


class Calculator(Tool):
    """Computes an arithmetic expression.

    Known are + - * / // % ** (also ^), parentheses, comparisons, the constants pi, e and tau, and the functions in
    `FUNCTIONS`. Whole numbers are exact; other results are shown with 12 significant digits. `ToolResult.data` is
    `{"value": number}`. What cannot be computed is a failed call, and `data` is `{"error": "calculation"}`.
    """

    name = "calculator"
    description = "Compute an arithmetic expression, such as (17 + 5) * 3 or sqrt(2) / 2."
    parameters = {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "The expression to compute."}},
        "required": ["expression"],
        "additionalProperties": False,
    }
    timeout = math.inf

    def execute(self, arguments: dict[str, Any]) -> ToolResult:
        try:
            value = calculate(arguments["expression"])
        except CalculatorError as error:
            return ToolResult(f"Cannot compute this: {error}.", ok=False, data={"error": "calculation"})
        return ToolResult(format_number(value), data={"value": value})


def calculate(expression: str) -> Number:
    """Return the value of an expression: an int if it is exact, else a finite float; a bool for a comparison.

    Raises:
        CalculatorError: it is not an expression of this language, or its value is too large or undefined.
    """
    if len(expression) > MAX_CHARS:
        raise CalculatorError(f"the expression is longer than {MAX_CHARS} characters")
    text = normalise(expression)
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the parser has its own limits
        raise CalculatorError("this is not a complete arithmetic expression") from None
    try:
        return _evaluate(tree.body, 0)
    except ZeroDivisionError:
        raise CalculatorError("division by zero") from None
    except OverflowError:
        raise CalculatorError("a number on the way is too large") from None
    except CalculatorError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise CalculatorError(str(error)) from None


def format_number(value: Number) -> str:
    """Format a number for the policy: 5, 0.3, 1e+20, True."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    if isinstance(value, int):
        return str(value)
    return f"{value:.{SIGNIFICANT_DIGITS}g}"


# --- evaluating -------------------------------------------------------------------------------------------------------


def _evaluate(node: ast.expr, depth: int) -> Number:
    if depth > MAX_DEPTH:
        raise CalculatorError(f"the expression is nested deeper than {MAX_DEPTH} levels")
    match node:
        case ast.Constant(value=value) if type(value) in (int, float):
            return _bounded(value)
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in UNARY:
            return _bounded(UNARY[type(op)](_evaluate(operand, depth + 1)))
        case ast.BinOp():
            chain = []  # a long sum leans to the left; it is long, not deep
            while isinstance(node, ast.BinOp) and type(node.op) in BINARY:
                chain.append(node)
                node = node.left
            if chain:
                value = _evaluate(node, depth + 1)
                for step in reversed(chain):
                    value = _bounded(BINARY[type(step.op)](value, _evaluate(step.right, depth + 1)))
                return value
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            values = [_evaluate(value, depth + 1) for value in (left, *comparators)]
            pairs = zip(ops, values, values[1:], strict=False)
            if any(type(op) not in COMPARISONS for op in ops):
                raise CalculatorError("known comparisons are < <= > >= == !=")
            return all(COMPARISONS[type(op)](a, b) for op, a, b in pairs)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            return _bounded(FUNCTIONS[name](*(_evaluate(argument, depth + 1) for argument in arguments)))
        case ast.Call(func=ast.Name(id=name)):
            raise CalculatorError(f"unknown function {name[:50]!r}; known are {', '.join(sorted(FUNCTIONS))}")
        case ast.Name(id=name):
            raise CalculatorError(f"unknown name {name[:50]!r}; known are {', '.join(sorted(CONSTANTS))}")
        case ast.Call():
            raise CalculatorError("a number cannot be called; write * to multiply")
        case ast.Tuple():
            raise CalculatorError("a comma separates arguments of a function or groups of three digits, nothing else")
    raise CalculatorError("only arithmetic is known: numbers, + - * / // % **, comparisons and functions")


def _bounded(value: Any) -> Number:
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise CalculatorError(f"a number on the way has more than {MAX_DIGITS} digits")
        return value
    if not isinstance(value, float):  # a negative number to a broken power is complex
        raise CalculatorError("the value is not a real number")
    if not math.isfinite(value):
        raise CalculatorError("a number on the way is too large")
    return value


def _multiply(a: Number, b: Number) -> Number:
    if isinstance(a, int) and isinstance(b, int) and a.bit_length() + b.bit_length() > MAX_BITS + 1:
        raise CalculatorError(f"a number on the way has more than {MAX_DIGITS} digits")
    return a * b


def _power(base: Number, exponent: Number) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0 and abs(base) > 1:
        if (base.bit_length() - 1) * exponent > MAX_BITS:  # |base| ** exponent >= 2 ** that
            raise CalculatorError(f"a number on the way has more than {MAX_DIGITS} digits")
    return base**exponent


def _factorial(number: Number) -> int:
    if number != int(number) or number < 0:
        raise CalculatorError("factorial takes a whole number that is not negative")
    if number > MAX_DIGITS:  # 450! has 1,001 digits already
        raise CalculatorError(f"a number on the way has more than {MAX_DIGITS} digits")
    return math.factorial(int(number))


def _round(number: Number, digits: Number = 0) -> Number:
    if not isinstance(digits, int) or abs(digits) > 400:
        raise CalculatorError("round takes a whole number of digits between -400 and 400")
    return round(number, digits) if digits else round(number)


def _extreme(choose: Callable[[tuple[Number, ...]], Number]) -> Callable[..., Number]:
    def chosen(*numbers: Number) -> Number:
        if not numbers:
            raise CalculatorError("min and max take at least one number")
        return choose(numbers)

    return chosen


def _equal(a: Number, b: Number) -> bool:
    """Return True if two numbers are equal or are shown alike: 0.1 + 0.2 == 0.3."""
    exact = isinstance(a, int) and isinstance(b, int)
    return a == b if exact else math.isclose(a, b, rel_tol=10**-SIGNIFICANT_DIGITS)


CONSTANTS: dict[str, float] = {"pi": math.pi, "e": math.e, "tau": math.tau}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "acos": math.acos,
    "asin": math.asin,
    "atan": math.atan,
    "ceil": math.ceil,
    "cos": math.cos,
    "exp": math.exp,
    "factorial": _factorial,
    "floor": math.floor,
    "gcd": math.gcd,
    "lcm": lambda a, b: abs(_multiply(a // (math.gcd(a, b) or 1), b)),
    "ln": math.log,
    "log": math.log,
    "log10": math.log10,
    "log2": math.log2,
    "max": _extreme(max),
    "min": _extreme(min),
    "round": _round,
    "sin": math.sin,
    "sqrt": math.sqrt,
    "tan": math.tan,
}
UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: _multiply,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: _equal,
    ast.NotEq: lambda a, b: not _equal(a, b),
}


# --- tidying up -------------------------------------------------------------------------------------------------------

_SYMBOLS = str.maketrans(
    {"−": "-", "–": "-", "×": "*", "·": "*", "⋅": "*", "∙": "*", "÷": "/", "^": "**", "π": "pi"}
    | {"≤": "<=", "≥": ">=", "≠": "!=", "[": "(", "]": ")"}
)
_OF = re.compile(r"\s*of\b")
_TOKEN = re.compile(
    r"\s*(?:"
    r"(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<name>[A-Za-z]\w*)"
    r"|(?P<op>\*\*|//|[<>=!]=|[-+*/%<>(),]))",
    re.ASCII,
)
_THOUSANDS = re.compile(r"\s*(\d{1,3}(?:,\d{3})+(?![\d,])(?:\.\d*)?)", re.ASCII)
_LEADING_ZEROS = re.compile(r"^0+(?=\d)")


def normalise(expression: str) -> str:
    """Rewrite an expression as Python writes it.

    - `×`, `·` and a lone `x` are `*`, `÷` is `/`, `^` is `**`, `−` and `–` are `-`, `≤ ≥ ≠` are comparisons, `π` is pi,
      square brackets are parentheses; a `$` before a number and a `=` at the end are dropped.
    - A comma groups digits by three (1,234,567), except inside the parentheses of a function, where it separates
      arguments.
    - `%` after a value is percent where nothing follows, or `)`, `,`, `*`, `/`, a comparison or the word "of":
      `15% of 80`. It is the remainder where a value follows: `17 % 5`. Before + and -, `10% + 5` (glued to the number,
      a space behind) is percent, `10 % -3` (a sign glued to a number) is the remainder, and anything else is rejected
      as ambiguous.

    Raises:
        CalculatorError: a character or a combination that has no meaning here.
    """
    text = " ".join(expression.translate(_SYMBOLS).split())
    text = re.sub(r"\$ ?(?=[\d.])", "", text).rstrip("= ")
    if not text:
        raise CalculatorError("the expression is empty")
    out: list[str] = []
    open_at: list[tuple[int, bool]] = []  # where each open parenthesis began in `out`, and whether it is a function's
    value_at: int | None = None  # where the value that has just ended began in `out`, if one has
    at = 0
    while at < len(text):
        in_call = bool(open_at) and open_at[-1][1]
        if not in_call and (grouped := _THOUSANDS.match(text, at)):
            token, kind, end = grouped[1].replace(",", ""), "number", grouped.end()
        elif match := _TOKEN.match(text, at):
            kind, end = str(match.lastgroup), match.end()
            token = match[kind]
        else:
            raise CalculatorError(f"unknown character {text[at:].strip()[:1]!r}")
        if kind == "number":
            if text[end : end + 1].isalnum() or text[end : end + 1] in ("_", "."):
                raise CalculatorError(f"{text[at : end + 1].strip()[:50]!r} is not a number; write * to multiply")
            value_at = len(out)
            out.append(_LEADING_ZEROS.sub("", token))
        elif kind == "name":
            if value_at is not None and token in ("x", "X"):
                out.append("*")
                value_at = None
            else:
                value_at = len(out)
                out.append(token)
        elif token == "(":
            is_call = bool(out) and out[-1].isidentifier()
            open_at.append((len(out) - 1 if is_call else len(out), is_call))
            out.append(token)
            value_at = None
        elif token == ")":
            if not open_at:
                raise CalculatorError("there is a ) without a (")
            value_at = open_at.pop()[0]
            out.append(token)
        elif token == "%" and value_at is not None and _is_percent(text, end):
            out[value_at:] = ["(", *out[value_at:], "/", "100", ")"]
            if of := _OF.match(text, end):
                end = of.end()
                out.append("*")
                value_at = None
        else:
            out.append(token)
            value_at = None
        at = end
    return " ".join(out)


def _is_percent(text: str, end: int) -> bool:
    """Return True if the % that ends at `end` means percent and not the remainder."""
    rest = text[end:].lstrip()
    if not rest or rest[0] in "),*/<>=!" or _OF.match(text, end):
        return True
    if rest[0] not in "+-":
        return False
    glued = not text[end - 2].isspace()
    spaced = text[end].isspace() and rest[1:2].isspace()
    if glued and spaced:
        return True
    if not glued and not rest[1:2].isspace():
        return False
    raise CalculatorError("% before + or - is ambiguous; write 10/100 for percent and 10 % (-3) for the remainder")
