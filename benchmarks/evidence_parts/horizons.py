"""Part 2: process rewards against the outcome alone, by the number of steps that a task takes."""

from __future__ import annotations

import shlex
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from evidence_parts.noise import FEWEST, bootstrap, gradients
from evidence_parts.scores import Claim, cell, claims_table, environment, job
from llm_utils.benchmark import Job, finish
from llm_utils.compare import read_curve

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


def grpo(label: str, seed: int, depth: int, dense: bool, episodes: int, more: str) -> Job:
    """Without annealing: a short run is the beginning of a long one."""
    kwargs = {"depth": depth} | ({} if dense else {"process_reward": False})
    flags = [*environment(ENV_ID, kwargs), "--total-episodes", episodes, "--no-anneal-lr", "--save-model"]
    name = f"{label} depth {depth} {'dense' if dense else 'outcome'} {episodes}"
    return job(name, "grpo_llm.py", seed, *flags, *shlex.split(more))


def steps_to_half(folder: Path) -> float:
    """Turns played until half of the held-out tasks are done, between two evaluations on a line; infinite if never."""
    at, success = read_curve(folder, "eval/success", "steps")
    for i in np.flatnonzero(success >= 0.5)[:1]:
        before, after = max(i - 1, 0), i
        if success[after] == success[before]:
            return float(at[after])
        return float(np.interp(0.5, success[[before, after]], at[[before, after]]))
    return float("inf")


def measure(args: Any) -> dict[str, Any]:
    """Noise at three checkpoints and steps to half success, by depth."""
    if args.batches < FEWEST:
        raise SystemExit(f"--batches {args.batches}: intervals from a bootstrap over batches need at least {FEWEST}")
    depths = args.depths
    jobs = {(depth, name): grpo("noise", 1, depth, True, episodes, f"--eval-episodes 0 {args.flags}")
            for depth in depths for name, episodes in CHECKPOINTS.items()}  # fmt: skip
    models = dict(zip(jobs, finish(list(jobs.values()), args.workers), strict=True))
    with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool:
        futures = {
            (depth, name): pool.submit(
                gradients, str(folder / "model"), ENV_ID, {"depth": depth},
                VARIANTS if (depth, name) == (3, "middle") else PLAIN, args.batches, 4, 1,
            )
            for (depth, name), folder in models.items()
        }  # fmt: skip
        noise = {place: bootstrap(future.result(), "outcome") for place, future in futures.items()}
    lines = ["| steps | checkpoint | gradient | signal / noise | noise / signal below that of the outcome |"]
    lines.append("|---|---|---|---|---|")
    claims = []
    for (depth, name), found in noise.items():
        for variant, (ratio, lower) in found.items():
            shown, less = "{:.4f} [{:.4f}, {:.4f}]".format(*ratio), cell(*lower, sign="+")
            lines.append(f"| {STEPS[depth]} | {name} | {variant} | {shown} | {less * (variant != 'outcome')} |")
        if STEPS[depth] >= LONG:
            text = f"less noise in the gradient with process rewards, {STEPS[depth]} steps, {name}"
            claims.append(Claim(text, GOAL, found["dense"][1]))

    runs = {(depth, dense): [grpo("half", seed, depth, dense, EPISODES, f"--eval-every 2 {args.flags}")
                             for seed in range(1, args.seeds + 1)]
            for depth in depths for dense in (True, False)}  # fmt: skip
    folders = iter(finish([one for group in runs.values() for one in group], args.workers))
    half = {place: [steps_to_half(next(folders)) for _ in group] for place, group in runs.items()}
    more = ["| steps | rewards | turns played until half of the tasks succeed, each seed |", "|---|---|---|"]
    for (depth, dense), values in half.items():
        cells = ", ".join(f"{value:,.0f}" if np.isfinite(value) else "never" for value in values)
        more.append(f"| {STEPS[depth]} | {'process and outcome' if dense else 'outcome alone'} | {cells} |")
    results = {
        "noise": {
            f"{depth} {name}": {v: [ratio, None if np.isnan(less[0]) else less] for v, (ratio, less) in found.items()}
            for (depth, name), found in noise.items()
        },
        "steps_to_half": {
            f"{depth} {'dense' * dense or 'outcome'}": [value if np.isfinite(value) else None for value in values]
            for (depth, dense), values in half.items()
        },
        "claims": [claim.record() for claim in claims],
        "table": "\n\n".join(["\n".join(lines), NOTE, claims_table(claims), "\n".join(more)]),
    }
    return {"CraftWorld": results}
