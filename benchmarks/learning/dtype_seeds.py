"""GRPO on MultihopWorld in float32 and in bf16, weights, sampling and training alike, over seeds.

    python benchmarks/learning/dtype_seeds.py             # 3 seeds, two runs at a time, a core for each
    python benchmarks/learning/dtype_seeds.py --workers 1

Everything runs through learner/sweep.py: what is finished is not repeated. Every point of a curve is a
greedy evaluation on held-out test tasks. A processor that can't multiply in bf16 is told so by the learner.
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
from compare import read_curve
from machine import from_1, record_results, require_quiet_machine
from sweep import Job, finish, make_job

DTYPES = ["float32", "bfloat16"]
ENOUGH = 0.85  # exact match


def job(dtype: str, seed: int, flags: str) -> Job:
    words = ["python", "learner/grpo_llm.py", "--exp-name", f"dtype_seeds_{dtype}", "--dtype", dtype]
    words += ["--seed", str(seed), "--num-threads", "1", "--total-episodes", "2560", "--eval-every", "1"]
    return make_job([*words, *shlex.split(flags)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=from_1, default=3, help="number of seeds, from 1 on")
    parser.add_argument("--workers", type=from_1, default=2, help="runs at the same time")
    parser.add_argument("--flags", default="", help="further flags of grpo_llm.py, in quotation marks")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    args = parser.parse_args()
    require_quiet_machine(args.force)
    os.chdir(ROOT)
    jobs = [(dtype, seed) for seed in range(1, args.seeds + 1) for dtype in DTYPES]
    runs = finish([job(*one, args.flags) for one in jobs], args.workers)
    results = {}
    rows = [
        f"| --dtype | EM before | EM after | episodes until EM {ENOUGH} | sampler-trainer gap: mean, largest | "
        "training seconds |",
        "|---|---|---|---|---|---|",
    ]
    for dtype in DTYPES:
        mine = [run for (name, _), run in zip(jobs, runs, strict=True) if name == dtype]
        summaries = [json.loads((run / "summary.json").read_text()) for run in mine]
        curves = [np.column_stack(read_curve(run, "eval/em", "episodes")).tolist() for run in mine]
        first_enough = [next((int(step) for step, em in curve if em >= ENOUGH), None) for curve in curves]
        gaps = {name: [read_curve(run, name)[1] for run in mine] for name in ("sampler/gap_mean", "sampler/gap_max")}
        gap = [np.mean(np.concatenate(gaps["sampler/gap_mean"])), np.max(np.concatenate(gaps["sampler/gap_max"]))]
        results[dtype] = {
            "eval/exact_match_first": [s["eval/exact_match_first"] for s in summaries],
            "eval/exact_match_last": [s["eval/exact_match_last"] for s in summaries],
            "episodes_until_enough": first_enough,
            "train_seconds": [s["train_seconds"] for s in summaries],
            "curves": curves,
            **{name: [values.tolist() for values in found] for name, found in gaps.items()},
        }
        scores = [results[dtype][f"eval/exact_match_{when}"] for when in ("first", "last")]
        columns = [[f"{value:.3f}" for value in values] for values in scores]
        columns.append([f"{step:,}" if step is not None else "not reached" for step in first_enough])
        columns.append([f"{value:.1e}" for value in gap])
        columns.append([f"{value:.0f}" for value in results[dtype]["train_seconds"]])
        rows.append(f"| {dtype} | " + " | ".join(", ".join(column) for column in columns) + " |")
    table = "\n".join(rows)
    print(table)
    command = f"python benchmarks/learning/dtype_seeds.py --seeds {args.seeds} --workers {args.workers}"
    if args.flags:
        command += f' --flags "{args.flags}"'
    record_results("dtype_seeds", results, table, command, args.force)


if __name__ == "__main__":
    main()
