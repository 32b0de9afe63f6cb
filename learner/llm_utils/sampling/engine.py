"""What samples: the contract that hides transformers, vLLM in this process, and vLLM servers.

An engine has `num_slots` slots. A slot holds one growing row of tokens; `feed` appends to it and has the next span (an
assistant turn) sampled, `step` works for a moment and returns the spans that are complete. Tokens go in and out:
nothing is ever tokenised again, and the row of a slot begins with all that it was fed and sampled before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch

from agent_r1_tools.text import PrintableMessage

Array = np.ndarray
VLLM_SHARE = 0.4  # of a GPU's memory, of --engine vllm; while the trainer works vLLM sleeps


class EngineDied(PrintableMessage, RuntimeError):
    """The sampler is gone: a server was stopped, or an engine crashed. The message says which and why, and is
    `printable`: it may quote what a server wrote."""


@dataclass
class Span:
    """A sampled span of n tokens."""

    slot: int
    tokens: Array  # int32 [n]
    logprobs: Array  # float32 [n], of the sampled tokens; with --top-p transformers gives those before it was applied
    versions: Array  # int32 [n]: `update` gave this number to the weights that sampled the token
    entropies: Array | None = None  # float32 [n] in nats, on request
    top_tokens: Array | None = None  # int32 [n, k], on request: the k most likely tokens, the likeliest first
    top_logprobs: Array | None = None  # float32 [n, k], theirs


class Engine(Protocol):
    """Every engine is made with `entropies` and `top_logprobs` (k): what spans carry beyond the sampled tokens.

    transformers gives exact entropies and any k. vLLM gives at most 20 log-probabilities of a token; its entropies take
    all other tokens as one, so they are lower bounds.
    """

    overlaps: bool  # does it go on sampling while the trainer works? Then `step` is worth calling in between

    def feed(
        self, slot: int, tokens: Array, max_new_tokens: int, stop_token_ids: Sequence[int], seed: Any = None
    ) -> None:
        """Append `tokens` int32 [m] to the slot's row and have the next span sampled, up to and with a stop token.

        `seed` begins a new row with random numbers of its own. Stop tokens are this span's only.
        """

    def step(self) -> list[Span]:
        """Work for a moment. Returns the spans that it completed; EngineDied where nothing will come any more."""

    def update(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Take over new weights, under their Hugging Face names; rows in flight go on under them."""

    def release(self) -> None:
        """Forget all rows, and give memory back where that is worth it."""

    @property
    def busy(self) -> bool:
        """Is something being sampled, or waiting to be returned by `step`?"""

    def twin(self, temperature: float) -> Self:
        """Another engine on the same weights, with rows and a temperature of its own."""

    def fork(self, slot: int, new: int, seed: Any) -> None:
        """Let the slot `new` go on from a copy of `slot`'s row, with random numbers of its own.

        Both have ended their span and wait for `feed`, which continues either without the other.
        """

    def close(self) -> None:
        """Stop what the engine runs."""
