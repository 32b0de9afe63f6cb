r"""Is an answer the gold answer? Mathematics judged by `math-verify`, in a process that a hostile answer cannot hurt.

An answer has to be one expression as a whole: `5 or 6 or 7` is not 7, and neither is a sentence that ends in 7. What
its text says is read by `math_text`; `math_server` computes it. `\frac{14}{3}`, `14/3` and `x = 14/3` are the same
answer. Every number of a right answer counts: with another one in its place the answer would say something else, or
math-verify has passed over it.

math-verify cannot be called in threads, and `9^{9^{9^9}}` costs it seconds and memory. So a server process is started
at the first question (see `child_process`).
"""

from __future__ import annotations

import json
import logging
import re
import sys
from functools import lru_cache
from importlib.util import find_spec
from itertools import count
from typing import IO, NamedTuple

from agent_r1.judges import math_server
from agent_r1.judges.math_copying import copied_pieces, stands_in
from agent_r1.judges.math_notation import unwrap
from agent_r1.judges.math_server import CRASHED, TOO_BUSY, TOO_COSTLY, UNREADABLE
from agent_r1.judges.math_text import Reading, has_other_symbols, is_words, read, same_text, same_words
from agent_r1_tools.child_process import ChildProcess

logger = logging.getLogger(__name__)

MAX_CHARS = 400
WHOLE = re.compile(r"0|-?[1-9][0-9]*")  # a number with one way to write it
COPIED = "the answer stands in the question and is not the gold answer"


class Verdict(NamedTuple):
    """Whether the answer is right, and, where it could not be judged, why ("" otherwise)."""

    correct: bool
    reason: str


class _TooCostly(Exception):
    """Not kept as a verdict: a machine that is busy may have a part in it."""


def require_math_verify() -> None:
    """Raise ImportError, naming the extra, where math-verify is not installed."""
    if find_spec("math_verify") is None:
        raise ImportError("judging mathematics needs math-verify: pip install 'agent-r1[math]'")


def judge(gold: str, answer: str, question: str = "") -> Verdict:
    """Compare an answer, whatever it is, with the gold answer (LaTeX or plain). Never raises for what is written.

    With a `question`, an answer that stands in it is wrong, unless it is the gold answer itself; so is one to which the
    rest adds nothing (`99^2+99+1+0`). What the question asks for may stand on the left of an equals sign
    (`x^2 + y^2 = 7`), where else only a name may.

    Raises ConnectionError where the process that judges does not run, crashes or is killed: a fault that says nothing
    about the answer, and that is not kept as its verdict. A crash is logged.
    """
    if len(answer) > max(MAX_CHARS, len(gold)):  # before anything is done with it
        return Verdict(False, f"the answer is longer than {MAX_CHARS} characters")
    gold, answer = unwrap(gold), unwrap(answer)
    if not answer:
        return Verdict(False, "the answer is empty")
    if same_text(gold, answer):
        return Verdict(True, "")
    if is_words(gold):
        return Verdict(same_words(gold, answer), "")
    if stands_in(question, gold, answer):
        return Verdict(False, COPIED)
    if WHOLE.fullmatch(gold) and WHOLE.fullmatch(answer):  # most wrong answers: there is nothing to compute
        return Verdict(False, "")
    try:
        verdict = _compute(gold, answer, question)
        pieces = copied_pieces(question, gold, answer) if verdict.correct else []
        if any(_compute(gold, piece, "").correct for piece in pieces):
            return Verdict(False, COPIED)
        return verdict
    except _TooCostly:
        return Verdict(False, TOO_COSTLY)


@lru_cache(maxsize=8192)
def _compute(gold: str, answer: str, question: str) -> Verdict:
    """The verdict on an unwrapped answer. Raises _TooCostly; ConnectionError as `judge` does."""
    reading = read(gold, answer, question)
    if reading is None:
        return Verdict(False, UNREADABLE)
    if has_other_symbols(reading.gold, reading.value):
        return Verdict(False, "")
    return server.ask(reading)


# --- the process ------------------------------------------------------------------------------------------------------


class _Server(ChildProcess):
    """The process that judges."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = count()

    def command(self) -> list[str]:
        require_math_verify()
        # -P: this folder has modules named like others (datasets, tokenizers) and must not be on the path.
        return [sys.executable, "-P", math_server.__file__]

    def ask(self, reading: Reading) -> Verdict:
        """The verdict on what an answer says. Raises _TooCostly and ConnectionError."""
        number = next(self.ids)
        request = json.dumps([number, *reading]).encode() + b"\n"

        def verdict(pipe: IO[bytes]) -> Verdict:
            # Another question's may come first: one whose child was killed when it had answered has two.
            while line := pipe.readline():
                answered, *said = json.loads(line)
                if answered == number:
                    return Verdict(*said)
            raise EOFError

        for _ in range(2):  # a server that was killed from outside is started again
            try:
                reply = self.exchange(request, verdict)
            except OSError:
                continue
            if reply.reason == TOO_BUSY:
                raise ConnectionError(TOO_BUSY)
            if reply.reason.startswith(CRASHED):
                logger.error("%s; gold answer %r, answer %r", reply.reason, reading.gold, reading.value)
                raise ConnectionError(reply.reason)
            if reply.reason == TOO_COSTLY:
                raise _TooCostly
            return reply
        raise ConnectionError("the process that judges answers does not run")


server = _Server()
