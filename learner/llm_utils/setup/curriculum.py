"""A horizon that grows while a policy is trained (ScalingInter-RL, arXiv 2509.08755, section 3.3)."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any


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


def check_reach(args: Any, max_turns: int) -> None:
    """SystemExit where every stage of --horizon-schedule is at least the environment's `max_turns`, so that none does
    anything; a line on the screen where some are more. A run that goes on (--resume) keeps what it was accepted with.
    """
    schedule = getattr(args, "horizon_schedule", None)
    if schedule is None or args.resume:
        return
    turns, gives = stages(schedule), f"{args.env_id} gives {max_turns} turns"
    more = f"--env-kwargs '{json.dumps({'max_turns': max(*turns, min(turns) + 1)})}'"
    if min(turns) >= max_turns:
        why = f"{gives}, and no stage is less; {more} gives more"
        raise SystemExit(f"--horizon-schedule {schedule} does nothing: {why}")
    if max(turns) > max_turns:
        why = f"{gives}, to which longer stages are cut; {more} gives them"
        print(f"--horizon-schedule {schedule}: {why}", file=sys.stderr)
