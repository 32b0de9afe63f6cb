"""The choice of --gradient-checkpointing and --microbatch-tokens by the memory of the machine, if they are `auto`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from llm_utils import distributed
from llm_utils.setup.environments import print_defaults
from llm_utils.setup.loading import enable_gradient_checkpointing
from llm_utils.setup.preflight import CHECKPOINTING, GB, Report, measure, memory_of, preflight

FLAGS = ("gradient_checkpointing", "microbatch_tokens")
SIZES = (32_768, 16_384, 8192, 4096)  # tokens of a microbatch that `auto` tries on a GPU
CPU_SIZE = 4096
Values = dict[str, Any]


def candidates(args: Any, device: torch.device, longest_row: int) -> list[Values]:
    """Return the values that the flags may take, the fastest first. The last ones need the least memory.

    Recomputed activations cost more time than a larger microbatch saves. A row of `longest_row` tokens is a microbatch
    anyway, so smaller microbatches save no memory.
    """
    sizes, checkpointing = [args.microbatch_tokens], [args.gradient_checkpointing]
    if args.microbatch_tokens == "auto":
        on_gpu = [size for size in SIZES if size >= longest_row] or [SIZES[0]]
        sizes = on_gpu if device.type == "cuda" else [CPU_SIZE]
    if args.gradient_checkpointing == "auto":
        checkpointing = ["off", "on"]
    return [dict(zip(FLAGS, (one, size), strict=True)) for one in checkpointing for size in sizes]


def choose(
    args: Any, device: torch.device, longest_row: int, estimate: Callable[[Any], Report]
) -> tuple[Report, list[Values]]:
    """Set the flags that are `auto` to the fastest values that fit, or to those that need the least memory.

    `estimate(args)` returns a preflight's report. Return the report of the chosen values, and the values to try next if
    a measured microbatch does not fit (`check`).
    """
    values = candidates(args, device, longest_row)
    while True:
        report = estimate(SimpleNamespace(**vars(args) | values[0] | {"preflight": False}))
        if report.fits or len(values) == 1:
            break
        del values[0]
    use(args, values[0])
    return report, values[1:]


def use(args: Any, values: Values) -> None:
    """Set the flags, and print those that change. config.yaml leaves open what was `auto`."""
    changed = {name: value for name, value in values.items() if getattr(args, name) != value}
    opened = {name: "auto" for name in changed if getattr(args, name) == "auto"}
    args.open_flags = getattr(args, "open_flags", {}) | opened
    for name, value in changed.items():
        setattr(args, name, value)
    print_defaults(changed, args)


def use_without_preflight(args: Any) -> None:
    """Set the flags that are `auto` to those of a CPU with enough memory, as the memory is not known."""
    use(args, candidates(args, torch.device("cpu"), 1)[0])


def least_memory_gb(device: torch.device) -> float | None:
    """Return the smallest memory of the processes, in GB of 10^9 bytes, so that all choose the same; None for one
    process."""
    return -distributed.all_reduce_max(-memory_of(device) / GB) if distributed.world_size() > 1 else None


def check(args: Any, policy: Any, report: Report, smaller: list[Values], measured: Callable[[], int]) -> Report:
    """Measure a microbatch with the chosen values. While it does not fit, take the next of the `smaller` ones.

    `measured()` returns bytes. Return the report with them. All processes must call this together.
    """
    for values in [*smaller, None]:
        try:
            found = report.measured(int(distributed.all_reduce_max(measured())))
        except torch.OutOfMemoryError:
            if values is None or distributed.world_size() > 1:  # the other processes wait in the middle of a pass
                raise
            found = report.measured(sys.maxsize)
        if values is None or found.fits:
            break
        torch.cuda.empty_cache()
        if values["gradient_checkpointing"] != args.gradient_checkpointing:
            enable_gradient_checkpointing(policy)
        use(args, values)
    if args.gradient_checkpointing == "on":  # the report may be of a choice without it
        for i, part in enumerate(found.parts):
            flags = tuple(flag for flag in part.flags if flag != CHECKPOINTING)
            found.parts[i] = dataclasses.replace(part, flags=flags)
    return found


def choose_for_rows(args: Any, policy: Any, source: str, longest_row: int, vocab_size: int) -> int:
    """Choose for a script that trains a loaded policy on rows, and does nothing else. Nothing is rejected. Return the
    tokens of a microbatch."""
    if "auto" not in (getattr(args, name) for name in FLAGS):
        return args.microbatch_tokens
    device, was = policy.device, args.gradient_checkpointing
    on_gpu = device.type == "cuda"
    held = torch.cuda.memory_reserved(device) if on_gpu else sum(p.nbytes for p in policy.parameters())
    memory_gb = (memory_of(device) + held) / GB  # the report counts the weights
    fixed = {"engine": "", "dtype": str(policy.dtype).removeprefix("torch.")}

    def estimate(args: Any) -> Report:
        return preflight(
            SimpleNamespace(**vars(args) | fixed), source, device, critic=False, reference=False,
            longest_row=longest_row, world_size=1, memory_gb=memory_gb,
        )  # fmt: skip

    report, smaller = choose(args, device, longest_row, estimate)
    if args.gradient_checkpointing == "on" and was != "on":
        enable_gradient_checkpointing(policy)
    if on_gpu:
        check(args, policy, report, smaller, lambda: measure(policy, args.microbatch_tokens, longest_row, vocab_size))
    return args.microbatch_tokens
