"""Value-guided decoding: the shipped policy of MultihopWorld, whose turns or episodes a critic picks."""

from __future__ import annotations

import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from evidence_parts.runs import ROOT, Made, Run, made, make
from safetensors.torch import save_file
from scores import cell

from agent_r1 import tiny_policy
from llm_utils.records.intervals import difference, mean, proportion
from llm_utils.value_model import FOLDER, WEIGHTS, Critic

ENV_ID = "AgentR1/MultihopWorld-v0"
CANDIDATES = 4
EPISODES = 2560  # of a critic's training
FLAGS = ("episodes", "critics", "flags")


@dataclass(frozen=True)
class RandomCritic(Made):
    """A critic that was never trained: the policy's backbone with a random head. It has the form of that of a run."""

    seed: int = 0

    @property
    def key(self) -> str:
        """As a run's, with the seed."""
        return f"random {self.seed} {super().key}"

    def write(self) -> Path:
        """The folder, as a run leaves it."""
        folder = ROOT / "runs" / "systems_random_critics" / str(self.seed)
        shutil.copytree(self.runs[0].folder() / FOLDER, folder / FOLDER, dirs_exist_ok=True)
        torch.manual_seed(self.seed)
        critic = Critic(tiny_policy(ENV_ID), SimpleNamespace(gradient_checkpointing="off"), torch.float32)
        torch.nn.init.normal_(critic.head.weight)
        content = {name: weight.contiguous() for name, weight in critic.state_dict().items()}
        if not (folder / "done").is_file():  # a rewritten file has another time, and would be another critic
            save_file(content, folder / FOLDER / WEIGHTS)
            (folder / "done").touch()
        return folder


def play(label: str, seed: int, episodes: int, *flags: object) -> Run:
    """An evaluation on the test tasks."""
    return Run(label, "evaluate_llm.py", seed, ("--env-id", ENV_ID, "--episodes", episodes, *flags))


def rows_of(args: Any) -> dict[str, list[Run]]:
    """The runs of each row of the table."""
    more = ["--total-episodes", EPISODES, "--critic-only", "--eval-episodes", 0, "--checkpoint-every", 0]
    flags = ("--env-id", ENV_ID, "--model", "tiny", *more, *shlex.split(args.flags))
    seeds = range(1, args.seeds + 1)
    critics = {seed: Run("critic of the shipped policy", "ppo_llm.py", seed, flags) for seed in seeds}
    sampled: list[object] = ["--temperature", 1]
    best = [*sampled, "--candidates", CANDIDATES, "--decode", "best-of-n"]
    turns = [*sampled, "--candidates", CANDIDATES, "--decode", "value-turn", "--critic"]
    rows: dict[str, list[Run]] = {
        "plain sampling": [play("plain", seed, args.episodes, *sampled) for seed in seeds],
        "greedy": [play("greedy", 1, args.episodes)],
        "best of 4 episodes, perfect scorer": [play("perfect", seed, args.episodes, *best) for seed in seeds],
        "best of 4 episodes, by the critic": [
            play("episodes", seed, args.episodes, *best, "--critic", critics[seed]) for seed in seeds
        ],
        "best of 4 in each turn, by the critic": [
            play("turns", seed, args.episodes, *turns, critics[seed]) for seed in seeds
        ],
    }
    numbers = range(1, args.critics + 1)
    random = [RandomCritic((critics[1],), number) for number in numbers]
    rows["best of 4 in each turn, by a random critic"] = [
        play("random", number, args.episodes, *turns, critic) for number, critic in zip(numbers, random, strict=True)
    ]
    return rows


def measure(args: Any) -> dict[str, Any]:
    """Success of each row, its difference to plain sampling, and the sampled tokens of a task."""
    found, of_row = {}, rows_of(args)
    lines = ["| MultihopWorld, shipped policy, 4 candidates | success | minus plain sampling | tokens of a task |"]
    lines.append("|---|---|---|---|")
    plain = None
    for row, runs in of_row.items():
        kept = make(runs, args)
        success = np.array([[float(digit) for digit in line["success"]] for line in kept])
        tokens = float(np.mean([line["tokens"] / line["tasks"] for line in kept]))
        shares = success.mean(1).tolist()
        if "random" in row:  # an interval over critics
            value, gain = mean(shares), None
            shown = f"{cell(*value)}, {min(shares):.3f} to {max(shares):.3f}"
        else:
            value, gain = proportion(success), None if plain is None else difference(success, plain)
            shown = cell(*value)
        plain = success if plain is None else plain
        versus = "" if gain is None else cell(*gain, sign="+")
        lines.append(f"| {row} | {shown} | {versus} | {tokens:.0f} |")
        found[row] = {"success": value, "minus_plain": gain, "tokens": tokens, "each": shares}
    note = f"Seeds of critics and of sampling: {args.seeds}. Tasks: {args.episodes}. Random critics: {args.critics}, "
    lines += ["", f"{note}with an interval over them, and their range. Tokens are the sampled ones of all candidates."]
    return {"rows": found, "table": "\n".join(lines)} | made(args)
