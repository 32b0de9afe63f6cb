"""The record of a real model's evaluations, results/NAME_episodes.jsonl: a line a policy, set and seed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from machine import RESULTS, append_line, describe_machine, read_lines
from sweep import Job, find, finish

from agent_r1.text.tokenizers import load_tokenizer
from real_model_parts.episodes import examples, figures, make_env, read_episodes
from real_model_parts.jobs import without_speed
from real_model_parts.questions import find_file, hash_of_files
from real_model_parts.suites import LEARNERS, PAIRS, START, Figures, Key, Suite

Episodes = dict[str, dict[str, list[Figures]]]  # label -> set -> the figures of each seed


def made_so(row: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    """Whether these are among the facts that a row, or a run's `how`, notes."""
    return all(row.get(name) == value for name, value in facts.items())


def read_record(path: Path, how: dict[Key, dict[str, Any]]) -> dict[Key, Figures]:
    """What was recorded of these. SystemExit for a line that was made in another way, or is cut off."""
    found = {}
    for row in read_lines(path):
        key = (row["policy"], row["set"], row["seed"])
        if key in how and not made_so(row, how[key]):
            said = f"{path} has {', '.join(map(str, key))} of another model, other questions, or with other flags"
            raise SystemExit(f"{said}; give --name, or delete that line")
        found[key] = row
    return found


def alike(recorded: dict[Key, Figures], sets: dict[str, dict[str, Any]],
          start: Mapping[str, Any] | None = None) -> dict[Key, Figures]:  # fmt: skip
    """What was played with these models, questions and flags; of learners, those that began with this start. Others
    are named on the screen."""
    played = {key: row for key, row in recorded.items() if key[1] in sets and made_so(row, sets[key[1]])}
    others = [key for key, row in played.items() if key[0] in LEARNERS and not made_so(row, start or {})]
    for label, seed in dict.fromkeys((label, seed) for label, _, seed in others):
        print(f"{label}, seed {seed}, is left out: what is recorded of it began with another {START}", file=sys.stderr)
    return {key: row for key, row in played.items() if key not in others}


def by_policy(recorded: dict[Key, Figures]) -> Episodes:
    """The figures of every policy on every set, in the order of the record."""
    episodes: Episodes = {}
    for (label, which, _), found in recorded.items():
        episodes.setdefault(label, {}).setdefault(which, []).append(found)
    return episodes


def recorded_elsewhere(sets: dict[str, dict[str, Any]], names: Sequence[str]) -> dict[str, Episodes]:
    """What is recorded under other names of this model and these questions. SystemExit where nothing is supervised."""
    same = {which: {x: how[x] for x in ("model", "questions") if x in how} for which, how in sets.items()}
    against = {of: by_policy(alike(read_record(RESULTS / f"{of}_episodes.jsonl", {}), same)) for of in names}
    for of in names:
        if START not in against[of]:
            raise SystemExit(f"--against {of}: it has no {START} of this model and these questions")
    return against


def how_trained(suite: Suite, reinforced: Sequence[tuple[str, int]], adapters: dict[tuple[str, int], str],
                questions: str, args: argparse.Namespace) -> dict[tuple[str, int], dict[str, Any]]:  # fmt: skip
    """Which training a figure is of, for each policy and seed: its flags and questions, or the hash of adapters."""
    sft = {"sft_flags": without_speed(args.sft_flags), "trained_on": questions}
    start = {"adapters": adapters[START, 1]} if adapters else sft
    found: dict[tuple[str, int], dict[str, Any]] = {(START, 1): start}
    if args.baselines:
        found = {(label, 1): {} for label in suite.modes} | {(PAIRS, 1): sft} | found
    for label, seed in reinforced:
        if args.part != "rl" and (label, seed) in adapters:
            found[label, seed] = start | {"on_top": adapters[label, seed]}
        else:
            found[label, seed] = start | {"rl_flags": without_speed(args.rl_flags), "trained_on": questions}
            told = {"profile": args.profile, "profile_questions": args.profile_questions}
            found[label, seed] |= {name: number for name, number in told.items() if number}
    return found


def how_played(suite: Suite, data: Path, model: str, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Which model, questions and flags a figure is of, for each set; nothing for a part that plays none of dev."""
    if args.part not in ("evaluate", "report"):
        return {which: {} for which in suite.sets}
    flags = without_speed(args.evaluate_flags)
    files = {which: find_file(data / one.folder / one.heldout) for which, one in suite.sets.items()}
    return {
        which: {"model": model, "questions": hash_of_files([file]), "evaluate_flags": flags}
        for which, file in files.items()
    }


def evaluate(jobs: dict[Key, Job], how: dict[Key, dict[str, Any]], record: Path, model: str, workers: int) -> None:
    """Play what isn't recorded, and record a line of each evaluation that ends, also when others were interrupted.

    SystemExit, after all others, where faults ended some of the episodes.
    """
    there = read_record(record, how)
    jobs = {key: job for key, job in jobs.items() if key not in there}
    damaged = []
    try:
        finish(list(jobs.values()), workers)
    finally:
        for key, job in jobs.items():
            folder, finished = find(job)
            if finished:
                line = dict(zip(("policy", "set", "seed"), key, strict=True)) | how[key]
                line["machine"] = describe_machine()
                try:
                    rows = read_episodes(folder, load_tokenizer(model))
                except ValueError as error:
                    damaged.append(f"{folder}: {error}; delete the folder to play it again")
                    continue
                env = make_env(json.loads((folder / "evaluation.json").read_text())["args"])
                line |= figures(rows)
                line["examples"] = examples(rows, lambda index, env=env: env.make_task(index).answers)
                append_line(record, line)
    if damaged:
        raise SystemExit("\n".join(damaged))
