"""A model that goes on with many growing episodes: each has a slot, whose keys and values are kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

Array = np.ndarray


@contextmanager
def logits_only_at(model: PreTrainedModel, index: tuple[torch.Tensor, ...]) -> Iterator[None]:
    """Inside, `model(...).logits` is [N, vocabulary]: the head sees only the hidden states at `index` (rows, columns).

    With a large vocabulary the head costs more than the layers, and most positions predict nothing that is needed.
    """
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: (inputs[0][index],))
    try:
        yield
    finally:
        hook.remove()


def attention_mask(model: PreTrainedModel, sees: torch.Tensor) -> torch.Tensor:
    """What each query sees (bool), as the model's attention takes it: eager attention adds it to the scores."""
    if model.config._attn_implementation != "eager":
        return sees
    return torch.zeros_like(sees, dtype=model.dtype).masked_fill(~sees, torch.finfo(model.dtype).min)


class SlotCache(DynamicCache):
    """A key-value cache whose rows grow independently: token t of a slot lies in column t, so there are no holes.

    Columns past a row's length hold garbage. It is never seen: a query at position p attends to columns 0..p only, and
    column p is written before it is read.
    """

    def __init__(self, num_slots: int, device: torch.device, capacity: int = 0) -> None:
        super().__init__()
        self.capacity = capacity  # columns
        self.everyone = torch.arange(num_slots, device=device)
        self.columns = torch.arange(capacity, device=device)
        self.slots: list[list[torch.Tensor]] = []  # per layer: keys and values, [num_slots, columns, heads, dimension]

    def place(self, rows: torch.Tensor | None, positions: torch.Tensor, width: int, capacity: int) -> None:
        """The next forward writes at `positions` [n, S] of `rows` [n] (None: all) and reads `width` columns."""
        self.rows, self.width = rows, width
        self.at = (self.everyone if rows is None else rows)[:, None], positions
        if capacity > self.capacity:
            self.capacity = capacity + capacity // 4
            self.columns = torch.arange(self.capacity, device=self.everyone.device)
            for layer in self.slots:
                layer[:] = [nn.functional.pad(x, (0, 0, 0, 0, 0, self.capacity - x.shape[1])) for x in layer]

    @torch.inference_mode()
    def copy(self, sources: list[int], targets: list[int], columns: int) -> None:
        """Give the slots `targets` the first columns of the slots `sources`."""
        for layer in self.slots:
            for store in layer:
                store[targets, :columns] = store[sources, :columns]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions and masks are given explicitly

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        news = [states.transpose(1, 2) for states in (key_states, value_states)]
        if layer_idx == len(self.slots):
            self.slots.append([new.new_zeros(len(self.everyone), self.capacity, *new.shape[2:]) for new in news])
        for store, new in zip(self.slots[layer_idx], news, strict=True):
            store[self.at] = new
        seen = [store[:, : self.width] for store in self.slots[layer_idx]]
        if self.rows is not None:
            seen = [keys_or_values.index_select(0, self.rows) for keys_or_values in seen]
        return [keys_or_values.transpose(1, 2) for keys_or_values in seen]


class SlotModel:
    """A causal model with `num_slots` episodes; `length[slot]` tokens of an episode are in the cache.

    Raises ValueError for a model in which a layer doesn't attend to everything before it.
    """

    PREFILL_TOKENS = 8192  # tokens, padding counted, in one forward of new tokens
    KEPT_BYTES = 2**28  # a cache up to this size stays when it is cleared: a CPU takes long to get memory

    def __init__(self, model: PreTrainedModel, num_slots: int, vocab_size: int) -> None:
        layers = set(getattr(model.config, "layer_types", None) or ["full_attention"])
        if layers != {"full_attention"}:
            raise ValueError(f"the transformers engine needs full attention in every layer, this model has {layers}")
        self.model, self.num_slots, self.vocab_size = model, num_slots, vocab_size
        self.device = model.device  # asking the model takes long
        self.cache = SlotCache(num_slots, self.device)
        self.clear()

    def clear(self) -> None:
        """Forget all episodes, and free the cache where it is large."""
        if sum(store.nbytes for layer in self.cache.slots for store in layer) > self.KEPT_BYTES:
            self.cache = SlotCache(self.num_slots, self.device, self.cache.capacity)  # as long as it became
        self.length = np.zeros(self.num_slots, np.int64)

    def decode(self, slots: Array, tokens: Array) -> torch.Tensor:
        """Append one token to each of `slots` [n]. Returns the logits of the next [n, vocabulary], float32."""
        positions, width = self.length[:, None], int(self.length[slots].max()) + 1
        if 2 * len(slots) > self.num_slots:  # reading all slots in place is cheaper than copying most of them
            ids = np.zeros((self.num_slots, 1), np.int64)
            ids[slots, 0] = tokens
            logits = self._forward(None, ids, positions, width, (slots, np.zeros_like(slots)))
        else:
            logits = self._forward(slots, tokens[:, None], positions[slots], width)
        self.length[slots] += 1
        return logits

    def prefill(self, pending: dict[int, Array]) -> Iterator[tuple[Array, torch.Tensor]]:
        """Append tokens to slots, and take them out of `pending`: slots of similar size at once, the longest first.

        Slots that begin with the same tokens are computed once. Yields slots [n] and the logits of their next tokens.
        """
        while pending:
            longest = max(map(len, pending.values()))
            alike = [slot for slot, new in pending.items() if 2 * len(new) >= longest]
            same: dict[Any, list[int]] = {}
            for slot in alike:
                same.setdefault(slot if self.length[slot] else pending[slot].tobytes(), []).append(slot)
            groups = list(same.values())[: max(1, self.PREFILL_TOKENS // longest)]
            leaders = np.array([group[0] for group in groups])
            sizes = np.array([len(pending[slot]) for slot in leaders.tolist()])
            tokens = np.zeros((len(groups), longest), np.int64)
            for row, slot in zip(tokens, leaders.tolist(), strict=True):
                row[: len(pending[slot])] = pending[slot]
            positions = self.length[leaders, None] + np.arange(longest)
            width = int(positions.max()) + 1
            logits = self._forward(leaders, tokens, positions, width, (np.arange(len(leaders)), sizes - 1))
            copies = [(group[0], slot) for group in groups for slot in group[1:]]
            if copies:
                sources, targets = (list(x) for x in zip(*copies, strict=True))
                self.cache.copy(sources, targets, width)
            slots, which = np.concatenate(groups), np.repeat(np.arange(len(groups)), [len(group) for group in groups])
            for slot in slots.tolist():
                del pending[slot]
            self.length[slots] += sizes[which]
            yield slots, logits[torch.from_numpy(which).to(logits.device)]

    @torch.inference_mode()
    def _forward(
        self, slots: Array | None, tokens: Array, positions: Array, width: int, at: tuple[Array, Array] | None = None
    ) -> torch.Tensor:
        """Tokens [n, S] at `positions` [n, S] of `slots` [n] -> logits [N, V] at the rows and columns `at` [N].

        Without `at`, the logits of the first column.
        """
        device = self.device
        ids, place = torch.from_numpy(tokens).to(device), torch.from_numpy(positions).to(device)
        where = None if slots is None else torch.from_numpy(slots).to(device)
        self.cache.place(where, place, width, int(positions.max()) + 1)
        if self.model.training:  # then layers with gradient checkpointing would ignore the cache
            self.model.eval()
        mask = attention_mask(self.model, self.cache.columns[:width] <= place[:, None, :, None])
        inputs = {"attention_mask": mask, "position_ids": place, "past_key_values": self.cache, "use_cache": True}
        if at is None:
            logits = self.model(ids, **inputs).logits[:, 0]
        else:
            rows, columns = (torch.from_numpy(x).to(device) for x in at)
            with logits_only_at(self.model, (rows, columns)):
                logits = self.model(ids, **inputs).logits
        return logits[:, : self.vocab_size].float()
