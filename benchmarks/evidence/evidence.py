"""What imitation, rewards, exploration and curricula do on long horizons, each claim with its figure and verdict.

    python benchmarks/evidence/evidence.py --part teachers  # CraftWorld and ShopWorld, 3 seeds each
    python benchmarks/evidence/evidence.py --part teachers --places ShopWorld --rows RLOO  # with one more row
    python benchmarks/evidence/evidence.py --part horizons  # process rewards against the outcome alone
    python benchmarks/evidence/evidence.py --part exploration  # what makes a policy try more
    python benchmarks/evidence/evidence.py --part standard                                 # three levels of BabyAI
    python benchmarks/evidence/evidence.py --part smollm2 --model FOLDER --seeds 1  # a chat model on BFCL and BabyAI
    python benchmarks/evidence/evidence.py --part paper  # the paper's tables in small, with its masks

What a run showed stands in results/evidence_runs.jsonl from its end on and is not measured again, here or elsewhere;
after Ctrl-C the same command goes on. Intervals are 95 %, those of llm_utils/records/intervals.py; the noise of
gradients has a bootstrap over the batches of one run. Differences are of the same tasks.
Writes benchmarks/results/evidence_PART.json and .md, and the plot docs/images/evidence_PART.png; rows that are not
asked for stay in them. The command in the first line of that .md writes them again, from the record alone.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks" / "common"), str(ROOT / "learner")]
from evidence_parts import exploration, horizons, page, paper, smollm2, standard, teachers
from evidence_parts.noise import FEWEST
from machine import RESULTS, from_1, given_flags, record_results

PARTS = {"teachers": teachers, "horizons": horizons, "exploration": exploration, "paper": paper,
         "standard": standard, "smollm2": smollm2}  # fmt: skip
FIXED = ["seeds", "episodes", "batches", "flags"]  # the same for all that stands in a table


def usual_rows(places: Sequence[str], rows: Sequence[str], results: Mapping[str, Any]) -> list[str]:
    """The rows of a part where none is asked for: none beyond those of its tables; all, where a place has none yet."""
    there = {*results, *(place for one in results.values() for place in one.get("steps", ()))}
    return [] if there >= {*places} else [*rows]


def what_stands(places: Sequence[str], rows: Sequence[str], results: Mapping[str, Any]) -> list[str]:
    """The places and rows of a part that its tables have, as flags, once for all places with the same rows."""
    there: dict[tuple[str, ...], list[str]] = {}
    for name, one in results.items():
        has = {*one.get("rows", ()), *one.get("success", ())}
        at = [place for place in places if place == name or place in one.get("steps", ())]
        there.setdefault(tuple(row for row in rows if row in has), []).extend(at)
    found = []
    for some, at in there.items():
        words = ["--places", *at] * (len(at) < len(places)) + ["--rows", *some] * (len(some) < len(rows))
        found.append("".join(f" {shlex.quote(word)}" for word in words))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, required=True, help="what is measured")
    parser.add_argument("--places", nargs="+", default=[], help="where (default: everywhere)")
    parser.add_argument("--rows", nargs="+", default=[], help="further rows (default: those that the tables have; "
                        "all where a place has none)")
    parser.add_argument("--batches", type=from_1, default=200, help="batches at each checkpoint (horizons)")
    parser.add_argument("--seeds", type=from_1, default=3, help="runs of each row, seeds 1, 2, ...")
    parser.add_argument("--workers", type=from_1, default=2, help="runs at the same time")
    parser.add_argument("--episodes", type=from_1, default=500, help="tasks of each evaluation")
    parser.add_argument("--model", default="", help="the folder of SmolLM2-135M-Instruct (smollm2)")
    parser.add_argument("--flags", default="", help="further flags of reinforcement learning, in quotation marks")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    args = parser.parse_args()
    part = PARTS[args.part]
    own = [*part.FLAGS, "places", "seeds", "workers", "flags"]
    for name in sorted({name for one in PARTS.values() for name in one.FLAGS} - set(own)):
        if getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name} does nothing in --part {args.part}")
    all_rows = list(getattr(part, "ROWS", []))
    for name, there in (("places", part.PLACES), ("rows", all_rows)):
        if unknown := [one for one in getattr(args, name) if one not in there]:
            parser.error(f"--{name} {unknown[0]!r}: --part {args.part} has {'; '.join(there)}")
    if args.part == "smollm2" and not (Path(args.model) / "model.safetensors").is_file():
        parser.error(f"--part smollm2 needs --model FOLDER with a model.safetensors, got {args.model!r}")
    if args.batches < FEWEST:
        parser.error(f"--batches {args.batches}: intervals from a bootstrap need at least {FEWEST} batches")
    args.places = args.places or list(part.PLACES)
    own_rows = [row for place in args.places for row in getattr(part.PLACES[place], "rows", all_rows)]
    if unknown := [row for row in args.rows if row not in own_rows]:
        parser.error(f"--rows {unknown[0]!r}: {', '.join(args.places)} has {'; '.join(dict.fromkeys(own_rows))}")
    args.model = os.path.abspath(args.model) if args.model else ""
    os.chdir(ROOT)  # learners run there, and find environments of benchmarks/common/
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "benchmarks" / "common"), os.environ.get("PYTHONPATH", "")])
    path = RESULTS / f"evidence_{args.part}.json"
    results = json.loads(path.read_text())["results"] if path.is_file() else {}
    args.rows = args.rows or usual_rows(args.places, all_rows, results)
    settings = {name: getattr(args, name) for name in FIXED if name in own}
    for name, one in results.items():
        if one["settings"] != settings:
            parser.error(f"{path.name} has {name} with other settings, {one['settings']}: use them, or delete it")
    args.used, args.begun, args.needs = set(), False, getattr(part, "NEEDS", None)
    found = part.measure(args, results)
    results |= {name: one | {"settings": settings} for name, one in found.items()}
    forced = any(one["forced"] for one in results.values())
    where = "; ".join(sorted({place for one in results.values() for place in one["on"]}))
    words = f"Runs on {where}{', beside other work' * forced}."
    tables = "\n\n".join([*(one["table"] for one in results.values()), words])
    print(tables)
    more = f"{given_flags(parser, args, *settings)}{' --model FOLDER' * bool(args.model)}"
    command = " && ".join(f"python benchmarks/evidence/evidence.py --part {args.part}{stands}{more}"
                          for stands in what_stands(list(part.PLACES), all_rows, results))  # fmt: skip
    record_results(f"evidence_{args.part}", results, tables, command, forced, merged=True)
    page.write_plot(f"evidence_{args.part}", results, part.PLOT)


if __name__ == "__main__":
    main()
