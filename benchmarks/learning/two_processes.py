"""Does training on two processes give the curve of one? The same job with and without torchrun, on the CPU (gloo).

    python benchmarks/learning/two_processes.py                                        # GRPO; table and JSON
    python benchmarks/learning/two_processes.py --learner ppo_llm --total-episodes 640

Both runs sample with the same random numbers. They stay the same but for rounding, until a rounding error changes a
sampled token; from there on they are two runs of the same experiment.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks" / "common"), str(ROOT / "learner")]
from machine import from_0, from_1, given_flags, record_results, require_quiet_machine

CURVES = {"return": "charts/episodic_return", "grad_norm": "losses/grad_norm", "exact_match": "eval/em"}


def train(processes: int, args: argparse.Namespace, folder: Path) -> Path:
    """Run the learner below `folder` and return the run's folder."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    script = str(ROOT / "learner" / f"{args.learner}.py")
    options = ["--total-episodes", args.total_episodes, "--episodes-per-iteration", args.episodes_per_iteration,
               "--seed", args.seed, "--num-threads", 1, "--eval-every", 1, "--eval-episodes", args.eval_episodes,
               "--checkpoint-every", 0, "--exp-name", f"on_{processes}", "--save-model"]  # fmt: skip
    command = [sys.executable, *(torchrun if processes > 1 else []), script, *map(str, options)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    print(f"{processes} process(es): done", flush=True)
    return next((folder / "runs").glob(f"*__on_{processes}__*"))


def weights(folder: Path) -> np.ndarray:
    from safetensors.numpy import load_file

    tensors = load_file(folder / "model.safetensors")
    return np.concatenate([tensors[name].ravel() for name in sorted(tensors)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learner", default="grpo_llm", help="a learner such as grpo_llm or ppo_llm")
    parser.add_argument("--total-episodes", type=from_1, default=1_280)
    parser.add_argument("--episodes-per-iteration", type=from_1, default=128)
    parser.add_argument("--eval-episodes", type=from_1, default=128, help="held-out tasks after each iteration")
    parser.add_argument("--seed", type=from_0, default=1)
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    args = parser.parse_args()
    require_quiet_machine(args.force)
    from compare import read_curve

    with tempfile.TemporaryDirectory() as folder:
        one, two = (train(processes, args, Path(folder)) for processes in (1, 2))
        curves = {n: [read_curve(run, tag)[1].tolist() for run in (one, two)] for n, tag in CURVES.items()}
        start = weights(ROOT / "envs" / "agent_r1" / "policies" / "MultihopWorld-v0")
        ends = [weights(run / "model") for run in (one, two)]
    difference = float(np.linalg.norm(ends[0] - ends[1]) / np.linalg.norm(ends[0] - start))
    rows = ["| iteration | return, 1 | 2 processes | gradient norm, 1 | 2 processes | held-out EM, 1 | 2 processes |"]
    rows.append("|---|---|---|---|---|---|---|")
    rows.append("| 0 | | | | | {:.3f} | {:.3f} |".format(*(em[0] for em in curves["exact_match"])))
    for i in range(len(curves["return"][0])):
        cells = [f"{curve[i]:.4f}" for name in ("return", "grad_norm") for curve in curves[name]]
        cells += [f"{curve[i + 1]:.3f}" for curve in curves["exact_match"]]
        rows.append(f"| {i + 1} | {' | '.join(cells)} |")
    table = "\n".join(rows)
    note = f"The final weights differ by {difference:.1e} of what training moved them (norms)."
    print(f"{table}\n\n{note}")
    command = (f"python benchmarks/learning/two_processes.py --learner {args.learner} "
               f"--total-episodes {args.total_episodes} "
               f"--episodes-per-iteration {args.episodes_per_iteration} --seed {args.seed}")  # fmt: skip
    command += given_flags(parser, args, "eval_episodes")
    results = {"curves": curves, "relative_difference_of_final_weights": difference}
    name = f"two_processes_{args.learner.removesuffix('_llm')}"
    record_results(name, results, f"{table}\n\n{note}", command, args.force)


if __name__ == "__main__":
    main()
