"""--track: Weights & Biases (offline, so without an account) and TensorBoard carry the same scalars."""

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("wandb")
pytest.importorskip("tensorboard")

SCRIPT = Path(__file__).parents[2] / "learner" / "ppo_llm.py"
ENV_KWARGS = json.dumps({"max_turns": 2, "max_action_tokens": 8})
SMALL = ["--tokenizer", "byte", "--env-kwargs", ENV_KWARGS, "--num-envs", "4", "--episodes-per-iteration", "8"]
SMALL += ["--num-threads", "1", "--eval-episodes", "4", "--num-minibatches", "2", "--critic-warmup", "0"]


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


def test_both_carry_the_same_scalars(tmp_path, policy_folder, environment_of_scripts):
    command = [sys.executable, str(SCRIPT), *SMALL, "--model", str(policy_folder), "--total-episodes", "16", "--track"]
    environment = environment_of_scripts | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (run_dir,) = (tmp_path / "runs").iterdir()
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    tags = events.Tags()["scalars"]
    expected = {(tag, event.step): event.value for tag in tags for event in events.Scalars(tag)}

    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    records = list(offline_records(path))
    found = {}
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            step = row.pop("global_step")
            found |= {(tag, step): value for tag, value in row.items() if not tag.startswith("_")}
    assert len({step for _, step in expected}) == 3  # the start and two iterations
    assert found.keys() == expected.keys()
    assert {"eval/em", "charts/SPS", "losses/policy_loss"} <= set(tags)
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-6), key

    (run,) = (record.run for record in records if record.WhichOneof("record_type") == "run")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert run.display_name == run_dir.name and config["total_episodes"] == 16
