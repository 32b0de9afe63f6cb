"""GSM8K: question, answer (a solution, then #### and the number)."""

from __future__ import annotations

import re

from agent_r1.task_data.records import DataSet, Problem, Row

_ANSWER = re.compile(r"#### (-?[0-9.,]+)")


def _read(row: Row) -> Problem:
    """Commas are dropped from the gold answer, as the official code does."""
    found = _ANSWER.search(row.text("answer"))
    if not found:
        raise row.error("answer", "a solution that ends in '#### number'")
    answer = found[1].replace(",", "")
    return Problem(f"{row.split}-{row.index}", row.text("question"), answer, {"solution": row.text("answer")})


GSM8K = DataSet(
    name="GSM8K",
    folder="gsm8k",
    files={"train": "train.jsonl", "test": "test.jsonl"},
    hub=("openai/gsm8k", "main"),
    hub_splits={"train": "train", "test": "test"},
    from_hub=dict,
    read=_read,
    aliases={},
    homepage="https://github.com/openai/grade-school-math",
)
