"""BM25 over passages in memory, scored by `bm25s`.

Method "lucene" (Kamphuis et al. 2020) with k1 = 0.9 and b = 0.4 (Anserini's values), the Snowball stemmer for
English, and bm25s's stop words "en". What is indexed is the title, a newline and the text. What a word is in other
scripts: `words.py`.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from agent_r1_tools.search.passages import Hit, Passage
from agent_r1_tools.search.words import all_words, letters, only_letter, words

if TYPE_CHECKING:
    import numpy as np

K1 = 0.9
B = 0.4
CACHED_CHARS = 256
"""Stems of longer queries are not kept: 2,000 queries of 8,192 characters took 131 MB."""


class BM25Retriever:
    """A retriever that finds passages by words.

    Equal scores keep the order of the passages, so results are the same on every machine. A passage that shares no
    word with the query is never returned. So there may be fewer than `top_k` hits, or none (an empty query, only stop
    words, only unknown words).

    Args:
        passages: the corpus; may be empty. Ten passages take about a millisecond to index, so an episode can have
        its own.
    """

    timeout = math.inf

    def __init__(self, passages: Iterable[Passage]) -> None:
        self.passages = list(passages)
        texts = [f"{p.title}\n{p.text}" for p in self.passages]
        self._plain = _Index(map(stems, texts))
        self._others = _Index(map(_others, self.passages, texts))  # so that names in other scripts add no length

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        """Return at most `top_k` hits for each query, best first, with scores above zero."""
        return [self._search(query, top_k) for query in queries]

    def _search(self, query: str, top_k: int) -> list[Hit]:
        plain, others = query_stems(query) if len(query) <= CACHED_CHARS else query_stems.__wrapped__(query)
        results = [scores for scores in (self._plain.scores(plain), self._others.scores(others)) if scores is not None]
        if not results or top_k < 1:
            return []
        scores = sum(results[1:], start=results[0])
        return [(self.passages[i], float(scores[i])) for i in top_indexes(scores, top_k)]


class _Index:
    """Scores of documents of stems."""

    def __init__(self, documents: Iterable[Sequence[str]]) -> None:
        self._vocabulary: dict[str, int] = {}
        number = self._vocabulary.setdefault
        ids = [[number(stem, len(self._vocabulary)) for stem in document] for document in documents]
        self._index = _build_index(ids, len(self._vocabulary))

    def scores(self, stems: Sequence[str]) -> np.ndarray[Any, Any] | None:
        """Return the score of each document; None if no document has any of these stems."""
        ids = [self._vocabulary[stem] for stem in stems if stem in self._vocabulary]
        scores: np.ndarray[Any, Any] | None = self._index.get_scores_from_ids(ids) if ids else None
        return scores


def top_indexes(scores: np.ndarray[Any, Any], top_k: int) -> list[int]:
    """Return the indexes of the `top_k` highest scores above zero, highest first; equal scores by index."""
    import numpy as np

    candidates = np.flatnonzero(scores > 0)
    if len(candidates) > top_k:
        threshold = np.partition(scores[candidates], -top_k)[-top_k]
        candidates = candidates[scores[candidates] >= threshold]
    order = np.argsort(-scores[candidates], kind="stable")[:top_k]
    indexes: list[int] = candidates[order].tolist()
    return indexes


def _build_index(documents: Sequence[Sequence[int]], vocabulary_size: int) -> Any:
    bm25s, _, _ = _libraries()
    index = bm25s.BM25(method="lucene", k1=K1, b=B, backend="numpy")
    if vocabulary_size:
        # One level below BM25.index(), which also logs, guesses what it was given and copies the vocabulary.
        index.scores = index.build_index_from_ids(range(vocabulary_size), documents, show_progress=False)
    return index


_LOCK = threading.Lock()  # a stemmer is not safe to share between threads, nor is what hides JAX


@lru_cache(maxsize=4096)
def stems(text: str) -> tuple[str, ...]:
    """Return the stems of the words, as `bm25s.tokenize` does with stopwords="en" and Snowball's English stemmer."""
    return _stems(all_words(text))


@lru_cache(maxsize=4096)
def query_stems(query: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the terms of a query: stems of plain words, and of all that may be found among others."""
    plain, others = words(query)
    stemmed = _stems(plain)
    return stemmed, (*stemmed, *_stems(others), *map(_letter, letters(query)))


def _others(passage: Passage, text: str) -> tuple[str, ...]:
    """Return the terms of a passage besides plain words. A letter that stands alone counts as a whole title only."""
    letter = only_letter(passage.title)
    others = words(text, inside=True)[1]
    short = [word for word in others if len(word) < 3]  # their own stems, as most pairs are
    return (*short, *_stems(word for word in others if len(word) > 2), *(() if letter is None else (_letter(letter),)))


def _letter(letter: str) -> str:
    return f"{letter} alone"  # as no word is written


def _stems(text_words: Iterable[str]) -> tuple[str, ...]:
    _, stop_words, stemmer = _libraries()
    with _LOCK:
        return tuple(stemmer.stemWords([word for word in text_words if word not in stop_words]))


def require_bm25() -> None:
    """Raise ImportError without the extra `search`."""
    _libraries()


@contextmanager
def _without_jax() -> Iterator[None]:
    """Block the import of JAX inside this context.

    bm25s starts JAX if it is installed. JAX then takes three quarters of a GPU's memory, and it is not needed."""
    modules: dict[str, Any] = sys.modules
    names = ("jax", "jax.lax") if "bm25s" not in modules else ()
    before = {name: modules[name] for name in names if name in modules}
    modules.update(dict.fromkeys(names))
    try:
        yield
    finally:
        for name in names:
            del modules[name]
        modules.update(before)


@cache
def _libraries() -> tuple[Any, frozenset[str], Any]:
    """Return bm25s, its stop words and the stemmer."""
    try:
        with _LOCK, _without_jax():
            import bm25s
        import Stemmer
        from bm25s.stopwords import STOPWORDS_EN
    except ImportError as error:
        raise ImportError('BM25 search needs bm25s and PyStemmer: pip install "agent-r1[search]"') from error
    return bm25s, frozenset(STOPWORDS_EN), Stemmer.Stemmer("english")
