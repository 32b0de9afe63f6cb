"""Rows: questions from a user's file, with tools by name, and a reward by name, by function or by a model."""

from __future__ import annotations

import copy
import inspect
import json
import os
import re
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from agent_r1.arguments import ArgumentError, FunctionError, function_tool, named_function
from agent_r1.baselines import ONLY_EXPERTS, Baselines, UnwrittenError
from agent_r1.judges.mathematics import judge, require_math_verify
from agent_r1.judges.models import verdict
from agent_r1.rewards import exact_match, f1, find_answers
from agent_r1.task_data import DataFormatError
from agent_r1.task_data.rows import has_split, load_rows
from agent_r1.tasks.question_answering import shared_corpus
from agent_r1.text.chat import reply_text
from agent_r1.tool_env import Task, ToolEnv
from agent_r1_tools import Tool, ToolResult
from agent_r1_tools.calculator import Calculator
from agent_r1_tools.exchange import is_address
from agent_r1_tools.functions import FunctionTool
from agent_r1_tools.running import describe, is_strict
from agent_r1_tools.search import Retriever, SearchTool
from agent_r1_tools.tool import is_fault

NAMES = ("calculator", "python", "search")
REWARDS = ("exact_match", "f1", "math", "model")
Reward = Callable[[str, Mapping[str, Any]], float]
WORDS = 500  # maximum number of words in the vocabulary


class RowsEnv(Baselines, ToolEnv):
    """Questions from your own file, with the tools and the reward that you choose.

    ## Description
    The file has one question and its answer in each row. You name the tools and the reward. No class has to be written.

    A row is a JSON object with `question` and `answer`. It may also have `id`, `system` (the system message) and
    `tools`. The question may be a list of chat messages. The other fields are in `task.metadata`.

    ## Tools
    `"calculator"`, `"python"`, `"search"`, your own functions as `"module:function"`, or `Tool` objects. By default
    there is none. A row may allow only some of them. At most eight calls of one turn are run.

    ## Arguments

    | argument | default | meaning |
    |---|---|---|
    | `data` | `None` | a file, a folder with `train` and `test`, or a list of rows |
    | `data_dir` | `None` | the folder, instead of `data` |
    | `split` | `"train"` | `"train"` or `"test"` |
    | `question`, `answer` | `"question"`, `"answer"` | names of columns; `"a.b"` is the field b in column a |
    | `tools` | `()` | names of tools, `"module:function"`, functions, or `Tool` objects |
    | `corpus` | `None` | the corpus of `search`: a file of passages, a server's address, or a `Retriever` |
    | `top_k` | `5` | the maximum number of passages in a search result |
    | `sandbox` | `"auto"` | the sandbox of `python` |
    | `reward` | `"exact_match"` | also `"f1"`, `"math"`, `"model"`, a function, or `"module:function"` |
    | `judge_url`, `judge_model` | `None` | with `"model"`: the API's address up to /v1, and the model's name |

    A file ends in `.jsonl` (JSON lines) or `.json` (a JSON list), or in one of these and `.gz`. The last tenth of a
    file is the split `test`: at least one row. A single row is in both splits. Without `data` and `data_dir`, the
    folder is `rows` in `AGENT_R1_DATA`. The other arguments are those of `ToolEnv`. A missing file raises
    DataNotFoundError. A wrong row raises DataFormatError with file, row and field.

    Rewards and baselines: docs/environments/rows.md.
    """

    splits: ClassVar[Mapping[str, str]] = {"train": "train", "test": "test"}

    def __init__(
        self,
        *,
        data: str | os.PathLike[str] | Sequence[Mapping[str, Any]] | None = None,
        data_dir: str | os.PathLike[str] | None = None,
        split: str = "train",
        question: str = "question",
        answer: str = "answer",
        tools: Sequence[str | Tool | Callable[..., Any]] = (),
        corpus: str | os.PathLike[str] | Retriever | None = None,
        top_k: int = 5,
        sandbox: str = "auto",
        reward: str | Reward = "exact_match",
        judge_url: str | None = None,
        judge_model: str | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(tools, str) or not isinstance(tools, Sequence):
            raise ArgumentError(f"tools must be a list of names, functions or Tools, got {tools!r}")
        for name, column in (("question", question), ("answer", answer)):
            if not isinstance(column, str) or not column:
                raise ArgumentError(f"{name} must be the name of a column, got {column!r}")
        if (corpus is None) == ("search" in tools):
            raise ArgumentError("corpus and the tool search belong together: give both of them or neither")
        tool_objects = [_tool(tool, corpus, top_k, sandbox) for tool in tools]
        self._names = [tool.name for tool in tool_objects]
        if data is not None and data_dir is not None:
            raise ArgumentError("data and data_dir both name a source of rows; give one of them")
        if {judge_url is not None, judge_model is not None} != {reward == "model"}:
            raise ArgumentError("reward 'model' needs judge_url and judge_model, and no other reward takes them")
        if judge_url is not None and not is_address(judge_url):
            raise ArgumentError(f"judge_url must be an address such as http://127.0.0.1:8000/v1, got {judge_url!r}")
        named = isinstance(reward, str) and reward in REWARDS
        function = _function(reward) if isinstance(reward, str) and not named else reward
        self.reward = function if named else _check(function)
        self.judge_url, self.judge_model = judge_url or "", judge_model or ""
        self.slow_judge = reward in ("math", "model")
        if reward == "math":
            require_math_verify()
        known = isinstance(split, str) and split in self.splits  # others are rejected below
        if known:
            self.rows = load_rows(data, data_dir, split, tuple(self._names), question, answer)
        if named and known and (row := next((r for r in self.rows if not r["answers"]), None)):
            raise DataFormatError(f"row {row['id']}, answer: reward {reward!r} needs an answer")
        super().__init__(tool_objects, split=split, **kwargs)

    @classmethod
    def has_split(cls, split: str, **kwargs: Any) -> bool:
        """Return whether the folder, if one is given, has the file of a split."""
        return super().has_split(split) and has_split(kwargs.get("data"), kwargs.get("data_dir"), split)

    @property
    def num_tasks(self) -> int:
        """The number of rows of the split."""
        return len(self.rows)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The schemas of the tools of this row."""
        return [self._all_tools[name].schema for name in self.task.metadata.get("tools", ())]

    def make_task(self, index: int) -> Task:
        """Return row `index` of the split."""
        row = self.rows[index]
        metadata = {**row["rest"], "tools": list(row["tools"])}
        return Task(row["id"], row["question"], list(row["answers"]), metadata, row["system"])

    def start_episode(self, task: Task) -> None:
        """Keep only the row's tools. A tool that takes the row is copied for each episode, so no two rows share calls.

        The object of a method is not copied: an environment has one, as for tools without a row.
        """
        tools = {name: self._all_tools[name] for name in task.metadata["tools"]}
        self.tools = {name: tool.of(_row(task)) if isinstance(tool, RowTool) else tool for name, tool in tools.items()}

    def judge_answer(self, answer: str) -> tuple[float, dict[str, float]]:
        """Score an answer with the reward; an empty answer scores 0."""
        metrics = {"em": 0.0, "f1": 0.0} if self.reward in ("exact_match", "f1") else {}
        if not answer.strip():
            return 0.0, {"score": 0.0, **metrics}
        task, gold = self.task, self.task.answers
        if self.reward == "model":
            score = verdict(self.judge_url, self.judge_model, task.question, tuple(gold), answer)
        elif self.reward == "math":
            score = float(any(judge(text, answer, task.question).correct for text in gold))
        elif isinstance(self.reward, str):
            metrics = {"em": exact_match(answer, gold), "f1": f1(answer, gold)}
            score = metrics["em" if self.reward == "exact_match" else "f1"]
        else:
            score = _score(self.reward, answer, copy.deepcopy(_row(task)), is_strict(self.strict))
        return score, {"score": score, **metrics}

    def vocabulary(self) -> list[str]:  # type: ignore[override]  # the words are the rows'
        """Return the digits and the rows' most frequent lower-case words, which a small tokenizer should keep whole."""
        texts = (json.dumps([row["question"], row["answers"], row["rest"]], ensure_ascii=False) for row in self.rows)
        counts = Counter(word for text in texts for word in re.findall(r"\b[a-z]+\b", text))
        return [*(word for word, count in counts.most_common(WORDS) if count >= 10), *"0123456789"]

    def demonstration(self, rng: np.random.Generator | None = None) -> list[str]:
        """Return the assistant's turns of the row's messages, or the right answer as one turn.

        If the last message has no <answer>, the row's first answer is added. Raises ValueError with `rng` and for a row
        without an answer. Raises UnwrittenError for an answer that would not be read as itself, and for a call that the
        row's tools or the dialect do not take.
        """
        turns, answers = self.rows[self.episode.task_index]["turns"], self.task.answers
        if rng is not None or not (turns or answers):
            raise ValueError(ONLY_EXPERTS.format(name=type(self).__name__))
        texts = [self._write(turn) for turn in turns]
        if texts and not turns[-1]["tool_calls"] and find_answers(texts[-1].rpartition("</think>")[2]):
            return texts
        if not answers:
            raise UnwrittenError(f"row {self.task.id}: the last message has no <answer>, and the row has no answer")
        last = {"content": f"<answer>{answers[0]}</answer>", "tool_calls": []}
        if texts and not turns[-1]["tool_calls"]:
            texts.pop()
            last["content"] = f"{turns[-1]['content']}\n{last['content']}"
        texts.append(self._write(last))
        has_thought = any(tag in answers[0] for tag in self.dialect.think_tags)
        if has_thought or find_answers(texts[-1])[-1:] != [answers[0]]:  # `_write` changes names of control tokens
            problem = f"the answer {answers[0]!r:.100} has tags and is not read as itself"
            raise UnwrittenError(f"row {self.task.id}: {problem}")
        return texts

    def _write(self, turn: Mapping[str, Any]) -> str:
        """Write an assistant's message in the dialect. Names of control tokens stay text, except the tags of thoughts.

        Raises UnwrittenError for a call that could not be made, and for a text that would become a control token.
        """
        dialect, content = self.dialect, turn["content"]
        codec, thoughts = dialect.codec, dialect.think_tags
        for name in sorted({*codec.controls, *(dialect.call_tags or ())} - {*thoughts}):
            content = content.replace(name, f"{name[0]} {name[1:]}")
        if {*codec.controls_in(codec.encode_text(content))} - {codec.controls.get(tag) for tag in thoughts}:
            raise UnwrittenError(f"row {self.task.id}: the text of a message or an answer would become a control token")
        text = reply_text(dialect, {**turn, "content": content}, self.schemas)
        calls = dialect.parse(codec.encode_text(text), self.schemas).calls
        if len(calls) != len(turn["tool_calls"]):
            cause = "the text of a message or answer is a call; write it into tool_calls"
            raise UnwrittenError(f"row {self.task.id}: {cause}")
        for call in calls:
            tool = self.tools.get(call.name)
            missing = f"there is no tool {call.name!r} (tools has {', '.join(self.tools) or 'none'})"
            if problem := call.error or (tool.validate(call.arguments) if tool else missing):
                raise UnwrittenError(f"row {self.task.id}: a call in its messages cannot be made: {problem}")
        return text


def _row(task: Task) -> dict[str, Any]:
    """Return a task's row for a function. The function gets a copy, which it may change."""
    return {"id": task.id, "question": task.question, "answer": list(task.answers), **task.metadata}


# ---------------------------------------------------------------------- tools


class RowTool(FunctionTool):
    """A function with a parameter `row`: the row of the episode, which the policy neither sees nor passes."""

    hidden = ("row",)
    row: Mapping[str, Any] = {}

    def of(self, row: Mapping[str, Any]) -> RowTool:
        """Return this tool for the episode of a row, with the same function: a method keeps its object."""
        tool = copy.copy(self)
        tool.row = row
        return tool

    def execute(self, arguments: dict[str, Any]) -> ToolResult:
        """Call the function with a copy of the row."""
        return super().execute(arguments | {"row": copy.deepcopy(self.row)})


def _tool(tool: Any, corpus: str | os.PathLike[str] | Retriever | None, top_k: int, sandbox: str) -> Tool:
    if tool == "search" and corpus is not None:
        return SearchTool(shared_corpus(corpus)[0], top_k)
    if tool == "calculator":
        return Calculator()
    if tool == "python":
        from agent_r1_tools.python import PythonTool

        return PythonTool(backend=sandbox)
    if isinstance(tool, str):
        if ":" not in tool:
            others = "others are module:function, functions and Tools"
            raise ArgumentError(f"there is no tool {tool!r}; the names are {', '.join(NAMES)}; {others}")
        tool = named_function("tools", tool)
    made = function_tool(tool, "tools", _from_function)
    return made if made.concurrency_safe else copy.deepcopy(made)  # each environment has its own session


def _from_function(function: Callable[..., Any]) -> Tool:
    takes_row = "row" in inspect.signature(function).parameters
    return (RowTool if takes_row else Tool).from_function(function)


# ---------------------------------------------------------------------- rewards

def _check(reward: Any) -> Reward:
    """Return the reward function. Raises ArgumentError for a value that is not one, and for an async function."""
    if not callable(reward):
        raise ArgumentError(f"reward is one of {', '.join(REWARDS)}, a function, or module:function; got {reward!r}")
    if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__):
        raise ArgumentError(f"the reward function {_name(reward)} is async; give a plain one, which may block")
    return reward


def _score(reward: Reward, answer: str, row: Mapping[str, Any], strict: bool) -> float:
    """Return a function's score of an answer. Raises FunctionError if it is not a score, or if the function raises.

    With `strict` the function's own exception is raised. An infrastructure error is raised in any case.
    """
    where = f"the reward function {_name(reward)}", f"in row {row['id']}"
    try:
        value: Any = reward(answer, row)
    except Exception as error:
        if strict or is_fault(error):
            raise
        frames = traceback.extract_tb(error.__traceback__)[1:]  # of the function and what it calls
        own = [frame for frame in frames if frame.filename == frames[0].filename]
        place = f"{own[-1].filename}, line {own[-1].lineno}: " if own else ""
        raise FunctionError(f"{where[0]} failed {where[1]}: {place}{' '.join(describe(error).split())}") from error
    try:
        if 0 <= value <= 1:
            return float(value)
    except (TypeError, ValueError, RuntimeError):  # a text, None; an array, a tensor
        pass
    raise FunctionError(f"a score must be a number from 0 to 1; {where[0]} returned {value!r:.100} {where[1]}")


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _function(name: str) -> Reward:
    if ":" not in name:
        raise ArgumentError(f"reward is one of {', '.join(REWARDS)}, a function, or module:function; got {name!r}")
    function: Reward = named_function("reward", name)
    return function
