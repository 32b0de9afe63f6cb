"""The limits that control groups set for this process: a container's, and those of a Slurm or systemd job inside it.

A file that cannot be read, or that does not follow the kernel's documentation, counts as no limit.
"""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path, PurePosixPath

ROOT, MINE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
PARSE_ERRORS = (ValueError, ZeroDivisionError)


def memory_left() -> list[int]:
    """Return the bytes that each group leaves: its limit minus its use. Inactive pages of the file cache do not count
    as used. The list is empty if there is no known limit."""
    names = {  # version 2; version 1, which writes a number of 19 digits for no limit
        "memory.max": ("memory.current", "inactive_file"),
        "memory.limit_in_bytes": ("memory.usage_in_bytes", "total_inactive_file"),
    }
    left = []
    for group in _groups("memory"):
        for limit_file, (usage_file, inactive_field) in names.items():
            if (limit_text := _read(group / limit_file)) not in ("", "max"):
                lines = [line.split() for line in _read(group / "memory.stat").splitlines()]
                stat = dict(words for words in lines if len(words) == 2)
                inactive = stat.get(inactive_field, "0")
                with suppress(*PARSE_ERRORS):
                    used = int(_read(group / usage_file)) - (int(inactive) if inactive.isdecimal() else 0)
                    left.append(int(limit_text) - used)
    return left


def cores() -> float:
    """Return the number of cores that the groups allow; infinite without a limit."""
    limits = [math.inf]
    for group in _groups("cpu"):
        quota, _, period = _read(group / "cpu.max").partition(" ")  # version 2
        if not quota:
            quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        if quota not in ("", "max", "-1"):
            with suppress(*PARSE_ERRORS):
                limits.append(int(quota) / int(period))
    return min(limits)


def _groups(controller: str) -> list[Path]:
    """Return the folders of the groups that contain this process, version 1 or 2, with all their parents.

    In a container the path may be the host's. Parts that do not exist there are left out; the container's own limits
    are at the root.
    """
    folders: dict[Path, None] = {ROOT: None}
    for line in _read(MINE).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        top = ROOT / controller if controllers else ROOT
        inner = PurePosixPath(path.lstrip("/"))
        folders |= dict.fromkeys(
            top / folder for folder in ([] if ".." in inner.parts else [inner, *inner.parents])
        )
        folders[top] = None
    return list(folders)


def _read(path: Path) -> str:
    """Return a file's text; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except (OSError, ValueError):
        return ""
