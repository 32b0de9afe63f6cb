"""Validation of a vLLM server's replies: a wrong figure in a span would be trained on."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any, TypeVar

import httpx
import numpy as np

T = TypeVar("T")
ROUNDING = 1e-3  # tolerance for a log-probability above 0


class Body:
    """The bytes of an answer as they arrive: at most `max_bytes`, within `seconds`."""

    def __init__(self, max_bytes: int, seconds: float) -> None:
        self.max_bytes, self.seconds, self.end = max_bytes, seconds, time.monotonic() + seconds
        self.buffer = bytearray()

    def add(self, chunk: bytes) -> None:
        """Append a chunk. Raise httpx.RequestError if the answer is too long, httpx.ReadTimeout if it is too late."""
        self.buffer += chunk
        if len(self.buffer) > self.max_bytes:
            raise httpx.RequestError(f"its answer is longer than {self.max_bytes} bytes")
        if time.monotonic() > self.end:
            raise self.late()

    def late(self) -> httpx.ReadTimeout:
        """Return the error for an answer that is too late."""
        return httpx.ReadTimeout(f"its answer is not complete after {self.seconds:g} s")

    @property
    def content(self) -> bytes:
        return bytes(self.buffer)


def parse(content: bytes) -> Any:
    """Parse JSON. Raise ValueError."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def member(value: Any, name: str, kind: type[T] | tuple[type[T], ...]) -> T:
    """Return a member of a JSON object, which must have this type. Otherwise raise ValueError with its name."""
    member_value = value.get(name) if isinstance(value, dict) else None
    if not isinstance(member_value, kind) or isinstance(member_value, bool):
        raise ValueError(f"{name} is {str(member_value)[:80]!r}")
    return member_value


def read_span(content: bytes, max_tokens: int, vocab_size: int, newest: int, likeliest: int) -> tuple[Any, ...]:
    """Return tokens, log-probabilities, (version, first token, one past the last) and most likely tokens of a span.

    The span has at most `max_tokens` tokens of a vocabulary, from weights not newer than `newest`. At least `likeliest`
    of the most likely tokens are read for each token, or none for 0. Raise ValueError with the name of an invalid
    field.
    """
    choices = member(parse(content), "choices", list)
    choice = choices[0] if choices else None
    if (reason := member(choice, "finish_reason", str)) not in ("stop", "length"):
        raise ValueError(f"finish_reason is {reason[:80]!r}")
    tokens = member(choice, "token_ids", list)
    details = member(member(choice, "logprobs", dict), "content", list)
    if not 0 < len(tokens) <= max_tokens:
        raise ValueError(f"token_ids has {len(tokens)} entries, but at most {max_tokens} were requested")
    if not all(type(token) is int and 0 <= token < vocab_size for token in tokens):
        raise ValueError(f"token_ids has entries that are not tokens below {vocab_size}")
    if len(details) != len(tokens):
        raise ValueError(f"logprobs has {len(details)} entries for {len(tokens)} tokens")
    tops: list[Any] = [member(detail, "top_logprobs", list) for detail in details] if likeliest else []
    if tops and not likeliest <= len(tops[0]) == min(map(len, tops)) == max(map(len, tops)):
        raise ValueError(f"top_logprobs has {min(map(len, tops))} to {max(map(len, tops))} entries")
    flat = list(itertools.chain.from_iterable(tops))
    logprobs, others = ([_logprob(entry) for entry in entries] for entries in (details, flat))
    ids = [member(top, "token_id", int) for top in flat]
    if ids and not 0 <= min(ids) <= max(ids) < 2**31:
        raise ValueError("token_id in top_logprobs is not a valid token")
    shape = (len(tops), -1)
    versions = _versions(member(choice, "weight_versions", list), len(tokens), newest)
    return tokens, logprobs, versions, (np.reshape(ids, shape), np.reshape(others, shape)) if tops else ([], [])


def _logprob(detail: Any) -> float:
    """Return the log-probability. NaN passes, as the engine handles it."""
    value = member(detail, "logprob", (int, float))
    if value > ROUNDING:
        raise ValueError(f"logprob is {value}, above 0")
    return value


def _versions(spans: list[Any], num_tokens: int, newest: int) -> list[tuple[int, int, int]]:
    """Return the version spans. Raise ValueError unless they cover all tokens."""
    valid, covered = [], np.zeros(num_tokens, bool)
    for span in spans:
        version = str(member(span, "version", (int, str)))[:80]
        start, end = member(span, "start", int), member(span, "end", int)
        if not (version.isdecimal() and int(version) <= newest and 0 <= start <= end <= num_tokens):
            raise ValueError(f"weight_versions has {version} from {start} to {end}, but {newest} was sent last")
        covered[start:end] = True
        valid.append((int(version), start, end))
    if not covered.all():
        raise ValueError(f"weight_versions do not cover {(~covered).sum()} tokens")
    return valid
