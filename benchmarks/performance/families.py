"""Model families against the trainer and the engines, measured with tiny models of random weights.

    python benchmarks/performance/families.py                       # trainer and transformers engine, a minute
    python benchmarks/performance/families.py                       # the same with vLLM installed: the columns of vLLM
    python benchmarks/performance/families.py --families "Gemma 3" Qwen3.5

Environments with vLLM have other versions of transformers. So a run measures either the columns of vLLM or all others
(`--columns`), and keeps what was recorded before.

Trainer: log-probabilities of rows in a batch equal those of each row alone, also for rows that share a prompt;
gradients are finite; gradient checkpointing changes nothing. Engines: four rows are sampled over two turns, three of
them with a shared beginning, and each log-probability is compared with the trainer's. vLLM gets new weights between the
turns. Windows have 8 tokens, chunks 128, and rows up to 167, so both matter. A family passes if the largest difference
is at most 1e-4.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks" / "common"), str(ROOT / "learner")]
from machine import RESULTS, above_0, given_flags, record_results

from llm_utils import distributed
from llm_utils.sampling.make_engine import check_updates
from llm_utils.sampling.transformers_engine import TransformersEngine
from llm_utils.sampling.vllm_engine import import_vllm
from llm_utils.setup import loading
from llm_utils.setup.model_checks import layers_of
from llm_utils.training import forward

CLOSE = 1e-4
VOCABULARY, SLOTS, TURN, REPLY, SHARED = 200, 4, 9, 4, 136
LONGEST = SHARED + 9 + 2 * TURN + REPLY  # tokens of the longest row

# Settings of all tiny models, as far as a family knows them.
SIZE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 128, "max_position_embeddings": 512,
    "initializer_range": 0.1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WINDOWS: dict[str, Any] = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
DELTA: dict[str, Any] = {
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 16,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "kv_lora_rank": 512, "q_lora_rank": 32, "qk_rope_head_dim": 64, "qk_nope_head_dim": 16, "v_head_dim": 32,
    "num_key_value_heads": 4,
}  # fmt: skip
GRANITE_4 = MAMBA | {"num_local_experts": 0, "shared_intermediate_size": 64, "attention_multiplier": 0.2}

# family: some of its models, model type, its own settings
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "AFMoE": (
        "Trinity", "afmoe",
        EXPERTS | WINDOWS | {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    ),
    "Apertus": ("Apertus 8B", "apertus", {}),
    "Arcee": ("AFM-4.5B", "arcee", {}),
    "Bamba": ("Bamba 9B", "bamba", MAMBA | {"attn_layer_indices": [1, 3]}),
    "Cohere 2": ("Command R7B", "cohere2", WINDOWS | {"logit_scale": 1.0}),
    "DeepSeek V3": (
        "DeepSeek-V3", "deepseek_v3",
        LATENT | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
                  "first_k_dense_replace": 1, "moe_intermediate_size": 64, "topk_method": "noaux_tc"},
    ),
    "ERNIE 4.5": ("ERNIE-4.5-0.3B", "ernie4_5", {}),
    "EXAONE 4": ("EXAONE-4.0-32B", "exaone4", WINDOWS),
    "Falcon-H1": ("Falcon-H1-1.5B", "falcon_h1", MAMBA | {"mamba_d_ssm": 256}),
    "Gemma 2": ("Gemma 2 2B, 9B", "gemma2", WINDOWS | {"query_pre_attn_scalar": 32}),
    "Gemma 3": ("Gemma 3 270M, 1B", "gemma3_text", WINDOWS | {"query_pre_attn_scalar": 32}),
    "Gemma 3n": (
        "Gemma 3n E4B", "gemma3n_text",
        WINDOWS | {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCABULARY, "laurel_rank": 8,
                   "hidden_size_per_layer_input": 16, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4},
    ),
    "Gemma 4": (
        "Gemma 4 E2B", "gemma4_text",
        WINDOWS | {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCABULARY, "global_head_dim": 64,
                   "hidden_size_per_layer_input": 16},
    ),
    "GLM-4": ("GLM-4-9B-0414", "glm4", {}),
    "gpt-oss": ("gpt-oss-20b", "gpt_oss", WINDOWS | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Granite 3": ("Granite 3.0 8B", "granite", {"attention_multiplier": 0.2}),
    "Granite 4": ("Granite 4 micro", "granitemoehybrid", GRANITE_4 | {"layer_types": ["full_attention"] * 4}),
    "Granite 4 H": (
        "Granite 4 H", "granitemoehybrid",
        GRANITE_4 | {"layer_types": ["linear_attention", "full_attention"] * 2},
    ),
    "Hunyuan": ("Hunyuan-7B", "hunyuan_v1_dense", {}),
    "Jamba": ("Jamba v0.1", "jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4}),
    "LFM2": (
        "LFM2-1.2B", "lfm2",
        {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False, "block_dim": 128,
         "conv_dim": 128},
    ),
    "Llama 3": ("Llama 3.2 1B, SmolLM2-135M", "llama", {}),
    "Llama 4": (
        "Llama 4 Scout", "llama4_text",
        {"attention_chunk_size": 128, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 128},
    ),
    "Mamba 2": (
        "Mamba 2 2.8B", "mamba2",
        {"num_heads": 8, "head_dim": 32, "n_groups": 1, "state_size": 16, "chunk_size": 16},
    ),
    "MiniCPM3": ("MiniCPM3-4B", "minicpm3", LATENT | {"head_dim": None}),
    "Ministral 3": ("Ministral 3 8B", "ministral3", {}),
    "Mistral": ("Mistral 7B v0.1", "mistral", {"sliding_window": 8}),
    "Nemotron-H": (
        "Nemotron 3 Nano 30B-A3B", "nemotron_h",
        {"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"], "mamba_num_heads": 8,
         "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 16, "n_routed_experts": 4,
         "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64, "num_experts_per_tok": 2},
    ),
    "OLMo 2": ("OLMo 2 7B", "olmo2", {}),
    "OLMo 3": ("OLMo 3 7B", "olmo3", WINDOWS),
    "OLMo hybrid": ("OLMo Hybrid 7B", "olmo_hybrid", DELTA | {"linear_num_value_heads": 2}),
    "Phi-3": ("Phi-4-mini", "phi3", {"sliding_window": 262_144}),
    "Qwen2": ("Qwen2.5 0.5B to 32B", "qwen2", {}),
    "Qwen3": ("Qwen3 0.6B, 4B", "qwen3", {}),
    "Qwen3 MoE": ("Qwen3-30B-A3B", "qwen3_moe", EXPERTS),
    "Qwen3-Next": (
        "Qwen3-Next-80B-A3B", "qwen3_next",
        DELTA | EXPERTS | {"shared_expert_intermediate_size": 64},
    ),
    "Qwen3.5": ("Qwen3.5 0.8B to 9B", "qwen3_5_text", DELTA),
    "Seed-OSS": ("Seed-OSS-36B", "seed_oss", {}),
    "SmolLM3": ("SmolLM3-3B", "smollm3", {}),
    "StarCoder 2": ("StarCoder2-7B", "starcoder2", {"sliding_window": 8}),
}  # fmt: skip


def tiny_config(family: str) -> Any:
    """Return the config of a tiny model of the family."""
    _, kind, own = FAMILIES[family]
    config = CONFIG_MAPPING[kind]
    known = {field.name for field in fields(config)}
    return config(**{name: value for name, value in SIZE.items() if name in known} | own)


def tiny_model(family: str) -> Any:
    """Return a tiny model of the family in float32, the same in every process."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32).eval()


def load(family: str) -> Any:
    """Return the tiny model as a learner reads it from a folder."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_model(family).save_pretrained(folder)
        return loading.load_policy(folder, torch.device("cpu"), dtype=torch.float32)


def other_layers(family: str) -> str:
    """Name the layers that do not attend to the whole row."""
    layers = layers_of(tiny_config(family), LONGEST)
    names = [*dict.fromkeys(layers.states.values()), *["windows"] * bool(layers.windows)]
    return ", ".join([*names, *["chunks"] * bool(layers.chunks)])


def make_rows(lengths: list[int], prompt: int, shared: bool) -> list[Any]:
    """Return rows of random tokens, all after the prompt to train on; `shared`: with the same prompt."""
    rng = np.random.default_rng(0)
    tokens = [rng.integers(VOCABULARY, size=length).astype(np.int32) for length in lengths]
    if shared:
        tokens = [np.concatenate([tokens[0][:prompt], row[prompt:]]) for row in tokens]
    return [
        SimpleNamespace(tokens=row, prompt_length=prompt, train_mask=np.arange(len(row)) >= prompt, task_index=task)
        for task, row in zip([0] * len(tokens) if shared else range(len(tokens)), tokens, strict=True)
    ]


def logprobs(model: Any, rows: list[Any]) -> torch.Tensor:
    """Return the trainer's log-probabilities of the rows' trained tokens."""
    return forward.policy_forward(model, rows, VOCABULARY, 1.0)[0]


def largest(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


# ------------------------------------------------------------------------------------------------------- the trainer


def measure_trainer(family: str) -> dict[str, Any]:
    """Return the largest differences of log-probabilities and gradients that should be equal."""
    model = load(family)
    mixed, group = (
        make_rows([46, 41, 33, 20], 12, False),
        make_rows([SHARED + more for more in (10, 10, 8, 7)], SHARED, True),
    )
    with torch.no_grad():
        batch = max(
            largest(logprobs(model, rows), torch.cat([logprobs(model, [row]) for row in rows]))
            for rows in (mixed, group)
        )
    found: dict[str, Any] = {"batch": batch, "trees": bool(forward.token_trees(model, group)[0])}
    computed = []
    for checkpointing in (False, True):
        if checkpointing:
            loading.enable_gradient_checkpointing(model)
        values = logprobs(model, mixed)
        model.zero_grad()
        values.sum().backward()
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        computed.append((values.detach(), torch.cat(gradients).clone()))
    (plain, gradient), (again, gradient_again) = computed
    found["gradients finite"] = bool(gradient.isfinite().all())
    found["checkpointing"] = max(largest(plain, again), largest(gradient, gradient_again) / float(gradient.norm()))
    return found


# ------------------------------------------------------------------------------------------------------- the engines


def play(engine: Any, between: Callable[[], None]) -> list[list[tuple[np.ndarray, int, Any]]]:
    """Sample two turns in four slots, with a call of `between` in between. Return for each turn the rows up to its
    end, the span's first token in them, and the span."""
    rng = np.random.default_rng(1)
    beginning = rng.integers(VOCABULARY, size=SHARED)
    ends = [rng.integers(VOCABULARY, size=size) for size in (5, 9, 5)]
    rows = [np.concatenate([beginning, end]) for end in ends] + [rng.integers(VOCABULARY, size=14)]
    rows[2] = rows[0]  # equal rows, rows with a shared beginning, and another one
    new, turns = [row.astype(np.int32) for row in rows], []
    for turn in range(2):
        for slot in range(SLOTS):
            seed = {"seed": [0, slot]} if turn == 0 else {}
            engine.feed(slot, new[slot], TURN, [], **seed)
        spans = []
        while engine.busy:
            spans += engine.step()
        played = []
        for span in spans:
            start = len(rows[span.slot])
            rows[span.slot] = np.concatenate([rows[span.slot], span.tokens])
            played.append((rows[span.slot], start, span))
        turns.append(played)
        if turn == 0:
            between()
        new = [rng.integers(VOCABULARY, size=REPLY).astype(np.int32) for _ in rows]
        rows = [np.concatenate([row, more]) for row, more in zip(rows, new, strict=True)]
    return turns


@torch.no_grad()
def gap(model: Any, played: list[tuple[np.ndarray, int, Any]]) -> float:
    """Return the largest difference between the sampler's log-probabilities and the trainer's, row by row."""
    found = 0.0
    for tokens, start, span in played:
        mask = np.arange(len(tokens)) >= start
        row = SimpleNamespace(tokens=tokens, prompt_length=start, train_mask=mask, task_index=0)
        found = max(found, largest(logprobs(model, [row]), torch.from_numpy(span.logprobs)))
    return found


def measure_engine(family: str) -> dict[str, Any]:
    """Return the largest gap of the transformers engine, or the reason of its refusal."""
    model = load(family)
    try:
        engine = TransformersEngine(model, SLOTS, VOCABULARY, longest_row=LONGEST)
    except ValueError as error:
        return {"refused": str(error).rpartition(" has ")[2]}
    return {"gap": max(gap(model, played) for played in play(engine, lambda: None))}


def measure_vllm(family: str) -> dict[str, Any]:
    """Return the largest gap of vLLM in this process, with the first weights and after an update, or the reason of a
    refusal."""
    from llm_utils.sampling.vllm_engine import VLLMEngine

    try:
        check_updates("vllm", tiny_config(family), torch.device("cpu"))
    except SystemExit as refusal:
        return {"refused": str(refusal).removeprefix("--engine vllm: ").partition(". ")[0]}
    model, first = load(family), load(family)  # before vLLM changes classes of transformers
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = VLLMEngine(folder, SLOTS, VOCABULARY, max_model_len=256)

        def change_weights() -> None:
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(1.05)
            engine.update(distributed.weights(model), 1)

        before, after = play(engine, change_weights)
        engine.close()
    return {"gap": gap(first, before), "gap after an update": gap(model, after)}


def in_child(family: str, seconds: float) -> dict[str, Any]:
    """Run `measure_vllm` in a process of its own, as vLLM may end its process."""
    command = [sys.executable, __file__, "--child", family]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"failed": f"no result after {seconds:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and lines:
        found = json.loads(lines[-1])
        causes = re.findall(r"\w+Error: .*", done.stdout.rpartition("{")[0])  # vLLM's log
        if causes and "check the logs" in found.get("failed", ""):
            found["failed"] = causes[-1]
        return found
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return {"failed": said[-1].strip() if said else f"its process ended with status {done.returncode}"}


def registered(family: str) -> bool:
    """Return True if vLLM has a class of its own for the family's text model; else it runs that of transformers."""
    from vllm.model_executor.models.registry import ModelRegistry

    return type(tiny_model(family)).__name__ in ModelRegistry.get_supported_archs()


def attempt(measure: Callable[[str], dict[str, Any]], family: str) -> dict[str, Any]:
    """Return the measurement, or the exception that ended it."""
    try:
        return measure(family)
    except (Exception, SystemExit) as error:
        traceback.print_exc(limit=-3)
        text = " ".join(str(error).split())
        return {
            "failed": re.sub(r"^SystemExit: (--engine vllm cannot load \S+: )?", "", f"{type(error).__name__}: {text}")
        }


# -------------------------------------------------------------------------------------------------------- the table


def trainer_cell(found: dict[str, Any] | None) -> str:
    if found is None or "failed" in found:
        return "not measured" if found is None else f"no: {short(found['failed'])}"
    worst = max(found["batch"], found["checkpointing"])
    if not found["gradients finite"]:
        return "no: gradients are not finite"
    return f"yes ({worst:.0e})" if worst <= CLOSE else f"no: differs by {worst:.0e}"


def engine_cell(found: dict[str, Any] | None) -> str:
    if found is None or "gap" not in found:
        reason = None if found is None else found.get("refused") or found["failed"]
        return "not measured" if reason is None else f"no: {short(reason)}"
    updated = found.get("gap after an update", 0.0)
    if max(found["gap"], updated) <= CLOSE:
        return f"yes ({max(found['gap'], updated):.0e})"
    if found["gap"] <= CLOSE:
        return f"no: differs by {updated:.0e} after an update"
    return f"no: differs by {found['gap']:.0e}"


def vllm_cell(found: dict[str, Any] | None) -> str:
    return engine_cell(found) + (", by transformers' class" if found is not None and not found["registered"] else "")


def short(reason: str) -> str:
    """Return a reason that fits into a cell."""
    text = reason.replace("|", "/").rstrip(".")
    return text if len(text) <= 90 else f"{text[:87]}..."


def make_table(rows: dict[str, dict[str, Any]], environments: dict[str, dict[str, str]]) -> str:
    """Format the table, with the versions that its columns were measured with."""
    lines = ["| family | models | other layers | trainer | token trees | `--engine transformers` | vLLM on a CPU |"]
    lines.append("|---" * 7 + "|")
    for family, row in rows.items():
        models = FAMILIES[family][0]
        trainer = row.get("trainer")
        trees = "not measured" if trainer is None else "yes" if trainer.get("trees") else "no"
        cells = [family, models, row["layers"], trainer_cell(trainer), trees, engine_cell(row.get("engine"))]
        cells.append(vllm_cell(row.get("vllm")))
        lines.append(f"| {' | '.join(cells)} |")
    said = [
        f"{columns}: {', '.join(f'{package} {number}' for package, number in versions.items())}"
        for columns, versions in environments.items()
    ]
    return "\n".join([*lines, "", f"Versions. {'; '.join(said)}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--columns", choices=["transformers", "vllm"], default=None,
                        help="columns to measure (default: vllm if it is installed, else transformers)")  # fmt: skip
    parser.add_argument("--limit", type=above_0, default=300, help="seconds of a family with vLLM")
    parser.add_argument("--child", choices=FAMILIES, metavar="FAMILY", help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    if args.child:
        print(json.dumps(attempt(measure_vllm, args.child)))
        return
    columns = args.columns or ("vllm" if find_spec("vllm") else "transformers")
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    if columns == "vllm":
        versions["vLLM"] = import_vllm().__version__
    path, record = RESULTS / "families.json", {}
    if path.is_file():
        record = json.loads(path.read_text())["results"]
    rows: dict[str, dict[str, Any]] = record.get("families", {})
    for family in args.families:
        kind = FAMILIES[family][1]
        if kind not in CONFIG_MAPPING:
            print(f"{family}: transformers {transformers.__version__} does not know the model type {kind}")
            continue
        row = rows.setdefault(family, {})
        row["layers"] = other_layers(family)
        if columns == "transformers":
            row["trainer"], row["engine"] = attempt(measure_trainer, family), attempt(measure_engine, family)
            said = f"trainer {trainer_cell(row['trainer'])}, engine {engine_cell(row['engine'])}"
        else:
            row["vllm"] = {"registered": registered(family)} | in_child(family, args.limit)
            said = f"vLLM {vllm_cell(row['vllm'])}"
        print(f"{family}: {said}", flush=True)
    rows = {family: rows[family] for family in FAMILIES if family in rows}
    environments = record.get("environments", {})
    environments["vLLM" if columns == "vllm" else "trainer and transformers engine"] = versions
    table = make_table(rows, environments)
    print(table)
    command = "python benchmarks/performance/families.py" + given_flags(parser, args, "families", "columns", "limit")
    record_results("families", {"families": rows, "environments": environments}, table, command, merged=True)


if __name__ == "__main__":
    main()
