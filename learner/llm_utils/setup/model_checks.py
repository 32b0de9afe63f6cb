"""Checks of a model before any work: does it fit its tokenizer, its environment and its engine?"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel


def attends_to_less(config: Any, longest_row: float) -> str:
    """Describe the attention of a layer that does not attend to all of a row of `longest_row` tokens, or positions that
    do not follow the given ones. Return "" if there is none.

    Only with "" does a row have the same logits alone, in the slot cache, and in a tree of rows with shared prefixes.
    """
    config = config.get_text_config()
    if config.model_type in ("bloom", "mpt") or getattr(config, "alibi", False):
        return "ALiBi, which uses columns as positions"
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


def check_attention(config: Any, longest_row: float) -> None:
    """Raise SystemExit unless every layer attends to all of a row. The transformers engine samples correctly only
    then."""
    if limited_attention := attends_to_less(config, longest_row):
        raise SystemExit(
            f"--engine transformers needs full attention in every layer, but this model ({config.model_type}) has "
            f"{limited_attention}, and rows have up to {longest_row} tokens. Use --engine vllm or vllm-server"
            + (", or a shorter max_context_tokens of the environment" if "window" in limited_attention else "")
        )
