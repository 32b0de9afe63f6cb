"""MuSiQue: question, answer, answer_aliases, answerable, paragraphs [{idx, title, paragraph_text, is_supporting}]."""

from __future__ import annotations

from agent_r1.task_data.records import DataSet, Question, Row, shown
from agent_r1_tools.search import Passage


def _read(row: Row) -> Question | None:
    """Read a row; None for `answerable: false` (MuSiQue-Full), which the official evaluation does not score."""
    answerable = row.fields.get("answerable", True)
    if not isinstance(answerable, bool):
        raise row.error("answerable", "true or false")
    if not answerable:
        return None
    paragraphs: list[Passage] = []
    supports: list[int] = []
    entries = row.fields.get("paragraphs")
    shape = "a list of objects with title, paragraph_text and is_supporting"
    if not isinstance(entries, list) or not entries:
        raise row.error("paragraphs", shape)
    for entry in entries:
        match entry:
            case {"title": str(title), "paragraph_text": str(text), "is_supporting": bool(is_supporting)}:
                if is_supporting:
                    supports.append(len(paragraphs))
                paragraphs.append(Passage(title, text.strip()))
            case _:
                raise row.error("paragraphs", f"{shape}; entry {len(paragraphs)} is {shown(entry)}")
    name = row.name("id")
    return Question(
        id=name,
        question=row.text("question"),
        answers=tuple(dict.fromkeys([row.text("answer"), *row.texts("answer_aliases")])),
        paragraphs=tuple(paragraphs),
        supports=tuple(supports),
        support_titles=tuple(dict.fromkeys(paragraphs[index].title for index in supports)),
        metadata={"type": name.split("__")[0]},  # "2hop", "3hop1", ...: the shape of the reasoning
    )


MUSIQUE = DataSet(
    name="MuSiQue",
    folder="musique",
    files={"train": "musique_ans_v1.0_train.jsonl", "dev": "musique_ans_v1.0_dev.jsonl"},
    hub=("dgslibisey/MuSiQue", None),
    hub_splits={"train": "train", "dev": "validation"},
    from_hub=dict,
    read=_read,
    aliases={"validation": "dev"},
    homepage="https://github.com/StonyBrookNLP/musique",
)
