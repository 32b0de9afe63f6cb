"""A horizon that grows while a policy is trained (ScalingInter-RL, arXiv 2509.08755, section 3.3)."""

from __future__ import annotations

from collections.abc import Sequence


def stages(schedule: str) -> list[int]:
    """The turns of each stage of --horizon-schedule, such as "4,8,12". Raises ValueError for anything else."""
    turns = [int(stage) for stage in schedule.split(",") if stage.strip().isdecimal()]
    if len(turns) != len(schedule.split(",")) or min(turns) < 1:
        raise ValueError(f"stages are numbers of turns, at least 1, such as 4,8,12; got {schedule!r}")
    return turns


def horizon(turns: Sequence[int], every: int, iteration: int) -> int:
    """The most turns of an episode in an iteration, counted from 1: a stage lasts `every` iterations, the last stays.

    A pure function, so a run that goes on has the horizon of one that was never stopped.
    """
    return turns[min((iteration - 1) // every, len(turns) - 1)]
