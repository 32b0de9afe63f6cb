"""What imitation reaches, from whom, and what reinforcement learning adds to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scores import Claim, Scores, cell, domains, facts, interval, intervals

from evidence_parts.commands import CRAFT, EPISODES, LEARNERS, World, imitate, play, reinforce
from evidence_parts.page import plot_success
from evidence_parts.runs import Run, Successes, made, make, table

FLAGS, PLOT = ["rows", "episodes"], (plot_success, "success", 11)

STEPS = {100: 60, 500: 120, 2000: 240, 5120: 480}  # demonstrations -> optimizer steps on 32 of them
LONG = 600  # steps of imitation that take the time of GRPO, about: 120 take 48 to 62 s, GRPO 280 s on CraftWorld
ROUNDS, TRIES = 4, 1280  # of imitating the own successes, and episodes of each: as many in all
EPOCHS, FEWEST = 8, 60  # passes over all successes so far, and steps at least
GOAL = 0.135
SAMPLED = "in domain, sampled"  # at temperature 1; all else is greedy


SHOP = "AgentR1/ShopWorld-v0"
PLACES = {
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
USUAL = "SFT, 500 of fallible_50"
SAME_TIME = f"{USUAL}, {LONG} steps"
OWN = [f"SFT, own successes, round {number}" for number in range(1, ROUNDS + 1)]
AFTER = {  # row -> learner, and the row that it begins with
    f"{learner} after {label}": (learner, label)
    for learner, label in (
        ("GRPO", "SFT, 500 of fallible_75"), ("GRPO", USUAL), ("PPO", USUAL), ("GRPO", "SFT, 500 of fallible_25"),
    )
}
RATES = {f"{USUAL}, rate {rate:g}": rate for rate in (1e-3, 3e-3)}  # beside 3e-4
OF_USUAL = ["--teacher", "fallible_50", "--num-demonstrations", 500]
PASSES = {"GRPO, 4 epochs": ("GRPO", 4)}  # of each batch; others make one, imitation of own successes 8
ROWS = [*IMITATIONS, *RATES, SAME_TIME, OWN[-1], *LEARNERS, *PASSES, *AFTER]  # earlier rounds are judged by nobody


def teacher_flags(who: str, count: int, filtered: bool) -> list[object]:
    """Whose demonstrations, and how many."""
    return ["--teacher", who, "--num-demonstrations", count, *["--only-successes"] * filtered]


def build(world: World, label: str, seed: int, more: str) -> Run:
    """The training of a row that is known before any has run."""
    if label in IMITATIONS:
        who, count, filtered = IMITATIONS[label]
        return imitate(world, label, seed, STEPS[count], *teacher_flags(who, count, filtered))
    if label == SAME_TIME:
        return imitate(world, label, seed, LONG, *OF_USUAL)
    if label in RATES:
        return imitate(world, label, seed, STEPS[500], *OF_USUAL, rate=RATES[label])
    if label in PASSES:
        learner, passes = PASSES[label]
        return reinforce(world, label, learner, seed, "tiny", f"--update-epochs {passes} {more}")
    learner, start = AFTER.get(label, (label, None))
    return reinforce(world, label, learner, seed, build(world, start, seed, more) if start else "tiny", more)


def train(world: World, rows: Sequence[str], args: Any) -> dict[str, list[Run]]:
    """The trainings of these rows, made: one for each seed. Rows that they need come with them."""
    numbers = range(1, args.seeds + 1)
    needed = set(rows) | {AFTER[row][1] for row in rows if row in AFTER}
    needed |= {row.removesuffix(", successes") for row in needed}  # what a filtered row cost
    trained = {row: [build(world, row, seed, args.flags) for seed in numbers]
               for row in ROWS if row in needed and row not in OWN}  # fmt: skip
    make([run for group in trained.values() for run in group], args)
    models: list[Run | str] = ["tiny"] * args.seeds
    tried: list[tuple[Run, ...]] = [()] * args.seeds
    for row in OWN[: max((OWN.index(row) + 1 for row in needed & set(OWN)), default=0)]:
        tried = [(*before, play(world, f"{row}, tried", 100 * OWN.index(row) + seed, "train", world.kwargs, model,
                                TRIES, 1, 10_000 * seed + TRIES * OWN.index(row)))
                 for seed, before, model in zip(numbers, tried, models, strict=True)]
        make([runs[-1] for runs in tried], args)
        own = [sum(line["success"].count("1") for line in make(runs, args)) for runs in tried]
        trained[row] = [imitate(world, row, seed, max(FEWEST, EPOCHS * right // 32), "--data", Successes(runs))
                        for seed, right, runs in zip(numbers, own, tried, strict=True)]  # fmt: skip
        make(trained[row], args)
        models = [*trained[row]]
    return trained


def cost(label: str, trained: dict[str, list[Run]], args: Any) -> list[float]:
    """Episodes and turns played, and seconds of training, means over seeds. What is left out was played, too.

    Seconds are the scripts': with their sampling, without what demonstrating takes.
    """
    lines = make(trained[label], args)
    seconds = float(np.mean([line["seconds"] for line in lines]))
    if label in OWN:
        before = cost(OWN[OWN.index(label) - 1], trained, args) if label != OWN[0] else [0.0, 0.0, 0.0]
        tried = make([run.needs[-1] for run in trained[label]], args)
        own = [float(TRIES), float(np.mean([line["turns"] for line in tried]))]
        own.append(seconds + float(np.mean([line["seconds"] for line in tried])))
    elif label in IMITATIONS or label in RATES or label == SAME_TIME:
        whole = make(trained[label.removesuffix(", successes")], args)
        return [IMITATIONS.get(label, IMITATIONS[USUAL])[1], float(np.mean([line["turns"] for line in whole])), seconds]
    else:
        own = [*(float(np.mean([line[name] for line in lines])) for name in ("episodes", "turns")), seconds]
        before = cost(AFTER[label][1], trained, args) if label in AFTER else [0.0, 0.0, 0.0]
    return [one + other for one, other in zip(own, before, strict=True)]


def evaluate(world: World, trained: dict[str, list[Run]], args: Any) -> dict[str, Scores]:
    """Success of every row on every task of every column."""
    models: dict[str, list[Run | str]] = {"shipped policy": ["tiny"]}
    models |= {row: [*trained[row]] for row in ROWS if row in trained}
    columns = [(name, *column, 0) for name, column in world.columns.items()]
    columns.insert(1, (SAMPLED, *columns[0][1:3], 1))
    plays = {
        (label, column): [play(world, label, seed, split, kwargs, model, args.episodes, temperature)
                          for seed, model in enumerate(models[label], 1)]
        for label in models for column, split, kwargs, temperature in columns
    }  # fmt: skip
    return table(plays, args)


def claims(scores: dict[str, Scores], seeds: int) -> list[Claim]:
    """Every learner against the imitation of the same teacher; and against imitation of as many episodes or of as long,
    where the goal is to be better at all, as it is for more demonstrations or passes against fewer."""
    pairs = []
    few, many = (f"SFT, {n:,} of fallible_50" for n in (100, EPISODES))
    for label in dict.fromkeys(label for _, label in AFTER.values()):
        learners = [*LEARNERS, *PASSES, *(row for row, (_, start) in AFTER.items() if start == label)]
        equal = dict.fromkeys((many, f"{many}, successes", SAME_TIME, OWN[-1]) if label == USUAL else (), 0.0)
        others = {label: GOAL, f"{label}, successes": GOAL} | equal
        pairs += [(learner, other, goal) for other, goal in others.items() for learner in learners]
    pairs += [(f"{many}{kind}", f"{few}{kind}", 0.0) for kind in ("", ", successes")]
    pairs += [(row, learner, 0.0) for row, (learner, _) in PASSES.items()]
    found = []
    for one, other, goal in pairs:
        if {one, other} <= scores.keys():
            first, *others = domains([name for name in scores[other] if name != SAMPLED])
            for where, columns in (first, (SAMPLED, [SAMPLED]), *others):
                more = interval(scores[one], scores[other], columns)
                found.append(Claim(f"{one} above {other}", goal, more, seeds, where))
    return found


def measure(args: Any, before: dict[str, Any]) -> dict[str, Any]:
    """The table and the claims of each world: of the rows that are asked for and of those that stand there already."""
    results: dict[str, Any] = {}
    for name in args.places:
        world, there = PLACES[name], before.get(name, {}).get("success", {})
        trained = train(world, [row for row in ROWS if row in args.rows or row in there], args)
        scores = evaluate(world, trained, args)
        found = claims(scores, args.seeds)
        costs = {label: cost(label, trained, args) for label in trained}
        columns = [*next(iter(scores.values()))]
        lines = [f"| {name}: success, greedy if not sampled | {' | '.join(columns)} | episodes | turns | seconds |"]
        lines.append("|---" * (len(columns) + 4) + "|")
        success = intervals(scores)
        for label, row in success.items():
            cells = [cell(*row[column]) for column in columns]
            cells += [f"{number:,.0f}" for number in costs.get(label, (0, 0, 0))]
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
        results[name] = facts(success, scores, found, lines) | made(args) | {"cost": costs}
    return results
