"""A small model and its tokenizer, made for an environment: the initial state of the shipped policies."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import GraniteConfig, GraniteForCausalLM, PreTrainedTokenizerFast

from llm_utils.imitation.demonstrations import Demonstration


def make_tokenizer(words: Sequence[str], rows: Sequence[Demonstration]) -> PreTrainedTokenizerFast:
    """Make a tokenizer that keeps the environment's words and recurring phrases whole, and spells other text in bytes.

    Text of the demonstrations `rows` (in byte tokens) is cut at `words` (and into digits, if it has those). The pieces
    between them recur in every episode, and each becomes one token. Nothing is merged (`ignore_merges`): a piece is in
    the vocabulary, or it is spelled.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    from agent_r1.text.tokenizers import added_tokens, load_tokenizer

    byte_tokenizer: Any = load_tokenizer(None)
    words = sorted(words, key=lambda word: (-len(word), word))
    lower = "|".join(re.escape(word) for word in words if not re.fullmatch("[A-Z][a-z]+|[0-9]", word))
    # A lower-case word includes the space after it, so that a word and the name after it are neighbours.
    patterns = ["[A-Z][a-z]+", *([rf"\b(?:{lower})\b ?"] if lower else []), *(["[0-9]"] if "0" in words else [])]
    split = pre_tokenizers.Split(Regex("|".join(patterns)), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    pieces: Counter[str] = Counter()
    specials = re.compile("|".join(map(re.escape, added_tokens(byte_tokenizer))))
    for row in rows:
        cuts = np.flatnonzero(np.diff(row.action_mask)) + 1  # a policy's text is encoded separately
        for part in np.split(row.tokens, cuts):
            for text in specials.split(byte_tokenizer.decode(part.tolist())):
                pieces.update(piece for piece, _ in pre_tokenizer.pre_tokenize_str(text))
    pieces.update({piece: 10 for word in words for piece, _ in pre_tokenizer.pre_tokenize_str(word)})
    vocabulary = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary += [p for p, n in sorted(pieces.items(), key=lambda x: (-x[1], x[0])) if n >= 10 and len(p) > 1]
    bpe = models.BPE({piece: i for i, piece in enumerate(vocabulary)}, [], ignore_merges=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in added_tokens(byte_tokenizer)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = byte_tokenizer.chat_template
    fast.model_max_length = 32_768
    return fast


def make_model(
    tokenizer: PreTrainedTokenizerFast, hidden_size: int, num_layers: int, intermediate_size: int
) -> GraniteForCausalLM:
    """Make a small Granite with random weights (torch's generator), near a copying circuit.

    Granite is a plain Llama with biases. AutoTokenizer does not change the tokenizer in such a folder; in a Qwen2 or
    Llama folder it would replace it with the family's own.
    """
    config = GraniteConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        attention_bias=True,
        attention_multiplier=(hidden_size // 4) ** -0.5,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = GraniteForCausalLM(config)
    initialize(model)
    return model


@torch.no_grad()
def initialize(model: GraniteForCausalLM, scale: float = 0.2) -> None:
    """Start attention close to a copying circuit. With usual weights a small model needs far more steps to learn one.

    Queries equal keys and outputs invert values, so that tokens attend to equal tokens and copy them (mimetic
    initialization, arXiv 2305.09828). The first heads of the first two layers form an induction head (arXiv
    2209.11895): one attends to the previous token, the next finds an earlier occurrence of the present token and copies
    its successor.
    """
    width, size = model.config.hidden_size, model.config.hidden_size // model.config.num_attention_heads
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.1)
    for layer in model.model.layers:
        attention = layer.self_attn
        for projection in (attention.q_proj, attention.v_proj):
            torch.nn.init.orthogonal_(projection.weight)
        attention.k_proj.weight.copy_(attention.q_proj.weight)
        attention.o_proj.weight.copy_(scale * attention.v_proj.weight.T)
    previous, induction = (layer.self_attn for layer in model.model.layers[:2])
    previous.q_proj.weight[:size], previous.k_proj.weight[:size] = 0, 0
    for i, strength in enumerate((6.0, 5.0, 4.0)):  # biases that align at a distance of one token
        angle = model.model.rotary_emb.inv_freq[i]
        previous.k_proj.bias[i] = strength
        previous.q_proj.bias[i] = strength * torch.cos(angle)
        previous.q_proj.bias[i + size // 2] = -strength * torch.sin(angle)
    written = torch.nn.init.orthogonal_(torch.empty(width, size))
    previous.o_proj.weight[:, :size] = scale * written
    induction.q_proj.weight[:size] = 2 * previous.v_proj.weight[:size]
    induction.k_proj.weight[:size] = 2 * written.T
