"""Lookup and reading of a set's data, once per process."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from agent_r1.arguments import ArgumentError
from agent_r1.task_data import gsm8k, hotpotqa, humaneval, math, mbpp, musique, two_wiki
from agent_r1.task_data.files import read_json, read_lines, read_rows
from agent_r1.task_data.records import DataFormatError, DataNotFoundError, DataSet, Row, shown

logger = logging.getLogger(__name__)

DATA_VARIABLE = "AGENT_R1_DATA"
_LARGE = 50_000_000  # bytes; reading a larger file takes long, so it is logged

DATA_SETS: dict[str, DataSet] = {
    "hotpotqa": hotpotqa.HOTPOTQA,
    "2wikimultihopqa": two_wiki.TWO_WIKI,
    "musique": musique.MUSIQUE,
    "gsm8k": gsm8k.GSM8K,
    "math": math.MATH,
    "math500": math.MATH500,
    "humaneval": humaneval.HUMANEVAL,
    "mbpp": mbpp.MBPP,
}


def load_questions(name: str, split: str = "train", data_dir: str | os.PathLike[str] | None = None) -> list[Any]:
    """Return the rows of one split, in the order of the file. They are read once per process; do not change the list.

    They are `Question`s ("hotpotqa", "2wikimultihopqa", "musique"), `Problem`s ("gsm8k", "math", "math500") or
    `Program`s ("humaneval", "mbpp").

    Args:
        name: a key of `DATA_SETS`.
        split: one of the set's splits, such as "train" or "dev" (also called "validation").
        data_dir: the folder of the set; None reads `AGENT_R1_DATA`, or else downloads.

    Raises: DataNotFoundError, DataFormatError; ArgumentError for an unknown set or split.
    """
    if name not in DATA_SETS:
        raise ArgumentError(f"there is no data set {name!r}; there are {', '.join(DATA_SETS)}")
    data_set = DATA_SETS[name]
    if split not in data_set.splits:
        raise ArgumentError(f"{data_set.name} has no split {split!r}; it has {', '.join(data_set.splits)}")
    split = data_set.splits[split]
    path = find_file(data_set, split, data_dir)
    if path is None:
        return _read_hub(name, split)
    stat = path.stat()
    aliases = path.parent / "id_aliases.json"
    return _read_file(name, split, path, stat.st_mtime_ns, stat.st_size, aliases if aliases.is_file() else None)


def has_questions(name: str, split: str, data_dir: str | os.PathLike[str] | None = None) -> bool:
    """Return whether a folder has the file of a split; without `data_dir` it may still be downloaded."""
    data_set = DATA_SETS[name]
    if split not in data_set.splits:
        return False
    try:
        find_file(data_set, data_set.splits[split], data_dir)
    except DataNotFoundError:
        return False
    return True


def find_file(data_set: DataSet, split: str, data_dir: str | os.PathLike[str] | None = None) -> Path | None:
    """Return the file (for an archive the folder) of a split, or None if only a download is left.

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
        missing = f"{data_dir} has no {' or '.join(names[:2])}"
        cause = missing if Path(data_dir).is_dir() else f"there is no folder {data_dir}"
        raise DataNotFoundError(_three_ways(data_set, split, cause))
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


@lru_cache(maxsize=8)
def _read_file(name: str, split: str, path: Path, mtime_ns: int, size: int, aliases: Path | None) -> list[Any]:
    """Read a file. Its time and size are part of the cache key, so a changed file is read again."""
    if path.is_dir():
        return _read_archive(DATA_SETS[name], split, path)
    if size > _LARGE:
        logger.warning("reading %s (%d MB); once per process", path.name, size // 1_000_000)
    return _questions(DATA_SETS[name], split, read_rows(path), str(path), _read_aliases(aliases) if aliases else {})


def _read_archive(data_set: DataSet, split: str, folder: Path) -> list[Any]:
    """Read MATH's archive: a folder for each subject, a file for each problem. The path is the id, as in MATH-500."""
    problems: list[Any] = []
    for path in sorted(folder.glob("*/*.json"), key=lambda path: (path.parent.name, len(path.name), path.name)):
        fields = read_json(path, "a JSON object")
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
    except Exception as error:  # offline, rejected, renamed: in any case the user needs the other two ways
        cause = f"{looked}, and the download of {hub} failed ({type(error).__name__}: {error})"
        raise DataNotFoundError(_three_ways(data_set, split, cause)) from error
    where = f"{hub} ({split})"
    return _questions(data_set, split, from_hub(data_set, rows, where), where, {})


def from_hub(data_set: DataSet, rows: Iterable[Mapping[str, Any]], where: str) -> Iterator[dict[str, Any]]:
    """Yield rows of the hub in the official format. Raises DataFormatError if they have other columns."""
    for index, row in enumerate(rows):
        try:
            yield data_set.from_hub(row)
        except (KeyError, TypeError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise DataFormatError(
                f"{where}, row {index} (counting from 0): expected the columns of {data_set.name}, found {problem}"
            ) from error


def _questions(
    data_set: DataSet, split: str, rows: Iterable[Any], file: str, aliases: Mapping[str, Sequence[str]]
) -> list[Any]:
    questions: list[Any] = []
    index = -1
    for index, fields in enumerate(rows):
        if not isinstance(fields, dict):
            raise DataFormatError(f"{file}, row {index} (counting from 0): expected an object, found {shown(fields)}")
        question = data_set.read(Row(fields, file, index, aliases, split))
        if question is not None:
            questions.append(question)
    if not questions:
        raise DataFormatError(f"{file}: expected at least one answerable question, found {index + 1} rows without one")
    return questions


def _read_aliases(path: Path) -> dict[str, list[str]]:
    """Read 2WikiMultihopQA's id_aliases.json (JSON lines in spite of its name): entity -> aliases and demonyms."""
    aliases: dict[str, list[str]] = {}
    for number, row in read_lines(path):
        match row:
            case {"Q_id": str(name), "aliases": list(names), "demonyms": list(more)} if all(
                isinstance(alias, str) for alias in [*names, *more]
            ):
                aliases[name] = [*names, *more]
            case _:
                raise DataFormatError(
                    f"{path}, line {number}: expected an object with Q_id, aliases and demonyms, found {shown(row)}"
                )
    return aliases
