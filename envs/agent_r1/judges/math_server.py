"""A program that computes whether answers are right, for `mathematics`: a line of JSON for each question and answer.

It runs as a separate process, which forks a child for every question. The child is limited to `CPU_SECONDS` and
`MEMORY_BYTES`. The program is started by its path and imports nothing of this package.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

# Of processor time: on a slow machine, the median of the answers that are not simplified takes 0.07, the longest 0.5.
CPU_SECONDS = 2.0
WALL_SECONDS = 20  # long, because the machine may be busy
COSTLY_SECONDS = 0.6
MEMORY_BYTES = 2**30
ROUNDED = 5e-6  # relative error of rounding to six digits
EXACT = 1e-45
LARGE = 2**53  # from here up a calculator rounds whole numbers
FEWEST_SHOWN = 10  # minimum digits of a rounded number: a number with fewer digits is exact
BINARY = 2.0**-52  # relative error of one binary digit

UNREADABLE = "the answer cannot be read as one expression"
TOO_COSTLY = "judging the answer took too much time or memory"
TOO_BUSY = "judging was killed from outside, or had no processor for so long"
CRASHED = "the process that judges crashed"


def serve() -> None:
    """Answer questions, one JSON line each, until the pipe is closed."""
    logging.disable()  # math-verify warns that it has no time limit
    # GMP, where it is installed, ends the process when it is out of memory; Python raises.
    os.environ |= {"SYMPY_GROUND_TYPES": "python", "MPMATH_NOGMPY": "1"}
    answers = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for ordinary in ("7", "8, 1,200", "\\frac{1}{2}", "x = \\sqrt{3} + 1", "-2y", "[-3^2, 4)"):
        _compare(ordinary, "0.5", [], [], [], [])  # imports and caches, before the first fork
    for line in sys.stdin:
        number, *reading = json.loads(line)
        child = os.fork()
        if child == 0:
            _limit()
            os.write(answers, (json.dumps([number, *_verdict(*reading)]) + "\n").encode())
            os._exit(0)
        _, status, used = os.wait4(child, 0)
        if status != 0:
            reason = _why_ended(status, used.ru_utime + used.ru_stime)
            os.write(answers, (json.dumps([number, False, reason]) + "\n").encode())


def _verdict(*reading: Any) -> tuple[bool, str]:
    """Run `_compare`. An exception is a crash, except lack of memory, which an answer can cause."""
    try:
        return _compare(*reading)
    except MemoryError:
        return False, TOO_COSTLY
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        error_message = " ".join(f"{type(error).__name__}: {error}".split())
        return False, f"{CRASHED}: {error_message} ({where.name}, line {where.lineno})"


def _why_ended(status: int, seconds: float) -> str:
    """Return the reason why a child, which used this processor time, did not answer."""
    if not os.WIFSIGNALED(status):
        return f"{CRASHED} with exit status {os.waitstatus_to_exitcode(status)}"
    ended_by = os.WTERMSIG(status)
    if ended_by == signal.SIGPROF or (ended_by == signal.SIGALRM and seconds >= COSTLY_SECONDS):
        return TOO_COSTLY
    if ended_by in (signal.SIGALRM, signal.SIGKILL, signal.SIGTERM):
        return TOO_BUSY
    return f"{CRASHED} by {signal.Signals(ended_by).name}"


def _limit() -> None:
    """Limit this process: at the time limit the kernel ends it, also in the middle of a long multiplication."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.alarm(WALL_SECONDS)


def _compare(
    gold: str,
    value: str,
    equal: list[tuple[str, str]],
    rounded: list[tuple[str, str]],
    members: list[tuple[int, int]],
    changed: list[tuple[int, int, list[str]]],
) -> tuple[bool, str]:
    """Return math-verify's verdict on a `math_text.Reading`."""
    stated = _parse(value)
    if not stated:
        return False, UNREADABLE
    if not _equal(_parse(gold), stated, lists=not (_is_braced(gold) or _is_braced(value))):
        return False, ""
    for side, other in equal:
        # An angle with a degree sign is converted to radians.
        radians = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", r"\\cdot\\frac{\\pi}{180}", side)
        if not any(_equal(_parse(side), _parse(other)) for side in {side, radians}):
            return False, ""  # 6 = 7
    for exact, decimal in rounded:
        number = _parse(exact)
        if not (number and getattr(number[0], "is_number", False) is True):
            return False, UNREADABLE
        if not abs(number[0] - float(decimal)) < 10.0 ** -len(decimal.partition(".")[2]):
            return False, ""  # 7 \approx 6
    # Numbers are changed in their member, if the members make up the whole: to parse a point takes ten times as long.
    pieces = [(start, end, _parse(value[start:end])) for start, end in members]
    if [expression for *_, parsed in pieces for expression in parsed] != _members(stated[0])[1]:
        pieces = []
    pieces.append((0, len(value), stated))
    for start, end, others in changed:
        first, last, whole = next(piece for piece in pieces if piece[0] <= start and end <= piece[1])
        if not any(_differ(whole, _parse(value[first:start] + other + value[end:last])) for other in others):
            return False, UNREADABLE
    return True, ""


def _parse(expression: str) -> list[Any]:
    """Return the sympy expression, or [] if math-verify cannot read all of it."""
    from math_verify import LatexExtractionConfig, parse

    # The first match is the box; with any_match it would continue to the last formula that it can read.
    return parse(
        "\\boxed{" + expression + "}",
        [LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )


def _is_braced(text: str) -> bool:
    """Return whether a text is a set in braces, and not a list `1, 2`, which is parsed to the same."""
    return bool(re.fullmatch(r"\s*\\?\{.*\}\s*", text, re.DOTALL))


def _equal(gold: list[Any], found: list[Any], lists: bool = True) -> bool:
    """Return whether math-verify finds them equal, and their numbers agree: math-verify takes all tiny numbers for 0.

    The gold answer goes first, because verify is not symmetric. With `lists` the members of a list may form a point.
    """
    from math_verify import verify

    if not gold:
        return False
    if _joins_numbers(found[0]) and not _joins_numbers(gold[0]):
        return False
    (kind, members), (other_kind, others) = _members(gold[0]), _members(found[0])
    if not lists and {kind, other_kind} == {"set", "row"}:
        return False
    if kind == other_kind == "union":  # verify leaves decimals and fractions apart
        return _same_members(members, others)
    for wanted, stated in _ways_to_read(gold[0], found[0]):
        if verify([wanted], [stated], timeout_seconds=None):
            return _same_size(wanted, stated, lists)
    return _is_as_shown(gold[0], found[0])


def _joins_numbers(side: Any) -> bool:
    r"""Return whether a number or letter is in the place of a set: `[1,2] \cup (5)`, which sympy reads as `\{5\}`."""
    from sympy import Complement, Expr, Intersection, Union

    joined = side.atoms(Complement, Intersection, Union) if hasattr(side, "atoms") else ()
    return any(isinstance(argument, Expr) for operation in joined for argument in operation.args)


def _ways_to_read(gold: Any, stated: Any) -> Iterator[tuple[Any, Any]]:
    r"""Yield the two as they are; then, if the gold answer has roots of letters, with these letters positive.

    In the complex plane `\sqrt{1/n}` and `1/\sqrt{n}` may have two signs; people mean a positive n. The gold answer
    decides which letters are positive: `\sqrt{x^2}` is not x.
    """
    from sympy import Abs

    yield gold, stated
    if positive := _positive(gold, alone=any(hasattr(side, "has") and side.has(Abs) for side in (gold, stated))):
        with suppress(Exception):  # sympy's, about what the answer is made of
            yield gold.doit().xreplace(positive), stated.doit().xreplace(positive)


def _positive(gold: Any, alone: bool) -> dict[Any, Any]:
    """Return positive symbols for the factors of odd power under even roots; none if a root has a negative factor.

    In `\\sqrt{-x^3}` the letter is negative. If an absolute value (`|x|`) occurs, only a factor that is `alone` under
    its root counts, because two factors may both be negative.
    """
    from sympy import Dummy, Mul, Pow

    if not hasattr(gold, "atoms"):
        return {}
    found: dict[Any, Any] = {}
    for root in (power.base for power in gold.atoms(Pow) if power.exp.is_Rational and power.exp.q % 2 == 0):
        factors = root.doit().as_powers_dict()
        odd = [factor for factor, power in factors.items() if factor.free_symbols and power.is_odd]
        number = Mul(*(factor**power for factor, power in factors.items() if factor.is_number))
        if not number.is_positive or alone and len(odd) > 1:
            return {}
        found |= {factor: Dummy(positive=True) for factor in odd}
    return found


def _is_as_shown(gold: Any, stated: Any) -> bool:
    r"""Return whether a large number is the other as a calculator (12 digits) or Python shows it: `1.1805916e+21`."""
    from sympy import Float, Rational

    if not getattr(gold, "is_number", False) or gold.has(Float) == stated.has(Float):
        return False
    exact, shown = (stated, gold) if gold.has(Float) else (gold, stated)
    sizes = _size_and_gap(exact, shown)
    if sizes is None or not LARGE <= sizes[0] < sys.float_info.max:
        return False
    number = float(exact.evalf(50))
    for text in (f"{number:.12g}", repr(number)):
        target = Rational(text)
        digits = len(text.partition("e")[0].strip("-").removesuffix(".0").replace(".", ""))
        # Only a product, such as 1.5 \cdot 10^{60}, is not computed in decimals.
        gap, bound = abs(Rational(shown) - target if shown.is_Float else shown.evalf(50) - target), BINARY * sizes[0]
        if digits >= FEWEST_SHOWN and gap <= (0 if shown.is_Float else bound):
            return True
    return False


def _size_and_gap(wanted: Any, stated: Any) -> tuple[Any, Any] | None:
    """Return the size of a number and its distance to the other; None unless both are finite numbers."""
    from sympy import Expr, Number

    if not all(isinstance(side, Expr) and side.is_number for side in (wanted, stated)):
        return None
    try:
        sizes = abs(wanted.evalf(50)), abs((stated - wanted).evalf(50))
    except Exception:  # an error of sympy about the parts of the answer
        return None
    return sizes if all(isinstance(size, Number) and size.is_finite for size in sizes) else None


def _same_members(members: list[Any], others: list[Any]) -> bool:
    """Return whether each member of one side equals one of the other side."""
    return all(any(_same(member, other) for other in others) for member in members) and all(
        any(_same(member, other) for member in members) for other in others
    )


def _same_size(wanted: Any, stated: Any, lists: bool = False) -> bool:
    """Return whether the numbers of two expressions, equal for math-verify, agree member by member, sets as sets.

    A decimal must be right to six digits, anything else exactly. The result is True if the two have different
    structures, except for a set and a point (`lists`: a list may be a point).
    """
    from math_verify.grader import is_expr_of_only_symbols
    from sympy import Eq, Float

    if isinstance(wanted, Eq) and not isinstance(stated, Eq):  # x = 5, of which the answer states the 5
        if not is_expr_of_only_symbols(wanted.lhs):
            return True
        wanted = wanted.rhs
    (kind, members), (other_kind, others) = _members(wanted), _members(stated)
    if "set" in (kind, other_kind):
        if "row" in (kind, other_kind) and not lists:
            return False
        return not {kind, other_kind} <= {"set", "row", "one"} or _same_members(members, others)
    if kind != "one" or other_kind != "one":
        if "other" in (kind, other_kind) or kind != other_kind or len(members) != len(others):
            return True
        if kind == "union":
            return _same_members(members, others)
        return kind == "relation" and members[0] != others[0] or all(map(_same_size, members, others))
    sizes = _size_and_gap(wanted, stated)
    if sizes is None or wanted == stated:
        return True
    size, gap = sizes
    return bool(gap <= (ROUNDED * size if wanted.has(Float) or stated.has(Float) else EXACT * (size or 1)))


def _same(wanted: Any, stated: Any) -> bool:
    """Return whether two members of sets are equal. Their size is compared first: that is faster than verify."""
    from math_verify import verify

    return wanted == stated or _same_size(wanted, stated) and verify([wanted], [stated], timeout_seconds=None)


def _members(side: Any) -> tuple[str, list[Any]]:
    """Return the kind of an expression and its members, in order.

    The kind is "set", "row", "union", "matrix", "chain", "relation", "one" or "other". The last two have one member:
    the expression itself.
    """
    from sympy import And, Expr, FiniteSet, Interval, MatrixBase, MatrixExpr, Set, Tuple, Union
    from sympy.core.relational import Relational

    if isinstance(side, MatrixExpr) or isinstance(side, Set) and not isinstance(side, FiniteSet | Interval):
        with suppress(Exception):  # sympy's, about what the answer is made of
            side = side.doit()
    if isinstance(side, MatrixBase):
        return "matrix", list(side.flat())
    if isinstance(side, Interval):
        return "row", [side.start, side.end]
    if isinstance(side, Relational):
        numbers_last = sorted((side.lhs, side.rhs), key=lambda part: bool(getattr(part, "is_number", False)))
        return "relation", numbers_last  # 5 = x
    for kind, of in (("set", FiniteSet), ("row", Tuple), ("chain", And), ("union", Union)):
        if isinstance(side, of):
            return kind, list(getattr(side, "_unsorted_args", side.args))  # as they were written
    return ("one" if isinstance(side, Expr) else "other"), [side]


def _differ(original: list[Any], changed: list[Any]) -> bool:
    """Return whether two expressions have different values."""
    from math_verify import verify

    if not changed or original[0] == changed[0]:
        return not changed
    try:  # this is faster than verify
        difference = original[0] - changed[0]
        values = {symbol: 1.37 + 0.61 * place for place, symbol in enumerate(sorted(difference.free_symbols, key=str))}
        # A large number differs by 1 all the same, and a small one by little.
        return bool(abs(difference.subs(values).evalf()) > 1e-9 * min(1, abs(original[0].subs(values).evalf())))
    except Exception:  # sets, points, matrices, equations
        return not verify(original, changed, timeout_seconds=None)


if __name__ == "__main__":
    serve()
