"""Decoding with a value model: candidates of the policy, of which a critic picks one.

- value-turn: K candidates of every turn (`CandidateEngine`). The environment sees only the chosen one.
- best-of-n: K whole episodes of every task (`best_of`).

`tilt` and `blockwise_kl` are the formulas behind both (Mudgal et al. 2024, arXiv 2310.17022).
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from agent_r1.text.tokenizers import fingerprint, load_tokenizer
from agent_r1_tools.text import printable
from llm_utils import distributed
from llm_utils.sampling.engine import Engine, Span
from llm_utils.streams import Stream
from llm_utils.training.forward import pad
from llm_utils.trajectory import Trajectory
from llm_utils.value_model import load_critic, weights_digest

Array = np.ndarray
Score = Callable[[Sequence[Array]], Array]  # rows of tokens that end with a span -> their values

BATCH_TOKENS = 2**15  # with padding, in one forward of the critic


def check_decoding(args: Any) -> None:
    """Raise SystemExit for flags of decoding that contradict each other."""
    if args.decode == "plain":
        return
    if args.temperature == 0:
        raise SystemExit(f"--decode {args.decode} needs a --temperature above 0: greedy candidates are all equal")
    if args.decode == "value-turn" and args.critic is None:
        raise SystemExit("--decode value-turn needs --critic, the folder of a run of ppo_llm.py")
    if args.decode == "best-of-n" and args.samples > 1:
        raise SystemExit("--samples contradicts --decode best-of-n, which plays --candidates episodes of each task")


def load_score(
    args: Any, tokenizer: str | None, vocab_size: int, policy: Any, device: torch.device
) -> tuple[Score | None, dict[str, str]]:
    """Return the function that scores rows by `--critic`, and lines for the report; None and {} without a critic.

    Raise SystemExit if the critic reads other tokens. Print a warning if it was trained for another policy: its values
    are then those of that policy. `policy` is None if another process has it, and is then not compared.
    """
    if args.critic is None:
        return None, {}
    critic, facts = load_critic(args.critic, device)
    if (facts.vocab_size, facts.tokenizer) != (vocab_size, fingerprint(load_tokenizer(tokenizer, args.chat_template))):
        raise SystemExit(
            f"--critic {args.critic} reads the tokens of another tokenizer or chat template: train one for this model "
            "with ppo_llm.py --critic-only"
        )
    digest = weights_digest(distributed.weights(policy)) if policy is not None else None
    relation = "not compared" if digest is None else "the evaluated one" if digest == facts.policy else "another one"
    if relation == "another one":
        print(f"--critic {args.critic} was trained for another policy than the evaluated one", file=sys.stderr)
    if facts.env_id != args.env_id:
        print(printable(f"--critic {args.critic} was trained on {facts.env_id}"), file=sys.stderr)

    def score(rows: Sequence[Array]) -> Array:
        return values_before_last(critic, rows, device)

    return score, {"critic": str(args.critic), "policy_of_critic": relation}


def end_of_actions(row: Trajectory) -> Array:
    """Return the tokens of an episode's last segment up to its last sampled token."""
    segment = row.segments()[-1]
    end = row.turns[-1].end if row.turns and row.turns[-1].end > segment.start else segment.end
    return row.tokens[segment.start : end]


def tilt(probabilities: Array, values: Array, strength: float = 1.0) -> Array:
    """Return the distribution [n] in proportion to p * exp(strength * V): the policy that maximises the expected value
    minus its KL divergence to p, divided by `strength`."""
    exponents = strength * np.asarray(values, float)
    weights = np.asarray(probabilities, float) * np.exp(exponents - exponents.max())
    return weights / weights.sum()


def blockwise_kl(candidates: int) -> float:
    """Return the largest KL divergence, in nats, from the policy to the best of `candidates` samples of it."""
    return math.log(candidates) - (candidates - 1) / candidates


@torch.no_grad()
def values_before_last(critic: Any, rows: Sequence[Array], device: torch.device) -> Array:
    """Return the critic's values float32 [n] of the states before the last token of each row [T].

    A critic is trained on states that precede a sampled token. The state after a span's last token is none of them.
    """
    values, order = np.zeros(len(rows), np.float32), sorted(range(len(rows)), key=lambda i: len(rows[i]))
    while order:
        fitting = max(1, BATCH_TOKENS // len(rows[order[-1]]))  # the longest rows first
        batch, order = order[-fitting:], order[:-fitting]
        states = [rows[i][:-1] for i in batch]
        found = critic(pad(states, device)).float().cpu().numpy()
        values[batch] = [found[k, len(state) - 1] for k, state in enumerate(states)]
    return values


@dataclass
class Group:
    """The candidates of one slot of the environments."""

    row: Array  # tokens that were fed and chosen so far
    seed: list[int]  # of the episode
    turn: int = 0
    chosen: int = 0  # the candidate whose span continued the row
    spans: dict[int, Span] | None = None  # completed candidates of this turn, by number


class CandidateEngine:
    """An engine that samples several candidates of each span and returns the one with the highest value.

    The `engine` behind it has `candidates` slots for each slot here. They hold the same row, and each samples with its
    own random numbers. The first candidate has those of plain sampling, and it wins ties. So one candidate, or constant
    values, give the tokens of plain sampling. The environment needs no fork.
    """

    overlaps = False

    def __init__(self, engine: Engine, candidates: int, score: Score) -> None:
        """Take `score`, which maps rows of tokens, each ending with a candidate, to values [n]."""
        self.engine, self.candidates, self.score = engine, candidates, score
        self.groups: dict[int, Group] = {}

    @property
    def busy(self) -> bool:
        """Return True while a candidate is being sampled."""
        return self.engine.busy

    def feed(
        self, slot: int, tokens: Array, max_new_tokens: int, stop_token_ids: Sequence[int], seed: Any = None
    ) -> None:
        """Append `tokens` int32 [m] to the slot's row and request the candidates of the next span. `seed` begins a new
        row."""
        first = slot * self.candidates
        if seed is not None:
            group = self.groups[slot] = Group(np.asarray(tokens), [*seed])
        else:
            group = self.groups[slot]
            group.turn += 1  # turn 0 has used its random numbers
            for k, span in (group.spans or {}).items():  # the others continue from the chosen candidate
                if not np.array_equal(span.tokens, (group.spans or {})[group.chosen].tokens):
                    of_candidate = [*group.seed, Stream.CANDIDATES, group.turn, k]
                    self.engine.fork(first + group.chosen, first + k, of_candidate)
            group.row = np.concatenate([group.row, tokens])
        group.spans = {}
        for k in range(self.candidates):
            own = None if seed is None else [*seed, Stream.CANDIDATES, 0, k] if k else seed
            self.engine.feed(first + k, tokens, max_new_tokens, stop_token_ids, seed=own)

    def step(self) -> list[Span]:
        """Work for a moment. Return the chosen spans of the slots whose candidates are complete."""
        complete = []
        for span in self.engine.step():
            slot, k = divmod(span.slot, self.candidates)
            spans = self.groups[slot].spans
            assert spans is not None, "a candidate that was not requested"
            spans[k] = span
            if len(spans) == self.candidates:
                self.groups[slot].spans = dict(sorted(spans.items()))
                complete.append(slot)
        return self._choose(complete) if complete else []

    def _choose(self, slots: Sequence[int]) -> list[Span]:
        """Choose a candidate for each slot. All rows are scored together, equal candidates of a slot once."""
        rows: dict[tuple[int, bytes], Array] = {}
        for slot in slots:
            group = self.groups[slot]
            different = {span.tokens.tobytes(): span.tokens for span in (group.spans or {}).values()}
            if len(different) > 1:
                rows |= {(slot, key): np.concatenate([group.row, tokens]) for key, tokens in different.items()}
        values = dict(zip(rows, self.score([*rows.values()]), strict=True)) if rows else {}
        spans = []
        for slot in slots:
            group = self.groups[slot]
            candidates = group.spans or {}
            found = [values.get((slot, span.tokens.tobytes()), 0.0) for span in candidates.values()]
            group.chosen = int(np.argmax(found))  # the first of equal ones
            span = candidates[group.chosen]
            group.row = np.concatenate([group.row, span.tokens])
            total = sum(len(other.tokens) for other in candidates.values())
            spans.append(replace(span, slot=slot, candidate_tokens=total))
        return spans

    def release(self) -> None:
        """Forget all rows."""
        self.groups = {}
        self.engine.release()

    def close(self) -> None:
        """Stop everything that the engine runs."""
        self.engine.close()


def best_of(rows: Iterable[Any]) -> list[Any]:
    """Return the best episode of each task, with the tokens of all its episodes as `candidate_tokens`.

    The best has the highest `critic_value` in its `stats`. Without values it has the highest `success`: this is a
    perfect scorer, an upper bound of all others. The first of equal ones wins.
    """
    of_tasks: dict[int, list[Any]] = {}
    for row in rows:
        of_tasks.setdefault(row.task_index, []).append(row)
    best = []
    for candidates in of_tasks.values():
        row = max(candidates, key=lambda row: row.stats.get("critic_value", row.stats["success"]))
        total = sum(other.stats["sampled_tokens"] for other in candidates)
        best.append(copy.copy(row))
        best[-1].stats = {**row.stats, "candidate_tokens": total}
    return best
