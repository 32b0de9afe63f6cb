"""Passages, the files they come from, and what every retriever has in common."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from agent_r1_tools.bounded import TooLargeError, bounded_lines
from agent_r1_tools.tool import ToolFault


@dataclass(frozen=True)
class Passage:
    """A piece of text with a title: what is indexed, found and shown."""

    title: str
    text: str


Hit = tuple[Passage, float]
"""A passage that was found and its score (higher is better; comparable within one retriever only)."""


class Retriever(Protocol):
    """Finds passages.

    `timeout` is the longest that a search can take, in seconds; `math.inf` for one that computes in process and never
    blocks. Searches of one with a finite timeout run in other threads, several at the same time.
    """

    @property
    def timeout(self) -> float: ...

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        """Return at most `top_k` hits for each query, best first.

        May raise `RetrievalError`, and `QueryRefused` if it rejects one of the queries.
        """
        ...


class RetrievalError(ToolFault, RuntimeError):
    """The retriever could not search: its server is down, too slow, or speaks another protocol."""


class QueryRefused(ValueError):
    """The retriever works, but doesn't take this query."""


def format_passages(passages: Sequence[Passage]) -> str:
    """Format passages for the policy, one a line: `[1] Title: text`."""
    return "\n".join(f"[{i}] {one_line(p.title)}: {one_line(p.text)}" for i, p in enumerate(passages, 1))


def one_line(text: str) -> str:
    return " ".join(text.splitlines())


def passage_from_row(row: Any) -> Passage:
    """Return the passage in a row of a corpus file or in a document of a retrieval server.

    The forms are `{"title", "text"}`, `{"title", "contents"}` (Agent-R1's KILT corpus) and `{"contents"}` alone, whose
    first line is the title in quotation marks (Search-R1).

    Raises:
        ValueError: the row is something else; the message names the field.
    """
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, found {type(row).__name__}")
    for field in ("title", "text", "contents"):
        if field in row and not isinstance(row[field], str):
            raise ValueError(f"field '{field}' must be a string, not {type(row[field]).__name__}")
    if "title" in row and "text" in row:
        return Passage(row["title"], row["text"])
    if "contents" in row:
        first, _, rest = row["contents"].partition("\n")
        first = first.strip()
        if len(first) >= 2 and first[0] == first[-1] == '"':
            first = first[1:-1]
        if row.get("title", first) == first:
            return Passage(first, rest)
        return Passage(row["title"], row["contents"])
    missing = "text" if "title" in row else "title"
    raise ValueError(f"field '{missing}' is missing (a row needs 'title' and 'text', or 'contents')")


def load_corpus(path: str | Path, source: str | None = None) -> list[Passage]:
    """Load the passages of a JSON Lines file, which may be compressed (.gz).

    Args:
        path: a file with one object a line, in a form that `passage_from_row` understands.
        source: keep only the rows whose `source` field is this.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a row cannot be read (file, row and field are named), or no row has that source.
    """
    path = Path(path)
    passages = []
    sources = set()
    number = 0
    try:
        packed = path.suffix.lower() == ".gz"
        opened: Any = gzip.open(path) if packed else path.open("rb")
        with opened as lines:
            for number, line in enumerate(bounded_lines(lines, path if packed else None), 1):
                if not line.strip():
                    continue
                row, passage = _read_row(line, f"{path}, row {number}")
                if source is not None:
                    source_name = row.get("source")
                    if not isinstance(source_name, str | None):
                        raise ValueError(f"{path}, row {number}: field 'source' must be a string")
                    sources.add(source_name)
                    if source_name != source:
                        continue
                passages.append(passage)
    except TooLargeError as error:
        raise ValueError(f"{path}, row {number + 1}: {error}") from None
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path}, after row {number}: the file is damaged ({error})") from error
    if source is not None and source not in sources:
        known = ", ".join(sorted(repr(s) for s in sources)) or "no rows at all"
        raise ValueError(f"{path}: no row has source {source!r}; it has {known}")
    return passages


def _read_row(line: bytes, where: str) -> tuple[dict[str, Any], Passage]:
    try:
        row = json.loads(line.decode())
        return row, passage_from_row(row)
    except ValueError as error:  # also broken JSON and broken UTF-8
        raise ValueError(f"{where}: {error}") from error
    except RecursionError:
        raise ValueError(f"{where}: nested too deeply") from None
