"""PPO with turns as actions against PPO with tokens as actions, on CraftWorld and ShopWorld, over seeds.

An arm is a pair of flags: `--advantage tokens --ratio token`, or `--advantage turns --ratio turn` (StepPO, arXiv
2604.18401). All other flags have their defaults. Each run is evaluated on the same test tasks, sampled at temperature
1. A recorded run is not made again. `run` writes results/systems_turns.json and .md after each run.
"""

from __future__ import annotations

import numpy as np
from compare import read_curve
from scores import cell

from llm_utils.records.intervals import difference, proportion, student
from systems_parts.rows import EPISODES, TASKS, Row, complete, seconds, train_and_evaluate

FLAGS = ()
NAME = "systems_turns"
WORLDS = ("CraftWorld", "ShopWorld")
ARMS = {
    "tokens": ["--advantage", "tokens", "--ratio", "token"],
    "turns": ["--advantage", "turns", "--ratio", "turn"],
}
SEEDS = (1, 2, 3)


def measure(world: str, arm: str, seed: int) -> Row:
    """Train and evaluate one policy. Return the success of each test task and of each training iteration."""
    run, episodes = train_and_evaluate("ppo_llm.py", f"AgentR1/{world}-v0", {}, seed, f"{NAME}_{arm}", *ARMS[arm])
    return {
        "world": world, "arm": arm, "seed": seed, "success": [int(one["stats"]["success"]) for one in episodes],
        "in_training": np.round(read_curve(run, "charts/success")[1], 4).tolist(), "seconds": seconds(run),
    }  # fmt: skip


def table(results: list[Row]) -> str:
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
            took = f"{np.mean([row['seconds'] for row in group]):.0f}"
            lines.append(f"| {world} | {arm} | {cell(*proportion(success))} | {less} | {training.mean():.3f} | "
                         f"{less_training} | {took} |")  # fmt: skip
    counts = {len([row for row in results if (row["world"], row["arm"]) == (world, arm)])
              for world in WORLDS for arm in ARMS}  # fmt: skip
    seeds = str(max(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    lines.append(f"\nPPO from the shipped policies, {EPISODES:,} episodes; {seeds} seeds, {TASKS} test tasks each, "
                 "sampled. Success in training is the mean over all its episodes. Intervals are 95 %.")  # fmt: skip
    return "\n".join(lines)


def run(force: bool = False) -> None:
    """Make the missing runs and print the table. `force`: on a busy machine too."""
    keys = [(world, arm, seed) for seed in SEEDS for world in WORLDS for arm in ARMS]
    complete("turns", ("world", "arm", "seed"), keys, measure, table, force)
