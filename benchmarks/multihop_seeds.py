"""The default job over seeds, with and without process rewards: learning curves, final scores, area under the curve.

    python benchmarks/multihop_seeds.py                      # 5 seeds x {process, outcome}; table, JSON and plot
    python benchmarks/multihop_seeds.py --workers 1 --threads 2   # one run at a time, as `make train` does it

Runs that are finished are not repeated (llm_utils/benchmark.py). Every point of a curve is a greedy evaluation on the
held-out test tasks.
"""

import argparse
import json
import os
import shlex
import sys
from pathlib import Path

import numpy as np
from machine import from_1, record_results, require_quiet_machine

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "learner"))
from llm_utils.benchmark import Job, finish, make_job  # noqa: E402

CONDITIONS = {"process + outcome": "{}", "outcome only": '{"process_reward": false}'}


def job(seed: int, condition: str, args: argparse.Namespace) -> Job:
    name = f"multihop_seeds_{'process' if condition.startswith('process') else 'outcome'}"
    name += f"_{args.threads}" * (args.threads != 1)  # runs that differ in it alone would be one, and seconds are shown
    words = ["python", "learner/ppo_llm.py", "--exp-name", name, "--seed", str(seed)]
    words += ["--env-kwargs", CONDITIONS[condition], "--num-threads", str(args.threads)]
    return make_job([*words, "--eval-every", str(args.eval_every), *shlex.split(args.flags)])


def curve(folder: Path) -> list[tuple[int, float]]:
    """(training episodes so far, held-out exact match) of every evaluation of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    args = json.loads((folder / "summary.json").read_text())["args"]
    iterations = args["total_episodes"] // args["episodes_per_iteration"]
    evaluated = sorted({*range(0, iterations + 1, args["eval_every"]), iterations})
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload().Scalars("eval/em")
    return [(i * args["episodes_per_iteration"], e.value) for i, e in zip(evaluated, events, strict=True)]


def area(points: list[tuple[int, float]]) -> float:
    """Mean height of a curve over the episodes, 0 to 1 (trapezoids)."""
    steps, values = np.array(points).T
    return float(np.trapezoid(values, steps) / (steps[-1] - steps[0]))


def spread(values: list[float]) -> str:
    deviation = np.std(values, ddof=1) if len(values) > 1 else 0.0
    return f"{np.mean(values):.3f} ± {deviation:.3f}"


def plot(curves: dict[str, list[list[tuple[int, float]]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for color, (condition, runs) in zip(("tab:blue", "tab:orange"), curves.items(), strict=True):
        for points in runs:
            axes.plot(*np.array(points).T, color=color, alpha=0.25, linewidth=1)
        steps = [step for step, _ in runs[0]]
        axes.plot(steps, np.mean([[value for _, value in points] for points in runs], 0), color=color, linewidth=2.2,
                  label=f"{condition} (mean of {len(runs)} seeds)")
    axes.set(xlabel="training episodes", ylabel="exact match on held-out tasks", ylim=(0, 1),
             title="PPO on AgentR1/MultihopWorld-v0 from the shipped tiny policy")
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight")


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
        curves[condition] = [curve(folder) for folder in mine]
        first = [s["eval/exact_match_first"] for s in summaries]
        last = [s["eval/exact_match_last"] for s in summaries]
        areas = [area(points) for points in curves[condition]]
        seconds = [s["train_seconds"] for s in summaries]
        results[condition] = {"exact_match_first": first, "exact_match_last": last, "area": areas,
                              "train_seconds": seconds, "curves": curves[condition]}
        rows.append(f"| {condition} | {spread(first)} | {spread(last)} | {spread(areas)} | {np.mean(seconds):.0f} |")
    table = "\n".join(rows)
    print(table)
    plot(curves, ROOT / "docs" / "images" / "multihop_seeds.png")
    command = (f"python benchmarks/multihop_seeds.py --seeds {args.seeds} --workers {args.workers} "
               f"--threads {args.threads} --eval-every {args.eval_every}")
    if args.flags:
        command += f' --flags "{args.flags}"'
    record_results("multihop_seeds", results, f"{table}\n\nMean ± standard deviation over {args.seeds} seeds.", command,
                   args.force)


if __name__ == "__main__":
    main()
