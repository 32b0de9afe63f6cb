"""Compare the ratio's denominators when older weights sampled, exactly, on small games.

    python benchmarks/learning/stale_ratios.py    # a table, seconds

The games are trees of estimators.py. The policy that sampled has the logits of the trained one plus a normal random
number. A row gives the expected gradient of the first optimizer step, by the learners' own loss and default flags:
`sampler` clips the ratio to what sampled, `trainer` weighs tokens by the capped ratio and clips around the newest
weights. The advantage of an episode is its return less the exact mean.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "common"))
from estimators import Episode, Game, cosine, markdown, tree_game, true_gradient
from grpo_llm import Args, policy_loss
from machine import from_0, from_1, record_results

Array = np.ndarray
DENOMINATORS = ("sampler", "trainer")
DRIFTS = (0.1, 0.3, 0.6, 1.0)


def policies(game: Game) -> dict[int, tuple[slice, Array]]:
    """Of each state with a choice: its parameters, and the chances of its actions."""
    found = {}
    for e in game:
        for (state, action), score in zip(e.keys, e.scores, strict=True):
            at = np.flatnonzero(score)
            if len(at):
                chances = -score[at[0] : at[-1] + 1]  # the gradient of a log-softmax is 1 at the action, less these
                chances[action] += 1
                found[state] = slice(at[0], at[-1] + 1), chances
    return found


def drifted(game: Game, drift: float, rng: np.random.Generator) -> tuple[dict[int, Array], dict[int, Array]]:
    """Log-probabilities of the actions of each state: the policy's, and those with logits off by `drift`."""
    new = {state: np.log(chances) for state, (_, chances) in policies(game).items()}
    old = {}
    for state, logs in new.items():
        logits = logs + drift * rng.normal(size=len(logs))
        old[state] = logits - np.log(np.exp(logits).sum())
    return new, old


def gradient(game: Game, new: dict[int, Array], old: dict[int, Array], denominator: str, args: Args) -> Array:
    """The expected gradient of the policy `new` on episodes that `old` sampled, [parameters]."""

    def logs(e: Episode, of: dict[int, Array]) -> Array:
        return np.array([of[state][action] if state in of else 0.0 for state, action in e.keys])

    chances = np.array([e.probability * math.exp((logs(e, old) - logs(e, new)).sum()) for e in game])
    returns = np.array([e.rewards.sum() for e in game])
    total, clip = np.zeros(game[0].scores.shape[1]), (args.clip_coef, args.clip_coef_high)
    for e, chance, advantage in zip(game, chances, returns - chances @ returns, strict=True):
        trained = torch.tensor(logs(e, new), requires_grad=True)
        sampler = torch.tensor(logs(e, old))
        before = sampler if denominator == "sampler" else trained.detach()
        losses, _ = policy_loss(trained, before, torch.full_like(sampler, advantage), *clip)
        (losses * (before - sampler).exp().clamp(max=args.importance_cap)).sum().backward()
        total -= chance * trained.grad.numpy() @ e.scores
    return total


def measure(games: Sequence[Game], drifts: Sequence[float] = DRIFTS, seed: int = 0) -> dict[str, dict[str, Any]]:
    """By drift and denominator: mean and worst cosine with the true gradient, and how many games point backwards."""
    found: dict[str, dict[str, Any]] = {}
    for drift in drifts:
        rng, cosines = np.random.default_rng(seed), {name: [] for name in DENOMINATORS}
        for game in games:
            new, old = drifted(game, drift, rng)
            for name in DENOMINATORS:
                cosines[name].append(cosine(true_gradient(game), gradient(game, new, old, name, Args())))
        found[str(drift)] = {
            name: {"mean": float(np.mean(c)), "worst": min(c), "backwards": sum(x < 0 for x in c)}
            for name, c in cosines.items()
        }
    return found


def table(found: dict[str, dict[str, Any]]) -> str:
    head = ["Drift of the logits", *(f"{name}: mean cosine, worst, backwards" for name in DENOMINATORS)]
    rows = [[drift, *(f"{c['mean']:.3f}, {c['worst']:.2f}, {c['backwards']}" for c in row.values())]
            for drift, row in found.items()]  # fmt: skip
    return markdown(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", type=from_1, default=60)
    parser.add_argument("--seed", type=from_0, default=0, help="of the games and the drifts")
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    found = measure([tree_game(rng) for _ in range(args.games)], seed=args.seed)
    print(table(found))
    command = f"python benchmarks/learning/stale_ratios.py --games {args.games} --seed {args.seed}"
    record_results("stale_ratios", found, table(found), command)


if __name__ == "__main__":
    main()
