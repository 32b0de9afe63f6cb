"""How noisy is the policy gradient, with process rewards and with the outcome alone?

    python benchmarks/gradient_noise.py    # 3 checkpoints of GRPO on MultihopWorld, 200 batches of 32 episodes at each

At each checkpoint the same episodes are paid both ways, and GRPO computes the gradient of every batch. The ratio of
noise to signal is trace(covariance) / squared norm of the mean: the scale of the rewards doesn't matter. Intervals are
95 %, from a bootstrap over batches. Training runs that are finished are not repeated.
"""

import argparse
import math
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
from evidence_parts.noise import FEWEST, bootstrap, gradients
from evidence_parts.scores import Interval
from machine import from_1, record_results, require_quiet_machine
from paper_table import MULTIHOP, ROOT, environment, finish, job

CHECKPOINTS = {"early": 256, "middle": 768, "late": 1536}  # episodes of training
KINDS: dict[str, dict[str, Any]] = {"process + outcome": {}, "outcome only": {"process_reward": False}}


def gradients_of(model: str, batches: int, groups: int, seed: int) -> dict[str, np.ndarray]:
    """Gram matrices [batches, batches] of GRPO's gradients at `model`, by kind of reward."""
    return gradients(model, MULTIHOP.env_id, MULTIHOP.env_kwargs[MULTIHOP.env_id], KINDS, batches, groups, seed)


def noise_to_signal(grams: dict[str, np.ndarray], resamples: int = 2000) -> dict[str, Interval]:
    """Of each kind of reward, and by how much it is lower with process rewards; nan where there is no signal."""
    found = bootstrap(grams, "outcome only", resamples)
    ratios = {kind: (1 / value, 1 / high, 1 / low) if low > 0 else (math.nan,) * 3
              for kind, ((value, low, high), _) in found.items()}  # fmt: skip
    return ratios | {"reduction": found["process + outcome"][1]}


def shown(found: Interval, form: str) -> str:
    """An interval in a table."""
    return "no signal" if math.isnan(found[0]) else "{0:{3}} [{1:{3}}, {2:{3}}]".format(*found, form)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=from_1, default=200, help="batches at each checkpoint")
    parser.add_argument("--groups", type=from_1, default=4, help="groups of 8 episodes in a batch")
    parser.add_argument("--checkpoints", nargs="+", choices=CHECKPOINTS, default=list(CHECKPOINTS))
    parser.add_argument("--workers", type=from_1, default=2, help="processes")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    args = parser.parse_args()
    if args.batches < FEWEST:
        parser.error(f"--batches {args.batches}: intervals from a bootstrap need at least {FEWEST} batches")
    require_quiet_machine(args.force)
    os.chdir(ROOT)  # learners run there
    # Everything random is a function of seed and iteration: without annealing a short run is the start of a long one.
    flags = [*environment(MULTIHOP, MULTIHOP.env_id), "--save-model", "--no-anneal-lr"]
    jobs = [job(f"noise {name}", "grpo_llm.py", 1, *flags, *MULTIHOP.flags, "--total-episodes", episodes)
            for name, episodes in CHECKPOINTS.items() if name in args.checkpoints]  # fmt: skip
    models = [str(folder / "model") for folder in finish(jobs, args.workers)]
    with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool:
        futures = [pool.submit(gradients_of, model, args.batches, args.groups, 1) for model in models]
        names = [name for name in CHECKPOINTS if name in args.checkpoints]
        results = {name: noise_to_signal(future.result()) for name, future in zip(names, futures, strict=True)}
    rows = ["| checkpoint | episodes of training | process + outcome | outcome only | lower by |"]
    rows.append("|---|---|---|---|---|")
    for name, values in results.items():
        cells = [shown(values[kind], ".1f") for kind in ("process + outcome", "outcome only")]
        rows.append(f"| {name} | {CHECKPOINTS[name]} | {' | '.join(cells)} | {shown(values['reduction'], '.0%')} |")
    table = "\n".join(rows)
    print(table)
    command = f"python benchmarks/gradient_noise.py --batches {args.batches} --groups {args.groups}"
    if len(results) < len(CHECKPOINTS):
        command += f" --checkpoints {' '.join(results)}"
    facts = {name: {kind: None if math.isnan(one[0]) else one for kind, one in values.items()}
             for name, values in results.items()}  # fmt: skip
    record_results("gradient_noise", facts, table, command, args.force)


if __name__ == "__main__":
    main()
