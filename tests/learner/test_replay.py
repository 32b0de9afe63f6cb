"""Replay of own successes, and the filter of void turns: the store, the weights, refusals, runs and their resume."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import rloo_llm
from interrupted import interrupted_after
from learners import PLAY, filled
from safetensors import torch as safetensors

from agent_r1.tool_env import End, Task, ToolEnv
from agent_r1.trajectories import episode_record
from llm_utils import replay
from llm_utils.recovery import checkpoint
from llm_utils.training.metrics import sampler_gap
from llm_utils.trajectory import Trajectory
from llm_utils.void_turns import drop_void_turns, has_void_turn

RUN = ["--num-envs", 16, "--episodes-per-iteration", 16, "--num-minibatches", 2, "--num-threads", 1]
RUN += ["--eval-episodes", 0, "--checkpoint-every", 1, "--deterministic"]
BOTH = ["--replay-successes", 0.5, "--drop-void-turns"]


@pytest.fixture
def success(make_row):
    """success(episode, task, advantage): a finished episode of two turns that succeeded."""

    def make(episode, task=0, advantage=1.0, value=1.0):
        rng = np.random.default_rng(episode)
        tokens, logprobs = rng.integers(40, size=9, dtype=np.int32), rng.normal(-1, 0.1, 9).astype(np.float32)
        row = make_row([(2, 4, 0.0), (6, 8, 1.0)], 9, 2, task, tokens, logprobs, episode=episode)
        row.set_turn_advantages([advantage, -advantage])
        row.stats["success"] = value
        return row

    return make


# ----------------------------------------------------------------------------------------------------------- the store


def test_the_store_keeps_the_newest_successes_of_a_task_and_of_all(success):
    failed, equal, dropped = success(90, value=0.0), success(91, advantage=0.0), success(92)
    dropped.train_mask = np.zeros_like(dropped.train_mask)
    rows = [*(success(i, task=7) for i in range(6)), success(6, task=8), failed, equal, dropped]
    stored = replay.remember([], rows, 100)
    assert [one["episode"] for one in stored] == [2, 3, 4, 5, 6]
    stored = replay.remember(stored, [success(10, task=7), success(11, task=9)], 4)
    assert [one["episode"] for one in stored] == [5, 6, 10, 11]


def test_a_draw_depends_on_its_seed_alone_and_gives_back_the_episodes(success):
    rows = [success(i, task=i) for i in range(20)]
    stored = replay.remember([], rows, 100)
    drawn = replay.draw(stored, 5, [1, 2, 3])
    assert [row.episode for row in drawn] == [row.episode for row in replay.draw(stored, 5, [1, 2, 3])]
    assert [row.episode for row in drawn] != [row.episode for row in replay.draw(stored, 5, [1, 2, 4])]
    assert len({row.episode for row in replay.draw(stored, 50, [1])}) == 20
    for row in drawn:
        first = rows[row.episode]
        for name in ("tokens", "logprobs", "versions", "action_mask", "rewards"):
            assert np.array_equal(getattr(row, name), getattr(first, name)), name
        assert row.replayed and row.advantages.tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 0]  # never below 0
        assert not row.value_mask.any()


def test_the_age_of_a_replayed_row_is_paid_by_a_capped_weight(success, made_up_rows, as_run, small_model):
    args = rloo_llm.Args(old_logprobs="trainer", num_minibatches=1, microbatch_tokens=4096, importance_cap=1.3)
    run, new = as_run(args, small_model("qwen2")), made_up_rows(groups=1, size=2)
    run.state = {"iteration": 0}
    for row in new:
        row.advantages[:] = 0.0
    rows = [*new, *replay.draw(replay.remember([], [success(50)], 9), 1, [1])]
    run.score_policy(rows)
    losses = [rloo_llm.backward(minibatch, args, run)["policy_loss"] for minibatch in run.minibatches(rows, 1)]
    old = run._score([rows[-1]], run.policy)[50]
    weights = np.minimum(np.exp(old - rows[-1].logprobs), 1.3)[2:4]  # of the turn with an advantage
    assert losses == pytest.approx([-weights.sum() / sum(row.train_mask.sum() for row in rows)], rel=1e-4)
    assert run.gap == sampler_gap(new)  # an older policy sampled the other one


# ---------------------------------------------------------------------------------------------------------- void turns


class Talk(ToolEnv):
    """A task of three turns; a user answers those who say hello, and ends the episode on bye."""

    splits = {"train": "train"}
    num_tasks = 1

    def make_task(self, index):
        return Task("one", "N", ["x"])  # the hint begins with the question

    def judge_answer(self, answer):
        return float(answer == "x"), {}

    def user_turn(self, said):
        return {"hello": "Hello.", "bye": End(1.0)}.get(said)


@pytest.mark.parametrize(
    ("turns", "void"),
    [
        (["<answer>x</answer>"], False),
        (["hm", "<answer>x</answer>"], True),
        (["hello", "<answer>x</answer>"], False),
        (["hello", "bye"], False),
        (['<tool_call>{"name": "nothing"}</tool_call>', "<answer>x</answer>"], False),
        (["hello", "hello", "hm"], True),  # the last of three turns
        (["hello", "hello", "hello"], False),
        (["x" * 900], True),  # it fills the context
    ],
)
def test_a_turn_is_void_if_it_neither_acts_nor_is_heard(turns, void):
    env = Talk(max_turns=3, max_context_tokens=700)
    env.reset(seed=1)
    for text in turns:
        *_, terminated, truncated, info = env.step(np.array(env.tokenizer.encode(text), np.int32))
    assert terminated or truncated
    row = Trajectory(0, 0, 0, np.zeros(3, np.int32), record=episode_record(env, info))
    row.finalize()
    row.train_mask = np.ones(3, bool)
    assert has_void_turn(row) == void
    assert drop_void_turns([row]) == void and row.train_mask.any() != void


# ---------------------------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize("script", PLAY)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"replay_successes": 1.0}, "--replay-successes must be below 1"),
        ({"replay_successes": -0.1}, "--replay-successes must be between 0 and 1"),
        ({"replay_successes": 0.2, "old_logprobs": "sampler"}, "--replay-successes needs .*--old-logprobs trainer"),
        ({"replay_successes": 0.2, "kl_in": "reward", "kl_coef": 0.1}, "incompatible with --kl-in reward"),
    ],
)
def test_contradictions_are_refused(script, given, message):
    module = importlib.import_module(script)
    with pytest.raises(SystemExit, match=message):
        module.check(filled(module.Args(**given)))


def scalars(run_dir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir)).Reload()
    return {name: [event.value for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


@pytest.mark.parametrize("script", PLAY)
def test_a_run_replays_what_it_stored_and_resumes_exactly(learn, monkeypatch, script):
    flags = [*RUN, *BOTH, "--total-episodes", 64]
    whole = learn(script, *flags, "--exp-name", "whole")
    logged, summary = scalars(whole), json.loads((whole / "summary.json").read_text())
    assert sum(logged["replay/rows"]) == summary["replayed_episodes"] > 5
    assert max(logged["replay/rows"]) <= 16 and logged["replay/age"][-1] >= 1
    assert logged["replay/stored"][-1] >= logged["replay/stored"][0]
    assert sum(logged["charts/void"]) * 16 == pytest.approx(summary["void_episodes"])
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "Checkpointer", interrupted_after(2))
        with pytest.raises(SystemExit):
            learn(script, *flags, "--exp-name", "stopped")
    (stopped,) = Path("runs").glob("*stopped*")
    learn(script, "--resume", stopped)
    one, two = (safetensors.load_file(folder / "model" / "model.safetensors") for folder in (whole, stopped))
    assert one.keys() == two.keys() and all((one[name] == two[name]).all() for name in one)
    assert json.loads((stopped / "summary.json").read_text())["replayed_episodes"] == summary["replayed_episodes"]


def test_a_damaged_store_is_refused(learn):
    run_dir = learn("grpo_llm", *RUN, *BOTH, "--total-episodes", 16)
    (run_dir / "checkpoint" / "replay.pt").write_bytes(b"nothing")
    with pytest.raises(SystemExit, match=r"--resume .*: the checkpoint's replay.pt is damaged"):
        learn("grpo_llm", "--resume", run_dir, "--total-episodes", 32)


def test_without_an_episode_to_train_on_the_warning_names_the_flag(learn, capsys):
    kwargs = json.dumps({"max_turns": 2, "max_action_tokens": 3})  # too few for a call or an answer
    run_dir = learn("grpo_llm", *RUN, "--drop-void-turns", "--total-episodes", 16, "--env-kwargs", kwargs)
    assert scalars(run_dir)["charts/void"] == [1.0]
    assert "--drop-void-turns left no episode to train on" in capsys.readouterr().err
