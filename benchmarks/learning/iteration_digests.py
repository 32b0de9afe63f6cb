"""Digests of what learners learn in a few iterations, to compare two versions of the code.

    python benchmarks/learning/iteration_digests.py --policies FOLDER --out before.json
    python benchmarks/learning/iteration_digests.py --policies FOLDER --against before.json  # 1 where one differs

A digest is over the weights, the episodes and the figures of a run, but for times. Every learner runs with two or three
sets of flags, on one thread of the CPU. FOLDER has a policy for each environment: the same for both versions.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "common"))
from digest import digest, measure
from machine import from_1

NOISE = {"tokenizer", "model", "model_files", "config_files", "args", "time", "seconds", "train_seconds", "SPS"}
SMALL = "--no-cuda --num-threads 1 --seed 1 --env-id AgentR1/{world}-v0 --model {model}"
RUN = f"{SMALL} --deterministic --save-model --num-envs 16 --episodes-per-iteration 16 --total-episodes {{total}} \
--num-minibatches 2 --eval-episodes 8 --eval-every 2 --log-trajectories all --learning-rate 3e-4 --no-preflight"
OTHER = '--update-epochs 2 --kl-coef 0.05 --ent-coef 0.01 --old-logprobs trainer --env-kwargs {{"max_turns":3}}'
LORA = "--lora-rank 4 --no-loss-mask --temperature 1.2"
PPO = f"{RUN} --critic-learning-rate 1e-3"
SFT = f"{SMALL} --deterministic --num-steps {{iterations}} --num-workers 0 --num-demonstrations 200 --batch-size 16 \
--eval-demonstrations 16 --eval-every 2 --warmup-steps 1 --learning-rate 1e-3"
EVALUATE = f"{SMALL} --episodes 32 --num-envs 16"
LEARNERS = {  # name -> flags; the world of its policy comes after the colon
    "ppo_llm": PPO,
    "ppo_llm turns:ArithmeticWorld": f"{PPO} {OTHER} --kl-in reward --advantage turns --gae-lambda 0.9 --gamma 0.98 "
    "--truncation bootstrap --adv-norm turn --target-kl 0.5 --reject-ratio 4",
    "ppo_llm bilevel": f"{PPO} {LORA} --advantage bilevel --gamma-turn 0.95 --critic-warmup 0 "
    "--gradient-checkpointing on",
    "grpo_llm": f"{RUN} --group-size 4",
    "grpo_llm turn:ArithmeticWorld": f"{RUN} {OTHER} --group-size 4 --dynamic-sampling 1 --ratio turn "
    "--loss-aggregation sequence --credit episode --kl-estimator k2",
    "grpo_llm lora": f"{RUN} {LORA} --group-size 8 --ratio sequence --loss-aggregation constant --no-scale-rewards "
    "--no-advantage-mask",
    "rloo_llm": f"{RUN} --group-size 4",
    "rloo_llm episode:ArithmeticWorld": f"{RUN} {OTHER} --group-size 4 --credit episode --kl-in reward --gamma 0.9",
    "rloo_llm lora": f"{RUN} {LORA} --group-size 4 --loss-aggregation sequence --top-p 0.9",
    "gigpo_llm": f"{RUN} --group-size 4 --ratio turn --dual-clip 3",
    "gigpo_llm published:ArithmeticWorld": f"{RUN} {OTHER} --group-size 4 --form published --gamma 0.95",
    "reinforce_pp_llm": RUN,
    "reinforce_pp_llm baseline:ArithmeticWorld": f"{RUN} {OTHER} --baseline --group-size 4 --credit episode",
    "reinforce_pp_llm lora": f"{RUN} {LORA} --adv-norm batch --horizon-schedule 2,4 --horizon-every 2",
    "sft_llm": SFT.replace("{model}", "scratch") + " --hidden-size 32 --num-layers 2 --intermediate-size 64",
    "sft_llm lora": f"{SFT} --lora-rank 4 --rag-share 0.2 --only-successes --gradient-checkpointing on",
    "evaluate_llm": EVALUATE,
    "evaluate_llm naive_rag": f"{EVALUATE} --mode naive_rag",
    "evaluate_llm samples:ArithmeticWorld": f"{EVALUATE} --samples 2 --temperature 1 --top-p 0.95",
}


def tensors(file: Path) -> list[Any]:
    """Name, type, shape and digest of every tensor in a file of safetensors."""
    raw = file.read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    header = {name: of for name, of in json.loads(raw[8:begin]).items() if name != "__metadata__"}
    bodies = {name: raw[begin + of["data_offsets"][0] : begin + of["data_offsets"][1]] for name, of in header.items()}
    return [[name, header[name]["dtype"], header[name]["shape"], hashlib.sha256(bodies[name]).hexdigest()]
            for name in sorted(header)]  # fmt: skip


def without_noise(content: Any) -> Any:
    """JSON without paths, times and flags, on every level."""
    if isinstance(content, dict):
        return {name: without_noise(value) for name, value in content.items() if name not in NOISE}
    return [without_noise(value) for value in content] if isinstance(content, list) else content


def scalars(run: Path) -> dict[str, list[Any]]:
    """Steps and values of every figure of a run that is no time."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if NOISE.isdisjoint(tag.split("/"))]
    return {tag: [[event.step, repr(event.value)] for event in events.Scalars(tag)] for tag in sorted(tags)}


def digest_learner(name: str, iterations: int, model: str, policies: Path | None) -> dict[str, Any]:
    """Run a learner in a folder of its own, and digest what it leaves there."""
    command, _, world = name.partition(":")
    world = world or "MultihopWorld"
    script = ROOT / "learner" / f"{command.split()[0]}.py"
    policy = str((policies / f"{world}-v0").resolve()) if policies else model
    flags = LEARNERS[name].format(world=world, model=policy, iterations=iterations, total=16 * iterations).split()
    outside = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0"}
    outside["PYTHONPATH"] = os.pathsep.join(str(Path(path).resolve()) for path in sys.path if path)
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, script, *flags], cwd=folder, env=outside, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(flags)}\n{done.stderr[-3000:]}")
        (run,) = Path(folder, "runs").iterdir()
        rows_of = run / "trajectories.jsonl"
        rows = [json.loads(line) for line in rows_of.read_text().splitlines()] if rows_of.is_file() else []
        parts = {"weights": [[file.relative_to(run).as_posix(), tensors(file)] for file in run.rglob("*.safetensors")],
                 "episodes": without_noise(rows), "figures": scalars(run)}  # fmt: skip
        parts["weights"].sort()
        for report in sorted([*run.glob("*.json"), *run.glob("model/tokenizer.json")]):
            parts[report.name] = without_noise(json.loads(report.read_text()))
    digests = {part: digest(content) for part, content in parts.items()}
    return {"count": sum(len(row["turns"]) for row in rows), "digest": digest(digests), "parts": digests}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(LEARNERS)
    parser.add_argument("--names", nargs="+", choices=names, default=names, metavar="NAME", help="those to digest")
    parser.add_argument("--out", type=Path, help="a file for the digests, as JSON")
    parser.add_argument("--against", type=Path, help="such a file of another version: what differs?")
    parser.add_argument("--iterations", type=from_1, default=3, help="of each learner")
    parser.add_argument("--model", default="tiny", help="the policy to begin with")
    parser.add_argument("--policies", type=Path, help="a folder with one for each environment")
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    take = partial(digest_learner, iterations=args.iterations, model=args.model, policies=args.policies)
    sys.exit(measure(take, args, "turns") > 0)


if __name__ == "__main__":
    main()
