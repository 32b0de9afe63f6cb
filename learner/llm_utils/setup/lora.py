"""LoRA layers that add their adapter's product to the base layer's in one operation. The module needs peft."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import nn

ADAPTER = "default"  # peft's name of the only adapter


class FusedLinear(Linear):
    """A LoRA layer of peft over a linear layer, with another forward.

    peft scales the adapter's product and adds it to the base layer's in two passes over the wide outputs, and keeps
    both products until then. Here the second product is added where the first one lies. Names, files and merging are
    peft's. So is the forward for adapters that are off, merged or in another dtype, and under autocast.
    """

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the outputs [..., out_features] of inputs [..., in_features]."""
        if args or kwargs or self.disable_adapters or self.merged or self.active_adapters != [ADAPTER]:
            return super().forward(x, *args, **kwargs)
        down, up = self.lora_A[ADAPTER].weight, self.lora_B[ADAPTER].weight
        rows = x.reshape(-1, x.shape[-1])  # not a view of the output: autograd would copy gradients for that
        out = self.base_layer(rows)
        if out.dtype != up.dtype:  # autocast, or adapters in another dtype than the model
            return super().forward(x)
        out.addmm_(rows @ down.T, up.T, alpha=self.scaling[ADAPTER])
        return out.view(*x.shape[:-1], out.shape[-1])


def fuse_adapters(model: nn.Module) -> None:
    """Let all LoRA layers for which `FusedLinear` computes the same use it: one adapter, without dropout, bias and
    variants such as DoRA, over a plain linear layer."""
    for module in model.modules():
        if (
            type(module) is Linear
            and type(module.base_layer) is nn.Linear
            and list(module.lora_A) == [ADAPTER]
            and isinstance(module.lora_dropout[ADAPTER], nn.Identity)
            and module.lora_B[ADAPTER].bias is None
            and not module.lora_variant
        ):
            module.__class__ = FusedLinear
