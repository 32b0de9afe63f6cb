"""What parts of systems.py share: rows that are measured once, and policies that are trained and evaluated."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from machine import RESULTS, record_results, require_quiet_machine
from scores import environment
from sweep import finish, make_job

ROOT = Path(__file__).resolve().parents[3]
EPISODES, TASKS = 2_560, 500  # of a training, and of an evaluation

Row = dict[str, Any]


def complete(
    part: str, names: Sequence[str], keys: Sequence[tuple[Any, ...]], measure: Callable[..., Row],
    table: Callable[[list[Row]], str], force: bool,
) -> None:  # fmt: skip
    """Measure the rows that are not recorded, one after the other, and print the table.

    Each row is recorded in results/systems_PART.json and .md when it is measured.

    Args:
        names: entries of a row that tell it from others.
        keys: their values, for every row of the table.
        measure: returns a row for these values.
        force: measure on a busy machine too.
    """
    os.chdir(ROOT)  # learners run there
    path = RESULTS / f"systems_{part}.json"
    rows: list[Row] = json.loads(path.read_text())["results"] if path.is_file() else []
    known = {tuple(row[name] for name in names) for row in rows}
    missing = [key for key in keys if key not in known]
    if missing:
        require_quiet_machine(force)
    for key in missing:
        rows.append(measure(*key))
        command = f"python benchmarks/evidence/systems.py --part {part}"
        record_results(f"systems_{part}", rows, table(rows), command, force, merged=True)
    print(table(rows))


def run_script(script: str, env_id: str, kwargs: dict[str, Any], seed: int, name: str, *flags: object) -> Path:
    """Run a learner or an evaluation in one thread, unless it has finished before. Return the folder of the run."""
    place = environment(env_id, kwargs) if kwargs else ["--env-id", env_id]
    words = ["python", f"learner/{script}", *place, "--seed", seed]
    words += ["--num-threads", 1, "--exp-name", name, *flags]
    (run,) = finish([make_job([str(word) for word in words])], 1)
    return run


def train_and_evaluate(
    script: str, env_id: str, kwargs: dict[str, Any], seed: int, name: str, *flags: object
) -> tuple[Path, list[Row]]:
    """Train a policy from the shipped one. Return its run, and the sampled episodes of test tasks in their order."""
    flags = ("--total-episodes", EPISODES, "--eval-episodes", 0, "--save-model", *flags)
    run = run_script(script, env_id, kwargs, seed, name, *flags)
    more = ("--model", run / "model", "--split", "test", "--episodes", TASKS, "--temperature", 1)
    played = run_script("evaluate_llm.py", env_id, kwargs, seed, name, *more)
    episodes = [json.loads(line) for line in (played / "trajectories.jsonl").read_text().splitlines()]
    return run, sorted(episodes, key=lambda episode: int(episode["task_index"]))


def seconds(run: Path) -> float:
    """Return the seconds of a training."""
    return float(json.loads((run / "summary.json").read_text())["train_seconds"])
