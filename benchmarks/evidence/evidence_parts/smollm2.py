"""A chat model of 135 million parameters on two standard sets: BFCL's multi-turn tasks, and a level of BabyAI."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from scores import Claim, cell, environment, facts, interval, intervals

from evidence_parts import standard
from evidence_parts.page import plot_success
from evidence_parts.runs import Run, made, make, table

FLAGS, PLOT = ["rows", "model"], (plot_success, "success", 3)

MODEL = "SmolLM2-135M-Instruct"
SUCCESS, DONE = "success", "requests done"
LORA = ["--lora-rank", 8, "--learning-rate", 1e-3]
ON_A_CORE = ("--dtype", "bfloat16", "--microbatch-tokens", 2048)


@dataclass(frozen=True)
class Place:
    """A set, its rows, and how both are trained."""

    label: str  # of its runs
    env_id: str
    kwargs: dict[str, Any]
    needs: tuple[str, str]  # a package, and the extra that brings it, or is needed with it
    held_out: int  # tasks of its split "test"
    at_once: int  # of them
    rows: tuple[str, str]  # supervised, reinforced
    supervised: tuple[object, ...]
    reinforced: tuple[object, ...]
    measured: dict[str, str]  # column -> what is kept of each task
    played: tuple[object, ...] = ()  # of evaluations


PLACES = {
    "BFCL multi-turn": Place(
        "bfcl", "bfcl_split:AgentR1Split/BFCLMultiTurn-v0",
        {"process_reward": {"request_done": 1.0}, "max_context_tokens": 6144, "max_action_tokens": 256},
        ("bfcl_eval", "bfcl"), 66, 16, ("SFT on 129 demonstrations", "GRPO after it"),
        ("--num-demonstrations", 129, "--batch-size", 8, "--num-steps", 32),  # two epochs
        ("--total-episodes", 512, "--num-envs", 32),
        {SUCCESS: "success", DONE: "requests_done"},
    ),
    "BabyAI GoToLocal": Place(
        "babyai, SmolLM2", standard.BABY,
        {"level": "GoToLocal", "max_context_tokens": 4096, **standard.SHORT, **standard.HORIZON},
        standard.NEEDS, 100, 50, ("SFT on 240 demonstrations", "GRPO after it"),
        ("--num-demonstrations", 240, "--batch-size", 8, "--num-steps", 60, *ON_A_CORE),  # two epochs
        ("--total-episodes", 320, "--num-envs", 64, *ON_A_CORE),
        {SUCCESS: "success"}, ("--dtype", "bfloat16"),
    ),
}  # fmt: skip
ROWS = [*dict.fromkeys(row for place in PLACES.values() for row in place.rows)]


def train(place: Place, row: str, seed: int, model: str, more: str) -> Run:
    """A row's training: hours on one core, in pieces; minutes on a GPU."""
    supervised, reinforced = place.rows
    if row == supervised:
        flags = ["--model", model, "--expert-share", 1, "--eval-demonstrations", 0, "--num-workers", 0]
        flags += ["--eval-every", 0, *place.supervised, "--warmup-steps", 5, "--checkpoint-every", 2, *LORA]
        script = "sft_llm.py"
    else:
        assert row == reinforced, row
        flags = ["--model", train(place, supervised, seed, model, more), *place.reinforced]
        flags += ["--episodes-per-iteration", 64, "--num-minibatches", 1, "--old-logprobs", "sampler"]
        flags += ["--no-preflight", "--eval-episodes", 0, "--save-model", "--checkpoint-every", 1]
        flags += [*LORA, *shlex.split(more)]
        script = "grpo_llm.py"
    return Run(f"{place.label}, {row}", script, seed, (*environment(place.env_id, place.kwargs), *flags))


def play(place: Place, row: str, seed: int, model: Run | str) -> Run:
    """An evaluation on what is held out."""
    flags = ["--model", model, "--split", "test", "--episodes", place.held_out, "--num-envs", place.at_once]
    flags += ["--temperature", 0, *place.played]
    return Run(f"{place.label}, {row}, test", "evaluate_llm.py", seed,
               (*environment(place.env_id, place.kwargs), *flags))  # fmt: skip


def measure(args: Any, before: dict[str, Any]) -> dict[str, Any]:
    """Success, reward and calls, of the rows that are asked for and of those that stand there."""
    results, seeds = {}, range(1, args.seeds + 1)
    for name in args.places:
        place, there = PLACES[name], before.get(name, {}).get("success", {})
        args.begun, args.needs = False, place.needs
        rows = [row for row in place.rows if row in args.rows or row in there]
        trained = {row: [train(place, row, seed, args.model, args.flags) for seed in seeds] for row in rows}
        make([run for group in trained.values() for run in group], args)
        models: dict[str, list[Run | str]] = {MODEL: [args.model]} | {row: [*trained[row]] for row in rows}
        plays = {(row, "test"): [play(place, row, seed, model) for seed, model in enumerate(group, 1)]
                 for row, group in models.items()}  # fmt: skip
        found = {column: table(plays, args, what) for column, what in place.measured.items()}
        scores = {row: {column: found[column][row]["test"] for column in found} for row in models}
        success = intervals(scores)
        heads = [f"{name}, {place.held_out} tasks held out", "success, greedy", *list(found)[1:]]
        heads += ["mean return", "calls a task", "failed"]
        lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        for row, of_row in success.items():
            played = make(plays[row, "test"], args)
            tasks = sum(line["tasks"] for line in played)
            calls = sum(int(number) * count for line in played for number, count in line["calls"].items())
            reward = sum(line["return"] for line in played) / len(played)
            failed = f"{sum(line['failed'] for line in played) / calls:.0%}" if calls else "–"
            cells = [row, *(cell(*one) for one in of_row.values()), f"{reward:.3f}", f"{calls / tasks:.1f}", failed]
            lines.append(f"| {' | '.join(cells)} |")
        claims = [Claim(f"{row} above {other}", 0.0, interval(scores[row], scores[other], [what]), args.seeds, what)
                  for other, row in zip(models, [*models][1:], strict=False) for what in found]  # fmt: skip
        results[name] = facts(success, scores, claims, lines) | made(args)
    return results
