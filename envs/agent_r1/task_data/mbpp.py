"""MBPP: task_id, text, code, test_setup_code, test_list."""

from __future__ import annotations

import ast

from agent_r1.task_data.records import DataSet, Program, Row, defined, shown

MBPP_SPLITS = {"prompt": (1, 10), "test": (11, 510), "validation": (511, 600), "train": (601, 974)}
"""The official ranges of task_id, both ends included."""


def _read(row: Row) -> Program | None:
    """Read a row; None for a row of another split, because one file has all splits."""
    number = row.fields.get("task_id")
    if not isinstance(number, int) or isinstance(number, bool):
        raise row.error("task_id", "a number")
    first, last = MBPP_SPLITS[row.split]
    if not first <= number <= last:
        return None
    tests = row.texts("test_list")
    if not tests:
        raise row.error("test_list", "a list of asserts")
    setup = row.fields.get("test_setup_code") or ""
    if not isinstance(setup, str):
        raise row.error("test_setup_code", "a string")
    code, setup = (text.replace("\r\n", "\n") for text in (row.text("code"), setup))
    row.python("test_setup_code", setup)
    names = defined(row.python("code", code))
    for test in tests:
        if not called(row.python("test_list", test)) & names:
            raise row.error("test_list", f"asserts that call what the code defines; one is {shown(test)}")
    return Program(f"MBPP/{number}", row.text("text"), "", code, setup, tuple(tests))


def called(code: ast.AST) -> set[str]:
    """Return the names of all functions that a piece of code calls."""
    calls = (node.func for node in ast.walk(code) if isinstance(node, ast.Call))
    return {function.id for function in calls if isinstance(function, ast.Name)}


MBPP = DataSet(
    name="MBPP",
    folder="mbpp",
    files=dict.fromkeys(MBPP_SPLITS, "mbpp.jsonl"),
    hub=("google-research-datasets/mbpp", "full"),
    hub_splits={split: split for split in MBPP_SPLITS},
    from_hub=dict,
    read=_read,
    aliases={},
    homepage="https://github.com/google-research/google-research/tree/master/mbpp",
)
