"""Rows to imitate: an environment's demonstrations, played through it, or rows that a learner logged."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from multiprocessing import resource_tracker
from typing import IO, Any

import gymnasium as gym
import numpy as np
from tqdm import tqdm

import agent_r1  # noqa: F401  (registers the environments)
from agent_r1.baselines import baseline, careless_demonstration
from agent_r1.faults import fault_line
from agent_r1.ids import find_environment
from agent_r1.validation import probes
from agent_r1_tools.bounded import TooLargeError, bounded_lines
from agent_r1_tools.text import printable
from llm_utils.streams import episode_seed

Array = np.ndarray
TRIED = 50  # tasks that are shown here first, which tells how long the others take
POOL_SECONDS = 20.0  # what other processes must save: each begins by importing torch


@dataclass
class Demonstration:
    """One episode as a row of tokens. `policy_forward` and `microbatches` take it as they take a trajectory."""

    tokens: Array  # int32 [T]
    action_mask: Array  # bool [T]: did the demonstrator write the token?
    task_index: int
    is_success: bool = True  # did the episode end so?
    failure: str = ""  # why not, in a few words

    @property
    def train_mask(self) -> Array:
        """The tokens that are trained on: those that the demonstrator wrote."""
        return self.action_mask

    @property
    def prompt_length(self) -> int:
        """Tokens before the first one that the demonstrator wrote."""
        return int(self.action_mask.argmax()) if self.action_mask.any() else len(self.tokens)


@dataclass
class Demonstrations:
    """What demonstrations are made from: an environment, a tokenizer, and a seed."""

    env_id: str
    split: str
    env_kwargs: dict[str, Any]
    tokenizer: str | None  # a name or folder; None: bytes
    seed: int
    mode: str = "agent"  # as evaluate_llm.py's: with tools, or one of the baselines without
    teacher: str | None = None  # one of the environment's, who shows every task but those of naive RAG
    only_successes: bool = False  # leave the others out

    def make_env(self) -> Any:
        """The environment, unwrapped."""
        kwargs = {"tokenizer": self.tokenizer, "split": self.split, **self.env_kwargs}
        if self.mode == "agent":
            return gym.make(self.env_id, **kwargs).unwrapped
        return baseline(find_environment(self.env_id).id, self.mode)(**kwargs)

    @property
    def only_experts(self) -> bool:
        """Has the environment nobody who makes mistakes?"""
        env = self.make_env()
        env.reset(seed=self.seed, options={"task_index": 0})
        try:
            careless_demonstration(env, np.random.default_rng(self.seed))
        except ValueError:
            return True
        finally:
            env.close()
        return False

    def split_tasks(self, num_demonstrations: int, num_heldout: int, first: int = 0) -> tuple[int, int]:
        """Numbers of tasks to train on and to hold out, from task `first` on: those asked for; of fewer nine in ten
        and one."""
        with closing(self.make_env()) as env:
            num_tasks = max(0, env.num_tasks - first)
        if num_demonstrations + num_heldout <= num_tasks:
            return num_demonstrations, num_heldout
        num_heldout = min(num_heldout, num_tasks // 10)
        return min(num_demonstrations, num_tasks - num_heldout), num_heldout

    def make(
        self, first: int, count: int, expert_share: float, rag_share: float = 0.0, num_workers: int = 0,
        kind: str = "demonstrations",
    ) -> list[Demonstration]:
        """Demonstrations of `count` tasks from `first` on. They are the same for any number of processes.

        A row is the expert's with probability `expert_share`, else sloppy; with probability `rag_share` it is instead a
        one-turn answer in the prompt of naive RAG. A `teacher` shows all but these instead. Where the expert shows a
        task and fails (a search that doesn't find the title, a context that is too short), the task gives no row. An
        answer to naive RAG is a row right or wrong (without `only_successes`): it shows the form of an answer without
        search. What gives no row is counted on the screen under the name `kind`, with the reasons.
        """
        stop, started = first + count, time.monotonic()
        begun = min(first + TRIED, stop)
        jobs = [(range(first, begun), expert_share, rag_share)] * (count > 0)
        jobs += [(range(i, min(i + 500, stop)), expert_share, rag_share) for i in range(begun, stop, 500)]
        rows: list[Demonstration] = []
        left_out: list[tuple[str, str]] = []
        with ExitStack() as stack:
            progress = stack.enter_context(tqdm(total=count, desc=kind, unit="task", dynamic_ncols=True))
            made: Iterator[tuple[list[Demonstration], list[tuple[str, str]]]] = map(self._make_some, jobs)
            for number, (indexes, *_) in enumerate(jobs):
                left = (time.monotonic() - started) / TRIED * (stop - begun)
                if number == 1 and num_workers and left > POOL_SECONDS:
                    pool = stack.enter_context(_pool(num_workers))
                    made = pool.imap(self._make_some, jobs[1:])
                some, why = next(made)
                rows += some
                left_out += why
                progress.update(len(indexes))
        if left_out:
            example = dict(reversed(left_out))  # the first of each
            counts = Counter(why for why, _ in left_out).most_common(5)
            said = "; ".join(f"{number} {why}{example[why]}" for why, number in counts)
            print(printable(f"{len(left_out)} of {count} {kind} are left out: {said}"), file=sys.stderr)
        return rows

    def _make_some(self, job: tuple[range, float, float]) -> tuple[list[Demonstration], list[tuple[str, str]]]:
        """Rows of some tasks, and of those that gave none, why, and what else is to be said of it."""
        with ExitStack() as stack:
            env = stack.enter_context(closing(self.make_env()))
            rag = replace(self, mode="naive_rag") if job[2] else None
            return self._show(*job, env, stack.enter_context(closing(rag.make_env())) if rag else None)

    def _show(
        self, indexes: range, expert_share: float, rag_share: float, env: Any, rag_env: Any
    ) -> tuple[list[Demonstration], list[tuple[str, str]]]:
        rows, left_out = [], []
        for index in indexes:
            rng = np.random.default_rng([self.seed, index])
            if rag_env is not None and rng.random() < rag_share:
                row = demonstrate(rag_env, index, rag_env.demonstration, self.seed)
                if row.is_success or not self.only_successes:
                    rows.append(row)
                else:
                    left_out.append((row.failure, ""))
                continue
            by_expert = self.teacher == "expert" if self.teacher else rng.random() < expert_share
            mistakes = None if by_expert else rng
            if self.teacher:
                turns = partial(env.demonstration, mistakes, teacher=self.teacher)
            else:
                turns = env.demonstration if by_expert else partial(careless_demonstration, env, rng)
            try:
                row = demonstrate(env, index, turns, self.seed)
            except ValueError as error:
                if mistakes is not None:
                    raise
                left_out.append(("not shown", fault_line(", such as", str(error))))
                continue
            if row.is_success or (mistakes is not None and not self.only_successes):
                rows.append(row)
            else:
                left_out.append((row.failure, ""))
        return rows, left_out


def _pool(num_workers: int) -> Any:
    """Other processes, which leave signals to this one."""
    resource_tracker.ensure_running()  # which would unblock it
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # as they inherit it, until they ignore it
    try:
        return multiprocessing.get_context("spawn").Pool(num_workers, _begin)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def _begin() -> None:
    """In another process: what a terminal or a scheduler sends to all is for the one that asked for it, which would
    wait forever for the lock of a queue that died with its holder. tqdm's lock would leave a semaphore behind."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    os.setpgid(0, 0)
    tqdm.set_lock(threading.RLock())
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


def demonstrate(env: Any, index: int, turns: Callable[[], list[str]], seed: int = 0) -> Demonstration:
    """Play one demonstration through the environment, so that a row is what a policy would have met, to the token."""
    state, _ = env.reset(seed=episode_seed(seed, index), options={"task_index": index})
    mask, info = np.zeros(len(state), bool), {}
    for text in probes.turns_of(turns()):
        span = probes.span(env, text)
        start = len(state)
        state, _, terminated, truncated, info = env.step(span)
        mask = np.concatenate([mask, np.arange(len(state) - start) < len(span)])  # a span that doesn't fit is cut
        if terminated or truncated:
            break
    return Demonstration(state, mask, index, bool(info.get("is_success")), probes.failure(env, info))


def digest(rows: Sequence[Demonstration]) -> str:
    """What is learned from, in a few letters: the same for the same tokens and masks in the same order."""
    found = hashlib.sha256()
    for row in rows:
        found.update(len(row.tokens).to_bytes(8, "little") + row.tokens.tobytes() + row.action_mask.tobytes())
    return found.hexdigest()[:16]


def read_rows(path: str, vocab_size: int) -> list[Demonstration]:
    """The rows of a JSONL file with `tokens` and `action_mask`, but for those in which nothing was sampled, and for
    episodes that a fault ended, which are counted on the screen.

    Where a learner logged a rewritten context (`segment_starts`), every segment is a row of its own.
    SystemExit names the line that is malformed.
    """
    rows, faults = [], 0
    with open(path, "rb") as file:
        for number, line in enumerate(bounded_rows(file, path), 1):
            try:
                row = json.loads(line)
                check_row(row, vocab_size)
            except (ValueError, RecursionError) as error:
                raise SystemExit(f"{path}, line {number}: {error or 'it is nested too deep'}") from None
            faults += bool(row.get("fault"))
            tokens, mask = np.array(row["tokens"], np.int32), np.array(row["action_mask"], bool)
            starts = [] if row.get("fault") else row.get("segment_starts", [0])
            for first, end in pairwise([*starts, len(tokens)]):
                part = mask[first:end].copy()
                part[:1] = False  # nothing predicts the first token
                if part.any():
                    rows.append(Demonstration(tokens[first:end], part, number))
    if faults:
        print(f"{path}: {faults} episodes that a fault ended are left out", file=sys.stderr)
    if not rows:
        raise SystemExit(f"{path}: there is no row with a sampled token")
    return rows


def bounded_rows(file: IO[bytes], path: str) -> Iterator[bytes]:
    """The lines of a file. SystemExit where one is longer than any row is."""
    try:
        yield from bounded_lines(file)
    except TooLargeError as error:
        raise SystemExit(f"{path}: {error}") from None


def check_row(row: Any, vocab_size: int) -> None:
    """ValueError where a logged row isn't what training takes it for."""
    if not isinstance(row, dict):
        raise ValueError("a row is a JSON object")
    tokens, mask, starts = row.get("tokens"), row.get("action_mask"), row.get("segment_starts", [0])
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < vocab_size for token in tokens):
        raise ValueError(f"`tokens` is a list of numbers from 0 to below {vocab_size}, the size of the vocabulary")
    if not isinstance(mask, list) or not all(type(own) in (bool, int) and own in (0, 1) for own in mask):
        raise ValueError("`action_mask` is a list of 0 and 1")
    if not 0 < len(tokens) == len(mask):
        raise ValueError(f"`tokens` and `action_mask` have {len(tokens)} and {len(mask)} entries")
    whole = isinstance(starts, list) and all(type(start) is int for start in starts) and starts[:1] == [0]
    if not whole or not all(a < b for a, b in pairwise([*starts, len(tokens)])):
        raise ValueError(f"`segment_starts` grows from 0 to below {len(tokens)}, the number of tokens")
