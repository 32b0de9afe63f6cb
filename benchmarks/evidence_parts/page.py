"""Tables and plots of docs/evidence.md, from what stands in benchmarks/results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from evidence_parts.runs import ROOT
from evidence_parts.scores import Interval

DOCS = ROOT / "docs"
COLOURS = [f"C{number}" for number in range(10)]


def write(part: str, results: Mapping[str, Any], words: str, docs: Path = DOCS) -> None:
    """Put a part's tables between its marks in evidence.md, with words about where they were made, and its plot into
    images. ValueError without the marks."""
    page = docs / "evidence.md"
    first, last = f"<!-- {part} -->\n", f"<!-- end of {part} -->"
    text = page.read_text()
    if first not in text or last not in text:
        raise ValueError(f"{page} has no lines {first.strip()} and {last}")
    before, rest = text.split(first, 1)
    tables = "\n\n".join(found["table"] for found in results.values())
    image = f"images/evidence_{part}.png"
    shown = f"![{PLOTS[part][0].__doc__}]({image})\n\n{tables}\n\n{words}"
    draw(part, results, docs / image)
    page.write_text(f"{before}{first}\n{shown}\n\n{last}{rest.split(last, 1)[1]}")


def draw(part: str, results: Mapping[str, Any], path: Path) -> None:
    """A part's plot as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plot, height = PLOTS[part]
    figure, axes = plt.subplots(1, len(results), figsize=(7 * len(results), height), squeeze=False)
    for place, (name, found) in zip(axes[0], results.items(), strict=True):
        plot(place, found)
        place.set_title(name)
        place.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def bars(axes: Any, rows: Mapping[str, Mapping[str, Interval]], label: str) -> None:
    """A line for each row and column: a point at the mean, a stroke for its interval."""
    columns = list(next(iter(rows.values())))
    for number, column in enumerate(columns):
        for place, found in enumerate(rows.values()):
            value, low, high = found[column]
            y = place + 0.2 * (number - (len(columns) - 1) / 2)
            axes.plot([low, high], [y, y], color=COLOURS[number], linewidth=1)
            axes.plot([value], [y], ".", color=COLOURS[number], label=None if place else column)
    axes.set(yticks=range(len(rows)), yticklabels=list(rows), xlabel=label, xlim=(-0.02, 1.02))
    axes.invert_yaxis()
    axes.legend(frameon=False)


def plot_success(axes: Any, found: Mapping[str, Any]) -> None:
    """Success of every row on held-out tasks, with 95 % intervals"""
    bars(axes, found["success"], "success, greedy, held-out tasks")


def plot_noise(axes: Any, found: Mapping[str, Any]) -> None:
    """How much less noise the gradient has with process rewards, by the number of steps, with 95 % intervals"""
    if not found["noise"]:
        return
    checkpoints = list(next(iter(found["noise"].values())))
    for number, checkpoint in enumerate(checkpoints):
        all_here = {name: places[checkpoint]["dense"][1] for name, places in found["noise"].items()}
        here = {name: less for name, less in all_here.items() if less}
        x = np.array([found["steps"][name] for name in here]) + 0.15 * (number - 1)
        y = np.array(list(here.values())).reshape(-1, 3)
        around = np.abs(y[:, 1:] - y[:, :1]).T
        axes.errorbar(x, y[:, 0], around, fmt=".", color=COLOURS[number], label=checkpoint)
        for name, place, (less, *_) in zip(here, x, y, strict=True):
            if not name.startswith("CraftWorld"):  # which the axis tells
                axes.annotate(name, (place, less), fontsize=7)
    axes.axhline(0.45, color="grey", linestyle=":", linewidth=1)
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set(xlabel="turns of the best way", ylabel="noise / signal below that of the outcome (share)")
    axes.legend(frameon=False)


def plot_curves(axes: Any, found: Mapping[str, Any]) -> None:
    """Success on held-out tasks over the turns played in training: a thin line for each seed, a thick one their mean"""
    for number, (row, curves) in enumerate(found["curves"].items()):
        turns = np.linspace(0, min(at[-1] for at, _ in curves), 50)
        each = [np.interp(turns, at, success) for at, success in curves]
        for line in each:
            axes.plot(turns, line, color=COLOURS[number], alpha=0.3, linewidth=0.8)
        axes.plot(turns, np.mean(each, 0), color=COLOURS[number], linewidth=2, label=row)
    axes.set(xlabel="turns played in training", ylabel="success, greedy, held-out tasks", ylim=(0, 1))
    axes.legend(frameon=False)


PLOTS = {  # of each part, and its height
    "teachers": (plot_success, 10), "horizons": (plot_noise, 5), "exploration": (plot_curves, 5),
    "standard": (plot_success, 4), "paper": (plot_success, 7),
}  # fmt: skip
