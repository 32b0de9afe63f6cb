"""A reward model on MultihopWorld: what it learned, best of N by it, and GRPO trained against it.

The shipped policy records episodes of training tasks. Each kind of model trains on them. GRPO then trains against the
model of kind "outcome" without process rewards, beside GRPO on the true outcome. `run` writes the tables in
results/systems_reward_model.md after each part; a recorded part is not made again.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import numpy as np

from systems_parts.rows import Row, complete, run_script

FLAGS = ()
NAME = "systems_reward_model"
KINDS = ("outcome", "pairs", "values")
AGAINST, TRUE = "against the model", "true outcome"
TASKS, SAMPLES = 400, 8  # recorded tasks, and episodes of each
EPISODES, PER_ITERATION = 10_240, 256
ENV_ID = "AgentR1/MultihopWorld-v0"


def train_model(kind: str) -> tuple[Path, Row]:
    """Record episodes and train a reward model on them. Return its run, and its summary."""
    flags = ("--split", "train", "--episodes", TASKS, "--samples", SAMPLES, "--temperature", 1)
    played = run_script("evaluate_llm.py", ENV_ID, {}, 1, NAME, *flags)
    flags = ("--data", played / "trajectories.jsonl", "--kind", kind)
    run = run_script("reward_model_llm.py", ENV_ID, {}, 1, f"{NAME}_{kind}", *flags)
    return run, json.loads((run / "summary.json").read_text())


def train_policy(model: Path | None) -> list[dict[str, float]]:
    """Train GRPO on the outcome, or on a model's score instead. Return means over the episodes of each iteration."""
    flags = ["--total-episodes", EPISODES, "--episodes-per-iteration", PER_ITERATION, "--eval-episodes", 0]
    flags += ["--log-trajectories", "all", *(["--reward-model", model] if model else [])]
    name = f"{NAME}_{'against' if model else 'true'}"
    run = run_script("grpo_llm.py", ENV_ID, {"process_reward": False}, 1, name, *flags)
    stats: dict[int, list[dict[str, float]]] = defaultdict(list)
    with (run / "trajectories.jsonl").open() as file:
        for row in map(json.loads, file):
            stats[row["iteration"]].append(row["stats"])
    names = ("model_score", "success", "turns", "tokens")
    return [{name: float(np.mean([one[name] for one in stats[i]])) for name in names if name in stats[i][0]}
            for i in sorted(stats)]  # fmt: skip


def measure(kind: str) -> Row:
    """Train a model of a kind, or a policy."""
    if kind in KINDS:
        _, summary = train_model(kind)
        return {"kind": kind, "heldout": summary["heldout"], "seconds": summary["train_seconds"]}
    return {"kind": kind, "curve": train_policy(train_model("outcome")[0] if kind == AGAINST else None)}


def cell(value: float | None, pairs: int | None = None) -> str:
    """Return a figure for a table."""
    text = "" if value is None else f"{value:.3f}"
    return text if pairs is None else f"{text} of {pairs}"


def table(results: list[Row]) -> str:
    """Return the tables of the recorded parts."""
    lines = ["| kind | score | AUC | pairs of one task | of these, equal turns |", "|---" * 5 + "|"]
    models = [row for row in results if "heldout" in row]
    for row in models:
        for name, figures in row["heldout"]["scores"].items():
            if name in ("turns", "tokens"):  # the same for every kind
                continue
            lines.append(f"| {row['kind']} | {name} | {cell(figures['auc'])} | "
                         f"{cell(figures['pairs_won'], figures['pairs'])} | "
                         f"{cell(figures['equal_turns_won'], figures['equal_turns_pairs'])} |")  # fmt: skip
    for name in ("turns", "tokens") if models else ():
        figures = models[0]["heldout"]["scores"][name]
        lines.append(f"| no model | {name} alone | {cell(figures['auc'])} | "
                     f"{cell(figures['pairs_won'], figures['pairs'])} | "
                     f"{cell(figures['equal_turns_won'], figures['equal_turns_pairs'])} |")  # fmt: skip
    if models:
        held = models[0]["heldout"]
        counts = f"{held['episodes']} held-out episodes of {held['tasks']} tasks"
        lines.append(f"\n{counts}, success {held['success']:.3f}.\n")
        lines += [f"| best of {held['best_of']['n']:g} by | success |", "|---|---|"]
        lines += [f"| {name} | {held['best_of'][name]:.3f} |" for name in ("random", "turns")]
        lines += [f"| model, {row['kind']} | {row['heldout']['best_of']['model']:.3f} |" for row in models]
        lines.append(f"| perfect | {held['best_of']['perfect']:.3f} |")
    curves = {row["kind"]: row["curve"] for row in results if "curve" in row}
    if len(curves) == 2:
        lines.append("\n| iteration | model's score | true success | turns | success of GRPO on the true outcome | "
                     "its turns |\n" + "|---" * 6 + "|")  # fmt: skip
        against, true = curves[AGAINST], curves[TRUE]
        for i in [0, *range(4, len(against), 5)]:
            one, other = against[i], true[i]
            lines.append(f"| {i + 1} | {one['model_score']:.3f} | {one['success']:.3f} | {one['turns']:.2f} | "
                         f"{other['success']:.3f} | {other['turns']:.2f} |")  # fmt: skip
        lines.append(f"\nGRPO from the shipped policy, one seed, {PER_ITERATION} sampled training episodes an "
                     "iteration, no process rewards. The reward is the score of the model of kind outcome, or the true "
                     "outcome.")  # fmt: skip
    return "\n".join(lines)


def run(force: bool = False) -> None:
    """Make the missing runs and print the tables. `force`: on a busy machine too."""
    complete("reward_model", ("kind",), [(kind,) for kind in (*KINDS, AGAINST, TRUE)], measure, table, force)
