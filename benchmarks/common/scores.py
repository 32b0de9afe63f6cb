"""Scores of policies over seeds and tasks, their differences with intervals, and what a claim is worth by them."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "learner"))
from llm_utils.records.intervals import Interval, difference, proportion

LONG = 20  # lines of a table that is shown when asked for
Scores = dict[str, np.ndarray]  # column -> success or exact match [seeds, tasks], 0 or 1


def interval(one: Scores, other: Scores | None = None, columns: Sequence[str] | None = None) -> Interval:
    """Mean over columns (default: all) of the score, or of one's minus the other's, and its 95 % interval.

    The tasks are the same for both. ValueError where one has more than the other.
    """
    of = [[scores[column] for column in (one if columns is None else columns)]
          for scores in (one, other) if scores is not None]  # fmt: skip
    return proportion(*of) if other is None else difference(*of)


def cell(value: float, low: float, high: float, sign: str = "") -> str:
    """An interval in a table; nan stands for what can't be measured."""
    if math.isnan(value):
        return "no signal"
    return f"{value:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"


@dataclass
class Claim:
    """What is claimed, the goal, and what was found over so many seeds."""

    text: str
    goal: float
    found: Interval
    seeds: int
    where: str  # on which tasks, or at which checkpoint

    @property
    def verdict(self) -> str:
        """shown: the goal is reached by the mean, and the interval is off zero; refuted: it lies below the goal. Where
        it misses the goal and lies above zero, that is said, too."""
        value, low, high = self.found
        if math.isnan(value):
            return "no signal"
        if value >= self.goal and low > 0:
            verdict = "shown"
        else:
            verdict = ("refuted" if high < self.goal else "not shown") + (", though above zero" if low > 0 else "")
        return f"{verdict}, in one run" if self.seeds < 2 else verdict

    def record(self) -> dict[str, Any]:
        """As JSON."""
        found = [None if math.isnan(number) else number for number in self.found]
        known = {"text": self.text, "where": self.where, "goal": self.goal, "found": found, "seeds": self.seeds}
        return known | {"verdict": self.verdict}

    def cell(self) -> str:
        """The verdict and the figure."""
        return self.verdict if math.isnan(self.found[0]) else f"{self.verdict}: {cell(*self.found, sign='+')}"


def claims_table(claims: Sequence[Claim]) -> str:
    """Claims, at least one, as markdown: a line for each, a column for each place where it was put to the test.

    ValueError where two say the same of the same place.
    """
    cells = {(claim.text, claim.goal, claim.where): claim.cell() for claim in claims}
    if len(cells) < len(claims):
        raise ValueError("two claims say the same of the same place")
    more = "seeds differ more than tasks." if min(claim.seeds for claim in claims) > 1 else "runs differ; this is one."
    head = f"Of {len(claims)} claims some are shown or refuted by chance: of those whose truth is zero, or the goal, "
    head += f"about one in forty, and more where {more}"
    columns = list(dict.fromkeys(claim.where for claim in claims))
    lines = [f"| claim | goal | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for text, goal in dict.fromkeys((claim.text, claim.goal) for claim in claims):
        found = [cells.get((text, goal, column), "") for column in columns]
        lines.append(f"| {text} | {goal:+.3f} | {' | '.join(found)} |")
    table = "\n".join(lines)
    if len(lines) > LONG:
        table = f"<details><summary>The {len(claims)} claims</summary>\n\n{table}\n\n</details>"
    return f"{head}\n\n{table}" if len(claims) > 1 else table


def intervals(scores: Mapping[str, Scores]) -> dict[str, dict[str, Interval]]:
    """The interval of every row and column."""
    return {row: {column: interval(found, None, [column]) for column in found} for row, found in scores.items()}


def domains(columns: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Which columns are in domain, the first one, and which are not, where there are others."""
    return [("in domain", [*columns[:1]]), ("out of domain", [*columns[1:]])][: len(columns)]


def facts(
    success: Mapping[str, Mapping[str, Interval]], scores: Mapping[str, Scores], claims: Sequence[Claim],
    lines: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """What is recorded of every place: success by row and column and of each seed, the claims, the table."""
    return {
        "success": success,
        "seeds": {row: {column: table.mean(1).tolist() for column, table in of_row.items()}
                  for row, of_row in scores.items()},
        "claims": [claim.record() for claim in claims],
        "table": "\n\n".join(["\n".join(lines), *([claims_table(claims)] if claims else [])]),
    }  # fmt: skip


def environment(env_id: str, kwargs: Mapping[str, Any]) -> list[str]:
    """The flags that name an environment."""
    return ["--env-id", env_id, "--env-kwargs", json.dumps(kwargs)]
