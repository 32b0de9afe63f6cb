"""The optimizer in float32: small steps, many microbatches, rates, states and copies."""

import pytest
import torch

from llm_utils.training import optimizer


def linear(dtype, weight=1.0):
    module = torch.nn.Linear(4, 1, bias=False, dtype=dtype)
    torch.nn.init.constant_(module.weight, weight)
    return module


def step(module, adam, size=1.0):
    (module.weight * size).sum().backward()
    return adam.step(max_grad_norm=1.0)


def test_small_steps_of_bf16_weights_add_up():
    """One step of 1e-4 is lost in a bf16 weight of 1; a hundred of them are not, as in float32."""
    modules = [linear(torch.bfloat16), linear(torch.float32)]
    for module in modules:
        adam = optimizer.Float32AdamW([module], [1e-4], betas=(0.9, 0.95))
        step(module, adam)
        if module.weight.dtype == torch.bfloat16:
            assert (module.weight == 1).all()
        for _ in range(99):
            step(module, adam)
    torch.testing.assert_close(modules[0].weight.float(), modules[1].weight, atol=4e-3, rtol=0)
    assert (modules[0].weight < 0.995).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_many_microbatches_add_up(dtype):
    """1000 of 1/1000 are 1; in bf16 the sum would stop at a quarter, where one more is less than half a step."""
    module = linear(dtype)
    adam = optimizer.Float32AdamW([module], [1e-4], betas=(0.9, 0.95))
    for _ in range(1000):
        (module.weight * 1e-3).sum().backward()
    assert adam.step(max_grad_norm=1e9) == pytest.approx([2.0], rel=1e-2)  # of four weights
    (module.weight * 1e-3).sum().backward()
    assert adam.step(max_grad_norm=1e9) == pytest.approx([2e-3], rel=1e-2)  # nothing is left of the step before


def test_every_module_has_its_own_rate_and_norm():
    modules = [linear(torch.float32), linear(torch.float32)]
    adam = optimizer.Float32AdamW(modules, [1e-2, 1e-3], betas=(0.9, 0.95))
    adam.scale_learning_rates(0.5)
    (modules[0].weight.sum() + 100 * modules[1].weight.sum()).backward()
    norms = adam.step(max_grad_norm=1.0)
    assert norms == pytest.approx([2, 200])
    moved = [1 - float(module.weight.detach()[0, 0]) for module in modules]
    assert moved == pytest.approx([5e-3, 5e-4], rel=1e-3)
    assert all(module.weight.grad is None for module in modules)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_optimizer_goes_on_from_its_state(dtype, tmp_path):
    one = linear(dtype)
    adam = optimizer.Float32AdamW([one], [1e-3], betas=(0.9, 0.95))
    for _ in range(5):
        step(one, adam)
    torch.save(adam.state_dict(), tmp_path / "state.pt")
    two = linear(dtype)
    two.load_state_dict(one.state_dict())
    again = optimizer.Float32AdamW([two], [1e-3], betas=(0.9, 0.95))
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for _ in range(50):
        step(one, adam)
        step(two, again)
    assert (one.weight == two.weight).all() and (one.weight != 1).all()


def test_a_gradient_that_is_not_finite_moves_nothing():
    module = torch.nn.Linear(2, 1)
    before = [p.detach().clone() for p in module.parameters()]
    adam = optimizer.Float32AdamW([module], [1e-2], betas=(0.9, 0.95))
    module(torch.tensor([float("inf"), 1.0])).sum().backward()
    with pytest.raises(FloatingPointError, match="gradient") as raised:
        adam.step(1.0, ["the rows"])
    assert raised.value.args[1] == ["the rows"]
    assert all(torch.equal(*pair) for pair in zip(module.parameters(), before, strict=True))


def test_copies_of_bf16_weights_lie_anywhere_in_their_rounding_interval():
    """So that short steps change weights from the first one on, as many as they are long."""
    torch.manual_seed(0)
    weight = torch.randn(4_000).bfloat16()
    weight[:4] = torch.tensor([0.0, 0.5, -0.25, 2.0**-130])
    copy = optimizer.float32_copy(weight, seed=1)
    assert copy.dtype == torch.float32 and torch.equal(copy.bfloat16(), weight)
    assert torch.equal(copy, optimizer.float32_copy(weight, seed=1))
    tenth = 0.1 * torch.ldexp(torch.ones(4_000), torch.frexp(weight.float()).exponent - 8)
    changed = ((copy + tenth).bfloat16() != weight).float().mean()
    assert 0.08 < changed < 0.12
