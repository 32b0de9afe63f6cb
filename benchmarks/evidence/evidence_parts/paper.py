"""The paper's tables in small (Agent-R1, arXiv 2511.14460): baselines, imitation, five algorithms, its two masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scores import Claim, cell, domains, facts, interval, intervals

from evidence_parts.commands import CRAFT, EPISODES, World, imitate, play, reinforce
from evidence_parts.page import plot_success
from evidence_parts.runs import Run, made, make, table
from evidence_parts.teachers import PLACES as TEACHERS

FLAGS, PLOT = ["rows", "episodes"], (plot_success, "success", 7)


@dataclass(frozen=True)
class Place(World):
    """Which rows of the tables are made where."""

    rows: tuple[str, ...]
    episodes: int  # of each training


MASKS = {  # table 4: flags beside those of the learner that a row begins with
    "PPO": "",
    "PPO, no advantage mask": "--no-advantage-mask",
    "PPO, no mask": "--no-advantage-mask --no-loss-mask",
    "GRPO": "",
    "GRPO, no loss mask": "--no-loss-mask",  # tools' tokens have advantage 0: they dilute the mean and nothing else
    "GRPO, no mask": "--no-advantage-mask --no-loss-mask",  # there they have their episode's advantage
}
LEARNERS = MASKS | {"RLOO": "", "REINFORCE++": "", "REINFORCE++-baseline": "--baseline"}  # table 3
BASELINES = {"base tool call": "agent", "naive RAG": "naive_rag"}  # modes of evaluate_llm.py, of the shipped policy
IMITATIONS = {f"SFT, {n:,} demonstrations": (n, steps) for n, steps in ((100, 60), (500, 120), (2000, 240))}
ROWS = [*BASELINES, *LEARNERS, *IMITATIONS]
EFFECTS = {  # of what: (with it, without it)
    "advantage mask, PPO": ("PPO", "PPO, no advantage mask"),
    "loss mask, PPO": ("PPO, no advantage mask", "PPO, no mask"),
    "loss mask, GRPO": ("GRPO", "GRPO, no loss mask"),
    "advantage mask without a loss mask, GRPO": ("GRPO, no loss mask", "GRPO, no mask"),
    "both masks, GRPO": ("GRPO", "GRPO, no mask"),
}
HOPS = "AgentR1/MultihopWorld-v0"
PLACES = {
    "MultihopWorld": Place(HOPS, {}, {
        "two and three hops": ("test", {}),
        "four hops": ("more_hops", {}),
    }, tuple(ROWS), 3840),
    "CraftWorld": Place(CRAFT, {}, TEACHERS["CraftWorld"].columns, tuple(MASKS), EPISODES),  # PPO, GRPO: as there
}  # fmt: skip


def train(place: Place, row: str, seed: int, more: str) -> Run:
    """A row's training, from the shipped policy, with this repository's defaults."""
    if row in IMITATIONS:
        count, steps = IMITATIONS[row]
        return imitate(place, row, seed, steps, "--expert-share", 1, "--num-demonstrations", count)
    learner = row.partition(",")[0].removesuffix("-baseline")
    return reinforce(place, row, learner, seed, "tiny", f"{LEARNERS[row]} {more}", place.episodes)


def measure(args: Any, before: dict[str, Any]) -> dict[str, Any]:
    """Success of the rows asked for and of those that stand there, and what each mask adds."""
    results: dict[str, Any] = {}
    for name in args.places:
        place, there = PLACES[name], before.get(name, {}).get("success", {})
        rows = [row for row in place.rows if row in args.rows or row in there]
        if not rows:
            continue
        seeds = range(1, args.seeds + 1)
        trained = {row: [train(place, row, seed, args.flags) for seed in seeds] for row in rows if row not in BASELINES}
        make([run for group in trained.values() for run in group], args)
        models: dict[str, list[Run | str]] = {row: [*trained.get(row, ["tiny"])] for row in rows}
        plays = {(row, column): [play(place, row, seed, split, kwargs, model, args.episodes,
                                      mode=BASELINES.get(row, "agent"))
                                 for seed, model in enumerate(group, 1)]
                 for row, group in models.items() for column, (split, kwargs) in place.columns.items()}  # fmt: skip
        scores = table(plays, args)
        lines = [f"| {name}: success, greedy | " + " | ".join(place.columns) + " |"]
        lines.append("|---" * (len(place.columns) + 1) + "|")
        success = intervals(scores)
        for row, of_row in success.items():
            lines.append(f"| {row} | " + " | ".join(cell(*found) for found in of_row.values()) + " |")
        claims = []
        for what, (one, other) in EFFECTS.items():
            for where, columns in domains([*place.columns]):
                if {one, other} <= scores.keys():
                    found = interval(scores[one], scores[other], columns)
                    claims.append(Claim(f"{what} helps", 0.0, found, args.seeds, where))
        results[name] = facts(success, scores, claims, lines) | made(args)
    return results
