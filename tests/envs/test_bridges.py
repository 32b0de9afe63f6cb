"""Other people's simulators: an episode has one, a snapshot continues in another that has done the same."""

import random

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Text

from agent_r1 import ToolFault
from agent_r1.bridges import GymToolEnv
from agent_r1.vector import ToolVectorEnv


class Lock(gym.Env):
    """A lock of three digits; each right one in its turn pays 1."""

    observation_space = action_space = Text(100)
    made, broken, forgetful = 0, False, False

    def __init__(self):
        type(self).made += 1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.code = [str(digit) for digit in (random if self.forgetful else random.Random(seed)).choices("123", k=3)]
        self.opened = 0
        return f"A lock of three digits from 1 to 3, seed {seed}.", {}

    def step(self, action):
        if self.broken:
            raise OSError("the game's process has ended")
        if action == "crash":
            raise ValueError("a bug of the game")
        right = action.strip() == self.code[self.opened]
        self.opened = self.opened + 1 if right else 0
        said = f"{self.opened} digits are open" if right else "it snaps shut"
        return said, float(right), self.opened == 3, False, {}


@pytest.fixture
def lock(monkeypatch):
    for name in ("made", "broken", "forgetful"):
        monkeypatch.setattr(Lock, name, getattr(Lock, name))


def make(**kwargs):
    return GymToolEnv(make_env=Lock, max_return=3.0, **kwargs)


def code_of(env):
    return [str(digit) for digit in random.Random(env.task.metadata["seed"]).choices("123", k=3)]


def do(env, *commands):
    text = "\n".join(env.dialect.tool_call("act", {"command": command}) for command in commands)
    return env.step(np.array(env.tokenizer.encode(text + env.dialect.end_of_turn), np.int32))


def test_a_game_is_played_to_its_end(lock):
    env = make(process_reward={"game": 1.0})
    env.reset(options={"task_index": 5})
    assert env.task.question == "A lock of three digits from 1 to 3, seed 5."
    first, second, third = code_of(env)
    assert do(env, first)[1] == pytest.approx(1 / 3)
    *_, terminated, truncated, info = do(env, second)
    assert not terminated and env.messages[-1]["content"] == "2 digits are open"
    _, reward, terminated, truncated, info = do(env, third, "1", "2")  # what comes after the end doesn't count
    assert terminated and info["is_success"] and info["metrics"] == {"return": 3.0} and len(info["tool_calls"]) == 1
    assert reward == pytest.approx(1 / 3 + 1)
    env.close()


def test_what_was_earned_stays(lock):
    env = make()
    env.reset(seed=1)
    do(env, code_of(env)[0])
    answer = np.array(env.tokenizer.encode("<answer>enough</answer>" + env.dialect.end_of_turn), np.int32)
    _, reward, terminated, _, info = env.step(answer)
    assert terminated and reward == pytest.approx(1 / 3) and not info["is_success"]


def test_a_snapshot_is_played_again(lock):
    env, other = make(), make()
    env.reset(options={"task_index": 7})
    digits = code_of(env)
    do(env, digits[0])
    state = env.get_state()
    for world in (other, env, other):
        world.set_state(state)
        do(world, digits[1])
        assert do(world, digits[2])[4]["is_success"]
    assert Lock.made == 6  # the first observation, the episode, and three for the snapshot: the task is kept in `env`


def test_a_game_that_answers_otherwise_is_a_fault(lock):
    env = make()
    env.reset(options={"task_index": 7})
    do(env, *code_of(env)[:2])
    Lock.forgetful = True
    random.seed(3)
    with pytest.raises(ToolFault, match="answered otherwise when act was called again"):
        for _ in range(20):
            env.set_state(env.get_state())


def test_a_game_that_is_lost_is_played_again_in_another(lock, monkeypatch):
    env = make(fault_deadline=5)
    env.reset(options={"task_index": 7})
    digits = code_of(env)
    do(env, digits[0])
    world, lost = env.world.env, []

    def step(action):
        lost.append(action)
        raise ConnectionError("gone")

    world.step = step
    assert env.messages and do(env, digits[1])[4]["tool_calls"][0]["ok"] and lost == [digits[1]]
    assert do(env, digits[2])[4]["is_success"]
    env.reset(options={"task_index": 8})
    Lock.broken = True
    env.fault_deadline = 0.2
    _, reward, terminated, truncated, info = do(env, "1")
    assert truncated and reward == 0 and info["fault"].startswith("tool act: OSError: the game's process has ended")


def test_a_bug_of_a_game_is_a_failed_call_and_changes_nothing(lock):
    env = make()
    env.reset(options={"task_index": 7})
    digits = code_of(env)
    do(env, digits[0])
    info = do(env, "crash")[4]
    assert not info["tool_calls"][0]["ok"] and "process/failed_call" in info["reward_terms"]
    do(env, digits[1])
    assert do(env, digits[2])[4]["is_success"]
    info = env.reset(seed=1) and env.step(
        np.array(env.tokenizer.encode(env.dialect.tool_call("act", {"word": 3}) + env.dialect.end_of_turn), np.int32)
    )[4]
    assert not info["tool_calls"][0]["ok"]


def test_many_games_at_once(lock):
    envs = ToolVectorEnv(make, num_envs=8)
    envs.reset(seed=[3] * 4 + [4] * 4)
    for turn in range(3):
        spans = []
        for env in envs.envs:
            call = env.dialect.tool_call("act", {"command": code_of(env)[turn]}) + env.dialect.end_of_turn
            spans.append(np.array(env.tokenizer.encode(call), np.int32))
        _, rewards, terminations, _, _ = envs.step(spans)
    assert terminations.all() and rewards.tolist() == [1.0] * 8
    envs.close()
