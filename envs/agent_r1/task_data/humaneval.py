"""HumanEval: task_id, prompt, entry_point, canonical_solution, test."""

from __future__ import annotations

import keyword

from agent_r1.task_data.records import DataSet, Program, Row, defined


def _read(row: Row) -> Program:
    prompt, entry_point, solution = (row.text(name) for name in ("prompt", "entry_point", "canonical_solution"))
    if not entry_point.isidentifier() or keyword.iskeyword(entry_point):
        raise row.error("entry_point", "the name of a function")
    row.python("prompt", prompt)
    if entry_point not in defined(row.python("canonical_solution", prompt + solution)):
        raise row.error("entry_point", "a function that the prompt begins")
    if "check" not in defined(row.python("test", row.text("test"))):
        raise row.error("test", "a program that defines check(candidate)")
    return Program(row.name("task_id"), prompt, entry_point, solution, setup="", tests=(row.text("test"),))


HUMANEVAL = DataSet(
    name="HumanEval",
    folder="humaneval",
    files={"test": "HumanEval.jsonl"},
    hub=("openai/openai_humaneval", None),
    hub_splits={"test": "test"},
    from_hub=dict,
    read=_read,
    aliases={},
    homepage="https://github.com/openai/human-eval",
)
