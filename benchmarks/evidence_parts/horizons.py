"""Process rewards against the outcome alone, by the number of steps that a task takes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

import numpy as np

from evidence_parts.noise import FEWEST, bootstrap, gradients
from evidence_parts.runs import Run, folders, make, record, recorded
from evidence_parts.scores import Claim, Interval, cell, claims_table, environment

ENV_ID = "AgentR1/CraftWorld-v0"
STEPS = {1: 3.5, 2: 6.0, 3: 9.3, 4: 11.7, 5: 14.2}  # depth -> turns of the best way, mean over tasks
CHECKPOINTS = {"early": 256, "middle": 1280, "late": 2560}  # episodes of training
EPISODES = 5120
GOAL, LONG = 0.45, 10.0  # less noise, from so many steps on
VARIANTS: dict[str, dict[str, Any]] = {  # what else may eat the difference
    "dense": {},
    "outcome": {"process_reward": False},
    "dense, not scaled": {"scale_rewards": False},
    "outcome, not scaled": {"scale_rewards": False, "process_reward": False},
    "dense, by episode": {"credit": "episode", "scale_rewards": False},
    "outcome, by episode": {"credit": "episode", "scale_rewards": False, "process_reward": False},
}
NOTE = "Batches at checkpoints of one run. No signal: the interval of signal / noise reaches 0."
PLAIN = {name: VARIANTS[name] for name in ("dense", "outcome")}


def grpo(label: str, seed: int, depth: int, dense: bool, episodes: int, more: str) -> Run:
    """Without annealing: a short run is the beginning of a long one."""
    kwargs = {"depth": depth} | ({} if dense else {"process_reward": False})
    flags = [*environment(ENV_ID, kwargs), "--total-episodes", episodes, "--no-anneal-lr", "--save-model"]
    name = f"{label}, depth {depth}, {'dense' if dense else 'outcome'}"
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


def noise_of(depths: Sequence[int], args: Any) -> dict[tuple[int, str], Ratios]:
    """Of each depth at each checkpoint. A line of the record each: what is there is not measured again."""
    runs = {(depth, name): grpo("noise", 1, depth, True, episodes, f"--eval-episodes 0 {args.flags}")
            for depth in depths for name, episodes in CHECKPOINTS.items()}  # fmt: skip
    keys = {place: f"{run.key} noise {args.batches}" for place, run in runs.items()}
    args.used.update(keys.values())
    known = recorded()
    missing = {place: run for place, run in runs.items() if keys[place] not in known}
    models = dict(zip(missing, folders(list(missing.values()), args.workers), strict=True))
    with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool:
        futures = {
            pool.submit(
                gradients, str(folder / "model"), ENV_ID, {"depth": place[0]},
                VARIANTS if place == (3, "middle") else PLAIN, args.batches, 4, 1,
            ): place
            for place, folder in models.items()
        }  # fmt: skip
        for future in as_completed(futures):
            place = futures[future]
            found = {name: [ratio, None if np.isnan(less[0]) else less]
                     for name, (ratio, less) in bootstrap(future.result(), "outcome").items()}  # fmt: skip
            record(keys[place], f"noise, depth {place[0]}, {place[1]}", {"noise": found}, args.force)
    known = recorded()
    return {place: {name: (tuple(ratio), tuple(less or [float("nan")] * 3))
                    for name, (ratio, less) in known[keys[place]]["noise"].items()} for place in runs}  # fmt: skip


def measure(args: Any, before: dict[str, Any]) -> dict[str, Any]:
    """Noise at three checkpoints and turns to half success, by depth: those asked for and those that stand there."""
    if args.batches < FEWEST:
        raise SystemExit(f"--batches {args.batches}: intervals from a bootstrap over batches need at least {FEWEST}")
    there = before.get("CraftWorld", {}).get("depths", [])
    depths = [depth for depth in STEPS if depth in args.depths or depth in there]
    noise = noise_of(depths, args)
    lines = ["| steps | checkpoint | gradient | signal / noise | noise / signal below that of the outcome |"]
    lines.append("|---|---|---|---|---|")
    claims = []
    for (depth, name), found in noise.items():
        for variant, (ratio, lower) in found.items():
            shown, less = "{:.4f} [{:.4f}, {:.4f}]".format(*ratio), cell(*lower, sign="+")
            lines.append(f"| {STEPS[depth]} | {name} | {variant} | {shown} | {less * (variant != 'outcome')} |")
        if STEPS[depth] >= LONG:
            text = f"less noise in the gradient with process rewards, {STEPS[depth]} steps, {name}"
            claims.append(Claim(text, GOAL, found["dense"][1], seeds=1))

    runs = {(depth, dense): [grpo("half", seed, depth, dense, EPISODES, f"--eval-every 2 {args.flags}")
                             for seed in range(1, args.seeds + 1)]
            for depth in depths for dense in (True, False)}  # fmt: skip
    make([run for group in runs.values() for run in group], args)
    half = {place: [turns_to_half(line["eval_turns"], line["eval_success"]) for line in make(group, args)]
            for place, group in runs.items()}  # fmt: skip
    more = ["| steps | rewards | turns played until half of the tasks succeed, each seed |", "|---|---|---|"]
    for (depth, dense), values in half.items():
        cells = ", ".join(f"{value:,.0f}" if np.isfinite(value) else "never" for value in values)
        more.append(f"| {STEPS[depth]} | {'process and outcome' if dense else 'outcome alone'} | {cells} |")
    results = {
        "depths": depths,
        "steps": {str(depth): STEPS[depth] for depth in depths},
        "noise": {
            f"{depth} {name}": {v: [ratio, None if np.isnan(less[0]) else less] for v, (ratio, less) in found.items()}
            for (depth, name), found in noise.items()
        },
        "turns_to_half": {
            f"{depth} {'dense' * dense or 'outcome'}": [value if np.isfinite(value) else None for value in values]
            for (depth, dense), values in half.items()
        },
        "claims": [claim.record() for claim in claims],
        "table": "\n\n".join(["\n".join(lines), NOTE, claims_table(claims), "\n".join(more)]),
    }
    return {"CraftWorld": results}
