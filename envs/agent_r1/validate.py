"""Checks environments, and measures what their experts and those who know nothing reach.

    python -m agent_r1.validate                                  every registered id (those without data are named)
    python -m agent_r1.validate AgentR1/MultihopWorld-v0 --tasks 1000
    python -m agent_r1.validate my_module:Mine/Guess-v0          one of your own
    python -m agent_r1.validate --data-dir DATA --write benchmarks/results/validation.md

Each check is a line of `CHECKS`. The status is 1 where one fails.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import pickle
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from types import MethodType
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import load_env_creator

import agent_r1
from agent_r1 import probes
from agent_r1.probes import Played, Probe, play
from agent_r1.task_data import DataNotFoundError
from agent_r1.tasks.draw import pick
from agent_r1.tool_env import ToolEnv
from agent_r1_tools import Tool, ToolResult

CONTEXT = 1 << 20  # tokens, for checks that play long
FARMED_TURNS = 200
MARK = "QXhereXQ"


@dataclass
class Subject:
    """What is checked: an id, how it is made, and how many of its tasks are played."""

    env_id: str
    kwargs: dict[str, Any]
    num_tasks: int

    def make(self, **kwargs: Any) -> Any:
        """The environment without gymnasium's wrappers, which would check the same again."""
        return gym.make(self.env_id, disable_env_checker=True, **self.kwargs | kwargs).unwrapped

    def tasks(self, env: ToolEnv, most: int) -> list[int]:
        """Indexes of tasks, spread over the split."""
        count = min(self.num_tasks, most, env.num_tasks)
        return [int(i) for i in np.linspace(0, env.num_tasks - 1, count)]


@dataclass
class Report:
    """What came out for an id: a row of the table, and which checks failed, with the reason.

    `missing`: what it needs and isn't there, data or a package.
    """

    env_id: str
    row: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    missing: DataNotFoundError | ImportError | None = None

    @property
    def lacks(self) -> str:
        """What is missing, in a word or two: the table names no folder of this machine."""
        if self.missing is None:
            return ""
        extra = re.search(r"agent-r1\[\w+\]", str(self.missing))
        return "its data" if isinstance(self.missing, DataNotFoundError) else extra[0] if extra else "a package"


class Failed(Exception):
    """A check that found something; the text says what and where."""


# ------------------------------------------------------------------------------------------------------------- figures


def measure(subject: Subject, report: Report) -> None:
    """Shares of success, speed, and how long it takes to build: the figures of the table."""
    subject.make().close()  # reads files, builds indexes
    builds = []
    for _ in range(3):
        start = time.perf_counter()
        env = subject.make()
        builds.append(1e3 * (time.perf_counter() - start))
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
    steps, seconds = 0, 0.0
    for name, probe in {**known, **ignorant}.items():
        start = time.perf_counter()
        episodes = [play(env, index, probe) for index in subject.tasks(env, subject.num_tasks)]
        seconds += time.perf_counter() - start
        steps += sum(len(episode.rewards) for episode in episodes)
        success[name] = sum(episode.success for episode in episodes) / len(episodes)
    report.row = {
        "tasks": env.num_tasks,
        "splits": len(set(env.splits.values())),
        "played": len(subject.tasks(env, subject.num_tasks)),
        "success": success,
        "floor": env.floor,
        "steps_per_second": steps / seconds,
        "build_ms": median(builds),
    }
    count = report.row["played"]
    if success.get("expert", 1) < 1:
        report.failed["expert"] = f"the expert succeeds in {success['expert']:.3f} of {count} episodes"
    for name in ignorant:
        if above(success[name], env.floor, count):
            report.failed[name] = f"{name} succeeds in {success[name]:.3f} of {count} episodes; `floor` is {env.floor}"
    for name in probes.teachers(env):
        meant = name.rsplit("_", 1)[-1]
        if meant.isdecimal() and abs(success[name] - int(meant) / 100) > 0.03 + 2 * (0.25 / count) ** 0.5:
            report.failed[name] = f"{name} succeeds in {success[name]:.3f} of {count} episodes"
    env.close()


def has_expert(subject: Subject, env: Any) -> bool:
    """Whether the environment has a demonstration of its first task."""
    env.reset(seed=0, options={"task_index": 0})
    try:
        env.demonstration()
    except (ValueError, NotImplementedError):
        return False
    return True


def above(share: float, bound: float, count: int) -> bool:
    """Whether a share is above a bound by more than chance: Wilson's lower 99 % limit."""
    z = 2.326
    center = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * (share * (1 - share) / count + z * z / (4 * count * count)) ** 0.5 / (1 + z * z / count)
    return center - half > bound + 1e-9


# -------------------------------------------------------------------------------------------------------------- checks


def gymnasium_check(subject: Subject) -> None:
    """Gymnasium's own check."""
    from gymnasium.utils.env_checker import check_env

    env = subject.make()
    check_env(env, skip_render_check=True)
    env.close()


def farming(subject: Subject) -> None:
    """200 turns of repeated or alternating calls earn at most the process terms of the expert (without one: 1)."""
    env = subject.make(max_context_tokens=CONTEXT)
    expert = has_expert(subject, env)
    for index in subject.tasks(env, 2):
        most = 1.0
        calls: list[str] = []
        if expert:
            most = max(0.0, play(env, index, probes.expert).process)
            calls = [text for text in env.demonstration() if "<answer>" not in text][:3]
        env.reset(seed=0, options={"task_index": index})
        rng = np.random.default_rng(index)
        calls += [probes.random_call(env, rng, name) for name in list(env.tools)[:4]]
        for cycle in filter(None, [*([call] for call in calls), calls[:2], calls, [probes.NOTHING]]):
            episode = play(env, index, probes.repeated(cycle), max_turns=FARMED_TURNS)
            if episode.process > most + 1e-6:
                earned = f"{FARMED_TURNS} turns of {cycle} earn {episode.process:.3f}"
                raise Failed(f"task {index}: {earned}, more than {most:.3f}")
    env.close()


def injection(subject: Subject) -> None:
    """Special tokens, roles, calls and answers in a question or a tool's result stay text."""
    env = subject.make(max_context_tokens=CONTEXT)
    first = subject.tasks(env, 1)[0]
    seen: dict[str, Any] = {}
    calls: list[str] = []
    for text in ("harmless", probes.hostile_text(env)):
        _put_into_questions(env, f"{MARK} {text}")
        state, _ = env.reset(seed=0, options={"task_index": first})
        results = [_put_into_results(tool, f"{MARK} {text}") for tool in env.tools.values()]  # of this episode
        specials = [_specials(env, state)]
        rng = np.random.default_rng(0)
        calls = calls or [probes.random_call(env, rng, name) for name in env.tools][: env.max_turns - 1]
        for call in calls:
            state, _, terminated, truncated, info = env.step(probes.span(env, call))
            if terminated or truncated:
                break
            if len(info["tool_calls"]) > 1:
                raise Failed(f"text of a result became a call: {info['tool_calls']}")
            specials.append(_specials(env, state))
        told = [message["content"] for message in env.messages if message["role"] == "tool"]
        if not all(MARK in text for text in [env.messages[1]["content"], *told]):
            raise Failed("the text that was put into questions and results doesn't arrive in the conversation")
        seen[text] = (specials, env.episode.over)
        for undo in results:
            undo()
    harmless, injected = seen.values()
    if harmless != injected:
        raise Failed("a question or result with control tokens and calls in it changes what the state is made of")
    env.close()


def _put_into_questions(env: Any, text: str) -> None:
    make_task = type(env).make_task

    def with_text(self: Any, index: int) -> Any:
        task = make_task(self, index)
        return replace(task, question=f"{task.question} {text}")

    env.make_task = MethodType(with_text, env)


def _put_into_results(tool: Tool, text: str) -> Callable[[], None]:
    """Put a text before all that a tool says; what is returned takes it out again."""
    execute, batch_execute = tool.execute, tool.batch_execute

    def marked(result: ToolResult) -> ToolResult:
        return replace(result, content=f"{text} {result.content}")

    changed: Any = tool
    changed.execute = lambda arguments: marked(execute(arguments))
    changed.batch_execute = lambda batch: [marked(result) for result in batch_execute(batch)]

    def undo() -> None:
        del changed.execute, changed.batch_execute

    return undo


def _specials(env: ToolEnv, state: Any) -> list[int]:
    from agent_r1.tokenizers import control_tokens

    special = set(control_tokens(env.tokenizer).values())
    return [token for token in state.tolist() if token in special]


def determinism(subject: Subject) -> None:
    """The same episodes in another process, under another hash seed, time zone, clock and global random state."""
    words = ["--digest", "--tasks", str(subject.num_tasks), "--env-kwargs", json.dumps(subject.kwargs)]
    found = set()
    for hash_seed, zone in (("1", "UTC"), ("2", "Asia/Tokyo")):
        child = subprocess.run(
            [sys.executable, "-m", "agent_r1.validate", subject.env_id, *words],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "TZ": zone, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
        )
        if child.returncode:
            raise Failed(f"a child process failed: {child.stderr.strip().splitlines()[-1:]}")
        found.add(child.stdout.strip())
    if len(found | {digest(subject)}) > 1:
        raise Failed("another process, with another hash seed and clock, plays other episodes")


def digest(subject: Subject) -> str:
    """Of all that a few episodes show: states, rewards, infos."""
    env, told = subject.make(), hashlib.sha256()
    for index in subject.tasks(env, 5):
        for probe in _players(subject, env):
            episode = play(env, index, probe, seed=3)
            told.update(json.dumps([episode.states, episode.rewards, episode.infos], sort_keys=True).encode())
    env.close()
    return told.hexdigest()


def _players(subject: Subject, env: Any) -> list[Probe]:
    return [probes.random, *([probes.expert] if has_expert(subject, env) else [])]


def snapshots(subject: Subject) -> None:
    """An episode that goes on from a pickled snapshot, in another environment, is the uninterrupted one."""
    env, other = subject.make(), subject.make()
    for index in subject.tasks(env, 2):
        for probe in _players(subject, env):
            texts: list[str] = []
            whole = play(env, index, _noting(probe, texts))
            for cut in range(len(texts)):
                play(env, index, _saying(texts[:cut]))
                other.set_state(pickle.loads(pickle.dumps(env.get_state())))
                rest = Played()
                for text in texts[cut:]:
                    state, reward, _, _, info = other.step(probes.span(other, text))
                    rest.states.append(state.tolist())
                    rest.rewards.append(reward)
                    rest.infos.append(info)
                parts = (rest.states, rest.rewards, rest.infos)
                if parts != (whole.states[cut + 1 :], whole.rewards[cut:], whole.infos[cut + 1 :]):
                    raise Failed(f"task {index}: a snapshot after turn {cut} goes on otherwise")
    env.close()
    other.close()


def _noting(probe: Probe, texts: list[str]) -> Probe:
    def noted(env: Any, rng: np.random.Generator) -> Any:
        for text in probe(env, rng):
            texts.append(text)
            yield text

    return noted


def _saying(texts: list[str]) -> Probe:
    return lambda env, rng: texts


def global_state(subject: Subject) -> None:
    """Neither Python's nor numpy's global random state is read (`determinism`) or changed."""
    random.seed(5)
    np.random.seed(5)
    before = random.getstate(), pickle.dumps(np.random.get_state())
    digest(subject)
    if before != (random.getstate(), pickle.dumps(np.random.get_state())):
        raise Failed("an episode changes the global random state; draw from self.np_random or a Generator of your own")


def broken_spans(subject: Subject) -> None:
    """Random tokens, torn and doubled calls, deep brackets: no exception, and the state grows by what was written."""
    env = subject.make()
    rng = np.random.default_rng(0)
    for index in subject.tasks(env, 10):
        state, _ = env.reset(seed=0, options={"task_index": index})
        over = False
        while not over:
            call = probes.random_call(env, rng) if env.tools else "x"
            cut = int(rng.integers(len(call) + 1))
            texts = (call[:cut], call[cut:], call * 9, call[:cut] + "\ud800\0" + call[cut:], "[" * 5_000, "{" * 900)
            span = probes.span(env, pick(rng, texts))
            if rng.random() < 0.2:
                span = rng.integers(env.action_space.vocab_size, size=int(rng.integers(1, 60)), dtype=np.int32)
            before, (state, _, terminated, truncated, info) = state, env.step(span)
            kept = min(len(span), len(state) - len(before))
            if not np.array_equal(state[: len(before) + kept], np.concatenate([before, span[:kept]])):
                raise Failed(f"task {index}: the state isn't what it was and what was written")
            json.dumps(info, allow_nan=False)
            over = terminated or truncated
    env.close()


CHECKS: dict[str, Callable[[Subject], None]] = {
    "gymnasium": gymnasium_check,
    "farming": farming,
    "injection": injection,
    "determinism": determinism,
    "snapshot": snapshots,
    "global state": global_state,
    "broken spans": broken_spans,
}


def validate(subject: Subject) -> Report:
    """Measure and check one id. What it needs and isn't there (data, a package) is in `missing`."""
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
            check(subject)
        except Exception as error:
            report.failed[name] = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
    return report


# --------------------------------------------------------------------------------------------------------------- table


def table(reports: Sequence[Report]) -> str:
    """The figures and verdicts as a Markdown table."""
    head = ["id", "tasks", "splits", "expert", "fallible", "null", "random", "stuffing", "copying", "shortcuts"]
    head += ["steps/s", "build ms", "checks"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for report in reports:
        name = report.env_id.removeprefix("AgentR1/")
        if not report.row:
            reason = f"not checked: {report.lacks}" if report.missing else f"failed: {', '.join(report.failed)}"
            lines.append("| " + " | ".join([name, *[""] * (len(head) - 2), reason]) + " |")
            continue
        row, success = report.row, report.row["success"]
        plain = ("expert", "null", "random", "stuffing", "many answers", "copying")
        fallible = " ".join(f"{share:.2f}" for name, share in success.items() if name.startswith("fallible"))
        tricks = {n: s for n, s in success.items() if n not in plain and not n.startswith("fallible")}
        lines.append(
            "| "
            + " | ".join(
                [
                    name,
                    f"{row['tasks']:,}" if row["tasks"] < 2**31 - 1 else "no end",
                    str(row["splits"]),
                    f"{success['expert']:.3f}" if "expert" in success else "none",
                    fallible,
                    f"{success['null']:.3f}",
                    f"{success['random']:.3f}",
                    f"{max(success['stuffing'], success['many answers']):.3f}",
                    f"{success['copying']:.3f}",
                    ", ".join(f"{name.replace('_', ' ')} {share:.3f}" for name, share in tricks.items()),
                    f"{row['steps_per_second']:,.0f}",
                    f"{row['build_ms']:.0f}",
                    "pass" if not report.failed else f"failed: {', '.join(report.failed)}",
                ]
            )
            + " |"
        )
    return "\n".join(lines) + "\n"


def index(pages: Path) -> str:
    """A table of all ids with what they ask of a policy. `pages` holds a page for each, titled by the id."""
    page_of = {page.read_text().partition("\n")[0].removeprefix("# "): page.name for page in sorted(pages.glob("*.md"))}
    lines = ["| id | | needs | observability | turns of an expert |", "|---|---|---|---|---|"]
    for env_id, entry in (agent_r1.ENVIRONMENTS | agent_r1.BRIDGES).items():
        what = (load_env_creator(entry.entry_point).__doc__ or "").partition("\n")[0].rstrip(".")
        link = f"[{env_id.removeprefix('AgentR1/')}]({page_of[env_id]})" if env_id in page_of else env_id
        lines.append(f"| {link} | {what} | {', '.join(entry.needs)} | {entry.observability} | {entry.horizon} |")
    return "\n".join(lines) + "\n"


def main(words: Sequence[str] | None = None) -> int:
    """The command line."""
    description, _, examples = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m agent_r1.validate",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("ids", nargs="*", help="ids, or MODULE:ID for one of your own (default: all of AgentR1)")
    parser.add_argument("--tasks", type=int, default=100, help="of each id, spread over its split (default: 100)")
    parser.add_argument("--env-kwargs", default="{}", help="arguments of the environments, as JSON")
    parser.add_argument("--data-dir", help="a folder with a folder for each data set, as AGENT_R1_DATA")
    parser.add_argument("--write", type=Path, help="a Markdown file for the table; its JSON goes beside it")
    parser.add_argument("--index", type=Path, metavar="PAGES", help="print what the ids ask of a policy, and be done")
    parser.add_argument("--digest", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.index:
        print(index(args.index), end="")
        return 0
    if args.tasks < 1:
        parser.error("--tasks is at least 1")
    try:
        kwargs = json.loads(args.env_kwargs)
        assert isinstance(kwargs, dict)
    except (ValueError, AssertionError):
        parser.error(f"--env-kwargs is a JSON object, got {args.env_kwargs!r}")
    if args.data_dir:
        os.environ["AGENT_R1_DATA"] = args.data_dir
    subjects = [Subject(env_id, kwargs, args.tasks) for env_id in args.ids or agent_r1.ENVIRONMENTS | agent_r1.BRIDGES]
    for subject in subjects:
        try:
            module, _, name = subject.env_id.rpartition(":")
            if module:
                importlib.import_module(module)
            gym.spec(name)
        except (gym.error.Error, ImportError) as error:
            parser.error(str(error))
    if args.digest:
        print(_digest_elsewhere(subjects[0]))
        return 0
    reports = []
    for subject in subjects:
        start = time.perf_counter()
        report = validate(subject)
        reports.append(report)
        verdict = str(report.missing or "") or ("failed" if report.failed else "pass")
        print(f"{subject.env_id}: {verdict} ({time.perf_counter() - start:.0f} s)", flush=True)
        for name, reason in report.failed.items():
            print(f"  {name}: {reason}", flush=True)
    print("\n" + table(reports), end="")
    if args.write:
        args.write.write_text(table(reports))
        rows = [vars(report) | {"missing": report.lacks} for report in reports]
        args.write.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(report.failed or (report.missing and args.ids) for report in reports))


def _digest_elsewhere(subject: Subject) -> str:
    """`digest` with another clock and other global random states."""
    random.seed(9)
    np.random.seed(9)
    now, later = time.time, 10 * 365 * 86_400.0
    time.time = lambda: now() + later
    return digest(subject)


if __name__ == "__main__":
    sys.exit(main())
