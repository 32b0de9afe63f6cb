"""The state of a run on disk, what ends a run early, and how it goes on.

    runs/{run_name}/checkpoint/policy/             save_pretrained() of the policy
                               critic.safetensors  where the algorithm has one
                               optimizer.pt        state of the optimizer, read with weights_only=True
                               state.json          algorithm, arguments, iteration, counters

A checkpoint is written beside the old one and then renamed: a crash leaves the old or the new one. There are no random
states in it: everything random in a run is a function of (seed, iteration, episode).
"""

from __future__ import annotations

import copy
import json
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoTokenizer

from agent_r1_tools.text import printable
from llm_utils import arguments, distributed
from llm_utils.records.run_files import append_rows, claim, sync, sync_one, write_json
from llm_utils.recovery import disk, signals
from llm_utils.setup.loading import without_bars

MOST_BYTES = 2**31  # weights and optimizer states up to this size are copied at every boundary
ArgsT = TypeVar("ArgsT")


class SaveError(OSError):
    """A checkpoint or a model could not be written. The message says why."""

    @classmethod
    def of(cls, what: str, error: Exception, folder: Path) -> SaveError:
        """What isn't written, the error, and where it would be: libraries have words of their own for a full disk."""
        full = "the disk is full, make room: " * (disk.free_bytes(folder) < 2**20)
        failed = cls(f"{what} could not be written: {full}{error}")
        failed.of_disk = bool(full) or isinstance(error, OSError)
        return failed

    of_disk = True
    """No bug in a program, whose traceback would be wanted."""


def copied(content: Any, memory: Any) -> Any:
    """A deep copy of nested dicts and lists with tensors in main memory, into the tensors of `memory` where they fit.

    What is there can be saved even when a GPU has no memory left or has failed.
    """
    if isinstance(content, torch.Tensor):
        fits = isinstance(memory, torch.Tensor) and (memory.shape, memory.dtype) == (content.shape, content.dtype)
        return memory.copy_(content) if fits else content.detach().to("cpu", copy=True)
    if isinstance(content, dict):
        memory = memory if isinstance(memory, dict) else {}
        return {name: copied(value, memory.get(name)) for name, value in content.items()}
    if isinstance(content, list):
        memory = memory if isinstance(memory, list) and len(memory) == len(content) else [None] * len(content)
        return [copied(value, kept) for value, kept in zip(content, memory, strict=True)]
    return copy.deepcopy(content)


def copied_bytes(trained: Iterable[torch.Tensor]) -> int:
    """What a checkpoint holds of trained weights: themselves, Adam's two moments, and a float32 copy of others."""
    return sum(p.numel() * (p.element_size() + (8 if p.dtype == torch.float32 else 12)) for p in trained)


class Checkpointer:
    """Writes the state that a run had at its last iteration boundary.

    `boundary(state)` is called when an iteration is complete. Small models are copied there, so that the boundary can
    be written at any moment after it; large ones can be written until `begin_update()` says that the weights are about
    to change. With several processes all call `boundary` together, and `save` where they are large; rank 0 writes.
    """

    def __init__(
        self, run_dir: Path, policy: Any, critic: nn.Module | None, optimizer: Any, rank: int = 0,
        most: int = MOST_BYTES,
    ) -> None:  # fmt: skip
        """`most`: bytes of weights and optimizer states that are copied at every boundary."""
        self.folder, self.rank = run_dir / "checkpoint", rank
        self.policy, self.critic, self.optimizer = policy, critic, optimizer
        trained = [p for module in (policy, critic) if module for p in module.parameters() if p.requires_grad]
        self.small = copied_bytes(trained) <= min(most, MOST_BYTES)
        self.last: tuple[dict[str, Any], dict[str, Any] | None] | None = None  # the last boundary; None: live weights
        self.spare: dict[str, Any] | None = None  # memory for the next one: Ctrl-C while it is filled spoils nothing
        self.signal: int | None = None  # the signal that ends the run
        self.failed = False  # the last save
        if rank == 0:  # the old one stands while the next is written
            disk.check_room(run_dir, copied_bytes(trained) * (1 if self.folder.is_dir() else 2))

    def boundary(self, state: dict[str, Any]) -> None:
        """An iteration is complete: remember it."""
        content = copied(self._content(), self.spare) if self.small else None
        self.spare, self.last = self.last and self.last[1], (copy.deepcopy(state), content)
        if self.signal is not None:  # Python drops what a signal raises where nothing can be raised, as in a finalizer
            raise KeyboardInterrupt

    def _content(self) -> dict[str, Any]:
        critic = distributed.collect_state(self.critic) if self.critic else {}
        policy = distributed.collect_state(self.policy)
        return {"policy": policy, "critic": critic, "optimizer": self.optimizer.state_dict()}

    def begin_update(self) -> None:
        """From here on the weights are no longer those of the boundary."""
        if not self.small:
            self.last = None

    def can_save_alone(self) -> bool:
        """Can this process write the last boundary without the others? Parts of large models lie with all of them."""
        return self.last is not None and (self.last[1] is not None or distributed.world_size() == 1)

    def save(self) -> bool:
        """Write the last boundary. False where that is no longer possible; what is on disk then stands.

        Raises SaveError where it can't be written, for one on a full disk; the old checkpoint stands.
        """
        if self.last is None:
            return False
        state, content = self.last[0], self.last[1] or self._content()
        if self.rank > 0:
            return True
        new, old = self.folder.with_suffix(".new"), self.folder.with_suffix(".old")
        try:
            recover(self.folder)
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
            save_policy(self.policy, new / "policy", content["policy"])
            if content["critic"]:
                save_file({k: v.contiguous() for k, v in content["critic"].items()}, new / "critic.safetensors")
            torch.save(content["optimizer"], new / "optimizer.pt")
            write_json(new / "state.json", state)
            sync(new)
            shutil.rmtree(old, ignore_errors=True)
            if self.folder.exists():
                self.folder.rename(old)
            new.rename(self.folder)
            sync_one(self.folder.parent)
        except Exception as error:  # of the disk, and in the words of the library that was writing
            failed, self.failed = SaveError.of("the checkpoint", error, self.folder.parent), True
            recover(self.folder)
            shutil.rmtree(new, ignore_errors=True)  # its space may be what is missing
            raise failed from error
        shutil.rmtree(old, ignore_errors=True)
        self.failed = False
        return True

    def on_disk(self) -> str:
        """What is on disk, in words, whatever it is."""
        if not (self.folder / "state.json").is_file():
            return "there is no checkpoint yet"
        try:
            return f"the checkpoint of iteration {read_state(self.folder)['run']['iteration']} stands"
        except (OSError, ValueError) as error:
            return f"the checkpoint on disk is damaged: {error}"


@contextmanager
def saving_at_exit(saver: Checkpointer, run: dict[str, Any]) -> Iterator[None]:
    """Whatever ends a run early leaves its last complete iteration on disk, and says how to go on.

    - Ctrl-C and SIGTERM end it with 130 and 143. A second one changes nothing while files are written. A signal that is
      ignored, as Ctrl-C in a shell's background jobs, stays so.
    - An exception goes on as it is, with a note. Of a loss that isn't finite (FloatingPointError with the rows as its
      second argument) the rows are written to not_finite.jsonl. Logits that aren't finite have no rows: the weights
      are at fault, and the update before them, so they don't replace the checkpoint.
    - Large models, which are not copied, are written until an update begins; then the checkpoint on disk stands. With
      several processes it always does: parts of the weights lie with processes that wait elsewhere, or are gone.

    With several processes signals are for rank 0, which must get out of a collective first; when it ends, all end.
    """
    run_dir = saver.folder.parent
    with signals.interrupting(lambda number: setattr(saver, "signal", number), ignored=saver.rank > 0):
        try:
            yield
        except BaseException as error:
            signals.ignore()
            reason = str(error) if isinstance(error, SaveError) and error.of_disk else disk.no_room(error)
            rows: Any = None
            if isinstance(error, FloatingPointError) and len(error.args) == 2:  # ours; libraries raise it, too
                reason, rows = error.args
            weights_at_fault = isinstance(error, FloatingPointError) and reason is not None and not rows
            savable = not weights_at_fault and not saver.failed
            how = "" if saver.rank > 0 else _how_to_go_on(saver, savable)
            if rows:
                append_rows(run_dir / "not_finite.jsonl", rows, iteration=run["iteration"] + 1)
                reason = f"{reason}. The rows that it comes from are in {run_dir / 'not_finite.jsonl'}"
            if isinstance(error, RuntimeError) and distributed.lost_connection(error):
                reason = f"process {saver.rank}: another process has ended"
            if reason is not None and saver.signal is None:
                sys.exit(f"stopped: {reason}" + (f"\n{how}" if how else ""))
            signals.end(error, how, saver.signal)
            raise


def _how_to_go_on(saver: Checkpointer, save: bool) -> str:
    """Write the last complete iteration where that is asked for and can be done; say what there is."""
    what = ""
    if save and saver.can_save_alone():
        try:
            saver.save()
            what = "go on after the last complete iteration"
        except SaveError as failure:
            what = f"{failure}; {saver.on_disk()}"
        except RuntimeError as failure:  # a large model, on a GPU that has failed
            what = f"the checkpoint could not be written: {failure}; {saver.on_disk()}"
    what = what or saver.on_disk()
    try:
        read_state(saver.folder)
    except (OSError, ValueError):
        return f"{what}; the run's files are in {saver.folder.parent}"
    what = what if what.startswith("go on") else f"{what}; go on"
    return f"{what} with\n  {resume_command(saver.folder.parent)}"


def resume_command(run_dir: Path) -> str:
    """What one types to go on with a run."""
    return shlex.join([*distributed.launcher(), sys.argv[0], "--resume", str(run_dir)])


def save_policy(policy: Any, folder: Path, state: dict[str, Any]) -> None:
    """Write the policy as `from_pretrained` reads it: its weights, or only its adapters where it has some."""
    with without_bars():
        policy.save_pretrained(folder, state_dict=state)
    if (folder / "config.json").is_file():  # FSDP renames the class of a model
        config = json.loads((folder / "config.json").read_text())
        config["architectures"] = [name.removeprefix("FSDP") for name in config.get("architectures") or []]
        write_json(folder / "config.json", config)


def recover(folder: Path) -> None:
    """Put the old checkpoint back where a machine stopped between two renames."""
    if not folder.is_dir() and folder.with_suffix(".old").is_dir():
        folder.with_suffix(".old").rename(folder)


def find(run_dir: str | Path) -> Path:
    """The checkpoint folder of a run that goes on; SystemExit with the reason where there is none.

    Rank 0 claims the run and puts an old checkpoint back, in this order: another process at work may stand between its
    two renames. The others wait for that.
    """
    folder = Path(run_dir) / "checkpoint"
    old = folder.with_suffix(".old")
    if distributed.launched_rank() == 0:
        if folder.is_dir() or old.is_dir():
            claim(Path(run_dir))
            recover(folder)
    else:
        while old.is_dir() and not folder.is_dir():
            time.sleep(0.05)
    if not (folder / "state.json").is_file():
        raise SystemExit(
            f"--resume {run_dir}: there is no checkpoint. Give a run's folder (runs/...); checkpoints are written with "
            "--checkpoint-every, and when something ends a run early"
        )
    return folder


def check_unchanged(run_dir: Path | str, saved: Mapping[str, Any], now: Mapping[str, Any], **what: str) -> None:
    """SystemExit where an entry of a run's summary is no longer what the run began with; older runs lack some.

    `what`: the entries by name, in words.
    """
    for name, words in what.items():
        if saved.get(name, now[name]) != now[name]:
            raise SystemExit(f"--resume {run_dir}: the {words} have changed since the run began")


def read_state(folder: Path) -> dict[str, Any]:
    """A checkpoint's state.json. Raises OSError, and ValueError where it is damaged."""
    path = folder / "state.json"
    try:
        state = json.loads(path.read_text())
        kinds = {"algorithm": str, "args": dict, "run": dict}
        whole = all(isinstance(state[name], kind) for name, kind in kinds.items())
        if whole and isinstance(state["run"]["iteration"], int):
            return state
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} can't be read: {error!r}") from None
    raise ValueError(f"{path} can't be read: it has no algorithm, args or run")


def load_args(args: ArgsT, algorithm: str) -> ArgsT:
    """The arguments of the run that `args.resume` names, which must be one of the same algorithm; or `args`.

    SystemExit for a damaged checkpoint, and for arguments that contradict the run's (`arguments.resumed`).
    """
    run_dir = getattr(args, "resume", None)
    if not run_dir:
        return args
    try:
        saved = read_state(find(run_dir))
    except OSError as error:
        raise SystemExit(f"--resume {run_dir}: it can't be read or written: {error}") from None
    except ValueError as error:
        raise SystemExit(f"--resume {run_dir}: the checkpoint is damaged: {error}") from None
    if saved["algorithm"] != algorithm:
        theirs = printable(saved["algorithm"])
        raise SystemExit(f"--resume {run_dir}: the checkpoint is of {theirs}.py, this is {algorithm}.py")
    return arguments.resumed(args, saved["args"], "the checkpoint")


def load(run_dir: str | Path, critic: nn.Module | None, optimizer: Any) -> dict[str, Any]:
    """Put critic and optimizer back and return the state. The caller loads the policy, from checkpoint/policy.

    SystemExit where the files are damaged, or of another model.
    """
    folder = find(run_dir)
    try:
        if critic is not None:
            saved, now = load_file(folder / "critic.safetensors"), critic.state_dict()
            critic.load_state_dict({name: distributed.like(x, now[name]) for name, x in saved.items()})
        optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True, map_location="cpu", mmap=True))
        return read_state(folder)
    except Exception as error:  # whatever torch and safetensors make of a damaged file
        why = f"the checkpoint is damaged, or doesn't fit this model: {error!r}"
        raise SystemExit(f"--resume {run_dir}: {why}") from error


def save_model(policy: Any, folder: Path, tokenizer: str | None) -> None:
    """Write the trained policy, adapters merged, and its tokenizer. All processes must call this together.

    Raises SaveError, as for a full disk.
    """
    state = {name: weight.cpu() for name, weight in distributed.weights(policy) if distributed.rank() == 0}
    if not state:
        return
    model, is_new = policy.get_base_model() if hasattr(policy, "get_base_model") else policy, not folder.exists()
    what = "the model"
    try:
        save_policy(model, folder, state)
        what = "the tokenizer of the model"
        if tokenizer is not None:
            AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False).save_pretrained(folder)
    except Exception as error:  # of the disk, and in the words of the library that was writing
        failed = SaveError.of(f"{folder}: {what}", error, folder)
        if is_new and what == "the model":  # half of one looks like a whole one
            shutil.rmtree(folder, ignore_errors=True)
        raise failed from error
    print(f"the trained policy is in {folder}")
