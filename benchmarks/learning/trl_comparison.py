"""grpo_llm.py next to TRL's GRPOTrainer: the same machine, checkpoints, tool task, groups and optimizer.

    python benchmarks/learning/trl_comparison.py              # two sizes of model; tables and JSON

Both sides train on AgentR1/MultihopWorld-v0 (TRL through `agent_r1.adapters.trl`) with the same loss, one optimizer
step for a batch of episodes, the same bounds on turns and tokens, and as many threads. The checkpoints are made first,
by sft_llm.py: they call tools, and not much more. Every run is a process of its own, and the sides take turns in going
first. TRL runs as it is fastest on a CPU: float32, no gradient checkpointing, no logging, no reference model.
"""

import argparse
import json
import os
import resource
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks" / "common"), str(ROOT / "learner")]
from machine import from_0, from_1, given_flags, record_results, require_quiet_machine

from llm_utils.records.intervals import ratio

ENV_ID = "AgentR1/MultihopWorld-v0"
SIZES = {  # flags of sft_llm.py
    "0.1M": "--hidden-size 48 --num-layers 2 --intermediate-size 96 --num-steps 400 --batch-size 32",
    "2.5M": "--hidden-size 256 --num-layers 4 --intermediate-size 384 --num-steps 300 --batch-size 12",
}
PARTS = {"sampling": "sampling", "environment": "environment", "score": "log-probs, advantages", "train": "training",
         "sync": "sync", "rest": "logs and the rest"}  # fmt: skip
MAX_TURNS, MAX_TOKENS = 4, 256  # of an episode; MAX_TOKENS is what TRL may write after the prompt, tools included
ENV_KWARGS = {"max_turns": MAX_TURNS, "max_action_tokens": MAX_TOKENS, "max_context_tokens": 2 * MAX_TOKENS}
LEARNING_RATE = 3e-4


# ---------------------------------------------------------------------------------------- one side, in its own process


class Clock:
    """When each step ended, and the seconds that were spent in what is timed by then."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.ends: list[dict[str, float]] = []

    def time(self, owner: Any, method: str, name: Callable[[], str]) -> None:
        """Count the seconds in this method, from now on, under the name that it has at the time."""
        inner = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[name()] += time.perf_counter() - start

        setattr(owner, method, timed)

    def time_model_passes(self) -> None:
        """Count the model's outermost forwards, with and without gradients, and its backwards."""
        import torch
        from transformers import GraniteForCausalLM

        self.time(GraniteForCausalLM, "__call__", lambda: "forward" if torch.is_grad_enabled() else "decode")
        self.time(torch.Tensor, "backward", lambda: "backward")

    def end_step(self) -> None:
        """A step is over."""
        self.ends.append({"step": time.perf_counter(), **self.seconds})

    def steps(self) -> list[dict[str, float]]:
        """Seconds of each step: the whole step, and what was timed in it. The first step warms up and is left out."""
        pairs = zip(self.ends, self.ends[1:], strict=False)
        return [{name: new[name] - old.get(name, 0.0) for name in new} for old, new in pairs]


def run_trl(args: argparse.Namespace) -> dict[str, Any]:
    import gymnasium as gym
    import numpy as np
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    from agent_r1.adapters.trl import environment_factory, environment_reward, task_rows

    torch.set_num_threads(args.threads)
    clock, logs = Clock(), {}

    class EndOfStep(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.end_step()
            logs.update({name: list(values) for name, values in trainer._metrics["train"].items()})

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.response_template = qwen3_template
    num_tasks = gym.make(ENV_ID).unwrapped.num_tasks
    from llm_utils.sampling.rollout import draw_episodes

    drawn = [draw_episodes(args.seed, i, args.prompts, num_tasks) for i in range(1, args.steps + 1)]  # as grpo_llm.py
    tasks = np.array([task for episodes in drawn for _, task in episodes])
    batch = args.prompts * args.group
    trainer = GRPOTrainer(
        model=args.model,
        args=GRPOConfig(
            output_dir="trl", seed=args.seed, use_cpu=True, bf16=False, gradient_checkpointing=False,
            report_to="none", logging_strategy="no", save_strategy="no", disable_tqdm=True, max_steps=args.steps,
            per_device_train_batch_size=batch // 2, gradient_accumulation_steps=2,  # a little faster than in one
            num_generations=args.group, max_completion_length=MAX_TOKENS,
            max_tool_calling_iterations=MAX_TURNS - 1, temperature=1.0, learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant", adam_beta1=0.9, adam_beta2=0.95, weight_decay=0.0, max_grad_norm=1.0,
            loss_type="dapo", epsilon=0.2, epsilon_high=0.28, beta=0.0, shuffle_dataset=False,
        ),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(task_rows(ENV_ID, tasks.tolist())),
        environment_factory=environment_factory(ENV_ID, tokenizer, **ENV_KWARGS),
        reward_funcs=environment_reward,
        callbacks=[EndOfStep()],
    )  # fmt: skip
    clock.time_model_passes()
    trainer.train()
    tokens = [mean * batch for mean in logs["completions/mean_length"]]
    return {
        "steps": clock.steps(), "tokens": tokens, "returns": logs["reward"], "exact_match": logs["env/em"],
        "calls": logs["tools/call_frequency"], "cut": logs["completions/clipped_ratio"],
    }  # fmt: skip


def run_ours(args: argparse.Namespace) -> dict[str, Any]:
    from agent_r1.vector import ToolVectorEnv
    from llm_utils.records.logger import Logger, mean_stats

    clock, logs = Clock(), defaultdict(list)
    log_iteration = Logger.iteration

    def end_iteration(
        self: Any, rows: Any, losses: Any, run: Any, scalars: dict[str, float], played: Any = None
    ) -> None:
        log_iteration(self, rows, losses, run, scalars, played)
        for name in ("rollout", "score", "train", "sync"):
            clock.seconds[name] += scalars[f"time/{name}"]
        clock.end_step()
        stats = mean_stats(rows)
        logs["tokens"].append(stats["sampled_tokens"] * len(rows))
        for name, key in (("returns", "return"), ("exact_match", "em"), ("calls", "tool_calls")):
            logs[name].append(stats[key])
        logs["cut"].append(sum(turn.end - turn.start >= MAX_TOKENS for row in rows for turn in row.turns) / len(rows))

    Logger.iteration = end_iteration
    for method in ("reset", "send", "recv"):
        clock.time(ToolVectorEnv, method, lambda: "environment")
    clock.time_model_passes()
    batch = args.prompts * args.group
    flags = {
        "model": args.model, "env-id": ENV_ID, "env-kwargs": json.dumps(ENV_KWARGS), "seed": args.seed,
        "num-threads": args.threads, "num-envs": batch, "episodes-per-iteration": batch, "group-size": args.group,
        "total-episodes": batch * args.steps, "credit": "episode", "num-minibatches": 1, "microbatch-tokens": 2048,
        "temperature": 1.0, "learning-rate": LEARNING_RATE, "eval-episodes": 0, "checkpoint-every": 0,
    }  # fmt: skip
    sys.argv = ["grpo_llm.py", "--no-anneal-lr", "--no-cuda", *(f"--{name}={value}" for name, value in flags.items())]
    runpy.run_path(str(ROOT / "learner" / "grpo_llm.py"), run_name="__main__")
    steps = clock.steps()
    for step in steps:
        step["sampling"] = step["rollout"] - step["environment"]
        step["rest"] = step["step"] - sum(step[name] for name in ("rollout", "score", "train", "sync"))
    return {"steps": steps, **logs}


# --------------------------------------------------------------------------------------------------------- comparison


def in_process(side: str, size: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run one side in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        flags = {"side": side, "model": checkpoint(size), "seed": seed, "threads": args.threads, "steps": args.steps,
                 "prompts": args.prompts, "group": args.group, "out": result}  # fmt: skip
        call([Path(__file__).resolve(), *(f"--{name}={value}" for name, value in flags.items())], folder, args.threads)
        return json.loads(result.read_text())


def checkpoint(size: str) -> Path:
    """The folder of a warm checkpoint."""
    return ROOT / "runs" / "trl_comparison" / size


def make_checkpoint(size: str, threads: int, more: str = "") -> None:
    """Train a model from scratch until it calls tools (half a minute), unless it is there. `more` flags of sft_llm.py
    come last."""
    if not (checkpoint(size) / "config.json").is_file():
        flags = f"{SIZES[size]} --num-demonstrations 4000 --tokenizer-demonstrations 1000 --warmup-steps 10"
        flags += f" --learning-rate 2e-3 --eval-demonstrations 64 --num-threads {threads}"
        flags += f" --out {checkpoint(size)} {more}"
        call([ROOT / "learner" / "sft_llm.py", *flags.split()], tempfile.gettempdir(), threads)


def call(command: list[Any], folder: str, threads: int) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false",
                   "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}  # fmt: skip
    done = subprocess.run([sys.executable, *map(str, command)], cwd=folder, env=environment, capture_output=True,
                          text=True)  # fmt: skip
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stderr[-3000:]}")


def figures(run: dict[str, Any]) -> dict[str, float]:
    """The figures of one run. Seconds are medians over its steps."""
    steps = run["steps"]
    seconds = {f"seconds/{name}": statistics.median(step[name] for step in steps) for name in steps[0]}
    outside = [1 - (step["decode"] + step["forward"] + step["backward"]) / step["step"] for step in steps]
    return seconds | {
        "outside": statistics.median(outside),
        "tokens": statistics.mean(run["tokens"]),
        "tokens_per_second": sum(run["tokens"][1:]) / sum(step["step"] for step in steps),
        "calls": statistics.mean(run["calls"]),
        "cut": statistics.mean(run["cut"]),
        "return_first": statistics.mean(run["returns"][:3]),
        "return_last": statistics.mean(run["returns"][-3:]),
        "exact_match_last": statistics.mean(run["exact_match"][-3:]),
        "peak_mib": run["peak_mib"],
    }


def compare(size: str, ours: list[dict[str, Any]], trl: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the runs of both sides, and the ratio of their seconds with its 95 % interval."""
    result: dict[str, Any] = {}
    for side, runs in (("ours", ours), ("trl", trl)):
        each = [figures(run) for run in runs]
        result[side] = {name: statistics.median(one[name] for one in each) for name in each[0]}
        result[side]["seconds_of_each_run"] = [one["seconds/step"] for one in each]
    result["ratio"] = ratio(*(result[side]["seconds_of_each_run"] for side in ("ours", "trl")))
    return result


def tables(results: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| parameters | | seconds a step | sampled tokens a step | sampled tokens/s | calls an episode "
        "| return, first and last 3 steps | peak MiB | outside the model's passes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for size, result in results.items():
        for side, name in (("ours", "grpo_llm.py"), ("trl", "TRL")):
            f = result[side]
            lines.append(
                f"| {size} | {name} | {f['seconds/step']:.3f} | {f['tokens']:.0f} | {f['tokens_per_second']:.0f} "
                f"| {f['calls']:.2f} | {f['return_first']:.2f}, {f['return_last']:.2f} | {f['peak_mib']:.0f} "
                f"| {f['outside']:.0%} |"
            )
    lines += ["", "| parameters | seconds a step, ours / TRL |", "|---|---|"]
    for size, result in results.items():
        lines.append("| {} | {:.2f} [{:.2f}, {:.2f}] |".format(size, *result["ratio"]))
    lines += ["", f"| seconds of a step of grpo_llm.py | {' | '.join(PARTS.values())} |"]
    lines.append("|---" * (len(PARTS) + 1) + "|")
    for size, result in results.items():
        parts = [result["ours"][f"seconds/{name}"] for name in PARTS]
        lines.append(f"| {size} | {' | '.join(f'{part:.3f}' for part in parts)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--repeats", type=from_1, default=3, help="runs of each side")
    parser.add_argument("--steps", type=from_1, default=20, help="optimizer steps of a run; the first is not counted")
    parser.add_argument("--prompts", type=from_1, default=4, help="tasks in a step")
    parser.add_argument("--group", type=from_1, default=8, help="episodes of each task")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=from_1, default=cores, help="torch threads of both sides")
    parser.add_argument("--checkpoint-flags", default="", help="further flags of sft_llm.py, in quotation marks")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    for name in ("--side", "--model", "--out"):  # one side in its own process
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=from_0, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        result = run_trl(args) if args.side == "trl" else run_ours(args)
        result["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        Path(args.out).write_text(json.dumps(result))
        return

    if args.steps < 2:
        parser.error("--steps is at least 2: the first one is not counted")
    require_quiet_machine(args.force)
    for size in args.sizes:
        make_checkpoint(size, args.threads, args.checkpoint_flags)
    runs: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for repeat in range(args.repeats):
        for size in args.sizes:
            for side in ("ours", "trl") if repeat % 2 else ("trl", "ours"):
                runs[size, side].append(in_process(side, size, repeat + 1, args))
                seconds = statistics.median(step["step"] for step in runs[size, side][-1]["steps"])
                print(f"run {repeat + 1}, {size}, {side}: {seconds:.3f} s a step", flush=True)
    results = {size: compare(size, runs[size, "ours"], runs[size, "trl"]) for size in args.sizes}
    table = tables(results)
    print(table)
    command = (f"python benchmarks/learning/trl_comparison.py --repeats {args.repeats} --steps {args.steps} "
               f"--prompts {args.prompts} --group {args.group} --threads {args.threads}")  # fmt: skip
    command += given_flags(parser, args, "sizes", "checkpoint_flags")
    record_results("trl_comparison", results, table, command, args.force)


if __name__ == "__main__":
    main()
