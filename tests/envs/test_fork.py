"""ToolVectorEnv.fork: a child is its parent until their actions differ."""

import pickle

import gymnasium as gym
import numpy as np
import pytest
from registered import ENVIRONMENTS

from agent_r1 import Task, ToolEnv, ToolFault
from agent_r1.vector import ToolVectorEnv
from agent_r1.vector_mix import mixed_spec

WORLD = "AgentR1/MultihopWorld-v0"


@pytest.fixture(autouse=True)
def data_folder(made_up_data, monkeypatch):
    monkeypatch.setenv("AGENT_R1_DATA", str(made_up_data))


def expert(env, start=("<tool_call>\n{oops\n</tool_call>",)):
    """The turns of an episode: a malformed one, then those of the expert."""
    return [text + env.dialect.end_of_turn for text in (*start, *env.demonstration())]


def encode(env, text):
    return np.array(env.tokenizer.encode(text, add_special_tokens=False), np.int32)


def play(envs, slots, action):
    """One turn with the same action in several slots; the result of each."""
    envs.send([action] * len(slots), slots)
    ids, *results = envs.recv(len(slots))
    assert ids.tolist() == sorted(slots)
    return list(zip(*results, strict=True))


def snapshot(env):
    """A snapshot without the unused end of the buffer, and without the shell's archive, which has the files' times."""
    state = env.get_state()
    episode = vars(state["episode"])
    episode["buffer"] = episode["buffer"][: state["episode"].length].tolist()
    return state | {"episode": episode, "tools": state["tools"] | {"shell": None}}


def assert_equal(first, second):
    for a, b in zip(first, second, strict=True):
        assert np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b


def assert_a_child_is_its_parent(envs, text=False, after=2):
    """Fork slot 0 into slot 2, which never began, after some turns; then play both to their end."""
    options = {"reset_mask": np.array([True, True, False]), "max_turns": 30}
    envs.reset(seed=[4, 5, 0], options=options)
    inner = envs.unwrapped
    turns = expert(inner.envs[0])
    actions = turns if text else [encode(inner.envs[0], turn) for turn in turns]
    for action in actions[: min(after, len(actions) - 1)]:
        ((seen, _, *over, _),) = play(envs, [0], action)
        assert not any(over)
    observation, info = envs.fork(0, 2)
    assert_equal([observation], [seen])
    assert info["turn"] == inner.envs[0].episode.turn and info["max_new_tokens"] == inner.envs[0].room
    for action in actions[min(after, len(actions) - 1) :]:
        if any(over):
            break
        parent, child = play(envs, [0, 2], action)
        assert_equal(parent, child)
        assert snapshot(inner.envs[0]) == snapshot(inner.envs[2])
        over = parent[2:4]
    return parent


@pytest.mark.parametrize("env_id", ENVIRONMENTS)
def test_a_child_of_every_environment_equals_its_parent_to_the_end(env_id):
    envs = gym.make_vec(env_id, num_envs=3, observation="new")
    *_, terminated, _, info = assert_a_child_is_its_parent(envs)
    assert terminated and "is_success" in info
    envs.close()


@pytest.mark.parametrize("kwargs", [{"text": True}, {"text": True, "observation": "new"}])
def test_in_every_mode(kwargs):
    envs = gym.make_vec(WORLD, num_envs=3, **kwargs)
    assert_a_child_is_its_parent(envs, kwargs.get("text", False))
    envs.close()


def test_a_child_is_truncated_with_its_parent():
    """`set_state` alone leaves the slot's own count of turns at 0."""
    envs = gym.make_vec(WORLD, num_envs=3, max_episode_steps=3)
    *_, truncated, info = assert_a_child_is_its_parent(envs, after=1)
    assert truncated and info["turn"] == 3
    envs.close()


@pytest.mark.parametrize("target", [1, 2])
def test_a_mix_makes_the_environment_that_the_target_lacks(target):
    ids = [WORLD, "AgentR1/ArithmeticWorld-v0"]
    envs = gym.make_vec(mixed_spec(ids), num_envs=3, observation="new")
    first = envs.unwrapped.tasks[1].start
    envs.reset(seed=3, options={"task_index": [first + 5, 3, 4]})
    turns = [encode(envs.envs[0], turn) for turn in expert(envs.envs[0])]
    play(envs, [0], turns[0])
    observation, info = envs.fork(0, target)
    assert info["env_id"] == ids[1] and len(observation)
    for turn in turns[1:]:
        parent, child = play(envs, [0, target], turn)
        assert_equal(parent, child)
    assert parent[2] and parent[4]["is_success"]
    envs.close()


class Dice(ToolEnv):
    """A user that throws a die."""

    num_tasks = 5

    def make_task(self, index):
        return Task(f"t{index}", "Throw.", ["x"])

    def user_turn(self, text):
        return f"It shows {self.np_random.integers(1_000_000)}."

    def judge_answer(self, answer):
        return 0.0, {}


def test_different_actions_part_them_and_neither_sees_the_other():
    envs = ToolVectorEnv(Dice, num_envs=2, text=True, observation="new", autoreset_mode="SameStep")
    envs.reset(seed=[1, 2])
    play(envs, [0], "go")
    envs.fork(0, 1)
    envs.send(["one", "another"], [0, 1])
    _, seen, *_ = envs.recv(2)
    assert seen[0] == seen[1]  # the same throw
    assert [env.messages[-2]["content"] for env in envs.envs] == ["one", "another"]
    assert_equal(*play(envs, [0, 1], "<answer>x</answer>"))  # also what begins next
    envs.close()


def test_a_snapshot_continues_after_its_episode_and_more_than_once():
    envs = gym.make_vec(WORLD, num_envs=2)
    envs.reset(seed=1)
    turns = [encode(envs.envs[0], turn) for turn in expert(envs.envs[0])]
    play(envs, [0], turns[0])
    state = pickle.loads(pickle.dumps(envs.get_state(0)))

    def rest(slot):
        return [play(envs, [slot], turn)[0] for turn in turns[1:]]

    first = rest(0)
    assert first[-1][2]
    for slot in (1, 0):
        envs.set_state(slot, state)
        for one, other in zip(first, rest(slot), strict=True):
            assert_equal(one, other)
    envs.close()


class Lost(ToolEnv):
    """A tool whose session can be set only after `failures` infrastructure errors."""

    num_tasks, failures = 5, 0

    def make_task(self, index):
        return Task(f"t{index}", "Go.", ["x"])

    def start_episode(self, task):
        if Lost.failures:
            Lost.failures -= 1
            raise ConnectionError("the sandbox is gone")


def test_an_infrastructure_error_is_retried_and_then_reported(monkeypatch):
    envs = ToolVectorEnv(Lost, num_envs=2, fault_deadline=0.2)
    envs.reset(seed=0)
    monkeypatch.setattr(Lost, "failures", 1)
    envs.fork(0, 1)
    monkeypatch.setattr(Lost, "failures", 9)
    with pytest.raises(ToolFault, match="snapshot: ConnectionError: the sandbox is gone"):
        envs.fork(0, 1)
    with pytest.raises(RuntimeError, match=r"episodes \[1\] are over"):
        envs.send([np.zeros(3, np.int32)], [1])
    envs.close()


def test_wrong_use_is_refused_and_changes_nothing():
    envs = ToolVectorEnv(Dice, num_envs=3, text=True)
    with pytest.raises(ValueError, match="source and target are both 0"):
        envs.fork(0, 0)
    with pytest.raises(ValueError, match=r"must be in \[0, 3\), got -1"):
        envs.fork(-1, 0)
    with pytest.raises(RuntimeError, match="episode 0 is over; take the snapshot before its last turn"):
        envs.fork(0, 1)
    envs.reset(seed=0)
    envs.send(["hello"], [0])
    with pytest.raises(RuntimeError, match=r"episode 0 is in flight; recv\(\) its result"):
        envs.fork(0, 1)
    with pytest.raises(RuntimeError, match=r"episode 0 is in flight; recv\(\) its result before another"):
        envs.fork(1, 0)
    envs.recv()
    envs.fork(0, 1)
    envs.close()


def test_environments_that_differ_are_refused():
    made = iter([Dice, type("OtherDice", (Dice,), {}), Dice])
    envs = ToolVectorEnv(lambda: next(made)(max_turns=4), num_envs=3, text=True)
    envs.reset(seed=0)
    with pytest.raises(ValueError, match="snapshot is of Dice, but episode 1 is of OtherDice"):
        envs.fork(0, 1)
    envs.fork(0, 2)
    envs.close()
