"""Supervised training: rows are what the environment would show, the loss is that of action tokens, the script runs,
in bf16 as in float32, and goes on after it was killed."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import processes
import pytest
import sft_bf16
import sft_llm
import torch
from gymnasium.envs.registration import EnvSpec
from interrupted import interrupted_after
from safetensors import torch as safetensors
from torch.utils.tensorboard import SummaryWriter
from transformers import GraniteConfig, GraniteForCausalLM

from agent_r1.text.tokenizers import load_tokenizer
from llm_utils.imitation import demonstrations
from llm_utils.imitation.demonstrations import Demonstration, Demonstrations, demonstrate, read_rows
from llm_utils.imitation.scratch import initialize
from llm_utils.recovery import checkpoint
from llm_utils.setup.loading import choose_dtype, load_policy
from llm_utils.setup.sources import model_source
from llm_utils.training.optimizer import Float32AdamW

ENV_ID = "AgentR1/MultihopWorld-v0"
CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory, vocab_size):
    """40 rows of 10 to 30 tokens, in which a token is mostly followed by its successor."""
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("data") / "rows.jsonl"
    with path.open("w") as file:
        for _ in range(40):
            length, first = int(rng.integers(10, 31)), int(rng.integers(40))
            tokens = (first + np.arange(length) + (rng.random(length) < 0.1)) % 40
            mask = np.arange(length) >= rng.integers(2, 8)
            file.write(json.dumps({"tokens": tokens.tolist(), "action_mask": mask.astype(int).tolist()}) + "\n")
    return path


@pytest.fixture
def flags(rows_file, policy_folder):
    """Arguments for quick steps on these rows."""
    return ["--model", str(policy_folder), "--tokenizer", "byte", "--data", str(rows_file), "--num-threads", "1",
            "--batch-size", "8", "--warmup-steps", "2", "--learning-rate", "1e-3", "--no-cuda"]


def weights(folder):
    return safetensors.load_file(folder / "model" / "model.safetensors")


def assert_goes_on_to(whole, stopped, learn):
    """A run that was stopped ends with the weights of the one that wasn't, to the bit."""
    learn("sft_llm", "--resume", stopped)
    one, two = weights(whole), weights(stopped)
    assert one.keys() == two.keys() and all((one[name] == two[name]).all() for name in one)


def test_a_demonstration_is_what_the_policy_would_have_met():
    env = Demonstrations(ENV_ID, "train", {}, None, 1).make_env()
    row = demonstrate(env, 5, env.demonstration)
    prompt, _ = env.reset(options={"task_index": 5})
    assert row.prompt_length == len(prompt) and np.array_equal(row.tokens[: len(prompt)], prompt)
    written = env.tokenizer.decode(row.tokens[row.action_mask].tolist())
    assert written == "".join(turn + env.dialect.end_of_turn for turn in env.demonstration())
    assert env.task.answers[0] in written and "<tool_response>" not in written


def test_sloppy_demonstrations_fail_and_expert_ones_do_not():
    env = Demonstrations(ENV_ID, "train", {}, None, 1).make_env()
    for rng, expected in ((None, 1.0), (np.random.default_rng(0), 0.1)):
        solved = []
        for index in range(40):
            env.reset(options={"task_index": index})
            for turn in env.demonstration(rng):
                span = env.tokenizer.encode(turn + env.dialect.end_of_turn)
                info = env.step(np.array(span))[4]
            solved.append(info["is_success"])
        assert np.mean(solved) == 1.0 if rng is None else np.mean(solved) <= expected


def test_demonstrations_are_a_function_of_seed_and_index():
    rows = Demonstrations(ENV_ID, "train", {}, None, 1).make(3, 2, 1.0)
    env = Demonstrations(ENV_ID, "train", {}, None, 2).make_env()
    for index, row in zip((3, 4), rows, strict=True):
        same = demonstrate(env, index, env.demonstration)
        assert np.array_equal(row.tokens, same.tokens) and np.array_equal(row.action_mask, same.action_mask)


@pytest.fixture
def gsm8k(tmp_path):
    """50 problems; every fifth solution is too long for a turn, so its expert fails."""
    pytest.importorskip("math_verify")
    rows = [{"question": f"What is {n} and {n}?", "answer": f"{'So ' * 99 * (n % 5 == 0)}it is {2 * n}.\n#### {2 * n}"}
            for n in range(50)]  # fmt: skip
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kwargs = {"data_dir": str(tmp_path), "max_action_tokens": 200}
    return Demonstrations("AgentR1/GSM8K-v0", "train", kwargs, None, 0)


def test_a_small_split_gives_what_it_has(gsm8k):
    assert gsm8k.split_tasks(30, 10) == (30, 10)
    assert gsm8k.split_tasks(80_000, 512) == (45, 5)
    assert gsm8k.split_tasks(80_000, 0) == (50, 0)
    assert gsm8k.split_tasks(80_000, 512, 30) == (18, 2)
    with pytest.raises(SystemExit, match="--first-demonstration 50: the split train has 50 tasks"):
        gsm8k.split_tasks(5, 1, 50)


def test_an_expert_that_fails_gives_no_row(gsm8k):
    assert [row.task_index for row in gsm8k.make(0, 12, 1.0)] == [1, 2, 3, 4, 6, 7, 8, 9, 11]


def test_question_answer_pairs_are_demonstrated_without_tools(gsm8k):
    (row,) = replace(gsm8k, mode="closed_book").make(5, 1, 1.0)
    env = gsm8k.make_env()
    assert env.tokenizer.decode(row.tokens[row.action_mask].tolist()) == f"<answer>10</answer>{env.dialect.end_of_turn}"
    assert "calculator" not in env.tokenizer.decode(row.tokens.tolist())


def test_demonstrations_of_a_baseline_are_of_the_registered_world(monkeypatch):
    made = gym.spec("AgentR1/MultihopWorld-v0").entry_point
    monkeypatch.setitem(gym.registry, "Mine/Hops-v0", EnvSpec("Mine/Hops-v0", made, kwargs={"world_seed": 5}))
    for mode in ("agent", "naive_rag"):
        assert Demonstrations("Mine/Hops-v0", "train", {}, None, 0, mode).make_env().world_seed == 5


def test_a_small_split_is_named(learn, gsm8k, policy_folder, capfd):
    kwargs = json.dumps(gsm8k.env_kwargs)
    flags = ["--model", policy_folder, "--tokenizer", "byte", "--env-id", gsm8k.env_id, "--env-kwargs", kwargs]
    learn("sft_llm", *flags, "--expert-share", "1", "--num-workers", "0", "--num-steps", "1", "--batch-size", "2")
    assert "the split train has 50 tasks: 45 to train on, 5 to evaluate on" in capfd.readouterr().out


def test_demonstrations_from_a_later_task_on(learn, gsm8k, policy_folder, capfd):
    kwargs = json.dumps(gsm8k.env_kwargs)
    flags = ["--model", policy_folder, "--tokenizer", "byte", "--env-id", gsm8k.env_id, "--env-kwargs", kwargs]
    flags += ["--expert-share", "1", "--num-workers", "0", "--num-steps", "1", "--batch-size", "2"]
    learn("sft_llm", *flags, "--first-demonstration", "20")
    assert "the split train has 30 tasks from 20 on: 27 to train on, 3 to evaluate on" in capfd.readouterr().out
    with pytest.raises(SystemExit, match="--first-demonstration 50: the split train has 50 tasks"):
        learn("sft_llm", *flags, "--first-demonstration", "50")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--env-id", "AgentR1/HotpotQA-v0", "--model", "scratch"], "--env-id AgentR1/HotpotQA-v0: "),
        (["--env-id", "AgentR1/MultihopWorld-v0", "--env-kwargs", '{"nope": 1}', "--rag-share", "0.1"], "nope"),
    ],
)
def test_an_environment_that_can_not_be_made_is_a_message_with_rows_too(learn, tmp_path, flags, message):
    (tmp_path / "rows.jsonl").write_bytes(row())
    with pytest.raises(SystemExit, match=message):
        learn("sft_llm", "--data", str(tmp_path / "rows.jsonl"), *flags)


def test_a_split_in_which_every_expert_fails_is_refused(learn, gsm8k, policy_folder):
    kwargs = json.dumps(gsm8k.env_kwargs | {"max_action_tokens": 4})
    flags = ["--model", policy_folder, "--tokenizer", "byte", "--env-id", gsm8k.env_id, "--env-kwargs", kwargs]
    with pytest.raises(SystemExit, match="all of 45 demonstrations are left out: 45 .*max_action_tokens 4"):
        learn("sft_llm", *flags, "--expert-share", "1", "--num-workers", "0")


def test_the_loss_on_recorded_held_out_rows(learn, flags, rows_file):
    run_dir = learn("sft_llm", *flags, "--eval-data", rows_file, "--num-steps", "2")
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["eval/expert_token_loss_first"] > summary["eval/expert_token_loss_last"] > 0


def test_where_nothing_can_be_written_nothing_is_trained(learn):
    with pytest.raises(SystemExit, match="--out /proc/policy: cannot write there"):
        learn("sft_llm", "--out", "/proc/policy")


def test_a_full_disk_is_found_before_anything_is_made(learn, monkeypatch):
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2_000_000))
    monkeypatch.setattr(Demonstrations, "make", None)
    with pytest.raises(SystemExit, match="2.0 MB are free there, but checkpoints take 4.2 MB"):
        learn("sft_llm")
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda folder: SimpleNamespace(free=5_000_000))
    with pytest.raises(SystemExit, match="5.0 MB are free there, but checkpoints take"):
        learn("sft_llm", "--model", "tiny", "--expert-share", "1")


def test_a_model_that_cannot_be_had_is_a_line(learn):
    for script in ("sft_llm", "grpo_llm", "evaluate_llm"):
        with pytest.raises(SystemExit, match="^--model no/such: there is no such folder here, and on the hub: "):
            learn(script, "--model", "no/such", "--env-id", ENV_ID)


def test_processes_make_the_same_demonstrations(monkeypatch):
    monkeypatch.setattr(demonstrations, "POOL_SECONDS", 0.0)
    maker = Demonstrations(ENV_ID, "train", {}, None, 1)
    here, there = (maker.make(7, 510, 0.5, 0.1, num_workers) for num_workers in (0, 2))
    assert [row.tokens.tolist() for row in here] == [row.tokens.tolist() for row in there]
    assert len({row.action_mask.sum() for row in here}) > 2 and [row.task_index for row in here] == list(range(7, 517))


def test_where_they_are_quick_no_process_is_started(monkeypatch):
    monkeypatch.setattr(demonstrations.multiprocessing, "get_context", None)
    assert len(Demonstrations(ENV_ID, "train", {}, None, 1).make(0, 120, 1.0, num_workers=2)) == 120


def random_rows(vocab_size, lengths=(9, 14, 6, 14, 30, 11)):
    rng, rows = np.random.default_rng(0), []
    for i, length in enumerate(lengths):
        mask = rng.random(length) < 0.4
        mask[0], mask[-1] = False, True
        rows.append(Demonstration(rng.integers(0, vocab_size, length).astype(np.int32), mask, i))
    return rows


def test_the_loss_is_the_mean_over_action_tokens_and_so_is_its_gradient_however_it_is_cut(policy, vocab_size):
    rows, expected, gradients = random_rows(vocab_size), [], []
    for row in rows:  # one row at a time, without padding
        logits = policy(input_ids=torch.from_numpy(row.tokens).long()[None]).logits[0, :, :vocab_size]
        logprobs = torch.log_softmax(logits, -1)
        expected += [-logprobs[t - 1, int(row.tokens[t])] for t in np.flatnonzero(row.action_mask)]
    loss = torch.stack(expected).mean()
    loss.backward()
    gradients.append([p.grad.clone() for p in policy.parameters()])
    for budget in (1, 29, 40, 10**6):
        policy.zero_grad()
        assert sft_llm.token_loss(policy, rows, budget, vocab_size, backward=True) == pytest.approx(loss.item(), 1e-5)
        gradients.append([p.grad.clone() for p in policy.parameters()])
        assert sft_llm.token_loss(policy, rows, budget, vocab_size) == pytest.approx(loss.item(), 1e-5)
    for others in gradients[1:]:
        for one, other in zip(gradients[0], others, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_matrices_decay_as_in_adamw_and_nothing_else_does():
    def model():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3))

    mine, theirs = model(), model()
    optimizer = Float32AdamW([mine], [0.1], betas=(0.9, 0.98), weight_decay=0.5)
    groups = [{"params": [p for p in theirs.parameters() if (p.ndim > 1) == matrices], "weight_decay": 0.5 * matrices}
              for matrices in (True, False)]
    reference = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.98))
    for _ in range(5):
        x = torch.randn(8, 4)
        for net in (mine, theirs):
            net(x).square().mean().backward()
        optimizer.step(1e9)
        reference.step()
        reference.zero_grad()
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_bf16_weights_learn_as_float32_ones_do(learn, flags, rows_file, vocab_size):
    """Steps that are far smaller than a bf16 weight can move by: with bf16 moments and weights nearly all are lost."""
    try:
        choose_dtype("bfloat16", CPU)
    except SystemExit as error:
        pytest.skip(str(error))
    rows, losses = read_rows(str(rows_file), vocab_size), {}
    start = sft_llm.token_loss(load_policy(flags[1], CPU), rows, 4096, vocab_size)
    for dtype in ("float32", "bfloat16"):
        more = ["--dtype", dtype, "--num-steps", 60, "--learning-rate", 2e-4, "--microbatch-tokens", 64]
        folder = learn("sft_llm", *flags, *more, "--exp-name", dtype) / "model"
        policy = load_policy(folder, CPU).to(getattr(torch, dtype))
        assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
        losses[dtype] = sft_llm.token_loss(policy, rows, 4096, vocab_size)
    assert losses["float32"] < start - 0.2
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02)


def test_auto_is_float32_on_a_cpu():
    assert choose_dtype("auto", CPU) == choose_dtype("float32", CPU) == torch.float32
    assert choose_dtype("auto", torch.device("cuda")) == torch.bfloat16


def test_the_learning_rate_suits_the_model():
    rates = [sft_llm.default_learning_rate(sft_llm.Args(model=model, lora_rank=rank))
             for model, rank in (("scratch", 0), ("tiny", 0), ("some/model", 0), ("some/model", 8))]
    assert rates == [3e-3, 3e-3, 2e-5, 1e-4]
    args = sft_llm.Args(num_steps=100, warmup_steps=10)
    factors = [sft_llm.schedule(step, args) for step in range(1, 101)]
    assert max(factors) == factors[9] == 1 and factors[4] == 0.5 and factors[-1] == pytest.approx(0.01)
    assert sft_llm.schedule(1, sft_llm.Args(num_steps=1, warmup_steps=0)) == pytest.approx(0.01)


@pytest.mark.parametrize(
    "arguments",
    [["--batch-size", "0"], ["--env-kwargs", "3"], ["--expert-share", "1.5"], ["--learning-rate", "-1"],
     ["--model", "scratch", "--lora-rank", "4"], ["--model", "scratch", "--tokenizer", "byte"]],
)  # fmt: skip
def test_contradictions_are_refused(learn, arguments):
    with pytest.raises(SystemExit, match="--"):
        learn("sft_llm", *arguments)


def test_a_peak_that_is_never_reached_is_told(capsys):
    for steps, told in ((75, True), (100, False)):
        sft_llm.check(sft_llm.Args(num_steps=steps))
        line = "--warmup-steps 100 is above --num-steps 75: the learning rate ends at 75% of its peak\n"
        assert capsys.readouterr().err == line * told


def test_a_rewritten_context_is_read_as_rows_of_its_own(tmp_path):
    row = {"tokens": [5, 6, 7, 8, 9, 5, 6, 7], "action_mask": [0, 0, 1, 1, 0, 0, 0, 1], "segment_starts": [0, 5]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    rows = read_rows(str(tmp_path / "rows.jsonl"), 20)
    assert [row.tokens.tolist() for row in rows] == [[5, 6, 7, 8, 9], [5, 6, 7]]
    assert [row.action_mask.astype(int).tolist() for row in rows] == [[0, 0, 1, 1, 0], [0, 0, 1]]


def test_a_row_longer_than_the_model_is_made_for_is_refused(learn, flags, tmp_path):
    rows = tmp_path / "long.jsonl"
    rows.write_text(json.dumps({"tokens": [1] * 32769, "action_mask": [0] * 32768 + [1]}) + "\n")
    with pytest.raises(SystemExit, match="32769 tokens, the model only 32768 positions"):
        learn("sft_llm", *flags, "--data", rows)


def test_the_first_head_of_a_new_model_looks_at_the_previous_token():
    config = GraniteConfig(vocab_size=300, hidden_size=128, intermediate_size=64, num_hidden_layers=2,
                           num_attention_heads=4, num_key_value_heads=4, attention_bias=True,
                           attention_multiplier=32**-0.5, attn_implementation="eager")
    new = GraniteForCausalLM(config)
    initialize(new)
    attentions = new(torch.randint(0, 300, (1, 24)), output_attentions=True).attentions
    assert attentions[0][0, 0].diagonal(-1).min() > 0.9


def test_batches_show_every_row_once_per_pass():
    rows = [Demonstration(np.full(3 + i % 5, i, np.int32), np.ones(3 + i % 5, bool), i) for i in range(50)]
    stream = sft_llm.batches(rows, 8, seed=0)
    seen = sorted(row.task_index for batch in itertools.islice(stream, 7) for row in batch)
    assert seen == list(range(50))


@pytest.mark.parametrize(("count", "size"), [(100, 32), (129, 8), (1026, 64), (2049, 64), (65, 64), (3, 8)])
def test_batches_are_of_one_size(count, size):
    """A short last batch would be of the longest rows, each with several times the weight of another."""
    rows = [Demonstration(np.full(3 + i, i, np.int32), np.ones(3 + i, bool), i) for i in range(count)]
    sizes = [len(batch) for batch in itertools.islice(sft_llm.batches(rows, size, seed=0), 3 * -(-count // size))]
    assert sum(sizes) == 3 * count and max(sizes) <= size and max(sizes) - min(sizes) <= 1


def row(**fields):
    return json.dumps({"tokens": [1, 2, 3], "action_mask": [0, 1, 1]} | fields).encode()


MALFORMED = [
    b'{"tokens": [1, 2]}', b'{"tokens": [1, 2], "action_mask": [1]}', b"no json", b"[1]", b"null", b'{"\xff',
    b'{"tokens": ' + b"[" * 10**5,
    *(row(tokens=[1, token, 3]) for token in (300, 999_999, 2**31, 2**70, -1, 2.0, "2", True, None, [2])),
    *(row(action_mask=[0, own, 1]) for own in (2, 0.5, float("nan"), "0", None)),
    *(row(segment_starts=starts) for starts in ([0, -1], [2, 0], [0, 0], [1], [], [0, 3], [0.5], [False], "abc", None)),
    row(tokens=[], action_mask=[]), row(tokens="abc"), row(action_mask={}),
]  # fmt: skip


@pytest.mark.parametrize("line", MALFORMED)
def test_a_malformed_row_is_named(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(row() + b"\n" + line + b"\n")
    with pytest.raises(SystemExit, match=r"rows.jsonl, line 2: \S"):
        read_rows(str(path), 300)


def test_rows_are_checked_under_python_o_too(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(row(tokens=[1, 300, 3]))
    code = "import sys; from llm_utils.imitation.demonstrations import read_rows; read_rows(sys.argv[1], 300)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-O", "-c", code, str(tmp_path / "rows.jsonl")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "line 1: `tokens` must be a list of numbers from 0 to below 300" in done.stderr


def test_episodes_that_a_fault_ended_are_left_out(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join([row(fault=None), row(fault="the search server is down"), row()]))
    assert [kept.task_index for kept in read_rows(str(path), 300)] == [1, 3]
    assert "rows.jsonl: 1 episodes that ended in infrastructure errors are left out" in capsys.readouterr().err


def test_only_successes_of_recorded_rows_are_kept_and_counted(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    rows = [row(is_success=True), row(is_success=False), row(is_success=None, fault="down"), row(is_success=True)]
    path.write_bytes(b"\n".join(rows))
    assert [kept.task_index for kept in read_rows(str(path), 300, only_successes=True)] == [1, 4]
    assert "rows.jsonl: 2 of 3 episodes succeeded and are kept" in capsys.readouterr().err
    assert [kept.task_index for kept in read_rows(str(path), 300)] == [1, 2, 4]
    path.write_bytes(rows[1])
    with pytest.raises(SystemExit, match="no episode succeeded; record more tasks"):
        read_rows(str(path), 300, only_successes=True)
    path.write_bytes(rows[0] + b"\n" + row())
    with pytest.raises(SystemExit, match="line 2: --only-successes needs `is_success`"):
        read_rows(str(path), 300, only_successes=True)


def test_rows_of_another_tokenizer_are_noticed(tmp_path):
    """Their numbers are valid, and would train nonsense."""
    world, path = gym.make(ENV_ID).unwrapped, tmp_path / "rows.jsonl"
    world.reset(options={"task_index": 0})
    content = {"tokens": world.episode.buffer[: world.episode.length].tolist(), "messages": world.messages}
    content |= {"tokens": [*content["tokens"], 5], "action_mask": [0] * len(content["tokens"]) + [1]}
    path.write_text(json.dumps(content | {"tokenizer": "byte"}) + "\n")
    shipped = load_tokenizer(model_source("tiny", ENV_ID))
    assert len(read_rows(str(path), 10**6, world.tokenizer)) == 1
    with pytest.raises(SystemExit, match="they are of the tokenizer byte; record the episodes with --tokenizer"):
        read_rows(str(path), 10**6, shipped)

    def line(tokenizer, name):
        tokens = tokenizer.encode(" ".join(message["content"] for message in world.messages))
        mask = [0] * len(tokens) + [1]
        named = {"messages": world.messages, "tokenizer": name}
        return json.dumps({"tokens": [*tokens, 5], "action_mask": mask} | named)

    path.write_text("\n".join([line(shipped, "mine")] * 30 + [line(world.tokenizer, "byte")] * 2))  # two files as one
    with pytest.raises(SystemExit, match="the tokens of 2 rows do not decode .* tokenizer byte;"):
        read_rows(str(path), 10**6, shipped)
    path.write_text("\n".join([line(shipped, "one"), *[line(world.tokenizer, "one")] * 3]))  # one that fits by chance
    with pytest.raises(SystemExit, match="the tokens of 3 rows do not decode .* tokenizer one;"):
        read_rows(str(path), 10**6, shipped)


def test_rows_without_sampled_tokens_are_left_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"tokens": [1, 2], "action_mask": [1, 0]}\n{"tokens": [1, 2, 3], "action_mask": [1, 0, 1]}\n')
    (row,) = read_rows(str(path), 300)
    assert row.action_mask.tolist() == [False, False, True] and row.prompt_length == 2  # nothing predicts the first
    path.write_text('{"tokens": [1, 2], "action_mask": [0, 0]}\n')
    with pytest.raises(SystemExit, match="no line has a sampled token"):
        read_rows(str(path), 300)


def test_the_script_makes_a_policy_from_nothing_and_trains_on_recorded_rows(learn, tmp_path, capsys):
    def run(*arguments: str) -> str:
        learn("sft_llm", "--num-threads", "1", "--batch-size", "4", *arguments)
        return capsys.readouterr().out

    text = run("--out", "policy", "--hidden-size", "32", "--num-layers", "2", "--num-demonstrations", "24",
               "--num-steps", "4", "--eval-demonstrations", "4", "--eval-every", "2", "--rag-share", "0.2",
               "--tokenizer-demonstrations", "100")
    assert "learning rate 0.003" in text and "float32" in text
    saved = GraniteForCausalLM.from_pretrained(tmp_path / "policy")
    maker = Demonstrations(ENV_ID, "train", {}, str(tmp_path / "policy"), 1)
    env = maker.make_env()
    assert len(env.tokenizer) == saved.config.vocab_size
    row = demonstrate(env, 0, env.demonstration)
    content = {"tokens": row.tokens.tolist(), "action_mask": row.action_mask.tolist()}
    for name, success in (("rows", True), ("heldout", False)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(content | {"is_success": success}))
    (tmp_path / "chat.jinja").write_text(env.tokenizer.chat_template)
    text = run("--model", "policy", "--data", "rows.jsonl", "--out", "again", "--num-steps", "1", "--exp-name", "again",
               "--only-successes", "--eval-data", "heldout.jsonl", "--chat-template", "chat.jinja")
    assert "learning rate 2e-05" in text and "step 1: expert-token loss" in text  # failures count in --eval-data
    assert "--chat-template must be the one that recorded rows.jsonl" in text
    again = GraniteForCausalLM.from_pretrained(tmp_path / "again")
    assert any(not torch.equal(a, b) for a, b in zip(saved.parameters(), again.parameters(), strict=True))
    (path,) = tmp_path.glob("runs/*__again__*/summary.json")
    summary = json.loads(path.read_text())
    assert summary["finished"] and summary["train_seconds"] > 0 and summary["args"]["data"] == "rows.jsonl"
    (path,) = tmp_path.glob("runs/*__sft_llm__*/summary.json")
    summary = json.loads(path.read_text())
    assert summary["eval/expert_token_loss_first"] > summary["eval/expert_token_loss_last"] > 0


@pytest.mark.slow
def test_killed_and_resumed_the_weights_are_the_same_to_the_bit(learn, flags, tmp_path):
    folder, moments = tmp_path / "killed", random.Random()  # other moments in every run of the tests
    flags = [*flags, "--num-steps", "40", "--checkpoint-every", "1", "--microbatch-tokens", "100"]
    for first, last in ((1, 10), (15, 25)):
        resume = ["--resume", str(processes.run_of(folder))] if folder.exists() else []
        process = processes.start("sft_llm", folder, *(resume or flags))
        moment = moments.randint(first, last), moments.uniform(0, 0.1)
        killed = processes.kill(process, folder, *moment)  # None on a machine so slow that the run was over
        assert killed or process.exitcode == 0, (folder / "log.txt").read_text()
    stopped, whole = processes.run_of(folder), learn("sft_llm", *flags)
    learn("sft_llm", "--resume", stopped)
    one, two = weights(stopped), weights(whole)
    assert one.keys() == two.keys() and all((one[name] == two[name]).all() for name in one), moment
    assert json.loads((stopped / "summary.json").read_text())["finished"]


@pytest.mark.parametrize(
    "options",
    [
        ["--lora-rank", 2, "--gradient-checkpointing", "on"],
        ["--dtype", "bfloat16"],
        pytest.param(
            ["--model", "scratch", "--num-demonstrations", 24, "--eval-demonstrations", 4, "--num-workers", 0,
             "--tokenizer-demonstrations", 40, "--hidden-size", 32, "--num-layers", 2, "--intermediate-size", 32],
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_interrupted_runs_go_on_with_other_options_too(learn, monkeypatch, flags, options):
    if "bfloat16" in options:
        try:
            choose_dtype("bfloat16", CPU)
        except SystemExit as error:
            pytest.skip(str(error))
    if "--lora-rank" in options:
        pytest.importorskip("peft")
    flags = ["--num-threads", 1, "--no-cuda", "--batch-size", 8] if "scratch" in options else flags
    flags = [*flags, *options, "--num-steps", 5, "--checkpoint-every", 2]
    whole = learn("sft_llm", *flags, "--exp-name", "whole")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "Checkpointer", interrupted_after(2))
        with pytest.raises(SystemExit):
            learn("sft_llm", *flags, "--exp-name", "stopped")
    (stopped,) = Path("runs").glob("*stopped*")
    assert not (stopped / "model").exists() and not json.loads((stopped / "summary.json").read_text())["finished"]
    if "scratch" in options:  # its tokenizer lies in a folder of its own
        played = learn("evaluate_llm", "--model", stopped, "--episodes", 1, "--num-threads", 1, "--env-kwargs", "{}")
        assert (played / "trajectories.jsonl").read_bytes().count(b"\n") == 1
    assert_goes_on_to(whole, stopped, learn)
    assert not any("lora" in name for name in weights(stopped))
    with pytest.raises(SystemExit, match="--batch-size 3 contradicts"):
        learn("sft_llm", "--resume", stopped, "--batch-size", 3)
    if "scratch" in options:
        learn("sft_llm", "--resume", stopped, "--out", "elsewhere")  # where the first folder could not be written
        assert Path("elsewhere/config.json").is_file()


def test_an_evaluation_that_fails_loses_no_step_of_a_large_model(learn, flags, monkeypatch):
    """Too large to be copied at every step: the live weights are what is saved, and they are complete."""
    evaluate = SummaryWriter.add_scalar

    def fails(self, name, value, step):
        if name.startswith("eval/") and step == 4:
            raise torch.OutOfMemoryError("no room for the rows that are held out")
        evaluate(self, name, value, step)

    monkeypatch.setattr(checkpoint, "MOST_BYTES", 0)
    flags = [*flags, "--num-steps", 6, "--eval-every", 4]
    whole = learn("sft_llm", *flags, "--eval-data", flags[flags.index("--data") + 1], "--exp-name", "whole")
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(SummaryWriter, "add_scalar", fails)
        learn("sft_llm", *flags, "--eval-data", flags[flags.index("--data") + 1], "--exp-name", "stopped")
    (stopped,) = Path("runs").glob("*__stopped__*")
    assert json.loads((stopped / "checkpoint/state.json").read_text())["run"]["iteration"] == 4
    assert_goes_on_to(whole, stopped, learn)


def test_a_signal_in_the_middle_of_a_step_waits_for_its_end(learn, flags, monkeypatch):
    """Too large to be copied, the weights are saved as they are: they must be those of a whole step."""
    step, steps = Float32AdamW.step, []

    def signalled(self, *args):
        steps.append(1)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *args)

    monkeypatch.setattr(checkpoint, "MOST_BYTES", 0)
    whole = learn("sft_llm", *flags, "--num-steps", 5, "--exp-name", "whole")
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="143"):
        patch.setattr(Float32AdamW, "step", signalled)
        learn("sft_llm", *flags, "--num-steps", 5, "--exp-name", "stopped")
    (stopped,) = Path("runs").glob("*__stopped__*")
    assert json.loads((stopped / "checkpoint/state.json").read_text())["run"]["iteration"] == 3
    assert_goes_on_to(whole, stopped, learn)


def test_a_run_goes_on_with_the_rows_that_it_began_with(learn, flags, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_bytes(Path(flags[flags.index("--data") + 1]).read_bytes())
    flags = [*flags[: flags.index("--data") + 1], str(data), *flags[flags.index("--data") + 2 :]]
    run_dir = learn("sft_llm", *flags, "--num-steps", 2, "--checkpoint-every", 1)
    data.write_text("".join(reversed(data.read_text().splitlines(keepends=True))))
    with pytest.raises(SystemExit, match="the demonstrations have changed since the run started"):
        learn("sft_llm", "--resume", run_dir)


def test_a_signal_leaves_a_checkpoint(tmp_path, flags):
    process = processes.start("sft_llm", tmp_path, *flags, "--num-steps", "100000", "--checkpoint-every", "0")
    try:
        while not list(tmp_path.glob("runs/*/summary.json")) and process.is_alive():
            time.sleep(0.05)
        time.sleep(0.3)
        process.terminate()
        process.join(60)
        assert process.exitcode in (130, 143), (tmp_path / "log.txt").read_text()
    finally:
        process.kill()
    assert "--resume runs/" in (tmp_path / "log.txt").read_text()
    (state,) = tmp_path.glob("runs/*/checkpoint/state.json")
    assert json.loads(state.read_text())["run"]["iteration"] > 0
    (summary,) = tmp_path.glob("runs/*/summary.json")
    assert not json.loads(summary.read_text()).get("finished")


def test_it_can_be_tracked(learn, flags, monkeypatch):
    """Weights & Biases (offline, so without an account) is given the run's name, and its id when it goes on."""
    wandb = pytest.importorskip("wandb")
    calls = []
    monkeypatch.setattr(wandb, "init", lambda **kwargs: calls.append(kwargs))
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_dir = learn("sft_llm", *flags, "--track", "--num-steps", 2)
    learn("sft_llm", "--resume", run_dir)
    assert calls[0]["name"] == run_dir.name and calls[0]["sync_tensorboard"]
    assert calls[0]["id"] == calls[1]["id"]


@pytest.mark.parametrize("arm", sft_bf16.ARMS)
def test_every_arm_of_the_benchmark_trains(arm, policy_folder):
    maker = Demonstrations(ENV_ID, "train", {}, None, 1)
    rows = maker.make(0, 4, 1.0)
    options = SimpleNamespace(num_steps=2, batch_size=2, learning_rate=1e-2, seed=1)
    try:
        found = sft_bf16.measure(arm, str(policy_folder), rows, rows, len(maker.make_env().tokenizer), options)
    except (RuntimeError, SystemExit) as error:
        pytest.skip(f"this processor can't multiply in bf16: {error}")
    assert found["after"] < found["before"]
