"""Runs of the scripts in learner/, and what is kept of them: results/evidence_runs.jsonl, a line a run.

A run that has its line is not made again, here or on another machine, whatever the commit in it says: what a learner
or an environment does by default is not in its key. After a change that matters delete the lines.
What a run begins with is made again where its files are gone.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from machine import RESULTS, append_line, describe_machine, read_lines, require_quiet_machine, where
from safetensors import safe_open

from agent_r1 import tiny_policy

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "learner"))
from compare import read_curve
from scores import Scores
from sweep import Job, find, finish, make_job

from llm_utils.sampling.decoding import best_of

RECORD = RESULTS / "evidence_runs.jsonl"
PER_TASK = ("requests_done", "support_recall")  # what is kept of each task of an evaluation, beside success


@dataclass(frozen=True)
class Run:
    """A run in one thread. A flag that is a `Run` stands for the model that it makes (behind --critic for its folder),
    `Made` for a file."""

    label: str
    script: str
    seed: int
    flags: tuple[object, ...]

    @property
    def key(self) -> str:
        """What it does, and from which weights, in a few letters; the same wherever its files lie."""
        words = [flag.key if isinstance(flag, Run | Made) else str(flag).removeprefix(f"{ROOT}/")
                 for flag in self.flags]  # fmt: skip
        given = dict(zip(self.flags, self.flags[1:], strict=False))
        if not isinstance(model := given.get("--model", "tiny"), Run) and model != "scratch":
            folder = Path(tiny_policy(str(given["--env-id"])) if model == "tiny" else str(model))
            if model != "tiny" and folder.is_absolute() and not folder.is_relative_to(ROOT):
                words[self.flags.index("--model") + 1] = ""  # somebody's own: the weights say which
            words.append(weights(folder / "model.safetensors"))
        return brief([self.script, self.seed, *words])

    @property
    def needs(self) -> list[Run]:
        """What it begins with."""
        return [run for flag in self.flags for run in
                ([flag] if isinstance(flag, Run) else flag.runs if isinstance(flag, Made) else ())]  # fmt: skip

    def job(self) -> Job:
        """As a command; what it needs must be finished."""
        name = "evidence_" + re.sub(r"\W+", "_", f"{self.label} {self.key[:4]}".lower())
        words = ["python", f"learner/{self.script}", "--exp-name", name, "--seed", str(self.seed), "--num-threads", "1"]
        for before, flag in zip(("", *self.flags), self.flags, strict=False):
            if isinstance(flag, Run):
                words.append(str(flag.folder() / "model" if before != "--critic" else flag.folder()))
            else:
                words.append(str(flag.write() if isinstance(flag, Made) else flag))
        return make_job(words)

    def folder(self) -> Path:
        """Where its files are. LookupError where it isn't finished."""
        folder, finished = find(self.job())
        if folder is None or not finished:
            raise LookupError(f"{self.label}, seed {self.seed} has not run here")
        return folder


@dataclass(frozen=True)
class Made:
    """A file or a folder that is made of the files of runs, as a flag."""

    runs: tuple[Run, ...]

    @property
    def key(self) -> str:
        """As a run's."""
        return " ".join(run.key for run in self.runs)

    def write(self) -> Path:
        """The path, after it was made."""
        raise NotImplementedError


@dataclass(frozen=True)
class Successes(Made):
    """The episodes of evaluations that ended in success, one file."""

    def write(self) -> Path:
        """The file, beside the last evaluation. SystemExit without an episode: there is nothing to imitate."""
        folders = [run.folder() for run in self.runs]
        rows = [row for folder in folders for row in (folder / "trajectories.jsonl").read_text().splitlines()]
        rows = [row for row in rows if json.loads(row)["stats"]["success"]]
        if not rows:
            raise SystemExit(f"{folders[-1]}: no episode succeeded, so there is nothing to imitate")
        path = folders[-1] / "successes.jsonl"
        path.write_text("\n".join(rows) + "\n")
        return path


def brief(facts: Sequence[object]) -> str:
    """What JSON says, in a few letters."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


@cache
def weights(path: Path) -> str:
    """Name the weights of a file of safetensors in 16 hex digits: SHA-256 of its bytes, or of the file that it was
    rounded from, where its header says so. The shipped policies are bf16; recorded runs began with their float32."""
    with safe_open(path, "np") as file:
        rounded_from: str | None = (file.metadata() or {}).get("rounded_from")
    return rounded_from or hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def recorded() -> dict[str, dict[str, Any]]:
    """The lines of the record by key, the last one where there are several. SystemExit where one is cut off."""
    there = RECORD.stat() if RECORD.is_file() else None
    return _recorded(RECORD, there and (there.st_mtime_ns, there.st_size))


@lru_cache(maxsize=1)
def _recorded(path: Path, version: tuple[int, int] | None) -> dict[str, dict[str, Any]]:
    """Of this version of the file: a table asks some hundred times. Nobody changes what comes back."""
    return {line["key"]: line for line in read_lines(path)}


@cache
def commit() -> str:
    """Of what runs here, with a + where a source differs from it; empty outside of a clone, or without git."""
    if shutil.which("git") is None:
        return ""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run([*git, "status", "--porcelain", "--", "learner", "envs", "tools"], capture_output=True)
    return head.stdout.strip() + "+" * bool(changed.stdout)


def record(key: str, label: str, facts: Mapping[str, Any], force: bool) -> None:
    """Write a line."""
    line = {"key": key, "label": label, "commit": commit(), "on": where(describe_machine()), "forced": force, **facts}
    append_line(RECORD, line)


def make(runs: Iterable[Run], args: Any) -> list[dict[str, Any]]:
    """What is kept of each run (`keep`), in order; those without a line are run, `args.workers` at a time.

    `args.used` gets the keys.
    """
    runs = list(runs)
    args.used.update(run.key for run in runs)
    lines = recorded()
    missing = [run for run in dict.fromkeys(runs) if run.key not in lines]
    if missing:
        begin([run.label for run in missing], args)

        def write(run: Run, folder: Path) -> None:
            record(run.key, f"{run.label}, seed {run.seed}", keep(folder), args.force)

        folders(missing, args.workers, write)
        lines = recorded()
    return [lines[run.key] for run in runs]


def begin(labels: Sequence[str], args: Any) -> None:
    """Say what isn't in the record and is made now. The first time SystemExit where it can't be: a package is missing,
    the machine is busy."""
    kinds = "; ".join(dict.fromkeys(labels))
    print(f"not in the record: {len(labels)} runs ({kinds}), made now after what they begin with", file=sys.stderr)
    if args.begun:
        return
    if args.needs and find_spec(args.needs[0]) is None:
        raise SystemExit('that needs the package {}: pip install -e ".[{}]"'.format(*args.needs))
    require_quiet_machine(args.force)
    args.begun = True


def made(args: Any) -> dict[str, Any]:
    """Where the runs behind a table were made, and whether beside other work: those used since it was asked last."""
    used = [line for key, line in recorded().items() if key in args.used]
    args.used.clear()
    return {"on": sorted({line["on"] for line in used}), "forced": any(line["forced"] for line in used)}


def folders(
    runs: Sequence[Run], workers: int, done: Callable[[Run, Path], None] = lambda run, folder: None
) -> list[Path]:
    """Run what isn't finished here, after what it needs; `done` is called with each and its folder as soon as it is.

    Returns the folders. SystemExit, after all others, where one can't begin.
    """
    needs = list(dict.fromkeys(need for run in runs for need in run.needs))
    if needs:
        folders(needs, workers)
    jobs: dict[Job, Run] = {}
    refused: list[SystemExit] = []
    for run in runs:
        try:
            jobs[run.job()] = run
        except SystemExit as error:
            refused.append(error)
    found = finish(list(jobs), workers, lambda job, folder: done(jobs[job], folder))
    if refused:
        raise refused[0]
    return found


def keep(folder: Path) -> dict[str, Any]:
    """What the tables need: of an evaluation its tasks, of a training its cost and its evaluations on the way.

    What a fault ended is no result.
    """
    if (folder / "evaluation.json").is_file():
        rows = [row for line in (folder / "trajectories.jsonl").read_text().splitlines()
                if not (row := json.loads(line))["fault"]]  # fmt: skip
        rows.sort(key=lambda row: row["task_index"])
        if json.loads((folder / "evaluation.json").read_text())["args"].get("decode") == "best-of-n":
            rows = [vars(row) for row in best_of([SimpleNamespace(**row) for row in rows])]
        calls = Counter(int(row["stats"]["tool_calls"]) for row in rows)
        return {
            "tasks": len(rows),
            "tasks_hash": brief([row["task_index"] for row in rows]),
            "success": "".join(str(int(row["stats"]["success"])) for row in rows),
            "turns": sum(int(row["stats"]["turns"]) for row in rows),
            "tokens": sum(int(row["stats"].get("candidate_tokens", row["stats"]["sampled_tokens"])) for row in rows),
            "calls": {str(number): calls[number] for number in sorted(calls)},
            "failed": sum(int(row["stats"]["tool_errors"]) for row in rows),
            "return": round(float(np.mean([row["stats"]["return"] for row in rows])), 4) if rows else 0.0,
            "seconds": json.loads((folder / "evaluation.json").read_text())["seconds"],
        } | {name: [round(float(row["stats"][name]), 4) for row in rows]
             for name in PER_TASK if rows and name in rows[0]["stats"]}  # fmt: skip
    summary = json.loads((folder / "summary.json").read_text())
    kept: dict[str, Any] = {"seconds": summary["train_seconds"]}
    if "turns" in summary:  # of demonstrations
        return kept | {"turns": summary["turns"]}
    turns, episodes = read_curve(folder, "charts/episodes")
    kept |= {"episodes": float(episodes[-1]), "turns": float(turns[-1])}
    try:
        at, success = read_curve(folder, "eval/success", "steps")
    except KeyError:  # --eval-episodes 0
        return kept
    return kept | {"eval_turns": at.tolist(), "eval_success": np.round(success, 4).tolist()}


def table(plays: Mapping[tuple[str, str], Sequence[Run]], args: Any, what: str = "success") -> dict[str, Scores]:
    """Row and column -> its evaluations, one a seed, to success in them, or what else is kept of each task.

    SystemExit where those of a column aren't of the same tasks: faults left some out.
    """
    make([run for group in plays.values() for run in group], args)
    lines = {place: make(group, args) for place, group in plays.items()}
    columns = dict.fromkeys(column for _, column in plays)
    for column in columns:
        there = [line for (_, other), group in lines.items() if other == column for line in group]
        if len({line["tasks_hash"] for line in there}) > 1:
            fewest = min(there, key=lambda line: line["tasks"])
            why = f"{column}: evaluations aren't of the same tasks; {fewest['label']} has {fewest['tasks']}"
            raise SystemExit(f"{why}. Delete its line from {RECORD.name} and its folder to play it again")
    return {
        row: {column: np.array([[float(value) for value in line[what]] for line in lines[row, column]])
              for column in columns if (row, column) in lines}
        for row in dict.fromkeys(row for row, _ in plays)
    }  # fmt: skip
