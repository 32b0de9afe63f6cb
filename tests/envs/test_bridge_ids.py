"""What holds for every environment through somebody else's package, where that is installed (`make test-worlds`)."""

import json
import pickle
import re
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import agent_r1

IDS = sorted(agent_r1.BRIDGES)


@pytest.fixture(params=IDS)
def env(request):
    try:
        made = gym.make(request.param).unwrapped
    except ImportError as error:
        assert re.search(r'pip install.* "agent-r1\[\w+\]"', str(error)), error  # or what else there is to do
        pytest.skip(str(error))
    yield made
    made.close()


def play(env, turns):
    """What the turns lead to: states, rewards, flags, infos."""
    found = []
    for text in turns:
        span = np.array(env.tokenizer.encode(text + env.dialect.end_of_turn, add_special_tokens=False), np.int32)
        state, *rest = env.step(span)
        found.append((state.tolist(), *rest))
        json.dumps(found[-1][-1])
        if rest[1] or rest[2]:
            break
    return found


def test_gymnasium_has_nothing_to_say(env):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env)


def test_the_expert_succeeds_and_a_snapshot_goes_on_as_the_episode_does(env):
    for index in (0, env.num_tasks // 2):
        env.reset(options={"task_index": index})
        turns = list(env.demonstration())
        half = len(turns) // 2
        first = play(env, turns[:half])
        state = env.get_state()
        rest = play(env, turns[half:])
        assert (first + rest)[-1][-1]["is_success"], env.task.id
        env.set_state(state)
        assert play(env, turns[half:]) == rest


def test_it_can_be_pickled_in_the_middle(env):
    env.reset(options={"task_index": 0})
    turns = list(env.demonstration())
    play(env, turns[: len(turns) // 2])
    copy = pickle.loads(pickle.dumps(env))
    assert play(copy, turns[len(turns) // 2 :]) == play(env, turns[len(turns) // 2 :])
    copy.close()


def test_the_same_seed_is_the_same_episode(env):
    found = []
    for _ in range(2):
        state, info = env.reset(seed=3)
        calls = [env.dialect.tool_call(name, {}) for name in list(env.tools)[:2]]
        found.append((state.tolist(), info, play(env, [*calls, "hello", "<answer>1</answer>"])))
    assert found[0] == found[1]
