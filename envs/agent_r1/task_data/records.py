"""The records of a data set: its rows in a file, and the questions, problems and programs made from them."""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_r1_tools.search import Passage
from agent_r1_tools.text import PrintableMessage


class DataNotFoundError(PrintableMessage, FileNotFoundError):
    """Missing data; the message names the three ways to get it, and is `printable`."""


class DataFormatError(PrintableMessage, ValueError):
    """A data file that is not in the official format.

    The message names file, row, field and the expected value. It is `printable`, because the file may be foreign.
    """


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
            so a title may be here although its paragraph is not in `paragraphs`.
        metadata: further fields of the row (type, level, hops ...); JSON values only.
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
        answer: the gold answer of the official extraction.
        metadata: further fields of the row (level, type); JSON values only.
    """

    id: str
    question: str
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """One function to write.

    Attributes:
        id: the data set's own id.
        text: HumanEval: the beginning of the program (imports, helpers, signature, docstring); MBPP: the description.
        entry_point: the function's name; "" if the official row names none (MBPP).
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
    """The description of a data set: the files of its splits, and the reader of its rows.

    Attributes:
        name: the usual name.
        folder: the folder's name inside `AGENT_R1_DATA`.
        files: split -> the official file name; files with `.gz`, or with `.jsonl` for `.json`, are read as well.
        hub: data set on the Hugging Face hub and its configuration (None: the default one).
        hub_splits: split -> the split's name on the hub.
        from_hub: turns a row of the hub's columns into one of the official format.
        read: turns a row of the official format into a Question, Problem or Program, or None to skip it.
        aliases: other names of splits.
        homepage: the page of the official files.
        archive: True if the official release has a folder for each split with a JSON file for each row.
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


@dataclass(frozen=True)
class Row:
    """One row and its position, so that an error can name both."""

    fields: Mapping[str, Any]
    file: str
    index: int
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    split: str = ""

    def error(self, name: str, expected: str) -> DataFormatError:
        """Return the error for a field with a wrong value."""
        value = shown(self.fields[name]) if name in self.fields else "nothing"
        return DataFormatError(
            f"{self.file}, row {self.index} (counting from 0), field {name!r}: expected {expected}, found {value}"
        )

    def text(self, name: str) -> str:
        """Return a field that must be a string that is not blank."""
        value = self.fields.get(name)
        if not isinstance(value, str) or not value.strip():
            raise self.error(name, "a non-empty string")
        return value

    def name(self, name: str) -> str:
        """Return a field that identifies the row: a string, or a number in some releases."""
        value = self.fields.get(name)
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else self.text(name)

    def texts(self, name: str) -> list[str]:
        """Return a field that must be a list of strings; [] if it is missing."""
        value = self.fields.get(name, [])
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self.error(name, "a list of strings")
        return value

    def extras(self, *names: str) -> dict[str, Any]:
        """Return the existing ones of these fields: text, or a number that JSON can write."""
        values = {name: self.fields[name] for name in names if self.fields.get(name) is not None}
        for name, value in values.items():
            if not isinstance(value, str | int) and not (isinstance(value, float) and math.isfinite(value)):
                raise self.error(name, "a string or a number")
        return values

    def python(self, name: str, code: str) -> ast.Module:
        """Return the syntax tree of code in a field, or of code that contains the field."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "\\d" and the like
                return ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested too deeply
            raise self.error(name, f"Python ({error or type(error).__name__})") from None


def defined(code: ast.Module) -> set[str]:
    """Return the names of the functions and classes that a program defines."""
    return {node.name for node in code.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def shown(value: Any) -> str:
    """Format a value of a row for an error."""
    try:
        text = repr(value)
    except RecursionError:
        return "values nested too deeply"
    return text if len(text) <= 80 else text[:77] + "..."
