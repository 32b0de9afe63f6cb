"""Where real data comes from: a folder in the official format, or a download through `datasets`.

Three ways, tried in this order:

    1. `data_dir=`        the folder of the set, with the official file names (an explicit folder is never passed over)
    2. `AGENT_R1_DATA`    an environment variable: a folder that holds one folder per set (hotpotqa, musique, ...)
    3. a download         pip install "agent-r1[data]"; the Hugging Face hub keeps it in its own cache

Nothing is read before it is asked for, and what was read is kept for the process: environments that share a set
share its rows. Rows become `Question`s, `Problem`s or `Program`s; a row that isn't in the official format raises
`DataFormatError`, which names the file, the row and the field.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from agent_r1.math_judge import last_boxed
from agent_r1_tools.search import Passage

logger = logging.getLogger(__name__)

DATA_VARIABLE = "AGENT_R1_DATA"
_LARGE = 50_000_000  # bytes; reading more than this takes long enough to say so


class DataNotFoundError(FileNotFoundError):
    """There is no data where it was looked for; the message names the three ways to get some."""


class DataFormatError(ValueError):
    """A data file that isn't in the official format; the message names file, row, field and what was expected."""


@dataclass(frozen=True)
class Question:
    """One question with the paragraphs that come with it.

    Attributes:
        id: the data set's own id.
        question: the question.
        answers: the gold answer first, then its aliases; at least one.
        paragraphs: the paragraphs of the question (distractors included), in the order of the file.
        supports: indexes into `paragraphs` of the gold ones, ascending. Paragraphs, not titles: MuSiQue has questions
            whose gold paragraphs share a title.
        support_titles: titles of the gold paragraphs, each once. HotpotQA and 2WikiMultihopQA name supports by title,
            so a title may stand here whose paragraph isn't among `paragraphs`.
        metadata: what else the row says (type, level, hops ...); JSON values only.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    paragraphs: tuple[Passage, ...]
    supports: tuple[int, ...]
    support_titles: tuple[str, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Problem:
    """One problem of mathematics.

    Attributes:
        id: the data set's own id, or the row's number.
        question: the problem.
        answer: the gold answer, as the official extraction gives it.
        metadata: what else the row says (level, type); JSON values only.
    """

    id: str
    question: str
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """One function that is to be written.

    Attributes:
        id: the data set's own id.
        text: HumanEval: the beginning of the program (imports, helpers, signature, docstring); MBPP: the description.
        entry_point: the function's name; "" where the official row names none (MBPP).
        solution: the canonical solution.
        setup: code that runs before the tests.
        tests: the official tests; one program (HumanEval) or one assert each (MBPP).
    """

    id: str
    text: str
    entry_point: str
    solution: str
    setup: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class DataSet:
    """Where a set's splits stand and how its rows are read.

    Attributes:
        name: as people write it.
        folder: the folder's name inside `AGENT_R1_DATA`.
        files: split -> the official file name; `.gz` behind it and `.jsonl` in place of `.json` are read as well.
        hub: data set on the Hugging Face hub and its configuration (None: the default one).
        hub_splits: split -> the split's name on the hub.
        from_hub: turns a row of the hub's columns into one of the official format.
        read: turns a row of the official format into a Question, Problem or Program, or None to leave it out.
        aliases: other names of splits.
        homepage: where the official files are.
        archive: the official release has a folder for each split, and in it a JSON file for each row.
    """

    name: str
    folder: str
    files: Mapping[str, str]
    hub: tuple[str, str | None]
    hub_splits: Mapping[str, str]
    from_hub: Callable[[Mapping[str, Any]], dict[str, Any]]
    read: Callable[[Row], Question | Problem | Program | None]
    aliases: Mapping[str, str]
    homepage: str
    archive: bool = False

    @property
    def splits(self) -> dict[str, str]:
        """Every accepted name of a split -> the split."""
        return {name: name for name in self.files} | dict(self.aliases)


def load_questions(name: str, split: str = "train", data_dir: str | os.PathLike[str] | None = None) -> list[Any]:
    """The rows of one split, in the order of the file. Read once per process; don't change the list.

    They are `Question`s ("hotpotqa", "2wikimultihopqa", "musique"), `Problem`s ("gsm8k", "math", "math500") or
    `Program`s ("humaneval", "mbpp").

    Args:
        name: a key of `DATA_SETS`.
        split: one of the set's splits, such as "train" or "dev" (also called "validation").
        data_dir: the folder of the set; None looks at `AGENT_R1_DATA` and then downloads.

    Raises: DataNotFoundError, DataFormatError; ValueError for a set or split that there isn't.
    """
    if name not in DATA_SETS:
        raise ValueError(f"there is no data set {name!r}; there are {', '.join(DATA_SETS)}")
    data_set = DATA_SETS[name]
    if split not in data_set.splits:
        raise ValueError(f"{data_set.name} has no split {split!r}; it has {', '.join(data_set.splits)}")
    split = data_set.splits[split]
    path = find_file(data_set, split, data_dir)
    if path is None:
        return _read_hub(name, split)
    stat = path.stat()
    aliases = path.parent / "id_aliases.json"
    return _read_file(name, split, path, stat.st_mtime_ns, stat.st_size, aliases if aliases.is_file() else None)


def find_file(data_set: DataSet, split: str, data_dir: str | os.PathLike[str] | None = None) -> Path | None:
    """The file (of an archive the folder) of a split, or None where only a download is left.

    Raises DataNotFoundError for a wrong `data_dir`.
    """
    official = data_set.files[split]
    stem, suffix = os.path.splitext(official)
    names = [official, official + ".gz"]
    if suffix == ".json":
        names += [stem + ".jsonl", stem + ".jsonl.gz"]
    variable = os.environ.get(DATA_VARIABLE)
    folders = [Path(data_dir)] if data_dir is not None else [Path(variable) / data_set.folder] if variable else []
    for folder in folders:
        for name in names:
            if (folder / name).is_file():
                return folder / name
        if data_set.archive and (folder / stem).is_dir():
            return folder / stem
    if data_dir is not None:
        raise DataNotFoundError(_three_ways(data_set, split, f"{data_dir} has no {' or '.join(names[:2])}"))
    return None


def _three_ways(data_set: DataSet, split: str, cause: str) -> str:
    hub, config = data_set.hub
    return (
        f"no data for {data_set.name}, split {split!r}: {cause}. There are three ways to get it:\n"
        f"  1. data_dir=...: a folder with the official file {data_set.files[split]} (from {data_set.homepage})\n"
        f"  2. {DATA_VARIABLE}=...: a folder whose folder {data_set.folder!r} has that file\n"
        f'  3. pip install "agent-r1[data]" and a network: '
        f"{hub}{f' ({config})' if config else ''} is downloaded from the Hugging Face hub"
    )


# ---------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Row:
    """One row and where it stands, so that whatever is wrong with it can be said in full."""

    fields: Mapping[str, Any]
    file: str
    index: int
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    split: str = ""

    def error(self, name: str, expected: str) -> DataFormatError:
        """The error that says that a field isn't what it has to be."""
        found = repr(self.fields[name]) if name in self.fields else "nothing"
        found = found if len(found) <= 80 else found[:77] + "..."
        return DataFormatError(
            f"{self.file}, row {self.index} (counting from 0), field {name!r}: expected {expected}, found {found}"
        )

    def text(self, name: str) -> str:
        """A field that has to be a string that isn't blank."""
        value = self.fields.get(name)
        if not isinstance(value, str) or not value.strip():
            raise self.error(name, "a non-empty string")
        return value

    def name(self, name: str) -> str:
        """A field that identifies the row: a string, or a number as some releases have it."""
        value = self.fields.get(name)
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else self.text(name)

    def texts(self, name: str) -> list[str]:
        """A field that has to be a list of strings; [] where it is missing."""
        value = self.fields.get(name, [])
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self.error(name, "a list of strings")
        return value

    def extras(self, *names: str) -> dict[str, Any]:
        """Those of the fields that the row has."""
        return {name: self.fields[name] for name in names if self.fields.get(name) is not None}


def read_rows(path: Path) -> Iterator[Any]:
    """The rows of a JSON list (.json) or of JSON lines (.jsonl), either with .gz behind it.

    Raises DataFormatError where the file isn't JSON. JSON lines are read one by one, a JSON list as a whole.
    """
    opened: Any = gzip.open if path.suffix == ".gz" else open
    lines = path.name.removesuffix(".gz").endswith(".jsonl")
    number = 0
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            if lines:
                for line in file:
                    number += 1
                    if line.strip():
                        yield json.loads(line)
            else:
                rows = json.load(file)
                if not isinstance(rows, list):
                    raise DataFormatError(f"{path}: expected a JSON list of rows, found a {type(rows).__name__}")
                yield from rows
    except json.JSONDecodeError as error:
        where = f"line {number}" if lines else f"line {error.lineno}, column {error.colno}"
        raise DataFormatError(
            f"{path}, {where}: expected {'one JSON object a line' if lines else 'JSON'}, found {error}"
        ) from None
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise DataFormatError(f"{path}: expected {'gzipped ' if opened is gzip.open else ''}UTF-8: {error}") from None


@lru_cache(maxsize=8)
def _read_file(name: str, split: str, path: Path, mtime_ns: int, size: int, aliases: Path | None) -> list[Any]:
    """The time and size of the file are part of the key, so a file that changed is read again."""
    if path.is_dir():
        return _read_archive(DATA_SETS[name], split, path)
    if size > _LARGE:
        logger.warning("reading %s (%d MB); once per process", path.name, size // 1_000_000)
    return _questions(DATA_SETS[name], split, read_rows(path), str(path), _read_aliases(aliases) if aliases else {})


def _read_archive(data_set: DataSet, split: str, folder: Path) -> list[Any]:
    """MATH's archive: a folder for each subject, a file for each problem. Its path is its id, as in MATH-500."""
    problems: list[Any] = []
    for path in sorted(folder.glob("*/*.json"), key=lambda path: (path.parent.name, len(path.name), path.name)):
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataFormatError(f"{path}: expected a JSON object in UTF-8, found {error}") from None
        if isinstance(fields, dict):
            fields["unique_id"] = path.relative_to(folder.parent).as_posix()
        problems += _questions(data_set, split, [fields], str(path), {})
    if not problems:
        raise DataFormatError(f"{folder}: expected folders of subjects with a JSON file for each problem, found none")
    return problems


@lru_cache(maxsize=8)
def _read_hub(name: str, split: str) -> list[Any]:
    data_set = DATA_SETS[name]
    variable = os.environ.get(DATA_VARIABLE)
    looked = f"{DATA_VARIABLE} " + (f"({variable}) has no such file" if variable else "is not set")
    try:
        from datasets import load_dataset
    except ImportError:
        raise DataNotFoundError(
            _three_ways(data_set, split, f"{looked}, and `datasets` is not installed")
        ) from None
    hub, config = data_set.hub
    try:
        rows = load_dataset(hub, config, split=data_set.hub_splits[split])
    except Exception as error:  # offline, refused, renamed: whatever it was, the reader needs the other two ways
        cause = f"{looked}, and the download of {hub} failed ({type(error).__name__}: {error})"
        raise DataNotFoundError(_three_ways(data_set, split, cause)) from error
    return _questions(data_set, split, map(data_set.from_hub, rows), f"{hub} ({split})", {})


def _questions(
    data_set: DataSet, split: str, rows: Iterable[Any], file: str, aliases: Mapping[str, Sequence[str]]
) -> list[Any]:
    questions: list[Any] = []
    index = -1
    for index, fields in enumerate(rows):
        if not isinstance(fields, dict):
            raise DataFormatError(f"{file}, row {index} (counting from 0): expected an object, found {fields!r:.80}")
        question = data_set.read(Row(fields, file, index, aliases, split))
        if question is not None:
            questions.append(question)
    if not questions:
        raise DataFormatError(f"{file}: expected at least one answerable question, found {index + 1} rows without one")
    return questions


def _read_aliases(path: Path) -> dict[str, list[str]]:
    """2WikiMultihopQA's id_aliases.json (JSON lines, whatever its name says): entity -> aliases and demonyms."""
    aliases: dict[str, list[str]] = {}
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                aliases[row["Q_id"]] = [*row["aliases"], *row["demonyms"]]
            except (ValueError, KeyError, TypeError):
                raise DataFormatError(
                    f"{path}, line {number}: expected an object with Q_id, aliases and demonyms, found {line!r:.80}"
                ) from None
    return aliases


# ---------------------------------------------------------------------- the official formats


def _read_by_title(row: Row, between: str) -> Question:
    """HotpotQA and 2WikiMultihopQA: context [[title, [sentence]]], supporting_facts [[title, sentence index]].

    A sentence index may be out of range (a quirk of 2WikiMultihopQA); only the titles are used.
    """
    paragraphs: list[Passage] = []
    context = row.fields.get("context")
    shape = "a list of [title, [sentence, ...]]"
    if not isinstance(context, list) or not context:
        raise row.error("context", shape)
    for entry in context:
        match entry:
            case [str(title), list(sentences)] if all(isinstance(sentence, str) for sentence in sentences):
                paragraphs.append(Passage(title, between.join(sentences).strip()))
            case _:
                raise row.error("context", f"{shape}; entry {len(paragraphs)} is {entry!r:.60}")
    titles: dict[str, None] = {}
    facts = row.fields.get("supporting_facts")
    if not isinstance(facts, list):
        raise row.error("supporting_facts", "a list of [title, sentence index]")
    for fact in facts:
        match fact:
            case [str(title), int()]:
                titles[title] = None
            case _:
                raise row.error("supporting_facts", f"a list of [title, sentence index]; one is {fact!r:.60}")
    answer = row.text("answer")
    answer_id = row.fields.get("answer_id")
    aliases = row.aliases.get(answer_id, ()) if isinstance(answer_id, str) else ()
    return Question(
        id=row.name("_id"),
        question=row.text("question"),
        answers=tuple(dict.fromkeys([answer, *aliases])),
        paragraphs=tuple(paragraphs),
        supports=_first_of_each(paragraphs, titles),
        support_titles=tuple(titles),
        metadata=row.extras("type", "level"),
    )


def _first_of_each(paragraphs: Sequence[Passage], titles: Iterable[str]) -> tuple[int, ...]:
    """The first paragraph of each title: 2WikiMultihopQA lists a few paragraphs twice."""
    first: dict[str, int] = {}
    for index, paragraph in enumerate(paragraphs):
        first.setdefault(paragraph.title, index)
    return tuple(sorted(first[title] for title in titles if title in first))


def _read_hotpotqa(row: Row) -> Question:
    return _read_by_title(row, between="")  # sentences bring their own leading space


def _read_2wiki(row: Row) -> Question:
    return _read_by_title(row, between=" ")


def _read_musique(row: Row) -> Question | None:
    """MuSiQue: paragraphs [{idx, title, paragraph_text, is_supporting}], answer_aliases, answerable.

    Rows with `answerable: false` (MuSiQue-Full) are left out: the official evaluation scores no answer on them.
    """
    answerable = row.fields.get("answerable", True)
    if not isinstance(answerable, bool):
        raise row.error("answerable", "true or false")
    if not answerable:
        return None
    paragraphs: list[Passage] = []
    supports: list[int] = []
    entries = row.fields.get("paragraphs")
    shape = "a list of objects with title, paragraph_text and is_supporting"
    if not isinstance(entries, list) or not entries:
        raise row.error("paragraphs", shape)
    for entry in entries:
        match entry:
            case {"title": str(title), "paragraph_text": str(text), "is_supporting": bool(is_supporting)}:
                if is_supporting:
                    supports.append(len(paragraphs))
                paragraphs.append(Passage(title, text.strip()))
            case _:
                raise row.error("paragraphs", f"{shape}; entry {len(paragraphs)} is {entry!r:.60}")
    name = row.name("id")
    return Question(
        id=name,
        question=row.text("question"),
        answers=tuple(dict.fromkeys([row.text("answer"), *row.texts("answer_aliases")])),
        paragraphs=tuple(paragraphs),
        supports=tuple(supports),
        support_titles=tuple(dict.fromkeys(paragraphs[index].title for index in supports)),
        metadata={"type": name.split("__")[0]},  # "2hop", "3hop1", ...: the shape of the reasoning
    )


_GSM8K_ANSWER = re.compile(r"#### (-?[0-9.,]+)")


def _read_gsm8k(row: Row) -> Problem:
    """GSM8K: question, answer; the gold answer stands behind ####, and commas are dropped as the official code does."""
    found = _GSM8K_ANSWER.search(row.text("answer"))
    if not found:
        raise row.error("answer", "a solution that ends in '#### number'")
    answer = found[1].replace(",", "")
    return Problem(f"{row.split}-{row.index}", row.text("question"), answer, {"solution": row.text("answer")})


def _read_math(row: Row) -> Problem:
    """MATH: problem, level, type, solution (answer in its last box); MATH-500 has answer, subject and unique_id too."""
    answer = row.fields.get("answer")
    answer = row.text("answer") if answer is not None else last_boxed(row.text("solution"))
    if not answer:
        raise row.error("solution", "a solution with its answer in \\boxed{}")
    name = row.name("unique_id") if "unique_id" in row.fields else f"{row.split}-{row.index}"
    return Problem(name, row.text("problem"), answer, row.extras("level", "type", "subject", "solution"))


def _read_humaneval(row: Row) -> Program:
    """HumanEval: task_id, prompt, entry_point, canonical_solution, test."""
    prompt, entry_point, solution = (row.text(name) for name in ("prompt", "entry_point", "canonical_solution"))
    return Program(row.name("task_id"), prompt, entry_point, solution, setup="", tests=(row.text("test"),))


MBPP_SPLITS = {"prompt": (1, 10), "test": (11, 510), "validation": (511, 600), "train": (601, 974)}
"""The official ranges of task_id, both ends included."""


def _read_mbpp(row: Row) -> Program | None:
    """MBPP: task_id, text, code, test_setup_code, test_list. One file has all splits; rows of others are left out."""
    number = row.fields.get("task_id")
    if not isinstance(number, int):
        raise row.error("task_id", "a number")
    first, last = MBPP_SPLITS[row.split]
    if not first <= number <= last:
        return None
    tests = row.texts("test_list")
    if not tests:
        raise row.error("test_list", "a list of asserts")
    setup = row.fields.get("test_setup_code") or ""
    code, setup = (text.replace("\r\n", "\n") for text in (row.text("code"), str(setup)))
    return Program(f"MBPP/{number}", row.text("text"), "", code, setup, tuple(tests))


def _pairs(columns: Any, first: str, second: str) -> list[list[Any]]:
    """[[a, b], ...] from {first: [a, ...], second: [b, ...]}, as the hub keeps lists of pairs."""
    return [list(pair) for pair in zip(columns[first], columns[second], strict=True)]


def _by_title_from_hub(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **row,
        "_id": row["id"],
        "context": _pairs(row["context"], "title", "sentences"),
        "supporting_facts": _pairs(row["supporting_facts"], "title", "sent_id"),
    }


_HUB_SPLITS = {"train": "train", "dev": "validation"}
_SPLIT_ALIASES = {"validation": "dev"}

DATA_SETS: dict[str, DataSet] = {
    "hotpotqa": DataSet(
        name="HotpotQA",
        folder="hotpotqa",
        files={"train": "hotpot_train_v1.1.json", "dev": "hotpot_dev_distractor_v1.json"},
        hub=("hotpotqa/hotpot_qa", "distractor"),
        hub_splits=_HUB_SPLITS,
        from_hub=_by_title_from_hub,
        read=_read_hotpotqa,
        aliases=_SPLIT_ALIASES,
        homepage="https://hotpotqa.github.io",
    ),
    "2wikimultihopqa": DataSet(
        name="2WikiMultihopQA",
        folder="2wikimultihopqa",
        files={"train": "train.json", "dev": "dev.json"},
        hub=("framolfese/2WikiMultihopQA", None),  # the authors' own hub page still needs a loading script
        hub_splits=_HUB_SPLITS,
        from_hub=_by_title_from_hub,
        read=_read_2wiki,
        aliases=_SPLIT_ALIASES,
        homepage="https://github.com/Alab-NII/2wikimultihop",
    ),
    "musique": DataSet(
        name="MuSiQue",
        folder="musique",
        files={"train": "musique_ans_v1.0_train.jsonl", "dev": "musique_ans_v1.0_dev.jsonl"},
        hub=("dgslibisey/MuSiQue", None),
        hub_splits=_HUB_SPLITS,
        from_hub=dict,
        read=_read_musique,
        aliases=_SPLIT_ALIASES,
        homepage="https://github.com/StonyBrookNLP/musique",
    ),
    "gsm8k": DataSet(
        name="GSM8K",
        folder="gsm8k",
        files={"train": "train.jsonl", "test": "test.jsonl"},
        hub=("openai/gsm8k", "main"),
        hub_splits={"train": "train", "test": "test"},
        from_hub=dict,
        read=_read_gsm8k,
        aliases={},
        homepage="https://github.com/openai/grade-school-math",
    ),
    "math": DataSet(
        name="MATH",
        folder="math",
        files={"train": "train.jsonl", "test": "test.jsonl"},
        hub=("DigitalLearningGmbH/MATH-lighteval", None),  # the authors' own page on the hub is gone
        hub_splits={"train": "train", "test": "test"},
        from_hub=dict,
        read=_read_math,
        aliases={},
        homepage="https://github.com/hendrycks/math",
        archive=True,
    ),
    "math500": DataSet(
        name="MATH-500",
        folder="math",
        files={"math500": "math500.jsonl"},
        hub=("HuggingFaceH4/MATH-500", None),
        hub_splits={"math500": "test"},
        from_hub=dict,
        read=_read_math,
        aliases={},
        homepage="https://github.com/openai/prm800k",
    ),
    "humaneval": DataSet(
        name="HumanEval",
        folder="humaneval",
        files={"test": "HumanEval.jsonl"},
        hub=("openai/openai_humaneval", None),
        hub_splits={"test": "test"},
        from_hub=dict,
        read=_read_humaneval,
        aliases={},
        homepage="https://github.com/openai/human-eval",
    ),
    "mbpp": DataSet(
        name="MBPP",
        folder="mbpp",
        files=dict.fromkeys(MBPP_SPLITS, "mbpp.jsonl"),
        hub=("google-research-datasets/mbpp", "full"),
        hub_splits={split: split for split in MBPP_SPLITS},
        from_hub=dict,
        read=_read_mbpp,
        aliases={},
        homepage="https://github.com/google-research/google-research/tree/master/mbpp",
    ),
}
