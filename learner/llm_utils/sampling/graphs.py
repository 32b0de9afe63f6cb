"""CUDA graphs for the forward of one token per row: captured once, then replayed. A GPU may run a small model's kernels
faster than Python launches them (benchmarks/performance/gpu.py)."""

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
    """Call `run`. Raise RuntimeError if it synchronises with the GPU: a capture would fail and leave torch in an
    undefined state."""
    before = torch.cuda.get_sync_debug_mode() if device.type == "cuda" else None
    with warnings.catch_warnings():  # torch warns that this is a prototype
        warnings.simplefilter("ignore")
        if before is not None:
            torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            if before is not None:
                torch.cuda.set_sync_debug_mode(before)


def record(run: Callable[[], None], device: torch.device, pool: Any) -> Callable[[], None]:
    """Return a function that repeats `run` on the same memory. Only a GPU has graphs; elsewhere it is `run` itself."""
    if device.type != "cuda":
        return run
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            run()
    except BaseException:
        torch.cuda.set_stream(stream)  # torch does not restore it if the end of the capture fails
        raise
    return graph.replay


class Graphs:
    """Forwards of a store's rows, with a graph for each width and memory location.

    A `forward` of (store, tokens [R, 1], positions [R, 1], width) returns logits [R, 1, vocabulary]. It is called
    twice, then captured, and replayed afterwards. So memory that moves soon is not captured.
    """

    STEP = 128  # columns, or an eighth to a sixteenth of all; widths are rounded up to a multiple
    ASKED = 2  # calls before the capture

    def __init__(self, device: torch.device) -> None:
        self.device, self.works, self.tried = device, True, False
        self.clear()

    def clear(self) -> None:
        """Free the memory that the graphs share. Their stores must be gone."""
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self.newest: Any = None  # a pool needs at least one live graph
        self.logits = torch.empty(0, 1, 0)  # shared by all graphs, as separate ones would take much memory

    def __call__(self, forward: Forward, store: Store, tokens: Array, positions: Array, width: int) -> torch.Tensor:
        """Run one token for each allocated row, [R] at positions [R]. Return logits [R, vocabulary], valid until the
        next call. An unused row may have any token at position 0."""
        step = max(self.STEP, 2 ** (width.bit_length() - 4))
        width = min(-(-width // step) * step, store.size[1])
        new_inputs = torch.from_numpy(np.stack([tokens, positions])[..., None])
        if width not in store.graphs and store.asked[width] == self.ASKED:
            self._record(forward, store, new_inputs, width)
        if width not in store.graphs:
            store.asked[width] += 1
            inputs = new_inputs.to(self.device)
            logits = forward(store, inputs[0], inputs[1], width)
            if self.logits.shape[0] < logits.shape[0]:
                self.logits = torch.empty_like(logits)
            return logits[:, 0]
        inputs, logits, replay = store.graphs[width]
        inputs.copy_(new_inputs)
        replay()
        return logits[:, 0]

    def _record(self, forward: Forward, store: Store, new_inputs: torch.Tensor, width: int) -> None:
        inputs, logits = new_inputs.to(self.device), self.logits[: new_inputs.shape[1]]

        def run() -> None:
            logits.copy_(forward(store, inputs[0], inputs[1], width))

        try:
            if not self.tried:
                with store.unchanged(store.numbers):
                    refuse_to_wait(run, self.device)
                self.tried = True
            self.newest = inputs, logits, record(run, self.device, self.pool)
            store.graphs[width] = self.newest
        except RuntimeError as error:  # some kinds of RoPE and some experts synchronise with the GPU
            self.works = False
            reason = (str(error).splitlines() or ["no reason given"])[0]
            problem = "this model's forward cannot be captured as a CUDA graph, so sampling is slower"
            warnings.warn(f"{problem}: {reason}", stacklevel=2)
