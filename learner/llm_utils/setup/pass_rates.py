"""How often a policy solves each task, as `evaluate_llm.py --profile N` writes it, and which tasks to train on then.

A group of episodes that all end alike teaches nothing, so a task is drawn in proportion to p (1 - p), the variance of
its outcome, where p is its pass rate.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from agent_r1_tools.text import printable
from llm_utils.records.run_files import write_json
from llm_utils.setup.foreign import read_object

MAX_BYTES = 256 << 20


def write_pass_rates(path: Path, rows: Iterable[Any], num_tasks: int, args: Any) -> None:
    """Write how many episodes of each task counted, and how many of these were successes."""
    successes, episodes = np.zeros(num_tasks, int), np.zeros(num_tasks, int)
    for row in rows:
        episodes[row.task_index] += 1
        successes[row.task_index] += int(row.stats["success"])
    names = ("env_id", "split", "env_kwargs", "data_dir", "model", "mode", "temperature", "top_p")
    told = {name: getattr(args, name) for name in names}
    write_json(path, told | {"successes": successes.tolist(), "episodes": episodes.tolist()})


def task_probabilities(path: str, env_id: str, split: str, num_tasks: int, **arguments: Any) -> np.ndarray:
    """The probability of every task to be drawn [num_tasks]; 0 for those that were not played.

    Of k successes in n episodes the pass rate is taken to be (k + 2 m) / (n + 2), m that of all tasks: as if each had
    two more episodes of the usual outcome. So a task that was never or always solved is still seen at times, rarely
    where most are like that. SystemExit for a file that isn't of this environment and split. Where `arguments`
    (`env_kwargs`, `data_dir`) aren't those that the tasks were played with, which may make other tasks, a line says so.
    """
    flag = f"--sample-by-pass-rate {path}"
    try:
        found = read_object(Path(path), MAX_BYTES)
        for name in ("successes", "episodes"):
            if not all(type(number) is int for number in found[name]):
                raise ValueError(f"{name} are whole numbers, one for each task")
        successes, episodes = (np.array(found[name], int) for name in ("successes", "episodes"))
        played_on = found["env_id"], found["split"]
        if successes.shape != episodes.shape or not ((successes >= 0) & (successes <= episodes)).all():
            raise ValueError("successes and episodes contradict each other")
    except FileNotFoundError:
        raise SystemExit(f"{flag}: there is no such file") from None
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        raise SystemExit(f"{flag}: this is no file of evaluate_llm.py --profile") from None
    if played_on != (env_id, split):
        other = printable(f"{played_on[0]}, split {played_on[1]}")
        raise SystemExit(f"{flag} is of {other}; this run is of {env_id}, split {split}")
    if found.get("mode", "agent") != "agent":
        mode = printable(str(found["mode"]))
        raise SystemExit(f"{flag} is of --mode {mode}, and learners play with tools: profile --mode agent")
    if len(episodes) > num_tasks or not episodes.any():
        played = np.count_nonzero(episodes)
        raise SystemExit(f"{flag} has {played} of {len(episodes)} tasks played; there are {num_tasks}")
    for name, value in arguments.items():
        if _read(found.get(name)) != _read(value):
            other = f"--{name.replace('_', '-')} {printable(str(found.get(name)))}"
            print(f"{flag} was played with {other}; make sure that its tasks are these", file=sys.stderr)
    usual = (successes.sum() + 1) / (episodes.sum() + 2)
    rate = (successes + 2 * usual) / (episodes + 2)
    weights = np.zeros(num_tasks)
    weights[: len(episodes)] = np.where(episodes > 0, rate * (1 - rate), 0.0)
    return weights / weights.sum()


def _read(value: Any) -> Any:
    """An argument: JSON as what it says, an empty one as none."""
    try:
        return json.loads(value) or None
    except (TypeError, ValueError):
        return value or None
