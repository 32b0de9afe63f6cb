"""Scenarios of PharmaSim: what a customer answers to which question, in several wordings, and which questions are key.

Our own stand in `scenarios/`, one file a customer. Their content is invented and harmless, and no medical advice.
Files of PharmaSimText (github.com/epfl-ml4ed/PharmaSimText-LLM-RL, arXiv 2404.18978) are read as they are, one file a
cause; only the fields named in `_official` are used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from agent_r1.task_data import DataFormatError, DataNotFoundError
from agent_r1.task_data.files import read_json
from agent_r1.task_data.records import shown
from agent_r1.tasks.draw import pick
from agent_r1.tool_env import Task

Wordings = tuple[str, ...]
Pair = tuple[str, str]

SPLITS = ("train", "validation", "test", "unseen_customers")
_FOLDERS = {"train": "train", "validation": "val", "test": "test"}  # of the original files
NOTHING = "I don't understand how this is relevant."  # what the original says where a file says nothing


@dataclass(frozen=True)
class Scenario:
    """A customer with one cause.

    Attributes:
        name: of the file, with the cause.
        cause, causes: the right one, and all that the post-test offers.
        opening, others: wordings of the first message, and of the answer to what has nothing to do with it.
        subjects, topics: names that can be asked about, each with the phrases that stand for it in plain speech.
        speaker: the subject that is meant where plain speech names none.
        answers: (subject, topic) -> wordings.
        key: the pairs that a good conversation asks about.
        posttest: the question at the end.
        unseen: kept for the split unseen_customers.
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


def part_of(wordings: Wordings, split: str) -> Wordings:
    """The wordings of a split: a tenth (at least one) for test, as many for validation, the rest for train.

    Two wordings are one for train and one for the others; where there is only one, all splits have it.
    """
    if len(wordings) < 3 or split == "unseen_customers":
        return wordings if split == "unseen_customers" else wordings[:1] if split == "train" else wordings[-1:]
    held = max(1, len(wordings) // 10)
    cut = len(wordings) - 2 * held
    return {"train": wordings[:cut], "validation": wordings[cut : cut + held]}.get(split, wordings[cut + held :])


@lru_cache(maxsize=1024)  # the episodes of a group play the same task
def generate_task(seed: int, split: str, index: int, data_dir: str | None = None) -> Task:
    """Task `index` of a split: a scenario, one wording of each of its answers, lists in some order.

    Don't change what is returned: it is kept. `metadata`: scenario, subjects and topics (name -> phrases), speaker,
    answers ([subject, topic, text]), others, key ([subject, topic]), causes (as the post-test lists them), posttest,
    and optimal_turns: the questions of `key`, `solve`, and the answer, a turn each.
    """
    scenarios = load_scenarios(split, data_dir)
    scenario = scenarios[index % len(scenarios)]
    rng = np.random.default_rng([seed, SPLITS.index(split), index])

    def say(wordings: Wordings) -> str:
        return pick(rng, wordings)

    def shuffled(names: Sequence[str]) -> list[str]:
        return [names[i] for i in rng.permutation(len(names))]

    subjects, topics = shuffled(list(scenario.subjects)), shuffled(list(scenario.topics))
    opening = say(scenario.opening)
    return Task(
        id=f"{split}-{seed}-{index}",
        question=f"{opening}\n\nSubjects: {', '.join(subjects)}.\nTopics: {', '.join(topics)}.",
        answers=[scenario.cause],
        metadata={
            "scenario": scenario.name,
            "opening": opening,
            "subjects": {name: list(scenario.subjects[name]) for name in scenario.subjects},
            "topics": {name: list(scenario.topics[name]) for name in scenario.topics},
            "speaker": scenario.speaker,
            "answers": [[*pair, say(wordings)] for pair, wordings in scenario.answers.items()],
            "others": say(scenario.others),
            "key": [list(pair) for pair in scenario.key],
            "causes": shuffled(scenario.causes),
            "posttest": scenario.posttest,
            "optimal_turns": len(scenario.key) + 2,
        },
    )


# ---------------------------------------------------------------------- plain speech


def words(text: str) -> list[str]:
    """Words in small letters, without the s of a plural."""
    found = re.findall(r"\w+", text.lower())
    return [word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word for word in found]


def match_question(text: str, task: Task) -> Pair | None:
    """The subject and topic that plain speech asks about, None where it names no topic.

    A name or one of its phrases is found where its words stand in the text, one after the other (`words`). The longest
    phrase found wins, the earlier name where two are equally long. Where no subject is named the speaker is meant, or,
    where they have nothing to say on the topic, the first subject with an answer. Of a text the first 2,000 characters
    count.
    """
    said = words(text[:2_000])
    topic = _longest(said, task.metadata["topics"])
    if topic is None:
        return None
    speaker = task.metadata["speaker"]
    able = [subject for subject, about, _ in task.metadata["answers"] if about == topic]
    default = speaker if speaker in able or not able else able[0]
    return _longest(said, task.metadata["subjects"]) or default, topic


def _longest(said: list[str], names: Mapping[str, Sequence[str]]) -> str | None:
    best, length = None, 0
    for name, phrases in names.items():
        for phrase in (name, *phrases):
            wanted = words(phrase)
            starts = range(len(said) - len(wanted) + 1)
            if len(wanted) > length and any(said[start : start + len(wanted)] == wanted for start in starts):
                best, length = name, len(wanted)
    return best


# ---------------------------------------------------------------------- files


@lru_cache(maxsize=32)
def load_scenarios(split: str, data_dir: str | None) -> tuple[Scenario, ...]:
    """The scenarios of a split with its wordings: our own, or those in a folder of original files.

    Raises: DataNotFoundError, DataFormatError (file and field are named).
    """
    if data_dir is None:
        found = [one for one in _own() if one.unseen == (split == "unseen_customers")]
        return tuple(_worded(one, split) for one in found)
    folder = Path(data_dir)
    given = sorted(folder.glob(f"**/{_FOLDERS[split]}/*.json")) if split in _FOLDERS else []
    # The folders wording/train, val and test: the wordings are split already (subtask splits causes, not wordings).
    if given := [path for path in given if "subtask" not in path.relative_to(folder).parts]:
        return tuple(_official(path) for path in given)
    flat = sorted(path for path in folder.glob("*.json"))
    if not flat or split not in _FOLDERS:
        raise DataNotFoundError(
            f"no scenarios of PharmaSimText for split {split!r} in data_dir={data_dir!r}: expected a folder with "
            "train/*.json, val/*.json and test/*.json (or such folders inside it), or with *.json, each a scenario as "
            "in github.com/epfl-ml4ed/PharmaSimText-LLM-RL, scenarios/patients"
        )
    return tuple(_worded(_official(path), split) for path in flat)


def _worded(scenario: Scenario, split: str) -> Scenario:
    parts = {pair: part_of(wordings, split) for pair, wordings in scenario.answers.items()}
    opening, others = part_of(scenario.opening, split), part_of(scenario.others, split)
    return replace(scenario, answers=parts, opening=opening, others=others)


@cache
def _own() -> tuple[Scenario, ...]:
    folder = Path(__file__).parent / "scenarios"
    return tuple(one for path in sorted(folder.glob("*.json")) for one in read_customer(path))


def own_words() -> list[str]:
    """Every word of our own scenarios, in small letters, in alphabetical order."""
    texts: list[str] = []
    for one in _own():
        wordings = [one.opening, one.others, *one.answers.values(), *one.subjects.values(), *one.topics.values()]
        texts += [one.posttest, *one.causes, *one.subjects, *one.topics, *chain.from_iterable(wordings)]
    return sorted({word for text in texts for word in re.findall(r"\w+", text.lower())})


class _Fields:
    """The fields of a JSON object, with errors that say where they stand."""

    def __init__(self, value: Any, path: Path, place: str = "") -> None:
        self.path, self.place = path, place
        if not isinstance(value, dict):
            raise DataFormatError(f"{path}{place and f', {place}'}: expected an object, found {shown(value)}")
        self.value = value

    def wrong(self, name: str, expected: str) -> DataFormatError:
        found = shown(self.value[name]) if name in self.value else "nothing"
        return DataFormatError(f"{self.path}, field {self.place + name!r}: expected {expected}, found {found}")

    def object(self, name: str) -> _Fields:
        if not isinstance(self.value.get(name), dict):
            raise self.wrong(name, "an object")
        return _Fields(self.value[name], self.path, f"{self.place}{name}.")

    def text(self, name: str) -> str:
        value = self.value.get(name)
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(name, "a text")
        return value

    def texts(self, name: str, least: int = 1) -> Wordings:
        value = self.value.get(name)
        if not isinstance(value, list) or len(value) < least or not all(isinstance(one, str) for one in value):
            raise self.wrong(name, f"a list of at least {least} texts" if least else "a list of texts")
        return tuple(value)


def read_customer(path: Path) -> list[Scenario]:
    """The scenarios of a file in our own format, one for each cause. Raises DataFormatError."""
    fields = _Fields(read_json(path), path)
    subjects, topics = fields.object("subjects"), fields.object("topics")
    names = {name: subjects.texts(name, 0) for name in subjects.value}
    about = {name: topics.texts(name, 0) for name in topics.value}
    common = _answers(fields.object("answers"))
    causes = fields.object("causes")
    if len(causes.value) < 2 or not common:
        raise fields.wrong("causes", "at least two causes, and at least one answer in field 'answers'")
    found = []
    for cause in causes.value:
        one = causes.object(cause)
        answers = common | _answers(one.object("answers"))
        key = one.value.get("key")
        pairs = tuple(tuple(pair) for pair in key if isinstance(pair, list)) if isinstance(key, list) else ()
        if not pairs or len(pairs) != len(key) or not set(pairs) <= set(answers):  # type: ignore[arg-type]
            raise one.wrong("key", "a list of [subject, topic] that have answers")
        if wrong := next((pair for pair in answers if pair[0] not in names or pair[1] not in about), None):
            raise one.wrong("answers", f"subjects and topics that are listed, not {wrong}")
        found.append(
            Scenario(
                name=f"{path.stem}: {cause}", cause=cause, causes=tuple(causes.value), opening=fields.texts("opening"),
                others=fields.texts("others"), subjects=names, topics=about, speaker=next(iter(names)),
                answers=answers, key=pairs,
                posttest=fields.text("posttest"), unseen=fields.value.get("unseen") is True,
            )  # fmt: skip
        )
    return found


def _answers(fields: _Fields) -> dict[Pair, Wordings]:
    return {
        (subject, topic): fields.object(subject).texts(topic)
        for subject in fields.value
        for topic in fields.object(subject).value
    }


def _official(path: Path) -> Scenario:
    """A scenario of PharmaSimText. Names keep their spelling; phrases of their own they have none.

    Read are name (the cause), causes, initial_state, subjects, topics, characters (the first is the speaker),
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
            raise fields.wrong("present_actions", f"details 'subject,topic' that there are; one is {detail!r}")
        key.append((subject, topic))
        subjects += (subject,) * (subject not in subjects)  # some files leave key ones out of their lists
        topics += (topic,) * (topic not in topics)
    asked = {pair: wordings for pair, wordings in answers.items() if pair[0] in subjects and pair[1] in topics}
    speaker = next((one for one in fields.texts("characters", 0) if one in subjects), key[0][0])
    return Scenario(
        name=f"{path.stem}: {cause}", cause=cause, causes=causes, opening=state[1:2], others=others,
        subjects=dict.fromkeys(subjects, ()), topics=dict.fromkeys(topics, ()), speaker=speaker, answers=asked,
        key=tuple(dict.fromkeys(key)), posttest=posttest[0],
    )  # fmt: skip
