r"""Is an answer the gold answer? Mathematics judged by `math-verify`, in a process that a hostile answer cannot hurt.

An answer has to be one expression as a whole: `5 or 6 or 7` is not 7, and neither is a sentence that ends in 7. It is
given to math-verify as the content of `\boxed{}`, which is the official extraction of MATH. `\frac{14}{3}`, `14/3` and
`x = 14/3` are the same answer. math-verify passes over much that states a second value (`7\text{, 8, 9}`, `6 \equiv 7`,
`7_2`), so that is looked for first.

math-verify cannot be called in threads, and `9^{9^{9^9}}` costs it seconds and memory. So a server process (started at
the first question, ended with this process) forks a child for every question, and the child has `CPU_SECONDS` and
`MEMORY_BYTES`. This file is also that server's program, so it imports nothing but the standard library.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

MAX_CHARS = 400
CPU_SECONDS = 1.0
WALL_SECONDS = 10  # for a machine that is busy with other things
COSTLY_SECONDS = 0.3  # of processor time; an ordinary answer takes 0.1
MEMORY_BYTES = 2**30

UNREADABLE = "the answer cannot be read as one expression"
TOO_COSTLY = "judging the answer took too much time or memory"
TOO_BUSY = "judging was killed from outside, or had no processor for so long"

# `\text{}` and its like, which math-verify takes for a unit and drops.
_TEXT_COMMAND = r"\\(?:text[a-z]*|mbox|hbox|math(?:rm|bf|it|sf|tt)|operatorname)(?![a-zA-Z])"
_TEXT = re.compile(_TEXT_COMMAND + r"\s*\{([^{}]*)\}")
_LAST_TEXT = re.compile(r"(?<=\S)\s*(?:(?:/|\\cdot|\\[ ,;])\s*)?" + _TEXT.pattern + r"(?:\^\d|\^\{\d\})?\s*$")
_UNIT = re.compile(r"(?:[a-zA-Z°µ](?:\^[23])?|[\s~./()'-])*")
_NO_UNITS = frozenset(
    "or and not is but maybe either neither nor no if unless else otherwise than versus vs perhaps possibly probably "
    "alternatively instead rather also except without equals wrong false plus minus times to ou oder "
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion trillion "
    "dozen half halves third thirds quarter quarters squared cubed twice".split()
)
_NEAR = 0.1  # \frac{14}{3} \approx 5


class Verdict(NamedTuple):
    """Whether the answer is right, and, where it could not be judged, why ("" otherwise)."""

    correct: bool
    reason: str


def require_math_verify() -> None:
    """Raise ImportError, naming the extra, where math-verify is not installed."""
    if find_spec("math_verify") is None:
        raise ImportError("judging mathematics needs math-verify: pip install 'agent-r1[math]'")


@lru_cache(maxsize=8192)
def judge(gold: str, answer: str) -> Verdict:
    """Compare an answer, whatever it is, with the gold answer (LaTeX or plain). Never raises for what is written.

    Raises ConnectionError where the process that judges doesn't run or is killed: a fault that says nothing about the
    answer, and that is not kept as its verdict.
    """
    answer = unwrap(answer)
    if not answer:
        return Verdict(False, "the answer is empty")
    if len(answer) > MAX_CHARS:
        return Verdict(False, f"the answer is longer than {MAX_CHARS} characters")
    if _plain_text(answer) == _plain_text(unwrap(gold)):
        return Verdict(True, "")
    if not _balanced(answer) or not _texts_are_units(gold, answer) or not _same_notation(gold, answer):
        return Verdict(False, UNREADABLE)
    return server.ask(gold, answer)


def last_boxed(solution: str) -> str | None:
    r"""The content of the last `\boxed{}` or `\fbox{}` of a solution, as MATH defines its gold answer; None without."""
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
    r"""The answer without what people put around it: blanks, a full stop, `$...$`, `\(...\)`, `\[...\]`, `\boxed{}`."""
    answer = answer.strip()
    while True:
        bare = answer.removesuffix(".").strip()
        for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("\\boxed{", "}")):
            inside = bare[len(opening) : len(bare) - len(closing)]
            if len(bare) > len(opening) and bare.startswith(opening) and bare.endswith(closing) and _balanced(inside):
                bare = inside.strip()
                break
        if bare == answer:
            return answer
        answer = bare


def _balanced(text: str) -> bool:
    """Whether every brace has its partner: otherwise it would close the box that the answer is put in."""
    depth = 0
    for brace in re.findall(r"(?<!\\)(?:\\\\)*([{}])", text):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            return False
    return depth == 0


def _plain_text(text: str) -> str:
    r"""For answers that are words, such as `\text{Evelyn}`: without blanks, `\text{}` and capitals."""
    text = re.sub(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}", r"\1", text)
    return re.sub(r"\s|\\[ ,;!]", "", text).lower()


def _texts_are_units(gold: str, answer: str) -> bool:
    r"""Whether every `\text{}` of the answer is a unit, the gold answer's, the whole answer, or just and/or."""
    known = {_plain_text(text) for text in _TEXT.findall(gold)}
    if _TEXT.fullmatch(answer):
        return True
    rest = re.sub(r"\\text\s*\{\s*(?:and|or)\s*\}", "", answer)  # a comma, to math-verify
    texts = [text for text in _TEXT.findall(rest) if _plain_text(text) not in known]
    if len(re.findall(_TEXT_COMMAND, rest)) != len(_TEXT.findall(rest)):  # nested, or without braces
        return False
    return all(
        _UNIT.fullmatch(text) and _NO_UNITS.isdisjoint(re.findall("[a-z]+", text.lower()))
        for text in [*texts, "".join(texts)]
    )


def _same_notation(gold: str, answer: str) -> bool:
    r"""Whether the answer has no `\equiv` and no base (`7_8`) that the gold answer has not: math-verify skips them."""

    def bases(text: str) -> set[str]:
        return set(re.findall(r"[\d)}!]_\{?(\d+|.)", _plain_text(text)))

    def congruences(text: str) -> int:
        return len(re.findall(r"\\equiv|≡", text))

    return congruences(answer) <= congruences(gold) and bases(answer) <= (bases(gold) or {"10"})


# --- the process ------------------------------------------------------------------------------------------------------


class _Server:
    """The process that judges, started when it is first asked. Questions from several threads are asked in turn."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, gold: str, answer: str) -> Verdict:
        with self.lock:
            for _ in range(2):  # a server that was killed from outside is started again
                try:
                    process = self._running()
                    assert process.stdin is not None and process.stdout is not None
                    process.stdin.write((json.dumps([gold, answer]) + "\n").encode())
                    line = process.stdout.readline()
                except OSError:
                    line = b""
                if line:
                    verdict = Verdict(*json.loads(line))
                    if verdict.reason == TOO_BUSY:
                        raise ConnectionError(TOO_BUSY)
                    return verdict
                self.close()
        raise ConnectionError("the process that judges answers does not run")

    def _running(self) -> subprocess.Popen[bytes]:
        if self.process is None:
            require_math_verify()
            # -P: this folder has modules named like others (datasets, tokenizers) and must not be on the path.
            command = [sys.executable, "-P", __file__]
            # Unbuffered: a fork in the middle of a question must not write the rest of it once more.
            self.process = subprocess.Popen(
                command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        return self.process

    def close(self) -> None:
        """End the process."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.communicate()

    def forget(self) -> None:
        """In a fork of this process: the lock and the process are its parent's."""
        self.lock = threading.Lock()
        if self.process is not None:
            self.process.returncode = 0  # not this process's child: nothing to wait for or to warn of
            self.process = None


server = _Server()
atexit.register(server.close)
os.register_at_fork(after_in_child=server.forget)


def _serve() -> None:
    """Answer questions, one JSON line each, until the pipe is closed."""
    logging.disable()  # math-verify warns that it has no time limit of its own
    answers = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    _compare("\\frac{1}{2}", "0.5")  # imports and caches, before the first fork
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _limit()
            os.write(answers, (json.dumps(_compare(*json.loads(line))) + "\n").encode())
            os._exit(0)
        _, status, used = os.wait4(child, 0)
        if status != 0:  # its processor time is over or it is out of memory; or the machine ended it
            ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            starved = ended_by == signal.SIGALRM and used.ru_utime + used.ru_stime < COSTLY_SECONDS
            busy = starved or ended_by in (signal.SIGKILL, signal.SIGTERM)
            os.write(answers, (json.dumps([False, TOO_BUSY if busy else TOO_COSTLY]) + "\n").encode())


def _limit() -> None:
    """Bound this process: when time is up, the kernel ends it, also in the middle of a long multiplication."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.alarm(WALL_SECONDS)


def _compare(gold: str, answer: str) -> tuple[bool, str]:
    """What math-verify says about two expressions; gold goes first, it is not symmetric."""
    from math_verify import LatexExtractionConfig, parse, verify

    def read(expression: str) -> list[Any]:
        # math-verify would drop all from the first unit on: 7\text{ cm} or 6\text{ cm}.
        while (shorter := _LAST_TEXT.sub("", expression)) != expression:
            expression = shorter
        boxed = "\\boxed{" + expression + "}"
        return parse(boxed, [LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=None)

    if (whole := _TEXT.fullmatch(answer)) and answer != gold:  # \mathbf{7}
        answer = whole[1]
    # As Python and sympy write it.
    answer = re.sub(r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi ", answer.replace("**", "^").replace("==", "="))
    found = read(answer)
    if not found or isinstance(found[0], str):
        return False, UNREADABLE
    for statement in _statements(answer):
        exact, *rounded = re.split(r"\\approx|≈|~=", statement)
        sides = re.split(r"(?<![\\<>!])=", exact)
        values = [read(side) for side in sides]
        if len(values) > 2:  # math-verify would take the last side of 5 = 6 = 7
            return False, UNREADABLE
        # The sine of a number may be that of degrees.
        plain = _is_number(values[0]) and not re.search("sin|cos|tan|cot|sec|csc", sides[0])
        named = not plain and bool(re.search("[a-zA-Z]", sides[0]))
        if len(values) == 2 and not named and not verify(*values, timeout_seconds=None):
            return False, ""  # 6 = 7
        if named and len(values) == len(rounded) == 1:  # x \approx 7
            continue
        for side in map(read, rounded):
            if not (_is_number(values[-1]) and _is_number(side)):
                return False, UNREADABLE
            if not abs(side[0] - values[-1][0]) <= _NEAR * abs(values[-1][0]):
                return False, ""  # 7 \approx 6
    return bool(verify(read(gold), found, timeout_seconds=None)), ""


def _statements(answer: str) -> list[str]:
    """What stands between the commas (and, or, semicolons) that are in no brackets and part no thousands."""
    found, depth = [""], 0
    answer = re.sub(r"\\text\s*\{\s*(?:and|or)\s*\}|(?<![a-zA-Z])(?:and|or)(?![a-zA-Z])", ";", answer)
    for piece in re.split(r"([(\[{)\]};]|(?<!\\),(?!\d{3}(?!\d)))", answer):
        depth += (piece in ("(", "[", "{")) - (piece in (")", "]", "}"))
        if depth == 0 and piece in (",", ";"):
            found.append("")
        else:
            found[-1] += piece
    return found


def _is_number(parsed: list[Any]) -> bool:
    return bool(parsed) and getattr(parsed[0], "is_number", False) is True


if __name__ == "__main__":
    _serve()
