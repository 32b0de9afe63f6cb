"""HumanEval: task_id, prompt, entry_point, canonical_solution, test."""

from __future__ import annotations

from agent_r1.task_data.rows import DataSet, Program, Row


def _read(row: Row) -> Program:
    prompt, entry_point, solution = (row.text(name) for name in ("prompt", "entry_point", "canonical_solution"))
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
