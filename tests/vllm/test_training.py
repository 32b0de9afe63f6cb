"""learner/grpo_llm.py trains through both engines, and a server that is killed costs at most an iteration."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

pytestmark = pytest.mark.timeout(900)

SCRIPT = Path(__file__).parents[2] / "learner" / "grpo_llm.py"
SMALL = "--num-envs 8 --episodes-per-iteration 16 --group-size 4 --num-minibatches 2 --eval-episodes 8 --num-threads 1"


def start(folder, *arguments, **options):
    command = [sys.executable, str(SCRIPT), *SMALL.split(), *map(str, arguments)]
    return subprocess.Popen(command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def train(folder, *arguments, **options):
    process = start(folder, *arguments, **options)
    _, errors = process.communicate()
    assert process.returncode == 0, errors[-4000:]
    return next((folder / "runs").iterdir())


def rows(run_dir):
    return [json.loads(line) for line in (run_dir / "trajectories.jsonl").read_text().splitlines()]


def scalars(run_dir, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return [event.value for event in EventAccumulator(str(run_dir)).Reload().Scalars(name)]


@pytest.mark.parametrize("engine", ["vllm", "vllm-server"])
def test_training(engine, server, policy_folder, tmp_path):
    arguments = ["--model", policy_folder, "--engine", engine, "--total-episodes", 48]
    arguments += ["--vllm-url", server.url] if engine == "vllm-server" else []
    run_dir = train(tmp_path, *arguments, "--num-minibatches", 1, "--learning-rate", 1e-3, "--save-model")
    assert len(scalars(run_dir, "charts/episodic_return")) == 3
    # One step an iteration: at its loss the trainer has the weights that were sampled from, or the update went wrong.
    assert max(scalars(run_dir, "sampler/gap_max")) < 1e-3
    before, after = (load_file(folder / "model.safetensors") for folder in (policy_folder, run_dir / "model"))
    assert any((before[name] != after[name]).any() for name in before)


def test_training_with_stale_weights(server, policy_folder, tmp_path):
    arguments = ["--model", policy_folder, "--engine", "vllm-server", "--vllm-url", server.url, "--max-staleness", 1]
    run_dir = train(tmp_path, *arguments, "--total-episodes", 64)
    assert len(scalars(run_dir, "charts/episodic_return")) == 4


def test_a_killed_server_leaves_a_checkpoint_to_go_on_from(server, policy_folder, tmp_path):
    """Last in this folder: the server is killed, started again, and the run goes on."""
    arguments = ["--model", policy_folder, "--engine", "vllm-server", "--vllm-url", server.url]
    process = start(tmp_path, *arguments, "--total-episodes", 16 * 200, "--eval-every", 0)
    log = None
    while log is None or not log.is_file() or len(log.read_text().splitlines()) < 16:  # of the second iteration
        assert process.poll() is None, process.communicate()[1][-4000:]
        log = next(tmp_path.glob("runs/*/trajectories.jsonl"), None)
        time.sleep(0.1)
    server.kill()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert f"the vLLM server {server.url}" in errors and f"--resume {run_dir.relative_to(tmp_path)}" in errors
    assert errors.count("Traceback") <= 1, "not those of the HTTP library"
    done = json.loads((run_dir / "checkpoint" / "state.json").read_text())["run"]["iteration"]
    assert done >= 2

    server.start()
    process = start(tmp_path, "--resume", run_dir.relative_to(tmp_path))
    while max(row["iteration"] for row in rows(run_dir)) < done + 2:
        assert process.poll() is None, process.communicate()[1][-4000:]
        time.sleep(0.1)
    os.kill(process.pid, 2)
    assert process.wait(120) == 130
