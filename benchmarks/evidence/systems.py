"""Other systems of the field, each in small: its claim against a baseline, at a stated budget.

    python benchmarks/evidence/systems.py --part decoding  # a critic picks the turns of a policy
    python benchmarks/evidence/systems.py --part arpo  # episodes that branch
    python benchmarks/evidence/systems.py --part turns  # advantages and ratios of turns, against tokens
    python benchmarks/evidence/systems.py --part hybrid  # a price for calls beyond the expert's
    python benchmarks/evidence/systems.py --part replay  # own successes are trained on again
    python benchmarks/evidence/systems.py --part reward_model  # what a model of rewards learned, and its exploitation

A part is a module of systems_parts with `run(force)`, or with `measure` and `FLAGS`. Each run takes one thread. It is
recorded when it ends, and is not made again. After Ctrl-C the same command continues. Intervals are 95 %. Writes
benchmarks/results/systems_PART.json and .md.
"""

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks" / "common"), str(ROOT / "learner")]
from evidence_parts import runs
from machine import RESULTS, from_1, given_flags, record_results
from systems_parts import arpo, decoding, hybrid, replay, reward_model, turns

PARTS = {"decoding": decoding, "arpo": arpo, "turns": turns, "hybrid": hybrid, "replay": replay,
         "reward_model": reward_model}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, required=True, help="what is measured")
    parser.add_argument("--seeds", type=from_1, default=3, help="runs of each row, seeds 1, 2, ...")
    parser.add_argument("--workers", type=from_1, default=1, help="runs at the same time")
    parser.add_argument("--episodes", type=from_1, default=500, help="tasks of each evaluation")
    parser.add_argument("--critics", type=from_1, default=10, help="random critics (decoding)")
    parser.add_argument("--flags", default="", help="further flags of the training runs, in quotation marks")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    args = parser.parse_args()
    part = PARTS[args.part]
    own = {*part.FLAGS, *(("seeds", "workers") if hasattr(part, "measure") else ())}
    for name in sorted({"seeds", "workers", *(name for one in PARTS.values() for name in one.FLAGS)} - own):
        if getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name} does nothing in --part {args.part}")
    os.chdir(ROOT)  # learners run there
    if hasattr(part, "run"):
        part.run(args.force)
        return
    runs.RECORD = RESULTS / "systems_runs.jsonl"
    args.used, args.begun, args.needs = set(), False, None
    found = part.measure(args)
    table = f"{found['table']} Runs on {'; '.join(found['on'])}{', beside other work' * found['forced']}."
    print(table)
    more = given_flags(parser, args, "seeds", *part.FLAGS)
    command = f"python benchmarks/evidence/systems.py --part {args.part}{more}"
    record_results(f"systems_{args.part}", found, table, command, found["forced"])


if __name__ == "__main__":
    main()
