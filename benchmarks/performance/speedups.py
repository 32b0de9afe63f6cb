"""Speed before and after each change that made the learners faster, measured in turn in one run.

    python benchmarks/performance/speedups.py                           # on a CPU, with one thread
    python benchmarks/performance/speedups.py --device cuda             # the rows of one GPU
    python benchmarks/performance/speedups.py --device cpu --models tiny --tokens 512    # the same without a GPU

Every row times two versions of the same work by turns. The version "before" is the code of today under a patch of this
file, as the learners have no switches for it. A row has the medians of both versions, and the ratio before / after with
its 95 % interval (bootstrap over the pairs). On a CPU the seconds are those that the process computed, so other
programs disturb them little. A CPU's table also says where the time of an iteration goes.

A step that fails, or takes longer than `--limit` seconds, is printed and left out. `--device cpu` is a rehearsal of the
GPU's rows, and records nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import gymnasium as gym
import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks" / name) for name in ("common", "performance")] + [str(ROOT / "learner")]
import gpu
import grpo_llm
import processes
from compare import read_curve
from machine import from_0, from_1, given_flags, record_results, require_quiet_machine

import agent_r1
from llm_utils import distributed
from llm_utils.run import Run
from llm_utils.sampling.rollout import draw_episodes, rollout
from llm_utils.sampling.transformers_engine import TransformersEngine
from llm_utils.setup import loading
from llm_utils.training import cudnn_attention, forward
from llm_utils.training.optimizer import Float32AdamW
from llm_utils.trajectory import Trajectory, Turn

ENV_ID = "AgentR1/MultihopWorld-v0"
RANK = 16
Pair = tuple[Callable[[], Any], Callable[[], Any]]  # the work as it was before a change, and after it
# Models for seconds of a CPU: layers of SmolLM2-135M, and mostly a head.
LAYERS = LlamaConfig(
    hidden_size=576, num_hidden_layers=4, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536,
    vocab_size=2_048, tie_word_embeddings=True,
)  # fmt: skip
HEAD = LlamaConfig(
    hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=128, vocab_size=20_000,
    tie_word_embeddings=True,
)  # fmt: skip
JOBS = {  # learner, flags
    "GRPO": ("grpo_llm", []),
    "GRPO, `--old-logprobs trainer`": ("grpo_llm", ["--old-logprobs", "trainer"]),
    "GRPO, `--lora-rank 16`": ("grpo_llm", ["--lora-rank", "16"]),
    "PPO": ("ppo_llm", ["--critic-warmup", "1"]),
}
PARTS = ("rollout", "score", "train", "sync")


# ------------------------------------------------------------------------------------------------------- measurement


def compare(pair: Pair, repetitions: int, device: torch.device) -> dict[str, list[float]]:
    """Return the seconds of both versions, run by turns after one run that is not counted."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    found: dict[str, list[float]] = {"before": [], "after": []}
    for work in pair:
        work()
    for repetition in range(repetitions):
        for name, work in list(zip(found, pair, strict=True))[:: 1 if repetition % 2 else -1]:
            gpu.wait(device)
            began = clock()
            work()
            gpu.wait(device)
            found[name].append(clock() - began)
    return found


def ratio(found: dict[str, list[float]]) -> tuple[float, float, float]:
    """Return the ratio of the medians, before / after, and its 95 % interval by a bootstrap over the pairs."""
    pairs = np.array([found["before"], found["after"]])
    drawn = np.random.default_rng(0).integers(pairs.shape[1], size=(2000, pairs.shape[1]))
    before, after = np.median(pairs[:, drawn], axis=2)
    value = float(np.median(pairs[0]) / np.median(pairs[1]))
    low, high = np.quantile(before / after, [0.025, 0.975])
    return value, float(low), float(high)


def line(name: str, found: dict[str, list[float]]) -> str:
    """Return a row of the table."""
    before, after = (1000 * float(np.median(found[which])) for which in ("before", "after"))
    value, low, high = ratio(found)
    return f"| {name} | {before:,.1f} | {after:,.1f} | {value:.2f} [{low:.2f}, {high:.2f}] |"


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in a step that takes longer."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"not ready after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def under(patch: Callable[[], Any], work: Callable[[], Any]) -> Callable[[], Any]:
    """Return the work under a patch."""

    def patched() -> None:
        with patch():
            work()

    return patched


# ------------------------------------------------------------------------------------------------- versions before


def without_cudnn() -> Any:
    """No row is long enough for cuDNN's attention."""
    return mock.patch.object(cudnn_attention, "SHORTEST", 2**40)


def with_entropies_again() -> Any:
    """Each part of the head saves a tensor after the entropies, so that the backward pass computes them again."""
    checkpoint = forward.checkpoint

    def whole(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        one = torch.ones((), device=arguments[0].device)

        def further(*inputs: Any) -> Any:
            chosen, entropies = function(*inputs)
            return chosen * one, entropies

        return checkpoint(further, *arguments, **options)

    return mock.patch.object(forward, "checkpoint", whole)


def with_forward_of_peft() -> Any:
    """LoRA layers have peft's own forward."""
    from peft.tuners.lora import Linear

    from llm_utils.setup.lora import FusedLinear

    return mock.patch.object(FusedLinear, "forward", Linear.forward)


# -------------------------------------------------------------------------------------------------------- the work


def save_model(config: Any, folder: str, device: torch.device, dtype: torch.dtype) -> None:
    """Write a model with random weights."""
    torch.manual_seed(0)
    with torch.device(device):
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)


def load(folder: str, device: torch.device, rank: int = 0, checkpointing: bool = False, compiled: bool = False) -> Any:
    """Load a policy as a learner does, in bf16 on a GPU, with adapters that change something."""
    args = SimpleNamespace(lora_rank=rank, gradient_checkpointing="on" if checkpointing else "off")
    policy = loading.load_policy(folder, device, args, compiled=compiled)
    torch.manual_seed(1)
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.01)
    return policy


def step_of(policy: Any, rows: list[Any], budget: int = 10**9) -> Callable[[], None]:
    """Return a training step on these rows, in microbatches of so many tokens."""
    vocab_size, optimizer = policy.config.vocab_size, Float32AdamW([policy], [1e-6], (0.9, 0.95))

    def step() -> None:
        for batch in forward.microbatches(rows, budget, policy.device):
            forward.policy_forward(policy, batch, vocab_size, 1.0)[0].sum().backward()
        optimizer.step(1.0)

    return step


def update_of(policy: Any, vocab_size: int, rows: list[Trajectory], **flags: Any) -> Callable[[], None]:
    """Return GRPO's score and update on finished episodes, as `grpo_llm.py` does them."""
    args = grpo_llm.Args(old_logprobs="trainer", **flags)
    known = {"args": args, "policy": policy, "device": policy.device, "vocab_size": vocab_size}
    empty = {"played": [], "metrics": [], "seconds": {}, "state": {"iteration": 1}}
    run = Run(**dict.fromkeys(Run.__dataclass_fields__) | known | empty)
    optimizer = Float32AdamW([policy], [1e-7], (0.9, 0.95))

    def update() -> None:
        for row in rows:
            row.train_mask = row.action_mask
        run.score_policy(rows)
        for minibatch in run.minibatches(rows, 2):
            grpo_llm.backward(minibatch, args, run)
            optimizer.step(1.0)

    return update


def score_pair(policy: Any, vocab_size: int, rows: list[Trajectory], minibatches: int, budget: int) -> Pair:
    """Return score and update with all rows scored, and without those of the first minibatch. What rejects rows needs
    all scores, so this flag is the version before."""
    flags = {"num_minibatches": minibatches, "microbatch_tokens": budget}
    return (
        update_of(policy, vocab_size, rows, **flags, reject_ratio=1e9), update_of(policy, vocab_size, rows, **flags)
    )  # fmt: skip


def made_up_episodes(count: int, length: int, vocab_size: int) -> list[Trajectory]:
    """Return episodes of random tokens whose last eighth is sampled, each of its own task."""
    rng, rows = np.random.default_rng(0), []
    for episode in range(count):
        row = Trajectory(episode, episode, length - length // 8, rng.integers(vocab_size, size=length).astype(np.int32))
        new = length // 8
        zeros = np.zeros(new, np.float32), np.zeros(new, np.int32)
        row.turns.append(Turn(length - new, length, 1.0, *zeros))
        row.finalize()
        row.advantages[:] = rng.normal(size=length)
        rows.append(row)
    return rows


# ------------------------------------------------------------------------------------------------------------ a CPU


class Job:
    """The shipped policy and its environment, as the learners' default job has them."""

    def __init__(self, episodes: int) -> None:
        self.folder = str(agent_r1.tiny_policy(ENV_ID))
        self.envs = gym.make_vec(ENV_ID, num_envs=episodes, tokenizer=self.folder, split="train", observation="new")
        self.vocab_size = self.envs.single_action_space.vocab_size
        self.episodes = draw_episodes(1, 1, episodes, self.envs.kinds[0].num_tasks, 8)

    def play(self, engine: TransformersEngine) -> list[Trajectory]:
        return rollout(self.envs, engine, self.episodes, 1)


def cpu_rows(job: Job, folder: str) -> dict[str, Callable[[], Pair]]:
    """Return what makes the pair of each row."""
    device = torch.device("cpu")

    def lora_rollout() -> Pair:
        policy, merged = load(job.folder, device, RANK), loading.load_policy(job.folder, device, whole=True)
        adapted, whole = (TransformersEngine(x, len(job.episodes), job.vocab_size) for x in (policy, merged))

        def after() -> None:
            whole.update(distributed.weights(policy), 0)
            job.play(whole)

        return lambda: job.play(adapted), after

    def entropies() -> Pair:
        save_model(HEAD, folder, device, torch.float32)
        step = step_of(load(folder, device), gpu.make_rows(gpu.Shape(1, 512, 1), HEAD.vocab_size))

        def in_parts() -> Any:
            return mock.patch.object(forward, "LOGITS_BYTES", 64 * 4 * HEAD.vocab_size)

        return under(in_parts, under(with_entropies_again, step)), under(in_parts, step)

    def scores(minibatches: int) -> Callable[[], Pair]:
        def pair() -> Pair:
            policy = load(job.folder, device)
            rows = job.play(TransformersEngine(policy, len(job.episodes), job.vocab_size))
            for row in rows:
                row.advantages[:] = np.random.default_rng(row.episode).normal(size=len(row.tokens))
            return score_pair(policy, job.vocab_size, rows, minibatches, 4096)

        return pair

    def lora_step() -> Pair:
        save_model(LAYERS, folder, device, torch.float32)
        step = step_of(load(folder, device, RANK), gpu.make_rows(gpu.Shape(1, 256, 8), LAYERS.vocab_size))
        return under(with_forward_of_peft, step), step

    episodes = len(job.episodes)
    return {
        f"1. LoRA {RANK}: rollout of {episodes} episodes": lora_rollout,
        "2. step with a head of 20,000 tokens, in 8 parts": entropies,
        f"6. score and update of {episodes} episodes, 4 minibatches": scores(4),
        "6. the same, 1 minibatch": scores(1),
        f"7. LoRA {RANK}: step of 256 tokens": lora_step,
    }


def parts_of_rollout(job: Job) -> dict[str, float]:
    """Return the shares of a rollout's CPU time: reading tokens, writing tokens, and everything else."""
    engine = TransformersEngine(load(job.folder, torch.device("cpu")), len(job.episodes), job.vocab_size)
    spent = {"prefill": 0.0, "decode": 0.0}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.process_time()
            results = function(*arguments)
            results = list(results) if name == "prefill" else results  # it yields
            spent[name] += time.process_time() - began
            return results

        return call

    job.play(engine)
    engine.slots.prefill, engine.slots.decode = (timed(name, getattr(engine.slots, name)) for name in spent)
    began = time.process_time()
    job.play(engine)
    total = time.process_time() - began
    shares = {name: seconds / total for name, seconds in spent.items()}
    return shares | {"environment, tools, sampling": 1 - sum(shares.values())}


def parts_of_iteration(iterations: int, episodes: int) -> dict[str, dict[str, float]]:
    """Return the mean seconds of each part of an iteration, by job; the first two iterations do not count."""
    found = {}
    for name, (script, flags) in JOBS.items():
        with tempfile.TemporaryDirectory() as folder:
            size = ["--episodes-per-iteration", str(episodes), "--total-episodes", str((iterations + 2) * episodes)]
            fixed = ["--num-threads", "1", "--no-cuda", "--eval-episodes", "0", "--checkpoint-every", "0"]
            process = processes.start(script, Path(folder), *size, *fixed, *flags)
            processes.finish(process, Path(folder))
            run = processes.run_of(Path(folder))
            found[name] = {part: float(read_curve(run, f"time/{part}")[1][2:].mean()) for part in PARTS}
        print(f"{name}: {found[name]}", flush=True)
    return found


def table_of_parts(shares: dict[str, float], parts: dict[str, dict[str, float]], episodes: int) -> list[str]:
    lines = [
        f"| default job on a CPU | rollout | score | update | sync | seconds of {episodes} episodes |",
        "|---" * 6 + "|",
    ]
    for name, seconds in parts.items():
        total = sum(seconds.values())
        cells = [f"{100 * seconds[part] / total:.0f} %" for part in PARTS]
        lines.append(f"| {name} | {' | '.join(cells)} | {total:.1f} |")
    lines += ["", f"| part of GRPO's rollout | {' | '.join(shares)} |", "|---" * (1 + len(shares)) + "|"]
    return [*lines, f"| share of CPU time | {' | '.join(f'{100 * share:.0f} %' for share in shares.values())} |"]


# ------------------------------------------------------------------------------------------------------------ a GPU


def gpu_rows(folder: str, device: torch.device, tokens: int) -> dict[str, Callable[[], Pair]]:
    """Return what makes the pair of each row. Training is with gradient checkpointing, where a row says nothing."""
    one, several, group = gpu.shapes(tokens)
    budget = max(1, tokens // 4)

    def step(shape: gpu.Shape, microbatch: int = 10**9, rank: int = 0, **settings: Any) -> Callable[[], None]:
        policy = load(folder, device, rank, **{"checkpointing": True} | settings)
        return step_of(policy, gpu.make_rows(shape, policy.config.vocab_size), microbatch)

    def cudnn(shape: gpu.Shape) -> Callable[[], Pair]:
        def pair() -> Pair:
            work = step(shape)
            return under(without_cudnn, work), work

        return pair

    def entropies() -> Pair:
        work = step(one)
        return under(with_entropies_again, work), work

    def adapters() -> Pair:
        work = step(one, rank=RANK)
        return under(with_forward_of_peft, work), work

    def compiled(shape: gpu.Shape) -> Callable[[], Pair]:
        return lambda: (step(shape), step(shape, compiled=True))

    def kept(shape: gpu.Shape) -> Callable[[], Pair]:
        return lambda: (step(shape), step(shape, checkpointing=False))

    def everything(shape: gpu.Shape, rank: int) -> Callable[[], Pair]:
        def pair() -> Pair:
            before = under(with_entropies_again, under(without_cudnn, step(shape, budget, rank)))
            before = under(with_forward_of_peft, before) if rank else before
            return before, step(shape, rank=rank, checkpointing=False, compiled=True)

        return pair

    def scores(minibatches: int) -> Callable[[], Pair]:
        def pair() -> Pair:
            policy = load(folder, device, checkpointing=True)
            rows = made_up_episodes(several.rows, several.length, policy.config.vocab_size)
            return score_pair(policy, policy.config.vocab_size, rows, minibatches, tokens)

        return pair

    def token() -> Pair:
        return tuple(decoding(load(folder, device, rank), 256) for rank in (RANK, 0))

    rows = {
        f"1. LoRA {RANK}: a token of 256 rows": token,
        f"2. step, {one}": entropies,
        f"6. score and update, {several}, 4 minibatches": scores(4),
        "6. the same, 1 minibatch": scores(1),
        f"7. LoRA {RANK}: step, {one}": adapters,
        f"5. microbatches of {budget:,} and {tokens:,} tokens, {several}": lambda: (
            step(several, budget),
            step(several),
        ),
    }
    for shape in (one, several, group):
        rows |= {
            f"3. cuDNN's attention, {shape}": cudnn(shape),
            f"4. compiled, {shape}": compiled(shape),
            f"5. no gradient checkpointing, {shape}": kept(shape),
            f"2 to 5. Together, {shape}": everything(shape, 0),
        }
    return rows | {f"2 to 5, 7. Together, LoRA {RANK}, {shape}": everything(shape, RANK) for shape in (one, several)}


def decoding(policy: Any, rows: int) -> Callable[[], None]:
    """Return the work of a token of all rows, after the forwards that are recorded."""
    vocab_size, rng = policy.config.vocab_size, np.random.default_rng(0)
    engine = TransformersEngine(policy, rows, vocab_size, longest_row=1024)
    for slot in range(rows):
        engine.feed(slot, rng.integers(vocab_size, size=gpu.PROMPT), 1024 - gpu.PROMPT - 1, [], seed=slot)
    while engine.pending:
        engine.step()
    for _ in range(gpu.WARM):
        engine.step()
    return engine.step


def measure(
    rows: dict[str, Callable[[], Pair]], args: argparse.Namespace, device: torch.device
) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of every row that is asked for. Print each as it is measured."""
    found = {}
    for name, make in rows.items():
        if args.rows and not set(args.rows) & set(map(int, re.findall(r"\d", name.partition(".")[0]))):
            continue
        try:
            with limited(args.limit):
                found[name] = compare(make(), args.repetitions, device)
            print(line(name, found[name]), flush=True)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], help="measure the rows of a GPU on it (cpu: rehearse)")
    parser.add_argument("--models", nargs="+", choices=gpu.MODELS, default=["Qwen3-0.6B"], help="of a GPU's rows")
    parser.add_argument("--tokens", type=from_1, default=16_384, help="of a GPU's training step")
    parser.add_argument("--rows", nargs="+", type=from_1, help="numbers of the changes to measure (default: all)")
    parser.add_argument("--repetitions", type=from_1, default=15, help="pairs of each row")
    parser.add_argument("--episodes", type=from_1, default=64, help="of a CPU's rows, and of an iteration")
    parser.add_argument("--iterations", type=from_0, default=4, help="of each job whose parts are measured on a CPU")
    parser.add_argument("--limit", type=from_1, default=240, help="seconds of a row")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    device, results, lines = torch.device(args.device or "cpu"), {}, []
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU here; --device cpu runs the same rows")
    if args.device != "cpu":
        require_quiet_machine(args.force)
    header = ["| change | before, ms | after, ms | before / after [95 %] |", "|---" * 4 + "|"]
    with tempfile.TemporaryDirectory() as folder:
        if args.device:
            for name in args.models:
                save_model(gpu.MODELS[name](), folder, device, dtype)
                results[name] = measure(gpu_rows(folder, device, args.tokens), args, device)
                lines += [f"{name}:", "", *header, *(line(*row) for row in results[name].items()), ""]
        else:
            torch.set_num_threads(1)
            job = Job(args.episodes)
            results["rows"] = measure(cpu_rows(job, folder), args, device)
            lines += [*header, *(line(*row) for row in results["rows"].items())]
            if args.iterations:
                results["rollout"] = parts_of_rollout(job)
                results["iteration"] = parts_of_iteration(args.iterations, args.episodes)
                lines += ["", *table_of_parts(results["rollout"], results["iteration"], args.episodes)]
    table = "\n".join(lines)
    print(table)
    if args.device != "cpu":
        flags = ("device", "models", "tokens", "rows", "repetitions", "episodes", "iterations", "limit")
        command = "python benchmarks/performance/speedups.py" + given_flags(parser, args, *flags)
        record_results("speedups_gpu" if args.device else "speedups_cpu", results, table, command, args.force)


if __name__ == "__main__":
    main()
