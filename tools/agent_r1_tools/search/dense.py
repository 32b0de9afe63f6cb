"""Dense retrieval: sentence-transformers encodes, faiss searches exactly by cosine similarity."""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_r1_tools.search.passages import Hit, Passage, RetrievalError, load_corpus

if TYPE_CHECKING:
    import numpy as np

DEFAULT_MODEL = "BAAI/bge-large-en-v1.5"
"""The encoder that Agent-R1 searched Wikipedia with."""
DEFAULT_QUERY_PREFIX = "Represent this sentence for searching relevant passages: "
"""The prefix that this encoder expects before a query, but not before a passage."""


class DenseRetriever:
    """A retriever that finds passages by meaning.

    What is encoded is the title, a newline and the text. The index is exact (flat); its size in memory is
    4 bytes x dimensions x passages. Hits of equal score keep the order of the passages.

    Args:
        passages: the corpus; may be empty.
        model: a sentence-transformers name or folder, or a loaded `SentenceTransformer`.
        query_prefix: text before each query, as the model was trained; E5 wants "query: ".
        passage_prefix: text before each passage; E5 wants "passage: ".
        batch_size: texts that are encoded together.
    """

    timeout = math.inf

    def __init__(
        self,
        passages: Iterable[Passage],
        model: Any = DEFAULT_MODEL,
        *,
        query_prefix: str = DEFAULT_QUERY_PREFIX,
        passage_prefix: str = "",
        batch_size: int = 64,
    ) -> None:
        self._prepare(passages, model, query_prefix, batch_size)
        self._index = self._faiss.IndexFlatIP(self._dimension())
        if self.passages:
            self._index.add(self._encode([f"{passage_prefix}{p.title}\n{p.text}" for p in self.passages]))

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        """Return at most `top_k` hits for each query, best first. Scores are cosines.

        Raises:
            RetrievalError: the encoder failed, on a GPU without memory, say.
        """
        count = min(top_k, len(self.passages))
        if not queries or count < 1:
            return [[] for _ in queries]
        try:
            vectors = self._encode([self._query_prefix + query for query in queries])
        except (RuntimeError, MemoryError) as error:  # PyTorch raises RuntimeError for all that the device does wrong
            raise RetrievalError(f"the encoder failed: {error}") from error
        scores, indexes = self._index.search(vectors, count)
        rows = (sorted(zip(-s, i, strict=True)) for s, i in zip(scores, indexes, strict=True))
        return [[(self.passages[i], float(-negated)) for negated, i in row] for row in rows]

    def save(self, folder: str | Path) -> None:
        """Write the passages and the index into a folder, from which `load` makes the retriever again."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "passages.jsonl").open("w", encoding="utf-8") as lines:
            for passage in self.passages:
                lines.write(json.dumps({"title": passage.title, "text": passage.text}) + "\n")
        self._faiss.write_index(self._index, str(folder / "index.faiss"))
        settings = {"model": self._model_name, "query_prefix": self._query_prefix}
        (folder / "settings.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path, model: Any = None, *, batch_size: int = 64) -> DenseRetriever:
        """Load the retriever that `save` wrote.

        Args:
            folder: where it was written.
            model: the encoder; None takes the name that was saved, which there is none of when the retriever was made
                with a loaded model.
            batch_size: texts that are encoded together.

        Raises:
            FileNotFoundError: the folder lacks a file.
            ValueError: the files don't belong together, or no model is known.
        """
        folder = Path(folder)
        settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
        model = model if model is not None else settings["model"]
        if model is None:
            raise ValueError(f"{folder} was made with a loaded model, whose name is not known; pass model=")
        retriever = cls.__new__(cls)
        retriever._prepare(load_corpus(folder / "passages.jsonl"), model, settings["query_prefix"], batch_size)
        retriever._model_name = settings["model"]
        retriever._index = retriever._faiss.read_index(str(folder / "index.faiss"))
        dimension = retriever._dimension()
        if (retriever._index.ntotal, retriever._index.d) != (len(retriever.passages), dimension):
            raise ValueError(
                f"{folder}: {retriever._index.ntotal} vectors of {retriever._index.d} numbers, but "
                f"{len(retriever.passages)} passages and a model that makes {dimension} numbers; make the index again"
            )
        return retriever

    def _prepare(self, passages: Iterable[Passage], model: Any, query_prefix: str, batch_size: int) -> None:
        try:
            import faiss
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            problem = 'dense search needs sentence-transformers and faiss: pip install "agent-r1[dense]"'
            raise ImportError(problem) from error
        self.passages = list(passages)
        self._faiss = faiss
        self._model_name = model if isinstance(model, str) else None
        self._model = SentenceTransformer(model) if isinstance(model, str) else model
        self._query_prefix = query_prefix
        self._batch_size = batch_size

    def _dimension(self) -> int:
        return int(self._encode([""]).shape[1])  # the name of the method for it differs between versions

    def _encode(self, texts: list[str]) -> np.ndarray[Any, Any]:
        """Return unit vectors, float32 of shape (texts, dimensions). Composed and decomposed accents are equal."""
        vectors = self._model.encode(
            [unicodedata.normalize("NFC", text) for text in texts],
            batch_size=self._batch_size,
            normalize_embeddings=True,
            convert_to_numpy=True,
            show_progress_bar=False,
        )
        encoded: np.ndarray[Any, Any] = vectors.astype("float32")
        return encoded
