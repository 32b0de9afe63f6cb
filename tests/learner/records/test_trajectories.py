"""What a run leaves to be read: rows in the schema of `RecordTrajectories`, and the way to print them."""

import json

import numpy as np
import pytest

from agent_r1 import show
from llm_utils.records import commands

FLAGS = ["--env-kwargs", json.dumps({"max_turns": 2, "max_action_tokens": 10}), "--num-envs", 8, "--num-threads", 1]
FLAGS += ["--episodes-per-iteration", 8, "--num-minibatches", 1, "--eval-episodes", 0]
OF_LEARNERS = {"iteration", "episode", "prompt_length", "stats", "segment_starts"}
OF_LEARNERS |= {"versions", "values", "logprobs", "advantages"}


def read(run_dir):
    return [json.loads(line) for line in (run_dir / "trajectories.jsonl").read_text().splitlines()]


def test_a_learner_writes_the_rows_of_record_trajectories(learn, make_envs, tmp_path, capsys):
    from agent_r1.wrappers import RecordTrajectories

    run_dir = learn("rloo_llm", *FLAGS, "--group-size", 2, "--total-episodes", 16, "--log-trajectories", "all")
    rows = read(run_dir)
    assert [row["episode"] for row in rows] == list(range(16))
    envs = RecordTrajectories(make_envs(1, max_turns=1), tmp_path / "rows.jsonl")
    envs.reset(seed=1)
    envs.step([np.full(3, 65, np.int32)])
    (other,) = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    for row in rows:
        assert row.keys() == other.keys() | OF_LEARNERS
        assert {name: type(row[name]) for name in ("messages", "turns", "rewards", "turn_rewards", "reward_terms")} == {
            name: type(other[name]) for name in ("messages", "turns", "rewards", "turn_rewards", "reward_terms")
        }
        assert row["env_id"] == "AgentR1/MultihopWorld-v0" and row["model"] == "tiny" and row["split"] == "train"
        assert "policies/MultihopWorld-v0" in row["tokenizer"] and row["messages"][1]["content"] == row["question"]
        assert [m["role"] for m in row["messages"]].count("assistant") == len(row["turns"]) == len(row["turn_rewards"])
        assert row["turn_rewards"] == pytest.approx([sum(terms.values()) for terms in row["reward_terms"]])
        assert row["turn_rewards"] == pytest.approx([sum(row["rewards"][a:b]) for a, b in row["turns"]], abs=1e-5)
        assert sum(row["turn_rewards"]) == pytest.approx(row["stats"]["return"])
        assert bool(row["is_success"]) == bool(row["stats"]["success"]) and row["fault"] is None
    printed = capsys.readouterr().out
    assert f"written to {run_dir}, the model to {run_dir}/model\n" in printed
    assert f" -m agent_r1.show {run_dir}\n" in printed
    show.main([str(run_dir), "--episodes", "2"])
    printed = capsys.readouterr().out
    assert printed.count("iteration 2, task ") == 2 and rows[-1]["question"] in printed
    show.main([str(run_dir), "--episodes", "1", "--raw"])
    printed = capsys.readouterr().out
    assert f"<|im_start|>user\n{rows[-1]['question']}<|im_end|>" in printed
    assert printed.count("<|im_start|>assistant\n\u27ea") == len(rows[-1]["turns"])


@pytest.mark.parametrize(("words", "logged"), [([], 8), (["--log-trajectories", 3], 3), (["--log-trajectories", 0], 0)])
def test_so_many_rows_of_an_iteration_are_logged(learn, words, logged):
    run_dir = learn("grpo_llm", *FLAGS, "--group-size", 2, "--total-episodes", 8, *words)
    assert [row["episode"] for row in read(run_dir)] == list(range(logged))


def test_a_resumed_run_may_log_others(learn):
    flags = [*FLAGS, "--group-size", 2, "--checkpoint-every", 1]
    run_dir = learn("rloo_llm", *flags, "--total-episodes", 8, "--log-trajectories", "all")
    learn("rloo_llm", "--resume", run_dir, "--total-episodes", 16)
    learn("rloo_llm", "--resume", run_dir, "--total-episodes", 24, "--log-trajectories", 1)
    assert [row["iteration"] for row in read(run_dir)] == [1] * 8 + [2] * 8 + [3]


def test_all_rows_are_those_of_faults_too(learn):
    kwargs = {"kind": "call", "rate": 0.5, "max_turns": 3, "max_action_tokens": 40}
    flags = ["--env-id", "faulty_world:AgentR1Faulty/MultihopWorld-v0", *FLAGS, "--env-kwargs", json.dumps(kwargs)]
    from llm_utils.setup.sources import model_source

    flags += ["--model", model_source("tiny", "AgentR1/MultihopWorld-v0"), "--max-invalid", 1, "--group-size", 2]
    rows = read(learn("grpo_llm", *flags, "--total-episodes", 8, "--log-trajectories", "all"))
    assert len(rows) == 8 and any(row["fault"] for row in rows) and not all(row["fault"] for row in rows)
    for row in rows:
        assert (row["truncation_reason"] == "fault") == bool(row["fault"])
        assert not row["fault"] or not any(row["advantages"])


@pytest.mark.parametrize("words", [["-1"], ["some"]])
def test_a_wrong_number_of_rows_is_refused(learn, words):
    with pytest.raises(SystemExit):
        learn("grpo_llm", *FLAGS, "--log-trajectories", *words)


def test_supervised_training_and_evaluations_name_their_folder(learn, tmp_path, capsys):
    row = {"tokens": [5] * 20, "action_mask": [0] * 10 + [1] * 10}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    run_dir = learn("sft_llm", "--model", "tiny", "--data", tmp_path / "rows.jsonl", "--num-steps", 1)
    assert f"written to {run_dir}, the model to {run_dir / 'model'}\n" in capsys.readouterr().out
    run_dir = learn("evaluate_llm", "--episodes", 2, "--num-envs", 2, "--num-threads", 1)
    assert f"written to {run_dir}; {commands.show(run_dir)} prints episodes\n" in capsys.readouterr().out
    rows = read(run_dir)
    assert [row["mode"] for row in rows] == ["agent"] * 2 and all(row["messages"] and row["model"] for row in rows)
    show.main([str(run_dir), "--raw"])
    assert capsys.readouterr().out.count("<|im_start|>assistant\n\u27ea") == sum(len(row["turns"]) for row in rows)
