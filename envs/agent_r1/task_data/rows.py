"""The user's own rows: questions and answers, from a file, a folder or a list."""

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
    f"folder rows in {DATA_VARIABLE}. `datasets` writes rows of the hub to such files with to_json: "
    'pip install "agent-r1[data]"'
)
TABLES = (".csv", ".tsv", ".xlsx", ".parquet")
TO_LINES = (
    'rows are JSON, each a line such as {"question": "What is 17 * 3?", "answer": "51"} in a file .jsonl. A table with '
    'such columns is converted by pandas.read_csv(FILE).to_json("rows.jsonl", orient="records", lines=True)'
)


def load_rows(data: Any, data_dir: Any, split: str, tools: tuple[str, ...]) -> tuple[dict[str, Any], ...]:
    """Return the rows of a split, each with id, question, answers, system, tools, rest. A file is read once.

    Args:
        data, data_dir: rows or a file of both splits; a folder with one file per split. Neither: `AGENT_R1_DATA`/rows.
        tools: names that rows may use; a row that names none may use all.

    Raises: DataNotFoundError, DataFormatError (row and field are named).
    """
    source = _source(data, data_dir)
    if source is None:
        raise DataNotFoundError(f"there are no rows. {WAYS}")
    if not isinstance(source, str | os.PathLike):
        _check_list(source)
        return _rows_of_split(_read_all(source, "", tools), split)
    path = Path(source)
    if path.is_file():
        return _rows_of_split(_file(path, path.stat().st_mtime_ns, path.stat().st_size, tools), split)
    file = _file_of(path, split)
    if file is None:
        problem = f"{path} has no {split}.jsonl or {split}.json" if path.is_dir() else f"there is no {path}"
        raise DataNotFoundError(f"{problem}. {WAYS}")
    return _file(file, file.stat().st_mtime_ns, file.stat().st_size, tools)


def has_split(data: Any, data_dir: Any, split: str) -> bool:
    """Return whether `load_rows` can read a split. A folder may lack the file of one split."""
    source = _source(data, data_dir)
    is_folder = isinstance(source, str | os.PathLike) and Path(source).is_dir()
    return not is_folder or _file_of(Path(source), split) is not None


def _source(data: Any, data_dir: Any) -> Any:
    if data is None and data_dir is None and DATA_VARIABLE in os.environ:
        return Path(os.environ[DATA_VARIABLE]) / "rows"
    return data if data is not None else data_dir


def _file_of(folder: Path, split: str) -> Path | None:
    names = [f"{split}{ending}" for ending in (".jsonl", ".json", ".jsonl.gz", ".json.gz")]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _rows_of_split(rows: tuple[dict[str, Any], ...], split: str) -> tuple[dict[str, Any], ...]:
    """Split rows of one source: the last tenth is for testing. A single row is for both splits."""
    cut = len(rows) - max(1, len(rows) // 10)
    return rows[cut:] if split == "test" else rows[: max(1, cut)]


@lru_cache(maxsize=16)
def _file(path: Path, mtime_ns: int, size: int, tools: tuple[str, ...]) -> tuple[dict[str, Any], ...]:
    if path.suffix.lower() in TABLES:
        raise DataFormatError(f"{path}: {TO_LINES}")
    return _read_all(read_rows(path), f"{path}, ", tools)


def _check_list(data: Any) -> None:
    """Raise DataFormatError, with the remedy, if this is not a list of rows."""
    description = f"{data!r:.100}"
    if type(data).__name__ == "DataFrame":
        description = 'a DataFrame; give df.to_dict("records")'
    elif isinstance(data, Mapping):
        description = "a dict; give the list of one split, or data_dir=FOLDER with train.jsonl and test.jsonl"
    elif isinstance(data, Iterable) and not isinstance(data, bytes):
        return
    raise DataFormatError(f"data: expected a file, a folder or a list of rows, found {description}")


def _read_all(rows: Iterable[Any], file: str, tools: tuple[str, ...]) -> tuple[dict[str, Any], ...]:
    """Return rows in the environment's form. Raises DataFormatError for no rows, and for equal ids."""
    read = [_read(fields, f"{file}row {number}", tools) for number, fields in enumerate(rows, 1)]
    given: dict[str, int] = {}
    for number, row in enumerate(read, 1):
        if row["id"] is not None and (before := given.setdefault(row["id"], number)) != number:
            raise DataFormatError(f"{file}row {number}, id: {row['id']!r} is that of row {before}; give each its own")
    if not read:
        raise DataFormatError(f"{file[:-2]}{': ' if file else ''}there are no rows")
    for number, row in enumerate(read, 1):
        if row["id"] is None:  # "#3", with more # if a row already has this id
            row["id"] = next(name for marks in count(1) if (name := "#" * marks + str(number)) not in given)
    return tuple(read)


def _read(row: Any, where: str, tools: tuple[str, ...]) -> dict[str, Any]:
    """Return a row in the environment's form. Raises DataFormatError with the name of a wrong field."""
    if not isinstance(row, Mapping):
        raise DataFormatError(f"{where}: expected an object, found a {type(row).__name__}")

    def wrong(field: str, expected: str) -> DataFormatError:
        names = printable(", ".join(map(str, row))) or "no fields"
        found = f"none; the row has {names:.200}" if field not in row else f"{row[field]!r:.100}"
        return DataFormatError(f"{where}, {field}: expected {expected}, found {found}")

    question, answer, system = row.get("question"), row.get("answer"), row.get("system")
    if not isinstance(question, str) or not question.strip():
        raise wrong("question", "a text")
    answers = answer if isinstance(answer, list) else [] if answer is None else [answer]
    if not all(type(value) in (str, int, float) and str(value).strip() and not _is_nan(value) for value in answers):
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
        "answers": tuple(str(value) for value in answers),
        "system": system,
        "tools": tuple(names),
        "rest": rest,
    }


def _is_nan(value: Any) -> bool:
    """Return whether this is NaN or infinite: a missing number."""
    return isinstance(value, float) and not math.isfinite(value)
