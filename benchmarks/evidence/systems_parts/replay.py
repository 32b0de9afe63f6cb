"""Sampled success of GRPO on CraftWorld by the share of replayed successes, over seeds, beside expert iteration.

Flags, tasks and episodes are those of the recorded part `teachers`, whose rows are compared. A run that stands in
results/evidence_runs.jsonl is not made again. `run` writes results/systems_replay.json and .md after each evaluation.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
from evidence_parts import runs, teachers
from evidence_parts.commands import EPISODES, play, reinforce
from evidence_parts.runs import ROOT
from machine import record_results
from scores import cell

from llm_utils.records.intervals import difference, proportion

FLAGS = ()
NAME = "systems_replay"
COMMAND = "python benchmarks/evidence/systems.py --part replay"
SHARES = (0.25, 0.0, 0.5)  # in this order, each with all seeds
SEEDS, TASKS = (1, 2, 3), 500
WORLD = teachers.PLACES["CraftWorld"]
EARLIER = ("GRPO", "GRPO, 4 epochs", teachers.OWN[-1])  # rows of `teachers`
BASELINE = "GRPO, share 0"


def training(share: float, seed: int) -> runs.Run:
    """Return a training run of GRPO."""
    return reinforce(WORLD, f"GRPO, share {share:g}", "GRPO", seed, "tiny", f"--replay-successes {share:g}")


def evaluation(label: str, trained: runs.Run, seed: int) -> runs.Run:
    """Return the evaluation of a trained policy on test tasks, at temperature 1."""
    return play(WORLD, label, seed, *WORLD.columns["in domain"], trained, TASKS, 1)


def successes(evaluations: list[runs.Run]) -> np.ndarray:
    """Return recorded success of evaluations, [seeds, tasks]."""
    lines = runs.recorded()
    return np.array([[int(one) for one in lines[run.key]["success"]] for run in evaluations])


def table(groups: dict[str, list[runs.Run]]) -> str:
    """Return the table of the evaluations that stand in the record, in groups of one row."""
    head = ["CraftWorld, sampled", "success", "minus share 0", "minus expert iteration", "of each seed", "seconds"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    recorded = runs.recorded()
    groups = {label: [run for run in group if run.key in recorded] for label, group in groups.items()}
    others = {label: successes(groups.get(label, [])) for label in (BASELINE, EARLIER[-1])}
    for label, group in groups.items():
        if not group:
            continue
        found = successes(group)
        less = [cell(*difference(found, other), sign="+") if label != name and len(other) == len(found) else ""
                for name, other in others.items()]  # fmt: skip
        each = ", ".join(f"{one:.3f}" for one in found.mean(1))
        seconds = np.mean([recorded[run.needs[0].key]["seconds"] for run in group])
        lines.append(f"| {label} | {cell(*proportion(found))} | {' | '.join(less)} | {each} | {seconds:,.0f} |")
    words = (f"{EPISODES:,} episodes from the shipped policy, {TASKS} test tasks at temperature 1. Intervals are 95 %. "
             f"Rows without a share are of earlier code, and were measured for `evidence.py --part teachers`. "
             f"The seconds of expert iteration are those of its last round.")  # fmt: skip
    return "\n".join([*lines, "", words])


def settings(force: bool) -> Any:
    """Return what `runs.make` reads of the flags of evidence.py."""
    return SimpleNamespace(seeds=len(SEEDS), workers=1, flags="", force=force, used=set(), begun=False, needs=None)


def rows(args: Any) -> dict[str, list[runs.Run]]:
    """Return the evaluations of each row, one a seed: those of earlier rows, and one of each share."""
    earlier = teachers.train(WORLD, EARLIER, args)
    groups = {label: [evaluation(label, trained, seed) for seed, trained in zip(SEEDS, earlier[label], strict=True)]
              for label in EARLIER}  # fmt: skip
    for share in sorted(SHARES):
        label = f"GRPO, share {share:g}"
        groups[label] = [evaluation(label, training(share, seed), seed) for seed in SEEDS]
    return groups


def run(force: bool = False) -> None:
    """Make the runs that are not recorded, one after the other, and write the table. `force`: on a busy machine too."""
    os.chdir(ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "benchmarks" / "common"), os.environ.get("PYTHONPATH", "")])
    args = settings(force)
    groups = rows(args)
    for share in SHARES:
        for seed, played in zip(SEEDS, groups[f"GRPO, share {share:g}"], strict=True):
            runs.make([training(share, seed)], args)
            runs.make([played], args)
            record_results(NAME, {"rows": recorded_rows(groups)}, table(groups), COMMAND, force, merged=True)
    print(table(groups))


def recorded_rows(groups: dict[str, list[runs.Run]]) -> dict[str, Any]:
    """Return success of each seed and the keys of the recorded evaluations, by row."""
    lines = runs.recorded()
    found = {label: [run for run in group if run.key in lines] for label, group in groups.items()}
    return {
        label: {"keys": [run.key for run in group], "success": successes(group).mean(1).tolist()}
        for label, group in found.items() if group
    }  # fmt: skip
