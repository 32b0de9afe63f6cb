"""Compilation of training passes (--compile). torch fuses the small operations of a layer, so that they read and write
memory less often."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.utils.checkpoint import _StopRecomputationError
from transformers import Cache

from llm_utils import distributed
from llm_utils.setup.foreign import describe_error
from llm_utils.training import forward

Function = Callable[..., Any]

MOST_GRAPHS = 64  # of a layer: with or without gradients, one row or several, masks, long rows, kinds of layers
# Errors that do not come from the compiler: too little memory, and the early end of a recompute.
NO_FAILURE = torch.OutOfMemoryError, _StopRecomputationError


def compile_training(model: Any, backend: str | Function = "inductor") -> None:
    """Compile a model's decoder layers in place, and the log-probabilities that `policy_forward` computes with it.

    Call this after `distributed.shard`: the hooks that gather weights stay outside the graphs. Names of weights stay. A
    layer that gets a cache runs as it is, so a sampler with the same model does not use the graphs.
    """
    import torch._dynamo  # slow, and only needed here
    import torch._functorch.config
    import torch._inductor.config

    torch._dynamo.config.recompile_limit = MOST_GRAPHS
    # A backward pass that cannot be compiled must fail in the forward pass, where there is a remedy.
    torch._functorch.config.force_non_lazy_backward_lowering = True
    # Round to bf16 where uncompiled layers do. Otherwise the trainer would differ more from the sampler.
    torch._inductor.config.emulate_precision_casts = True
    failed: list[str] = []  # shared by the layers
    for layer in distributed.decoder_layers(model):
        compiled = torch.compile(layer.forward, backend=backend, dynamic=True)
        layer.forward = without_cache(layer.forward, with_fallback(layer.forward, compiled, "layers", failed))
    whole = forward.log_probabilities
    fused = with_fallback(whole, torch.compile(whole, backend=backend), "log-probabilities", [])

    def log_probabilities(logits: torch.Tensor, index: torch.Tensor, targets: torch.Tensor, *settings: Any) -> Any:
        if min(len(logits), len(targets)) < 2:  # sizes 0 and 1 would have graphs of their own
            return whole(logits, index, targets, *settings)
        for x in (logits, index, targets):  # only their length varies
            torch._dynamo.maybe_mark_dynamic(x, 0)
        return fused(logits, index, targets, *settings)

    model.compiled_log_probabilities = log_probabilities


def without_cache(function: Function, compiled: Function) -> Function:
    """Return a layer's forward that calls `compiled`, but `function` if an argument is a cache."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, Cache) for x in (*args, *kwargs.values())):
            return function(*args, **kwargs)
        if not torch.is_grad_enabled():  # gradient checkpointing asks for a gradient of the first layer's input only
            args = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in args)
        return compiled(*args, **kwargs)

    return call


def with_fallback(function: Function, compiled: Function, name: str, failed: list[str]) -> Function:
    """Return a function that calls `compiled`. If that fails, warn, add the reason to `failed`, and call `function`
    from then on."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not failed:
            try:
                return compiled(*args, **kwargs)
            except NO_FAILURE:
                raise
            except Exception as error:
                failed.append(describe_error(error))
                problem = f"--compile: this model's {name} cannot be compiled; they run uncompiled"
                warnings.warn(f"{problem}: {failed[0]}", stacklevel=2)
        return function(*args, **kwargs)

    return call
