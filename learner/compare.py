"""Curves of many runs as a table and a plot: mean over seeds, final value and area under the curve.

    python learner/compare.py --exp-names ppo_llm grpo_llm --plot curves.png
    python learner/compare.py --metric charts/success --x seconds --group-by exp_name learning_rate

Everything is read from disk: the arguments from summary.json, the curves from TensorBoard's event files. Unfinished
runs, and runs without the scalar, are left out and named. A warning names groups whose runs differ in more than their
seeds.
"""

import llm_utils.setup.startup  # noqa: F401  isort: skip  (reports a missing package in one line)

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agent_r1_tools.text import printable
from llm_utils.records.intervals import mean
from llm_utils.setup.environments import words

Curve = tuple[np.ndarray, np.ndarray]  # increasing x, and values


def read_curve(run_dir: Path, metric: str, x: str = "steps") -> Curve:
    """Read a scalar of a run against "steps" (turns), "episodes" or "seconds". Raise KeyError if the run has no such
    scalar.

    Seconds are wall-clock time since the log was opened, with evaluations and pauses of an interrupted run.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    scalars = events.Scalars(metric)
    if x == "seconds":
        at = [event.wall_time - events.FirstEventTimestamp() for event in scalars]
    else:
        at = [event.step for event in scalars]
    if x == "episodes":  # episodes until then; an iteration logs once, at its last step
        played = {event.step: event.value for event in events.Scalars("charts/episodes")}
        at = [max((value for end, value in played.items() if end <= step), default=0) for step in at]
    return np.array(at, float), np.array([event.value for event in scalars])


def area(curve: Curve, until: float = np.inf) -> float:
    """Return the mean height of a curve over x, up to `until` (trapezoids)."""
    x, values = curve
    if x[-1] > until:
        inside = x < until
        values = np.append(values[inside], np.interp(until, x, values))
        x = np.append(x[inside], until)
    return float(np.trapezoid(values, x) / (x[-1] - x[0])) if x[-1] > x[0] else float(values[-1])


def find_runs(runs: Path, group_by: Sequence[str], only: dict[str, list[str]]) -> dict[tuple[str, ...], list[Path]]:
    """Return finished runs whose arguments are among `only` (name -> values as text), grouped by arguments.

    A group is named by the environment's id and the arguments `group_by`. Values that no run has are printed, if other
    values match.
    """
    groups: dict[tuple[str, ...], list[Path]] = defaultdict(list)
    seen: set[tuple[str, str]] = set()
    for path in sorted(runs.glob("*/summary.json")):
        report: dict[str, Any] = json.loads(path.read_text())
        args = {name: words(value) for name, value in report["args"].items()}
        if all(args.get(name) in values for name, values in only.items()):
            if report.get("finished"):
                groups[tuple(args.get(name, "-") for name in ("env_id", *group_by))].append(path.parent)
                seen |= args.items()
            else:
                print(f"left out, as it is not finished: {path.parent}", file=sys.stderr)
    if groups and (unknown := set(group_by) - {name for name, _ in seen}):
        names = ", ".join(sorted({name for name, _ in seen}))
        raise SystemExit(f"--group-by {min(unknown)}: no run has this argument; the runs have {names}")
    for name, values in only.items() if groups else ():
        for value in sorted(value for value in set(values) if (name, value) not in seen):
            print(f"no matching finished run has {name} {value}", file=sys.stderr)
    return dict(sorted(groups.items()))


def differences(folders: Sequence[Path]) -> list[str]:
    """Return the reasons why runs are not seeds of one experiment: different arguments, equal seeds."""
    args: list[dict[str, Any]] = [json.loads((folder / "summary.json").read_text())["args"] for folder in folders]
    reasons = []
    for name in dict.fromkeys(name for run in args for name in run):
        values = dict.fromkeys(str(run.get(name, "-")) for run in args)
        if len(values) > 1 and name not in ("seed", "resume", "memory_gb"):  # older runs have a --memory-gb
            reasons.append(f"its runs differ in {name}: {', '.join(values)}")
    for seed, count in Counter(run.get("seed") for run in args).items():
        if count > 1:
            reasons.append(f"{count} of its runs have seed {seed}")
    return reasons


def table(curves: dict[tuple[str, ...], list[Curve]], metric: str, x: str) -> str:
    """Format a markdown table. The areas of an environment's groups end where its shortest curve ends."""
    rows = [f"| environment | group | runs | final `{metric}` | area under the curve over {x} |"]
    rows.append("|---|---|---|---|---|")
    for (env_id, *names), group in curves.items():
        until = min(c[0][-1] for other, cs in curves.items() if other[0] == env_id for c in cs)
        cells = []
        for values in ([c[1][-1] for c in group], [area(c, until) for c in group]):
            value, low, high = mean(values)
            cells.append(f"{value:.3f} [{low:.3f}, {high:.3f}]" if len(values) > 1 else f"{value:.3f}")
        rows.append(f"| {env_id} | {', '.join(names)} | {len(group)} | {cells[0]} | {cells[1]} |")
    return "\n".join(rows)


def plot(curves: dict[tuple[str, ...], list[Curve]], metric: str, x: str, path: Path) -> None:
    """Draw a panel for each environment: every run as a thin line, the mean of a group as a thick one."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    env_ids = list(dict.fromkeys(env_id for env_id, *_ in curves))
    figure, panels = plt.subplots(1, len(env_ids), figsize=(6 * len(env_ids), 4), squeeze=False)
    for env_id, axes in zip(env_ids, panels[0], strict=True):
        for number, ((_, *names), group) in enumerate((g, cs) for g, cs in curves.items() if g[0] == env_id):
            color = f"C{number % 10}"
            for c in group:
                axes.plot(*c, color=color, alpha=0.3, linewidth=0.8)
            grid = np.linspace(max(c[0][0] for c in group), min(c[0][-1] for c in group), 200)
            label = f"{', '.join(names)} ({len(group)})"
            axes.plot(grid, np.mean([np.interp(grid, *c) for c in group], 0), color=color, linewidth=2, label=label)
        axes.set(xlabel=x, ylabel=metric, title=env_id)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    path = path if path.suffix else path.with_suffix(".png")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        save_plot(figure, path, bbox_inches="tight")
    except ValueError as error:  # a file extension that matplotlib does not support
        sys.exit(f"--plot {path}: {error}")
    print(f"written to {path}", file=sys.stderr)


def save_plot(figure: Any, path: Path, dpi: int = 130, **options: Any) -> None:
    """Save a figure of matplotlib. A PNG gets 256 colours, which takes a third of the bytes."""
    figure.savefig(path, dpi=dpi, **options)
    if path.suffix == ".png":
        from PIL import Image

        with Image.open(path) as image:
            few = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
        few.save(path, optimize=True)


def main() -> None:
    llm_utils.setup.startup.imported()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs")
    parser.add_argument("--env-ids", nargs="+", help="only these environments")
    parser.add_argument("--exp-names", nargs="+", help="only these experiments")
    parser.add_argument("--where", nargs="+", default=[], metavar="NAME=VALUE", help="only runs with these arguments")
    parser.add_argument("--group-by", nargs="+", default=["exp_name"], help="arguments that define the groups")
    parser.add_argument("--metric", default="eval/em", help="scalar to compare")
    parser.add_argument("--x", default="episodes", choices=["episodes", "steps", "seconds"], help="horizontal axis")
    parser.add_argument("--plot", type=Path, help="file to draw the curves into")
    args = parser.parse_args()
    only = {name: values for name, values in (("env_id", args.env_ids), ("exp_name", args.exp_names)) if values}
    for condition in args.where:
        if "=" not in condition:
            parser.error(f"--where {condition}: give NAME=VALUE, such as seed=1")
    only |= {name: [value] for name, _, value in (condition.partition("=") for condition in args.where)}
    groups = find_runs(args.runs, args.group_by, only)
    if not groups:
        sys.exit(f"no finished run in {args.runs} fits {only or 'yet'}")
    curves: dict[tuple[str, ...], list[Curve]] = defaultdict(list)
    for group, folders in groups.items():
        used = []
        for folder in folders:
            try:
                curve = read_curve(folder, args.metric, args.x)
            except KeyError:
                print(f"left out, as it logged no {args.metric}: {folder}", file=sys.stderr)
            else:
                curves[group].append(curve)
                used.append(folder)
        for difference in differences(used):
            print(printable(f"{', '.join(group)}: {difference}"), file=sys.stderr)
    if not curves:
        sys.exit(f"no run has {args.metric}; give a --metric that the runs have")
    print(printable(table(curves, args.metric, args.x)))
    if args.plot:
        plot(curves, args.metric, args.x, args.plot)


if __name__ == "__main__":
    main()
