"""Checks of a model before any work: does it fit its tokenizer, its environment and its engine?"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from transformers import PreTrainedModel


class Layers(NamedTuple):
    """The layers of a model over rows of a given length, by their kind: its name in the config's `layer_types`.

    `kinds` lists all kinds, one if the config names none. A layer of a kind in `windows` or `chunks` attends to part of
    a row: to the last so many tokens, or to those in the same chunk of so many. A layer of a kind in `states` also, or
    only, keeps a state that each token changes; the value is its usual name ("Mamba layers"). With such layers no tree
    of rows is right. All other layers attend to all of a row, or mix no tokens. `refused` says why neither cached rows
    nor trees can be right, whatever masks the model gets; "" if they can.
    """

    kinds: tuple[str, ...]
    windows: dict[str, int]
    chunks: dict[str, int]
    states: dict[str, str]
    refused: str


ATTENDING_TO_ALL = {"full_attention", "attention"}
MIXING_NO_TOKENS = {"moe", "mlp"}
KEEPING_A_STATE = {"linear_attention", "recurrent", "conv", "hybrid"}  # "recurrent": RecurrentGemma until 5.16
WITHOUT_KEYS = (KEEPING_A_STATE | MIXING_NO_TOKENS) - {"hybrid"}  # kinds of layers; a hybrid one also attends
KEPT = {  # families whose states the slots keep; their code continues several tokens from a state
    "bamba", "falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_next",
}  # fmt: skip
OWN_NAMES = {"minimax": "lightning attention layers", "recurrent_gemma": "RG-LRU layers"}


def layers_of(config: Any, longest_row: float = math.inf) -> Layers:
    """Describe the layers of a model over rows of at most `longest_row` tokens. A window or chunk that holds a whole
    row is left out."""
    config = config.get_text_config()
    model_type, one_layer = config.model_type, config.per_layer_config[0] if config.is_heterogeneous else config
    window, chunk = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    names = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    kinds = set(names or ["sliding_attention" if window else "full_attention"])
    states = {kind: name for kind in kinds & KEEPING_A_STATE if (name := state_name(config, kind))}
    named = " and ".join(dict.fromkeys(states.values()))
    sizes = {"sliding_attention": window, "chunked_attention": chunk}
    unknown = kinds - ATTENDING_TO_ALL - MIXING_NO_TOKENS - states.keys() - {kind for kind in sizes if sizes[kind]}
    reasons = {
        "ALiBi, which uses columns as positions": model_type in ("bloom", "mpt") or getattr(config, "alibi", False),
        "local attention, which counts columns": model_type == "gpt_neo",
        "RWKV layers": model_type == "rwkv",
        "xLSTM layers": model_type == "xlstm",
        "attention to later tokens": getattr(config, "use_bidirectional_attention", None) in (True, "all"),
        f"only {named}": bool(states) and not (kinds - states.keys() - MIXING_NO_TOKENS or "hybrid" in kinds),
        f"only {named}, and no heads": bool(states) and not getattr(one_layer, "num_attention_heads", None),
        "query temperatures, which count tokens from the beginning of each forward": (
            bool(getattr(config, "attn_temperature_tuning", False)) and config.floor_scale < longest_row < math.inf
        ),
        "a cache that is not kept (Moshi)": model_type == "moshi",
        "no attention heads": not getattr(one_layer, "num_attention_heads", None),
        f"layers of an unknown kind ({', '.join(sorted(unknown))})": bool(unknown),
        "limits of time steps, which transformers ignores in the forward of one token": not unlimited(config),
        f"{named} of a family whose states are not kept": bool(states) and model_type not in KEPT,
    }
    short = {kind: size for kind, size in sizes.items() if kind in kinds and size and size < longest_row}
    return Layers(
        kinds=tuple(sorted(kinds)),
        windows={kind: size for kind, size in short.items() if kind == "sliding_attention"},
        chunks={kind: size for kind, size in short.items() if kind == "chunked_attention"},
        states=states,
        refused=next((reason for reason, applies in reasons.items() if applies), ""),
    )


def unlimited(config: Any) -> bool:
    """Return True if Mamba layers take time steps of any size, or if there are none."""
    return tuple(getattr(config, "time_step_limit", None) or (0, math.inf)) == (0, math.inf)


def state_name(config: Any, kind: str) -> str:
    """Return the usual name of the layers of a kind that keeps a state, or "" if it cannot be told from the config.

    The kind does not tell it: `transformers` calls Mamba layers and gated delta nets "linear_attention".
    """
    if kind == "conv":
        return "convolution layers"
    if config.model_type in OWN_NAMES:
        return OWN_NAMES[config.model_type]
    if "mamba" in config.model_type or any(key.startswith("mamba_") for key in config.to_dict()):
        return "Mamba layers"
    return "gated delta net layers" if hasattr(config, "linear_conv_kernel_dim") else ""


def check_vocabulary(model: PreTrainedModel, vocab_size: int) -> None:
    """Raise SystemExit if the tokenizer is larger than the embedding. It may be smaller: the extra rows are never
    sampled."""
    rows = model.get_input_embeddings().num_embeddings
    if vocab_size > rows:
        raise SystemExit(
            f"the tokenizer has {vocab_size} tokens, but the model's embedding has only {rows} rows. "
            "Use the model's own tokenizer, or resize the embedding and train it first"
        )


def positions_of(config: Any) -> int | None:
    """Return the number of positions of a model; None without a limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def check_context(config: Any, max_context_tokens: int) -> None:
    """Raise SystemExit if the model has too few positions for the environment's longest state.

    `config` is the model's. `max_context_tokens` is the `max_len` of the environment's observation space.
    """
    positions = positions_of(config)
    if positions is not None and max_context_tokens > positions:
        raise SystemExit(
            f"the environment's states have up to {max_context_tokens} tokens, but the model has {positions} "
            f"positions: limit them with --env-kwargs '{{\"max_context_tokens\": {positions}}}'"
        )


def check_layers(config: Any, longest_row: float = math.inf) -> None:
    """Raise SystemExit if the transformers engine cannot sample rows of this length from the model."""
    if reason := layers_of(config, longest_row).refused:
        raise SystemExit(
            f"--engine transformers cannot sample from this model ({config.model_type}), as it has {reason}. "
            "Use --engine vllm or vllm-server, if vLLM has this model"
        )
