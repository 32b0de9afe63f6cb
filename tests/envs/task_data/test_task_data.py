"""Real data: the official formats in their small, made-up form, and what is said where there is none."""

import gzip
import json
import os
import subprocess
import sys

import pytest

from agent_r1 import ArgumentError
from agent_r1 import task_data as data
from agent_r1.task_data import DataFormatError, DataNotFoundError, load_questions
from agent_r1_tools.search import Passage


def hotpot_row(**changes):
    """A HotpotQA row; 2WikiMultihopQA's have the same fields and a few more."""
    row = {
        "_id": "q0",
        "question": "Which river flows through the town where Ada Quill was born?",
        "answer": "River Lorn",
        "type": "bridge",
        "level": "hard",
        "supporting_facts": [["Ada Quill", 0], ["Lornby", 1]],
        "context": [
            ["Oat Mill", ["The Oat Mill is a mill."]],
            ["Ada Quill", ["Ada Quill was born in Lornby.", " She wrote plays."]],
            ["Lornby", ["Lornby is a town.", " The River Lorn flows through it."]],
        ],
    }
    return row | changes


def musique_row(**changes):
    """A MuSiQue row whose two gold paragraphs share a title."""
    texts = [
        ("Lornby", "Lornby is a town.", True),
        ("Oat Mill", "The Oat Mill is a mill.", False),
        ("Lornby", "The River Lorn flows through the town.", True),
    ]
    row = {
        "id": "2hop__1_2",
        "question": "Which river flows through the town of Ada Quill?",
        "question_decomposition": [],
        "answer": "River Lorn",
        "answer_aliases": ["the Lorn", "River Lorn"],
        "answerable": True,
        "paragraphs": [
            {"idx": index, "title": title, "paragraph_text": text, "is_supporting": gold}
            for index, (title, text, gold) in enumerate(texts)
        ],
    }
    return row | changes


def write_json(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def no_data_of_this_machine(monkeypatch):
    monkeypatch.delenv("AGENT_R1_DATA", raising=False)


def test_hotpotqa_row(tmp_path):
    write_json(tmp_path / "hotpot_train_v1.1.json", [hotpot_row()])
    (question,) = load_questions("hotpotqa", "train", tmp_path)
    assert question.id == "q0" and question.answers == ("River Lorn",)
    assert question.paragraphs[1] == Passage("Ada Quill", "Ada Quill was born in Lornby. She wrote plays.")
    assert question.supports == (1, 2) and question.support_titles == ("Ada Quill", "Lornby")
    assert dict(question.metadata) == {"type": "bridge", "level": "hard"}


def test_2wiki_quirks_and_aliases(tmp_path):
    """Sentences without leading space, an index out of range, a paragraph listed twice, answers with aliases."""
    context = [
        ["Lornby", ["Lornby is a town.", "The River Lorn flows through it."]],
        ["Lornby", ["Lornby is a town.", "The River Lorn flows through it."]],
        ["Ada Quill", ["Ada Quill was born in Lornby."]],
    ]
    facts = [["Ada Quill", 7], ["Lornby", 0]]
    rows = [
        hotpot_row(context=context, supporting_facts=facts, answer_id="Q1"),
        hotpot_row(_id="q1", context=context, supporting_facts=facts, answer_id=None),
    ]
    write_json(tmp_path / "train.json", rows)
    first, second = load_questions("2wikimultihopqa", "train", tmp_path)
    assert first.paragraphs[0].text == "Lornby is a town. The River Lorn flows through it."
    assert first.supports == (0, 2)
    assert first.answers == second.answers == ("River Lorn",)

    other = tmp_path / "with_aliases"
    write_json(other / "train.json", rows)
    write_lines(other / "id_aliases.json", [{"Q_id": "Q1", "aliases": ["Lorn"], "demonyms": ["Lorner"]}])
    first, second = load_questions("2wikimultihopqa", "train", other)
    assert first.answers == ("River Lorn", "Lorn", "Lorner") and second.answers == ("River Lorn",)


def test_broken_alias_file_is_named(tmp_path):
    write_json(tmp_path / "train.json", [hotpot_row()])
    write_lines(tmp_path / "id_aliases.json", [{"Q_id": "Q1"}])
    with pytest.raises(DataFormatError, match=r"id_aliases\.json, line 1: .*Q_id, aliases and demonyms"):
        load_questions("2wikimultihopqa", "train", tmp_path)


def test_musique_counts_paragraphs_and_leaves_out_the_unanswerable(tmp_path):
    rows = [musique_row(), musique_row(id="2hop__3_4", answerable=False)]
    write_lines(tmp_path / "musique_ans_v1.0_dev.jsonl", rows)
    (question,) = load_questions("musique", "dev", tmp_path)
    assert question.supports == (0, 2) and question.support_titles == ("Lornby",)
    assert question.answers == ("River Lorn", "the Lorn")
    assert dict(question.metadata) == {"type": "2hop"}


def test_hotpotqa_support_without_its_paragraph(tmp_path):
    write_json(tmp_path / "hotpot_train_v1.1.json", [hotpot_row(supporting_facts=[["Ada Quill", 0], ["Gone", 0]])])
    (question,) = load_questions("hotpotqa", "train", tmp_path)
    assert question.supports == (1,) and question.support_titles == ("Ada Quill", "Gone")


def test_a_number_is_an_id_too(tmp_path):
    write_json(tmp_path / "hotpot_train_v1.1.json", [hotpot_row(_id=37)])
    assert load_questions("hotpotqa", "train", tmp_path)[0].id == "37"


def test_compressed_and_line_files_are_read_too(tmp_path):
    rows = [hotpot_row(), hotpot_row(_id="q1")]
    with gzip.open(tmp_path / "hotpot_train_v1.1.json.gz", "wt") as file:
        json.dump(rows, file)
    (tmp_path / "hotpot_dev_distractor_v1.jsonl").write_text("\n".join(json.dumps(r) for r in rows) + "\n\n")
    for split in ("train", "dev", "validation"):
        assert [question.id for question in load_questions("hotpotqa", split, tmp_path)] == ["q0", "q1"]


def test_math_as_the_official_archive_has_it(tmp_path):
    def problem(number):
        return {"problem": f"{number}?", "level": "Level 1", "solution": f"So $\\boxed{{{number}}}$."}

    for name in ("test/geometry/1.json", "train/prealgebra/1.json", "train/algebra/10.json", "train/algebra/2.json"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(problem(int(path.stem)), indent=4))
    (tmp_path / "train" / "README.md").write_text("No problem.")
    problems = load_questions("math", "train", tmp_path)
    names = ["algebra/2", "algebra/10", "prealgebra/1"]
    assert [problem.id for problem in problems] == [f"train/{name}.json" for name in names]
    assert [problem.answer for problem in problems] == ["2", "10", "1"]
    assert [problem.id for problem in load_questions("math", "test", tmp_path)] == ["test/geometry/1.json"]
    write_lines(tmp_path / "train.jsonl", [problem(7)])  # a file goes before a folder
    assert [problem.id for problem in load_questions("math", "train", tmp_path)] == ["train-0"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("algebra/1.json", '{"problem": "?", "solution": "7"}', r"algebra/1\.json, row 0 .*field 'solution'"),
        ("algebra/1.json", '[{"problem": "?"}]', r"algebra/1\.json, row 0 .*expected an object"),
        ("algebra/1.json", "{", r"algebra/1\.json: expected a JSON object"),
        ("1.json", "{}", "train: expected folders of subjects"),
    ],
)
def test_a_broken_archive_is_named(tmp_path, name, text, message):
    path = tmp_path / "train" / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(DataFormatError, match=message):
        load_questions("math", "train", tmp_path)


def test_environment_variable_and_order(tmp_path, monkeypatch):
    write_json(tmp_path / "all" / "hotpotqa" / "hotpot_train_v1.1.json", [hotpot_row(_id="variable")])
    write_json(tmp_path / "mine" / "hotpot_train_v1.1.json", [hotpot_row(_id="argument")])
    monkeypatch.setenv("AGENT_R1_DATA", str(tmp_path / "all"))
    assert load_questions("hotpotqa")[0].id == "variable"
    assert load_questions("hotpotqa", data_dir=tmp_path / "mine")[0].id == "argument"
    with pytest.raises(DataNotFoundError, match="empty"):  # an explicit folder is never passed over
        load_questions("hotpotqa", data_dir=tmp_path / "empty")


def test_questions_are_read_once_and_again_when_the_file_changes(tmp_path):
    path = write_json(tmp_path / "hotpot_train_v1.1.json", [hotpot_row()])
    first = load_questions("hotpotqa", "train", tmp_path)
    assert load_questions("hotpotqa", "train", str(tmp_path)) is first
    write_json(path, [hotpot_row(), hotpot_row(_id="q1")])
    assert len(load_questions("hotpotqa", "train", tmp_path)) == 2


def test_no_data_names_the_three_ways(tmp_path):
    with pytest.raises(DataNotFoundError) as caught:
        load_questions("musique", "dev", tmp_path)
    message = str(caught.value)
    for word in ("data_dir", "AGENT_R1_DATA", "agent-r1[data]", "musique_ans_v1.0_dev.jsonl", str(tmp_path)):
        assert word in message


def test_offline_download_names_the_three_ways(tmp_path):
    """In a process of its own: the hub library reads its offline switch when it is imported."""
    code = (
        "from agent_r1.task_data import load_questions, DataNotFoundError\n"
        "try: load_questions('hotpotqa')\n"
        "except DataNotFoundError as error: print(error)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "AGENT_R1_DATA"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    for word in ("data_dir", "AGENT_R1_DATA is not set", "agent-r1[data]", "hotpotqa/hotpot_qa"):
        assert word in out.stdout, out.stderr


def test_hub_columns_become_the_official_format():
    """The hub keeps lists of pairs as a pair of lists."""
    row = hotpot_row()
    hub = {key: row[key] for key in ("question", "answer", "type", "level")} | {
        "id": row["_id"],
        "supporting_facts": {"title": ["Ada Quill", "Lornby"], "sent_id": [0, 1]},
        "context": {"title": [t for t, _ in row["context"]], "sentences": [s for _, s in row["context"]]},
    }
    for name in ("hotpotqa", "2wikimultihopqa"):
        data_set = data.DATA_SETS[name]
        official = data_set.from_hub(hub)
        assert {key: official[key] for key in row} == row
        assert data_set.read(data.Row(official, "hub", 0)).supports == (1, 2)
    musique = data.DATA_SETS["musique"]
    assert musique.read(data.Row(musique.from_hub(musique_row()), "hub", 0)).supports == (0, 2)


def test_unknown_names_are_listed(tmp_path):
    with pytest.raises(ArgumentError, match="no split 'test'; it has train, dev, validation"):
        load_questions("hotpotqa", "test", tmp_path)
    with pytest.raises(ArgumentError, match="'hotpot'.*hotpotqa, 2wikimultihopqa, musique"):
        load_questions("hotpot", "train", tmp_path)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("_id", None),
        ("_id", ["q1"]),
        ("question", ""),
        ("question", ["?"]),
        ("answer", None),
        ("answer", "  "),
        ("context", None),
        ("context", []),
        ("context", [["title only"]]),
        ("context", [["title", "a sentence, not a list"]]),
        ("context", [["title", [1]]]),
        ("context", {"title": [], "sentences": []}),
        ("supporting_facts", None),
        ("supporting_facts", [["Ada Quill"]]),
        ("supporting_facts", [["Ada Quill", "0"]]),
    ],
)
def test_malformed_hotpotqa_names_file_row_and_field(tmp_path, name, change):
    path = write_json(tmp_path / "hotpot_train_v1.1.json", [hotpot_row(), hotpot_row(**{name: change})])
    with pytest.raises(DataFormatError) as caught:
        load_questions("hotpotqa", "train", tmp_path)
    assert f"{path}, row 1 (counting from 0), field {name!r}: expected" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("id", True),
        ("answerable", "yes"),
        ("answer_aliases", "Lorn"),
        ("answer_aliases", [None]),
        ("paragraphs", []),
        ("paragraphs", [{"title": "x", "paragraph_text": "y"}]),
        ("paragraphs", [{"title": "x", "paragraph_text": None, "is_supporting": True}]),
    ],
)
def test_malformed_musique_names_file_row_and_field(tmp_path, name, change):
    path = write_lines(tmp_path / "musique_ans_v1.0_train.jsonl", [musique_row(), musique_row(**{name: change})])
    with pytest.raises(DataFormatError) as caught:
        load_questions("musique", "train", tmp_path)
    assert f"{path}, row 1 (counting from 0), field {name!r}: expected" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("hotpot_train_v1.1.json", "[{,]", "line 1, column 3"),
        ("hotpot_train_v1.1.json", '{"a": 1}', "JSON list"),
        ("hotpot_train_v1.1.json", "[]", "at least one answerable question, found 0 rows"),
        ("hotpot_train_v1.1.json", "[7]", "row 0 .*expected an object"),
        ("hotpot_train_v1.1.jsonl", '\n{"a"\n', "line 2: expected one JSON object a line"),
        ("hotpot_train_v1.1.json.gz", "no gzip", "expected gzipped"),
    ],
)
def test_files_that_are_no_rows(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataFormatError, match=message):
        load_questions("hotpotqa", "train", tmp_path)


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("#### 7", "7"), ("#### -1,234", "-1234"), ("#### 1,234,567.5", "1234567.5"), ("#### .5", ".5"), ("####7", "7"),
        ("#### 0.25  \n", "0.25"), ("#### -3", "-3"), ("#### 1000000", "1000000"),
    ],
)  # fmt: skip
def test_a_gold_answer_of_gsm8k_is_read_whole(tmp_path, written, answer):
    write_lines(tmp_path / "train.jsonl", [{"question": "How many?", "answer": f"So <<3+4=7>>7.\n{written}"}])
    assert load_questions("gsm8k", "train", tmp_path)[0].answer == answer


@pytest.mark.parametrize(
    "written",
    ["#### 1/2", "#### ,", "#### .", "#### -", "#### 1,23", "#### 1,2345", "#### 12 apples", "#### 7.", "#### 1.2.3",
     "#### 5\n#### 6", "#### 5\nThat is all.", "#### $5", "#### 3e5", "#### 1 000", "#### x", "####", "7", "#### --7"],
)  # fmt: skip
def test_a_gold_answer_of_gsm8k_that_cannot_be_read_whole_is_refused(tmp_path, written):
    write_lines(tmp_path / "train.jsonl", [{"question": "How many?", "answer": f"So 7.\n{written}"}])
    with pytest.raises(DataFormatError, match=r"train\.jsonl, row 0 .*answer.*#### number"):
        load_questions("gsm8k", "train", tmp_path)
