"""Configs of models and adapters that strangers made. They are data: what names a program, or is made to take all time
or memory, is refused before a library reads it, in one line that names the file and the cause."""

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
"""The most bytes in a config."""
MAX_NUMBER = 1 << 20
"""The largest number in the config of adapters."""
MAX_RANK = 1024
"""The largest rank that adapters may have, unless their weights in the file have a larger one."""
MAX_LAYERS = 2000
MAX_ITERATIONS = 100
PATTERN_SECONDS = 5.0
"""How long the patterns of adapters may take to be compared with all names of modules."""
KINDS = ("model_type", "rope_type", "type", "quant_method")
"""What transformers prints as it is, where it doesn't know it."""
NAMES, FLAG, PATTERN = (list, str), (bool,), (dict,)
TYPES: dict[str, tuple[type, ...]] = {
    "target_modules": NAMES, "exclude_modules": NAMES, "modules_to_save": NAMES, "layers_pattern": NAMES,
    "target_parameters": NAMES, "layers_to_transform": (list, int), "trainable_token_indices": (list, dict),
    "rank_pattern": PATTERN, "alpha_pattern": PATTERN, "loftq_config": (dict,), "init_lora_weights": (bool, str),
    "use_rslora": FLAG, "use_dora": FLAG, "fan_in_fan_out": FLAG, "lora_bias": FLAG, "lora_dropout": (float, int),
    "bias": (str,), "task_type": (str,), "base_model_name_or_path": (str,),
}  # fmt: skip
"""What the config of adapters may hold, besides null; the lists that may be a text have texts in them."""
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")

# Runs in a child process: Python can't end a match that takes for ever. Prints the key that it is at.
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
    """A config that isn't used; the text says why, in one line that is `printable`: it may quote a stranger's file."""


def read_object(path: Path, most: int = MAX_BYTES) -> dict[str, Any]:
    """The JSON object in a file. RefusedError where there is none; OSError where there is no file."""
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise RefusedError(f"{path} is larger than {most >> 20} MiB")
    try:
        found = json.loads(content.decode())
    except RecursionError:
        raise RefusedError(f"{path} is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise RefusedError(f"{path} isn't UTF-8 ({error})") from None
    except ValueError as error:
        raise RefusedError(f"{path} is no JSON ({error})") from None
    if not isinstance(found, dict):
        raise RefusedError(f"{path} should hold a JSON object, not a {type(found).__name__}")
    return found


def said(error: BaseException) -> str:
    """An error of a library in one line: its first two lines, which name the cause; more may follow for each weight."""
    lines = " ".join(line.strip() for line in str(error).strip().splitlines()[:2])
    own = type(error).__name__
    return f"{own}: {printable(lines):.500}" if lines else own


def leaves(value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values of nested JSON that hold no others, each with the keys that lead to it."""
    waiting: list[tuple[tuple[str, ...], Any]] = [((), value)]
    while waiting:
        keys, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [((*keys, str(key)), part) for key, part in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [(keys, part) for part in value]
        else:
            yield keys, value


# ------------------------------------------------------------------------------------------------------------- models


def check_configs(folder: Path) -> None:
    """RefusedError where the configs in a folder, of a model or a tokenizer, are damaged."""
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            check_settings(read_object(folder / name), str(folder / name))


def check_files(folder: Path) -> None:
    """RefusedError where the configs of a model's folder are damaged, or its index names files elsewhere."""
    check_configs(folder)
    if (folder / "config.json").is_file() and (folder / "adapter_config.json").exists():
        how = "give the folder of the model alone, and that of the adapters to evaluate_llm.py --adapter"
        raise RefusedError(f"{folder} has adapter_config.json beside config.json; {how}")
    for name in INDEXES:
        if (folder / name).is_file():
            files = read_object(folder / name).get("weight_map")
            if not isinstance(files, dict) or not files:
                raise RefusedError(f"{folder / name}: weight_map should say which file each weight is in")
            for file in files.values():
                if not isinstance(file, str) or Path(file).name != file or not (folder / file).is_file():
                    raise RefusedError(f"{folder / name} names {file!r:.100}, which is no file beside it")


def check_settings(config: dict[str, Any], place: str) -> None:
    """RefusedError where a model's config names code of a hub, has more layers than can be built, a number that isn't
    finite, or a kind of model that is no name.

    transformers loads and runs a kernel whose name has the form org/name ("paged|org/name", "org/name:function").
    """
    for keys, value in leaves(config):
        kind = next((key for key in keys if key in KINDS), None)
        if kind and isinstance(value, str) and not re.fullmatch(r"[\w.-]*", value, re.ASCII):
            raise RefusedError(f"{place}: {kind} is {value!r:.100}, which is no name of a kind")
        no_limit = value == math.inf and "time_step_limit" in keys  # so do state-space models write it
        if isinstance(value, float) and not math.isfinite(value) and not no_limit:
            raise RefusedError(f"{place}: {keys[0]} has {value}; numbers there are finite")
        choice = next((key for key in keys if "implementation" in key.lower()), None)
        if choice and isinstance(value, str) and not re.fullmatch(r"[\w.|-]*", value, re.ASCII):
            why = "that may be code of a hub, which is never run; take it out of the file"
            raise RefusedError(f"{place}: {choice} is {value!r:.100}, and {why}")
        number = type(value) in (int, float)
        if number and keys and re.fullmatch(r"(n|num)_(\w+_)?layers?", keys[-1]) and not abs(value) <= MAX_LAYERS:
            raise RefusedError(f"{place}: {keys[-1]} is {value!r:.40}; {MAX_LAYERS:,} at most can be built")


# ----------------------------------------------------------------------------------------------------------- adapters


def check_adapters(folder: Path, names: list[str]) -> None:
    """RefusedError where adapters aren't LoRA's, or their config has values that make weights which aren't finite, or
    take all time or memory. `names`: of the model's modules."""
    path = folder / "adapter_config.json"
    config = read_object(path)
    if not (folder / "adapter_model.safetensors").is_file():
        raise RefusedError(f"{folder} has no adapter_model.safetensors; weights are read from no other kind of file")
    if config.get("peft_type") != "LORA":
        raise RefusedError(f"{path}: peft_type is {config.get('peft_type')!r:.100}; only LORA can be added to a model")
    if config.get("megatron_config") is not None:
        raise RefusedError(f"{path}: megatron_config names code to load, which is never run")
    for keys, value in leaves(config):
        if type(value) in (int, float) and not abs(value) <= MAX_NUMBER:  # nor is NaN
            raise RefusedError(f"{path}: {keys[0]} has {value!r:.40}; numbers there are finite, at most {MAX_NUMBER:,}")
    check_settings(config, str(path))
    for key, types in TYPES.items():
        value = config.get(key)
        odd = isinstance(value, list) and types is NAMES and not all(isinstance(name, str) for name in value)
        if value is not None and (type(value) not in types or odd):
            raise RefusedError(f"{path}: {key} is {value!r:.100}, which is of the wrong type")
    ranks, alphas = ([config.get(name), *_values(config.get(of))] for name, of in (
        ("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")))  # fmt: skip
    largest = max(MAX_RANK, _largest_rank(folder))
    for value in ranks:
        if value is not None and (type(value) is not int or not 1 <= value <= largest):
            raise RefusedError(f"{path}: a rank (r, rank_pattern) is {value!r:.40}, and its weights have no such rank")
    for value in alphas:
        if value is not None and type(value) not in (int, float):
            raise RefusedError(f"{path}: a scale (lora_alpha, alpha_pattern) is {value!r:.40}, which is no number")
    for name in ("init_lora_weights", "loftq_config"):
        for number in re.findall(r"\d+", str(config.get(name) or "")):
            if len(number) > 3 or int(number) > MAX_ITERATIONS:
                raise RefusedError(f"{path}: {name} asks for {number:.20} iterations; {MAX_ITERATIONS} are enough")
    _check_replication(path, config.get("layer_replication"), len(names))
    _check_patterns(path, config, names)


def _values(pattern: Any) -> list[Any]:
    return list(pattern.values()) if isinstance(pattern, dict) else [] if pattern is None else [pattern]


def _largest_rank(folder: Path) -> int:
    """The largest rank of the weights in the file; 0 where there is no such file."""
    from safetensors import SafetensorError, safe_open

    ranks = [0]
    with suppress(OSError, SafetensorError):  # what loads it says so
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
        raise RefusedError(f"{path}: layer_replication should be a few pairs, of first and last layers of the model")


def _check_patterns(path: Path, config: dict[str, Any], names: list[str]) -> None:
    """Compare the patterns as peft does, in a process that can be ended."""
    forms = {key: [config[key]] for key in ("target_modules", "exclude_modules") if isinstance(config.get(key), str)}
    for key, form in (
        ("rank_pattern", r"(.*\.)?({})$"),
        ("alpha_pattern", r"(.*\.)?({})$"),
        ("modules_to_save", r"(^|.*\.){}($|\..*)"),
        ("layers_pattern", r"(?:^|.*?\.){}\.(?P<idx>\d+)\."),
    ):
        given = config.get(key) or []
        forms[key] = [form.replace("{}", str(one)) for one in ([given] if isinstance(given, str) else given)]
    forms = {key: patterns for key, patterns in forms.items() if patterns}
    if not forms:
        return
    longest = [f"base_model.model.{name}.lora_magnitude_vector.default.weight" for name in names]
    request = json.dumps([forms, [*names, *longest]])
    try:
        command = [sys.executable, "-I", "-S", "-c", MATCH]
        done = subprocess.run(command, input=request.encode(), capture_output=True, timeout=PATTERN_SECONDS)
    except subprocess.TimeoutExpired as error:
        at = _last((error.stdout or b"").decode()) or "a pattern"
        why = f"can't be compared with the model's modules within {PATTERN_SECONDS:g} seconds; list plain names there"
        raise RefusedError(f"{path}: {at} {why}") from None
    if done.returncode:
        at, why = _last(done.stdout.decode()), _last(done.stderr.decode(errors="replace"))
        raise RefusedError(f"{path}: {at} is no pattern ({why:.200})")


def _last(text: str) -> str:
    """The last line of a text."""
    return (text.strip().splitlines() or [""])[-1]
