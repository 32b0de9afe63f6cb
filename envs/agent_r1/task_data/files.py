"""Files of rows: JSON lists and JSON lines, compressed or not. Every error in a file is a `DataFormatError`."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent_r1.task_data.records import DataFormatError
from agent_r1_tools.bounded import HUGE, TooLargeError, bounded_lines, unpacked_bound

MAX_DIGITS = 400
"""The maximum number of digits of an integer in a data set."""


ENDINGS = "a file whose name ends in .jsonl has JSON lines, one that ends in .json a list"


class LongNumber:
    """A placeholder for an integer of more than `MAX_DIGITS` digits.

    No field accepts its type. So a field that is used is named in an error, and other fields do no harm.
    """

    def __init__(self, digits: int) -> None:
        self.digits = digits

    def __repr__(self) -> str:
        return f"a number of {self.digits} digits"


def read_rows(path: Path) -> Iterator[Any]:
    """Yield the rows of a JSON list (.json) or of JSON lines (.jsonl), optionally with .gz at the end.

    Raises DataFormatError if the file is not JSON. JSON lines are read one by one, a JSON list as a whole.
    """
    if path.name.lower().removesuffix(".gz").endswith(".jsonl"):
        yield from (row for _, row in read_lines(path))
        return
    rows = read_json(path)
    if not isinstance(rows, list):
        raise DataFormatError(f"{path}: expected a JSON list of rows, found a {type(rows).__name__}; {ENDINGS}")
    yield from rows


def read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number of each line of JSON lines, from 1, and its value; empty lines are skipped.

    Raises DataFormatError if the file is not JSON lines, or if a line or the unpacked file is too large for data.
    """
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(bounded_lines(file, path if _packed(path) else None), 1):
                if line.lstrip().startswith("["):
                    where = f"{path}, line {number}"
                    raise DataFormatError(f"{where}: expected one JSON object a line, found a list; {ENDINGS}")
                if line.strip():
                    yield number, _parse(line, f"{path}, line {number}", "one JSON object a line")
    except TooLargeError as error:
        raise DataFormatError(f"{path}, line {number + 1}: {error}") from None
    except (UnicodeDecodeError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise _damaged(path, f"{path}, after line {number}", error) from None


def read_json(path: Path, expected: str = "JSON") -> Any:
    """Return the value in a JSON file. Raises DataFormatError if it is not JSON, or too large after unpacking."""
    max_chars = unpacked_bound(path) if _packed(path) else -1
    try:
        with _open(path) as file:
            text = file.read(max_chars)
            if max_chars >= 0 and file.read(1):
                raise DataFormatError(f"{path}: {HUGE}; unpack it, if you trust it")
    except (UnicodeDecodeError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise _damaged(path, str(path), error) from None
    return _parse(text, str(path), expected)


def _packed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def _open(path: Path) -> Any:
    open_file: Any = gzip.open if _packed(path) else open
    return open_file(path, "rt", encoding="utf-8-sig")  # some programs begin a file with a byte order mark


def _damaged(path: Path, where: str, error: Exception) -> DataFormatError:
    return DataFormatError(f"{where}: expected {'gzipped ' if _packed(path) else ''}UTF-8: {error}")


def _parse(text: str, where: str, expected: str) -> Any:
    try:
        return json.loads(text, parse_int=_integer)
    except RecursionError:
        problem = "values nested too deeply"
    except json.JSONDecodeError as error:
        problem = f"{error}; {ENDINGS}" if error.msg == "Extra data" else str(error)
        if expected == "JSON":
            where = f"{where}, line {error.lineno}, column {error.colno}"
    raise DataFormatError(f"{where}: expected {expected}, found {problem}")


def _integer(digits: str) -> int | LongNumber:
    return int(digits) if len(digits) <= MAX_DIGITS else LongNumber(len(digits.removeprefix("-")))
