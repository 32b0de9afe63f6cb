"""What a run's folder may not do: name code to run, or an address for a key."""

import json
import sys
from pathlib import Path

import evaluate_llm
import grpo_llm
import pytest

from llm_utils import arguments
from llm_utils.records import earlier_runs
from llm_utils.setup.code_names import check_names
from llm_utils.setup.sources import model_source

ROWS = "AgentR1/Rows-v0"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current folder with code of the user's own, and a run's folder with a stranger's."""
    (tmp_path / "runs" / "stranger").mkdir(parents=True)
    (tmp_path / "own").mkdir()
    (tmp_path / "lib" / "site-packages").mkdir(parents=True)
    for file in ("mine_of_here.py", "own/__init__.py", "own/part.py", "lib/in_path.py", "runs/stranger/evil.py",
                 "lib/site-packages/installed_here.py"):  # fmt: skip
        (tmp_path / file).write_text("raise AssertionError('imported')\n")
    (tmp_path / "own" / "link").symlink_to(tmp_path / "runs" / "stranger")
    paths = [str(tmp_path / "lib"), str(tmp_path / "lib" / "site-packages"), str(tmp_path)]
    monkeypatch.setenv("PYTHONPATH", ":".join(paths[:2]))
    monkeypatch.setattr(sys, "path", [*sys.path, *paths])
    monkeypatch.chdir(tmp_path)
    return Path("runs/stranger")


def folder_with(here, **args):
    (here / "config.json").write_text("{}")
    (here / "summary.json").write_text(json.dumps({"args": args, "finished": True}))


STRANGERS = ["runs.stranger.evil", "torch._inductor.cpp_builder", "subprocess", "pytest", "installed_here", "__main__",
             "own.link.evil"]  # fmt: skip


@pytest.mark.parametrize("module", STRANGERS)
def test_code_that_is_not_the_users_own_is_refused(here, module):
    with pytest.raises(SystemExit, match=rf"the run's folder names code: {module}; repeat --env-id on the command"):
        check_names(here, f"{module}:X/Game-v0")
    for kwargs in ({"reward": f"{module}:f"}, {"tools": ["search", {"deep": [f"{module}:f"]}]}):
        with pytest.raises(SystemExit, match=rf"names code: {module}; repeat --env-kwargs on the command"):
            check_names(here, ROWS, ["{}", json.dumps(kwargs)])


def test_the_users_own_code_and_texts_pass(here):
    check_names(here, "mine_of_here:Mine/Game-v0")
    texts = ["mine_of_here:f", "own.part:f", "in_path:f", "http://a/v1", "code: 12", "No one: there", ":", "rows.jsonl"]
    check_names(here, [ROWS, "own:Mine/Game-v0"], json.dumps({"reward": texts}))
    check_names(here, ROWS, "no JSON")
    check_names(here, None, None)


def test_code_in_the_runs_folder_is_refused_also_from_inside(here, monkeypatch):
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path.cwd())])
    with pytest.raises(SystemExit, match="names code: evil;"):
        check_names(".", "evil:X/Game-v0")


def test_an_evaluation_takes_no_code_from_a_strangers_run(here):
    folder_with(here, env_id=ROWS, env_kwargs='{"reward": "runs.stranger.evil:f"}', eval_split="test")
    for given in ({"model": str(here)}, {"adapter": str(here), "model": "Qwen/base"}):
        with pytest.raises(SystemExit, match=r"names code: runs.stranger.evil; repeat --env-kwargs"):
            earlier_runs.fill_environment(evaluate_llm.Args(**given))
    args = evaluate_llm.Args(model=str(here), env_kwargs='{"reward": "runs.stranger.evil:f"}', split="test")
    earlier_runs.fill_environment(args)  # repeated
    assert args.env_id == ROWS
    folder_with(here, env_id=ROWS, env_kwargs='{"reward": "mine_of_here:f"}', eval_split="test")
    args = evaluate_llm.Args(model=str(here))
    earlier_runs.fill_environment(args)
    assert args.env_kwargs == '{"reward": "mine_of_here:f"}'


def test_a_resumed_run_takes_no_code_from_a_strangers_run(here, monkeypatch):
    env_kwargs = '{"reward": "pytest:exit"}'
    saved = {"env_id": "pytest:X/Game-v0", "env_kwargs": env_kwargs}
    flags = {"env_id": saved["env_id"], "env_kwargs": env_kwargs}

    def resumed(**given):
        words = [word for name, value in given.items() for word in (arguments.flag(name), value)]
        monkeypatch.setattr(sys, "argv", ["grpo_llm.py", "--resume", str(here), *words])
        return arguments.resumed(grpo_llm.Args(resume=str(here), **given), saved, "the checkpoint")

    with pytest.raises(SystemExit, match="names code: pytest; repeat --env-id"):
        resumed()
    with pytest.raises(SystemExit, match="names code: pytest; repeat --env-kwargs"):
        resumed(env_id=saved["env_id"])
    assert resumed(**flags).env_kwargs == env_kwargs


@pytest.mark.parametrize("kwargs", [
    {"reward": "model", "judge_url": "http://127.0.0.1:1/v1", "judge_model": "m"},
    {"think_judge": {"url": "http://127.0.0.1:1/v1", "model": "m"}},
])  # fmt: skip
def test_a_judge_of_a_strangers_run_gets_no_key(here, kwargs):
    kwargs = json.dumps(kwargs)
    folder_with(here, env_id=ROWS, env_kwargs=kwargs, eval_split="test")
    with pytest.raises(SystemExit, match=r"OPENAI_API_KEY: http://127.0.0.1:1/v1; repeat --env-kwargs on the command"):
        earlier_runs.fill_environment(evaluate_llm.Args(model=str(here)))
    earlier_runs.fill_environment(evaluate_llm.Args(model=str(here), env_kwargs=kwargs))


WRONG = [{"env_id": {"a": 1}}, {"env_id": ["a", 1]}, {"eval_split": ["a", "b"]}, {"env_kwargs": 5}, {"model": 3},
         {"env_kwargs": ["{}", "{}"]}, {"data_dir": 7}, {"tokenizer": ["byte"]}, {"chat_template": {}}]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_values_of_another_type_make_it_no_run(here, wrong):
    folder_with(here, **{"env_id": ROWS, "env_kwargs": "{}", "eval_split": "test", **wrong})
    assert earlier_runs.arguments_of_run(str(here)) == {}


def test_no_escape_of_a_run_reaches_the_terminal(here):
    folder_with(here, env_id=["a\x1b[2J", "b"], env_kwargs="{}")
    with pytest.raises(SystemExit) as caught:
        earlier_runs.fill_environment(evaluate_llm.Args(model=str(here)))
    assert "\x1b" not in str(caught.value)
    for wrong in ({"env_kwargs": "\x1b"}, {"data_dir": "\x1b"}, {"chat_template": "\x1b"}, {"eval_split": "\x1b"},
                  {"eval_split": ["\x1b", "b"]}, {"env_id": "\x1b"}, {"model": "/\x1b"}):  # fmt: skip
        args = grpo_llm.Args(**{"model": "tiny", **wrong})
        with pytest.raises(SystemExit) as caught:
            arguments.check_environment(args)
            arguments.check_splits(args)
            model_source(args.model, args.env_id)
        assert "\x1b" not in str(caught.value)
