"""cuDNN attention for long rows: where it is used, and that its padding changes nothing."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from ppo_llm import Critic
from torch.nn.attention import SDPBackend
from transformers import AttentionInterface
from transformers.integrations import sdpa_attention

from llm_utils.sampling.transformers_engine import TransformersEngine
from llm_utils.setup import loading, preflight
from llm_utils.training import cudnn_attention, forward

CPU = torch.device("cpu")


@pytest.fixture
def hopper(monkeypatch):
    """Take this device for one of compute capability 9.0. The registered attention is restored afterwards."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", sdpa_attention.sdpa_attention_forward)
    monkeypatch.setattr(cudnn_attention, "capability", lambda device: (9, 0))
    monkeypatch.setattr(cudnn_attention, "DTYPES", (torch.float32, torch.float64))  # a CPU is exact only in these
    cudnn_attention.register(CPU)


@pytest.fixture
def calls(monkeypatch):
    """The attention calls: columns of queries and keys, and whether cuDNN is the first choice."""
    seen, compute = [], torch.nn.functional.scaled_dot_product_attention

    def record(query, key, *args, **kwargs):
        first = torch._C._get_sdp_priority_order()[0] == int(SDPBackend.CUDNN_ATTENTION)
        seen.append((query.shape[2], key.shape[2], first))
        return compute(query, key, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    return seen


def rows_of(vocab_size, *lengths, trained=50):
    """Rows of random tokens; the last ones are trained."""
    rng = np.random.default_rng(0)
    return [
        SimpleNamespace(
            tokens=rng.integers(vocab_size, size=n, dtype=np.int32), prompt_length=n - trained, task_index=i,
            train_mask=np.arange(n) >= n - trained,
        )
        for i, n in enumerate(lengths)
    ]  # fmt: skip


def load(folder, checkpointing=True):
    args = SimpleNamespace(lora_rank=0, gradient_checkpointing="on" if checkpointing else "off")
    return loading.load_policy(folder, CPU, args, dtype=torch.float32).double()


def results(model, rows, vocab_size):
    logprobs, entropies = forward.policy_forward(model, rows, vocab_size, 1.0)
    logprobs.sum().backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return logprobs.detach(), entropies, flat


@pytest.mark.parametrize("checkpointing", [False, True])
def test_long_rows_are_padded_and_use_it_in_forward_and_recompute(
    policy_folder, vocab_size, request, calls, checkpointing
):
    model, rows = load(policy_folder, checkpointing), rows_of(vocab_size, 1900, 1700)
    times = 2 + 2 * checkpointing  # of the model's two layers
    before = torch._C._get_sdp_priority_order()
    plain = results(model, rows, vocab_size)
    assert calls == [(1900, 1900, False)] * times
    calls.clear()
    request.getfixturevalue("hopper")
    padded = results(model, rows, vocab_size)
    assert calls == [(2048, 2048, True)] * times
    assert torch._C._get_sdp_priority_order() == before
    for one, two in zip(plain, padded, strict=True):
        assert (one - two).abs().max() <= 1e-6 * one.abs().max()


def test_other_devices_and_short_rows_are_left_alone(policy_folder, vocab_size, hopper, calls, monkeypatch):
    model = load(policy_folder)
    results(model, rows_of(vocab_size, 1536), vocab_size)
    assert calls == [(1536, 1536, False)] * 4
    for other in ((8, 0), (10, 0), (12, 0), (0, 0)):
        calls.clear()
        monkeypatch.setattr(cudnn_attention, "capability", lambda device, other=other: other)
        monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", sdpa_attention.sdpa_attention_forward)
        model = load(policy_folder)
        results(model, rows_of(vocab_size, 2049), vocab_size)
        assert calls == [(2049, 2049, False)] * 4


def test_the_capability_of_a_cpu_is_none():
    assert cudnn_attention.capability(CPU) == (0, 0) and cudnn_attention.width(5000, "cpu") == 5000


def test_trees_and_windows_keep_their_masks(small_model, vocab_size, hopper, calls):
    rows = rows_of(vocab_size, *[2100] * 4, trained=9)
    for row in rows:
        row.tokens[:2091] = rows[0].tokens[:2091]
    with torch.no_grad():
        forward.policy_forward(small_model("qwen2"), rows, vocab_size, 1.0)
        forward.policy_forward(small_model("sliding window"), rows[:1], vocab_size, 1.0)
    assert calls == [(2127, 2127, False)] * 2 + [(2560, 2560, True), (2560, 2560, False)]


@pytest.mark.parametrize("reason", ["", "float32", "eager", "windows"])
def test_no_row_is_padded_that_cudnn_would_not_take(small_model, vocab_size, monkeypatch, reason):
    monkeypatch.setattr(cudnn_attention, "capability", lambda device: (9, 0))
    model = small_model("sliding window", "eager" if reason == "eager" else "sdpa")  # in one of two layers
    if reason == "windows":
        model.config.layer_types = ["sliding_attention"] * 2
    if reason != "float32":
        model.bfloat16()
    wide = cudnn_attention.widen(torch.zeros(1, 2100, dtype=torch.long), model)
    assert wide.shape[1] == (2100 if reason else 2560)


def test_no_row_is_padded_beyond_the_positions_of_its_model(small_model, vocab_size, hopper, calls):
    model = small_model("gpt2")  # a table of 4,096 positions
    model.config.n_positions = 2100
    with torch.no_grad():
        forward.policy_forward(model, rows_of(vocab_size, 2050), vocab_size, 1.0)
    assert calls == [(2050, 2050, False)] * 2


def test_a_sampler_never_uses_it(policy_folder, vocab_size, hopper, calls):
    engine = TransformersEngine(load(policy_folder), 2, vocab_size)
    rng = np.random.default_rng(0)
    for slot, size in enumerate((2048, 2040)):
        engine.feed(slot, rng.integers(vocab_size, size=size).astype(np.int32), 3, [vocab_size], seed=[slot])
    while engine.busy:
        engine.step()
    assert any(queries == 2048 for queries, *_ in calls) and any(queries < 3 for queries, *_ in calls)
    assert not any(first for *_, first in calls)


def test_a_critic_uses_it_too(policy_folder, vocab_size, request, calls):
    args = SimpleNamespace(gradient_checkpointing="on")
    critic = Critic(policy_folder, args, torch.float32).eval()
    critic.backbone.double()
    critic.head.weight.data.normal_()
    ids = forward.pad([row.tokens for row in rows_of(vocab_size, 1900, 1700)])
    plain = critic(ids)
    calls.clear()
    request.getfixturevalue("hopper")
    values = critic(ids)
    values.sum().backward()
    assert calls == [(2048, 2048, True)] * 4
    assert values.shape == plain.shape == (2, 1900)
    assert (values - plain).abs().max() <= 1e-6 * plain.abs().max()


def test_a_critic_is_made_without_a_report_of_the_unused_head(small_model, tmp_path, monkeypatch):
    small_model("qwen2").save_pretrained(tmp_path)
    said, log = [], transformers.logging.get_logger("transformers.modeling_utils")
    monkeypatch.setattr(log, "callHandlers", lambda record: said.append(record.getMessage()))
    Critic(tmp_path, SimpleNamespace(gradient_checkpointing="off"), torch.float32)
    assert not said


def test_a_microbatch_counts_the_padding(vocab_size, hopper):
    rows = rows_of(vocab_size, *[2100] * 12)
    assert [len(batch) for batch in forward.microbatches(rows, 8400, CPU)] == [3] * 4
    assert [len(batch) for batch in forward.microbatches(rows, 8400, "cuda")] == [3] * 4


def test_the_measured_microbatch_is_padded(policy_folder, vocab_size, hopper, calls, monkeypatch):
    monkeypatch.setattr(preflight, "resident_bytes", lambda name: 0)
    monkeypatch.setattr(preflight.Path, "write_text", lambda *args: None)
    sizes = []
    model = load(policy_folder, checkpointing=False)
    model.get_input_embeddings().register_forward_hook(lambda _, inputs, __: sizes.append(tuple(inputs[0].shape)))
    preflight.measure(model, 4200, 2100, vocab_size)
    assert sizes == [(1, 2560)] and calls == [(2560, 2560, True)] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_gives_the_same_with_and_without_it(policy_folder, vocab_size, monkeypatch):
    model = load(policy_folder).to("cuda", torch.bfloat16)
    rows, found = rows_of(vocab_size, 2100, 1700), []
    for shortest in (cudnn_attention.SHORTEST, 10**9):
        monkeypatch.setattr(cudnn_attention, "SHORTEST", shortest)
        found.append(results(model, rows, vocab_size))
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert (found[0][0] - found[1][0]).abs().mean() < 0.05
    assert (found[0][2] - found[1][2]).norm() < 0.2 * found[1][2].norm()
