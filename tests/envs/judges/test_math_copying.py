r"""The judge of mathematics on answers that are copied from the question, with something added that adds nothing."""

import time

import pytest

pytest.importorskip("math_verify")

from agent_r1.judges.math_copying import MOST_PIECES, copied_pieces, stands_in
from agent_r1.judges.mathematics import COPIED, judge

SUM = "Compute $99^2+99+1$ in your head. One of the numbers is $1,200$, another $\\frac{3}{6}$, and $x = 3 + 4$."
EXPAND = r"Express $\frac{3}{20}$ as a decimal, expand $(x+1)(x+2)$, and simplify $\sqrt{\frac{18}{2}}$."
COPIES = [
    ("9901", "99^2+99+1+0", SUM),
    ("9901", "1-1+99^2+99+1", SUM),
    ("9901", "(99^2+99+1) \\cdot 1", SUM),
    ("9901", "\\frac{2(99^2+99+1)}{2}", SUM),
    ("9901", "\\sqrt{99^2+99+1}^2", SUM),
    ("9801", "99^2+0", SUM),
    ("7", "3+4+0", SUM),
    ("\\frac12", "\\frac{3}{6}+0", SUM),
    ("0.15", "\\dfrac{3}{20}+0", EXPAND),
    ("x^2+3x+2", "(x+1)(x+2)+0", EXPAND),
    ("3", "\\sqrt{\\frac{18}{2}}+0", EXPAND),
    ("\\frac{2}{5}", "\\frac{1}{5} \\div \\frac{12}{24}+0", "Find $\\frac{1}{5} \\div \\frac{12}{24}$."),
]
MORE_COPIES = [
    ("9901", "0+99^2+99+1", SUM),
    ("9901", "99^{2} + 99 + 1 + 1 - 1", SUM),
    ("9901", "-(-(99^2+99+1))", SUM),
    ("9901", "x = 99^2+99+1+1-1", SUM),
    ("9901", "(99**2+99+1)^1", SUM),
    ("9901", "$\\boxed{99^2+99+1-0}$", SUM),
]
NO_COPIES = [
    ("9901", "9801+100", SUM),
    ("9901", "9801+99+1", SUM),
    ("9901", "99 \\cdot 100+1", SUM),
    ("9901", "99^2+99+1 = 9901", SUM),
    ("9901", "9,901.0", SUM),
    ("7", "3+4=7", SUM),
    ("\\frac12", "\\frac12+0", SUM),
    ("99^2+99+1", "99^2+99+1+0", SUM),  # the gold answer itself
    ("0.15", "0.150", EXPAND),
    ("x^2+3x+2", "2+3x+x^2", EXPAND),
    ("x^2+3x+2", "x(x+3)+2", EXPAND),
    ("3", "\\sqrt{9}", EXPAND),
]


QUARTER = r"Compute $\sum_{n=0}^\infty \left(\frac{1}{4}\right)^{n+1}$, where $4$, $0$ and $(0,3)$, $(9,11)$ are given."
GOLDS = [
    ("\\frac{1}{4}", "(\\frac{1}{4})", QUARTER),
    ("\\frac{1}{4}", "\\left(\\frac{1}{4}\\right)", QUARTER),
    ("\\frac{1}{4}", "((\\frac14))", QUARTER),
    ("4", "((4))", QUARTER),
    ("y=2x+3", "2x-y+3=0", QUARTER),
    ("y=2x+3", "2x+3=y", "Rewrite $2x+3$."),
    ("y=2x+3", "2x+3", "Rewrite $2x+3$."),
    ("x = 4", "4=x", QUARTER),
    ("x = 4", "4", QUARTER),
    ("4x-5y+50=0", "4x-5y-(-50)=0", QUARTER),
    ("(9,11)", "9, 11", QUARTER),
    ("(9,11)", "(9, 11)", QUARTER),
    ("9,11", "(9,11)", QUARTER),
]
EQUATIONS = [
    ("x=7", "x=3+4", SUM),
    ("x=7", "3+4=x", SUM),
    ("x=7", "3+4", SUM),
    ("y=\\frac12", "y=\\frac{3}{6}", SUM),
    ("y=x^2+3x+2", "y=(x+1)(x+2)", EXPAND),
    ("y=2x+3", "2x-y+3=0", "Solve $2x-y+3=0$ for $y$."),
    ("y=2x+3", "2x-y+3=0+0", "Solve $2x-y+3=0$ for $y$."),
]


@pytest.mark.parametrize(("gold", "answer", "question"), GOLDS)
def test_the_gold_answer_is_no_copy_in_brackets_or_as_an_equation(gold, answer, question):
    assert judge(gold, answer, question) == (True, "")


@pytest.mark.parametrize(("gold", "answer", "question"), EQUATIONS)
def test_a_name_does_not_hide_a_copy(gold, answer, question):
    assert judge(gold, answer).correct
    assert judge(gold, answer, question) == (False, COPIED)


def test_more_than_the_longest_piece_is_looked_at():
    question = "Of $1+2+3+4$, $2+5+6$ and $3+4$, which is seven?"
    answer = "(3+4)+(1+2+3+4)-(2+5+6)+3"
    assert len(copied_pieces(question, "7", answer)) == 3 < MOST_PIECES
    assert judge("7", answer).correct and judge("7", answer, question) == (False, COPIED)


@pytest.mark.parametrize(
    ("gold", "answer", "question"), COPIES + [pytest.param(*copy, marks=pytest.mark.slow) for copy in MORE_COPIES]
)
def test_what_is_added_to_a_copy_does_not_count(gold, answer, question):
    assert judge(gold, answer).correct
    assert judge(gold, answer, question) == (False, COPIED)


@pytest.mark.parametrize(("gold", "answer", "question"), NO_COPIES)
def test_what_is_computed_counts(gold, answer, question):
    assert judge(gold, answer, question) == (True, "")


def test_the_pieces_of_an_answer_are_whole():
    assert copied_pieces(SUM, "9901", "7+99^2+99+1") == ["99^2+99+1"]
    assert copied_pieces(SUM, "9901", "\\sqrt{99^{2}}+5") == ["99^{2}"]
    assert copied_pieces(SUM, "9901", "99") == copied_pieces("", "9901", "99^2+99+1") == []
    assert not stands_in(SUM, "9901", "99^2+99+1+0")


def test_a_long_question_costs_little():
    start = time.process_time()
    copied_pieces("1 + " * 15_000, "7", "+".join("1" * 190))
    copied_pieces("x + 1 - y " * 6_000, "7", "x+1" * 60)
    assert time.process_time() - start < 3
