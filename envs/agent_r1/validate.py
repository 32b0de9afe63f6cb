"""Checks of environments, and success rates of their experts and of policies that know nothing.

    python -m agent_r1.validate                                  every registered id (ids without data are named)
    python -m agent_r1.validate AgentR1/MultihopWorld-v0 --tasks 1000
    python -m agent_r1.validate my_module:Mine/Guess-v0          your own environment
    python -m agent_r1.validate --data-dir DATA --write benchmarks/results/validation.md
    python -m agent_r1.validate AgentR1/ShopWorld-v0 --write benchmarks/results/validation.md     its row, no other
    python -m agent_r1.validate --index docs/environments        write the index and the heads of the pages

In `validation/`, `checks.py` has the checks, `probes.py` the policies, `record.py` the table, `pages.py` the generated
parts of docs/environments. The exit status is 1 if a check fails. Rows are written one by one.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import agent_r1
from agent_r1 import interrupts
from agent_r1.arguments import ArgumentError, json_object, share
from agent_r1.baselines import baselines_of
from agent_r1.ids import find_environment
from agent_r1.task_data import DataNotFoundError
from agent_r1.tool_env import ToolEnv
from agent_r1.validation import probes
from agent_r1.validation.checks import CHECKS, Failed, Subject, digest_elsewhere, has_expert
from agent_r1.validation.pages import write as write_pages
from agent_r1.validation.probes import Played, Probe, play
from agent_r1.validation.record import Report, machine, read, table, write
from agent_r1_tools.text import printable

__all__ = ["CHECKS", "Failed", "Report", "Subject", "above", "main", "measure", "table", "validate"]

# ------------------------------------------------------------------------------------------------------------- figures


def measure(subject: Subject, report: Report) -> None:
    """Measure the figures of the table: success rates, speed and build time."""
    subject.make().close()  # reads files, builds indexes
    builds = []
    for _ in range(3):
        start = time.perf_counter()
        env = subject.make()
        builds.append(1e3 * (time.perf_counter() - start))
    floors = known_floors(env)
    known = {"expert": probes.expert} if has_expert(subject, env) else {}
    known |= probes.teachers(env)
    ignorant: dict[str, Probe] = {
        **probes.shortcuts(env),
        "null": probes.null,
        "random": probes.random,
        "stuffing": probes.stuffing,
        "many answers": probes.many_answers,
        "copying": probes.copying,
    }
    success: dict[str, float] = {}
    reasons_text = ""
    steps, seconds = 0, 0.0
    for name, probe in {**known, **ignorant}.items():
        start = time.perf_counter()
        episodes = [play(env, index, probe) for index in subject.tasks(env, subject.num_tasks)]
        seconds += time.perf_counter() - start
        steps += sum(len(episode.rewards) for episode in episodes)
        success[name] = sum(episode.success for episode in episodes) / len(episodes)
        if name == "expert":
            report.note = failing_calls(episodes)
            reasons = Counter(probes.failure(env, episode.infos[-1]) for episode in episodes if not episode.success)
            common = ", ".join(f"{n} {reason or 'not paid'}" for reason, n in reasons.most_common(5))
            reasons_text = "; " * bool(reasons) + common
    report.row = {
        "tasks": env.num_tasks,
        "splits": len(set(env.splits.values())),
        "played": len(subject.tasks(env, subject.num_tasks)),
        "success": success,
        **floors,
        "steps_per_second": steps / seconds,
        "build_ms": median(builds),
    }
    count = report.row["played"]
    if unknown := floors["floors"].keys() - ignorant.keys():
        known_names = f"the known names are {', '.join(ignorant)}"
        names = ", ".join(sorted(unknown))
        report.failed["floors"] = f"{type(env).__name__}.floors has the unknown names {names}; {known_names}"
    if success.get("expert", 1) < 1:
        report.failed["expert"] = f"the expert succeeds in {success['expert']:.3f} of {count} episodes{reasons_text}"
    for name in ignorant:
        if above(success[name], floor := floors["floors"].get(name, floors["floor"]), count):
            rate = f"{name} succeeds in {success[name]:.3f} of {count} episodes"
            report.failed[name] = f"{rate}; at most {floor} is allowed (floor, or floors[{name!r}])"
    for name in probes.teachers(env):
        percent = name.rsplit("_", 1)[-1]
        if percent.isdecimal() and abs(success[name] - int(percent) / 100) > 0.03 + 2 * (0.25 / count) ** 0.5:
            expected = f"expected {int(percent) / 100:.2f}"
            report.failed[name] = f"{name} succeeds in {success[name]:.3f} of {count} episodes; {expected}"
    env.close()


def known_floors(env: ToolEnv) -> dict[str, Any]:
    """Return `floor` and `floors` of an environment instance. Raises ArgumentError for a value that is not a share."""
    name, known = type(env).__name__, baselines_of(env)
    floors = known.floors
    if not isinstance(floors, Mapping):
        raise ArgumentError(f"{name}.floors must map names of heuristic baselines to shares, got {floors!r:.200}")
    shares = {probe: share(f"{name}.floors[{probe!r}]", value) for probe, value in floors.items()}
    return {"floor": share(f"{name}.floor", known.floor), "floors": shares}


def failing_calls(episodes: Sequence[Played]) -> str:
    """Report the share of an expert's episodes with failed calls, and the first error; "" if no call fails.

    An expert may succeed in spite of failed calls. This finds a tool that always raises.
    """
    calls = [[call for info in episode.infos for call in info["tool_calls"] if not call["ok"]] for episode in episodes]
    if not (failed := [failures for failures in calls if failures]):
        return ""
    first = failed[0][0]
    often = f"{len(failed)} of {len(calls)} episodes"
    return f"calls of the expert fail in {often}, such as {first['name']}: {first['error']}"


def above(share: float, bound: float, count: int) -> bool:
    """Return whether a share is above a bound by more than chance: Wilson's lower 99 % limit."""
    z = 2.326
    center = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * (share * (1 - share) / count + z * z / (4 * count * count)) ** 0.5 / (1 + z * z / count)
    return center - half > bound + 1e-9


def validate(subject: Subject) -> Report:
    """Measure and check one id. Missing data or a missing package is in `missing`."""
    report = Report(subject.env_id)
    try:
        subject.make().close()
    except (DataNotFoundError, ImportError) as error:
        report.missing = error
        return report
    except Exception as error:
        report.failed["build"] = f"{type(error).__name__}: {error}"
        if isinstance(error, AttributeError):
            report.failed["build"] += "; does its __init__ call super().__init__(tools, **kwargs)?"
        return report
    for name, check in {"figures": lambda one: measure(one, report), **CHECKS}.items():
        if sys.stderr.isatty():
            print(f"\r{subject.env_id}: {name} ...\033[K", end="\r", file=sys.stderr, flush=True)
        try:
            with warnings.catch_warnings():  # random calls fail; failed calls of an expert are noted
                warnings.filterwarnings("ignore", "the tool .* failed in", RuntimeWarning)
                check(subject)
        except Exception as error:
            report.failed[name] = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
    return report


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line."""
    description, _, examples = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m agent_r1.validate",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("ids", nargs="*", help="ids, or MODULE:ID for your own environment (default: all of AgentR1)")
    parser.add_argument("--tasks", type=int, default=100, help="tasks per id, spread over its split (default: 100)")
    parser.add_argument("--env-kwargs", default="{}", help="arguments of the environments, as JSON")
    parser.add_argument("--data-dir", help="a folder with one folder for each data set, like AGENT_R1_DATA")
    parser.add_argument("--write", type=Path, help="a Markdown file for the table, with a JSON file; other rows stay")
    parser.add_argument("--index", type=Path, metavar="PAGES", help="only write the index and the heads of these pages")
    parser.add_argument("--digest", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.index:
        for path in write_pages(args.index):
            print(f"wrote {path}")
        return 0
    if args.tasks < 1:
        parser.error("--tasks must be at least 1")
    try:
        kwargs = json_object(args.env_kwargs)
    except argparse.ArgumentTypeError as error:
        parser.error(f"--env-kwargs {error}")
    if args.data_dir:
        os.environ["AGENT_R1_DATA"] = args.data_dir
    subjects = [Subject(env_id, kwargs, args.tasks) for env_id in args.ids or agent_r1.ENVIRONMENTS | agent_r1.BRIDGES]
    for subject in subjects:
        try:
            find_environment(subject.env_id)
        except ArgumentError as error:
            parser.error(printable(f"{subject.env_id}: {error}"))
    if args.digest:
        print(digest_elsewhere(subjects[0]))
        return 0
    if args.write and (args.write.suffix != ".md" or not args.write.parent.is_dir()):
        parser.error(f"--write: {args.write} must end in .md, in an existing folder")
    try:
        if args.write:
            read(args.write)
    except ValueError as error:
        parser.error(f"--write: {error}")
    flags = ["--tasks", str(args.tasks), *(["--env-kwargs", args.env_kwargs] if kwargs else [])]
    flags += ["--data-dir", "DATA"] if args.data_dir else []  # the recorded command must not name a local folder
    reports: list[Report] = []
    for subject in subjects:
        start = time.perf_counter()
        command, computer = ["python", "-m", "agent_r1.validate", subject.env_id, *flags], machine()
        try:
            report = replace(validate(subject), command=shlex.join(command), machine=computer)
        except KeyboardInterrupt:
            print(f"\n{subject.env_id}: stopped", file=sys.stderr)
            print("\n" + table(reports), end="")
            return 130
        reports.append(report)
        verdict = str(report.missing or "") or ("failed" if report.failed else "pass")
        print(f"{subject.env_id}: {verdict} ({time.perf_counter() - start:.0f} s)", flush=True)
        for name, reason in report.failed.items():
            print(printable(f"  {name}: {reason}"), flush=True)
        if report.note:
            print(printable(f"  note: {report.note}"), flush=True)
        if args.write:
            write(args.write, [report])  # at once: measured rows stay if the program stops
    print("\n" + table(reports), end="")
    return int(any(report.failed or (report.missing and args.ids) for report in reports))


if __name__ == "__main__":
    sys.exit(interrupts.run(main))
