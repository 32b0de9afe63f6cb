"""Where models and tokenizers come from, and what is checked about them before any work is done."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import agent_r1
from llm_utils import distributed


class EngineDied(RuntimeError):
    """What samples is gone: a server that was stopped, an engine that crashed. The message says which and why."""


def model_source(name: str, env_id: str) -> str:
    """The Hugging Face name or the folder of the weights that `--model` means.

    "tiny" is the policy shipped for the environment; a run's folder stands for its saved model, or its checkpoint.
    """
    folder = agent_r1.tiny_policy(env_id) if name == "tiny" else name
    if os.path.isdir(folder):
        for candidate in (folder, os.path.join(folder, "model"), os.path.join(folder, "checkpoint", "policy")):
            if os.path.isfile(os.path.join(candidate, "config.json")):
                return candidate
            if os.path.isfile(os.path.join(candidate, "adapter_config.json")):
                raise SystemExit(
                    f"--model {name}: {candidate} holds only adapters. Go on with that run with --resume, give its "
                    "model/ (--save-model), or merge the adapters with peft's merge_and_unload()"
                )
        raise SystemExit(f"--model {name}: the folder holds no config.json; give one that save_pretrained() made")
    if os.path.isabs(folder) or folder.startswith(".") or folder.count("/") > 1:
        raise SystemExit(f"--model {name}: there is no such folder")
    return folder


def arguments_of_run(source: str) -> dict[str, str | None]:
    """The arguments of the run to which a model folder (or the run's folder itself) belongs; {} for other folders."""
    for folder in (Path(source), *Path(source).parents[:2]):
        if (folder / "summary.json").is_file():
            return json.loads((folder / "summary.json").read_text()).get("args", {})
    return {}


def tokenizer_source(name: str | None, source: str, env_id: str) -> str | None:
    """What the environment gets as its tokenizer: None for "byte", the name given, or else the model's own."""
    if name == "byte":
        return None
    if name is None and os.path.isdir(source) and not any(Path(source).glob("tokenizer*.json")):
        run = arguments_of_run(source)  # a checkpoint holds no tokenizer
        if not run:
            raise SystemExit(f"the folder {source} holds no tokenizer; name one with --tokenizer")
        return tokenizer_source(run["tokenizer"], model_source(str(run["model"]), env_id), env_id)
    return name or source


def check_vocabulary(model: PreTrainedModel, vocab_size: int) -> None:
    """A tokenizer may be shorter than the embedding (the rows beyond it are never sampled), but not longer."""
    rows = model.get_input_embeddings().num_embeddings
    if vocab_size > rows:
        raise SystemExit(
            f"the tokenizer has {vocab_size} tokens, the model's embedding only {rows} rows: they don't fit. "
            "Give the model's own tokenizer, or resize the embedding and train it first"
        )


def load_policy(
    source: str | Path, device: torch.device, args: Any = None, resumed: Path | None = None, whole: bool = False
) -> Any:
    """A causal language model for sampling and training: no dropout; float32 on a CPU, where bf16 may be an illegal
    instruction, and bf16 elsewhere.

    With `args.lora_rank` only adapters are trained. `resumed` is the policy of a checkpoint: weights, or adapters;
    SystemExit where they are not of the model in `source`. It is split over the processes unless `whole` is asked for.
    """
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    lora_rank = args.lora_rank if args is not None else 0
    try:
        weights = resumed if resumed is not None and not lora_rank else source
        config = AutoConfig.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(weights, config=config, dtype=dtype)
        for weight in model.parameters():  # out of the file, where they lie elsewhere in a checkpoint's than in the
            weight.data = weight.data.clone()  # source's: products round by where in memory a row begins
        if lora_rank:
            model = _with_adapters(model, lora_rank, resumed)
    except RuntimeError as error:
        if resumed is None:
            raise
        raise SystemExit(f"--resume: the checkpoint in {resumed} doesn't fit this model, {source}: {error}") from error
    if args is not None and args.gradient_checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        _without_dropout(model)  # `policy_forward` puts such a model into training mode
    return model.eval().to(device) if whole else distributed.shard(model.eval(), device)


def _with_adapters(model: Any, rank: int, folder: Path | None) -> Any:
    """LoRA adapters on every linear layer but the head: those in `folder`, or new ones."""
    try:
        import peft
    except ImportError as error:
        raise SystemExit("--lora-rank needs peft: pip install 'agent-r1[lora]'") from error
    if folder is not None:
        return peft.PeftModel.from_pretrained(model, folder, is_trainable=True)
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def _without_dropout(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0


def vllm_engine(args: Any, source: str, vocab_size: int) -> Any:
    """The engine of `--engine vllm` or `--engine vllm-server`."""
    if args.engine == "vllm":
        from llm_utils.vllm_engine import VLLMEngine

        return VLLMEngine(source, args.num_envs, vocab_size, args.temperature, args.top_p)
    from llm_utils.vllm_server import VLLMServerEngine

    tokenizer = tokenizer_source(args.tokenizer, source, args.env_id)
    return VLLMServerEngine(args.vllm_url, source, args.num_envs, vocab_size, args.temperature, args.top_p, tokenizer)
