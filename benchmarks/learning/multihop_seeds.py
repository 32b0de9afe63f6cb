"""The default job over seeds, with and without process rewards: learning curves, final scores, area under the curve.

    python benchmarks/learning/multihop_seeds.py  # 5 seeds x {process, outcome}; table, JSON and plot
    python benchmarks/learning/multihop_seeds.py --workers 1 --threads 2  # one run at a time, as `make train` does it

Runs that are finished are not repeated (sweep.py). Every point of a curve is a greedy evaluation on the
held-out test tasks.
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
from compare import area, plot, read_curve
from machine import from_1, record_results, require_quiet_machine
from sweep import Job, finish, make_job

CONDITIONS = {"process + outcome": "{}", "outcome only": '{"process_reward": false}'}


def job(seed: int, condition: str, args: argparse.Namespace) -> Job:
    name = f"multihop_seeds_{'process' if condition.startswith('process') else 'outcome'}"
    name += f"_{args.threads}" * (args.threads != 1)  # runs that differ in it alone would be one, and seconds are shown
    words = ["python", "learner/ppo_llm.py", "--exp-name", name, "--seed", str(seed)]
    words += ["--env-kwargs", CONDITIONS[condition], "--num-threads", str(args.threads)]
    return make_job([*words, "--eval-every", str(args.eval_every), *shlex.split(args.flags)])


def spread(values: list[float]) -> str:
    deviation = np.std(values, ddof=1) if len(values) > 1 else 0.0
    return f"{np.mean(values):.3f} ± {deviation:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=from_1, default=5, help="number of seeds, from 1 on")
    parser.add_argument("--workers", type=from_1, default=2, help="runs at the same time")
    parser.add_argument("--threads", type=from_1, default=1, help="torch threads of a run")
    parser.add_argument("--eval-every", type=from_1, default=4, help="iterations between points of a curve")
    parser.add_argument("--flags", default="", help="further flags of ppo_llm.py, in quotation marks")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    args = parser.parse_args()
    require_quiet_machine(args.force)
    os.chdir(ROOT)  # learners run there
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    jobs = [(seed, condition) for seed in range(1, args.seeds + 1) for condition in CONDITIONS]
    folders = finish([job(*one, args) for one in jobs], args.workers)
    results, curves = {}, {}
    rows = ["| rewards | EM before | EM after | area under the curve | training seconds |", "|---|---|---|---|---|"]
    for condition in CONDITIONS:
        mine = [folder for (_, name), folder in zip(jobs, folders, strict=True) if name == condition]
        summaries = [json.loads((folder / "summary.json").read_text()) for folder in mine]
        curves[condition] = [read_curve(folder, "eval/em", "episodes") for folder in mine]
        first = [s["eval/exact_match_first"] for s in summaries]
        last = [s["eval/exact_match_last"] for s in summaries]
        areas = [area(curve) for curve in curves[condition]]
        seconds = [s["train_seconds"] for s in summaries]
        results[condition] = {"exact_match_first": first, "exact_match_last": last, "area": areas,
                              "train_seconds": seconds,
                              "curves": [np.column_stack(curve).tolist() for curve in curves[condition]]}  # fmt: skip
        rows.append(f"| {condition} | {spread(first)} | {spread(last)} | {spread(areas)} | {np.mean(seconds):.0f} |")
    table = "\n".join(rows)
    print(table)
    command = (f"python benchmarks/learning/multihop_seeds.py --seeds {args.seeds} --workers {args.workers} "
               f"--threads {args.threads} --eval-every {args.eval_every}")
    if args.flags:
        command += f' --flags "{args.flags}"'
    said = f"{table}\n\nMean ± standard deviation over {args.seeds} seeds."
    name = record_results("multihop_seeds", results, said, command, args.force)
    plot({("AgentR1/MultihopWorld-v0", condition): runs for condition, runs in curves.items()},
         "exact match on held-out tasks", "training episodes", ROOT / f"docs/images/{name}.png")  # fmt: skip


if __name__ == "__main__":
    main()
