"""Runs of environments x commands x seeds, some in parallel. Finished runs are skipped, and runs with a checkpoint
resume.

    python learner/sweep.py --env-ids AgentR1/MultihopWorld-v0 --num-seeds 3 --workers 2 \\
        --commands "python learner/ppo_llm.py --num-threads 1" "python learner/grpo_llm.py --num-threads 1"

A command ends with a learner and its arguments (`torchrun --nproc-per-node 2 learner/grpo_llm.py` works too);
`--env-id` and `--seed` are added. Two runs are the same if all their arguments and the files of their model are equal,
defaults included, except `--num-threads` and `--save-model`. After any change the run starts again. The output of a run
goes to runs/logs/. After Ctrl-C, the same command continues.
"""

import llm_utils.setup.startup  # noqa: F401  isort: skip  (reports a missing package in one line)

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
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tqdm import tqdm

RUNS = Path("runs")  # the learners write here too
FITTED = ("env_kwargs", "chat_template")  # arguments that a run adapts to its model
CHOSEN = ("gradient_checkpointing", "microbatch_tokens")  # arguments that a run adapts to its machine, if they are auto


@dataclass(eq=False)
class Job:
    """One run: the words of its command line, and the learner's arguments that they mean."""

    words: list[str]
    args: dict[str, Any]
    defaults: dict[str, Any]  # the learner's, for arguments that are missing in old runs
    threads: int | None = None  # torch's, if the learner has that argument; also for a resumed run

    @property
    def name(self) -> str:
        from llm_utils.records.run_files import name_of

        return re.sub("[/:]", "_", f"{name_of(self.args['env_id'])}__{self.args['exp_name']}__{self.args['seed']}")

    def model_files(self) -> str | None:
        """Return the current fingerprint of the model that the run starts from or evaluates."""
        from llm_utils.setup.sources import model_files

        try:
            return model_files(SimpleNamespace(**self.args)) if "model" in self.args else None
        except SystemExit:  # there is no such model: the run reports it
            return None

    def fitted(self) -> dict[str, Any]:
        """Return the arguments as a run records them, with those that depend on its model (FITTED)."""
        from llm_utils.setup.sources import fit_environment

        args = SimpleNamespace(**self.args, resume=None)
        if all(name in self.args for name in FITTED):  # a learner of one's own may lack them
            with suppress(SystemExit):  # the model is gone
                fit_environment(args)
        return comparable(vars(args))


def make_job(words: Sequence[str]) -> Job:
    """Read a command line with the learner's own `Args`. Raise SystemExit for an invalid one, before anything runs."""
    scripts = [i for i, word in enumerate(words) if word.endswith(".py")]
    if not scripts or not Path(words[scripts[0]]).is_file():
        raise SystemExit(f"the command has no learner (a file.py): {shlex.join(words)}")
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
    if hasattr(args, "old_logprobs"):  # a run records the defaults that suit its model
        from llm_utils.run import fill_defaults

        fill_defaults(args)
    elif hasattr(args, "mode"):  # an evaluation records its model and environment
        from llm_utils.records.earlier_runs import fill_environment

        fill_environment(args)
    words = [sys.executable if word in ("python", "python3") else word for word in words]
    return Job(words, comparable(asdict(args)), defaults_of(kind), getattr(args, "num_threads", None))


def comparable(args: dict[str, Any]) -> dict[str, Any]:
    """Return arguments in JSON form, without those that may differ in a resumed run."""
    differing = ("resume", "num_threads", "save_model", "memory_gb")  # runs of an older version have a --memory-gb
    return {name: value for name, value in json.loads(json.dumps(args)).items() if name not in differing}


def find(job: Job) -> tuple[Path | None, bool]:
    """Return the folder of a run with the job's arguments and weights, and whether it is finished. Otherwise return one
    to resume, or None."""
    from llm_utils.records.evaluation_files import current_names

    unfinished, files = None, job.model_files()

    def same(args: dict[str, Any], report: dict[str, Any]) -> bool:
        run = comparable(job.defaults | current_names(args))
        run |= {name: "auto" for name in CHOSEN if job.args.get(name) == "auto"}
        as_given = run | {name: job.args[name] for name in FITTED if name in job.args}
        if as_given != job.args or report.get("model_files", files) != files:
            return False
        return run == job.args or run == job.fitted()  # only now: the model may come from another job

    for path in [*RUNS.glob("*/summary.json"), *RUNS.glob("*/evaluation.json")]:
        report = json.loads(path.read_text())
        evaluation = path.stem == "evaluation"
        if (evaluation or report.get("finished")) and same(report["args"], report):
            if report.get("finished", True):  # missing in older evaluations
                return path.parent, True
            unfinished = path.parent
    for path in sorted(RUNS.glob("*/checkpoint/state.json")):
        state = json.loads(path.read_text())
        if same(state["args"], state.get("run", {}).get("summary", {})):
            return path.parents[1], False
    return unfinished, False


def start(job: Job) -> subprocess.Popen:
    """Start a run, or resume an unfinished one."""
    folder, _ = find(job)
    words = job.words
    if folder is not None:
        script = next(i for i, word in enumerate(words) if word.endswith(".py"))
        threads = ["--num-threads", str(job.threads)] if job.threads is not None else []
        names = {name: job.args[name] for name in ("env_id", "env_kwargs") if job.args.get(name) is not None}
        for name, value in names.items():  # repeated, because a folder may not name code that is installed
            threads += [f"--{name.replace('_', '-')}", *(value if isinstance(value, list) else [value])]
        words = [*words[: script + 1], "--resume", str(folder), *threads]
    log = RUNS / "logs" / f"{job.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:  # its own session, so that Ctrl-C reaches it only once, through `run_all`
        return subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)


def run_all(
    jobs: Sequence[Job], workers: int, done: Callable[[Job, Path], None] = lambda job, folder: None
) -> list[Path | None]:
    """Run the unfinished jobs, `workers` at a time. Return the run folders in the order of the jobs, None for failed
    ones.

    `done` is called with each finished job and its folder. Ctrl-C (or SIGTERM) interrupts the active runs, which write
    their checkpoints, and ends the program.
    """
    for name, count in Counter(job.name for job in jobs).items():
        if count > 1:
            raise SystemExit(f"{count} runs would be called {name}; give each command its own --exp-name")
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
            os.killpg(process.pid, signal.SIGTERM)  # background processes may ignore SIGINT
        bar.write(f"interrupted; {len(running)} runs write their checkpoints")
        for process in running.values():
            process.wait()
        bar.close()
        if not isinstance(error, KeyboardInterrupt):
            raise
        print("finished runs are kept; continue with the same command", file=sys.stderr)
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, before)
    bar.close()
    return [finished.get(job) for job in jobs]


def last_words(job: Job) -> str:
    """Return the last output line of a failed job, and the path of its log."""
    log = RUNS / "logs" / f"{job.name}.log"
    lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
    return f"{job.name} failed: {(lines or ['no output'])[-1][-300:]}\n  {log}"


def finish(
    jobs: Sequence[Job], workers: int, done: Callable[[Job, Path], None] = lambda job, folder: None
) -> list[Path]:
    """Run the unfinished jobs, as `run_all`. Return the folders of all jobs. Raise SystemExit with the last line of
    each failed one."""
    folders = run_all(jobs, workers, done)
    failed = [last_words(job) for job, folder in zip(jobs, folders, strict=True) if folder is None]
    if failed:
        sys.exit("\n".join([*failed, "some runs failed; after a fix, the same command continues where it stopped"]))
    return [folder for folder in folders if folder is not None]


if __name__ == "__main__":
    llm_utils.setup.startup.imported()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env-ids", nargs="+", required=True, help='ids of environments ("A B": both in one run)')
    parser.add_argument("--commands", nargs="+", required=True, help="learners with arguments, each in quotation marks")
    parser.add_argument("--num-seeds", type=int, default=3, help="seeds of each, from --first-seed on")
    parser.add_argument("--first-seed", type=int, default=1, help="the first seed")
    parser.add_argument("--workers", type=int, default=1, help="number of parallel runs")
    options = parser.parse_args()
    for name in ("num_seeds", "first_seed", "workers"):
        if vars(options)[name] < (name != "first_seed"):
            parser.error(f"--{name.replace('_', '-')} must be at least {int(name != 'first_seed')}")
    seeds = range(options.first_seed, options.first_seed + options.num_seeds)
    jobs = [
        make_job([*shlex.split(command), "--env-id", *env_id.split(), "--seed", str(seed)])
        for seed in seeds for env_id in options.env_ids for command in options.commands
    ]  # fmt: skip
    folders = run_all(jobs, options.workers)
    failed = [job for job, folder in zip(jobs, folders, strict=True) if folder is None]
    for job in failed:
        print(f"{last_words(job)}\n  {shlex.join(job.words)}", file=sys.stderr)
    sys.exit(f"{len(failed)} of {len(jobs)} runs failed" if failed else 0)
