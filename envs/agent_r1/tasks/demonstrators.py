"""Demonstrators of a task: an expert, teachers that are right in a stated share of episodes, and a sloppy one."""

from __future__ import annotations

import numpy as np

TEACHERS = {"expert": 1.0, "fallible_75": 0.75, "fallible_50": 0.5, "fallible_25": 0.25}  # share of right episodes
SLOPPY = "sloppy"  # the demonstrator for warm starts


def demonstrator(rng: np.random.Generator | None, teacher: str | None) -> str:
    """Return a name of `TEACHERS`, or `SLOPPY`: without `teacher` the expert, with `rng` only the sloppy demonstrator.

    Raises: ValueError for an unknown teacher, and for a fallible one without `rng`.
    """
    if teacher not in (None, *TEACHERS):
        raise ValueError(f"there is no teacher {teacher!r}; there are {', '.join(TEACHERS)}")
    if teacher is None:
        return "expert" if rng is None else SLOPPY
    if teacher != "expert" and rng is None:
        raise ValueError(f"{teacher} makes mistakes at random: pass an rng")
    return teacher
