"""Rows: questions from a user's file, with tools by name, and a reward by name, by function or by a model."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from agent_r1.arguments import ArgumentError, named_function
from agent_r1.baselines import ONLY_EXPERTS, Baselines
from agent_r1.judges.mathematics import judge, require_math_verify
from agent_r1.judges.models import verdict
from agent_r1.rewards import exact_match, f1
from agent_r1.task_data import DataFormatError
from agent_r1.task_data.rows import has_split, load_rows
from agent_r1.tasks.question_answering import shared_corpus
from agent_r1.tool_env import Task, ToolEnv
from agent_r1_tools import Tool
from agent_r1_tools.calculator import Calculator
from agent_r1_tools.exchange import is_address
from agent_r1_tools.search import Retriever, SearchTool

NAMES = ("calculator", "python", "search")
REWARDS = ("exact_match", "f1", "math", "model")
Reward = Callable[[str, Mapping[str, Any]], float]


class RowsEnv(Baselines, ToolEnv):
    """Questions from your own file, with the tools and the reward that you choose.

    ## Description
    The file has one question and its answer in each row. You name the tools and the reward. No class has to be written.

    A row is a JSON object with `question` and `answer`. It may also have `id`, `system` (the system message) and
    `tools`. The other fields are in `task.metadata`.

    ## Tools
    `"calculator"`, `"python"`, `"search"`, or `Tool` objects. By default there is none. A row may allow only some of
    them. At most eight calls of one turn are run.

    ## Arguments

    | argument | default | meaning |
    |---|---|---|
    | `data` | `None` | a file, a folder with `train` and `test`, or a list of rows |
    | `data_dir` | `None` | the folder, instead of `data` |
    | `split` | `"train"` | `"train"` or `"test"` |
    | `tools` | `()` | names of tools, or `Tool` objects |
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
        tools: Sequence[str | Tool] = (),
        corpus: str | os.PathLike[str] | Retriever | None = None,
        top_k: int = 5,
        sandbox: str = "auto",
        reward: str | Reward = "exact_match",
        judge_url: str | None = None,
        judge_model: str | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(tools, str) or not isinstance(tools, Sequence):
            raise ArgumentError(f"tools must be a list of names or Tools, got {tools!r}")
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
            self.rows = load_rows(data, data_dir, split, tuple(self._names))
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
        """Keep only the row's tools."""
        self.tools = {name: self._all_tools[name] for name in task.metadata["tools"]}

    def judge_answer(self, answer: str) -> tuple[float, dict[str, float]]:
        """Score an answer with the reward; an empty answer scores 0."""
        if not answer.strip():
            return 0.0, {"score": 0.0}
        task, gold = self.task, self.task.answers
        metrics = {}
        if self.reward == "model":
            score = verdict(self.judge_url, self.judge_model, task.question, tuple(gold), answer)
        elif self.reward == "math":
            score = float(any(judge(text, answer, task.question).correct for text in gold))
        elif isinstance(self.reward, str):
            metrics = {"em": exact_match(answer, gold), "f1": f1(answer, gold)}
            score = metrics["em" if self.reward == "exact_match" else "f1"]
        else:
            row = {"id": task.id, "question": task.question, "answer": list(gold), **task.metadata}
            score = _score(self.reward, answer, row)
        return score, {"score": score, **metrics}

    def demonstration(self, rng: np.random.Generator | None = None) -> list[str]:
        """Return the right answer as one turn. Raises ValueError with `rng`, and for a row without an answer."""
        if rng is not None or not self.task.answers:
            raise ValueError(ONLY_EXPERTS.format(name=type(self).__name__))
        return [f"<answer>{self.task.answers[0]}</answer>"]


# ---------------------------------------------------------------------- tools


def _tool(tool: str | Tool, corpus: str | os.PathLike[str] | Retriever | None, top_k: int, sandbox: str) -> Tool:
    if isinstance(tool, Tool):  # a tool with a session is copied for each environment
        return tool if tool.concurrency_safe else copy.deepcopy(tool)
    if tool == "search" and corpus is not None:
        return SearchTool(shared_corpus(corpus)[0], top_k)
    if tool == "calculator":
        return Calculator()
    if tool == "python":
        from agent_r1_tools.python import PythonTool

        return PythonTool(backend=sandbox)
    raise ArgumentError(f"there is no tool {tool!r}; the names are {', '.join(NAMES)}; pass other tools as Tools")


# ---------------------------------------------------------------------- rewards

def _check(reward: Any) -> Reward:
    """Return the reward function. Raises ArgumentError for a value that is not one, and for an async function."""
    if not callable(reward):
        raise ArgumentError(f"reward is one of {', '.join(REWARDS)}, a function, or module:function; got {reward!r}")
    if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__):
        raise ArgumentError(f"the reward function {_name(reward)} is async; give a plain one, which may block")
    return reward


def _score(reward: Reward, answer: str, row: Mapping[str, Any]) -> float:
    """Return a function's score of an answer. Raises ValueError if it is not a score."""
    value: Any = reward(answer, row)
    try:
        if 0 <= value <= 1:
            return float(value)
    except (TypeError, ValueError, RuntimeError):  # a text, None; an array, a tensor
        pass
    raise ValueError(
        f"a score must be a number from 0 to 1; the reward function {_name(reward)} returned {value!r:.100} in row "
        f"{row['id']}"
    )


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _function(name: str) -> Reward:
    if ":" not in name:
        raise ArgumentError(f"reward is one of {', '.join(REWARDS)}, a function, or module:function; got {name!r}")
    function: Reward = named_function("reward", name)
    return function
