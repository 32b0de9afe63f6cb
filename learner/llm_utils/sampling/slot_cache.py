"""The key-value cache of many growing episodes, each in a slot: its memory, and moves of rows within it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from llm_utils.setup.model_checks import WITHOUT_KEYS

Array = np.ndarray
GPU_SHARE = 0.25  # share of a GPU's memory for the smallest store; if all rows fit, it is allocated at once



def bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes that the keys and values of a token take in all layers that have their own."""
    config, numbers = config.get_text_config(), 0
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    for index in range(config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", 0) or 0)):
        if kinds[index] in WITHOUT_KEYS:
            continue
        layer = config.per_layer_config[index]  # the config, with this layer's own values
        if rank := getattr(layer, "kv_lora_rank", None):  # keys and values are computed from fewer numbers
            numbers += rank + layer.qk_rope_head_dim
        elif all_heads := getattr(layer, "num_attention_heads", None):
            heads = getattr(layer, "num_key_value_heads", None) or getattr(layer, "num_kv_heads", None) or all_heads
            if getattr(layer, "multi_query", False) and not getattr(layer, "new_decoder_architecture", False):
                heads = 1  # Falcon
            numbers += 2 * heads * (getattr(layer, "head_dim", None) or layer.hidden_size // all_heads)
    return numbers * dtype.itemsize


def gpu_room(device: torch.device) -> int:
    """Return the bytes of a GPU that the smallest store may take."""
    return int(GPU_SHARE * torch.cuda.get_device_properties(device).total_memory)


def first_store(capacity: int, num_slots: int, longest_row: float, token: int, max_bytes: int) -> tuple[int, int]:
    """Return the capacity of the smallest store, and the longest row if all slots with such rows fit (else 0).

    The capacity is `capacity` tokens of `token` bytes, or more if all slots then take at most `max_bytes`.
    """
    all_fit = longest_row * num_slots * token <= max_bytes
    while capacity < longest_row if all_fit else 2 * capacity * num_slots * token <= max_bytes:
        capacity *= 2
    return capacity, int(longest_row) if all_fit else 0


class Store:
    """Keys and values of rows of similar length, of at most `capacity` tokens.

    Token t of a row is in column t, so there are no holes. Columns past a row's length hold garbage that is never read:
    a query at position p attends to columns 0..p only, and column p is written before it is read. There is always one
    column more than the longest row needs; unused rows of a batch write there. The columns of a head are contiguous:
    attention reads all of them for every token, and takes up to three times as long if they are not.
    """

    SMALL = 2**27  # bytes; allocation is slow on a CPU, so small stores grow in larger steps

    def __init__(self, capacity: int, device: torch.device, whole: tuple[int, int] | None = None) -> None:
        """Make an empty store. `whole`: rows and columns to allocate at once, so that the memory never moves."""
        self.capacity, self.device, self.whole = capacity, device, whole
        self.slots: list[int] = []  # the slot of each row
        self.layers: dict[int, list[torch.Tensor]] = {}  # by layer: keys and values, [rows, heads, columns, dimension]
        self.states: dict[Any, torch.Tensor] = {}  # [rows, ...], of layers that have them (slot_states.py)
        self.size = (0, 0)  # allocated rows and columns
        self.numbers = self.columns = torch.arange(0, device=device)  # indices of rows and of columns
        self.asked: Counter[int] = Counter()  # by width: forwards of one token without a graph (graphs.py)
        self.graphs: dict[int, Any] = {}  # by width: the captured graphs

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for layer in (*self.layers.values(), self.states.values()) for x in layer)

    def layer(self, index: int, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the keys and values of a layer. A new layer gets the heads and dtype of `like`, [_, heads, _,
        dim.]."""
        if index not in self.layers:
            self.layers[index] = [x.new_zeros(self.size[0], x.shape[1], self.size[1], x.shape[3]) for x in like]
        return self.layers[index]

    def state(self, key: Any, like: torch.Tensor) -> torch.Tensor:
        """Return a state of all rows. A new one gets the shape and dtype of `like` [_, ...]."""
        if key not in self.states:
            self.states[key] = like.new_zeros(self.size[0], *like.shape[1:])
        return self.states[key]

    @contextmanager
    def unchanged(self, rows: Array | torch.Tensor) -> Iterator[None]:
        """Restore the states of these rows after the block, in which forwards may change them."""
        before = {key: state[rows] for key, state in self.states.items()}
        try:
            yield
        finally:
            for key, state in before.items():
                self.states[key][rows] = state

    def reserve(self, columns: int) -> None:
        """Allocate memory for all rows with so many columns. Growth adds an eighth more than needed; columns of a small
        store grow by a half."""
        if self.whole and self.size == (0, 0):
            self.resize(*self.whole)
        (rows, allocated), used = self.size, len(self.slots)
        if used > rows or columns >= allocated:
            share = 2 if 0 < self.nbytes < self.SMALL else 8
            self.resize(
                used + used // 8 if used > rows else rows,
                min(self.capacity, columns + columns // share) + 1 if columns >= allocated else allocated,
            )

    def resize(self, rows: int, columns: int) -> None:
        """Change the size of the memory. Rows in use stay."""
        used, width = min(rows, self.size[0]), min(columns, self.size[1])
        for layer in self.layers.values():
            for i, old in enumerate(layer):  # one by one, so that the whole store never exists twice
                layer[i] = old.new_zeros(rows, old.shape[1], columns, old.shape[3])
                layer[i][:used, :, :width] = old[:used, :, :width]
        for key, state in self.states.items() if rows != self.size[0] else ():
            self.states[key] = state.new_zeros(rows, *state.shape[1:])
            self.states[key][:used] = state[:used]
        self.size, self.asked, self.graphs = (rows, columns), Counter(), {}
        self.numbers, self.columns = (torch.arange(n, device=self.device) for n in self.size)

    def drop(self, rows: Sequence[int]) -> dict[int, int]:
        """Remove rows; rows from the end fill the holes. Return the new rows of the slots that moved."""
        num_left, dropped = len(self.slots) - len(rows), set(rows)
        holes = [row for row in sorted(dropped) if row < num_left]
        movers = [row for row in range(num_left, len(self.slots)) if row not in dropped]
        if holes:
            copy_rows(self, movers, self, holes, self.size[1])
        for hole, mover in zip(holes, movers, strict=True):
            self.slots[hole] = self.slots[mover]
        del self.slots[num_left:]
        return {self.slots[hole]: hole for hole in holes}


def copy_rows(source: Store, rows: Sequence[int], target: Store, new_rows: Sequence[int], columns: int) -> None:
    """Copy the first columns and the states of rows of one store to rows of another, or of the same."""
    for index, layer in source.layers.items():
        for old, new in zip(layer, target.layer(index, layer), strict=True):
            new[new_rows, :, :columns] = old[rows, :, :columns]
    for key, state in source.states.items():
        target.state(key, state)[new_rows] = state[rows]


class SlotCache(DynamicCache):
    """A key-value cache whose rows grow independently, each in a store for its length. A row that becomes long moves to
    another store, so the other rows do not become as long."""

    KEPT_BYTES = 2**28  # unused memory up to this size is kept, as allocation is slow on a CPU

    def __init__(self, num_slots: int, device: torch.device, smallest: int, whole: int = 0) -> None:
        """Make an empty cache. `whole`: tokens of the longest row if all slots of that length fit; 0 if stores must
        grow."""
        super().__init__()
        self.device, self.smallest = device, smallest
        self.whole = (num_slots, whole + 1) if whole else None
        self.stores: dict[int, Store] = {}  # by capacity: `smallest` times a power of 2
        self.capacity = np.zeros(num_slots, np.int64)  # of each slot's store; 0: the slot has no row yet
        self.row = np.zeros(num_slots, np.int64)  # of each slot in its store

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self.stores.values())

    def clear(self) -> None:
        """Remove all rows."""
        grown = self.device.type == "cuda" and not self.whole  # a fresh run has other sizes and rounds differently
        if grown or self.nbytes > self.KEPT_BYTES:
            self.stores = {}
        for store in self.stores.values():
            store.slots = []
        self.capacity[:] = 0
        self.next: Any = None  # a reference to the last forward's store would keep its memory

    @torch.inference_mode()
    def reserve(self, slots: Array, kept: Array, needed: Array) -> None:
        """Give each of `slots` [n] a row with room for `needed` tokens. Its first `kept` tokens stay."""
        before = self.capacity[slots]
        doublings = np.ceil(np.log2(np.maximum(needed / self.smallest, 1))).astype(np.int64)
        after = self.smallest * 2**doublings
        moving = before != after  # to a smaller store only at the beginning of a new row
        for source, target in sorted(set(zip(before[moving].tolist(), after[moving].tolist(), strict=True))):
            movers = moving & (before == source) & (after == target)
            self._move(slots[movers], source, target, int(kept[movers].max()))

    def _move(self, slots: Array, source: int, target: int, columns: int) -> None:
        """Move slots from the store of capacity `source` (0: none) to the store of capacity `target`."""
        whole = self.whole if target == self.smallest else None
        new = self.stores.setdefault(target, Store(target, self.device, whole))
        rows = list(range(len(new.slots), len(new.slots) + len(slots)))
        new.slots += slots.tolist()
        new.reserve(columns)
        if source:
            old = self.stores[source]
            if columns:
                copy_rows(old, self.row[slots].tolist(), new, rows, columns)
            for slot, row in old.drop(self.row[slots].tolist()).items():
                self.row[slot] = row
            num_left = len(old.slots)
            if self.nbytes > self.KEPT_BYTES and num_left + num_left // 4 < old.size[0]:
                old.resize(num_left + num_left // 8, old.size[1] if num_left else 0)
        self.row[slots], self.capacity[slots] = rows, target

    @torch.inference_mode()
    def copy(self, sources: Sequence[int], targets: Sequence[int], columns: int) -> None:
        """Give the slots `targets`, all of one store, the first columns of the slots `sources`, all of one store."""
        old, new = (self.stores[int(self.capacity[slots[0]])] for slots in (sources, targets))
        new.reserve(columns)
        copy_rows(old, self.row[list(sources)].tolist(), new, self.row[list(targets)].tolist(), columns)

    def place(self, store: Store, rows: torch.Tensor | None, positions: torch.Tensor, width: int) -> None:
        """Set the target of the next forward: it writes at `positions` [n, S] of the store's `rows` [n] (None: the
        first n), and reads `width` columns."""
        at = (store.numbers[: len(positions)] if rows is None else rows)[:, None], positions
        self.next = store, rows, at, width

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions and masks are given explicitly

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        store, rows, at, width = self.next
        stored = store.layer(layer_idx, (key_states, value_states))
        for old, new in zip(stored, (key_states, value_states), strict=True):
            old[at[0], :, at[1]] = new.transpose(1, 2)
        if rows is None:
            return [x[: len(key_states), :, :width] for x in stored]
        return [x[:, :, :width].index_select(0, rows) for x in stored]
