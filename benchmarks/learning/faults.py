"""What faults of the environment's machinery do to training: GRPO on MultihopWorld with parts that break.

    python benchmarks/learning/faults.py  # 4 kinds, 3 seeds, two runs at a time, a core for each; about half an hour
    python benchmarks/learning/faults.py --kinds none once --seeds 1

Faults hit 30 % of the calls or episodes, whatever the policy does (`faulty_world.py`). A fault that goes away when the
call is made again must cost nothing but time. Episodes that a fault ended are dropped; where they are broken from the
start on, the run plays until as many have counted as in the others. In the end each policy is evaluated greedily on
1,000 held-out tasks of the sound world.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np

import agent_r1

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks" / "common"), str(ROOT / "learner")]
from compare import read_curve
from machine import from_1, record_results, require_quiet_machine
from sweep import Job, finish, make_job

RATE, PER_ITERATION = 0.3, 256  # episodes of an iteration; all of a run that is smaller
EPISODES = 5_120
KINDS = {
    "none": "no faults",
    "once": "30 % of the calls fail once",
    "episode": "30 % of the episodes are broken from the start on",
    "call": "30 % of the calls fail for good",
}


def training(kind: str, seed: int, episodes: int, *flags: str) -> Job:
    """A run of grpo_llm.py that trains on about `episodes` episodes that count, if one in `RATE` is dropped."""
    each = min(PER_ITERATION, episodes)
    if kind == "episode":
        episodes = round(episodes / (1 - RATE) / each) * each
    model = agent_r1.tiny_policy("AgentR1/MultihopWorld-v0")
    words = ["python", "learner/grpo_llm.py", "--env-id", "faulty_world:AgentR1Faulty/MultihopWorld-v0"]
    words += ["--env-kwargs", json.dumps({"kind": kind, "rate": RATE}), "--model", os.path.relpath(model, ROOT)]
    words += ["--learning-rate", "3e-4", "--exp-name", f"faults_{kind}", "--seed", str(seed), "--max-invalid", "0.9"]
    words += ["--total-episodes", str(episodes), "--episodes-per-iteration", str(each), "--num-threads", "1"]
    return make_job([*words, "--eval-episodes", "0", "--save-model", *flags])


def evaluation(run: Path, kind: str, seed: int, *flags: str) -> Job:
    """The greedy evaluation of what a run has learned, in a world without faults."""
    words = ["python", "learner/evaluate_llm.py", "--model", str(run / "model"), "--num-threads", "1"]
    words += ["--env-id", "AgentR1/MultihopWorld-v0"]
    return make_job([*words, "--exp-name", f"faults_eval_{kind}", "--seed", str(seed), *flags])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS), help="the kinds of faults")
    parser.add_argument("--seeds", type=from_1, default=3, help="number of seeds, from 1 on")
    parser.add_argument("--workers", type=from_1, default=2, help="runs at the same time")
    parser.add_argument("--episodes", type=from_1, default=EPISODES, help="episodes that count, of each run")
    parser.add_argument("--eval-episodes", type=from_1, default=1000, help="held-out tasks that judge each policy")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    args = parser.parse_args()
    require_quiet_machine(args.force)
    os.chdir(ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "benchmarks" / "common"), os.environ.get("PYTHONPATH", "")])
    cases = [(kind, seed) for seed in range(1, args.seeds + 1) for kind in args.kinds]
    runs = finish([training(*case, args.episodes) for case in cases], args.workers)
    tasks = ["--episodes", str(args.eval_episodes)]
    evaluations = finish([evaluation(run, *case, *tasks) for run, case in zip(runs, cases, strict=True)], args.workers)
    names = ("em", "turns", "valid_episodes", "invalid", "area", "seconds")
    results: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in names} for kind in args.kinds}
    for (kind, _), run, folder in zip(cases, runs, evaluations, strict=True):
        found = results[kind]
        metrics = json.loads((folder / "evaluation.json").read_text())["metrics"]
        invalid = read_curve(run, "charts/invalid", "episodes")[1]
        success = read_curve(run, "charts/exact_match", "episodes")[1]
        found["em"].append(metrics["exact_match"]["mean"])
        found["turns"].append(metrics["turns"]["mean"])
        found["valid_episodes"].append(float(np.sum(1 - np.array(invalid)) * min(PER_ITERATION, args.episodes)))
        found["invalid"].append(float(np.mean(invalid)))
        found["area"].append(float(np.mean(success)))
        found["seconds"].append(json.loads((run / "summary.json").read_text())["train_seconds"])
    rows = ["| faults | episodes that counted | dropped | held-out EM, each seed | mean EM in training | turns |"]
    rows.append("|---|---|---|---|---|---|")
    for kind, found in results.items():
        em = ", ".join(f"{value:.3f}" for value in found["em"])
        counted, dropped = np.mean(found["valid_episodes"]), np.mean(found["invalid"])
        area = ", ".join(f"{value:.3f}" for value in found["area"])
        turns = np.mean(found["turns"])
        rows.append(f"| {KINDS[kind]} | {counted:.0f} | {dropped:.1%} | {em} | {area} | {turns:.2f} |")
    table = "\n".join(rows)
    print(table)
    command = f"python benchmarks/learning/faults.py --kinds {' '.join(args.kinds)} --seeds {args.seeds}"
    command += f" --episodes {args.episodes} --eval-episodes {args.eval_episodes}"
    record_results("faults", results, table, command, args.force)


if __name__ == "__main__":
    main()
