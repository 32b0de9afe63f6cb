"""What a script fills in for its model: a chat template in a file, and a context that the model can read."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import grpo_llm
import pytest
import torch
import transformers

import agent_r1
from agent_r1.text.templates import BYTE_CHAT_TEMPLATE
from llm_utils.arguments import resumed, same_but_context
from llm_utils.setup import environments
from llm_utils.setup.loading import read_config
from llm_utils.setup.sources import config_files, fit_environment, template_source

SHIPPED = Path(agent_r1.tiny_policy("AgentR1/MultihopWorld-v0"))
LOUD = BYTE_CHAT_TEMPLATE.replace("Call one so:", "CALL ONE SO:")
SMALL = ["--num-envs", 4, "--num-threads", 1, "--no-cuda"]
SHORT = ["--env-kwargs", '{"max_turns": 2, "max_action_tokens": 8}']
LEARN = [*SMALL, "--total-episodes", 8, "--episodes-per-iteration", 8, "--num-minibatches", 1, "--group-size", 4]
LEARN += ["--eval-episodes", 2]


@pytest.fixture
def base_model(tmp_path):
    """A model with a tokenizer that has no chat template."""
    folder = tmp_path / "base"
    shutil.copytree(SHIPPED, folder, ignore=shutil.ignore_patterns("*.jinja", "README.md"))
    (tmp_path / "chat.jinja").write_text(LOUD)
    return folder


def prompts(run):
    tokenizer = transformers.AutoTokenizer.from_pretrained(SHIPPED)
    rows = [json.loads(line) for line in (run / "trajectories.jsonl").read_text().splitlines()]
    return [tokenizer.decode(row["tokens"][: row["prompt_length"]]) for row in rows]


def test_a_base_model_learns_with_the_template_of_a_file(learn, base_model, capsys):
    with pytest.raises(SystemExit, match="has no chat template.*--chat-template FILE"):
        learn("grpo_llm", "--model", base_model, *LEARN, *SHORT)
    run = learn("grpo_llm", "--model", base_model, *LEARN, *SHORT, "--chat-template", "chat.jinja")
    assert all("CALL ONE SO:" in prompt for prompt in prompts(run))
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "model")  # by transformers alone
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi."}], tokenize=False)
    assert tokenizer.chat_template == LOUD and text == "<|im_start|>user\nHi.<|im_end|>\n"
    model = transformers.AutoModelForCausalLM.from_pretrained(run / "model")
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")

    # with the saved model the file is not needed; with a checkpoint and for the initial model it is
    few = [*SMALL, "--episodes", 2]
    for more in ([], ["--mode", "base_tool_call"]):
        capsys.readouterr()
        played = learn("evaluate_llm", "--model", run, *few, *more, "--exp-name", f"of{len(more)}")
        assert all("CALL ONE SO:" in prompt for prompt in prompts(played))
        assert ("--chat-template chat.jinja" in capsys.readouterr().err) == bool(more)
    shutil.rmtree(run / "model")
    played = learn("evaluate_llm", "--model", run, *few, "--exp-name", "checkpoint")
    assert all("CALL ONE SO:" in prompt for prompt in prompts(played))
    shown = "--env-id AgentR1/MultihopWorld-v0: --chat-template chat.jinja"
    assert f"defaults for --model {run} and {shown}\n" in capsys.readouterr().err

    Path("chat.jinja").write_text(LOUD.replace("CALL", "DO"))
    with pytest.raises(SystemExit, match="the model's files have changed"):
        learn("evaluate_llm", "--resume", played)
    with pytest.raises(SystemExit, match="the config or tokenizer of --model .* have changed since the run started"):
        learn("grpo_llm", "--resume", run)


def test_demonstrations_are_written_with_the_template_of_a_file(learn, base_model):
    words = ["--model", base_model, "--num-demonstrations", 6, "--eval-demonstrations", 0, "--num-steps", 1]
    words += ["--num-threads", 1, "--no-cuda", "--batch-size", 2, "--rag-share", 0.3]
    with pytest.raises(SystemExit, match="has no chat template.*--chat-template FILE"):
        learn("sft_llm", *words)
    run = learn("sft_llm", *words, "--chat-template", "chat.jinja")
    first = json.loads((run / "summary.json").read_text())["rows_hash"]
    assert transformers.AutoTokenizer.from_pretrained(run / "model").chat_template == LOUD
    Path("other.jinja").write_text(LOUD.replace("CALL", "DO"))
    run = learn("sft_llm", *words, "--chat-template", "other.jinja", "--exp-name", "other")
    assert json.loads((run / "summary.json").read_text())["rows_hash"] != first


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        ("grpo_llm", ["--chat-template", "nowhere.jinja"], "^--chat-template nowhere.jinja: there is no such file"),
        ("sft_llm", ["--chat-template", "."], r"^--chat-template \.: there is no such file"),
        ("grpo_llm", ["--chat-template", "chat.jinja", "--tokenizer", "byte"], "does nothing with --tokenizer byte"),
        ("sft_llm", ["--chat-template", "chat.jinja"], "^--model scratch makes its own chat template"),
        ("grpo_llm", ["--env-kwargs", '{"chat_template": "x"}'], "must not contain chat_template; use --chat-template"),
        ("evaluate_llm", ["--api", "http://localhost:1/v1", "--api-model", "x", "--chat-template", "chat.jinja"],
         "the byte tokenizer has its own template"),
    ],
)  # fmt: skip
def test_mistakes_end_with_one_line(learn, base_model, script, words, message):
    with pytest.raises(SystemExit, match=message):
        learn(script, *words)
    assert not Path("runs").exists()


def test_the_template_of_a_checkpoint_is_that_of_its_run(tmp_path):
    base, first = tmp_path / "base", tmp_path / "first"
    for folder in (base, first / "checkpoint" / "policy", tmp_path / "second" / "checkpoint" / "policy"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    (base / "tokenizer.json").write_text("{}")
    (first / "summary.json").write_text(json.dumps({"args": {"model": str(base), "chat_template": "a.jinja"}}))
    (tmp_path / "second" / "summary.json").write_text(json.dumps({"args": {"model": str(first)}}))
    source = str(tmp_path / "second" / "checkpoint" / "policy")
    assert template_source(None, None, source, "any") == "a.jinja"  # over both runs
    assert template_source("b.jinja", None, source, "any") == "b.jinja"
    assert template_source(None, "name/of-one", source, "any") is None  # another tokenizer
    assert template_source(None, None, str(base), "any") is None
    assert template_source(None, None, "Qwen/Qwen3-8B", "any") is None


def test_a_template_counts_by_its_content(tmp_path):
    (tmp_path / "a.jinja").write_text("a")
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "a.jinja").write_text("a")
    plain = config_files(str(SHIPPED))
    assert config_files(str(SHIPPED), None) == plain
    first = config_files(str(SHIPPED), str(tmp_path / "a.jinja"))
    assert first == config_files(str(SHIPPED), str(tmp_path / "copy" / "a.jinja")) != plain
    (tmp_path / "a.jinja").write_text("b")
    assert config_files(str(SHIPPED), str(tmp_path / "a.jinja")) != first


def test_a_supervised_run_does_not_go_on_with_another_tokenizer(learn, tmp_path):
    """Its folder may be another one than the model's."""
    tokenizer = Path(shutil.copytree(SHIPPED, tmp_path / "tokenizer"))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"tokens": [1, 2, 3], "action_mask": [0, 1, 1]}))
    words = ["--num-threads", 1, "--no-cuda", "--data", tmp_path / "rows.jsonl", "--num-steps", 1]
    run = learn("sft_llm", "--model", SHIPPED, "--tokenizer", tokenizer, *words)
    learn("sft_llm", "--resume", run)
    settings = tokenizer / "tokenizer_config.json"
    settings.write_text(settings.read_text() + " ")
    with pytest.raises(SystemExit, match="the config or tokenizer of --model .* have changed"):
        learn("sft_llm", "--resume", run)


# ---------------------------------------------------------------------------------------------------------- the context


@pytest.fixture
def short_model(tmp_path, vocab_size):
    """A model that reads 512 tokens at most."""
    config = transformers.Qwen2Config(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path / "short")
    return tmp_path / "short"


def arguments_for(model, env_kwargs="{}", **more):
    args = {"model": str(model), "tokenizer": "byte", "env_id": "AgentR1/ArithmeticWorld-v0", "split": "train"}
    return SimpleNamespace(**args, env_kwargs=env_kwargs, data_dir=None, chat_template=None, resume=None, **more)


def test_the_smaller_context_of_model_and_environment_is_taken(short_model, policy_folder, monkeypatch):
    args = arguments_for(short_model, '{"max_turns": 2}')
    assert fit_environment(args) == {"env_kwargs": '{"max_turns": 2, "max_context_tokens": 512}'}
    assert json.loads(args.env_kwargs)["max_context_tokens"] == 512
    assert fit_environment(args) == {}  # it is there now, and stays
    for named in (256, 1024):  # the user's own word; `check_context` refuses the second
        assert fit_environment(arguments_for(short_model, json.dumps({"max_context_tokens": named}))) == {}
    assert fit_environment(arguments_for(policy_folder)) == {}
    assert fit_environment(arguments_for("tiny")) == {}
    assert fit_environment(arguments_for("scratch")) == {}
    monkeypatch.setattr(environments, "context_of", None)
    assert fit_environment(arguments_for(short_model, api="http://x")) == {}  # nobody knows the model behind an API
    assert fit_environment(arguments_for(short_model, data="rows.jsonl")) == {}  # no environment is made


def test_no_shipped_policy_reads_less_than_its_environment_writes():
    for policy in SHIPPED.parent.iterdir():
        env_id = f"AgentR1/{policy.name}"
        if policy.name != "BabyAI-v0":  # its package may be missing; its context is ToolEnv's
            limit = environments.context_of(env_id, "train", str(policy), "{}")
            assert limit == 32_768 == read_config(policy).max_position_embeddings


def test_a_short_model_trains_and_is_evaluated_without_further_flags(learn, short_model, capsys):
    torch.manual_seed(0)
    words = ["--env-id", "AgentR1/ArithmeticWorld-v0", "--tokenizer", "byte", *SMALL]
    run = learn("grpo_llm", "--model", short_model, *words, *LEARN[len(SMALL):], *SHORT)
    shown = "--env-kwargs '{\"max_turns\": 2, \"max_action_tokens\": 8, \"max_context_tokens\": 512}'"
    assert shown in capsys.readouterr().err
    learn("grpo_llm", "--resume", run, "--total-episodes", 16, *SHORT)  # as it was typed at first
    learn("evaluate_llm", "--model", run, "--episodes", 2, *SMALL)
    learn("evaluate_llm", "--model", short_model, "--episodes", 2, *words, *SHORT, "--exp-name", "base")
    beginning = f"defaults for --model {short_model} and --env-id AgentR1/ArithmeticWorld-v0: "
    assert f"{beginning}{shown}\n" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="up to 1024 tokens, but the model has 512 positions"):
        learn("grpo_llm", "--model", short_model, *words, *LEARN[len(SMALL):], "--env-kwargs",
              '{"max_context_tokens": 1024}')  # fmt: skip


def test_env_kwargs_of_a_run_may_be_repeated_without_the_models_context():
    assert same_but_context('{"max_turns": 2}', '{"max_turns": 2, "max_context_tokens": 512}')
    assert not same_but_context('{"max_turns": 3}', '{"max_turns": 2, "max_context_tokens": 512}')
    assert not same_but_context('{"max_context_tokens": 9}', '{"max_context_tokens": 512}')
    assert not same_but_context("[", "{}") and not same_but_context("{}", "[]")


@pytest.mark.parametrize("given", ["{}", ["{}", "{}"], ["{}", '{"max_context_tokens": 512}']])
def test_env_kwargs_of_several_environments_are_compared_one_by_one(given, monkeypatch):
    monkeypatch.setattr("sys.argv", ["grpo_llm.py", "--resume", "runs/RUN", "--env-kwargs"])
    ids = ["AgentR1/MultihopWorld-v0", "AgentR1/ArithmeticWorld-v0"]
    saved = {"env_id": ids, "env_kwargs": ["{}", '{"max_context_tokens": 512}']}
    args = grpo_llm.Args(env_id=ids, env_kwargs=given, resume="runs/RUN")
    assert resumed(args, saved, "the checkpoint").env_kwargs == saved["env_kwargs"]
    for other in ('{"max_turns": 2}', ["{}", '{"max_turns": 2}']):
        with pytest.raises(SystemExit, match="--env-kwargs .* contradicts its"):
            resumed(replace(args, env_kwargs=other), saved, "the checkpoint")
