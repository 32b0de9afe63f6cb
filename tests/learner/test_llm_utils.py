"""What the learners share: the optimizer, checkpoints, where models come from."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from llm_utils import distributed
from llm_utils.records import earlier_runs
from llm_utils.recovery import checkpoint
from llm_utils.sampling.make_engine import make_engine
from llm_utils.setup import loading, model_checks, sources
from llm_utils.training import forward, optimizer


def linear(dtype, weight=1.0):
    module = torch.nn.Linear(4, 1, bias=False, dtype=dtype)
    torch.nn.init.constant_(module.weight, weight)
    return module


def step(module, adam, size=1.0):
    (module.weight * size).sum().backward()
    return adam.step(max_grad_norm=1.0)


def test_small_steps_of_bf16_weights_add_up():
    """One step of 1e-4 is lost in a bf16 weight of 1; a hundred of them are not, as in float32."""
    modules = [linear(torch.bfloat16), linear(torch.float32)]
    for module in modules:
        adam = optimizer.Float32AdamW([module], [1e-4], betas=(0.9, 0.95))
        step(module, adam)
        if module.weight.dtype == torch.bfloat16:
            assert (module.weight == 1).all()
        for _ in range(99):
            step(module, adam)
    torch.testing.assert_close(modules[0].weight.float(), modules[1].weight, atol=4e-3, rtol=0)
    assert (modules[0].weight < 0.995).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_many_microbatches_add_up(dtype):
    """1000 of 1/1000 are 1; in bf16 the sum would stop at a quarter, where one more is less than half a step."""
    module = linear(dtype)
    adam = optimizer.Float32AdamW([module], [1e-4], betas=(0.9, 0.95))
    for _ in range(1000):
        (module.weight * 1e-3).sum().backward()
    assert adam.step(max_grad_norm=1e9) == pytest.approx([2.0], rel=1e-2)  # of four weights
    (module.weight * 1e-3).sum().backward()
    assert adam.step(max_grad_norm=1e9) == pytest.approx([2e-3], rel=1e-2)  # nothing is left of the step before


def test_every_module_has_its_own_rate_and_norm():
    modules = [linear(torch.float32), linear(torch.float32)]
    adam = optimizer.Float32AdamW(modules, [1e-2, 1e-3], betas=(0.9, 0.95))
    adam.scale_learning_rates(0.5)
    (modules[0].weight.sum() + 100 * modules[1].weight.sum()).backward()
    norms = adam.step(max_grad_norm=1.0)
    assert norms == pytest.approx([2, 200])
    moved = [1 - float(module.weight.detach()[0, 0]) for module in modules]
    assert moved == pytest.approx([5e-3, 5e-4], rel=1e-3)
    assert all(module.weight.grad is None for module in modules)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_optimizer_goes_on_from_its_state(dtype, tmp_path):
    one = linear(dtype)
    adam = optimizer.Float32AdamW([one], [1e-3], betas=(0.9, 0.95))
    for _ in range(5):
        step(one, adam)
    torch.save(adam.state_dict(), tmp_path / "state.pt")
    two = linear(dtype)
    two.load_state_dict(one.state_dict())
    again = optimizer.Float32AdamW([two], [1e-3], betas=(0.9, 0.95))
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for _ in range(50):
        step(one, adam)
        step(two, again)
    assert (one.weight == two.weight).all() and (one.weight != 1).all()


def make_run(folder, args, saved):
    (folder / saved).mkdir(parents=True)
    (folder / saved / "config.json").write_text("{}")
    (folder / "summary.json").write_text(json.dumps({"args": args}))


@pytest.mark.parametrize("saved", ["model", "checkpoint/policy"])
def test_a_runs_folder_stands_for_its_model(tmp_path, saved):
    base = tmp_path / "base"
    base.mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        (base / name).write_text('{"model_type": "qwen2"}')
    make_run(tmp_path / "run", {"model": str(base), "tokenizer": None}, saved)
    source = sources.model_source(str(tmp_path / "run"), "any")
    assert source == str(tmp_path / "run" / saved)
    assert sources.tokenizer_source(None, source, "any") == str(base)
    assert sources.tokenizer_source("byte", source, "any") is None
    assert sources.tokenizer_source("name/of-one", source, "any") == "name/of-one"
    assert sources.tokenizer_source(None, str(base), "any") == str(base)


def test_a_folder_without_a_tokenizer_asks_for_one(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match="name one with --tokenizer"):
        sources.tokenizer_source(None, str(tmp_path), "any")


def test_a_hub_name_is_left_alone():
    assert sources.model_source("Qwen/Qwen2.5-3B-Instruct", "any") == "Qwen/Qwen2.5-3B-Instruct"
    assert sources.tokenizer_source(None, "Qwen/Qwen2.5-3B-Instruct", "any") == "Qwen/Qwen2.5-3B-Instruct"


def test_the_line_to_go_on_names_a_program_that_is_there(monkeypatch, tmp_path):
    python = Path(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert distributed.launcher() == [str(python)]
    monkeypatch.chdir(python.parents[1])
    assert distributed.launcher() == [os.path.join(python.parent.name, python.name)]
    monkeypatch.setenv("PATH", str(python.parent))
    assert distributed.launcher() == [python.name]
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert distributed.launcher() == ["torchrun", "--nproc-per-node", "2"]


@pytest.mark.parametrize("name", ["runs/RUN", "./RUN", "../RUN", "~/RUN", "~nobody/RUN", "a/b/c"])
def test_a_folder_that_is_not_there_is_no_hub_name(monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SystemExit, match="no such folder"):
        sources.model_source(name, "any")


def test_a_folder_in_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    make_run(tmp_path / "run", {"env_id": "any"}, "model")
    assert sources.model_source("~/run", "any") == str(tmp_path / "run" / "model")
    assert earlier_runs.arguments_of_run("~/run") == {"env_id": "any"}


def test_vocabulary_check():
    model = SimpleNamespace(get_input_embeddings=lambda: torch.nn.Embedding(10, 2))
    model_checks.check_vocabulary(model, 10)
    with pytest.raises(SystemExit, match="11 tokens, the model's embedding only 10 rows"):
        model_checks.check_vocabulary(model, 11)


def test_a_gradient_that_is_not_finite_moves_nothing():
    module = torch.nn.Linear(2, 1)
    before = [p.detach().clone() for p in module.parameters()]
    adam = optimizer.Float32AdamW([module], [1e-2], betas=(0.9, 0.95))
    module(torch.tensor([float("inf"), 1.0])).sum().backward()
    with pytest.raises(FloatingPointError, match="gradient") as raised:
        adam.step(1.0, ["the rows"])
    assert raised.value.args[1] == ["the rows"]
    assert all(torch.equal(*pair) for pair in zip(module.parameters(), before, strict=True))


def test_a_folder_with_adapters_alone_is_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(SystemExit, match="only adapters.*--save-model"):
        sources.model_source(str(tmp_path), "AgentR1/MultihopWorld-v0")


# ---------------------------------------------------------------------------------- adapters, gradient checkpointing

CPU = torch.device("cpu")


def load(folder, lora_rank=0, gradient_checkpointing=False, **kwargs):
    args = SimpleNamespace(lora_rank=lora_rank, gradient_checkpointing=gradient_checkpointing)
    return loading.load_policy(folder, CPU, args, **kwargs)


def gradients(model, rows, vocab_size):
    """The log-probabilities of the rows, and the gradient of their sum by name."""
    logprobs, _ = forward.policy_forward(model, rows, vocab_size, 1.0)
    logprobs.sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return logprobs.detach(), found


@pytest.fixture
def adapted(policy_folder):
    """A policy with adapters that are no longer zero."""
    pytest.importorskip("peft")
    model = load(policy_folder, lora_rank=2)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(p, std=0.3)
    return model


def test_only_adapters_are_trained(adapted, made_up_rows, vocab_size):
    _, found = gradients(adapted, made_up_rows(), vocab_size)
    assert found and all(".lora_" in name for name in found)
    adam = optimizer.Float32AdamW([adapted], [1e-3], betas=(0.9, 0.95))
    assert sum(map(len, adam.weights)) == len(found)


def test_merged_weights_are_those_of_the_policy_which_stays_as_it_is(adapted, policy_folder, made_up_rows, vocab_size):
    rows = made_up_rows()
    before = {name: x.clone() for name, x in adapted.state_dict().items()}
    plain = load(policy_folder)
    own = dict(plain.named_parameters())
    with torch.no_grad():
        for name, weight in distributed.weights(adapted):
            own.pop(name).copy_(weight)
    assert not own
    torch.testing.assert_close(
        gradients(plain, rows, vocab_size)[0], gradients(adapted, rows, vocab_size)[0], atol=1e-4, rtol=1e-4
    )
    assert all((before[name] == x).all() for name, x in adapted.state_dict().items())  # to the bit
    plain_too = load(policy_folder)
    assert {name for name, _ in distributed.weights(plain_too)} == {name for name, _ in plain_too.named_parameters()}


def test_a_policy_is_resumed_from_weights_or_adapters(adapted, policy_folder, tmp_path):
    checkpoint.save_policy(adapted, tmp_path / "adapters", distributed.collect_state(adapted))
    again = load(policy_folder, lora_rank=2, resumed=tmp_path / "adapters")
    for name, x in adapted.state_dict().items():
        assert (again.state_dict()[name] == x).all()
    assert {n for n, p in again.named_parameters() if p.requires_grad} == {
        n for n, p in adapted.named_parameters() if p.requires_grad
    }
    plain = load(policy_folder)
    with torch.no_grad():
        plain.get_input_embeddings().weight.add_(1)
    checkpoint.save_policy(plain, tmp_path / "weights", distributed.collect_state(plain))
    again = load(policy_folder, resumed=tmp_path / "weights")
    assert (again.get_input_embeddings().weight == plain.get_input_embeddings().weight).all()


def test_adapters_have_the_dtype_of_their_model(policy_folder, made_up_rows, vocab_size, tmp_path):
    pytest.importorskip("peft")
    model = load(policy_folder, lora_rank=2, dtype=torch.bfloat16)
    _, found = gradients(model, made_up_rows(), vocab_size)
    assert {gradient.dtype for gradient in found.values()} == {torch.bfloat16}
    model.save_pretrained(tmp_path / "adapters")
    again = load(policy_folder, lora_rank=2, resumed=tmp_path / "adapters", dtype=torch.bfloat16)
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    for name, x in model.state_dict().items():
        assert (again.state_dict()[name] == x).all()


def test_a_checkpoint_of_another_shape_is_refused(adapted, small_model, policy_folder, tmp_path):
    small_model("llama").save_pretrained(tmp_path / "llama")
    other = small_model("qwen2")
    other.resize_token_embeddings(50)
    other.save_pretrained(tmp_path / "short")
    adapted.save_pretrained(tmp_path / "adapters")
    with pytest.raises(SystemExit, match="doesn't fit this model"):
        load(policy_folder, resumed=tmp_path / "short")
    with pytest.raises(SystemExit, match="doesn't fit this model"):
        load(tmp_path / "llama", lora_rank=2, resumed=tmp_path / "adapters")


def test_without_peft_the_extra_is_named(policy_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(SystemExit, match=r"pip install 'agent-r1\[lora\]'"):
        load(policy_folder, lora_rank=2)


def test_without_httpx_the_extra_is_named(monkeypatch):
    for name in ("httpx", "llm_utils.sampling.vllm_client", "llm_utils.sampling.vllm_replies"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "httpx", None)
    args = SimpleNamespace(engine="vllm-server", temperature=1.0, top_p=1.0)
    with pytest.raises(SystemExit, match=r"--engine vllm-server needs httpx: pip install 'agent-r1\[http\]'"):
        make_engine(args, "any", 10, None, None)


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_gradient_checkpointing_changes_no_gradient(policy_folder, made_up_rows, vocab_size, lora_rank):
    if lora_rank:
        pytest.importorskip("peft")
    rows, results, calls = made_up_rows(), [], []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = load(policy_folder, lora_rank, checkpointing)
        layer = model.get_submodule("base_model.model.model.layers.1" if lora_rank else "model.layers.1")
        layer.self_attn.register_forward_hook(lambda *_, now=checkpointing: calls.append(now))
        with torch.no_grad():
            for name, p in model.named_parameters():
                if ".lora_B." in name:
                    torch.nn.init.normal_(p, std=0.3)
        results.append(gradients(model, rows, vocab_size))
    (plain, expected), (checkpointed, found) = results
    assert calls.count(False) == 1 and calls.count(True) == 2  # forward, and again in the backward pass
    torch.testing.assert_close(plain, checkpointed, atol=1e-5, rtol=1e-5)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert (gradient - found[name]).norm() <= 1e-5 * gradient.norm(), name


def test_there_is_no_dropout_under_gradient_checkpointing(tmp_path, made_up_rows, vocab_size):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=vocab_size, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.5, attn_pdrop=0.5)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    rows = made_up_rows()
    with torch.no_grad():
        plain, checkpointed = (
            forward.policy_forward(load(tmp_path, 0, on), rows, vocab_size, 1.0)[0]
            for on in (False, True)
        )
    torch.testing.assert_close(plain, checkpointed, atol=1e-5, rtol=1e-5)


def test_copies_of_bf16_weights_lie_anywhere_in_their_rounding_interval():
    """So that short steps change weights from the first one on, as many as they are long."""
    torch.manual_seed(0)
    weight = torch.randn(4_000).bfloat16()
    weight[:4] = torch.tensor([0.0, 0.5, -0.25, 2.0**-130])
    copy = optimizer.float32_copy(weight, seed=1)
    assert copy.dtype == torch.float32 and torch.equal(copy.bfloat16(), weight)
    assert torch.equal(copy, optimizer.float32_copy(weight, seed=1))
    tenth = 0.1 * torch.ldexp(torch.ones(4_000), torch.frexp(weight.float()).exponent - 8)
    changed = ((copy + tenth).bfloat16() != weight).float().mean()
    assert 0.08 < changed < 0.12
