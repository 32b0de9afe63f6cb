"""Families of models that differ in what their layers see and in where their dropout is: tiny ones, random weights."""

import copy
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from llm_utils.recovery import checkpoint
from llm_utils.sampling import graphs, slots
from llm_utils.sampling.slot_cache import bytes_per_token
from llm_utils.sampling.transformers_engine import TransformersEngine
from llm_utils.setup import loading, model_checks, preflight
from llm_utils.training import forward

VOCABULARY, CPU = 200, torch.device("cpu")
GROUPED = {"num_key_value_heads": 2}
BOTH = {"layer_types": ["sliding_attention", "full_attention"]}
CHUNKS = {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0], "intermediate_size_mlp": 48}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "top_k_experts": 2, "moe_intermediate_size": 16}
GLOBAL_HEADS = {"head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
GLOBAL_HEADS |= {"hidden_size_per_layer_input": 0}
LAYERS_OF_OTHERS = {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "layer_types": 3 * BOTH["layer_types"]}
LAYERS_OF_OTHERS |= {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
LAYERS_OF_OTHERS |= {"activation_sparsity_pattern": [0.5] + 5 * [0.0]}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 12}
ONE_GROUP = {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
FAMILIES = {
    "mistral": ("Mistral", GROUPED),
    "phi3": ("Phi3", {**GROUPED, "pad_token_id": 0}),
    "starcoder2": ("Starcoder2", GROUPED),
    "mixtral": ("Mixtral", {**GROUPED, "num_local_experts": 4}),
    "gemma2": ("Gemma2", {**GROUPED, "head_dim": 8}),
    "gemma3": ("Gemma3Text", {**GROUPED, "head_dim": 8, **BOTH}),
    "gemma3n": ("Gemma3nText", {**GROUPED, "head_dim": 8, **LAYERS_OF_OTHERS, "laurel_rank": 4}),
    "gemma4": ("Gemma4Text", {**GROUPED, "head_dim": 8, "global_head_dim": 16, **LAYERS_OF_OTHERS}),
    "gemma4 moe": ("Gemma4Text", {**GROUPED, **GLOBAL_HEADS, **BOTH, **EXPERTS, "enable_moe_block": True}),
    "gpt_oss": ("GptOss", {**GROUPED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **BOTH}),
    "olmo3": ("Olmo3", {**GROUPED, **BOTH}),
    "cohere2": ("Cohere2", {**GROUPED, **BOTH}),
    "exaone4": ("Exaone4", {**GROUPED, **BOTH}),
    "afmoe": ("Afmoe", {**GROUPED, "head_dim": 8, **EXPERTS, "num_dense_layers": 1, **BOTH}),
    "llama4": ("Llama4Text", {**GROUPED, "head_dim": 8, "num_local_experts": 4, **CHUNKS}),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 8, "use_sliding_window": True, "max_window_layers": 1}),
    "ministral": ("Ministral", {**GROUPED, "head_dim": 8}),
    "deepseek_v3": ("DeepseekV3", {**LATENT, "n_routed_experts": 4, "num_experts_per_tok": 2, **ONE_GROUP}),
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
WINDOWED = ["mistral", "phi3", "starcoder2", "mixtral", "gemma2", "gemma3", "gemma3n", "gemma4", "gemma4 moe"]
WINDOWED += ["gpt_oss", "olmo3", "cohere2", "exaone4", "afmoe", "llama4", "qwen3", "ministral"]
REFUSED = ["gpt_neo", "bloom", "mpt", "falcon alibi", "rwkv", "mamba"]
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


def windowed(name, size=8):
    """The config of a tiny model with windows, or chunks, of so many tokens."""
    return family(name, **{"attention_chunk_size" if name == "llama4" else "sliding_window": size})


def sampled(model, begin=5, **kwargs):
    """The log-probabilities of rows as they were sampled over two turns, and by the trainer. The rows begin with the
    same `begin` tokens, and the last is another row's fork."""
    engine, rng = TransformersEngine(model, 4, VOCABULARY, **kwargs), np.random.default_rng(0)
    rows, logprobs = {}, {slot: [] for slot in range(4)}
    common = rng.integers(VOCABULARY, size=begin)

    def feed(slot, new, **more):
        row = rows.setdefault(slot, SimpleNamespace(tokens=np.zeros(0, np.int32), train_mask=[], task_index=slot))
        row.tokens, row.train_mask = np.append(row.tokens, new.astype(np.int32)), row.train_mask + len(new) * [False]
        engine.feed(slot, new, 9, [VOCABULARY], **more)

    for slot in range(3):
        feed(slot, np.append(common, rng.integers(VOCABULARY, size=3 * slot)), seed=[slot])
    while engine.busy:
        for span in engine.step():
            row = rows[span.slot]
            row.tokens, row.train_mask = (
                np.append(row.tokens, span.tokens),
                [*row.train_mask, *len(span.tokens) * [True]],
            )
            logprobs[span.slot] += span.logprobs.tolist()
            if span.slot == 2 and 3 not in rows:
                engine.fork(2, 3, seed=[3])
                rows[3], logprobs[3] = copy.deepcopy(row), logprobs[2].copy()
                feed(3, rng.integers(VOCABULARY, size=6))
            if len(logprobs[span.slot]) < 18:
                feed(span.slot, rng.integers(VOCABULARY, size=4))
    for row in rows.values():
        row.prompt_length, row.train_mask = 5, np.array(row.train_mask)
    return torch.tensor(sum((logprobs[slot] for slot in rows), [])), scored(model, list(rows.values()))


# ---------------------------------------------------------------------------------------- what layers attend to


@pytest.mark.parametrize("forwards", ["one by one", "replayed"])
@pytest.mark.parametrize("name", WINDOWED)
def test_windows_sample_what_they_train(name, forwards, monkeypatch):
    """In rows of nine windows that share their beginning, move to larger stores, are forked and have two turns."""
    monkeypatch.setattr(slots.SlotModel, "CAPACITY", 16)
    monkeypatch.setattr(slots.SlotCache, "KEPT_BYTES", 0)
    moves, replays = [], []
    move = slots.SlotCache._move
    monkeypatch.setattr(slots.SlotCache, "_move", lambda cache, *args: [moves.append(args[1]), move(cache, *args)])
    if forwards == "replayed":
        monkeypatch.setattr(slots.SlotModel, "RECORDED", ("cpu",))
        monkeypatch.setattr(graphs.Graphs, "STEP", 8)
        monkeypatch.setattr(graphs, "record", lambda run, *_: lambda: [replays.append(1), run()])
    of_engine, of_trainer = sampled(model_of(windowed(name)), begin=40)
    torch.testing.assert_close(of_engine, of_trainer, atol=1e-4, rtol=0)
    assert len(of_engine) == 4 * 18 and 64 in moves  # from a store of 64 columns to one of 128
    assert bool(replays) == (forwards == "replayed")


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("name", WINDOWED)
def test_windows_are_the_same_in_trees(name, parts, monkeypatch):
    """The log-probabilities and gradients of rows that share a prompt, also with logits in parts."""
    model, rows = model_of(windowed(name)), group()
    if parts:
        monkeypatch.setattr(forward, "LOGITS_BYTES", 4 * VOCABULARY * 10)
    assert forward.token_trees(model, rows)[0]
    found = []
    for batches in ([rows], [[row] for row in rows]):
        logprobs = torch.cat([forward.policy_forward(model, batch, VOCABULARY, 1.0)[0] for batch in batches])
        logprobs.sum().backward()
        found.append((logprobs.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
        model.zero_grad()
    torch.testing.assert_close(*[logprobs for logprobs, _ in found], atol=1e-4, rtol=0)
    largest = max(x.abs().max() for x in found[1][1])
    torch.testing.assert_close(*[[x / largest for x in gradients] for _, gradients in found], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", WINDOWED)
def test_all_layers_keep_one_mask_of_their_windows(name, monkeypatch):
    """Of rows that share nothing; the log-probabilities are those with the model's own masks."""
    model, kept = model_of(windowed(name)), {}
    rows = [group(size=1, prompt=prompt)[0] for prompt in (40, 45)]

    def keep(x):
        if x.shape[-2:] == (51, 51):
            kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        logprobs = forward.policy_forward(model, rows, VOCABULARY, 1.0)[0]
    assert len(kept) == 1 or model.config._attn_implementation == "eager"
    monkeypatch.setattr(forward, "masks_of_windows", lambda *_: {})
    torch.testing.assert_close(logprobs, forward.policy_forward(model, rows, VOCABULARY, 1.0)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["mistral", "gemma3", "llama4"])
def test_a_window_changes_what_a_model_sees(name):
    """A tiny random model feels its window, so that the tests above mean something."""
    rows = group()
    short, long = (scored(model_of(windowed(name, size)), rows) for size in (8, 46))
    assert (short - long).abs().max() > 0.1


@pytest.mark.parametrize("name", ["mistral", "gemma4", "llama4"])
def test_a_window_as_long_as_the_longest_row_needs_one_mask(name):
    model, sees, places = model_of(windowed(name, 46)), torch.ones(1, 1, 46, 46, dtype=bool), torch.arange(46)
    all_seen, some_seen = (model_checks.layers_of(model.config, longest) for longest in (46, 47))
    assert not (all_seen.windows or all_seen.chunks) and (some_seen.windows or some_seen.chunks)
    assert isinstance(forward.attention_mask(model, sees, all_seen, places[:, None], places), torch.Tensor)
    torch.testing.assert_close(*sampled(model, longest_row=46), atol=1e-4, rtol=0)
    torch.testing.assert_close(*sampled(model, longest_row=47), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", REFUSED)
def test_where_masks_do_not_help_nothing_is_shared_and_slots_are_refused(name):
    model, rows = model_of(family(name, **{"window_size": 8} if name == "gpt_neo" else {})), group()
    assert forward.token_trees(model, rows) == ([], [])
    one_by_one = torch.cat([scored(model, [row]) for row in rows])
    torch.testing.assert_close(scored(model, rows), one_by_one, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match=rf"cannot sample from this model \({model.config.model_type}\), as it has"):
        TransformersEngine(model, 2, VOCABULARY, longest_row=46)


@pytest.mark.parametrize("name", ["opt", "xglm", "falcon", "biogpt", "gpt_bigcode", "deepseek_v3"])
def test_full_attention_samples_what_it_trains(name):
    model, rows = model_of(family(name)), group()
    assert forward.token_trees(model, rows)[0]
    one_by_one = torch.cat([scored(model, [row]) for row in rows])
    torch.testing.assert_close(scored(model, rows), one_by_one, atol=1e-4, rtol=0)
    torch.testing.assert_close(*sampled(model, begin=40), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in REFUSED])
def test_the_cache_takes_the_bytes_that_are_reckoned(name):
    model = model_of(family(name))
    engine = TransformersEngine(model, 2, VOCABULARY)
    engine.feed(0, np.arange(20), 2, [VOCABULARY], seed=[0])
    engine.step()
    (store,) = engine.slots.cache.stores.values()
    rows, columns = store.size
    assert store.nbytes == rows * columns * bytes_per_token(model.config, model.dtype) > 0


def test_a_window_that_is_switched_off_is_none():
    for config in (
        transformers.Qwen2Config(sliding_window=8, use_sliding_window=False),
        transformers.MistralConfig(sliding_window=None),
    ):
        assert not model_checks.layers_of(config).windows


@pytest.mark.parametrize(
    ("name", "own", "reason"),
    [
        ("Jamba", {}, "Mamba layers of a family whose states are not kept"),
        ("Zamba2", {}, "Mamba layers of a family whose states are not kept"),
        ("Mamba2", {}, "only Mamba layers"),
        ("FalconH1", {"time_step_limit": (0.0, 0.1)}, "limits of time steps"),
        ("MiniMax", {}, "lightning attention layers of a family whose"),
        ("RecurrentGemma", {}, "RG-LRU layers of a family whose"),
        ("Rwkv", {}, "RWKV layers"),
        ("xLSTM", {}, "xLSTM layers"),
        ("GPTNeo", {}, "local attention, which counts columns"),
        ("Gemma3Text", {"use_bidirectional_attention": True}, "attention to later tokens"),
        ("DeepseekV32", {}, "layers of an unknown kind"),
        ("Moshi", {}, "a cache that is not kept"),
        ("GraniteMoeHybrid", {"layer_types": ["mamba"] * 2, "num_hidden_layers": 2}, "only Mamba layers"),
    ],
)
def test_a_refusal_names_the_true_reason(name, own, reason):
    config = getattr(transformers, name + "Config")(**own)
    with pytest.raises(SystemExit, match=rf"{config.model_type}\), as it has {reason}"):
        model_checks.check_layers(config)


def test_llama_4_is_refused_for_rows_whose_queries_have_temperatures():
    config = transformers.Llama4TextConfig(floor_scale=8192)
    model_checks.check_layers(config, 8192)
    with pytest.raises(SystemExit, match="llama4_text., as it has query temperatures"):
        model_checks.check_layers(config, 8193)


@pytest.mark.parametrize("name", ["llama4", "phimoe"])
def test_adapters_leave_routers_alone(name):
    model, rows = loading.with_adapters(model_of(family(name)), 2), group()
    logprobs = forward.policy_forward(model, rows, VOCABULARY, 1.0)[0]
    logprobs.sum().backward()
    assert torch.isfinite(logprobs).all()


@pytest.mark.parametrize("script", ["grpo_llm", "evaluate_llm"])
def test_a_model_is_refused_before_the_first_episode(learn, tmp_path, vocab_size, script):
    model_of(family("mamba", vocab_size=vocab_size)).save_pretrained(tmp_path / "mamba")
    with pytest.raises(SystemExit, match="cannot sample from this model .mamba., as it has only Mamba layers"):
        learn(script, "--model", tmp_path / "mamba", "--tokenizer", "byte", "--num-envs", 4)


@pytest.mark.parametrize("name", ["mistral", "gemma4"])
def test_an_iteration_with_windows(learn, tmp_path, vocab_size, name):
    size = {"vocab_size": vocab_size, "vocab_size_per_layer_input": vocab_size, "max_position_embeddings": 32_768}
    model_of(family(name, sliding_window=8, **size)).save_pretrained(tmp_path / "windowed")
    flags = ["--env-kwargs", json.dumps({"max_turns": 2, "max_action_tokens": 10}), "--num-threads", 1]
    flags += ["--num-envs", 8, "--episodes-per-iteration", 8, "--total-episodes", 8, "--eval-episodes", 0]
    flags += ["--group-size", 4, "--num-minibatches", 1, "--ent-coef", 0.1, "--old-logprobs", "trainer"]
    run_dir = learn("grpo_llm", "--model", tmp_path / "windowed", "--tokenizer", "byte", *flags)
    events = EventAccumulator(str(run_dir)).Reload()
    gap, norm = (events.Scalars(tag)[0].value for tag in ("sampler/gap_max", "losses/grad_norm"))
    assert gap < 1e-4 and 0 < norm < math.inf


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("name", ["gemma4", "lfm2_moe"])
def test_a_saved_model_keeps_its_buffers(name, lora_rank, tmp_path):
    if name == "lfm2_moe":
        shape = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 2}
        shape |= {"num_experts": 4, "num_experts_per_tok": 2, "num_attention_heads": 4, "num_dense_layers": 0}
        layers = ["conv", "full_attention"]
        model = model_of(transformers.Lfm2MoeConfig(**shape, **GROUPED, layer_types=layers, vocab_size=VOCABULARY))
    else:
        model = model_of(family(name))
    stored = [buffer for key, buffer in model.named_buffers() if key in model.state_dict()]
    assert stored
    for buffer in stored:
        torch.nn.init.uniform_(buffer, 0.3, 0.6)
    ids = torch.arange(3, 43)[None]
    before = model(ids, use_cache=False).logits
    policy = loading.with_adapters(model, lora_rank) if lora_rank else model
    checkpoint.save_model(policy, tmp_path / "model", None)
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()(ids, use_cache=False).logits
    torch.testing.assert_close(after, before, atol=1e-4, rtol=0)


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


@pytest.mark.parametrize(
    ("name", "columns"),
    [(name, 64) for name in FAMILIES if name not in ("rwkv", "mamba")] + [(name, 512) for name in WINDOWED],
)
def test_the_preflight_knows_every_family_by_its_shape(name, columns):
    """Also rows of many windows, whose masks, or scores in eager attention, are most of what is kept."""
    config = windowed(name) if name in WINDOWED else family(name)
    args = {"lora_rank": 0, "gradient_checkpointing": "off", "engine": "transformers", "microbatch_tokens": 4 * columns}
    args = SimpleNamespace(**args, num_envs=8, dtype="float32", preflight=True)
    report = preflight.preflight(
        args, config, CPU, critic=False, reference=False, longest_row=columns, world_size=1, memory_gb=80
    )
    model, kept = model_of(config), {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x
        return x

    inputs = {"input_ids": torch.zeros(4, columns, dtype=torch.long), **forward.masks_of_windows(model, columns)}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        forward.without_head(model)(**inputs, use_cache=False)
    held = sum(x.untyped_storage().nbytes() for pointer, x in kept.items() if pointer not in weights)
    names = ("activations", "masks of attention windows")
    estimate = sum(part.bytes for part in report.parts if part.name in names)
    assert 0.5 < estimate / held < 3
