"""Does stable-baselines3's PPO learn to choose the turns of MultihopWorld? One core, under a minute a seed.

    python benchmarks/learning/sb3_choices.py                  # seeds 1 to 3; table and JSON
    python benchmarks/learning/sb3_choices.py --seeds 1 2 3 4 5

`ChoiceInterface` shows PPO the features of up to six candidate turns. Before and after training the greedy policy plays
tasks that it wasn't trained on, and questions with more hops than any of those. `random` chooses blindly among the
candidates that there are. Intervals are 95 %: the wider of Student's t over seeds and Wilson's over tasks.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import agent_r1  # noqa: F401 - registers the environments
from agent_r1.wrappers import ChoiceInterface

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks" / "common"), str(ROOT / "learner")]
from machine import from_0, from_1, given_flags, record_results, require_quiet_machine
from scores import cell

from llm_utils.records.intervals import of_seeds

ENV_ID = "AgentR1/MultihopWorld-v0"
SPLITS = ("test", "more_hops")
SETTINGS = {"n_steps": 128, "batch_size": 256, "learning_rate": 1e-3, "gamma": 1.0, "ent_coef": 0.01}


def make(split: str = "train") -> gym.Env[Any, Any]:
    return ChoiceInterface(gym.make(ENV_ID, split=split))


def success(model: Any, split: str, episodes: int, seed: int = 0) -> float:
    """The share of the first tasks of a split that a policy solves; without a model, one that chooses blindly."""
    env, rng, solved = make(split), np.random.default_rng(seed), 0
    for task in range(episodes):
        observation, _ = env.reset(options={"task_index": task})
        over = False
        while not over:
            if model is None:
                choice = rng.choice(np.flatnonzero(env.action_masks()))
            else:
                choice, _ = model.predict(observation, deterministic=True)
            observation, _, terminated, truncated, info = env.step(choice)
            over = terminated or truncated
        solved += info["is_success"]
    return solved / episodes


def train(seed: int, steps: int, episodes: int) -> dict[str, Any]:
    """One seed: success by split before and after, of a random policy, and processor seconds of training."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    model = PPO("MlpPolicy", make_vec_env(make, n_envs=8, seed=seed), seed=seed, device="cpu", **SETTINGS)
    found: dict[str, Any] = {
        "random": {split: success(None, split, episodes, seed) for split in SPLITS},
        "before": {split: success(model, split, episodes) for split in SPLITS},
    }
    start = time.process_time()
    model.learn(steps)
    found["seconds"] = time.process_time() - start
    return found | {"steps": model.num_timesteps, "after": {split: success(model, split, episodes) for split in SPLITS}}


def table(runs: list[dict[str, Any]], episodes: int) -> str:
    """Success of random choices, before and after training, with 95 % intervals, and how it was measured."""
    rows = ["| success, greedy | random choices | before | after |", "|---|---|---|---|"]
    for split in SPLITS:
        shares = ([run[when][split] for run in runs] for when in ("random", "before", "after"))
        rows.append(f"| `{split}` | {' | '.join(cell(*of_seeds(share, episodes)) for share in shares)} |")
    seconds = [run["seconds"] for run in runs]
    note = (f"{runs[0]['steps']:,} turns a seed, {episodes} tasks a split, {len(runs)} seeds; "
            f"{min(seconds):.0f} to {max(seconds):.0f} seconds of one core to train.")  # fmt: skip
    return "\n".join([*rows, "", note])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=from_0, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=from_1, default=32_768, help="turns that PPO plays while it learns")
    parser.add_argument("--episodes", type=from_1, default=256, help="held-out tasks of each split")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    args = parser.parse_args()
    require_quiet_machine(args.force)
    import torch

    torch.set_num_threads(1)
    runs = []
    for seed in args.seeds:
        runs.append({"seed": seed} | train(seed, args.steps, args.episodes))
        print(runs[-1], flush=True)
    said = table(runs, args.episodes)
    print(said)
    command = "python benchmarks/learning/sb3_choices.py" + given_flags(parser, args, "steps", "episodes", "seeds")
    record_results("sb3_choices", runs, said, command, args.force)


if __name__ == "__main__":
    main()
