"""Runs that were killed or stopped, and go on: at the end nothing tells them from runs that were left alone."""

import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path

import kill_resume
import pytest
from interrupted import interrupted_after
from safetensors import torch as safetensors

from llm_utils import distributed, run
from llm_utils.recovery import checkpoint

SMALL = ["--env-kwargs", json.dumps({"max_turns": 2, "max_action_tokens": 10}), "--num-envs", "8", "--temperature", "2"]
SMALL += ["--num-threads", "1", "--eval-episodes", "4", "--episodes-per-iteration", "8", "--num-minibatches", "2"]
SMALL += ["--checkpoint-every", "1", "--save-model", "--learning-rate", "1e-3"]
OF_SCRIPT = {"grpo_llm": ["--group-size", "4"], "ppo_llm": ["--critic-warmup", "1"]}


def rows(run_dir):
    return [json.loads(line) for line in (run_dir / "trajectories.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("script", [pytest.param("ppo_llm", marks=pytest.mark.slow), "grpo_llm"])
def test_killed_twice_and_resumed_the_weights_are_the_same_to_the_bit(learn, tmp_path, script):
    """benchmarks/learning/kill_resume.py does it with more moments."""
    folder, moments = tmp_path / "killed", random.Random()  # other moments in every run of the tests
    flags = [*SMALL, *OF_SCRIPT[script], "--total-episodes", "40", "--deterministic"]
    for first, last in ((1, 2), (3, 4)):
        resume = ["--resume", str(kill_resume.run_of(folder))] if folder.exists() else []
        process = kill_resume.start(script, folder, *(resume or flags))
        moment = moments.randint(first, last), moments.uniform(0, 0.3)
        killed = kill_resume.kill(process, folder, *moment)  # None on a machine so slow that the run was over
        assert killed or process.exitcode == 0, (folder / "log.txt").read_text()
    stopped, whole = kill_resume.run_of(folder), learn(script, *flags)
    learn(script, "--resume", stopped)
    assert kill_resume.differences(folder, tmp_path) == [], moment
    one, two = (json.loads((run_dir / "summary.json").read_text()) for run_dir in (stopped, whole))
    assert one["finished"] and one["eval/success_last"] == two["eval/success_last"]


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("grpo_llm", ["--lora-rank", 2, "--kl-coef", 0.1]),  # the reference is the policy at the start of the run
        pytest.param(
            "grpo_llm",
            ["--old-logprobs", "trainer", "--dynamic-sampling", 1, "--gradient-checkpointing", "on"],
            marks=pytest.mark.slow,
        ),
        pytest.param("ppo_llm", ["--lora-rank", 2, "--update-epochs", 2], marks=pytest.mark.slow),
        pytest.param("ppo_llm", ["--kl-coef", 0.1, "--kl-in", "reward"], marks=pytest.mark.slow),
    ],
)
def test_with_other_options_too(learn, monkeypatch, script, options):
    flags = [*SMALL, *OF_SCRIPT[script], "--total-episodes", 24, "--deterministic", *options]
    whole = learn(script, *flags, "--exp-name", "whole")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "Checkpointer", interrupted_after(1))
        with pytest.raises(SystemExit):
            learn(script, *flags, "--exp-name", "stopped")
    (stopped,) = Path("runs").glob("*stopped*")
    assert not (stopped / "model").exists()
    learn(script, "--resume", stopped)
    one, two = (safetensors.load_file(folder / "model" / "model.safetensors") for folder in (whole, stopped))
    assert one.keys() == two.keys() and all((one[name] == two[name]).all() for name in one)
    assert (whole / "trajectories.jsonl").read_text() == (stopped / "trajectories.jsonl").read_text()


def test_an_evaluation_that_was_cut_short_is_done_again(learn, monkeypatch):
    """That of the start, of iteration 2, or of the end: afterwards nothing tells the run from an undisturbed one."""
    flags = [*SMALL, *OF_SCRIPT["grpo_llm"], "--total-episodes", 24, "--eval-every", 2, "--deterministic"]
    whole, play = evaluations(learn("grpo_llm", *flags, "--exp-name", "whole")), run.rollout
    assert len(whole["eval/success"]) == 3
    for number in (1, 2, 3):
        calls = []

        def play_or_stop(*args, number=number, calls=calls):
            calls.append(args)
            if len(calls) == number:
                os.kill(os.getpid(), signal.SIGTERM)
            return play(*args)

        with monkeypatch.context() as patch, pytest.raises(SystemExit, match="143"):
            patch.setattr(run, "rollout", play_or_stop)  # only evaluations call it
            learn("grpo_llm", *flags, "--exp-name", f"stopped{number}")
        (stopped,) = Path("runs").glob(f"*stopped{number}*")
        learn("grpo_llm", "--resume", stopped)
        assert evaluations(stopped) == whole


def evaluations(run_dir):
    """All that the log and the summary say of evaluations, and whether the run is over."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir)).Reload()
    names = [name for name in events.Tags()["scalars"] if name.startswith("eval/")]
    summary = json.loads((run_dir / "summary.json").read_text())
    found = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in names}
    return found | {name: value for name, value in summary.items() if name.startswith("eval/") or name == "finished"}


def test_rows_that_were_in_flight_start_again_and_none_is_lost(learn, monkeypatch):
    flags = ["--log-trajectories", 8, *SMALL, *OF_SCRIPT["grpo_llm"], "--total-episodes", 40, "--max-staleness", 2]
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "Checkpointer", interrupted_after(1))
        with pytest.raises(SystemExit):
            learn("grpo_llm", *flags)
    (run_dir,) = Path("runs").iterdir()
    learn("grpo_llm", "--resume", run_dir)
    assert [row["episode"] for row in rows(run_dir)] == list(range(40))
    for row in rows(run_dir):
        versions = {v for v, sampled in zip(row["versions"], row["action_mask"], strict=True) if sampled}
        assert all(0 <= row["iteration"] - 1 - version <= 2 for version in versions)
        assert row["iteration"] == 1 or min(versions) >= 1  # nothing of before the interruption is left


def test_a_run_that_was_over_stays_as_it_is(learn, tmp_path):
    run_dir = learn("grpo_llm", *SMALL, *OF_SCRIPT["grpo_llm"], "--total-episodes", 16, "--deterministic")
    shutil.copytree(tmp_path / run_dir, tmp_path / "before" / "runs" / "one")
    learn("grpo_llm", "--resume", run_dir)
    assert kill_resume.differences(tmp_path, tmp_path / "before") == []


def test_a_checkpoint_of_another_algorithm_or_model_is_refused(learn, policy_folder):
    run_dir = learn("grpo_llm", *SMALL, *OF_SCRIPT["grpo_llm"], "--total-episodes", 8)
    with pytest.raises(SystemExit, match="checkpoint is of grpo_llm.py, but this is ppo_llm.py"):
        learn("ppo_llm", "--resume", run_dir)
    with pytest.raises(SystemExit, match="--model elsewhere contradicts its tiny"):
        learn("grpo_llm", "--resume", run_dir, "--model", "elsewhere")
    state = run_dir / "checkpoint" / "state.json"
    content = json.loads(state.read_text())
    content["args"] |= {"model": str(policy_folder), "tokenizer": "byte"}
    state.write_text(json.dumps(content))
    with pytest.raises(SystemExit, match="does not fit this model"):
        learn("grpo_llm", "--resume", run_dir)


def test_the_line_to_go_on_names_a_program_that_is_there(monkeypatch, tmp_path):
    python = Path(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert distributed.launcher() == [str(python)]
    monkeypatch.chdir(python.parents[1])
    assert distributed.launcher() == [os.path.join(python.parent.name, python.name)]
    monkeypatch.setenv("PATH", str(python.parent))
    assert distributed.launcher() == [python.name]
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert distributed.launcher() == ["torchrun", "--nproc-per-node", "2"]
