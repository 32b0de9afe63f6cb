"""The number of threads that torch computes with.

The threads of a product wait for each other, and OpenMP waits by spinning. With a thread on every core, a second busy
process takes a core away from one of them. The others spin until it is back, and a job takes many times as long
(benchmarks/performance/threads.py). So by default the number follows what other processes leave free, during the whole
run.
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

SECONDS = 2.0  # between two measurements of the load
SPARE = 0.25  # cores that others may use before a thread is dropped
STAT = Path("/proc/stat")


class Load:
    """The cores that this process may use, and their use by other processes."""

    def __init__(self) -> None:
        self.cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
        omp_setting = os.environ.get("OMP_NUM_THREADS", "")
        omp_limit = int(omp_setting) if omp_setting.isdecimal() else math.inf
        self.cores = max(1, math.ceil(min(len(self.cpus), cgroups.cores(), omp_limit)))
        self.reason = f" (OMP_NUM_THREADS={omp_setting})" if omp_limit < len(self.cpus) else ""
        self.last = self._now()

    def _now(self) -> tuple[float, float]:
        """Return the clock, and the seconds that other processes have used these cores since boot; 0 if unknown."""
        names, ticks = {f"cpu{cpu}" for cpu in self.cpus}, 0
        for line in STAT.read_text().splitlines() if STAT.exists() else ():
            name, *fields = line.split()
            if name in names:  # user, nice, system, idle, iowait, irq, softirq, steal (time of other virtual machines)
                ticks += sum(map(int, fields[:3])) + sum(map(int, fields[5:8]))
        return time.monotonic(), (ticks / os.sysconf("SC_CLK_TCK") - time.process_time()) if ticks else 0.0

    def others(self) -> float:
        """Return the number of cores that others used since the last measurement."""
        (began, used_before), self.last = self.last, self._now()
        now, used = self.last
        return max(0.0, (used - used_before) / (now - began))

    def threads(self, others: float) -> int:
        """Return one thread for every free core among those that this process may use."""
        return max(1, min(self.cores, len(self.cpus) - math.ceil(others - SPARE)))


_followed: Load | None = None  # the load that `follow` measures


def use(args: Any) -> None:
    """Set torch's number of threads to `args.num_threads`; 0 means as many as there are free cores.

    With --deterministic, and with several torchrun processes that share the cores, the load does not count. With
    --compile it counts once: a graph is compiled again for another number of threads.
    """
    global _followed
    load, processes, _followed = Load(), distributed.local_world_size(), None
    number, reason = args.num_threads, "--num-threads"
    if not number and (processes > 1 or getattr(args, "deterministic", False)):
        cores = len(load.cpus) if processes > 1 else load.cores  # torchrun sets OMP_NUM_THREADS to 1
        number = max(1, cores // processes)
        reason = f"{cores} core{'s' * (cores > 1)}, {processes} process{'es' * (processes > 1)}"
    elif not number:
        time.sleep(0.3)
        others, fixed = load.others(), getattr(args, "compile", False)
        number, _followed = load.threads(others), None if fixed else load
        available = f"{load.cores} core{'s' * (load.cores > 1)}{load.reason}"
        rule = "stays" if fixed else "follows them"
        reason = f"of {available}; other processes use {others:.1f}, and the number {rule}"
    torch.set_num_threads(number)
    if distributed.rank() == 0:
        print(f"torch uses {number} thread{'s' * (number > 1)} ({reason})", file=sys.stderr)


def follow() -> None:
    """Adapt torch's number of threads to the load, every few seconds, unless a flag fixed it.

    Call this on the thread that computes, between its steps: OpenMP keeps a number for each thread.
    """
    if _followed is not None and time.monotonic() - _followed.last[0] >= SECONDS:
        number = _followed.threads(_followed.others())
        if number != torch.get_num_threads():
            torch.set_num_threads(number)
