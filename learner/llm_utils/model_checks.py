"""What is checked about a model before any work is done: does it fit its tokenizer, environment and engine?"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from llm_utils.slots import attends_to_less


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
