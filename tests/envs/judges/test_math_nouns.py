"""Words behind a number: what is a noun, and what changes the number."""

import pytest

from agent_r1.judges.math_nouns import is_noun
from agent_r1.judges.math_text import read

NOUNS = (
    "books months hands pounds friends notes toes logs seconds birds cards tourists yards students boxes glasses "
    "people feet dollars cents men hours girls cakes doubloons raisins modules tents hens meters"
).split() + [
    "red apples",
    "US dollars",
    "in total",
    "miles per hour",
    "square meters",
    "positive integers",
    "cups of flour",
]
CHANGES = (
    "fifths fourths fifteenths sevenths fífths ninths twelfth twenty-fifths twofifths onehalf third thousandths nth "
    "umpteenth zillionth quadrillion quintillions googol googols myriad milliard double doubled tripled halved "
    "redoubled quadrupled multiplied divided negated increased repeating recurring imaginary infinitely rounded pairs "
    "pair couple fold two-fold tenfold dozens ppm permille kilo mega Milli almost nearly approximately alpha modulo "
    "xyz abc wxyz abcd axby pq Tausend Dutzend Millionen Milliarden millones Hälfte anderthalb Viertel fünftel "
    "Hundertstel zwanzig docena douzaine"
).split() + [
    "et demi",
    "too many",
    "too few",
    "y media",
    "books doubled",
    "half books",
    "quadrillion books",
    "not books",
]


@pytest.mark.parametrize("question", ["", "How many BOOKS does the brochure's author have?"])
def test_nouns(question):
    assert [words for words in NOUNS if not is_noun(words, question)] == []


@pytest.mark.parametrize("question", ["", "How many pairs of shoes were doubled, and in triangle ABC the fifths?"])
def test_words_that_change_a_number(question):
    assert [words for words in CHANGES if is_noun(words, question)] == []


def test_a_word_that_a_question_does_not_know():
    assert is_noun("wibble") and not is_noun("wibble", "How many?") and is_noun("wibble", "How many wibbles?")
    assert is_noun("Äpfel", "Wie viele Äpfel?") and not is_noun("jug") and is_noun("jug", "How many jugs?")
    assert is_noun("jugs of cider", "How many jugs?")


def test_the_noun_goes_and_the_other_word_stays():
    assert read("12", "12 books").value == "12"
    assert read("12", "12 fifths").value == "12 fifths"
    assert read("12", "12\\text{ fifths}") is None
