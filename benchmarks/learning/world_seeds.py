"""GRPO and PPO on CraftWorld (depth 3) and ShopWorld from the shipped tiny policies, over seeds.

    python benchmarks/learning/world_seeds.py                              # 12 runs, two at a time, a core for each
    python benchmarks/learning/world_seeds.py --worlds CraftWorld --learners grpo --seeds 1 --workers 1

Success before and after is that of held-out test tasks, greedy and sampled at temperature 1. What is finished is not
repeated (sweep.py). Writes benchmarks/results/world_seeds.json and .md, and docs/images/world_seeds.png.
"""

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks" / "common"), str(ROOT / "learner")]
from compare import plot, read_curve
from machine import from_1, given_flags, record_results, require_quiet_machine
from sweep import Job, finish, make_job

WORLDS = {"CraftWorld": ["--env-kwargs", '{"depth": 3}'], "ShopWorld": []}
LEARNERS = {"grpo": "GRPO", "ppo": "PPO"}
EPISODES = "5120"


def job(script: str, world: str, name: str, *flags: str) -> Job:
    words = ["python", f"learner/{script}", "--env-id", f"AgentR1/{world}-v0", *WORLDS[world]]
    return make_job([*words, "--exp-name", f"world_seeds_{name}", "--num-threads", "1", *flags])


def training(world: str, learner: str, seed: int, flags: str) -> Job:
    total = ["--total-episodes", EPISODES, "--eval-every", "5", "--save-model"]
    return job(f"{learner}_llm.py", world, learner, "--seed", str(seed), *total, *shlex.split(flags))


def evaluation(world: str, model: str, temperature: int, episodes: int) -> Job:
    flags = ["--model", model, "--split", "test", "--episodes", str(episodes), "--temperature", str(temperature)]
    return job("evaluate_llm.py", world, f"{Path(model).name}_{temperature}", *flags)


def figures(folder: Path) -> dict[str, list[float]]:
    """Success and return of an evaluation, each with its 95 % interval."""
    metrics = json.loads((folder / "evaluation.json").read_text())["metrics"]
    return {name: [metrics[name][part] for part in ("mean", "low", "high")] for name in ("success", "return")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS), help="which worlds")
    parser.add_argument("--learners", nargs="+", choices=LEARNERS, default=list(LEARNERS), help="which learners")
    parser.add_argument("--seeds", type=from_1, default=3, help="number of seeds, from 1 on")
    parser.add_argument("--workers", type=from_1, default=2, help="runs at the same time")
    parser.add_argument("--episodes", type=from_1, default=500, help="test tasks of each evaluation")
    parser.add_argument("--flags", default="", help="further flags of the learners, in quotation marks")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    args = parser.parse_args()
    require_quiet_machine(args.force)
    os.chdir(ROOT)
    runs = [(world, learner, seed) for world in args.worlds for learner in args.learners
            for seed in range(1, args.seeds + 1)]  # fmt: skip
    folders = finish([training(*run, args.flags) for run in runs], args.workers)
    models = [(world, "tiny") for world in args.worlds]
    models += [(world, str(folder)) for (world, *_), folder in zip(runs, folders, strict=True)]
    jobs = [evaluation(*model, temperature, args.episodes) for model in models for temperature in (1, 0)]
    found = iter([figures(folder) for folder in finish(jobs, args.workers)])
    played: dict[tuple[str, str], dict[str, Any]] = {
        model: {"sampled": next(found), "greedy": next(found)} for model in models
    }
    results: list[dict[str, Any]] = []
    lines = ["| world | learner | seed | success, sampled | greedy | return, sampled | training seconds |"]
    lines.append("|---|---|---|---|---|---|---|")

    def row(*names: str, seconds: str, **how: dict[str, list[float]]) -> str:
        shown = [how["sampled"]["success"], how["greedy"]["success"], how["sampled"]["return"]]
        cells = ["{:.3f} [{:.3f}, {:.3f}]".format(*value) for value in shown]
        return "| " + " | ".join([*names, *cells, seconds]) + " |"

    for world in args.worlds:
        lines.append(row(world, "shipped policy", "", seconds="", **played[world, "tiny"]))
        for (other, learner, seed), folder in zip(runs, folders, strict=True):
            if other != world:
                continue
            seconds = json.loads((folder / "summary.json").read_text())["train_seconds"]
            curve = np.column_stack(read_curve(folder, "eval/success", "episodes")).tolist()
            after = played[world, str(folder)]
            results.append({"world": world, "learner": learner, "seed": seed, "train_seconds": seconds, "curve": curve,
                            "before": played[world, "tiny"], "after": after})  # fmt: skip
            lines.append(row(world, LEARNERS[learner], str(seed), seconds=f"{seconds:.0f}", **after))
    table = "\n".join(lines)
    print(table)
    curves = {
        (f"AgentR1/{world}-v0", LEARNERS[learner]): [
            read_curve(folder, "eval/success", "episodes")
            for (*names, _), folder in zip(runs, folders, strict=True)
            if names == [world, learner]
        ]
        for world in args.worlds
        for learner in args.learners
    }
    given = given_flags(parser, args, "worlds", "learners", "seeds", "workers", "episodes", "flags")
    command = f"python benchmarks/learning/world_seeds.py{given}"
    name = record_results("world_seeds", results, table, command, args.force)
    plot(curves, "success on held-out tasks (greedy)", "training episodes", ROOT / f"docs/images/{name}.png")


if __name__ == "__main__":
    main()
