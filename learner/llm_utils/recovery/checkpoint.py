"""The state of a run on disk, the handling of its early end, and its continuation.

    runs/{run_name}/checkpoint/policy/             save_pretrained() of the policy
                               critic.safetensors  if the algorithm has a critic
                               optimizer.pt        state of the optimizer, read with weights_only=True
                               replay.pt           stored successes (--replay-successes), read in the same way
                               state.json          algorithm, arguments, iteration, counters

A checkpoint is written beside the old one and then renamed, so a crash leaves either the old or the new one. It holds
no random states: everything random in a run is a function of (seed, iteration, episode).
"""

from __future__ import annotations

import copy
import json
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

from agent_r1.text.tokenizers import load_tokenizer
from agent_r1_tools.text import printable
from llm_utils import arguments, distributed
from llm_utils.records import commands, run_files
from llm_utils.records.run_files import append_rows, claim, sync, sync_one, write_json
from llm_utils.recovery import disk, signals
from llm_utils.setup.loading import without_bars

MOST_BYTES = 2**31  # weights and optimizer states up to this size are copied at every boundary
ArgsT = TypeVar("ArgsT")


class SaveError(OSError):
    """A checkpoint or a model that could not be written. The message names the cause."""

    @classmethod
    def of(cls, content: str, error: Exception, folder: Path) -> SaveError:
        """Return the error for `content` that could not be written to `folder`. Libraries describe a full disk in
        different ways, so it is checked here."""
        full = "the disk is full, make room: " * (disk.free_bytes(folder) < 2**20)
        save_error = cls(f"{content} could not be written: {full}{error}")
        save_error.of_disk = bool(full) or isinstance(error, OSError)
        return save_error

    of_disk = True
    """True for a problem of the disk; False for a bug, whose traceback is wanted."""


def copied(content: Any, memory: Any) -> Any:
    """Return a deep copy of nested dicts and lists with tensors in main memory. It reuses the tensors of `memory` that
    fit.

    The copy can be saved even if a GPU has no memory left or has failed.
    """
    if isinstance(content, torch.Tensor):
        fits = isinstance(memory, torch.Tensor) and (memory.shape, memory.dtype) == (content.shape, content.dtype)
        return memory.copy_(content) if fits else content.detach().to("cpu", copy=True)
    if isinstance(content, dict):
        memory = memory if isinstance(memory, dict) else {}
        return {name: copied(value, memory.get(name)) for name, value in content.items()}
    if isinstance(content, list):
        memory = memory if isinstance(memory, list) and len(memory) == len(content) else [None] * len(content)
        return [copied(value, reused) for value, reused in zip(content, memory, strict=True)]
    return copy.deepcopy(content)


def copied_bytes(trained: Iterable[torch.Tensor]) -> int:
    """Return the bytes of trained weights in a checkpoint: the weights, Adam's two moments, and float32 copies of
    weights in other dtypes."""
    return sum(p.numel() * (p.element_size() + (8 if p.dtype == torch.float32 else 12)) for p in trained)


class Checkpointer:
    """A writer of the state at the last iteration boundary.

    `boundary(state)` is called when an iteration is complete. Small models are copied there, so the boundary can be
    written at any later moment. Large models can be written until `begin_update()` announces that the weights will
    change. With several processes all call `boundary` together, and `save` if the models are large; rank 0 writes.
    """

    def __init__(
        self, run_dir: Path, policy: Any, critic: nn.Module | None, optimizer: Any, rank: int = 0,
        max_bytes: int = MOST_BYTES, with_model: bool = False,
    ) -> None:  # fmt: skip
        """Prepare the folder. Weights and optimizer states of up to `max_bytes` are copied at every boundary.

        with_model: the disk also needs room for the model that is saved at the end, with adapters merged.
        """
        self.folder, self.rank = run_dir / "checkpoint", rank
        self.policy, self.critic, self.optimizer = policy, critic, optimizer
        trained = [p for module in (policy, critic) if module for p in module.parameters() if p.requires_grad]
        self.small = copied_bytes(trained) <= min(max_bytes, MOST_BYTES)
        self.last: tuple[dict[str, Any], dict[str, Any] | None] | None = None  # the last boundary; None: live weights
        self.stored: list[dict[str, Any]] | None = None  # the successes of the last boundary
        self.spare: dict[str, Any] | None = None  # memory for the next one, so that Ctrl-C during copying is harmless
        self.signal: int | None = None  # the signal that ends the run
        self.failed = False  # True if the last save failed
        if rank == 0:  # the old one is kept while the next is written
            model = 0
            if with_model and not (run_dir / "model").is_dir():
                weights = [p for name, p in policy.named_parameters() if "lora_" not in name]
                model = sum(p.numel() * p.element_size() for p in weights)
            disk.check_room(run_dir, copied_bytes(trained) * (1 if self.folder.is_dir() else 2), model)

    def boundary(self, state: dict[str, Any], stored: list[dict[str, Any]] | None = None) -> None:
        """Remember the state of a complete iteration. `stored` are the successes to replay, not copied."""
        content = copied(self._content(), self.spare) if self.small else None
        self.spare, self.last = self.last and self.last[1], (copy.deepcopy(state), content)
        self.stored = stored
        if self.signal is not None:  # Python drops a signal's exception in some places, such as finalizers
            raise KeyboardInterrupt

    def _content(self) -> dict[str, Any]:
        critic = distributed.collect_state(self.critic) if self.critic else {}
        policy = distributed.collect_state(self.policy)
        return {"policy": policy, "critic": critic, "optimizer": self.optimizer.state_dict()}

    def begin_update(self) -> None:
        """Announce that the weights will change. From now on they are no longer those of the boundary."""
        if not self.small:
            self.last = None

    def can_save_alone(self) -> bool:
        """Return True if this process can write the last boundary alone. The parts of a large model are spread over all
        processes."""
        return self.last is not None and (self.last[1] is not None or distributed.world_size() == 1)

    def save(self) -> bool:
        """Write the last boundary. Return False if that is no longer possible; the checkpoint on disk then stays.

        Raise SaveError if it cannot be written, for example on a full disk; the old checkpoint stays.
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
            if self.stored is not None:
                torch.save(self.stored, new / "replay.pt")
            write_json(new / "state.json", state)
            sync(new)
            shutil.rmtree(old, ignore_errors=True)
            if self.folder.exists():
                self.folder.rename(old)
            new.rename(self.folder)
            sync_one(self.folder.parent)
        except Exception as error:  # from the disk, in the writing library's words
            failed, self.failed = SaveError.of("the checkpoint", error, self.folder.parent), True
            recover(self.folder)
            shutil.rmtree(new, ignore_errors=True)  # frees its space
            raise failed from error
        shutil.rmtree(old, ignore_errors=True)
        self.failed = False
        return True

    def on_disk(self) -> str:
        """Describe the checkpoint on disk."""
        if not (self.folder / "state.json").is_file():
            return "there is no checkpoint yet"
        try:
            return f"the checkpoint of iteration {read_state(self.folder)['run']['iteration']} is kept"
        except (OSError, ValueError) as error:
            return f"the checkpoint on disk is damaged: {error}"


@contextmanager
def saving_at_exit(saver: Checkpointer, run: dict[str, Any]) -> Iterator[None]:
    """Save the last complete iteration if anything ends the run early, and print how to resume.

    - Ctrl-C and SIGTERM end the run with status 130 and 143. A second signal changes nothing while files are written.
      An ignored signal (Ctrl-C in a shell's background jobs) stays ignored.
    - A SystemExit before the first iteration is raised again. There is nothing to resume, so the folder is removed.
    - Other exceptions are raised again with a note. For a loss that is not finite (FloatingPointError with the
      trajectories as its second argument), the trajectories are written to not_finite.jsonl. If the logits are not
      finite, there are no trajectories: the last update destroyed the weights, so the checkpoint is kept.
    - Large models are not copied. They are written until an update begins; after that the checkpoint on disk stays.
      With several processes it always stays, because other processes hold parts of the weights and may be gone.

    With several processes signals are for rank 0, which must leave a collective first. When it ends, all end.
    """
    run_dir = saver.folder.parent
    with signals.interrupting(lambda number: setattr(saver, "signal", number), ignored=saver.rank > 0):
        try:
            yield
        except BaseException as error:
            signals.ignore()
            if isinstance(error, SystemExit) and run.get("iteration") == 0 and not saver.folder.exists():
                if saver.rank == 0 and not any(name.startswith("eval/") for name in run.get("summary", {})):
                    run_files.discard(run_dir)
                raise  # it never began, and would end in the same way if it was resumed
            reason = str(error) if isinstance(error, SaveError) and error.of_disk else disk.no_room(error)
            rows: Any = None
            if isinstance(error, FloatingPointError) and len(error.args) == 2:  # ours; libraries raise this error too
                reason, rows = error.args
            weights_destroyed = isinstance(error, FloatingPointError) and reason is not None and not rows
            savable = not weights_destroyed and not saver.failed
            remedy = "" if saver.rank > 0 else _save_and_describe(saver, savable)
            if rows:
                append_rows(run_dir / "not_finite.jsonl", rows, iteration=run["iteration"] + 1)
                reason = f"{reason}. Its trajectories are in {run_dir / 'not_finite.jsonl'}"
            if isinstance(error, RuntimeError) and distributed.lost_connection(error):
                reason = f"process {saver.rank}: another process has ended"
            if reason is not None and saver.signal is None:
                sys.exit(f"stopped: {reason}" + (f"\n{remedy}" if remedy else ""))
            signals.end(error, remedy, saver.signal)
            raise


def _save_and_describe(saver: Checkpointer, save: bool) -> str:
    """Write the last complete iteration if requested and possible. Describe the checkpoint and how to resume."""
    status = ""
    if save and saver.can_save_alone():
        try:
            saver.save()
            status = "resume after the last complete iteration"
        except SaveError as failure:
            status = f"{failure}; {saver.on_disk()}"
        except RuntimeError as failure:  # a large model, on a GPU that has failed
            status = f"the checkpoint could not be written: {failure}; {saver.on_disk()}"
    status = status or saver.on_disk()
    try:
        read_state(saver.folder)
    except (OSError, ValueError):
        return f"{status}; the run's files are in {saver.folder.parent}"
    status = status if status.startswith("resume") else f"{status}; resume"
    return f"{status} with\n  {commands.resume(saver.folder.parent)}"


def save_policy(policy: Any, folder: Path, state: dict[str, Any]) -> None:
    """Write the policy in the form that `from_pretrained` reads: its weights, or only its adapters if it has some."""
    with without_bars():
        policy.save_pretrained(folder, state_dict=state)
    if (folder / "config.json").is_file():  # FSDP renames the model's class
        config = json.loads((folder / "config.json").read_text())
        config["architectures"] = [name.removeprefix("FSDP") for name in config.get("architectures") or []]
        write_json(folder / "config.json", config)


def recover(folder: Path) -> None:
    """Restore the old checkpoint if a crash happened between the two renames."""
    if not folder.is_dir() and folder.with_suffix(".old").is_dir():
        folder.with_suffix(".old").rename(folder)


def find(run_dir: str | Path) -> Path:
    """Return the checkpoint folder of a run to resume. Raise SystemExit with the cause if there is none.

    Rank 0 claims the run first and then restores an old checkpoint, because another process may be between its two
    renames. The other ranks wait for that.
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
    if not Path(run_dir).is_dir():
        raise SystemExit(f"--resume {run_dir}: there is no such folder. Give a run's folder (runs/...)")
    if not (folder / "state.json").is_file():
        raise SystemExit(
            f"--resume {run_dir}: there is no checkpoint. Give a run's folder (runs/...). Checkpoints are written by "
            "--checkpoint-every, and when a run ends early"
        )
    return folder


def check_unchanged(run_dir: Path | str, saved: Mapping[str, Any], now: Mapping[str, Any], **descriptions: str) -> None:
    """Raise SystemExit if an entry of a run's summary differs from its value at the start; older runs lack some.

    `descriptions` has a text for each entry to compare.
    """
    for name, description in descriptions.items():
        if saved.get(name, now[name]) != now[name]:
            raise SystemExit(f"--resume {run_dir}: the {description} have changed since the run started")


def read_state(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's state.json. Raise OSError, or ValueError if it is damaged."""
    path = folder / "state.json"
    try:
        state = json.loads(path.read_text())
        kinds = {"algorithm": str, "args": dict, "run": dict}
        whole = all(isinstance(state[name], kind) for name, kind in kinds.items())
        if whole and isinstance(state["run"]["iteration"], int):
            return state
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error!r}") from None
    raise ValueError(f"{path} cannot be read: it has no algorithm, args or run")


def load_args(args: ArgsT, algorithm: str) -> ArgsT:
    """Return the arguments of the run that `args.resume` names, which must be of the same algorithm; otherwise `args`.

    Raise SystemExit for a damaged checkpoint, and for arguments that contradict the run's (`arguments.resumed`).
    """
    run_dir = getattr(args, "resume", None)
    if not run_dir:
        return args
    try:
        saved = read_state(find(run_dir))
    except OSError as error:
        raise SystemExit(f"--resume {run_dir}: the checkpoint cannot be read or written: {error}") from None
    except ValueError as error:
        raise SystemExit(f"--resume {run_dir}: the checkpoint is damaged: {error}") from None
    if saved["algorithm"] != algorithm:
        theirs = printable(saved["algorithm"])
        raise SystemExit(f"--resume {run_dir}: the checkpoint is of {theirs}.py, but this is {algorithm}.py")
    return arguments.resumed(args, saved["args"], "the checkpoint")


def load(run_dir: str | Path, critic: nn.Module | None, optimizer: Any) -> dict[str, Any]:
    """Restore critic and optimizer and return the state. The caller loads the policy from checkpoint/policy.

    Raise SystemExit if the files are damaged, or of another model.
    """
    folder = find(run_dir)
    try:
        if critic is not None:
            saved, now = load_file(folder / "critic.safetensors"), critic.state_dict()
            critic.load_state_dict({name: distributed.like(x, now[name]) for name, x in saved.items()})
        optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True, map_location="cpu", mmap=True))
        return read_state(folder)
    except Exception as error:  # any error of torch or safetensors for a damaged file
        cause = f"the checkpoint is damaged, or does not fit this model: {error!r}"
        raise SystemExit(f"--resume {run_dir}: {cause}") from error


def load_stored(run_dir: str | Path) -> list[dict[str, Any]]:
    """Return the stored successes of a run's checkpoint. Raise SystemExit if the file is damaged."""
    try:
        stored: list[dict[str, Any]] = torch.load(find(run_dir) / "replay.pt", weights_only=True, map_location="cpu")
        return stored
    except Exception as error:  # any error of torch for a damaged file
        raise SystemExit(f"--resume {run_dir}: the checkpoint's replay.pt is damaged: {error!r}") from error


def save_model(policy: Any, folder: Path, tokenizer: str | None, chat_template: str | None = None) -> None:
    """Write the trained policy, with adapters merged, and its tokenizer with its chat template: the built-in byte
    tokenizer (None) as one of Hugging Face with the same ids. All processes must call this together.

    Raise SaveError, for example on a full disk.
    """
    state = {name: weight.cpu() for name, weight in distributed.weights(policy) if distributed.rank() == 0}
    if not state:
        return
    model, is_new = policy.get_base_model() if hasattr(policy, "get_base_model") else policy, not folder.exists()
    content = "the model"
    buffers = dict(model.named_buffers())
    for name, value in model.state_dict().items():  # no learner trains buffers, but some models cannot do without
        if name in buffers:
            state[name.replace(".base_layer", "")] = value.cpu()
    try:
        save_policy(model, folder, state)
        content = "the tokenizer of the model"
        saved: Any = load_tokenizer(tokenizer, chat_template)
        saved.save_pretrained(folder)
    except Exception as error:  # from the disk, in the writing library's words
        save_error = SaveError.of(f"{folder}: {content}", error, folder)
        if is_new and content == "the model":  # an incomplete model looks like a complete one
            shutil.rmtree(folder, ignore_errors=True)
        raise save_error from error
