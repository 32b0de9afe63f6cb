"""Tiny checkpoints of models that read images, too, saved as their makers save them: random weights."""

from pathlib import Path
from typing import Any

import torch
import transformers

VISION = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


def save(family: str, folder: Path, vocab_size: int = 120) -> Any:
    """Save a checkpoint of a family of `FAMILIES`, and return the whole model."""
    text = {"vocab_size": vocab_size, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512}
    text |= {"initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    model = FAMILIES[family](text).float().eval()
    model.save_pretrained(folder)
    return model


def _qwen3_5(text: dict[str, Any]) -> Any:
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    heads |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    config = transformers.Qwen3_5Config(
        text_config=text | heads | {"layer_types": ["linear_attention", "full_attention"]},
        vision_config=vision | {"num_position_embeddings": 16},
        **dict(zip(["image_token_id", "video_token_id"], range(116, 118), strict=True)),
        **dict(zip(["vision_start_token_id", "vision_end_token_id"], range(118, 120), strict=True)),
    )
    return transformers.Qwen3_5ForConditionalGeneration(config)


def _gemma3(text: dict[str, Any]) -> Any:
    layers = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    config = transformers.Gemma3Config(
        text_config=text | layers | {"query_pre_attn_scalar": 32},
        vision_config=VISION | {"patch_size": 14, "image_size": 28},
        mm_tokens_per_image=4, image_token_index=117, boi_token_index=118, eoi_token_index=119,
    )  # fmt: skip
    return transformers.Gemma3ForConditionalGeneration(config)


def _gemma4(text: dict[str, Any]) -> Any:
    layers = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 64}
    layers |= {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": text["vocab_size"]}
    vision = {"num_key_value_heads": 2, "head_dim": 32, "global_head_dim": 32, "position_embedding_size": 64}
    config = transformers.Gemma4Config(
        text_config=text | layers | {"num_kv_shared_layers": 0}, vision_config=VISION | vision | {"patch_size": 16},
        audio_config=None, image_token_id=117, boi_token_id=118, eoi_token_id=119,
    )  # fmt: skip
    return transformers.Gemma4ForConditionalGeneration(config)


def _mistral3(text: dict[str, Any]) -> Any:
    vision = {"model_type": "pixtral", "head_dim": 32, "patch_size": 14, "image_size": 28}
    config = transformers.Mistral3Config(
        text_config=text | {"model_type": "mistral", "sliding_window": None}, vision_config=VISION | vision,
        image_token_index=119, spatial_merge_size=1, vision_feature_layer=-1,
    )  # fmt: skip
    return transformers.Mistral3ForConditionalGeneration(config)


FAMILIES = {"Qwen3.5": _qwen3_5, "Gemma 3": _gemma3, "Gemma 4": _gemma4, "Mistral 3": _mistral3}
