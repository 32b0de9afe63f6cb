"""A model that continues many growing episodes: each has a slot whose keys and values are kept."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from llm_utils import distributed
from llm_utils.sampling.graphs import Graphs
from llm_utils.sampling.slot_cache import SlotCache, Store, bytes_per_token, first_store, gpu_room
from llm_utils.setup.model_checks import layers_of
from llm_utils.training.forward import attention_mask, logits_only_at

Array = np.ndarray


def in_common(rows: Sequence[Array]) -> int:
    """Return the length of the prefix that all rows share."""
    length = min(map(len, rows))
    for row in rows[1:]:
        differs = np.flatnonzero(row[:length] != rows[0][:length])
        length = int(differs[0]) if len(differs) else length
    return length


class SlotModel:
    """A causal model with `num_slots` episodes. The cache holds `length[slot]` tokens of an episode.

    A new episode begins with `begin`. Raise ValueError for a model whose layers need more of a row than its keys and
    values, or columns instead of positions. `slot_states.make_slots` also takes models with states. `longest_row` is
    the maximum of a row's tokens.
    """

    PREFILL_TOKENS = 8192  # tokens, padding counted, in one forward of new tokens
    CAPACITY = 256  # tokens of the smallest store, more if that takes little memory: each store costs a forward
    RECORDED = ("cuda",)  # devices with CUDA graphs for the forward of one token per row
    KEEPS_STATES = False
    SHARED = 32  # minimum length of a prefix that is computed once and copied to the rows that share it

    def __init__(self, model: PreTrainedModel, num_slots: int, vocab_size: int, longest_row: float = math.inf) -> None:
        self.layers = layers_of(model.config, longest_row)
        if reason := self.layers.refused:
            raise ValueError(
                f"the transformers engine cannot sample from this model ({model.config.model_type}), as it has {reason}"
            )
        if self.layers.states and not self.KEEPS_STATES:
            raise ValueError(
                f"{type(self).__name__} keeps no states, and this model ({model.config.model_type}) has "
                f"{' and '.join(self.layers.states.values())}: use slot_states.make_slots"
            )
        self.model, self.num_slots, self.vocab_size, self.longest_row = model, num_slots, vocab_size, longest_row
        self.device = model.device  # cached: the model's property is slow
        on_one_gpu = self.device.type in self.RECORDED and distributed.world_size() == 1
        self.graphs = Graphs(self.device) if on_one_gpu else None
        max_bytes = gpu_room(self.device) if self.device.type == "cuda" and self.graphs else SlotCache.KEPT_BYTES
        token = bytes_per_token(model.config, model.dtype)
        smallest, whole = first_store(self.CAPACITY, num_slots, longest_row, token, max_bytes)
        self.cache = SlotCache(num_slots, self.device, smallest, whole if self.graphs else 0)
        self.clear()

    def clear(self) -> None:
        """Forget all episodes. Free the cache if it is large."""
        self.cache.clear()
        if self.graphs and not self.cache.stores:
            self.graphs.clear()
        self.length = np.zeros(self.num_slots, np.int64)
        self.new_episodes: set[int] = set()  # slots whose next tokens begin an episode
        self.forget_shared_prefixes()

    def forget_shared_prefixes(self) -> None:
        """Forget the slots' equal histories and the episodes' first tokens. Call this after new weights: they change
        the keys and values of equal tokens."""
        self.history = list(range(self.num_slots))  # of each slot: equal for slots with equal tokens so far
        self.first_tokens: list[Array] = [np.zeros(0, np.int64)] * self.num_slots  # of each slot's episode

    @property
    def replays(self) -> bool:
        """Return True if the forward of one token per row replays a CUDA graph."""
        return self.graphs is not None and self.graphs.works

    def begin(self, slot: int) -> None:
        """Mark the slot: its next tokens begin an episode."""
        self.new_episodes.add(slot)

    def copy(self, source: int, target: int) -> None:
        """Copy an episode (keys, values and length) from the slot `source` to the slot `target`."""
        length = int(self.length[source])
        if length:
            self.cache.reserve(np.array([target]), np.array([0]), np.array([length]))
            self.cache.copy([source], [target], length)
        self.length[target], self.history[target] = length, self.history[source]
        self.first_tokens[target] = self.first_tokens[source]
        self.new_episodes.discard(target)

    def decode(self, slots: Array, tokens: Array) -> torch.Tensor:
        """Append one token to each of `slots` [n]. Return the logits of the next tokens [n, vocabulary], float32."""
        lengths = self.length[slots]
        self.cache.reserve(slots, lengths, lengths + 1)
        capacities = self.cache.capacity[slots]
        parts = [np.flatnonzero(capacities == capacity) for capacity in np.unique(capacities)]
        logits = [self._decode(slots[part], tokens[part]) for part in parts]
        self.length[slots] += 1
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            self.history[slot] = hash((self.history[slot], token))
        if len(parts) == 1:
            return logits[0]
        order = np.argsort(np.concatenate(parts))
        return torch.cat(logits)[torch.from_numpy(order).to(self.device)]

    def _decode(self, slots: Array, tokens: Array) -> torch.Tensor:
        """Do the same for slots of one store."""
        store, rows = self.cache.stores[int(self.cache.capacity[slots[0]])], self.cache.row[slots]
        width = int(self.length[slots].max()) + 1
        if self.graphs and self.graphs.works:
            return self._replay(self.graphs, store, rows, tokens, width)
        if 2 * len(slots) <= len(store.slots):
            return self._forward(store, rows, tokens[:, None], self.length[slots, None], width)
        # Reading all rows in place is cheaper than copying most of them.
        ids = np.zeros((len(store.slots), 1), np.int64)
        ids[rows, 0] = tokens
        return self._forward(store, None, ids, self.length[store.slots, None], width, (rows, np.zeros_like(rows)))

    @torch.inference_mode()
    def _replay(self, graphs: Graphs, store: Store, rows: Array, tokens: Array, width: int) -> torch.Tensor:
        """Do the same with a CUDA graph, over all allocated rows."""
        store.reserve(width)
        ids, places = np.zeros((2, store.size[0]), np.int64)
        ids[rows], places[: len(store.slots)] = tokens, self.length[store.slots]
        logits = graphs(self._model, store, ids, places, width)
        return logits[torch.from_numpy(rows).to(self.device), : self.vocab_size].float()

    def prefill(self, pending: dict[int, Array]) -> Iterator[tuple[Array, torch.Tensor]]:
        """Append tokens to slots and remove them from `pending`. Slots of similar length run together, the longest
        first.

        Slots with equal tokens from the start, like a group's episodes before they differ, are computed once. So is a
        prefix that several new episodes share. A prefix shared with the slot's previous episode is reused from the
        cache. Yield slots [n] and the logits of their next tokens.
        """
        for slot, new in pending.items():
            begins = slot in self.new_episodes or not self.length[slot]
            self.history[slot] = hash((None if begins else self.history[slot], new.astype(np.int64).tobytes()))
            if begins:
                cached = min(in_common([self.first_tokens[slot], new]), len(new) - 1, int(self.length[slot]))
                self.length[slot], self.first_tokens[slot], pending[slot] = cached, new, new[cached:]
        self.new_episodes -= pending.keys()
        all_slots, cache = np.array(list(pending)), self.cache
        lengths = self.length[all_slots]
        cache.reserve(all_slots, lengths, lengths + [len(new) for new in pending.values()])
        self._share_beginning(pending)
        while pending:
            first = max(pending, key=lambda slot: len(pending[slot]))
            longest, capacity = len(pending[first]), int(cache.capacity[first])
            ratio = 8 if self.replays else 2  # padding costs a GPU less than another forward
            alike = [s for s, new in pending.items() if ratio * len(new) >= longest and cache.capacity[s] == capacity]
            alike.sort(key=lambda slot: -len(pending[slot]))
            same: dict[int, list[int]] = {}
            for slot in alike:
                same.setdefault(self.history[slot], []).append(slot)
            groups = list(same.values())[: max(1, self.PREFILL_TOKENS // longest)]
            leaders, store = np.array([group[0] for group in groups]), cache.stores[capacity]
            news = [pending[slot] for slot in leaders.tolist()]
            if longest > self.PREFILL_TOKENS:  # then it is the only one
                news = [self._append_parts(store, leaders, news[0])]
            logits = self._append(store, leaders, news)
            copies = [(group[0], slot) for group in groups for slot in group[1:]]
            if copies:
                sources, targets = zip(*copies, strict=True)
                cache.copy(sources, targets, int(self.length[leaders].max()))
            slots, of_leader = (
                np.concatenate(groups),
                np.repeat(np.arange(len(groups)), [len(group) for group in groups]),
            )
            self.length[slots] = self.length[leaders[of_leader]]
            for slot in slots.tolist():
                del pending[slot]
            yield slots, logits[torch.from_numpy(of_leader).to(logits.device)]

    def _share_beginning(self, pending: dict[int, Array]) -> None:
        """Compute a prefix shared by several uncached episodes once, and remove it from `pending`."""
        alike: dict[bytes, list[int]] = {}
        for slot, new in pending.items():
            if not self.length[slot] and len(new) > self.SHARED:
                alike.setdefault(new[: self.SHARED].astype(np.int64).tobytes(), []).append(slot)
        for slots in alike.values():
            if len({self.history[slot] for slot in slots}) < 2:
                continue
            news, first, capacities = [pending[slot] for slot in slots], slots[0], self.cache.capacity[slots]
            shared = min(in_common(news), min(map(len, news)) - 1)
            store, leader = self.cache.stores[int(capacities[0])], np.array([first])
            self._append(store, leader, [self._append_parts(store, leader, news[0][:shared])], predict=False)
            for capacity in np.unique(capacities):
                others = [slot for slot in slots[1:] if self.cache.capacity[slot] == capacity]
                if others:
                    self.cache.copy([first] * len(others), others, shared)
            self.length[slots] = shared
            pending |= {slot: new[shared:] for slot, new in zip(slots, news, strict=True)}

    def _append_parts(self, store: Store, slot: Array, tokens: Array) -> Array:
        """Append tokens to one slot in parts, as the mask of all of them would be too large. Return the rest."""
        while len(tokens) > self.PREFILL_TOKENS:
            self._append(store, slot, [tokens[: self.PREFILL_TOKENS]], predict=False)
            tokens = tokens[self.PREFILL_TOKENS :]
        return tokens

    def _append(self, store: Store, slots: Array, news: Sequence[Array], predict: bool = True) -> torch.Tensor:
        """Append tokens to slots of a store, at least one to each. Return the logits of the next tokens [n,
        vocabulary], float32, unless `predict` is False."""
        sizes = np.array([len(new) for new in news])
        tokens = np.zeros((len(news), sizes.max()), np.int64)
        for row, new in zip(tokens, news, strict=True):
            row[: len(new)] = new
        lengths = self.length[slots] + sizes
        positions = self.length[slots, None] + np.arange(tokens.shape[1])
        positions = np.minimum(positions, lengths[:, None])  # padding goes where the next token will be
        last = (np.arange(len(slots)), sizes - 1) if predict else (sizes[:0], sizes[:0])
        logits = self._forward(store, self.cache.row[slots], tokens, positions, int(lengths.max()), last)
        self.length[slots] = lengths
        return logits

    @torch.inference_mode()
    def _forward(
        self, store: Store, rows: Array | None, tokens: Array, positions: Array, width: int,
        at: tuple[Array, Array] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Run tokens [n, S] at `positions` [n, S] of the store's `rows` [n] (None: all). Return logits [N, V] at the
        rows and columns `at` [N].

        Without `at`, return the logits of the first column.
        """
        device = self.device
        ids, place = torch.from_numpy(tokens).to(device), torch.from_numpy(positions).to(device)
        store.reserve(width)
        places = None if rows is None else torch.from_numpy(rows).to(device)
        if at is None:
            logits = self._model(store, ids, place, width, places)[:, 0]
        else:
            with logits_only_at(self.model, tuple(torch.from_numpy(x).to(device) for x in at)):
                logits = self._model(store, ids, place, width, places)
        return logits[:, : self.vocab_size].float()

    def _model(
        self, store: Store, ids: torch.Tensor, positions: torch.Tensor, width: int, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the model's logits for tokens [n, S] at `positions` [n, S] of the store's `rows` [n] (None: the first
        n)."""
        self.cache.place(store, rows, positions, width)
        if self.model.training:  # in training mode, gradient checkpointing ignores the cache
            self.model.eval()
        columns, places = store.columns[:width], positions[:, None, :, None]
        mask = attention_mask(self.model, columns <= places, self.layers, places, columns)
        return self.model(
            ids, attention_mask=mask, position_ids=positions, past_key_values=self.cache, use_cache=True
        ).logits
