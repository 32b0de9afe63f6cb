"""Models for sampling and training: their weights, dtype, adapters, and how their activations are kept."""

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

# Some processors end a process that multiplies in bf16 with an illegal instruction: a child process tries it.
TRIAL = """
import torch
torch.set_num_threads(1)
x = torch.randn(64, 64, dtype=torch.bfloat16)
layer = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
(layer(x @ x).float().log_softmax(-1)[:, 0]).sum().backward()
assert torch.isfinite(layer.weight.grad).all()
"""


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of the weights that `--dtype auto|float32|bfloat16` means on this device.

    A CPU computes in float32 unless asked, a GPU in bf16. SystemExit where bf16 is asked of a CPU that can't.
    """
    if name == "float32" or (name == "auto" and device.type == "cpu"):
        return torch.float32
    if device.type == "cpu":
        why = trial_failure(TRIAL)
        if why:
            raise SystemExit(f"--dtype bfloat16: a small product in bf16 failed on this processor ({why}); use float32")
    return torch.bfloat16


@cache
def trial_failure(code: str) -> str:
    """Run Python code in a child process. Returns why it failed, "" where it didn't."""
    trial = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if trial.returncode == 0:
        return ""
    return (trial.stderr.strip().splitlines() or [f"it ended with status {trial.returncode}"])[-1]


@contextmanager
def without_bars() -> Iterator[None]:
    """Inside, transformers draws no bars of its own, which would cut into ours, while it reads and writes weights.
    Downloads keep theirs."""
    previous = logging.set_tqdm_hook(lambda factory, args, kwargs: logging.EmptyTqdm(*args, **kwargs))
    try:
        yield
    finally:
        logging.set_tqdm_hook(previous)


@contextmanager
def sizes_told() -> Iterator[None]:
    """Inside, weights of other sizes than the config's are a ValueError that says so, without transformers' table."""
    log = logging.get_logger("transformers.modeling_utils")

    def no_table(record: Any) -> bool:
        return "MISMATCH" not in record.getMessage()

    log.addFilter(no_table)
    try:
        yield
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError("the sizes of its weights are not those of its config.json") from error
    finally:
        log.removeFilter(no_table)


def read_config(source: str | Path) -> Any:
    """The config of a model. SystemExit where there is none (the name is wrong, or the hub can't be reached), where it
    is damaged, and for one that only code of its own or of a hub could make: that is never run."""
    found: dict[str, Any] = {}
    try:
        foreign.check_files(Path(source))
        if not Path(source).is_dir() and find_adapter_config_file(str(source)) is not None:
            raise foreign.RefusedError("it has adapters beside its weights, which are not loaded with it")
        found, _ = PreTrainedConfig.get_config_dict(source)
        foreign.check_settings(found, "config.json")
        return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, foreign.RefusedError) as error:
        raise SystemExit(f"--model {source}: {' '.join(str(error).split())}") from None
    except Exception as error:
        if isinstance(error, ValueError) and found.get("model_type") not in CONFIG_MAPPING:
            why = "transformers doesn't know this kind of model, and code that comes with a model is never run"
            raise SystemExit(f"--model {source}: {why} ({foreign.said(error)})") from error
        raise SystemExit(f"--model {source}: its config.json can't be used ({foreign.said(error)})") from error


def load_policy(
    source: str | Path, device: torch.device, args: Any = None, resumed: Path | None = None, whole: bool = False,
    dtype: torch.dtype | None = None, float32_head: bool = False,
) -> Any:  # fmt: skip
    """A causal language model for sampling and training, without dropout.

    With `args.lora_rank` only adapters are trained; `args.gradient_checkpointing` computes activations again. `resumed`
    is the policy of a checkpoint: weights, or adapters; SystemExit where they are not of the model in `source`. It is
    split over the processes unless `whole` is asked for. `dtype` None is what `choose_dtype` calls auto. With
    `float32_head` logits are computed in float32.
    """
    if device.type == "cuda":  # cuDNN plans attention anew for every length, of every token (docs/benchmarks.md)
        torch.backends.cuda.enable_cudnn_sdp(False)
    dtype = dtype or choose_dtype("auto", device)
    lora_rank = args.lora_rank if args is not None else 0
    try:
        weights = resumed if resumed is not None and not lora_rank else source
        config = read_config(source)
        with without_bars(), sizes_told():
            model = AutoModelForCausalLM.from_pretrained(weights, config=config, dtype=dtype, trust_remote_code=False)
        for weight in model.parameters():  # out of the file, where they lie elsewhere in a checkpoint's than in the
            weight.data = weight.data.clone()  # source's: products round by where in memory a row begins
        if lora_rank:
            model = with_adapters(model, lora_rank, resumed)
    except Exception as error:
        if resumed is None and isinstance(error, OSError):
            raise SystemExit(f"--model {source}: {' '.join(str(error).split())}") from error
        if resumed is None:
            raise SystemExit(f"--model {source} can't be loaded ({foreign.said(error)})") from error
        why = f"is damaged, or doesn't fit this model, {source}: {error}"
        raise SystemExit(f"--resume: the checkpoint in {resumed} {why}") from error
    if float32_head:
        use_float32_head(model)
    if args is not None and args.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    return model.eval().to(device) if whole else distributed.shard(model.eval(), device)


def with_adapters(model: PreTrainedModel, rank: int, folder: Path | None = None) -> Any:
    """LoRA adapters on every linear layer but the head, in the model's dtype: those in `folder`, or new ones.

    Float32 adapters would have all activations of a bf16 model cast for products that no bf16 unit computes.
    """
    try:
        import peft
    except ImportError as error:
        raise SystemExit("LoRA adapters need peft: pip install 'agent-r1[lora]'") from error
    if folder is not None:
        return peft.PeftModel.from_pretrained(model, folder, is_trainable=True, autocast_adapter_dtype=False)
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


def merge_adapters(model: PreTrainedModel, folder: str) -> Any:
    """The model with the LoRA adapters in `folder` added to its weights. SystemExit where they do not fit."""
    if not (Path(folder) / "adapter_config.json").is_file():
        own = Path(folder, *CHECKPOINT)  # of a run
        meant = own if (own / "adapter_config.json").is_file() else "a folder that peft saved"
        raise SystemExit(f"--adapter {folder}: there is no adapter_config.json; give {meant}")
    try:
        foreign.check_adapters(Path(folder), [name for name, _ in model.named_modules()])
        adapted = with_adapters(model, 0, Path(folder))
        check_loaded(adapted, Path(folder) / "adapter_model.safetensors")
        merged = adapted.merge_and_unload().eval()
        check_finite(merged)
        return merged
    except foreign.RefusedError as error:
        raise SystemExit(f"--adapter {folder}: {error}") from None
    except (SafetensorError, KeyError, TypeError) as error:  # a part of a file, a config that is none
        raise SystemExit(f"--adapter {folder}: its weights can't be read ({foreign.said(error)})") from error
    except (RuntimeError, ValueError) as error:
        raise SystemExit(f"--adapter {folder} doesn't fit --model: {foreign.said(error)}") from error
    except Exception as error:
        raise SystemExit(f"--adapter {folder} can't be used ({foreign.said(error)})") from error


def check_loaded(adapted: Any, file: Path) -> None:
    """ValueError where peft passed over weights in the file, or left some of the adapters as new ones are."""
    import peft

    there = load_file(file)
    wanted = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False).keys()
    if odd := [*sorted(wanted - there.keys()), *sorted(name for name in there.keys() - wanted if "lora_" in name)]:
        raise ValueError(f"{len(odd)} of their weights are on one side only, such as {odd[0]:.100}")
    for name, weight in there.items():
        if not weight.is_floating_point() or not weight.isfinite().all():
            raise ValueError(f"{name:.100} has no finite numbers of a float type")


def check_finite(model: Any) -> None:
    """ValueError where weights aren't finite: those of a file are, and yet products and sums of them may not be."""
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise ValueError(f"with them, {name:.100} isn't finite")


class Float32Linear(nn.Linear):
    """Weights of any dtype, products in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(x.float(), self.weight.float(), bias)


def use_float32_head(model: Any) -> None:
    """From now on the output embedding computes in float32; its weights, which the input embedding may share, stay.

    bf16 logits are rounded to 1 part in 256: a sampler and a trainer that add in another order differ by that.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise SystemExit(f"--float32-head needs a linear output embedding, this model's is a {type(head).__name__}")
    head.__class__ = Float32Linear


def enable_gradient_checkpointing(model: Any) -> None:
    """Have the layers' activations computed again in the backward pass, in a policy or a critic's backbone.

    It works in training mode only, into which `policy_forward` puts these layers; every rate of dropout becomes 0, in
    the config too, so that training mode changes nothing else.
    """
    model.enable_input_require_grads()  # with frozen weights the first layer would have no input to go back to
    enable = getattr(model, "activation_checkpointing_enable", None)  # its name from transformers 5.23 on
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for owner in (module, getattr(module, "config", None)):  # some read the config's rates as they compute
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(owner, name, 0.0)
