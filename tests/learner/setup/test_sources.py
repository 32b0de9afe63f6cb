"""Sources of models and tokenizers: a run's folder, a folder, a hub name."""

import json

import pytest

from llm_utils.records import earlier_runs
from llm_utils.setup import sources


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


def test_a_folder_with_adapters_alone_is_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(SystemExit, match="only adapters.*--no-save-model"):
        sources.model_source(str(tmp_path), "AgentR1/MultihopWorld-v0")
