"""Models and adapters: which ones they are, and one in the other's weights."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path

import torch

from llm_utils.records.earlier_runs import base_of_adapters, stack_of_adapters
from llm_utils.recovery.checkpoint import save_model
from llm_utils.setup.foreign import read_object
from llm_utils.setup.loading import load_policy, merge_adapters
from real_model_parts.questions import hash_of_files

ADAPTERS = Path(__file__).resolve().parents[1] / "adapters"
SCALING = ("alpha_pattern", "fan_in_fan_out", "layer_replication", "rank_pattern", "use_dora", "use_rslora")


def deleted(adapters: Path) -> dict[str, str] | None:
    """What deleted.json says of adapters that the repository doesn't carry any more; None for others."""
    if (adapters / "adapter_model.safetensors").is_file() or not adapters.is_relative_to(ADAPTERS):
        return None
    return json.loads((ADAPTERS / "deleted.json").read_text()).get(str(adapters.relative_to(ADAPTERS)))


def require_weights(adapters: Path) -> None:
    """SystemExit for deleted adapters, with the commands that train them again."""
    if gone := deleted(adapters):
        commands = [one["command"] for one in (deleted(ADAPTERS / gone["start"]), gone) if one]
        said = "; ADAPTERS is checkpoint/policy of the run of the first one" * (len(commands) > 1)
        raise SystemExit(
            f"--adapters {adapters} are not in the repository any more. --part report does without them. These "
            f"commands train them again, with a --name of your own{said}:\n\n" + "\n".join(commands)
        )


def hash_of_adapters(adapters: Path) -> str:
    """Of their weights, and of the settings by which they are added, where those aren't a learner's."""
    if gone := deleted(adapters):
        return gone["hash"]
    file = adapters / "adapter_model.safetensors"
    if not file.is_file():
        raise SystemExit(f"--adapters {adapters}: there is no {file.name}; give a folder that peft saved")
    found = hash_of_files([file])
    try:
        config = read_object(adapters / "adapter_config.json")
    except FileNotFoundError:  # what adds them says so
        return found
    except ValueError as error:
        raise SystemExit(f"--adapters {adapters}: {error}") from None
    settings = {name: config[name] for name in SCALING if config.get(name)}
    rank = config.get("r")
    if config.get("lora_alpha") != (2 * rank if type(rank) is int else None):  # what learners write
        settings |= {name: config.get(name) for name in ("r", "lora_alpha")}
    if not settings:
        return found
    return hashlib.sha256((found + json.dumps(settings, sort_keys=True)).encode()).hexdigest()[:16]


def hash_below(adapters: Path) -> str | None:
    """Of the adapters that these go on top of, where that is known: their config names those, or the model that they
    were added to here (`merge`, whose facts stand beside it)."""
    if gone := deleted(adapters):
        return hash_of_adapters(ADAPTERS / gone["start"]) if gone["start"] else None
    stack = stack_of_adapters(str(adapters))
    if len(stack) > 1:
        return hash_of_adapters(Path(stack[-2]))
    base = Path(base_of_adapters(str(adapters)) or "")
    with suppress(OSError, ValueError):
        facts = json.loads(base.parent.joinpath(f"{base.name}.json").read_text())
        if isinstance(facts, list) and len(facts) == 4:
            return facts[3]  # of those that were added last
    return None


def hash_of_model(model: str) -> str:
    """Of a folder's weights; a name on a hub stands for itself."""
    weights = list(Path(model).glob("*.safetensors"))
    return hash_of_files(weights) if weights else model


def merge(model: str, adapters: Path, folder: Path) -> None:
    """Write the model with LoRA adapters added to its weights, as learners begin with it."""
    save_model(merge_adapters(load_policy(model, torch.device("cpu"), whole=True), str(adapters)), folder, model)
