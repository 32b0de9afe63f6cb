"""What no learner accepts, said before any work."""

from __future__ import annotations

import json
import math
from typing import Any

import gymnasium as gym

from llm_utils import distributed

RATES = ("learning_rate", "critic_learning_rate")
# What has a least value; a share has a largest, too. A learner has some of them.
LEAST = {
    **dict.fromkeys(("num_envs", "total_episodes", "episodes_per_iteration", "num_minibatches", "update_epochs"), 1),
    **dict.fromkeys(("microbatch_tokens", "constant_length", "importance_cap"), 1),
    **dict.fromkeys(("max_staleness", "lora_rank", "dynamic_sampling", "num_threads", "checkpoint_every"), 0),
    **dict.fromkeys(("eval_episodes", "eval_every", "kl_coef", "clip_coef", "clip_coef_high", "clip_coef_value"), 0),
}
SHARES = ("max_invalid", "gamma", "gae_lambda", "gamma_turn")


def check(args: Any) -> None:
    """Refuse arguments that are out of range, or contradict each other, in any learner."""
    for name, least in LEAST.items():
        if getattr(args, name, least) < least:
            raise SystemExit(f"--{name.replace('_', '-')} is at least {least}")
    for name in SHARES:
        if not 0 <= getattr(args, name, 0) <= 1:
            raise SystemExit(f"--{name.replace('_', '-')} is between 0 and 1")
    try:
        readable = isinstance(json.loads(args.env_kwargs), dict)
    except ValueError:
        readable = False
    if ":" not in args.env_id and args.env_id not in gym.registry:  # module:id imports the module first
        known = ", ".join(name for name in gym.registry if name.startswith("AgentR1/"))
        raise SystemExit(f"--env-id {args.env_id}: there is no such environment; there are {known}")
    contradictions = [
        (not readable, f"--env-kwargs takes a JSON object, such as '{{\"max_turns\": 4}}', got {args.env_kwargs}"),
        (args.temperature <= 0, "--temperature is above 0: the loss needs the distribution that was sampled from"),
        (not 0 < args.top_p <= 1, "--top-p is above 0 and at most 1"),
        (any((getattr(args, name, 0) or 0) < 0 for name in RATES), "a learning rate is at least 0"),
        (not 0 < (1 if (gb := getattr(args, "memory_gb", None)) is None else gb) < math.inf, "--memory-gb is above 0"),
        (args.max_grad_norm <= 0, "--max-grad-norm is above 0; a large one clips nothing"),
        (args.reject_ratio != 0 and args.reject_ratio <= 1, "--reject-ratio is a factor above 1, or 0 for none"),
        (
            args.reject_ratio > 0 and args.old_logprobs == "sampler",
            "--reject-ratio compares with the trainer's log-probabilities: give --old-logprobs trainer",
        ),
        (args.num_minibatches > args.episodes_per_iteration, "--num-minibatches exceeds --episodes-per-iteration"),
        (
            args.deterministic and args.max_staleness > 0,
            "--deterministic and --max-staleness contradict each other: what is in flight depends on the clock",
        ),
        (
            args.deterministic and args.engine != "transformers",
            f"--deterministic and --engine {args.engine} contradict each other; use --engine transformers",
        ),
        (
            args.episodes_per_iteration // args.num_minibatches < distributed.launched(),
            f"--num-minibatches {args.num_minibatches} leaves fewer episodes in a step than there are processes",
        ),
        (args.kl_in == "reward" and args.kl_coef <= 0, "--kl-in reward needs a --kl-coef above 0"),
    ]
    for wrong, why in contradictions:
        if wrong:
            raise SystemExit(why)
