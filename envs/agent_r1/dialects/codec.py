"""A codec from text to tokens and back, over one tokenizer, in which text never becomes a control token.

A private character, the cut, is put into the string of each control token. The pieces between cuts are encoded
separately. Text without such strings is encoded exactly as the family does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from agent_r1.text.tokenizers import control_tokens, fast_codec, replace_surrogates

# Private-use characters with a special meaning. None of them survives in a text given to a dialect.
RESERVED = re.compile("[\U0010f8a0-\U0010f8af]")
SPLIT = "\U0010f8a0"  # cuts a rendered text into pieces that are encoded separately


class Codec:
    """An encoder of guarded text. Foreign text must pass `guard` first.

    Attributes:
        encode_text, decode: the tokenizer's own functions, text to ids and back.
        controls: control tokens, text to id.
        control_ids: their ids.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.encode_text, self.decode = fast_codec(tokenizer)
        self.controls = control_tokens(tokenizer)
        self.control_ids = frozenset(self.controls.values())
        self._cut, self._edges = _occurrences(self.controls)
        self._normalize = _normalizer(tokenizer) if self.controls else None

    def guard(self, text: str) -> str:
        """Put a cut into every control token's string, so that `encode` never makes a control token from the text."""
        if not text.isascii():
            text = RESERVED.sub("\ufffd", replace_surrogates(text))
            if self._normalize:
                text = self._normalize(text)
        return self._cut(text)

    def guard_edges(self, text: str) -> str:
        """Apply `guard`, and put cuts at both ends, so that no control token forms across the ends."""
        text = self.guard(text)
        inner = text.strip()
        if not inner:
            return text
        start = text.index(inner)
        return f"{text[:start]}{SPLIT}{inner}{SPLIT}{text[start + len(inner) :]}"

    def touches_edge(self, content: Any) -> bool:
        """Return whether a text begins or ends with a part of a control token's string, or is such a part."""
        if not isinstance(content, str) or not content:
            return False
        starts, ends, inside = self._edges
        content = content.strip()
        return content.startswith(starts) or content.endswith(ends) or content in inside

    def encode(self, text: str) -> list[int]:
        """Encode the pieces between cuts."""
        if SPLIT not in text:
            return self.encode_text(text)
        return [token for piece in text.split(SPLIT) if piece for token in self.encode_text(piece)]

    def controls_in(self, ids: list[int]) -> list[int]:
        return [token for token in ids if token in self.control_ids]


def _occurrences(
    controls: dict[str, int],
) -> tuple[Callable[[str], str], tuple[tuple[str, ...], tuple[str, ...], frozenset[str]]]:
    """Return a function that cuts every occurrence of these strings, also overlapping ones, and their parts.

    The parts matter at the edges of a text: proper suffixes (at its start), prefixes (at its end) and inner parts (as
    the whole text).
    """
    by_first: dict[str, list[str]] = {}
    for token in controls:
        by_first.setdefault(token[0], []).append(re.escape(token[1:]))
    # "<(?=...)" and not "(?=<...)": with a literal in front the search skips through text at memory speed.
    pattern = re.compile("|".join(f"{re.escape(c)}(?={'|'.join(rests)})" for c, rests in by_first.items()) or r"(?!)")

    def cut(match: re.Match[str]) -> str:
        return "\ufffd" if match[0] in controls else match[0] + SPLIT  # a token of one character cannot be cut

    starts = tuple({token[i:] for token in controls for i in range(1, len(token))})
    ends = tuple({token[:i] for token in controls for i in range(1, len(token))})
    inside = frozenset(t[i:j] for t in controls for i in range(1, len(t)) for j in range(i + 1, len(t)))
    return lambda text: pattern.sub(cut, text), (starts, ends, inside)


def _normalizer(tokenizer: Any) -> Callable[[str], str] | None:
    """Return the tokenizer's own normalisation, if it runs before the search for control tokens; else None."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    details = getattr(tokenizer, "added_tokens_decoder", {})
    if backend is None or backend.normalizer is None or not any(token.normalized for token in details.values()):
        return None

    def normalize(text: str) -> str:
        once: str = backend.normalizer.normalize_str(text)
        return once if backend.normalizer.normalize_str(once) == once else text

    return normalize
