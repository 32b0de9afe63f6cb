"""Texts of strangers in messages for a terminal: nothing that it would obey, and nothing that hides."""

import json
import pickle

import gymnasium as gym
import pytest

from agent_r1 import show, validate
from agent_r1.arguments import ArgumentError
from agent_r1.task_data import DataFormatError, DataNotFoundError

EVIL = "\x1b]0;pwned\x07\x1b[2J\x9b31m\u202eevil\u2066\u200b\r\x08\x85\u2028\ud800\U000e0041"
BAD = set(EVIL) - set("]0;pwned[2Jm31evil")


def clean(text):
    return not BAD & set(text) and "pwned" in text


@pytest.mark.parametrize("kind", [ArgumentError, DataFormatError, DataNotFoundError])
def test_errors_about_files_and_arguments_are_escaped(kind):
    error = kind(f"row 3: {EVIL}")
    assert clean(str(error)) and str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize("words", [["--task", "x"], ["--task", "x", "--episodes", "all"], ["--task", EVIL[:-2]]])
def test_show_names_tasks_escaped(tmp_path, words):
    row = {"task_id": EVIL + "\nnext", "task_index": 0, "tokens": [1], "iteration": 3}
    (tmp_path / "trajectories.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(SystemExit) as raised:
        show.main([str(tmp_path), *words])
    assert clean(str(raised.value)) and "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["folder", "missing", "file"])
def test_show_names_paths_escaped(tmp_path, name):
    path = tmp_path / f"\x1b]0;pwned\x07{name}"
    if name == "folder":
        path.mkdir()
    if name == "file":
        path.write_text(json.dumps({"task_id": "a", "task_index": 0, "tokens": [1], "iteration": 3}) + "\n")
    with pytest.raises(SystemExit) as raised:
        show.main([str(path), "--task", "x"])
    assert clean(str(raised.value))


@pytest.mark.parametrize(
    "row",
    [
        {EVIL: 1},
        {"question": "q", "answer": [EVIL], "tools": [EVIL]},
        {"question": "q", "answer": {EVIL: EVIL}},
        {"question": "q", "answer": "a", "system": [EVIL]},
        {"question": [EVIL], "answer": "a"},
        {"question": "q", "answer": "a", "id": EVIL},
    ],
)
def test_readers_of_rows_quote_escaped(tmp_path, row):
    path = tmp_path / "rows.jsonl"
    path.write_text((json.dumps(row) + "\n") * 2)
    with pytest.raises((ArgumentError, DataFormatError)) as raised:
        gym.make("AgentR1/Rows-v0", data=str(path))
    assert not BAD & set(str(raised.value)), str(raised.value)


def test_validate_prints_reasons_and_notes_escaped(monkeypatch, capsys):
    def evil(subject):
        return validate.Report(subject.env_id, failed={"calls": EVIL}, note=EVIL)

    monkeypatch.setattr(validate, "validate", evil)
    monkeypatch.setattr(validate, "table", lambda reports: "")
    validate.main(["AgentR1/MultihopWorld-v0"])
    assert clean(capsys.readouterr().out)
