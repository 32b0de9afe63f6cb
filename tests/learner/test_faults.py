"""What breaks in the environment's machinery is no training signal: such episodes are dropped, counted, and bounded."""

import json
from pathlib import Path

import faulty_world
import gymnasium as gym
import numpy as np
import pytest

from llm_utils.imitation.demonstrations import demonstrate
from llm_utils.sampling.rollout import rollout
from llm_utils.sampling.transformers_engine import TransformersEngine
from llm_utils.setup.sources import model_source

ENV_ID = "AgentR1/MultihopWorld-v0"
FLAGS = ["--env-id", "faulty_world:AgentR1Faulty/MultihopWorld-v0", "--num-envs", 16, "--num-threads", 1]
FLAGS += ["--episodes-per-iteration", 32, "--num-minibatches", 2, "--eval-episodes", 0, "--learning-rate", 3e-4]


def flags(**env_kwargs):
    env_kwargs["max_action_tokens"] = 64  # of a policy that babbles a turn takes long
    return [*FLAGS, "--model", model_source("tiny", ENV_ID), "--env-kwargs", json.dumps(env_kwargs)]


def scalars(run_dir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir)).Reload()
    return {name: [event.value for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


@pytest.mark.parametrize("kind", ["none", "once"])
def test_the_world_is_that_of_the_default_where_nothing_lasts(kind):
    env = gym.make("faulty_world:AgentR1Faulty/MultihopWorld-v0", kind=kind).unwrapped
    for index in range(10):
        rows = [demonstrate(world, index, world.demonstration) for world in (env, gym.make(ENV_ID).unwrapped)]
        assert rows[0].is_success
        np.testing.assert_array_equal(rows[0].tokens, rows[1].tokens)


CASES = [("grpo_llm", "call"), ("ppo_llm", "episode"), ("reinforce_pp_llm", "call")]


@pytest.mark.parametrize(("script", "kind"), CASES)
def test_broken_episodes_are_dropped_and_counted(learn, script, kind):
    logged = ["--log-trajectories", 32]
    run_dir = learn(script, *flags(kind=kind, rate=0.3), *logged, "--total-episodes", 64, "--max-invalid", 0.9)
    rows = [json.loads(line) for line in (run_dir / "trajectories.jsonl").read_text().splitlines()]
    logged = scalars(run_dir)
    dropped = [32 - sum(row["iteration"] == i for row in rows) for i in (1, 2)]
    assert sum(dropped) > 4 and not any(row["fault"] for row in rows)
    assert logged["charts/invalid"] == pytest.approx([n / 32 for n in dropped])
    assert logged["charts/episodes"] == [32, 64]  # what was played
    assert all(np.isfinite(row["advantages"]).all() for row in rows)
    assert np.isfinite(logged["losses/grad_norm"]).all()


def test_calls_that_fail_once_change_nothing(learn):
    """With retries the run is that of a sound world, to the token."""
    found = []
    for kind in ("none", "once"):
        run_dir = learn("grpo_llm", *flags(kind=kind, rate=0.3), "--total-episodes", 32, "--deterministic",
                        "--exp-name", kind)  # fmt: skip
        lines = (run_dir / "trajectories.jsonl").read_text().splitlines()
        found.append([json.loads(line)["tokens"] for line in lines])
        assert scalars(run_dir)["charts/invalid"] == [0]
    assert found[0] == found[1]


def test_a_run_that_only_meets_faults_stops_and_says_why(learn):
    with pytest.raises(RuntimeError, match=r"of the iteration's 32 episodes.*--max-invalid 0.5.*search server is down"):
        learn("grpo_llm", *flags(kind="call", rate=1.0), "--total-episodes", 64)


def test_faults_of_greedy_baselines_count_too(learn, monkeypatch):
    """Of the example of an algorithm: its greedy episodes are played beside those that it trains on."""
    begun, start = [], faulty_world.FaultyWorldEnv.start_episode

    def breaking_later(env, task):
        begun.append(task)
        if len(begun) > 8:  # the greedy ones
            raise ConnectionError("the corpus server is down")
        start(env, task)

    monkeypatch.setattr(faulty_world.FaultyWorldEnv, "start_episode", breaking_later)
    more = ["--episodes-per-iteration", 8, "--total-episodes", 8]
    with pytest.raises(RuntimeError, match=r"50% of the iteration's 16 episodes.*--max-invalid 0.4.*corpus server"):
        learn("../docs/examples/remax_llm", *flags(kind="none"), *more, "--max-invalid", 0.4)


def test_an_episode_that_cannot_begin_is_not_sampled(policy, vocab_size):
    envs = gym.make_vec("faulty_world:AgentR1Faulty/MultihopWorld-v0", num_envs=4, kind="episode", rate=0.5,
                        observation="new", max_turns=2, max_action_tokens=8)  # fmt: skip
    engine = TransformersEngine(policy, 4, vocab_size)
    rows = rollout(envs, engine, [(i, i) for i in range(24)], seed=1)
    broken = [row for row in rows if row.fault]
    assert 4 < len(broken) < 20
    for row in broken:
        assert not row.turns and not row.action_mask.any() and row.truncated and not row.terminated
        assert "corpus server is down" in row.fault
    envs.close()


def test_an_evaluation_says_what_faults_ended_and_costs_no_iteration(learn, monkeypatch):
    more = ["--total-episodes", 32, "--eval-episodes", 16, "--max-invalid", 1, "--checkpoint-every", 1]
    run_dir = learn("grpo_llm", *flags(kind="episode", rate=0.4), *more)
    logged = scalars(run_dir)["eval/invalid"]
    assert len(logged) == 2 and all(0 < share < 1 for share in logged)
    begun, start = [], faulty_world.FaultyWorldEnv.start_episode

    def breaking_later(env, task):
        begun.append(env.split)
        if begun.count("test") > 16:  # after the first evaluation
            raise ConnectionError("the corpus server is down")
        start(env, task)

    monkeypatch.setattr(faulty_world.FaultyWorldEnv, "start_episode", breaking_later)
    with pytest.raises(SystemExit, match="every episode of the evaluation failed because of infrastructure errors"):
        learn("grpo_llm", *flags(kind="none"), *more, "--exp-name", "late")
    (late,) = Path("runs").glob("*late*")
    state = json.loads((late / "checkpoint" / "state.json").read_text())
    assert state["run"]["iteration"] == 1  # trained, although its evaluation failed
