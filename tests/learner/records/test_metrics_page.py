"""docs/learners/metrics.md and sft_llm.md name what a run logs, and what they name is logged."""

import json
import re
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

from llm_utils.setup.sources import model_source

DOCS = Path(__file__).parents[3] / "docs" / "learners"
ENV_ID = "AgentR1/MultihopWorld-v0"
FAULTY = ["--env-id", "faulty_world:AgentR1Faulty/MultihopWorld-v0", "--model", model_source("tiny", ENV_ID)]
FAULTY += ["--env-kwargs", json.dumps({"kind": "call", "rate": 0.4, "max_turns": 4, "max_action_tokens": 40})]
FAULTY += ["--num-envs", 16, "--num-threads", 1, "--num-minibatches", 1, "--eval-episodes", 16, "--max-invalid", 1]
FAULTY += ["--episodes-per-iteration", 32]


def tags(run_dir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return set(EventAccumulator(str(run_dir)).Reload().Tags()["scalars"])


def named(page):
    """The names in the first column of the page's table of metrics, written out: `a_0`, `_1` is a_0 and a_1."""
    found = set()
    for line in (DOCS / page).read_text().splitlines():
        names = re.findall(r"`([^`]+)`", line.split("|")[1]) if line.startswith("| `") else []
        found |= {names[0].rpartition("_")[0] + name if name.startswith("_") else name for name in names}
    return {name for name in found if "/" in name}


def test_what_a_learner_logs_is_on_the_page_and_what_is_on_the_page_is_logged(learn):
    gigpo = ["--kl-coef", 0.1, "--total-episodes", 64]
    gigpo += ["--replay-successes", 0.5, "--drop-void-turns"]
    ppo = ["--critic-warmup", 0, "--total-episodes", 32, "--horizon-schedule", "3"]
    run_dir = learn("gigpo_llm", *FAULTY, *gigpo)  # it logs what GRPO does, and more
    logged = tags(run_dir) | tags(learn("ppo_llm", *FAULTY, *ppo)) | tags(learn("arpo_llm", *FAULTY, *ppo[2:]))
    statistics = json.loads((run_dir / "trajectories.jsonl").read_text().splitlines()[0])["stats"].keys()
    page = named("metrics.md")
    assert {"rewards/*", "eval/*", "charts/invalid_calls_3+"} <= page
    env = gym.make(ENV_ID).unwrapped
    env.reset(seed=0)
    of_task = env.judge_answer("")[1].keys()  # the page names some for example
    for tag in sorted(logged - page):
        group, _, name = tag.partition("/")
        assert group == "rewards" or name in {"charts": of_task, "eval": statistics}.get(group, ()), tag
    some = {name for name in page if not name.startswith("charts/invalid_calls_")} - {"rewards/*", "eval/*"}
    some -= set() if torch.cuda.is_available() else {"memory/peak_gb"}
    assert some <= logged
    assert len({tag for tag in logged if tag.startswith("charts/invalid_calls_")} & page) > 1


def test_what_supervised_training_logs_is_on_its_page(learn, tmp_path):
    rng = np.random.default_rng(0)
    row = {"tokens": rng.integers(40, size=20).tolist(), "action_mask": [0] * 10 + [1] * 10}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    data = ["--data", tmp_path / "rows.jsonl", "--eval-data", tmp_path / "rows.jsonl", "--num-steps", 1]
    assert tags(learn("sft_llm", "--model", "tiny", *data, "--num-threads", 1)) == named("sft_llm.md")
