r"""The judge of mathematics on intervals, sets, points and roots of letters."""

import pytest

pytest.importorskip("math_verify")

from agent_r1.judges.mathematics import judge

UNION = r"(-\infty,2)\cup(5,\infty)"
NOT_ZERO = r"(-\infty,0)\cup(0,\infty)"
RIGHT = [  # one of each kind
    (UNION, r"(5,\infty) \cup (-\infty,2)"),
    (UNION, "(-inf, 2) U (5, inf)"),
    (UNION, r"(-\infty, 2.0) \cup (\frac{10}{2}, \infty)"),
    (r"[1,2]\cup\{5\}", r"\{5\}\cup[1,2]"),
    (r"\mathbb{R}\setminus\{0\}", NOT_ZERO),
    ("x>3", r"(3,\infty)"),
    (r"\infty", "inf"),
    (r"\{3,4\}", r"\{4,3\}"),
    ("3,4", r"\{3,4\}"),
    ("(3,4)", "(3.0, 4)"),
    (r"\frac{1}{\sqrt{n}}", r"\sqrt{\frac{1}{n}}"),
    (r"\sqrt{\frac{a}{b}}", r"\frac{\sqrt{a}}{\sqrt{b}}"),
]
MORE_RIGHT = [
    # unions in any order and notation
    (UNION, r"(-\infty, 2) \cup (5, +\infty)"),
    (UNION, r"\left(-\infty,2\right)\cup\left(5,\infty\right)"),
    (UNION, r"\bigl(-\infty,2\bigr)\cup\bigl(5,\infty\bigr)"),
    (UNION, r"x \in (-\infty,2)\cup(5,\infty)"),
    (UNION, "(-∞,2)∪(5,∞)"),
    (UNION, r"(-oo, 2) \cup (5, oo)"),
    (UNION, r"(-\infty,1]\cup(0,2)\cup(5,\infty)"),
    (r"(-\infty,\frac12)\cup(1,\infty)", r"(-\infty,0.5)\cup(1,\infty)"),
    (r"(-2,-\sqrt{3})\cup(\sqrt{3},2)", r"(\sqrt{3},2)\cup(-2,-\sqrt{3})"),
    (r"(-\infty,0)\cup(0,1)\cup(1,\infty)", r"(1,\infty)\cup(0,1)\cup(-\infty,0)"),
    (r"(a,b)\cup(c,d)", r"(c,d)\cup(a,b)"),
    (r"\{1,2,3\}", r"\{1\}\cup\{2,3\}"),
    # intervals and inequalities
    ("x<3", r"(-\infty,3)"),
    ("x>3", "(3, infinity)"),
    ("x>3", "(3,∞)"),
    (r"x \ge 2", r"[2,\infty)"),
    (r"x \ge 2", r"[2,+\infty)"),
    (r"n \le 4", r"(-\infty,4]"),
    ("t<3", r"t \in (-\infty,3)"),
    ("-2<x<2", "(-2,2)"),
    (r"-\infty", "-oo"),
    # sets and points
    (r"\{3,4\}", "3,4"),
    (r"\{3,4\}", "{4, 3}"),
    (r"\{3,4\}", "x = 3, x = 4"),
    ("(1,2),(3,4)", r"\{(3,4),(1,2)\}"),
    # roots of letters
    (r"\sqrt{\frac{1}{n}}", r"\frac{1}{\sqrt{n}}"),
    (r"\frac{1}{\sqrt{n}}", r"\frac{\sqrt{n}}{n}"),
    (r"\frac{1}{\sqrt{n}}", "sqrt(1/n)"),
    (r"\sqrt{\frac{2}{n}}", r"\frac{\sqrt{2n}}{n}"),
    (r"\sqrt{\frac{a}{b}}", r"\frac{\sqrt{ab}}{b}"),
    (r"\frac{\sqrt{ab}}{b}", r"\sqrt{\frac{a}{b}}"),
    (r"x\sqrt{x}", r"\sqrt{x^3}"),
    (r"2\pi\sqrt{\frac{L}{g}}", r"\frac{2\pi\sqrt{L}}{\sqrt{g}}"),
    (r"\frac{1}{\sqrt{n+1}}", r"\sqrt{\frac{1}{n+1}}"),
    (r"\frac{1}{\sqrt[4]{n}}", r"\sqrt[4]{\frac{1}{n}}"),
    (r"(\frac{1}{\sqrt{n}}, 2)", r"(\sqrt{\frac1n}, 2)"),
    (r"y=\frac{1}{\sqrt{x}}", r"y=\sqrt{\frac{1}{x}}"),
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
]
WRONG = [  # one of each kind
    (UNION, r"(-\infty,2)\cup(6,\infty)"),
    (UNION, r"(-\infty,2]\cup(5,\infty)"),
    (r"[1,2]\cup\{5\}", r"[1,2]\cup\{6\}"),
    (NOT_ZERO, r"\mathbb{R}"),
    (UNION, r"[-\infty,2)\cup(5,\infty)"),
    ("x<3", r"(-\infty,4)"),
    ("(1,2)", r"\{1,2\}"),
    (r"\{1,2\}", "(1,2)"),
    (r"\frac{1}{\sqrt{n}}", r"\sqrt{n}"),
    (r"\sqrt{x^2}", "x"),
    (r"\sqrt{-x^3}", r"x\sqrt{-x}"),
    (r"|x|\sqrt{-x}", r"x\sqrt{-x}"),
    (r"|x|\sqrt{xy}", r"x\sqrt{xy}"),
    (r"[1,2]\cup\{5\}", r"[1,2]\cup(5)"),
]
MORE_WRONG = [
    (UNION, r"(-\infty,2)"),
    (UNION, r"(-\infty,2)\cap(5,\infty)"),
    (UNION, r"(-\infty,5)\cup(2,\infty)"),
    (UNION, r"(-\infty,2)\cup(5,\infty)\cup\{3\}"),
    (UNION, r"(-\infty,2),(5,\infty),7"),
    (UNION, r"\mathbb{R}"),
    (r"(-\infty,0.0000001)\cup(1,\infty)", r"(-\infty,0.0000002)\cup(1,\infty)"),
    (r"(-\infty,0)\cup(0,1)\cup(1,\infty)", r"(1,\infty)\cup(-\infty,0)"),
    (UNION, r"(-\infty,2)\cup(5,+\infty]"),
    (r"(-\infty,2)", "[-∞, 2)"),
    ("x<3", r"(3,\infty)"),
    ("x<3", r"(-\infty,3]"),
    (r"x \ge 2", r"(2,\infty)"),
    (r"\infty", r"-\infty"),
    ("7", r"\infty"),
    ("(1,2,3)", r"\{1,2,3\}"),
    (r"\{1,2,3\}", "(1,2,3)"),
    ("(3,4)", r"\left\{3,4\right\}"),
    ("(3,4)", "{3,4}"),
    ("(3,4)", "｛3,4｝"),
    ("(3,4)", r"x\in\{3,4\}"),
    (r"\{\frac12,3\}", "(0.5,3)"),
    ("(x,y)", r"\{x,y\}"),
    ("(1,2),(3,4)", r"\{1,2\},\{3,4\}"),
    (r"\{(1,2),(3,4)\}", r"\{\{1,2\},\{3,4\}\}"),
    ("[3,4]", r"\{3,4\}"),
    ("[1,2]", "(1,2)"),
    (r"\frac{1}{\sqrt{n}}", r"-\sqrt{\frac{1}{n}}"),
    (r"\frac{1}{\sqrt{n}}", r"\sqrt{\frac{1}{n^2}}"),
    (r"\sqrt{\frac{k}{m}}", r"\sqrt{\frac{m}{k}}"),
    # another sign for a negative letter
    (r"\sqrt{(x-1)^2}", "x-1"),
    ("|x|", "x"),
    ("x", "|x|"),
    (r"|x|\sqrt{y}", r"x\sqrt{y}"),
    (r"\sqrt{-2x^3}", r"x\sqrt{-2x}"),
    (r"-x\sqrt{-x}", r"-\sqrt{-x^3}"),
    (r"\sqrt{-x}+|x|", r"\sqrt{-x}+x"),
    # a number is no set
    (r"[1,2]\cup\{5\}", r"[1,2]\cup[5]"),
    (r"[1,2]\cup\{5\}", r"((5))\cup[1,2]"),
    (r"\{1,5\}", r"\{1\}\cup(5)"),
]


def more(pairs):
    """Of a kind that a fast test has: to judge a set takes half a second."""
    return [pytest.param(*pair, marks=pytest.mark.slow) for pair in pairs]


@pytest.mark.parametrize(("gold", "answer"), RIGHT + more(MORE_RIGHT))
def test_the_same_set_is_right(gold, answer):
    assert judge(gold, answer) == (True, "")


@pytest.mark.parametrize(("gold", "answer"), WRONG + more(MORE_WRONG))
def test_another_set_is_wrong(gold, answer):
    assert not judge(gold, answer).correct
