"""Agent-R1's two masks (arXiv 2511.14460, table 4) where a task takes some twelve turns."""

from __future__ import annotations

import shlex
from typing import Any

from evidence_parts.runs import Run, make, table
from evidence_parts.scores import Claim, cell, claims_table, environment, interval
from evidence_parts.teachers import CRAFT, EPISODES, World, play

WORLD = World(CRAFT, {"depth": 4}, {"in domain": ("test", {"depth": 4}), "deeper": ("depth_5", {}),
                                    "other wording": ("other_phrasings", {})})  # fmt: skip
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


def train(row: str, seed: int, more: str) -> Run:
    """A learner with or without a mask, from the shipped policy."""
    script, *flags = ROWS[row]
    words = [*environment(WORLD.env_id, WORLD.kwargs), "--total-episodes", EPISODES, "--eval-episodes", 0]
    return Run(f"masks, {row}", script, seed, (*words, "--save-model", *flags, *shlex.split(more)))


def measure(args: Any, before: dict[str, Any]) -> dict[str, Any]:
    """Success of each row, and what each mask adds."""
    numbers = range(1, args.seeds + 1)
    trained = {row: [train(row, seed, args.flags) for seed in numbers] for row in ROWS}
    plays = {(row, column): [play(WORLD, f"masks, {row}", seed, split, kwargs, run, args.episodes)
                             for seed, run in zip(numbers, trained[row], strict=True)]
             for row in ROWS for column, (split, kwargs) in WORLD.columns.items()}  # fmt: skip
    make([run for group in trained.values() for run in group], args)
    scores = table(plays, args)
    lines = ["| CraftWorld, depth 4: success, greedy | " + " | ".join(WORLD.columns) + " |"]
    lines.append("|---" * (len(WORLD.columns) + 1) + "|")
    for row, found in scores.items():
        lines.append(f"| {row} | " + " | ".join(cell(*interval(found, None, [c])) for c in found) + " |")
    claims = [Claim(f"{mask} helps", 0.0, interval(scores[one], scores[other], ["in domain"]), args.seeds)
              for mask, (one, other) in EFFECTS.items()]  # fmt: skip
    return {"CraftWorld": {
        "success": {row: {c: interval(found, None, [c]) for c in found} for row, found in scores.items()},
        "claims": [claim.record() for claim in claims],
        "table": "\n\n".join(["\n".join(lines), claims_table(claims)]),
    }}  # fmt: skip
