"""Success of ARPO and GRPO on CraftWorld against turns, sampled tokens and seconds, over seeds.

All rows play as many episodes of a task. GRPO begins all of them at the prompt, ARPO half of them. "beta 0" branches
by a coin, whatever the entropy is. Each run is evaluated on the same test tasks, sampled at temperature 1. A recorded
run is not made again. `run` writes results/systems_arpo.json and .md after each run.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from compare import read_curve
from scores import cell

from llm_utils.records.intervals import difference, proportion
from systems_parts.rows import EPISODES, TASKS, Row, complete, seconds, train_and_evaluate

FLAGS = ()
NAME = "systems_arpo"
ROWS = {
    "GRPO": ("grpo_llm.py", []),
    "ARPO": ("arpo_llm.py", []),
    "ARPO, unit of deviation": ("arpo_llm.py", ["--entropy-unit", "deviation"]),
    "ARPO, beta 0": ("arpo_llm.py", ["--branch-beta", 0]),
}
SEEDS = (1, 2, 3)
CHANCES = ("branch_probability", "branch_probability_min", "branch_probability_max")


def work(run: Path) -> dict[str, float]:
    """Return turns and sampled tokens of a training, without those that branches copied."""
    try:
        return {name: float(read_curve(run, f"charts/own_{name}")[1].sum()) for name in ("turns", "tokens")}
    except KeyError:  # without branches
        episodes = np.diff(read_curve(run, "charts/episodes")[1], prepend=0)
        turns, tokens = (read_curve(run, f"charts/{name}")[1] for name in ("episodic_length", "sampled_tokens"))
        return {"turns": float(turns @ episodes), "tokens": float(tokens @ episodes)}


def measure(row: str, seed: int) -> Row:
    """Train and evaluate one policy."""
    script, flags = ROWS[row]
    name = f"{NAME}_{row}".replace(" ", "_").replace(",", "")
    run, episodes = train_and_evaluate(script, "AgentR1/CraftWorld-v0", {}, seed, name, *flags)
    found = {"row": row, "seed": seed, "success": [int(one["stats"]["success"]) for one in episodes], **work(run)}
    found["seconds"] = seconds(run)
    if script == "arpo_llm.py":
        found["branched"] = float(read_curve(run, "charts/branched")[1].mean())
        curves = [read_curve(run, f"charts/{name}")[1] for name in CHANCES]
        found["chance"] = [float(curves[0].mean()), float(curves[1].min()), float(curves[2].max())]
    return found


def table(results: list[Row]) -> str:
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
    """Make the missing runs and print the table. `force`: on a busy machine too."""
    complete("arpo", ("row", "seed"), [(row, seed) for seed in SEEDS for row in ROWS], measure, table, force)
