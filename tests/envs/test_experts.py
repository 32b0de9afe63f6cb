"""The experts of every generated world over a thousand tasks."""

import gymnasium as gym
import pytest

from agent_r1 import generated_worlds
from agent_r1.probes import span


@pytest.mark.slow
@pytest.mark.timeout(1800)  # Terminal starts a sandbox and runs tests for every task
@pytest.mark.parametrize("env_id", generated_worlds())
def test_the_expert_succeeds_in_a_thousand_tasks_in_the_fewest_turns(env_id):
    env = gym.make(env_id).unwrapped
    for index in range(1_000):
        env.reset(options={"task_index": index})
        turns = env.demonstration()
        assert len(turns) == env.task.metadata.get("optimal_turns", len(turns)), index
        for text in turns:
            _, _, terminated, _, info = env.step(span(env, text))
        assert terminated and info["is_success"], index
    env.close()
