"""Data files that are damaged, or made to do harm: all are named when they are read, with file, row and field."""

import gzip
import json
import re

import pytest
from made_up_data import humaneval_row, mbpp_row

from agent_r1.judges.programs import left_side
from agent_r1.task_data import DATA_SETS, DataFormatError, Row, load_questions
from agent_r1.task_data.files import read_rows
from agent_r1.tasks.programming import humaneval_task, mbpp_task
from agent_r1_tools import bounded

DEEP = "[" * 100_000
LONG = "9" * 5_000
HOTPOT = {
    "_id": "q0",
    "question": "Which river?",
    "answer": "Lorn",
    "supporting_facts": [["Lornby", 0]],
    "context": [["Lornby", ["The Lorn flows through it."]]],
}


@pytest.fixture(autouse=True)
def no_data_of_this_machine(monkeypatch):
    monkeypatch.delenv("AGENT_R1_DATA", raising=False)


def refusal(name, split, folder):
    """What is said of a set, without the folder's name."""
    with pytest.raises(DataFormatError) as caught:
        load_questions(name, split, folder)
    return str(caught.value).replace(str(folder), "")


@pytest.mark.parametrize("damage", ["in the middle", "at the end"])
def test_a_damaged_gzip_file(tmp_path, damage):
    rows = "".join(json.dumps({"question": f"{i}?", "answer": f"#### {i * 7919}"}) + "\n" for i in range(2_000))
    data = bytearray(gzip.compress(rows.encode()))
    if damage == "at the end":
        del data[-20:]
    else:
        data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    (tmp_path / "train.jsonl.gz").write_bytes(data)
    message = refusal("gsm8k", "train", tmp_path)  # in the middle a row may be damaged before gzip's checksum tells
    assert re.search("/train.jsonl.gz, (after line|row) [0-9]", message) if damage == "in the middle" else (
        "/train.jsonl.gz, after line " in message
    )


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("train.jsonl", '{"question": "' + "a" * 5000 + '"}', ", line 1: the line has more than"),
        ("train.jsonl.gz", '{"question": "' + "a" * 5000 + '"}', ", line 1: the line has more than"),
        ("train.jsonl.gz", "\n" * 100_000, ", line 40: the unpacked file is more than 50 times as large"),
        ("train.json.gz", "[" + " " * 100_000 + "]", ": the unpacked file is more than 50 times as large"),
    ],
)
def test_a_file_that_would_fill_the_memory(tmp_path, monkeypatch, name, content, says):
    monkeypatch.setattr(bounded, "MAX_LINE", 1000)
    monkeypatch.setattr(bounded, "ALWAYS", 10_000)
    (tmp_path / name).write_bytes(gzip.compress(content.encode()) if name.endswith("gz") else content.encode())
    with pytest.raises(DataFormatError) as caught:
        list(read_rows(tmp_path / name))
    assert f"/{name}" in str(caught.value) and says in str(caught.value)


@pytest.mark.parametrize("text", [DEEP, f'{{"question": {DEEP}', '{"question":' * 100_000])
def test_json_nested_too_deeply(tmp_path, text):
    good = json.dumps({"question": "?", "answer": "#### 1"})
    (tmp_path / "train.jsonl").write_text(f"{good}\n{text}\n")
    assert refusal("gsm8k", "train", tmp_path).startswith("/train.jsonl, line 2: ")
    (tmp_path / "hotpot_train_v1.1.json").write_text(text)
    assert "nested too deeply" in refusal("hotpotqa", "train", tmp_path)
    (tmp_path / "train" / "algebra").mkdir(parents=True)
    (tmp_path / "train" / "algebra" / "1.json").write_text(text)
    (tmp_path / "train.jsonl").unlink()
    assert refusal("math", "train", tmp_path).startswith("/train/algebra/1.json: ")
    (tmp_path / "train.json").write_text(json.dumps([HOTPOT]))
    (tmp_path / "id_aliases.json").write_text(text)
    assert refusal("2wikimultihopqa", "train", tmp_path).startswith("/id_aliases.json, line 1: ")


@pytest.mark.parametrize("field", ["_id", "answer", "level", "supporting_facts"])
@pytest.mark.parametrize("ending", ["json", "jsonl"])
def test_a_number_of_5000_digits(tmp_path, field, ending):
    facts = f'[["Lornby", {LONG}]]' if field == "supporting_facts" else LONG
    row = json.dumps(HOTPOT | {field: "?"}).replace(f'"{field}": "?"', f'"{field}": {facts}')
    good = json.dumps(HOTPOT)
    text = f"[{good}, {row}]" if ending == "json" else f"{good}\n{row}\n"
    (tmp_path / f"hotpot_train_v1.1.{ending}").write_text(text)
    message = refusal("hotpotqa", "train", tmp_path)
    assert message.startswith(f"/hotpot_train_v1.1.{ending}, row 1 (counting from 0), field '{field}': ")
    assert "5000 digits" in message and len(message) < 300


def test_a_number_of_5000_digits_where_nobody_looks(tmp_path):
    (tmp_path / "train.jsonl").write_text(f'{{"question": "?", "answer": "#### 1", "more": {LONG}}}\n')
    assert load_questions("gsm8k", "train", tmp_path)[0].answer == "1"


@pytest.mark.parametrize("value", [["easy"], {"a": 1}, float("nan"), float("inf")])
def test_what_goes_into_info_is_text_or_a_number(tmp_path, value):
    (tmp_path / "hotpot_train_v1.1.json").write_text(json.dumps([HOTPOT | {"level": value}]))
    assert "row 0 (counting from 0), field 'level': " in refusal("hotpotqa", "train", tmp_path)


def test_an_alias_file_that_is_no_utf8(tmp_path):
    (tmp_path / "train.json").write_text(json.dumps([HOTPOT]))
    (tmp_path / "id_aliases.json").write_bytes(b'{"Q_id": "Q1", "aliases": ["\xff"], "demonyms": []}\n')
    assert "/id_aliases.json" in refusal("2wikimultihopqa", "train", tmp_path)


def test_columns_of_the_hub_in_another_shape(monkeypatch):
    """As if the hub's page had changed; the row is named all the same."""
    from agent_r1.task_data import load

    good = {"id": "q", "question": "?", "answer": "a", "context": {"title": ["A"], "sentences": [["a"]]}}
    bad = good | {"supporting_facts": {"title": ["A", "B"], "sent_id": [0]}}
    with pytest.raises(DataFormatError, match=r"the hub, row 0 .*columns"):
        list(load.from_hub(DATA_SETS["hotpotqa"], [bad], "the hub"))
    with pytest.raises(DataFormatError, match=r"the hub, row 0 .*columns.*supporting_facts"):
        list(load.from_hub(DATA_SETS["hotpotqa"], [good], "the hub"))


NO_PYTHON = ["def f(:\n", "x = (" * 300, "-" * 200_000 + "1", "x = '\0'", "\ud800"]


@pytest.mark.parametrize("code", NO_PYTHON, ids=range(len(NO_PYTHON)))
@pytest.mark.parametrize("field", ["code", "test_setup_code", "test_list"])
def test_mbpp_that_is_no_python(tmp_path, field, code):
    good = mbpp_row(601)
    bad = good | {field: [*good["test_list"], code] if field == "test_list" else code}
    (tmp_path / "mbpp.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps(bad)}\n")
    message = refusal("mbpp", "train", tmp_path)
    assert f"/mbpp.jsonl, row 1 (counting from 0), field '{field}': " in message and len(message) < 600


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("test_list", ["assert True"]),
        ("test_list", ["assert other(1) == 2"]),
        ("test_list", ["assert add_601(1) == 602", "x = 1"]),
        ("test_list", [""]),
        ("test_setup_code", ["import math"]),
        ("task_id", True),
        ("task_id", 10**400),
    ],
)
def test_mbpp_whose_tests_test_nothing(tmp_path, field, value):
    (tmp_path / "mbpp.jsonl").write_text(json.dumps(mbpp_row(601) | {field: value}))
    assert f"row 0 (counting from 0), field '{field}': " in refusal("mbpp", "train", tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("entry_point", "f("),
        ("entry_point", "class"),
        ("entry_point", "times_3"),
        ("prompt", "def times_2(x:\n"),
        ("canonical_solution", "    return (\n"),
        ("test", "def check(candidate:\n"),
        ("test", "assert True\n"),
        *[("prompt", code) for code in NO_PYTHON],
    ],
)
def test_humaneval_that_is_no_python(tmp_path, field, value):
    (tmp_path / "HumanEval.jsonl").write_text(json.dumps(humaneval_row(2) | {field: value}))
    assert f"/HumanEval.jsonl, row 0 (counting from 0), field '{field}': " in refusal("humaneval", "test", tmp_path)


def test_what_is_read_makes_tasks(tmp_path):
    (tmp_path / "HumanEval.jsonl").write_text(json.dumps(humaneval_row(2)))
    (tmp_path / "mbpp.jsonl").write_text(json.dumps(mbpp_row(601)))
    assert humaneval_task(*load_questions("humaneval", "test", tmp_path)).metadata["entry_point"] == "times_2"
    assert mbpp_task(*load_questions("mbpp", "train", tmp_path), 1).metadata["entry_point"] == "add_601"


def test_a_test_too_deep_to_be_written_out_again():
    assert left_side(f"assert f({'+'.join(['1'] * 900)}) == 1") is None


def test_an_error_about_a_value_of_any_depth():
    value = []
    for _ in range(100_000):
        value = [value]
    assert "nested too deeply" in str(Row({"a": value}, "file", 0).error("a", "text"))
    while value:  # or Python's own clean-up would go as deep
        (value,) = value
