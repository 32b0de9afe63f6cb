"""From `--engine` to what samples: the one place that knows all engines."""

from __future__ import annotations

from typing import Any

from llm_utils.engine import Engine
from llm_utils.transformers_engine import TransformersEngine


def make_engine(args: Any, source: str, vocab_size: int, model: Any, tokenizer: str | None) -> Engine:
    """The engine that `--engine` names, with `--num-envs` slots. `model` is what the transformers engine samples from.

    vLLM is imported here and nowhere else.
    """
    sampling = {"temperature": args.temperature, "top_p": args.top_p}
    if args.engine == "transformers":
        return TransformersEngine(model, args.num_envs, vocab_size, **sampling)
    if args.engine == "vllm":
        from llm_utils.vllm_engine import VLLMEngine

        return VLLMEngine(source, args.num_envs, vocab_size, **sampling)
    from llm_utils.vllm_client import VLLMClient

    return VLLMClient(args.vllm_url, source, args.num_envs, vocab_size, tokenizer=tokenizer, **sampling)
