"""agent_r1.adapters.torchrl in the real TorchRL: what it sees is what the environment itself says."""

import gymnasium as gym
import numpy as np
import pytest

import agent_r1

torch = pytest.importorskip("torch")
envs = pytest.importorskip("torchrl.envs")
lazy_stack = pytest.importorskip("tensordict").lazy_stack

from agent_r1.adapters.torchrl import InfoReader  # noqa: E402

ENV_ID = "AgentR1/MultihopWorld-v0"
TINY = agent_r1.tiny_policy(ENV_ID)


def make(**kwargs):
    return envs.GymWrapper(gym.make(ENV_ID, **kwargs)).set_info_dict_reader(InfoReader("em"))


def speaker(env, sloppy=False):
    """A policy for TorchRL that plays the demonstration of each task."""
    core, turns = env._env.unwrapped, []

    def policy(td):  # TorchRL goes by this name
        if core.episode.turn == 0:
            turns[:] = core.demonstration(np.random.default_rng(0) if sloppy else None)
        text = turns[core.episode.turn] + core.dialect.end_of_turn
        return td.set("action", torch.tensor(core.tokenizer.encode(text), dtype=torch.int32))

    return policy


@pytest.mark.parametrize("sloppy", [False, True])
def test_a_rollout_is_that_of_the_environment(sloppy):
    pytest.importorskip("transformers")
    env, single = make(tokenizer=TINY), gym.make(ENV_ID, tokenizer=TINY)
    for seed in range(3):
        env.set_seed(seed)  # resets
        episode = env.rollout(9, speaker(env, sloppy), auto_reset=False, tensordict=env.reset(seed=seed))
        state, info = single.reset(seed=seed)
        for step in episode.unbind(0):
            np.testing.assert_array_equal(step["observation"], state)
            state, reward, terminated, truncated, info = single.step(step["action"].numpy())
            after = step["next"]
            np.testing.assert_array_equal(after["observation"], state)
            assert after["observation"].dtype == torch.int32
            assert (after["reward"].item(), after["terminated"].item()) == (pytest.approx(reward), terminated)
            assert after["truncated"].item() == truncated and after["max_new_tokens"].item() == info["max_new_tokens"]
        assert terminated and after["is_success"].item() == info["is_success"] != sloppy
        assert after["em"].item() == info["metrics"]["em"]


def test_specs_hold():
    env = make(max_turns=2)
    envs.check_env_specs(env, seed=1)
    assert env.action_spec.shape == (-1,) and env.action_spec.is_in(torch.tensor([1, 2], dtype=torch.int32))
    assert not env.action_spec.is_in(torch.tensor([env._env.action_space.vocab_size], dtype=torch.int32))


def test_spans_of_one_token_and_of_none():
    env = make(max_turns=2)

    def policy(td):  # TorchRL goes by this name
        return td.set("action", torch.full((int(env._env.unwrapped.episode.turn == 0),), 65, dtype=torch.int32))

    episode = env.rollout(5, policy)
    assert [len(span) for span in episode.get("action", as_list=True)] == [1, 0]
    assert episode[-1]["next", "truncated"].item()


def test_a_collector_and_a_replay_buffer_keep_lengths():
    data = pytest.importorskip("torchrl.data")
    collectors = pytest.importorskip("torchrl.collectors")
    env = make(tokenizer=TINY)
    collector = collectors.Collector(env, speaker(env), frames_per_batch=10, total_frames=10)
    (batch,) = list(collector)
    spans, ends = batch.get("action", as_list=True), batch["next", "done"].flatten()
    assert len(spans) == 10 and len({len(span) for span in spans}) > 1 and ends.any()
    assert batch["next", "is_success"].flatten()[ends].all()
    buffer = data.ReplayBuffer(storage=data.LazyStackStorage(20), batch_size=4)
    buffer.extend(batch)
    padded = buffer.sample().get("observation", as_padded_tensor=True)
    assert padded.shape[0] == 4 and padded.shape[1] > 50


def test_several_environments_side_by_side():
    both = envs.SerialEnv(2, lambda: make(max_turns=2))
    both.set_seed(2)  # two prompts of one length TorchRL stacks as one tensor, and then takes no ragged actions

    def policy(td):
        spans = [torch.full((n,), 65, dtype=torch.int32) for n in (3, 5)]
        return lazy_stack([one.set("action", span) for one, span in zip(td.unbind(0), spans, strict=True)])

    episode = both.rollout(2, policy, break_when_any_done=False)
    assert episode.batch_size == (2, 2) and episode["next", "truncated"][:, -1].all()
    assert [len(one[0]["action"]) for one in episode.unbind(0)] == [3, 5]
