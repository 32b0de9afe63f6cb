"""vLLM in the trainer's process on one GPU: does it sample from the trained policy, and how fast?

    python benchmarks/performance/vllm_gpu.py  # about ten minutes; needs pip install -e ".[vllm,lora]"
    python benchmarks/performance/vllm_gpu.py --device cpu  # a rehearsal with a tiny model: nothing is recorded

Every step is a process of its own with a time limit. A step that fails is named, and the others still run.

`engine MODEL` builds vLLM beside a trainer's copy of a model with random weights. A gap is the difference between the
log-probabilities that vLLM reports and those of the trainer's forward. It is measured for the first weights, after an
update, after an update in the middle of spans, and after sleep and wake. Two runs with equal seeds show how many of
their tokens are equal. A token of all rows is timed over 48 tokens that follow 512 others; the time without them is
that of 8 tokens, subtracted. The learner steps train the default job of GRPO, with vLLM, with transformers, and with
vLLM, LoRA and weights that are one iteration old.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks" / "common"), str(ROOT / "learner")]
from gpu import MODELS, PROMPT, WARM, WRITTEN, wait
from machine import from_0, from_1, given_flags, record_results, require_quiet_machine
from transformers import AutoModelForCausalLM

from llm_utils import distributed
from llm_utils.sampling.engine import Span
from llm_utils.sampling.vllm_engine import VLLMEngine

LEARN = {
    "GRPO, vllm": ["--engine", "vllm"],
    "GRPO, transformers": ["--engine", "transformers"],
    "GRPO, vllm, LoRA 8, staleness 1": ["--engine", "vllm", "--lora-rank", "8", "--max-staleness", "1"],
}
SHORT = "--num-envs 8 --episodes-per-iteration 16 --group-size 4 --num-minibatches 2 --eval-episodes 8 --num-threads 1"
LIMITS = {"engine": 240, "GRPO": 180}  # seconds of a step
CHECKED = 16  # rows whose log-probabilities are compared


class Trial:
    """A trainer's model and vLLM with a copy of its weights."""

    def __init__(self, folder: str, rows: int, device: torch.device) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.device = device
        self.policy = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
        self.vocab_size = self.policy.config.vocab_size
        self.engine = VLLMEngine(folder, rows, self.vocab_size, max_model_len=2 * PROMPT)
        self.version = 0

    def update(self) -> None:
        """Send the trainer's weights under the next version."""
        self.version += 1
        self.engine.update(distributed.weights(self.policy), self.version)

    def feed(self, rows: int, length: int, tokens: int, seed: int) -> dict[int, np.ndarray]:
        """Start `rows` spans of `tokens` tokens after random prompts of `length` tokens. Return the prompts."""
        rng = np.random.default_rng(seed)
        prompts = {slot: rng.integers(self.vocab_size, size=length).astype(np.int32) for slot in range(rows)}
        for slot, prompt in prompts.items():
            self.engine.feed(slot, prompt, tokens, [], seed=[seed, slot])
        return prompts

    def finish(self) -> list[Span]:
        """Sample until no span is left."""
        spans: list[Span] = []
        while self.engine.busy:
            spans += self.engine.step()
        return spans

    def play(self, rows: int, tokens: int = 32, seed: int = 0) -> tuple[float, dict[str, Any], list[Span]]:
        """Return the seconds, the gap and the spans of `rows` rows."""
        wait(self.device)
        began = time.perf_counter()
        prompts = self.feed(rows, PROMPT, tokens, seed)
        spans = self.finish()
        wait(self.device)
        return time.perf_counter() - began, self.gap(prompts, spans), spans

    @torch.no_grad()
    def gap(self, prompts: dict[int, np.ndarray], spans: list[Span]) -> dict[str, Any]:
        """Return the mean and the largest gap, and the versions of all tokens."""
        gaps = []
        for span in spans[:CHECKED]:
            row = torch.tensor(np.concatenate([prompts[span.slot], span.tokens]), device=self.device).long()
            logits = self.policy(row[None]).logits[0, -len(span.tokens) - 1 : -1].float()
            ours = logits.log_softmax(-1).gather(1, row[-len(span.tokens) :, None])[:, 0].cpu().numpy()
            gaps.append(np.abs(ours - span.logprobs))
        versions = sorted({int(version) for span in spans for version in span.versions})
        return {"mean": float(np.mean(np.concatenate(gaps))), "max": float(np.max(gaps)), "versions": versions}


def engine_step(model: str, rows: list[int], device: torch.device) -> dict[str, Any]:
    """Measure gaps, seconds and memory of vLLM with a model of `MODELS`."""
    results: dict[str, Any] = {}

    def say(name: str, value: Any) -> None:
        results[name] = value
        print(f"  [{time.perf_counter() - began:5.0f} s] {name}: {value}", flush=True)

    def free_gb() -> float:
        return torch.cuda.mem_get_info()[0] / 1e9 if device.type == "cuda" else 0.0

    began = time.perf_counter()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        config = MODELS[model]()
        config.initializer_range = 0.04  # flat distributions would hide a gap
        with torch.device(device):
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        trial = Trial(folder, max(rows), device)
    few = min(rows)
    say("seconds until vLLM is built", time.perf_counter() - began)
    say("gap, first weights", trial.play(few)[1])
    for count in rows:
        trial.play(count, WARM + WRITTEN, seed=1)  # with new prompts each time, as vLLM keeps those it has read
        short, long = (trial.play(count, tokens, seed)[0] for tokens, seed in ((WARM, 2), (WARM + WRITTEN, 3)))
        say(f"ms a token, {count} rows", 1000 * (long - short) / WRITTEN)
        say(f"tokens/s, {count} rows", count * WRITTEN / (long - short))
    with torch.no_grad():
        for parameter in trial.policy.parameters():
            size = 0.02 * parameter.float().std().nan_to_num(0).to(parameter.dtype)
            parameter.add_(torch.randn_like(parameter) * size)
    wait(device)
    start = time.perf_counter()
    trial.update()
    wait(device)
    say("seconds of an update", time.perf_counter() - start)
    say("gap, after an update", trial.play(few, seed=4)[1])
    prompts = trial.feed(min(few, CHECKED), 100, 40, seed=5)
    spans = [span for _ in range(12) for span in trial.engine.step()]
    trial.update()  # with equal weights, so that one forward gives the log-probabilities of both versions
    say("gap, an update in mid-span", trial.gap(prompts, spans + trial.finish()))
    one, two = ({s.slot: s.tokens for s in trial.play(few, seed=6)[2]} for _ in range(2))
    say("equal tokens of equal seeds, %", 100 * float(np.mean([(one[slot] == two[slot]).mean() for slot in one])))
    awake = free_gb()
    trial.engine.release()
    say("GB freed by sleep", free_gb() - awake)
    start = time.perf_counter()
    trial.update()
    say("seconds of wake and update", time.perf_counter() - start)
    say("gap, after sleep", trial.play(few, seed=7)[1])
    trial.engine.close()
    return results


def learn_step(name: str, episodes: int, seed: int, device: torch.device) -> dict[str, Any]:
    """Train GRPO's default job. Return its success, the seconds of an iteration, and the largest gap."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    command = [sys.executable, str(ROOT / "learner" / "grpo_llm.py"), *LEARN[name], "--seed", str(seed)]
    command += ["--total-episodes", str(episodes), *(SHORT.split() if device.type == "cpu" else [])]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(command, cwd=folder, check=True)
        (run,) = Path(folder).glob("runs/*")
        summary = json.loads((run / "summary.json").read_text())
        events = EventAccumulator(str(run)).Reload()
        series = {tag: [event.value for event in events.Scalars(tag)] for tag in ("time/rollout", "sampler/gap_max")}
    return {
        "success, first": summary["eval/success_first"],
        "success, last": summary["eval/success_last"],
        "seconds of an iteration": summary["train_seconds"] / len(series["time/rollout"]),
        "of them sampling": float(np.mean(series["time/rollout"][1:] or series["time/rollout"])),  # the first builds
        "gap, largest": max(series["sampler/gap_max"]),
    }


def table(results: dict[str, Any]) -> str:
    """Return all measurements as a table, a row for each."""
    lines = ["| step | measured | |", "|---|---|---|"]
    for step, found in results.items():
        for name, value in found.items():
            if isinstance(value, dict):
                value = f"mean {value['mean']:.2g}, max {value['max']:.2g}, versions {value['versions']}"
            lines.append(f"| {step} | {name} | {value if isinstance(value, str) else f'{value:.4g}'} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["SmolLM2-135M", "Qwen3-0.6B"])
    parser.add_argument("--rows", nargs="+", type=from_1, default=[64, 256], help="that write at the same time")
    parser.add_argument("--episodes", type=from_1, default=2_560, help="of each learner")
    parser.add_argument("--seed", type=from_0, default=1, help="of each learner")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a rehearsal with small defaults")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    parser.add_argument("--step", nargs=2, help=argparse.SUPPRESS)  # in a child process: a step, and its file
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.step:
        step, file = options.step
        kind, _, model = step.partition(" ")
        if kind == "engine":
            found = engine_step(model, options.rows, device)
        else:
            found = learn_step(step, options.episodes, options.seed, device)
        Path(file).write_text(json.dumps(found))
        return
    if device.type == "cpu":
        options.models, options.rows, options.episodes = ["tiny"], [2, 4], 32
    elif not torch.cuda.is_available():
        parser.error("torch finds no GPU here; --device cpu runs the same program")
    else:
        require_quiet_machine(options.force)
    names = ("models", "rows", "episodes", "seed")
    results: dict[str, Any] = {}
    failed = []
    for step in [*(f"engine {model}" for model in options.models), *LEARN]:
        limit = next(seconds for kind, seconds in LIMITS.items() if step.startswith(kind))
        print(f"{step}, at most {limit} s", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "found.json"
            words = [word for name in names for word in (f"--{name}", *map(str, _as_list(getattr(options, name))))]
            command = [sys.executable, __file__, "--device", options.device, *words, "--step", step, str(file)]
            try:
                subprocess.run(command, timeout=limit, check=True)
                results[step] = json.loads(file.read_text())
            except (subprocess.SubprocessError, OSError, ValueError) as error:
                failed.append(step)
                print(f"{step} failed: {error}", file=sys.stderr)
    print(table(results))
    if device.type == "cuda" and results:
        command = "python benchmarks/performance/vllm_gpu.py" + given_flags(parser, options, *names)
        record_results("vllm_gpu", results, table(results), command, options.force)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


if __name__ == "__main__":
    main()
