"""The paper's tables in small: baselines, imitation and five algorithms; the masks; process rewards or none.

    python benchmarks/paper_table.py                                         # MultihopWorld, 3 seeds, two at a time
    python benchmarks/paper_table.py --suite wiki --model NAME --data DATA   # HotpotQA, 2WikiMultihopQA, MuSiQue

Everything runs through learner/llm_utils/benchmark.py: what is finished is not repeated, and after Ctrl-C the same
command goes on. Intervals are 95 %, from a bootstrap over seeds and tasks together; effects compare the same tasks.
"""

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from evidence_parts.scores import Scores, cell, interval, per_task, report
from machine import from_1, record_results, require_quiet_machine

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "learner"))
from llm_utils.benchmark import Job, finish, make_job  # noqa: E402
from llm_utils.compare import read_curve  # noqa: E402

ALGORITHMS = {
    "PPO": ["ppo_llm.py"],
    "GRPO": ["grpo_llm.py"],
    "RLOO": ["rloo_llm.py"],
    "REINFORCE++": ["reinforce_pp_llm.py"],
    "REINFORCE++-baseline": ["reinforce_pp_llm.py", "--baseline"],
}
ABLATIONS = {  # table 4 of the paper, and no process rewards
    "PPO, no advantage mask": ["ppo_llm.py", "--no-advantage-mask"],
    "PPO, no mask": ["ppo_llm.py", "--no-advantage-mask", "--no-loss-mask"],
    "GRPO, no loss mask": ["grpo_llm.py", "--no-loss-mask"],
    "PPO, outcome only": ["ppo_llm.py"],
    "GRPO, outcome only": ["grpo_llm.py"],
}
EFFECTS = {  # of what: (with it, without it)
    "advantage mask, PPO": ("PPO", "PPO, no advantage mask"),
    "loss mask, PPO": ("PPO, no advantage mask", "PPO, no mask"),
    "loss mask, GRPO": ("GRPO", "GRPO, no loss mask"),
    "process rewards, PPO": ("PPO", "PPO, outcome only"),
    "process rewards, GRPO": ("GRPO", "GRPO, outcome only"),
}
BASELINES = {"base tool call": "agent", "naive RAG": "naive_rag"}  # modes of evaluate_llm.py, of the first policy


@dataclass
class Suite:
    """What is trained on and what it is judged by."""

    env_id: str
    columns: dict[str, tuple[str, str, int | None]]  # name -> environment, split, and the hops of its tasks (None: any)
    env_kwargs: dict[str, dict[str, Any]]  # of each environment
    flags: list[str]  # of every learner
    evaluate: list[str]  # of every evaluation
    imitation: dict[str, tuple[int, int]] = field(default_factory=dict)  # demonstrations, steps


WORLD = "AgentR1/MultihopWorld-v0"
MULTIHOP = Suite(
    WORLD,
    {"2 hops": (WORLD, "test", 2), "3 hops": (WORLD, "test", 3), "4 hops (out of domain)": (WORLD, "more_hops", 4)},
    {WORLD: {}},
    ["--num-threads", "1", "--total-episodes", "3840", "--eval-episodes", "0"],
    ["--num-threads", "1", "--episodes", "500"],
    {f"SFT, {n:,} demonstrations": (n, steps) for n, steps in ((100, 60), (500, 120), (2000, 240))},
)  # fmt: skip


def wiki(data: Path, flags: list[str]) -> Suite:
    """The real data sets: trained on HotpotQA, so 2WikiMultihopQA and MuSiQue are out of domain."""
    names = {"HotpotQA": "hotpotqa", "2WikiMultihopQA": "2wikimultihopqa", "MuSiQue": "musique"}
    ids = {name: f"AgentR1/{name}-v0" for name in names}
    kwargs = {ids[name]: {"data_dir": str((data / folder).resolve())} for name, folder in names.items()}
    return Suite(ids["HotpotQA"], {name: (id, "dev", None) for name, id in ids.items()}, kwargs,
                 ["--eval-episodes", "0", "--learning-rate", "1e-6", *flags], [])  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- runs


def job(label: str, script: str, seed: int, *flags: str) -> Job:
    name = "paper_" + re.sub(r"\W+", "_", label.lower())
    return make_job(["python", f"learner/{script}", "--exp-name", name, "--seed", str(seed), *map(str, flags)])


def environment(suite: Suite, env_id: str, **more: Any) -> list[str]:
    return ["--env-id", env_id, "--env-kwargs", json.dumps(suite.env_kwargs[env_id] | more)]


def learner_flags(suite: Suite, model: str, label: str) -> tuple[str, list[str]]:
    """The learner that makes a row of the table, and its flags."""
    script, *flags = (ALGORITHMS | ABLATIONS)[label]
    more = {"process_reward": False} if "outcome only" in label else {}
    return script, [*environment(suite, suite.env_id, **more), "--model", model, "--save-model", *suite.flags, *flags]


def train(suite: Suite, model: str, seeds: int, workers: int, only: Sequence[str] = ()) -> dict[str, list[Path]]:
    """The run folders of every trained row of the table (or of those in `only`), a run for each seed."""
    jobs: dict[str, list[Job]] = {}
    for label in ALGORITHMS | ABLATIONS:
        if only and label not in only:
            continue
        script, flags = learner_flags(suite, model, label)
        jobs[label] = [job(label, script, seed, *flags) for seed in range(1, seeds + 1)]
    for label, (count, steps) in suite.imitation.items():
        if only and label not in only:
            continue
        jobs[label] = [imitation(suite, model, label, count, steps, seed) for seed in range(1, seeds + 1)]
    folders = iter(finish([one for group in jobs.values() for one in group], workers))
    done = {label: [next(folders) for _ in group] for label, group in jobs.items()}
    if suite.imitation and not only:
        label, same = "SFT, 500 demonstrations, the time of PPO", "SFT, 500 demonstrations"
        count, steps = suite.imitation[same]
        a_step = np.mean([report(folder)["train_seconds"] for folder in done[same]]) / steps
        steps = round(np.mean([report(folder)["train_seconds"] for folder in done["PPO"]]) / a_step)
        more_jobs = [imitation(suite, model, label, count, steps, seed) for seed in range(1, seeds + 1)]
        done[label] = finish(more_jobs, workers)
    return done


def imitation(suite: Suite, model: str, label: str, count: int, steps: int, seed: int) -> Job:
    flags = [*environment(suite, suite.env_id), "--model", model, "--expert-share", "1", "--num-workers", "0"]
    flags += ["--num-demonstrations", str(count), "--num-steps", str(steps), "--batch-size", "32", "--num-threads", "1"]
    flags += ["--learning-rate", "3e-4", "--warmup-steps", "10", "--eval-demonstrations", "0"]
    return job(label, "sft_llm.py", seed, *flags)


def evaluate(
    suite: Suite, model: str, trained: dict[str, list[Path]], workers: int, only: Sequence[str] = ()
) -> dict[str, Scores]:
    """Exact match of every row of the table, on every task of every column."""
    places = list(dict.fromkeys((env_id, split) for env_id, split, _ in suite.columns.values()))
    models = {label: [(model, mode)] for label, mode in BASELINES.items() if not only or label in only}
    models |= {label: [(str(folder), "agent") for folder in folders] for label, folders in trained.items()}
    jobs = {}
    for label, policies in models.items():
        for seed, (policy, mode) in enumerate(policies, 1):
            for env_id, split in places:
                flags = [*environment(suite, env_id), "--split", split, "--model", policy, "--mode", mode]
                jobs[label, seed, env_id, split] = job(f"{label} {split}", "evaluate_llm.py", seed, *flags,
                                                       *suite.evaluate)  # fmt: skip
    folders = finish(list(jobs.values()), workers)
    em = {key: per_task(folder, "em") for key, folder in zip(jobs, folders, strict=True)}
    common: dict[tuple[str, str], list[int]] = {}  # tasks that no fault ended, whoever played them
    for place in places:
        rows = [tasks for key, tasks in em.items() if key[2:] == place]
        common[place] = sorted(set(rows[0]).intersection(*rows))
        if left := max(map(len, rows)) - len(common[place]):
            print(f"{' '.join(place)}: {left} tasks are left out, which a fault ended for one of the rows")
    scores: dict[str, Scores] = {}
    for label, policies in models.items():
        scores[label] = {}
        for column, (env_id, split, hops) in suite.columns.items():
            rows = [em[label, seed, env_id, split] for seed in range(1, len(policies) + 1)]
            tasks = [task for task in common[env_id, split] if hops is None or number_of_hops(split, task) == hops]
            scores[label][column] = np.array([[row[task] for task in tasks] for row in rows])
    return scores


def number_of_hops(split: str, index: int) -> int:
    from agent_r1.tasks.multihop_world import generate_task

    return generate_task(0, split, index).metadata["hops"]


def tables(suite: Suite, scores: dict[str, Scores], trained: dict[str, list[Path]]) -> tuple[str, dict[str, Any]]:
    """Everything as markdown and as numbers."""
    columns, numbers = list(suite.columns), {"exact_match": {}, "effects": {}, "deviation": {}}
    lines = ["| | " + " | ".join(columns) + " | average |", "|---" * (len(columns) + 2) + "|"]
    for label in scores:
        values = [interval(scores[label], None, chosen) for chosen in (*([c] for c in columns), columns)]
        numbers["exact_match"][label] = dict(zip([*columns, "average"], values, strict=True))
        numbers["exact_match"][label]["seeds"] = {c: table.mean(1).tolist() for c, table in scores[label].items()}
        lines.append(f"| {label} | " + " | ".join(cell(*value) for value in values) + " |")
    lines += ["", "| effect of | " + " | ".join(columns) + " | average |", "|---" * (len(columns) + 2) + "|"]
    for label, (with_it, without) in EFFECTS.items():
        if with_it not in scores or without not in scores:
            continue
        pair = scores[with_it], scores[without]
        values = [interval(*pair, chosen) for chosen in (*([c] for c in columns), columns)]
        numbers["effects"][label] = dict(zip([*columns, "average"], values, strict=True))
        lines.append(f"| {label} | " + " | ".join(cell(*value, sign="+") for value in values) + " |")
    lines += ["", "| standard deviation of the training EM within a run, second half | of each seed |", "|---|---|"]
    for label in ("PPO", "PPO, outcome only", "GRPO", "GRPO, outcome only"):
        if label not in trained:
            continue
        curves = [read_curve(folder, "charts/exact_match")[1] for folder in trained[label]]
        numbers["deviation"][label] = [float(np.std(c[len(c) // 2 :], ddof=1)) for c in curves]
        lines.append(f"| {label} | " + ", ".join(f"{value:.3f}" for value in numbers["deviation"][label]) + " |")
    return "\n".join(lines), numbers


def plot(scores: dict[str, Scores], trained: dict[str, list[Path]], path: Path) -> None:
    """Left the exact match of every row, a point for each seed; right the training curves of the algorithms."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5))
    columns = list(next(iter(scores.values())))
    for number, column in enumerate(columns):
        for place, label in enumerate(scores):
            value, low, high = interval(scores[label], None, [column])
            y = place + 0.2 * (number - 1)
            left.plot([low, high], [y, y], color=f"C{number}", linewidth=1)
            left.plot(scores[label][column].mean(1), [y] * len(scores[label][column]), ".", color=f"C{number}",
                      label=column if place == 0 else None)  # fmt: skip
    left.set(yticks=range(len(scores)), yticklabels=scores, xlabel="exact match, held-out tasks", xlim=(-0.02, 1.02))
    left.invert_yaxis()
    left.legend(frameon=False)
    for number, label in enumerate(ALGORITHMS):
        if label not in trained:
            continue
        curves = [read_curve(folder, "charts/exact_match", "episodes") for folder in trained[label]]
        for curve in curves:
            right.plot(*curve, color=f"C{number}", alpha=0.3, linewidth=0.8)
        mean = np.mean([values for _, values in curves], 0)
        right.plot(curves[0][0], mean, color=f"C{number}", linewidth=2, label=label)
    right.set(xlabel="training episodes", ylabel="exact match, sampled, training tasks", ylim=(0, 1))
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=["multihop", "wiki"], default="multihop")
    parser.add_argument("--seeds", type=from_1, default=3, help="runs of each row, seeds 1, 2, ...")
    parser.add_argument("--workers", type=from_1, default=2, help="runs at the same time")
    parser.add_argument("--model", help="with --suite wiki: the policy to begin with, a Hugging Face name or a folder")
    parser.add_argument("--data", type=Path, help="with --suite wiki: holds hotpotqa/, 2wikimultihopqa/, musique/")
    parser.add_argument("--flags", default="", help="further flags of all learners, in quotation marks")
    rows = [*BASELINES, *ALGORITHMS, *ABLATIONS, *MULTIHOP.imitation]
    parser.add_argument("--rows", nargs="+", choices=rows, default=[], help="only these rows of the table")
    parser.add_argument("--episodes", type=from_1, help="tasks of each evaluation (default: 500, wiki: 1000)")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    args = parser.parse_args()
    if args.suite == "wiki" and not (args.model and args.data):
        parser.error("--suite wiki needs --model and --data")
    require_quiet_machine(args.force)
    os.chdir(ROOT)  # learners run there
    name = "paper_table" if args.suite == "multihop" else f"paper_table_{args.suite}"
    if args.suite == "wiki":
        suite, model = wiki(args.data, shlex.split(args.flags)), args.model
    else:
        suite, model = MULTIHOP, "tiny"
        suite.flags += shlex.split(args.flags)
    if args.episodes:
        suite.evaluate += ["--episodes", str(args.episodes)]
    trained = train(suite, model, args.seeds, args.workers, args.rows)
    scores = evaluate(suite, model, trained, args.workers, args.rows)
    table, numbers = tables(suite, scores, trained)
    print(table)
    command = f"python benchmarks/paper_table.py --suite {args.suite} --seeds {args.seeds} --workers {args.workers}"
    if args.suite == "wiki":
        command += " --model NAME --data DATA"
    if args.rows:
        command += " --rows " + " ".join(map(shlex.quote, args.rows))
    if args.episodes:
        command += f" --episodes {args.episodes}"
    command += f' --flags "{args.flags}"' if args.flags else ""
    name = record_results(name, numbers, table, command, args.force)
    plot(scores, trained, ROOT / "docs" / "images" / f"{name}.png")


if __name__ == "__main__":
    main()
