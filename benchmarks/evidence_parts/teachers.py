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
ROUNDS, TRIES = 3, 1000  # of imitating the own successes, episodes in each
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
    "CraftWorld": World(CRAFT, {"depth": 3}, {
        "in domain": ("test", {"depth": 3}),
        "deeper": ("depth_4", {}),
        "other wording": ("other_phrasings", {"depth": 3}),
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
ROWS = [*IMITATIONS, SAME_TIME, *OWN, *LEARNERS, *AFTER]


def imitate(world: World, label: str, seed: int, steps: int, *flags: object) -> Job:
    """Supervised training of the shipped policy."""
    more = ["--model", "tiny", "--num-steps", steps, "--batch-size", 32, "--warmup-steps", 10]
    more += ["--learning-rate", 3e-4, "--eval-every", 0, *flags]
    if "--data" not in flags:
        more += ["--eval-demonstrations", 0, "--num-workers", 0]
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
    jobs = {
        label: [imitate(world, label, seed, STEPS[n], *teacher_flags(who, n, filtered)) for seed in numbers]
        for label, (who, n, filtered) in IMITATIONS.items() if label in needed
    }  # fmt: skip
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
        flags = teacher_flags("fallible_50", 500, False)
        jobs[SAME_TIME] = [imitate(world, SAME_TIME, seed, steps, *flags) for seed in numbers]
    done |= run(jobs, workers)

    models = ["tiny"] * args.seeds
    for label in OWN if needed & set(OWN) else ():
        tried = finish([play(world, f"{label}, tried", seed, "train", world.kwargs, model, TRIES, 1)
                        for seed, model in zip(numbers, models, strict=True)], workers)  # fmt: skip
        files = [successes(folder) for folder in tried]
        done |= run({label: [imitate(world, label, seed, STEPS[500], "--data", file)
                             for seed, file in zip(numbers, files, strict=True)]}, workers)  # fmt: skip
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


def successes(folder: Path) -> Path:
    """A file with the rows of an evaluation that ended in success."""
    lines = (folder / "trajectories.jsonl").read_text().splitlines()
    path = folder / "successes.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["stats"]["success"]))
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


def cost(label: str, trained: dict[str, list[Path]]) -> tuple[float, float]:
    """Episodes played and seconds of training, means over seeds. Demonstrations are played, also those left out."""
    seconds = np.mean([report(folder)["train_seconds"] for folder in trained[label]])
    if label in OWN:
        rounds = [trained[row] for row in OWN[: OWN.index(label) + 1]]
        seconds = sum(np.mean([report(folder)["train_seconds"] for folder in folders]) for folders in rounds)
        return TRIES * len(rounds), float(seconds)
    if label in IMITATIONS or label == SAME_TIME:
        return IMITATIONS.get(label, IMITATIONS[SAME])[1], float(seconds)
    folders, before = trained[label], cost(AFTER[label][1], trained) if label in AFTER else (0.0, 0.0)
    played = np.mean([read_curve(folder, "charts/episodes")[1][-1] for folder in folders])
    return float(played) + before[0], float(seconds) + before[1]


def claims(name: str, scores: dict[str, Scores]) -> list[Claim]:
    """Reinforcement learning against the imitation of the same teacher."""
    found = []
    for label in dict.fromkeys(label for _, label in AFTER.values()):
        learners = [*LEARNERS, *(row for row, (_, start) in AFTER.items() if start == label)]
        for other in (label, f"{label}, successes"):
            for learner in learners if other in scores else ():
                if learner in scores:
                    inside, *outside = scores[other]
                    for where, columns in (("in domain", [inside]), ("out of domain", outside)):
                        text = f"{name}, {where}: {learner} above {other}"
                        found.append(Claim(text, GOAL, interval(scores[learner], scores[other], columns)))
    return found


def measure(args: Any) -> tuple[dict[str, Any], str]:
    """All worlds: results and tables."""
    results: dict[str, Any] = {}
    tables = []
    for name in args.worlds:
        world = WORLDS[name]
        trained = train(world, args)
        scores = evaluate(world, trained, args)
        found = claims(name, scores)
        lines = [f"| {name}: success, greedy | " + " | ".join(world.columns) + " | episodes played | seconds |"]
        lines.append("|---" * (len(world.columns) + 3) + "|")
        for label, row in scores.items():
            played, seconds = cost(label, trained) if label in trained else (0.0, 0.0)
            cells = [cell(*interval(row, None, [column])) for column in world.columns]
            lines.append(f"| {label} | " + " | ".join(cells) + f" | {played:,.0f} | {seconds:,.0f} |")
        tables += ["\n".join(lines), claims_table(found)]
        results[name] = {
            "success": {label: {c: interval(row, None, [c]) for c in row} for label, row in scores.items()},
            "seeds": {label: {c: t.mean(1).tolist() for c, t in row.items()} for label, row in scores.items()},
            "cost": {label: cost(label, trained) for label in trained},
            "claims": [{"text": c.text, "goal": c.goal, "found": c.found, "verdict": c.verdict} for c in found],
        }
    return results, "\n\n".join(tables)
