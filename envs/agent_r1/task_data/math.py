"""MATH: problem, level, type, solution. MATH-500 also has answer, subject and unique_id."""

from __future__ import annotations

from agent_r1.judges.math_notation import last_boxed
from agent_r1.task_data.records import DataSet, Problem, Row


def _read(row: Row) -> Problem:
    """Read a row. Without an answer in the row, the gold answer is the solution's last box."""
    answer = row.fields.get("answer")
    answer = row.text("answer") if answer is not None else last_boxed(row.text("solution"))
    if not answer:
        raise row.error("solution", "a solution with its answer in \\boxed{}")
    name = row.name("unique_id") if "unique_id" in row.fields else f"{row.split}-{row.index}"
    return Problem(name, row.text("problem"), answer, row.extras("level", "type", "subject", "solution"))


MATH = DataSet(
    name="MATH",
    folder="math",
    files={"train": "train.jsonl", "test": "test.jsonl"},
    hub=("DigitalLearningGmbH/MATH-lighteval", None),  # the authors' own page on the hub is gone
    hub_splits={"train": "train", "test": "test"},
    from_hub=dict,
    read=_read,
    aliases={},
    homepage="https://github.com/hendrycks/math",
    archive=True,
)

MATH500 = DataSet(
    name="MATH-500",
    folder="math",
    files={"math500": "math500.jsonl"},
    hub=("HuggingFaceH4/MATH-500", None),
    hub_splits={"math500": "test"},
    from_hub=dict,
    read=_read,
    aliases={},
    homepage="https://github.com/openai/prm800k",
)
