"""Part 1: what imitation reaches, from whom, and what reinforcement learning adds to it."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evidence_parts.scores import Claim, Scores, cell, claims_table, environment, interval, job, report, table_of
from llm_utils.benchmark import Job, finish
from llm_utils.compare import read_curve

STEPS = {100: 60, 500: 120, 2000: 240, 5120: 480}  # demonstrations -> optimizer steps on 32 of them
EPISODES = 5120  # of reinforcement learning
ROUNDS, TRIES, EPOCHS = 3, 1000, 8  # of imitating the own successes; episodes in each, passes over all successes so far
GOAL = 0.135
LEARNERS = {"GRPO": "grpo_llm.py", "PPO": "ppo_llm.py", "RLOO": "rloo_llm.py", "REINFORCE++": "reinforce_pp_llm.py"}


@dataclass(frozen=True)
class World:
    """Where it is shown: what is trained on, and what it is judged by."""

    env_id: str
    kwargs: dict[str, Any]
    columns: dict[str, tuple[str, dict[str, Any]]]  # name -> split, arguments of the environment


CRAFT, SHOP = "AgentR1/CraftWorld-v0", "AgentR1/ShopWorld-v0"
WORLDS = {
    "CraftWorld": World(CRAFT, {}, {  # depths 1 to 3, of which the teachers' shares hold
        "in domain": ("test", {}),
        "deeper": ("depth_4", {}),
        "other wording": ("other_phrasings", {}),
    }),
    "ShopWorld": World(SHOP, {}, {
        "in domain": ("test", {}),
        "more constraints": ("more_constraints", {}),
        "other wording": ("other_phrasings", {}),
    }),
}  # fmt: skip

# Who is imitated in how many episodes; "successes": what went wrong is left out.
IMITATIONS: dict[str, tuple[str, int, bool]] = {
    f"SFT, {n:,} of {who}{', successes' * filtered}": (who, n, filtered)
    for who, counts, filters in (
        ("expert", (100, 500, 2000), (False,)),
        ("fallible_75", (500,), (False, True)),
        ("fallible_50", (100, 500, 2000, 5120), (False, True)),
        ("fallible_25", (500,), (False, True)),
    )
    for n in counts
    for filtered in filters
}
SAME = "SFT, 500 of fallible_50"
SAME_TIME = f"{SAME}, the time of GRPO"
OWN = [f"SFT, own successes, round {number}" for number in range(1, ROUNDS + 1)]
AFTER = {  # row -> learner, and the row that it begins with
    f"{learner} after {label}": (learner, label)
    for learner, label in (
        ("GRPO", "SFT, 500 of fallible_75"), ("GRPO", SAME), ("PPO", SAME), ("GRPO", "SFT, 500 of fallible_25"),
    )
}
RATES = {f"{SAME}, rate {rate:g}": rate for rate in (1e-3, 3e-3)}  # beside 3e-4
ROWS = [*IMITATIONS, *RATES, SAME_TIME, *OWN, *LEARNERS, *AFTER]


def imitate(world: World, label: str, seed: int, steps: int, *flags: object, rate: float = 3e-4) -> Job:
    """Supervised training of the shipped policy, on other tasks for each seed."""
    more = ["--model", "tiny", "--num-steps", steps, "--batch-size", 32, "--warmup-steps", 10]
    more += ["--learning-rate", rate, "--eval-every", 0, *flags]
    if "--data" not in flags:
        more += ["--eval-demonstrations", 0, "--num-workers", 0, "--first-demonstration", 10_000 * seed]
    return job(label, "sft_llm.py", seed, *environment(world.env_id, world.kwargs), *more)


def teacher_flags(who: str, count: int, filtered: bool) -> list[object]:
    """Whose demonstrations, and how many."""
    return ["--teacher", who, "--num-demonstrations", count, *["--only-successes"] * filtered]


def reinforce(world: World, label: str, learner: str, seed: int, model: str, more: str) -> Job:
    """Reinforcement learning from a policy."""
    flags = ["--model", model, "--total-episodes", EPISODES, "--eval-episodes", 0, "--save-model"]
    flags += ["--learning-rate", 3e-4, *["--critic-learning-rate", 1e-3] * (learner == "PPO"), *shlex.split(more)]
    return job(label, LEARNERS[learner], seed, *environment(world.env_id, world.kwargs), *flags)


def train(world: World, args: Any) -> dict[str, list[Path]]:
    """The run folders of the rows of the table and of those that they begin with, a run for each seed."""
    numbers, workers = range(1, args.seeds + 1), args.workers
    needed = set(args.rows) | {AFTER[row][1] for row in args.rows if row in AFTER}
    needed |= {SAME, "GRPO"} if SAME_TIME in needed else set()
    needed |= {row.removesuffix(", successes") for row in needed}  # what a filtered row cost
    jobs = {
        label: [imitate(world, label, seed, STEPS[n], *teacher_flags(who, n, filtered)) for seed in numbers]
        for label, (who, n, filtered) in IMITATIONS.items() if label in needed
    }  # fmt: skip
    of_same = teacher_flags("fallible_50", 500, False)
    jobs |= {row: [imitate(world, row, seed, STEPS[500], *of_same, rate=rate) for seed in numbers]
             for row, rate in RATES.items() if row in needed}  # fmt: skip
    jobs |= {name: [reinforce(world, name, name, seed, "tiny", args.flags) for seed in numbers]
             for name in LEARNERS if name in needed}  # fmt: skip
    done = run(jobs, workers)

    jobs = {
        row: [reinforce(world, row, learner, seed, str(folder / "model"), args.flags)
              for seed, folder in zip(numbers, done[label], strict=True)]
        for row, (learner, label) in AFTER.items() if row in needed
    }  # fmt: skip
    if SAME_TIME in needed:
        a_step = np.mean([report(folder)["train_seconds"] for folder in done[SAME]]) / STEPS[500]
        steps = round(float(np.mean([report(folder)["train_seconds"] for folder in done["GRPO"]]) / a_step))
        jobs[SAME_TIME] = [imitate(world, SAME_TIME, seed, steps, *of_same) for seed in numbers]
    done |= run(jobs, workers)

    models, kept = ["tiny"] * args.seeds, [[] for _ in numbers]
    for number, label in enumerate(OWN if needed & set(OWN) else (), 1):
        tried = finish([play(world, f"{label}, tried", 100 * number + seed, "train", world.kwargs, model, TRIES, 1)
                        for seed, model in zip(numbers, models, strict=True)], workers)  # fmt: skip
        for own, folder in zip(kept, tried, strict=True):
            own += successes(folder)
        files = [write_rows(folder / "successes.jsonl", own) for folder, own in zip(tried, kept, strict=True)]
        steps = [max(1, EPOCHS * len(own) // 32) for own in kept]
        done |= run({label: [imitate(world, label, seed, n, "--data", file)
                             for seed, n, file in zip(numbers, steps, files, strict=True)]}, workers)  # fmt: skip
        models = [str(folder / "model") for folder in done[label]]
    return done


def run(jobs: dict[str, list[Job]], workers: int) -> dict[str, list[Path]]:
    """Finish all jobs; their folders by label."""
    folders = iter(finish([one for group in jobs.values() for one in group], workers))
    return {label: [next(folders) for _ in group] for label, group in jobs.items()}


def play(
    world: World, label: str, seed: int, split: str, kwargs: dict[str, Any], model: str, episodes: int, temperature: int
) -> Job:
    """An evaluation."""
    flags = [*environment(world.env_id, kwargs), "--model", model, "--split", split, "--episodes", episodes]
    return job(f"{label} {split}", "evaluate_llm.py", seed, *flags, "--temperature", temperature)


def successes(folder: Path) -> list[str]:
    """The rows of an evaluation that ended in success."""
    lines = (folder / "trajectories.jsonl").read_text().splitlines()
    return [line for line in lines if json.loads(line)["stats"]["success"]]


def write_rows(path: Path, rows: list[str]) -> Path:
    """A file to imitate. SystemExit without a row: the first policy never succeeded."""
    if not rows:
        raise SystemExit(f"{path.parent}: no episode succeeded, so there is nothing to imitate")
    path.write_text("\n".join(rows) + "\n")
    return path


def evaluate(world: World, trained: dict[str, list[Path]], args: Any) -> dict[str, Scores]:
    """Greedy success of every row on every task of every column."""
    models = {"shipped policy": ["tiny"]}
    models |= {row: [str(folder / "model") for folder in trained[row]] for row in ROWS if row in args.rows}
    jobs = {
        (label, column): [play(world, label, seed, split, kwargs, model, args.episodes, 0)
                          for seed, model in enumerate(models[label], 1)]
        for label in models for column, (split, kwargs) in world.columns.items()
    }  # fmt: skip
    folders = iter(finish([one for group in jobs.values() for one in group], args.workers))
    scores: dict[str, Scores] = {label: {} for label in models}
    for (label, column), group in jobs.items():
        scores[label][column] = table_of([next(folders) for _ in group])
    return scores


def cost(label: str, trained: dict[str, list[Path]]) -> tuple[float, float, float]:
    """Episodes and turns played, and seconds of training, means over seeds. What is left out was played, too.

    Seconds are the learner's: with its sampling, without what demonstrating takes.
    """
    if label in OWN:
        rounds = [trained[row] for row in OWN[: OWN.index(label) + 1]]
        seconds = sum(np.mean([report(folder)["train_seconds"] for folder in folders]) for folders in rounds)
        return TRIES * len(rounds), float("nan"), float(seconds)
    seconds = float(np.mean([report(folder)["train_seconds"] for folder in trained[label]]))
    whole = trained[label.removesuffix(", successes")]
    if label in IMITATIONS or label in RATES or label == SAME_TIME:
        episodes = IMITATIONS.get(label, IMITATIONS[SAME])[1]
        return episodes, float(np.mean([report(folder)["turns"] for folder in whole])), seconds
    curves = [read_curve(folder, "charts/episodes") for folder in whole]
    own = np.mean([[values[-1], steps[-1]] for steps, values in curves], 0)
    before = cost(AFTER[label][1], trained) if label in AFTER else (0.0, 0.0, 0.0)
    return float(own[0]) + before[0], float(own[1]) + before[1], seconds + before[2]


def claims(name: str, scores: dict[str, Scores], seeds: int) -> list[Claim]:
    """Reinforcement learning against the imitation of the same teacher, also in as many episodes and as long."""
    found = []
    for label in dict.fromkeys(label for _, label in AFTER.values()):
        learners = [*LEARNERS, *(row for row, (_, start) in AFTER.items() if start == label)]
        many = f"SFT, {EPISODES:,} of fallible_50"
        equal = (many, f"{many}, successes", SAME_TIME, OWN[-1])
        for other in (label, f"{label}, successes", *(equal if label == SAME else ())):
            for learner in learners if other in scores else ():
                if learner in scores:
                    inside, *outside = scores[other]
                    for where, columns in (("in domain", [inside]), ("out of domain", outside)):
                        text = f"{name}, {where}: {learner} above {other}"
                        found.append(Claim(text, GOAL, interval(scores[learner], scores[other], columns), seeds))
    return found


def measure(args: Any) -> dict[str, Any]:
    """The table and the claims of each world."""
    results: dict[str, Any] = {}
    for name in args.worlds:
        world = WORLDS[name]
        trained = train(world, args)
        scores = evaluate(world, trained, args)
        found = claims(name, scores, args.seeds)
        costs = {label: cost(label, trained) for label in scores if label in trained}
        lines = [f"| {name}: success, greedy | " + " | ".join(world.columns) + " | episodes | turns | seconds |"]
        lines.append("|---" * (len(world.columns) + 4) + "|")
        for label, row in scores.items():
            cells = [cell(*interval(row, None, [column])) for column in world.columns]
            cells += [f"{number:,.0f}".replace("nan", "") for number in costs.get(label, (0, 0, 0))]
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
        results[name] = {
            "success": {label: {c: interval(row, None, [c]) for c in row} for label, row in scores.items()},
            "seeds": {label: {c: t.mean(1).tolist() for c, t in row.items()} for label, row in scores.items()},
            "cost": {label: [None if np.isnan(number) else number for number in of] for label, of in costs.items()},
            "claims": [claim.record() for claim in found],
            "table": "\n\n".join(["\n".join(lines), claims_table(found)]),
        }
    return results
