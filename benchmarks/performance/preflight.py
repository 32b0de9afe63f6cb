"""Is the preflight right? What it predicts for a model of 135M parameters on a CPU, and what processes really take.

    python benchmarks/performance/preflight.py          # six cases, a minute or two each on one core
    python benchmarks/performance/preflight.py --sizes  # what larger models need on cards of 80 GB; what auto is there
    python benchmarks/performance/preflight.py --sizes 1.5B 3B --memory-gb 24 --longest-row 2048

Each case runs in a process of its own: a model of SmolLM2-135M's shape with random weights, a rollout that fills the
cache, an update with two microbatches, the optimizer's step, the copies for checkpoints. Measured is the most that the
process ever had in main memory, less what it had after its imports.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks" / "common"), str(ROOT / "learner")]
from machine import above_0, from_1, record_results

SHAPE = {
    "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "vocab_size": 49_152, "tie_word_embeddings": True, "max_position_embeddings": 8192,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "GRPO": {},
    "GRPO, --gradient-checkpointing on": {"gradient_checkpointing": "on"},
    "GRPO, --kl-coef 0.01": {"reference": True},
    "GRPO, --lora-rank 16": {"lora_rank": 16},
    "PPO": {"critic": True},
    "PPO, --microbatch-tokens 256": {"critic": True, "microbatch_tokens": 256},
}
COMMON = {
    "lora_rank": 0, "gradient_checkpointing": "off", "dtype": "float32", "engine": "transformers", "num_envs": 8,
    "microbatch_tokens": 1024, "longest_row": 256, "critic": False, "reference": False, "preflight": False,
    "updates": 2,
}  # fmt: skip

SIZES = {  # of Qwen2.5: layers, hidden size, MLP's size, heads, keys' heads, vocabulary, one matrix for both embeddings
    "0.5B": (24, 896, 4864, 14, 2, 151_936, True),
    "1.5B": (28, 1536, 8960, 12, 2, 151_936, True),
    "3B": (36, 2048, 11_008, 16, 2, 151_936, True),
    "7B": (28, 3584, 18_944, 28, 4, 152_064, False),
    "14B": (48, 5120, 13_824, 40, 8, 152_064, False),
    "32B": (64, 5120, 27_648, 40, 8, 152_064, False),
}


KINDS = {"GRPO": (False, 0), "GRPO, LoRA": (False, 16), "PPO": (True, 0), "PPO, LoRA": (True, 16)}


def kinds() -> dict[str, tuple[bool, int]]:
    """Return the columns of a table: whether there is a critic, and the rank of the adapters."""
    return {kind: shape for kind, shape in KINDS.items() if not shape[1] or find_spec("peft")}  # it knows adapters


def config_of(name: str) -> Any:
    from transformers import Qwen2Config

    layers, hidden, inner, heads, keys, vocabulary, tied = SIZES[name]
    return Qwen2Config(
        num_hidden_layers=layers, hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads,
        num_key_value_heads=keys, vocab_size=vocabulary, tie_word_embeddings=tied,
    )  # fmt: skip


def estimator(name: str, critic: bool, memory_gb: float, longest_row: int, world_size: int = 1) -> Any:
    """Return the function from a run's arguments to the preflight's report, on GPUs."""
    import torch

    from llm_utils.setup.preflight import preflight

    return partial(
        preflight, config_or_source=config_of(name), device=torch.device("cuda"), critic=critic, reference=False,
        longest_row=longest_row, world_size=world_size, memory_gb=memory_gb,
    )  # fmt: skip


def sizes(names: list[str], memory_gb: float = 80, longest_row: int = 8192) -> str:
    """A table of these models: the peak of a run with vLLM in its process, and the fewest training GPUs with servers
    elsewhere."""
    columns = kinds()
    if len(columns) < len(KINDS):
        print("without LoRA, whose columns need peft: pip install 'agent-r1[lora]'", file=sys.stderr)
    lines = [f"| | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for name in names:
        cells = []
        for critic, rank in columns.values():
            case = {**COMMON, "lora_rank": rank, "gradient_checkpointing": "on", "dtype": "auto", "num_envs": 128}
            case |= {"microbatch_tokens": 4096}

            def estimate(engine: str, world_size: int, case=case, name=name, critic=critic) -> Any:
                args = SimpleNamespace(**{**case, "engine": engine})
                return estimator(name, critic, memory_gb, longest_row, world_size)(args)

            alone = estimate("vllm", 1)
            fewest = next((n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if estimate("vllm-server", n).fits), 0)
            cells.append(f"{alone.peak / 1e9:.0f} GB{'' if alone.fits else ', refused'}; {fewest or '> 32'}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def choices(names: list[str], memory_gb: float = 80, longest_row: int = 8192) -> str:
    """A table of what `auto` chooses on one GPU with vLLM in the process: --gradient-checkpointing and
    --microbatch-tokens."""
    import torch

    from llm_utils.setup import memory_flags

    columns = kinds()
    lines = [f"| | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for name in names:
        cells = []
        for critic, rank in columns.values():
            case = {**COMMON, "lora_rank": rank, "dtype": "auto", "num_envs": 128, "engine": "vllm"}
            args = SimpleNamespace(**case | dict.fromkeys(memory_flags.FLAGS, "auto"))
            values = memory_flags.candidates(args, torch.device("cuda"), longest_row)
            estimate = estimator(name, critic, memory_gb, longest_row)
            reports = (estimate(SimpleNamespace(**vars(args) | one)) for one in values)
            fitting = (one for one, report in zip(values, reports, strict=True) if report.fits)
            cells.append(", ".join(map(str, next(fitting, {"": "refused"}).values())))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def run(case: dict[str, Any]) -> dict[str, float]:
    """Predict, then do what a learner does. Returns bytes."""
    import numpy as np
    import torch
    from transformers import AutoModel, LlamaConfig, LlamaForCausalLM

    from llm_utils import distributed
    from llm_utils.recovery import checkpoint
    from llm_utils.sampling.slot_states import make_slots
    from llm_utils.sampling.transformers_engine import TransformersEngine
    from llm_utils.setup import loading, preflight
    from llm_utils.training import forward, optimizer

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
        merged = loading.load_policy(folder, device, dtype=torch.float32) if args.lora_rank else None  # samples
    adam = optimizer.Float32AdamW(modules, [1e-6] * len(modules), (0.9, 0.95))
    saver = checkpoint.Checkpointer(Path("unused"), policy, modules[1] if args.critic else None, adam)
    for _ in range(2):
        saver.boundary({})
    rng = np.random.default_rng(0)
    fixed = {"prompt_length": 9, "train_mask": np.arange(longest) >= 9}
    rows = [
        SimpleNamespace(tokens=rng.integers(vocab_size, size=longest), task_index=i, **fixed)
        for i in range(2 * args.microbatch_tokens // longest)
    ]
    if merged is not None:
        TransformersEngine(merged, 1, vocab_size).update(distributed.weights(policy), 0)
    model = make_slots(merged or policy, args.num_envs, vocab_size)
    for _ in model.prefill({slot: rng.integers(vocab_size, size=longest - 2) for slot in range(args.num_envs)}):
        pass
    everyone = np.arange(args.num_envs)
    for _ in range(2):
        model.decode(everyone, rng.integers(vocab_size, size=args.num_envs))
    model.clear()
    for _ in range(args.updates):
        for batch in forward.microbatches(rows, args.microbatch_tokens):
            if reference is not None:
                with torch.no_grad():
                    forward.policy_forward(reference, batch, vocab_size, 1.0)
            forward.policy_forward(policy, batch, vocab_size, 1.0)[0].sum().backward()
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
    parser.add_argument("--sizes", nargs="*", metavar="SIZE", choices=SIZES,
                        help=f"the table of larger models ({', '.join(SIZES)}; default all), from their shapes alone")
    parser.add_argument("--memory-gb", type=above_0, default=80, help="with --sizes: memory of each GPU")
    parser.add_argument("--longest-row", type=from_1, default=8192, help="with --sizes: tokens of the longest episode")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="what is run and measured")
    parser.add_argument("--layers", type=from_1, default=SHAPE["num_hidden_layers"], help="layers of the model")
    options = parser.parse_args()
    if options.sizes is not None:
        shown = options.sizes or list(SIZES), options.memory_gb, options.longest_row
        print(sizes(*shown), choices(*shown), sep="\n\n")
        sys.exit()
    if options.child:
        print(json.dumps(run(json.loads(options.child))))
        sys.exit()
    lines = ["| | predicted, GB | measured, GB | predicted / measured |", "|---|---|---|---|"]
    results = {}
    for name in options.cases:
        results[name] = found = check(CASES[name], {**SHAPE, "num_hidden_layers": options.layers})
        gigabytes = [found[key] / 1e9 for key in ("predicted", "measured")]
        lines.append(f"| {name} | {gigabytes[0]:.2f} | {gigabytes[1]:.2f} | {gigabytes[0] / gigabytes[1]:.2f} |")
        print(lines[-1], flush=True)
    command = "python benchmarks/performance/preflight.py"
    if options.cases != list(CASES):
        command += " --cases " + " ".join(map(shlex.quote, options.cases))
    if options.layers != SHAPE["num_hidden_layers"]:
        command += f" --layers {options.layers}"
    record_results("preflight", results, "\n".join(lines), command)
