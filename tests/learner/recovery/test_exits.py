"""Runs that something ends: each leaves its last complete iteration, and goes on to the weights of an undisturbed one.

The learner runs in a process of its own, which executes this file with run_name "worker".
"""

import importlib
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import grpo_llm
import processes
import pytest
import torch
from learners import PLAY

from llm_utils import arguments
from llm_utils.recovery import checkpoint
from llm_utils.sampling.engine import EngineDied
from llm_utils.sampling.slots import SlotModel
from llm_utils.training.optimizer import Float32AdamW

ROOT = Path(__file__).resolve().parents[3]
SMALL = ["--env-kwargs", json.dumps({"max_turns": 2, "max_action_tokens": 10}), "--num-envs", "8", "--temperature", "2"]
SMALL += ["--num-threads", "1", "--eval-episodes", "0", "--episodes-per-iteration", "8", "--num-minibatches", "2"]
SMALL += ["--save-model", "--learning-rate", "1e-3", "--deterministic", "--no-cuda", "--total-episodes", "32"]
OF_SCRIPT = {"grpo_llm": ["--group-size", "4"], "ppo_llm": ["--critic-warmup", "0"]}


# ------------------------------------------------------------------------------------------------ what a worker does


def end_by(what):
    """How a run is ended."""
    if what == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
    elif what == "OutOfMemoryError":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.16 GiB.")
    elif what == "EngineDied":
        raise EngineDied("the vLLM server http://localhost:8000 is gone")


def sabotage(what, where, large):
    """End the run in its third iteration, in the middle of the rollout or after one of the two steps of the update."""
    if large:
        checkpoint.MOST_BYTES = 0
    steps, decode, step, save = [0, 0], SlotModel.decode, Float32AdamW.step, torch.save

    def decode_some(self, *args):
        steps[1] = steps[1] + 1 if steps[0] == 4 else 0
        if where == "rollout" and steps[1] == 5:
            end_by(what)
        return decode(self, *args)

    def step_some(self, *args, **kwargs):
        norms = step(self, *args, **kwargs)
        steps[0] += 1
        if where == "update" and steps[0] == 5:
            end_by(what)
        return norms

    def save_under_signals(*args):
        if signal.getsignal(signal.SIGTERM) == signal.SIG_IGN:  # at the exit; whoever sends one may send more
            os.kill(os.getpid(), signal.SIGTERM)
        save(*args)

    SlotModel.decode, Float32AdamW.step, torch.save = decode_some, step_some, save_under_signals


if __name__ == "worker":
    folder, script, flags, failure = job  # noqa: F821  (of `run_path`)
    sabotage(*failure)
    processes.play(script, folder, flags)


# -------------------------------------------------------------------------------------------------------- the tests


def play(script, folder, *flags, failure=(None, None, False)):
    """Run a learner to whatever end; returns the exit status and what it printed."""
    folder.mkdir(parents=True, exist_ok=True)
    job = (folder, script, [str(flag) for flag in flags], failure)
    process = processes.forked(runpy.run_path, __file__, {"job": job}, "worker")
    process.join()
    return process.exitcode, (folder / "log.txt").read_text()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """whole(script): the folder in which a run was left alone."""
    folders = {}

    def run(script):
        if script not in folders:
            folders[script] = tmp_path_factory.mktemp(script)
            status, printed = play(script, folders[script], *SMALL, *OF_SCRIPT[script])
            assert status == 0, printed
        return folders[script]

    return run


def steps_of_scalars(run_dir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir)).Reload()
    return [event.step for event in events.Scalars("charts/episodic_return")]


@pytest.mark.parametrize(
    ("script", "what", "where", "status", "words"),
    [
        ("grpo_llm", "SIGTERM", "rollout", 143, "terminated; resume after the last complete iteration with"),
        pytest.param("ppo_llm", "SIGTERM", "update", 143, "terminated; resume after the last complete iteration with",
                     marks=pytest.mark.slow),
        ("grpo_llm", "OutOfMemoryError", "update", 1, "CUDA out of memory. Tried to allocate 1.16 GiB.\nresume after"),
        ("grpo_llm", "EngineDied", "rollout", 1, "EngineDied: the vLLM server http://localhost:8000 is gone\nresume"),
    ],
)
def test_what_ends_a_run_leaves_its_last_complete_iteration(whole, tmp_path, script, what, where, status, words):
    flags = [*SMALL, *OF_SCRIPT[script], "--checkpoint-every", 0]
    got, printed = play(script, tmp_path, *flags, failure=(what, where, False))
    assert got == status and words in printed, printed
    assert ("Traceback" in printed) == (what != "SIGTERM")
    run_dir = processes.run_of(tmp_path)
    assert f"--resume {run_dir.relative_to(tmp_path)}" in printed
    assert processes.iteration_of(tmp_path) == 2
    assert not json.loads((run_dir / "summary.json").read_text())["finished"]

    got, printed = play(script, tmp_path, "--resume", run_dir.relative_to(tmp_path))
    assert got == 0, printed
    assert processes.differences(tmp_path, whole(script)) == []
    assert steps_of_scalars(run_dir) == steps_of_scalars(processes.run_of(whole(script)))


@pytest.mark.parametrize(
    ("where", "every", "words"),
    [
        pytest.param("rollout", 0, "resume after the last complete iteration with", marks=pytest.mark.slow),
        ("update", 2, "the checkpoint of iteration 2 is kept; resume with"),
    ],
)
def test_a_large_model_is_saved_during_a_rollout_and_not_in_an_update(whole, tmp_path, where, every, words):
    flags = [*SMALL, *OF_SCRIPT["grpo_llm"], "--checkpoint-every", every]
    got, printed = play("grpo_llm", tmp_path, *flags, failure=("SIGTERM", where, True))
    assert got == 143 and words in printed, printed
    assert processes.iteration_of(tmp_path) == 2
    got, printed = play("grpo_llm", tmp_path, "--resume", processes.run_of(tmp_path).relative_to(tmp_path))
    assert got == 0 and processes.differences(tmp_path, whole("grpo_llm")) == [], printed


@pytest.mark.slow
def test_of_several_processes_the_first_saves_what_another_could_not(tmp_path, environment_of_scripts):
    """The second runs out of memory in the update; small models lie with the first as a whole."""
    flags = [*SMALL, *OF_SCRIPT["grpo_llm"], "--checkpoint-every", "0"]
    script = tmp_path / "grpo_llm.py"
    script.write_text(f"""
import os, runpy, sys
job = ({str(tmp_path)!r}, "grpo_llm", {flags!r}, ("OutOfMemoryError", "update" * (os.environ["RANK"] == "1"), False))
sys.path[:0] = [{str(Path(checkpoint.__file__).parents[1])!r}, {str(Path(processes.__file__).parent)!r}]
runpy.run_path({__file__!r}, {{"job": job}}, "worker")
""")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=environment_of_scripts, capture_output=True, text=True)
    assert (tmp_path / "log.txt").is_file(), done.stdout + done.stderr
    printed = (tmp_path / "log.txt").read_text()
    assert done.returncode == 1, done.stderr
    assert "[rank1]: torch.OutOfMemoryError: CUDA out of memory" in printed
    assert re.search(r"resume after the last complete iteration with\n  \S*torchrun --nproc-per-node 2 ", printed)
    assert processes.iteration_of(tmp_path) == 2


def test_more_episodes_on_resume(learn, tmp_path):
    """The run that was over goes on, its learning rate anneals to the new end, and only then it is finished again."""
    flags = [*SMALL, *OF_SCRIPT["grpo_llm"]]
    flags[flags.index("--total-episodes") + 1] = "16"
    run_dir = learn("grpo_llm", *flags)
    assert json.loads((run_dir / "summary.json").read_text())["finished"]
    with pytest.raises(SystemExit, match="--total-episodes 8 is less than the run's own 16"):
        learn("grpo_llm", "--resume", run_dir, "--total-episodes", 8)

    seen = []
    with pytest.MonkeyPatch.context() as patch:
        step = Float32AdamW.step

        def watch(self, *args):
            summary = json.loads((run_dir / "summary.json").read_text())
            seen.append((summary["finished"], summary["args"]["total_episodes"], self.adam.param_groups[0]["lr"]))
            return step(self, *args)

        patch.setattr(Float32AdamW, "step", watch)
        assert learn("grpo_llm", "--resume", run_dir, "--total-episodes", 32) == run_dir
    rates = [1e-3 * (1 - i / 4) for i in (2, 2, 3, 3)]
    assert seen == [(False, 32, pytest.approx(rate)) for rate in rates]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["finished"] and summary["args"]["total_episodes"] == 32
    rows = [json.loads(line) for line in (run_dir / "trajectories.jsonl").read_text().splitlines()]
    assert [row["episode"] for row in rows] == list(range(32))


def test_what_a_lack_of_memory_asks_for_can_be_changed_on_resume(learn, monkeypatch, capfd):
    """The same episodes, in smaller microbatches, with fewer rows at a time, and the change is printed."""
    forward, sizes = grpo_llm.policy_forward, []

    def in_little_memory(model, batch, *args):
        sizes.append(len(batch))
        if sizes[-1] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(model, batch, *args)

    monkeypatch.setattr("llm_utils.training.forward.policy_forward", in_little_memory)
    with pytest.raises(torch.OutOfMemoryError):
        learn("grpo_llm", *SMALL, *OF_SCRIPT["grpo_llm"])
    (run_dir,) = Path("runs").iterdir()
    with pytest.raises(torch.OutOfMemoryError):
        learn("grpo_llm", "--resume", run_dir)
    capfd.readouterr()
    flags = ["--microbatch-tokens", 1, "--num-envs", 4, "--gradient-checkpointing", "on", "--checkpoint-every", 0]
    learn("grpo_llm", "--resume", run_dir, *flags)
    words = "--num-envs 4 (was 8), --gradient-checkpointing on (was off), --microbatch-tokens 1 (was 4096)"
    printed = capfd.readouterr().err
    assert "resuming with --checkpoint-every 0 (was 10), " in printed and words in printed
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["finished"] and summary["args"]["microbatch_tokens"] == 1 and sizes[-32:] == [1] * 32


def test_what_is_given_with_resume_is_never_ignored(learn, monkeypatch):
    """Also where it is what the learner takes by default, and so looks as if nothing had been given."""
    flags = [*SMALL, *OF_SCRIPT["grpo_llm"]]
    flags[flags.index("--total-episodes") + 1] = "8"
    run_dir = learn("grpo_llm", *flags)
    with pytest.raises(SystemExit, match="--learning-rate 0.0003 contradicts its 0.001"):
        learn("grpo_llm", "--resume", run_dir, "--learning-rate", 3e-4)
    with pytest.raises(SystemExit, match="--deterministic False contradicts its True"):
        learn("grpo_llm", "--resume", run_dir, "--no-deterministic")
    args = grpo_llm.Args(resume=str(run_dir))
    for words, total in (([], 8), (["--total-episodes", "5120"], 5_120), (["--total_episodes=5120"], 5_120)):
        monkeypatch.setattr(sys, "argv", ["grpo_llm.py", "--resume", str(run_dir), *words])
        assert checkpoint.load_args(args, "grpo_llm").total_episodes == total


FINDER = """
import os, sys
class Finder:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == os.environ["STUMBLE"]:
            raise KeyboardInterrupt if os.environ["OVER"] == "Ctrl-C" else ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Finder())
"""
AT_IMPORT = [("ppo_llm", "missing", "torch", "--help"), ("sft_llm", "missing", "torch", "--seed", "1")]
AT_IMPORT += [("evaluate_llm", "missing", "tyro", "--help"), ("grpo_llm", "Ctrl-C", "numpy", "--help")]
AT_IMPORT += [("evaluate_llm", "Ctrl-C", "tyro"), ("ppo_llm", "missing", "gymnasium", "--help")]
AT_IMPORT += [("sft_llm", "missing", "numpy", "--help")]
AT_IMPORT += [("sweep", "missing", "tqdm", "--help"), ("compare", "missing", "numpy", "--help")]


@pytest.mark.parametrize("what", AT_IMPORT, ids=" ".join)
def test_what_happens_while_a_script_imports_is_told_in_a_line(what, tmp_path):
    """In its own folder, whose name the command leaves out."""
    script, over, package, *words = what
    (tmp_path / "sitecustomize.py").write_text(FINDER)
    places = [str(tmp_path), *(str(ROOT / name) for name in ("envs", "tools", "learner"))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places), "OVER": over}
    environment["STUMBLE"] = package
    command, folder = [sys.executable, f"{script}.py", *words], ROOT / "learner"
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=folder, env=environment)
    if over == "Ctrl-C":
        assert (done.returncode, done.stderr) == (130, "\ninterrupted\n")
    else:
        assert done.returncode == 1
        assert re.fullmatch(rf"{script}.py needs \w+: pip install -e '\.\[train\]' in {ROOT}\n", done.stderr)


@pytest.mark.parametrize("module", ["gymnasium.spaces", "numpy", "agent_r1", "agent_r1_tools.text", "tokenizers",
                                    "jinja2", "jsonschema", "torch.nn", "tyro"])  # fmt: skip
def test_packages_that_every_script_needs_are_told_in_a_line(module, capsys):
    from llm_utils.setup import startup

    with pytest.raises(SystemExit):
        startup.in_a_line(ModuleNotFoundError, ModuleNotFoundError("no", name=module), None)
    said = capsys.readouterr().err
    assert said.endswith(f" needs {module.partition('.')[0]}: pip install -e '.[train]' in {ROOT}\n")


def test_a_failure_of_the_users_function_is_told_in_a_line(capsys):
    from agent_r1.arguments import FunctionError
    from llm_utils.setup import startup

    error = FunctionError("the reward function score failed")
    error.add_note("resume: ...")
    with pytest.raises(SystemExit):
        startup.in_a_line(FunctionError, error, None)
    assert capsys.readouterr().err == "the reward function score failed\nresume: ...\n"


def test_other_errors_keep_their_traceback(capsys):
    from llm_utils.setup import startup

    for error in (ValueError("no"), ModuleNotFoundError("nobody", name="nobody")):
        startup.in_a_line(type(error), error, None)
        assert type(error).__name__ in capsys.readouterr().err


@pytest.mark.parametrize("script", [*PLAY, "sft_llm"])
@pytest.mark.parametrize("name", ["learning_rate", "critic_learning_rate"])
def test_a_learning_rate_of_0_is_told(script, name, capsys):
    module = importlib.import_module(script)
    if not hasattr(module.Args, name):
        pytest.skip("it has no critic")
    for rate, said in ((0.0, True), (1e-9, False)):
        args = module.Args(**{name: rate})
        getattr(module, "check", arguments.check_each)(args)
        words = f"--{name.replace('_', '-')} 0: the {'critic' if 'critic' in name else 'policy'} keeps its weights"
        assert (words in capsys.readouterr().err) == said



@pytest.mark.parametrize(
    "command", [["grpo_llm.py"], ["-m", "agent_r1.show", "x"], ["-m", "agent_r1.validate"]], ids=" ".join
)
def test_ctrl_c_in_a_package_that_hides_it_is_told_in_a_line(command, tmp_path):
    """A package may turn KeyboardInterrupt into an error of its own, as some in C do."""
    hides = "import os, signal\ntry: os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(9)\n"
    hides += "except BaseException as error: raise ImportError('numpy could not be imported') from error\n"
    (tmp_path / "numpy.py").write_text(hides)
    places = [str(tmp_path), *(str(ROOT / name) for name in ("envs", "tools", "learner"))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=200, cwd=ROOT / "learner",
                          env=environment)  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\ninterrupted\n")


def test_after_the_imports_ctrl_c_is_an_exception_again(monkeypatch):
    from agent_r1 import interrupts
    from llm_utils.setup import startup

    def press():
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(sys, "argv", ["-m"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "agent_r1.show"])
    try:
        interrupts.guard_imports()
        assert signal.getsignal(signal.SIGINT) is interrupts.end_in_a_line
        with pytest.raises(SystemExit) as ended:
            interrupts.run(press)
        assert ended.value.code == 130
        monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "my_package.train"])
        interrupts.guard_imports()  # another program that imports us keeps its own
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, startup.end_in_a_line)
        startup.imported()
        with pytest.raises(KeyboardInterrupt):
            press()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
