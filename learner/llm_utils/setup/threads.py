"""How many threads torch computes with.

The threads of a product wait for each other, and OpenMP's wait by spinning. With one on every core, a second busy
process takes a core away from one of them, the others spin until it is back, and a job takes many times as long
(benchmarks/performance/threads.py). So the default follows what other processes leave free, from the start to the end.
"""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from llm_utils import distributed
from llm_utils.setup import cgroups

SECONDS = 2.0  # between two looks at the load
SPARE = 0.25  # of a core: what others may use before there is a thread less
STAT = Path("/proc/stat")


class Load:
    """The cores that this process may use, and what other processes use of them."""

    def __init__(self) -> None:
        self.cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
        asked = os.environ.get("OMP_NUM_THREADS", "")
        bound = int(asked) if asked.isdecimal() else math.inf
        self.cores = max(1, math.ceil(min(len(self.cpus), cgroups.cores(), bound)))
        self.why = f" (OMP_NUM_THREADS={asked})" if bound < len(self.cpus) else ""
        self.last = self._now()

    def _now(self) -> tuple[float, float]:
        """The clock, and the seconds that others have used of these cores since the machine started; 0 if unknown."""
        names, ticks = {f"cpu{cpu}" for cpu in self.cpus}, 0
        for line in STAT.read_text().splitlines() if STAT.exists() else ():
            name, *fields = line.split()
            if name in names:  # user, nice, system, idle, iowait, irq, softirq, steal: what the machine's owner took
                ticks += sum(map(int, fields[:3])) + sum(map(int, fields[5:8]))
        return time.monotonic(), (ticks / os.sysconf("SC_CLK_TCK") - time.process_time()) if ticks else 0.0

    def others(self) -> float:
        """How many cores others used since the last look."""
        (began, used_before), self.last = self.last, self._now()
        now, used = self.last
        return max(0.0, (used - used_before) / (now - began))

    def threads(self, others: float) -> int:
        """A thread for every core that is free, of those that this process may use."""
        return max(1, min(self.cores, len(self.cpus) - math.ceil(others - SPARE)))


_followed: Load | None = None  # the load that `follow` looks at


def use(args: Any) -> None:
    """Have torch compute with `args.num_threads` threads, or where that is 0 with as many as others leave cores free.

    With --deterministic, and in processes of torchrun, which share the cores, the load doesn't count.
    """
    global _followed
    load, processes, _followed = Load(), distributed.local_world_size(), None
    number, why = args.num_threads, "--num-threads"
    if not number and (processes > 1 or getattr(args, "deterministic", False)):
        cores = len(load.cpus) if processes > 1 else load.cores  # torchrun sets OMP_NUM_THREADS to 1
        number = max(1, cores // processes)
        why = f"{cores} core{'s' * (cores > 1)}, {processes} process{'es' * (processes > 1)}"
    elif not number:
        time.sleep(0.3)
        others, _followed = load.others(), load
        number = load.threads(others)
        why = f"{load.cores} core{'s' * (load.cores > 1)}{load.why}, others use {others:.1f}; it follows the load"
    torch.set_num_threads(number)
    if distributed.rank() == 0:
        print(f"torch computes with {number} thread{'s' * (number > 1)} ({why})", file=sys.stderr)


def follow() -> None:
    """Where the number of threads was left open: see what others use now, every few seconds, and change it.

    To be called on the thread that computes, as it works: OpenMP keeps a number for each.
    """
    if _followed is not None and time.monotonic() - _followed.last[0] >= SECONDS:
        number = _followed.threads(_followed.others())
        if number != torch.get_num_threads():
            torch.set_num_threads(number)
