"""Finished rows of tokens through a model: batches, and the log-probabilities of chosen tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from llm_utils import distributed
from llm_utils.slots import logits_only_at

Array = np.ndarray


def microbatches(rows: Sequence[Any], budget: int) -> Iterator[list[Any]]:
    """Rows of similar length together, those with the same prompt side by side, at most `budget` tokens with padding
    in a batch (but at least one row)."""
    longest: dict[int, int] = {}
    for row in rows:
        longest[row.task_index] = max(longest.get(row.task_index, 0), len(row.tokens))
    batch: list[Any] = []
    for row in sorted(rows, key=lambda row: (-longest[row.task_index], row.task_index, -len(row.tokens))):
        if batch and longest[batch[0].task_index] * (len(batch) + 1) > budget:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def pad(arrays: Sequence[Array], device: torch.device | str = "cpu") -> torch.Tensor:
    """Arrays of different lengths -> [B, T], zeros on the right.

    With padding on the right a causal model needs no attention mask: no real token sees a padded one.
    """
    out = np.zeros((len(arrays), max(map(len, arrays))), bool if arrays[0].dtype == bool else np.int64)
    for target, array in zip(out, arrays, strict=True):
        target[: len(array)] = array
    return torch.from_numpy(out).to(device)


def gather(rows: Sequence[Any], name: str, masks: Sequence[Array], device: Any) -> torch.Tensor:
    """The entries of the rows' array `name` where `masks` are True, one row after the other: [N]."""
    return torch.from_numpy(np.concatenate([getattr(r, name)[m] for r, m in zip(rows, masks, strict=True)])).to(device)


def policy_forward(
    model: PreTrainedModel, rows: Sequence[Any], masks: Sequence[Array], vocab_size: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [N] of the tokens where `masks` are True, row by row, and those of the vocabulary there [N, V].

    A prompt that several rows share is computed once; its keys and values, gradients included, serve all of them.
    """
    prefixes: dict[bytes, int] = {}  # all of a prompt but its last token, which predicts the first sampled one
    which = [prefixes.setdefault(row.tokens[: row.prompt_length - 1].tobytes(), len(prefixes)) for row in rows]
    shared = 2 * len(prefixes) <= len(rows) and all(prefixes) and can_share(model)
    skip = [row.prompt_length - 1 if shared else 0 for row in rows]
    device = model.device
    if computes_anew(model):  # in training mode only
        model.train()
    ids = pad([row.tokens[n:] for row, n in zip(rows, skip, strict=True)], device)
    at, columns = pad([mask[n:] for mask, n in zip(masks, skip, strict=True)], device).nonzero(as_tuple=True)
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if shared:
        heads = pad([np.frombuffer(prefix, rows[0].tokens.dtype) for prefix in prefixes], device)
        lengths = torch.tensor(skip, device=device)[:, None]
        cache = DynamicCache()
        with logits_only_at(model, (at[:0], at[:0])):
            model(input_ids=heads, past_key_values=cache, use_cache=True)
        cache.batch_select_indices(torch.tensor(which, device=device))
        columns_of = torch.arange(heads.shape[1] + ids.shape[1], device=device)[None, None, None]
        place = torch.arange(ids.shape[1], device=device)
        own = (columns_of >= heads.shape[1]) & (columns_of - heads.shape[1] <= place[None, None, :, None])
        seen = own | (columns_of < lengths[:, :, None, None])
        if model.config._attn_implementation == "eager":  # which adds the mask to the scores
            seen = torch.zeros_like(seen, dtype=model.dtype).masked_fill(~seen, torch.finfo(model.dtype).min)
        inputs |= {"attention_mask": seen, "position_ids": lengths + place, "past_key_values": cache}
    with logits_only_at(model, (at, columns - 1)):
        logits = model(**inputs).logits[:, :vocab_size].float()
    everything = torch.log_softmax(logits if temperature == 1 else logits / temperature, -1)
    return everything.gather(1, ids[at, columns, None])[:, 0], everything


def can_share(model: PreTrainedModel) -> bool:
    """Can this model continue from computed keys and values, with gradients? Not where it computes its layers anew in
    the backward pass (gradient checkpointing), gathers their weights there (FSDP), or sees only a window of tokens."""
    layers = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    return layers == {"full_attention"} and not computes_anew(model) and not distributed.is_sharded(model)


def computes_anew(model: PreTrainedModel) -> bool:
    """Are activations computed again in the backward pass (gradient checkpointing)?"""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


@torch.no_grad()
def score(
    rows: Sequence[Any], masks: Sequence[Array], name: str, model: PreTrainedModel, budget: int, vocab_size: int,
    temperature: float, between: Callable[[], Any] = lambda: None,
) -> None:  # fmt: skip
    """Fill the rows' array `name` with the model's log-probabilities where `masks` are True."""
    mask_of = {id(row): mask for row, mask in zip(rows, masks, strict=True)}
    batches = list(microbatches(rows, budget))
    for i in range(distributed.most(len(batches))):  # every process takes part in every forward
        batch = batches[min(i, len(batches) - 1)]
        chosen = [mask_of[id(row)] for row in batch]
        logprobs, _ = policy_forward(model, batch, chosen, vocab_size, temperature)
        parts = np.split(logprobs.cpu().numpy(), np.cumsum([mask.sum() for mask in chosen])[:-1])
        for row, mask, part in zip(batch, chosen, parts, strict=True):
            getattr(row, name)[mask] = part
        between()
