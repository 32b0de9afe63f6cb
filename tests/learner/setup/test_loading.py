"""Loaded policies: adapters, weights to resume from, gradient checkpointing, extras that are missing."""

import sys
from types import SimpleNamespace

import pytest
import torch
import transformers

from llm_utils import distributed
from llm_utils.recovery import checkpoint
from llm_utils.sampling.make_engine import make_engine
from llm_utils.setup import loading
from llm_utils.training import forward, optimizer

CPU = torch.device("cpu")


def load(folder, lora_rank=0, gradient_checkpointing="off", **kwargs):
    args = SimpleNamespace(lora_rank=lora_rank, gradient_checkpointing=gradient_checkpointing)
    return loading.load_policy(folder, CPU, args, **kwargs)


def gradients(model, rows, vocab_size):
    """The log-probabilities of the rows, and the gradient of their sum by name."""
    logprobs, _ = forward.policy_forward(model, rows, vocab_size, 1.0)
    logprobs.sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return logprobs.detach(), found


@pytest.fixture
def adapted(policy_folder):
    """A policy with adapters that are no longer zero."""
    pytest.importorskip("peft")
    model = load(policy_folder, lora_rank=2)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(p, std=0.3)
    return model


def test_only_adapters_are_trained(adapted, made_up_rows, vocab_size):
    _, found = gradients(adapted, made_up_rows(), vocab_size)
    assert found and all(".lora_" in name for name in found)
    adam = optimizer.Float32AdamW([adapted], [1e-3], betas=(0.9, 0.95))
    assert sum(map(len, adam.weights)) == len(found)


def test_merged_weights_are_those_of_the_policy_which_stays_as_it_is(adapted, policy_folder, made_up_rows, vocab_size):
    rows = made_up_rows()
    before = {name: x.clone() for name, x in adapted.state_dict().items()}
    plain = load(policy_folder)
    own = dict(plain.named_parameters())
    with torch.no_grad():
        for name, weight in distributed.weights(adapted):
            own.pop(name).copy_(weight)
    assert not own
    torch.testing.assert_close(
        gradients(plain, rows, vocab_size)[0], gradients(adapted, rows, vocab_size)[0], atol=1e-4, rtol=1e-4
    )
    assert all((before[name] == x).all() for name, x in adapted.state_dict().items())  # to the bit
    plain_too = load(policy_folder)
    assert {name for name, _ in distributed.weights(plain_too)} == {name for name, _ in plain_too.named_parameters()}


def test_a_policy_is_resumed_from_weights_or_adapters(adapted, policy_folder, tmp_path):
    checkpoint.save_policy(adapted, tmp_path / "adapters", distributed.collect_state(adapted))
    again = load(policy_folder, lora_rank=2, resumed=tmp_path / "adapters")
    for name, x in adapted.state_dict().items():
        assert (again.state_dict()[name] == x).all()
    assert {n for n, p in again.named_parameters() if p.requires_grad} == {
        n for n, p in adapted.named_parameters() if p.requires_grad
    }
    plain = load(policy_folder)
    with torch.no_grad():
        plain.get_input_embeddings().weight.add_(1)
    checkpoint.save_policy(plain, tmp_path / "weights", distributed.collect_state(plain))
    again = load(policy_folder, resumed=tmp_path / "weights")
    assert (again.get_input_embeddings().weight == plain.get_input_embeddings().weight).all()


def test_adapters_have_the_dtype_of_their_model(policy_folder, made_up_rows, vocab_size, tmp_path):
    pytest.importorskip("peft")
    model = load(policy_folder, lora_rank=2, dtype=torch.bfloat16)
    _, found = gradients(model, made_up_rows(), vocab_size)
    assert {gradient.dtype for gradient in found.values()} == {torch.bfloat16}
    model.save_pretrained(tmp_path / "adapters")
    again = load(policy_folder, lora_rank=2, resumed=tmp_path / "adapters", dtype=torch.bfloat16)
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    for name, x in model.state_dict().items():
        assert (again.state_dict()[name] == x).all()


def test_a_checkpoint_of_another_shape_is_refused(adapted, small_model, policy_folder, tmp_path):
    small_model("llama").save_pretrained(tmp_path / "llama")
    other = small_model("qwen2")
    other.resize_token_embeddings(50)
    other.save_pretrained(tmp_path / "short")
    adapted.save_pretrained(tmp_path / "adapters")
    with pytest.raises(SystemExit, match="does not fit this model"):
        load(policy_folder, resumed=tmp_path / "short")
    with pytest.raises(SystemExit, match="does not fit this model"):
        load(tmp_path / "llama", lora_rank=2, resumed=tmp_path / "adapters")


def test_without_peft_the_extra_is_named(policy_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(SystemExit, match=r"pip install 'agent-r1\[lora\]'"):
        load(policy_folder, lora_rank=2)


def test_without_httpx_the_extra_is_named(monkeypatch):
    for name in ("httpx", "llm_utils.sampling.vllm_client", "llm_utils.sampling.vllm_replies"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "httpx", None)
    args = SimpleNamespace(engine="vllm-server", temperature=1.0, top_p=1.0)
    with pytest.raises(SystemExit, match=r"--engine vllm-server needs httpx: pip install 'agent-r1\[http\]'"):
        make_engine(args, "any", 10, None, None)


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_gradient_checkpointing_changes_no_gradient(policy_folder, made_up_rows, vocab_size, lora_rank):
    if lora_rank:
        pytest.importorskip("peft")
    rows, results, calls = made_up_rows(), [], []
    for checkpointing in ("off", "on"):
        torch.manual_seed(0)
        model = load(policy_folder, lora_rank, checkpointing)
        layer = model.get_submodule("base_model.model.model.layers.1" if lora_rank else "model.layers.1")
        layer.self_attn.register_forward_hook(lambda *_, now=checkpointing: calls.append(now))
        with torch.no_grad():
            for name, p in model.named_parameters():
                if ".lora_B." in name:
                    torch.nn.init.normal_(p, std=0.3)
        results.append(gradients(model, rows, vocab_size))
    (plain, expected), (checkpointed, found) = results
    assert calls.count("off") == 1 and calls.count("on") == 2  # forward, and again in the backward pass
    torch.testing.assert_close(plain, checkpointed, atol=1e-5, rtol=1e-5)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert (gradient - found[name]).norm() <= 1e-5 * gradient.norm(), name


def test_there_is_no_dropout_under_gradient_checkpointing(tmp_path, made_up_rows, vocab_size):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=vocab_size, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.5, attn_pdrop=0.5)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    rows = made_up_rows()
    with torch.no_grad():
        plain, checkpointed = (
            forward.policy_forward(load(tmp_path, 0, on), rows, vocab_size, 1.0)[0]
            for on in ("off", "on")
        )
    torch.testing.assert_close(plain, checkpointed, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe", "Qwen3Next"])
def test_adapters_of_experts_are_merged_for_a_sampler(kind):
    config = getattr(transformers, kind + "Config")(
        vocab_size=60, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts=4, num_experts_per_tok=2,
        shared_expert_intermediate_size=24, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    sampler = transformers.AutoModelForCausalLM.from_config(config).eval()
    policy = loading.with_adapters(transformers.AutoModelForCausalLM.from_config(config), 2).eval()
    adapters = {name: p for name, p in policy.named_parameters() if "lora_" in name}
    assert any(".experts." in name for name in adapters)
    with torch.no_grad():
        for parameter in adapters.values():
            torch.nn.init.normal_(parameter, std=0.3)
        sampler.load_state_dict(dict(distributed.weights(policy)), strict=True)
        ids = torch.arange(3, 43)[None]
        logits = [model(ids, use_cache=False).logits for model in (sampler, policy)]
        torch.testing.assert_close(*logits, atol=1e-4, rtol=0)
