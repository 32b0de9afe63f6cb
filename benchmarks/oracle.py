"""The ceiling of the question answering environments: an oracle that searches for every gold title, then answers.

    python benchmarks/oracle.py --data-dir DATA

DATA holds the folders hotpotqa, 2wikimultihopqa and musique in the official formats. The oracle plays through
`env.step`, in tokens, as a policy would. EM and F1 must be 1 on every question of every split; support recall shows
how much of the evidence BM25 gives to someone who asks for the right titles. Prints a table and writes it to
benchmarks/results/oracle.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import agent_r1  # noqa: F401  (registers the environments)

RESULTS = Path(__file__).parent / "results" / "oracle.json"
ENVIRONMENTS = {
    "AgentR1/HotpotQA-v0": "hotpotqa",
    "AgentR1/2WikiMultihopQA-v0": "2wikimultihopqa",
    "AgentR1/MuSiQue-v0": "musique",
}


def oracle_turns(env: Any) -> Iterator[str]:
    """The oracle's turns on the task at hand, as text: a search for each gold title, then the gold answer."""
    for title in env.task.metadata["supports"]:
        yield env.dialect.tool_call("search", {"query": title}) + env.dialect.end_of_turn
    yield f"<answer>{env.task.answers[0]}</answer>{env.dialect.end_of_turn}"


def play(env: gym.Env[Any, Any], index: int) -> tuple[float, dict[str, Any]]:
    """One episode of the oracle on task `index`: its return and the last info."""
    _, info = env.reset(seed=0, options={"task_index": index})
    unwrapped: Any = env.unwrapped
    total, over = 0.0, False
    for text in oracle_turns(unwrapped):
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
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()

    table = []
    print(f"{'environment':28} {'split':6} {'questions':>9} {'EM':>6} {'F1':>6} {'support recall':>14} {'return':>7}")
    for env_id, folder in ENVIRONMENTS.items():
        for split in ("train", "dev"):
            row = evaluate(env_id, split, arguments.data_dir / folder)
            table.append(row)
            scores = f"{row['em']:6.3f} {row['f1']:6.3f} {row['support_recall']:14.3f} {row['return']:7.3f}"
            print(f"{env_id:28} {split:6} {row['questions']:9d} {scores}")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps({"rows": table}, indent=2) + "\n")
    return table


if __name__ == "__main__":
    sys.exit(any(row["failures"] for row in main()))
