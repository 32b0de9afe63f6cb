"""Loading of models for sampling and training: weights, dtype, adapters, and gradient checkpointing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import find_adapter_config_file, logging

from llm_utils import distributed
from llm_utils.records.earlier_runs import CHECKPOINT
from llm_utils.setup import foreign
from llm_utils.training import cudnn_attention
from llm_utils.training.compiled import compile_training

# On some processors a bf16 product kills the process with an illegal instruction, so a child process tries one.
TRIAL = """
import torch
torch.set_num_threads(1)
x = torch.randn(64, 64, dtype=torch.bfloat16)
layer = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
(layer(x @ x).float().log_softmax(-1)[:, 0]).sum().backward()
assert torch.isfinite(layer.weight.grad).all()
"""


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of the weights that `--dtype auto|float32|bfloat16` means on this device.

    `auto` is float32 on a CPU and bfloat16 on a GPU. Raise SystemExit if bfloat16 is requested on a CPU that cannot
    compute with it.
    """
    if name == "float32" or (name == "auto" and device.type == "cpu"):
        return torch.float32
    if device.type == "cpu":
        failure = trial_failure(TRIAL)
        if failure:
            cause = f"a small product in bf16 failed on this processor ({failure})"
            raise SystemExit(f"--dtype bfloat16: {cause}; use float32")
    return torch.bfloat16


@cache
def trial_failure(code: str) -> str:
    """Run Python code in a child process. Return the cause if it failed, else ""."""
    trial = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if trial.returncode == 0:
        return ""
    return (trial.stderr.strip().splitlines() or [f"it ended with status {trial.returncode}"])[-1]


@contextmanager
def without_bars() -> Iterator[None]:
    """Silence transformers' progress bars while it reads and writes weights; they would break ours. Downloads keep
    theirs."""
    previous = logging.set_tqdm_hook(lambda factory, args, kwargs: logging.EmptyTqdm(*args, **kwargs))
    try:
        yield
    finally:
        logging.set_tqdm_hook(previous)


@contextmanager
def without_report_of_unused_weights() -> Iterator[None]:
    """Silence transformers' report that a model without a head does not use the file's head. Reports of missing weights
    stay."""
    log = logging.get_logger("transformers.modeling_utils")

    def counts(record: Any) -> bool:
        text = record.getMessage()
        return "LOAD REPORT" not in text or any(status in text for status in ("MISSING", "MISMATCH", "CONVERSION"))

    log.addFilter(counts)
    try:
        yield
    finally:
        log.removeFilter(counts)


@contextmanager
def size_mismatch_as_value_error() -> Iterator[None]:
    """Raise a plain ValueError if the sizes of weights differ from the config's, and suppress transformers' table."""
    log = logging.get_logger("transformers.modeling_utils")

    def no_table(record: Any) -> bool:
        return "MISMATCH" not in record.getMessage()

    log.addFilter(no_table)
    try:
        yield
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError("its weights have other sizes than its config.json says") from error
    finally:
        log.removeFilter(no_table)


def read_config(source: str | Path) -> Any:
    """Read the config of a model. Raise SystemExit if there is none (wrong name, or the hub cannot be reached), if it
    is damaged, or if it needs the model's own code or code of a hub, which is never run."""
    config: dict[str, Any] = {}
    try:
        foreign.check_files(Path(source))
        if not Path(source).is_dir() and find_adapter_config_file(str(source)) is not None:
            raise foreign.RefusedError("it has adapters beside its weights, and these would not be loaded")
        config, _ = PreTrainedConfig.get_config_dict(source)
        foreign.check_settings(config, "config.json")
        found = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, foreign.RefusedError) as error:
        here = "" if Path(source).exists() else "there is no such folder here, and on the hub: "
        raise SystemExit(f"--model {source}: {here}{' '.join(str(error).split())}") from None
    except Exception as error:
        if isinstance(error, ValueError) and config.get("model_type") not in CONFIG_MAPPING:
            cause = "transformers does not know this model type, and code that comes with a model is never run"
            raise SystemExit(f"--model {source}: {cause} ({foreign.describe_error(error)})") from error
        cause = f"its config.json cannot be used ({foreign.describe_error(error)})"
        raise SystemExit(f"--model {source}: {cause}") from error
    if found.model_type == "mistral3":  # transformers registers Gemma 3 and 4 itself
        from transformers import Mistral3ForConditionalGeneration

        AutoModelForCausalLM.register(type(found), Mistral3ForConditionalGeneration, exist_ok=True)
    return found


def no_advice(record: Any) -> bool:
    """Return False for transformers' advice to install the package of a faster kernel."""
    return "is falling back to its reference PyTorch implementation" not in record.getMessage()


def load_policy(
    source: str | Path, device: torch.device, args: Any = None, resumed: Path | None = None, whole: bool = False,
    dtype: torch.dtype | None = None, float32_head: bool = False, compiled: bool = False,
) -> Any:  # fmt: skip
    """Load a causal language model for sampling and training, without dropout.

    With `args.lora_rank` only adapters are trained. With `args.gradient_checkpointing` "on" activations are recomputed
    in the backward pass. `resumed` is the policy in a checkpoint: weights, or adapters. Raise SystemExit if they do not
    belong to the model in `source`. The model is sharded over the processes unless `whole` is true. `dtype` None is
    what `choose_dtype` calls auto. With `float32_head` logits are computed in float32. With `compiled` training passes
    are compiled, unless `whole` is true.
    """
    if device.type == "cuda":  # cuDNN plans attention again for every length, so for every token (docs/performance.md)
        torch.backends.cuda.enable_cudnn_sdp(False)
    else:  # on a CPU, transformers advises to install kernels for GPUs
        logging.get_logger("transformers.integrations.hub_kernels").addFilter(no_advice)
    cudnn_attention.register(device)  # it turns cuDNN on for long rows in training
    dtype = dtype or choose_dtype("auto", device)
    lora_rank = args.lora_rank if args is not None else 0
    try:
        weights = resumed if resumed is not None and not lora_rank else source
        config = read_config(source)
        with without_bars(), size_mismatch_as_value_error():
            model = AutoModelForCausalLM.from_pretrained(weights, config=config, dtype=dtype, trust_remote_code=False)
        # Copy weights out of the mapped file. Offsets differ between a checkpoint's file and the source's, and the
        # rounding of products depends on the memory address at which a row begins.
        for weight in model.parameters():
            weight.data = weight.data.clone()
        if lora_rank:
            model = with_adapters(model, lora_rank, resumed)
    except Exception as error:
        if resumed is None and isinstance(error, OSError):
            raise SystemExit(f"--model {source}: {' '.join(str(error).split())}") from error
        if resumed is None:
            raise SystemExit(f"--model {source} cannot be loaded ({foreign.describe_error(error)})") from error
        cause = f"is damaged, or does not fit this model, {source}: {error}"
        raise SystemExit(f"--resume: the checkpoint in {resumed} {cause}") from error
    use_configured_time_steps(model)
    if float32_head:
        use_float32_head(model)
    if args is not None and args.gradient_checkpointing == "on":
        enable_gradient_checkpointing(model)
    if whole:
        return model.eval().to(device)
    model = distributed.shard(model.eval(), device)
    if compiled:
        compile_training(model)
    return model


def with_adapters(model: PreTrainedModel, rank: int, folder: Path | None = None) -> Any:
    """Add LoRA adapters to every linear layer that peft takes, except the head, in the model's dtype: those in
    `folder`, or new ones.

    Float32 adapters would cast all activations of a bf16 model, and their products could not use bf16 units.
    """
    try:
        import peft

        from llm_utils.setup.lora import fuse_adapters
    except ImportError as error:
        raise SystemExit("LoRA adapters need peft: pip install 'agent-r1[lora]'") from error
    adapted: Any
    if folder is not None:
        adapted = peft.PeftModel.from_pretrained(model, folder, is_trainable=True, autocast_adapter_dtype=False)
    else:
        excluded = WITHOUT_ADAPTERS.get(model.config.get_text_config().model_type)
        config = peft.LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules="all-linear", exclude_modules=excluded, task_type="CAUSAL_LM"
        )
        adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    fuse_adapters(adapted)
    return adapted


def check_adapter_folder(folder: str) -> None:
    """Raise SystemExit if a folder holds no adapters."""
    if not (Path(folder) / "adapter_config.json").is_file():
        checkpoint = Path(folder, *CHECKPOINT)  # of a run
        remedy = checkpoint if (checkpoint / "adapter_config.json").is_file() else "a folder that peft saved"
        raise SystemExit(f"--adapter {folder}: there is no adapter_config.json; give {remedy}")


def merge_adapters(model: PreTrainedModel, folder: str) -> Any:
    """Return the model with the LoRA adapters in `folder` added to its weights. Raise SystemExit if they do not fit."""
    check_adapter_folder(folder)
    try:
        foreign.check_adapters(Path(folder), [name for name, _ in model.named_modules()])
        adapted = with_adapters(model, 0, Path(folder))
        check_loaded(adapted, Path(folder) / "adapter_model.safetensors")
        merged = adapted.merge_and_unload().eval()
        check_finite(merged)
        return merged
    except foreign.RefusedError as error:
        raise SystemExit(f"--adapter {folder}: {error}") from None
    except (SafetensorError, KeyError, TypeError) as error:  # an incomplete file, or an invalid config
        raise SystemExit(f"--adapter {folder}: its weights cannot be read ({foreign.describe_error(error)})") from error
    except (RuntimeError, ValueError) as error:
        raise SystemExit(f"--adapter {folder} does not fit --model: {foreign.describe_error(error)}") from error
    except Exception as error:
        raise SystemExit(f"--adapter {folder} cannot be used ({foreign.describe_error(error)})") from error


def check_loaded(adapted: Any, file: Path) -> None:
    """Raise ValueError if peft ignored weights in the file, or left some adapters at their initial values."""
    import peft

    stored = load_file(file)
    wanted = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False).keys()
    if missed := [
        *sorted(wanted - stored.keys()),
        *sorted(name for name in stored.keys() - wanted if "lora_" in name),
    ]:
        raise ValueError(
            f"{len(missed)} weights are only in the file or only in the model, such as {missed[0]:.100}"
        )
    for name, weight in stored.items():
        if not weight.is_floating_point() or not weight.isfinite().all():
            raise ValueError(f"{name:.100} does not hold finite floating-point numbers")


def check_finite(model: Any) -> None:
    """Raise ValueError if weights are not finite. Merged weights may overflow even if the weights in a file are
    finite."""
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise ValueError(f"with the adapters, {name:.100} is not finite")


# By family: linear layers that get no adapters. peft refuses those whose weights Mamba's kernels read past the adapter,
# and cannot add to the outputs of routers, which are tuples.
WITHOUT_ADAPTERS = {
    **dict.fromkeys(("falcon_h1", "nemotron_h"), ["out_proj"]), **dict.fromkeys(("llama4_text", "phimoe"), ["router"])
}  # fmt: skip


class Float32Linear(nn.Linear):
    """A linear layer with weights of any dtype and products in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(x.float(), self.weight.float(), bias)


def use_float32_head(model: Any) -> None:
    """Make the output embedding compute in float32 from now on. Its weights stay, as the input embedding may share
    them.

    bf16 logits are rounded to 1 part in 256. A sampler and a trainer that add in another order differ by that.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise SystemExit(f"--float32-head needs a linear output embedding, but this model's is a {type(head).__name__}")
    head.__class__ = Float32Linear


def use_configured_time_steps(model: Any) -> None:
    """Limit the time steps of Nemotron-H's Mamba layers as its config says.

    transformers 5.16 to 5.23 raises them to `time_step_min`, but not in the forward of one token, so sampler and
    trainer would differ. Neither the published code of these models nor vLLM raises them.
    """
    if model.config.model_type == "nemotron_h":
        for module in model.modules():
            if hasattr(module, "time_step_limit"):
                module.time_step_limit = tuple(model.config.time_step_limit)


def enable_gradient_checkpointing(model: Any) -> None:
    """Recompute the layers' activations in the backward pass of a policy or of a critic's backbone.

    This works in training mode only; `policy_forward` puts these layers into it. Every dropout rate becomes 0, in the
    config too, so training mode changes nothing else.
    """
    model.enable_input_require_grads()  # with frozen weights the first layer's input would need no gradient
    enable = getattr(model, "activation_checkpointing_enable", None)  # the name since transformers 5.23
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for owner in (module, getattr(module, "config", None)):  # some models read the config's rates in each forward
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(owner, name, 0.0)
