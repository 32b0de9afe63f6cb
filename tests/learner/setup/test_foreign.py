"""Models and adapters of strangers: their files are data, and whatever is wrong with them is one line."""

import json
import shutil

import pytest
import torch

from agent_r1_tools import bounded
from llm_utils.imitation.demonstrations import read_rows
from llm_utils.setup import foreign, pass_rates
from llm_utils.setup.loading import load_policy, merge_adapters
from llm_utils.setup.preflight import preflight
from llm_utils.setup.sources import tokenizer_source

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def adapters(policy_folder, tmp_path_factory):
    """LoRA adapters of the shipped policy, as peft writes them."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    folder = tmp_path_factory.mktemp("adapters")
    peft.get_peft_model(load_policy(policy_folder, CPU), config).save_pretrained(folder)
    return folder


@pytest.fixture
def changed(adapters, tmp_path):
    """A copy of the adapters with other settings."""

    def change(**settings):
        folder = tmp_path / "adapters"
        shutil.copytree(adapters, folder, dirs_exist_ok=True)
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))
        return folder

    return change


def refusal(call, *args):
    with pytest.raises(SystemExit) as caught:
        call(*args)
    said = str(caught.value)
    assert "\n" not in said and "\x1b" not in said and len(said) < 1500, said
    return said


NAN, INFINITE, HANGS = float("nan"), float("inf"), "(([a-z_.0-9])*)*!"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"lora_alpha": NAN}, "lora_alpha has nan"),
        ({"lora_alpha": INFINITE}, "lora_alpha has inf"),
        ({"lora_alpha": 1e39}, "lora_alpha has 1e+39"),
        ({"lora_alpha": -1e300}, "lora_alpha has -1e+300"),
        ({"lora_alpha": 10**400}, "lora_alpha has 1000"),
        ({"lora_alpha": "16"}, "a scale (lora_alpha, alpha_pattern) is '16'"),
        ({"lora_alpha": [16]}, "a scale (lora_alpha, alpha_pattern) is [16]"),
        ({"alpha_pattern": {"q_proj": NAN}}, "alpha_pattern has nan"),
        ({"alpha_pattern": {"q_proj": "x"}}, "is 'x', which is not a number"),
        ({"r": 10**7}, "r has 10000000"),
        ({"r": 100_000}, "a rank (r, rank_pattern) is 100000"),
        ({"r": 0}, "a rank (r, rank_pattern) is 0"),
        ({"r": True}, "a rank (r, rank_pattern) is True"),
        ({"rank_pattern": {"q_proj": 50_000}}, "a rank (r, rank_pattern) is 50000"),
        ({"init_lora_weights": "pissa_niter_999999999"}, "asks for 999999999 iterations"),
        ({"layer_replication": [[0, 10**6]]}, "layer_replication must be a few pairs"),
        ({"layer_replication": [[0, 1]] * 5000}, "layer_replication must be a few pairs"),
        ({"layer_replication": "x"}, "layer_replication must be a few pairs"),
        ({"trainable_token_indices": [0, 10**12]}, "trainable_token_indices has 1000000000000"),
        ({"target_modules": "(unclosed"}, "target_modules is not a valid pattern"),
        ({"rank_pattern": {"*": 2}}, "rank_pattern is not a valid pattern"),
        ({"peft_type": "PROMPT_TUNING", "tokenizer_kwargs": {"trust_remote_code": True}}, "only LORA is supported"),
        ({"peft_type": None}, "only LORA is supported"),
        ({"megatron_config": {"x": 1}, "megatron_core": "evil"}, "megatron_config names code"),
        ({"attn_implementation": "org/name"}, "attn_implementation is 'org/name'; it may name code of a hub"),
        ({"rank_pattern": 5}, "rank_pattern is 5, which has the wrong type"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern is ['q_proj'], which has the wrong type"),
        ({"alpha_pattern": 5}, "alpha_pattern is 5, which has the wrong type"),
        ({"target_modules": 5}, "target_modules is 5, which has the wrong type"),
        ({"target_modules": {"q_proj": 1}}, "target_modules is {'q_proj': 1}, which has the wrong type"),
        ({"target_modules": [["q_proj"]]}, "target_modules is [['q_proj']], which has the wrong type"),
        ({"target_modules": True}, "target_modules is True, which has the wrong type"),
        ({"exclude_modules": 1.5}, "exclude_modules is 1.5, which has the wrong type"),
        ({"modules_to_save": 5}, "modules_to_save is 5, which has the wrong type"),
        ({"modules_to_save": [5]}, "modules_to_save is [5], which has the wrong type"),
        ({"layers_pattern": 5}, "layers_pattern is 5, which has the wrong type"),
        ({"layers_to_transform": "x"}, "layers_to_transform is 'x', which has the wrong type"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes', which has the wrong type"),
        ({"use_dora": [1]}, "use_dora is [1], which has the wrong type"),
        ({"init_lora_weights": [5]}, "init_lora_weights is [5], which has the wrong type"),
        ({"lora_dropout": "0.1"}, "lora_dropout is '0.1', which has the wrong type"),
        ({"bias": 5}, "bias is 5, which has the wrong type"),
        ({"target_modules": "\x1b[2J", "loftq_config": "\x1b[2J"}, "loftq_config is '\\x1b[2J', which has the wrong"),
    ],
    ids=str,
)
def test_settings_of_adapters_that_are_refused(policy_folder, changed, settings, says):
    folder = changed(**settings)
    said = refusal(merge_adapters, load_policy(policy_folder, CPU), str(folder))
    assert said.startswith(f"--adapter {folder}: {folder}/adapter_config.json") and says in said


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": HANGS},
        {"target_modules": "(.*)*(.*)*(.*)*(.*)*x"},
        {"exclude_modules": HANGS},
        {"rank_pattern": {HANGS: 2}},
        {"alpha_pattern": {"q_proj": 2, "((.*)*)*!": 3}},
        {"modules_to_save": [HANGS]},
        {"layers_pattern": HANGS, "layers_to_transform": [0]},
        {"layers_pattern": ["layers", HANGS], "layers_to_transform": [0]},
        {"rank_pattern": {f"a{'.*' * (n % 40)}b{n}": 2 for n in range(20_000)}},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_patterns_of_adapters_that_take_for_ever_are_refused(policy_folder, changed, settings, monkeypatch):
    monkeypatch.setattr(foreign, "PATTERN_SECONDS", 0.5)
    said = refusal(merge_adapters, load_policy(policy_folder, CPU), str(changed(**settings)))
    assert f"{next(iter(settings))} takes more than 0.5 seconds to match with the model's modules" in said


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"target_modules": r".*\.(self_attn|mlp)\.(?:q|k|v|o|gate|up|down)_proj"},
        {"target_modules": r"(?:.*?(?:attn|mlp).*?(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj).*?)"},
        {"alpha_pattern": {"q_proj": 4, r"layers\.0\.mlp\..*": 3.5}},
        {"rank_pattern": {"q_proj": 2, r"^.*mlp.*$": 2}},
        {"lora_alpha": 16.5, "use_rslora": True},
        {"exclude_modules": "lm_head"},
        {"layers_to_transform": [0, 1, 2, 3, 4, 5, 6, 7], "layers_pattern": "layers"},
        {"r": 8, "rank_pattern": {".*_proj": 2}},
    ],
    ids=str,
)
def test_adapters_that_are_meant_well_are_added(policy_folder, changed, settings):
    peft = pytest.importorskip("peft")
    folder = changed(**settings)
    expected = peft.PeftModel.from_pretrained(load_policy(policy_folder, CPU), folder).merge_and_unload()
    merged = merge_adapters(load_policy(policy_folder, CPU), str(folder)).state_dict()
    assert all(torch.equal(weight, merged[name]) for name, weight in expected.state_dict().items())


def test_weights_that_are_finite_only_before_they_are_added(policy_folder, adapters, changed):
    safetensors = pytest.importorskip("safetensors.torch")
    weights = safetensors.load_file(adapters / "adapter_model.safetensors")
    folder = changed(lora_alpha=1_000_000)
    safetensors.save_file({name: w * 1e18 for name, w in weights.items()}, folder / "adapter_model.safetensors")
    said = refusal(merge_adapters, load_policy(policy_folder, CPU), str(folder))
    assert "with the adapters, " in said and said.endswith("is not finite")


DAMAGE = {
    "nested": b"[" * 100_000,
    "nested objects": b'{"a":' * 100_000,
    "a list": b"[]",
    "a number": b"5",
    "no JSON": b"{'a': 1}",
    "half": b'{"peft_type": "LORA", "r"',
    "empty": b"",
    "UTF-16": '{"r": 2}'.encode("utf-16"),
    "Latin-1": '{"r": "é"}'.encode("latin-1"),
    "a huge number": b'{"r": ' + b"9" * 10_000 + b"}",
    "too large": b" " * (17 << 20) + b"{}",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_configs_are_named(policy_folder, changed, tmp_path, damage):
    folder = changed()
    (folder / "adapter_config.json").write_bytes(DAMAGE[damage])
    said = refusal(merge_adapters, load_policy(policy_folder, CPU), str(folder))
    assert said.startswith(f"--adapter {folder}: {folder}/adapter_config.json ")
    for name in ("config.json", "generation_config.json", "model.safetensors.index.json"):
        model = tmp_path / f"model {name}"
        shutil.copytree(policy_folder, model)
        (model / name).write_bytes(DAMAGE[damage])
        assert refusal(load_policy, model, CPU).startswith(f"--model {model}: {model}/{name} ")


@pytest.fixture
def model(policy_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(policy_folder, folder)

    def change(**settings):
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))
        return folder

    return change


NAMED = ["org/name", "org/name:function", "paged|org/name", "org/name@v1", "kernels-community/x", " org/name"]
NAMED += ["org\\name", "org\uff0fname", {"": "org/name"}, {"text_config": "org/name"}]
KEYS = ["attn_implementation", "_attn_implementation", "experts_implementation", "_attn_implementation_internal"]


@pytest.mark.parametrize("value", NAMED, ids=str)
@pytest.mark.parametrize("key", [*KEYS, "ATTN_IMPLEMENTATION"])
def test_code_of_a_hub_that_a_config_names_is_never_loaded(model, key, value):
    for settings in ({key: value}, {"text_config": {key: value}}, {"parts": [{"vision": {key: value}}]}):
        folder = model(**{"text_config": None, "parts": None} | settings)
        assert "may name code of a hub, which is never run" in refusal(load_policy, folder, CPU)
        (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | {key: None}))


def test_code_of_a_hub_in_other_configs(model):
    folder = model()
    (folder / "generation_config.json").write_text('{"attn_implementation": "org/name"}')
    assert "generation_config.json: attn_implementation is 'org/name'" in refusal(load_policy, folder, CPU)


@pytest.mark.parametrize("value", ["eager", "sdpa", None, {"": "eager"}])
def test_attention_of_transformers_may_be_named(model, value):
    load_policy(model(attn_implementation=value), CPU)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_hidden_layers": 10**9}, {"num_hidden_layers": -1}, {"hidden_size": -16}, {"hidden_size": "16"},
        {"hidden_size": None}, {"vocab_size": 10**12}, {"rope_scaling": {"rope_type": "evil"}}, {"rope_scaling": 5},
        {"dtype": "evil"}, {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        {"quantization_config": {"quant_method": "torchao", "quant_type": "int4wo"}}, {"num_attention_heads": 0},
        {"hidden_act": "evil"}, {"model_type": "\x1b[2Jevil"}, {"model_type": 5}, {"layer_types": ["evil"]},
    ],
    ids=str,
)  # fmt: skip
def test_settings_of_models_that_cannot_be_are_one_line(model, settings):
    folder = model(**settings)
    assert refusal(load_policy, folder, CPU).startswith(f"--model {folder}")


def test_a_preflight_says_in_a_line_what_is_wrong(model):
    args = type("Args", (), {"engine": "transformers", "lora_rank": 0})
    folder = model(rope_scaling={"rope_type": "evil"})
    call = dict(critic=False, reference=False, longest_row=10, world_size=1)
    assert f"--model {folder}" in refusal(lambda: preflight(args, folder, CPU, **call))


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {"x": 5}}, {"weight_map": {"x": "../a"}},
                                   {"weight_map": {"x": "/etc/passwd"}}, {"weight_map": {"x": "missing"}}])  # fmt: skip
def test_an_index_names_files_beside_it(model, index):
    folder = model()
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model.safetensors.index.json" in refusal(load_policy, folder, CPU)


def test_weights_that_are_damaged_are_one_line(model, changed, policy_folder):
    folder = model()
    weights = (folder / "model.safetensors").read_bytes()
    for content in (weights[: len(weights) // 2], weights[:5], b"", (1 << 40).to_bytes(8, "little") + b"{}"):
        (folder / "model.safetensors").write_bytes(content)
        assert str(folder) in refusal(load_policy, folder, CPU)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"no pickle")
    assert str(folder) in refusal(load_policy, folder, CPU)


@pytest.mark.parametrize("weights", [None, {}, "all", "no pickle"])
def test_adapters_without_safetensors_are_refused(policy_folder, adapters, changed, weights):
    """Of others nobody would see that they lack weights, and the model would be played as it is."""
    safetensors = pytest.importorskip("safetensors.torch")
    folder = changed()
    (folder / "adapter_model.safetensors").unlink()
    if weights == "no pickle":
        (folder / "adapter_model.bin").write_bytes(b"no pickle")
    elif weights is not None:
        there = safetensors.load_file(adapters / "adapter_model.safetensors") if weights == "all" else weights
        torch.save(there, folder / "adapter_model.bin")
    said = refusal(merge_adapters, load_policy(policy_folder, CPU), str(folder))
    assert said.startswith(f"--adapter {folder}: {folder} has no adapter_model.safetensors; ")


RED = "\x1b[31mred\nFAKE LINE"


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": RED}, {"model_type": "red\nFAKE"}, {"model_type": "a b"}, {"model_type": "\u202eevil"},
        {"model_type": [RED]}, {"text_config": {"model_type": RED}}, {"model_type": "qwen2\n"}, {"model_type": "a/b"},
        {"rope_scaling": {"rope_type": RED}}, {"rope_scaling": {"type": RED}}, {"rope_parameters": {"rope_type": RED}},
        {"quantization_config": {"quant_method": RED}},
    ],
    ids=str,
)  # fmt: skip
def test_transformers_prints_nothing_of_a_stranger_as_it_is(model, settings, capfd):
    folder = model(**settings)
    (folder / "tokenizer.json").write_text("{}")
    for call in (load_policy, folder, CPU), (tokenizer_source, None, str(folder), "any"):
        said = refusal(*call)
        assert said.startswith(f"--model {folder}: {folder}/config.json: ") and "which is not a valid name" in said
    said = refusal(tokenizer_source, str(folder), "org/name", "any")
    assert said.startswith(f"--tokenizer {folder}: {folder}/config.json: ")
    assert "FAKE" not in capfd.readouterr().err


NO_NUMBERS = [NAN, INFINITE, -INFINITE, {"__float__": "NaN"}, {"__float__": "-Infinity"}, [NAN]]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=str)
@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta", "of_a_stranger"])
def test_numbers_of_a_config_are_finite(model, key, value):
    for settings in ({key: value}, {"text_config": {key: value}}):
        said = refusal(load_policy, model(**{"text_config": None, key: 1.0} | settings), CPU)
        assert f"config.json: {next(iter(settings))} has " in said and said.endswith("; numbers must be finite")


def test_limits_that_state_space_models_leave_open_may_be_infinite():
    foreign.check_settings({"time_step_limit": [0.0, INFINITE]}, "config.json")
    with pytest.raises(foreign.RefusedError):
        foreign.check_settings({"time_step_limit": [NAN, INFINITE]}, "config.json")


@pytest.mark.parametrize("settings", [{"hidden_size": 10**9}, {"intermediate_size": 48}, {"vocab_size": 7}], ids=str)
def test_weights_of_other_sizes_are_told_without_a_table(model, settings, capfd):
    folder = model(**settings)
    said = refusal(load_policy, folder, CPU)
    assert said.startswith(f"--model {folder} ") and "its weights have other sizes than its config.json says" in said
    assert "LOAD REPORT" not in capfd.readouterr().err


@pytest.mark.parametrize("damage", [*DAMAGE, "hidden_size"])
def test_a_damaged_config_is_no_fault_of_the_tokenizer(model, damage):
    folder = model(hidden_size="big")
    (folder / "tokenizer.json").write_text("{}")
    if damage in DAMAGE:
        (folder / "config.json").write_bytes(DAMAGE[damage])
    assert refusal(tokenizer_source, None, str(folder), "any").startswith(f"--model {folder}: ")


def test_adapters_beside_the_weights_of_a_model_are_refused(model):
    folder = model()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/name"}')
    assert "has both adapter_config.json and config.json" in refusal(load_policy, folder, CPU)


def test_pass_rates_and_rows_of_strangers(tmp_path, monkeypatch):
    file = tmp_path / "rates.json"
    for content in DAMAGE.values():
        file.write_bytes(content)
        assert "this is not a file of evaluate_llm.py --samples" in refusal(
            pass_rates.task_probabilities, str(file), "id", "train", 5
        )
    monkeypatch.setattr(bounded, "MAX_LINE", 1000)
    file.write_text('{"tokens": [' + "1, " * 1000 + "1]}")
    assert "the line has more than" in refusal(read_rows, str(file), 5)
