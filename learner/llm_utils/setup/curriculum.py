"""A horizon that grows while a policy is trained (ScalingInter-RL, arXiv 2509.08755, section 3.3)."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from llm_utils.setup.environments import ids_of


def stages(schedule: str) -> list[int]:
    """Return the maximum number of turns of each stage of --horizon-schedule, such as "4,8,12". Raise ValueError for
    anything else."""
    turns = [int(stage) for stage in schedule.split(",") if stage.strip().isdecimal()]
    if len(turns) != len(schedule.split(",")) or min(turns) < 1:
        raise ValueError(
            f"stages must be numbers of turns, each at least 1, such as 4,8,12; got {schedule!r}"
        )
    return turns


def horizon(turns: Sequence[int], every: int, iteration: int) -> int:
    """Return the maximum number of turns of an episode in `iteration`, counted from 1. A stage lasts `every`
    iterations; the last stage has no end.

    This is a pure function, so a resumed run has the same horizon as an uninterrupted one.
    """
    return turns[min((iteration - 1) // every, len(turns) - 1)]


def check_reach(args: Any, max_turns: int) -> None:
    """Raise SystemExit if no stage of --horizon-schedule is below the environments' `max_turns`, so that the flag would
    do nothing. Print a line if some stages are above it. A resumed run (--resume) is not checked again."""
    schedule = getattr(args, "horizon_schedule", None)
    if schedule is None or args.resume:
        return
    turns, ids = stages(schedule), ids_of(args)
    limit = f"{', '.join(ids)} allow{'s' * (len(ids) == 1)} {max_turns} turns"
    remedy = f"--env-kwargs '{json.dumps({'max_turns': max(*turns, min(turns) + 1)})}'"
    if min(turns) >= max_turns:
        cause = f"{limit}, and no stage is below that; {remedy} allows more"
        raise SystemExit(f"--horizon-schedule {schedule} does nothing: {cause}")
    if max(turns) > max_turns:
        cause = f"{limit}, so longer stages are cut to that; {remedy} allows them"
        print(f"--horizon-schedule {schedule}: {cause}", file=sys.stderr)
