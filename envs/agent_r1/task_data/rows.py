"""Rows of one's own: questions and answers, from a file, a folder or a list."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

from agent_r1.task_data.files import read_rows
from agent_r1.task_data.load import DATA_VARIABLE
from agent_r1.task_data.records import DataFormatError, DataNotFoundError
from agent_r1_tools.text import printable

FIELDS = ("id", "question", "answer", "system", "tools")
WAYS = (
    "Give data=FILE (JSON lines with question and answer), data_dir=FOLDER with train.jsonl and test.jsonl, or a "
    f"folder rows in {DATA_VARIABLE}. `datasets` writes those of the hub to such files by to_json: "
    'pip install "agent-r1[data]"'
)
TABLES = (".csv", ".tsv", ".xlsx", ".parquet")
TO_LINES = (
    'rows are JSON, each a line such as {"question": "What is 17 * 3?", "answer": "51"} in a file .jsonl. A table with '
    'such columns becomes one by pandas.read_csv(FILE).to_json("rows.jsonl", orient="records", lines=True)'
)


def load_rows(data: Any, data_dir: Any, split: str, tools: tuple[str, ...]) -> tuple[dict[str, Any], ...]:
    """The rows of a split (a file is read once for the process), each with id, question, answers, system, tools, rest.

    Args:
        data, data_dir: rows or a file of both splits; a folder with a file a split. Neither: `AGENT_R1_DATA`/rows.
        tools: names that rows may use; a row that names none may use all.

    Raises: DataNotFoundError, DataFormatError (row and field are named).
    """
    where = _where(data, data_dir)
    if where is None:
        raise DataNotFoundError(f"there are no rows. {WAYS}")
    if not isinstance(where, str | os.PathLike):
        _check_list(where)
        return _part(_read_all(where, "", tools), split)
    path = Path(where)
    if path.is_file():
        return _part(_file(path, path.stat().st_mtime_ns, path.stat().st_size, tools), split)
    found = _file_of(path, split)
    if found is None:
        raise DataNotFoundError(f"there is no {path}, or no {split}.jsonl or {split}.json in it. {WAYS}")
    return _file(found, found.stat().st_mtime_ns, found.stat().st_size, tools)


def has_split(data: Any, data_dir: Any, split: str) -> bool:
    """Whether `load_rows` has where to read a split: of a folder that has files of others it may lack one."""
    where = _where(data, data_dir)
    folder = isinstance(where, str | os.PathLike) and Path(where).is_dir()
    return not folder or _file_of(Path(where), split) is not None


def _where(data: Any, data_dir: Any) -> Any:
    if data is None and data_dir is None and DATA_VARIABLE in os.environ:
        return Path(os.environ[DATA_VARIABLE]) / "rows"
    return data if data is not None else data_dir


def _file_of(folder: Path, split: str) -> Path | None:
    names = [f"{split}{ending}" for ending in (".jsonl", ".json", ".jsonl.gz", ".json.gz")]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _part(rows: tuple[dict[str, Any], ...], split: str) -> tuple[dict[str, Any], ...]:
    """Of rows that stand together the last tenth is for testing; one that stands alone is for both."""
    cut = len(rows) - max(1, len(rows) // 10)
    return rows[cut:] if split == "test" else rows[: max(1, cut)]


@lru_cache(maxsize=16)
def _file(path: Path, mtime_ns: int, size: int, tools: tuple[str, ...]) -> tuple[dict[str, Any], ...]:
    if path.suffix.lower() in TABLES:
        raise DataFormatError(f"{path}: {TO_LINES}")
    return _read_all(read_rows(path), f"{path}, ", tools)


def _check_list(data: Any) -> None:
    """DataFormatError with the remedy where this is no list of rows."""
    found = f"{data!r:.100}"
    if type(data).__name__ == "DataFrame":
        found = 'a DataFrame; give df.to_dict("records")'
    elif isinstance(data, Mapping):
        found = "a dict; of rows by split give the list of one, or data_dir=FOLDER with train.jsonl and test.jsonl"
    elif isinstance(data, Iterable) and not isinstance(data, bytes):
        return
    raise DataFormatError(f"data: expected a file, a folder or a list of rows, found {found}")


def _read_all(rows: Iterable[Any], file: str, tools: tuple[str, ...]) -> tuple[dict[str, Any], ...]:
    """Rows as the environment keeps them. DataFormatError where there are none, or two have the same id."""
    read = [_read(fields, f"{file}row {number}", tools) for number, fields in enumerate(rows, 1)]
    given: dict[str, int] = {}
    for number, row in enumerate(read, 1):
        if row["id"] is not None and (before := given.setdefault(row["id"], number)) != number:
            raise DataFormatError(f"{file}row {number}, id: {row['id']!r} is that of row {before}; give each its own")
    if not read:
        raise DataFormatError(f"{file[:-2]}{': ' if file else ''}there are no rows")
    for number, row in enumerate(read, 1):
        if row["id"] is None:  # "#3", or with more of # where a row has that already
            row["id"] = next(name for marks in count(1) if (name := "#" * marks + str(number)) not in given)
    return tuple(read)


def _read(row: Any, where: str, tools: tuple[str, ...]) -> dict[str, Any]:
    """A row as the environment keeps it; DataFormatError names the field that is wrong."""
    if not isinstance(row, Mapping):
        raise DataFormatError(f"{where}: expected an object, found a {type(row).__name__}")

    def wrong(field: str, expected: str) -> DataFormatError:
        others = ", ".join(map(str, row))
        told = printable(others) or "no fields"
        said = f"none; the row has {told:.200}" if field not in row else f"{row[field]!r:.100}"
        return DataFormatError(f"{where}, {field}: expected {expected}, found {said}")

    question, answer, system = row.get("question"), row.get("answer"), row.get("system")
    if not isinstance(question, str) or not question.strip():
        raise wrong("question", "a text")
    answers = answer if isinstance(answer, list) else [] if answer is None else [answer]
    if not all(type(one) in (str, int, float) and str(one).strip() and not _is_nan(one) for one in answers):
        raise wrong("answer", "a text, a number (a finite one), or a list of them")
    if system is not None and not isinstance(system, str):
        raise wrong("system", "a text")
    names = row.get("tools", list(tools))
    if not isinstance(names, list) or not set(map(str, names)) <= set(tools):
        raise wrong("tools", f"names among {', '.join(tools) or 'none, as the environment has no tools'}")
    rest = {name: value for name, value in row.items() if name not in FIELDS}
    try:
        json.dumps(rest, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataFormatError(f"{where}: expected JSON values, found others ({error})") from None
    given = row.get("id")  # a missing one of a table is None, "" or NaN
    return {
        "id": None if given is None or _is_nan(given) or not str(given).strip() else str(given),
        "question": question,
        "answers": tuple(str(one) for one in answers),
        "system": system,
        "tools": tuple(names),
        "rest": rest,
    }


def _is_nan(value: Any) -> bool:
    """Whether this is NaN or infinite: a number that is missing."""
    return isinstance(value, float) and not math.isfinite(value)
