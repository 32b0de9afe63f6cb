"""Success of ARPO and GRPO on CraftWorld against turns, sampled tokens and seconds, over seeds.

All rows play as many episodes of a task. GRPO begins all of them at the prompt, ARPO half of them. "beta 0" branches
by a coin, whatever the entropy is. Each run is evaluated on the same test tasks, sampled at temperature 1. A recorded
run is not made again. `run` writes results/systems_arpo.json and .md after each run.
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

from llm_utils.records.intervals import difference, proportion

ROOT = Path(__file__).resolve().parents[3]
FLAGS = ()
NAME = "systems_arpo"
COMMAND = "python benchmarks/evidence/systems.py --part arpo"
ROWS = {
    "GRPO": ("grpo_llm.py", []),
    "ARPO": ("arpo_llm.py", []),
    "ARPO, unit of deviation": ("arpo_llm.py", ["--entropy-unit", "deviation"]),
    "ARPO, beta 0": ("arpo_llm.py", ["--branch-beta", 0]),
}
SEEDS = (1, 2, 3)
EPISODES, TASKS = 2_560, 500  # of a training, and of an evaluation
CHANCES = ("branch_probability", "branch_probability_min", "branch_probability_max")


def job(script: str, label: str, seed: int, *flags: object) -> Job:
    """Return a command in one thread."""
    words = ["python", f"learner/{script}", *environment("AgentR1/CraftWorld-v0", {}), "--seed", seed]
    words += ["--num-threads", 1, "--exp-name", f"{NAME}_{label}".replace(" ", "_").replace(",", ""), *flags]
    return make_job([str(word) for word in words])


def work(run: Path) -> dict[str, float]:
    """Return turns and sampled tokens of a training, without those that branches copied."""
    try:
        return {name: float(read_curve(run, f"charts/own_{name}")[1].sum()) for name in ("turns", "tokens")}
    except KeyError:  # without branches
        episodes = np.diff(read_curve(run, "charts/episodes")[1], prepend=0)
        turns, tokens = (read_curve(run, f"charts/{name}")[1] for name in ("episodic_length", "sampled_tokens"))
        return {"turns": float(turns @ episodes), "tokens": float(tokens @ episodes)}


def measure(row: str, seed: int) -> dict[str, Any]:
    """Train and evaluate one policy."""
    script, more = ROWS[row]
    flags = ["--total-episodes", EPISODES, "--eval-episodes", 0, "--save-model", *more]
    (run,) = finish([job(script, row, seed, *flags)], 1)
    flags = ["--model", run / "model", "--split", "test", "--episodes", TASKS, "--temperature", 1]
    (played,) = finish([job("evaluate_llm.py", row, seed, *flags)], 1)
    rows = [json.loads(line) for line in (played / "trajectories.jsonl").read_text().splitlines()]
    rows.sort(key=lambda one: one["task_index"])
    found = {"row": row, "seed": seed, "success": [int(one["stats"]["success"]) for one in rows], **work(run)}
    found["seconds"] = json.loads((run / "summary.json").read_text())["train_seconds"]
    if script == "arpo_llm.py":
        found["branched"] = float(read_curve(run, "charts/branched")[1].mean())
        curves = [read_curve(run, f"charts/{name}")[1] for name in CHANCES]
        found["chance"] = [float(curves[0].mean()), float(curves[1].min()), float(curves[2].max())]
    return found


def table(results: list[dict[str, Any]]) -> str:
    """Return the table of all recorded runs."""
    head = ["", "success", "minus GRPO", "turns", "sampled tokens", "training seconds", "branches",
            "P: mean, range"]  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    groups = {row: sorted((one for one in results if one["row"] == row), key=lambda one: one["seed"]) for row in ROWS}
    base = groups["GRPO"]
    for row, group in groups.items():
        if not group:
            continue
        success = np.array([one["success"] for one in group])
        less = ""
        if row != "GRPO" and [one["seed"] for one in group] == [one["seed"] for one in base]:
            less = cell(*difference(success, np.array([one["success"] for one in base])), sign="+")
        cells = [row, cell(*proportion(success)), less]
        cells += [f"{np.mean([one[name] for one in group]):,.0f}" for name in ("turns", "tokens", "seconds")]
        if "chance" in group[0]:
            mean, low, high = (np.array([one["chance"] for one in group])[:, i] for i in range(3))
            cells += [f"{np.mean([one['branched'] for one in group]):.0%}"]
            cells += [f"{mean.mean():.3f}, {low.min():.2f} to {high.max():.2f}"]
        else:
            cells += ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    seeds = sorted({one["seed"] for one in results})
    lines.append(f"\nCraftWorld, depth 1 to 3, from the shipped policy: {EPISODES:,} episodes in groups of 8, seeds "
                 f"{', '.join(map(str, seeds))}, {TASKS} test tasks each, sampled. Turns and tokens are those of a "
                 "run, without copied ones. Intervals are 95 %.")  # fmt: skip
    return "\n".join(lines)


def run(force: bool = False) -> None:
    """Make the runs that are not recorded, one after the other, and write the table. `force`: on a busy machine too."""
    os.chdir(ROOT)
    path = RESULTS / f"{NAME}.json"
    results: list[dict[str, Any]] = json.loads(path.read_text())["results"] if path.is_file() else []
    known = {(one["row"], one["seed"]) for one in results}
    missing = [(row, seed) for seed in SEEDS for row in ROWS if (row, seed) not in known]
    if missing:
        require_quiet_machine(force)
    for row, seed in missing:
        results.append(measure(row, seed))
        record_results(NAME, results, table(results), COMMAND, force, merged=True)
    print(table(results))
