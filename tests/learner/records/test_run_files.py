"""Rows and summaries: what is written, and what a crash or a full disk leaves."""

import json
import os
import resource
import tracemalloc

import pytest

from llm_utils.records import run_files


def test_a_row_that_was_cut_short_is_dropped_too(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"iteration": 1}\n{"iteration": 2}\n{"iteration": 3, "tok')
    run_files.drop_later_rows(path, 2)
    assert path.read_text() == '{"iteration": 1}\n{"iteration": 2}\n'


LINES = [
    b'{"iteration": 1}', b'{"iteration":2,"q":"\xc2\x85"}', b'{"q": 1, "iteration": 2}', b'{"iteration": 3}',
    b'{"a": 1}', b"[]", b'{"iteration": "x"}', b"\x00\x00", b"\xff\xfe", b'{"iteration": 1, "tok', b"[" * 100_000, b"",
    b'{"iteration": 2, "b": []}',
]  # fmt: skip


def test_damaged_lines_are_removed_and_counted(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in LINES) + b'{"iteration": 2, "cut')
    run_files.drop_later_rows(path, 2)
    assert path.read_bytes().splitlines() == [*LINES[:3], LINES[-1]]
    assert f"{path}: 8 damaged lines were removed" in capsys.readouterr().err
    run_files.drop_later_rows(path, 2)
    assert not capsys.readouterr().err


def test_long_rows_pass_one_by_one(tmp_path):
    """A file is not read into memory as a whole."""
    path, row = tmp_path / "rows.jsonl", b'{"iteration": 1, "tokens": [' + b"1, " * 300_000 + b"1]}\n"
    with path.open("wb") as file:
        for _ in range(50):
            file.write(row)
        file.write(row.replace(b'": 1,', b'": 2,'))
    tracemalloc.start()
    run_files.drop_later_rows(path, 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.stat().st_size == 50 * len(row) and peak < 4 * len(row)


def test_rows_after_a_checkpoint_are_dropped(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"iteration": i}) + "\n" for i in (1, 2, 2, 3)))
    run_files.drop_later_rows(path, 2)
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [1, 2, 2]
    run_files.drop_later_rows(tmp_path / "none.jsonl", 2)


def test_a_full_disk_leaves_the_old_file(tmp_path):
    path = tmp_path / "summary.json"
    run_files.write_json(path, {"iteration": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            run_files.write_json(path, {"iteration": 2, "more": 100 * "x"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert json.loads(path.read_text()) == {"iteration": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_files_are_on_disk_before_they_replace_the_old_one(tmp_path, monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace

    def watch(descriptor):
        calls.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watch)
    monkeypatch.setattr(os, "replace", lambda *names: (calls.append("replace"), replace(*names)))
    run_files.write_json(tmp_path / "summary.json", {})
    assert calls == ["summary.json.tmp", "replace", tmp_path.name]
