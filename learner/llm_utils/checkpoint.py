"""Files of a run: checkpoints, rows, summaries. Everything is written so that a crash leaves the old or the new file.

    runs/{run_name}/checkpoint/policy/             save_pretrained() of the policy
                               critic.safetensors  where the algorithm has one
                               optimizer.pt        state of the optimizer, read with weights_only=True
                               state.json          algorithm, arguments, iteration, counters

There are no random states in it: everything random in a run is a function of (seed, iteration, episode).
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import nn

MOST_BYTES = 2**31  # weights and optimizer states up to this size are copied at every boundary, for Ctrl-C

ArgsT = TypeVar("ArgsT")


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file in one go."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(temporary, path)


def append_rows(path: Path, rows: Sequence[Any], **extra: Any) -> None:
    """Append trajectories to a JSONL file: lists with an entry per token, and what is known of the episode."""
    with path.open("a") as file:
        for row in rows:
            content: dict[str, Any] = dict(extra)
            for name in ("episode", "task_index", "prompt_length", "terminated", "truncated", "stats", "reward_terms"):
                content[name] = getattr(row, name)
            content |= {name: [int(x) for x in getattr(row, name)] for name in ("tokens", "action_mask")}
            for name in ("rewards", "values", "logprobs", "advantages"):
                content[name] = [round(x, 6) for x in getattr(row, name, []).astype(float).tolist()]
            file.write(json.dumps(content) + "\n")


def drop_later_rows(path: Path, iteration: int) -> None:
    """Remove rows of iterations after `iteration` from a JSONL file: a resumed run plays them again."""
    if path.is_file():
        rows = [line for line in path.read_text().splitlines(True) if json.loads(line)["iteration"] <= iteration]
        path.write_text("".join(rows))


class Checkpointer:
    """Writes the state that a run had at its last iteration boundary.

    `boundary(state)` is called when an iteration is complete. Small models are copied there, so that the boundary can
    be written at any moment after it; large ones can be written until `dirty()` says that an update has begun.
    """

    def __init__(self, run_dir: Path, policy: Any, critic: nn.Module | None, optimizer: Any) -> None:
        self.folder = run_dir / "checkpoint"
        self.policy, self.critic, self.optimizer = policy, critic, optimizer
        sizes = [p.numel() * p.element_size() for module in (policy, critic) if module for p in module.parameters()]
        self.small = 3 * sum(sizes) <= MOST_BYTES
        self.last: tuple[dict[str, Any], dict[str, Any]] | None = None  # state and weights of the last boundary

    def boundary(self, state: dict[str, Any]) -> None:
        """An iteration is complete: remember it."""
        critic = self.critic.state_dict() if self.critic else {}
        live = {"policy": self.policy.state_dict(), "critic": critic, "optimizer": self.optimizer.state_dict()}
        self.last = copy.deepcopy(state), copy.deepcopy(live) if self.small else live  # all or, at Ctrl-C, nothing

    def dirty(self) -> None:
        """From here on the weights are no longer those of the boundary."""
        if not self.small:
            self.last = None

    def save(self) -> bool:
        """Write the last boundary. False where that is no longer possible; what is on disk then stands."""
        if self.last is None:
            return False
        state, content = self.last
        new, old = self.folder.with_suffix(".new"), self.folder.with_suffix(".old")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        self.policy.save_pretrained(new / "policy", state_dict=content["policy"])
        if content["critic"]:
            save_file({k: v.contiguous() for k, v in content["critic"].items()}, new / "critic.safetensors")
        torch.save(content["optimizer"], new / "optimizer.pt")
        write_json(new / "state.json", state)
        shutil.rmtree(old, ignore_errors=True)
        if self.folder.exists():
            self.folder.rename(old)
        new.rename(self.folder)
        shutil.rmtree(old, ignore_errors=True)
        return True


def find(run_dir: str | Path) -> Path:
    """The checkpoint folder of a run; SystemExit with the reason where there is none."""
    folder = Path(run_dir) / "checkpoint"
    if not folder.is_dir() and folder.with_suffix(".old").is_dir():  # the machine stopped between two renames
        folder.with_suffix(".old").rename(folder)
    if not (folder / "state.json").is_file():
        raise SystemExit(
            f"--resume {run_dir}: there is no checkpoint. Give a run's folder (runs/...); checkpoints are written with "
            "--checkpoint-every and at Ctrl-C"
        )
    return folder


def load_args(run_dir: str | Path, args: ArgsT, algorithm: str) -> ArgsT:
    """The arguments of the run that is resumed, which must be one of the same algorithm."""
    saved = json.loads((find(run_dir) / "state.json").read_text())
    if saved["algorithm"] != algorithm:
        raise SystemExit(f"--resume {run_dir}: the checkpoint is of {saved['algorithm']}.py, this is {algorithm}.py")
    return type(args)(**{**saved["args"], "resume": str(run_dir)})


def load(run_dir: str | Path, critic: nn.Module | None, optimizer: Any) -> dict[str, Any]:
    """Put critic and optimizer back and return the state. The caller loads the policy, from checkpoint/policy."""
    folder = find(run_dir)
    try:
        if critic is not None:
            critic.load_state_dict(load_file(folder / "critic.safetensors"))
        optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True, map_location="cpu"))
    except (RuntimeError, ValueError, FileNotFoundError) as error:
        raise SystemExit(f"--resume {run_dir}: the checkpoint doesn't fit this model: {error}") from error
    return json.loads((folder / "state.json").read_text())
