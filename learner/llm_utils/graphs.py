"""A forward of one token for every row, recorded once and replayed: a GPU runs a small model's kernels several times
faster than Python asks for them (benchmarks/gpu.py)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from llm_utils.slot_cache import Store

Array = np.ndarray


def record(run: Callable[[], None], device: torch.device, pool: Any) -> Callable[[], None]:
    """A function that does what `run` did, on the same memory. Only a GPU has graphs; elsewhere it is `run`."""
    if device.type != "cuda":
        return run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        run()
    return graph.replay


class Graphs:
    """Forwards of a store's rows, a graph for each width and place of its memory.

    `forward(store, tokens [R, 1], positions [R, 1], width)` gives logits [R, 1, vocabulary]. It is called the first
    time, recorded the second time, and replayed from then on: memory that soon moves again isn't worth a recording.
    """

    STEP = 128  # columns; widths between have the graph of the next multiple

    def __init__(self, forward: Callable[..., torch.Tensor], device: torch.device) -> None:
        self.forward, self.device, self.works = forward, device, True
        self.clear()

    def clear(self) -> None:
        """Give back what graphs share; the stores with the graphs are gone."""
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self.newest: Any = None  # a pool without a graph takes no other
        self.logits = torch.empty(0, 1, 0)  # of all graphs: each with its own would take much memory

    def __call__(self, store: Store, tokens: Array, positions: Array, width: int) -> torch.Tensor:
        """One token for each row that there is memory for, [R] at positions [R] -> logits [R, vocabulary], there until
        the next call. A row that isn't in use may have any token at position 0."""
        width = min(-(-width // self.STEP) * self.STEP, store.size[1])
        given = torch.from_numpy(np.stack([tokens, positions])[..., None])
        if self.works and width in store.graphs and not store.graphs[width]:
            self._record(store, given, width)
        if not store.graphs.get(width):
            store.graphs[width] = None
            logits = self.forward(store, *given.to(self.device), width)
            if self.logits.shape[0] < logits.shape[0]:
                self.logits = torch.empty_like(logits)
            return logits[:, 0]
        inputs, logits, replay = store.graphs[width]
        inputs.copy_(given)
        replay()
        return logits[:, 0]

    def _record(self, store: Store, given: torch.Tensor, width: int) -> None:
        inputs, logits = given.to(self.device), self.logits[: given.shape[1]]

        def run() -> None:
            logits.copy_(self.forward(store, *inputs, width))

        try:
            store.graphs[width] = self.newest = inputs, logits, record(run, self.device, self.pool)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # something in it waits for the GPU, as some kinds of RoPE and experts do
            self.works = False
            first = (str(error).splitlines() or ["no reason given"])[0]
            warnings.warn(f"this model's forward can't be recorded, so sampling takes longer: {first}", stacklevel=2)
