"""A standard set: three levels of BabyAI, where the bot demonstrates and held-out seeds judge."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
from scores import Claim, cell, environment, facts, interval, intervals

from agent_r1 import tiny_policy
from agent_r1.validation import probes
from evidence_parts.commands import World, imitate, play, reinforce
from evidence_parts.page import plot_success
from evidence_parts.runs import Run, begin, brief, made, make, record, recorded, table

FLAGS, PLOT = ["rows", "episodes"], (plot_success, "success", 4)

BABY = "AgentR1/BabyAI-v0"
SHORT = {"max_turns": 32, "max_action_tokens": 48}  # of 400 tasks the bot takes at most 26 turns, a call each
LEVELS = ("GoToLocal", "PickupLoc", "PutNextLocal")
PLACES = {level: World(BABY, {"level": level, **SHORT}, {"held-out seeds": ("test", {"level": level, **SHORT})})
          for level in LEVELS}  # fmt: skip
EPISODES = 2560  # of reinforcement learning
STEPS = {500: 120, 2560: 240}  # demonstrations -> optimizer steps on 32 of them
START = Run("standard, start", "sft_llm.py", 1, (
    *environment(BABY, {"level": ",".join(LEVELS)}), "--model", "scratch", "--expert-share", 1,
    "--first-demonstration", 100_000, "--num-demonstrations", 16_000, "--tokenizer-demonstrations", 1_000,
    "--eval-demonstrations", 64,
    "--batch-size", 32, "--num-steps", 600, "--warmup-steps", 50, "--eval-every", 0, "--num-workers", 0,
))  # fmt: skip
NEEDS = ("minigrid", "babyai")  # a package, and the extra that brings it
TRICK = "a trick that never reads"
FIRST = "the start: 16,000 of the bot, of all three levels"
IMITATIONS = {f"SFT, {n:,} of the bot": n for n in STEPS}
GRPO = "GRPO"
ROWS = [*IMITATIONS, GRPO]
HORIZON = {"max_turns": 16}  # of GRPO's episodes: three in four of the start's successes are shorter


def train(place: World, row: str, seed: int, more: str) -> Run:
    """A row's training, from a policy that has seen all three levels."""
    label = f"standard, {row}"
    if row in IMITATIONS:
        n = IMITATIONS[row]
        return imitate(place, label, seed, STEPS[n], "--expert-share", 1, "--num-demonstrations", n,
                       model=START)  # fmt: skip
    return reinforce(replace(place, kwargs=place.kwargs | HORIZON), label, GRPO, seed, START, more, EPISODES)


def trick(place: World, args: Any) -> dict[str, Any]:
    """What the environment's trick that never reads the mission comes to on the same tasks. A line of the record."""
    [(split, kwargs)] = place.columns.values()
    kwargs = kwargs | {"max_action_tokens": 512}  # it calls tools that the policy's tokenizer spells out
    key = brief(["try_all", place.env_id, split, kwargs, args.episodes])
    args.used.add(key)
    if key not in recorded():
        label = f"standard, {TRICK}, {kwargs['level']}"
        begin([label], args)
        env: Any = gym.make(place.env_id, split=split, tokenizer=tiny_policy(place.env_id), **kwargs).unwrapped
        played = [probes.play(env, index, probes.shortcuts(env)["try_all"]) for index in range(args.episodes)]
        env.close()
        if fault := next((fault for one in played if (fault := one.infos[-1].get("fault"))), None):
            raise SystemExit(f"{label}: a fault ended an episode ({fault}); begin again")
        record(key, label, {
            "tasks": len(played),
            "tasks_hash": brief([*range(args.episodes)]),
            "success": "".join(str(int(bool(one.infos[-1].get("is_success")))) for one in played),
            "turns": sum(len(one.rewards) for one in played),
            "return": round(float(np.mean([sum(one.rewards) for one in played])), 4),
        }, args.force)  # fmt: skip
    return recorded()[key]


def measure(args: Any, before: dict[str, Any]) -> dict[str, Any]:
    """Success and reward in each level, of the rows that are asked for and of those that stand there."""
    results: dict[str, Any] = {}
    for name in args.places:
        place, there = PLACES[name], before.get(name, {}).get("success", {})
        wanted = {*args.rows, *there}
        rows = [row for row in ROWS if row in wanted]
        trained = {row: [train(place, row, seed, args.flags) for seed in range(1, args.seeds + 1)] for row in rows}
        make([START, *(run for group in trained.values() for run in group)], args)
        lines_of = {row: make(group, args) for row, group in trained.items()}
        models: dict[str, list[Run | str]] = {FIRST: [START]} | {row: [*trained[row]] for row in rows}
        plays = {(row, column): [play(place, f"standard, {row}", seed, split, kwargs, model, args.episodes)
                                 for seed, model in enumerate(group, 1)]
                 for row, group in models.items() for column, (split, kwargs) in place.columns.items()}  # fmt: skip
        scores = table(plays, args)
        tried = trick(place, args)
        scores |= {TRICK: {column: np.array([[float(done) for done in tried["success"]]]) for column in place.columns}}
        rewards = {row: float(np.mean([line["return"] for line in make(plays[row, "held-out seeds"], args)]))
                   for row in models} | {TRICK: tried["return"]}  # fmt: skip
        lines = [f"| {name} | success, greedy | mean return | episodes after the start | turns |", "|---" * 5 + "|"]
        success = intervals(scores)
        for row, of_row in success.items():
            cells = [*(cell(*found) for found in of_row.values()), f"{rewards[row]:.3f}"]
            cells += [f"{number:,.0f}" for number in cost(row, lines_of)]
            lines.append(f"| {row} | {' | '.join(cells)} |")
        pairs = [(row, FIRST) for row in IMITATIONS] + [(GRPO, row) for row in (FIRST, *IMITATIONS, TRICK)]
        claims = [Claim(f"{row} above {other}", 0.0, interval(scores[row], scores[other]), args.seeds, name)
                  for row, other in pairs if {row, other} <= scores.keys()]  # fmt: skip
        results[name] = facts(success, scores, claims, lines) | made(args) | {"return": rewards}
    return results


def cost(row: str, lines_of: dict[str, list[dict[str, Any]]]) -> tuple[float, float]:
    """Episodes and turns that were played for a row after the start, the bot's included; means over seeds."""
    if row not in lines_of:
        return 0.0, 0.0
    turns = float(np.mean([line["turns"] for line in lines_of[row]]))
    return float(IMITATIONS.get(row) or np.mean([line["episodes"] for line in lines_of[row]])), turns
