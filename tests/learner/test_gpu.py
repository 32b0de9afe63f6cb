"""A GPU computes what a CPU computes; and where adapters are trained there, the engine samples from a copy.

The tests with `cpu` in their names run everywhere, the others need a GPU: `pytest -m gpu tests/learner/test_gpu.py`.
"""

import json

import grpo_llm
import numpy as np
import pytest
import torch

from llm_utils import distributed, forward, loading, make_engine, preflight, rollout, run
from llm_utils.transformers_engine import TransformersEngine

HAS_GPU = torch.cuda.is_available()
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="there is no GPU")]
BOTH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
EPISODES = [(i, 7 * i) for i in range(8)]


class Args:
    engine, lora_rank, gradient_checkpointing = "transformers", 4, False


@pytest.fixture
def adapted(policy_folder):
    """adapted(device): a policy with adapters that change what it says."""
    pytest.importorskip("peft")

    def make(device, dtype=torch.float32):
        policy = loading.load_policy(policy_folder, torch.device(device), Args, dtype=dtype)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, weight in policy.named_parameters():
                if ".lora_B" in name:
                    weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
        return policy

    return make


@BOTH
def test_a_copy_with_the_adapters_added_samples_what_the_policy_would(
    adapted, policy_folder, make_envs, vocab_size, device
):
    policy, envs = adapted(device), make_envs(4)
    copy = loading.load_policy(policy_folder, torch.device(device), whole=True, dtype=torch.float32)
    engine = TransformersEngine(copy, 4, vocab_size)
    gaps = []
    for version in range(2):  # what it samples before it is given the weights is another policy's
        rows = rollout.rollout(envs, engine, EPISODES, 1)
        forward.score([([s for row in rows for s in row.segments()], 1)], "ref_logprobs", policy, vocab_size, 1.0)
        gaps.append(max(np.abs((row.ref_logprobs - row.logprobs)[row.action_mask]).max() for row in rows))
        engine.update(distributed.weights(policy), version + 1)
    assert gaps[0] > 0.1 and gaps[1] < 1e-3


@BOTH
def test_rows_and_trees_of_rows_have_the_gradients_of_a_cpu(policy_folder, made_up_rows, vocab_size, device):
    def gradients(device, rows, together):
        model = loading.load_policy(policy_folder, torch.device(device), whole=True, dtype=torch.float32)
        for row in rows:
            row.train_mask = row.action_mask
        for batch in [rows] if together else [[row] for row in rows]:
            forward.policy_forward(model, batch, vocab_size, 0.7)[0].sum().backward()
        return torch.cat([p.grad.flatten().cpu() for p in model.parameters()])

    groups = made_up_rows(groups=3, size=4)
    expected = gradients("cpu", groups, together=False)
    for together in (False, True):
        got = gradients(device, groups, together)
        assert device == "cpu" or not torch.backends.cuda.cudnn_sdp_enabled()
        assert (got - expected).norm() / expected.norm() < 1e-4


def test_on_a_gpu_adapters_are_sampled_from_a_copy_of_which_the_preflight_knows(monkeypatch, policy_folder):
    cases = {("cuda", 4, 1): False, ("cuda", 0, 1): True, ("cpu", 4, 1): True, ("cpu", 0, 2): False}
    for (device, rank, world_size), expected in cases.items():
        args = type("Some", (Args,), {"lora_rank": rank, "num_envs": 4, "microbatch_tokens": 64, "memory_gb": 80})
        assert make_engine.samples_in_place(args, torch.device(device), world_size) == expected
        report = preflight.preflight(
            args, policy_folder, torch.device(device), critic=False, reference=False, longest_row=64,
            world_size=world_size,
        )  # fmt: skip
        assert any("sampler" in part.name for part in report.parts) != expected


@pytest.mark.parametrize(("rank", "chosen"), [(0, "sampler"), (4, "trainer")])
def test_a_copy_on_a_gpu_is_not_the_trainers_program(monkeypatch, rank, chosen):
    """In float32, too: adapters that are added to the weights round them."""
    monkeypatch.setattr(run.distributed, "device", lambda cuda: torch.device("cuda"))
    args = grpo_llm.Args(dtype="float32", lora_rank=rank)
    run.fill_defaults(args)
    assert args.old_logprobs == chosen


@BOTH
def test_a_run_with_adapters_goes_on_from_its_checkpoint(learn, device):
    pytest.importorskip("peft")
    flags = ["--env-kwargs", json.dumps({"max_turns": 2, "max_action_tokens": 10}), "--num-threads", 1]
    flags += ["--num-envs", 16, "--episodes-per-iteration", 16, "--group-size", 4, "--num-minibatches", 2]
    flags += ["--eval-episodes", 4, "--lora-rank", 2, "--learning-rate", 1e-2, "--checkpoint-every", 1, "--save-model"]
    flags += ["--no-cuda"] if device == "cpu" else []
    run_dir = learn("grpo_llm", *flags, "--total-episodes", 32)
    learn("grpo_llm", "--resume", run_dir, "--total-episodes", 48)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["finished"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir)).Reload()
    assert len(events.Scalars("charts/episodes")) == 3
    assert ("memory/peak_gb" in events.Tags()["scalars"]) == (device == "cuda")
    bound = {"cuda": 0.1, "cpu": 1e-4}[device]  # bf16 there, float32 here
    assert all(0 <= event.value < bound for event in events.Scalars("sampler/gap_mean"))
