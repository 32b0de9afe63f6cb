"""AdamW with float32 weights behind bf16 ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from llm_utils.distributed import collect, full, like


def _add_gradient(weight: torch.Tensor, master: torch.Tensor) -> None:
    """Move what a backward pass gave a bf16 weight to its float32 copy."""
    gradient, weight.grad = weight.grad, None
    if master.grad is None:
        master.grad = gradient.float()
    else:
        master.grad += gradient


def float32_copy(weight: torch.Tensor, seed: int) -> torch.Tensor:
    """A float32 copy of a bf16 weight, drawn from the interval of numbers that round to it.

    A copy that began on the weight itself would have to travel half of the interval before the weight changes at all:
    at 1e-6 a weight of 0.1 takes 240 steps. Drawn so, a part of the weights changes at every step, as many as the steps
    are long. A weight of a sharded model draws for its own part.
    """
    copy = weight.detach().float()
    exact = copy.to_local() if hasattr(copy, "to_local") else copy
    generator = torch.Generator(exact.device).manual_seed(seed)
    width = torch.ldexp(torch.ones_like(exact), torch.frexp(exact).exponent - 8)  # bf16 has 8 significant bits
    drawn = exact + width * (torch.rand(exact.shape, generator=generator, device=exact.device) - 0.5)
    rounded = drawn.to(weight.dtype).float()
    exact.copy_(torch.where(rounded == exact, drawn, exact))  # next to a power of 2 an interval is shorter
    return copy


class Float32AdamW:
    """AdamW over several modules, one learning rate each. Weights that aren't float32 get a float32 copy.

    A step of Adam is about as large as the learning rate, and a bf16 weight of size 1 can't move by less than 1/256:
    the copies take the steps, the modules get the rounded result. The copies also hold the gradient, to which every
    backward pass is added in float32: a sum of many small numbers in bf16 stops growing. Float32 modules are updated
    directly. Matrices decay: each step takes `weight_decay` times the learning rate of them away; biases and norms
    don't.
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
        """Every weight and what takes its steps: its float32 copy, or itself."""
        groups = zip(self.weights, self.masters, strict=True)
        return [pair for weights, masters in groups for pair in zip(weights, masters, strict=True)]

    def scale_learning_rates(self, factor: float) -> None:
        """Set every learning rate to its first value times `factor`."""
        for group, rate in zip(self.adam.param_groups, self.learning_rates, strict=True):
            group["lr"] = rate * factor

    @torch.no_grad()
    def step(self, max_grad_norm: float, rows: Sequence[Any] = ()) -> list[float]:
        """Clip the gradient of every module by its own norm, take a step, clear the gradients. Returns the norms.

        Raises FloatingPointError with the `rows` that the gradient is of, before any weight has moved, where it isn't
        finite.
        """
        norms = [float(full(nn.utils.clip_grad_norm_(group, max_grad_norm))) for group in self.masters]
        if not all(map(math.isfinite, norms)):
            raise FloatingPointError(f"the norm of the gradient is {max(norms)}", rows)
        if self.weight_decay:  # here, as Adam would need groups of their own for matrices
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
        """Adam's state and the float32 copies (None where a weight is float32 itself), as whole tensors.

        With several processes all must call this together; rank 0 gets them.
        """
        pairs = zip(self.weights, self.masters, strict=True)
        copies = [[None if m is w else collect(m) for w, m in zip(ws, ms, strict=True)] for ws, ms in pairs]
        adam = self.adam.state_dict()
        state = {i: {name: collect(x) for name, x in values.items()} for i, values in adam["state"].items()}
        return {"adam": {**adam, "state": state}, "copies": copies}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse; the modules' own weights must be loaded already. Raises ValueError for another model's state."""
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
