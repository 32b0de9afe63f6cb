"""Slots of models with states: layers that keep a recurrent state, a convolution's last inputs, or both."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from llm_utils.sampling.slot_cache import Store
from llm_utils.sampling.slots import SlotModel
from llm_utils.setup.model_checks import layers_of

Array = np.ndarray
KINDS = ("conv_states", "recurrent_states")  # attributes of a layer of transformers' cache: each a dict by number


def make_slots(model: PreTrainedModel, num_slots: int, vocab_size: int, longest_row: float = math.inf) -> SlotModel:
    """Return the slots that fit the model's layers."""
    kind = StateSlots if layers_of(model.config, longest_row).states else SlotModel
    return kind(model, num_slots, vocab_size, longest_row)


@torch.no_grad()
def state_bytes(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes that the states of a row take in a model of this dtype, 0 if it has none.

    An empty model computes a token. It is in bfloat16, as torch multiplies shapes of experts in no other dtype.
    """
    cache = DynamicCache(config=config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.bfloat16, trust_remote_code=False)
        token, mask = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1, 1, 1, dtype=torch.bool)
    model.base_model(token, attention_mask=mask, past_key_values=cache, use_cache=True)
    states = [state for layer in cache.layers for kind in KINDS for state in getattr(layer, kind, {}).values()]
    return sum(x.numel() * (dtype if x.dtype == torch.bfloat16 else x.dtype).itemsize for x in states if x is not None)


def equal_parts(sizes: Array) -> Iterator[tuple[Array, int]]:
    """Cut rows of these sizes [n] into parts of equal length. Yield the rows of each part, and its length.

    A part takes the rows whose rest has the highest bit of the longest rest, up to the shortest of them. So rows of
    equal size have one part, and there are never more than log2(longest size) + 1 parts.
    """
    rest = sizes.copy()
    while longest := int(rest.max()):
        rows = np.flatnonzero(rest >= 1 << (longest.bit_length() - 1))
        length = int(rest[rows].min())
        rest[rows] -= length
        yield rows, length


class StateSlots(SlotModel):
    """A SlotModel for layers with states, which a store keeps beside its keys and values.

    During a forward, transformers' own cache layers hold the states of its rows. A padded token would change a state,
    so new tokens run in parts without padding. A state cannot be rewound, so an episode reuses nothing of the slot's
    previous episode.
    """

    KEEPS_STATES = True

    def __init__(self, model: PreTrainedModel, num_slots: int, vocab_size: int, longest_row: float = math.inf) -> None:
        super().__init__(model, num_slots, vocab_size, longest_row)
        self.cache.layers = DynamicCache(config=model.config).layers
        self.places = {
            (index, kind, number): layer
            for index, layer in enumerate(self.cache.layers)
            for kind in KINDS
            for number in getattr(layer, kind, ())
        }

    def prefill(self, pending: dict[int, Array]) -> Iterator[tuple[Array, torch.Tensor]]:
        self.first_tokens = [np.zeros(0, np.int64)] * self.num_slots
        return super().prefill(pending)

    def _append(self, store: Store, slots: Array, news: Sequence[Array], predict: bool = True) -> torch.Tensor:
        sizes = np.array([len(new) for new in news])
        done, last = np.zeros_like(sizes), dict[int, torch.Tensor]()
        for rows, length in equal_parts(sizes):
            parts = [news[row][done[row] : done[row] + length] for row in rows]
            done[rows] += length
            logits = super()._append(store, slots[rows], parts, predict)
            last |= dict(zip(rows.tolist(), logits, strict=False))  # without `predict` there are none
        return torch.stack([last[row] for row in range(len(news))]) if predict else logits

    @torch.inference_mode()
    def _decode(self, slots: Array, tokens: Array) -> torch.Tensor:
        store, rows = self.cache.stores[int(self.cache.capacity[slots[0]])], self.cache.row[slots]
        if not self.replays and 2 * len(slots) <= len(store.slots):  # then only these rows run
            return super()._decode(slots, tokens)
        with store.unchanged(np.setdiff1d(np.arange(len(store.slots)), rows)):
            return super()._decode(slots, tokens)

    def _model(
        self, store: Store, ids: torch.Tensor, positions: torch.Tensor, width: int, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        self._load(store, positions[:, 0], rows)
        logits = super()._model(store, ids, positions, width, rows)
        for key, layer in self.places.items():
            states, number = getattr(layer, key[1]), key[2]
            if rows is not None and states[number] is not None:
                store.state(key, states[number]).index_copy_(0, rows, states[number])
            states[number] = None
        return logits

    def _load(self, store: Store, positions: torch.Tensor, rows: torch.Tensor | None) -> None:
        """Give the cache's layers copies of the states of a store's `rows` [n], or the first n in place if None. Rows
        at position 0 of `positions` [n] begin with zeros, like rows of a store that has no states yet."""
        for key, layer in self.places.items():
            (_, kind, number), state = key, store.states.get(key)
            if state is not None and rows is None:
                state = state[: len(positions)]
            elif state is not None:
                begins = (positions == 0).view(-1, *[1] * (state.ndim - 1))
                state = state.index_select(0, rows).masked_fill_(begins, 0)
            getattr(layer, kind)[number] = state
            getattr(layer, f"is_{kind}_initialized")[number] = state is not None
            layer.has_previous_state[number] = bool(store.states)
