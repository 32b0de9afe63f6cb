"""Trajectory reward models, which reward_model_llm.py trains on recorded episodes: a `Critic` that scores an episode.

A score is a probability: of success (kinds "outcome" and "values"), or of winning against an average training episode
(kind "pairs"). "outcome" and "pairs" read it after the last token. "values" also reads it after the prompt and after
every turn, tool results included.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agent_r1.text.tokenizers import fingerprint, load_tokenizer
from agent_r1_tools.text import printable
from llm_utils.imitation.demonstrations import bounded_rows, check_row, check_tokenizer, decodes
from llm_utils.recovery.checkpoint import SaveError
from llm_utils.training.forward import pad
from llm_utils.trajectory import Trajectory
from llm_utils.value_model import FACTS, Critic, read_critic, write_critic

Array = np.ndarray
FOLDER = "reward_model"
SCORING_TOKENS = 2**15  # with padding, in one forward pass without gradients


# ---------------------------------------------------------------------------------------------------------- episodes


@dataclass(frozen=True)
class Episode:
    """A recorded episode."""

    tokens: Array  # int32 [T]
    segment_starts: list[int]
    spans: list[tuple[int, int]]  # first token and one past the last of each turn with sampled tokens
    is_success: bool
    task: tuple[Any, ...]  # equal for episodes of one task


def read_episodes(path: str, vocab_size: int, tokenizer: Any) -> list[Episode]:
    """Read a trajectories.jsonl. Episodes without sampled tokens and those that ended in infrastructure errors are left
    out.

    Raise SystemExit with the number of a malformed line, and for rows whose tokens are not those of `tokenizer`.
    """
    rows: list[Episode] = []
    readable: dict[str, list[bool]] = {}  # of each tokenizer named in the rows
    with open(path, "rb") as file:
        for number, line in enumerate(bounded_rows(file, path), 1):
            try:
                row = json.loads(line)
                check_row(row, vocab_size)
                if row.get("fault") or 1 not in row["action_mask"]:
                    continue
                rows.append(_episode(row))
            except (ValueError, RecursionError) as error:
                raise SystemExit(f"{path}, line {number}: {error or 'it is nested too deeply'}") from None
            if (shown := decodes(row, tokenizer)) is not None:
                readable.setdefault(str(row.get("tokenizer")), []).append(shown)
    check_tokenizer(path, readable)
    return rows


def _episode(row: dict[str, Any]) -> Episode:
    """Return a line as an episode. Raise ValueError if it lacks what a reward model needs."""
    if not isinstance(row.get("is_success"), bool):
        raise ValueError("`is_success` must be true or false: a reward model learns to predict it")
    if type(row.get("task_index")) is not int:
        raise ValueError("`task_index` must be a number: it tells which episodes have the same task")
    turns = row.get("turns")
    if not isinstance(turns, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in turns):
        turns = [[None]]
    if not all(type(place) is int for turn in turns for place in turn):
        raise ValueError("`turns` must be a list of [first token, one past the last]")
    borders = [0, *(place for turn in turns for place in turn), len(row["tokens"])]
    if sorted(borders) != borders:
        raise ValueError("the places in `turns` must grow, up to the number of tokens")
    spans = [(start, end) for start, end in turns if end > start]
    if not spans or spans[0][0] == 0:
        raise ValueError("the first of the `turns` must follow a prompt")
    task = (row.get("env_id"), row.get("split"), row["task_index"])
    return Episode(np.array(row["tokens"], np.int32), row.get("segment_starts", [0]), spans, row["is_success"], task)


# ------------------------------------------------------------------------------------------------------------ scores


@dataclass(frozen=True)
class View:
    """A row of tokens that the model reads, and the positions after which it gives a score."""

    tokens: Array  # int32 [T]
    ends: Array  # int64 [scores]


def views(row: Episode | Trajectory, kind: str) -> list[View]:
    """Return what a model of this kind reads of an episode: the last segment, or with "values" all segments.

    With "values" there is a score after the prompt and one after each turn, together [turns + 1]; otherwise one.
    """
    borders = list(pairwise([*row.segment_starts, len(row.tokens)]))
    if kind != "values":
        start, end = borders[-1]
        return [View(row.tokens[start:end], np.array([end - start - 1]))]
    starts = [start for start, _ in row.spans] if isinstance(row, Episode) else [turn.start for turn in row.turns]
    found: list[View] = []
    for start, end in borders:
        if inside := [at for at in starts if start <= at < end]:
            ends = np.array([*inside, end]) - start - 1  # a turn ends where the next one starts
            found.append(View(row.tokens[start:end], ends[1:] if found else ends))
    return found


def packs(units: Sequence[Sequence[View]], budget: int) -> Iterator[list[int]]:
    """Yield the numbers of units of similar length: at most `budget` tokens with padding, but at least one unit."""
    longest = [max(len(view.tokens) for view in unit) for unit in units]
    pack: list[int] = []
    count = 0
    for i in sorted(range(len(units)), key=lambda i: -longest[i]):
        if pack and longest[pack[0]] * (count + len(units[i])) > budget:
            yield pack
            pack, count = [], 0
        pack.append(i)
        count += len(units[i])
    if pack:
        yield pack


def forward(critic: Critic, rows: Sequence[View]) -> list[torch.Tensor]:
    """Return the logits of each row, float32 [scores], in one pass."""
    device = next(critic.parameters()).device
    values = critic(pad([row.tokens for row in rows], device))
    return [values[i, torch.from_numpy(row.ends).to(device)] for i, row in enumerate(rows)]


@torch.no_grad()
def logits(critic: Critic, units: Sequence[Sequence[View]], budget: int = SCORING_TOKENS) -> list[Array]:
    """Return the logits of each unit, float64 [scores], its views one after the other."""
    found: dict[int, Array] = {}
    for pack in packs(units, budget):
        scored = iter(forward(critic, [view for i in pack for view in units[i]]))
        for i in pack:
            found[i] = np.concatenate([next(scored).double().cpu().numpy() for _ in units[i]])
    return [found[i] for i in range(len(units))]


def last_logits(critic: Critic, rows: Sequence[Episode | Trajectory], kind: str) -> Array:
    """Return the logit of each episode after its last token, float64 [episodes]."""
    return np.array([scores[-1] for scores in logits(critic, [views(row, kind) for row in rows])])


@dataclass(frozen=True)
class RewardModelFacts:
    """Facts about a saved reward model: how it is read, and the tokens that it fits."""

    kind: str
    center: float  # the logit of an average training episode with "pairs", else 0
    env_id: str
    tokenizer: str  # the fingerprint of its tokenizer
    vocab_size: int  # tokens of that tokenizer
    dtype: str


@dataclass(frozen=True)
class RewardModel:
    """A trained model that scores episodes."""

    critic: Critic
    facts: RewardModelFacts

    def scores(self, rows: Sequence[Episode | Trajectory]) -> list[Array]:
        """Return the scores of each episode, float64, from 0 to 1: [turns + 1] with kind "values", else [1]."""
        found = logits(self.critic, [views(row, self.facts.kind) for row in rows])
        return [1 / (1 + np.exp(self.facts.center - values)) for values in found]


def score_rows(rows: Sequence[Trajectory], model: RewardModel, coef: float) -> None:
    """Replace the share `coef` of each episode's outcome by the model's score, after the rollout.

    "outcome" and "pairs" pay the score with the last turn. "values" pays each turn the difference of the scores after
    and before it. Process rewards stay. The statistic `model_score` is the score after the last token.
    """
    rows = [row for row in rows if row.turns]
    for row, scores in zip(rows, model.scores(rows), strict=True):
        row.stats["model_score"] = float(scores[-1])
        paid = np.zeros(len(row.turns))
        if model.facts.kind == "values":
            paid += np.diff(scores)
        else:
            paid[-1] = scores[-1]
        row.add_rewards(coef * (paid - outcome(row)))


def outcome(row: Trajectory) -> Array:
    """Return the outcome reward of each turn, float64 [turns]: the terms `outcome/...`, which are paid at the end. An
    environment without named terms pays nothing but outcomes."""
    if not row.reward_terms:
        return row.turn_rewards()
    paid = np.zeros(len(row.turns))
    paid[-1] = sum(value for name, value in row.reward_terms.items() if name.startswith("outcome/"))
    return paid


# ------------------------------------------------------------------------------------------------------------- files


def save_reward_model(model: RewardModel, folder: Path) -> None:
    """Write the model to `folder`/reward_model. Raise SaveError."""
    try:
        write_critic(model.critic, model.critic.state_dict(), folder / FOLDER, asdict(model.facts))
    except Exception as error:  # from the disk, in the writing library's words
        raise SaveError.of("the reward model", error, folder) from error


def load_reward_model(args: Any, tokenizer: str | None, vocab_size: int, device: torch.device) -> RewardModel:
    """Return the model that `--reward-model` names.

    Raise SystemExit if there is none, if it cannot be read, or if it reads other tokens. Print a warning if it was
    trained on another environment.
    """
    run = args.reward_model
    folder = Path(run) / FOLDER
    if not (folder / FACTS).is_file():
        cause = "there is no reward model; give the folder of a finished run of reward_model_llm.py (runs/...)"
        raise SystemExit(printable(f"--reward-model {run}: {cause}"))
    try:
        critic, facts = read_critic(folder, RewardModelFacts)
    except Exception as error:  # a damaged file, in the reading library's words
        raise SystemExit(f"--reward-model {run} cannot be read: {type(error).__name__}: {error}") from error
    if (facts.vocab_size, facts.tokenizer) != (vocab_size, fingerprint(load_tokenizer(tokenizer, args.chat_template))):
        raise SystemExit(
            f"--reward-model {run} reads the tokens of another tokenizer or chat template: train one on this model's "
            "episodes"
        )
    if facts.env_id != args.env_id:
        print(printable(f"--reward-model {run} was trained on {facts.env_id}"), file=sys.stderr)
    return RewardModel(critic.to(device).eval(), facts)
