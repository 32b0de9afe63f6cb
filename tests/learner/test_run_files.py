"""Rows and summaries: what is written, and what a crash or a full disk leaves."""

import json

import pytest

pytest.importorskip("torch")
run_files = pytest.importorskip("llm_utils.run_files")


def test_a_row_that_was_cut_short_is_dropped_too(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"iteration": 1}\n{"iteration": 2}\n{"iteration": 3, "tok')
    run_files.drop_later_rows(path, 2)
    assert path.read_text() == '{"iteration": 1}\n{"iteration": 2}\n'


def test_rows_after_a_checkpoint_are_dropped(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"iteration": i}) + "\n" for i in (1, 2, 2, 3)))
    run_files.drop_later_rows(path, 2)
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [1, 2, 2]
    run_files.drop_later_rows(tmp_path / "none.jsonl", 2)
