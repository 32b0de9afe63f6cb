"""What a run needs is added up from the config, compared with what there is, and refused with a way out."""

import gc
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

from llm_utils.setup import cgroups, preflight
from llm_utils.setup.loading import with_adapters

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
QWEN_3B = {
    "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
    "intermediate_size": 11008, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip


def estimate(
    device=CUDA, critic=False, reference=False, longest_row=4096, world_size=1, config=None, memory_gb=80, **kwargs
):
    args = {"lora_rank": 0, "gradient_checkpointing": "off", "engine": "vllm", "microbatch_tokens": 4096}
    args |= {"num_envs": 128, "dtype": "auto", "preflight": True}
    config = config or transformers.Qwen2Config(**QWEN_3B)
    return preflight.preflight(
        SimpleNamespace(**{**args, **kwargs}), config, device, critic=critic, reference=reference,
        longest_row=longest_row, world_size=world_size, memory_gb=memory_gb,
    )  # fmt: skip


def size(report, *words):
    return sum(part.bytes for part in report.parts if any(word in part.name for word in words))


def test_ppo_with_a_3b_model_on_80_gb_is_refused_from_the_config_alone():
    with pytest.raises(SystemExit) as error:
        estimate(critic=True, gradient_checkpointing="on")
    message = str(error.value)
    for words in ("--lora-rank", "torchrun with more processes", "learner without a critic", "--no-preflight"):
        assert words in message
    assert "critic: Adam's moments" in message and "only 73.6 GB are available" in message
    report = estimate(critic=True, gradient_checkpointing="on", preflight=False)
    assert not report.fits
    assert 85e9 < size(report, "weights", "moments") - size(report, "gathered") < 88e9  # 14 bytes for each of 6.2e9


def test_with_staleness_vllm_and_the_update_share_the_card():
    """Rows stay in flight, so vLLM doesn't sleep while the trainer works."""
    kwargs = {"lora_rank": 16, "gradient_checkpointing": "on", "preflight": False}
    assert estimate(max_staleness=1, **kwargs).at("update") > estimate(**kwargs).at("update") + 20e9


def test_with_staleness_the_rows_in_flight_keep_their_cache_through_the_update():
    kwargs = {"engine": "transformers", "lora_rank": 16, "gradient_checkpointing": "on", "preflight": False}
    stale, fresh = estimate(max_staleness=1, **kwargs), estimate(**kwargs)
    cache = size(stale, "keys and values")
    assert cache > 10e9 and stale.at("update") - fresh.at("update") == cache
    assert stale.at("rollout") == fresh.at("rollout")
    evaluating = estimate(max_staleness=1, eval_episodes=64, **kwargs)  # beside them, with a cache of its own
    assert evaluating.at("rollout") - stale.at("rollout") == cache and evaluating.at("update") == stale.at("update")
    assert estimate(eval_episodes=64, **kwargs).at("rollout") == fresh.at("rollout")


def test_states_of_the_rows_do_not_grow_with_their_length():
    config = transformers.Qwen3_5TextConfig(hidden_size=1024, num_hidden_layers=8, intermediate_size=3584)
    heads, layers = 32 * 128 * 128 * 4, 6  # float32; 2 of 8 layers are attention
    convolutions = 4 * (2 * 16 + 32) * 128 * 2  # bf16, 4 columns
    kwargs = {"config": config, "engine": "transformers", "preflight": False, "num_envs": 64}
    report, longer = estimate(**kwargs), estimate(longest_row=8192, **kwargs)
    states = size(report, "states of the rows")
    assert 2 * 64 * layers * (heads + convolutions) < states < 2.2 * 64 * layers * (heads + convolutions)
    assert size(longer, "states of the rows") == states
    stale = estimate(max_staleness=1, eval_episodes=64, **kwargs)
    assert size(stale, "states of an evaluation's rows") == states
    assert stale.at("update") - report.at("update") > states
    assert size(estimate(engine="transformers", preflight=False), "states") == 0


def test_without_a_preflight_nothing_of_it_runs(learn, policy_folder, monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError

    monkeypatch.setattr("llm_utils.run.preflight", fail)
    flags = ["--model", policy_folder, "--tokenizer", "byte", "--num-envs", 4]
    flags += ["--env-kwargs", '{"max_turns": 2, "max_action_tokens": 4}']
    flags += ["--episodes-per-iteration", 4, "--group-size", 2, "--total-episodes", 4]
    flags += ["--num-minibatches", 1, "--eval-episodes", 0, "--checkpoint-every", 0, "--num-threads", 1]
    with pytest.raises(AssertionError):
        learn("rloo_llm", *flags)
    learn("rloo_llm", *flags, "--no-preflight")


def test_what_mends_it_fits():
    for kwargs in (
        {"lora_rank": 16, "gradient_checkpointing": "on"},
        {"engine": "vllm-server", "gradient_checkpointing": "on"},
        {"engine": "vllm-server", "critic": True, "gradient_checkpointing": "on", "world_size": 2},
    ):
        report = estimate(**kwargs)
        assert report.fits and report.peak < 73.6e9


def test_every_flag_lowers_what_it_is_named_for():
    one = estimate(preflight=False)
    assert size(estimate(preflight=False, gradient_checkpointing="on"), "activations") < size(one, "activations") / 8
    assert size(estimate(preflight=False, lora_rank=8), "moments") < size(one, "moments") / 50
    half = estimate(preflight=False, microbatch_tokens=2048, longest_row=2048)
    assert size(half, "activations") == pytest.approx(size(one, "activations") / 2, rel=0.01)
    few, many = (estimate(preflight=False, engine="transformers", num_envs=n) for n in (8, 16))
    assert size(many, "keys and values") == 2 * size(few, "keys and values")
    four = estimate(preflight=False, engine="vllm-server", world_size=4)
    assert 4 * size(four, "moments") == pytest.approx(size(one, "moments"))
    assert size(one, "reference") == 0 < size(estimate(preflight=False, reference=True), "reference")
    assert estimate(dtype="float32", preflight=False).peak > one.peak


def test_a_long_row_is_a_microbatch_of_its_own_and_its_logits_stay_bounded():
    long = estimate(longest_row=32_768, gradient_checkpointing="on", preflight=False)
    short = estimate(gradient_checkpointing="on", preflight=False)
    assert size(long, "activations") == pytest.approx(8 * size(short, "activations"), rel=0.01)
    assert size(long, "logits") == size(short, "logits") <= 4 * 2**29
    with pytest.raises(SystemExit, match="max_context_tokens"):
        estimate(longest_row=131_072, lora_rank=8)


def test_an_entropy_bonus_is_one_copy_of_the_logits_more():
    """On a GPU a microbatch is measured; on a CPU this estimate is all there is."""
    for device in (CPU, CUDA):
        plain, none, bonus = (estimate(device, preflight=False, **kwargs) for kwargs in ({}, {"ent_coef": 0.0},
                                                                                       {"ent_coef": 0.01}))  # fmt: skip
        assert size(plain, "logits") == size(none, "logits") and 4 * size(bonus, "logits") == 5 * size(plain, "logits")


def small_config(**kwargs):
    shape = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaConfig(**{**shape, "intermediate_size": 160, "vocab_size": 500, **kwargs})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "lora_rank"), [("llama", 0), ("llama", 16), ("gpt2", 0)])
def test_counted_activations_are_those_that_autograd_keeps(kind, lora_rank, dtype):
    gpt2 = transformers.GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=500)
    config = small_config() if kind == "llama" else gpt2
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    whole = model
    if lora_rank:
        pytest.importorskip("peft")
        model = with_adapters(model, lora_rank)
    kept = {p.untyped_storage().data_ptr() for p in model.parameters()}
    total = []

    def keep(x):
        if x.untyped_storage().data_ptr() not in kept:
            kept.add(x.untyped_storage().data_ptr())
            total.append((x.untyped_storage().nbytes(), x))
        return x

    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            whole.base_model(input_ids=torch.zeros(2, 96, dtype=torch.long), use_cache=False)
    except RuntimeError as error:
        pytest.skip(f"no {dtype} here: {error}")
    empty = preflight.empty_model(config, dtype, lora_rank)
    assert [p.dtype for p in empty.parameters()] == [p.dtype for p in model.parameters()]
    found, layer = preflight.activations(empty, 2, 96)
    assert found == pytest.approx(sum(n for n, _ in total), rel=0.01)
    assert 0.3 * found < layer < 0.4 * found


def test_a_float32_head_is_a_copy_of_the_head():
    """In rollouts and updates, and none of it is there where all is in float32, or where vLLM samples."""
    def head(report, when):
        return sum(part.bytes for part in report.parts if part.when == when and "head in float32" in part.name)

    kwargs = {"preflight": False, "float32_head": True}
    copy = 4 * QWEN_3B["vocab_size"] * QWEN_3B["hidden_size"]
    ours, vllm = estimate(engine="transformers", **kwargs), estimate(**kwargs)
    assert [head(ours, when) for when in ("rollout", "update")] == [copy, copy]
    assert [head(vllm, when) for when in ("rollout", "update")] == [0, copy]
    assert head(ours.measured(1), "update") == 0 and head(ours.measured(1), "rollout") == copy
    assert head(estimate(engine="transformers", dtype="float32", **kwargs), "update") == 0


def test_adapters_add_up_no_gradients_of_the_head():
    kwargs = {"preflight": False, "lora_rank": 16}
    assert size(estimate(**kwargs), "embedding and head") == 0
    assert size(estimate(critic=True, **kwargs), "embedding and head") > 1e9


def test_with_adapters_the_transformers_engine_has_a_merged_copy():
    kwargs = {"preflight": False, "engine": "transformers"}
    with_adapters, without = (estimate(lora_rank=rank, **kwargs) for rank in (16, 0))
    assert size(with_adapters, "sampler") == size(without, "policy: weights") > 6e9 and size(without, "sampler") == 0
    assert "sampler: weights" in with_adapters.table()
    assert size(estimate(preflight=False, lora_rank=16), "sampler") == 0  # vLLM's share holds its own


def test_where_layers_do_not_run_on_shapes_a_formula_counts(monkeypatch):
    model = preflight.empty_model(small_config(), torch.bfloat16, 0)
    exact, _ = preflight.activations(model, 2, 96)

    def fail(*args, **kwargs):
        raise RuntimeError("needs data")

    monkeypatch.setattr(type(model.model), "forward", fail)
    assert preflight.activations(model, 2, 96)[0] == pytest.approx(exact, rel=0.25)


def test_a_measured_microbatch_replaces_the_estimate():
    model = transformers.AutoModelForCausalLM.from_config(small_config(vocab_size=4000)).float().eval()
    try:
        found = preflight.measure(model, 4096, 256, 4000)
    except (RuntimeError, OSError) as error:
        pytest.skip(str(error))
    logits = 4096 * 4000 * 4
    assert 2 * logits < found < 6 * logits + 100e6
    assert all(p.grad is None for p in model.parameters())
    report = estimate(preflight=False)
    assert report.measured(10**9).at("update") == report.at("update") - size(report, "activations", "logits") + 10**9


@pytest.mark.slow
def test_what_an_entropy_bonus_takes():
    """Of a model that is nothing beside its logits: as many copies of them as the estimate has."""
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "vocab_size": 32_000}
    model = transformers.AutoModelForCausalLM.from_config(small_config(**shape)).float().eval()
    found = {}
    for entropy in (False, True, False, True):  # the first ones also read in code
        try:
            taken = preflight.measure(model, 1024, 256, 32_000, entropy=entropy)
        except (RuntimeError, OSError) as error:
            pytest.skip(str(error))
        found[entropy] = taken / (1024 * 32_000 * 4)
    assert found[False] == pytest.approx(preflight.LOGITS_COPIES, abs=0.3)
    assert found[True] - found[False] == pytest.approx(1, abs=0.3)


def test_what_waits_for_the_garbage_collector_does_not_hide_what_a_microbatch_takes(monkeypatch):
    model = transformers.AutoModelForCausalLM.from_config(small_config(vocab_size=4000)).float().eval()
    forward = preflight.policy_forward

    def collect_and_run(*args):
        gc.collect()
        return forward(*args)

    monkeypatch.setattr(preflight, "policy_forward", collect_and_run)
    garbage = [torch.ones(100_000_000)]
    garbage.append(garbage)
    del garbage
    try:
        assert preflight.measure(model, 4096, 256, 4000) > 2 * 4096 * 4000 * 4
    except (RuntimeError, OSError) as error:
        pytest.skip(str(error))


def test_main_memory_is_shared_by_the_processes_of_a_machine(monkeypatch):
    whole = preflight.memory_of(CPU)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert 0 < preflight.memory_of(CPU) < 0.7 * whole


def test_files_in_the_page_cache_of_a_container_make_room(monkeypatch, tmp_path):
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    assert preflight.memory_of(CPU) == 100_000
    (tmp_path / "memory.stat").write_text("anon 300000\ninactive_file 500000\nactive_file 100000\n")
    assert preflight.memory_of(CPU) == 600_000


def test_the_shipped_policy_fits_a_laptop(policy_folder):
    config = transformers.AutoConfig.from_pretrained(policy_folder)
    kwargs = {"config": config, "engine": "transformers", "critic": True, "memory_gb": 4}
    assert estimate(CPU, longest_row=2048, **kwargs).peak < 2e9


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="a process's peak is read from /proc")
@pytest.mark.slow
@pytest.mark.parametrize("case", [{}, {"critic": True}])
def test_a_process_takes_what_was_predicted(case):
    """As the benchmark does for 135M parameters; of a small process more is noise."""
    path = Path(__file__).parents[3] / "benchmarks" / "performance" / "preflight.py"
    spec = importlib.util.spec_from_file_location("preflight_benchmark", path)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    shape = {**benchmark.SHAPE, "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 16_384}
    found = benchmark.check({**case, "updates": 1}, shape)
    assert found["measured"] > 2e8
    assert 0.65 < found["predicted"] / found["measured"] < 1.5
