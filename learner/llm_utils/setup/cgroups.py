"""What control groups allow this process: a container's limits, and those of a job of Slurm or systemd inside it.

What can't be read, or says something else than the kernel's documentation, is no limit.
"""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path, PurePosixPath

ROOT, MINE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
ODD = (ValueError, ZeroDivisionError)


def memory_left() -> list[int]:
    """Bytes that each of the groups leaves: its limit less what is used, files in the page cache that nobody uses not
    counted. Empty where there is no limit, or none is known."""
    names = {  # version 2; version 1, which writes a number of 19 digits where there is no limit
        "memory.max": ("memory.current", "inactive_file"),
        "memory.limit_in_bytes": ("memory.usage_in_bytes", "total_inactive_file"),
    }
    left = []
    for group in _groups("memory"):
        for limit, (used, unused) in names.items():
            if (most := _read(group / limit)) not in ("", "max"):
                lines = [line.split() for line in _read(group / "memory.stat").splitlines()]
                stat = dict(words for words in lines if len(words) == 2)
                free = stat.get(unused, "0")
                with suppress(*ODD):
                    left.append(int(most) - int(_read(group / used)) + (int(free) if free.isdecimal() else 0))
    return left


def cores() -> float:
    """The cores that the groups allow; infinite where there is no limit."""
    found = [math.inf]
    for group in _groups("cpu"):
        most, _, period = _read(group / "cpu.max").partition(" ")  # version 2
        if not most:
            most, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        if most not in ("", "max", "-1"):
            with suppress(*ODD):
                found.append(int(most) / int(period))
    return min(found)


def _groups(controller: str) -> list[Path]:
    """The folders of the groups that this process is in, of version 1 or 2, with all above them.

    In a container the path may be the host's; what it then lacks is left out, and its own limits stand at the root.
    """
    found: dict[Path, None] = {ROOT: None}
    for line in _read(MINE).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        top = ROOT / controller if controllers else ROOT
        way = PurePosixPath(path.lstrip("/"))
        found |= dict.fromkeys(top / part for part in ([] if ".." in way.parts else [way, *way.parents]))
        found[top] = None
    return list(found)


def _read(path: Path) -> str:
    """A file's text; empty where it can't be read."""
    try:
        return path.read_text(errors="replace").strip()
    except (OSError, ValueError):
        return ""
