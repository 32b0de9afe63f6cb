"""LoRA layers with a forward of their own compute what peft's compute, and leave the rest to peft."""

import copy

import pytest
import torch

from llm_utils.setup.loading import enable_gradient_checkpointing, with_adapters
from llm_utils.training import forward

peft = pytest.importorskip("peft")
from llm_utils.setup.lora import FusedLinear, fuse_adapters  # noqa: E402

Linear = peft.tuners.lora.Linear


def adapted(model, **config):
    """The model with adapters that are no longer zero."""
    if config:
        model = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules="all-linear", **config))
        fuse_adapters(model)
    else:
        model = with_adapters(model, 3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_" in name:
                weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
    return model


def count(model, kind):
    return sum(type(module) is kind for module in model.modules())


def of_peft(model):
    """The same model with peft's forward."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if type(module) is FusedLinear:
            module.__class__ = Linear
    return model


def layer(bias=True, dtype=torch.float32):
    torch.manual_seed(0)
    return adapted(torch.nn.Sequential(torch.nn.Linear(12, 20, bias=bias)), lora_alpha=7).base_model.model[0].to(dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("shape", [(5, 12), (2, 3, 12), (1, 1, 12), (2, 0, 12), (12,), (2, 1, 4, 12)])
def test_a_layer_computes_what_pefts_computes(shape, dtype, bound, bias):
    one, (expected, found) = layer(bias, dtype), ([], [])
    x = torch.randn(shape[::-1], dtype=dtype).permute(*reversed(range(len(shape))))  # its memory is in another order
    for module, results in ((of_peft(one), expected), (one, found)):
        inputs = x.clone().requires_grad_()
        out = module(inputs)
        (out * torch.arange(20)).sum().backward()
        results += [out, inputs.grad, *(p.grad for p in module.parameters() if p.grad is not None)]
    assert type(one) is FusedLinear and len(found) == len(expected) == 4 and found[0].shape == (*shape[:-1], 20)
    for a, b in zip(expected, found, strict=True):
        assert a.dtype == b.dtype and (a - b).float().norm() <= bound * a.float().norm()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_a_policy_has_the_log_probabilities_and_gradients_of_pefts(
    small_model, made_up_rows, vocab_size, kind, checkpointing
):
    policy = adapted(small_model(kind))
    assert count(policy, FusedLinear) == 2 * 7 and count(policy, Linear) == 0
    results = []
    for model in (of_peft(policy), policy):
        if checkpointing:
            enable_gradient_checkpointing(model)
        logprobs, _ = forward.policy_forward(model, made_up_rows(groups=5, size=1), vocab_size, 1.0)
        logprobs.sum().backward()
        results.append((logprobs.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (expected, gradients), (found, others) = results
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert len(gradients) == 2 * 7 * 2 and gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        assert (gradient - others[name]).norm() <= 1e-5 * gradient.norm(), name


def test_adapters_that_are_off_merged_or_in_another_dtype_are_pefts():
    one, x = layer(), torch.randn(2, 3, 12)
    plain, with_adapter = one.base_layer(x), one(x)
    assert (with_adapter - plain).abs().max() > 0.1
    one.enable_adapters(False)
    assert torch.equal(one(x), plain)
    one.enable_adapters(True)
    one.merge()
    torch.testing.assert_close(one(x), with_adapter, atol=1e-5, rtol=1e-5)
    one.unmerge()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(one(x), of_peft(one)(x)) and one(x).dtype == torch.bfloat16
    half = of_peft(one)
    for module in (one, half):
        module.base_layer.bfloat16()
    assert torch.equal(one(x.bfloat16()), half(x.bfloat16()))


def test_several_adapters_are_pefts(small_model):
    policy, ids = adapted(small_model("llama")), torch.arange(9)[None]
    policy.add_adapter("other", peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    seen = []
    for names in ("default", "other", ["default", "other"]):
        policy.base_model.set_adapter(names)
        with torch.no_grad():
            seen.append(policy(input_ids=ids).logits)
            torch.testing.assert_close(seen[-1], of_peft(policy)(input_ids=ids).logits, atol=1e-4, rtol=1e-4)
    assert all((a - b).abs().max() > 0.01 for a, b in zip(seen, seen[1:], strict=False))


@pytest.mark.parametrize("config", [{"lora_dropout": 0.1}, {"use_dora": True}, {"lora_bias": True}])
def test_layers_with_more_than_two_products_stay_pefts(small_model, config):
    assert count(adapted(small_model("qwen2"), lora_alpha=6), FusedLinear) == 2 * 7
    assert count(adapted(small_model("qwen2"), bias="none", **config), FusedLinear) == 0


def test_layers_over_other_layers_stay_pefts(small_model):
    policy = with_adapters(small_model("gpt2"), 2)  # Conv1D
    assert count(policy, Linear) > 0 and count(policy, FusedLinear) == 0


def test_adapters_are_saved_and_merged_as_pefts(small_model, tmp_path):
    policy = adapted(small_model("qwen2"))
    folders = tmp_path / "ours", tmp_path / "theirs"
    for folder, model in zip(folders, (policy, of_peft(policy)), strict=True):
        model.save_pretrained(folder)
    one, two = ((folder / "adapter_model.safetensors").read_bytes() for folder in folders)
    assert one == two
    ours, theirs = (model.merge_and_unload().state_dict() for model in (policy, of_peft(policy)))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
