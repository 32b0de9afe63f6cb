r"""The judge of mathematics: equal expressions are equal, candidates are not answers, and hostile ones hurt nobody."""

import json
import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import two_candidates

pytest.importorskip("math_verify")

from agent_r1.judges import math_server, mathematics
from agent_r1.judges.mathematics import COPIED, MAX_CHARS, TOO_COSTLY, UNREADABLE, Verdict, judge

RIGHT = [
    ("7", "7"),
    ("7", "7.0"),
    ("7", " $7$. "),
    ("7", "\\boxed{7}."),
    ("7", "x = 7"),
    ("7", "7 apples"),
    ("7", "7 square inches"),
    ("(3, \\frac{\\pi}{2})", "(3, π/2)"),
    ("6", "3×2"),
    ("2\\sqrt{3}", "2√3"),
    ("90^\\circ", "90°"),
    ("11,\\! 111,\\! 111,\\! 100", "11111111100"),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{bmatrix} 1 \\\\ 2 \\end{bmatrix}"),
    ("1234", "1,234"),
    ("1234", "$1,234"),
    ("1000000", "10^6"),
    ("\\frac{14}{3}", "14/3"),
    ("\\frac{3}{4}", "3/4 = 0.75"),
    ("\\frac{\\sqrt{2}}{2}", "sqrt(2)/2"),
    ("(3,\\frac{\\pi}{2})", "(3, pi/2)"),
    ("x^2+1", "x**2 + 1"),
    ("x^2+1", "1 + x^2"),
    ("y = 2x + 3", "y=3+2x"),
    ("\\text{Evelyn}", "Evelyn"),
    ("\\text{(C)}", "C"),
    ("90^\\circ", "90"),
    ("10\\%", "10"),
    ("7", "7\\text{ cm}"),
    ("7", "7\\text{ m/s^2}"),
    ("7", "7\\mbox{ cm}^2"),
    ("7", "7\\,\\mathrm{cm}"),
    ("7", "7\\text{ m}/\\text{s}^2"),
    ("7", "\\text{7 cm}"),
    ("7", "\\mathbf{7}"),
    ("7", "x == 7"),
    ("7", "x \\approx 7"),
    ("7", "f(6) = 7"),
    ("7", "\\sqrt{49} = 7"),
    ("\\frac{1}{2}", "\\sin 30^\\circ = \\frac12"),
    ("\\frac{14}{3}", "\\frac{14}{3} \\approx 4.67"),
    ("5\\text{ million}", "5.0\\text{ million}"),
    ("-2,1", "1 \\text{ and } -2"),
    ("-2,1", "x=-2, x=1"),
    ("-2,1", "x=-2 or x=1"),
    ("(1,2)", "(x,y) = (1,2)"),
    ("1110_2", "1110_{2}"),
    ("1110_2", "1110"),
    ("7", "7_{10}"),
    ("x \\equiv 7", "x\\equiv 7.0"),
    ("50\\%", "50"),
    ("50", "50\\%"),
    ("50", "50 percent"),
    ("42", "7(6)"),
    ("42", "(7)(6)"),
    ("\\frac{15}{2}", "7 1/2"),
    ("\\frac{15}{2}", "7\\frac12"),
    ("\\frac{1}{2004!}", "1/2004!"),
    ("\\frac{\\sqrt{2}}{2}", "\\dfrac{\\sqrt{2}}{2}"),
    ("\\sqrt{17}", "\\sqrt{1^2 + 4^2}"),
    ("4", "64^\\frac{1}{3}"),
    ("\\frac{\\pi}{6}", "\\frac\\pi3 \\cdot \\frac12"),
    ("7", "3 + 4 = 7"),
    ("7", "x = 3 + 4 = 7"),
    ("7", "x_1 = 7"),
    ("7", "m\\angle B = 7"),
    ("7", "\\text{surface area} = 7"),
    ("7", "P(A \\cap B) = 7"),
    ("\\frac{1}{2^{98}}", "2^{-98}"),
    ("\\frac{1}{649740}", "\\frac{4}{2598960}"),
    ("x = 5", "5 = x"),
    ("0.00012", "1.2 \\cdot 10^{-4}"),
    ("\\frac{1}{12}", "0.0833333"),
    ("\\frac{2}{19}", "0.105263"),
    ("1,\\!200", "1,200"),
    ("(1,2)", "( 1, 2 )"),
    ("7", "\\angle ABC = 7"),
    ("7", "\\text{area} = 7"),
    ("[-2,7]", "x \\in [-2,7]"),
    ("x = 5", "5"),
    ("\\text{(C)}", "\\textbf{(C)}"),
    # the size of each member counts, and no more than that
    ("\\{0.0000001,1\\}", "\\{1, 10^{-7}\\}"),
    ("(\\frac{1}{3}, 2)", "(0.333333, 2)"),
    ("(\\frac{\\sqrt{2}}{2}, 0)", "(\\frac{1}{\\sqrt{2}}, 0.0)"),
    ("x=1, x=2", "2, 1"),
    ("x^2 < 4", "(-2,2)"),
    ("\\{1,2,3\\}", "\\{1,2\\} \\cup \\{3\\}"),
    ("\\begin{pmatrix} 2 \\\\ 4 \\end{pmatrix}", "2\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
    ("(1,200)", "(1,200.0)"),
    # thin spaces part thousands
    ("12000", "12\\,000"),
    ("12{,}000", "12\\,000"),
    ("12\\,000", "12000"),
    ("12000", "12\u2009000"),
    ("12000", "12\u202f000"),
    ("1200000.5", "1\\,200\\,000.5\\,\\mathrm{km}"),
    ("7", "y(2)=7"),
    ("x^2+1", "y(x)=x^2+1"),
    ("7", "|AB| = 7"),
    ("7", "\\text{area}(ABC) = 7"),
    ("7", "\\text{area}(\\triangle ABC) = 7"),
    ("7", "gcd(14, 21) = 7"),
    ("(15,-29)", "(2^3 + 7, -3 \\cdot 2^2 - 6 \\cdot 2 - 5)"),  # each number of it is looked at
    ("\\begin{pmatrix} 1 & 7 \\\\ 0 & 1 \\end{pmatrix}", "\\begin{pmatrix} 1.0 & 7 \\\\ 0 & 1 \\end{pmatrix}"),
]
WRONG = [
    ("7", "5 or 6 or \\boxed{7}"),
    ("7", "not \\boxed{7}"),
    ("7", "\\boxed{6} or \\boxed{7}"),
    ("7", "\\boxed{\\boxed{6} 7}"),
    ("\\frac{1}{3}", "\\frac{1}{2} \\lor \\frac{1}{3}"),
    ("\\frac{1}{3}", "\\frac{1}{2} \\to \\frac{1}{3}"),
    ("0.5", "50\\%"),
    ("50\\%", ".5"),
    ("50\\%", "\\frac{1}{2}"),
    ("13", "7 6"),
    ("13", "7(6)"),
    ("13", "(7)(6)"),
    ("13", "{7}{6}"),
    ("4", "7 1/2"),
    ("76", "7'6"),
    ("7", "7 + 0 \\cdot 6"),
    ("7", "7 \\cdot 6^0"),
    ("7", "\\max(7, 6)"),
    ("7", "2x = 7"),
    ("7", "x + 1 = 7"),
    ("7", "x != 7"),
    ("7", "\\neg x = 7"),
    ("7", "not = 7"),
    ("x", "x\\text{ y}"),
    ("5\\text{ cm}", "5\\text{ cm}^6\\text{ cm}"),
    ("15\\mbox{ cm}^2", "15\\mbox{ cm}^9"),
    ("9", "9 \\approx 10"),
    ("\\begin{pmatrix} 1 & 7 \\\\ 0 & 1 \\end{pmatrix}", "\\begin{pmatrix} 1 & 6 \\\\ 0 & 1 \\end{pmatrix}"),
    ("(7,8)", "(7 + 0 \\cdot 6,8)"),
    ("(0,5)", "(0,5) \\cup (0,3)"),
    ("7", "8"),
    ("7", "5 or 6 or 7"),
    ("7", "5, 6, 7"),
    ("7", "6 \\text{ or } 7"),
    ("7", "7 or 7.5"),
    ("7", "5 7"),
    ("7", "[5, 7]"),
    ("7", "x \\leq 7"),
    ("7", "not 8 but 7"),
    ("7", "The answer is 7"),
    ("7", "6 = 7"),
    ("7", "5 = 6 = 7"),
    ("7", "7}{8"),
    ("7", "8}\\boxed{7"),
    ("7", "\\boxed{6} \\boxed{7}"),
    ("7", "7\\text{, 8, 9}"),
    ("7", "7\\text{ is wrong, 6}"),
    ("7", "7\\text{ or six}"),
    ("7", "7\\text{ cm or so}"),
    ("7", "7\\text{ million}"),
    ("7", "7\\text{, eight}"),
    ("7", "7\\text{ cm} or 6\\text{ cm}"),
    ("7", "7\\text{ cm}, 6\\text{ cm}"),
    ("7", "7\\text{ cm} \\text{ or } 6\\text{ cm}^2"),
    ("7", "7\\text{ cm} + 6\\text{ cm}"),
    ("15\\mbox{ cm}^2", "15\\mbox{ cm}^2 or 22\\mbox{ cm}^2"),
    ("7", "7\\text{o}\\text{r}\\text{ s}\\text{ix}"),
    ("7", "7\\text{ $6$}"),
    ("7", "7\\text{ \\text{or} 6}"),
    ("7", "7\\text{{o}r six}"),
    ("7", "7\\mathrm{ or 6}"),
    ("7", "7\\mathbf{6}"),
    ("7", "7\\mathit{ or 6}"),
    ("7", "7\\textbf{ 6}"),
    ("7", "7\\textnormal{ or 6}"),
    ("7", "7\\mbox{, but maybe also 12}"),
    ("7", "7\\quad\\text{(not 6)}"),
    ("7", "\\text{7 or 6}"),
    ("7", "7\\text{ hundredths}"),
    ("7", "7\\text{ lakh}"),
    ("7", "7\\text{ negative}"),
    ("7", "7\\text{ at least}"),
    ("7", "6 \\equiv 7"),
    ("7", "6 ≡ 7"),
    ("7", "6\\equiv 8 \\equiv 7"),
    ("x \\equiv 7", "6 \\equiv x \\equiv 7"),
    ("7", "7_2"),
    ("7", "7 _ {6}"),
    ("7", "7_6 + 0"),
    ("7", "\\frac{7}{1}_6"),
    ("7", "7_a"),
    ("1110_2", "1110_3"),
    ("1110_2", "1110_{10}"),
    ("2516_8", "2516_9"),
    ("7", "6 == 7"),
    ("7", "\\sqrt{36} = 7"),
    ("7", "\\frac{12}{2} = 7"),
    ("7", "6\\text{ cm} = 7"),
    ("7", "\\{6\\} = 7"),
    ("7", "7 \\approx 6"),
    ("7", "x = 7 \\approx 6"),
    ("7", "7 ≈ 6"),
    ("7", "6 \\approx 7"),
    ("7", "5 < 7"),
    ("7", "7 \\ne 6"),
    ("7", "7 \\lor 6"),
    ("7", "\\{7\\} \\cup \\{6\\}"),
    ("7", "7 \\pm 1"),
    ("7", "7^{\\text{or 6}}"),
    ("7", "7\\\\8"),
    ("7", "\\begin{cases} 7 \\\\ 6 \\end{cases}"),
    ("7", "7\\phantom{6}"),
    ("7", "7\\hspace{6cm}"),
    ("7", "7 % 6"),
    ("-2,1", "5 = -2, 6 = 1"),
    ("-2,1", "x = 5 = -2, x = 1"),
    ("-2,1", "-2, 1 \\text{ or } 5"),
    ("-2,1", "-2, 1\\text{ or five}"),
    ("7", "7!"),
    ("7", "7x"),
    ("\\frac{1}{3}", "0.333"),
    ("(1, 2)", "(2, 1)"),
    ("\\text{Evelyn}", "nylevE"),
    ("\\text{Evelyn}", "Carla"),
    # a tiny number is another one than another tiny number
    ("\\frac{1}{2^{98}}", "\\frac{1}{2^{60}}"),
    ("\\frac{1}{2^{98}}", "\\frac{5}{2^{98}}"),
    ("\\frac{1}{2^{98}}", "0.0"),
    ("\\frac{1}{20!}", "\\frac{1}{19!}"),
    ("\\frac{3}{2^{60}}", "\\frac{1}{2^{60}}"),
    ("10^{-20}", "5 \\cdot 10^{-20}"),
    ("e^{-50}", "e^{-51}"),
    ("x = \\frac{1}{2^{98}}", "\\frac{1}{2^{60}}"),
    ("\\frac{1}{2^{98}}", "\\frac{1}{2^{60}} = \\frac{1}{2^{98}}"),
    ("0.000001", "0.0000012"),
    ("0.00012", "0.0001201"),
    ("\\frac{1}{649740}", "0.000002"),
    ("\\frac{\\sqrt{2}}{1000}", "0.001414"),
    ("\\{0.0000001,1\\}", "\\{0.0000002,1\\}"),
    ("\\{0.0000001\\}", "0.0000002"),
    ("(0.0000001,2)", "(0.0000003,2)"),
    ("(1,2,0.0000001)", "(1,2,0.0000003)"),
    ("[0,0.0000001]", "[0,0.0000004]"),
    ("(0.0000001,2), (3,4)", "(0.0000002,2), (3,4)"),
    ("0.0000001, 0.0000002", "0.0000003, 0.0000004"),
    ("0.00012, 0.5", "0.0001203, 0.5"),
    ("x = 1, x = 0.0000001", "1, 0.0000002"),
    ("(0.001,2)", "(0.0010004,2)"),
    ("x = 0.0000001", "0.0000002 = x"),
    ("\\begin{pmatrix}0.0000001\\\\1\\end{pmatrix}", "\\begin{pmatrix}0.0000003\\\\1\\end{pmatrix}"),
    # blanks part numbers
    ("7 1/2", "71/2"),
    ("71/2", "7 1/2"),
    ("3 3/4", "33/4"),
    ("33/4", "3 3/4"),
    ("2 1/3", "21/3"),
    ("21/3", "2\\ 1/3"),
    ("1, 200", "1,200"),
    ("1,200", "1, 200"),
    ("1,200", "1 ,200"),
    ("7.5", "7 .5"),
    ("7.5", "7. 5"),
    ("\\text{7 1}", "71"),
    ("1200", "1 200"),
    ("12", "1\\,2"),
    ("12000", "1200\\,0"),
    ("12000000", "1200\\,000\\,0"),
    # another value of x
    ("7", "-x = 7"),
    ("7", "-x \\approx 7"),
    ("7", "7, -x = 7"),
    ("7", "\\sqrt{x} = 7"),
    ("7", "x^2 = 7"),
    ("7", "x/y = 7"),
    ("7", "|x| = 7"),
    ("7", "x x = 7"),
    ("7", "x \\cdot x = 7"),
    ("7", "\\log x = 7"),
    ("7", "x(2) = 7"),
    ("7", "n(n + 1) = 7"),
    ("7", "x(6) = 7"),
    ("7", "y(t) = 7"),
    ("7", "y(y + 1) = 7"),
    # text beside a name
    ("7", "\\text{cost}(5 or 6, not) = 7"),
    ("7", "\\text{area} (not) = 7"),
    ("7", "\\text{area}(SIX) = 7"),
    ("7", "f(5, not) = 7"),
    ("7", ""),
    ("7", "$$"),
    ("7", "."),
]
HOSTILE = [
    "9^{9^{9^9}}",
    "2^{10000000000}",
    "10000000!",
    "(" * 150 + "7" + ")" * 150,
    "{" * 200,
    "\\frac{" * 60 + "7" + "}" * 60,
    "\\int" * 50,
    "__import__('os').system('kill -9 0')",
    "exit()",
    "\x00",
    "\ud800",
    "7\n\n8\n",
    '"]\n["7", "7"]\n',
    "7" * 10_000,
]


@pytest.mark.parametrize(("gold", "answer"), RIGHT)
def test_the_same_expression_is_right(gold, answer):
    assert judge(gold, answer) == Verdict(True, "")


@pytest.mark.parametrize(("gold", "answer"), WRONG)
def test_anything_else_is_wrong(gold, answer):
    assert not judge(gold, answer).correct


def test_whole_numbers_are_judged_as_the_process_judges_them(monkeypatch):
    rng = random.Random(0)
    pairs = [(str(a), str(a + rng.choice([-2 * a, -1, 1, 9 * a]))) for a in (0, 1, 7, 1200, -3, 10**18)]
    with monkeypatch.context() as patch:
        patch.setattr(mathematics.server, "ask", None)
        at_once = [judge(*pair, "How many?") for pair in pairs]
    assert at_once == [mathematics._compute(*pair, "How many?") if pair[0] != pair[1] else Verdict(True, "")
                       for pair in pairs]  # fmt: skip


def test_the_gold_answer_is_right_even_where_it_cannot_be_read():
    assert judge("\\begin{oops} 7", "\\begin{oops}7") == Verdict(True, "")


def test_no_answer_of_two_candidates_is_right():
    """A sample of the templates; two_candidates.py asks all of them, with all pairs in all orders."""
    rng = random.Random(0)
    templates = two_candidates.candidates()
    assert len(templates) > 1000 and len(two_candidates.PAIRS) >= 20
    for template in rng.sample(templates, 120):
        gold, other = rng.sample(rng.choice(two_candidates.PAIRS), 2)
        assert not two_candidates.passes(template, gold, other), template
    for template in two_candidates.statements():
        gold, other = rng.sample(two_candidates.PAIRS[0], 2)
        assert not two_candidates.passes(template, gold, other, states=True), template
    for gold in {gold for pair in two_candidates.PAIRS for gold in pair}:
        assert judge(gold, gold).correct


COMPUTE = "Compute $99^2+99+1$ in your head. One of the numbers is $1,200$, another $\\frac{3}{6}$, and $x = 3 + 4$."


@pytest.mark.parametrize(
    ("gold", "answer", "reason"),
    [
        ("9901", "99^2+99+1", COPIED),
        ("9901", "$99^{2} + 99 + 1$", COPIED),
        ("9901", "x = (99^2+99+1)", COPIED),
        ("9801", "99^2", COPIED),  # a piece of it
        ("\\frac{1}{2}", "3/6", COPIED),
        ("\\frac{1}{2}", "\\dfrac{3}{6}", COPIED),
        ("7", "3 + 4", COPIED),
        ("9901", "99^2+99+1 = 9901", ""),
        ("9901", "9801 + 100", ""),  # unsimplified
        ("1200", "\\$1,200.0", ""),  # the gold answer's value in another notation
        ("99^2+99+1", "99^2 + 99 + 1", ""),
        ("99", "99.0", ""),
        ("9902", "99^2+99+1", COPIED),
    ],
)
def test_an_answer_that_stands_in_the_question_is_none(gold, answer, reason):
    assert judge(gold, answer, COMPUTE) == Verdict(reason == "", reason)


@pytest.mark.parametrize(
    ("answer", "question", "right"),
    [
        ("x^2 + y^2 = 7", "Compute $x^2 + y^2$.", True),
        ("\\sin A = 7", "What is $\\sin A$?", True),
        ("|A \\cap B| = 7", "Find $|A \\cap B|$, please.", True),
        ("AB/BC = 7", "Find \\(AB/BC\\)", True),
        ("\\sin x = 7", "Find $\\sin(x)$.", True),
        ("\\sin^2(x) = 7", "Find $\\sin^2 x$.", True),
        ("a/b = 7", "Find $\\frac{a}{b}$.", True),
        ("\\frac{a+b}{c} = 7", "Find \\[(a+b)/c.\\]", True),
        ("a \\cdot b = 7", "Find $ab$.", True),
        ("a/b = 7", "Find the ratio a/b, please.", True),
        ("x^2 = 7", "Find $x^2 \\text{ when } y = 1$.", True),
        ("\\sin x = 7", "Find $\\sin(2x)$.", False),
        ("\\sin x = 7", "Find $\\sin(x) \\cos(x)$.", False),
        ("\\sin x = 7", "Find $\\sin(x)^2$.", False),
        ("a/b = 7", "Find $\\frac{a}{bc}$.", False),
        ("a/b = 7", "Find $c \\cdot \\frac{a}{b}$.", False),
        ("a/b = 7", "Find $c \\frac{a}{b}$.", False),
        ("a/b = 7", "Find $\\frac{a}{b}c$.", False),
        ("a \\cdot b = 7", "Find $abc$.", False),
        ("x \\cdot x = 7", "Find $x$.", False),
        ("x^2 = 7", "Compute $y^2$.", False),
        ("x^2 = 7", "Solve $x^2 = 49$ for $x > 0$.", False),  # of an equation
        ("x^2 = 7", "Compute $1 - x^2$.", False),  # a part
        ("x + y = 7", "Compute $2x + y$.", False),
        ("-x = 7", "Compute $-x$.", False),
        ("\\sqrt{x} = 7", "Compute $\\sqrt{x}$.", False),
        ("2x = 7", "Compute $2x$.", False),
    ],
)
def test_an_expression_says_what_is_asked_for_where_the_question_has_it(answer, question, right):
    assert judge("7", answer, question).correct == right


def test_the_length_is_looked_at_before_anything_else(monkeypatch):
    for name in ("unwrap", "same_text", "stands_in", "read"):
        monkeypatch.setattr(mathematics, name, None)
    start = time.monotonic()
    for answer in ("$" * 10_000 + "7" + "$" * 10_000, "\\boxed{" * 4_000 + "7" + "}" * 4_000, " " * 10**6):
        assert str(MAX_CHARS) in judge("7", answer).reason
    assert time.monotonic() - start < 2
    monkeypatch.undo()
    longer = " + ".join(["x^2"] * 100)
    assert judge(longer, longer).correct  # a gold answer of any length is right


def test_a_question_of_spaces_costs_no_time():
    """A file of somebody's; patterns of what a question asks for try all of them from every place."""
    start = time.process_time()
    judge("7", "x^2 = 7", "^" + " " * 30_000 + "$x^2$")
    assert time.process_time() - start < 1


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_a_hostile_answer_is_wrong_and_the_next_one_is_judged(number):
    start = time.monotonic()
    assert not judge("7", HOSTILE[number]).correct
    assert time.monotonic() - start < 60  # two seconds of processor time, on a machine that may be busy
    assert judge(f"{2 * number + 1}/2", f"{number}.5").correct  # a new one: verdicts are kept


def test_a_long_answer_takes_little_of_the_time():
    """Each of its nine numbers is looked at; to parse the point anew for each took ten times as long."""
    mathematics.server.close()
    judge("2", "1 + 1 + 0 + 0 + 0")
    process = mathematics.server.process
    before = _processor_seconds(process.pid)
    assert judge("(16,-30)", "(2^3 + 8, -3 \\cdot 2^2 - 6 \\cdot 2 - 6)").correct
    assert _processor_seconds(process.pid) - before < math_server.CPU_SECONDS / 2


def test_what_could_not_be_judged_has_a_reason():
    assert judge("7", "7 | 6") == Verdict(False, UNREADABLE)
    assert judge("7", "9^{9^{9^9}}") == Verdict(False, TOO_COSTLY)
    assert judge("7", " ").reason == "the answer is empty"
    assert str(MAX_CHARS) in judge("7", "7" * (MAX_CHARS + 1)).reason
    assert judge("7", "8").reason == ""


def test_it_works_in_threads():
    verdicts = {}

    def work(number):
        verdicts[number] = judge(str(number), f"{number}.0").correct, judge(str(number), f"{number + 1}.0").correct

    threads = [threading.Thread(target=work, args=(number,)) for number in range(100, 108)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(verdicts.values()) == {(True, False)} and len(verdicts) == 8


def test_a_server_that_was_killed_is_started_again():
    assert judge("41", "41.0").correct
    os.kill(mathematics.server.process.pid, signal.SIGKILL)
    mathematics.server.process.wait()
    assert judge("43", "43.0").correct


def test_a_forked_process_has_a_server_of_its_own():
    assert judge("47", "47.0").correct
    child = os.fork()
    if child == 0:
        os._exit(0 if judge("53", "53.0").correct and not judge("53", "54.0").correct else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert judge("59", "59.0").correct and not judge("59", "61.0").correct


def test_a_fork_in_the_middle_of_a_question():
    assert judge("67", "67.0").correct
    process = mathematics.server.process
    asking = threading.Thread(target=judge, args=("67", "9^{9^{9^8}}"))
    asking.start()
    deadline = time.monotonic() + 30
    while not mathematics.server.lock.locked() and time.monotonic() < deadline:
        time.sleep(0.001)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(0 if judge("71", "71.0").correct and not judge("71", "72.0").correct else 1)
    assert os.waitpid(child, 0)[1] == 0
    asking.join()
    assert mathematics.server.process is process and process.poll() is None
    assert judge("73", "73.0").correct and not judge("73", "74.0").correct


def test_a_missing_math_verify_names_the_extra(monkeypatch):
    monkeypatch.setattr(mathematics, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'agent-r1\[math\]'"):
        mathematics.require_math_verify()


ANSWERS_TWICE = """
import json, sys
for line in sys.stdin:
    number, gold, value, *_ = json.loads(line)
    for verdict in [gold == value, False]:
        print(json.dumps([number, verdict, ""]), flush=True)
"""


def test_a_second_answer_to_a_question_does_not_shift_the_next_ones(monkeypatch, tmp_path):
    """A child that is killed when it has answered leaves two: its own, and the server's about its end."""
    (tmp_path / "server.py").write_text(ANSWERS_TWICE)
    mathematics.server.close()
    monkeypatch.setattr(mathematics.math_server, "__file__", str(tmp_path / "server.py"))
    try:
        assert [judge("8101", f"{n} + 0").correct for n in (1, 2)] == [False, False]
        for number in range(8102, 8107):
            assert judge(str(number), f"x = {number}").correct
            assert not judge(str(number), f"x = {number + 1}").correct
    finally:
        mathematics.server.close()


def test_an_answer_that_nobody_waited_for_is_passed_over():
    assert judge("8201", "8201.0").correct
    request = [-1, "8201", "8200", [], [], [], []]  # asked by someone who was interrupted
    mathematics.server.process.stdin.write((json.dumps(request) + "\n").encode())
    assert judge("8203", "8203.0").correct and not judge("8203", "8204.0").correct


def test_what_was_too_costly_is_asked_again(monkeypatch):
    asked = []

    def ask(reading):
        asked.append(reading)
        raise mathematics._TooCostly

    monkeypatch.setattr(mathematics.server, "ask", ask)
    assert [judge("7", "6 + 8301") for _ in range(2)] == [Verdict(False, TOO_COSTLY)] * 2 and len(asked) == 2
    monkeypatch.undo()
    assert judge("8307", "6 + 8301") == Verdict(True, "")
    assert judge("7", "6 + 8301") == Verdict(False, "")


def test_a_judge_that_does_not_run_is_a_fault_and_not_a_verdict(monkeypatch):
    mathematics.server.close()
    monkeypatch.setattr(mathematics.sys, "executable", "/bin/false")
    with pytest.raises(ConnectionError, match="does not run"):
        judge("7331", "7331 + 0")
    monkeypatch.undo()
    assert judge("7331", "7331 + 0").correct


def test_a_judge_that_is_killed_from_outside_is_a_fault():
    judge("2", "1 + 1")
    before = set(_children(mathematics.server.process.pid))
    raised = []

    def ask():
        try:
            judge("7", "99^{99}! / 5")
        except ConnectionError as error:
            raised.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    deadline = time.monotonic() + 20
    while thread.is_alive() and time.monotonic() < deadline:
        for pid in set(_children(mathematics.server.process.pid)) - before:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    thread.join()
    assert raised == [mathematics.TOO_BUSY]


@pytest.mark.parametrize(("seconds", "reason"), [(1.0, TOO_COSTLY), (0.0, mathematics.TOO_BUSY)])
def test_an_alarm_is_the_answers_doing_where_it_has_used_the_processor(seconds, reason):
    """The alarm of the clock comes early, as it does on a machine so busy that the processor's limit is not reached."""
    mathematics.server.close()
    judge("2", f"1 + 1 + {'0' if seconds else '0 + 0'}")  # starts the server
    before = set(_children(mathematics.server.process.pid))
    said = []

    def ask():
        try:
            said.append(judge("7", f"98^{{98}}! / {11 if seconds else 13}").reason)
        except ConnectionError as error:
            said.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    deadline = time.monotonic() + 20
    while thread.is_alive() and time.monotonic() < deadline:
        for pid in set(_children(mathematics.server.process.pid)) - before:
            with suppress(OSError):
                times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
                if sum(map(int, times)) / os.sysconf("SC_CLK_TCK") >= seconds:
                    os.kill(pid, signal.SIGALRM)
    thread.join()
    assert said == [reason]


def _children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _processor_seconds(pid):
    """Of a process and the children that it has waited for."""
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
