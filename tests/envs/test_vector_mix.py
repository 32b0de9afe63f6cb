"""MixedVectorEnv: each episode is that of its own environment, whatever the others are."""

import gymnasium as gym
import numpy as np
import pytest

from agent_r1 import ArgumentError
from agent_r1.tasks.arithmetic_world import ArithmeticWorldEnv
from agent_r1.vector_mix import MixedVectorEnv, mixed_spec

IDS = ["AgentR1/MultihopWorld-v0", "AgentR1/ArithmeticWorld-v0"]


def make(num_envs, ids=IDS, **kwargs):
    return gym.make_vec(mixed_spec(ids), num_envs=num_envs, **kwargs)


def turns(env_id, task):
    """The expert's turns, with a malformed one first."""
    env = gym.make(env_id).unwrapped
    env.reset(options={"task_index": task})
    texts = ["<tool_call>\n{oops\n</tool_call>", *env.demonstration()]
    return [np.array(env.tokenizer.encode(text + env.dialect.end_of_turn), np.int32) for text in texts]


def test_an_episode_is_that_of_its_own_environment_token_for_token():
    """Slots play one environment after the other, so that the second episode of each is in a swapped slot."""
    envs = make(2)
    first = [numbers.start for numbers in envs.unwrapped.tasks]
    for order in ((0, 1), (1, 0), (1, 1), (0, 0)):
        tasks, seeds = [3, 4], [7, 8]
        numbers = [first[place] + task for place, task in zip(order, tasks, strict=True)]
        states, infos = envs.reset(seed=seeds, options={"task_index": numbers})
        assert list(infos["env_id"]) == [IDS[place] for place in order]
        single = [gym.make(IDS[place]) for place in order]
        spans = [turns(IDS[place], task) for place, task in zip(order, tasks, strict=True)]
        for slot, env in enumerate(single):
            state, info = env.reset(seed=seeds[slot], options={"task_index": tasks[slot]})
            assert (state == states[slot]).all() and info["task_id"] == infos["task_id"][slot]
            for span in spans[slot]:
                envs.send([span], [slot])
                _, (found,), (reward,), (terminated,), (truncated,), (told,) = envs.recv()
                expected = env.step(span)
                assert np.array_equal(found, expected[0])
                assert (reward, terminated, truncated, told) == expected[1:]
            assert terminated and told["is_success"]
            assert envs.unwrapped.envs[slot].episode.task_index == tasks[slot]
    envs.close()


def test_the_seed_draws_the_environment_by_share_and_the_task_as_the_environment_does():
    envs = make(50, share=[3, 1], max_turns=1)
    seeds = list(range(40)) + list(range(10))
    states, infos = envs.reset(seed=seeds)
    drawn = list(infos["env_id"])
    assert 5 <= drawn.count(IDS[1]) <= 20
    assert drawn[:10] == drawn[40:] and all((states[i] == states[40 + i]).all() for i in range(10))
    for env_id, slot in {env_id: slot for slot, env_id in enumerate(drawn)}.items():
        assert (gym.make(env_id, max_turns=1).reset(seed=seeds[slot])[0] == states[slot]).all()
    envs.close()


def test_autoreset_draws_environments_too_and_repeatably():
    found = []
    for _ in range(2):
        envs = make(2, max_turns=1, autoreset_mode="SameStep", text=True)
        envs.reset(seed=5)
        episodes = [envs.step(["<answer>x</answer>"] * 2) for _ in range(12)]
        found.append([(list(info["env_id"]), list(info["task_id"])) for *_, info in episodes])
        envs.close()
    assert found[0] == found[1]
    assert {env_id for names, _ in found[0] for env_id in names} == set(IDS)


def test_limits_are_of_each_environment_and_spaces_of_the_longest():
    each = [{"max_turns": 2, "max_context_tokens": 4000, "max_action_tokens": 9}, {"max_turns": 5}]
    envs = make(2, each=each, text=False)
    inner = envs.unwrapped
    assert envs.single_observation_space.max_len == 32_768 and envs.single_action_space.max_len == 512
    envs.reset(options={"task_index": [0, inner.tasks[1].start], "max_turns": 3})
    assert [env.episode.max_turns for env in inner.envs] == [2, 3]
    assert [env.action_space.max_len for env in inner.envs] == [9, 512]
    envs.close()


def test_gymnasiums_limit_is_that_of_the_registration():
    gym.register("Short-v0", entry_point=ArithmeticWorldEnv, max_episode_steps=1)
    try:
        envs = make(2, [IDS[0], "Short-v0"], text=True)
        envs.reset(options={"task_index": [0, envs.unwrapped.tasks[1].start]})
        assert list(envs.step(["hm"] * 2)[3]) == [False, True]
        envs.close()
    finally:
        del gym.registry["Short-v0"]


class Letters(ArithmeticWorldEnv):
    """It takes no other tokenizer than its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.tokenizer = list(range(26))


def test_what_cannot_be_mixed_is_refused():
    for kwargs, message in (
        ({"share": [1]}, "there are 1 shares for 2 environments"),
        ({"share": [1, 0]}, "a share must be above 0, got 0.0"),
        ({"share": [1, float("nan")]}, "a share must be a number"),
        ({"each": [{}]}, "each has 1 entries for 2 environments"),
        ({"split": ["train"]}, "split has 1 entries for 2 environments"),
        ({"split": "validation"}, "has no split 'validation'"),
        ({"ids": [IDS[0], IDS[0]]}, "MultihopWorld-v0 is named twice"),
    ):
        with pytest.raises(ArgumentError, match=message):
            make(2, **kwargs)
    with pytest.raises(ArgumentError, match="unexpected keyword") as caught:
        make(1, each=[{}, {"max_hops": 3}])
    assert caught.value.__notes__ == [f"this is the environment {IDS[1]}"]
    gym.register("Letters-v0", entry_point=Letters)
    try:
        with pytest.raises(ArgumentError, match=r"differ in their number of tokens \(.*, Letters-v0 26\)"):
            make(2, [IDS[0], "Letters-v0"])
    finally:
        del gym.registry["Letters-v0"]
    envs = MixedVectorEnv(IDS)
    with pytest.raises(ValueError, match=r"task_index must be in \[0, 2000000\)"):
        envs.reset(options={"task_index": 2_000_000})
    envs.close()


@pytest.mark.parametrize("num_envs", [1, 3])
def test_environments_are_closed_if_another_cannot_be_made(num_envs, monkeypatch):
    closed = []
    monkeypatch.setattr(ArithmeticWorldEnv, "close", lambda env: closed.append(env))
    spec = mixed_spec(["AgentR1/ArithmeticWorld-v0", "AgentR1/CraftWorld-v0"])
    with pytest.raises(ArgumentError, match="nothing"):
        gym.make_vec(spec, num_envs=num_envs, split=["train", "nothing"])
    assert len(closed) == 1
