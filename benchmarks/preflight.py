"""Is the preflight right? What it predicts for a model of 135M parameters on a CPU, and what processes really take.

    python benchmarks/preflight.py    # six cases, some minutes each on one core

Each case runs in a process of its own: a model of SmolLM2-135M's shape with random weights, a rollout that fills the
cache, an update with two microbatches, the optimizer's step, the copies for checkpoints. Measured is the most that the
process ever had in main memory, less what it had after its imports.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from machine import record_results

ROOT = Path(__file__).parents[1]
SHAPE = {
    "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "vocab_size": 49_152, "tie_word_embeddings": True, "max_position_embeddings": 8192,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "GRPO": {},
    "GRPO, --gradient-checkpointing": {"gradient_checkpointing": True},
    "GRPO, --kl-coef 0.01": {"reference": True},
    "GRPO, --lora-rank 16": {"lora_rank": 16},
    "PPO": {"critic": True},
    "PPO, --microbatch-tokens 256": {"critic": True, "microbatch_tokens": 256},
}
COMMON = {
    "lora_rank": 0, "gradient_checkpointing": False, "dtype": "float32", "engine": "transformers", "num_envs": 8,
    "microbatch_tokens": 1024, "longest_row": 256, "critic": False, "reference": False, "preflight": False,
    "updates": 2,
}  # fmt: skip


def run(case: dict[str, Any]) -> dict[str, float]:
    """Predict, then do what a learner does. Returns bytes."""
    import numpy as np
    import torch
    from transformers import AutoModel, LlamaConfig, LlamaForCausalLM

    from llm_utils import checkpoint, forward, loading, optimizer, preflight, slots

    torch.set_num_threads(1)
    args, device = SimpleNamespace(**case), torch.device("cpu")
    config = LlamaConfig(**args.shape)
    vocab_size, longest = config.vocab_size, args.longest_row
    report = preflight.preflight(
        args, config, device, critic=args.critic, reference=args.reference, longest_row=longest, world_size=1
    )
    with tempfile.TemporaryDirectory() as folder:
        if os.fork() == 0:  # making the weights is no part of a run
            torch.manual_seed(0)
            LlamaForCausalLM(config).save_pretrained(folder)
            os._exit(0)
        assert os.wait()[1] == 0
        torch.ones(8, 8, requires_grad=True).matmul(torch.ones(8, 8)).sum().backward()  # threads, and kernels
        before = preflight.resident_bytes("VmRSS")
        policy = loading.load_policy(folder, device, args, dtype=torch.float32)
        modules = [policy]
        if args.critic:
            modules.append(AutoModel.from_pretrained(folder, dtype=torch.float32).eval())
        reference = loading.load_policy(folder, device, dtype=torch.float32) if args.reference else None
    adam = optimizer.Float32AdamW(modules, [1e-6] * len(modules), (0.9, 0.95))
    saver = checkpoint.Checkpointer(Path("unused"), policy, modules[1] if args.critic else None, adam)
    for _ in range(2):
        saver.boundary({})
    rng = np.random.default_rng(0)
    rows = [
        SimpleNamespace(tokens=rng.integers(vocab_size, size=longest), prompt_length=9, task_index=i)
        for i in range(2 * args.microbatch_tokens // longest)
    ]
    masks = [np.arange(longest) >= 9] * len(rows)
    model = slots.SlotModel(policy, args.num_envs, vocab_size)
    for _ in model.prefill({slot: rng.integers(vocab_size, size=longest - 2) for slot in range(args.num_envs)}):
        pass
    everyone = np.arange(args.num_envs)
    for _ in range(2):
        model.decode(everyone, rng.integers(vocab_size, size=args.num_envs))
    model.clear()
    for _ in range(args.updates):
        for batch in forward.microbatches(rows, args.microbatch_tokens):
            chosen = masks[: len(batch)]
            if reference is not None:
                with torch.no_grad():
                    forward.policy_forward(reference, batch, chosen, vocab_size, 1.0)
            forward.policy_forward(policy, batch, chosen, vocab_size, 1.0)[0].sum().backward()
            if args.critic:
                modules[1](input_ids=forward.pad([row.tokens for row in batch])).last_hidden_state.mean().backward()
        adam.step(1.0)
        saver.boundary({})
    measured = preflight.resident_bytes("VmHWM") - before
    return {"predicted": report.peak, "measured": measured, "imports": before}


def check(case: dict[str, Any], shape: dict[str, Any]) -> dict[str, float]:
    """Run a case in a process of its own."""
    paths = [str(ROOT / "learner"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--child", json.dumps({**COMMON, **case, "shape": shape})]
    found = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(found.stdout.splitlines()[-1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run(json.loads(options.child))))
        sys.exit()
    lines = ["| | predicted, GB | measured, GB | predicted / measured |", "|---|---|---|---|"]
    results = {}
    for name, case in CASES.items():
        results[name] = found = check(case, SHAPE)
        gigabytes = [found[key] / 1e9 for key in ("predicted", "measured")]
        lines.append(f"| {name} | {gigabytes[0]:.2f} | {gigabytes[1]:.2f} | {gigabytes[0] / gigabytes[1]:.2f} |")
        print(lines[-1], flush=True)
    record_results("preflight", results, "\n".join(lines), "python benchmarks/preflight.py")
    far = [name for name, x in results.items() if not 0.8 < x["predicted"] / x["measured"] < 1.2]
    sys.exit(f"more than 20 % off: {', '.join(far)}" if far else 0)
