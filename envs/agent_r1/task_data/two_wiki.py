"""2WikiMultihopQA: HotpotQA's fields, and answer_id, the key of further answers in id_aliases.json."""

from __future__ import annotations

from agent_r1.task_data.hotpotqa import by_title_from_hub, read_by_title
from agent_r1.task_data.records import DataSet, Question, Row


def _read(row: Row) -> Question:
    return read_by_title(row, between=" ")


TWO_WIKI = DataSet(
    name="2WikiMultihopQA",
    folder="2wikimultihopqa",
    files={"train": "train.json", "dev": "dev.json"},
    hub=("framolfese/2WikiMultihopQA", None),  # the authors' own hub page still needs a loading script
    hub_splits={"train": "train", "dev": "validation"},
    from_hub=by_title_from_hub,
    read=_read,
    aliases={"validation": "dev"},
    homepage="https://github.com/Alab-NII/2wikimultihop",
)
