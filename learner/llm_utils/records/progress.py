"""The progress of a long job: a bar on a terminal, plain lines in a file (nohup, Slurm, CI)."""

from __future__ import annotations

import os
import sys
import time
from typing import Any, TextIO

from tqdm import tqdm

LINES, SECONDS = 40, 5.0  # in a file: about this many lines per job, at least this far apart


def on_terminal() -> bool:
    """Return True if standard error is a terminal that can redraw a line."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def duration(seconds: float) -> str:
    """Return a time such as 02:10 or 1:02:10."""
    return tqdm.format_interval(round(seconds))


class Progress:
    """The progress through `total` units. A bar and plain lines go to standard error, without colors."""

    def __init__(
        self, total: int, unit: str, label: str, initial: int = 0, lines: int = LINES, with_clock: bool = True
    ) -> None:
        """Start at `initial` units. In a file there are about `lines` lines (0: none but those of `write`).

        Without a clock, the bar has the label and the figures alone.
        """
        self.total, self.unit, self.label, self.done, self.lines = total, unit, label, initial, lines
        self.figures, self.initial, self.with_clock = "", initial, with_clock
        self.started = self.updated = self.printed = time.monotonic()
        self.bar: Any = None
        if on_terminal():
            options = {} if with_clock else {"bar_format": "{desc} {percentage:3.0f}%|{bar}|"}
            self.bar = tqdm(total=total, initial=initial, unit=unit, desc=label, dynamic_ncols=True, **options)
        elif lines and initial:
            self._print()

    def update(self, count: int = 1) -> None:
        """Advance by `count` units."""
        parts = self.lines and self.total and self.done * self.lines // self.total
        self.done += count
        self.updated = time.monotonic()
        if self.bar is not None:
            self.bar.update(count)
        elif self.lines and (
            self.done == self.total
            or (self.done * self.lines // self.total > parts and self.updated - self.printed >= SECONDS)
        ):
            self._print()

    def grow(self, count: int) -> None:
        """Add `count` units to the total."""
        self.total += count
        if self.bar is not None:
            self.bar.total = self.total

    def show(self, figures: str, label: str | None = None) -> None:
        """Change the figures, and the label if one is given."""
        self.figures, self.label = figures, label or self.label
        if self.bar is None:
            return
        self.bar.set_description_str(self.label, refresh=False)
        if self.with_clock:
            self.bar.set_postfix_str(figures)
        else:
            self.bar.bar_format = "{desc} {percentage:3.0f}%|{bar}| " + figures.replace("{", "{{").replace("}", "}}")
            self.bar.refresh()

    def unpause(self) -> None:
        """Leave the time since the last update out of the clock. It was spent on something else."""
        now = time.monotonic()
        self.started, self.updated = self.started + now - self.updated, now
        if self.bar is not None:
            self.bar.unpause()

    def write(self, text: str, file: TextIO | None = None) -> None:
        """Print text above the bar, at once; by default to standard output."""
        file = sys.stdout if file is None else file
        if self.bar is not None:
            tqdm.write(text, file=file)
        else:
            print(text, file=file)
        file.flush()

    def close(self) -> None:
        """End the bar."""
        if self.bar is not None:
            self.bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _print(self) -> None:
        parts = [f"{self.label}: {self.done}/{self.total} {self.unit}s"] + [self.figures] * bool(self.figures)
        if self.initial < self.done < self.total:
            pace = (self.updated - self.started) / (self.done - self.initial)
            parts.append(f"{duration(pace * (self.total - self.done))} left")
        print(", ".join(parts), file=sys.stderr)
        self.printed = time.monotonic()
