"""BFCL's multi-turn tasks, a model of 135 million parameters, the package's own calls as demonstrations."""

from __future__ import annotations

import shlex
from typing import Any

from scores import Claim, cell, environment, facts, interval, intervals

from evidence_parts.page import plot_success
from evidence_parts.runs import Run, made, make, table

FLAGS, PLOT = ["rows", "model"], (plot_success, "success", 3)

ENV = environment("bfcl_split:AgentR1Split/BFCLMultiTurn-v0", {
    "process_reward": {"request_done": 1.0}, "max_context_tokens": 6144, "max_action_tokens": 256,
})  # fmt: skip
NEEDS = ("bfcl_eval", "bfcl")  # a package, and the extra that is needed with it
MODEL = "SmolLM2-135M-Instruct"
PLACES = {"BFCL multi-turn": ENV}
SFT, GRPO = "SFT on 129 demonstrations", "GRPO after it"
ROWS = [SFT, GRPO]
HELD_OUT = 66
SUCCESS, DONE = "success", "requests done"
LORA = ["--lora-rank", 8, "--learning-rate", 1e-3]
SUPERVISED = ["--num-demonstrations", 129, "--batch-size", 8, "--num-steps", 32, "--warmup-steps", 5,
              "--checkpoint-every", 2]  # two epochs: 2 to 3 hours in float32 on one core  # fmt: skip


def train(row: str, seed: int, model: str, more: str) -> Run:
    """A row's training."""
    if row == SFT:
        flags = ["--model", model, "--expert-share", 1, "--eval-demonstrations", 0, "--num-workers", 0]
        flags += ["--eval-every", 0, *SUPERVISED, *LORA]
        script = "sft_llm.py"
    else:
        flags = ["--model", train(SFT, seed, model, more), "--total-episodes", 512, "--episodes-per-iteration", 64]
        flags += ["--num-envs", 16, "--num-minibatches", 1, "--old-logprobs", "sampler", "--no-preflight"]
        flags += ["--eval-episodes", 0, "--save-model", "--checkpoint-every", 1, *LORA, *shlex.split(more)]
        script = "grpo_llm.py"
    return Run(f"bfcl, {row}", script, seed, (*ENV, *flags))


def play(row: str, seed: int, model: Run | str) -> Run:
    """An evaluation on what is held out."""
    flags = ["--model", model, "--split", "test", "--episodes", HELD_OUT, "--num-envs", 16, "--temperature", 0]
    return Run(f"bfcl, {row}, test", "evaluate_llm.py", seed, (*ENV, *flags))


def measure(args: Any, before: dict[str, Any]) -> dict[str, Any]:
    """Success, requests done and calls, of the rows that are asked for and of those that stand there."""
    [name], seeds = PLACES, range(1, args.seeds + 1)
    rows = [row for row in ROWS if row in args.rows or row in before.get(name, {}).get("success", {})]
    trained = {row: [train(row, seed, args.model, args.flags) for seed in seeds] for row in rows}
    make([run for group in trained.values() for run in group], args)
    models: dict[str, list[Run | str]] = {MODEL: [args.model]} | {row: [*trained[row]] for row in rows}
    plays = {(row, "test"): [play(row, seed, model) for seed, model in enumerate(group, 1)]
             for row, group in models.items()}  # fmt: skip
    scores, done = table(plays, args), table(plays, args, "requests_done")
    both = {row: {SUCCESS: scores[row]["test"], DONE: done[row]["test"]} for row in models}
    success = intervals(both)
    lines = [f"| {name}, {HELD_OUT} tasks held out | success, greedy | requests done | calls a task | failed |"]
    lines.append("|---" * 5 + "|")
    for row, of_row in success.items():
        played = make(plays[row, "test"], args)
        calls = [sum(int(number) * count for number, count in line["calls"].items()) for line in played]
        each = sum(calls) / sum(line["tasks"] for line in played)
        failed = f"{sum(line['failed'] for line in played) / sum(calls):.0%}" if any(calls) else "–"
        lines.append(f"| {row} | {' | '.join(cell(*found) for found in of_row.values())} | {each:.1f} | {failed} |")
    pairs = [(row, other) for row, other in ((SFT, MODEL), (GRPO, SFT)) if {row, other} <= both.keys()]
    claims = [Claim(f"{row} above {other}", 0.0, interval(both[row], both[other], [what]), args.seeds, what)
              for row, other in pairs for what in (SUCCESS, DONE)]  # fmt: skip
    return {name: facts(success, both, claims, lines) | made(args)}
