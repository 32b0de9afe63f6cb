"""The row of tokens that everything works on: what a rollout makes, advantages fill, and losses read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

Array = np.ndarray


@dataclass
class Trajectory:
    """One episode as one row of tokens. In the arrays, which `lay_out` fills, entry t belongs to token t."""

    episode: int
    task_index: int
    prompt_length: int
    tokens: Array  # int32: the prompt, then sampled spans and what the environment wrote, in turn
    terminated: bool = False
    truncated: bool = False
    turns: list[tuple[int, int, float]] = field(default_factory=list)  # first token, one past the last, reward
    span_logprobs: list[Array] = field(default_factory=list)  # the sampler's, of every turn
    span_versions: list[Array] = field(default_factory=list)  # of the weights that sampled each token
    stats: Counter[str] = field(default_factory=Counter)  # return, turns, success, exact match ...
    reward_terms: Counter[str] = field(default_factory=Counter)  # the named terms, summed over the episode

    action_mask: Array = field(init=False)  # bool: was the token sampled?
    versions: Array = field(init=False)  # int32: optimizer iterations before the token was sampled
    logprobs: Array = field(init=False)  # the sampling policy's, 0 for tokens that were not sampled
    old_logprobs: Array = field(init=False)  # the ratio's denominator: the sampler's or the trainer's before the update
    ref_logprobs: Array = field(init=False)  # the reference policy's, where a KL divergence is paid
    rewards: Array = field(init=False)  # a turn's reward, on the turn's last sampled token
    values: Array = field(init=False)  # the critic's value of the state before the token
    value_last: float = 0.0  # its value of the last state
    advantages: Array = field(init=False)
    returns: Array = field(init=False)  # what the critic regresses to

    def lay_out(self) -> None:
        """Lay the turns of a finished episode out over its tokens.

        An empty span has no token to carry its reward. The reward moves to the last token sampled before it, or, where
        there is none, to the end of the next span; an episode in which nothing was sampled trains nothing.
        """
        for name in ("logprobs", "ref_logprobs", "rewards", "values", "advantages", "returns"):
            setattr(self, name, np.zeros(len(self.tokens), np.float32))
        self.action_mask, self.versions = np.zeros(len(self.tokens), bool), np.zeros(len(self.tokens), np.int32)
        carried, last = 0.0, -1
        spans = zip(self.turns, self.span_logprobs, self.span_versions, strict=True)
        for (start, end, reward), logprobs, versions in spans:
            self.action_mask[start:end], self.logprobs[start:end], self.versions[start:end] = True, logprobs, versions
            carried, last = carried + reward, end - 1 if end > start else last
            if last >= 0:
                self.rewards[last] += carried
                carried = 0.0
        self.turns = [turn for turn in self.turns if turn[1] > turn[0]]
        self.old_logprobs = self.logprobs.copy()

    def turn_rewards(self) -> Array:
        """The reward of each turn in which something was sampled."""
        return np.array([self.rewards[start:stop].sum() for start, stop, _ in self.turns])

    def set_turn_advantages(self, values: Array, sampled_only: bool) -> None:
        """Give every sampled token of a turn the turn's advantage; or every token up to the next turn."""
        ends = [start for start, _, _ in self.turns[1:]] + [len(self.tokens)]
        for (start, stop, _), end, value in zip(self.turns, ends, values, strict=True):
            self.advantages[start : stop if sampled_only else end] = value


def train_positions(row: Trajectory, sampled_only: bool) -> Array:
    """The tokens that were sampled; or, as in rows 2 and 3 of Agent-R1's table 4, all tokens after the prompt."""
    return row.action_mask if sampled_only else np.arange(len(row.tokens)) >= row.prompt_length
