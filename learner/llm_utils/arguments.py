"""What no learner accepts, said before any work."""

from __future__ import annotations

import json
from typing import Any

import gymnasium as gym

from llm_utils import distributed

RATES = ("learning_rate", "critic_learning_rate")


def check(args: Any) -> None:
    """Refuse arguments that are out of range, or contradict each other, in any learner."""
    counts = ("num_envs", "total_episodes", "episodes_per_iteration", "num_minibatches", "microbatch_tokens")
    for name in (*counts, "constant_length"):
        if getattr(args, name, 1) < 1:
            raise SystemExit(f"--{name.replace('_', '-')} is at least 1")
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
        (args.max_grad_norm <= 0, "--max-grad-norm is above 0; a large one clips nothing"),
        (not 0 <= args.max_invalid <= 1, "--max-invalid is a share, from 0 to 1"),
        (args.importance_cap <= 0, "--importance-cap is above 0"),
        (args.reject_ratio != 0 and args.reject_ratio <= 1, "--reject-ratio is a factor above 1, or 0 for none"),
        (
            args.reject_ratio > 0 and args.old_logprobs == "sampler",
            "--reject-ratio compares with the trainer's log-probabilities: give --old-logprobs trainer",
        ),
        (args.num_minibatches > args.episodes_per_iteration, "--num-minibatches exceeds --episodes-per-iteration"),
        (args.max_staleness < 0 or args.lora_rank < 0, "--max-staleness and --lora-rank are at least 0"),
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
