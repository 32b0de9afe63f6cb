"""The folder of a saved model: what plain transformers opens, and the card beside it."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
import yaml

from agent_r1.text.tokenizers import load_tokenizer
from llm_utils.records.model_card import card, code, hub_name
from llm_utils.setup.sources import tokenizer_source

ARGS = {"model": "Qwen/Qwen3-8B", "env_id": "AgentR1/HotpotQA-v0", "env_kwargs": "{}", "split": "train", "seed": 3}
ARGS |= {"data_dir": None, "tokenizer": None, "chat_template": None, "lora_rank": 0, "learning_rate": 1e-5}
FIGURES = {"eval/episodes": 200, "eval/success_first": 0.25, "eval/success_last": 0.5}


def parts(text):
    _, metadata, rest = text.split("---\n", 2)
    return yaml.safe_load(metadata), rest


def test_it_says_what_was_trained_and_how_to_use_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["learner/grpo_llm.py"])
    run = tmp_path / "run_1"
    run.mkdir()
    (run / "summary.json").write_text("{}")
    metadata, text = parts(card(run / "model", SimpleNamespace(**ARGS), FIGURES, 8_190_735_360))
    assert metadata["base_model"] == "Qwen/Qwen3-8B" and metadata["library_name"] == "transformers"
    assert metadata["tags"] == ["agent-r1", "tool-use", "reinforcement-learning"] and "license" not in metadata
    assert text.strip().startswith("# run_1\n")
    interval = "0.250 (95 % CI 0.195 to 0.314) before, 0.500 (95 % CI 0.431 to 0.569) after"
    assert f"| success on 200 held-out tasks, greedy | {interval} |" in text
    assert "| algorithm | `grpo_llm.py` |" in text and "| `--seed` | `3` |" in text and "--lora-rank" not in text
    assert f"evaluate_llm.py --model {run}\nvllm serve {run}/model\n" in text
    monkeypatch.setattr(sys, "argv", ["learner/sft_llm.py"])
    figures = {"eval/expert_token_loss_first": 10.25, "eval/expert_token_loss_last": 0.0484}
    args = SimpleNamespace(**ARGS | {"model": "scratch", "env_kwargs": '{"max_turns": 2}'})
    metadata, text = parts(card(tmp_path / "policy", args, figures, 1))
    assert "--model policy --env-id AgentR1/HotpotQA-v0 " in card(Path("policy"), args, figures, 1)
    assert "base_model" not in metadata and metadata["tags"][-1] == "sft"
    assert "| expert-token loss on held-out tasks | 10.2500 before, 0.0484 after |" in text
    assert f"--model {tmp_path}/policy --env-id AgentR1/HotpotQA-v0 --env-kwargs '{{\"max_turns\": 2}}'\n" in text


def test_a_run_on_several_environments_has_figures_and_a_command_of_each(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["learner/grpo_llm.py"])
    run = tmp_path / "run_1"
    run.mkdir()
    (run / "summary.json").write_text("{}")
    ids = ["AgentR1/HotpotQA-v0", "my:Mine/Own-v0"]
    of_each = {"eval/HotpotQA-v0/success_first": 0.1, "eval/HotpotQA-v0/success_last": 0.2}
    of_each |= {"eval/HotpotQA-v0/episodes": 100}
    of_each |= {"eval/Mine/Own-v0/success_first": 0.4, "eval/Mine/Own-v0/success_last": 0.8}
    args = SimpleNamespace(**ARGS | {"env_id": ids, "env_kwargs": ["{}", "{}"], "seed": 0, "lora_rank": 0})
    text = card(run / "model", args, FIGURES | of_each, 1)
    assert "| success on 200 held-out tasks, greedy | 0.250 (" in text
    assert "| success on 100 held-out tasks of `HotpotQA-v0`, greedy | 0.100 (95 % CI 0.055 to 0.174) before, " in text
    assert "| success on held-out tasks of `Mine/Own-v0` | 0.4000 before, 0.8000 after |" in text
    assert "| `--seed` | `0` |" in text and "--lora-rank" not in text
    for env_id in ids:
        assert f"evaluate_llm.py --model {run} --env-id {env_id}\n" in text


@pytest.mark.parametrize(
    "name",
    ["a\n---\nlicense: mit", "`x` | ![](http://x/y.png)", "```\n# Title", "\x1b[2Jx\u202ey", "x'; rm -rf ~ #",
     "<script>alert(1)</script>", "``|``", "a\\|b\\"],
)  # fmt: skip
def test_a_name_that_somebody_else_chose_writes_no_markup(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sys, "argv", ["grpo_llm.py"])
    args = SimpleNamespace(**ARGS | dict.fromkeys(("model", "env_id", "env_kwargs", "split", "tokenizer"), name))
    text = card(tmp_path / name.replace("/", "_") / "model", args, {}, 1)
    metadata, rest = parts(text)
    assert metadata.keys() == {"library_name", "pipeline_tag", "tags"}
    assert len(re.findall("^# ", rest, re.MULTILINE)) == 1 and not re.search("[\x1b\u202e]", rest)
    assert len(re.findall("^```", rest, re.MULTILINE)) == 2
    for line in re.findall(r"^\| .*$", rest, re.MULTILINE)[1:]:
        cells = re.split(r"(?:^|[^\\])(?:\\\\)*\|", line)[1:-1]
        assert len(cells) == 2, line
        value = cells[1].strip()
        if value.startswith("`"):  # one span of code, which nothing inside closes
            fence = re.match("`+", value)[0]
            assert [len(run) for run in re.findall("`+", value)].count(len(fence)) == 2 and value.endswith(fence)


def test_code_of_nothing_is_nothing():
    assert code("") == "" and code(["a", "b"]) == "`a b`" and code("`a`") == "`` `a` ``"


def test_the_base_model_is_found_over_several_runs(tmp_path):
    for name, model in (("first", "Qwen/Qwen3-8B"), ("second", str(tmp_path / "first")), ("tiny_run", "tiny")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps({"args": {"model": model, "env_id": "x"}}))
    assert hub_name(str(tmp_path / "second")) == "Qwen/Qwen3-8B"
    for name in ("tiny", "scratch", None, str(tmp_path), str(tmp_path / "tiny_run")):
        assert hub_name(name) is None
    (tmp_path / "first" / "summary.json").write_text(json.dumps({"args": {"model": str(tmp_path / "second")}}))
    assert hub_name(str(tmp_path / "second")) is None  # each began with the other


def test_transformers_opens_a_model_with_the_byte_tokenizer(learn, policy_folder):
    flags = ["--num-envs", 4, "--total-episodes", 8, "--episodes-per-iteration", 8, "--num-minibatches", 1, "--no-cuda"]
    flags += ["--num-threads", 1, "--group-size", 4, "--eval-episodes", 2, "--tokenizer", "byte"]
    flags += ["--env-kwargs", '{"max_turns": 1, "max_action_tokens": 8}', "--model", policy_folder]
    run = learn("grpo_llm", *flags)
    opened, ours = transformers.AutoTokenizer.from_pretrained(run / "model"), load_tokenizer()
    transformers.AutoModelForCausalLM.from_pretrained(run / "model")
    conversation = [{"role": "user", "content": "H\u00e9, <|im_end|>!"}]
    text = opened.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    assert text == ours.render_chat(conversation, None, True) and opened.encode(text) == ours.encode(text)
    assert "saved for transformers with the same ids" in (run / "model" / "README.md").read_text()
    assert tokenizer_source(None, str(run / "model"), "any") is None  # our scripts take their own
    assert not (learn("grpo_llm", *flags, "--no-save-model", "--exp-name", "without") / "model").exists()
