"""Pass rates: the share of episodes in which a policy solves each task, and the tasks to train on.

`evaluate_llm.py --samples K` writes the file. A group of episodes with the same outcome teaches nothing, so a task is
drawn in proportion to p (1 - p), the variance of its outcome, where p is its pass rate.
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
MAX_COUNT = 1 << 32  # of one task; a file of MAX_BYTES has fewer than 2**28 tasks, so a sum has at most 60 bits


def write_pass_rates(path: Path, rows: Iterable[Any], num_tasks: int, args: Any) -> None:
    """Write the number of counted episodes of each task, and the number of successes among them."""
    successes, episodes = np.zeros(num_tasks, int), np.zeros(num_tasks, int)
    for row in rows:
        episodes[row.task_index] += 1
        successes[row.task_index] += int(row.stats["success"])
    names = ("env_id", "split", "env_kwargs", "data_dir", "model", "mode", "temperature", "top_p")
    settings = {name: getattr(args, name) for name in names}
    write_json(path, settings | {"successes": successes.tolist(), "episodes": episodes.tolist()})


def task_probabilities(path: str, env_id: str, split: str, num_tasks: int, **arguments: Any) -> np.ndarray:
    """Return the probability [num_tasks] of drawing each task; 0 for tasks without episodes.

    With k successes in n episodes the pass rate is (k + 2 m) / (n + 2), where m is the rate over all tasks. This adds
    two pseudo-episodes at the mean rate to each task. So a task that was never or always solved is still drawn at
    times, but rarely if most tasks are like it.

    Raise SystemExit if the file is not of this environment and split. If `arguments` (`env_kwargs`, `data_dir`) differ
    from those of the file, the tasks may differ too, and a line is printed.
    """
    flag = f"--sample-by-pass-rate {path}"
    try:
        profile = read_object(Path(path), MAX_BYTES)
        for name in ("successes", "episodes"):
            if not all(type(number) is int and number <= MAX_COUNT for number in profile[name]):
                raise ValueError(f"{name} must be integers up to {MAX_COUNT}, one for each task")
        successes, episodes = (np.array(profile[name], int) for name in ("successes", "episodes"))
        profile_of = profile["env_id"], profile["split"]
        if successes.shape != episodes.shape or not ((successes >= 0) & (successes <= episodes)).all():
            raise ValueError("successes and episodes contradict each other")
    except FileNotFoundError:
        raise SystemExit(f"{flag}: there is no such file") from None
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        raise SystemExit(f"{flag}: this is not a file of evaluate_llm.py --samples") from None
    if profile_of != (env_id, split):
        other = printable(f"{profile_of[0]}, split {profile_of[1]}")
        raise SystemExit(f"{flag} was made with {other}, but this run uses {env_id}, split {split}")
    if profile.get("mode", "agent") != "agent":
        mode = printable(str(profile["mode"]))
        raise SystemExit(f"{flag} was made with --mode {mode}, but learners use tools: sample with --mode agent")
    if len(episodes) > num_tasks or not episodes.any():
        num_profiled = np.count_nonzero(episodes)
        raise SystemExit(
            f"{flag} has episodes of {num_profiled} of {len(episodes)} tasks; this run has {num_tasks}"
        )
    for name, value in arguments.items():
        if _read(profile.get(name)) != _read(value):
            other = f"--{name.replace('_', '-')} {printable(str(profile.get(name)))}"
            print(f"{flag} was made with {other}; make sure that its tasks are the same", file=sys.stderr)
    mean_rate = (successes.sum() + 1) / (episodes.sum() + 2)
    rate = (successes + 2 * mean_rate) / (episodes + 2)
    weights = np.zeros(num_tasks)
    weights[: len(episodes)] = np.where(episodes > 0, rate * (1 - rate), 0.0)
    return weights / weights.sum()


def _read(value: Any) -> Any:
    """Parse an argument: JSON by its value, an empty one as None."""
    try:
        return json.loads(value) or None
    except (TypeError, ValueError):
        return value or None
