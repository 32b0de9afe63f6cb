"""Process rewards against the outcome alone, by the number of steps that a task takes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import numpy as np
from scores import Claim, Interval, cell, claims_table, environment

from evidence_parts.commands import CRAFT
from evidence_parts.noise import bootstrap, gradients, grpo_args
from evidence_parts.page import plot_noise
from evidence_parts.runs import Run, begin, folders, made, make, record, recorded

FLAGS, PLOT = ["rows", "batches"], (plot_noise, "noise", 5)


@dataclass(frozen=True)
class Place:
    """Tasks of one length."""

    steps: float  # turns of the best way, mean over tasks
    env_id: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    checkpoints: tuple[int, int, int] = (256, 1280, 2560)  # early, middle, late: episodes of training
    episodes: int = 5120  # of the runs to half success


PLACES = {"MultihopWorld": Place(3.5, "AgentR1/MultihopWorld-v0", {}, (256, 768, 1536), 2560)}
PLACES |= {f"CraftWorld, depth {depth}": Place(steps, CRAFT, {"depth": depth})
           for depth, steps in enumerate((3.5, 6.0, 9.3, 11.7, 14.2), 1)}  # fmt: skip
CHECKPOINTS = ("early", "middle", "late")
ALL_VARIANTS = ("CraftWorld, depth 3", "middle")  # where every variant is measured
GOAL, LONG = 0.45, 10.0  # less noise, from so many steps on
VARIANTS: dict[str, dict[str, Any]] = {  # what else may eat the difference
    "dense": {},
    "outcome": {"process_reward": False},
    "dense, not scaled": {"scale_rewards": False},
    "outcome, not scaled": {"scale_rewards": False, "process_reward": False},
    "dense, by episode, not scaled": {"credit": "episode", "scale_rewards": False},
    "outcome, by episode, not scaled": {"credit": "episode", "scale_rewards": False, "process_reward": False},
}
TITLE = "MultihopWorld and CraftWorld"
NOISE, HALF = "noise", "half success"
ROWS = [NOISE, HALF]
NOTE = "Batches at checkpoints of one run. No signal: the interval of signal / noise reaches 0."
PLAIN = {name: VARIANTS[name] for name in ("dense", "outcome")}


def grpo(label: str, seed: int, name: str, dense: bool, episodes: int, more: str) -> Run:
    """Without annealing: a short run is the beginning of a long one."""
    place = PLACES[name]
    kwargs = place.kwargs | ({} if dense else {"process_reward": False})
    flags = [*environment(place.env_id, kwargs), "--total-episodes", episodes, "--no-anneal-lr", "--save-model"]
    name = f"{label}, {name}, {'dense' if dense else 'outcome'}"
    return Run(name, "grpo_llm.py", seed, (*flags, *shlex.split(more)))


def turns_to_half(at: list[float], success: list[float]) -> float:
    """Turns played until half of the held-out tasks are done, between two evaluations on a line; infinite if never."""
    for i in np.flatnonzero(np.array(success) >= 0.5)[:1]:
        before, after = max(i - 1, 0), i
        if success[after] == success[before]:
            return float(at[after])
        return float(np.interp(0.5, [success[before], success[after]], [at[before], at[after]]))
    return float("inf")


Ratios = dict[str, tuple[Interval, Interval]]  # of each variant, as of `bootstrap`


def noise_of(names: Sequence[str], args: Any) -> dict[tuple[str, str], Ratios]:
    """Of each place at each checkpoint. A line of the record each: what is there is not measured again."""
    runs = {(name, checkpoint): grpo("noise", 1, name, True, episodes, f"--eval-episodes 0 {args.flags}")
            for name in names
            for checkpoint, episodes in zip(CHECKPOINTS, PLACES[name].checkpoints, strict=True)}  # fmt: skip
    keys = {at: f"{run.key} noise {args.batches}" for at, run in runs.items()}
    args.used.update(keys.values())
    known = recorded()
    missing = {at: run for at, run in runs.items() if keys[at] not in known}
    if missing:
        begin([f"noise, {name}, {checkpoint}" for name, checkpoint in missing], args)
    for name, _ in missing:
        grpo_args(PLACES[name].env_id, shlex.split(args.flags))  # before anything is trained
    models = dict(zip(missing, folders(list(missing.values()), args.workers), strict=True))
    with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool:
        futures = {
            pool.submit(
                gradients, str(folder / "model"), PLACES[at[0]].env_id, PLACES[at[0]].kwargs,
                VARIANTS if at == ALL_VARIANTS else PLAIN, args.batches, 4, 1,
                shlex.split(args.flags),
            ): at
            for at, folder in models.items()
        }  # fmt: skip
        for future in as_completed(futures):
            at = futures[future]
            found = {name: [ratio, None if np.isnan(less[0]) else less]
                     for name, (ratio, less) in bootstrap(future.result(), "outcome").items()}  # fmt: skip
            record(keys[at], f"noise, {at[0]}, {at[1]}", {"noise": found}, args.force)
    known = recorded()
    return {at: {name: (tuple(ratio), tuple(less or [float("nan")] * 3))
                 for name, (ratio, less) in known[keys[at]]["noise"].items()} for at in runs}  # fmt: skip


def noise_table(noise: dict[tuple[str, str], Ratios]) -> tuple[str, list[Claim]]:
    """The noise of every gradient, and the claims on tasks that are long."""
    lines = ["| tasks | steps | checkpoint | gradient | signal / noise | noise / signal below that of the outcome |"]
    lines.append("|---" * 6 + "|")
    claims = []
    for (name, checkpoint), found in noise.items():
        steps = PLACES[name].steps
        for variant, (ratio, lower) in found.items():
            shown, less = "{:.4f} [{:.4f}, {:.4f}]".format(*ratio), cell(*lower, sign="+")
            less *= variant != "outcome"
            lines.append(f"| {name} | {steps} | {checkpoint} | {variant} | {shown} | {less} |")
        if steps >= LONG:
            text = f"less noise in the gradient with process rewards, {steps} steps"
            claims.append(Claim(text, GOAL, found["dense"][1], 1, checkpoint))
    return "\n".join(lines), claims


def half_of(names: Sequence[str], args: Any) -> dict[tuple[str, bool], list[tuple[float, float]]]:
    """Turns to half success and success at the end, of each place, with process rewards and without, of each seed."""
    runs = {(name, dense): [grpo("half", seed, name, dense, PLACES[name].episodes, f"--eval-every 2 {args.flags}")
                            for seed in range(1, args.seeds + 1)]
            for name in names for dense in (True, False)}  # fmt: skip
    make([run for group in runs.values() for run in group], args)
    return {at: [(turns_to_half(line["eval_turns"], line["eval_success"]), line["eval_success"][-1])
                 for line in make(group, args)] for at, group in runs.items()}  # fmt: skip


def half_table(half: dict[tuple[str, bool], list[tuple[float, float]]]) -> str:
    """Turns to half success, and success after all of training."""
    lines = ["| tasks | steps | rewards | turns played until half of the tasks succeed, each seed | episodes in all | "
             "success after them |", "|---" * 6 + "|"]  # fmt: skip
    for (name, dense), values in half.items():
        place, rewards = PLACES[name], "process and outcome" if dense else "outcome alone"
        turns = ", ".join(f"{value:,.0f}" if np.isfinite(value) else "never" for value, _ in values)
        ends = ", ".join(f"{end:.3f}" for _, end in values)
        lines.append(f"| {name} | {place.steps} | {rewards} | {turns} | {place.episodes:,} | {ends} |")
    return "\n".join(lines)


def measure(args: Any, before: dict[str, Any]) -> dict[str, Any]:
    """Noise at three checkpoints and turns to half success: of the places asked for and of those that stand there."""
    there = before.get(TITLE, {})
    names = [name for name in PLACES if name in args.places or name in there.get("steps", {})]
    rows = [row for row in ROWS if row in args.rows or row in there.get("rows", ())]
    noise = noise_of(names, args) if NOISE in rows else {}
    half = half_of(names, args) if HALF in rows else {}
    table, claims = noise_table(noise)
    tables = [table, NOTE, *([claims_table(claims)] if claims else [])] if noise else []
    tables += [half_table(half)] if half else []
    results = {
        "rows": rows,
        "steps": {name: PLACES[name].steps for name in names},
        "noise": {
            name: {checkpoint: {v: [ratio, None if np.isnan(less[0]) else less]
                                for v, (ratio, less) in noise[name, checkpoint].items()} for checkpoint in CHECKPOINTS}
            for name in names if noise
        },
        "turns_to_half": {
            f"{name}, {'dense' if dense else 'outcome'}": [value if np.isfinite(value) else None for value, _ in values]
            for (name, dense), values in half.items()
        },
        "success_at_end": {
            f"{name}, {'dense' if dense else 'outcome'}": [end for _, end in values]
            for (name, dense), values in half.items()
        },
        "claims": [claim.record() for claim in claims],
        "table": "\n\n".join(tables),
    }  # fmt: skip
    return {TITLE: results | made(args)}
