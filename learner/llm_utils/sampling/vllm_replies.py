"""What a vLLM server answers, read with care: a span with a wrong figure in it would be trained on."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any, TypeVar

import httpx
import numpy as np

T = TypeVar("T")
ROUNDING = 1e-3  # by which a log-probability may be above 0


class Body:
    """The bytes of an answer as they arrive: at most `most` of them, in at most `seconds`."""

    def __init__(self, most: int, seconds: float) -> None:
        self.most, self.seconds, self.end = most, seconds, time.monotonic() + seconds
        self.buffer = bytearray()

    def add(self, chunk: bytes) -> None:
        """Raises httpx.RequestError where that is too much, httpx.ReadTimeout where it comes too late."""
        self.buffer += chunk
        if len(self.buffer) > self.most:
            raise httpx.RequestError(f"its answer is longer than {self.most} bytes")
        if time.monotonic() > self.end:
            raise self.late()

    def late(self) -> httpx.ReadTimeout:
        """The error that says so."""
        return httpx.ReadTimeout(f"its answer isn't complete after {self.seconds:g} s")

    @property
    def content(self) -> bytes:
        return bytes(self.buffer)


def parse(content: bytes) -> Any:
    """JSON. Raises ValueError."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def member(value: Any, name: str, kind: type[T] | tuple[type[T], ...]) -> T:
    """The member of a JSON object, which has this type. ValueError names the one that hasn't."""
    found = value.get(name) if isinstance(value, dict) else None
    if not isinstance(found, kind) or isinstance(found, bool):
        raise ValueError(f"{name} is {str(found)[:80]!r}")
    return found


def read_span(content: bytes, most: int, vocab_size: int, newest: int, likeliest: int) -> tuple[Any, ...]:
    """Tokens, log-probabilities, (version, first token, one past the last) and likeliest tokens of a sampled span.

    It has at most `most` tokens of a vocabulary, of weights that are not newer than `newest`; of each token at least
    `likeliest` of the likeliest are read, or none for 0. ValueError names the field that can't be right.
    """
    choices = member(parse(content), "choices", list)
    choice = choices[0] if choices else None
    if (reason := member(choice, "finish_reason", str)) not in ("stop", "length"):
        raise ValueError(f"finish_reason is {reason[:80]!r}")
    tokens = member(choice, "token_ids", list)
    details = member(member(choice, "logprobs", dict), "content", list)
    if not 0 < len(tokens) <= most:
        raise ValueError(f"token_ids has {len(tokens)} entries, {most} were asked for at most")
    if not all(type(token) is int and 0 <= token < vocab_size for token in tokens):
        raise ValueError(f"token_ids has more than the numbers of {vocab_size} tokens")
    if len(details) != len(tokens):
        raise ValueError(f"logprobs has {len(details)} entries for {len(tokens)} tokens")
    tops: list[Any] = [member(detail, "top_logprobs", list) for detail in details] if likeliest else []
    if tops and not likeliest <= len(tops[0]) == min(map(len, tops)) == max(map(len, tops)):
        raise ValueError(f"top_logprobs has {min(map(len, tops))} to {max(map(len, tops))} entries")
    flat = list(itertools.chain.from_iterable(tops))
    logprobs, others = ([_logprob(one) for one in part] for part in (details, flat))
    ids = [member(top, "token_id", int) for top in flat]
    if ids and not 0 <= min(ids) <= max(ids) < 2**31:
        raise ValueError("token_id in top_logprobs is no token's")
    shape = (len(tops), -1)
    versions = _versions(member(choice, "weight_versions", list), len(tokens), newest)
    return tokens, logprobs, versions, (np.reshape(ids, shape), np.reshape(others, shape)) if tops else ([], [])


def _logprob(detail: Any) -> float:
    """NaN passes: the engine knows what it means."""
    value = member(detail, "logprob", (int, float))
    if value > ROUNDING:
        raise ValueError(f"logprob is {value}, above 0")
    return value


def _versions(spans: list[Any], num_tokens: int, newest: int) -> list[tuple[int, int, int]]:
    """ValueError unless they cover all tokens."""
    found, covered = [], np.zeros(num_tokens, bool)
    for span in spans:
        version = str(member(span, "version", (int, str)))[:80]
        start, end = member(span, "start", int), member(span, "end", int)
        if not (version.isdecimal() and int(version) <= newest and 0 <= start <= end <= num_tokens):
            raise ValueError(f"weight_versions has {version} from {start} to {end}, and {newest} was the last one sent")
        covered[start:end] = True
        found.append((int(version), start, end))
    if not covered.all():
        raise ValueError(f"weight_versions say nothing of {(~covered).sum()} tokens")
    return found
