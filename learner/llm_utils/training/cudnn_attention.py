"""Attention of cuDNN for long rows in training, on GPUs where it is the fastest kernel.

The choice depends on the tensors of each call. So it is the same in the score, the update and the recompute of
gradient checkpointing, and it never reaches a sampler, which always has a mask.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from llm_utils.setup.model_checks import WITHOUT_KEYS, layers_of, positions_of

FASTEST_ON = (9, 0)  # compute capability of H100 and H200; on A100 and RTX Blackwell, cuDNN is slower
SHORTEST = 2048  # columns; shorter rows spend little time in attention
DTYPES = (torch.float16, torch.bfloat16)  # that cuDNN takes
STEP = 512  # columns; cuDNN makes a plan for every shape, so there must be few


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU; (0, 0) for another device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def width(tokens: int, device: torch.device | str) -> int:
    """Return the largest number of columns of rows whose longest has `tokens` tokens: more than `tokens` on a device
    where cuDNN computes the attention of some models."""
    padded = -(-tokens // STEP) * STEP
    return padded if padded >= SHORTEST and capability(torch.device(device)) == FASTEST_ON else tokens


def widen(ids: torch.Tensor, model: Any) -> torch.Tensor:
    """Pad token ids [B, T] on the right to their `width` if cuDNN then computes the attention of a layer. No real token
    attends to a later one."""
    columns, positions = width(ids.shape[1], ids.device), positions_of(model.config)
    if columns == ids.shape[1] or positions is not None and columns > positions or not takes(model, columns):
        return ids
    return torch.nn.functional.pad(ids, (0, columns - ids.shape[1]))


def takes(model: Any, columns: int) -> bool:
    """Return True if cuDNN takes the attention of a layer in rows of so many columns: in its dtypes, without a mask."""
    if model.dtype not in DTYPES or model.config._attn_implementation != "sdpa":
        return False
    layers = layers_of(model.config, columns)
    return bool({*layers.kinds} - WITHOUT_KEYS - {*layers.windows, *layers.chunks})


def attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, *args: Any, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Compute transformers' "sdpa" attention of [B, heads, T, head size], long rows without a mask by cuDNN.

    torch takes the next kernel of the list for tensors that cuDNN does not take, such as float32.
    """
    columns = query.shape[2]
    if attention_mask is not None or columns < SHORTEST or columns % STEP:
        return sdpa_attention_forward(module, query, key, value, attention_mask, *args, **kwargs)
    order = [
        SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
    ]  # fmt: skip
    with sdpa_kernel(order, set_priority=True):
        return sdpa_attention_forward(module, query, key, value, attention_mask, *args, **kwargs)


def register(device: torch.device) -> None:
    """Make transformers' models call `attention` if cuDNN's is the fastest on the device."""
    if capability(device) == FASTEST_ON:
        AttentionInterface.register("sdpa", attention)
