"""CraftWorld's shipped policy is a start for reinforcement learning: readable, curious, and seldom right."""

import json
import runpy
import sys
from collections import Counter
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "learner" / "evaluate_llm.py"


@pytest.mark.slow
def test_the_tiny_policy_explores(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    flags = ["--env-id", "AgentR1/CraftWorld-v0", "--env-kwargs", '{"depth": 3}', "--temperature", "1"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *flags, "--episodes", "128", "--num-threads", "1", "--no-cuda"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    (folder,) = Path("runs").iterdir()
    rows = [json.loads(line) for line in (folder / "trajectories.jsonl").read_text().splitlines()]
    turns = [terms for row in rows for terms in row["reward_terms"]]
    malformed = sum("process/malformed_call" in terms or "process/no_action" in terms for terms in turns)
    assert len(turns) > 3 * len(rows) and malformed < 0.05 * len(turns)
    worked = Counter(call["name"] for row in rows for calls in row["tool_calls"] for call in calls if call["ok"])
    assert min(worked[name] for name in ("recipe", "get", "craft", "inventory")) >= 10
    assert sum(len(row["reward_terms"]) > 8 for row in rows) > 5  # some go far
    assert sum(row["is_success"] for row in rows) < 13
