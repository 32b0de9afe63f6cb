"""The program that computes whether answers are right, for `math_judge`: a line of JSON for each question and answer.

It runs as a process of its own, which forks a child for every question; the child has `CPU_SECONDS` and
`MEMORY_BYTES`. It is started by its path and imports nothing of this package.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
from typing import Any

# Of processor time: on a slow machine, the median of the answers that are not simplified takes 0.07, the longest 0.5.
CPU_SECONDS = 2.0
WALL_SECONDS = 20  # for a machine that is busy with other things
COSTLY_SECONDS = 0.6
MEMORY_BYTES = 2**30
ROUNDED = 5e-6  # of a number: what rounding to six digits may change
EXACT = 1e-45

UNREADABLE = "the answer cannot be read as one expression"
TOO_COSTLY = "judging the answer took too much time or memory"
TOO_BUSY = "judging was killed from outside, or had no processor for so long"


def serve() -> None:
    """Answer questions, one JSON line each, until the pipe is closed."""
    logging.disable()  # math-verify warns that it has no time limit of its own
    answers = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for ordinary in ("7", "8, 1,200", "\\frac{1}{2}", "x = \\sqrt{3} + 1", "-2y", "[-3^2, 4)"):
        _compare(ordinary, "0.5", [], [], [], [])  # imports and caches, before the first fork
    for line in sys.stdin:
        number, *reading = json.loads(line)
        child = os.fork()
        if child == 0:
            _limit()
            os.write(answers, (json.dumps([number, *_compare(*reading)]) + "\n").encode())
            os._exit(0)
        _, status, used = os.wait4(child, 0)
        if status != 0:  # its processor time is over or it is out of memory; or the machine ended it
            ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            starved = ended_by == signal.SIGALRM and used.ru_utime + used.ru_stime < COSTLY_SECONDS
            busy = starved or ended_by in (signal.SIGKILL, signal.SIGTERM)
            os.write(answers, (json.dumps([number, False, TOO_BUSY if busy else TOO_COSTLY]) + "\n").encode())


def _limit() -> None:
    """Bound this process: when time is up, the kernel ends it, also in the middle of a long multiplication."""
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
    """What math-verify says about a `math_text.Reading`."""
    found = _parse(value)
    if not found:
        return False, UNREADABLE
    if not _equal(_parse(gold), found):
        return False, ""
    for side, other in equal:
        # An angle is one of degrees where it says so.
        radians = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", r"\\cdot\\frac{\\pi}{180}", side)
        if not any(_equal(_parse(side), _parse(other)) for side in {side, radians}):
            return False, ""  # 6 = 7
    for exact, decimal in rounded:
        number = _parse(exact)
        if not (number and getattr(number[0], "is_number", False) is True):
            return False, UNREADABLE
        if not abs(number[0] - float(decimal)) < 10.0 ** -len(decimal.partition(".")[2]):
            return False, ""  # 7 \approx 6
    # Each is looked at in its member, where these make up the whole: to parse a point takes ten times as long.
    pieces = [(start, end, _parse(value[start:end])) for start, end in members]
    if [one for *_, parsed in pieces for one in parsed] != _members(found[0])[1]:
        pieces = []
    pieces.append((0, len(value), found))
    for start, end, others in changed:
        first, last, whole = next(piece for piece in pieces if piece[0] <= start and end <= piece[1])
        if not any(_differ(whole, _parse(value[first:start] + other + value[end:last])) for other in others):
            return False, UNREADABLE
    return True, ""


def _parse(expression: str) -> list[Any]:
    """The sympy expression, or [] where math-verify can't read all of it."""
    from math_verify import LatexExtractionConfig, parse

    # The first match is the box; with any_match it would go on to the last formula that it can read.
    return parse(
        "\\boxed{" + expression + "}",
        [LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )


def _equal(gold: list[Any], found: list[Any]) -> bool:
    """Whether math-verify calls them equal; their numbers also by their own size: to it all that are tiny are 0.

    Gold goes first, verify is not symmetric.
    """
    from math_verify import verify

    return verify(gold, found, timeout_seconds=None) and _same_size(gold[0], found[0])


def _same_size(wanted: Any, stated: Any) -> bool:
    """Whether the numbers of two expressions that math-verify calls equal are: member by member, sets as sets.

    A decimal has to be right to six digits, anything else exactly. True where the two are not made alike.
    """
    from math_verify.grader import is_expr_of_only_symbols
    from sympy import Eq, Expr, Float, Number

    if isinstance(wanted, Eq) and not isinstance(stated, Eq):  # x = 5, of which the answer states the 5
        if not is_expr_of_only_symbols(wanted.lhs):
            return True
        wanted = wanted.rhs
    (kind, members), (other_kind, others) = _members(wanted), _members(stated)
    if "set" in (kind, other_kind):
        if not {kind, other_kind} <= {"set", "row", "one"}:
            return True
        return all(any(_same(one, other) for other in others) for one in members) and all(
            any(_same(one, other) for one in members) for other in others
        )
    if kind != "one" or other_kind != "one":
        if kind != other_kind or len(members) != len(others) or kind == "relation" and members[0] != others[0]:
            return True
        return all(map(_same_size, members, others))
    numbers = all(isinstance(side, Expr) and side.is_number for side in (wanted, stated))
    if not numbers or wanted == stated:
        return True
    size, difference = wanted.evalf(50), (stated - wanted).evalf(50)
    if wanted.has(Float) or stated.has(Float):
        most = ROUNDED * abs(size)
    else:
        most = EXACT * (abs(size) or 1)
    if not all(isinstance(one, Number) and one.is_finite for one in (abs(difference), most)):
        return True
    return bool(abs(difference) <= most)


def _same(wanted: Any, stated: Any) -> bool:
    """Whether two members of sets are equal. Their size is looked at first: that is faster than verify."""
    from math_verify import verify

    return wanted == stated or _same_size(wanted, stated) and verify([wanted], [stated], timeout_seconds=None)


def _members(side: Any) -> tuple[str, list[Any]]:
    """What an expression is ("set", "row", "matrix", "chain", "relation", "one", "other"), and made of, in order."""
    from sympy import And, Expr, FiniteSet, Interval, MatrixBase, MatrixExpr, Tuple
    from sympy.core.relational import Relational

    if isinstance(side, MatrixExpr):
        side = side.doit()
    if isinstance(side, MatrixBase):
        return "matrix", list(side.flat())
    if isinstance(side, Interval):
        return "row", [side.start, side.end]
    if isinstance(side, Relational):
        numbers_last = sorted((side.lhs, side.rhs), key=lambda one: bool(getattr(one, "is_number", False)))
        return "relation", numbers_last  # 5 = x
    for kind, of in (("set", FiniteSet), ("row", Tuple), ("chain", And)):
        if isinstance(side, of):
            return kind, list(getattr(side, "_unsorted_args", side.args))  # as they were written
    return ("one" if isinstance(side, Expr) else "other"), [side]


def _differ(found: list[Any], changed: list[Any]) -> bool:
    """Whether two expressions have different values."""
    from math_verify import verify

    if not changed or found[0] == changed[0]:
        return not changed
    try:  # this is faster than verify
        difference = found[0] - changed[0]
        values = {symbol: 1.37 + 0.61 * place for place, symbol in enumerate(sorted(difference.free_symbols, key=str))}
        # A large number differs by 1 all the same, and a small one by little.
        return bool(abs(difference.subs(values).evalf()) > 1e-9 * min(1, abs(found[0].subs(values).evalf())))
    except Exception:  # sets, points, matrices, equations
        return not verify(found, changed, timeout_seconds=None)


if __name__ == "__main__":
    serve()
