"""ChoiceInterface, a choice among candidate turns for learners that write no tokens; stable-baselines3 around it."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from agent_r1 import Task
from agent_r1.wrappers import ChoiceInterface

WORLD, SUMS = "AgentR1/MultihopWorld-v0", "AgentR1/ArithmeticWorld-v0"
FEATURES = 11


def make(split="train", **kwargs):
    return ChoiceInterface(gym.make(WORLD, split=split, **kwargs))


def told(env):
    """Two candidates in the first turn, one afterwards."""
    there = [("<answer>1</answer>", [1.0, 0.5]), (env.dialect.tool_call("calculator", {"expression": "1+1"}), [1, 0])]
    return there if env.episode.turn == 0 else there[:1]


def follow(env, **options):
    """Play a task by the features alone: the relation that is due, and an answer at the last hop."""
    observation, info = env.reset(options=options)
    turn, over = 0, False
    while not over:
        rows = observation.reshape(-1, FEATURES)
        due = rows[:, 2 + turn - 1] == 1 if turn else rows[:, 0] == 1
        choice = np.flatnonzero(due & (rows[:, 1] == (rows[:, 6] if turn else 0)))[0]
        observation, _, terminated, truncated, info = env.step(choice)
        turn, over = turn + 1, terminated or truncated
    return info


def test_gymnasiums_checks():
    check_env(make(), skip_render_check=True)


@pytest.mark.parametrize("split", ["train", "more_hops", "unseen_relations", "unseen_entities", "other_phrasings"])
def test_the_right_turn_is_always_among_the_candidates_and_its_features_say_so(split):
    env = make(split)
    assert all(follow(env, task_index=index)["is_success"] for index in range(15))


def test_candidates_come_from_what_the_policy_reads(monkeypatch):
    env = make()
    observation, _ = env.reset(options={"task_index": 3})
    for choice in (0, 2):
        there, task = env.unwrapped.candidates(), env.unwrapped.task
        with monkeypatch.context() as patch:
            patch.setattr(env.unwrapped, "_task", Task(task.id, task.question, []))  # no chain, no answer
            assert env.unwrapped.candidates() == there
        observation, *_ = env.step(choice)
    assert observation.shape == (6 * FEATURES,) and observation.dtype == np.float32


def test_candidates_of_the_caller():
    env = ChoiceInterface(gym.make(SUMS), told, shape=(3, 2))
    observation, _ = env.reset(seed=0)
    assert observation.tolist() == [1, 0.5, 1, 0, 0, 0] and env.action_masks().tolist() == [True, True, False]
    observation, _, terminated, _, info = env.step(np.int64(1))
    assert info["tool_calls"][0]["name"] == "calculator" and not terminated
    assert observation.tolist() == [1, 0.5, 0, 0, 0, 0] and env.action_masks().tolist() == [True, False, False]
    _, _, terminated, _, info = env.step(2)  # there is none: an empty turn
    assert env.unwrapped.messages[-2]["content"] == "" and not terminated
    observation, _, terminated, _, info = env.step(0)
    assert terminated and info["answer"] == "1" and not observation.any()


def test_where_there_are_no_candidates_it_is_refused():
    with pytest.raises(ValueError, match="ArithmeticWorldEnv has no candidate turns.*override `candidates`"):
        ChoiceInterface(gym.make(SUMS))
    with pytest.raises(ValueError, match="shape="):
        ChoiceInterface(gym.make(SUMS), told)
    for shape, found in (((1, 2), r"1 to 1 candidates.*\[2, 2\]"), ((2, 3), "3 features each")):
        with pytest.raises(ValueError, match=found):
            ChoiceInterface(gym.make(SUMS), told, shape).reset(seed=0)
    with pytest.raises(ValueError, match="expected 1 to 2"):
        ChoiceInterface(gym.make(SUMS), lambda env: [], (2, 2)).reset(seed=0)
    env = make()
    env.reset(seed=0)
    for choice in (-1, 6):
        with pytest.raises(ValueError, match=r"\[0, 6\)"):
            env.step(choice)


# ---------------------------------------------------------------------- stable-baselines3


def test_stable_baselines3_takes_it():
    checker = pytest.importorskip("stable_baselines3.common.env_checker")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *args, **_: pytest.fail(str(args)))
        checker.check_env(make())


@pytest.mark.timeout(900)  # ten seconds of a core that is free
def test_its_ppo_learns():
    """A short part of benchmarks/learning/sb3_choices.py: the return rises."""
    sb3 = pytest.importorskip("stable_baselines3")
    vectors = pytest.importorskip("stable_baselines3.common.env_util")
    envs = vectors.make_vec_env(lambda: make(max_turns=4), n_envs=8, seed=1)
    settings = {"n_steps": 64, "batch_size": 256, "learning_rate": 3e-3, "gamma": 1.0, "ent_coef": 0.01, "seed": 1}
    model = sb3.PPO("MlpPolicy", envs, device="cpu", **settings)
    model.learn(512)
    before = np.mean([episode["r"] for episode in model.ep_info_buffer])
    model.learn(6_144, reset_num_timesteps=False)
    after = np.mean([episode["r"] for episode in model.ep_info_buffer])
    assert after > before + 0.2
    assert len(model.ep_success_buffer) == 100  # is_success was in every final info


def test_maskable_ppo_takes_the_masks():
    contrib = pytest.importorskip("sb3_contrib")
    model = contrib.MaskablePPO("MlpPolicy", make(), n_steps=32, batch_size=32, device="cpu", seed=1)
    model.learn(32)
    assert model.rollout_buffer.action_masks.min() == 0  # some were not there
