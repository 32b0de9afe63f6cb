"""What a benchmark says about the machine, and the guard that keeps numbers of a busy machine out of the results.

    from machine import record_results
    record_results("vector_throughput", results, table, force=args.force)
"""

import argparse
import json
import math
import os
import platform
import re
import resource
import shlex
import subprocess
import sys
import time
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
DOCS = Path(__file__).parents[2] / "docs"
PACKAGES = ["agent-r1", "bm25s", "gymnasium", "jinja2", "numpy", "tokenizers", "torch", "transformers", "trl", "vllm"]
MOST_LOAD = 0.3  # the share of the cores that others may use while a benchmark starts


def from_1(text: str) -> int:
    """A flag's number, at least 1."""
    return _at_least(1, text)


def from_0(text: str) -> int:
    """A flag's number, at least 0."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    if not text.removeprefix("-").isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"it is a whole number, at least {least}, and not {text!r}")
    return int(text)


def above_0(text: str) -> float:
    """A flag's number, above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"it is a number above 0, and not {text!r}")
    return value


def given_flags(parser: argparse.ArgumentParser, args: argparse.Namespace, *names: str) -> str:
    """Those of these flags that aren't at their default, as they are typed behind a command: " --seeds 1 2"."""
    words: list[str] = []
    for name in names:
        value = getattr(args, name)
        if value != parser.get_default(name):
            values = value if isinstance(value, list | tuple) else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return "".join(f" {shlex.quote(word)}" for word in words)


def describe_machine() -> dict[str, Any]:
    """Cores, processor, NVIDIA's GPUs, memory, and the versions of what matters. Nothing that names the machine or its
    user."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            pass
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "processor": _processor(),
        **({"gpus": gpus} if (gpus := _gpus()) else {}),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": platform.system(),
        "python": platform.python_version(),
        "packages": versions,
    }


def resident_mib() -> float:
    """Resident memory of this process (on Linux; elsewhere its highest so far)."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def busy(seconds: float = 2.0) -> float:
    """The share of the cores that was in use, by anyone, over the next few seconds (0 to 1).

    Linux only; elsewhere the load average of the last minute, by cores.
    """
    if not Path("/proc/stat").exists():
        return min(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    idle_before, total_before = _cpu_times()
    time.sleep(seconds)
    idle, total = _cpu_times()
    return 1.0 - (idle - idle_before) / max(1, total - total_before)


def require_quiet_machine(force: bool = False) -> None:
    """Exit where others use the cores: the numbers would be theirs. `force` measures anyway (and says so)."""
    share = busy()
    if share > MOST_LOAD:
        message = f"{share:.0%} of the cores are in use; wait until the machine is quiet"
        if not force:
            sys.exit(f"{message}, or measure anyway with --force")
        print(f"warning: {message}", file=sys.stderr)


_NUMBERS = re.compile(r"\[\n\s+([^][{}\"]*?)\n\s*\]")  # a list without texts, lists and objects, as `indent` writes it


def _in_one_line(match: re.Match[str]) -> str:
    return f"[{' '.join(match[1].split())}]"


def record_results(
    name: str, results: Any, table: str, command: str, forced: bool = False, merged: bool = False
) -> str:
    """Write `results/NAME.json` (with the machine and the command) and `results/NAME.md` (the table).

    Where rows would be lost that were recorded, they stay, and these go to `NAME_part`; `merged`: the results have them
    already. Returns the name.
    """
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    if path.is_file() and not merged and _lacks(results, json.loads(path.read_text())["results"]):
        print(f"{path.name} has rows that this command leaves out; delete it to replace it. Recorded as {name}_part")
        name = f"{name}_part"
    record = {"command": command, "machine": describe_machine(), "forced": forced, "results": results}
    (RESULTS / f"{name}.json").write_text(_NUMBERS.sub(_in_one_line, json.dumps(record, indent=2)) + "\n")
    (RESULTS / f"{name}.md").write_text(f"`{command}` on {where(record['machine'])}:\n\n{table}\n")
    return name


def read_lines(path: Path) -> list[Any]:
    """What a record holds, JSON a line; nothing where there is none. SystemExit that names a line that is cut off."""
    found = []
    for number, line in enumerate(path.read_text().split("\n") if path.is_file() else [], 1):
        try:
            if line.strip():
                found.append(json.loads(line))
        except ValueError as error:
            said = f"{path}: line {number} is no whole record ({error})"
            raise SystemExit(f"{said}; delete it, and what it was of is made anew") from None
    return found


def append_line(path: Path, facts: Any) -> None:
    """Add a line to a record, which may end in one that was cut off."""
    path.parent.mkdir(exist_ok=True)
    with path.open("ab+") as file:
        cut = file.tell() > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read() != b"\n"
        file.write(b"\n" * cut + json.dumps(facts).encode() + b"\n")


def _lacks(new: Any, old: Any, levels: int = 2) -> bool:
    """Whether results leave out rows of others: keys of two levels, and items of lists, by what names them."""
    if isinstance(new, list) and isinstance(old, list):
        return bool(Counter(map(_named, old)) - Counter(map(_named, new)))
    if not levels or not (isinstance(new, dict) and isinstance(old, dict)):
        return False
    return not old.keys() <= new.keys() or any(_lacks(new[key], old[key], levels - 1) for key in old)


def _named(row: Any) -> str:
    """A row's texts and its seed; a number has no name."""
    if not isinstance(row, dict):
        return row if isinstance(row, str) else ""
    return json.dumps([[key, row[key]] for key in sorted(row) if isinstance(row[key], str) or key == "seed"])


def where(machine: dict[str, Any]) -> str:
    """What a table says of the machine (`describe_machine`)."""
    cores = machine["cores"]
    counts = Counter(machine.get("gpus", ()))
    gpus = "".join(f"{f'{count} x ' if count > 1 else ''}{name}, " for name, count in counts.items())
    return f"{gpus}{cores} core{'s' * (cores != 1)} ({machine['processor']}), Python {machine['python']}"


def _cpu_times() -> tuple[int, int]:
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return fields[3] + fields[4], sum(fields[:8])


def _gpus() -> list[str]:
    """Names, one for each, whether or not they are used here."""
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return found.stdout.splitlines() if found.returncode == 0 else []


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()
