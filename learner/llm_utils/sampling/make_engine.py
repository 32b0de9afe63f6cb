"""From `--engine` or `--api` to what samples: the one place that knows all engines."""

from __future__ import annotations

import math
from typing import Any

from llm_utils.sampling.engine import Engine
from llm_utils.sampling.transformers_engine import TransformersEngine
from llm_utils.setup.model_checks import check_attention


def make_engine(
    args: Any, source: str, vocab_size: int, model: Any, tokenizer: str | None, longest_row: float = math.inf
) -> Engine:
    """The engine that `--engine` names, with `--num-envs` slots. `model` is what the transformers engine samples from,
    rows of at most `longest_row` tokens.

    vLLM is imported here and nowhere else. SystemExit where an engine and the model don't fit.
    """
    sampling = {"temperature": args.temperature, "top_p": 1.0 if args.top_p is None else args.top_p}
    if args.engine == "transformers":
        check_attention(model.config, longest_row)
        return TransformersEngine(model, args.num_envs, vocab_size, **sampling, longest_row=longest_row)
    if args.engine == "vllm":
        from llm_utils.sampling.vllm_engine import VLLMEngine

        return VLLMEngine(source, args.num_envs, vocab_size, **sampling)
    try:
        from llm_utils.sampling.vllm_client import VLLMClient
    except ModuleNotFoundError as error:
        raise SystemExit(f"--engine vllm-server needs {error.name}: pip install 'agent-r1[http]'") from error

    return VLLMClient(args.vllm_url, source, args.num_envs, vocab_size, tokenizer=tokenizer, **sampling)


def make_chat_engine(args: Any, envs: Any) -> Any:
    """What asks the chat API of `--api` for the turns of the episodes in `envs`: an engine for evaluations only."""
    try:
        from llm_utils.sampling.chat_engine import ChatEngine
    except ModuleNotFoundError as error:
        raise SystemExit(f"--api needs {error.name}: pip install 'agent-r1[http]'") from error

    return ChatEngine(args.api, args.api_model, envs, args.temperature, args.top_p)
