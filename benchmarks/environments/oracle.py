"""The ceiling of the question answering environments: an oracle that searches for every gold title, then answers.

    python benchmarks/environments/oracle.py --data-dir DATA

DATA holds the folders hotpotqa, 2wikimultihopqa and musique in the official formats. The oracle plays through
`env.step`, in tokens, as a policy would. EM and F1 must be 1 on every question of every split; support recall shows
how much of the evidence BM25 gives to someone who asks for the right titles. Table and JSON go to results/.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import agent_r1  # noqa: F401  (registers the environments)
from agent_r1.task_data import DataNotFoundError

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "common"))
from machine import record_results

ENVIRONMENTS = {
    "AgentR1/HotpotQA-v0": "hotpotqa",
    "AgentR1/2WikiMultihopQA-v0": "2wikimultihopqa",
    "AgentR1/MuSiQue-v0": "musique",
}


def play(env: gym.Env[Any, Any], index: int) -> tuple[float, dict[str, Any]]:
    """One episode of the oracle on task `index`: its return and the last info."""
    _, info = env.reset(seed=0, options={"task_index": index})
    unwrapped: Any = env.unwrapped
    total, over = 0.0, False
    for text in unwrapped.demonstration():
        text += unwrapped.dialect.end_of_turn
        span = np.asarray(unwrapped.tokenizer.encode(text, add_special_tokens=False), np.int32)
        _, reward, terminated, truncated, info = env.step(span)
        total += float(reward)
        over = terminated or truncated
        if over:
            break
    if not over:
        raise RuntimeError(f"the oracle's answer did not end the episode of task {info['task_id']}")
    return total, info


def evaluate(env_id: str, split: str, data_dir: Path, **kwargs: Any) -> dict[str, Any]:
    """Means over every question of a split, and how many episodes were not a success."""
    env = gym.make(env_id, split=split, data_dir=str(data_dir), **kwargs)
    unwrapped: Any = env.unwrapped
    questions = unwrapped.num_tasks
    returns, metrics, failures = 0.0, {"em": 0.0, "f1": 0.0, "support_recall": 0.0}, 0
    for index in range(questions):
        total, info = play(env, index)
        returns += total
        failures += not info["is_success"]
        for name in metrics:
            metrics[name] += info["metrics"][name]
    means = {name: round(value / questions, 4) for name, value in metrics.items()}
    row = {"environment": env_id, "split": split, "questions": questions, "failures": failures}
    return row | means | {"return": round(returns / questions, 4)}


def main() -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder with one folder per set")
    arguments = parser.parse_args()

    table = []
    lines = ["| environment | split | questions | EM | F1 | support recall | return |", "|---|---|---|---|---|---|---|"]
    for env_id, folder in ENVIRONMENTS.items():
        for split in ("train", "dev"):
            try:
                row = evaluate(env_id, split, arguments.data_dir / folder)
            except DataNotFoundError as error:
                sys.exit(str(error))
            table.append(row)
            scores = " | ".join(f"{row[name]:.3f}" for name in ("em", "f1", "support_recall", "return"))
            lines.append(f"| {env_id} | {split} | {row['questions']} | {scores} |")
            print(lines[-1], flush=True)
    record_results("oracle", {"rows": table}, "\n".join(lines),
                   "python benchmarks/environments/oracle.py --data-dir DATA")  # fmt: skip
    return table


if __name__ == "__main__":
    sys.exit(any(row["failures"] for row in main()))
