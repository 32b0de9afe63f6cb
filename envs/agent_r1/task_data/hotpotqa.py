"""HotpotQA: question, answer, context [[title, [sentence]]], supporting_facts [[title, sentence index]]."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agent_r1.task_data.records import DataSet, Question, Row, shown
from agent_r1_tools.search import Passage


def read_by_title(row: Row, between: str) -> Question:
    """Read a row of HotpotQA or 2WikiMultihopQA, with its sentences joined by `between`.

    A sentence index may be out of range (a quirk of 2WikiMultihopQA); only the titles are used.
    """
    paragraphs: list[Passage] = []
    context = row.fields.get("context")
    shape = "a list of [title, [sentence, ...]]"
    if not isinstance(context, list) or not context:
        raise row.error("context", shape)
    for entry in context:
        match entry:
            case [str(title), list(sentences)] if all(isinstance(sentence, str) for sentence in sentences):
                paragraphs.append(Passage(title, between.join(sentences).strip()))
            case _:
                raise row.error("context", f"{shape}; entry {len(paragraphs)} is {shown(entry)}")
    titles: dict[str, None] = {}
    facts = row.fields.get("supporting_facts")
    if not isinstance(facts, list):
        raise row.error("supporting_facts", "a list of [title, sentence index]")
    for fact in facts:
        match fact:
            case [str(title), int()]:
                titles[title] = None
            case _:
                raise row.error("supporting_facts", f"a list of [title, sentence index]; one is {shown(fact)}")
    answer = row.text("answer")
    answer_id = row.fields.get("answer_id")
    aliases = row.aliases.get(answer_id, ()) if isinstance(answer_id, str) else ()
    return Question(
        id=row.name("_id"),
        question=row.text("question"),
        answers=tuple(dict.fromkeys([answer, *aliases])),
        paragraphs=tuple(paragraphs),
        supports=_first_of_each(paragraphs, titles),
        support_titles=tuple(titles),
        metadata=row.extras("type", "level"),
    )


def _first_of_each(paragraphs: Sequence[Passage], titles: Iterable[str]) -> tuple[int, ...]:
    """Return the first paragraph of each title: 2WikiMultihopQA lists a few paragraphs twice."""
    first: dict[str, int] = {}
    for index, paragraph in enumerate(paragraphs):
        first.setdefault(paragraph.title, index)
    return tuple(sorted(first[title] for title in titles if title in first))


def _read(row: Row) -> Question:
    return read_by_title(row, between="")  # sentences have their own leading space


def _pairs(columns: Any, first: str, second: str) -> list[list[Any]]:
    """Return [[a, b], ...] from {first: [a, ...], second: [b, ...]}, the hub's form of lists of pairs."""
    return [list(pair) for pair in zip(columns[first], columns[second], strict=True)]


def by_title_from_hub(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **row,
        "_id": row["id"],
        "context": _pairs(row["context"], "title", "sentences"),
        "supporting_facts": _pairs(row["supporting_facts"], "title", "sent_id"),
    }


HOTPOTQA = DataSet(
    name="HotpotQA",
    folder="hotpotqa",
    files={"train": "hotpot_train_v1.1.json", "dev": "hotpot_dev_distractor_v1.json"},
    hub=("hotpotqa/hotpot_qa", "distractor"),
    hub_splits={"train": "train", "dev": "validation"},
    from_hub=by_title_from_hub,
    read=_read,
    aliases={"validation": "dev"},
    homepage="https://hotpotqa.github.io",
)
