"""The user's own rows: questions and answers, from a file, a folder or a list."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from typing import Any

from agent_r1.rewards import find_answers
from agent_r1.task_data.files import read_rows
from agent_r1.task_data.load import DATA_VARIABLE
from agent_r1.task_data.records import DataFormatError, DataNotFoundError
from agent_r1.text.chat import read_reply
from agent_r1_tools.text import printable

FIELDS = ("id", "question", "answer", "system", "tools")
NEXT: dict[str | None, tuple[str, ...]] = {  # roles that may follow; "calls" is an assistant's message with tool_calls
    None: ("system", "user"), "system": ("user",), "user": ("assistant",), "calls": ("tool", "assistant"),
    "tool": ("tool", "assistant"), "assistant": (),
}  # fmt: skip
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


def load_rows(
    data: Any,
    data_dir: Any = None,
    split: str = "train",
    tools: tuple[str, ...] = (),
    question: str = "question",
    answer: str = "answer",
) -> tuple[dict[str, Any], ...]:
    """Return the rows of a split. A file is read once.

    A row is a dict of `id` and `question` (texts), `answers` (a tuple of texts), `system` (a text or None), `tools` (a
    tuple of names), `turns` (the assistant's messages of a demonstration) and `rest` (a dict of the other fields).

    Args:
        data, data_dir: rows or a file of both splits; a folder with one file per split. Neither: `AGENT_R1_DATA`/rows.
        tools: names that rows may use; a row that names none may use all.
        question, answer: names of columns; "a.b" is the field b of the object in column a.

    Raises: DataNotFoundError, DataFormatError (row and field are named).
    """
    source = _source(data, data_dir)
    if source is None:
        raise DataNotFoundError(f"there are no rows. {WAYS}")
    columns = (tools, question, answer)
    if not isinstance(source, str | os.PathLike):
        _check_list(source)
        return _rows_of_split(_read_all(source, "", *columns), split)
    path = Path(source)
    if path.is_file():
        return _rows_of_split(_file(path, path.stat().st_mtime_ns, path.stat().st_size, *columns), split)
    file = _file_of(path, split)
    if file is None:
        problem = f"{path} has no {split}.jsonl or {split}.json" if path.is_dir() else f"there is no {path}"
        raise DataNotFoundError(f"{problem}. {WAYS}")
    return _file(file, file.stat().st_mtime_ns, file.stat().st_size, *columns)


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
def _file(path: Path, mtime_ns: int, size: int, *columns: Any) -> tuple[dict[str, Any], ...]:
    if path.suffix.lower() in TABLES:
        raise DataFormatError(f"{path}: {TO_LINES}")
    return _read_all(read_rows(path), f"{path}, ", *columns)


def _check_list(data: Any) -> None:
    """Raise DataFormatError, with the remedy, if this is not a list of rows."""
    if type(data).__name__ == "DataFrame":
        description = 'a DataFrame; give df.to_dict("records")'
    elif isinstance(data, Mapping):
        description = "a dict; give the list of one split, or data_dir=FOLDER with train.jsonl and test.jsonl"
    elif isinstance(data, Iterable) and not isinstance(data, bytes):
        return
    else:
        description = "a number" if _is_too_long(data) else f"{data!r:.100}"
    raise DataFormatError(f"data: expected a file, a folder or a list of rows, found {description}")


def _read_all(rows: Iterable[Any], file: str, *columns: Any) -> tuple[dict[str, Any], ...]:
    """Return rows in the environment's form. Raises DataFormatError for no rows, and for equal ids."""
    read = [_read_row(fields, f"{file}row {number}", *columns) for number, fields in enumerate(rows, 1)]
    given: dict[str, int] = {}
    for number, row in enumerate(read, 1):
        if row["id"] is not None and (before := given.setdefault(row["id"], number)) != number:
            same = f"{row['id']!r:.100} is that of row {before}"
            raise DataFormatError(f"{file}row {number}, id: {same}; give each its own")
    if not read:
        raise DataFormatError(f"{file[:-2]}{': ' if file else ''}there are no rows")
    for number, row in enumerate(read, 1):
        if row["id"] is None:  # "#3", with more # if a row already has this id
            row["id"] = next(name for marks in count(1) if (name := "#" * marks + str(number)) not in given)
    return tuple(read)


def _read_row(row: Any, where: str, *columns: Any) -> dict[str, Any]:
    """Return `_read`. Raises DataFormatError also for an integer of more digits than Python writes."""
    try:
        return _read(row, where, *columns)
    except DataFormatError:
        raise
    except ValueError as error:
        field = next((f", {name}" for name, value in row.items() if isinstance(name, str) and _is_too_long(value)), "")
        reason = str(error).partition(";")[0]
        raise DataFormatError(f"{where}{printable(field):.100}: {reason}; write the number as a text") from None


def _is_too_long(value: Any) -> bool:
    try:
        return not repr(value)
    except ValueError:
        return True


def _read(row: Any, where: str, tools: tuple[str, ...], question: str, answer: str) -> dict[str, Any]:
    """Return a row in the environment's form. Raises DataFormatError with the name of a wrong field."""
    if not isinstance(row, Mapping):
        raise DataFormatError(f"{where}: expected an object, found a {type(row).__name__}")

    def wrong(field: str, expected: str, value: Any) -> DataFormatError:
        names = printable(", ".join(map(str, row))) or "no fields"
        remedy = "; the arguments question and answer name other columns" * (field in (question, answer))
        found = f"none; the row has {names:.200}{remedy}" if value is None else f"{value!r:.100}"
        return DataFormatError(f"{where}, {field}: expected {expected}, found {found}")

    if question == "question" and question not in row and "messages" in row:
        question = "messages"
    text, said = _column(row, question), None
    turns: tuple[dict[str, Any], ...] = ()
    if isinstance(text, list):
        said, text, turns = _read_messages(text, partial(wrong, question))
    elif not isinstance(text, str) or not text.strip():
        raise wrong(question, "a text, or a list of messages", text)
    right, system = _column(row, answer), row.get("system") if said is None else said
    if right is None and turns and not turns[-1]["tool_calls"]:
        right = find_answers(turns[-1]["content"].rpartition("</think>")[2])[-1:]
    answers = right if isinstance(right, list) else [] if right is None else [right]
    if not all(type(value) in (str, int, float) and str(value).strip() and not _is_nan(value) for value in answers):
        raise wrong(answer, "a text, a number (a finite one), or a list of them", right)
    if system is not None and not isinstance(system, str):
        raise wrong("system", "a text", system)
    given = list(tools) if row.get("tools") is None else row["tools"]
    names = [_tool_name(tool) for tool in given] if isinstance(given, list) else None
    if names is None or not set(names) <= set(tools):
        raise wrong("tools", f"names among {', '.join(tools) or 'none, as the environment has no tools'}", given)
    rest = {name: value for name, value in row.items() if name not in (*FIELDS, question, answer)}
    try:
        json.dumps(rest, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataFormatError(f"{where}: expected JSON values, found others ({error})") from None
    given = row.get("id")  # a missing one of a table is None, "" or NaN
    return {
        "id": None if given is None or _is_nan(given) or not str(given).strip() else str(given),
        "question": text,
        "answers": tuple(str(value) for value in answers),
        "system": system,
        "tools": tuple(names),
        "turns": turns,
        "rest": rest,
    }


def _tool_name(tool: Any) -> str:
    """Return a tool's name: a name itself, or that of a schema in the form of chat APIs."""
    function = tool.get("function") or tool if isinstance(tool, Mapping) else {}
    return str(function.get("name") if isinstance(function, Mapping) and function else tool)


def _column(row: Mapping[str, Any], name: str) -> Any:
    """Return the value in a column, None without one; "a.b" is the field b of the object in column a."""
    value: Any = row
    for part in [name] if name in row else name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _read_messages(
    messages: list[Any], wrong: Callable[[str, Any], DataFormatError]
) -> tuple[str | None, str, tuple[dict[str, Any], ...]]:
    """Return the system message or None, the question, and the assistant's turns, of one task in chat form.

    A turn has `content` and `tool_calls`, whose arguments are objects. What tools said is left out.
    """
    texts: dict[str, str] = {}
    turns: list[dict[str, Any]] = []
    before: str | None = None
    for number, message in enumerate(messages, 1):
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in NEXT[before]:
            allowed = " or ".join(NEXT[before]) or "nothing after an assistant's message without tool_calls"
            several = "; a row has one user message, so give each question its own row" * (role == "user")
            raise wrong(f"{allowed} as message {number}{several}", role or message)
        if role == "assistant":
            turns.append(_read_turn(message, number, wrong))
        elif role != "tool":
            text = message.get("content")
            if not isinstance(text, str) or not text.strip():
                raise wrong(f"a text as content of message {number} ({role}); images are not read", text or "no text")
            texts[role] = text
        before = "calls" if role == "assistant" and turns[-1]["tool_calls"] else role
    if "user" not in texts:
        raise wrong("messages, one of them the user's", messages)
    return texts.get("system"), texts["user"], tuple(turns)


def _read_turn(message: Mapping[str, Any], number: int, wrong: Callable[[str, Any], DataFormatError]) -> dict[str, Any]:
    try:
        content, calls = read_reply(message)
    except TypeError as error:
        raise wrong(f"an assistant's message with content or tool_calls as message {number}", error) from None
    for name, arguments in calls:
        if not name or isinstance(arguments, str):
            raise wrong(f"tool_calls with a name and arguments, a JSON object, in message {number}", (name, arguments))
    return {"content": content, "tool_calls": [{"function": {"name": n, "arguments": a}} for n, a in calls]}


def _is_nan(value: Any) -> bool:
    """Return whether this is NaN or infinite: a missing number."""
    return isinstance(value, float) and not math.isfinite(value)
