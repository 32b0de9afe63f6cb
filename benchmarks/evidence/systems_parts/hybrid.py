"""Success and calls of GRPO on CraftWorld by the price of a call beyond the expert's number, over seeds.

A row is a price: `process_reward={"extra_call": -w}`, with all other process terms at 0. Each run is evaluated on the
same test tasks, sampled at temperature 1. A recorded run is not made again. `run` writes results/systems_hybrid.json
after each run, and the table in results/systems_hybrid.md after the last.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from machine import RESULTS, record_results, require_quiet_machine
from scores import cell, environment
from sweep import Job, finish, make_job

from agent_r1.tasks.craft_world import CraftWorldEnv, generate_task
from llm_utils.records.intervals import Interval, difference, mean, proportion

ROOT = Path(__file__).resolve().parents[3]
FLAGS = ()
NAME = "systems_hybrid"
COMMAND = "python benchmarks/evidence/systems.py --part hybrid"
PRICES = (0.0, 0.02, 0.1)
SEEDS = (1, 2, 3)
EPISODES, TASKS = 2_560, 500  # of a training, and of an evaluation


def job(script: str, price: float, seed: int, *flags: object) -> Job:
    """Return a command in one thread. It pays the outcome, and the price of a call."""
    weights = dict.fromkeys(CraftWorldEnv.PROCESS_WEIGHTS, 0.0) | {"extra_call": -price}
    kwargs = {"process_reward": weights if price else False}
    words = ["python", f"learner/{script}", *environment("AgentR1/CraftWorld-v0", kwargs), "--seed", seed]
    words += ["--num-threads", 1, "--exp-name", f"{NAME}_{price}", *flags]
    return make_job([str(word) for word in words])


def measure(price: float, seed: int) -> dict[str, Any]:
    """Train and evaluate one policy. Return what its evaluation shows, an entry for each task."""
    flags = ["--total-episodes", EPISODES, "--eval-episodes", 0, "--save-model"]
    (run,) = finish([job("grpo_llm.py", price, seed, *flags)], 1)
    flags = ["--model", run / "model", "--split", "test", "--episodes", TASKS, "--temperature", 1]
    (played,) = finish([job("evaluate_llm.py", price, seed, *flags)], 1)
    rows = [json.loads(line) for line in (played / "trajectories.jsonl").read_text().splitlines()]
    rows.sort(key=lambda row: row["task_index"])
    experts = [generate_task(0, "test", row["task_index"]).metadata["optimal_turns"] for row in rows]
    calls = [int(row["stats"]["tool_calls"]) for row in rows]
    return {
        "price": price, "seed": seed, "success": [int(row["stats"]["success"]) for row in rows], "calls": calls,
        "beyond": [made - expert for made, expert in zip(calls, experts, strict=True)],
        "seconds": json.loads((run / "summary.json").read_text())["train_seconds"],
    }  # fmt: skip


def beyond(row: dict[str, Any]) -> float:
    """Return the mean number of calls beyond the expert's over the successes of a run. SystemExit if it has none."""
    extra = [extra for extra, success in zip(row["beyond"], row["success"], strict=True) if success]
    if not extra:
        raise SystemExit(f"price {row['price']}, seed {row['seed']}: no episode succeeded, so no calls can be compared")
    return float(np.mean(extra))


def against_free(group: list[dict[str, Any]], free: list[dict[str, Any]]) -> tuple[Interval, Interval]:
    """Return the differences of success and of calls beyond the expert's to price 0. The second is paired by seed."""
    priced, unpriced = (np.array([row["success"] for row in rows]) for rows in (group, free))
    extra = [beyond(row) - beyond(other) for row, other in zip(group, free, strict=True)]
    return difference(priced, unpriced), mean(extra)


def table(results: list[dict[str, Any]]) -> str:
    """Return the table of all recorded runs."""
    groups = {price: sorted((row for row in results if row["price"] == price), key=lambda row: row["seed"])
              for price in PRICES}  # fmt: skip
    lines = ["| w | success | minus w = 0 | calls beyond the expert's, per success | minus w = 0 | of each seed | "
             "calls per episode | training seconds |", "|---" * 8 + "|"]  # fmt: skip
    for price, group in groups.items():
        if not group:
            continue
        seeds = [row["seed"] for row in group]
        free = [row for row in groups[0.0] if row["seed"] in seeds]
        compared = price > 0 and len(free) == len(group)
        less = [cell(*one, sign="+") for one in against_free(group, free)] if compared else ["", ""]
        success = cell(*proportion(np.array([row["success"] for row in group])))
        extra = [beyond(row) for row in group]
        each, calls = ", ".join(f"{one:.3f}" for one in extra), np.mean([row["calls"] for row in group])
        seconds = np.mean([row["seconds"] for row in group])
        lines.append(f"| {price:g} | {success} | {less[0]} | {np.mean(extra):.3f} | {less[1]} | {each} | {calls:.2f} | "
                     f"{seconds:.0f} |")  # fmt: skip
    counts = sorted({len(group) for group in groups.values()})
    seeds_text = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    lines.append(f"\nGRPO from the shipped policy, {EPISODES:,} episodes of depth 1 to 3, outcome and `extra_call` "
                 f"only; {seeds_text} seeds, {TASKS} test tasks each, sampled. Intervals are 95 %.")  # fmt: skip
    return "\n".join(lines)


def run(force: bool = False) -> None:
    """Make the runs that are not recorded, one after the other, and write the table. `force`: on a busy machine too."""
    os.chdir(ROOT)
    path = RESULTS / f"{NAME}.json"
    results: list[dict[str, Any]] = json.loads(path.read_text())["results"] if path.is_file() else []
    known = {(row["price"], row["seed"]) for row in results}
    missing = [(price, seed) for seed in SEEDS for price in PRICES if (price, seed) not in known]
    if missing:
        require_quiet_machine(force)
    for price, seed in missing:
        results.append(measure(price, seed))
        record_results(NAME, results, table(results), COMMAND, force, merged=True)
    print(table(results))
