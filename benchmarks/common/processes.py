"""Learners in processes of their own: started in a folder, killed at a moment, compared by what they leave there."""

import json
import multiprocessing
import os
import runpy
import signal
import sys
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

LEARNER = Path(__file__).resolve().parents[2] / "learner"
sys.path.insert(0, str(LEARNER))
IMPORTED = ["ppo_llm", "grpo_llm", "sft_llm", "evaluate_llm"]  # before the first fork
IMPORTED += ["agent_r1.tasks.multihop_world", "agent_r1.tasks.craft_world"]  # and what a run imports on its way
IMPORTED += ["bm25s", "transformers.generation.utils", "transformers.models.granite.modeling_granite"]


def print_to(file: str) -> None:
    """What this process and its children print from now on goes to the end of a file."""
    log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)


def play(script: str, folder: Path, flags: list[str]) -> None:
    """Run a learner in this folder; what it prints goes to log.txt there."""
    os.chdir(folder)
    print_to("log.txt")
    sys.argv = [f"{script}.py", *flags]
    runpy.run_path(str(LEARNER / f"{script}.py"), run_name="__main__")


def forked(target: Any, *args: Any) -> Any:
    """A process that has begun. It is forked from one that has imported the learners, which is most of a short run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    before = os.environ.get("PYTHONPATH")
    # Python 3.11 and 3.12 do not give the server sys.path (gh-117378): it would import nothing, and say nothing.
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
    process = context.Process(target=target, args=args)
    process.start()
    return process


def start(script: str, folder: Path, *flags: str) -> Any:
    """A process that runs a learner in this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return forked(play, script, folder, list(flags))


def finish(process: Any, folder: Path) -> None:
    """Wait for the end of a run, which must be a good one."""
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the run in {folder} failed:\n{(folder / 'log.txt').read_text()[-3000:]}")


def run_of(folder: Path) -> Path:
    """The only run in this folder."""
    (run,) = (folder / "runs").iterdir()
    return run


def iteration_of(folder: Path) -> int:
    """The iteration of the checkpoint on disk (0: none)."""
    for state in folder.glob("runs/*/checkpoint/state.json"):
        try:
            return json.loads(state.read_text())["run"]["iteration"]
        except FileNotFoundError:  # it is just being replaced
            continue
    return 0


def kill(process: Any, folder: Path, iteration: int, seconds: float) -> dict[str, Any] | None:
    """kill -9 so many seconds after the checkpoint of this iteration. None where the run was over before."""
    while iteration_of(folder) < iteration and process.is_alive():
        time.sleep(0.002)
    process.join(seconds)
    process.kill()
    process.join()
    if process.exitcode != -signal.SIGKILL:
        return None
    writing = any(folder.glob("runs/*/checkpoint.*"))
    return {"iteration": iteration, "seconds": seconds, "found": iteration_of(folder), "writing": writing}


def differences(folder: Path, whole: Path) -> list[str]:
    """Names of the weights, and files, in which two finished runs differ."""
    one, two = (load_file(run_of(x) / "model" / "model.safetensors") for x in (folder, whole))
    names = [
        name for name in one.keys() | two.keys() if name not in one or name not in two or (one[name] != two[name]).any()
    ]
    rows = [(run_of(x) / "trajectories.jsonl").read_text() for x in (folder, whole)]
    return sorted(names) + ["trajectories.jsonl"] * (rows[0] != rows[1])
