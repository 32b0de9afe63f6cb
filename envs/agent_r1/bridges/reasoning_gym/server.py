"""The program that makes reasoning-gym's items and scores answers, for `environment.py`.

A process of its own, because the package draws from the global random state, keeps things in classes, and gives what a
model answers to `eval` and to sympy, which calls it. Each item is made, and each answer scored, in a fork with limits
and with random state of its own; readers of literals and of formulas take the place of `eval`. It is started by its
path and imports nothing of this package. A request is a line of JSON, the arguments of `reply_to`; a reply is JSON,
after its number of bytes in 8 bytes.
"""

from __future__ import annotations

import ast
import importlib
import json
import math
import os
import pickle
import random
import re
import signal
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

SCORE_SECONDS = 3.0  # of processor time; the slowest right answers take 0.1
MAKE_SECONDS = 120.0  # the slowest items take 5
WALL_FACTOR = 10  # long, because the machine may be busy
MEMORY_BYTES = 2**32
BLOCK = 10_000  # items of a seed: some sets make or draw all of them at once
KEPT_SETS, KEPT_ITEMS = 256, 4096

TOO_COSTLY = "scoring took too much time or memory"
EVALUATE = ("algorithmic.binary_matrix", "algorithmic.spiral_matrix", "algorithmic.string_insertion", "games.n_queens")
"""Modules that give answers to `eval`, hoping for a list."""
PARSE = ("games.countdown", "games.puzzle24")
"""Modules that give them to sympy's `parse_expr`, which they import by name; those of algebra take it from sympy."""
EXAMPLES = ("possible_answer", "example_answer", "example_correct_answer")
"""Where a right answer stands in the metadata of items that have several."""

FUNCTIONS = "sin cos tan cot sec csc asin acos atan sinh cosh tanh exp log ln sqrt pi Abs abs"
FORMULA = re.compile(
    rf"(?:\s|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w.])"
    rf"|(?:{FUNCTIONS.replace(' ', '|')}|[A-Za-z]_?\d*(?!\s*\())(?!\w)|\)(?!\s*\()|[-+*/^(,!])*+"
)
"""Numbers, symbols of one letter, functions by name, operators: nothing that sympy could call besides (N, S, O)."""


class Made(NamedTuple):
    """A data set, and what its class kept of it, which the next one of the class replaces."""

    data_set: Any
    kept: dict[str, Any]


_sets: OrderedDict[tuple[Any, ...], Made] = OrderedDict()
_items: OrderedDict[tuple[Any, ...], bytes] = OrderedDict()  # pickled: nobody can change them


class Killed(Exception):
    """A fork has not come to its end."""


def serve() -> None:
    """Answer requests until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # some sets print what they do
    for line in sys.stdin.buffer:
        try:
            reply = reply_to(**json.loads(line))
        except ConnectionError as error:
            reply = {"fault": str(error)}
        except Exception as error:
            reply = {"error": str(error)[:1_000] or repr(error)}
        data = json.dumps(reply).encode()
        replies.write(len(data).to_bytes(8, "big") + data)
        replies.flush()


def reply_to(
    name: str = "",
    config: dict[str, Any] | None = None,
    level: int | None = None,
    index: int | None = None,
    answer: str | None = None,
) -> dict[str, Any]:
    """The sets there are; or whether a set can be made; or item `index` of it; or what an answer to that item scores.

    Raises ValueError for a set or a setting that there isn't, ConnectionError where a fork was killed from outside, and
    what the package raises where it can't make an item.
    """
    from reasoning_gym.factory import DATASETS, has_curriculum

    names = sorted(set(DATASETS) - {"composite"})
    if not name:
        return {"names": names, "levels": [name for name in names if has_curriculum(name)]}
    if name not in names:
        raise ValueError(f"reasoning-gym has no data set {name!r}; it has {', '.join(names)}")
    key = (name, json.dumps(config, sort_keys=True), level, (index or 0) // BLOCK)
    made = _sets.get(key) or _sets.setdefault(key, build(name, config or {}, level, key[-1]))
    _bound(_sets, key, KEPT_SETS)
    if index is None:
        return {}
    place = (*key, index)
    if place not in _items:
        _items[place] = in_fork(lambda: item(made, name, index), MAKE_SECONDS)
    _bound(_items, place, KEPT_ITEMS)
    shown, entry = pickle.loads(_items[place])
    if answer is None:
        return dict(shown)
    try:
        return {"score": pickle.loads(in_fork(lambda: score(made, entry, answer), SCORE_SECONDS))}
    except Killed:
        return {"score": 0.0, "reason": TOO_COSTLY}


def _bound(kept: OrderedDict[tuple[Any, ...], Any], key: tuple[Any, ...], most: int) -> None:
    kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)


def build(name: str, config: dict[str, Any], level: int | None, block: int) -> Made:
    """A data set whose items are those of a block."""
    from reasoning_gym.factory import DATASETS, create_curriculum, create_dataset

    there = [field.name for field in fields(DATASETS[name][1]) if field.name not in ("seed", "size")]
    unknown = ", ".join(repr(setting) for setting in config if setting not in there)
    if unknown:
        raise ValueError(f"{name} has no setting {unknown}; it has {', '.join(there)}")
    if level is not None:
        curriculum = create_curriculum(name)
        curriculum.set_global_level(level)
        harder = curriculum.generate_configuration()
        config = {setting: getattr(harder, setting) for setting in there} | config
    seed_all(name, block)
    try:
        data_set = create_dataset(name, **config, seed=block * BLOCK, size=BLOCK)
    except Exception as error:  # assertions, mostly
        raise ValueError(f"{name} can't be made with {config}: {error!r}") from error
    kept = {key: value for key, value in vars(type(data_set)).items() if key == "_jsonl_data"}  # codeio's rows
    return Made(data_set, kept)


def item(made: Made, name: str, index: int) -> tuple[dict[str, Any], Any]:
    """What is shown of an item (its question, and a right answer or None), and the item."""
    seed_all(name, index)
    for key, value in made.kept.items():
        setattr(type(made.data_set), key, value)
    entry = made.data_set[index % BLOCK]
    gold = entry["answer"]
    if gold is None:
        gold = next((entry["metadata"][key] for key in EXAMPLES if entry["metadata"].get(key)), None)
    if gold is not None and not isinstance(gold, str):
        gold = json.dumps(gold)
    return {"question": str(entry["question"]), "gold": gold}, entry


def score(made: Made, entry: Any, answer: str) -> float:
    """The set's own score of an answer, from 0 to 1; what it raises is 0."""
    import sympy

    seed_all("score", 0)
    parse = sympy.parse_expr

    def parse_formula(text: str, *args: Any, **kwargs: Any) -> Any:
        if not FORMULA.fullmatch(text):
            raise ValueError("this is no formula")
        return parse(text, *args, **kwargs)

    sympy.parse_expr = parse_formula
    for name in PARSE:
        vars(importlib.import_module(f"reasoning_gym.{name}"))["parse_expr"] = parse_formula
    for name in EVALUATE:
        vars(importlib.import_module(f"reasoning_gym.{name}"))["eval"] = ast.literal_eval
    try:
        value = float(made.data_set.score_answer(answer, entry))
    except Exception:
        return 0.0
    return min(max(value, 0.0), 1.0) if math.isfinite(value) else 0.0


def seed_all(name: str, number: int) -> None:
    """Some sets draw from the global random state."""
    import numpy as np

    random.seed(f"{name} {number}")
    np.random.seed(random.getrandbits(32))


def in_fork(work: Callable[[], Any], seconds: float) -> bytes:
    """What `work` returns, pickled, made in a fork with so many seconds of processor time.

    Raises Killed where it takes more, or too much memory; ConnectionError where it was killed from outside;
    RuntimeError for what it raises.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _limit(seconds)
        try:
            data, status = pickle.dumps(work()), 0
        except MemoryError:
            data, status = b"", 2
        except BaseException as error:
            data, status = repr(error).encode("utf-8", "replace")[:1_000], 1
        with os.fdopen(write, "wb") as pipe:
            pipe.write(data)
        os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    _, status, used = os.wait4(child, 0)
    if status == 0:
        return data
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 1:
        raise RuntimeError(data.decode())
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    starved = ended_by == signal.SIGALRM and used.ru_utime + used.ru_stime < seconds / 2
    if starved or ended_by in (signal.SIGKILL, signal.SIGTERM):
        raise ConnectionError("a process was killed from outside, or had no processor for so long")
    raise Killed(TOO_COSTLY)


def _limit(seconds: float) -> None:
    """Bound this process: when time is up, the kernel ends it, also in the middle of a long multiplication."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, WALL_FACTOR * seconds)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # some sets go through sets of texts
        own = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, "-P", __file__], os.environ | own)
    serve()
