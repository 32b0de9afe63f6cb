"""How noisy is the policy gradient, with process rewards and with the outcome alone?

    python benchmarks/gradient_noise.py    # 3 checkpoints of GRPO on MultihopWorld, 200 batches of 32 episodes at each

At each checkpoint the same episodes are paid both ways, and GRPO computes the gradient of every batch. The ratio of
noise to signal is trace(covariance) / squared norm of the mean: the scale of the rewards doesn't matter. Intervals are
95 %, from a bootstrap over batches. Training runs that are finished are not repeated.
"""

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
from evidence_parts.noise import FEWEST, gradients, signal_to_noise
from machine import from_1, record_results, require_quiet_machine
from paper_table import MULTIHOP, ROOT, environment, finish, job

CHECKPOINTS = {"early": 256, "middle": 768, "late": 1536}  # episodes of training
KINDS: dict[str, dict[str, Any]] = {"process + outcome": {}, "outcome only": {"process_reward": False}}


def gradients_of(model: str, batches: int, groups: int, seed: int) -> dict[str, np.ndarray]:
    """Gram matrices [batches, batches] of GRPO's gradients at `model`, by kind of reward."""
    return gradients(model, MULTIHOP.env_id, MULTIHOP.env_kwargs[MULTIHOP.env_id], KINDS, batches, groups, seed)


def noise_to_signal(gram: np.ndarray, counts: np.ndarray) -> float:
    """trace(covariance) / squared norm of the mean: one over `signal_to_noise`."""
    return 1 / signal_to_noise(gram, counts)


def bootstrap(grams: dict[str, np.ndarray], resamples: int = 2000) -> dict[str, tuple[float, float, float]]:
    """Value, low, high of the ratio of each kind of reward, and of how much lower it is with process rewards."""
    rng, n = np.random.default_rng(0), len(grams["outcome only"])
    draws = [np.ones(n), *(np.bincount(rng.integers(n, size=n), minlength=n) for _ in range(resamples))]
    values = {kind: np.array([noise_to_signal(gram, counts) for counts in draws]) for kind, gram in grams.items()}
    values["reduction"] = 1 - values["process + outcome"] / values["outcome only"]
    return {name: (v[0], *np.percentile(v[1:], [2.5, 97.5])) for name, v in values.items()}


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
        results = {name: bootstrap(future.result()) for name, future in zip(names, futures, strict=True)}
    rows = ["| checkpoint | episodes of training | process + outcome | outcome only | lower by |"]
    rows.append("|---|---|---|---|---|")
    for name, values in results.items():
        dense, sparse = ("{:.1f} [{:.1f}, {:.1f}]".format(*values[k]) for k in ("process + outcome", "outcome only"))
        less = "{:.0%} [{:.0%}, {:.0%}]".format(*values["reduction"])
        rows.append(f"| {name} | {CHECKPOINTS[name]} | {dense} | {sparse} | {less} |")
    table = "\n".join(rows)
    print(table)
    command = f"python benchmarks/gradient_noise.py --batches {args.batches} --groups {args.groups}"
    if len(results) < len(CHECKPOINTS):
        command += f" --checkpoints {' '.join(results)}"
    record_results("gradient_noise", results, table, command, args.force)


if __name__ == "__main__":
    main()
