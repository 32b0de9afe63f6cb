"""Does supervised training in bf16 learn what it learns in float32?

    python benchmarks/learning/sft_bf16.py  # the tiny policy of MultihopWorld
    python benchmarks/learning/sft_bf16.py --model FOLDER --learning-rate 1e-5 --batch-size 2  # any causal model

The same model takes the same steps on expert demonstrations: in float32; in bf16 as learner/sft_llm.py does it, with
float32 copies of the weights; and in bf16 with plain AdamW, whose steps are smaller than what a bf16 weight can move
by. The loss is that of action tokens of held-out demonstrations, each model in its own precision. No time is recorded,
so a busy machine does no harm.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks" / "common"), str(ROOT / "learner")]
import sft_llm
from machine import RESULTS, above_0, from_0, from_1, given_flags, record_results

from llm_utils.imitation.demonstrations import Demonstration, Demonstrations
from llm_utils.setup.loading import choose_dtype, load_policy
from llm_utils.setup.sources import model_source
from llm_utils.training.optimizer import Float32AdamW

ENV_ID = "AgentR1/MultihopWorld-v0"
ARMS = {"float32": "float32", "bf16": "bfloat16", "bf16, plain AdamW": "bfloat16"}


def measure(
    arm: str, source: str, rows: list[Demonstration], heldout: list[Demonstration], vocab_size: int, options: Any
) -> dict[str, float]:
    """Train in one way; the loss before and after."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args = sft_llm.Args(num_steps=options.num_steps, warmup_steps=options.num_steps // 10, microbatch_tokens=4096)
    rate, betas, decay = options.learning_rate, (0.9, 0.98), args.weight_decay
    policy = load_policy(source, device).to(choose_dtype(ARMS[arm], device))
    optimizer: torch.optim.AdamW | Float32AdamW  # one alone: the second takes the gradients away from the weights
    if arm == "bf16, plain AdamW":
        optimizer = torch.optim.AdamW(policy.parameters(), lr=rate, betas=betas, weight_decay=decay)
    else:
        optimizer = Float32AdamW([policy], [rate], betas=betas, weight_decay=decay)
    before = sft_llm.token_loss(policy, heldout, args.microbatch_tokens, vocab_size)
    start, stream = time.monotonic(), sft_llm.batches(rows, options.batch_size, options.seed)
    for step in range(1, options.num_steps + 1):
        sft_llm.token_loss(policy, next(stream), args.microbatch_tokens, vocab_size, backward=True)
        factor = sft_llm.schedule(step, args)
        if isinstance(optimizer, Float32AdamW):
            optimizer.scale_learning_rates(factor)
            optimizer.step(args.max_grad_norm)
        else:
            torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad()
        if step % 10 == 0:
            print(f"{arm}: step {step}, {time.monotonic() - start:.0f} s", flush=True)
    after = sft_llm.token_loss(policy, heldout, args.microbatch_tokens, vocab_size)
    return {"before": before, "after": after}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a folder, a Hugging Face name, or tiny")
    parser.add_argument("--env-id", default=ENV_ID, help="the environment whose demonstrations are learned")
    parser.add_argument("--env-kwargs", default="{}", help="further arguments of the environment, as JSON")
    parser.add_argument("--num-steps", type=from_1, default=60, help="optimizer steps")
    parser.add_argument("--batch-size", type=from_1, default=16, help="demonstrations a step")
    parser.add_argument("--learning-rate", type=above_0, default=1e-4, help="peak learning rate")
    parser.add_argument("--heldout", type=from_1, default=64, help="demonstrations that the loss is measured on")
    parser.add_argument("--seed", type=from_0, default=1, help="of demonstrations and batches")
    parser.add_argument("--name", default="sft_bf16", help="of the files in benchmarks/results")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM",
                        help="only these; the others stay as the same command has recorded them")  # fmt: skip
    options = parser.parse_args()
    source = model_source(options.model, options.env_id)
    maker = Demonstrations(options.env_id, "train", json.loads(options.env_kwargs), source, options.seed)
    count = options.num_steps * options.batch_size
    rows, heldout = maker.make(0, count, 1.0), maker.make(count, options.heldout, 1.0)
    vocab_size = maker.make_env().action_space.vocab_size
    flags = {"model": options.model if options.model == "tiny" else Path(options.model).name}
    flags |= {name: getattr(options, name) for name in ("num_steps", "batch_size", "learning_rate", "heldout", "seed")}
    command = "python benchmarks/learning/sft_bf16.py "
    command += " ".join(f"--{n.replace('_', '-')} {v}" for n, v in flags.items())
    command += given_flags(parser, options, "env_id", "env_kwargs", "name")
    record = RESULTS / f"{options.name}.json"
    results: dict[str, dict[str, float]] = {}
    if set(options.arms) < ARMS.keys():
        found = json.loads(record.read_text()) if record.is_file() else {}
        if found.get("command") != command:
            sys.exit(f"--arms: {record} has no record of this command to put them into")
        results = found["results"]
    results |= {arm: measure(arm, source, rows, heldout, vocab_size, options) for arm in options.arms}
    lines = ["| | loss before | loss after | against float32 |", "|---|---|---|---|"]
    for arm in ARMS:
        found = results[arm]
        gap = found["after"] / results["float32"]["after"] - 1
        lines.append(f"| {arm} | {found['before']:.4f} | {found['after']:.4f} | {gap:+.1%} |")
    table = "\n".join(lines)
    print(table)
    record_results(options.name, results, table, command)


if __name__ == "__main__":
    main()
