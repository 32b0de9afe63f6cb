"""What the learners share: the optimizer, checkpoints, where models come from."""

import json
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
checkpoint = pytest.importorskip("llm_utils.checkpoint")
models = pytest.importorskip("llm_utils.models")
optimizer = pytest.importorskip("llm_utils.optimizer")


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


@pytest.fixture
def saver(policy, tmp_path):
    critic = linear(torch.float32)
    adam = optimizer.Float32AdamW((policy, critic), (1e-3, 1e-3), betas=(0.9, 0.95))
    return checkpoint.Checkpointer(tmp_path / "run", policy, critic, adam)


def test_what_is_saved_is_the_last_boundary(saver, tmp_path):
    saver.boundary({"algorithm": "x", "iteration": 3})
    before = saver.policy.get_input_embeddings().weight.detach().clone()
    saver.dirty()
    with torch.no_grad():
        saver.policy.get_input_embeddings().weight.add_(1)
    assert saver.save()
    loaded = type(saver.policy).from_pretrained(tmp_path / "run" / "checkpoint" / "policy")
    assert (loaded.get_input_embeddings().weight == before).all()
    assert json.loads((tmp_path / "run" / "checkpoint" / "state.json").read_text())["iteration"] == 3
    assert not list((tmp_path / "run").glob("checkpoint.*"))


def test_a_large_model_is_not_copied_and_not_saved_half_trained(saver, tmp_path):
    saver.small = False
    saver.boundary({"algorithm": "x", "iteration": 1})
    assert saver.save()
    saver.dirty()
    assert not saver.save()
    assert (tmp_path / "run" / "checkpoint" / "state.json").is_file()


def test_a_save_that_was_cut_short_leaves_the_old_checkpoint(saver, tmp_path):
    saver.boundary({"algorithm": "x", "iteration": 1})
    saver.save()
    folder = tmp_path / "run" / "checkpoint"
    folder.rename(folder.with_suffix(".old"))  # stopped between the two renames
    assert checkpoint.find(tmp_path / "run") == folder
    (folder.with_suffix(".new")).mkdir()  # stopped while writing the next one
    saver.boundary({"algorithm": "x", "iteration": 2})
    assert saver.save()
    assert json.loads((folder / "state.json").read_text())["iteration"] == 2


def test_rows_after_a_checkpoint_are_dropped(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"iteration": i}) + "\n" for i in (1, 2, 2, 3)))
    checkpoint.drop_later_rows(path, 2)
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [1, 2, 2]
    checkpoint.drop_later_rows(tmp_path / "none.jsonl", 2)


def make_run(folder, args, saved):
    (folder / saved).mkdir(parents=True)
    (folder / saved / "config.json").write_text("{}")
    (folder / "summary.json").write_text(json.dumps({"args": args}))


@pytest.mark.parametrize("saved", ["model", "checkpoint/policy"])
def test_a_runs_folder_stands_for_its_model(tmp_path, saved):
    base = tmp_path / "base"
    base.mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        (base / name).write_text("{}")
    make_run(tmp_path / "run", {"model": str(base), "tokenizer": None}, saved)
    source = models.model_source(str(tmp_path / "run"), "any")
    assert source == str(tmp_path / "run" / saved)
    assert models.tokenizer_source(None, source, "any") == str(base)
    assert models.tokenizer_source("byte", source, "any") is None
    assert models.tokenizer_source("name/of-one", source, "any") == "name/of-one"
    assert models.tokenizer_source(None, str(base), "any") == str(base)


def test_a_folder_without_a_tokenizer_asks_for_one(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match="name one with --tokenizer"):
        models.tokenizer_source(None, str(tmp_path), "any")


def test_a_hub_name_is_left_alone():
    assert models.model_source("Qwen/Qwen2.5-3B-Instruct", "any") == "Qwen/Qwen2.5-3B-Instruct"
    assert models.tokenizer_source(None, "Qwen/Qwen2.5-3B-Instruct", "any") == "Qwen/Qwen2.5-3B-Instruct"


def test_vocabulary_check():
    model = SimpleNamespace(get_input_embeddings=lambda: torch.nn.Embedding(10, 2))
    models.check_vocabulary(model, 10)
    with pytest.raises(SystemExit, match="11 tokens, the model's embedding only 10 rows"):
        models.check_vocabulary(model, 11)
