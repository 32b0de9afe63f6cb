"""The trajectory: a rollout makes it, advantages fill it, and losses read it."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch

from llm_utils.returns import returns_to_go

Array = np.ndarray
OF_TURNS = ("return", "turns", "tool_calls", "tool_errors")  # statistics of an episode, summed over its turns


@dataclass
class Turn:
    """One sampled span: the tokens from `start` to before `end` of the trajectory, with the result of its turn."""

    start: int
    end: int
    reward: float
    logprobs: Array  # float32 [end - start], the sampler's
    versions: Array  # int32 [end - start], of the weights that sampled each token
    tool_calls: int = 0
    tool_errors: int = 0
    reward_terms: Mapping[str, float] = field(default_factory=dict)  # the named terms of `reward`
    forced: int = 0  # number of tokens before `start` that are part of the action, but were given, not sampled


@dataclass(eq=False)
class Trajectory:
    """One episode. In the arrays, which `finalize` makes, entry t belongs to token t.

    The tokens form one growing row. If a wrapper rewrites the context, a new segment begins at the next entry of
    `segment_starts`, and the tokens are the segments end to end.
    """

    episode: int
    task_index: int
    prompt_length: int
    tokens: Array  # int32: the prompt, then alternately sampled spans and tokens of the environment
    segment_starts: list[int] = field(default_factory=lambda: [0])
    turns: list[Turn] = field(default_factory=list)  # after `finalize`, only turns with sampled tokens
    terminated: bool = False
    truncated: bool = False
    fault: str | None = None  # infrastructure error that ended it; such an episode trains nothing
    stats: dict[str, float] = field(default_factory=lambda: dict.fromkeys(OF_TURNS, 0))  # and the task's metrics
    reward_terms: Any = field(default_factory=Counter)  # the named terms, summed over the episode
    record: dict[str, Any] = field(default_factory=dict)  # from `episode_record`, for people
    answers: Sequence[str] = ()  # the task's gold answers, which no policy reads
    critic_prefix: Array = field(default_factory=lambda: np.zeros(0, np.int32))  # before `tokens`, for the critic
    branches: tuple[tuple[int, int], ...] = ()  # of its ancestors, the oldest first: number, and turns shared
    copied: int = 0  # number of tokens that are copied from another episode, the prompt included

    played: list[tuple[int, int, float]] = field(init=False)  # start, end and reward of all turns
    action_mask: Array = field(init=False)  # bool: True for sampled tokens
    train_mask: Array = field(init=False)  # bool: True for tokens that train the policy
    value_mask: Array = field(init=False)  # bool: True if the state before the token trains the critic
    versions: Array = field(init=False)  # int32: training iterations before the token was sampled
    logprobs: Array = field(init=False)  # the sampling policy's; 0 for tokens not sampled
    old_logprobs: Array = field(init=False)  # the ratio's denominator: the sampler's or the trainer's before the update
    replayed: bool = False  # True: a stored success of an earlier iteration
    unscored: bool = False  # True: the first optimizer step of the iteration fills `old_logprobs`
    ref_logprobs: Array = field(init=False)  # the reference policy's, if there is a KL penalty
    rewards: Array = field(init=False)  # a turn's reward, on the turn's last sampled token
    values: Array = field(init=False)  # the critic's value of the state before the token
    value_last: float = 0.0  # the critic's value of the last state
    advantages: Array = field(init=False)
    returns: Array = field(init=False)  # targets of the critic

    def add(self, turn: Turn) -> None:
        """Append a turn, and count it in the statistics."""
        self.turns.append(turn)
        for name, value in zip(OF_TURNS, (turn.reward, 1, turn.tool_calls, turn.tool_errors), strict=True):
            self.stats[name] += value
        self.reward_terms.update(turn.reward_terms)

    def upto(self, turn: int, episode: int) -> Trajectory:
        """Return a copy of this running episode before its turn number `turn` (from 0), as the beginning of `episode`.

        The copy shares no array. Its record names `parent` and `branch_turn`.

        Raises ValueError for an episode that is over, because `finalize` moved its rewards, and for a turn after the
        next one.
        """
        if hasattr(self, "played"):
            raise ValueError(f"episode {self.episode} is over; copy it while it runs")
        if not 0 <= turn <= len(self.turns):
            raise ValueError(f"turn must be in [0, {len(self.turns)}], the turns of episode {self.episode}, got {turn}")
        end = len(self.tokens) if turn == len(self.turns) else self.turns[turn].start - self.turns[turn].forced
        starts = [start for start in self.segment_starts if start < end]
        child = Trajectory(episode, self.task_index, self.prompt_length, self.tokens[:end].copy(), starts)
        for old in self.turns[:turn]:
            child.add(copy.deepcopy(old))
        with_tokens = sum(old.end > old.start for old in child.turns)  # those that `finalize` keeps
        child.branches, child.copied = (*self.branches, (self.episode, with_tokens)), end
        child.answers = self.answers
        child.record = copy.deepcopy(self.record) | {"parent": self.episode, "branch_turn": turn}
        return child

    def finalize(self) -> None:
        """End the episode: make the arrays, and move rewards of empty spans to neighbouring turns.

        An empty span has no token to carry its reward. The reward goes to the previous turn, or to the next if there is
        none. An episode without sampled tokens trains nothing.
        """
        self.played = [(turn.start, turn.end, turn.reward) for turn in self.turns]
        turns: list[Turn] = []
        carried = 0.0
        for turn in self.turns:
            if turn.end > turn.start:
                turn.reward += carried
                turns.append(turn)
                carried = 0.0
            elif turns:
                turns[-1].reward += turn.reward
            else:
                carried += turn.reward
        self.turns = turns
        zeros = np.zeros(len(self.tokens), np.float32)
        self.logprobs, self.ref_logprobs, self.rewards = zeros.copy(), zeros.copy(), zeros.copy()
        self.values, self.advantages, self.returns = zeros.copy(), zeros.copy(), zeros.copy()
        self.action_mask, self.versions = np.zeros(len(self.tokens), bool), np.zeros(len(self.tokens), np.int32)
        for turn in turns:
            at = slice(turn.start, turn.end)
            self.action_mask[at], self.logprobs[at], self.versions[at] = True, turn.logprobs, turn.versions
            self.rewards[turn.end - 1] = turn.reward
        self.old_logprobs = self.logprobs.copy()
        self.train_mask = self.value_mask = self.action_mask

    def after_prompt(self) -> Array:
        """Return the mask of all tokens after each segment's prompt, bool, without forced ones. Rows 2 and 3 of
        Agent-R1's table 4 train on them."""
        mask = np.ones(len(self.tokens), bool)
        for segment in self.segments():
            mask[segment.start : segment.start + segment.prompt_length] = False
        for turn in self.turns:
            mask[turn.start - turn.forced : turn.start] = False
        return mask

    def turn_rewards(self) -> Array:
        """Return the reward of each turn, float64 [turns]."""
        return np.array([turn.reward for turn in self.turns], float)

    def add_rewards(self, values: Array) -> None:
        """Add `values` [turns] to the rewards of the finished episode's turns. The statistic `return` and the logged
        `turn_rewards` stay as the environment paid them."""
        for turn, value in zip(self.turns, values, strict=True):
            turn.reward += float(value)
            self.rewards[turn.end - 1] = turn.reward

    def turn_sums(self, values: Array) -> Array:
        """Sum `values`, one per token, over each turn's sampled tokens."""
        return np.array([values[turn.start : turn.end].sum() for turn in self.turns], float)

    def set_turn_advantages(self, values: Array, sampled_only: bool = True) -> None:
        """Give every sampled token of a turn the turn's advantage. With `sampled_only` False, give it to every token up
        to the next turn or segment."""
        borders = np.array([turn.start for turn in self.turns] + [*self.segment_starts, len(self.tokens)])
        for turn, value in zip(self.turns, values, strict=True):
            self.advantages[turn.start : turn.end if sampled_only else borders[borders >= turn.end].min()] = value

    def segments(self) -> list[Segment]:
        """Return the segments that a model sees: one, unless the context was rewritten."""
        ends = [*self.segment_starts[1:], len(self.tokens)]
        return [Segment(self, start, end) for start, end in zip(self.segment_starts, ends, strict=True)]


@dataclass
class Segment:
    """The tokens from `start` to before `end` of a trajectory: one row that a model sees."""

    trajectory: Trajectory
    start: int
    end: int

    @property
    def task_index(self) -> int:
        return self.trajectory.task_index

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first span of this segment."""
        if self.start == 0:
            return self.trajectory.prompt_length
        starts = (turn.start - turn.forced for turn in self.trajectory.turns if turn.start >= self.start)
        return min(starts, default=self.end) - self.start

    @property
    def turn_starts(self) -> list[int]:
        """Start positions of the turns within this segment."""
        return [t.start - self.start for t in self.trajectory.turns if self.start <= t.start < self.end]

    @property
    def tokens(self) -> Array:
        """Token ids, int32 [tokens]."""
        return self.trajectory.tokens[self.start : self.end]

    @property
    def train_mask(self) -> Array:
        """True for tokens that train the policy, bool [tokens]."""
        return self.trajectory.train_mask[self.start : self.end]

    @property
    def value_mask(self) -> Array:
        """True if the state before the token trains the critic, bool [tokens]."""
        return self.trajectory.value_mask[self.start : self.end]


@dataclass(frozen=True)
class Batch:
    """The inputs of the losses for some rows, one row after the other: tensors on the policy's device."""

    # for the N tokens where `train_mask` is True
    old: torch.Tensor  # float32 [N], log-probabilities in the ratio's denominator
    sampler: torch.Tensor  # float32 [N], the sampler's log-probabilities, 0 for tool results
    reference: torch.Tensor  # float32 [N], the reference policy's log-probabilities, 0 without one
    advantages: torch.Tensor  # float32 [N]
    sampled: torch.Tensor  # bool [N], True for sampled tokens, False for tool results
    # for the M states where `value_mask` is True
    values: torch.Tensor  # float32 [M], the critic's before the update
    returns: torch.Tensor  # float32 [M], targets of the critic

    def importance(self, cap: float) -> torch.Tensor:
        """Return truncated importance weights float32 [N]: trainer / sampler, at most `cap`; 1 for tool results."""
        return torch.where(self.sampled, (self.old - self.sampler).exp().clamp(max=cap), 1.0)


def make_batch(rows: Sequence[Segment], device: Any, new: torch.Tensor | None = None) -> Batch:
    """Gather the inputs of the losses for these rows.

    `new` [N] are the policy's log-probabilities now. They also become the old ones of `unscored` rows, which are those
    of the first optimizer step: its weights are still the ones before the update.
    """
    of = [row.trajectory for row in rows]
    tokens = [row.start + np.flatnonzero(row.train_mask) for row in rows]
    states = [row.start + np.flatnonzero(row.value_mask) for row in rows]
    if new is not None and any(row.unscored for row in of):
        parts = np.split(new.detach().cpu().numpy(), np.cumsum([len(at) for at in tokens])[:-1])
        for row, at, part in zip(of, tokens, parts, strict=True):
            if row.unscored:
                row.old_logprobs[at] = part

    def gather(arrays: list[Array], at: list[Array]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([x[i] for x, i in zip(arrays, at, strict=True)])).to(device)

    return Batch(
        old=gather([row.old_logprobs for row in of], tokens),
        sampler=gather([row.logprobs for row in of], tokens),
        reference=gather([row.ref_logprobs for row in of], tokens),
        advantages=gather([row.advantages for row in of], tokens),
        sampled=gather([row.action_mask for row in of], tokens),
        values=gather([row.values for row in of], states),
        returns=gather([row.returns for row in of], states),
    )


@dataclass(frozen=True)
class Group:
    """The episodes of one task, except those ended by infrastructure errors, and their returns."""

    rows: list[Trajectory]
    returns: Array  # float64 [episodes, turns]: discounted rewards from each turn on, 0 after an episode's end

    def has_signal(self, credit: str) -> bool:
        """Return True if the rewards give a gradient: the returns differ (with credit "turn": at any turn)."""
        returns = self.returns[:, :1] if credit == "episode" else self.returns
        return bool(np.ptp(returns.round(6), axis=0).any())


def make_groups(rows: Sequence[Trajectory], size: int, gamma: float) -> list[Group]:
    """Group the episodes by task. Episodes of the same task have neighbouring numbers."""
    rows = sorted(rows, key=lambda row: row.episode)
    groups = [list(group) for _, group in groupby(rows, key=lambda row: row.episode // size)]
    return [Group(group, returns_to_go([row.turn_rewards() for row in group], gamma)) for group in groups]


def token_weights(
    rows: Sequence[Segment], aggregation: str, num_tokens: int, num_rows: int, constant_length: int
) -> torch.Tensor:
    """Return the weight of each trained token in the loss: float32 [N].

    "token": the mean over the step's `num_tokens`. "sequence": the mean over its `num_rows` episodes of their token
    means. "constant": the sum over episodes, divided by their number and by `constant_length`.
    """
    weight = {
        "token": [1 / max(1, num_tokens)] * len(rows),
        "sequence": [1 / max(1, int(row.trajectory.train_mask.sum())) / max(1, num_rows) for row in rows],
        "constant": [1 / constant_length / max(1, num_rows)] * len(rows),
    }[aggregation]
    return torch.tensor(np.repeat(weight, [int(row.train_mask.sum()) for row in rows]), dtype=torch.float32)
