"""A tiny random policy, the real environment with the byte tokenizer, and rows that are made up."""

import math
import os
import resource
import runpy
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import transformers
from rows import make_row, one_thread  # noqa: F401  (fixtures)

import agent_r1  # noqa: F401  (registers the environments)
from llm_utils.run import Run
from llm_utils.training.forward import score

ROOT = Path(__file__).parents[2]
ENV_ID = "AgentR1/MultihopWorld-v0"
ENV_KWARGS = {"max_turns": 3, "max_action_tokens": 12}


@pytest.fixture(scope="session")
def vocab_size() -> int:
    return gym.make(ENV_ID).action_space.vocab_size


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory, vocab_size) -> Path:
    """A Qwen2 of about 30k parameters with grouped-query attention and 7 embedding rows that no token uses."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=vocab_size + 7,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("policy")
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def policy(policy_folder):
    return transformers.AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def small_model(vocab_size):
    """small_model(kind, attention): a random model of another architecture."""

    def make(kind, attention="sdpa"):
        torch.manual_seed(0)
        size = {"vocab_size": vocab_size, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        size |= {"num_attention_heads": 4, "max_position_embeddings": 32_768, "initializer_range": 0.3}
        if kind == "gpt2":
            config = transformers.GPT2Config(vocab_size=vocab_size, n_embd=32, n_layer=2, n_head=4, n_positions=4096)
        elif kind == "gemma2":  # its logits are capped after the head
            config = transformers.Gemma2Config(**size, num_key_value_heads=2, head_dim=8)
            config.layer_types, attention = ["full_attention"] * 2, "eager"
        elif kind == "qwen3":
            config = transformers.Qwen3Config(**size, num_key_value_heads=2, head_dim=16)
        elif kind == "llama":
            config = transformers.LlamaConfig(**size, num_key_value_heads=1)
        elif kind == "granite":  # it scales its logits, attention and residuals
            config = transformers.GraniteConfig(**size, num_key_value_heads=2, attention_multiplier=0.3)
            config.logits_scaling, config.residual_multiplier = 2.0, 0.8
        elif kind == "sliding window":  # in its second layer
            size |= {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
            config = transformers.Qwen2Config(**size, num_key_value_heads=2)
        else:
            config = transformers.Qwen2Config(**size, num_key_value_heads=2)
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).float().eval()

    return make


@pytest.fixture
def make_envs():
    """make_envs(n): n episodes of MultihopWorld with the byte tokenizer."""
    made = []

    def make(num_envs, **kwargs):
        kwargs = {"observation": "new", "tokenizer": None, **ENV_KWARGS, **kwargs}
        made.append(gym.make_vec(ENV_ID, num_envs=num_envs, **kwargs))
        return made[-1]

    yield make
    for envs in made:
        envs.close()


@pytest.fixture(scope="session")
def made_up_rows(make_row, vocab_size):  # noqa: F811
    """made_up_rows(groups, size): episodes of random tokens and lengths, a group with the same prompt side by side.

    Log-probabilities, advantages and so on are made up too, also where tools wrote.
    """

    def make(groups=3, size=4, seed=0, turns=3, prompts=(4, 20)):
        rng, rows = np.random.default_rng(seed), []
        for task in range(groups):
            prompt = rng.integers(vocab_size, size=int(rng.integers(*prompts)), dtype=np.int32)
            for _ in range(size):
                spans, at = [], len(prompt)
                for _ in range(int(rng.integers(1, turns + 1))):
                    end = at + int(rng.integers(1, 9))
                    spans.append((at, end, rng.normal()))
                    at = end + int(rng.integers(1, 12))
                length = at if rng.random() < 0.5 else spans[-1][1]
                tokens = np.concatenate([prompt, rng.integers(vocab_size, size=length - len(prompt), dtype=np.int32)])
                logprobs = rng.normal(-5, 0.2, size=length).astype(np.float32)
                row = make_row(spans, length, len(prompt), task, tokens, logprobs, episode=len(rows))
                for name in ("old_logprobs", "ref_logprobs"):
                    setattr(row, name, logprobs + rng.normal(0, 0.3, size=length).astype(np.float32))
                for name in ("advantages", "returns", "values"):
                    setattr(row, name, rng.normal(size=length).astype(np.float32))
                row.stats["return"] = sum(reward for _, _, reward in spans)
                rows.append(row)
        return rows

    return make


@pytest.fixture(scope="session")
def as_run(vocab_size):
    """as_run(args, policy, critic, size): what `backward` needs of a run, in one process."""

    def make(args, policy, critic=None, size=vocab_size):
        names = {name: None for name in Run.__dataclass_fields__}
        names |= {"args": args, "policy": policy, "critic": critic, "device": policy.device}
        rows = len(policy.get_input_embeddings().weight)  # a model may have fewer than the byte tokenizer has tokens
        names |= {"vocab_size": min(rows, size), "played": [], "metrics": [], "seconds": {}}
        return Run(**names)

    return make


def slow_loss(model, rows, args, vocab_size):
    """The loss, one row and one token after the other."""
    row_losses, row_lengths, span = [], [], args.ratio
    for row in rows:
        ids = torch.from_numpy(row.tokens).long()
        logits = model(input_ids=ids[None]).logits[0, :, :vocab_size].float() / args.temperature
        logprobs = torch.log_softmax(logits, -1)[:-1]
        new, entropy = logprobs.gather(1, ids[1:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)
        tokens = [t for t in range(row.prompt_length, len(ids)) if row.action_mask[t] or not args.loss_mask]
        segments = {}
        for t in tokens:
            turn = max([0] + [k for k, other in enumerate(row.turns) if t >= other.start])
            segments.setdefault({"token": t, "turn": turn, "sequence": 0}[span], []).append(t)
        losses = []
        for segment in segments.values():
            mean = sum(new[t - 1].item() - float(row.old_logprobs[t]) for t in segment) / len(segment)
            for t in segment:
                ratio = math.exp(mean) * torch.exp(new[t - 1] - new[t - 1].detach())
                clipped = torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef_high)
                advantage = float(row.advantages[t])
                loss = -torch.minimum(ratio * advantage, clipped * advantage)
                if advantage < 0 and args.dual_clip:
                    loss = torch.clamp(loss, max=-args.dual_clip * advantage)
                if row.action_mask[t]:
                    loss = loss * min(math.exp(row.old_logprobs[t] - row.logprobs[t]), args.importance_cap)
                loss = loss - args.ent_coef * entropy[t - 1]
                if args.kl_coef and args.kl_in == "loss":
                    x = new[t - 1] - float(row.ref_logprobs[t])
                    kl = {"k1": x, "k2": x**2 / 2, "k3": torch.exp(-x) - 1 + x}[args.kl_estimator]
                    loss = loss + args.kl_coef * kl
                losses.append(loss)
        row_losses.append(sum(losses, torch.zeros(())))
        row_lengths.append(len(losses))
    if args.loss_aggregation == "token":
        return sum(row_losses) / sum(row_lengths)
    if args.loss_aggregation == "sequence":
        return sum(loss / n for loss, n in zip(row_losses, row_lengths, strict=True)) / len(rows)
    return sum(row_losses) / len(rows) / args.constant_length


def gradient_of(model):
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return flat


@pytest.fixture
def compare_with_loops(small_model, made_up_rows, vocab_size, as_run):
    """compare_with_loops(script, **arguments): the loss and the gradient of a learner without a critic."""

    def compare(script, **case):
        model, rows = small_model("qwen2"), made_up_rows(groups=3, size=3)
        with torch.no_grad():  # ratios near 1, some of them clipped
            for row in rows:
                row.train_mask = row.after_prompt()
                scored = score([(row.segments(), 1)], model, vocab_size, case.get("temperature", 1.0))
                row.logprobs[row.train_mask] = scored[row.episode][row.train_mask]
        rng = np.random.default_rng(0)
        for row in rows:
            for name in ("old_logprobs", "ref_logprobs"):
                setattr(row, name, row.logprobs + rng.normal(0, 0.2, size=len(row.tokens)).astype(np.float32))
            row.logprobs[~row.action_mask] = 0  # the sampler has none there
            row.train_mask = row.action_mask if case.get("loss_mask", True) else row.after_prompt()
        args = script.Args(constant_length=30, group_size=3, **case)
        loss = slow_loss(model, rows, args, vocab_size)
        loss.backward()
        expected = gradient_of(model)
        for budget in (10**6, 120, 1):
            cut = replace(args, microbatch_tokens=budget)
            logs = script.backward(rows, cut, as_run(cut, model))
            got = gradient_of(model)
            assert (got - expected).norm() / expected.norm() < 1e-5
            if not case.get("kl_coef") and not case.get("ent_coef"):
                assert logs["policy_loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)

    return compare


@pytest.fixture
def learn(monkeypatch, tmp_path):
    """learn(script, *arguments): run a learner in this process, in an empty folder; returns the newest run's folder."""
    monkeypatch.chdir(tmp_path)

    def run(script, *arguments):
        path = ROOT / "learner" / f"{script}.py"
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        try:
            runpy.run_path(str(path), run_name="__main__")
        finally:
            torch.use_deterministic_algorithms(False)
        return max(Path("runs").iterdir(), key=lambda folder: folder.stat().st_mtime)

    return run


@pytest.fixture
def claimed():
    """with claimed(folder): another process is at work in it, and ends with the block."""

    @contextmanager
    def hold(folder):
        script = "import sys; from pathlib import Path; from llm_utils.records import run_files\n"
        script += "run_files.claim(Path(sys.argv[1])); print('ready', flush=True); sys.stdin.read()"
        command, pipes = [sys.executable, "-c", script, folder], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, cwd=ROOT / "learner", **pipes) as process:
            assert process.stdout.readline() == b"ready\n"
            yield
            process.communicate()
        assert process.returncode == 0

    return hold


@pytest.fixture
def full_disk():
    """full_disk(size): files can't grow beyond it; the error comes from the kernel, in the middle of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def environment_of_scripts():
    """Environment variables for a learner that runs as a process of its own."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}
