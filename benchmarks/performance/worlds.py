"""What a step of each embedded world costs, alone and with 64 episodes at once, and what is left behind.

    python benchmarks/performance/worlds.py
    python benchmarks/performance/worlds.py --ids Terminal --episodes 16

Alone: one environment plays its expert's turns. Together: ToolVectorEnv plays the same turns in so many episodes, tool
calls of all of them run together. Tokens are the byte tokenizer's. Writes benchmarks/results/worlds.json and .md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from agent_r1 import generated_worlds

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "common"))
from load import measure
from machine import from_1, given_flags, record_results, require_quiet_machine

WORLDS = [env_id.removeprefix("AgentR1/").removesuffix("-v0") for env_id in generated_worlds()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", nargs="+", default=WORLDS, choices=WORLDS, help="which worlds")
    parser.add_argument("--episodes", type=from_1, default=64, help="at once, and one after the other")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    args = parser.parse_args()
    require_quiet_machine(args.force)
    results = {}
    lines = ["| world | reset ms | step ms | steps/s alone | at once | memory MiB | processes | theirs | left behind |"]
    lines.append("|---|" + "---|" * 8)
    for name in args.ids:
        results[name] = found = measure(f"AgentR1/{name}-v0", args.episodes)
        one, many, left = found["alone"], found["together"], found["left_behind"]
        lines.append(
            f"| {name} | {one['reset_ms']:.2f} | {one['step_ms']:.2f} | {one['steps_per_second']:,.0f} "
            f"| {many['steps_per_second']:,.0f} | {many['memory_mb']:.0f} | {many['processes']} "
            f"| {many['processes_mb']:.0f} | {left} |"
        )
        print(lines[-1], flush=True)
    command = f"python benchmarks/performance/worlds.py --episodes {args.episodes}"
    command += given_flags(parser, args, "ids")
    record_results("worlds", results, "\n".join(lines), command, args.force)


if __name__ == "__main__":
    main()
