"""What samples: the contract that hides transformers, vLLM in this process, and vLLM servers.

An engine has `num_slots` slots. A slot holds one growing row of tokens; `feed` appends to it and has the next span (an
assistant turn) sampled, `step` works for a moment and returns the spans that are complete. Tokens go in and out:
nothing is ever tokenised again, and the row of a slot begins with all that it was fed and sampled before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch

from llm_utils.sources import check_attention

Array = np.ndarray


class EngineDied(RuntimeError):
    """What samples is gone: a server that was stopped, an engine that crashed. The message says which and why."""


@dataclass
class Span:
    """A sampled span of n tokens."""

    slot: int
    tokens: Array  # int32 [n]
    logprobs: Array  # float32 [n], of the sampled tokens under the distribution that was sampled from
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


def make_engine(
    args: Any, source: str, vocab_size: int, model: Any, tokenizer: str | None, longest_row: float = math.inf
) -> Engine:
    """The engine that `--engine` names, with `--num-envs` slots. `model` is what the transformers engine samples from,
    rows of at most `longest_row` tokens.

    vLLM is imported here and nowhere else. SystemExit where an engine and the model don't fit.
    """
    sampling = {"temperature": args.temperature, "top_p": args.top_p}
    if args.engine == "transformers":
        from llm_utils.transformers_engine import TransformersEngine

        check_attention(model.config, longest_row)
        return TransformersEngine(model, args.num_envs, vocab_size, **sampling, longest_row=longest_row)
    if args.engine == "vllm":
        from llm_utils.vllm_engine import VLLMEngine

        return VLLMEngine(source, args.num_envs, vocab_size, **sampling)
    from llm_utils.vllm_client import VLLMClient

    return VLLMClient(args.vllm_url, source, args.num_envs, vocab_size, tokenizer=tokenizer, **sampling)
