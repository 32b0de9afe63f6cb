"""GSM8K: question, answer (a solution, then #### and the number)."""

from __future__ import annotations

import re

from agent_r1.task_data.records import DataSet, Problem, Row

_MARK = "####"
_NUMBER = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|-?\.[0-9]+")


def _read(row: Row) -> Problem:
    """Read a row, and drop commas from the gold answer, as the official code does.

    The answer must be one number, and nothing else may follow the mark: the official code would read 1 in `#### 1/2`.
    """
    _, *answers = row.text("answer").split(_MARK)
    if len(answers) != 1 or not _NUMBER.fullmatch(number := answers[0].strip()):
        raise row.error("answer", "a solution that ends in '#### number'")
    answer = number.replace(",", "")
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
