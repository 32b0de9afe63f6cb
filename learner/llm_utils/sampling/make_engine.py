"""The choice of engine for `--engine` and `--api`: the only module that knows all engines."""

from __future__ import annotations

import math
from typing import Any

import torch

from llm_utils.sampling.engine import Engine
from llm_utils.sampling.transformers_engine import TransformersEngine
from llm_utils.setup.model_checks import check_layers


def make_engine(
    args: Any, source: str, vocab_size: int, model: Any, tokenizer: str | None, longest_row: float = math.inf,
    entropies: bool = False, top_logprobs: int = 0,
) -> Engine:  # fmt: skip
    """Return the engine that `--engine` names, with `--num-envs` slots and rows of at most `longest_row` tokens. The
    transformers engine samples from `model`. `entropies` and `top_logprobs` add these figures to spans.

    vLLM is imported here and nowhere else. Raise SystemExit if engine and model do not fit.
    """
    sampling = {"temperature": args.temperature, "top_p": 1.0 if args.top_p is None else args.top_p}
    sampling |= {"entropies": entropies, "top_logprobs": top_logprobs}
    if args.engine == "transformers":
        check_layers(model.config, longest_row)
        return TransformersEngine(model, args.num_envs, vocab_size, **sampling, longest_row=longest_row)
    if args.engine == "vllm":
        from llm_utils.sampling.vllm_engine import VLLMEngine

        if torch.cuda.is_available() and not args.cuda:
            raise SystemExit("--engine vllm would use the GPU in spite of --no-cuda")
        longest = None if longest_row == math.inf else int(longest_row)
        return VLLMEngine(source, args.num_envs, vocab_size, max_model_len=longest, **sampling)
    try:
        from llm_utils.sampling.vllm_client import VLLMClient
    except ModuleNotFoundError as error:
        raise SystemExit(f"--engine vllm-server needs {error.name}: pip install 'agent-r1[http]'") from error

    return VLLMClient(args.vllm_url, source, args.num_envs, vocab_size, tokenizer=tokenizer, **sampling)


def check_updates(engine: str, config: Any, device: torch.device) -> None:
    """Raise SystemExit if vLLM would keep sampling from old weights, which it does not report.

    vLLM 0.32 copies some weights around its own loader, or packs them for the processor once.
    """
    config = config.get_text_config()
    experts = any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    cause = ""
    if config.model_type == "gpt_oss":
        cause = "of gpt-oss"
    elif experts and engine == "vllm" and device.type == "cpu":
        cause = "on a CPU"
    if cause and engine != "transformers":
        raise SystemExit(f"--engine {engine}: vLLM 0.32 does not update the experts {cause}. Use --engine transformers")


def make_chat_engine(args: Any, envs: Any) -> Any:
    """Return the engine that requests the turns of the episodes in `envs` from the chat API of `--api`. It is for
    evaluations only."""
    try:
        from llm_utils.sampling.chat_engine import ChatEngine
    except ModuleNotFoundError as error:
        raise SystemExit(f"--api needs {error.name}: pip install 'agent-r1[http]'") from error

    return ChatEngine(args.api, args.api_model, envs, args.temperature, args.top_p)
