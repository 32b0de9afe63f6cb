"""Scenarios of PharmaSim: what a customer answers to which question, in several wordings, and which questions are key.

The shipped scenarios are in `scenarios/`. Their content is invented and harmless, and not medical advice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path

import numpy as np

from agent_r1.task_data import DataNotFoundError
from agent_r1.task_data.pharma_sim import Pair, Scenario, Wordings, read_customer, read_official
from agent_r1.tasks.draw import pick
from agent_r1.tool_env import Task

SPLITS = ("train", "validation", "test", "unseen_customers")
_FOLDERS = {"train": "train", "validation": "val", "test": "test"}  # of the original files


def part_of(wordings: Wordings, split: str) -> Wordings:
    """Return the wordings of a split: a tenth (at least one) for test, as many for validation, the rest for train.

    Of two wordings, train has one and the other splits the other. A single wording is in all splits.
    """
    if len(wordings) < 3 or split == "unseen_customers":
        return wordings if split == "unseen_customers" else wordings[:1] if split == "train" else wordings[-1:]
    held = max(1, len(wordings) // 10)
    cut = len(wordings) - 2 * held
    return {"train": wordings[:cut], "validation": wordings[cut : cut + held]}.get(split, wordings[cut + held :])


@lru_cache(maxsize=1024)  # the episodes of a group have the same task
def generate_task(seed: int, split: str, index: int, data_dir: str | None = None) -> Task:
    """Generate task `index` of a split: a scenario, one wording of each of its answers, lists in random order.

    The result is cached: do not change it. `metadata`: scenario, subjects and topics (name -> phrases), speaker,
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
    """Return words in small letters, without the s of a plural."""
    all_words = re.findall(r"\w+", text.lower())
    plural = [len(word) > 3 and word.endswith("s") and not word.endswith("ss") for word in all_words]
    return [word[:-1] if is_plural else word for word, is_plural in zip(all_words, plural, strict=True)]


def match_question(text: str, task: Task) -> Pair | None:
    """Return the subject and topic of plain speech, or None if it names no topic.

    A name or one of its phrases matches if its words follow each other in the text (`words`). The longest match wins;
    of equally long ones the earlier name. Without a subject it is the speaker, or, if the speaker has no answer on the
    topic, the first subject with an answer. Only the first 2,000 characters count.
    """
    spoken = words(text[:2_000])
    topic = _longest(spoken, task.metadata["topics"])
    if topic is None:
        return None
    speaker = task.metadata["speaker"]
    able = [subject for subject, about, _ in task.metadata["answers"] if about == topic]
    default = speaker if speaker in able or not able else able[0]
    return _longest(spoken, task.metadata["subjects"]) or default, topic


def _longest(spoken: list[str], names: Mapping[str, Sequence[str]]) -> str | None:
    best, length = None, 0
    for name, phrases in names.items():
        for phrase in (name, *phrases):
            wanted = words(phrase)
            starts = range(len(spoken) - len(wanted) + 1)
            if len(wanted) > length and any(spoken[start : start + len(wanted)] == wanted for start in starts):
                best, length = name, len(wanted)
    return best


# ---------------------------------------------------------------------- files


@lru_cache(maxsize=32)
def load_scenarios(split: str, data_dir: str | None) -> tuple[Scenario, ...]:
    """Return the scenarios of a split with its wordings: our own, or those of a folder of original files.

    Raises: DataNotFoundError, DataFormatError (file and field are named).
    """
    if data_dir is None:
        own = [scenario for scenario in _own() if scenario.unseen == (split == "unseen_customers")]
        return tuple(_worded(scenario, split) for scenario in own)
    folder = Path(data_dir)
    given = sorted(folder.glob(f"**/{_FOLDERS[split]}/*.json")) if split in _FOLDERS else []
    # The folders wording/train, val and test: the wordings are split already (subtask splits causes, not wordings).
    if given := [path for path in given if "subtask" not in path.relative_to(folder).parts]:
        return tuple(read_official(path) for path in given)
    flat = sorted(path for path in folder.glob("*.json"))
    if not flat or split not in _FOLDERS:
        raise DataNotFoundError(
            f"no scenarios of PharmaSimText for split {split!r} in data_dir={data_dir!r}: expected a folder with "
            "train/*.json, val/*.json and test/*.json (or such folders inside it), or with *.json, each a scenario as "
            "in github.com/epfl-ml4ed/PharmaSimText-LLM-RL, scenarios/patients"
        )
    return tuple(_worded(read_official(path), split) for path in flat)


def _worded(scenario: Scenario, split: str) -> Scenario:
    parts = {pair: part_of(wordings, split) for pair, wordings in scenario.answers.items()}
    opening, others = part_of(scenario.opening, split), part_of(scenario.others, split)
    return replace(scenario, answers=parts, opening=opening, others=others)


@cache
def _own() -> tuple[Scenario, ...]:
    folder = Path(__file__).parent / "scenarios"
    return tuple(scenario for path in sorted(folder.glob("*.json")) for scenario in read_customer(path))


def own_words() -> list[str]:
    """Return every word of the shipped scenarios, in lower case, in alphabetical order."""
    texts: list[str] = []
    for one in _own():
        wordings = [one.opening, one.others, *one.answers.values(), *one.subjects.values(), *one.topics.values()]
        texts += [one.posttest, *one.causes, *one.subjects, *one.topics, *chain.from_iterable(wordings)]
    return sorted({word for text in texts for word in re.findall(r"\w+", text.lower())})
