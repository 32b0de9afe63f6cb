"""Plots of the parts in docs/images, drawn from the recorded results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from compare import save_plot
from machine import DOCS
from scores import Interval

Plot = Callable[[Any, Mapping[str, Any]], None]
COLOURS = [f"C{number}" for number in range(10)]


def write_plot(name: str, results: Mapping[str, Any], kind: tuple[Plot, str, float], docs: Path = DOCS) -> None:
    """Draw a part's plot as docs/images/NAME.png, if its results have what the plot shows.

    `kind` is the function that draws one place, the key of the results that it shows, and the height.
    """
    if any(found[kind[1]] for found in results.values()):
        draw(results, docs / "images" / f"{name}.png", kind)


def draw(results: Mapping[str, Any], path: Path, kind: tuple[Plot, str, float]) -> None:
    """A part's plot as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plot, _, height = kind
    figure, axes = plt.subplots(1, len(results), figsize=(7 * len(results), height), squeeze=False)
    for place, (name, found) in zip(axes[0], results.items(), strict=True):
        plot(place, found)
        place.set_title(name)
        place.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    save_plot(figure, path, dpi=110)
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
    room = (0.12 * len(columns) + 0.3) * len(rows) / axes.figure.get_figheight()  # for the legend, which hides nothing
    axes.set_ylim(len(rows) - 0.5, -0.5 - room)
    axes.legend(frameon=False, loc="upper center", ncol=2)


def plot_success(axes: Any, found: Mapping[str, Any]) -> None:
    """Success of every row on held-out tasks, with 95 % intervals"""
    bars(axes, found["success"], "success, greedy where nothing is said")


FLOOR = 3e-4  # the lowest signal / noise that is drawn: a log scale has no 0


def plot_noise(axes: Any, found: Mapping[str, Any]) -> None:
    """Signal / noise of the gradient with process rewards (filled) and without, by the number of steps, with 95 %
    intervals"""
    checkpoints = list(next(iter(found["noise"].values())))
    for number, checkpoint in enumerate(checkpoints):
        for kind, filled in (("dense", True), ("outcome", False)):
            for name, places in found["noise"].items():
                value, low, high = (max(x, FLOOR) for x in places[checkpoint][kind][0])
                other = not name.startswith("CraftWorld")  # in other places the same number of steps means less
                x = found["steps"][name] + 0.3 * (number - 1) + 0.1 * (not filled) - 0.9 * other
                first = name == list(found["noise"])[-1]
                axes.errorbar([x], [value], [[value - low], [high - value]], fmt="s" if other else "o", markersize=5,
                              color=COLOURS[number], markerfacecolor=COLOURS[number] if filled else "white",
                              label=f"{checkpoint}, {kind}" if first else None)  # fmt: skip
                if other and filled and number == 0:
                    said = f"{name}, {found['steps'][name]} turns"
                    axes.annotate(said, (x, high), (0, 4), textcoords="offset points", fontsize=8)
    axes.set(xlabel="turns of the best way", ylabel="signal / noise", yscale="log")
    axes.set_ylim(bottom=FLOOR)
    axes.legend(frameon=False)


def plot_curves(axes: Any, found: Mapping[str, Any]) -> None:
    """Success on held-out tasks over the turns played in training: a thin line for each seed, a thick one their mean"""
    for number, (row, curves) in enumerate(found["curves"].items()):
        turns = np.linspace(0, min(at[-1] for at, _ in curves), 50)
        each = [np.interp(turns, at, success) for at, success in curves]
        for line in each:
            axes.plot(turns, line, color=COLOURS[number], alpha=0.3, linewidth=0.8)
        axes.plot(turns, np.mean(each, 0), color=COLOURS[number], linewidth=2, label=row)
    axes.set(xlabel="turns played in training", ylabel="success, greedy, held-out tasks")
    axes.set_ylim(bottom=0, top=1.6 * axes.get_ylim()[1])  # the legend stands above the curves
    axes.legend(frameon=False, loc="upper left")

