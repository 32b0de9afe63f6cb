"""--track: Weights & Biases (offline, so without an account) and TensorBoard carry the same scalars."""

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llm_utils.records import tracking

SCRIPT = Path(__file__).parents[3] / "learner" / "ppo_llm.py"
ENV_KWARGS = json.dumps({"max_turns": 2, "max_action_tokens": 8})
SMALL = ["--tokenizer", "byte", "--env-kwargs", ENV_KWARGS, "--num-envs", "4", "--episodes-per-iteration", "8"]
SMALL += ["--num-threads", "1", "--eval-episodes", "4", "--num-minibatches", "2", "--critic-warmup", "0"]


@pytest.fixture(autouse=True)
def installed():
    pytest.importorskip("wandb")  # here, so that only the process that runs these tests imports it


def offline_records(path: Path) -> Iterator:
    """The records of a .wandb file: 7 bytes, then LevelDB's log format with a protobuf message in each record.

    (wandb 0.31 reads these files in its binary only.)
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, message = path.read_bytes(), 7, b""
    while position + 7 < len(data):
        if 32768 - position % 32768 < 7:  # no header fits into the rest of the block
            position += 32768 - position % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        message += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(message)
            message = b""


def train(folder, environment, *flags):
    """Run the learner with --track; returns the run's folder, its scalars and the records of its W&B files, by start.

    The scalars are {(tag, step): value}.
    """
    command = [sys.executable, str(SCRIPT), *map(str, flags)]
    environment = environment | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (run_dir,) = (folder / "runs").iterdir()
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    scalars = {(tag, e.step): e.value for tag in events.Tags()["scalars"] for e in events.Scalars(tag)}
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    return run_dir, scalars, [list(offline_records(path)) for path in files]


def history(records):
    """The scalars that W&B carries, as those of TensorBoard."""
    found = {}
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            step = row.pop("global_step")
            found |= {(tag, step): value for tag, value in row.items() if not tag.startswith(("_", "eval/episodes"))}
    return found


def run_and_config(records):
    (run,) = (record.run for record in records if record.WhichOneof("record_type") == "run")
    return run, {item.key: json.loads(item.value_json) for item in run.config.update}


@pytest.mark.slow
def test_both_carry_the_same_scalars_and_a_resumed_run_goes_on(tmp_path, policy_folder, environment_of_scripts):
    flags = [*SMALL, "--model", policy_folder, "--total-episodes", 16, "--track"]
    run_dir, expected, (first,) = train(tmp_path, environment_of_scripts, *flags)
    found = history(first)
    assert len({step for _, step in expected}) == 3  # the start and two iterations
    assert found.keys() == expected.keys()
    assert {"eval/em", "charts/SPS", "losses/policy_loss"} <= {tag for tag, _ in expected}
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-6), key
    pages = list(tmp_path.glob("wandb/offline-run-*/files/media/html/eval/*.html"))
    assert len(pages) == 2 and all("[assistant]" in page.read_text() for page in pages)  # at the start and at the end
    run, config = run_and_config(first)
    assert run.display_name == run_dir.name and config["total_episodes"] == 16

    resumed = ["--resume", run_dir.relative_to(tmp_path), "--total-episodes", 24]
    _, more, (_, second) = train(tmp_path, environment_of_scripts, *resumed)
    again, config = run_and_config(second)
    assert again.run_id == run.run_id and again.display_name == run.display_name and config["total_episodes"] == 24
    assert more.keys() > expected.keys() and history(second).keys() == more.keys() - expected.keys()


def test_without_a_key_nothing_begins(learn, tmp_path, monkeypatch):
    """A home without credentials, in this process; a key that cannot be one is refused as well."""
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    import wandb

    wandb.teardown()
    remedy = "wandb login.*WANDB_API_KEY.*WANDB_MODE=offline"
    try:
        with pytest.raises(SystemExit, match=f"^--track: no API key of Weights & Biases is set; .*{remedy}"):
            learn("grpo_llm", "--track", "--model", "/nowhere/model")
        with pytest.raises(SystemExit, match=f"^--track: wandb cannot start .*No API key configured.*{remedy}"):
            tracking.start(project="x", dir=str(tmp_path))
        wandb.teardown()
        monkeypatch.setenv("WANDB_API_KEY", "short")
        with pytest.raises(SystemExit, match=f"^--track: wandb cannot start .*40.*{remedy}"):
            learn("sft_llm", "--track", "--model", "/nowhere/model")
    finally:
        wandb.teardown()
    assert not (tmp_path / "runs").exists()
