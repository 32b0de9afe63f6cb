"""The judge of mathematics on characters, bold, powers of ten and nouns."""

import pytest

pytest.importorskip("math_verify")

from agent_r1.judges.math_notation import last_boxed, unwrap
from agent_r1.judges.mathematics import judge
from agent_r1_tools.calculator import calculate, format_number

RIGHT = [
    # dashes and digits
    ("-5", "\u22125"),
    ("-5", "\u20135"),
    ("-5", "\u20145"),
    ("-5", "\u20105"),
    ("-5", "\uff0d\uff15"),
    ("x-1", "x\u20131"),
    ("12", "\uff11\uff12"),
    ("12.5", "\uff11\uff12\uff0e\uff15"),
    ("1200", "\uff11\uff0c\uff12\uff10\uff10"),
    ("12", "12\u3002"),
    ("12", "१२"),
    ("12", "𝟏𝟐"),
    ("(1,2)", "（１，２）"),
    ("x^2", "𝑥²"),
    ("10^{20}", "10²⁰"),
    ("10^{-3}", "10⁻³"),
    ("\\frac12", "½"),
    ("3.5", "3½"),
    ("0.5", "1⁄2"),
    ("12", "12\u200b"),
    # bold
    ("12", "**12**"),
    ("12", "**12.**"),
    ("12", "__12__"),
    ("12", "*12*"),
    ("12", "`12`"),
    ("12", "**$12$**"),
    ("12", "$\\boldsymbol{12}$"),
    ("12", "\\textbf{12}"),
    ("\\frac12", "\\mathbf{\\frac{1}{2}}"),
    ("12", "<b>12</b>"),
    ("12", "x = **12**"),
    ("12", "**12** apples"),
    ("-5", "**\u20135**"),
    ("8", "2**3"),
    # powers of ten
    ("3 \\cdot 10^{20}", "3e+20"),
    ("3e+20", "3 \\cdot 10^{20}"),
    ("3e+20", "300000000000000000000"),
    ("1500", "1.5e3"),
    ("1500", "1.5E+03"),
    ("1500", "x \\approx 1.5e3"),
    ("-1500", "-1.5e3"),
    ("0.00012", "1.2e-4"),
    ("10^{-7}", "1e-7"),
    ("10^{100}", "1e+100"),
    ("(1000,2)", "(1e3,2)"),
    ("\\frac{1}{75}", "4/3e2"),
    ("115", "1.15 \\times 10^2"),
    ("115", "1.15 × 10²"),
    ("1.023 \\cdot 10^{3}", "1023"),
    ("0.000245", "2.45*10**-4"),
    ("(115,2)", "(1.15 \\cdot 10^{2}, 2)"),
    ("x^2+1500", "x^2+1.5e3"),
    ("20+3e", "3e+20"),
    ("2e-1", "-1+2e"),
    ("2^{70}", "1.18059162072e+21"),
    ("1.18059162072e+21", "2^{70}"),
    ("4", "4e0"),
    ("2^{70}", "1.1805916207174113e+21"),  # as Python shows it
    ("2^{200}", "1.60693804426e+60"),
    ("9007199254740993", "9007199254740992.0"),
    ("-115", "-1.15 \\times 10^2"),
    ("120", "5 + 1.15 \\times 10^2"),
    ("230", "2 \\cdot 1.15 \\times 10^2"),
    ("115,3", "3 and 1.15 \\times 10^2"),
    ("115", "x \\approx 1.15 \\times 10^2"),
    # nouns
    ("12", "12 books"),
    ("12", "12 dollars"),
    ("12", "$12 dollars"),
    ("12", "12 green apples."),
    ("12", "12 US dollars"),
    ("12", "x = 12 ice-creams"),
    ("12", "12 miles per hour"),
    ("3.5", "3.5 hours"),
    ("1,200", "1200 people"),
    ("\\frac34", "3/4 cups"),
    ("\\frac34", "\\frac{3}{4} cups"),
    ("3,5", "3 cats, 5 dogs"),
]
WRONG = [
    ("5", "\u20135"),
    ("5", "\u20145"),
    ("12", "\u221212"),
    ("21", "\uff11\uff12"),
    ("12", "٢١"),
    ("15.5", "3½"),
    ("7", "6\u20137"),
    ("12", "1\u200b2"),
    ("12", "「12」"),
    ("12", "**1**2"),
    ("12", "**12"),
    ("12", "**6** or **12**"),
    ("12", "**6**, **12**"),
    ("7", "**7** **6**"),
    ("7", "**7**6**"),
    ("12", "**Answer: 12**"),
    ("1500", "1.5e4"),
    ("0.00012", "1.2e4"),
    ("3e+20", "3\\times10^{21}"),
    ("10^{100}", "1e+101"),
    ("2e-1", "0.2"),
    ("e^2", "e2"),
    ("1000001", "1e6"),
    ("1000001", "1000000.0"),
    ("2^{70}", "1.18059162e+21"),
    ("2^{70}", "1.18059162073e+21"),
    ("1500", "1.5e3 or 7"),
    ("115", "1.15 \\times 10^3"),
    ("115", "1.16 \\times 10^{2}"),
    ("\\frac{1}{115}", "1/1.15 \\times 10^2"),
    ("\\frac{1}{115}", "1 \\div 1.15 \\times 10^2"),
    ("\\frac{1}{115}", "1÷1.15\\times 10^2"),
    ("\\frac{1}{115}", "1 /  1.15 \\times 10^2"),
    ("-\\frac{1}{115}", "1 \\div -1.15 \\times 10^2"),
    ("\\log 150", "\\log 1.5 \\times 10^2"),
    ("2^{70}", "1.180591621e+21"),
    ("2^{200}", "1.60693804427e+60"),
    ("9007199254740993", "9007199254740993.5"),
    ("300000000000000000000", "300000000000000000001.0"),
    ("10000000000000001", "1.0e16"),
    ("15000000000000001", "1.5e16"),
    ("12", "12 dozen"),
    ("12", "12 thousand"),
    ("12", "12 hundreds"),
    ("12", "12 tenths"),
    ("12", "12 squared"),
    ("12", "12 factorial"),
    ("12", "12 less"),
    ("12", "12 half"),
    ("12", "12 or thirteen"),
    ("12", "12 but not"),
    ("12", "12 is wrong"),
    ("12", "12 minus one"),
    ("12", "12 books 13"),
    ("12", "12 or 13 books"),
    ("12", "13 books"),
    ("12", "12 pi"),
    ("12", "12 alpha"),
    ("12", "12x"),
    ("12", "12 xy"),
    ("12", "twelve books"),
    ("12", "12 books doubled"),
    ("12", "12 pairs of shoes"),
    ("12", "12 too many"),
    ("12", "12 hund red"),
    ("12", "12 et demi"),
    ("12", "12\\text{ fifths}"),
    ("12", "12 books left over there somewhere"),
    ("12 apples", "12 oranges"),
    ("2x", "2x books"),
]


@pytest.mark.parametrize(("gold", "answer"), RIGHT)
def test_what_people_write_is_read(gold, answer):
    assert judge(gold, answer) == (True, "")


@pytest.mark.parametrize(("gold", "answer"), WRONG)
def test_another_value_stays_wrong(gold, answer):
    assert not judge(gold, answer).correct


@pytest.mark.parametrize(
    ("expression", "gold"),
    [
        ("3 * 10.0**20", "3 \\cdot 10^{20}"),
        ("2.0**100", "2^{100}"),
        ("1 / 30000", "\\frac{1}{30000}"),
        ("0.1 + 0.2", "\\frac{3}{10}"),
        ("1 / 8", "\\frac{1}{8}"),
        ("10.0**-12", "10^{-12}"),
        ("2**100", "2^{100}"),
        ("-5 * 10.0**17", "-5 \\cdot 10^{17}"),
        ("3 / 2 * 10.0**300", "1.5 \\cdot 10^{300}"),
        ("4e3 / 8", "500"),
    ],
)
def test_the_calculator_and_the_judge_agree(expression, gold):
    shown = format_number(calculate(expression))
    assert judge(gold, shown).correct and judge(shown, gold).correct
    assert not judge(gold, f"{shown}9").correct
    assert calculate(shown) == pytest.approx(calculate(expression), rel=1e-11)


def test_a_noun_of_the_question_is_no_copy():
    question = "There are 12 books and 5 eggs. How many books are there?"
    assert judge("12", "12 books", question).correct and judge("5", "5 eggs", question).correct


def test_the_last_box_is_the_answer():
    assert last_boxed("First \\boxed{1}, so \\boxed{\\frac{1}{2}}.") == "\\frac{1}{2}"
    assert last_boxed("\\fbox{3}") == "3" and last_boxed("so $\\boxed 7$.") == "7"
    assert last_boxed("no box") is None and last_boxed("\\boxed{7") is None


def test_what_people_put_around_an_answer():
    for text in (
        "7",
        " 7 ",
        "7.",
        "$7$",
        "$$7$$",
        "\\(7\\)",
        "\\[ 7 \\]",
        "\\boxed{7}",
        "$\\boxed{7}$.",
        "**7**",
        "７。",
    ):
        assert unwrap(text) == "7"
    for text in ("$7", "\\boxed{6} \\boxed{7}", "7}{8", "$5", "", "**7", "2**3", "\\textbf{A}"):
        assert unwrap(text) == text
