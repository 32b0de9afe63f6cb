"""What is checked about a model before any work is done: does it fit its tokenizer, environment and engine?"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel


def attends_to_less(config: Any, longest_row: float) -> str:
    """What a layer sees instead of all of a row of so many tokens at the positions that are given; "" for nothing.

    Only with "" has a row the same logits alone, in the cache of slots, and in the tree of rows that begin alike.
    """
    config = config.get_text_config()
    if config.model_type in ("bloom", "mpt") or getattr(config, "alibi", False):
        return "ALiBi, which takes columns for positions"
    if not getattr(config, "num_attention_heads", None):
        return "no attention"
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    layers = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)  # the latter: GPT-Neo
    kinds = set(layers or ["sliding_attention" if window else "full_attention"]) - {"full_attention", "global"}
    if window and kinds <= {"sliding_attention", "chunked_attention"}:
        return f"windows of {window} tokens" if kinds and window < longest_row else ""
    return f"layers of {', '.join(sorted(kinds))}" if kinds else ""


def check_vocabulary(model: PreTrainedModel, vocab_size: int) -> None:
    """A tokenizer may be shorter than the embedding (the rows beyond it are never sampled), but not longer."""
    rows = model.get_input_embeddings().num_embeddings
    if vocab_size > rows:
        raise SystemExit(
            f"the tokenizer has {vocab_size} tokens, the model's embedding only {rows} rows: they don't fit. "
            "Give the model's own tokenizer, or resize the embedding and train it first"
        )


def check_context(config: Any, max_context_tokens: int) -> None:
    """The environment's longest state, in tokens, must have positions in the model.

    `config` is the model's, `max_context_tokens` the `max_len` of the environment's observation space. SystemExit
    otherwise.
    """
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and max_context_tokens > positions:
        raise SystemExit(
            f"the environment's states have up to {max_context_tokens} tokens, the model has {positions} positions: "
            f"give the environment fewer, --env-kwargs '{{\"max_context_tokens\": {positions}}}'"
        )


def check_attention(config: Any, longest_row: float) -> None:
    """The transformers engine samples right only where every layer attends to all of a row. SystemExit otherwise."""
    if less := attends_to_less(config, longest_row):
        raise SystemExit(
            f"--engine transformers needs full attention in every layer, and this model ({config.model_type}) has "
            f"{less}, with rows of up to {longest_row} tokens: sample with --engine vllm or vllm-server"
            + (", or give the environment a shorter max_context_tokens" if "window" in less else "")
        )
