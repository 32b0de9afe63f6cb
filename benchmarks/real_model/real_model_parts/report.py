"""Tables, curves and the picture of what is recorded."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from compare import read_curve, save_plot
from machine import DOCS, RESULTS, record_results
from scores import Scores, cell, interval
from sweep import Job, find

from llm_utils.records.intervals import proportion
from llm_utils.records.run_files import write_json
from real_model_parts.episodes import METRICS, story
from real_model_parts.record import Episodes, by_policy, made_so, recorded_elsewhere
from real_model_parts.suites import ERRORS, LEARNERS, START, Figures, Key, Suite

ROOT = DOCS.parent


def complete(scores: dict[str, np.ndarray], names: Sequence[str]) -> bool:
    """Whether all of these sets were played, with as many seeds each."""
    seeds = {len(scores.get(name, ())) for name in names}
    return len(seeds) == 1 and 0 not in seeds


def exact_match(sets: dict[str, list[Figures]]) -> Scores:
    """Of each set [seeds, questions]."""
    return {name: np.array([seed["em"] for seed in seeds], float) for name, seeds in sets.items()}


def tables(suite: Suite, episodes: Episodes, against: dict[str, Episodes] | None = None) -> tuple[str, dict[str, Any]]:
    """Markdown, and the same as numbers; `against`: other results by name, whose start is to be compared with, too."""
    numbers: dict[str, Any] = {"metrics": {}, "differences": {}, "errors": {}, "questions": {}}
    lines = ["| policy | set | questions | " + " | ".join(METRICS.values()) + " |", "|---" * (3 + len(METRICS)) + "|"]
    scores = {label: exact_match(sets) for label, sets in episodes.items()}
    for label, sets in episodes.items():
        for name, seeds in sets.items():
            values = {metric: [np.array(seed[metric], float) for seed in seeds] for metric in METRICS}
            numbers["questions"][name] = len(seeds[0]["em"])
            numbers["metrics"].setdefault(label, {})[name] = {
                metric: [None if np.isnan(seed).any() else float(np.mean(seed)) for seed in found]
                for metric, found in values.items()
            }
            cells = []
            for metric, found in values.items():
                flat = np.concatenate(found)
                if np.isnan(flat).any():
                    cells.append("–")
                elif metric in ("em", "format"):
                    cells.append(cell(*proportion(np.array(found))))
                else:
                    cells.append(f"{flat.mean():.3f}")
            lines.append(f"| {label} | {name} | {len(seeds[0]['em'])} | " + " | ".join(cells) + " |")
            kinds = {kind: sum(seed["error"].count(kind) for seed in seeds) for kind in ERRORS}
            numbers["errors"].setdefault(label, {})[name] = kinds
    columns = {name: [name] for name in suite.sets} | suite.columns
    for of, others in {"": episodes, **(against or {})}.items():
        lines += ["", f"| EM against {START}{of and f' of {of}'} | {' | '.join(columns)} |"]
        lines.append("|---" * (1 + len(columns)) + "|")
        start = exact_match(others.get(START, {}))
        for label in scores if start else ():
            if label == START and not of:
                continue
            found = {column: interval(scores[label], start, names) for column, names in columns.items()
                     if complete(scores[label], names) and complete(start, names)}  # fmt: skip
            numbers["differences"][f"{label} against {of}" if of else label] = found
            cells = [cell(*found[column], sign="+") if column in found else "–" for column in columns]
            of_sets = [won_and_lost(scores[label][name], start[name]) if name in found else "" for name in suite.sets]
            cells = [f"{one}{more}" for one, more in zip_longest(cells, of_sets, fillvalue="")]
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
    lines += ["", "| what went wrong, episodes | set | " + " | ".join(ERRORS) + " |", "|---" * (2 + len(ERRORS)) + "|"]
    for label, sets in numbers["errors"].items():
        for name, kinds in sets.items():
            lines.append(f"| {label} | {name} | " + " | ".join(str(kinds[kind]) for kind in ERRORS) + " |")
    searched, numbers["searches"] = search_table(episodes)
    return "\n".join([*lines, *searched]), numbers


def search_table(episodes: Episodes) -> tuple[list[str], dict[str, Any]]:
    """How often policies that call tools are right, by what their episodes found and by their calls ("at most 1" are
    also those without): Markdown lines, and the same as numbers."""
    groups = {  # column -> of what, above which, up to which
        "EM where nothing was found": ("support_recall", -0.1, 0.0),
        "EM where a part was found": ("support_recall", 0.0, 0.999),
        "EM where everything was found": ("support_recall", 0.999, 1.0),
        "EM, calls: at most 1": ("tool_calls", -1, 1),
        "EM, calls: 2": ("tool_calls", 1, 2),
        "EM, calls: 3 and more": ("tool_calls", 2, np.inf),
    }
    rows: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    for label, sets in episodes.items():
        for name, seeds in sets.items():
            of = {metric: np.concatenate([np.array(seed[metric], float) for seed in seeds])
                  for metric in ("em", "support_recall", "tool_calls")}  # fmt: skip
            if of["tool_calls"].any():
                rows[label, name] = {head: of["em"][(low < of[metric]) & (of[metric] <= high)]
                                     for head, (metric, low, high) in groups.items()}  # fmt: skip
    heads = [head for head in groups if any(len(row[head]) for row in rows.values())]
    lines, numbers = ["", f"| policy | set | {' | '.join(heads)} |", "|---" * (2 + len(heads)) + "|"], {}
    for (label, name), row in rows.items():
        cells = [f"{row[head].mean():.3f} of {len(row[head])}" if len(row[head]) else "–" for head in heads]
        lines.append(f"| {label} | {name} | {' | '.join(cells)} |")
        numbers.setdefault(label, {})[name] = {head: [int(row[head].sum()), len(row[head])] for head in heads}
    return (lines if rows else []), numbers


def won_and_lost(seeds: np.ndarray, start: np.ndarray) -> str:
    """Over the seeds, how many questions are right that the start (of one seed) has wrong, and the reverse; both
    [seeds, questions]."""
    return f", {int((seeds > start).sum())} won, {int((seeds < start).sum())} lost" if len(start) == 1 else ""


CURVES = ("charts/episodic_return", "charts/exact_match", "charts/tool_calls", "charts/step_recall", "eval/em")
OF_A_RUN = dict.fromkeys(("time/rollout", "time/score", "time/train", "time/sync"), np.sum)  # seconds
OF_A_RUN["sampler/gap_mean"] = np.mean


def check_curves(how: dict[tuple[str, int], str], path: Path) -> None:
    """SystemExit where the curves of one of these learners are of runs that were made in another way."""
    found = json.loads(path.read_text()) if path.is_file() else {}
    for (label, _), made in how.items():
        if any(run["how"] != made for run in found.get(label, {}).values()):
            said = f"{path} has {label} of another model, other questions, or with other flags"
            raise SystemExit(f"{said}; give --name, or delete that")


def record_curves(
    jobs: dict[tuple[str, int], Job], how: dict[tuple[str, int], str], path: Path
) -> dict[str, dict[str, Any]]:
    """Training return and held-out EM of each run, against episodes and seconds of training, and where its time went;
    also of one that isn't finished. Those of other runs stay in the file."""
    found: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else {}
    for (label, seed), job in jobs.items():
        folder, _ = find(job)
        one: dict[str, Any] = {}
        for metric in CURVES if folder else ():
            with suppress(KeyError):  # nothing of it yet
                curves = {x: read_curve(folder, metric, x) for x in ("episodes", "seconds")}
                one |= {f"{metric} at {x}": at.tolist() for x, (at, _) in curves.items()}
                one[metric] = curves["episodes"][1].tolist()
        for metric, whole in OF_A_RUN.items() if folder else ():
            with suppress(KeyError):
                one[metric] = float(whole(read_curve(folder, metric)[1]))
        if one:
            found.setdefault(label, {})[str(seed)] = {"how": how[label, seed]} | one
    if found:
        path.parent.mkdir(exist_ok=True)
        write_json(path, found)
    return found


def begun_with(start: Mapping[str, Any], found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The curves of runs that began with this supervised policy."""
    alike = {label: {seed: run for seed, run in runs.items() if made_so(json.loads(run["how"]), start)}
             for label, runs in found.items()}  # fmt: skip
    return {label: runs for label, runs in alike.items() if runs}


def runs_table(found: dict[str, dict[str, Any]]) -> str:
    """How far each training came, and what it was like in its first and second half, in Markdown. The gap is the mean
    distance of sampler and trainer in a token's log-probability."""
    heads = ["training", "seed", "episodes", "minutes", "rollout, scoring, update", "gap", "return, halves"]
    heads += ["EM of samples, halves", "held-out EM, greedy"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for label, runs in found.items():
        for seed, run in runs.items():
            if "charts/episodic_return" not in run:
                continue
            cells = [label, seed, f"{run['charts/episodic_return at episodes'][-1]:,.0f}"]
            cells.append(f"{run['charts/episodic_return at seconds'][-1] / 60:.1f}")
            parts = [run.get(f"time/{part}") for part in ("rollout", "score", "train")]
            whole = sum(filter(None, parts)) + run.get("time/sync", 0.0)
            cells.append("–" if None in parts else ", ".join(f"{100 * part / whole:.0f} %" for part in parts))
            cells.append(f"{run['sampler/gap_mean']:.4f}" if "sampler/gap_mean" in run else "–")
            for metric in ("charts/episodic_return", "charts/exact_match"):
                values = run.get(metric, [])
                halves = values[: len(values) // 2], values[len(values) - len(values) // 2 :]
                cells.append(", ".join(f"{np.mean(half):.3f}" for half in halves) if halves[0] else "–")
            cells.append(", ".join(f"{value:.3f}" for value in run.get("eval/em", ())) or "–")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def hours_axis(axes: Any, run: dict[str, Any]) -> Any:
    """The hours of a run above its episodes; beyond the run at its mean speed."""
    episodes, seconds = ([0.0, *run[f"charts/episodic_return at {x}"]] for x in ("episodes", "seconds"))
    x, hours = (np.array([-at[-1], *at, 2 * at[-1]]) for at in (episodes, np.array(seconds) / 3600))
    there, back = (lambda at: np.interp(at, x, hours)), (lambda at: np.interp(at, hours, x))
    return axes.secondary_xaxis("top", functions=(there, back))


def plot_dev(axes: Any, label: str, end: float, recorded: dict[Key, Figures], colour: str) -> None:
    """Exact match on each set that judges, before training and after it, at `end` episodes, with 95 % intervals."""
    for place, which in enumerate(dict.fromkeys(which for _, which, _ in recorded)):
        rows = [[row["em"] for (name, one, _), row in recorded.items() if (name, one) == (policy, which)]
                for policy in (START, label)]  # fmt: skip
        if all(rows):
            y = np.array([proportion(np.array(row)) for row in rows])
            x = np.array([0, end]) + 0.012 * end * place  # or intervals hide each other
            around = np.abs(y[:, 1:] - y[:, :1]).T
            named = {"color": colour, "label": f"{label}, {which}, evaluated"}
            axes.errorbar(x, y[:, 0], around, fmt=f"{'osD^v'[place % 5]}:", linewidth=1, **named)


def plot(found: dict[str, dict[str, Any]], recorded: dict[Key, Figures], path: Path) -> None:
    """Left the training return, with its mean over five iterations, right the greedy exact match:
    on held-out questions on the way, on dev before and after. A step's few questions differ much from the next one's.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(13, 4.4))
    for axes, metric, shown in zip(panels, ("charts/episodic_return", "eval/em"),
                                   ("training return", "exact match, greedy"), strict=True):
        for number, (label, runs) in enumerate(found.items()):
            for index, run in enumerate(run for run in runs.values() if metric in run):
                x, y = np.array(run[f"{metric} at episodes"]), np.array(run[metric])
                of = f"{label}, held-out questions" if metric == "eval/em" else label
                axes.plot(x, y, ".", color=f"C{number}", alpha=0.5)
                line = (x, y)
                if metric.startswith("charts"):
                    line = tuple(np.convolve(z, np.ones(5) / 5, "valid") if len(z) >= 5 else [] for z in line)
                axes.plot(*line, color=f"C{number}", label=None if index else of)
        axes.set(xlabel="training episodes", ylabel=shown)
        axes.set_ylim(min(0.0, axes.get_ylim()[0]), max(1.0, axes.get_ylim()[1]))
        axes.spines[["top", "right"]].set_visible(False)
    trained = [(label, run) for label, runs in found.items() for run in runs.values()
               if "charts/episodic_return" in run]  # fmt: skip
    for label, run in dict(trained).items():
        colour = f"C{list(found).index(label)}"
        plot_dev(panels[1], label, run["charts/episodic_return at episodes"][-1], recorded, colour)
    if len(dict(trained)) > 1:
        panels[0].legend(frameon=False, loc="upper left", fontsize="small")
    if trained:
        panels[1].set_xlabel("training episodes (evaluated before and after: side by side, to be read)")
        hours_axis(panels[0], trained[0][1]).set_xlabel("hours of the first run")
    if panels[1].get_legend_handles_labels()[0]:
        panels[1].legend(frameon=False, bbox_to_anchor=(1.02, 1), loc="upper left", fontsize="small")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_plot(figure, path)
    plt.close(figure)


def adapters_as_words(adapters: dict[tuple[str, int], Path]) -> list[str]:
    """As `--adapters` takes them; where somebody has them outside of the repository doesn't matter to others."""
    words = []
    for (label, _), folder in adapters.items():
        ours = folder.is_relative_to(ROOT / "benchmarks" / "real_model" / "adapters")
        where = str(folder.relative_to(ROOT)) if ours else "ADAPTERS"
        words.append(where if label == START else f"{label}={where}")
    return words


def write_report(
    suite: Suite, name: str, recorded: dict[Key, Figures], sets: dict[str, dict[str, Any]], start: Mapping[str, Any],
    args: argparse.Namespace,
) -> None:
    """Write the tables of what is recorded, and episodes that went wrong; curves only of learners that began with this
    start. SystemExit where nothing is recorded."""
    if not recorded:
        raise SystemExit(f"nothing of {name} is recorded; --part evaluate plays it")
    against = recorded_elsewhere(sets, args.against)
    to_read = [f"# Episodes that went wrong\n\nThe first of each kind, of the trained agents of `{name}.md`."]
    for (label, which, seed), found in recorded.items():
        if label == START or label in LEARNERS:
            to_read += [f"## {label}, {which}, seed {seed}", *map(story, found.get("examples", ()))]
    (RESULTS / f"{name}_examples.md").write_text("\n\n".join(to_read) + "\n")
    table, numbers = tables(suite, by_policy(recorded), against)
    curves = RESULTS / f"{name}_curves.json"
    if curves.is_file():
        found = begun_with(start, json.loads(curves.read_text()))
        plot(found, recorded, ROOT / "docs" / "images" / f"{name}.png")
        table += f"\n\n{runs_table(found)}"
    print(table)
    command = f"python benchmarks/real_model/real_model.py --part {args.part} --suite {args.suite} --model FOLDER"
    command += f" --data DATA --seeds {args.seeds}" + (f" --name {name}" if args.name else "")
    command += f" --learners {shlex.join(args.learners)}".rstrip()
    command += f" --profile {args.profile}" if args.profile else ""
    command += f" --profile-questions {args.profile_questions}" if args.profile_questions else ""
    command += f" --against {shlex.join(args.against)}" if args.against else ""
    if args.adapters:
        command += f" --adapters {shlex.join(adapters_as_words(args.adapters))}"
    command += "" if args.baselines else " --no-baselines"
    for flag in ("sft_flags", "rl_flags", "evaluate_flags"):
        if getattr(args, flag):
            command += f' --{flag.replace("_", "-")} "{getattr(args, flag)}"'
    record_results(name, numbers, table, command, merged=True)
