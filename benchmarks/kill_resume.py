"""kill -9 at random moments, then --resume: does a run end with the weights of one that nobody disturbed?

    python benchmarks/kill_resume.py              # ten moments each for ppo_llm.py and grpo_llm.py; table and JSON

Every run is a process of its own, with --deterministic and a checkpoint after every iteration. A moment is random: some
time of an iteration's length after a random checkpoint. Weights are compared bit by bit, logged rows as text.
"""

import argparse
import json
import multiprocessing
import os
import random
import runpy
import signal
import sys
import tempfile
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from machine import from_0, from_1, given_flags, record_results, require_quiet_machine
from safetensors.torch import load_file

LEARNER = Path(__file__).resolve().parent.parent / "learner"
sys.path.insert(0, str(LEARNER))
SCRIPTS = ("ppo_llm", "grpo_llm")
IMPORTED = [*SCRIPTS, "sft_llm", "evaluate_llm"]  # before the first fork
ITERATIONS, EPISODES = 8, 8
FLAGS = f"--deterministic --checkpoint-every 1 --save-model --no-cuda --num-threads 1 --num-envs 8 --num-minibatches 2 \
--episodes-per-iteration {EPISODES} --total-episodes {ITERATIONS * EPISODES} --eval-episodes 4 --eval-every 3 \
--temperature 2 --learning-rate 1e-3".split()
FLAGS += ["--env-kwargs", json.dumps({"max_turns": 2, "max_action_tokens": 12})]


def play(script: str, folder: Path, flags: list[str]) -> None:
    """Run a learner in this folder; what it prints goes to log.txt there."""
    os.chdir(folder)
    log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
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


def measure(script: str, moments: int, seed: int, work: Path) -> list[dict[str, Any]]:
    """Kill and resume so many runs."""
    begun = time.monotonic()
    whole = work / script / "whole"
    finish(start(script, whole, *FLAGS), whole)
    length = json.loads((run_of(whole) / "summary.json").read_text())["train_seconds"] / ITERATIONS
    print(f"{script}: {time.monotonic() - begun:.0f} s undisturbed, {length:.2f} s an iteration", flush=True)
    rng, results = random.Random(seed), []
    while len(results) < moments:
        folder = work / script / f"killed{len(results)}"
        process = start(script, folder, *FLAGS)
        killed = kill(process, folder, rng.randint(1, ITERATIONS - 1), rng.uniform(0, 1.5 * length))
        if killed is None:  # the moment was after the end: draw another one
            (folder / "runs").rename(folder.parent / f"too_late{time.monotonic_ns()}")
            continue
        finish(start(script, folder, "--resume", str(run_of(folder).relative_to(folder))), folder)
        killed["differences"] = differences(folder, whole)
        results.append(killed)
        print(script, killed, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=from_1, default=10, help="kills of each script")
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=list(SCRIPTS), help="the learners")
    parser.add_argument("--seed", type=from_0, default=1, help="of the moments")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    args = parser.parse_args()
    require_quiet_machine(args.force)
    with tempfile.TemporaryDirectory() as work:
        results = {script: measure(script, args.moments, args.seed, Path(work)) for script in args.scripts}
    lines = ["| script | killed after checkpoint | and seconds | while writing one | resumed from | weights and rows |"]
    lines.append("|---|---|---|---|---|---|")
    for script, kills in results.items():
        for k in kills:
            what = ", ".join(k["differences"]) or "identical"
            lines.append(
                f"| {script}.py | {k['iteration']} | {k['seconds']:.2f} | {'yes' if k['writing'] else 'no'} "
                f"| {k['found']} | {what} |"
            )
    table = "\n".join(lines)
    print(table)
    command = f"python benchmarks/kill_resume.py --moments {args.moments} --seed {args.seed}"
    command += given_flags(parser, args, "scripts")
    record_results("kill_resume", results, table, command, args.force)
    sys.exit(any(k["differences"] for kills in results.values() for k in kills))


if __name__ == "__main__":
    main()
