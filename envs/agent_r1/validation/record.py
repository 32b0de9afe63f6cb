"""Recorded results of `validate.py`, one row for each id: a Markdown table and a JSON file."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agent_r1.task_data import DataNotFoundError


@dataclass
class Report:
    """The result for an id: a row of the table, and the failed checks with their reasons.

    `missing` is the error for missing data or a missing package (in a row that was read: a short text). `command`
    reproduces the row, and `machine` describes the computer. Both are empty if they were not recorded.
    """

    env_id: str
    row: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    missing: DataNotFoundError | ImportError | str | None = None
    note: str = ""  # a warning: usually a mistake, but may be intended
    command: str = ""
    machine: str = ""

    @property
    def lacks(self) -> str:
        """The missing item in a word or two: the table must not name a local folder."""
        if self.missing is None or isinstance(self.missing, str):
            return self.missing or ""
        extra = re.search(r"agent-r1\[\w+\]", str(self.missing))
        return "its data" if isinstance(self.missing, DataNotFoundError) else extra[0] if extra else "a package"


def table(reports: Sequence[Report]) -> str:
    """Format the figures and verdicts as a Markdown table."""
    head = ["id", "tasks", "played", "splits", "expert", "fallible", "null", "random", "stuffing", "copying"]
    head += ["shortcuts", "floor", "steps/s", "build ms", "checks"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for report in reports:
        name = report.env_id.removeprefix("AgentR1/")
        if not report.row:
            reason = f"not checked: {report.lacks}" if report.missing else f"failed: {', '.join(report.failed)}"
            lines.append("| " + " | ".join([name, *[""] * (len(head) - 2), reason]) + " |")
            continue
        row, success = report.row, report.row["success"]
        plain = ("expert", "null", "random", "stuffing", "many answers", "copying")
        fallible = " ".join(f"{share:.2f}" for name, share in success.items() if name.startswith("fallible"))
        floors = row.get("floors", {})
        heuristics = {n: s for n, s in success.items() if n not in plain and not n.startswith("fallible")}
        lines.append(
            "| "
            + " | ".join(
                [
                    name,
                    f"{row['tasks']:,}" if row["tasks"] < 2**31 - 1 else "no end",
                    f"{row['played']:,}",
                    str(row["splits"]),
                    f"{success['expert']:.3f}" if "expert" in success else "none",
                    fallible,
                    f"{success['null']:.3f}",
                    f"{success['random']:.3f}",
                    f"{max(success['stuffing'], success['many answers']):.3f}",
                    f"{success['copying']:.3f}",
                    ", ".join(
                        f"{name.replace('_', ' ')} {share:.3f}"
                        + (f" (may {floors[name]:.2f})" if name in floors else "")
                        for name, share in heuristics.items()
                    ),
                    f"{row.get('floor', 0.0):.2f}",
                    f"{row['steps_per_second']:,.0f}",
                    f"{row['build_ms']:.0f}",
                    "pass" if not report.failed else f"failed: {', '.join(report.failed)}",
                ]
            )
            + " |"
        )
    return "\n".join(lines) + "\n"


def read(path: Path) -> list[Report]:
    """Return the rows that `write` recorded; none without such a file. Raises ValueError for a damaged file."""
    try:
        return [Report(**row) for row in json.loads(path.with_suffix(".json").read_text())]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path.with_suffix('.json')}: {error}") from None


def write(path: Path, reports: Sequence[Report]) -> None:
    """Record rows: the table at `path`, and a JSON file. Rows of other ids stay, also rows that could not be repeated.

    An existing row keeps its position, and new rows are appended.
    """
    rows = {report.env_id: report for report in read(path)}
    for report in reports:
        old = rows.get(report.env_id, report)
        rows[report.env_id] = old if report.missing else report
    content = [vars(replace(report, missing=report.lacks)) for report in rows.values()]
    _replace(path.with_suffix(".json"), json.dumps(content, indent=1) + "\n")  # first: the table comes from it
    _replace(path, table(list(rows.values())))


def _replace(path: Path, text: str) -> None:
    """Write a file completely or not at all."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_text(text)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def machine() -> str:
    """Describe the computer: cores, processor, and the load of the last minute."""
    try:  # Linux
        match = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        match = None
    processor = match[1] if match else platform.machine()
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()  # usable
    return f"{cores} cores ({processor}){load}"
