"""Spider and BIRD: questions with gold queries over SQLite files, in the folders of the official releases."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from agent_r1.task_data.files import read_rows
from agent_r1.task_data.records import DataFormatError, DataNotFoundError, Row, shown
from agent_r1_tools.sql import Database, SchemaTool
from agent_r1_tools.tool import ToolFault

FILES = {"train": ("train_spider.json", "train.json"), "dev": ("dev.json",), "test": ("test.json",)}
FOLDERS = ("database", "dev_databases", "train_databases", "test_database")
ORDER_PARTS = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`|[()]|\border\s+by\b", re.IGNORECASE)
"""The parts of a query. A doubled quote within quotes reads as two adjacent quoted texts: the same for text outside of
the quotes."""
HEADER = b"SQLite format 3\0"


@dataclass(frozen=True)
class SQLQuestion:
    """A question over a database.

    Attributes:
        id: BIRD's question_id, or the row's number in Spider.
        question: the question, followed by BIRD's evidence as a hint.
        gold: the gold query.
        database: the path of the SQLite file.
        mode: the comparison of results: see `same_result`.
        metadata: db_id, and BIRD's difficulty.
    """

    id: str
    question: str
    gold: str
    database: str
    mode: str
    metadata: dict[str, str]


def load_sql(split: str, data_dir: str | os.PathLike[str]) -> list[SQLQuestion]:
    """Return the questions of a split from a folder of Spider or BIRD.

    The fields are db_id, question, query (Spider) or db_id, question, evidence, SQL (BIRD).

    Raises: DataNotFoundError, DataFormatError (file, row and field, or the database that SQLite cannot read).
    """
    folder = Path(data_dir)
    names = FILES.get(split, ())
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None:
        wanted = " or ".join(names) or f"file for the split {split!r} (there are {', '.join(FILES)})"
        splits = ", ".join(name for name in FILES if has_split(folder, name))
        known = f"it has the split {splits}" if splits else "it must be a folder of Spider or BIRD"
        raise DataNotFoundError(f"data_dir={folder} has no {wanted}; {known}")
    return _read(file, file.stat().st_mtime_ns)


def has_split(data_dir: str | os.PathLike[str], split: str) -> bool:
    """Return whether a folder of Spider or BIRD has the file of a split."""
    return any((Path(data_dir) / name).is_file() for name in FILES.get(split, ()))


@lru_cache(maxsize=8)
def _read(file: Path, mtime_ns: int) -> list[SQLQuestion]:
    """Read a file. Its time is part of the cache key, so a changed file is read again."""
    questions = []
    databases: dict[str, str] = {}
    for index, fields in enumerate(read_rows(file)):
        if not isinstance(fields, dict):
            raise DataFormatError(f"{file}, row {index} (counting from 0): expected an object, found {shown(fields)}")
        row = Row(fields, str(file), index)
        bird = "SQL" in fields
        name = row.text("db_id")
        if name not in databases:
            databases[name] = _database(row, file.parent, name)
        evidence = row.text("evidence").strip() if bird and fields.get("evidence") else ""
        gold = row.text("SQL" if bird else "query").strip().rstrip(";")
        mode = "set" if bird else "ordered" if _is_ordered(gold) else "rows"
        questions.append(
            SQLQuestion(
                row.name("question_id") if bird and "question_id" in fields else f"{file.stem}-{index}",
                row.text("question").strip() + (f"\nHint: {evidence}" if evidence else ""),
                gold,
                databases[name],
                mode,
                {"db_id": name} | {key: str(value) for key, value in row.extras("difficulty").items()},
            )
        )
    if not questions:
        raise DataFormatError(f"{file}: expected at least one question, found none")
    return questions


def _database(row: Row, folder: Path, name: str) -> str:
    """Return the file of a database, after SQLite has read its tables."""
    if not re.fullmatch(r"[\w. -]+", name) or not name.strip(". "):
        raise row.error("db_id", "the name of a folder")
    paths = [folder / place / name / f"{name}.sqlite" for place in FOLDERS]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise row.error("db_id", f"a database with the file {paths[0]}")
    with path.open("rb") as file:
        if file.read(len(HEADER)) != HEADER:
            raise DataFormatError(f"{path}: expected an SQLite database, found another file")
    try:
        SchemaTool(Database(file=str(path))).execute({})
    except ToolFault as fault:
        raise DataFormatError(f"{path}: expected an SQLite database: {fault}") from None
    return str(path.resolve())


def _is_ordered(query: str) -> bool:
    """Return whether the whole result has an order: an ORDER BY outside quotes and brackets."""
    depth = 0
    for part in ORDER_PARTS.finditer(query):
        text = part.group()
        if text == "(":
            depth += 1
        elif text == ")":
            depth -= 1
        elif depth == 0 and text[0] in "oO":
            return True
    return False
