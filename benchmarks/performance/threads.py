"""How long a short training job takes with one thread, one on every core, and the default; alone, and two at once.

    python benchmarks/performance/threads.py                        # table and JSON
    python benchmarks/performance/threads.py --total-episodes 256

Of two jobs at once the slower one counts. With a thread on every core those of one job wait, spinning, for threads that
the other job has taken the core from; the default follows what others leave free.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "common"))
from machine import from_1, record_results, require_quiet_machine

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
CASES = {"one thread": 1, "a thread on every core": CORES, "the default": 0}


def train(threads: int, jobs: int, total_episodes: int) -> float:
    """Seconds of training of the slowest of so many jobs that run at once."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    batch = min(256, total_episodes)
    command = [sys.executable, str(ROOT / "learner" / "grpo_llm.py"), "--num-threads", str(threads), "--no-cuda",
               "--total-episodes", str(total_episodes), "--episodes-per-iteration", str(batch),
               "--eval-episodes", "0", "--checkpoint-every", "0"]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        names = [f"job{i}" for i in range(jobs)]
        running = [
            subprocess.Popen([*command, "--exp-name", name], cwd=folder, env=environment, stdout=subprocess.DEVNULL,
                             stderr=subprocess.PIPE, text=True)
            for name in names
        ]  # fmt: skip
        for process in running:
            said = process.communicate()[1]
            if process.returncode:
                sys.exit(f"{' '.join(command)} failed:\n{said[-3000:]}")
        summaries = [json.loads(path.read_text()) for path in Path(folder).glob("runs/*/summary.json")]
    return max(summary["train_seconds"] for summary in summaries)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-episodes", type=from_1, default=1_024, help="of each job; the default job has 5,120")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    args = parser.parse_args()
    require_quiet_machine(args.force)
    seconds = {}
    for name, threads in CASES.items():
        seconds[name] = {str(jobs): train(threads, jobs, args.total_episodes) for jobs in (1, 2)}
        print(f"{name}: {seconds[name]}", flush=True)
    rows = ["| threads of a job | seconds, alone | seconds, two at once |", "|---|---|---|"]
    rows += [f"| {name} | {times['1']:.0f} | {times['2']:.0f} |" for name, times in seconds.items()]
    table = "\n".join(rows)
    print(table)
    command = f"python benchmarks/performance/threads.py --total-episodes {args.total_episodes}"
    record_results("threads", {"cores": CORES, "seconds": seconds}, table, command, args.force)


if __name__ == "__main__":
    main()
