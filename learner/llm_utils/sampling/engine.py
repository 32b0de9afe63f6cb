"""The sampling-engine interface, implemented for transformers, in-process vLLM and vLLM servers.

An engine has `num_slots` slots. A slot holds one growing row of tokens. `feed` appends to the row and requests the next
span (an assistant turn). `step` works for a moment and returns the completed spans. Tokens go in and out, and nothing
is ever re-tokenised. A slot's row always begins with everything fed and sampled before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch

from agent_r1_tools.text import PrintableMessage

Array = np.ndarray
VLLM_SHARE = 0.4  # share of a GPU's memory for --engine vllm, which sleeps while the trainer works


class EngineDied(PrintableMessage, RuntimeError):
    """An engine that is gone: its server was stopped, or it crashed. The message names engine and cause, and is
    `printable`, as it may quote a server's text."""


@dataclass
class Span:
    """A sampled span of n tokens."""

    slot: int
    tokens: Array  # int32 [n]
    logprobs: Array  # float32 [n], of the sampled tokens; for transformers, before --top-p was applied
    versions: Array  # int32 [n]: the version, given to `update`, of the weights that sampled each token
    entropies: Array | None = None  # float32 [n] in nats, on request
    top_tokens: Array | None = None  # int32 [n, k], on request: the k most likely tokens, most likely first
    top_logprobs: Array | None = None  # float32 [n, k], of `top_tokens`


class Engine(Protocol):
    """The interface of all engines. Arguments `entropies` and `top_logprobs` (k) add these figures to spans.

    transformers gives exact entropies and any k. vLLM gives at most 20 log-probabilities per token. Its entropies treat
    all other tokens as one token, so they are lower bounds.
    """

    overlaps: bool  # True if it samples while the trainer works, so that `step` is worth calling in between

    def feed(
        self, slot: int, tokens: Array, max_new_tokens: int, stop_token_ids: Sequence[int], seed: Any = None
    ) -> None:
        """Append `tokens` int32 [m] to the slot's row and request the next span, up to and including a stop token.

        `seed` begins a new row with its own random numbers. The stop tokens are for this span only.
        """

    def step(self) -> list[Span]:
        """Work for a moment. Return the spans completed by it. Raise EngineDied if no more will come."""

    def update(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Load new weights, given by their Hugging Face names. Rows in flight continue under them."""

    def release(self) -> None:
        """Forget all rows. Free memory if that is worth it."""

    @property
    def busy(self) -> bool:
        """Return True while a span is being sampled, or waits to be returned by `step`."""

    def twin(self, temperature: float) -> Self:
        """Return an evaluation engine: the same weights, top-p and figures, its own rows and its own temperature."""

    def fork(self, slot: int, new: int, seed: Any) -> None:
        """Copy `slot`'s row to the slot `new`, which continues with its own random numbers.

        Both have completed their span and wait for `feed`, which continues each independently. Raise RuntimeError while
        one of them is being sampled.
        """

    def close(self) -> None:
        """Stop everything that the engine runs."""


def check_fork(slot: int, new: int, sampling: Iterable[int]) -> None:
    """Raise RuntimeError if one of two slots is among those that are being sampled."""
    if busy := {slot, new}.intersection(map(int, sampling)):
        raise RuntimeError(
            f"slot {min(busy)} is being sampled, but only rows that wait for `feed` can be forked; step() first"
        )
