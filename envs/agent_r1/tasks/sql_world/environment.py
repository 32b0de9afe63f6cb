"""SQLWorld: questions over SQLite databases, answered by a query and judged by its result."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from agent_r1.arguments import ArgumentError, integer
from agent_r1.baselines import ONLY_EXPERTS, Baselines
from agent_r1.task_data.sql import FILES, has_split, load_sql
from agent_r1.tasks.demonstrators import SLOPPY, TEACHERS, demonstrator
from agent_r1.tasks.draw import pick
from agent_r1.tasks.sql_world import generator
from agent_r1.text.fences import SQL, find_code
from agent_r1.tool_env import Task, ToolEnv
from agent_r1_tools.sql import Database, QueryTool, SchemaTool, same_result

RAN = ("", "no copy", "another result")  # reasons of `same_result` for a query that ran
_QUERY = re.compile(r"(?:\s|\(|--[^\n]*|/\*.*?\*/)*+(?:SELECT|WITH|VALUES)\b", re.DOTALL | re.IGNORECASE)


class SQLWorldEnv(Baselines, ToolEnv):
    """Questions over databases that are new in every task, or over those of Spider and BIRD.

    ## Description
    A database has two tables with drawn names, such as `lamp_list` and `shops` (three in `more_tables`). The policy
    looks at the schema, may try queries, and answers with one SELECT. The answer is right if it gives the result of the
    gold query. It must do so on this database and on a second one, which the policy never sees. So a constant is a
    wrong answer.

    Nothing has to be downloaded. With `data_dir` the questions are those of
    [Spider](https://yale-lily.github.io/spider) or [BIRD](https://bird-bench.github.io).

    ## Tools

    - `schema(table)` shows the tables with their columns, types and keys. `table` is optional.
    - `query(sql)` shows the first 30 rows of a result.

    ## Arguments

    | argument | default | meaning |
    |---|---|---|
    | `split` | `"train"` | `train`, `test`, `more_tables`, `unseen_words` or `other_phrasings` |
    | `world_seed` | `0` | the family of databases |
    | `data_dir` | `None` | a folder of Spider or BIRD as it was released |
    | `process_reward` | `True` | `False`: no process terms; a dict: new weights |
    | `max_action_tokens` | `512` | the maximum number of tokens in a turn; 2,048 with `data_dir` |

    With `data_dir` the splits are `train`, `dev` (also `validation`) and `test`, as far as the folder has them. The
    other arguments are those of `ToolEnv`. A missing or damaged file raises DataNotFoundError or DataFormatError, with
    file, row and field.

    Rewards and baselines: docs/environments/sql_world.md.
    """

    instructions = (
        "Write a query for SQLite that answers the question. Look at the tables with schema, and try queries with "
        "query. Give the final query as <answer>SELECT ...</answer>."
    )
    outcome_term: ClassVar[str] = "outcome/same_result"
    slow_judge: bool = True  # a query may take a second
    splits: ClassVar[Mapping[str, str]] = {name: name for name in (*generator.SPLITS, "dev")} | {"validation": "dev"}
    teachers: ClassVar[tuple[str, ...]] = tuple(TEACHERS)

    def __init__(
        self,
        *,
        world_seed: int = 0,
        data_dir: str | os.PathLike[str] | None = None,
        split: str = "train",
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("max_action_tokens", 512 if data_dir is None else None)
        super().__init__([SchemaTool(), QueryTool()], split=split, **kwargs)
        available = generator.SPLITS if data_dir is None else tuple(FILES)
        if self.split not in available:
            condition = "without data_dir" if data_dir is None else "with data_dir"
            raise ArgumentError(f"SQLWorld has no split {split!r} {condition}; it has {', '.join(available)}")
        self.world_seed = integer("world_seed", world_seed, least=0)
        self.questions = None if data_dir is None else load_sql(self.split, data_dir)

    @classmethod
    def has_split(cls, split: str, **kwargs: Any) -> bool:
        """Return whether the folder, if one is given, has the file of a split."""
        name, data_dir = cls.splits.get(split, ""), kwargs.get("data_dir")
        return name in generator.SPLITS if data_dir is None else has_split(data_dir, name)

    @property
    def num_tasks(self) -> int:
        """The number of tasks: a million in train, ten thousand in other splits; or the questions of a folder."""
        if self.questions is not None:
            return len(self.questions)
        return generator.NUM_TASKS.get(self.split, generator.NUM_TASKS["test"])

    def make_task(self, index: int) -> Task:
        """Generate task `index`, or question `index` in the order of the file."""
        if self.questions is None:
            return generator.generate_task(self.world_seed, self.split, index)
        question = self.questions[index]
        metadata = {**question.metadata, "file": question.database, "mode": question.mode}
        return Task(question.id, question.question, [question.gold], metadata)

    def start_episode(self, task: Task) -> None:
        """Give the tools the task's database."""
        for tool in self.tools.values():
            assert isinstance(tool, SchemaTool | QueryTool)
            tool.database = self._database(task)

    def judge_answer(self, answer: str) -> tuple[float, dict[str, float]]:
        """Score equal results. The metrics are em (the same) and valid_sql (the query ran).

        Raises ToolFault if the gold query does not run within its limits, ten times the usual ones.
        """
        query = find_code(answer, SQL, _is_query).strip().rstrip(";")
        if not query:
            return 0.0, {"em": 0.0, "valid_sql": 0.0}
        data = self.task.metadata
        others = [Database(script=data["copy"])] if "copy" in data else []
        right, reason = same_result(self._database(self.task), self.task.answers[0], query, data["mode"], others)
        return float(right), {"em": float(right), "valid_sql": float(reason in RAN)}

    @staticmethod
    def _database(task: Task) -> Database:
        data = task.metadata
        return Database(script=data["script"]) if "script" in data else Database(file=data["file"])

    def demonstration(self, rng: np.random.Generator | None = None, teacher: str | None = None) -> list[str]:
        """Return the turns of the scripted expert on the current task as text: it looks at the schema and answers.

        A fallible teacher makes one error in the query in a share of the episodes (1 - its number). With `rng` only, a
        sloppy demonstrator always makes one; in half of the episodes it looks at the wrong result before it answers.

        Raises: ValueError for an unknown teacher, for a fallible one without `rng`, and for questions of a folder for
        all except the expert.
        """
        gold = self.task.answers[0]
        schema = self.dialect.tool_call("schema", {})
        who = demonstrator(rng, teacher)
        if rng is None or who == "expert":
            return [schema, f"<answer>{gold}</answer>"]
        if self.questions is not None:
            raise ValueError(ONLY_EXPERTS.format(name=type(self).__name__))
        mistakes = self.task.metadata["mistakes"]
        if who != SLOPPY:
            wrong = rng.random() >= TEACHERS[who]
            return [schema, f"<answer>{pick(rng, mistakes) if wrong else gold}</answer>"]
        query = pick(rng, mistakes)
        looks = [self.dialect.tool_call("query", {"sql": query})] if rng.random() < 0.5 else []
        return [schema, *looks, f"<answer>{query}</answer>"]

    @staticmethod
    def vocabulary() -> list[str]:
        """Return every word of the worlds, which a small tokenizer should keep whole."""
        words = [word for theme in generator.THEMES + generator.UNSEEN_THEMES for word in theme]
        words += [word for group in (generator.CATEGORIES, generator.NUMBERS) for key, kept in group.items()
                  for word in (key, *kept)]  # fmt: skip
        columns = generator.NAME_COLUMNS + generator.TOWN_COLUMNS + generator.REGION_COLUMNS
        sql = "SELECT FROM JOIN ON WHERE GROUP BY ORDER LIMIT DESC ASC COUNT MAX MIN SUM AVG id list of no".split()
        return list(dict.fromkeys([*words, *columns, *generator.NAMES, *generator.TOWNS, *generator.REGIONS, *sql]))


def _is_query(text: str) -> bool:
    return _QUERY.match(text) is not None
