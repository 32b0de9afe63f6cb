"""Part 5: Agent-R1's two masks (arXiv 2511.14460, table 4) where episodes are long."""

from __future__ import annotations

import shlex
from typing import Any

from evidence_parts.scores import Claim, Scores, cell, claims_table, environment, interval, job, table_of
from evidence_parts.teachers import EPISODES, WORLDS, World, play
from llm_utils.benchmark import Job, finish

ROWS: dict[str, list[str]] = {
    "PPO": ["ppo_llm.py"],
    "PPO, no advantage mask": ["ppo_llm.py", "--no-advantage-mask"],
    "PPO, no mask": ["ppo_llm.py", "--no-advantage-mask", "--no-loss-mask"],
    "GRPO": ["grpo_llm.py"],
    "GRPO, no loss mask": ["grpo_llm.py", "--no-loss-mask"],
}
EFFECTS = {  # of what: (with it, without it)
    "advantage mask, PPO": ("PPO", "PPO, no advantage mask"),
    "loss mask, PPO": ("PPO, no advantage mask", "PPO, no mask"),
    "loss mask, GRPO": ("GRPO", "GRPO, no loss mask"),
}


def train(world: World, row: str, seed: int, more: str) -> Job:
    """A learner with or without a mask, from the shipped policy."""
    script, *flags = ROWS[row]
    words = [*environment(world.env_id, world.kwargs), "--total-episodes", EPISODES, "--eval-episodes", 0]
    return job(f"masks {row}", script, seed, *words, "--save-model", *flags, *shlex.split(more))


def measure(args: Any) -> dict[str, Any]:
    """Success of each row, and what each mask adds."""
    results: dict[str, Any] = {}
    for name in args.worlds:
        world, numbers = WORLDS[name], range(1, args.seeds + 1)
        runs = [(row, seed) for row in ROWS for seed in numbers]
        folders = finish([train(world, row, seed, args.flags) for row, seed in runs], args.workers)
        scores: dict[str, Scores] = {row: {} for row in ROWS}
        for column, (split, kwargs) in world.columns.items():
            plays = [play(world, f"masks {row}", seed, split, kwargs, str(folder / "model"), args.episodes, 0)
                     for (row, seed), folder in zip(runs, folders, strict=True)]  # fmt: skip
            played = finish(plays, args.workers)
            for row in ROWS:
                own = [folder for (other, _), folder in zip(runs, played, strict=True) if other == row]
                scores[row][column] = table_of(own)
        lines = [f"| {name}: success, greedy | " + " | ".join(world.columns) + " |"]
        lines.append("|---" * (len(world.columns) + 1) + "|")
        for row, found in scores.items():
            lines.append(f"| {row} | " + " | ".join(cell(*interval(found, None, [c])) for c in found) + " |")
        inside = next(iter(world.columns))
        claims = [
            Claim(f"{name}: {mask} helps", 0.0, interval(scores[one], scores[other], [inside]), args.seeds)
            for mask, (one, other) in EFFECTS.items()
        ]
        results[name] = {
            "success": {row: {c: interval(found, None, [c]) for c in found} for row, found in scores.items()},
            "claims": [claim.record() for claim in claims],
            "table": "\n\n".join(["\n".join(lines), claims_table(claims)]),
        }
    return results
