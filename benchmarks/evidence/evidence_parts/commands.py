"""Commands of the learners that several parts give: imitate, reinforce, play."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from scores import environment

from evidence_parts.runs import Run

CRAFT = "AgentR1/CraftWorld-v0"
EPISODES = 5120  # of reinforcement learning
LEARNERS = {"GRPO": "grpo_llm.py", "PPO": "ppo_llm.py", "RLOO": "rloo_llm.py", "REINFORCE++": "reinforce_pp_llm.py"}


@dataclass(frozen=True)
class World:
    """Where it is shown: what is trained on, and what it is judged by."""

    env_id: str
    kwargs: dict[str, Any]
    columns: dict[str, tuple[str, dict[str, Any]]]  # name -> split, arguments of the environment


def imitate(
    world: World, label: str, seed: int, steps: int, *flags: object, rate: float = 3e-4, model: Run | str = "tiny"
) -> Run:
    """Supervised training of a policy, the shipped one by default, on other tasks for each seed."""
    more = ["--model", model, "--num-steps", steps, "--batch-size", 32, "--warmup-steps", 10]
    more += ["--learning-rate", rate, "--eval-every", 0, *flags]
    if "--data" not in flags:
        more += ["--eval-demonstrations", 0, "--num-workers", 0, "--first-demonstration", 10_000 * seed]
    return Run(label, "sft_llm.py", seed, (*environment(world.env_id, world.kwargs), *more))


def reinforce(
    world: World, label: str, learner: str, seed: int, model: Run | str, more: str, episodes: int = EPISODES
) -> Run:
    """Reinforcement learning from a policy."""
    flags = ["--model", model, "--total-episodes", episodes, "--eval-episodes", 0, "--save-model"]
    flags += ["--learning-rate", 3e-4, *["--critic-learning-rate", 1e-3] * (learner == "PPO"), *shlex.split(more)]
    return Run(label, LEARNERS[learner], seed, (*environment(world.env_id, world.kwargs), *flags))


def play(
    world: World, label: str, seed: int, split: str, kwargs: dict[str, Any], model: Run | str, episodes: int,
    temperature: int = 0, first: int = 0, mode: str = "agent",
) -> Run:  # fmt: skip
    """An evaluation."""
    flags = ["--model", model, "--split", split, "--episodes", episodes, "--temperature", temperature]
    flags += ["--first-episode", first, *["--mode", mode] * (mode != "agent")]
    label = f"{label}, {split}{', sampled' * bool(temperature)}"
    return Run(label, "evaluate_llm.py", seed, (*environment(world.env_id, kwargs), *flags))
