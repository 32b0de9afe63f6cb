"""The scores, against worked examples of the official scripts and against the hacks that a looser match pays for."""

import itertools
import string
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.episode import Task
from agent_r1.rewards import (
    PROCESS_WEIGHTS,
    exact_match,
    f1,
    find_answers,
    format_score,
    normalize_answer,
    paper_outcome,
    process_weights,
)


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("The Chief of Protocol", "chief of protocol"),
        ("  An\tapple,\n a  day!  ", "apple day"),
        ("U.S.A.", "usa"),  # punctuation goes without leaving a space
        ("rock-and-roll", "rockandroll"),
        ("theatre an1 A-team", "theatre an1 ateam"),  # articles are words, not prefixes
        ("A", ""),
        ("the", ""),
        ("...", ""),
        ("Señor — Ñandú’s", "señor — ñandú’s"),  # only ASCII punctuation is removed
        ("1,000.5", "10005"),
    ],
)
def test_normalization_examples(text, normalized):
    assert normalize_answer(text) == normalized


def official_normalization(text):
    """The official functions, one step after the other, as all three scripts define them."""
    import re

    text = text.lower()
    text = "".join(character for character in text if character not in set(string.punctuation))
    text = re.sub(r"\b(a|an|the)\b", " ", text)
    return " ".join(text.split())


@given(st.text(alphabet=st.sampled_from("aAnNtThHeE -'.,!_ \t\nyo1é’"), max_size=40) | st.text(max_size=40))
def test_normalization_is_the_official_one(text):
    assert normalize_answer(text) == official_normalization(text)


def test_exact_match_takes_the_best_alias():
    assert exact_match("the United States", ["USA", "United States"]) == 1
    assert exact_match("United Kingdom", ["USA", "United States"]) == 0
    assert exact_match("anything", []) == 0


def test_a_text_is_one_answer_and_not_its_letters():
    assert exact_match("P", "Paris") == 0 and exact_match("Paris", "Paris") == 1
    assert f1("P", "Paris") == 0 and f1("Paris, France", "Paris") == pytest.approx(2 / 3)
    with pytest.raises(TypeError, match="answers must be a list of texts, got 'Paris'"):
        Task("a", "Q", "Paris")


@pytest.mark.parametrize(
    ("prediction", "gold"),
    [
        ("Paris, Lyon, Marseille, Nice", "Lyon"),  # a list of candidates
        ("nothing", "no"),
        ("eyes", "yes"),
        ("yes and no", "yes"),
        ("Paris", "A"),  # "A" normalises to ""
        ("The Matrix", "The"),
        ("", "Paris"),
    ],
)
def test_containment_is_no_match(prediction, gold):
    assert exact_match(prediction, [gold]) == 0
    assert exact_match(gold, [prediction]) == 0


def test_two_empty_texts_follow_the_official_scripts():
    assert exact_match("the", ["A"]) == 1  # "" == "" in every official script
    assert f1("the", ["A"], yes_no_rule=True) == 0  # HotpotQA, 2Wiki: no common token
    assert f1("the", ["A"], yes_no_rule=False) == 1  # MuSiQue: "F1 is 1 if they agree"
    assert f1("the", ["Paris"], yes_no_rule=False) == 0
    assert f1("Paris", ["A"], yes_no_rule=False) == 0


@pytest.mark.parametrize("rule", [True, False])
def test_f1_examples(rule):
    assert f1("the Chief of Protocol of US", ["Chief of Protocol"], rule) == pytest.approx(0.75)
    assert f1("Paris", ["Lyon", "Paris"], rule) == 1
    assert f1("Paris", [], rule) == 0
    assert f1("b b b", ["b"], rule) == pytest.approx(0.5)  # a multiset: repeating a token doesn't help


@pytest.mark.parametrize("closed", ["yes", "No", "noanswer"])
def test_yes_no_rule_is_hotpotqas_not_musiques(closed):
    for prediction, gold in [(closed, f"{closed} it is"), (f"{closed} it is", closed)]:
        assert f1(prediction, [gold], yes_no_rule=True) == 0
        assert f1(prediction, [gold], yes_no_rule=False) == pytest.approx(0.5)
    assert f1(closed, [closed.upper()], yes_no_rule=True) == 1


@given(st.text(max_size=30), st.lists(st.text(max_size=30), max_size=4), st.booleans())
def test_scores_are_bounded_and_an_exact_match_has_full_f1(prediction, answers, rule):
    em, score = exact_match(prediction, answers), f1(prediction, answers, rule)
    assert em in (0.0, 1.0) and 0.0 <= score <= 1.0
    if em and normalize_answer(prediction):
        assert score == 1.0


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        ("", []),
        ("no tag at all", []),
        ("It is <answer>Paris</answer>.", ["Paris"]),
        ("<answer>a</answer> <answer>b</answer>", ["a", "b"]),
        ("<answer></answer>", [""]),
        ("<answer> \n</answer>", [" \n"]),
        ("<answer>open", []),
        ("closed</answer>", []),
        ("</answer><answer>", []),
        ("<answer>a</answer></answer>", ["a"]),
        ("<answer>outer <answer>inner</answer> rest</answer>", ["inner"]),
        ("<answer><answer>x</answer>", ["x"]),
        ("<answer>line\nbreak</answer>", ["line\nbreak"]),
        ("<answer>1 < 2</answer>", ["1 < 2"]),
        ("<Answer>x</Answer> < answer>y</answer>", []),  # the tag is written one way
    ],
)
def test_find_answers(text, answers):
    assert find_answers(text) == answers


TAGS = st.sampled_from(["<answer>", "</answer>", "<ans", "wer>", "a", "\n", "<think>"])


@given(st.lists(TAGS | st.text(max_size=5)).map("".join))
def test_find_answers_is_total_and_what_it_finds_stands_in_tags(text):
    for answer in find_answers(text):
        assert f"<answer>{answer}</answer>" in text
        assert "<answer>" not in answer and "</answer>" not in answer


@pytest.mark.parametrize("piece", ["<answer>", "<answer>x</answer>", "</answer>", "<", "<answer", "x"])
def test_find_answers_is_linear(piece):
    text = piece * (2_000_000 // len(piece))
    start = time.process_time()
    find_answers(text)
    assert time.process_time() - start < 3  # takes about 0.1 s; a quadratic scan would take hours


def test_equation_6():
    """The whole table: a is the answer's format, c the calls', a right format pays the exact match."""
    table = {(False, False): -1.0, (False, True): -0.5, (True, False): -0.5}
    for answer_ok, calls_ok, score in itertools.product([False, True], [False, True], [0.0, 1.0]):
        assert format_score(answer_ok=answer_ok, calls_ok=calls_ok) == (answer_ok + calls_ok) / 2
        expected = score if answer_ok and calls_ok else table[answer_ok, calls_ok]
        assert paper_outcome(score, answer_ok=answer_ok, calls_ok=calls_ok) == expected


def test_process_weights():
    assert process_weights(True) == dict(PROCESS_WEIGHTS)
    assert process_weights(False) == {}
    assert process_weights({"support_found": 1}) == {**PROCESS_WEIGHTS, "support_found": 1.0}
    assert process_weights({}) == dict(PROCESS_WEIGHTS)
    assert process_weights({"tests_passed": 2}, {"tests_passed": 1.0}) == {"tests_passed": 2.0}
    with pytest.raises(ValueError, match="'suport_found'.*support_found, malformed_call"):
        process_weights({"suport_found": 1})
    assert PROCESS_WEIGHTS["support_found"] == 0.3 and PROCESS_WEIGHTS["malformed_call"] == -0.1
    assert PROCESS_WEIGHTS["failed_call"] == PROCESS_WEIGHTS["repeated_call"] == -0.05
