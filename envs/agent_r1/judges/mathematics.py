r"""The judge of mathematics: `math-verify` in a process that a hostile answer cannot hurt.

An answer must be one expression as a whole: `5 or 6 or 7` is not 7, and neither is a sentence that ends in 7.
`math_text` reads the text, and `math_server` computes the result. `\frac{14}{3}`, `14/3` and `x = 14/3` are the same
answer. Every number of a right answer counts. If another number in its place does not change the value, math-verify
has ignored it.

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
    """A verdict: whether the answer is right, and the reason if it could not be judged ("" otherwise)."""

    correct: bool
    reason: str


class _TooCostly(Exception):
    """A judgement that took too long. It is not cached, because a busy machine may be the cause."""


def require_math_verify() -> None:
    """Raise ImportError, with the name of the extra, if math-verify is not installed."""
    if find_spec("math_verify") is None:
        raise ImportError("judging mathematics needs math-verify: pip install 'agent-r1[math]'")


def judge(gold: str, answer: str, question: str = "") -> Verdict:
    """Compare any answer with the gold answer (LaTeX or plain). No text of an answer raises.

    With a `question`, an answer that occurs in it is wrong, unless it is the gold answer itself. A copied piece with an
    addition that changes nothing is wrong, too (`99^2+99+1+0`). The left side of an equals sign may be the expression
    that the question asks for (`x^2 + y^2 = 7`); otherwise it must be a name.

    Raises ConnectionError if the process that judges does not run, crashes or is killed. Such a fault says nothing
    about the answer, and it is not cached as a verdict. A crash is logged.
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
    if WHOLE.fullmatch(gold) and WHOLE.fullmatch(answer):  # most wrong answers: no computation needed
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
    """Judge an unwrapped answer. Raises _TooCostly; ConnectionError as `judge` does."""
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
        # -P: modules of this folder may have the names of other packages, so it must not be on the path.
        return [sys.executable, "-P", math_server.__file__]

    def ask(self, reading: Reading) -> Verdict:
        """Return the verdict on a reading. Raises _TooCostly and ConnectionError."""
        number = next(self.ids)
        request = json.dumps([number, *reading]).encode() + b"\n"

        def verdict(pipe: IO[bytes]) -> Verdict:
            # A reply to an earlier question may come first: if its child was killed after answering, it has two.
            while line := pipe.readline():
                answered, *fields = json.loads(line)
                if answered == number:
                    return Verdict(*fields)
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
