"""What one GPU gives: the trainer's and the sampler's tokens a second and their memory, beside the GPU's own limits.

    python benchmarks/performance/gpu.py  # models of three sizes with random weights
    python benchmarks/performance/gpu.py --device cpu --models tiny --tokens 512  # without a GPU: nothing is recorded

Trainer: forward, backward and AdamW's step on `--tokens` with --gradient-checkpointing on, as learners do them
(llm_utils/training). Model FLOPs are 6 for each weight and token (4 for a frozen weight; the
head's where a token is sampled), those of attention added; their share is of what a large product of bf16 matrices
reached on the same GPU, minutes before. A prompt that rows share is computed once, so its FLOPs count once and its
tokens for every row. Predicted memory is that of preflight.py. Sampler: every row writes
48 tokens after 512 others (transformers_engine.py), by a forward that was recorded before and is replayed,
and by forwards that Python asks for, kernel by kernel; the floor of a token is the time to read the weights and all
keys and values once, at the bytes a second that a large copy reads and writes. With LoRA the sampler is a copy with
merged adapters, and gets new weights in every iteration.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks" / "common"), str(ROOT / "learner")]
from machine import from_1, given_flags, record_results, require_quiet_machine

from llm_utils import distributed
from llm_utils.sampling.slot_cache import bytes_per_token
from llm_utils.sampling.transformers_engine import TransformersEngine
from llm_utils.setup import (
    loading,
    preflight,
)
from llm_utils.training import forward
from llm_utils.training.optimizer import Float32AdamW

MODELS: dict[str, Callable[[], Any]] = {
    "SmolLM2-135M": lambda: LlamaConfig(
        hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536,
        vocab_size=49_152, tie_word_embeddings=True, max_position_embeddings=32_768,
    ),
    "Qwen3-0.6B": lambda: Qwen3Config(
        hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        intermediate_size=3072, vocab_size=151_936, tie_word_embeddings=True, max_position_embeddings=32_768,
    ),
    "Qwen3-4B": lambda: Qwen3Config(
        hidden_size=2560, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        intermediate_size=9728, vocab_size=151_936, tie_word_embeddings=True, max_position_embeddings=32_768,
    ),
    "tiny": lambda: LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=128,
        vocab_size=1_000, tie_word_embeddings=True, max_position_embeddings=32_768,
    ),
}  # fmt: skip


class Shape(NamedTuple):
    """Rows of random tokens: one of `every` so many tokens is sampled, and the first `shared` tokens are those of all
    rows."""

    rows: int
    length: int
    every: int
    shared: int = 0

    def __str__(self) -> str:
        sampled = {1: "all", 8: "an eighth"}[self.every]
        prompt = f", one prompt of {self.shared:,}" if self.shared else ""
        return f"{self.rows} x {self.length:,}, {sampled} sampled{prompt}"


def shapes(tokens: int) -> list[Shape]:
    """Return the shapes of a training step on so many tokens."""
    row = tokens // 8
    return [Shape(1, tokens, 1), Shape(16, tokens // 16, 8), Shape(8, row, 8, 3 * row // 4)]


PROMPT, WRITTEN, WARM = 512, 48, 8
KINDS = {"all weights": 0, "LoRA 16": 16}
LARGE = ("Qwen3-4B",)  # trained with adapters only


def seconds(run: Callable[[], Any], times: int, device: torch.device) -> float:
    """Of one of so many runs, after one that isn't counted."""
    run()
    wait(device)
    began = time.perf_counter()
    for _ in range(times):
        run()
    wait(device)
    return (time.perf_counter() - began) / times


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def limits(device: torch.device) -> dict[str, float]:
    """FLOP/s of a product of bf16 matrices, and bytes/s that a copy reads and writes."""
    size = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(size * size * 8, device=device)
    target = torch.empty_like(source)
    return {
        "flops": 2 * size**3 / seconds(lambda: a @ b, 10, device),
        "bandwidth": 2 * source.nbytes / seconds(lambda: target.copy_(source), 10, device),
    }


def load(folder: str, rank: int, device: torch.device, tokens: int = 1) -> tuple[Any, SimpleNamespace]:
    """A policy with so many ranks of adapters (0: none), and arguments of a run that trains so many tokens at once."""
    args = SimpleNamespace(
        lora_rank=rank, gradient_checkpointing="on", dtype="bfloat16", engine="transformers", num_envs=1,
        microbatch_tokens=tokens, preflight=False,
    )  # fmt: skip
    return loading.load_policy(folder, device, args, dtype=torch.bfloat16), args


def make_rows(shape: Shape, vocab_size: int) -> list[Any]:
    """Rows of random tokens, all with one prompt, or no two with the same."""
    rng, at = np.random.default_rng(0), np.arange(shape.length)
    train = (at % shape.every == shape.every - 1) & (at >= max(1, shape.shared))
    tokens = rng.integers(vocab_size, size=(shape.rows, shape.length))
    tokens[:, : shape.shared] = tokens[0, : shape.shared]
    return [
        SimpleNamespace(
            tokens=row, prompt_length=shape.shared or 8, task_index=0 if shape.shared else i, train_mask=train
        )
        for i, row in enumerate(tokens)
    ]  # fmt: skip


def flops(model: Any, shape: Shape) -> float:
    """Of a forward and backward pass over all rows, without what is computed again, and a shared prompt once."""
    config, own = model.config, shape.length - shape.shared
    weights = sum(p.numel() for name, p in model.named_parameters() if ".lora_" not in name)
    head = config.vocab_size * config.hidden_size
    seen = shape.rows * own * (shape.shared + own / 2) + shape.shared**2 / 2  # pairs of tokens
    width = config.num_attention_heads * config.head_dim
    # two products of 2 FLOPs for a pair, forward once and backward twice
    attention = 12 * config.num_hidden_layers * width * seen
    trained = any(".lora_" not in name for name, p in model.named_parameters() if p.requires_grad)
    sampled = shape.rows * own / shape.every  # the head sees these only
    layers = (shape.rows * own + shape.shared) * (weights - head)
    return (6 if trained else 4) * (layers + sampled * head) + attention


def train(folder: str, rank: int, shape: Shape, device: torch.device, steps: int) -> dict[str, float]:
    """Seconds of a step on these rows, and the bytes that it took at most."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    policy, args = load(folder, rank, device, shape.rows * shape.length)
    vocab_size = policy.config.vocab_size
    report = preflight.preflight(
        args, policy.config, device, critic=False, reference=False, longest_row=shape.length, world_size=1
    )
    optimizer, rows = Float32AdamW([policy], [1e-6], (0.9, 0.95)), make_rows(shape, vocab_size)

    def step() -> None:
        forward.policy_forward(policy, rows, vocab_size, 1.0)[0].sum().backward()
        optimizer.step(1.0)

    one = seconds(step, steps, device)
    found = {"seconds": one, "tokens": shape.rows * shape.length, "flops": flops(policy, shape)}
    predicted = max(report.at(preflight.UPDATE), report.at(preflight.STEP))
    return found | {"predicted": predicted, "peak": torch.cuda.max_memory_allocated() if device.type == "cuda" else 0}


def sample(policy: Any, rows: int, recorded: bool) -> tuple[float, float]:
    """Seconds of a token of all rows, and those of reading the prompts."""
    vocab_size, rng, device = policy.config.vocab_size, np.random.default_rng(0), policy.device
    most = WARM + WRITTEN + 2
    engine = TransformersEngine(policy, rows, vocab_size, longest_row=PROMPT + most)
    if not recorded:
        engine.slots.graphs = None
    for slot in range(rows):
        engine.feed(slot, rng.integers(vocab_size, size=PROMPT), most, [], seed=slot)
    wait(device)
    began = time.perf_counter()
    while engine.pending:
        engine.step()
    wait(device)
    read = time.perf_counter() - began
    for _ in range(WARM):
        engine.step()
    wait(device)
    began = time.perf_counter()
    for _ in range(WRITTEN):
        engine.step()
    wait(device)
    return (time.perf_counter() - began) / WRITTEN, read


def sampler(folder: str, rank: int, rows: int, device: torch.device, limit: float) -> dict[str, float]:
    """What a token of all rows takes, recorded and asked for, the prompts, and the least that a token could take; and
    with adapters, what a copy takes to get them merged."""
    (policy, _), sync = load(folder, 0, device), 0.0
    if rank:
        (adapted, _), engine = load(folder, rank, device), TransformersEngine(policy, 1, policy.config.vocab_size)
        sync = seconds(lambda: engine.update(distributed.weights(adapted), 0), 3, device)
        del adapted, engine
    asked, _ = sample(policy, rows, recorded=False)
    one, read = sample(policy, rows, recorded=True)
    cache = rows * (PROMPT + WARM + WRITTEN // 2) * bytes_per_token(policy.config, policy.dtype)
    floor = (sum(p.nbytes for p in policy.parameters()) + cache) / limit
    return {"seconds": one, "asked": asked, "prefill_seconds": read, "floor": floor, "rows": rows, "sync": sync}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["SmolLM2-135M", "Qwen3-0.6B", "Qwen3-4B"])
    parser.add_argument("--rows", nargs="+", type=from_1, default=[64, 256], help="that write at the same time")
    parser.add_argument("--tokens", type=from_1, default=16_384, help="of a training step")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a rehearsal")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            parser.error("torch finds no GPU here; --device cpu runs the same program")
        require_quiet_machine(options.force)
    torch.manual_seed(0)
    found = limits(device)
    card = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    results: dict[str, Any] = {"card": card, "limits": found, "trainer": {}, "sampler": {}}
    lines = [f"{card}: {found['flops'] / 1e12:.0f} TFLOP/s (bf16), {found['bandwidth'] / 1e12:.2f} TB/s", ""]
    lines += ["| trainer | rows | tokens/s | model FLOPs, % | peak GB | predicted GB |", "|---" * 6 + "|"]
    print("\n".join(lines), flush=True)
    further = [
        "",
        "| sampler | rows | tokens/s | ms a token | each kernel asked for | floor, ms | prompts, tokens/s "
        "| new weights, ms |",
    ]
    further.append("|---" * 8 + "|")
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            with torch.device(device):
                AutoModelForCausalLM.from_config(MODELS[name](), dtype=torch.bfloat16).save_pretrained(folder)
            for kind, rank in KINDS.items():
                if name in LARGE and not rank:
                    continue
                for shape in shapes(options.tokens):
                    one = train(folder, rank, shape, device, 3)
                    results["trainer"][f"{name}, {kind}, {shape}"] = one
                    share = 100 * one["flops"] / one["seconds"] / found["flops"]
                    lines.append(
                        f"| {name}, {kind} | {shape} | {one['tokens'] / one['seconds']:,.0f} | {share:.1f} | "
                        f"{one['peak'] / 1e9:.1f} | {one['predicted'] / 1e9:.1f} |"
                    )
                    print(lines[-1], flush=True)
                for rows in options.rows:
                    one = sampler(folder, rank, rows, device, found["bandwidth"])
                    results["sampler"][f"{name}, {kind}, {rows}"] = one
                    times = " | ".join(f"{1000 * one[which]:.1f}" for which in ("seconds", "asked", "floor"))
                    further.append(
                        f"| {name}, {kind} | {rows} | {rows / one['seconds']:,.0f} | {times} | "
                        f"{rows * PROMPT / one['prefill_seconds']:,.0f} | {1000 * one['sync']:.1f} |"
                    )
                    print(further[-1], flush=True)
    if device.type == "cuda":
        command = "python benchmarks/performance/gpu.py" + given_flags(parser, options, "models", "rows", "tokens")
        record_results("gpu", results, "\n".join(lines + further), command, options.force)


if __name__ == "__main__":
    main()
