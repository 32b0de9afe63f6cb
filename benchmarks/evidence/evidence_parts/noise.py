"""How noisy the policy gradient of GRPO is, and with which rewards and estimator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scores import Interval

FEWEST = 10  # batches: with fewer the bootstrap draws samples without a pair of different batches, whose ratio is nan
UNKNOWN = ("model", "lora_rank", "engine", "kl_coef", "loss_mask", "advantage_mask", "dynamic_sampling", "reject_ratio")


def outcome_only(row: Any) -> None:
    """Take the process rewards out of a finished episode: its outcome is paid at the end, nothing before."""
    for turn in row.turns:
        turn.reward = 0.0
    if row.turns:
        row.turns[-1].reward = sum(value for name, value in row.reward_terms.items() if name.startswith("outcome/"))


def grpo_args(env_id: str, flags: Sequence[str]) -> Any:
    """GRPO's arguments with these flags. SystemExit for those of which `gradients` would know nothing."""
    import grpo_llm
    import tyro

    args = tyro.cli(grpo_llm.Args, args=["--env-id", env_id, *flags])
    for name in UNKNOWN:
        if getattr(args, name) != getattr(grpo_llm.Args, name):
            raise SystemExit(f"--{name.replace('_', '-')}: noise is measured of whole policies without a reference, "
                             "with transformers, of all episodes and the policy's tokens alone")  # fmt: skip
    return args


def gradients(
    model: str, env_id: str, kwargs: dict[str, Any], variants: dict[str, dict[str, Any]], batches: int, groups: int,
    seed: int, flags: Sequence[str] = (),
) -> dict[str, np.ndarray]:  # fmt: skip
    """Gram matrices [batches, batches] of GRPO's gradients at `model`, by variant, of the same episodes.

    A variant is a set of GRPO's arguments, beside those of `flags`, and `process_reward=False` for the outcome alone.
    """
    import grpo_llm
    import gymnasium as gym
    import torch

    from llm_utils.run import Run
    from llm_utils.sampling.rollout import rollout
    from llm_utils.sampling.transformers_engine import TransformersEngine
    from llm_utils.setup.loading import choose_dtype, load_policy
    from llm_utils.trajectory import make_groups

    torch.set_num_threads(1)
    args, device = grpo_args(env_id, flags), torch.device("cpu")
    kwargs = {"num_envs": args.num_envs, "observation": "new", "tokenizer": model, "split": "train", **kwargs}
    envs = gym.make_vec(env_id, **kwargs)
    vocab_size = envs.single_action_space.vocab_size
    policy = load_policy(model, device, dtype=choose_dtype(args.dtype, device))
    engine = TransformersEngine(policy, args.num_envs, vocab_size, args.temperature, args.top_p)
    size = groups * args.group_size
    found: dict[str, list[np.ndarray]] = {name: [] for name in variants}
    tasks = np.random.default_rng(seed).integers(envs.envs[0].num_tasks, size=batches * groups)
    episodes = list(enumerate(np.repeat(tasks, args.group_size).tolist()))
    for first in range(0, len(episodes), 16 * size):  # enough at a time to keep all slots busy
        rows = rollout(envs, engine, episodes[first : first + 16 * size], seed)
        for row in rows:
            row.train_mask = row.action_mask
        for name, variant in sorted(variants.items(), key=lambda item: not item[1].get("process_reward", True)):
            if not variant.get("process_reward", True):  # these come last
                for row in rows:
                    outcome_only(row)
            flags = {key: value for key, value in variant.items() if key != "process_reward"}
            own = replace(args, microbatch_tokens=4096, **flags)
            fields = dict.fromkeys(Run.__dataclass_fields__)
            run = Run(**fields | {"args": own, "policy": policy, "vocab_size": vocab_size})
            for start in range(0, len(rows), size):
                batch = rows[start : start + size]
                in_groups = make_groups(batch, own.group_size, own.gamma)
                grpo_llm.compute_advantages(in_groups, own)  # a batch by itself: scales come from the other groups
                policy.zero_grad()
                grpo_llm.backward(batch, own, run)
                parts = [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
                found[name].append(torch.cat(parts).numpy())
    envs.close()
    return {name: (matrix := np.stack(grads)) @ matrix.T for name, grads in found.items()}


def signal_to_noise(gram: np.ndarray, counts: np.ndarray) -> float:
    """Squared norm of the mean / trace(covariance), from inner products of the gradients of batches.

    `counts` says how often each batch was drawn. The squared norm is the mean inner product of different batches: that
    of the mean itself would hold a part of the noise. Without signal it is around 0, and may be below.
    """
    weights = np.outer(counts, counts).astype(float)
    np.fill_diagonal(weights, 0.0)
    signal = (weights * gram).sum() / weights.sum()
    return float(signal / (np.average(np.diag(gram), weights=counts) - signal))


def bootstrap(
    grams: dict[str, np.ndarray], reference: str, resamples: int = 2000
) -> dict[str, tuple[Interval, Interval]]:
    """Of each variant signal / noise, and by how much its noise / signal is below that of `reference`.

    The second is nan where one of the two has no signal: where an interval of the first reaches 0.
    """
    rng, n = np.random.default_rng(0), len(grams[reference])
    draws = [np.ones(n), *(np.bincount(rng.integers(n, size=n), minlength=n) for _ in range(resamples))]
    values = {name: np.array([signal_to_noise(gram, counts) for counts in draws]) for name, gram in grams.items()}

    def interval(drawn: np.ndarray) -> Interval:
        low, high = np.percentile(drawn[1:], [2.5, 97.5])
        return float(drawn[0]), float(low), float(high)

    found = {name: interval(drawn) for name, drawn in values.items()}
    nothing = (float("nan"), float("nan"), float("nan"))
    return {
        name: (ratio, interval(1 - values[reference] / values[name])
               if min(ratio[1], found[reference][1]) > 0 else nothing)
        for name, ratio in found.items()
    }  # fmt: skip
