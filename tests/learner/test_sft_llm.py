"""Supervised training: rows are what the environment would show, the loss is that of action tokens, the script runs."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "learner"))

import sft_llm  # noqa: E402
from transformers import GraniteConfig, GraniteForCausalLM, Qwen2Config, Qwen2ForCausalLM  # noqa: E402


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True)
    return Qwen2ForCausalLM(config)


def test_a_demonstration_is_what_the_policy_would_have_met():
    env = sft_llm.make_env(sft_llm.Args(), None)
    tokens, mask = sft_llm.demonstrate(env, 5, env.demonstration)
    prompt, _ = env.reset(options={"task_index": 5})
    assert np.array_equal(tokens[: len(prompt)], prompt) and not mask[: len(prompt)].any()
    written = env.tokenizer.decode(tokens[mask].tolist())
    assert written == "".join(turn + env.dialect.end_of_turn for turn in env.demonstration())
    assert env.task.answers[0] in written and "<tool_response>" not in written


def test_sloppy_demonstrations_fail_and_expert_ones_do_not():
    env = sft_llm.make_env(sft_llm.Args(), None)
    for rng, expected in ((None, 1.0), (np.random.default_rng(0), 0.1)):
        solved = []
        for index in range(40):
            env.reset(options={"task_index": index})
            for turn in env.demonstration(rng):
                span = env.tokenizer.encode(turn + env.dialect.end_of_turn)
                info = env.step(np.array(span))[4]
            solved.append(info["is_success"])
        assert np.mean(solved) == 1.0 if rng is None else np.mean(solved) <= expected


def test_only_action_tokens_are_trained_on(model):
    rng = np.random.default_rng(0)
    rows = []
    for length in (9, 14, 6):
        tokens = rng.integers(0, 300, length).astype(np.int32)
        mask = rng.random(length) < 0.4
        mask[0] = False
        rows.append((tokens, mask))
    got = sft_llm.action_logprobs(model, rows, "cpu")
    expected = []
    for tokens, mask in rows:  # one row at a time, without padding
        logits = model(input_ids=torch.from_numpy(tokens).long()[None]).logits[0]
        logprobs = torch.log_softmax(logits, -1)
        expected += [logprobs[t - 1, int(tokens[t])] for t in np.flatnonzero(mask)]
    torch.testing.assert_close(got, torch.stack(expected), atol=1e-5, rtol=0)


def test_the_first_head_of_a_new_model_looks_at_the_previous_token():
    config = GraniteConfig(vocab_size=300, hidden_size=128, intermediate_size=64, num_hidden_layers=2,
                           num_attention_heads=4, num_key_value_heads=4, attention_bias=True,
                           attention_multiplier=32**-0.5, attn_implementation="eager")
    new = GraniteForCausalLM(config)
    sft_llm.initialize(new)
    attentions = new(torch.randint(0, 300, (1, 24)), output_attentions=True).attentions
    assert attentions[0][0, 0].diagonal(-1).min() > 0.9


def test_batches_show_every_row_once_per_pass():
    rows = [(np.full(3 + i % 5, i, np.int32), np.ones(3 + i % 5, bool)) for i in range(50)]
    stream = sft_llm.batches(rows, 8, np.random.default_rng(0))
    seen = sorted(int(tokens[0]) for _ in range(7) for tokens, _ in next(stream))
    assert seen == list(range(50))


@pytest.mark.parametrize("line", ['{"tokens": [1, 2]}', '{"tokens": [1, 2], "action_mask": [1]}', "no json",
                                  '{"tokens": [1, 999999], "action_mask": [0, 1]}'])
def test_a_malformed_row_is_named(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"tokens": [1, 2], "action_mask": [0, 1]}\n' + line + "\n")
    with pytest.raises(SystemExit, match=r"rows.jsonl, line 2"):
        sft_llm.read_rows(str(path), 300)


def test_the_script_makes_a_policy_from_nothing_and_trains_on_recorded_rows(tmp_path):
    def run(*arguments: str) -> None:
        command = [sys.executable, str(ROOT / "learner" / "sft_llm.py"), "--num-workers", "1", "--num-threads", "1",
                   "--batch-size", "4", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]

    run("--out", "policy", "--hidden-size", "32", "--num-layers", "2", "--num-demonstrations", "24", "--num-steps", "4",
        "--eval-demonstrations", "4", "--eval-every", "2", "--rag-share", "0.2", "--tokenizer-demonstrations", "100")
    saved = GraniteForCausalLM.from_pretrained(tmp_path / "policy")
    env = sft_llm.make_env(sft_llm.Args(), str(tmp_path / "policy"))
    assert len(env.tokenizer) == saved.config.vocab_size
    tokens, mask = sft_llm.demonstrate(env, 0, env.demonstration)
    with (tmp_path / "rows.jsonl").open("w") as file:
        file.write(json.dumps({"tokens": tokens.tolist(), "action_mask": mask.tolist()}) + "\n")
    run("--model", "policy", "--data", "rows.jsonl", "--out", "again", "--num-steps", "1", "--exp-name", "again")
    again = GraniteForCausalLM.from_pretrained(tmp_path / "again")
    assert any(not torch.equal(a, b) for a, b in zip(saved.parameters(), again.parameters(), strict=True))
    (path,) = tmp_path.glob("runs/*__again__*/summary.json")
    summary = json.loads(path.read_text())
    assert summary["finished"] and summary["train_seconds"] > 0 and summary["args"]["data"] == "rows.jsonl"


def test_demonstrations_can_be_made_in_this_process():
    args = sft_llm.Args(num_workers=0)
    rows = sft_llm.make_demonstrations(args, None, 3, 2, 1.0)
    env = sft_llm.make_env(args, None)
    for index, (tokens, mask) in zip((3, 4), rows, strict=True):
        same_tokens, same_mask = sft_llm.demonstrate(env, index, env.demonstration)
        assert np.array_equal(tokens, same_tokens) and np.array_equal(mask, same_mask)
