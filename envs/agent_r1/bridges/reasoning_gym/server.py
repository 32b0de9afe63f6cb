"""A program that makes reasoning-gym's items and scores answers, for `environment.py`.

It is a separate process, because the package draws from the global random state, keeps state in classes, and passes a
model's answers to `eval` and to sympy, which calls it. Each item is made, and each answer scored, in a fork with limits
and its own random state. Readers of literals and of formulas replace `eval`. The program is started by its path and
imports nothing of this package. A request is a line of JSON, the arguments of `reply_to`. A reply is JSON, after its
number of bytes in 8 bytes.
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

SCORE_SECONDS = 3.0  # processor time; the slowest right answers take 0.1
MAKE_SECONDS = 120.0  # the slowest items take 5
WALL_FACTOR = 10  # long, because the machine may be busy
MEMORY_BYTES = 2**32
BLOCK = 10_000  # items of a seed: some sets make or draw all of them at once
KEPT_SETS, KEPT_ITEMS = 256, 4096

TOO_COSTLY = "scoring took too much time or memory"
EVALUATE = ("algorithmic.binary_matrix", "algorithmic.spiral_matrix", "algorithmic.string_insertion", "games.n_queens")
"""Modules that pass answers to `eval`, and expect a list."""
PARSE = ("games.countdown", "games.puzzle24")
"""Modules that pass answers to sympy's `parse_expr`, imported by name; those of algebra use it through sympy."""
EXAMPLES = ("possible_answer", "example_answer", "example_correct_answer")
"""Keys of a right answer in the metadata of items that have several."""

FUNCTIONS = "sin cos tan cot sec csc asin acos atan sinh cosh tanh exp log ln sqrt pi Abs abs"
FORMULA = re.compile(
    rf"(?:\s|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w.])"
    rf"|(?:{FUNCTIONS.replace(' ', '|')}|[A-Za-z]_?\d*(?!\s*\())(?!\w)|\)(?!\s*\()|[-+*/^(,!])*+"
)
"""Numbers, symbols of one letter, functions by name, operators: nothing else that sympy could call (N, S, O)."""


class Made(NamedTuple):
    """A data set, and its state in its class, which the next set of the class replaces."""

    data_set: Any
    kept: dict[str, Any]


_sets: OrderedDict[tuple[Any, ...], Made] = OrderedDict()
_items: OrderedDict[tuple[Any, ...], bytes] = OrderedDict()  # pickled, so that they cannot change


class Killed(Exception):
    """The error of a fork that was killed."""


def serve() -> None:
    """Answer requests until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # some sets print messages
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
    """Reply with the list of sets, with the check of a set, with item `index` of it, or with the score of an answer.

    Raises ValueError for an unknown set or setting, ConnectionError if a fork was killed from outside, and the
    exceptions of the package if it cannot make an item.
    """
    from reasoning_gym.factory import DATASETS, has_curriculum

    names = sorted(set(DATASETS) - {"composite"})
    if not name:
        return {"names": names, "levels": [name for name in names if has_curriculum(name)]}
    if name not in names:
        raise ValueError(f"reasoning-gym has no data set {name!r}; it has {', '.join(names)}")
    key = (name, json.dumps(config, sort_keys=True), level, (index or 0) // BLOCK)
    data_set = _sets.get(key) or _sets.setdefault(key, build(name, config or {}, level, key[-1]))
    _bound(_sets, key, KEPT_SETS)
    if index is None:
        return {}
    place = (*key, index)
    if place not in _items:
        _items[place] = in_fork(lambda: item(data_set, name, index), MAKE_SECONDS)
    _bound(_items, place, KEPT_ITEMS)
    shown, entry = pickle.loads(_items[place])
    if answer is None:
        return dict(shown)
    try:
        return {"score": pickle.loads(in_fork(lambda: score(data_set, entry, answer), SCORE_SECONDS))}
    except Killed:
        return {"score": 0.0, "reason": TOO_COSTLY}


def _bound(cache: OrderedDict[tuple[Any, ...], Any], key: tuple[Any, ...], maximum: int) -> None:
    cache.move_to_end(key)
    if len(cache) > maximum:
        cache.popitem(last=False)


def build(name: str, config: dict[str, Any], level: int | None, block: int) -> Made:
    """Make a data set with the items of a block."""
    from reasoning_gym.factory import DATASETS, create_curriculum, create_dataset

    settings = [field.name for field in fields(DATASETS[name][1]) if field.name not in ("seed", "size")]
    unknown = ", ".join(repr(setting) for setting in config if setting not in settings)
    if unknown:
        raise ValueError(f"{name} has no setting {unknown}; it has {', '.join(settings)}")
    if level is not None:
        curriculum = create_curriculum(name)
        curriculum.set_global_level(level)
        harder = curriculum.generate_configuration()
        config = {setting: getattr(harder, setting) for setting in settings} | config
    seed_all(name, block)
    try:
        data_set = create_dataset(name, **config, seed=block * BLOCK, size=BLOCK)
    except Exception as error:  # mostly assertions
        raise ValueError(f"{name} cannot be made with {config}: {error!r}") from error
    class_state = {key: value for key, value in vars(type(data_set)).items() if key == "_jsonl_data"}  # codeio's rows
    return Made(data_set, class_state)


def item(made: Made, name: str, index: int) -> tuple[dict[str, Any], Any]:
    """Return the visible part of an item (its question, and a right answer or None), and the item."""
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
    """Return the set's own score of an answer, from 0 to 1; 0 if it raises."""
    import sympy

    seed_all("score", 0)
    parse = sympy.parse_expr

    def parse_formula(text: str, *args: Any, **kwargs: Any) -> Any:
        if not FORMULA.fullmatch(text):
            raise ValueError("this is not a formula")
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
    """Seed the global random states, because some sets draw from them."""
    import numpy as np

    random.seed(f"{name} {number}")
    np.random.seed(random.getrandbits(32))


def in_fork(work: Callable[[], Any], seconds: float) -> bytes:
    """Run `work` in a fork with a limit on processor time, in seconds. Return its pickled result.

    Raises Killed if it takes more time, or too much memory; ConnectionError if it was killed from outside; RuntimeError
    for its exceptions.
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
    """Limit this process: at the time limit the kernel ends it, also in the middle of a long multiplication."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, WALL_FACTOR * seconds)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # some data sets iterate over sets of texts
        own = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, "-P", __file__], os.environ | own)
    serve()
