"""AdamW with float32 copies of bf16 weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from llm_utils.distributed import collect, full, like


def _add_gradient(weight: torch.Tensor, master: torch.Tensor) -> None:
    """Move the gradient of a bf16 weight to its float32 copy."""
    gradient, weight.grad = weight.grad, None
    if master.grad is None:
        master.grad = gradient.float()
    else:
        master.grad += gradient


def float32_copy(weight: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a float32 copy of a bf16 weight, drawn from the interval of numbers that round to the weight.

    A copy that starts at the weight itself must cross half of the interval before the weight changes at all: at 1e-6, a
    weight of 0.1 takes 240 steps. With a random start some weights change at every step, in proportion to its length. A
    sharded weight draws its own part.
    """
    copy = weight.detach().float()
    exact = copy.to_local() if hasattr(copy, "to_local") else copy
    generator = torch.Generator(exact.device).manual_seed(seed)
    width = torch.ldexp(torch.ones_like(exact), torch.frexp(exact).exponent - 8)  # bf16 has 8 significant bits
    drawn = exact + width * (torch.rand(exact.shape, generator=generator, device=exact.device) - 0.5)
    rounded = drawn.to(weight.dtype).float()
    exact.copy_(torch.where(rounded == exact, drawn, exact))  # an interval next to a power of 2 is shorter
    return copy


class Float32AdamW:
    """AdamW over several modules, with a learning rate for each. Weights that are not float32 get a float32 copy.

    A step of Adam is about as large as the learning rate, but a bf16 weight of size 1 cannot move by less than 1/256.
    So the copies take the steps, and the modules get the rounded result. The copies also hold the gradient: every
    backward pass is added in float32, because a sum of many small numbers in bf16 stops growing. Float32 modules are
    updated directly.

    Only matrices decay, not biases and norms: each step subtracts `weight_decay` times the learning rate of them.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        learning_rates: Sequence[float],
        betas: tuple[float, float],
        weight_decay: float = 0.0,
    ) -> None:
        self.weights = [[p for p in module.parameters() if p.requires_grad] for module in modules]
        self.masters = [
            [p if p.dtype == torch.float32 else float32_copy(p, i) for i, p in enumerate(group)]
            for group in self.weights
        ]
        for weight, master in self._pairs():
            if master is not weight:
                weight.register_post_accumulate_grad_hook(partial(_add_gradient, master=master))
        self.learning_rates, self.weight_decay = list(learning_rates), weight_decay
        groups = [{"params": g, "lr": lr} for g, lr in zip(self.masters, learning_rates, strict=True)]
        self.adam = torch.optim.AdamW(groups, betas=betas, weight_decay=0.0, fused=True)

    def _pairs(self) -> list[tuple[Any, Any]]:
        """Return every weight with the tensor that takes its steps: its float32 copy, or itself."""
        groups = zip(self.weights, self.masters, strict=True)
        return [pair for weights, masters in groups for pair in zip(weights, masters, strict=True)]

    def scale_learning_rates(self, factor: float) -> None:
        """Set every learning rate to its first value times `factor`."""
        for group, rate in zip(self.adam.param_groups, self.learning_rates, strict=True):
            group["lr"] = rate * factor

    @torch.no_grad()
    def step(self, max_grad_norm: float, rows: Sequence[Any] = ()) -> list[float]:
        """Clip the gradient of every module by its own norm, take a step, and clear the gradients. Return the norms.

        Raise FloatingPointError with the gradient's `rows`, before any weight moves, if the gradient is not finite.
        """
        norms = [float(full(nn.utils.clip_grad_norm_(group, max_grad_norm))) for group in self.masters]
        if not all(map(math.isfinite, norms)):
            raise FloatingPointError(f"the norm of the gradient is {max(norms)}", rows)
        if self.weight_decay:  # done here, as Adam would need separate groups for matrices
            for group in self.adam.param_groups:
                for master in group["params"]:
                    if master.ndim > 1 and master.grad is not None:
                        master.mul_(1 - group["lr"] * self.weight_decay)
        self.adam.step()
        for weight, master in self._pairs():
            master.grad = None
            if master is not weight:
                weight.copy_(master)
        return norms

    def state_dict(self) -> dict[str, Any]:
        """Return Adam's state and the float32 copies (None if a weight is float32 itself), as whole tensors.

        With several processes all must call this together; rank 0 gets the result.
        """
        pairs = zip(self.weights, self.masters, strict=True)
        copies = [[None if m is w else collect(m) for w, m in zip(ws, ms, strict=True)] for ws, ms in pairs]
        adam = self.adam.state_dict()
        state = {i: {name: collect(x) for name, x in values.items()} for i, values in adam["state"].items()}
        return {"adam": {**adam, "state": state}, "copies": copies}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. The modules' weights must be loaded before. Raise ValueError for another
        model's state."""
        weights = [master for masters in self.masters for master in masters]
        split = {  # Adam numbers the weights in this order; its step counts have no shape
            i: {name: like(x, weights[i]) if x.dim() else x for name, x in values.items()}
            for i, values in state["adam"]["state"].items()
        }
        self.adam.load_state_dict({**state["adam"], "state": split})
        for masters, copies in zip(self.masters, state["copies"], strict=True):
            for master, copy in zip(masters, copies, strict=True):
                if copy is not None:
                    master.copy_(like(copy, master))
