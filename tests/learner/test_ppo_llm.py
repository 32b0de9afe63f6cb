"""learner/ppo_llm.py as a script: a run, Ctrl-C and going on, and what it refuses."""

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import processes
import pytest
from safetensors import torch as safetensors

from llm_utils.value_model import load_critic, weights_digest

ENV_KWARGS = json.dumps({"max_turns": 2, "max_action_tokens": 8})
SMALL = ["--tokenizer", "byte", "--env-kwargs", ENV_KWARGS, "--num-envs", "4", "--episodes-per-iteration", "8"]
SMALL += ["--num-threads", "1", "--eval-episodes", "4", "--num-minibatches", "2", "--critic-warmup", "0"]
PER_TOKEN = ("tokens", "action_mask", "rewards", "values", "logprobs", "advantages", "versions")


def trajectories(run_dir):
    return [json.loads(line) for line in (run_dir / "trajectories.jsonl").read_text().splitlines()]


def test_a_run_leaves_what_is_promised(learn, policy_folder):
    flags = ["--total-episodes", 16, "--save-model", "--log-trajectories", 3]
    learn("ppo_llm", "--model", policy_folder, *SMALL, *flags)
    (run_dir,) = Path("runs").iterdir()
    assert run_dir.name.startswith("AgentR1_MultihopWorld-v0__ppo_llm__1__")
    summary = json.loads((run_dir / "summary.json").read_text())
    for name in ("exact_match_first", "exact_match_last", "success_first", "success_last"):
        assert 0 <= summary[f"eval/{name}"] <= 1
    assert summary["train_seconds"] > 0
    assert summary["args"]["total_episodes"] == 16
    rows = trajectories(run_dir)
    assert [row["iteration"] for row in rows] == [1, 1, 1, 2, 2, 2]
    for row in rows:
        lengths = {len(row[k]) for k in PER_TOKEN}
        assert lengths == {len(row["tokens"])}
        assert row["terminated"] != row["truncated"]
        mask = np.array(row["action_mask"], bool)
        assert not mask[: row["prompt_length"]].any() and mask.any()
        assert np.array_equal(np.flatnonzero(mask), np.concatenate([np.arange(a, b) for a, b in row["turns"]]))
        assert set(np.array(row["versions"])[mask]) == {row["iteration"] - 1}
        for name in ("rewards", "logprobs", "advantages", "versions"):
            assert not np.array(row[name])[~mask].any()
        assert sum(row["rewards"]) == pytest.approx(row["stats"]["return"], abs=1e-5)
    before = safetensors.load_file(policy_folder / "model.safetensors")
    after = safetensors.load_file(run_dir / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    assert any((before[name] != after[name]).any() for name in before)
    assert load_critic(run_dir)[1].policy == weights_digest(after.items())

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir)).Reload()
    logged = set(events.Tags()["scalars"])
    assert logged >= {f"charts/{x}" for x in ("SPS", "episodic_return", "episodic_length", "success", "exact_match")}
    assert logged >= {f"losses/{x}" for x in ("policy_loss", "value_loss", "approx_kl", "clipfrac", "entropy")}
    assert logged >= {"losses/explained_variance", "time/rollout", "time/train", "eval/success", "charts/learning_rate"}
    first = events.Scalars("losses/clipfrac")[0]
    assert 0 <= first.value <= 1


def test_the_same_seed_gives_the_same_weights(learn, policy_folder):
    weights = []
    for seed in (1, 1, 2):
        arguments = ["--total-episodes", 16, "--save-model", "--eval-episodes", 0, "--seed", seed]
        run_dir = learn("ppo_llm", "--model", policy_folder, *SMALL, *arguments, "--exp-name", f"run{len(weights)}")
        weights.append(safetensors.load_file(run_dir / "model" / "model.safetensors"))
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
    assert any((weights[0][name] != weights[2][name]).any() for name in weights[0])


@pytest.mark.parametrize(
    "options",
    [
        ["--advantage", "turns", "--truncation", "bootstrap", "--adv-norm", "turn"],
        ["--advantage", "bilevel", "--old-logprobs", "trainer", "--temperature", "0.7", "--ent-coef", "0.01"],
        ["--no-loss-mask", "--no-advantage-mask"],
        ["--kl-coef", "0.1", "--kl-in", "reward", "--update-epochs", "2", "--target-kl", "0.01", "--top-p", "0.9"],
        ["--lora-rank", "2", "--gradient-checkpointing", "on", "--kl-coef", "0.1", "--kl-estimator", "k2"],
        ["--max-staleness", "1", "--no-anneal-lr"],
    ],
    ids=lambda options: options[0],
)
def test_options_run(learn, policy_folder, options):
    run_dir = learn("ppo_llm", "--model", policy_folder, *SMALL, "--total-episodes", 8, "--eval-episodes", 0, *options)
    for row in trajectories(run_dir):
        assert np.isfinite(row["advantages"]).all()
        if "bootstrap" in options:
            assert not row["truncated"] or not any(terms.get("outcome/unfinished") for terms in row["reward_terms"])


@pytest.mark.slow
def test_ctrl_c_and_resume_end_where_an_uninterrupted_run_ends(learn, policy_folder):
    options = ["--model", str(policy_folder), *map(str, SMALL), "--total-episodes", "48", "--save-model"]
    process = processes.start("ppo_llm", Path.cwd(), *options, "--exp-name", "stopped")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.is_alive():
        files = list(Path("runs").glob("*stopped*/trajectories.jsonl"))
        if files and '"iteration": 2' in files[0].read_text():
            break
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    process.join(120)
    output = Path("log.txt").read_text()
    assert process.exitcode == 130, output
    (stopped,) = Path("runs").glob("*stopped*")
    assert f"--resume {stopped}" in output
    done = json.loads((stopped / "checkpoint" / "state.json").read_text())["run"]["iteration"]
    assert 1 <= done < 6  # rows are written just before the boundary

    learn("ppo_llm", "--resume", stopped)
    whole = learn("ppo_llm", *options, "--exp-name", "whole")
    assert whole != stopped
    expected = safetensors.load_file(whole / "model" / "model.safetensors")
    got = safetensors.load_file(stopped / "model" / "model.safetensors")
    assert all((expected[name] == got[name]).all() for name in expected)
    for name in ("tokens", "iteration", "advantages"):
        assert [row[name] for row in trajectories(stopped)] == [row[name] for row in trajectories(whole)]
    one, two = (json.loads((folder / "summary.json").read_text()) for folder in (stopped, whole))
    assert one["eval/success_last"] == two["eval/success_last"]


def test_a_loss_that_is_not_finite_stops_the_run(learn, policy_folder):
    with pytest.raises(SystemExit, match="stopped: .*(nan|inf|finite)"):
        learn("ppo_llm", "--model", policy_folder, *SMALL, "--total-episodes", 24, "--critic-learning-rate", "1e30")
    (run_dir,) = Path("runs").iterdir()
    rows = [json.loads(line) for line in (run_dir / "not_finite.jsonl").read_text().splitlines()]
    assert rows and all(row["tokens"] for row in rows)


def test_clear_errors_before_any_work(learn, policy_folder, tmp_path, vocab_size):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tiny = Qwen2Config(vocab_size=vocab_size - 1, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    tiny.num_attention_heads = tiny.num_key_value_heads = 2
    Qwen2ForCausalLM(tiny).save_pretrained(tmp_path / "short")
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        (["--model", tmp_path / "empty"], "has no config.json"),
        (["--model", tmp_path / "nowhere"], "no such folder"),
        (["--model", tmp_path / "short"], f"the tokenizer has {vocab_size} tokens"),
        (["--model", policy_folder, "--resume", tmp_path], "no checkpoint"),
        (["--model", policy_folder, "--advantage", "turns", "--no-advantage-mask"], "with --no-advantage-mask"),
    ):
        with pytest.raises(SystemExit, match=message):
            learn("ppo_llm", *SMALL, *arguments)
    assert not Path("runs").exists()


def test_a_checkpoint_of_another_algorithm_or_model_is_refused(learn, policy_folder, tmp_path):
    run_dir = learn("ppo_llm", "--model", policy_folder, *SMALL, "--total-episodes", 8, "--checkpoint-every", 1)
    state = json.loads((run_dir / "checkpoint" / "state.json").read_text())
    other = {**state, "algorithm": "grpo_llm"}
    (run_dir / "checkpoint" / "state.json").write_text(json.dumps(other))
    with pytest.raises(SystemExit, match="checkpoint is of grpo_llm.py, but this is ppo_llm.py"):
        learn("ppo_llm", "--resume", run_dir)
    from transformers import Qwen2Config, Qwen2ForCausalLM

    wide = Qwen2Config(vocab_size=300, hidden_size=64, intermediate_size=16, num_hidden_layers=1)
    wide.num_attention_heads = wide.num_key_value_heads = 2
    Qwen2ForCausalLM(wide).save_pretrained(tmp_path / "wide")
    state["args"]["model"] = str(tmp_path / "wide")
    (run_dir / "checkpoint" / "state.json").write_text(json.dumps(state))
    with pytest.raises(SystemExit, match="does not fit this model"):
        learn("ppo_llm", "--resume", run_dir)
