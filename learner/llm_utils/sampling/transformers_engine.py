"""Sampling with a `transformers` model in this process: token by token, for many episodes at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from llm_utils.sampling.deterministic import cumulative_sum
from llm_utils.sampling.engine import Span, check_fork
from llm_utils.sampling.slot_states import make_slots

Array = np.ndarray

NOISE = 256  # random numbers drawn at once for a slot


class TransformersEngine:
    """The engine of `--engine transformers` (the interface: `engine.py`). It keeps the rows' keys and values.

    A `step` is one forward: either of all waiting new tokens together, or of one token for every row that is decoding.
    New tokens run when at least one row waits for every eight that are decoding (three with CUDA graphs). Every row has
    its own random numbers, so except for rounding it does not depend on its neighbours.
    """

    overlaps = False  # a step computes in this process, so it gains nothing while the trainer works

    def __init__(
        self, model: PreTrainedModel, num_slots: int, vocab_size: int, temperature: float = 1.0, top_p: float = 1.0,
        entropies: bool = False, top_logprobs: int = 0, longest_row: float = math.inf,
    ) -> None:  # fmt: skip
        self.slots = make_slots(model, num_slots, vocab_size, longest_row)
        self.temperature, self.top_p = temperature, top_p
        self.entropies, self.top_logprobs = entropies, min(top_logprobs, vocab_size)
        self.version = 0  # number of iterations that trained the weights
        self.twins: list[TransformersEngine] = []
        self.release()

    def release(self) -> None:
        """Forget all rows."""
        n = self.slots.num_slots
        self.slots.clear()
        self.pending: dict[int, Array] = {}  # slot -> tokens that the model has not seen
        self.last = np.zeros(n, np.int64)  # the newest sampled token, not yet in the cache
        self.writing = np.zeros(n, bool)
        self.stops = np.full((n, 1), -1, np.int64)  # stop tokens of each slot's span, padded with -1
        self.count, self.room = np.zeros(n, np.int64), np.zeros(n, np.int64)  # tokens of the span, and their limit
        kinds: dict[str, Any] = {"tokens": np.int32, "logprobs": np.float32, "versions": np.int32}
        kinds |= {"entropies": np.float32} if self.entropies else {}
        self.written = {name: np.zeros((n, 64), kind) for name, kind in kinds.items()}
        if self.top_logprobs:
            for name, kind in (("top_tokens", np.int32), ("top_logprobs", np.float32)):
                self.written[name] = np.zeros((n, 64, self.top_logprobs), kind)
        self.generators: list[np.random.Generator | None] = [None] * n
        self.noise, self.noise_used = np.zeros((n, NOISE), np.float32), np.full(n, NOISE)

    def twin(self, temperature: float) -> TransformersEngine:
        """Return an evaluation engine with the same weights and its own rows. Its rows must have ended before the
        weights are updated."""
        shape = self.slots.model, self.slots.num_slots, self.slots.vocab_size
        figures = self.top_p, self.entropies, self.top_logprobs
        self.twins.append(TransformersEngine(*shape, temperature, *figures, longest_row=self.slots.longest_row))
        return self.twins[-1]

    @torch.no_grad()
    def update(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Load new weights. Rows continue under them; their keys and values from older weights stay until the rows
        end."""
        parameters = dict(self.slots.model.named_parameters())
        for name, weight in weights:
            parameters[name].copy_(weight)
        self.version = version
        for engine in (self, *self.twins):
            engine.slots.forget_shared_prefixes()

    def feed(
        self, slot: int, tokens: Array, max_new_tokens: int, stop_token_ids: Sequence[int], seed: Any = None
    ) -> None:
        """Append `tokens` to the slot's row and request the next span. `seed` begins a new row."""
        if seed is not None:
            self.slots.begin(slot)
            self.generators[slot], self.noise_used[slot] = np.random.default_rng(seed), NOISE
        else:  # the last sampled token ended the span: the model has not seen it yet
            tokens = np.concatenate([self.last[slot : slot + 1], tokens])
        self.pending[slot] = tokens
        self.count[slot], self.room[slot] = 0, max_new_tokens
        if (missing := len(stop_token_ids) - self.stops.shape[1]) > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, missing)), constant_values=-1)
        self.stops[slot] = -1
        self.stops[slot, : len(stop_token_ids)] = stop_token_ids

    def fork(self, slot: int, new: int, seed: Any) -> None:
        """Copy `slot`'s row to the slot `new`, which continues with its own random numbers. Raise RuntimeError while
        one of them is being sampled."""
        check_fork(slot, new, (*self.pending, *np.flatnonzero(self.writing)))
        self.slots.copy(slot, new)
        self.last[new] = self.last[slot]
        self.generators[new], self.noise_used[new] = np.random.default_rng(seed), NOISE

    @property
    def busy(self) -> bool:
        """Return True if anything was fed and not yet returned."""
        return bool(self.pending) or bool(self.writing.any())

    def step(self) -> list[Span]:
        """Run one forward. Return the spans that it completed."""
        patience = 3 if self.slots.replays else 8  # relative to a replayed token, a forward of new tokens is slow
        if self.pending and patience * len(self.pending) >= self.writing.sum():
            return [span for slots, logits in self.slots.prefill(self.pending) for span in self._accept(slots, logits)]
        rows = np.flatnonzero(self.writing)
        return self._accept(rows, self.slots.decode(rows, self.last[rows]))

    def close(self) -> None:
        """Forget all rows."""
        self.release()

    @torch.inference_mode()
    def _accept(self, rows: Array, logits: torch.Tensor) -> list[Span]:
        """Sample the next token of `rows` and return the spans that end with it."""
        logprobs = torch.log_softmax(logits if self.temperature in (0, 1) else logits / self.temperature, -1)
        if self.temperature == 0:
            chosen = logprobs.argmax(-1)
        else:
            for row in rows[self.noise_used[rows] == NOISE]:
                self.noise[row], self.noise_used[row] = self.generators[row].random(NOISE, np.float32), 0
            noise = torch.from_numpy(self.noise[rows, self.noise_used[rows]]).to(logits.device)
            self.noise_used[rows] += 1
            chosen = sample(logprobs, noise, self.top_p)
        chosen_logprobs = logprobs.gather(1, chosen[:, None])[:, 0].cpu().numpy()
        if not np.isfinite(chosen_logprobs).all():
            raise FloatingPointError("the policy's logits are not finite", [])
        tokens = chosen.cpu().numpy()
        new: dict[str, Any] = {"tokens": tokens, "logprobs": chosen_logprobs, "versions": self.version}
        if self.entropies:
            new["entropies"] = -(logprobs.exp() * logprobs).sum(-1).cpu().numpy()
        if self.top_logprobs:
            top = logprobs.topk(self.top_logprobs, -1)
            new |= {"top_tokens": top.indices.cpu().numpy(), "top_logprobs": top.values.cpu().numpy()}
        if self.count[rows].max() == self.written["tokens"].shape[1]:  # doubles the room
            self.written = {k: np.concatenate([x, np.zeros_like(x)], axis=1) for k, x in self.written.items()}
        for name, value in new.items():
            self.written[name][rows, self.count[rows]] = value
        self.last[rows] = tokens
        self.count[rows] += 1
        ended = (tokens[:, None] == self.stops[rows]).any(1) | (self.count[rows] >= self.room[rows])
        self.writing[rows] = ~ended
        return [Span(int(r), **{k: x[r, : self.count[r]].copy() for k, x in self.written.items()}) for r in rows[ended]]


def sample(logprobs: torch.Tensor, noise: torch.Tensor, top_p: float = 1.0) -> torch.Tensor:
    """Sample one token per row of log-probabilities [n, vocabulary] from one uniform number per row [n], by
    inversion."""
    probs = logprobs.exp()
    if top_p < 1:  # keep the most likely tokens until their mass reaches top_p
        ordered, order = probs.sort(-1, descending=True)
        probs = torch.zeros_like(probs).scatter(-1, order, ordered * (cumulative_sum(ordered) - ordered < top_p))
    mass = cumulative_sum(probs)
    chosen = torch.searchsorted(mass, mass[:, -1:] * noise[:, None].clamp(max=1 - 1e-6), right=True)[:, 0]
    return chosen.clamp(max=probs.shape[1] - 1)  # larger only if the probabilities are NaN
