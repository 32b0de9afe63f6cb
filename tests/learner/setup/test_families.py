"""Families of models that differ in what their layers see and in where their dropout is: tiny ones, random weights."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from llm_utils.sampling.transformers_engine import TransformersEngine
from llm_utils.setup import loading, model_checks, preflight
from llm_utils.training import forward

VOCABULARY, CPU = 200, torch.device("cpu")
GROUPED = {"num_key_value_heads": 2}
FAMILIES = {
    "mistral": ("Mistral", GROUPED),
    "phi3": ("Phi3", {**GROUPED, "pad_token_id": 0}),
    "starcoder2": ("Starcoder2", GROUPED),
    "mixtral": ("Mixtral", {**GROUPED, "num_local_experts": 4}),
    "gemma2": ("Gemma2", {**GROUPED, "head_dim": 8}),
    "gemma3": ("Gemma3Text", {**GROUPED, "head_dim": 8}),
    "gpt_neo": ("GPTNeo", {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}),
    "opt": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3}),
    "xglm": ("XGLM", {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "init_std": 0.3}),
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 4}),
    "mpt": ("Mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 512}),
    "falcon": ("Falcon", {"alibi": False}),
    "falcon alibi": ("Falcon", {"alibi": True}),
    "biogpt": ("BioGpt", {}),
    "gpt_bigcode": ("GPTBigCode", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "phimoe": ("Phimoe", {**GROUPED, "num_local_experts": 4}),  # it routes otherwise in training mode
    "rwkv": ("Rwkv", {"attention_hidden_size": 32}),
    "mamba": ("Mamba", {}),
}
WINDOWED = ["mistral", "phi3", "starcoder2", "mixtral", "gemma2", "gemma3"]
DROPPING = ["opt", "xglm", "biogpt", "gpt_bigcode", "falcon", "gpt_neo", "phimoe"]


def family(name, **kwargs):
    """The config of a tiny model; what a family doesn't know is left out."""
    kind, own = FAMILIES[name]
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512}
    size |= {"intermediate_size": 48, "initializer_range": 0.3}
    if name in ("opt", "xglm", "bloom", "falcon", "falcon alibi", "mpt", "gpt_neo", "gpt_bigcode", "rwkv"):
        del size["intermediate_size"]  # as their configs have none
    if name in ("rwkv", "mamba"):
        del size["num_attention_heads"]
    return getattr(transformers, kind + "Config")(**{**size, "vocab_size": VOCABULARY, **own, **kwargs})


def model_of(config):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()


def group(size=4, prompt=40, more=6):
    """Rows that begin with the same prompt."""
    rng = np.random.default_rng(0)
    first, length = rng.integers(VOCABULARY, size=prompt), prompt + more
    return [
        SimpleNamespace(
            tokens=np.concatenate([first, rng.integers(VOCABULARY, size=more)]).astype(np.int32), prompt_length=prompt,
            train_mask=np.arange(length) >= prompt, task_index=0,
        )
        for _ in range(size)
    ]  # fmt: skip


@torch.no_grad()
def scored(model, rows):
    return forward.policy_forward(model, rows, VOCABULARY, 1.0)[0]


def sampled(model, **kwargs):
    """The log-probabilities of rows as they were sampled over two turns, and by the trainer."""
    engine, rng = TransformersEngine(model, 3, VOCABULARY, **kwargs), np.random.default_rng(0)
    rows, logprobs = {}, {slot: [] for slot in range(3)}

    def feed(slot, size, **more):
        new = rng.integers(VOCABULARY, size=size).astype(np.int32)
        row = rows.setdefault(slot, SimpleNamespace(tokens=new[:0], train_mask=np.zeros(0, bool), task_index=slot))
        row.tokens, row.train_mask = np.append(row.tokens, new), np.append(row.train_mask, np.zeros(size, bool))
        engine.feed(slot, new, 9, [VOCABULARY], **more)

    for slot in range(3):
        feed(slot, 5 + 3 * slot, seed=[slot])
    while engine.busy:
        for span in engine.step():
            row = rows[span.slot]
            row.tokens = np.append(row.tokens, span.tokens)
            row.train_mask = np.append(row.train_mask, np.ones(len(span.tokens), bool))
            logprobs[span.slot] += span.logprobs.tolist()
            if len(logprobs[span.slot]) < 18:
                feed(span.slot, 4)
    for row in rows.values():
        row.prompt_length = 5
    return torch.tensor(sum(logprobs.values(), [])), scored(model, list(rows.values()))


# ---------------------------------------------------------------------------------------- what layers attend to


@pytest.mark.parametrize("name", [*WINDOWED, "gpt_neo", "bloom", "mpt", "falcon alibi", "rwkv"])
def test_where_a_layer_does_not_see_all_nothing_is_shared_and_slots_are_refused(name):
    windows = {"gpt_neo": {"window_size": 8}} | {name: {"sliding_window": 8} for name in WINDOWED}
    model, rows = model_of(family(name, **windows.get(name, {}))), group()
    assert forward.token_trees(model, rows) == ([], [])
    one_by_one = torch.cat([scored(model, [row]) for row in rows])
    torch.testing.assert_close(scored(model, rows), one_by_one, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match=rf"full attention in every layer .*\({model.config.model_type}\) has"):
        TransformersEngine(model, 2, VOCABULARY, longest_row=46)


@pytest.mark.parametrize("name", [*WINDOWED, "opt", "xglm", "falcon"])
def test_a_window_as_long_as_the_longest_row_is_none(name):
    model, rows = model_of(family(name, **({"sliding_window": 46} if name in WINDOWED else {}))), group()
    assert forward.token_trees(model, rows)[0]
    one_by_one = torch.cat([scored(model, [row]) for row in rows])
    torch.testing.assert_close(scored(model, rows), one_by_one, atol=1e-4, rtol=0)
    torch.testing.assert_close(*sampled(model, longest_row=46), atol=1e-4, rtol=0)
    if name in WINDOWED:
        assert forward.token_trees(model, group(more=7)) == ([], [])
        with pytest.raises(ValueError, match="windows of 46 tokens"):
            TransformersEngine(model, 2, VOCABULARY, longest_row=47)


def test_a_window_that_is_switched_off_is_none():
    config = transformers.Qwen2Config(sliding_window=8, use_sliding_window=False)
    assert model_checks.check_attention(config, 10**6) is None
    assert model_checks.check_attention(transformers.MistralConfig(sliding_window=None), 10**6) is None


@pytest.mark.parametrize("script", ["grpo_llm", "evaluate_llm"])
def test_a_window_is_refused_before_the_first_episode(learn, tmp_path, vocab_size, script):
    model_of(family("mistral", sliding_window=300, vocab_size=vocab_size)).save_pretrained(tmp_path / "windowed")
    kwargs = json.dumps({"max_context_tokens": 400})
    with pytest.raises(SystemExit, match="windows of 300 tokens, and rows .* 400 .* shorter max_context_tokens"):
        learn(script, "--model", tmp_path / "windowed", "--tokenizer", "byte", "--num-envs", 4, "--env-kwargs", kwargs)


# ------------------------------------------------------------------------------------------------------- dropout


@pytest.mark.parametrize("name", DROPPING)
def test_training_with_gradient_checkpointing_draws_nothing(name):
    """Twice the same log-probabilities, those of the model without it, and the same gradients."""
    config, rows, found = family(name), group(size=2, prompt=10), []
    rates = [key for key, value in vars(config).items() if "drop" in key and isinstance(value, float)]
    assert rates
    for key in rates:
        setattr(config, key, 0.4)
    model = model_of(config)
    for checkpointing in (False, True, True):
        if checkpointing:
            loading.enable_gradient_checkpointing(model)
        logprobs = forward.policy_forward(model, rows, VOCABULARY, 1.0)[0]
        logprobs.sum().backward()
        found.append((logprobs.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
        model.zero_grad()
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-4, rtol=1e-3)


# ----------------------------------------------------------------------------------------------------- preflight


@pytest.mark.parametrize("name", ["opt", "xglm", "bloom", "falcon", "falcon alibi", "mpt", "gpt_bigcode", "gpt_neo"])
def test_the_preflight_knows_every_family_by_its_shape(name):
    config = family(name)
    args = {"lora_rank": 0, "gradient_checkpointing": "off", "engine": "vllm-server", "microbatch_tokens": 256}
    args = SimpleNamespace(**args, num_envs=8, dtype="float32", preflight=True)
    report = preflight.preflight(
        args, config, CPU, critic=False, reference=False, longest_row=64, world_size=1, memory_gb=80
    )
    model, kept = model_of(config), {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model.base_model(input_ids=torch.zeros(4, 64, dtype=torch.long), use_cache=False)
    held = sum(x.untyped_storage().nbytes() for pointer, x in kept.items() if pointer not in weights)
    estimate = sum(part.bytes for part in report.parts if part.name == "activations")
    assert 0.5 < estimate / held < 3
