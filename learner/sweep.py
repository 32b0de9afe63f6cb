"""Runs ids x commands x seeds, some at a time. Finished runs are skipped, those with a checkpoint go on from it.

    python learner/sweep.py --env-ids AgentR1/MultihopWorld-v0 --num-seeds 3 --workers 2 \\
        --commands "python learner/ppo_llm.py --num-threads 1" "python learner/grpo_llm.py --num-threads 1"

A command ends in a learner and its arguments (`torchrun --nproc-per-node 2 learner/grpo_llm.py` is one too); `--env-id`
and `--seed` are added. Two runs are the same when all their arguments are, defaults included, but for the number of
threads, and the files of the model that they name: change one and it runs anew. The output of a run goes to runs/logs/.
After Ctrl-C the same command goes on.
"""

import llm_utils.setup.startup  # noqa: F401  isort: skip  (a missing package is told in a line)

import argparse
import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tqdm import tqdm

RUNS = Path("runs")  # where the learners write, too


@dataclass(eq=False)
class Job:
    """One run: the words of its command line, and all arguments of the learner that they stand for."""

    words: list[str]
    args: dict[str, Any]
    defaults: dict[str, Any]  # of the learner, for arguments that a run is too old to have
    threads: int | None = None  # torch's, where the learner has that argument: the run's or those of one that goes on

    @property
    def name(self) -> str:
        return re.sub("[/:]", "_", f"{self.args['env_id']}__{self.args['exp_name']}__{self.args['seed']}")

    def model_files(self) -> str | None:
        """The fingerprint of the model that the run begins with, or plays, as it is now."""
        from llm_utils.setup.sources import model_files

        try:
            return model_files(SimpleNamespace(**self.args)) if "model" in self.args else None
        except SystemExit:  # there is none: the run says so
            return None


def make_job(words: Sequence[str]) -> Job:
    """Read a command line with the learner's own `Args`. SystemExit, before anything runs, where it makes no sense."""
    scripts = [i for i, word in enumerate(words) if word.endswith(".py")]
    if not scripts or not Path(words[scripts[0]]).is_file():
        raise SystemExit(f"there is no learner (a file.py) in the command: {shlex.join(words)}")
    script, arguments = Path(words[scripts[0]]), list(words[scripts[0] + 1 :])
    if str(script.parent) not in sys.path:
        sys.path.insert(0, str(script.parent))
    from llm_utils.arguments import defaults_of, read

    kind = importlib.import_module(script.stem).Args
    try:
        args = read(kind, args=arguments, prog=shlex.join(words[: scripts[0] + 1]))
    except SystemExit:
        print(f"in the command: {shlex.join(words)}", file=sys.stderr)
        raise
    if hasattr(args, "old_logprobs"):  # a run notes the defaults that suit its model
        from llm_utils.run import fill_defaults

        fill_defaults(args)
    elif hasattr(args, "mode"):  # an evaluation notes what it plays
        from llm_utils.records.earlier_runs import fill_environment

        fill_environment(args)
    words = [sys.executable if word in ("python", "python3") else word for word in words]
    return Job(words, comparable(asdict(args)), defaults_of(kind), getattr(args, "num_threads", None))


def comparable(args: dict[str, Any]) -> dict[str, Any]:
    """Arguments as a JSON file gives them back, without those that may differ when a run goes on here."""
    differing = ("resume", "num_threads", "memory_gb")  # runs of an older version have a --memory-gb
    return {name: value for name, value in json.loads(json.dumps(args)).items() if name not in differing}


def find(job: Job) -> tuple[Path | None, bool]:
    """The folder of a run with the job's arguments and weights, and whether it is finished; else one that can go on, or
    None."""
    unfinished, files = None, job.model_files()

    def same(args: dict[str, Any], report: dict[str, Any]) -> bool:
        return comparable(job.defaults | args) == job.args and report.get("model_files", files) == files

    for path in [*RUNS.glob("*/summary.json"), *RUNS.glob("*/evaluation.json")]:
        report = json.loads(path.read_text())
        evaluation = path.stem == "evaluation"
        if (evaluation or report.get("finished")) and same(report["args"], report):
            if report.get("finished", True):  # older evaluations don't say so
                return path.parent, True
            unfinished = path.parent
    for path in sorted(RUNS.glob("*/checkpoint/state.json")):
        state = json.loads(path.read_text())
        if same(state["args"], state.get("run", {}).get("summary", {})):
            return path.parents[1], False
    return unfinished, False


def start(job: Job) -> subprocess.Popen:
    """Begin a run, or let an unfinished one go on."""
    folder, _ = find(job)
    words = job.words
    if folder is not None:
        script = next(i for i, word in enumerate(words) if word.endswith(".py"))
        threads = ["--num-threads", str(job.threads)] if job.threads is not None else []
        words = [*words[: script + 1], "--resume", str(folder), *threads]
    log = RUNS / "logs" / f"{job.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:  # a session of its own: Ctrl-C reaches it through `run_all` only, and once
        return subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)


def run_all(
    jobs: Sequence[Job], workers: int, done: Callable[[Job, Path], None] = lambda job, folder: None
) -> list[Path | None]:
    """Run what isn't finished, `workers` at a time. Returns the run folders in the order of the jobs, None if failed.

    `done` is called with each job that is finished and its folder, as soon as it is. Ctrl-C (or SIGTERM) interrupts the
    runs under way, which write their checkpoints, and ends the program.
    """
    for name, count in Counter(job.name for job in jobs).items():
        if count > 1:
            raise SystemExit(f"{count} runs would be called {name}; give each command an --exp-name of its own")
    finished = {job: folder for job in jobs for folder, ended in [find(job)] if ended and folder is not None}
    waiting = deque(job for job in jobs if job not in finished)
    running: dict[Job, subprocess.Popen] = {}
    bar = tqdm(total=len(jobs), initial=len(jobs) - len(waiting), unit="run", dynamic_ncols=True)
    if bar.n:
        bar.write(f"{bar.n} of {len(jobs)} runs are finished already")
        for job, folder in finished.items():
            done(job, folder)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                job = waiting.popleft()
                running[job] = start(job)
            time.sleep(0.1)
            for job in [job for job, process in running.items() if process.poll() is not None]:
                code = running.pop(job).returncode
                bar.write(f"{job.name}: " + (f"FAILED with status {code}" if code else "done"))
                bar.update()
                path, ended = find(job)
                if ended and path is not None:
                    finished[job] = path
                    done(job, path)
    except BaseException as error:
        for process in running.values():
            os.killpg(process.pid, signal.SIGTERM)  # what began in the background may ignore SIGINT
        bar.write(f"interrupted; {len(running)} runs write their checkpoints")
        for process in running.values():
            process.wait()
        bar.close()
        if not isinstance(error, KeyboardInterrupt):
            raise
        print("finished runs stay finished; go on with the same command", file=sys.stderr)
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, before)
    bar.close()
    return [finished.get(job) for job in jobs]


def last_words(job: Job) -> str:
    """What a job that failed said last, and where all that it said is."""
    log = RUNS / "logs" / f"{job.name}.log"
    said = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
    return f"{job.name} failed: {(said or ['no output'])[-1][-300:]}\n  {log}"


def finish(
    jobs: Sequence[Job], workers: int, done: Callable[[Job, Path], None] = lambda job, folder: None
) -> list[Path]:
    """Run what isn't finished, as `run_all`. Returns the folders of all jobs; SystemExit, with the last words of each,
    where some failed."""
    folders = run_all(jobs, workers, done)
    failed = [last_words(job) for job, folder in zip(jobs, folders, strict=True) if folder is None]
    if failed:
        sys.exit("\n".join([*failed, "failed; when that is mended, the same command goes on where it stopped"]))
    return [folder for folder in folders if folder is not None]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env-ids", nargs="+", required=True, help="ids of environments")
    parser.add_argument("--commands", nargs="+", required=True, help="learners with arguments, each in quotation marks")
    parser.add_argument("--num-seeds", type=int, default=3, help="seeds of each, from --first-seed on")
    parser.add_argument("--first-seed", type=int, default=1, help="the first seed")
    parser.add_argument("--workers", type=int, default=1, help="runs at the same time")
    options = parser.parse_args()
    for name in ("num_seeds", "first_seed", "workers"):
        if vars(options)[name] < (name != "first_seed"):
            parser.error(f"--{name.replace('_', '-')} is at least {int(name != 'first_seed')}")
    seeds = range(options.first_seed, options.first_seed + options.num_seeds)
    jobs = [
        make_job([*shlex.split(command), "--env-id", env_id, "--seed", str(seed)])
        for seed in seeds for env_id in options.env_ids for command in options.commands
    ]  # fmt: skip
    folders = run_all(jobs, options.workers)
    failed = [job for job, folder in zip(jobs, folders, strict=True) if folder is None]
    for job in failed:
        print(f"{last_words(job)}\n  {shlex.join(job.words)}", file=sys.stderr)
    sys.exit(f"{len(failed)} of {len(jobs)} runs failed" if failed else 0)
