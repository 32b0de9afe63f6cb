"""Figures of a trajectory reward model on held-out episodes, and controls that show what it learned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from llm_utils.reward_model import Episode, View, last_logits, logits
from llm_utils.value_model import Critic

Array = np.ndarray


def by_task(rows: Sequence[Episode]) -> list[list[Episode]]:
    """Return the episodes of each task."""
    tasks: dict[tuple[Any, ...], list[Episode]] = defaultdict(list)
    for row in rows:
        tasks[row.task].append(row)
    return list(tasks.values())


def auc(scores: Array, success: Array) -> float:
    """Return the probability that a success has a higher score than a failure; a tie counts half. There must be one of
    each."""
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    wins = ranks[success].sum() - success.sum() * (success.sum() + 1) / 2
    return float(wins / success.sum() / (~success).sum())


def pairs_won(scores: Array, rows: Sequence[Episode], equal_turns: bool) -> tuple[float | None, int]:
    """Return the share of pairs of one task, a success and a failure, in which the success has the higher score, and
    the number of pairs. With `equal_turns` only those of equally many turns count. None without pairs."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        groups[row.task, len(row.spans) if equal_turns else 0].append(i)
    won = []
    for at in groups.values():
        success = np.array([rows[i].is_success for i in at])
        gaps = scores[at][success][:, None] - scores[at][~success]
        won += ((np.sign(gaps) + 1) / 2).ravel().tolist()
    return (float(np.mean(won)) if won else None), len(won)


def with_results_of(row: Episode, other: Episode) -> Episode:
    """Return an episode with the tool results of another one of equally many turns. Its own spans stay."""
    parts, spans, at = [row.tokens[: row.spans[0][0]]], [], row.spans[0][0]
    starts = [*(start for start, _ in other.spans[1:]), len(other.tokens)]
    for (start, end), (_, other_end), next_start in zip(row.spans, other.spans, starts, strict=True):
        spans.append((at, at + end - start))
        parts += [row.tokens[start:end], other.tokens[other_end:next_start]]
        at = spans[-1][1] + next_start - other_end
    return Episode(np.concatenate(parts), [0], spans, row.is_success, row.task)


def swapped(rows: Sequence[Episode], seed: int) -> list[tuple[Episode, Episode]]:
    """Return episodes, each with a copy that has the tool results of another task (`with_results_of`). Those without
    another task of equally many turns are left out, and those with a rewritten context."""
    rng, found = np.random.default_rng(seed), []
    whole = [row for row in rows if len(row.segment_starts) == 1]
    for row in whole:
        if others := [x for x in whole if x.task != row.task and len(x.spans) == len(row.spans)]:
            found.append((row, with_results_of(row, others[rng.integers(len(others))])))
    return found


def report(
    critic: Critic, kind: str, train: Sequence[Episode], rows: Sequence[Episode], seed: int
) -> dict[str, Any]:
    """Return the figures of held-out episodes, of the model and of controls.

    "turns" and "tokens" score an episode by its length alone, in the direction that fits the training episodes. For
    "results of another task" the model reads foreign tool results, and for "prompt alone" nothing else. `best_of` has
    the success of the episode that has the best score of its task.
    """

    def by_length(length: Callable[[Episode], int]) -> Array:
        known = auc(np.array([length(row) for row in train]), np.array([row.is_success for row in train]))
        return np.array([length(row) for row in rows]) * (1.0 if known >= 0.5 else -1.0)

    prompts = [[View(row.tokens[: row.spans[0][0]], np.array([row.spans[0][0] - 1]))] for row in rows]
    foreign = swapped(rows, seed)
    own, copies = [row for row, _ in foreign], [copy for _, copy in foreign]
    lines = {
        "model": (last_logits(critic, rows, kind), rows),
        "turns": (by_length(lambda row: len(row.spans)), rows),
        "tokens": (by_length(lambda row: len(row.tokens)), rows),
        "results of another task": (last_logits(critic, copies, kind), own),
        "prompt alone": (np.array([x[-1] for x in logits(critic, prompts)]), rows),
    }
    table = {}
    for name, (scores, of) in lines.items():
        success = np.array([row.is_success for row in of], bool)
        (won, pairs), (equal_won, equal_pairs) = (pairs_won(scores, of, equal) for equal in (False, True))
        known = bool(success.any() and not success.all())
        table[name] = {"episodes": len(of), "auc": auc(scores, success) if known else None, "pairs_won": won,
                       "pairs": pairs, "equal_turns_won": equal_won, "equal_turns_pairs": equal_pairs}  # fmt: skip
    counts: dict[str, float] = {"episodes": len(rows), "tasks": len(by_task(rows))}
    counts["success"] = float(np.mean([row.is_success for row in rows]))
    best = best_of({name: lines[name][0] for name in ("model", "turns")}, rows)
    return {**counts, "scores": table, "best_of": best}


def best_of(scores: dict[str, Array], rows: Sequence[Episode]) -> dict[str, float]:
    """Return the mean success over tasks of the episode that a score likes best (a tie counts as the mean of the tied),
    and of a random and a perfect choice. Tasks of a single episode do not count; {} if there are no others."""
    places: dict[Any, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        places[row.task].append(i)
    groups = [np.array(at) for at in places.values() if len(at) > 1]
    if not groups:
        return {}
    success = np.array([row.is_success for row in rows])
    found = {"tasks": len(groups), "n": float(np.mean([len(at) for at in groups]))}
    found["random"] = float(np.mean([success[at].mean() for at in groups]))
    for name, values in scores.items():
        found[name] = float(np.mean([success[at][values[at] == values[at].max()].mean() for at in groups]))
    return found | {"perfect": float(np.mean([success[at].any() for at in groups]))}


def shown(held: dict[str, Any]) -> str:
    """Return the held of `report` as a table for people."""

    def cell(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    lines = [f"held out: {held['episodes']} episodes of {held['tasks']} tasks, success {held['success']:.3f}"]
    lines.append(f"{'score':25}{'AUC':>6}{'pairs of a task':>20}{'with equal turns':>20}")
    for name, row in held["scores"].items():
        won = f"{cell(row['pairs_won'])} of {row['pairs']}"
        equal = f"{cell(row['equal_turns_won'])} of {row['equal_turns_pairs']}"
        lines.append(f"{name:25}{cell(row['auc']):>6}{won:>20}{equal:>20}")
    if best := held["best_of"]:
        values = ", ".join(f"{name} {value:.3f}" for name, value in best.items() if name not in ("tasks", "n"))
        lines.append(f"best of {best['n']:g}: {values}")
    return "\n".join(lines)
