"""Does the expected gradient of an estimator of advantages point where the truth does? Exactly, on small games.

    python benchmarks/learning/estimators.py    # a table for each question, about three minutes on one core

A game is a list of all its episodes, each with its probability, the rewards and sampled tokens of its turns, and the
gradient of the log-probability of each turn's choice. The expected first-step gradient (ratio 1, nothing clipped) of an
estimator is a sum over all batches of such episodes, weighted by their probability: no sampling, no noise.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from itertools import combinations_with_replacement, product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import tyro

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks" / "common"), str(ROOT / "learner")]
import arpo_llm
import gigpo_llm
import grpo_llm
import ppo_llm
import reinforce_pp_llm
import rloo_llm
from machine import from_0, from_1, record_results

from llm_utils.branching import branch_probability
from llm_utils.returns import returns_to_go
from llm_utils.trajectory import Trajectory, Turn, make_groups

Array = np.ndarray
AGGREGATIONS = ("sum", "token", "sequence")

# ------------------------------------------------------------------------------------------------------------- games


@dataclass(frozen=True, eq=False)  # hashed by identity
class Episode:
    """One way a game can go."""

    probability: float
    rewards: Array  # [turns]
    lengths: Array  # [turns] sampled tokens; the first of them is the choice, the others follow from it
    scores: Array  # [turns, parameters] gradient of the log-probability of the choice
    keys: tuple[tuple[int, int], ...]  # state and action of each turn
    values: dict[str, Array] = field(default_factory=dict)  # name -> [tokens], before each sampled token

    @property
    def calls(self) -> int:
        """Tool calls that can fail: the last turn answers, each before it calls."""
        return len(self.rewards) - 1

    @property
    def starts(self) -> Array:
        """The position of the choice of each turn among the sampled tokens."""
        return np.cumsum(self.lengths) - self.lengths


Game = list[Episode]
Choice = tuple[int, int, int]  # state, action, sampled tokens


def true_gradient(game: Game) -> Array:
    """Gradient of the expected return, [parameters]."""
    return sum(e.probability * e.rewards.sum() * e.scores.sum(0) for e in game)


def with_values(game: Game, rng: np.random.Generator) -> Game:
    """Add the value functions "exact", "zero" and "wrong" (exact plus a random number for each state)."""
    mass, total = Counter[Any](), Counter[Any]()
    for e in game:
        for (state, action), earned in zip(e.keys, np.cumsum(e.rewards[::-1])[::-1], strict=True):
            for key in (state, (state, action)):
                mass[key] += e.probability
                total[key] += e.probability * earned
    exact = {key: total[key] / mass[key] for key in mass}
    error = {key: rng.normal() for key in exact}
    found = []
    for e in game:  # the first token of a turn is written in its state, the others after the choice
        at = [key for (s, a), n in zip(e.keys, e.lengths, strict=True) for key in [s] + [(s, a)] * (n - 1)]
        values = {"exact": np.array([exact[key] for key in at]), "zero": np.zeros(len(at))}
        values["wrong"] = values["exact"] + [error[key] for key in at]
        found.append(replace(e, values=values))
    return found


def tree_game(rng: np.random.Generator, most: int = 8) -> Game:
    """A random tree: 2 to 4 decisions among 2 to 4 actions, of which stopping is one, and a softmax policy with a logit
    for each action of each state. Turns without a choice may follow. At most `most` different episodes."""
    while True:
        game = _grow(rng)
        if len(game) <= most and np.linalg.norm(true_gradient(game)) > 1e-3 * max(abs(e.rewards).max() for e in game):
            return with_values(game, rng)


def _grow(rng: np.random.Generator) -> Game:
    kind, unit = rng.choice(["binary", "outcome", "process"]), rng.choice([0.2, 1.0, 5.0])
    policies: list[Array] = []  # of each state
    paths: list[tuple[float, list[Choice], list[float]]] = []  # probability, turns, rewards

    def visit(probability: float, turns: list[Choice], rewards: list[float], decisions: int) -> None:
        state = len(policies)
        logits = rng.normal(size=rng.integers(2, 5) if decisions else 1)
        policies.append(np.exp(logits) / np.exp(logits).sum())
        forced = 0 if decisions else int(rng.integers(0, 3))  # turns without a choice to follow this one
        for action, p in enumerate(policies[state]):
            path = [*turns, (state, action, int(rng.integers(1, 4)))]
            reward = unit * rng.normal() / 2 if kind == "process" else 0.0
            if decisions > 1 and (action == 1 or action > 1 and rng.random() < 0.5):  # action 0 is to stop
                visit(probability * p, path, [*rewards, reward], decisions - 1)
            elif decisions and rng.random() < 0.5:
                visit(probability * p, path, [*rewards, reward], 0)
            else:
                for _ in range(forced):
                    policies.append(np.ones(1))
                    path, rewards = [*path, (len(policies) - 1, 0, int(rng.integers(1, 4)))], [*rewards, 0.0]
                chance = rng.uniform(0.1, 0.9)
                ends = [(chance, 1.0), (1 - chance, 0.0)] if kind == "binary" else [(1.0, rng.normal())]
                for share, paid in ends:
                    paths.append((probability * p * share, path, [*rewards, reward + unit * paid]))

    visit(1.0, [], [], int(rng.integers(2, 5)))
    first = np.cumsum([0, *map(len, policies)])  # the first parameter of each state
    game = []
    for probability, path, rewards in paths:
        scores = np.zeros((len(path), first[-1]))
        for row, (state, action, _) in zip(scores, path, strict=True):
            row[first[state] : first[state + 1]] = -policies[state]
            row[first[state] + action] += 1
        lengths = np.array([length for _, _, length in path])
        game.append(Episode(probability, np.array(rewards), lengths, scores, tuple((s, a) for s, a, _ in path)))
    return game


def stopping_game(
    go_on: float, pays: Sequence[float], turns: Sequence[int], lengths: Sequence[int] = (1, 1, 1),
    certain: bool = False, rng: np.random.Generator | None = None,
) -> Game:  # fmt: skip
    """One parameter, the logit of P(go on), at each of len(pays) - 1 decisions.

    Who stops at decision i has `turns[i]` turns more and is then paid 1 with probability `pays[i]` (or, if `certain`,
    `pays[i]`). Sampled tokens of a turn: `lengths` of stopping, of going on, and of the turns without a choice.
    """
    game = []
    last = len(pays) - 1
    for i, pay in enumerate(pays):
        decisions = min(i + 1, last)
        chosen = [1] * i + [0] * (i < last)
        for chance, paid in [(1.0, pay)] if certain else [(pay, 1.0), (1 - pay, 0.0)]:
            n = decisions + turns[i]
            rewards, scores = np.zeros(n), np.zeros((n, 1))
            rewards[-1], scores[:decisions, 0] = paid, np.array(chosen) - go_on
            keys = [(k, c) for k, c in enumerate(chosen)] + [(100 * (i + 1) + k, 0) for k in range(turns[i])]
            spans = np.array([lengths[c] for c in chosen] + [lengths[2]] * turns[i])
            probability = chance * go_on**i * (1 - go_on) ** (i < last)
            game.append(Episode(probability, rewards, spans, scores, tuple(keys)))
    return with_values([e for e in game if e.probability > 0], rng or np.random.default_rng(0))


def one_parameter_game(rng: np.random.Generator, most: int = 3) -> Game:
    """A stopping game with 1 to `most` - 1 decisions and any lengths; in half of them the pays are close."""
    while True:
        n = int(rng.integers(2, most + 1))
        certain = bool(rng.random() < 0.3)
        middle, width = rng.uniform(0.2, 0.8), 0.1 if rng.random() < 0.5 else 0.95
        pays = np.clip(middle + width * rng.uniform(-1, 1, n), 0.05, 0.95)
        pays *= rng.choice([0.2, 1.0, 5.0]) if certain else 1.0
        turns, lengths = rng.integers(0, 7, n), rng.integers(1, 4, 3)
        game = stopping_game(rng.uniform(0.05, 0.95), pays, turns, lengths, certain, rng)
        if abs(true_gradient(game)[0]) > 1e-3:
            return game


AUDITED = stopping_game(0.2, (0.4, 0.5), (0, 5))  # stopping pays 1 with chance .4, going on to turn 6 with .5

# -------------------------------------------------------------------- the learners' estimators, behind one signature
# An estimator takes the groups of a batch and returns, group after group, the advantages of the turns' choices.

Estimator = Callable[[Sequence[Sequence[Episode]]], list[Array]]
OWN_RETURN, OWN_TOKENS = "own return in the scale", "own tokens in mean and scale"
SHARED = "shared turns count twice, and own returns in their baseline"
OWN_STATE = "shared states weigh more, own later visits in the mean"


@dataclass(frozen=True)
class Entry:
    """A row of the tables: a learner with some of its flags, whether it claims the truth's direction, and why not.

    The learner's own `compute_advantages` computes it from its own `Args`, so a row cannot differ from its flags.
    """

    name: str
    learner: ModuleType
    flags: str = ""
    values: str = "zero"  # which value function the critic is
    bias: str = ""  # by design; "" claims the direction
    groups: int = 1  # groups in the batch
    alone: bool = False  # each group is a batch of its own

    @cached_property
    def args(self) -> Any:
        return tyro.cli(self.learner.Args, args=shlex.split(self.flags))

    def estimator(self, groups: Sequence[Sequence[Episode]]) -> list[Array]:
        """Compute the learner's advantages of a batch, each group of one task."""
        if self.alone and len(groups) > 1:
            return [a for group in groups for a in self.estimator([group])]
        size = max(map(len, groups))
        rows = [row(e, self.values, g * size + i) for g, group in enumerate(groups) for i, e in enumerate(group)]
        args = replace(self.args, group_size=size) if hasattr(self.args, "group_size") else self.args
        in_groups = self.learner in (grpo_llm, rloo_llm, gigpo_llm)
        self.learner.compute_advantages(make_groups(rows, size, args.gamma) if in_groups else rows, args)
        return [r.advantages[[turn.start for turn in r.turns]].astype(float) for r in rows]

    @property
    def by_group(self) -> bool:
        """Return whether the advantages of a group depend on no other group of the batch."""
        scaled_by_others = self.learner is grpo_llm and self.args.scale_rewards and (
            self.args.scale_by == "others" or self.args.scale_by == "auto" and self.args.credit == "turn"
        )  # fmt: skip
        if self.learner is gigpo_llm:
            return self.alone or not self.args.scale_rewards or self.args.form == "published"
        return self.alone or self.learner is rloo_llm or self.learner is grpo_llm and not scaled_by_others


@lru_cache(maxsize=10_000)
def _row(episode: Episode, values: str) -> Trajectory:
    """A token of the environment stands before each turn: a tool result that three states of a game share by number."""
    starts = episode.starts + np.arange(1, len(episode.rewards) + 1)
    tokens = np.zeros(episode.lengths.sum() + len(starts), np.int32)
    tokens[starts - 1] = [state % 3 + 1 for state, _ in episode.keys]
    spans = zip(starts, starts + episode.lengths, episode.rewards, strict=True)
    nothing = np.zeros(episode.lengths.max(), np.int32)
    turns = [Turn(start, end, reward, nothing[: end - start], nothing[: end - start]) for start, end, reward in spans]
    found = Trajectory(0, 0, 1, tokens, turns=turns, terminated=True)
    found.finalize()
    if values in episode.values:
        found.values[found.action_mask] = episode.values[values]
    return found


def row(episode: Episode, values: str, number: int) -> Trajectory:
    """The episode as the learners read it, with the values of a critic."""
    found = copy(_row(episode, values))
    found.episode, found.advantages = number, np.zeros(len(found.tokens), np.float32)
    return found


def columns(groups: Sequence[Sequence[Episode]], eps: float = 1e-6) -> list[Array]:
    """An earlier default of grpo_llm.py: the scale is the root of the mean variance of the turns of the group."""
    found: list[Array] = []
    for group in groups:
        table = returns_to_go([e.rewards for e in group])
        table = (table - table.mean(0)) / (np.sqrt(table.var(0, ddof=1).mean()) + eps)
        found += [line[: len(e.rewards)] for line, e in zip(table, group, strict=True)]
    return found


@dataclass(frozen=True)
class Columns(Entry):
    """The earlier default, which no flag brings back."""

    def estimator(self, groups: Sequence[Sequence[Episode]]) -> list[Array]:
        return columns(groups)


@dataclass(frozen=True)
class Branched(Entry):
    """ARPO: groups of three episodes, of which the first may branch once. Two begin. The third begins at the branch, or
    at the start of the game if there is none. The policy's entropy at a turn decides, as in learner/arpo_llm.py."""

    def expected(self, game: Game) -> dict[str, Array]:
        """The expected gradient of a group, by aggregation [parameters]."""
        found = {kind: np.zeros(game[0].scores.shape[1]) for kind in AGGREGATIONS}
        mean, chances = sum(e.probability * e.lengths.sum() for e in game), _turn_chances(game)
        for first, second in product(game, repeat=2):
            none = first.probability * second.probability  # of no branch so far
            for turn in range(1, len(first.keys)):
                state = first.keys[turn][0]
                chance = branch_probability(
                    _entropy(chances[state]) - _entropy(chances[first.keys[0][0]]), self.args.branch_alpha,
                    self.args.branch_beta,
                )  # fmt: skip
                ways = [e for e in game if e.keys[:turn] == first.keys[:turn]]
                mass = sum(e.probability for e in ways)
                for e in ways:
                    self._add(found, none * chance * e.probability / mass, [first, second, e], turn, mean)
                none *= 1 - chance
            for e in game:
                self._add(found, none * e.probability, [first, second, e], 0, mean)
        return found

    def _add(
        self, found: dict[str, Array], probability: float, episodes: list[Episode], turn: int, mean: float
    ) -> None:
        rows = [row(e, "zero", i) for i, e in enumerate(episodes)]
        if turn:
            rows[2].branches = ((0, turn),)
        self.learner.compute_advantages(make_groups(rows, 3, 1.0), self.args)
        total = sum(e.lengths.sum() for e in episodes)
        for e, r in zip(episodes, rows, strict=True):
            gradient = probability * r.advantages[[turn.start for turn in r.turns]].astype(float) @ e.scores
            found["sum"] += gradient / 3
            found["token"] += gradient * mean / total
            found["sequence"] += gradient * mean / (3 * e.lengths.sum())


def _turn_chances(game: Game) -> dict[int, list[float]]:
    """The probabilities of the actions of each state."""
    mass: dict[int, Counter[int]] = {}
    for e in game:
        for state, action in set(e.keys):
            mass.setdefault(state, Counter())[action] += e.probability
    return {state: [p / sum(actions.values()) for p in actions.values()] for state, actions in mass.items()}


def _entropy(chances: Sequence[float]) -> float:
    """The entropy as a share of that of a vocabulary of four tokens."""
    return -sum(p * math.log(p) for p in chances if p) / math.log(4)


ESTIMATORS = [
    Entry("GRPO turn, scale of the others (default)", grpo_llm),
    Entry("GRPO turn, scale of the group's others", grpo_llm, alone=True),
    Entry("GRPO turn, unscaled", grpo_llm, "--no-scale-rewards"),
    Entry("GRPO turn, scale of the group", grpo_llm, "--scale-by group", bias=OWN_RETURN),
    Columns("GRPO turn, scale of the columns (old default)", grpo_llm, alone=True,
            bias="own return and turns in the scale"),
    Entry("GRPO episode, scale of the group (published)", grpo_llm, "--credit episode", bias=OWN_RETURN),
    Entry("GRPO episode, scale of the others", grpo_llm, "--credit episode --scale-by others"),
    Entry("GRPO episode, unscaled (Dr. GRPO)", grpo_llm, "--credit episode --no-scale-rewards"),
    Entry("RLOO turn (default)", rloo_llm),
    Entry("RLOO episode (published)", rloo_llm, "--credit episode"),
    Entry("GiGPO turn (default)", gigpo_llm),
    Entry("GiGPO turn, unscaled", gigpo_llm, "--no-scale-rewards"),
    Entry("GiGPO, published", gigpo_llm, "--form published", bias=OWN_STATE + ", own return in the scale"),
    Entry("GiGPO, published, unscaled", gigpo_llm, "--form published --no-scale-rewards", bias=OWN_STATE),
    Entry("REINFORCE++ turn, by the others (default)", reinforce_pp_llm),
    Entry("REINFORCE++ turn, by the batch", reinforce_pp_llm, "--adv-norm batch", bias=OWN_TOKENS),
    Entry("REINFORCE++ episode, by the batch (published)", reinforce_pp_llm, "--credit episode --adv-norm batch",
          bias=OWN_TOKENS),
    Entry("REINFORCE++-baseline turn, by the others (default)", reinforce_pp_llm, "--baseline", groups=2),
    Entry("REINFORCE++-baseline episode, by the batch (published)", reinforce_pp_llm,
          "--baseline --credit episode --adv-norm batch", bias=OWN_TOKENS, groups=2),
    Entry("PPO tokens, λ 1, wrong V, by the others (default)", ppo_llm, values="wrong"),
    Entry("PPO tokens, λ 1, V = 0, by the others", ppo_llm),
    Entry("PPO tokens, λ 0.9, exact V, by the others", ppo_llm, "--gae-lambda 0.9", "exact"),
    Entry("PPO turns, λ 0.9, exact V, by the others", ppo_llm, "--advantage turns --gae-lambda 0.9", "exact"),
    Entry("PPO bilevel, λ 1, wrong V, by the others", ppo_llm, "--advantage bilevel", "wrong"),
    Entry("PPO bilevel, λ 0.9, exact V, by the others", ppo_llm, "--advantage bilevel --gae-lambda 0.9", "exact",
          "a turn's last token says that it is the last"),
    Entry("PPO bilevel, λ 1, exact V, discounted by turns (VAGEN)", ppo_llm, "--advantage bilevel --gamma-turn 0.95",
          "exact", "a discount per turn favours short episodes"),
    Entry("PPO tokens, λ 0.9, wrong V, by the others", ppo_llm, "--gae-lambda 0.9", "wrong", "the critic's error"),
    Entry("PPO tokens, λ 1, wrong V, by the batch (published)", ppo_llm, "--adv-norm token", "wrong", OWN_TOKENS),
    Entry("PPO tokens, λ 1, V = 0, by the batch", ppo_llm, "--adv-norm token", bias=OWN_TOKENS),
    Entry("PPO tokens, λ 1, V = 0, by the batch's turns", ppo_llm, "--adv-norm turn",
          bias="own turns in mean and scale"),
    Entry("PPO tokens, λ 1, wrong V, not whitened", ppo_llm, "--adv-norm none", "wrong"),
    Branched("ARPO turn, tree (default)", arpo_llm),
    Branched("ARPO turn, tree, half of the branches by entropy", arpo_llm, "--branch-beta 2"),
    Branched("ARPO episode, soft (published)", arpo_llm, "--advantage soft --credit episode", bias=SHARED),
    Branched("ARPO episode, hard (published)", arpo_llm, "--advantage hard --credit episode", bias=SHARED),
    Branched("ARPO turn, soft, unscaled, beta 0", arpo_llm, "--advantage soft --no-scale-rewards --branch-beta 0",
             bias=SHARED),
]  # fmt: skip

# ------------------------------------------------------------------------------------------------- exact expectations


def batches(game: Game, size: int) -> list[tuple[float, tuple[int, ...]]]:
    """Every multiset of `size` episodes of the game, as sorted indices, with its probability."""
    return _multisets(tuple(e.probability for e in game), size)


@lru_cache(maxsize=1000)
def _multisets(probabilities: tuple[float, ...], size: int) -> list[tuple[float, tuple[int, ...]]]:
    found = []
    for chosen in combinations_with_replacement(range(len(probabilities)), size):
        ways = math.factorial(size) // math.prod(math.factorial(count) for count in Counter(chosen).values())
        found.append((ways * math.prod(probabilities[i] for i in chosen), chosen))
    return found


def expected_gradients(games: Sequence[Game], estimator: Estimator, group_size: int) -> dict[str, list[Array]]:
    """The expected gradient of a batch with a group from each of `games`: by aggregation, for each game [parameters].

    "sum" divides by the number of episodes, "token" is a mean over the batch's tokens, "sequence" a mean over episodes
    of means over their tokens; the latter two are multiplied by the expected tokens of an episode, to be of one size.
    """
    expected = {kind: [[np.zeros(len(e.rewards)) for e in game] for game in games] for kind in AGGREGATIONS}
    tokens = [np.array([e.lengths.sum() for e in game]) for game in games]
    mean = sum(e.probability * e.lengths.sum() for game in games for e in game) / len(games)
    for parts in product(*(batches(game, group_size) for game in games)):
        probability = math.prod(p for p, _ in parts)
        batch = [[game[i] for i in chosen] for game, (_, chosen) in zip(games, parts, strict=True)]
        advantages = iter(estimator(batch))
        total = sum(ns[i] for ns, (_, chosen) in zip(tokens, parts, strict=True) for i in chosen)
        for g, (_, chosen) in enumerate(parts):
            for i in chosen:
                term = probability * next(advantages)
                expected["sum"][g][i] += term
                expected["token"][g][i] += term / total
    episodes = group_size * len(games)
    for g, ns in enumerate(tokens):
        for i, n in enumerate(ns):
            expected["sequence"][g][i] = expected["sum"][g][i] * mean / (n * episodes)
            expected["token"][g][i] *= mean
            expected["sum"][g][i] /= episodes
    return {
        kind: [sum(c @ e.scores for c, e in zip(cs, game, strict=True)) for cs, game in zip(table, games, strict=True)]
        for kind, table in expected.items()
    }


def expected_gradient(game: Game, entry: Entry, episodes: int) -> dict[str, Array]:
    """The expected gradient of a batch of so many episodes of one game, by aggregation [parameters]."""
    if isinstance(entry, Branched):
        return entry.expected(game)
    found = expected_gradients([game] * entry.groups, entry.estimator, episodes // entry.groups)
    return {kind: sum(parts) for kind, parts in found.items()}


def cosine(a: Array, b: Array) -> float:
    return float(a @ b / max(1e-300, np.linalg.norm(a) * np.linalg.norm(b)))


# -------------------------------------------------------------------------------------------------------- the tables


def survey(one: Sequence[Game], trees: Sequence[Game]) -> dict[str, Any]:
    """Errors of direction of every estimator, by aggregation: 4 episodes of all games, 8 of the smallest."""
    small = [game for game in one if len(game) <= 4]
    found = {}
    for entry in ESTIMATORS:
        line: dict[str, Any] = {"flags": entry.flags, "bias": entry.bias, "episodes_of_8": len(small)}
        four, eight, many = (
            [(true_gradient(game), expected_gradient(game, entry, size)) for game in games]
            for games, size in ((one, 4), (small, 8), (trees, 4))
        )
        for kind in AGGREGATIONS:
            cosines = [cosine(truth, got[kind]) for truth, got in many]
            signs = [((np.sign(got[kind]) != np.sign(t))[abs(t) > 0.1 * abs(t).max()]).mean() for t, got in many]
            sizes = [float(t @ got[kind] / (t @ t)) for t, got in [*four, *many]]
            line[kind] = {
                "wrong_sign_4": float(np.mean([t[0] * got[kind][0] <= 0 for t, got in four])),
                "wrong_sign_8": float(np.mean([t[0] * got[kind][0] <= 0 for t, got in eight])),
                "backwards": float(np.mean([c < 0 for c in cosines])),
                "worst_cosine": min(cosines),
                "wrong_components": float(np.mean(signs)),
                "median_size": float(np.median(sizes)),
            }
        found[entry.name] = line
    return found


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


def survey_tables(found: dict[str, Any]) -> list[str]:
    """One with all figures for the sum, one for the means over tokens."""
    head = ["Sum aggregation", "Wrong sign, 4 episodes", "8 episodes", "Trees: backwards", "worst cosine",
            "wrong components", "Median size", "Biased by design", "Flags"]  # fmt: skip
    first = []
    for name, row in found.items():
        r = row["sum"]
        first.append([name, f"{r['wrong_sign_4']:.1%}", f"{r['wrong_sign_8']:.1%}", f"{r['backwards']:.1%}",
                      f"{r['worst_cosine']:.2f}", f"{r['wrong_components']:.1%}", f"{r['median_size']:.2f}",
                      row["bias"] or "no", f"`{row['flags']}`" if row["flags"] else ""])  # fmt: skip
    figures = ["wrong sign, 4 episodes", "8 episodes", "trees: backwards", "worst cosine"]
    second = []
    for name, row in found.items():
        cells = [name]
        for r in (row["token"], row["sequence"]):
            cells += [f"{r['wrong_sign_4']:.1%}", f"{r['wrong_sign_8']:.1%}", f"{r['backwards']:.1%}"]
            cells.append(f"{r['worst_cosine']:.2f}")
        second.append(cells)
    means = [f"Token mean: {figures[0]}", *figures[1:], f"Sequence mean: {figures[0]}", *figures[1:]]
    return [markdown(head, first), markdown(["Means over tokens", *means], second)]


def token_mean_gradient(game: Game, estimator: Estimator, group_size: int, groups: int) -> Array:
    """As "token" of `expected_gradients`, for a batch of many groups, of an estimator that looks at one group alone."""
    tokens = np.array([int(e.lengths.sum()) for e in game])
    one = np.bincount(tokens, [e.probability for e in game])
    rest = np.ones(1)  # distribution of the tokens of the other groups
    for _ in range(group_size * (groups - 1)):
        rest = np.convolve(rest, one)
    expected = [np.zeros(len(e.rewards)) for e in game]
    for probability, chosen in batches(game, group_size):
        inverse = rest @ (1 / (tokens[list(chosen)].sum() + np.arange(len(rest))))
        for i, advantages in zip(chosen, estimator([[game[i] for i in chosen]]), strict=True):
            expected[i] += probability * inverse * advantages
    mean = one @ np.arange(len(one))
    return groups * mean * sum(c @ e.scores for c, e in zip(expected, game, strict=True))


TOKEN_MEAN_ESTIMATORS = ("GRPO turn, scale of the group's others", "GRPO turn, unscaled", "RLOO turn (default)")


def token_means(one: Sequence[Game], trees: Sequence[Game], sizes: Sequence[int] = (1, 4, 16, 64)) -> dict[str, Any]:
    """How the error of the mean over the batch's tokens goes down with the batch: groups of 4 episodes of one game."""
    found: dict[str, Any] = {}
    for entry in ESTIMATORS:
        if entry.name in TOKEN_MEAN_ESTIMATORS:
            for groups in sizes:
                signs = [true_gradient(g)[0] * token_mean_gradient(g, entry.estimator, 4, groups)[0] <= 0 for g in one]
                cosines = [cosine(true_gradient(g), token_mean_gradient(g, entry.estimator, 4, groups)) for g in trees]
                found.setdefault(entry.name, {})[groups * 4] = (float(np.mean(signs)), min(cosines))
    return found


def token_means_table(found: dict[str, Any]) -> str:
    head = ["Token mean: wrong sign, worst cosine", *(f"{n} episodes" for n in next(iter(found.values())))]
    rows = [[name, *(f"{sign:.1%}, {cos:.4f}" for sign, cos in cells.values())] for name, cells in found.items()]
    return markdown(head, rows)


PROMPT_ESTIMATORS = (
    "GRPO turn, scale of the others (default)",
    "GRPO turn, scale of the group's others",
    "GRPO turn, unscaled",
    "GRPO turn, scale of the group",
    "RLOO turn (default)",
    "REINFORCE++-baseline turn, by the others (default)",
)


def prompts(pairs: Sequence[tuple[Game, Game]], group_size: int = 3) -> dict[str, Any]:
    """Each of two groups plays one of two games, drawn at random, and the games share their one parameter."""
    found = {}
    for entry in ESTIMATORS:
        if entry.name in PROMPT_ESTIMATORS:
            wrong = []
            for pair in pairs:
                drawn = [expected_gradients([a, b], entry.estimator, group_size) for a, b in product(pair, pair)]
                estimate = np.mean([sum(parts["sum"])[0] for parts in drawn])
                wrong.append(estimate * sum(true_gradient(game)[0] for game in pair) <= 0)
            found[entry.name] = float(np.mean(wrong))
    return found


def prompts_table(found: dict[str, Any]) -> str:
    head = ["Two prompts that share a parameter, sum aggregation", "Wrong sign"]
    return markdown(head, [[name, f"{share:.1%}"] for name, share in found.items()])


def train_bandit(entry: Entry, seed: int, steps: int = 4000, rate: float = 0.25, groups: int = 8) -> float:
    """P(go on) after plain gradient ascent on the audited game from .2: sum aggregation, batches of groups of 8."""
    rng, logit = np.random.default_rng(seed), math.log(0.2 / 0.8)

    @cache
    def advantages(batch: tuple[tuple[int, ...], ...]) -> Array:
        found = entry.estimator([[AUDITED[i] for i in group] for group in batch])
        return np.array([a[0] for a in found]).reshape(len(batch), -1)

    goes_on = np.array([e.keys[0][1] for e in AUDITED])
    for _ in range(steps):
        p = 1 / (1 + math.exp(-logit))
        chances = np.where(goes_on, p, 1 - p) * [0.4, 0.6, 0.5, 0.5]
        batch = np.sort(rng.choice(len(AUDITED), p=chances, size=(groups, 8)), axis=1)
        chosen = tuple(map(tuple, batch.tolist()))
        if entry.by_group:
            found = np.concatenate([advantages((group,)) for group in chosen])
        else:
            found = advantages(tuple(sorted(chosen)))
            batch = batch[sorted(range(groups), key=chosen.__getitem__)]
        logit += rate * float((found * (goes_on[batch] - p)).mean())
    return 1 / (1 + math.exp(-logit))


def bandits(seeds: int = 3, steps: int = 4000) -> dict[str, list[float]]:
    kept = [e for e in ESTIMATORS if e.groups == 1 and not isinstance(e, Branched)]
    kept = [e for e in kept if not e.name.startswith("PPO")]  # with V = 0 it is REINFORCE++
    return {entry.name: [train_bandit(entry, seed, steps) for seed in range(seeds)] for entry in kept}


def bandit_table(found: dict[str, list[float]]) -> str:
    head = ["Trained on stop or go on, sum aggregation", "P(go on) at the end (start .20, best 1)"]
    return markdown(head, [[name, f"{min(ends):.2f} to {max(ends):.2f}"] for name, ends in found.items()])


# ------------------------------------------------------------------------------------------------------------ faults


def faulty_game() -> Game:
    """Play safe: 2 calls, then .7. Or take a chance: right at once (1), or wrong after 6 calls (0), as often."""
    game = []
    for first, chance, calls, paid in ((0, 1.0, 2, 0.7), (1, 0.5, 0, 1.0), (1, 0.5, 6, 0.0)):
        scores, rewards = np.zeros((calls + 1, 1)), np.zeros(calls + 1)
        scores[0], rewards[-1] = first - 0.5, paid
        keys = tuple((k if k == 0 else 10 * calls + k, first if k == 0 else 0) for k in range(calls + 1))
        game.append(Episode(0.5 * chance, rewards, np.ones(calls + 1, int), scores, keys))
    return game


FAULT_ESTIMATORS = (
    "GRPO turn, scale of the others (default)",
    "GRPO episode, scale of the group (published)",
    "RLOO turn (default)",
    "REINFORCE++ turn, by the others (default)",
)


def gradient_under_faults(game: Game, estimator: Estimator, episodes: int, rate: float, drop: bool = True) -> Array:
    """The expected gradient, sum aggregation, where each call fails for good with this rate, apart from all else.

    An episode with such a fault is dropped before anything is computed, the denominator included; or (drop=False) it
    is kept, paid 0 and trained on.
    """
    chance = [e.probability * (1 - rate) ** e.calls for e in game]
    valid = [replace(e, probability=p) for e, p in zip(game, chance, strict=True)]
    if drop:  # what is dropped looks all the same
        broken = [replace(game[0], probability=1 - sum(chance))]
    else:
        broken = [replace(e, probability=e.probability - p, rewards=0 * e.rewards)
                  for e, p in zip(game, chance, strict=True)]  # fmt: skip
    everything = valid + broken
    total = np.zeros(game[0].scores.shape[1])
    for probability, chosen in batches(everything, episodes):
        used = [everything[i] for i in chosen if not drop or i < len(valid)]
        for e, advantages in zip(used, estimator([used]) if used and probability else [], strict=False):
            total += probability * advantages @ e.scores / len(used)
    return total


def faults(rates: Sequence[float] = (0.0, 0.01, 0.03, 0.1, 0.3), episodes: int = 8) -> list[dict[str, float]]:
    game, rows = faulty_game(), []
    estimators = {e.name: e.estimator for e in ESTIMATORS}
    for rate in rates:
        chance = [e.probability * (1 - rate) ** e.calls for e in game]
        row = {"rate": rate, "valid_safe": chance[0] / 0.5, "valid_chance": sum(chance[1:]) / 0.5,
               "truth": float(true_gradient(game)[0])}  # fmt: skip
        for name in FAULT_ESTIMATORS:
            row[name] = float(gradient_under_faults(game, estimators[name], episodes, rate)[0])
        row["paid 0"] = float(gradient_under_faults(game, estimators["RLOO turn (default)"], episodes, rate, False)[0])
        rows.append(row)
    return rows


def faults_table(rows: list[dict[str, float]]) -> str:
    head = ["Faults per call", "P(valid), safe", "P(valid), chance", "Truth", *FAULT_ESTIMATORS]
    head.append("RLOO turn, kept and paid 0")
    cells = []
    for row in rows:
        shown = [f"{row['rate']:g}", f"{row['valid_safe']:.2f}", f"{row['valid_chance']:.2f}"]
        cells.append(shown + [f"{row[key]:+.3f}" for key in ("truth", *FAULT_ESTIMATORS, "paid 0")])
    return markdown(head, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", type=from_1, default=100, help="games of each kind: one parameter, trees")
    parser.add_argument("--steps", type=from_1, default=4000, help="of training on the game of stopping or going on")
    parser.add_argument("--seed", type=from_0, default=0, help="of the games")
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    one = [one_parameter_game(rng) for _ in range(args.games)]
    trees = [tree_game(rng) for _ in range(args.games)]
    small = [game for game in one if len(game) <= 4]
    results: dict[str, Any] = {
        "audited": {e.name: {k: float(v[0]) for k, v in expected_gradient(AUDITED, e, 8).items()} for e in ESTIMATORS},
        "survey": survey(one, trees),
        "token_means": token_means(one, trees),
        "prompts": prompts(list(zip(small[::2], small[1::2], strict=False))),
        "bandits": bandits(steps=args.steps),
        "faults": faults(),
    }  # fmt: skip
    head = [f"Stop or go on (truth {true_gradient(AUDITED)[0]:+.4f}), 8 episodes", "Sum", "Token mean", "Sequence mean"]
    audited = [[name, *(f"{v:+.4f}" for v in found.values())] for name, found in results["audited"].items()]
    tables = [*survey_tables(results["survey"]), token_means_table(results["token_means"]),
              prompts_table(results["prompts"]), markdown(head, audited), bandit_table(results["bandits"]),
              faults_table(results["faults"])]  # fmt: skip
    table = "\n\n".join(tables)
    print(table)
    command = f"python benchmarks/learning/estimators.py --games {args.games} --steps {args.steps} --seed {args.seed}"
    record_results("estimators", results, table, command)


if __name__ == "__main__":
    main()
