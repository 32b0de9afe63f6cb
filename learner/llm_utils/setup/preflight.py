"""The preflight: compute the memory that a run needs from the model's config alone, before any weight is read."""

from __future__ import annotations

import copy
import dataclasses
import gc
import math
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM

from llm_utils import distributed
from llm_utils.recovery.checkpoint import MOST_BYTES, copied_bytes
from llm_utils.sampling.engine import VLLM_SHARE
from llm_utils.sampling.slot_cache import GPU_SHARE, Store, bytes_per_token, gpu_room
from llm_utils.sampling.slot_states import state_bytes
from llm_utils.setup import cgroups, foreign
from llm_utils.setup.loading import choose_dtype, read_config, with_adapters
from llm_utils.setup.model_checks import layers_of
from llm_utils.training import cudnn_attention
from llm_utils.training.forward import LOGITS_BYTES, masks_of_windows, policy_forward, without_head

GB = 1e9
ALWAYS, ROLLOUT, UPDATE, STEP = "always", "rollout", "update", "step"
USABLE = {"cuda": 0.92, "cpu": 0.95}  # the rest is for kernel workspaces and allocator fragmentation
TYPICAL_ROW = 4096  # tokens; few of the rows that grow in parallel fill a longer context
ROOM_TO_GROW = 1.27  # factor of the cache: a store has an eighth more rows and columns than needed
ROOM_OF_STATES = 2.13  # factor of the states: a store has an eighth more rows, and rows that wait are copied
ROOM_OF_SMALL = 1.69  # factor of a small cache: it has half as many columns more
CHECKPOINTING = "--gradient-checkpointing on"
CONTEXT = "--env-kwargs '{\"max_context_tokens\": ...}'"
# On a CPU, freed blocks between others stay with the process: a share of the activations, and three layers.
# Adapters leave more such blocks. Fitted to benchmarks/performance/preflight.py.
MALLOC_GAPS, MALLOC_GAPS_LORA = 0.1, 0.8
# Float32 tensors of the size of the logits that exist at once: logits, their softmax, two for entropies (measured:
# 4.03). An entropy bonus keeps one more for its gradient (5.03).
LOGITS_COPIES = 4
FLOAT32_HEAD = "the head in float32"


@dataclass
class Part:
    """A part of the memory: its bytes in each process, `when` it is in use, and the flags that reduce it."""

    name: str
    bytes: int
    when: str = ALWAYS
    flags: tuple[str, ...] = ()


@dataclass
class Report:
    """The bytes that a run needs in each process, and the bytes that are available."""

    parts: list[Part]
    available: int

    def at(self, when: str) -> int:
        return sum(part.bytes for part in self.parts if part.when in (ALWAYS, when))

    @property
    def peak(self) -> int:
        return max(self.at(when) for when in (ROLLOUT, UPDATE, STEP))

    @property
    def fits(self) -> bool:
        return self.peak <= self.available

    def table(self) -> str:
        """Format the parts and the sums, in GB of 10^9 bytes."""
        lines = [f"{part.bytes / GB:9.2f} GB  {part.when:8} {part.name}" for part in self.parts if part.bytes]
        lines += [f"{self.at(when) / GB:9.2f} GB  total    {when}" for when in (ROLLOUT, UPDATE, STEP)]
        return "\n".join([*lines, f"{self.available / GB:9.2f} GB  available"])

    def flags(self) -> list[str]:
        """List the flags that would lower the peak, the most effective first."""
        worst = max((ROLLOUT, UPDATE, STEP), key=self.at)
        savings: dict[str, int] = {}
        for part in self.parts:
            for flag in part.flags if part.when in (ALWAYS, worst) and part.bytes > 0.02 * self.peak else ():
                savings[flag] = savings.get(flag, 0) + part.bytes
        return sorted(savings, key=lambda flag: -savings[flag])

    def measured(self, activations_and_logits: int) -> Report:
        """Return a copy with the bytes that `measure` found instead of the two estimates."""
        estimates = ("activations", "logits", "gaps left by malloc", FLOAT32_HEAD)
        parts = [part for part in self.parts if part.when != UPDATE or part.name not in estimates]
        flags = tuple(dict.fromkeys(flag for part in self.parts if part not in parts for flag in part.flags))
        parts.append(Part("activations and logits, measured", activations_and_logits, UPDATE, flags))
        return dataclasses.replace(self, parts=parts)

    def refuse(self) -> None:
        """Raise SystemExit with the table and suggested flags if the run does not fit."""
        if not self.fits:
            raise SystemExit(
                f"this run does not fit: it needs {self.peak / GB:.1f} GB in each process, but only "
                f"{self.available / GB:.1f} GB are available\n{self.table()}\nSuggestions, most effective first: "
                f"{'; '.join(self.flags())}\n--no-preflight starts the run without this check"
            )


def preflight(
    args: Any, config_or_source: Any, device: torch.device, *, critic: bool, reference: bool, longest_row: int,
    world_size: int, memory_gb: float | None = None, reference_config: Any = None,
) -> Report:  # fmt: skip
    """Return the memory that a learner with these arguments needs.

    `longest_row` is the number of tokens of the longest possible row. `memory_gb` replaces the device's memory, in GB
    of 10^9 bytes. The configs may be of models without weights; `reference_config` None is the policy's. Raise
    SystemExit if the run does not fit, unless `args.preflight` is False.
    """
    config = config_or_source
    if isinstance(config, str | Path):
        config = read_config(config)
    in_process, on_cpu = args.engine == "transformers", device.type == "cpu"
    dtype = choose_dtype(getattr(args, "dtype", "auto"), device)
    try:
        model = empty_model(config, dtype, args.lora_rank)
    except Exception as error:
        cause = f"transformers cannot build a model from its config.json ({foreign.describe_error(error)})"
        raise SystemExit(f"--model {config.name_or_path}: {cause}") from error
    weights = sum(p.nbytes for p in model.parameters())
    trained = [p for p in model.parameters() if p.requires_grad]
    whole = empty_model(config, dtype, 0) if args.lora_rank else model  # critic and reference have no adapters
    parts: list[Part] = []

    def add(name: str, size: float, when: str = ALWAYS, *flags: str) -> None:
        parts.append(Part(name, int(size), when, flags))

    processes = "torchrun with more processes"
    smaller = ("a smaller --model", processes)
    add("policy: weights", weights / world_size, ALWAYS, *smaller)
    groups = [("policy", trained, () if args.lora_rank else ("--lora-rank 16",))]
    if critic:
        in_critic = [p for p in whole.parameters() if p is not whole.get_output_embeddings().weight or is_tied(whole)]
        add(
            "critic: weights",
            sum(p.nbytes for p in in_critic) / world_size,
            ALWAYS,
            *smaller,
            "a learner without a critic",
        )
        groups.append(("critic", in_critic, ("a learner without a critic",)))
    for name, parameters, flags in groups:
        count = sum(p.numel() for p in parameters)
        rounded = sum(p.numel() for p in parameters if p.dtype != torch.float32)
        add(f"{name}: float32 weights", 4 * rounded / world_size, ALWAYS, *flags, processes)
        add(f"{name}: Adam's moments", 8 * count / world_size, ALWAYS, *flags, processes)
        for when in (UPDATE, STEP):  # in float32, whatever the weights are
            add(f"{name}: gradients", 4 * count / world_size, when, *flags, processes)
    if reference:
        referred = empty_model(reference_config, dtype, 0) if reference_config is not None else whole
        add(
            "reference: weights",
            sum(p.nbytes for p in referred.parameters()) / world_size,
            ALWAYS,
            "--kl-coef 0",
            processes,
        )
    if in_process and (world_size > 1 or args.lora_rank):
        whole_copy = sum(p.nbytes for p in whole.parameters())
        add("sampler: weights", whole_copy, ALWAYS, "--engine vllm-server", "a smaller --model")
    copied = sum(copied_bytes(parameters) for _, parameters, _ in groups)
    if on_cpu and copied <= MOST_BYTES:
        add("last two iterations, for checkpoints", 2 * copied)
    if world_size > 1:
        layer, rest = layer_bytes(whole)
        add("layers and embeddings, gathered", 3 * layer + 2 * rest, UPDATE, "a smaller --model")

    memory = memory_of(device) if memory_gb is None else int(memory_gb * GB)
    stale = getattr(args, "max_staleness", 0)  # rows stay in flight during updates
    if in_process:
        row, token = min(longest_row, TYPICAL_ROW), bytes_per_token(config, dtype)
        needed = (args.num_envs * row + max(0, longest_row - row)) * token
        cache = (ROOM_OF_SMALL if needed < Store.SMALL else ROOM_TO_GROW) * needed
        if not on_cpu and world_size == 1:  # one long row can make the smallest store this large
            room = GPU_SHARE * memory if memory_gb else gpu_room(device)
            cache = max(cache, min(args.num_envs * longest_row * token, room))
        states = 0.0
        if layers_of(config, longest_row).states:
            states = ROOM_OF_STATES * args.num_envs * state_bytes(config, dtype)
        both = ("keys and values", cache, ("--num-envs", CONTEXT)), ("states", states, ("--num-envs",))
        for name, size, remedies in both:
            add(f"{name} of the rows", size, ALWAYS if stale else ROLLOUT, *remedies)
            if stale and getattr(args, "eval_episodes", 0):  # rows in flight stay during an evaluation
                add(f"{name} of an evaluation's rows", size, ROLLOUT, "--eval-episodes 0", *remedies)
        logit = 8 if on_cpu else 20  # bytes: two copies in bf16 with CUDA graphs, four in float32
        add("logits of new tokens", logit * args.num_envs * config.get_text_config().vocab_size, ROLLOUT, "--num-envs")
    if args.engine == "vllm" and not on_cpu:
        add(
            "vLLM", VLLM_SHARE * memory, ALWAYS if stale else ROLLOUT, "--engine vllm-server"
        )  # otherwise it sleeps during updates

    tokens = max(args.microbatch_tokens, longest_row)
    shorter = CONTEXT if longest_row > args.microbatch_tokens else "--microbatch-tokens"
    masks = masks_of_windows(model, longest_row).get("attention_mask", {})
    masks = list(masks.values()) if isinstance(masks, dict) else [masks]
    add("masks of attention windows", sum(mask.nbytes for mask in masks if mask is not None), UPDATE, CONTEXT)
    saved, layer = activations(model, max(1, tokens // longest_row), longest_row)
    checkpointing = args.gradient_checkpointing == "on"
    if checkpointing:
        inputs = tokens * config.get_text_config().hidden_size * dtype.itemsize
        saved = config.get_text_config().num_hidden_layers * inputs + layer
    again = () if checkpointing else (CHECKPOINTING,)
    add("activations", saved + layer, UPDATE, *again, shorter)
    if on_cpu:
        gaps = MALLOC_GAPS_LORA if args.lora_rank else MALLOC_GAPS
        add("gaps left by malloc", gaps * saved + 3 * layer, UPDATE, *again, shorter)
    vocabulary = config.get_text_config().vocab_size
    logits = min(tokens, LOGITS_BYTES // (4 * vocabulary)) * 4 * vocabulary
    copies = LOGITS_COPIES + (getattr(args, "ent_coef", 0) != 0)
    add("logits", copies * logits, UPDATE, shorter)
    head = whole.get_output_embeddings().weight
    if critic or not args.lora_rank:  # adapters do not train them
        add("gradients of embedding and head, before they are added", 2 * head.nbytes, UPDATE, "a smaller --model")
    if getattr(args, "float32_head", False) and dtype != torch.float32:
        for when in (UPDATE, *(ROLLOUT,) * in_process):
            add(FLOAT32_HEAD, 4 * head.numel(), when, "no --float32-head", "a smaller --model")

    report = Report(parts, int(USABLE[device.type] * memory))
    if getattr(args, "preflight", True):
        report.refuse()
    return report


# ------------------------------------------------------------------------------------------------------ the estimates


def unshared_prompts(config: Any, group_size: int) -> str:
    """Describe what states cost in training: a prompt of several episodes is computed for each. Return "" if it is
    not."""
    names = dict.fromkeys(layers_of(config, math.inf).states.values())
    if not names or group_size < 2:
        return ""
    return (
        f"{config.model_type} has {' and '.join(names)}: prompts are not shared in training, so a group of "
        f"{group_size} computes its prompt {group_size} times"
    )


def empty_model(config: Any, dtype: torch.dtype, lora_rank: int) -> Any:
    """Build the model without memory for its weights. Its parameters can be counted, its layers run on shapes."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, trust_remote_code=False)
        if not lora_rank:
            return model
        model = with_adapters(model, lora_rank)
        for parameter in model.parameters():  # peft gives adapters the model's dtype only if there are weights
            if parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
        return model


def is_tied(model: Any) -> bool:
    """Return True if the output embedding is the input embedding."""
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def layer_bytes(model: Any) -> tuple[int, int]:
    """Return the bytes of the largest decoder layer's weights, and of all weights outside the layers."""
    sizes = [sum(p.nbytes for p in layer.parameters()) for layer in distributed.decoder_layers(model)]
    return max(sizes), sum(p.nbytes for p in model.parameters()) - sum(sizes)


class FusedAttention(torch.autograd.Function):
    """A stand-in on the meta device that saves the tensors a fused kernel keeps. It has no backward pass."""

    @staticmethod
    def forward(ctx: Any, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        out = values.new_empty(queries.shape[0], queries.shape[2], queries.shape[1], values.shape[3])
        ctx.save_for_backward(queries, keys, values, out, queries.new_empty(queries.shape[:3], dtype=torch.float32))
        return out


def fused_attention(
    module: nn.Module, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    return FusedAttention.apply(queries, keys, values), None


def activations(model: Any, rows: int, columns: int) -> tuple[int, int]:
    """Return the bytes that autograd keeps for tokens [rows, columns] in all layers, and in one layer.

    They are counted by running an empty model's layers on the meta device. If a model cannot run there (data-dependent
    routing), a formula for layers like Qwen2's is used.
    """
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    saved: dict[int, torch.Tensor] = {}  # by storage, as several operations may keep the same tensor
    total, marks = [0], []

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in weights and storage._cdata not in saved:
            saved[storage._cdata] = x
            total[0] += storage.nbytes()
        return x

    model_itself = (model.get_base_model() if hasattr(model, "get_base_model") else model).eval()
    layers = distributed.decoder_layers(model_itself)
    hooks = [layer.register_forward_hook(lambda *_: marks.append(total[0])) for layer in layers]
    AttentionInterface.register("fused_on_meta", fused_attention)
    eager = model_itself.config._attn_implementation == "eager"  # some models have no other; it keeps all scores
    if not eager:
        model_itself.config.get_text_config()._attn_implementation = "fused_on_meta"
    ids = torch.zeros(rows, columns, dtype=torch.long, device="meta")
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device="meta")  # four dimensions: used unchanged
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            without_head(model_itself)(input_ids=ids, attention_mask=mask, use_cache=False)
        return total[0], max(b - a for a, b in zip([0, *marks], marks, strict=False))
    except Exception:  # code of a model family that cannot run on the meta device
        config = model_itself.config.get_text_config()
        keys = bytes_per_token(config, torch.uint8) // (2 * config.num_hidden_layers)
        names = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
        inner = next((size for name in names if (size := getattr(config, name, None))), 4 * config.hidden_size)
        layer = rows * columns * (18 * config.hidden_size + 8 * inner + 4 * keys)
        if eager:
            layer += 2 * rows * columns**2 * config.num_attention_heads
        layer = layer * model_itself.dtype.itemsize // 2  # of 16 bits
        return config.num_hidden_layers * layer, layer
    finally:
        for hook in hooks:
            hook.remove()


def memory_of(device: torch.device) -> int:
    """Return the bytes of its device that this process may use: all free memory of a GPU, or its share of main
    memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
        free.append(1024 * int(fields["MemAvailable"].split()[0]))
    return min(free + cgroups.memory_left()) // distributed.local_world_size()


# ------------------------------------------------------------------------------------------------------- a measurement


def measure(
    model: Any, tokens: int, longest_row: int, vocab_size: int, temperature: float = 1.0, entropy: bool = False
) -> int:
    """Measure the peak bytes of activations and logits of one microbatch, in a forward and backward pass.

    The microbatch has `tokens` tokens in rows of at most `longest_row`; all are trained. With `entropy`, entropies are
    computed too. All processes must call this together. Raise RuntimeError if the peak of main memory cannot be read
    (no /proc).
    """
    length = min(tokens, longest_row)
    rng, count = np.random.default_rng(0), max(1, tokens // cudnn_attention.width(length, model.device))
    tokens_of = [rng.integers(vocab_size, size=length) for _ in range(count)]
    rows = [SimpleNamespace(tokens=ids, prompt_length=1, train_mask=np.arange(length) > 0) for ids in tokens_of]
    device = model.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    else:
        gc.collect()  # a collection during the measurement would lower the peak
        before = resident_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    try:
        logprobs, entropies = policy_forward(model, rows, vocab_size, temperature, entropy)
        (logprobs.sum() + (entropies.sum() if entropy else 0.0)).backward()
    finally:
        gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        model.zero_grad()
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resident_bytes("VmHWM")
    return max(0, peak - before - gradients)


def resident_bytes(name: str) -> int:
    """Return the main memory of this process: VmRSS is now, VmHWM the peak. Raise RuntimeError without /proc."""
    status = Path("/proc/self/status")
    if not status.exists():
        raise RuntimeError("the memory of a process is read from /proc, which exists only on Linux")
    return next(1024 * int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(name))
