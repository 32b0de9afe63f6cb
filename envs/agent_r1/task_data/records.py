"""What a data set is made of: its rows as they stand in a file, and what they become."""

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
    """There is no data where it was looked for; the message names the three ways to get some, and is `printable`."""


class DataFormatError(PrintableMessage, ValueError):
    """A data file that isn't in the official format; the message names file, row, field and what was expected, and is
    `printable`: the file may be a stranger's."""


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
        found = shown(self.fields[name]) if name in self.fields else "nothing"
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
        """Those of the fields that the row has: text, or a number that JSON can write."""
        found = {name: self.fields[name] for name in names if self.fields.get(name) is not None}
        for name, value in found.items():
            if not isinstance(value, str | int) and not (isinstance(value, float) and math.isfinite(value)):
                raise self.error(name, "a string or a number")
        return found

    def python(self, name: str, code: str) -> ast.Module:
        """The syntax tree of code that a field has, or is a part of."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "\\d" and the like
                return ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested too deeply
            raise self.error(name, f"Python ({error or type(error).__name__})") from None


def defined(code: ast.Module) -> set[str]:
    """The names of the functions and classes that a program defines."""
    return {node.name for node in code.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def shown(value: Any) -> str:
    """A value of a row as an error shows it."""
    try:
        text = repr(value)
    except RecursionError:
        return "values nested too deeply"
    return text if len(text) <= 80 else text[:77] + "..."
