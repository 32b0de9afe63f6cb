"""Who makes mistakes in showing a task is named alike wherever there is one; how often each is right is tested with its
world."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import load_env_creator

import agent_r1
from agent_r1.tasks.demonstrators import TEACHERS

IDS = [i for i, e in (agent_r1.ENVIRONMENTS | agent_r1.BRIDGES).items() if load_env_creator(e.entry_point).teachers]


@pytest.mark.parametrize("env_id", IDS)
def test_teachers(env_id):
    with gym.make(env_id) as made:
        env = made.unwrapped
        made.reset(options={"task_index": 0})
        assert env.teachers == tuple(TEACHERS)
        assert env.demonstration() == env.demonstration(teacher="expert")
        assert env.demonstration() == env.demonstration(np.random.default_rng(0), "expert")
        with pytest.raises(ValueError, match="no teacher 'genius'; there are expert, fallible_75"):
            env.demonstration(np.random.default_rng(0), "genius")
        with pytest.raises(ValueError, match="fallible_50 makes mistakes at random: pass an rng"):
            env.demonstration(teacher="fallible_50")


def test_there_are_some():
    assert IDS
