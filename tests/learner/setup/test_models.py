"""What is checked and chosen before models are loaded, how they are loaded, and sums that every device can repeat."""

import copy
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers
from ppo_llm import Critic

from llm_utils import run
from llm_utils.recovery.checkpoint import save_policy
from llm_utils.sampling import deterministic
from llm_utils.setup import loading, model_checks

CPU = torch.device("cpu")


def test_a_context_beyond_the_models_positions_is_refused_with_the_flag():
    from transformers import GPT2Config, Qwen2Config

    model_checks.check_context(Qwen2Config(max_position_embeddings=4096), 4096)
    for config in (Qwen2Config(max_position_embeddings=1024), GPT2Config(n_positions=1024)):
        with pytest.raises(SystemExit, match=r"""--env-kwargs '\{"max_context_tokens": 1024\}'"""):
            model_checks.check_context(config, 1025)


def test_learning_rates_suit_the_model():
    assert run.default_learning_rates("tiny", 0) == run.default_learning_rates("tiny", 16) == (3e-4, 1e-3)
    assert run.default_learning_rates("Qwen/Qwen2.5-3B-Instruct", 0) == (1e-6, 1e-5)
    assert run.default_learning_rates("./folder", 16) == (1e-5, 1e-5)


def test_a_cpu_computes_in_float32_unless_asked_and_a_gpu_in_bf16(monkeypatch):
    for name in ("auto", "float32"):
        assert loading.choose_dtype(name, CPU) == torch.float32
    gpu = torch.device("cuda")
    assert [loading.choose_dtype(name, gpu) for name in ("auto", "bfloat16")] == [torch.bfloat16] * 2
    assert loading.choose_dtype("float32", gpu) == torch.float32
    monkeypatch.setattr(loading, "TRIAL", "pass")
    assert loading.choose_dtype("bfloat16", CPU) == torch.bfloat16


def test_the_trial_multiplies_in_bf16():
    """On a processor that can't, the trial is what dies, not the run."""
    namespace: dict = {}
    try:
        loading.choose_dtype("bfloat16", CPU)
    except SystemExit as error:
        pytest.skip(str(error))
    exec(loading.TRIAL, namespace)
    assert namespace["layer"].weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("how", ["import os; os.kill(os.getpid(), 4)", "raise ValueError('no bf16')"])
def test_a_processor_without_bf16_is_refused(monkeypatch, how):
    monkeypatch.setattr(loading, "TRIAL", how)
    with pytest.raises(SystemExit, match="bf16 failed on this processor .*(status -4|no bf16).*use float32"):
        loading.choose_dtype("bfloat16", CPU)


def test_a_policy_is_loaded_in_the_dtype_that_was_asked_for(policy_folder):
    assert loading.load_policy(policy_folder, CPU).dtype == torch.float32
    assert loading.load_policy(policy_folder, CPU, dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["own", "qwen2"])
@pytest.mark.parametrize("script", ["ppo_llm", "sft_llm", "evaluate_llm"])
def test_code_that_comes_with_a_model_is_never_run(learn, policy_folder, tmp_path, monkeypatch, script, kind):
    """Nobody is asked, either. Where transformers has the class itself, it takes its own."""
    folder = tmp_path / "model"
    shutil.copytree(policy_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    classes = {name: f"code.{name}" for name in ("AutoConfig", "AutoModel", "AutoModelForCausalLM")}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": kind, "auto_map": classes}))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    asked = []
    monkeypatch.setattr("builtins.input", lambda *words: asked.append(words) or "y")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"tokens": [1, 2, 3], "action_mask": [0, 1, 1]}')
    flags = ["--model", folder, "--tokenizer", "byte", "--env-kwargs", '{"max_turns": 2, "max_action_tokens": 4}']
    flags += {
        "ppo_llm": ["--num-envs", 4, "--episodes-per-iteration", 4, "--num-minibatches", 1, "--total-episodes", 4,
                    "--critic-warmup", 0, "--eval-episodes", 0, "--checkpoint-every", 0, "--num-threads", 1],
        "sft_llm": ["--data", rows, "--num-steps", 1, "--num-threads", 1],
        "evaluate_llm": ["--episodes", 1, "--num-envs", 1, "--num-threads", 1],
    }[script]  # fmt: skip
    if kind == "own":
        with pytest.raises(SystemExit, match="code that comes with a model is never run"):
            learn(script, *flags)
    else:
        learn(script, *flags)
    assert not asked and not (tmp_path / "ran").exists()


def test_a_float32_head_is_saved_and_copied_like_any_other(policy_folder, tmp_path):
    policy = loading.load_policy(policy_folder, CPU, dtype=torch.bfloat16, float32_head=True)
    twin = copy.deepcopy(policy)
    with torch.no_grad():
        twin.get_input_embeddings().weight.zero_()
    ids = torch.arange(5)[None]
    assert policy(ids).logits.dtype == torch.float32 and policy(ids).logits.any() and not twin(ids).logits.any()
    policy.save_pretrained(tmp_path)
    again = loading.load_policy(tmp_path, CPU, dtype=torch.bfloat16)
    assert all(torch.equal(x, y) for x, y in zip(policy.parameters(), again.parameters(), strict=True))


def test_a_critics_backbone_checkpoints_its_activations_too(policy_folder):
    from transformers import AutoModel

    found, calls = [], []
    for checkpointing in (False, True):
        backbone = AutoModel.from_pretrained(policy_folder, dtype=torch.float32).eval()
        assert not backbone.is_activation_checkpointing
        if checkpointing:
            loading.enable_gradient_checkpointing(backbone)
            assert backbone.is_activation_checkpointing
            backbone.train()
        backbone.layers[1].self_attn.register_forward_hook(lambda *_, now=checkpointing: calls.append(now))
        states = backbone(input_ids=torch.arange(24).reshape(2, 12), use_cache=False).last_hidden_state
        states.square().sum().backward()
        found.append([states.detach(), *(p.grad for p in backbone.parameters())])
    assert calls.count(False) == 1 and calls.count(True) == 2
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


def test_fixed_point_sums_are_those_of_floating_point():
    torch.manual_seed(0)
    probabilities = torch.randn(16, 5000).mul(3).softmax(-1)
    probabilities[:, 1000:3000] = 0  # as --top-p leaves them
    found = deterministic.fixed_point_sum(probabilities)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, probabilities.double().cumsum(-1).float(), atol=2e-7, rtol=0)
    assert (found.diff() >= 0).all() and (found[:, 999:2999] == found[:, 1000:3000]).all()
    assert torch.equal(deterministic.cumulative_sum(probabilities), probabilities.cumsum(-1))



def test_a_step_in_bf16_does_not_hold_two_gradients(policy_folder):
    """When Adam moves the float32 copies, the bf16 gradients are gone."""
    from llm_utils.training.optimizer import Float32AdamW

    policy = loading.load_policy(policy_folder, CPU, dtype=torch.bfloat16)
    adam, seen = Float32AdamW([policy], [1e-3], (0.9, 0.95)), []
    adam.adam.register_step_pre_hook(lambda *_: seen.extend(p.grad for p in policy.parameters()))
    policy(torch.arange(5)[None]).logits.float().square().sum().backward()
    assert adam.step(1.0)[0] > 0 and seen and not any(grad is not None for grad in seen)


def test_arguments_of_a_policy_are_optional(policy_folder):
    args = SimpleNamespace(lora_rank=0, gradient_checkpointing="on")
    modules = loading.load_policy(policy_folder, CPU, args).modules()
    assert any(getattr(module, "gradient_checkpointing", False) for module in modules)


def test_loading_and_saving_draw_no_bars_and_leave_those_of_others(policy_folder, tmp_path, capfd):
    """Into our progress bar; a user's own `from_pretrained` shows what it did before."""
    policy = loading.load_policy(policy_folder, CPU)
    save_policy(policy, tmp_path, policy.state_dict())
    Critic(policy_folder, SimpleNamespace(gradient_checkpointing="off"), torch.float32)
    assert capfd.readouterr().err == ""
    transformers.AutoModelForCausalLM.from_pretrained(policy_folder)
    assert "Loading weights" in capfd.readouterr().err


def test_vocabulary_check():
    model = SimpleNamespace(get_input_embeddings=lambda: torch.nn.Embedding(10, 2))
    model_checks.check_vocabulary(model, 10)
    with pytest.raises(SystemExit, match="11 tokens, but the model's embedding has only 10 rows"):
        model_checks.check_vocabulary(model, 11)
