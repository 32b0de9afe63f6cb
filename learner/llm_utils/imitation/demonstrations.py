"""Training sequences to imitate: an environment's demonstrations, or trajectories that a learner logged."""

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, takewhile
from multiprocessing import resource_tracker
from typing import IO, Any

import gymnasium as gym
import numpy as np
from tqdm import tqdm

import agent_r1  # noqa: F401  (registers the environments)
from agent_r1.baselines import baseline, baselines_of, careless_demonstration, has_demonstration
from agent_r1.faults import fault_line
from agent_r1.ids import find_environment
from agent_r1.tool_env import PromptTooLong
from agent_r1.validation import probes
from agent_r1_tools.bounded import TooLargeError, bounded_lines
from agent_r1_tools.text import printable
from llm_utils.records.progress import Progress
from llm_utils.setup.environments import plain_errors
from llm_utils.streams import episode_seed

Array = np.ndarray
TRIED = 50  # tasks demonstrated in this process first, to estimate the time of the others
HELD_OUT = "held-out demonstrations"  # the kind that may be left out entirely: there are no evaluations then
UNLIMITED = 1 << 20  # tokens
POOL_SECONDS = 20.0  # minimum time that other processes must save, as each must import torch


@dataclass
class Demonstration:
    """One episode as a training sequence, in the form that `policy_forward` and `microbatches` take."""

    tokens: Array  # int32 [T]
    action_mask: Array  # bool [T]: True for tokens that the demonstrator wrote
    task_index: int
    is_success: bool = True  # outcome of the episode
    failure: str = ""  # cause of a failure, in a few words
    calls: int | None = None  # made in the episode; None: it has no tools

    @property
    def train_mask(self) -> Array:
        """True for the tokens to train on: those that the demonstrator wrote."""
        return self.action_mask

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first that the demonstrator wrote."""
        return int(self.action_mask.argmax()) if self.action_mask.any() else len(self.tokens)


@dataclass
class Demonstrations:
    """The source of demonstrations: an environment, a tokenizer and a seed."""

    env_id: str
    split: str
    env_kwargs: dict[str, Any]
    tokenizer: str | None  # a name or folder; None: bytes
    seed: int
    mode: str = "agent"  # as in evaluate_llm.py: with tools, or a baseline without tools
    teacher: str | None = None  # the demonstrator of every task except those of naive RAG
    only_successes: bool = False  # drop failed demonstrations
    limited: bool = True  # False: no bounds in tokens where `env_kwargs` has some, as bytes are more tokens than words

    def make_env(self) -> Any:
        """Make the environment, unwrapped."""
        kwargs = {"tokenizer": self.tokenizer, "split": self.split, **self.env_kwargs}
        if self.tokenizer is None:  # bytes have a template of their own
            kwargs.pop("chat_template", None)
        if not self.limited and kwargs.keys() & {"max_context_tokens", "max_action_tokens"}:
            kwargs |= {"max_context_tokens": UNLIMITED, "max_action_tokens": UNLIMITED}
        if self.mode == "agent":
            return gym.make(self.env_id, **kwargs).unwrapped
        return baseline(find_environment(self.env_id).id, self.mode)(**kwargs)

    def check(self, env: Any, teacher: str | None, expert_share: float) -> None:
        """Raise SystemExit if the environment lacks the demonstrators that `--teacher` and `--expert-share` ask for."""
        if not has_demonstration(env):
            raise SystemExit(f"--env-id {self.env_id}: it has no demonstrations to imitate; use --data FILE")
        with plain_errors(self.env_id):
            teachers = baselines_of(env).teachers
        if teacher not in (None, *teachers):
            choices = f"it has {', '.join(teachers)}" if teachers else "it has none"
            raise SystemExit(f"--teacher {teacher}: {self.env_id} has no such teacher; {choices}")
        if teacher is None and expert_share < 1 and self.only_experts:
            cause = f"{self.env_id} has only expert demonstrations; use --expert-share 1"
            raise SystemExit(f"--expert-share {expert_share}: {cause}")

    @property
    def only_experts(self) -> bool:
        """Return True if the environment has no demonstrator that makes mistakes."""
        env = replace(self, limited=False).make_env()
        env.reset(seed=self.seed, options={"task_index": 0})
        try:
            careless_demonstration(env, np.random.default_rng(self.seed))
        except ValueError:
            return True
        finally:
            env.close()
        return False

    def split_tasks(self, num_demonstrations: int, num_heldout: int, first: int = 0) -> tuple[int, int]:
        """Return the numbers of tasks to train on and to hold out, from task `first` on. If there are too few tasks, at
        most a tenth is held out. Raise SystemExit if there is none."""
        with closing(self.make_env()) as env:
            num_tasks = env.num_tasks - first
        if num_tasks < 1:
            raise SystemExit(f"--first-demonstration {first}: the split {self.split} has {num_tasks + first} tasks")
        if num_demonstrations + num_heldout <= num_tasks:
            return num_demonstrations, num_heldout
        num_heldout = min(num_heldout, num_tasks // 10)
        return min(num_demonstrations, num_tasks - num_heldout), num_heldout

    def make(
        self, first: int, count: int, expert_share: float, rag_share: float = 0.0, num_workers: int = 0,
        kind: str = "demonstrations",
    ) -> list[Demonstration]:
        """Make demonstrations of `count` tasks from `first` on. They are the same for any number of processes.

        A task is demonstrated by the expert with probability `expert_share`, else with mistakes. With probability
        `rag_share` it is instead a one-turn answer to the prompt of naive RAG. A `teacher` demonstrates all tasks
        except these.

        If the expert fails (a search does not find the title, a context is too short), the task gives no demonstration.
        An answer to naive RAG counts even if it is wrong (without `only_successes`), because it shows the form of an
        answer without search. Dropped demonstrations are counted in a printed line, under the name `kind`, with the
        causes. Raise SystemExit with the causes if all are dropped, except for `HELD_OUT`.
        """
        stop, started = first + count, time.monotonic()
        begun = min(first + TRIED, stop)
        jobs = [(range(first, begun), expert_share, rag_share)] * (count > 0)
        jobs += [(range(i, min(i + 500, stop)), expert_share, rag_share) for i in range(begun, stop, 500)]
        rows: list[Demonstration] = []
        left_out: list[tuple[str, str]] = []
        if count > 0:
            where = f"in up to {num_workers} processes" if num_workers > 1 and len(jobs) > 1 else "in one process"
            said = f"making {kind} of {count:,} tasks of {self.env_id}, split {self.split}, {where}"
            print(printable(said), file=sys.stderr)
        with ExitStack() as stack:
            progress = stack.enter_context(Progress(count, "task", kind))
            made: Iterator[tuple[list[Demonstration], list[tuple[str, str]]]] = map(self._make_some, jobs)
            for number, (indexes, *_) in enumerate(jobs):
                seconds_left = (time.monotonic() - started) / TRIED * (stop - begun)
                if number == 1 and num_workers and seconds_left > POOL_SECONDS:
                    pool = stack.enter_context(_pool(num_workers))
                    made = pool.imap(self._make_some, jobs[1:])
                some_rows, some_left_out = next(made)
                rows += some_rows
                left_out += some_left_out
                progress.update(len(indexes))
        if left_out:
            example = dict(reversed(left_out))  # the first detail of each cause
            counts = Counter(cause for cause, _ in left_out).most_common(5)
            causes = "; ".join(f"{number} {cause}{example[cause]}" for cause, number in counts)
            if not rows and kind != HELD_OUT:
                raise SystemExit(printable(f"all of {count} {kind} are left out: {causes}"))
            print(printable(f"{len(left_out)} of {count} {kind} are left out: {causes}"), file=sys.stderr)
        calls = [row.calls for row in rows if row.calls is not None]
        if calls and not any(calls) and kind == "demonstrations":
            fact = f"none of the {len(calls)} demonstrations calls a tool"
            print(f"{fact}: the policy learns to answer without tools", file=sys.stderr)
        return rows

    def _make_some(self, job: tuple[range, float, float]) -> tuple[list[Demonstration], list[tuple[str, str]]]:
        """Make demonstrations of some tasks. Return them, and a cause with a detail for each task without one."""
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
                row = demonstrate(env, index, turns if mistakes is not None else partial(_shown, turns), self.seed)
            except (_NotShown, PromptTooLong) as error:
                left_out.append(("not shown", fault_line(", such as", str(error))))
                continue
            if row.is_success or (mistakes is not None and not self.only_successes):
                rows.append(row)
            else:
                left_out.append((row.failure, ""))
        return rows, left_out


class _NotShown(Exception):
    """The expert has no solution of a task."""


def _shown(turns: Callable[[], list[str]]) -> Iterator[str]:
    """Yield the expert's turns. A ValueError of the demonstration becomes `_NotShown`; one of the judge does not."""
    try:
        yield from probes.turns_of(turns())
    except ValueError as error:
        raise _NotShown(str(error)) from error


def _pool(num_workers: int) -> Any:
    """Start worker processes, which leave signals to this process."""
    resource_tracker.ensure_running()  # it would unblock the signal
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # inherited by the workers until they ignore it
    try:
        return multiprocessing.get_context("spawn").Pool(num_workers, _begin)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def _begin() -> None:
    """Set up a worker process. Signals for the whole group are left to the parent, which would otherwise wait forever
    for a queue's lock whose holder died. tqdm's own lock would leave a semaphore behind."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    os.setpgid(0, 0)
    tqdm.set_lock(threading.RLock())
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


def demonstrate(env: Any, index: int, turns: Callable[[], Iterable[str]], seed: int = 0) -> Demonstration:
    """Run one demonstration through the environment, so that its tokens are exactly those that a policy would see."""
    state, _ = env.reset(seed=episode_seed(seed, index), options={"task_index": index})
    mask, info = np.zeros(len(state), bool), {}
    for text in probes.turns_of(turns()):
        span = probes.span(env, text)
        start = len(state)
        state, _, terminated, truncated, info = env.step(span)
        mask = np.concatenate([mask, np.arange(len(state) - start) < len(span)])  # a span that does not fit is cut
        if terminated or truncated:
            break
    calls = sum(map(len, env.episode.tool_calls)) if env.tools else None
    return Demonstration(state, mask, index, bool(info.get("is_success")), probes.failure(env, info), calls)


def digest(rows: Sequence[Demonstration]) -> str:
    """Hash the training data: the same for the same tokens and masks in the same order."""
    hasher = hashlib.sha256()
    for row in rows:
        hasher.update(len(row.tokens).to_bytes(8, "little") + row.tokens.tobytes() + row.action_mask.tobytes())
    return hasher.hexdigest()[:16]


def read_rows(path: str, vocab_size: int, tokenizer: Any = None, only_successes: bool = False) -> list[Demonstration]:
    """Read the lines of a JSONL file with `tokens` and `action_mask`. Lines without sampled tokens are skipped.
    Episodes that ended in infrastructure errors are skipped and counted in a printed line. So are failed episodes with
    `only_successes` (`is_success` of a line).

    If a learner logged a rewritten context (`segment_starts`), every segment is its own training sequence. Raise
    SystemExit with the number of a malformed line, and for rows whose tokens are not those of `tokenizer`.
    """
    rows: list[Demonstration] = []
    readable: dict[str, list[bool]] = {}  # of each tokenizer named in the rows
    faults = valid = failed = 0
    with open(path, "rb") as file:
        for number, line in enumerate(bounded_rows(file, path), 1):
            try:
                row = json.loads(line)
                check_row(row, vocab_size)
                if only_successes and not row.get("fault") and not isinstance(row.get("is_success"), bool):
                    raise ValueError("--only-successes needs `is_success`, true or false; leave the flag out")
            except (ValueError, RecursionError) as error:
                raise SystemExit(f"{path}, line {number}: {error or 'it is nested too deeply'}") from None
            if tokenizer is not None and (shown := decodes(row, tokenizer)) is not None:
                readable.setdefault(str(row.get("tokenizer")), []).append(shown)
            if row.get("fault"):
                faults += 1
                continue
            valid += 1
            if only_successes and not row["is_success"]:
                failed += 1
                continue
            tokens, mask = np.array(row["tokens"], np.int32), np.array(row["action_mask"], bool)
            for first, end in pairwise([*row.get("segment_starts", [0]), len(tokens)]):
                segment_mask = mask[first:end].copy()
                segment_mask[:1] = False  # nothing predicts the first token
                if segment_mask.any():
                    rows.append(Demonstration(tokens[first:end], segment_mask, number))
    check_tokenizer(path, readable)
    if faults:
        print(f"{path}: {faults} episodes that ended in infrastructure errors are left out", file=sys.stderr)
    if only_successes:
        print(f"{path}: {valid - failed} of {valid} episodes succeeded and are kept", file=sys.stderr)
    if valid and failed == valid:
        raise SystemExit(f"{path}: no episode succeeded; record more tasks or a better teacher's, or train on failures")
    if not rows:
        raise SystemExit(f"{path}: no line has a sampled token")
    return rows


def decodes(row: dict[str, Any], tokenizer: Any) -> bool | None:
    """Return whether the prompt of a row decodes to a message of its conversation, white space aside; None without a
    recorded conversation."""
    messages = row.get("messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages) or 1 not in row["action_mask"]:
        return None
    before = takewhile(lambda message: message.get("role") != "assistant", messages)
    contents = list(filter(None, ("".join(str(message.get("content") or "").split()) for message in before)))
    prompt = "".join(tokenizer.decode(row["tokens"][: row["action_mask"].index(1)]).split())
    return any(content in prompt for content in contents) if contents else None


def check_tokenizer(path: str, readable: dict[str, list[bool]]) -> None:
    """Raise SystemExit if most rows of a tokenizer's name do not decode to their messages (`decodes`).

    The numbers of another tokenizer are mostly valid, and would train nonsense without an error. Some rows of the right
    one may differ, because a tokenizer may change rare characters.
    """
    for name, shown in readable.items():
        if 2 * sum(shown) < len(shown):
            cause = f"the tokens of {shown.count(False)} rows do not decode to their messages"
            remedy = "record the episodes with --tokenizer and the name or folder of --model"
            raise SystemExit(f"{path}: {cause}: they are of the tokenizer {name}; {remedy}")


def check_first_row(flag: str, path: str) -> None:
    """Raise SystemExit, before any work, if the file of a flag does not begin with a row of `read_rows`. "" is no
    file."""
    if not path:
        return
    with open(path, "rb") as file:
        first = next(bounded_rows(file, path), b"")
    try:
        row = json.loads(first)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict) or not {"tokens", "action_mask"} <= row.keys():
        cause = "its first line is no JSON object with `tokens` and `action_mask`" if first else "the file is empty"
        raise SystemExit(f"{flag} {path}: {cause}; give a trajectories.jsonl of a run or an evaluation")


def bounded_rows(file: IO[bytes], path: str) -> Iterator[bytes]:
    """Yield the lines of a file. Raise SystemExit if one is longer than any valid line."""
    try:
        yield from bounded_lines(file)
    except TooLargeError as error:
        raise SystemExit(f"{path}: {error}") from None


def check_row(row: Any, vocab_size: int) -> None:
    """Raise ValueError if a logged line is not valid training data."""
    if not isinstance(row, dict):
        raise ValueError("a line must be a JSON object")
    tokens, mask, starts = row.get("tokens"), row.get("action_mask"), row.get("segment_starts", [0])
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < vocab_size for token in tokens):
        raise ValueError(f"`tokens` must be a list of numbers from 0 to below {vocab_size}, the vocabulary size")
    if not isinstance(mask, list) or not all(type(flag) in (bool, int) and flag in (0, 1) for flag in mask):
        raise ValueError("`action_mask` must be a list of 0 and 1")
    if not 0 < len(tokens) == len(mask):
        raise ValueError(f"`tokens` and `action_mask` have {len(tokens)} and {len(mask)} entries")
    valid_starts = isinstance(starts, list) and all(type(start) is int for start in starts) and starts[:1] == [0]
    if not valid_starts or not all(a < b for a, b in pairwise([*starts, len(tokens)])):
        raise ValueError(f"`segment_starts` must grow from 0 to below {len(tokens)}, the number of tokens")
