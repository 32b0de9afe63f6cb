"""GRPO on ArithmeticWorld from the shipped tiny policy, over seeds; then the zero-shot splits.

    python benchmarks/learning/arithmetic_seeds.py  # 3 seeds, two at a time, a core for each; about ten minutes
    python benchmarks/learning/arithmetic_seeds.py --workers 1

Everything runs through learner/sweep.py: what is finished is not repeated. Every point of a curve is a
greedy evaluation on 256 held-out tasks; the table of the splits is from 500 tasks each.
"""

import argparse
import json
import os
import shlex
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks" / "common"), str(ROOT / "learner")]
from compare import plot, read_curve
from machine import from_1, given_flags, record_results, require_quiet_machine
from sweep import Job, finish, make_job

ENV_ID = "AgentR1/ArithmeticWorld-v0"
SPLITS = ["test", "more_steps", "larger_numbers", "unseen_words", "other_phrasings"]


def job(script: str, name: str, seed: int, *flags: str) -> Job:
    words = ["python", f"learner/{script}", "--env-id", ENV_ID, "--exp-name", f"arithmetic_{name}", "--seed", str(seed)]
    return make_job([*words, "--num-threads", "1", *flags])


def success(
    models: dict[str, list[str]], splits: list[str], episodes: int, workers: int
) -> dict[str, dict[str, list[float]]]:
    """Greedy success of each model of each name: name -> split -> one figure a model."""
    jobs = {
        (name, split, seed): job("evaluate_llm.py", f"{name}_{split}", seed,
                                 "--model", model, "--split", split, "--env-kwargs", "{}", "--episodes", str(episodes))
        for name, group in models.items() for split in splits for seed, model in enumerate(group, 1)
    }  # fmt: skip
    found: dict[str, dict[str, list[float]]] = {name: {split: [] for split in splits} for name in models}
    for (name, split, _), folder in zip(jobs, finish(list(jobs.values()), workers), strict=True):
        metrics = json.loads((folder / "evaluation.json").read_text())["metrics"]
        found[name][split].append(metrics["success"]["mean"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=from_1, default=3, help="number of seeds, from 1 on")
    parser.add_argument("--workers", type=from_1, default=2, help="runs at the same time")
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=SPLITS, help="splits to evaluate on in the end")
    parser.add_argument("--episodes", type=from_1, default=500, help="tasks of each split")
    parser.add_argument("--flags", default="", help="further flags of grpo_llm.py, in quotation marks")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    args = parser.parse_args()
    require_quiet_machine(args.force)
    os.chdir(ROOT)
    flags = ["--total-episodes", "2560", "--eval-every", "1", "--save-model", *shlex.split(args.flags)]
    runs = finish([job("grpo_llm.py", "grpo", seed, *flags) for seed in range(1, args.seeds + 1)], args.workers)
    summaries = [json.loads((run / "summary.json").read_text()) for run in runs]
    curves = [read_curve(run, "eval/success", "episodes") for run in runs]
    rows = ["| seed | success before | after | training seconds |", "|---|---|---|---|"]
    rows += [
        f"| {seed} | {s['eval/success_first']:.3f} | {s['eval/success_last']:.3f} | {s['train_seconds']:.0f} |"
        for seed, s in enumerate(summaries, 1)
    ]
    table = "\n".join(rows)
    print(table)
    results = {
        name: [s[name] for s in summaries] for name in ("eval/success_first", "eval/success_last", "train_seconds")
    }
    results["curves"] = [np.column_stack(curve).tolist() for curve in curves]
    command = f"python benchmarks/learning/arithmetic_seeds.py --seeds {args.seeds} --workers {args.workers}"
    command += given_flags(parser, args, "splits", "episodes", "flags")
    picture = record_results("arithmetic_seeds", results, table, command, args.force)
    plot({(ENV_ID, "GRPO"): curves}, "success on held-out tasks", "training episodes",
         ROOT / f"docs/images/{picture}.png")  # fmt: skip

    models = {"shipped": ["tiny"], "trained": [str(run) for run in runs]}
    zero_shot = success(models, args.splits, args.episodes, args.workers)
    rows = ["| split | shipped policy | trained, each seed |", "|---|---|---|"]
    for split in args.splits:
        trained = ", ".join(f"{value:.3f}" for value in zero_shot["trained"][split])
        rows.append(f"| `{split}` | {zero_shot['shipped'][split][0]:.3f} | {trained} |")
    table = "\n".join(rows)
    print(table)
    record_results("arithmetic_splits", zero_shot, table, command, args.force)


if __name__ == "__main__":
    main()
