"""Dense retrieval with a real encoder that needs no download: a bag of six words."""

from pathlib import Path

import pytest

from agent_r1_tools import run_tool
from agent_r1_tools.search import DenseRetriever, Passage, SearchTool

PASSAGES = [
    Passage("Cats", "the cat sat"),
    Passage("Dogs", "the dog ran"),
    Passage("Dogs again", "the dog ran"),
    Passage("Fish", "fish swim"),
]


@pytest.fixture(scope="module")
def encoder() -> object:
    # Here, so that only the process that runs these tests imports them.
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="the extra 'dense' is not installed")
    pytest.importorskip("faiss", reason="the extra 'dense' is not installed")
    try:
        from sentence_transformers.sentence_transformer.modules import BoW  # version 6
    except ImportError:
        from sentence_transformers.models import BoW

    bag = BoW(vocab=["cat", "dog", "fish", "sat", "ran", "swim"])
    return sentence_transformers.SentenceTransformer(modules=[bag], device="cpu")


def test_the_nearest_passages_come_first(encoder: object) -> None:
    retriever = DenseRetriever(PASSAGES, encoder, query_prefix="")
    found = retriever.search(["fish swim", "dog"], 2)
    assert found[0][0][0].title == "Fish"
    assert [p.title for p, _ in found[1]] == ["Dogs", "Dogs again"]  # equal scores: the order of the passages
    assert found[1][0][1] == pytest.approx(0.5**0.5, abs=1e-6)  # a cosine
    assert retriever.search([], 2) == []
    assert len(retriever.search(["dog"], 100)[0]) == 4
    assert run_tool(SearchTool(retriever, 1), {"query": "cat sat"}).data["titles"] == ["Cats"]


def test_an_empty_corpus(encoder: object) -> None:
    assert DenseRetriever([], encoder).search(["dog"], 3) == [[]]


def test_an_index_is_saved_and_loaded(encoder: object, tmp_path: Path) -> None:
    retriever = DenseRetriever(PASSAGES, encoder)
    retriever.save(tmp_path / "index")
    loaded = DenseRetriever.load(tmp_path / "index", encoder)
    assert loaded.passages == PASSAGES
    assert loaded.search(["dog", "fish"], 3) == retriever.search(["dog", "fish"], 3)
    with pytest.raises(ValueError, match="model="):
        DenseRetriever.load(tmp_path / "index")
    with pytest.raises(FileNotFoundError):
        DenseRetriever.load(tmp_path / "nowhere", encoder)
    (tmp_path / "index" / "passages.jsonl").write_text('{"title": "One", "text": "only"}\n')
    with pytest.raises(ValueError, match="make the index again"):
        DenseRetriever.load(tmp_path / "index", encoder)


def test_an_encoder_that_fails_is_a_fault(encoder: object, monkeypatch: pytest.MonkeyPatch) -> None:
    retriever = DenseRetriever(PASSAGES, encoder)

    def out_of_memory(*arguments: object, **keywords: object) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(encoder, "encode", out_of_memory)
    assert run_tool(SearchTool(retriever), {"query": "dog"}).fault == (
        "RetrievalError: the encoder failed: CUDA out of memory"
    )
