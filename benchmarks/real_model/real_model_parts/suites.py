"""What is trained on, and what it is judged by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DataSet:
    """One set: its environment, and where its questions stand."""

    env_id: str
    folder: str
    train: str  # the official file
    heldout: str  # the file that the environment reads in `split`; ours holds training questions
    split: str


@dataclass(frozen=True)
class Suite:
    """What is trained on, what it is judged by, and how."""

    sets: dict[str, DataSet]
    reinforced: list[str]  # the sets that reinforcement sees, one format
    columns: dict[str, list[str]]  # of the table: name -> sets that are averaged
    env_kwargs: dict[str, Any]
    modes: dict[str, str]  # baselines of the model as it comes: label -> mode of evaluate_llm.py
    sft: list[str]
    pairs: list[str]
    rl: list[str]


HOTPOT = DataSet("AgentR1/HotpotQA-v0", "hotpotqa", "hotpot_train_v1.1.json", "hotpot_dev_distractor_v1.json", "dev")
WIKI = Suite(
    {
        "HotpotQA": HOTPOT,
        "2WikiMultihopQA": DataSet("AgentR1/2WikiMultihopQA-v0", "2wikimultihopqa", "train.json", "dev.json", "dev"),
        "MuSiQue": DataSet(
            "AgentR1/MuSiQue-v0", "musique", "musique_ans_v1.0_train.jsonl", "musique_ans_v1.0_dev.jsonl", "dev"
        ),
    },
    ["HotpotQA", "2WikiMultihopQA"],
    {"in domain": ["HotpotQA", "2WikiMultihopQA"], "out of domain": ["MuSiQue"]},
    {"top_k": 1, "max_turns": 6, "max_context_tokens": 2048, "max_action_tokens": 64},
    {"base, naive RAG": "naive_rag", "base tool call": "agent"},
    ["--num-steps", "224", "--batch-size", "8", "--learning-rate", "1e-4", "--warmup-steps", "10"],
    ["--num-steps", "224", "--batch-size", "8", "--learning-rate", "1e-4", "--warmup-steps", "10"],
    ["--total-episodes", "4096", "--episodes-per-iteration", "64", "--num-minibatches", "1", "--num-envs", "64"],
)
GSM8K = Suite(
    {"GSM8K": DataSet("AgentR1/GSM8K-v0", "gsm8k", "train.jsonl", "test.jsonl", "test")},
    ["GSM8K"],
    {},
    {"tools": ["calculator"], "max_turns": 10, "max_context_tokens": 1024, "max_action_tokens": 96},
    {"base tool call": "agent"},
    ["--num-steps", "1681", "--batch-size", "8", "--learning-rate", "1e-4", "--warmup-steps", "50"],
    ["--num-steps", "1681", "--batch-size", "8", "--learning-rate", "1e-4", "--warmup-steps", "50"],
    ["--total-episodes", "4096", "--episodes-per-iteration", "64", "--num-minibatches", "1", "--num-envs", "64"],
)
SUITES = {"wiki": WIKI, "gsm8k": GSM8K}
OUTCOME: dict[str, Any] = {"process_reward": False}
LEARNERS: dict[str, tuple[str, dict[str, Any]]] = {  # label -> script, arguments of the environment
    "GRPO": ("grpo_llm.py", {}),
    "GRPO, outcome only": ("grpo_llm.py", OUTCOME),
    # an episode without an answer pays nothing, where the outcome takes a half or one
    "GRPO, unfinished free": ("grpo_llm.py", OUTCOME | {"unfinished_reward": 0.0}),
    "GRPO, steps paid": ("grpo_llm.py", {"process_reward": {"step_found": 1.0}}),
    "PPO": ("ppo_llm.py", {}),
    "PPO, outcome only": ("ppo_llm.py", OUTCOME),
}
ONLY = {"GRPO, steps paid": "gsm8k"}  # label -> the suite whose environments have what it pays
START = "SFT on demonstrations"
PAIRS = "SFT on question-answer pairs"
ERRORS = ("format", "search", "copying", "reasoning")
Key = tuple[str, str, int]  # policy, set, seed
Figures = dict[str, list[Any]]
