"""Evaluations that something ends: what was played is kept, and the rest comes to the figures of an undisturbed one."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import processes
import pytest

from llm_utils.records import run_files
from llm_utils.sampling.slots import SlotModel
from llm_utils.setup.sources import fingerprint

ROOT = Path(__file__).parents[3]
FLAGS = ["--tokenizer", "byte", "--num-envs", 3, "--num-threads", 1, "--no-cuda", "--episodes", 8]
FLAGS += ["--env-kwargs", json.dumps({"max_turns": 2, "max_action_tokens": 8})]


def rows(folder):
    return [json.loads(line) for line in (folder / "trajectories.jsonl").read_text().splitlines()]


def report(folder):
    return json.loads((folder / "evaluation.json").read_text())


def essence(folder):
    """All but the clock and rounding."""
    kept = []
    for row in rows(folder):
        row["logprobs"] = [round(x, 3) for x in row["logprobs"]]
        kept.append(row)
    found = report(folder)
    del found["seconds"], found["args"]
    return kept, found


def folder_of(name):
    (folder,) = Path("runs").glob(f"*__{name}__*")
    return folder


def stop_after(monkeypatch, folder_name, count, how):
    """End the evaluation in the middle of a turn, when so many rows are on disk."""
    decode = SlotModel.decode

    def decode_some(self, *args):
        for path in Path("runs").glob(f"*__{folder_name}__*/trajectories.jsonl"):
            if len(path.read_bytes().splitlines()) >= count:
                how()
        return decode(self, *args)

    monkeypatch.setattr(SlotModel, "decode", decode_some)


@pytest.fixture
def evaluate(learn, policy_folder):
    return lambda name, *words: learn("evaluate_llm", "--model", policy_folder, *FLAGS, "--exp-name", name, *words)


def test_an_evaluation_goes_on_with_the_model_that_began_it(evaluate, learn, policy_folder, tmp_path, capsys):
    folder = evaluate("other").absolute()
    found = report(folder)
    begun = {"model": found["model"], "model_files": found["model_files"], "finished": False, "seconds": 1.0}
    (folder / "evaluation.json").write_text(json.dumps(begun | {"args": found["args"]}))
    kept = (folder / "trajectories.jsonl").read_bytes().splitlines(keepends=True)[:3]
    (folder / "trajectories.jsonl").write_bytes(b"".join(kept))
    with pytest.raises(SystemExit, match="this evaluation is of another version"):
        without = {name: value for name, value in begun.items() if name != "model_files"}
        (folder / "evaluation.json").write_text(json.dumps(without | {"args": found["args"]}))
        learn("evaluate_llm", "--resume", folder)
    (folder / "evaluation.json").write_text(json.dumps(begun | {"args": found["args"]}))
    weights = policy_folder / "model.safetensors"
    before = weights.stat()
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
    try:
        with pytest.raises(SystemExit, match="the model's files have changed since"):
            learn("evaluate_llm", "--resume", folder)
    finally:
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    row = json.loads(kept[0])
    del row["stats"]
    (folder / "trajectories.jsonl").write_bytes(b"".join([json.dumps(row).encode() + b"\n", *kept]))
    with pytest.raises(SystemExit, match="a line of another version lacks 'stats'"):
        learn("evaluate_llm", "--resume", folder)
    assert len(rows(folder)) == 4  # nothing was removed
    del begun["seconds"]
    (folder / "evaluation.json").write_text(json.dumps(begun | {"args": found["args"]}))
    with pytest.raises(SystemExit, match="is damaged: KeyError\\('seconds'\\)"):
        learn("evaluate_llm", "--resume", folder)


def test_a_full_disk_ends_it_in_a_line(evaluate, learn, full_disk):
    stopped = r"stopped: File too large.*; make room\n\d of 8 episodes are kept; resume with\n.* --resume "
    with pytest.raises(SystemExit, match=stopped):
        full_disk(100_000)
        evaluate("full")
    full_disk(2**30)
    folder = folder_of("full")
    kept = (folder / "trajectories.jsonl").read_bytes()
    assert 0 < kept.count(b"\n") < 8 and len(kept) == 100_000  # the last one is cut
    learn("evaluate_llm", "--resume", folder)
    assert report(folder)["finished"] and len(rows(folder)) == 8


def test_two_processes_never_write_into_one_folder(evaluate, learn, monkeypatch, claimed):
    """Both played on and rewrote the rows by places of their own: most of them were no JSON in the end."""
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        stop_after(patch, "stopped", 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        evaluate("stopped")
    folder = folder_of("stopped").absolute()
    before = (folder / "trajectories.jsonl").read_bytes()
    monkeypatch.setattr(run_files, "_claimed", {})  # this process has let go of it
    (folder / ".lock").unlink()
    with claimed(folder):
        with pytest.raises(SystemExit, match="another process uses this folder"):
            learn("evaluate_llm", "--resume", folder)
        assert (folder / "trajectories.jsonl").read_bytes() == before
    learn("evaluate_llm", "--resume", folder)
    assert report(folder)["finished"]


def test_the_files_of_an_adapter_are_the_models_too(tmp_path):
    for name in ("model", "adapter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    sources = [str(tmp_path / "model"), str(tmp_path / "adapter")]
    before = fingerprint(*sources)
    assert before == fingerprint(*sources) != fingerprint(sources[0], None)
    (tmp_path / "adapter" / "adapter.safetensors").write_bytes(b"other weights")
    assert fingerprint(*sources) != before
    assert fingerprint("Qwen/Qwen2.5-3B-Instruct", None) is None


@pytest.mark.parametrize("words", [[], ["--temperature", 1, "--samples", 2, "--episodes", 4]])
def test_an_evaluation_that_was_stopped_goes_on_to_the_same_figures(evaluate, learn, monkeypatch, capsys, words):
    """Greedy and sampled, after SIGTERM, with a last row that is cut short; and once more, which plays nothing."""
    evaluate("whole", *words)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        stop_after(patch, "stopped", 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        evaluate("stopped", *words)
    folder = folder_of("stopped")
    kept = (folder / "trajectories.jsonl").read_bytes()
    count = kept.count(b"\n")
    assert ended.value.code == 143 and 3 <= count < 8 and not report(folder)["finished"]
    said = capsys.readouterr().err
    assert f"terminated; {count} of 8 episodes are kept; resume with\n" in said and f"--resume {folder}\n" in said

    (folder / "trajectories.jsonl").write_bytes(kept + kept.splitlines()[0][:500])  # as kill -9 may leave it
    monkeypatch.chdir(folder.absolute().parents[1])
    learn("evaluate_llm", "--resume", folder)
    assert f"{count}/8" in capsys.readouterr().err  # what was kept is not played again
    assert essence(folder) == essence(folder_of("whole")) and report(folder)["finished"]
    assert [row["episode"] for row in rows(folder)] == list(range(8))
    (folder / "pass_rates.json").unlink(missing_ok=True)
    before = (folder / "trajectories.jsonl").read_bytes()
    monkeypatch.setattr(SlotModel, "prefill", None)
    learn("evaluate_llm", "--resume", folder)
    assert (folder / "trajectories.jsonl").read_bytes() == before and essence(folder) == essence(folder_of("whole"))
    assert (folder / "pass_rates.json").exists() == ("--samples" in words)
    assert ("pass@2" in report(folder)["metrics"]) == ("--samples" in words)


@pytest.mark.parametrize("samples", [1, 2])
def test_an_evaluation_that_knew_samples_as_profile_goes_on(evaluate, learn, samples):
    import sweep

    words = ["--temperature", 1, "--samples", samples, "--episodes", 4]
    folder = evaluate("older", *words)
    before, found = essence(folder), report(folder)
    job = sweep.Job([], sweep.comparable(found["args"]), sweep.comparable(found["args"]))
    del found["args"]["samples"]
    found["args"]["profile"] = samples if samples > 1 else 0
    (folder / "evaluation.json").write_text(json.dumps(found))
    assert sweep.find(job) == (folder, True)
    lines = (folder / "trajectories.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "trajectories.jsonl").write_bytes(b"".join(lines[:3]))
    learn("evaluate_llm", "--resume", folder)
    assert essence(folder) == before and report(folder)["args"]["samples"] == samples


def test_a_killed_evaluation_goes_on(evaluate, learn, policy_folder, tmp_path):
    whole = evaluate("whole", "--episodes", 40)
    words = ["--model", str(policy_folder), *map(str, FLAGS), "--exp-name", "killed", "--episodes", "40"]
    process = processes.start("evaluate_llm", tmp_path, *words)
    while process.is_alive():
        found = list(Path("runs").glob("*__killed__*/trajectories.jsonl"))
        if found and found[0].read_bytes().count(b"\n") >= 2:
            process.kill()
        time.sleep(0.005)
    assert process.exitcode == -signal.SIGKILL  # 40 episodes take seconds
    folder = folder_of("killed")
    assert not report(folder)["finished"]
    learn("evaluate_llm", "--resume", folder)
    assert essence(folder) == essence(whole)


def test_an_interrupt_and_an_error_say_how_to_go_on(evaluate, monkeypatch, capsys):
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        stop_after(patch, "stopped", 1, lambda: os.kill(os.getpid(), signal.SIGINT))
        evaluate("stopped")
    assert ended.value.code == 130 and "interrupted; " in capsys.readouterr().err

    def fail():
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError) as ended:
        stop_after(patch, "failed", 1, fail)
        evaluate("failed")
    (note,) = ended.value.__notes__
    assert "of 8 episodes are kept; resume with\n" in note and f"--resume {folder_of('failed')}" in note


def test_a_signal_that_python_drops_ends_it_at_the_next_row(evaluate, monkeypatch):
    def in_a_finalizer():
        class Finalized:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGTERM)

        Finalized()

    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    stop_after(monkeypatch, "stopped", 2, in_a_finalizer)
    with pytest.raises(SystemExit) as ended:
        evaluate("stopped")
    assert ended.value.code == 143 and len(rows(folder_of("stopped"))) < 8


def test_rows_that_are_none_and_faults_are_played_again(evaluate, learn, capsys):
    folder = evaluate("whole")
    before, path = essence(folder), folder / "trajectories.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    broken = json.loads(lines[2]) | {"fault": "the server was down"}
    foreign = json.loads(lines[3]) | {"task_index": 77}
    damaged = [json.dumps(foreign).encode() + b"\n", b"[" * 100_000 + b"\n", b"{}\n", b"\xff\xfe\n"]
    path.write_bytes(b"".join([*lines[:2], json.dumps(broken).encode() + b"\n", *damaged, lines[4], lines[4]]))
    learn("evaluate_llm", "--resume", folder)
    assert f"{path}: 4 damaged lines were removed" in capsys.readouterr().err and essence(folder) == before


def test_more_episodes_on_resume(evaluate, learn, tmp_path):
    whole = evaluate("whole", "--episodes", 12)
    folder = evaluate("short")
    assert len(rows(folder)) == 8
    learn("evaluate_llm", "--resume", folder, "--episodes", 12, "--num-envs", 5)
    assert essence(folder) == essence(whole) and report(folder)["args"]["num_envs"] == 5
    for words, message in (
        (["--temperature", 1], "--temperature 1.0 contradicts its 0.0. Leave it out"),
        (["--episodes", 8], "--episodes 8 is less than the run's own 12"),
        (["--mode", "naive_rag"], "--mode naive_rag contradicts its agent"),
    ):
        with pytest.raises(SystemExit, match=message):
            learn("evaluate_llm", "--resume", folder, *words)


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", '{"args": []}', '{"args": {"episodes": "x"}}', "[" * 100_000])
def test_what_is_no_evaluation_is_refused(learn, tmp_path, text):
    if text is not None:
        (tmp_path / "evaluation.json").write_text(text)
    with pytest.raises(SystemExit, match="--resume .*: (there is no evaluation.json|evaluation.json is damaged)"):
        learn("evaluate_llm", "--resume", tmp_path)


def test_benchmarks_take_an_evaluation_that_was_stopped_for_unfinished(evaluate, monkeypatch, policy_folder):
    import sweep

    words = ["python", str(ROOT / "learner" / "evaluate_llm.py"), "--model", str(policy_folder), *map(str, FLAGS)]
    folder = evaluate("one")
    job = sweep.make_job([*words, "--exp-name", "one"])
    assert sweep.find(job) == (folder, True)
    (folder / "evaluation.json").write_text(json.dumps(report(folder) | {"finished": False}))
    assert sweep.find(job) == (folder, False)
    shutil.rmtree(folder)
    assert sweep.find(job) == (None, False)
