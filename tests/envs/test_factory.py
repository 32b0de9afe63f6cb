"""A factory makes environments by id, also in other processes."""

import multiprocessing
import pickle
import sys

import gymnasium as gym
import pytest

import agent_r1

OWN = """
import gymnasium as gym

from agent_r1.tasks.rows import RowsEnv

gym.register("Mine/Cells-v0", entry_point=RowsEnv, kwargs={"data": [{"question": "Which cell?", "answer": "A1"}]})
"""


def first_question(make):
    """Make an environment in another process, and return the question of its first task."""
    env = make()
    env.reset(seed=0)
    return env.unwrapped.task.question, env.unwrapped.max_turns


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "cells_of_this_folder.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    yield "cells_of_this_folder:Mine/Cells-v0"
    gym.registry.pop("Mine/Cells-v0", None)


def test_a_factory_works_in_a_process_that_knows_nothing_of_it(here):
    make = agent_r1.factory(here, {"max_turns": 3})
    assert first_question(pickle.loads(pickle.dumps(make))) == ("Which cell?", 3)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(first_question, (make,)) == ("Which cell?", 3)


def test_a_factory_makes_a_vector_of_environments():
    envs = gym.vector.SyncVectorEnv([agent_r1.factory("AgentR1/ArithmeticWorld-v0")] * 2)
    envs.reset(seed=[1, 2])
    first, second = (env.unwrapped for env in envs.envs)
    assert first is not second and first.task.question != second.task.question
    envs.close()


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("AgentR1/ArithmaticWorld-v0", "no such environment; similar ids: AgentR1/ArithmeticWorld-v0, .*ENVIRONMENTS"),
        ("nowhere:Mine/Cells-v0", "there is no module nowhere"),
        ("CartPole-v1", "CartPoleEnv is not a ToolEnv"),
    ],
)
def test_a_factory_of_nothing_is_refused_at_once(env_id, message):
    with pytest.raises(agent_r1.ArgumentError, match=message):
        agent_r1.factory(env_id)
