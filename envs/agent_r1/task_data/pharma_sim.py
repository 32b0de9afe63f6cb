"""Scenarios of PharmaSim: files in our own format, and those of PharmaSimText.

PharmaSimText (github.com/epfl-ml4ed/PharmaSimText-LLM-RL, arXiv 2404.18978) has one file per cause, our format one file
per customer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r1.task_data.files import read_json
from agent_r1.task_data.records import DataFormatError, shown

Wordings = tuple[str, ...]
Pair = tuple[str, str]
NOTHING = "I don't understand how this is relevant."  # the original's answer if a file has none


@dataclass(frozen=True)
class Scenario:
    """A customer with one cause.

    Attributes:
        name: the name of the file, with the cause.
        cause, causes: the right cause, and all causes in the post-test.
        opening, others: wordings of the first message, and of the answer to unrelated questions.
        subjects, topics: names for questions, each with its phrases in plain speech.
        speaker: the subject of plain speech that names none.
        answers: (subject, topic) -> wordings.
        key: the pairs that a good conversation asks about.
        posttest: the question at the end.
        unseen: True for a customer of the split unseen_customers.
    """

    name: str
    cause: str
    causes: tuple[str, ...]
    opening: Wordings
    others: Wordings
    subjects: Mapping[str, Sequence[str]]
    topics: Mapping[str, Sequence[str]]
    speaker: str
    answers: Mapping[Pair, Wordings]
    key: tuple[Pair, ...]
    posttest: str
    unseen: bool = False


class _Fields:
    """The fields of a JSON object, with errors that name their position."""

    def __init__(self, value: Any, path: Path, place: str = "") -> None:
        self.path, self.place = path, place
        if not isinstance(value, dict):
            raise DataFormatError(f"{path}{place and f', {place}'}: expected an object, found {shown(value)}")
        self.value = value

    def wrong(self, name: str, expected: str) -> DataFormatError:
        value = shown(self.value[name]) if name in self.value else "nothing"
        return DataFormatError(f"{self.path}, field {self.place + name!r}: expected {expected}, found {value}")

    def object(self, name: str) -> _Fields:
        if not isinstance(self.value.get(name), dict):
            raise self.wrong(name, "an object")
        return _Fields(self.value[name], self.path, f"{self.place}{name}.")

    def text(self, name: str) -> str:
        value = self.value.get(name)
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(name, "a text")
        return value

    def texts(self, name: str, minimum: int = 1) -> Wordings:
        value = self.value.get(name)
        if not isinstance(value, list) or len(value) < minimum or not all(isinstance(text, str) for text in value):
            raise self.wrong(name, f"a list of at least {minimum} texts" if minimum else "a list of texts")
        return tuple(value)


def read_customer(path: Path) -> list[Scenario]:
    """Read the scenarios of a file in our own format, one for each cause. Raises DataFormatError."""
    fields = _Fields(read_json(path), path)
    subjects, topics = fields.object("subjects"), fields.object("topics")
    names = {name: subjects.texts(name, 0) for name in subjects.value}
    about = {name: topics.texts(name, 0) for name in topics.value}
    common = _answers(fields.object("answers"))
    causes = fields.object("causes")
    if len(causes.value) < 2 or not common:
        raise fields.wrong("causes", "at least two causes, and at least one answer in field 'answers'")
    scenarios = []
    for cause in causes.value:
        cause_fields = causes.object(cause)
        answers = common | _answers(cause_fields.object("answers"))
        pairs = _pairs(cause_fields.value.get("key"))
        if not pairs or not set(pairs) <= set(answers):
            raise cause_fields.wrong("key", "a list of [subject, topic] that have answers")
        if unknown := next((pair for pair in answers if pair[0] not in names or pair[1] not in about), None):
            raise cause_fields.wrong("answers", f"subjects and topics that are listed, not {unknown}")
        scenarios.append(
            Scenario(
                name=f"{path.stem}: {cause}", cause=cause, causes=tuple(causes.value), opening=fields.texts("opening"),
                others=fields.texts("others"), subjects=names, topics=about, speaker=next(iter(names)),
                answers=answers, key=pairs,
                posttest=fields.text("posttest"), unseen=fields.value.get("unseen") is True,
            )  # fmt: skip
        )
    return scenarios


def _pairs(value: Any) -> tuple[Pair, ...]:
    """Return the pairs of a list of [text, text]; no pairs if it contains anything else."""
    pairs = value if isinstance(value, list) else []
    if not all(isinstance(pair, list) and list(map(type, pair)) == [str, str] for pair in pairs):
        return ()
    return tuple((first, second) for first, second in pairs)


def _answers(fields: _Fields) -> dict[Pair, Wordings]:
    return {
        (subject, topic): fields.object(subject).texts(topic)
        for subject in fields.value
        for topic in fields.object(subject).value
    }


def read_official(path: Path) -> Scenario:
    """Read a scenario of PharmaSimText. Names keep their spelling and have no further phrases.

    The fields are name (the cause), causes, initial_state, subjects, topics, characters (the first is the speaker),
    question_answers, present_actions (the key questions) and posttest_qs.
    """
    fields = _Fields(read_json(path), path)
    cause, causes = fields.text("name"), fields.texts("causes", 2)
    if cause not in causes:
        raise fields.wrong("name", f"one of the causes {shown(list(causes))}")
    state, posttest = fields.texts("initial_state", 2), fields.texts("posttest_qs")
    answers = _answers(fields.object("question_answers"))
    others = answers.pop(("others", "all"), (NOTHING,))
    subjects, topics = fields.texts("subjects"), fields.texts("topics")
    actions = fields.value.get("present_actions")
    if not isinstance(actions, list) or not actions:
        raise fields.wrong("present_actions", "a list of actions")
    key = []
    for number, action in enumerate(actions):
        detail = _Fields(action, path, f"present_actions[{number}].").text("detail")
        subject, _, topic = detail.partition(",")
        if (subject, topic) not in answers and (subject not in subjects or topic not in topics):
            raise fields.wrong("present_actions", f"details 'subject,topic' with known names; one is {detail!r}")
        key.append((subject, topic))
        subjects += (subject,) * (subject not in subjects)  # some files omit key subjects from their lists
        topics += (topic,) * (topic not in topics)
    asked = {pair: wordings for pair, wordings in answers.items() if pair[0] in subjects and pair[1] in topics}
    speaker = next((name for name in fields.texts("characters", 0) if name in subjects), key[0][0])
    return Scenario(
        name=f"{path.stem}: {cause}", cause=cause, causes=causes, opening=state[1:2], others=others,
        subjects=dict.fromkeys(subjects, ()), topics=dict.fromkeys(topics, ()), speaker=speaker, answers=asked,
        key=tuple(dict.fromkeys(key)), posttest=posttest[0],
    )  # fmt: skip
