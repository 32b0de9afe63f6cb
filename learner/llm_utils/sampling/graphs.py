"""A forward of one token for every row, recorded once and replayed: a GPU may run a small model's kernels faster
than Python asks for them (benchmarks/performance/gpu.py)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from llm_utils.sampling.slot_cache import Store

Array = np.ndarray
Forward = Callable[[Store, torch.Tensor, torch.Tensor, int], torch.Tensor]


def refuse_to_wait(run: Callable[[], None], device: torch.device) -> None:
    """Call `run`. RuntimeError where it waits for the GPU: a recording would fail, and leave torch in disorder."""
    before = torch.cuda.get_sync_debug_mode() if device.type == "cuda" else None
    with warnings.catch_warnings():  # that this is a prototype
        warnings.simplefilter("ignore")
        if before is not None:
            torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            if before is not None:
                torch.cuda.set_sync_debug_mode(before)


def record(run: Callable[[], None], device: torch.device, pool: Any) -> Callable[[], None]:
    """A function that does what `run` does, on the same memory. Only a GPU has graphs; elsewhere it is `run`."""
    if device.type != "cuda":
        return run
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            run()
    except BaseException:
        torch.cuda.set_stream(stream)  # torch leaves its own when the end of the recording fails
        raise
    return graph.replay


class Graphs:
    """Forwards of a store's rows, a graph for each width and place of its memory.

    A `forward` of (store, tokens [R, 1], positions [R, 1], width) gives logits [R, 1, vocabulary]. It is called twice,
    then recorded, and replayed from then on: memory that soon moves again isn't worth a recording.
    """

    STEP = 128  # columns, or an eighth to a sixteenth of all; a width between has the graph of the next multiple
    ASKED = 2  # calls before the recording

    def __init__(self, device: torch.device) -> None:
        self.device, self.works, self.tried = device, True, False
        self.clear()

    def clear(self) -> None:
        """Give back what the graphs shared; the stores that had them must be gone."""
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self.newest: Any = None  # a pool without a graph takes no other
        self.logits = torch.empty(0, 1, 0)  # of all graphs: each with its own would take much memory

    def __call__(self, forward: Forward, store: Store, tokens: Array, positions: Array, width: int) -> torch.Tensor:
        """One token for each row that there is memory for, [R] at positions [R] -> logits [R, vocabulary], there until
        the next call. A row that isn't in use may have any token at position 0."""
        step = max(self.STEP, 2 ** (width.bit_length() - 4))
        width = min(-(-width // step) * step, store.size[1])
        given = torch.from_numpy(np.stack([tokens, positions])[..., None])
        if width not in store.graphs and store.asked[width] == self.ASKED:
            self._record(forward, store, given, width)
        if width not in store.graphs:
            store.asked[width] += 1
            inputs = given.to(self.device)
            logits = forward(store, inputs[0], inputs[1], width)
            if self.logits.shape[0] < logits.shape[0]:
                self.logits = torch.empty_like(logits)
            return logits[:, 0]
        inputs, logits, replay = store.graphs[width]
        inputs.copy_(given)
        replay()
        return logits[:, 0]

    def _record(self, forward: Forward, store: Store, given: torch.Tensor, width: int) -> None:
        inputs, logits = given.to(self.device), self.logits[: given.shape[1]]

        def run() -> None:
            logits.copy_(forward(store, inputs[0], inputs[1], width))

        try:
            if not self.tried:
                refuse_to_wait(run, self.device)
                self.tried = True
            self.newest = inputs, logits, record(run, self.device, self.pool)
            store.graphs[width] = self.newest
        except RuntimeError as error:  # some kinds of RoPE, and some experts, wait for the GPU
            self.works = False
            first = (str(error).splitlines() or ["no reason given"])[0]
            warnings.warn(f"this model's forward can't be recorded, so sampling takes longer: {first}", stacklevel=2)
