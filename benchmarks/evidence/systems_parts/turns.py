"""PPO with turns as actions against PPO with tokens as actions, on CraftWorld and ShopWorld, over seeds.

An arm is a pair of flags: `--advantage tokens --ratio token`, or `--advantage turns --ratio turn` (StepPO, arXiv
2604.18401). All other flags have their defaults. Each run is evaluated on the same test tasks, sampled at temperature
1. A recorded run is not made again. `run` writes results/systems_turns.json and .md after each run.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from compare import read_curve
from machine import RESULTS, record_results, require_quiet_machine
from scores import cell, environment
from sweep import Job, finish, make_job

from llm_utils.records.intervals import difference, proportion, student

ROOT = Path(__file__).resolve().parents[3]
FLAGS = ()
NAME = "systems_turns"
COMMAND = "python benchmarks/evidence/systems.py --part turns"
WORLDS = ("CraftWorld", "ShopWorld")
ARMS = {
    "tokens": ["--advantage", "tokens", "--ratio", "token"],
    "turns": ["--advantage", "turns", "--ratio", "turn"],
}
SEEDS = (1, 2, 3)
EPISODES, TASKS = 2_560, 500  # of a training, and of an evaluation


def job(script: str, world: str, arm: str, seed: int, *flags: object) -> Job:
    """Return a command in one thread."""
    words = ["python", f"learner/{script}", *environment(f"AgentR1/{world}-v0", {}), "--seed", seed]
    words += ["--num-threads", 1, "--exp-name", f"{NAME}_{arm}", *flags]
    return make_job([str(word) for word in words])


def measure(world: str, arm: str, seed: int) -> dict[str, Any]:
    """Train and evaluate one policy. Return the success of each test task and of each training iteration."""
    flags = ["--total-episodes", EPISODES, "--eval-episodes", 0, "--save-model", *ARMS[arm]]
    (run,) = finish([job("ppo_llm.py", world, arm, seed, *flags)], 1)
    flags = ["--model", run / "model", "--split", "test", "--episodes", TASKS, "--temperature", 1]
    (played,) = finish([job("evaluate_llm.py", world, arm, seed, *flags)], 1)
    rows = [json.loads(line) for line in (played / "trajectories.jsonl").read_text().splitlines()]
    rows.sort(key=lambda row: row["task_index"])
    return {
        "world": world, "arm": arm, "seed": seed, "success": [int(row["stats"]["success"]) for row in rows],
        "in_training": np.round(read_curve(run, "charts/success")[1], 4).tolist(),
        "seconds": json.loads((run / "summary.json").read_text())["train_seconds"],
    }  # fmt: skip


def table(results: list[dict[str, Any]]) -> str:
    """Return the table of all recorded runs. A difference is shown if both arms have the same seeds."""
    head = ["world", "arm", "success", "minus tokens", "success in training", "minus tokens", "training seconds"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for world in WORLDS:
        groups = {arm: sorted((row for row in results if (row["world"], row["arm"]) == (world, arm)),
                              key=lambda row: row["seed"]) for arm in ARMS}  # fmt: skip
        for arm, group in groups.items():
            if not group:
                continue
            success = np.array([row["success"] for row in group])
            training = np.array([np.mean(row["in_training"]) for row in group])
            less, less_training = "", ""
            tokens = groups["tokens"]
            if arm != "tokens" and [row["seed"] for row in tokens] == [row["seed"] for row in group]:
                less = cell(*difference(success, np.array([row["success"] for row in tokens])), sign="+")
                if len(group) > 1:  # paired by seed
                    gains = training - np.array([np.mean(row["in_training"]) for row in tokens])
                    half = student(len(gains) - 1) * float(gains.std(ddof=1)) / len(gains) ** 0.5
                    less_training = cell(gains.mean(), gains.mean() - half, gains.mean() + half, sign="+")
            seconds = f"{np.mean([row['seconds'] for row in group]):.0f}"
            lines.append(f"| {world} | {arm} | {cell(*proportion(success))} | {less} | {training.mean():.3f} | "
                         f"{less_training} | {seconds} |")  # fmt: skip
    counts = {len([row for row in results if (row["world"], row["arm"]) == (world, arm)])
              for world in WORLDS for arm in ARMS}  # fmt: skip
    seeds = str(max(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    lines.append(f"\nPPO from the shipped policies, {EPISODES:,} episodes; {seeds} seeds, {TASKS} test tasks each, "
                 "sampled. Success in training is the mean over all its episodes. Intervals are 95 %.")  # fmt: skip
    return "\n".join(lines)


def run(force: bool = False) -> None:
    """Make the runs that are not recorded, one after the other, and write the table. `force`: on a busy machine too."""
    os.chdir(ROOT)
    path = RESULTS / f"{NAME}.json"
    results: list[dict[str, Any]] = json.loads(path.read_text())["results"] if path.is_file() else []
    known = {(row["world"], row["arm"], row["seed"]) for row in results}
    rows = [(world, arm, seed) for seed in SEEDS for world in WORLDS for arm in ARMS]
    missing = [row for row in rows if row not in known]
    if missing:
        require_quiet_machine(force)
    for row in missing:
        results.append(measure(*row))
        record_results(NAME, results, table(results), COMMAND, force, merged=True)
    print(table(results))
