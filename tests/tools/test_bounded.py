"""Lines of strangers' files: none is longer, and no archive larger, than what is meant well."""

import gzip
import io
import json

import pytest

from agent_r1_tools import bounded
from agent_r1_tools.bounded import TooLargeError, bounded_lines
from agent_r1_tools.search.passages import load_corpus


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(bounded, "MAX_LINE", 1000)
    monkeypatch.setattr(bounded, "ALWAYS", 20_000)


@pytest.mark.parametrize("kind", [io.StringIO, lambda text: io.BytesIO(text.encode())])
def test_a_line_without_end_is_refused(kind):
    assert len(list(bounded_lines(kind("a" * 999 + "\n" + "b" * 1000)))) == 2
    lines = bounded_lines(kind("a\n" + "b" * 100_000))
    assert len(next(lines)) == 2
    with pytest.raises(TooLargeError, match="the line has more than"):
        next(lines)


@pytest.mark.parametrize("line", ["\n", "{}\n", "x" * 900 + "\n"])
def test_an_archive_that_unpacks_to_too_much_is_refused(tmp_path, line):
    path = tmp_path / "rows.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(line * 5000)
    with gzip.open(path, "rt") as file, pytest.raises(TooLargeError, match="50 times as large.*unpack it"):
        list(bounded_lines(file, path))
    with gzip.open(path, "rt") as file:
        assert len(list(bounded_lines(file))) == 5000


@pytest.mark.parametrize("content", [b'{"id": "1", "contents": "' + b"a" * 5000 + b'"}\n', b"\n" * 100_000])
def test_a_corpus_is_read_within_bounds(tmp_path, content):
    path = tmp_path / "corpus.jsonl.gz"
    path.write_bytes(gzip.compress(content))
    with pytest.raises(ValueError, match=f"{path}, row [0-9]+: the .* more than"):
        load_corpus(path)


def test_a_corpus_of_ordinary_size_is_read(tmp_path):
    path = tmp_path / "corpus.jsonl.gz"
    rows = [
        json.dumps({"id": str(number), "contents": f"title {number}\ntext {number * 7919}"}) for number in range(50)
    ]
    path.write_bytes(gzip.compress("\n".join(rows).encode()))
    assert len(load_corpus(path)) == 50
