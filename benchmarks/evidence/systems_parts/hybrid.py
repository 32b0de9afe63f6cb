"""Success and calls of GRPO on CraftWorld by the price of a call beyond the expert's number, over seeds.

A row is a price: `process_reward={"extra_call": -w}`, with all other process terms at 0. Each run is evaluated on the
same test tasks, sampled at temperature 1. A recorded run is not made again. `run` writes results/systems_hybrid.json
after each run, and the table in results/systems_hybrid.md after the last.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scores import cell

from agent_r1.tasks.craft_world import CraftWorldEnv, generate_task
from llm_utils.records.intervals import Interval, difference, mean, proportion
from systems_parts.rows import EPISODES, TASKS, Row, complete, seconds, train_and_evaluate

FLAGS = ()
NAME = "systems_hybrid"
PRICES = (0.0, 0.02, 0.1)
SEEDS = (1, 2, 3)


def kwargs_of(price: float) -> dict[str, Any]:
    """Return arguments of an environment that pays the outcome and the price of a call."""
    weights = dict.fromkeys(CraftWorldEnv.PROCESS_WEIGHTS, 0.0) | {"extra_call": -price}
    return {"process_reward": weights if price else False}


def measure(price: float, seed: int) -> Row:
    """Train and evaluate one policy. Return what its evaluation shows, an entry for each task."""
    env_id, name = "AgentR1/CraftWorld-v0", f"{NAME}_{price}"
    run, episodes = train_and_evaluate("grpo_llm.py", env_id, kwargs_of(price), seed, name)
    experts = [generate_task(0, "test", one["task_index"]).metadata["optimal_turns"] for one in episodes]
    calls = [int(one["stats"]["tool_calls"]) for one in episodes]
    return {
        "price": price, "seed": seed, "success": [int(one["stats"]["success"]) for one in episodes], "calls": calls,
        "beyond": [made - expert for made, expert in zip(calls, experts, strict=True)], "seconds": seconds(run),
    }  # fmt: skip


def beyond(row: Row) -> float:
    """Return the mean number of calls beyond the expert's over the successes of a run. SystemExit if it has none."""
    extra = [extra for extra, success in zip(row["beyond"], row["success"], strict=True) if success]
    if not extra:
        raise SystemExit(f"price {row['price']}, seed {row['seed']}: no episode succeeded, so no calls can be compared")
    return float(np.mean(extra))


def against_free(group: list[Row], free: list[Row]) -> tuple[Interval, Interval]:
    """Return the differences of success and of calls beyond the expert's to price 0. The second is paired by seed."""
    priced, unpriced = (np.array([row["success"] for row in rows]) for rows in (group, free))
    extra = [beyond(row) - beyond(other) for row, other in zip(group, free, strict=True)]
    return difference(priced, unpriced), mean(extra)


def table(results: list[Row]) -> str:
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
        took = np.mean([row["seconds"] for row in group])
        lines.append(f"| {price:g} | {success} | {less[0]} | {np.mean(extra):.3f} | {less[1]} | {each} | {calls:.2f} | "
                     f"{took:.0f} |")  # fmt: skip
    counts = sorted({len(group) for group in groups.values()})
    seeds_text = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    lines.append(f"\nGRPO from the shipped policy, {EPISODES:,} episodes of depth 1 to 3, outcome and `extra_call` "
                 f"only; {seeds_text} seeds, {TASKS} test tasks each, sampled. Intervals are 95 %.")  # fmt: skip
    return "\n".join(lines)


def run(force: bool = False) -> None:
    """Make the missing runs and print the table. `force`: on a busy machine too."""
    keys = [(price, seed) for seed in SEEDS for price in PRICES]
    complete("hybrid", ("price", "seed"), keys, measure, table, force)
