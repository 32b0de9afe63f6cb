"""kill -9 at random moments, then --resume: does a run end with the weights of one that nobody disturbed?

    python benchmarks/learning/kill_resume.py  # ten moments each for ppo_llm.py and grpo_llm.py; table and JSON

Every run is a process of its own, with --deterministic and a checkpoint after every iteration. A moment is random: some
time of an iteration's length after a random checkpoint. Weights are compared bit by bit, logged rows as text.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "common"))
from machine import from_0, from_1, given_flags, record_results, require_quiet_machine
from processes import differences, finish, kill, run_of, start

SCRIPTS = ("ppo_llm", "grpo_llm")
ITERATIONS, EPISODES = 8, 8
FLAGS = f"--deterministic --checkpoint-every 1 --save-model --no-cuda --num-threads 1 --num-envs 8 --num-minibatches 2 \
--episodes-per-iteration {EPISODES} --total-episodes {ITERATIONS * EPISODES} --eval-episodes 4 --eval-every 3 \
--temperature 2 --learning-rate 1e-3".split()
FLAGS += ["--env-kwargs", json.dumps({"max_turns": 2, "max_action_tokens": 12})]


def measure(script: str, moments: int, seed: int, work: Path) -> list[dict[str, Any]]:
    """Kill and resume so many runs."""
    begun = time.monotonic()
    whole = work / script / "whole"
    finish(start(script, whole, *FLAGS), whole)
    length = json.loads((run_of(whole) / "summary.json").read_text())["train_seconds"] / ITERATIONS
    print(f"{script}: {time.monotonic() - begun:.0f} s undisturbed, {length:.2f} s an iteration", flush=True)
    rng, results = random.Random(seed), []
    while len(results) < moments:
        folder = work / script / f"killed{len(results)}"
        process = start(script, folder, *FLAGS)
        killed = kill(process, folder, rng.randint(1, ITERATIONS - 1), rng.uniform(0, 1.5 * length))
        if killed is None:  # the moment was after the end: draw another one
            (folder / "runs").rename(folder.parent / f"too_late{time.monotonic_ns()}")
            continue
        finish(start(script, folder, "--resume", str(run_of(folder).relative_to(folder))), folder)
        killed["differences"] = differences(folder, whole)
        results.append(killed)
        print(script, killed, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=from_1, default=10, help="kills of each script")
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=list(SCRIPTS), help="the learners")
    parser.add_argument("--seed", type=from_0, default=1, help="of the moments")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    args = parser.parse_args()
    require_quiet_machine(args.force)
    with tempfile.TemporaryDirectory() as work:
        results = {script: measure(script, args.moments, args.seed, Path(work)) for script in args.scripts}
    lines = ["| script | killed after checkpoint | and seconds | while writing one | resumed from | weights and rows |"]
    lines.append("|---|---|---|---|---|---|")
    for script, kills in results.items():
        for k in kills:
            what = ", ".join(k["differences"]) or "identical"
            lines.append(
                f"| {script}.py | {k['iteration']} | {k['seconds']:.2f} | {'yes' if k['writing'] else 'no'} "
                f"| {k['found']} | {what} |"
            )
    table = "\n".join(lines)
    print(table)
    command = f"python benchmarks/learning/kill_resume.py --moments {args.moments} --seed {args.seed}"
    command += given_flags(parser, args, "scripts")
    record_results("kill_resume", results, table, command, args.force)
    sys.exit(any(k["differences"] for kills in results.values() for k in kills))


if __name__ == "__main__":
    main()
