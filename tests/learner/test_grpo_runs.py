"""Runs of learner/grpo_llm.py: what they leave behind, options, and what stops them."""

import json
import re
import shutil
from pathlib import Path

import grpo_llm
import numpy as np
import pytest
import torch
from safetensors import torch as safetensors

from agent_r1 import tiny_policy
from llm_utils import run
from llm_utils.records import progress
from llm_utils.returns import other_groups_deviation, returns_to_go
from llm_utils.setup.loading import load_policy
from llm_utils.setup.sources import model_source

SMALL = ["--env-kwargs", json.dumps({"max_turns": 2, "max_action_tokens": 10}), "--num-threads", 1, "--num-envs", 16]
SMALL += ["--episodes-per-iteration", 16, "--num-minibatches", 2, "--eval-episodes", 0]
SMALL += ["--temperature", 2.0]  # so that the episodes of a group differ
GROUPS = [*SMALL, "--group-size", 4]


def jsonl(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def scalars(run_dir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir)).Reload()
    return {name: [event.value for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def events_step(run_dir):
    """The number of turns that the axes of the log have counted."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(run_dir)).Reload().Scalars("charts/SPS")[-1].step


def test_that_a_start_was_trained_with_other_arguments_is_said(learn, tmp_path, policy_folder, capsys):
    start = tmp_path / "start"
    shutil.copytree(policy_folder, start / "model")
    kwargs = '{"max_turns": 3}'
    args = {"env_id": "AgentR1/MultihopWorld-v0", "env_kwargs": kwargs}
    (start / "summary.json").write_text(json.dumps({"args": args}))
    learn("grpo_llm", *GROUPS, "--total-episodes", 16, "--model", start, "--tokenizer", "byte")
    said = f"--model {start} was trained with --env-kwargs '{kwargs}', but this run has '{SMALL[1]}'"
    assert said in capsys.readouterr().err
    learn("grpo_llm", *GROUPS, "--total-episodes", 16, "--model", start, "--tokenizer", "byte", "--env-kwargs", kwargs)
    assert "was trained with" not in capsys.readouterr().err


def test_a_run_leaves_what_is_promised(learn):
    flags = ["--log-trajectories", 16, "--total-episodes", 32, "--save-model", "--eval-episodes", 4]
    run_dir = learn("grpo_llm", *GROUPS, *flags)
    assert run_dir.name.startswith("AgentR1_MultihopWorld-v0__grpo_llm__1__")
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["finished"] and {"eval/success_first", "eval/exact_match_last"} <= summary.keys()
    rows = jsonl(run_dir / "trajectories.jsonl")
    assert [row["iteration"] for row in rows] == [1] * 16 + [2] * 16
    assert [row["episode"] for row in rows] == list(range(32))
    for row in rows:
        lengths = {len(row[k]) for k in ("tokens", "action_mask", "rewards", "versions", "logprobs", "advantages")}
        assert lengths == {len(row["tokens"])}
        mask = np.array(row["action_mask"], bool)
        assert not mask[: row["prompt_length"]].any() and mask.any()
        for name in ("rewards", "logprobs", "advantages", "versions"):
            assert not np.array(row[name])[~mask].any()
        assert np.array_equal(np.flatnonzero(mask), np.concatenate([np.arange(a, b) for a, b in row["turns"]]))
        assert set(np.array(row["versions"])[mask]) == {row["iteration"] - 1}
        assert sum(row["rewards"]) == pytest.approx(row["stats"]["return"], abs=1e-5)
    totals = [np.array([sum(row["rewards"]) for row in rows[first : first + 4]]) for first in range(0, 32, 4)]
    deviations = [*other_groups_deviation(totals[:4]), *other_groups_deviation(totals[4:])]
    for first, deviation in zip(range(0, 32, 4), deviations, strict=True):
        of_group = rows[first : first + 4]
        assert len({tuple(row["tokens"][: row["prompt_length"]]) for row in of_group}) == 1
        turn_rewards = [np.array([sum(row["rewards"][a:b]) for a, b in row["turns"]]) for row in of_group]
        expected = grpo_llm.group_advantages(returns_to_go(turn_rewards), "turn", deviation=deviation)
        for row, values in zip(of_group, expected, strict=True):
            for (start, end), value in zip(row["turns"], values[: len(row["turns"])], strict=True):
                np.testing.assert_allclose(row["advantages"][start:end], value, atol=1e-4)
    before = safetensors.load_file(model_source("tiny", "AgentR1/MultihopWorld-v0") + "/model.safetensors")
    after = safetensors.load_file(run_dir / "model" / "model.safetensors")
    assert before.keys() == after.keys() and any((before[name] != after[name]).any() for name in before)
    assert (run_dir / "model" / "tokenizer.json").is_file()
    logged = scalars(run_dir)
    assert logged["charts/staleness"] == [0, 0]
    assert all(0 <= value <= 1 for value in logged["charts/groups_with_signal"])
    assert {"losses/policy_loss", "losses/clipfrac", "losses/entropy", "losses/grad_norm"} <= logged.keys()
    assert {f"time/{name}" for name in ("rollout", "score", "train", "sync")} <= logged.keys()


@pytest.mark.parametrize(
    "options",
    [
        ["--credit", "episode", "--no-scale-rewards", "--loss-aggregation", "constant", "--constant-length", 32],
        ["--ratio", "sequence", "--loss-aggregation", "sequence", "--clip-coef", 3e-4, "--clip-coef-high", 4e-4],
        ["--ratio", "turn", "--old-logprobs", "trainer", "--gamma", 0.9, "--top-p", 0.9, "--update-epochs", 2],
        ["--no-loss-mask", "--no-advantage-mask", "--no-anneal-lr", "--microbatch-tokens", 256],
        ["--kl-coef", 0.1, "--kl-estimator", "k2", "--lora-rank", 2, "--max-grad-norm", 0.5],
        ["--gradient-checkpointing", "on", "--max-staleness", 2],
    ],
    ids=lambda options: options[0],
)
def test_options_run(learn, options):
    run_dir = learn("grpo_llm", *GROUPS, "--total-episodes", 32, *options)
    assert all(np.isfinite(row["advantages"]).all() for row in jsonl(run_dir / "trajectories.jsonl"))
    logged = scalars(run_dir)
    assert len(logged["losses/policy_loss"]) == 2 and np.isfinite(logged["losses/grad_norm"]).all()
    assert logged["losses/grad_norm"][0] > 0


def test_log_probabilities_of_the_trainer_are_those_of_the_sampler(learn):
    """With --old-logprobs trainer on the first step of an iteration every ratio and every weight is 1."""
    flags = ["--total-episodes", 16, "--num-minibatches", 1, "--no-scale-rewards"]
    one, two = (scalars(learn("grpo_llm", *GROUPS, *flags, "--old-logprobs", x, "--exp-name", x))
                for x in ("sampler", "trainer"))  # fmt: skip
    assert one["losses/approx_kl"][0] == pytest.approx(0, abs=1e-6)
    assert two["losses/clipfrac"] == [0]
    assert one["losses/grad_norm"][0] == pytest.approx(two["losses/grad_norm"][0], rel=1e-3)


@pytest.mark.parametrize("rounds", [0, 8])
def test_dynamic_sampling_fills_the_batch_with_groups_that_differ(learn, monkeypatch, capfd, rounds):
    monkeypatch.setattr(progress, "on_terminal", lambda: True)
    flags = ["--log-trajectories", 16, "--total-episodes", 32, "--temperature", 0.7]
    flags += ["--dynamic-sampling", rounds, "--group-size", 2]
    run_dir = learn("grpo_llm", *GROUPS, *flags)
    rows = jsonl(run_dir / "trajectories.jsonl")
    assert len(rows) == 32 and len({row["episode"] for row in rows}) == 32
    groups = [rows[i : i + 2] for i in range(0, 32, 2)]
    assert all(one["task_index"] == two["task_index"] for one, two in groups)
    earned = [[[sum(row["rewards"][a:]) for a, _ in row["turns"]] for row in group] for group in groups]
    even = [
        np.allclose(one[: len(two)], two[: len(one)]) and not any(one[len(two) :] + two[len(one) :])
        for one, two in earned
    ]
    logged = scalars(run_dir)
    shares = [int(share) for share in re.findall(r"iteration \d/2 +(\d+)%", capfd.readouterr().err)]
    assert shares[-1] == max(shares) == 100  # the progress bar counts what was added
    if rounds:
        assert not any(even)
        assert logged["charts/episodes"][-1] > 32 and events_step(run_dir) > sum(row["stats"]["turns"] for row in rows)
    else:
        assert any(even)
        assert logged["charts/groups_with_signal"] == pytest.approx([1 - np.mean(even[:8]), 1 - np.mean(even[8:])])


def test_dynamic_sampling_counts_groups_so_one_that_lost_an_episode_counts(learn, monkeypatch):
    """A fault had taken an episode, and sixteen further ones were played for it."""
    collect = run.Run.collect

    def collect_and_lose(self, *arguments):
        rows = collect(self, *arguments)
        for row in rows[1::2]:
            row.turns[-1].reward += 1  # all groups differ
        return rows[1:]

    monkeypatch.setattr(run.Run, "collect", collect_and_lose)
    run_dir = learn("grpo_llm", *GROUPS, "--total-episodes", 32, "--dynamic-sampling", 3)
    assert scalars(run_dir)["charts/episodes"] == [16, 32]


def bfloat16_or_skip():
    from llm_utils.setup.loading import choose_dtype

    try:
        choose_dtype("bfloat16", torch.device("cpu"))
    except SystemExit as error:
        pytest.skip(str(error))


def test_in_bf16_no_ratio_is_clipped_before_an_update(learn):
    """Sampling and training round differently in bf16: against the sampler's log-probabilities GSPO's narrow range
    would clip most episodes at once. The default compares with the trainer's, and the gap is logged."""
    bfloat16_or_skip()
    flags = ["--total-episodes", 8, "--episodes-per-iteration", 8, "--num-minibatches", 1, "--dtype", "bfloat16"]
    flags += ["--ratio", "sequence", "--loss-aggregation", "sequence", "--clip-coef", 3e-4, "--clip-coef-high", 4e-4]
    default, sampler = (
        scalars(learn("grpo_llm", *GROUPS, *flags, *more, "--exp-name", name))
        for name, more in (("default", []), ("sampler", ["--old-logprobs", "sampler"]))
    )
    # a few differ for the trainer, too, where an update forms other batches than the scoring
    assert default["losses/clipfrac"][0] < 0.1 and sampler["losses/clipfrac"][0] > 0.2
    assert 0 < default["sampler/gap_mean"][0] < default["sampler/gap_max"][0] < 1
    assert 0 <= default["sampler/gap_beyond"][0] < 1


def test_the_gap_is_that_of_all_rows_also_of_rejected_ones(learn):
    bfloat16_or_skip()
    flags = ["--total-episodes", 16, "--dtype", "bfloat16", "--reject-ratio", 1.0005]
    logged = scalars(learn("grpo_llm", *GROUPS, *flags))
    assert logged["charts/rejected"][0] > 0.3
    assert logged["sampler/gap_mean"][0] > 5e-4 and logged["sampler/gap_max"][0] > logged["sampler/gap_mean"][0]


@pytest.mark.parametrize(
    ("flag", "why"), [("--importance-cap 1.5", "--old-logprobs sampler"), ("--float32-head", "--dtype float32")]
)
def test_a_flag_that_a_default_makes_dead_is_refused(learn, flag, why):
    """Both are chosen on a CPU, where the sampler's log-probabilities are the trainer's."""
    with pytest.raises(SystemExit, match=f"{flag.split()[0]} does nothing with {why}"):
        learn("grpo_llm", *GROUPS, "--total-episodes", 16, "--no-cuda", "--dtype", "auto", *flag.split())


def test_where_nothing_is_trained_there_is_no_step(learn):
    """Adam would move the weights by what it remembers, and means over no tokens would be logged as 0."""
    flags = ["--total-episodes", 16, "--reject-ratio", 1 + 1e-9, "--save-model"]
    run_dir = learn("grpo_llm", *GROUPS, *flags)
    logged = scalars(run_dir)
    assert logged["charts/rejected"] == [1.0] and not [name for name in logged if name.startswith("losses/")]
    folders = run_dir / "model", Path(tiny_policy("AgentR1/MultihopWorld-v0"))
    one, other = (safetensors.load_file(folder / "model.safetensors") for folder in folders)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_does_not_go_on_with_another_reference(learn, tmp_path):
    model = Path(shutil.copytree(tiny_policy("AgentR1/MultihopWorld-v0"), tmp_path / "m"))
    flags = ["--model", model, "--tokenizer", model, "--kl-coef", 0.1, "--checkpoint-every", 1, "--learning-rate", 1e-5]
    run_dir = learn("grpo_llm", *GROUPS, *flags, "--total-episodes", 16)
    weights = safetensors.load_file(model / "model.safetensors")
    safetensors.save_file({name: weight + 0.01 for name, weight in weights.items()}, model / "model.safetensors")
    with pytest.raises(SystemExit, match="the files of --model .* have changed since the run started"):
        learn("grpo_llm", "--resume", run_dir, "--total-episodes", 32)


def test_a_run_does_not_go_on_with_another_config(learn, tmp_path):
    """It is read from --model, the weights from the checkpoint; a copy of the same files is no other."""
    model = Path(shutil.copytree(tiny_policy("AgentR1/MultihopWorld-v0"), tmp_path / "m"))
    flags = ["--model", model, "--tokenizer", model, "--checkpoint-every", 1]
    run_dir = learn("grpo_llm", *GROUPS, *flags, "--total-episodes", 16)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text((model / "config.json").read_text())
    learn("grpo_llm", "--resume", run_dir, "--total-episodes", 32)
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    with pytest.raises(SystemExit, match="the config or tokenizer of --model .* have changed since the run started"):
        learn("grpo_llm", "--resume", run_dir, "--total-episodes", 48)


def test_staleness_occurs_and_is_bounded(learn):
    run_dir = learn("grpo_llm", *GROUPS, "--total-episodes", 64, "--max-staleness", 2)
    staleness = [
        row["iteration"] - 1 - version
        for row in jsonl(run_dir / "trajectories.jsonl")
        for version, sampled in zip(row["versions"], row["action_mask"], strict=True)
        if sampled
    ]
    assert 0 < max(staleness) <= 2 and min(staleness) >= 0
    logged = scalars(run_dir)["charts/staleness"]
    assert logged[0] == 0 and max(logged) <= 2 and logged[-1] > 0


def test_lora_trains_adapters_and_saves_them_merged(learn):
    peft = pytest.importorskip("peft")
    flags = ["--total-episodes", 32, "--lora-rank", 2, "--save-model", "--checkpoint-every", 1]
    run_dir = learn("grpo_llm", *GROUPS, *flags, "--learning-rate", 3e-3)
    source = model_source("tiny", "AgentR1/MultihopWorld-v0")
    adapters = safetensors.load_file(run_dir / "checkpoint" / "policy" / "adapter_model.safetensors")
    assert all(".lora_" in name for name in adapters) and any(x.abs().max() > 0 for x in adapters.values())
    base = load_policy(source, torch.device("cpu"))
    ids = torch.arange(40)[None]
    with torch.no_grad():
        before = base(input_ids=ids).logits
        merged = load_policy(run_dir / "model", torch.device("cpu"))(input_ids=ids).logits
        expected = peft.PeftModel.from_pretrained(base, run_dir / "checkpoint" / "policy")(input_ids=ids).logits
    torch.testing.assert_close(merged, expected, atol=1e-4, rtol=1e-4)
    assert (merged - before).abs().max() > 0.01


def test_with_adapters_a_merged_copy_samples_what_the_trainer_scores(learn, monkeypatch):
    pytest.importorskip("peft")
    engines, make_engine = [], run.make_engine
    monkeypatch.setattr(run, "make_engine", lambda *args: engines.append(make_engine(*args)) or engines[-1])
    flags = ["--temperature", 1, "--total-episodes", 64, "--lora-rank", 2, "--learning-rate", 1e-2, "--save-model"]
    run_dir = learn("grpo_llm", *GROUPS, *flags, "--old-logprobs", "trainer")
    sampler, (twin,) = engines[0].slots.model, engines[0].twins
    assert twin.slots.model is sampler
    start = load_policy(model_source("tiny", "AgentR1/MultihopWorld-v0"), torch.device("cpu")).state_dict()
    saved, weights = load_policy(run_dir / "model", torch.device("cpu")).state_dict(), sampler.state_dict()
    assert weights.keys() == saved.keys()  # so it has no adapters
    assert all(torch.equal(weights[name], saved[name]) for name in saved)
    assert max(float((weights[name] - start[name]).abs().max()) for name in start) > 0.01
    gaps = scalars(run_dir)["sampler/gap_max"]
    assert len(gaps) == 4 and max(gaps) < 1e-5


def test_a_run_that_does_not_fit_is_refused_before_any_work(learn, monkeypatch):
    monkeypatch.setattr("llm_utils.setup.preflight.memory_of", lambda device: 10**6)
    with pytest.raises(SystemExit, match="this run does not fit"):
        learn("grpo_llm", *GROUPS)
    assert not Path("runs").exists()


def test_contradicting_flags_are_named_before_any_work(learn):
    for arguments, message in (
        (["--group-size", 5], "--episodes-per-iteration 16 must be a multiple of --group-size 5"),
        (["--group-size", 1], "--group-size 1 must be at least 2"),
        (["--max-staleness", 1, "--dynamic-sampling", 1], "--max-staleness is incompatible with --dynamic-sampling"),
        (["--max-staleness", 1, "--deterministic"], "--deterministic is incompatible with --max-staleness"),
        (["--engine", "vllm", "--deterministic"], "--deterministic is incompatible with --engine vllm"),
        (["--compile", "--deterministic"], "--deterministic is incompatible with --compile"),
        (["--kl-in", "reward"], "--kl-in reward needs a --kl-coef above 0"),
        (["--num-minibatches", 17], "--num-minibatches exceeds --episodes-per-iteration"),
        (["--max-staleness", -1], "--max-staleness must be at least 0"),
        (["--model", "./nowhere"], "no such folder"),
        (["--resume", "."], "no checkpoint"),
        (["--temperature", 0], "--temperature must be above 0"),
        (["--top-p", 0], "--top-p must be above 0"),
        (["--learning-rate", -1], "--learning-rate must be at least 0"),
        (["--num-minibatches", 0], "--num-minibatches must be at least 1"),
        (["--constant-length", 0], "--constant-length must be at least 1"),
        (["--num-envs", 0], "--num-envs must be at least 1"),
        (["--env-kwargs", "{bad"], "--env-kwargs takes a JSON object"),
        (["--env-id", "AgentR1/Nope-v0"], "there is no such environment; similar ids: AgentR1/"),
        (["--no-advantage-mask"], "--no-advantage-mask has no effect without --no-loss-mask"),
        (["--max-grad-norm", -1], "--max-grad-norm must be above 0"),
        (["--max-invalid", 2], "--max-invalid must be between 0 and 1"),
        (["--reject-ratio", 0.5], "--reject-ratio must be above 1"),
        (["--reject-ratio", 2, "--old-logprobs", "sampler"], "use --old-logprobs trainer"),
        (["--kl-coef", -0.5], "--kl-coef must be at least 0"),
        (["--update-epochs", 0], "--update-epochs must be at least 1"),
        (["--gamma", -3], "--gamma must be between 0 and 1"),
        (["--importance-cap", 0.5], "--importance-cap must be at least 1"),
        (["--no-scale-rewards", "--scale-by", "others"], "--scale-by does nothing"),
        (["--env-kwargs", '{"max_context_tokens": 40000}'], "the model has 32768 positions"),
        (["--env-kwargs", '{"autoreset_mode": "SameStep"}'], "the environment has autoreset_mode SameStep"),
        (["--env-kwargs", '{"text": true}'], "the environment has text=True"),
    ):
        with pytest.raises(SystemExit, match=message):
            learn("grpo_llm", *GROUPS, *arguments)
    assert not Path("runs").exists()


def test_a_run_reads_new_tokens_also_where_its_arguments_say_state(learn):
    """As those of an older run may do."""
    kwargs = json.dumps({**json.loads(SMALL[1]), "observation": "state"})
    run_dir = learn("grpo_llm", *GROUPS, "--total-episodes", 16, "--env-kwargs", kwargs)
    assert json.loads((run_dir / "summary.json").read_text())["finished"]


def test_a_loss_that_is_not_finite_stops_the_run(learn):
    with pytest.raises(SystemExit, match="stopped: .*(nan|inf|finite)"):
        learn("grpo_llm", *GROUPS, "--total-episodes", 48, "--learning-rate", "1e30")
    (run_dir,) = Path("runs").iterdir()
    rows = jsonl(run_dir / "not_finite.jsonl")
    assert rows and all(row["tokens"] for row in rows)
