"""What is never tried is never learned. What makes it be tried: horizons, entropy, temperature, rewards."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

import numpy as np
from scores import Claim, cell, environment, facts, interval, intervals

from evidence_parts.commands import CRAFT
from evidence_parts.page import plot_curves
from evidence_parts.runs import Run, made, make, table

FLAGS, PLOT = ["episodes"], (plot_curves, "curves", 5)


@dataclass(frozen=True)
class Place:
    """Where it is tried, from which policy, and by what."""

    env_id: str
    kwargs: dict[str, Any]
    model: str  # whose tiny policy
    rows: dict[str, tuple[dict[str, Any], list[object], bool]]  # arguments, flags, after ten longer demonstrations?
    pairs: tuple[tuple[str, str], ...]  # rows that are compared with each other, beside those of all places
    whole: tuple[str, str]  # a figure of an episode that is 1 where all that is asked for was found, and its words


HOPS = "exploring_world:AgentR1Exploring/MultihopWorld-v0"
AFTER = "after ten longer demonstrations"
PLACES = {
    "MultihopWorld": Place(HOPS, {"max_turns": 10}, "AgentR1/MultihopWorld-v0", {
        "GRPO": ({}, [], False),
        "entropy bonus .01": ({}, ["--ent-coef", 0.01], False),
        "temperature 1.3": ({}, ["--temperature", 1.3], False),
        "temperature .7": ({}, ["--temperature", 0.7], False),
        "a reward of .1 for each new query": ({"process_reward": {"new_query": 0.1}}, [], False),
        f"{AFTER}, GRPO": ({}, [], True),
        f"{AFTER}, horizon 5,7,10": ({}, ["--horizon-schedule", "5,7,10", "--horizon-every", 10], True),
    }, (), ("support_recall", "all four supports found")),
    "CraftWorld": Place(CRAFT, {"depth": 4}, CRAFT, {  # the shipped policy has nothing there that horizons could cut
        "GRPO from the shipped policy": ({}, [], False),
        f"{AFTER}, GRPO, 30 turns": ({}, [], True),
        f"{AFTER}, 15 turns": ({}, ["--horizon-schedule", "15"], True),
        f"{AFTER}, horizon 12,20,30": ({}, ["--horizon-schedule", "12,20,30", "--horizon-every", 7], True),
        f"{AFTER}, entropy bonus .01": ({}, ["--ent-coef", 0.01], True),
        f"{AFTER}, temperature 1.2": ({}, ["--temperature", 1.2], True),
        f"{AFTER}, temperature .7": ({}, ["--temperature", 0.7], True),
    }, ((f"{AFTER}, horizon 12,20,30", f"{AFTER}, 15 turns"),), ("success", "the goal made")),
}  # fmt: skip
EPISODES = 7_680
GREEDY, SAMPLED = "greedy", "sampled"
TEMPERATURES = {GREEDY: 0, SAMPLED: 1}
DEMONSTRATED = "ten longer demonstrations alone"


def demonstrations(place: Place, seed: int) -> Run:
    """Ten of the expert's, supervised."""
    flags = ["--model", tiny(place), "--expert-share", 1, "--num-demonstrations", 10, "--eval-demonstrations", 0]
    flags += ["--first-demonstration", 1000 * seed, "--num-steps", 40, "--batch-size", 10, "--warmup-steps", 5]
    flags += ["--learning-rate", 3e-4, "--num-workers", 0]
    return Run(DEMONSTRATED, "sft_llm.py", seed, (*environment(place.env_id, place.kwargs), *flags, "--eval-every", 0))


def tiny(place: Place) -> str:
    """The folder of the policy that the package carries."""
    from agent_r1 import tiny_policy

    return tiny_policy(place.model)


def grpo(place: Place, row: str, seed: int, model: Run | str, more: str) -> Run:
    """One way of a table, in so many episodes."""
    kwargs, flags, _ = place.rows[row]
    words = [*environment(place.env_id, place.kwargs | kwargs), "--model", model, "--total-episodes", EPISODES]
    words += ["--learning-rate", 3e-4, "--no-anneal-lr", "--eval-every", 5, "--save-model", *flags, *shlex.split(more)]
    return Run(row, "grpo_llm.py", seed, tuple(words))


def play(place: Place, row: str, seed: int, model: Run | str, episodes: int, temperature: int) -> Run:
    """An evaluation on held-out tasks, greedy or sampled."""
    flags = [*environment(place.env_id, place.kwargs), "--model", model, "--split", "test", "--episodes", episodes]
    return Run(f"{row}, test, {temperature}", "evaluate_llm.py", seed, (*flags, "--temperature", temperature))


def at_budget(lines: list[dict[str, Any]], budget: float) -> list[float]:
    """Success in the evaluations of training after so many turns, at the end where there were fewer; of each seed."""
    return [float(np.interp(budget, line["eval_turns"], line["eval_success"])) for line in lines]


def measure(args: Any, before: dict[str, Any]) -> dict[str, Any]:
    """A table for each place, at equal episodes and at equal turns; the ten demonstrations come on top of them."""
    results: dict[str, Any] = {}
    for name in args.places:
        place, numbers = PLACES[name], range(1, args.seeds + 1)
        stat, words = place.whole
        shown = [demonstrations(place, seed) for seed in numbers]
        starts: dict[bool, list[Run | str]] = {True: [*shown], False: [tiny(place)] * args.seeds}
        trained = {row: [grpo(place, row, seed, model, args.flags)
                         for seed, model in zip(numbers, starts[after], strict=True)]
                   for row, (_, _, after) in place.rows.items()}  # fmt: skip
        make([*shown, *(run for group in trained.values() for run in group)], args)
        models: dict[str, list[Run | str]] = {"shipped policy": [tiny(place)], DEMONSTRATED: starts[True]}
        models |= {row: [*group] for row, group in trained.items()}
        plays = {(row, name): [play(place, row, seed, model, args.episodes, temperature)
                               for seed, model in enumerate(group, 1)]
                 for row, group in models.items() for name, temperature in TEMPERATURES.items()}  # fmt: skip
        scores = table(plays, args)
        whole = {row: [float(np.mean([float(value) == 1 for value in line[stat]]))
                       for line in make(plays[row, SAMPLED], args)] for row in models}  # fmt: skip
        lines_of = {row: make(group, args) for row, group in trained.items()}
        budget = min(float(np.mean([line["eval_turns"][-1] for line in group])) for group in lines_of.values())
        then = {row: at_budget(group, budget) for row, group in lines_of.items()}
        lines = [f"| {name} | success, greedy | sampled | {words}, sampled, each seed | "
                 f"success after {budget:,.0f} turns, each seed |", "|---" * 5 + "|"]  # fmt: skip
        success = intervals(scores)
        for row in scores:
            cells = [cell(*success[row][column]) for column in TEMPERATURES]
            cells += [", ".join(f"{value:.3f}" for value in values) for values in (whole[row], then.get(row, ()))]
            lines.append(f"| {row} | {' | '.join(cells)} |")
        first = {after: next(row for row, other in place.rows.items() if other[2] == after) for after in (False, True)}
        pairs = [(row, first[after]) for row, (_, _, after) in place.rows.items() if row != first[after]]
        pairs.append((first[True], first[False]))
        pairs += [(row, DEMONSTRATED) for row, (_, _, after) in place.rows.items() if after]
        pairs += place.pairs
        where = f"{name}, {GREEDY}"
        claims = [Claim(f"{row} above {other}", 0.0, interval(scores[row], scores[other], [GREEDY]), args.seeds, where)
                  for row, other in pairs]  # fmt: skip
        results[name] = facts(success, scores, claims, lines) | made(args) | {
            "whole": whole,
            "turns": float(budget),
            "at_turns": then,
            "curves": {row: [[line["eval_turns"], line["eval_success"]] for line in group]
                       for row, group in lines_of.items()},
        }  # fmt: skip
    return results
