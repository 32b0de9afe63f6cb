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
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoTokenizer

from llm_utils import distributed
from llm_utils.engine import EngineDied

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
            content["turns"] = [[start, end] for start, end, _ in row.turns]
            content |= {"tokens": row.tokens.tolist(), "action_mask": row.action_mask.astype(int).tolist()}
            content["versions"] = row.versions.tolist()
            for name in ("rewards", "values", "logprobs", "advantages"):
                content[name] = getattr(row, name).astype(float).round(6).tolist()
            file.write(json.dumps(content) + "\n")


def drop_later_rows(path: Path, iteration: int) -> None:
    """Remove rows of iterations after `iteration` from a JSONL file: a resumed run plays them again.

    A run that was killed may have left its last row cut short; it is one of them.
    """
    if path.is_file():
        lines = [line for line in path.read_text().splitlines(True) if line.endswith("\n")]
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(line for line in lines if json.loads(line)["iteration"] <= iteration))
        os.replace(temporary, path)


def copied(content: Any, memory: Any) -> Any:
    """A deep copy of nested dicts and lists with tensors, into the tensors of `memory` where they fit."""
    if isinstance(content, torch.Tensor):
        fits = isinstance(memory, torch.Tensor) and (memory.shape, memory.dtype) == (content.shape, content.dtype)
        return memory.copy_(content) if fits else content.detach().clone()
    if isinstance(content, dict):
        memory = memory if isinstance(memory, dict) else {}
        return {name: copied(value, memory.get(name)) for name, value in content.items()}
    if isinstance(content, list):
        memory = memory if isinstance(memory, list) and len(memory) == len(content) else [None] * len(content)
        return [copied(value, kept) for value, kept in zip(content, memory, strict=True)]
    return copy.deepcopy(content)


class Checkpointer:
    """Writes the state that a run had at its last iteration boundary.

    `boundary(state)` is called when an iteration is complete. Small models are copied there, so that the boundary can
    be written at any moment after it; large ones can be written until `dirty()` says that an update has begun. With
    several processes all call `boundary` together, and `save` where they are large; rank 0 writes.
    """

    def __init__(self, run_dir: Path, policy: Any, critic: nn.Module | None, optimizer: Any, rank: int = 0) -> None:
        self.folder, self.rank = run_dir / "checkpoint", rank
        self.policy, self.critic, self.optimizer = policy, critic, optimizer
        trained = [p for module in (policy, critic) if module for p in module.parameters() if p.requires_grad]
        self.small = 3 * sum(p.numel() * p.element_size() for p in trained) <= MOST_BYTES
        self.last: tuple[dict[str, Any], dict[str, Any] | None] | None = None  # the last boundary; None: live weights
        self.spare: dict[str, Any] | None = None  # memory for the next one: Ctrl-C while it is filled spoils nothing

    def boundary(self, state: dict[str, Any]) -> None:
        """An iteration is complete: remember it."""
        content = copied(self._content(), self.spare) if self.small else None
        self.spare, self.last = self.last and self.last[1], (copy.deepcopy(state), content)

    def _content(self) -> dict[str, Any]:
        critic = distributed.collect_state(self.critic) if self.critic else {}
        policy = distributed.collect_state(self.policy)
        return {"policy": policy, "critic": critic, "optimizer": self.optimizer.state_dict()}

    def dirty(self) -> None:
        """From here on the weights are no longer those of the boundary."""
        if not self.small:
            self.last = None

    def save(self) -> bool:
        """Write the last boundary. False where that is no longer possible; what is on disk then stands."""
        if self.last is None:
            return False
        state, content = self.last[0], self.last[1] or self._content()
        if self.rank > 0:
            return True
        new, old = self.folder.with_suffix(".new"), self.folder.with_suffix(".old")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        save_policy(self.policy, new / "policy", content["policy"])
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


@contextmanager
def leaving_nothing_lost(saver: Checkpointer, run: dict[str, Any]) -> Iterator[None]:
    """What ends a run early leaves its last complete iteration behind, and says how to go on.

    Ctrl-C and an engine that died write the checkpoint. A loss that isn't finite (FloatingPointError, with the rows as
    its second argument) leaves its rows in not_finite.jsonl; the checkpoint on disk stands. Logits that aren't finite
    have no rows yet: the weights are at fault, and the update before them.
    """
    run_dir = saver.folder.parent
    try:
        yield
    except (KeyboardInterrupt, EngineDied) as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not spoil the files
        saved = saver.small and saver.save() or (saver.folder / "state.json").is_file()
        command = f"{distributed.launcher()} {sys.argv[0]} --resume {run_dir}"
        how = f"go on after the last complete iteration with\n  {command}"
        print(f"\n{str(error) or 'interrupted'}; {how if saved else 'there is no checkpoint yet'}", file=sys.stderr)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)
    except FloatingPointError as error:
        reason, rows = error.args
        if rows:
            append_rows(run_dir / "not_finite.jsonl", rows, iteration=run["iteration"] + 1)
            reason += f". The rows that it comes from are in {run_dir / 'not_finite.jsonl'}"
        sys.exit(f"stopped: {reason}")
    except RuntimeError as error:
        if not distributed.lost_connection(error):
            raise
        sys.exit(f"process {saver.rank} stopped: another process has ended")


def save_policy(policy: Any, folder: Path, state: dict[str, Any]) -> None:
    """Write the policy as `from_pretrained` reads it: its weights, or only its adapters where it has some."""
    policy.save_pretrained(folder, state_dict=state)
    if (folder / "config.json").is_file():  # FSDP renames the class of a model
        config = json.loads((folder / "config.json").read_text())
        config["architectures"] = [name.removeprefix("FSDP") for name in config.get("architectures") or []]
        write_json(folder / "config.json", config)


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


def load_args(args: ArgsT, algorithm: str) -> ArgsT:
    """The arguments of the run that `args.resume` names, which must be one of the same algorithm; or `args`."""
    run_dir = getattr(args, "resume", None)
    if not run_dir:
        return args
    saved = json.loads((find(run_dir) / "state.json").read_text())
    if saved["algorithm"] != algorithm:
        raise SystemExit(f"--resume {run_dir}: the checkpoint is of {saved['algorithm']}.py, this is {algorithm}.py")
    known = {name: value for name, value in saved["args"].items() if hasattr(args, name)}
    for name, default in vars(type(args)()).items():
        given = getattr(args, name)
        if name != "resume" and given not in (default, known.get(name, default)):
            raise SystemExit(
                f"--resume goes on with the run's own arguments: --{name.replace('_', '-')} {given} contradicts its "
                f"{known.get(name, default)}. Leave it out, or begin a new run"
            )
    return type(args)(**{**known, "resume": str(run_dir)})


def load(run_dir: str | Path, critic: nn.Module | None, optimizer: Any) -> dict[str, Any]:
    """Put critic and optimizer back and return the state. The caller loads the policy, from checkpoint/policy."""
    folder = find(run_dir)
    try:
        if critic is not None:
            saved, now = load_file(folder / "critic.safetensors"), critic.state_dict()
            critic.load_state_dict({name: distributed.like(x, now[name]) for name, x in saved.items()})
        optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True, map_location="cpu", mmap=True))
    except (KeyError, RuntimeError, ValueError, FileNotFoundError) as error:
        raise SystemExit(f"--resume {run_dir}: the checkpoint doesn't fit this model: {error}") from error
    return json.loads((folder / "state.json").read_text())


def save_model(policy: Any, folder: Path, tokenizer: str | None) -> None:
    """Write the trained policy, adapters merged, and its tokenizer. All processes must call this together."""
    state = {name: weight.cpu() for name, weight in distributed.weights(policy) if distributed.rank() == 0}
    if not state:
        return
    model = policy.get_base_model() if hasattr(policy, "get_base_model") else policy
    save_policy(model, folder, state)
    if tokenizer is not None:
        AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    print(f"the trained policy is in {folder}")
