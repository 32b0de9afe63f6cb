"""The runner of many runs, with real ones: they fail, are interrupted, go on, and are skipped when finished."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sweep

import agent_r1

LEARNER = Path(__file__).parents[2] / "learner"
ENV_KWARGS = json.dumps({"max_turns": 2, "max_action_tokens": 8})
SMALL = f"--tokenizer byte --env-kwargs '{ENV_KWARGS}' --num-envs 4 --episodes-per-iteration 8 --num-threads 1"
SMALL += " --eval-episodes 4 --num-minibatches 1 --total-episodes 40"
BROKEN = """
from dataclasses import dataclass

@dataclass
class Args:
    env_id: str = ""
    exp_name: str = "broken"
    seed: int = 1

if __name__ == "__main__":
    raise SystemExit("it can't be learned")
"""


WAITS = """
import dataclasses, pathlib, time

@dataclasses.dataclass
class Args:
    exp_name: str = "waits"
    env_id: str = ""
    seed: int = 1

if __name__ == "__main__":
    pathlib.Path("begun").touch()
    time.sleep(90)
"""


@pytest.fixture
def benchmark_command(policy_folder, tmp_path):
    """The runner's command line for two seeds of PPO, and of a learner that fails."""
    (tmp_path / "broken.py").write_text(BROKEN)
    commands = [f"python {LEARNER / 'ppo_llm.py'} {SMALL} --model {policy_folder}", f"python {tmp_path / 'broken.py'}"]
    runner = str(LEARNER / "sweep.py")
    arguments = ["--env-ids", "AgentR1/MultihopWorld-v0", "--num-seeds", "2", "--workers", "2", "--commands", *commands]
    return [sys.executable, runner, *arguments]


@pytest.mark.slow
def test_failures_are_listed_an_interrupted_run_goes_on_and_a_finished_one_is_skipped(
    benchmark_command, environment_of_scripts, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    pipes = {"env": environment_of_scripts, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    first = subprocess.Popen(benchmark_command, **pipes)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and first.poll() is None:
        files = list(Path("runs").glob("*ppo_llm__1__*/trajectories.jsonl"))
        if files and '"iteration": 2' in files[0].read_text():
            break
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    _, errors = first.communicate(timeout=120)
    assert first.returncode == 130 and "continue with the same command" in errors, errors
    stopped = list(Path("runs").glob("*ppo_llm__1__*/checkpoint/state.json"))
    assert len(stopped) == 1
    assert not json.loads((stopped[0].parents[1] / "summary.json").read_text()).get("finished")

    second = subprocess.run(benchmark_command, **pipes)
    assert second.returncode == 1 and "2 of 4 runs failed" in second.stderr, second.stderr
    assert "it can't be learned" in second.stderr  # the last line of the log of the run that failed
    for seed in (1, 2):
        summaries = list(Path("runs").glob(f"*ppo_llm__{seed}__*/summary.json"))
        assert any(json.loads(path.read_text()).get("finished") for path in summaries)
    assert len(list(Path("runs").glob("*ppo_llm__1__*"))) == 1  # it went on in its folder
    rows = (stopped[0].parents[1] / "trajectories.jsonl").read_text().splitlines()
    assert sorted({json.loads(row)["iteration"] for row in rows}) == list(range(1, 6))

    before = {path: path.stat().st_mtime_ns for path in Path("runs").glob("*ppo_llm__*/*")}
    third = subprocess.run(benchmark_command, **pipes)
    assert "2 of 4 runs are finished already" in third.stdout
    assert before == {path: path.stat().st_mtime_ns for path in Path("runs").glob("*ppo_llm__*/*")}


@pytest.mark.slow
def test_one_that_began_in_the_background_can_be_stopped(tmp_path, monkeypatch):
    """Such a process ignores SIGINT (`cmd &` in a script, nohup), and so do the runs that it starts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "waits.py").write_text(WAITS)
    runner = [sys.executable, str(LEARNER / "sweep.py"), "--env-ids", "AgentR1/MultihopWorld-v0"]
    words = [*runner, "--num-seeds", "1", "--commands", f"python {tmp_path / 'waits.py'}"]
    process = subprocess.Popen(words, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    deadline = time.monotonic() + 60
    while not Path("begun").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 130


def test_two_runs_are_the_same_when_all_arguments_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = str(LEARNER / "ppo_llm.py")
    job = sweep.make_job(["python", script, "--seed", "3"])
    assert job.words[0] == sys.executable and job.args["total_episodes"] == 5120
    assert job.name == "AgentR1_MultihopWorld-v0__ppo_llm__3"
    run_dir = Path("runs") / "one"
    run_dir.mkdir(parents=True)
    for finished in (True, False):
        summary = {"args": {**job.args, "resume": "runs/one"}, "finished": finished}
        (run_dir / "summary.json").write_text(json.dumps(summary))
        assert sweep.find(job) == ((run_dir, True) if finished else (None, False))
    (run_dir / "checkpoint").mkdir()
    (run_dir / "checkpoint" / "state.json").write_text(json.dumps({"args": job.args}))
    assert sweep.find(job) == (run_dir, False)
    other = sweep.make_job(["python", script, "--seed", "3", "--gamma", "0.9"])
    assert sweep.find(other) == (None, False)
    saved = {**job.args, "num_threads": 1}
    (run_dir / "checkpoint" / "state.json").write_text(json.dumps({"args": saved}))
    threads = sweep.make_job(["python", script, "--seed", "3", "--num-threads", "2"])
    assert sweep.find(threads) == (run_dir, False)  # a run goes on with the cores that are free now
    started: list[list[str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda words, **_: started.append(words))
    sweep.start(threads)
    names = ["--env-id", threads.args["env_id"], "--env-kwargs", threads.args["env_kwargs"]]
    assert started[0][2:] == ["--resume", "runs/one", "--num-threads", "2", *names]


PLAYING = [*shlex.split(SMALL), "--total-episodes", "8", "--checkpoint-every", "1"]
ROWS = json.dumps({"tokens": [1, 2, 3], "action_mask": [0, 1, 1]})
STARTS = {  # a script and its arguments
    "grpo_llm": PLAYING,
    "sft_llm": ["--tokenizer", "byte", "--data", "rows.jsonl", "--num-steps", "1", "--checkpoint-every", "1",
                "--num-threads", "1"],
    "evaluate_llm": ["--tokenizer", "byte", "--env-kwargs", ENV_KWARGS, "--episodes", "2", "--num-threads", "1"],
}


@pytest.mark.parametrize("model", ["tiny", "a folder"])
@pytest.mark.parametrize("script", STARTS)
def test_runs_from_other_weights_are_not_the_same(learn, monkeypatch, policy_folder, tmp_path, script, model):
    """"tiny" and a folder keep their names when their files change."""
    weights = shutil.copytree(policy_folder, tmp_path / "policy") / "model.safetensors"
    (tmp_path / "rows.jsonl").write_text(ROWS)
    monkeypatch.setattr(agent_r1, "tiny_policy", lambda env_id: str(weights.parent))
    words = [*STARTS[script], "--no-cuda"]
    words += ["--model", "tiny" if model == "tiny" else str(weights.parent)]
    folder = learn(script, *words)
    job = sweep.make_job(["python", str(LEARNER / f"{script}.py"), *words])
    path = folder / ("evaluation.json" if script == "evaluate_llm" else "summary.json")
    report = json.loads(path.read_text())
    states = [("finished", report, True), ("unfinished", report | {"finished": False}, False)]
    before = weights.stat().st_mtime_ns
    for name, content, finished in states:
        path.write_text(json.dumps(content))
        os.utime(weights, ns=(before, before))
        assert sweep.find(job) == (folder, finished), name
        os.utime(weights, ns=(before, before + 10**9))
        assert sweep.find(job) == (None, False), name
    del report["model_files"]  # of an older version, which doesn't say
    path.write_text(json.dumps(report))
    assert sweep.find(job) == (folder, True)


def test_a_run_with_an_argument_that_is_dropped_is_the_same_run(tmp_path, monkeypatch):
    """And the order of the arguments says nothing."""
    monkeypatch.chdir(tmp_path)
    job = sweep.make_job(["python", str(LEARNER / "ppo_llm.py")])
    path = Path("runs") / "one" / "summary.json"
    path.parent.mkdir(parents=True)
    older = dict(reversed(job.args.items()))
    for more, found in (({"memory_gb": 24.0}, (path.parent, True)), ({"unheard_of": 24.0}, (None, False))):
        path.write_text(json.dumps({"finished": True, "args": {**older, **more}}))
        assert sweep.find(job) == found


def test_a_run_whose_machine_chose_is_the_run_that_left_it_open(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script, path = str(LEARNER / "ppo_llm.py"), Path("runs") / "one" / "summary.json"
    path.parent.mkdir(parents=True)
    job = sweep.make_job(["python", script])
    given = sweep.make_job(["python", script, "--gradient-checkpointing", "on", "--microbatch-tokens", "512"])
    for checkpointing, tokens, same in (("off", 4096, False), ("on", 512, True), (True, 512, True)):  # once a switch
        args = {**job.args, "gradient_checkpointing": checkpointing, "microbatch_tokens": tokens}
        path.write_text(json.dumps({"finished": True, "args": args}))
        assert sweep.find(job) == (path.parent, True)
        assert sweep.find(given) == ((path.parent, True) if same else (None, False))


def test_an_evaluation_of_a_run_is_named_by_what_it_plays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_dir = Path("runs") / "one"
    run_dir.mkdir(parents=True)
    trained = {"env_id": "AgentR1/ArithmeticWorld-v0", "env_kwargs": '{"max_turns": 4}', "eval_split": "more_steps"}
    (run_dir / "summary.json").write_text(json.dumps({"args": trained}))
    job = sweep.make_job(["python", str(LEARNER / "evaluate_llm.py"), "--model", str(run_dir)])
    assert job.name == "AgentR1_ArithmeticWorld-v0__evaluate_llm__1"
    assert (job.args["env_kwargs"], job.args["split"]) == ('{"max_turns": 4}', "more_steps")


def test_what_makes_no_sense_ends_before_anything_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    script = str(LEARNER / "ppo_llm.py")
    with pytest.raises(SystemExit, match="no learner"):
        sweep.make_job(["python", "nothing.py"])
    with pytest.raises(SystemExit):
        sweep.make_job(["python", script, "--no-such-flag"])
    said = " ".join(re.sub("[│╭╮╰╯─]", "", capsys.readouterr().err).split())
    assert f"{script} --no-such-flag" in said and "ppo_llm.py --help" in said and "sweep.py" not in said
    jobs = [sweep.make_job(["python", script, *more]) for more in ((), ("--gamma", "0.9"))]
    with pytest.raises(SystemExit, match="2 runs would be called .*ppo_llm__1.*--exp-name"):
        sweep.run_all(jobs, 1)
    assert not Path("runs").exists()


def test_a_job_that_fails_is_told_with_its_last_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["python", str(LEARNER / "ppo_llm.py"), "--exp-name", "bad", "--learning-rate", "-1"]
    with pytest.raises(SystemExit) as refused:
        sweep.finish([sweep.make_job(words)], 1)
    first, where, last = str(refused.value).splitlines()
    assert first.endswith("bad__1 failed: --learning-rate must be at least 0")
    assert Path(where.strip()).read_text().strip().endswith("at least 0") and "the same command continues" in last
    shutil.rmtree("runs/logs")
    assert "no output" in sweep.last_words(sweep.make_job(words))


def test_who_waits_is_told_of_each_run_that_is_finished(tmp_path, monkeypatch):
    """One that was before, one that is now, also with a status that says otherwise, none that failed."""
    monkeypatch.chdir(tmp_path)
    words = ["python", str(LEARNER / "ppo_llm.py"), "--exp-name"]
    jobs = [sweep.make_job([*words, name]) for name in ("before", "now", "late", "failed")]
    before, now, late, failed = jobs
    handler = signal.getsignal(signal.SIGTERM)
    commands, finished, told = {now: "true", late: "false", failed: "false"}, {before}, []

    def start(job):
        finished.update({now, late} & {job})
        return subprocess.Popen([commands[job]])

    monkeypatch.setattr(sweep, "start", start)
    monkeypatch.setattr(sweep, "find", lambda job: (tmp_path, job in finished))
    assert sweep.run_all(jobs, 1, lambda *one: told.append(one)) == [tmp_path, tmp_path, tmp_path, None]
    assert told == [(job, tmp_path) for job in (before, now, late)]
    assert signal.getsignal(signal.SIGTERM) == handler


def test_no_run_stays_behind_where_what_is_told_fails(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["python", str(LEARNER / "ppo_llm.py"), "--exp-name"]
    short, long = jobs = [sweep.make_job([*words, name]) for name in ("short", "long")]
    processes = {}

    def start(job):
        seconds = {short: "0", long: "60"}[job]
        processes[job] = subprocess.Popen(["sleep", seconds], start_new_session=True)
        return processes[job]

    def told(job, folder):
        raise OSError("no space")

    monkeypatch.setattr(sweep, "start", start)
    monkeypatch.setattr(sweep, "find", lambda job: (tmp_path, job in processes and processes[job].poll() == 0))
    with pytest.raises(OSError, match="no space"):
        sweep.run_all(jobs, 2, told)
    assert processes[long].poll() == -signal.SIGTERM


def test_a_run_on_a_model_that_another_job_makes_is_found(tmp_path, monkeypatch):
    """It records a context that fits the model, which did not exist when the command was read."""
    monkeypatch.chdir(tmp_path)
    words = ["python", str(LEARNER / "grpo_llm.py"), "--model", "./trained", "--tokenizer", "byte", "--no-cuda"]
    job, other = sweep.make_job(words), sweep.make_job([*words, "--env-kwargs", '{"max_turns": 2}'])
    Path("trained").mkdir()
    Path("trained/config.json").write_text('{"model_type": "qwen2", "max_position_embeddings": 512}')
    run = Path("runs") / "one"
    run.mkdir(parents=True)
    for kwargs, same in (({"max_context_tokens": 512}, True), ({"max_context_tokens": 256}, False), ({}, True)):
        report = {"args": {**job.args, "env_kwargs": json.dumps(kwargs)}, "model_files": job.model_files()}
        (run / "summary.json").write_text(json.dumps(report | {"finished": True}))
        assert sweep.find(job) == ((run, True) if same else (None, False)), kwargs
        assert sweep.find(other) == (None, False)


def test_whether_the_model_is_saved_makes_no_other_run(tmp_path, monkeypatch):
    """Saving became the default, and runs of before are still finished."""
    monkeypatch.chdir(tmp_path)
    job = sweep.make_job(["python", str(LEARNER / "grpo_llm.py"), "--model", "tiny", "--no-cuda"])
    (tmp_path / "runs" / "one").mkdir(parents=True)
    report = {"args": {**job.args, "save_model": False}, "finished": True}
    (tmp_path / "runs" / "one" / "summary.json").write_text(json.dumps(report))
    assert sweep.find(job) == (Path("runs/one"), True)
