"""Files of rows: JSON lists and JSON lines, compressed or not."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent_r1.task_data.rows import DataFormatError


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
