"""A GPU computes what a CPU computes. Each test runs on a CPU, too; those for a GPU alone: `pytest -m gpu`."""

import json
import warnings

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from llm_utils import distributed
from llm_utils.sampling import rollout, slots
from llm_utils.sampling.transformers_engine import TransformersEngine
from llm_utils.setup import loading
from llm_utils.training import forward

HAS_GPU = torch.cuda.is_available()
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="there is no GPU")]
BOTH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
EPISODES = [(i, 7 * i) for i in range(8)]


class Args:
    engine, lora_rank, gradient_checkpointing = "transformers", 4, "off"


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
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-3), (torch.bfloat16, 0.5)])
def test_a_merged_copy_samples_what_the_trainer_scores(
    adapted, policy_folder, make_envs, vocab_size, device, dtype, bound
):
    policy = adapted(device, dtype)
    merged = loading.load_policy(policy_folder, torch.device(device), whole=True, dtype=dtype)
    engine = TransformersEngine(merged, 4, vocab_size)
    rollout.rollout(make_envs(4), engine, EPISODES, 1)  # a GPU records forwards, whose weights then change in place
    engine.update(distributed.weights(policy), 1)
    rows = rollout.rollout(make_envs(4), engine, EPISODES, 1)
    scored = forward.score([([s for row in rows for s in row.segments()], 1)], policy, vocab_size, 1.0)
    gaps = np.concatenate([np.abs(scored[row.episode] - row.logprobs)[row.action_mask] for row in rows])
    assert gaps.mean() < bound / 10 and gaps.max() < bound


@BOTH
def test_a_recorded_forward_has_the_logits_of_one_that_is_asked_for(adapted, vocab_size, device, monkeypatch):
    rng, policy = np.random.default_rng(0), adapted(device)
    prompts = {slot: rng.integers(vocab_size, size=100 + 9 * slot) for slot in range(6)}
    tokens, seen = rng.integers(vocab_size, size=(60, 6)), []
    for devices in ((), ("cpu", "cuda")):
        monkeypatch.setattr(slots.SlotModel, "RECORDED", devices)
        model_slots = slots.SlotModel(policy, 6, vocab_size)
        for _ in model_slots.prefill(dict(prompts)):
            pass
        some = [np.arange(6) if step % 5 else np.array([1, 4]) for step in range(len(tokens))]
        seen.append([model_slots.decode(rows, row[rows]) for rows, row in zip(some, tokens, strict=True)])
    assert model_slots.replays and model_slots.graphs.newest  # something was recorded
    for asked, replayed in zip(*seen, strict=True):
        torch.testing.assert_close(asked, replayed, atol=1e-3, rtol=1e-4)


@BOTH
def test_a_forward_that_waits_for_the_gpu_is_not_recorded(small_model, vocab_size, device, monkeypatch):
    monkeypatch.setattr(slots.SlotModel, "RECORDED", ("cpu", "cuda"))
    config = small_model("llama").config
    config.rope_parameters |= {"rope_type": "dynamic", "factor": 2.0}
    model = AutoModelForCausalLM.from_config(config).eval().to(device)
    rows, model_slots, text = np.array([0]), slots.SlotModel(model, 1, vocab_size), list(range(100))
    stream = torch.cuda.current_stream() if device == "cuda" else None
    for _ in model_slots.prefill({0: np.array(text)}):
        pass
    for token in range(6):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logits = model_slots.decode(rows, np.array([token]))
        text.append(token)
        with torch.no_grad():
            expected = model(torch.tensor([text], device=device)).logits[0, -1, :vocab_size]
        torch.testing.assert_close(logits[0], expected, atol=1e-3, rtol=1e-3)
    assert model_slots.replays == (device == "cpu")  # there nothing waits
    assert stream is None or torch.cuda.current_stream() == stream


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
