"""Spaces of actions and observations: TokenSpan for token sequences, UnicodeText for texts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

_LONGEST_SAMPLE = 64  # random spans are for checks and smoke tests, which do not need 30,000 random tokens
_LONGEST_TEXT = 32


class TokenSpan(gym.Space[NDArray[np.int32]]):
    """Sequences of `min_len` to `max_len` token ids below `vocab_size`, as 1-D int32 arrays.

    It subclasses `Space` directly. `Text` and `Sequence` cost a thousand times more per check. A subclass of `Text`
    would inherit its shared-memory path, which silently returns garbage in `AsyncVectorEnv`. Pass
    `shared_memory=False` to `AsyncVectorEnv`; it raises an error otherwise.
    """

    def __init__(
        self, vocab_size: int, max_len: int, min_len: int = 0, seed: int | np.random.Generator | None = None
    ) -> None:
        if vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1, got {vocab_size}")
        if not 0 <= min_len <= max_len:
            raise ValueError(f"0 <= min_len <= max_len must hold, got min_len={min_len}, max_len={max_len}")
        self.vocab_size = int(vocab_size)
        self.max_len = int(max_len)
        self.min_len = int(min_len)
        super().__init__(None, np.int32, seed)

    @property
    def is_np_flattenable(self) -> bool:
        """False: spans have no fixed length, so they do not flatten to a Box."""
        return False

    def sample(self, mask: None = None, probability: None = None) -> NDArray[np.int32]:
        """Return a uniform span of at most 64 tokens (or `min_len`, if larger)."""
        if mask is not None or probability is not None:
            raise ValueError("TokenSpan.sample takes no mask and no probability; mask logits in the sampler instead")
        longest = max(self.min_len, min(self.max_len, _LONGEST_SAMPLE))
        length = int(self.np_random.integers(self.min_len, longest + 1))
        return self.np_random.integers(0, self.vocab_size, size=length, dtype=np.int32)

    def contains(self, x: Any) -> bool:
        """Return True for a 1-D integer array whose length and ids are in range."""
        if not isinstance(x, np.ndarray) or x.ndim != 1 or not np.issubdtype(x.dtype, np.integer):
            return False
        if not self.min_len <= x.size <= self.max_len:
            return False
        return x.size == 0 or bool(x.min() >= 0 and x.max() < self.vocab_size)

    def read(self, action: Any) -> NDArray[np.int32]:
        """Return the action as int32, of any length.

        Raises ValueError for an action that is not a 1-D array of ids of the vocabulary.
        """
        try:
            span = np.asarray(action)
        except ValueError:  # nested lists of different lengths
            span = np.empty((), object)
        if span.size == 0 and span.ndim == 1:
            return np.empty(0, np.int32)
        if span.ndim != 1 or not np.issubdtype(span.dtype, np.integer):
            raise ValueError(
                f"an action must be a 1-D array of token ids, got shape {span.shape} and dtype {span.dtype}; "
                "encode text with env.unwrapped.tokenizer, or wrap the environment in TextInterface"
            )
        low, high = int(span.min()), int(span.max())
        if low < 0 or high >= self.vocab_size:
            raise ValueError(
                f"token id {low if low < 0 else high} is outside the vocabulary of {self.vocab_size}; "
                "mask logits beyond action_space.vocab_size when sampling"
            )
        return span.astype(np.int32, copy=False)

    def to_jsonable(self, sample_n: Iterable[NDArray[np.int32]]) -> list[list[int]]:
        """Return lists of ids."""
        return [span.tolist() for span in sample_n]

    def from_jsonable(self, sample_n: list[Any]) -> list[NDArray[np.int32]]:
        """Invert `to_jsonable`."""
        return [np.asarray(span, dtype=np.int32) for span in sample_n]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TokenSpan)
            and (self.vocab_size, self.max_len, self.min_len) == (other.vocab_size, other.max_len, other.min_len)
        )

    def __repr__(self) -> str:
        return f"TokenSpan(vocab_size={self.vocab_size}, max_len={self.max_len}, min_len={self.min_len})"


class UnicodeText(gym.Space[str]):
    """Texts of any length.

    `gymnasium.spaces.Text` needs a finite alphabet, and takes seconds to build with all of Unicode. This space samples
    printable ASCII only (at most 32 characters), which is enough for checks.
    """

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(None, str, seed)

    @property
    def is_np_flattenable(self) -> bool:
        """False: texts have no fixed length, so they do not flatten to a Box."""
        return False

    def sample(self, mask: None = None, probability: None = None) -> str:
        """Return at most 32 printable ASCII characters."""
        if mask is not None or probability is not None:
            raise ValueError("UnicodeText.sample takes no mask and no probability")
        length = int(self.np_random.integers(_LONGEST_TEXT + 1))
        return bytes(self.np_random.integers(32, 127, size=length, dtype=np.uint8)).decode()

    def contains(self, x: Any) -> bool:
        """Return True for a str."""
        return isinstance(x, str)

    def to_jsonable(self, sample_n: Iterable[str]) -> list[str]:
        """Return the texts themselves."""
        return list(sample_n)

    def from_jsonable(self, sample_n: list[Any]) -> list[str]:
        """Invert `to_jsonable`."""
        return [str(text) for text in sample_n]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnicodeText)

    def __repr__(self) -> str:
        return "UnicodeText()"
