"""From the official files to questions for training and rows to imitate, and which files they are."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from llm_utils.imitation.demonstrations import Demonstrations
from real_model_parts.suites import Suite

MEASURED = 100  # held-out questions of a set, at most, on whose demonstrations the loss is measured


def find_file(path: Path) -> Path:
    """An official file, packed or not."""
    for found in (path, path.with_name(path.name + ".gz")):
        if found.is_file():
            return found
    raise SystemExit(f"there is no {path} (nor with .gz); --data holds a folder for each set, see docs/data.md")


@contextmanager
def named(path: Path) -> Iterator[None]:
    """SystemExit with the file's name where it turns out to be cut off, or of another kind."""
    try:
        yield
    except (ValueError, EOFError, OSError, zlib.error) as error:
        raise SystemExit(f"{path}: this is no whole file of the set ({error})") from error


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of an official file, JSON or JSON lines, packed or not. SystemExit where it is broken."""
    found = find_file(path)
    with named(found):
        text = gzip.open(found, "rt").read() if found.suffix == ".gz" else found.read_text()
        if ".jsonl" not in path.name:
            return json.loads(text)
        return [json.loads(line) for line in text.split("\n") if line.strip()]  # str.splitlines() splits at U+2028, too


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.suffix == ".jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) if lines else json.dumps(rows))


def split_questions(suite: Suite, data: Path, work: Path) -> None:
    """Write nine tenths of each set's training questions as its train file, the others as its held-out file.

    The sets that reinforcement sees stand together in `reinforced/`, in the format of the first one.
    """
    rng = np.random.default_rng(0)
    together: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for name, data_set in suite.sets.items():
        rows = read_rows(data / data_set.folder / data_set.train)
        out = set(rng.permutation(len(rows))[: max(1, len(rows) // 10)].tolist())
        for is_out, file in ((False, data_set.train), (True, data_set.heldout)):
            some = [row for index, row in enumerate(rows) if (index in out) == is_out]
            write_rows(work / data_set.folder / file, some)
            if name in suite.reinforced:
                together[is_out] += some
    first = suite.sets[suite.reinforced[0]]
    for is_out, file in ((False, first.train), (True, first.heldout)):
        order = rng.permutation(len(together[is_out]))
        write_rows(work / "reinforced" / file, [together[is_out][index] for index in order])


def env_kwargs(suite: Suite, folder: Path, **more: Any) -> str:
    return json.dumps({**suite.env_kwargs, "data_dir": str(folder), **more})


def write_demonstrations(suite: Suite, model: str, work: Path) -> None:
    """Rows of tokens for sft_llm.py: demonstrations with tools, and question-answer pairs without."""
    for kind in ("agent", "closed_book"):
        for part in ("train", "heldout"):
            path = work / f"{kind}_{part}.jsonl"
            rows = []
            for data_set in suite.sets.values():
                split = "train" if part == "train" else data_set.split
                kwargs = json.loads(env_kwargs(suite, work / data_set.folder))
                maker = Demonstrations(data_set.env_id, split, kwargs, model, seed=0, mode=kind)
                tasks = maker.make_env().num_tasks
                rows += maker.make(0, tasks if part == "train" else min(tasks, MEASURED), expert_share=1.0)
            content = [{"tokens": r.tokens.tolist(), "action_mask": r.action_mask.astype(int).tolist()} for r in rows]
            write_rows(path, content)
            lengths = [len(r.tokens) for r in rows]
            print(f"{path}: {len(rows)} rows of {np.mean(lengths):.0f} tokens, the longest of {max(lengths)}")


def hash_of_files(files: Sequence[Path]) -> str:
    """Of what they hold, unpacked."""
    found = hashlib.sha256()
    for file in sorted(files):
        with named(file), gzip.open(file) if file.suffix == ".gz" else file.open("rb") as content:
            while block := content.read(1 << 20):
                found.update(block)
    return found.hexdigest()[:16]
