"""The environments through other people's packages: experts over all tasks, what they cost, a small chat model in them.

    python benchmarks/environments/bridges.py --part oracle                # all tasks of all splits, or 20 of each kind
    python benchmarks/environments/bridges.py --part tricks                # what calls at random and cheap tricks solve
    python benchmarks/environments/bridges.py --part load                  # 64 episodes at once
    python benchmarks/environments/bridges.py --part costs                 # milliseconds of a task, a call, a snapshot
    python benchmarks/environments/bridges.py --part model --model FOLDER  # 20 tasks of each by evaluate_llm.py
    python benchmarks/environments/bridges.py --part oracle --ids BabyAI  # some again; the others stay

Ids whose packages aren't installed are passed over and named. Writes benchmarks/results/bridges_PART.json and .md, in
which every row says by which command and where it was measured, and bridges_overview.md of oracle and load.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import agent_r1
from agent_r1.bridges import BridgeEnv, babyai
from agent_r1.bridges.alfworld import environment as alfworld
from agent_r1.bridges.miniwob.scripts import SCRIPTS
from agent_r1.bridges.scienceworld import environment as scienceworld
from agent_r1.validation import probes

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks" / "common"), str(ROOT / "learner")]
from load import measure
from machine import (
    RESULTS,
    describe_machine,
    from_0,
    from_1,
    given_flags,
    record_results,
    require_quiet_machine,
    where,
)

IDS = [env_id.removeprefix("AgentR1/").removesuffix("-v0") for env_id in agent_r1.BRIDGES]
SHOWN = 12  # failures that are named in the JSON
EACH = 20  # tasks of a kind
COSTED = 16  # tasks of which the costs are measured
KINDS: dict[str, dict[str, dict[str, Any]]] = {  # ids whose tasks are of several kinds, and how each is asked for
    "BabyAI": {level: {"level": level} for level in babyai.LEVELS},
    "ALFWorld": {kind: {"kinds": (kind,)} for kind in alfworld.KINDS},
    "ScienceWorld": {task: {"tasks": (task,)} for task in scienceworld.TASKS},
    "MiniWoB": {task: {"tasks": (task,)} for task in SCRIPTS},
}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {  # of which the splits are played, too
    "AgentDojo": {"no attack": {"attack": None}},
}
TRICKS = ("BabyAI", "AgentDojo")  # ids with cheap tricks that solve some of their kinds or splits, and not others


def oracle(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """How many tasks the expert solves, and why not all; the same of who says nothing. A row for each split or kind."""
    if name in KINDS:
        return {kind: oracle_of(name, kind, kwargs, min(args.tasks, EACH)) for kind, kwargs in KINDS[name].items()}
    rows = splits(name) | variants(name)
    return {row: oracle_of(name, row, kwargs, args.tasks) for row, kwargs in rows.items()}


def splits(name: str) -> dict[str, dict[str, Any]]:
    """Each split, and how it is asked for."""
    return {split: {"split": split} for split in gym.make(f"AgentR1/{name}-v0").unwrapped.splits.values()}


def variants(name: str) -> dict[str, dict[str, Any]]:
    """The splits of an id in `VARIANTS` once more."""
    there = VARIANTS.get(name, {}).items()
    return {f"{split}, {variant}": how | more for variant, more in there for split, how in splits(name).items()}


def oracle_of(name: str, row: str, kwargs: dict[str, Any], tasks: int) -> dict[str, Any]:
    """The first tasks of an environment made with `kwargs`."""
    env: Any = gym.make(f"AgentR1/{name}-v0", **kwargs).unwrapped
    count = min(env.num_tasks, tasks)
    played, solved, idle, calls, failed = 0, 0, 0, 0, {}
    for index in range(count):
        try:
            episode = probes.play(env, index, probes.expert, max_turns=10_000)
        except ValueError as error:  # there is no demonstration of this task
            failed[env.task.id] = str(error)[:300]
            continue
        played += 1
        calls += sum(len(info["tool_calls"]) for info in episode.infos)
        solved += episode.success
        if not episode.success:
            failed[env.task.id] = str(episode.infos[-1].get("metrics") or episode.infos[-1])[:300]
    for index in range(min(count, 100)):
        idle += probes.play(env, index, probes.null, max_turns=3).success
    of = env.num_tasks
    env.close()
    print(f"{name}, {row}: {solved} of {count}", flush=True)
    return {
        "tasks": count, "of": of, "solved": solved, "calls": calls / max(played, 1),
        "null_of_100": idle, "failed": dict(list(failed.items())[:SHOWN]),
    }  # fmt: skip


def tricks(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Success and mean reward of calls at random and of the environment's own tricks, for each kind or variant."""
    found = {}
    most, kinds = (EACH, KINDS[name]) if name in KINDS else (args.tasks, variants(name) or splits(name))
    for row, kwargs in kinds.items():
        env: Any = gym.make(f"AgentR1/{name}-v0", **kwargs).unwrapped
        count = min(env.num_tasks, args.tasks, most)
        found[row] = {"tasks": count}
        for trick, probe in {"random": probes.random, **probes.shortcuts(env)}.items():
            episodes = [probes.play(env, index, probe) for index in range(count)]
            rewards = [sum(episode.rewards) for episode in episodes]
            found[row][trick] = [sum(episode.success for episode in episodes), float(np.mean(rewards))]
        env.close()
        print(f"{name}, {row}: {found[row]}", flush=True)
    return found


def costs(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Medians in milliseconds over the first tasks: a task that is new, one that was played before, a turn, and a
    snapshot that is taken halfway along the expert's turns and gone on from, with the calls that are made again for it.
    """
    env: Any = gym.make(f"AgentR1/{name}-v0").unwrapped
    times: dict[str, list[float]] = {key: [] for key in ("new", "again", "turn", "snapshot", "calls before it")}

    def timed(key: str, work: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        found = work()
        times[key].append(1e3 * (time.perf_counter() - begun))
        return found

    env.reset(options={"task_index": env.num_tasks - 1})  # the package is loaded
    index = 0
    while len(times["new"]) < min(args.tasks, COSTED) and index < env.num_tasks:
        options, index = {"task_index": index}, index + 1
        timed("new", lambda options=options: env.reset(options=options))
        try:
            turns = env.demonstration()
        except ValueError:  # there is none of this task
            times["new"].pop()
            continue
        timed("again", lambda options=options: env.reset(options=options))
        half = len(turns) // 2
        for number, text in enumerate(turns[: half + 1]):
            if number == half:
                timed("snapshot", lambda: env.set_state(env.get_state()))
                times["calls before it"].append(len(env.memory.get("log", ())))
            span = probes.span(env, text)
            timed("turn", lambda span=span: env.step(span))
    by_calls = isinstance(env, BridgeEnv)
    env.close()
    medians = {key: float(np.median(values)) for key, values in times.items()}
    return {"tasks": len(times["new"]), **medians, "how": "calls made again" if by_calls else "copied"}


def load(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The cost of a step, alone and with many episodes at once, and what is left behind."""
    found = measure(f"AgentR1/{name}-v0", args.episodes)
    one = {f"alone_{key}": value for key, value in found["alone"].items()}
    return {**one, **found["together"], "left_behind": found["left_behind"]}


def model(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """What a chat model does in the first tasks, greedy. Ids whose prompts don't fit its context are only measured."""
    from sweep import finish, make_job
    from transformers import AutoConfig

    positions = AutoConfig.from_pretrained(args.model).max_position_embeddings
    env: Any = gym.make(f"AgentR1/{name}-v0", tokenizer=args.model, max_context_tokens=10**6).unwrapped
    count = min(20, env.num_tasks)
    prompts = [len(env.reset(options={"task_index": index})[0]) for index in range(count)]
    env.close()
    found: dict[str, Any] = {"prompt_tokens": max(prompts), "tasks": count}
    if max(prompts) + 512 > positions:
        return found | {"fits": False}
    kwargs = {"max_context_tokens": positions, "max_action_tokens": 128, "max_turns": 8}
    flags = ["--model", args.model, "--env-id", f"AgentR1/{name}-v0"]
    flags += ["--episodes", str(count), "--num-envs", str(count)]
    flags += ["--env-kwargs", json.dumps(kwargs), "--exp-name", f"bridges_{name}", "--num-threads", str(args.threads)]
    (run,) = finish([make_job(["python", str(ROOT / "learner/evaluate_llm.py"), *flags])], 1)
    metrics = json.loads((run / "evaluation.json").read_text())["metrics"]
    names = ("success", "turns", "tool_calls", "tool_errors")
    return found | {"fits": True} | {key: metrics[key]["mean"] for key in names if key in metrics}


PARTS: dict[str, Callable[[str, argparse.Namespace], dict[str, Any]]] = {
    "oracle": oracle, "tricks": tricks, "load": load, "costs": costs, "model": model,
}  # fmt: skip


def table(part: str, results: dict[str, Any]) -> str:
    """A row for each id, and for each split or kind of it where those count."""
    rows: list[dict[str, Any]] = []
    for name, row in sorted(results.items()):
        found, busy = row["found"], " (busy)" * row["forced"]
        measured = {"measured by": f"`{row['command']}`", "on": f"{where(row['machine'])}{busy}"}
        if part == "tricks":
            for kind, one in found.items():
                cells = {trick: f"{value[0]} ({value[1]:+.2f})" for trick, value in one.items() if trick != "tasks"}
                rows.append({"id": name, "split or kind": kind, "tasks": one["tasks"], **cells, **measured})
            continue
        if part != "oracle":
            rows.append({"id": name, **{key: _shown(value) for key, value in found.items()}, **measured})
            continue
        for split, one in found.items():
            reasons = Counter(one["failed"].values()).most_common(1)
            rows.append(
                {"id": name, "split or kind": split, "tasks": f"{one['tasks']:,} of {one['of']:,}",
                 "solved": one["solved"], "calls": f"{one['calls']:.1f}", "null, of 100": one["null_of_100"],
                 "why not all": reasons[0][0] if reasons else "", **measured}
            )  # fmt: skip
    names = sorted(dict.fromkeys(key for row in rows for key in row), key=lambda name: name in ("measured by", "on"))
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(str(row.get(key, "")) for key in names) + " |" for row in rows)])


def _shown(value: Any) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


def overview() -> str:
    """Return a table of the recorded experts and load, with a row for each id."""
    files = {part: RESULTS / f"bridges_{part}.json" for part in ("oracle", "load")}
    records = {part: json.loads(file.read_text())["results"] for part, file in files.items() if file.is_file()}
    lines = ["| id | tasks | solved by the expert | by a silent policy | steps/s, one episode | episodes at once "
             "| steps/s, all | memory, MiB | simulators' processes | their MiB |", "|---" * 10 + "|"]  # fmt: skip
    for name in IDS:
        if any(name not in records.get(part, {}) for part in files):
            continue
        row, loaded = list(records["oracle"][name]["found"].values()), records["load"][name]
        words = loaded["command"].split()
        found, episodes = loaded["found"], words[words.index("--episodes") + 1] if "--episodes" in words else "64"
        count, solved, idle = (sum(one[key] for one in row) for key in ("tasks", "solved", "null_of_100"))
        cells = [name, f"{count:,}", f"{solved:,}", str(idle), f"{found['alone_steps_per_second']:,.0f}", episodes]
        cells += [f"{found['steps_per_second']:,.0f}", f"{found['memory_mb']:.0f}", str(found["processes"])]
        theirs = f"{found['processes_mb']:,.0f}" if "processes_mb" in found else ""
        lines.append(f"| {' | '.join(cells)} | {theirs} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, required=True, help="what is measured")
    parser.add_argument("--ids", nargs="+", choices=IDS, help="which environments (default: all that the part is for)")
    parser.add_argument("--tasks", type=from_1, default=10_000, help="of each split, at most (oracle, tricks, costs)")
    parser.add_argument("--episodes", type=from_1, default=64, help="at once (load)")
    parser.add_argument("--model", help="a chat model's folder or name (model)")
    parser.add_argument("--threads", type=from_0, default=0, help="torch threads (model)")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    args = parser.parse_args()
    if (args.part == "model") != (args.model is not None):
        parser.error("--model goes with --part model")
    if args.part in ("load", "costs"):
        require_quiet_machine(args.force)
    if args.part == "model":
        if find_spec("transformers") is None:
            parser.error('--part model needs pip install "agent-r1[train]"')
        os.environ["HF_HUB_OFFLINE"] = "1"
    record = RESULTS / f"bridges_{args.part}.json"
    results = json.loads(record.read_text())["results"] if record.is_file() else {}
    command = f"python benchmarks/environments/bridges.py --part {args.part}"
    command += f" --model {Path(args.model).name}" if args.part == "model" else ""
    command += given_flags(parser, args, "ids", "tasks", "episodes", "threads")
    measured = {"command": command, "machine": describe_machine(), "forced": args.force}
    newly = []
    for name in args.ids or (TRICKS if args.part == "tricks" else IDS):
        try:
            gym.make(f"AgentR1/{name}-v0").close()
        except ImportError as error:
            print(f"{name} is passed over: {error}")
            continue
        newly.append(name)
        results[name] = {"found": PARTS[args.part](name, args), **measured}
    print(table(args.part, results))
    if newly:
        record_results(f"bridges_{args.part}", results, table(args.part, results), command, args.force, merged=True)
    if args.part in ("oracle", "load"):
        title = "Experts and load; bridges_oracle.md and bridges_load.md have the commands:"
        (RESULTS / "bridges_overview.md").write_text(f"{title}\n\n{overview()}\n")


if __name__ == "__main__":
    main()
