"""Checks of model and adapter configs made by strangers.

A config is data. If it names a program, or would take unlimited time or memory, it is rejected before a library reads
it. The error is one line that names the file and the cause.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from agent_r1_tools.text import PrintableMessage, printable

MAX_BYTES = 16 << 20
"""Maximum size of a config in bytes."""
MAX_NUMBER = 1 << 20
"""Largest number allowed in an adapter config."""
MAX_RANK = 1024
"""Largest rank that adapters may have, unless their weights in the file have a larger one."""
MAX_LAYERS = 2000
MAX_ITERATIONS = 100
PATTERN_SECONDS = 5.0
"""Time limit, in seconds, for matching the adapter config's patterns with all module names."""
KINDS = ("model_type", "rope_type", "type", "quant_method")
"""Fields that transformers prints unchanged when it does not know their value."""
NAMES, FLAG, PATTERN = (list, str), (bool,), (dict,)
TYPES: dict[str, tuple[type, ...]] = {
    "target_modules": NAMES, "exclude_modules": NAMES, "modules_to_save": NAMES, "layers_pattern": NAMES,
    "target_parameters": NAMES, "layers_to_transform": (list, int), "trainable_token_indices": (list, dict),
    "rank_pattern": PATTERN, "alpha_pattern": PATTERN, "loftq_config": (dict,), "init_lora_weights": (bool, str),
    "use_rslora": FLAG, "use_dora": FLAG, "fan_in_fan_out": FLAG, "lora_bias": FLAG, "lora_dropout": (float, int),
    "bias": (str,), "task_type": (str,), "base_model_name_or_path": (str,),
}  # fmt: skip
"""Allowed types of the adapter config's fields, besides null. A list that may be a string holds strings."""
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")

# Runs in a child process: Python cannot stop a match that never ends. It prints each key before matching.
MATCH = """
import json, re, sys
forms, names = json.load(sys.stdin)
for key, patterns in forms.items():
    print(key, flush=True)
    for name in names:
        for pattern in patterns:
            re.match(pattern, name)
"""


class RefusedError(PrintableMessage, ValueError):
    """A config that is rejected. The message is one `printable` line with the cause, as it may quote a stranger's
    file."""


def read_object(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Read the JSON object in a file. Raise RefusedError if it holds none, OSError if there is no file."""
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise RefusedError(f"{path} is larger than {max_bytes >> 20} MiB")
    try:
        value = json.loads(content.decode())
    except RecursionError:
        raise RefusedError(f"{path} is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise RefusedError(f"{path} is not UTF-8 ({error})") from None
    except ValueError as error:
        raise RefusedError(f"{path} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise RefusedError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def describe_error(error: BaseException) -> str:
    """Describe a library's error in one line: its first two lines, which name the cause. Later lines may list every
    weight."""
    lines = " ".join(line.strip() for line in str(error).strip().splitlines()[:2])
    type_name = type(error).__name__
    return f"{type_name}: {printable(lines):.500}" if lines else type_name


def leaves(value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the scalar values of nested JSON, each with the keys that lead to it."""
    pending: list[tuple[tuple[str, ...], Any]] = [((), value)]
    while pending:
        keys, value = pending.pop()
        if isinstance(value, dict):
            pending += [((*keys, str(key)), child) for key, child in value.items()]
        elif isinstance(value, list | tuple):
            pending += [(keys, child) for child in value]
        else:
            yield keys, value


# ------------------------------------------------------------------------------------------------------------- models


def check_configs(folder: Path) -> None:
    """Raise RefusedError if a config of the model or tokenizer in a folder is damaged."""
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            check_settings(read_object(folder / name), str(folder / name))


def check_files(folder: Path) -> None:
    """Raise RefusedError if a config or a file of weights in a model's folder is damaged, or its index names files
    elsewhere."""
    check_configs(folder)
    files_of_weights = {"model.safetensors"}
    if (folder / "config.json").is_file() and (folder / "adapter_config.json").exists():
        remedy = "give a folder with the model only, and the adapters' folder to evaluate_llm.py --adapter"
        raise RefusedError(f"{folder} has both adapter_config.json and config.json; {remedy}")
    for name in INDEXES:
        if (folder / name).is_file():
            files = read_object(folder / name).get("weight_map")
            if not isinstance(files, dict) or not files:
                raise RefusedError(f"{folder / name}: weight_map must map each weight to its file")
            for file in files.values():
                if not isinstance(file, str) or Path(file).name != file or not (folder / file).is_file():
                    raise RefusedError(f"{folder / name} names {file!r:.100}, which is not a file in the same folder")
            files_of_weights |= set(files.values())
    for name in sorted(files_of_weights):
        if name.endswith(".safetensors") and (folder / name).is_file():
            check_weights(folder / name)


def check_weights(path: Path) -> None:
    """Raise RefusedError if a file of safetensors is cut off or damaged. Only its header is read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt"):
            pass
    except (OSError, SafetensorError) as error:
        size = f"{path.stat().st_size:,} bytes"
        cause = f"{path} ({size}) cannot be read, perhaps after an interrupted download; copy or download it again"
        raise RefusedError(f"{cause} ({describe_error(error)})") from None


def check_settings(config: dict[str, Any], source: str) -> None:
    """Raise RefusedError if a model's config names code of a hub, has too many layers to build, a number that is not
    finite, or an invalid model type.

    transformers loads and runs a kernel whose name has the form org/name ("paged|org/name", "org/name:function").
    """
    for keys, value in leaves(config):
        kind = next((key for key in keys if key in KINDS), None)
        if kind and isinstance(value, str) and not re.fullmatch(r"[\w.-]*", value, re.ASCII):
            raise RefusedError(f"{source}: {kind} is {value!r:.100}, which is not a valid name")
        no_limit = value == math.inf and "time_step_limit" in keys  # state-space models write it for no limit
        if isinstance(value, float) and not math.isfinite(value) and not no_limit:
            raise RefusedError(f"{source}: {keys[0]} has {value}; numbers must be finite")
        choice = next((key for key in keys if "implementation" in key.lower()), None)
        if choice and isinstance(value, str) and not re.fullmatch(r"[\w.|-]*", value, re.ASCII):
            remedy = "it may name code of a hub, which is never run; remove it from the file"
            raise RefusedError(f"{source}: {choice} is {value!r:.100}; {remedy}")
        number = type(value) in (int, float)
        if number and keys and re.fullmatch(r"(n|num)_(\w+_)?layers?", keys[-1]) and not abs(value) <= MAX_LAYERS:
            raise RefusedError(f"{source}: {keys[-1]} is {value!r:.40}; it must be at most {MAX_LAYERS:,}")


# ----------------------------------------------------------------------------------------------------------- adapters


def check_adapters(folder: Path, names: list[str]) -> None:
    """Raise RefusedError if adapters are not LoRA adapters, or if their config would make weights that are not finite,
    or take unlimited time or memory. `names` are the names of the model's modules."""
    path = folder / "adapter_config.json"
    config = read_object(path)
    if not (folder / "adapter_model.safetensors").is_file():
        raise RefusedError(f"{folder} has no adapter_model.safetensors; other weight files are not read")
    if config.get("peft_type") != "LORA":
        raise RefusedError(f"{path}: peft_type is {config.get('peft_type')!r:.100}; only LORA is supported")
    if config.get("megatron_config") is not None:
        raise RefusedError(f"{path}: megatron_config names code to load, which is never run")
    for keys, value in leaves(config):
        if type(value) in (int, float) and not abs(value) <= MAX_NUMBER:  # false for NaN, too
            raise RefusedError(
                f"{path}: {keys[0]} has {value!r:.40}; it must be finite and at most {MAX_NUMBER:,}"
            )
    check_settings(config, str(path))
    for key, types in TYPES.items():
        value = config.get(key)
        mixed_list = isinstance(value, list) and types is NAMES and not all(isinstance(name, str) for name in value)
        if value is not None and (type(value) not in types or mixed_list):
            raise RefusedError(f"{path}: {key} is {value!r:.100}, which has the wrong type")
    ranks, alphas = ([config.get(name), *_values(config.get(of))] for name, of in (
        ("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")))  # fmt: skip
    largest = max(MAX_RANK, _largest_rank(folder))
    for value in ranks:
        if value is not None and (type(value) is not int or not 1 <= value <= largest):
            raise RefusedError(f"{path}: a rank (r, rank_pattern) is {value!r:.40}, but its weights have no such rank")
    for value in alphas:
        if value is not None and type(value) not in (int, float):
            raise RefusedError(f"{path}: a scale (lora_alpha, alpha_pattern) is {value!r:.40}, which is not a number")
    for name in ("init_lora_weights", "loftq_config"):
        for number in re.findall(r"\d+", str(config.get(name) or "")):
            if len(number) > 3 or int(number) > MAX_ITERATIONS:
                raise RefusedError(f"{path}: {name} asks for {number:.20} iterations; the maximum is {MAX_ITERATIONS}")
    _check_replication(path, config.get("layer_replication"), len(names))
    _check_patterns(path, config, names)


def _values(pattern: Any) -> list[Any]:
    return list(pattern.values()) if isinstance(pattern, dict) else [] if pattern is None else [pattern]


def _largest_rank(folder: Path) -> int:
    """Return the largest rank of the weights in the file; 0 if there is no such file."""
    from safetensors import SafetensorError, safe_open

    ranks = [0]
    with suppress(OSError, SafetensorError):  # reported when the file is loaded
        with safe_open(folder / "adapter_model.safetensors", "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if "lora_A" in name or "lora_embedding_A" in name:
                    ranks += file.get_slice(name).get_shape()[:1]
    return max(ranks)


def _check_replication(path: Path, ranges: Any, count: int) -> None:
    try:
        layers = sum(max(0, last - first) for first, last in ranges or ())
    except (TypeError, ValueError):
        layers = -1
    if not 0 <= layers <= min(count, MAX_LAYERS):
        raise RefusedError(
            f"{path}: layer_replication must be a few pairs of first and last layers of the model"
        )


def _check_patterns(path: Path, config: dict[str, Any], names: list[str]) -> None:
    """Match the patterns as peft does, in a process that can be stopped."""
    forms = {
        key: [config[key]] for key in ("target_modules", "exclude_modules") if isinstance(config.get(key), str)
    }
    for key, form in (
        ("rank_pattern", r"(.*\.)?({})$"),
        ("alpha_pattern", r"(.*\.)?({})$"),
        ("modules_to_save", r"(^|.*\.){}($|\..*)"),
        ("layers_pattern", r"(?:^|.*?\.){}\.(?P<idx>\d+)\."),
    ):
        value = config.get(key) or []
        forms[key] = [
            form.replace("{}", str(name)) for name in ([value] if isinstance(value, str) else value)
        ]
    forms = {key: patterns for key, patterns in forms.items() if patterns}
    if not forms:
        return
    long_names = [f"base_model.model.{name}.lora_magnitude_vector.default.weight" for name in names]
    request = json.dumps([forms, [*names, *long_names]])
    try:
        command = [sys.executable, "-I", "-S", "-c", MATCH]
        process = subprocess.run(command, input=request.encode(), capture_output=True, timeout=PATTERN_SECONDS)
    except subprocess.TimeoutExpired as error:
        key = _last((error.stdout or b"").decode()) or "a pattern"
        cause = f"takes more than {PATTERN_SECONDS:g} seconds to match with the model's modules; use plain names"
        raise RefusedError(f"{path}: {key} {cause}") from None
    if process.returncode:
        key, cause = _last(process.stdout.decode()), _last(process.stderr.decode(errors="replace"))
        raise RefusedError(f"{path}: {key} is not a valid pattern ({cause:.200})")


def _last(text: str) -> str:
    """Return the last line of a text."""
    return (text.strip().splitlines() or [""])[-1]
