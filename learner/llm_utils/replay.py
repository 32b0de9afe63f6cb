"""Stored successes of earlier iterations, trained on again beside new episodes (`--replay-successes`).

A stored success keeps its tokens, the log-probabilities of the policy that sampled it, and its advantages.

- **Advantages** are those of the iteration that sampled it, and at least 0, as in self-imitation learning (arXiv
  1806.05249). They need no group and no critic, so they mean the same in every learner. Groups of the stored task
  (LUFFY, ExGRPO) would need new episodes of it.
- **The ratio's denominator** is the trainer's policy before the update, as for new episodes. So clipping bounds the
  step from the current policy. With the old sampler's, clipping would drop all that became likelier since.
- **The age** is paid by the importance weight trainer / sampler of each token, at most `--importance-cap`.

This is biased. Failures are not stored, so a success counts more than the expected return asks for. The baseline is
that of an earlier policy, which solved less. The weights are capped, and ignore earlier tokens of the episode.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from llm_utils.trajectory import Trajectory, Turn

OF_TASK = 4  # stored successes of one task
ITERATIONS = 4  # iterations whose episodes would fill the store
Stored = dict[str, Any]
"""A success as numbers, lists and tensors, which a checkpoint can hold. It is never changed."""


def remember(stored: Sequence[Stored], rows: Sequence[Trajectory], capacity: int) -> list[Stored]:
    """Return the stored successes with those of `rows`, the oldest first.

    Rows that were left out of the update, and rows without an advantage above 0, are not stored. The newest `OF_TASK`
    successes of a task stay, and of all the newest `capacity`.
    """
    new = [_pack(row) for row in rows if row.stats.get("success") and row.advantages[row.train_mask].max(initial=0) > 0]
    kept: list[Stored] = []
    of_task: Counter[int] = Counter()
    for one in reversed([*stored, *new]):
        of_task[one["task_index"]] += 1
        if of_task[one["task_index"]] <= OF_TASK and len(kept) < capacity:
            kept.append(one)
    return kept[::-1]


def draw(stored: Sequence[Stored], count: int, seed: Sequence[int]) -> list[Trajectory]:
    """Return `count` different stored successes, all if there are fewer. They depend only on the arguments.

    They train the policy and not the critic, which would see only successes.
    """
    drawn = np.random.default_rng(seed).permutation(len(stored))[:count]
    return [_unpack(stored[i]) for i in drawn]


def _pack(row: Trajectory) -> Stored:
    arrays = {"tokens": row.tokens, "logprobs": row.logprobs, "versions": row.versions}
    arrays["advantages"] = np.maximum(row.advantages, 0)
    return {
        "episode": row.episode,
        "task_index": row.task_index,
        "prompt_length": row.prompt_length,
        "segment_starts": list(row.segment_starts),
        "turns": [(turn.start, turn.end, turn.reward) for turn in row.turns],
        **{name: torch.tensor(array) for name, array in arrays.items()},
    }


def _unpack(one: Stored) -> Trajectory:
    logprobs, versions = one["logprobs"].numpy(), one["versions"].numpy()
    turns = [Turn(start, end, reward, logprobs[start:end], versions[start:end]) for start, end, reward in one["turns"]]
    row = Trajectory(one["episode"], one["task_index"], one["prompt_length"], one["tokens"].numpy(), turns=turns)
    row.segment_starts, row.replayed = list(one["segment_starts"]), True
    row.finalize()
    row.advantages = one["advantages"].numpy()
    row.value_mask = np.zeros_like(row.action_mask)
    return row
