"""Training of one model by several processes: `torchrun --nproc-per-node N learner/grpo_llm.py`.

Every process holds a shard of the weights (FSDP2) and trains on its part of the trajectories. Only rank 0 has
environments, the sampling engine and the log. Without torchrun everything here is the identity.
"""

from __future__ import annotations

import copy
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from llm_utils.trajectory import Trajectory

T = TypeVar("T")


def launched() -> int:
    """Return the number of processes that torchrun started, before they have joined."""
    return int(os.environ.get("WORLD_SIZE", 1))


def launched_rank() -> int:
    """Return the rank that torchrun gave this process, before it has joined."""
    return int(os.environ.get("RANK", 0))


def launcher() -> list[str]:
    """Return the program and options that started this process, as a user would type them."""
    python = Path(sys.executable)
    if launched() == 1:
        return [shell_name(python)]
    torchrun = python.with_name("torchrun")  # a user installation has it elsewhere
    return [shell_name(torchrun) if torchrun.exists() else "torchrun", "--nproc-per-node", str(local_world_size())]


def shell_name(program: Path) -> str:
    """Return a program's name if the shell finds it by name, else its path: relative if it is below the working
    directory."""
    if shutil.which(program.name) == str(program):
        return program.name
    return str(program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program)


def device(cuda: bool) -> torch.device:
    """Return the device of this process."""
    if cuda and torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")


def setup(cuda: bool) -> None:
    """Join the processes that torchrun started, if any, and choose this process's GPU."""
    on_gpu = device(cuda).type == "cuda"
    if on_gpu:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it --deterministic raises on a GPU
        torch.cuda.set_device(device(cuda))
    if launched() > 1:
        # rank 0 may sample for long while the others wait
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(hours=4))
        if rank() > 0:  # Ctrl-C is for rank 0, which must leave a collective first; when it ends, all end
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def leave() -> None:
    """Leave the group of processes at the end of a successful run. After an error a process just ends, and torchrun
    ends the others."""
    if dist.is_initialized():
        dist.barrier()  # a process may abort if its peer ends while connections close
        idle = _wait_for_other_threads(10.0)
        dist.barrier()  # so that all wait for the slowest threads
        _wait_for_other_threads(10.0 if idle else 0.2)
        dist.destroy_process_group()


def _wait_for_other_threads(seconds: float) -> bool:
    """Wait until gloo's threads release their tensors, as Python must not end before: pytorch/pytorch#179291. Return
    True if the threads became idle."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.2)
        if not _other_threads_run():  # on a busy machine they may not have run yet
            return True
    return False


def _other_threads_run() -> bool:
    """Return True if another thread of this process is running or waits for a core (Linux; else False)."""
    states = []
    for task in Path("/proc/self/task").glob("[0-9]*"):
        with suppress(OSError):  # the thread has just ended
            if int(task.name) != threading.get_native_id():
                states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    return "R" in states


def shard(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to the device, and with several processes a shard of every weight to each. Return the model.

    A decoder layer is gathered while it computes, weights outside the layers during the whole pass.
    """
    if world_size() == 1:
        return model.to(device)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (world_size(),))
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh)
    outside = [p for p in model.parameters() if not is_split(p)]
    for module in model.modules():  # weights that are gathered together need one dtype; a critic's head differs
        if any(p.dtype != outside[0].dtype and not is_split(p) for p in module.parameters(recurse=False)):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the list of a model's decoder layers: the list that holds most of the weights."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda module: sum(p.numel() for p in module.parameters()))


def rank() -> int:
    """Return the number of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def local_world_size() -> int:
    """Return the number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def lost_connection(error: RuntimeError) -> bool:
    """Return True if the error only means that another process has ended."""
    return any(words in str(error) for words in ("closed by peer", "reset by peer", "Broken pipe"))


def is_split(tensor: torch.Tensor) -> bool:
    """Return True if this process holds only its part of the tensor."""
    return hasattr(tensor, "full_tensor")


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return a split tensor as a whole one (all processes must call this together); return others unchanged."""
    return tensor.full_tensor() if is_split(tensor) else tensor


def collect(tensor: torch.Tensor) -> torch.Tensor:
    """Return `full` in the main memory of rank 0; other ranks get an empty tensor."""
    if not is_split(tensor):
        return tensor
    whole = tensor.full_tensor()
    return whole.cpu() if rank() == 0 else whole.new_empty(0)


def collect_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's state dict for a checkpoint, or only its adapters. All processes must call this together; rank 0
    gets the whole."""
    adapters_only = hasattr(model, "get_base_model")
    return {k: collect(v) for k, v in model.state_dict().items() if ".lora_" in k or not adapters_only}


def like(tensor: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Split a whole tensor as `target` is."""
    if not is_split(target):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(target.device), target.device_mesh, target.placements)


def all_reduce_sum(*values: float) -> list[float]:
    """Sum each value over the processes."""
    if world_size() == 1:
        return list(values)
    sums = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(sums)
    return sums.tolist()


def all_reduce_max(value: float) -> float:
    """Return the largest of the processes' values."""
    if world_size() == 1:
        return value
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def broadcast(value: T) -> T:
    """Return rank 0's value in all processes."""
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def even_passes(batches: Sequence[T]) -> Iterator[tuple[T, int]]:
    """Yield the microbatches of this process, each with the factor of its loss.

    Every process must take part in every forward and backward, so one with fewer batches repeats its last with factor
    0. The factor of the others is the number of processes, over which gradients are averaged.
    """
    for i in range(int(all_reduce_max(len(batches)))):
        yield batches[min(i, len(batches) - 1)], 0 if i >= len(batches) else world_size()


def balanced(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Split indices into `parts` lists of nearly equal total size: the largest first, each to the smallest list."""
    lists: list[list[int]] = [[] for _ in range(parts)]
    totals = [0] * parts
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        part = min(range(parts), key=lambda p: (totals[p], len(lists[p])))
        lists[part].append(index)
        totals[part] += sizes[index]
    return lists


def scatter(rows: Sequence[Trajectory]) -> list[Trajectory]:
    """Split rank 0's trajectories over the processes so that each gets about the same number of tokens.

    If there are fewer trajectories than processes, some get a placeholder that trains nothing and is not gathered.
    """
    if world_size() == 1:
        return list(rows)
    parts: list[list[Trajectory]] = []
    if rank() == 0:
        parts = [[rows[i] for i in part] for part in balanced([len(row.tokens) for row in rows], world_size())]
        shortest = min(rows, key=lambda row: len(row.tokens)) if rows else None
        parts = [part or ([placeholder(shortest)] if shortest is not None else []) for part in parts]
    received: list[Any] = [None]
    dist.scatter_object_list(received, parts if rank() == 0 else None, src=0)
    return received[0]


def placeholder(row: Trajectory) -> Trajectory:
    """Copy a trajectory without anything to train, for a process that would get none. Its episode number is -1."""
    other = copy.copy(row)
    other.episode, other.turns = -1, []
    other.train_mask = other.action_mask = other.value_mask = np.zeros_like(row.action_mask)
    return other


def gather(results: dict[int, T]) -> dict[int, T]:
    """Return the results of all processes by episode number on rank 0; nothing elsewhere."""
    if world_size() == 1:
        return results
    parts: list[Any] | None = [None] * world_size() if rank() == 0 else None
    dist.gather_object(results, parts, dst=0)
    return {episode: result for part in parts or [] for episode, result in part.items() if episode >= 0}


def weights(policy: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the policy's whole weights by their Hugging Face names, adapters merged, for a sampling engine.

    All processes must exhaust this together. The policy's own weights stay unchanged: adding adapters and removing them
    again would round the weights in every iteration.
    """
    base = policy.get_base_model() if hasattr(policy, "get_base_model") else policy
    adapted = {name: module for name, module in base.named_modules() if hasattr(module, "get_delta_weight")}
    for name, parameter in base.named_parameters():
        if ".lora_" in name:
            continue
        weight = full(parameter.detach())
        first, *inner = name.split(".base_layer")  # peft wraps the experts of a layer once for each of their parameters
        for wrapper in (adapted.get(first + ".base_layer" * depth) for depth in range(len(inner))):
            if wrapper is not None and inner[-1] == f".{getattr(wrapper, 'parameter_name', 'weight')}":
                weight = weight + full(wrapper.get_delta_weight("default").detach()).to(weight.dtype)
        yield name.replace(".base_layer", ""), weight
