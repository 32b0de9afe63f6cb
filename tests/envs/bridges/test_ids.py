"""What holds for every environment through somebody else's package, besides all that test_registry.py and
test_validate.py ask of every id."""

import gymnasium as gym
import pytest
from gymnasium.envs.registration import load_env_creator
from gymnasium.spaces import Text
from registered import BRIDGES

import agent_r1
from agent_r1.bridges import GymToolEnv


class Silent(gym.Env):
    """A game that says nothing but its seed."""

    observation_space = action_space = Text(100)

    def reset(self, *, seed=None, options=None):
        return f"{seed}", {}


class SilentEnv(GymToolEnv):
    def __init__(self, **kwargs):
        super().__init__(make_env=Silent, **kwargs)


@pytest.mark.parametrize("env_id", sorted(set(agent_r1.BRIDGES) - set(BRIDGES)))
def test_a_package_that_is_missing_is_named_with_its_extra(env_id):
    with pytest.raises(ImportError, match=r'pip install.* "agent-r1\[\w+\]"'):  # or what else there is to do
        gym.make(env_id)


@pytest.mark.parametrize(
    "env_class", [SilentEnv, *(load_env_creator(agent_r1.BRIDGES[env_id].entry_point) for env_id in BRIDGES)]
)
def test_no_two_splits_share_a_task(env_class):
    """A split has a range of seeds to itself, or tasks of other names, but for splits that the original has besides."""
    ranges, names = [], []
    own = set(env_class.splits.values())
    for split in own & {"train", "validation", "dev", "test"} or own:
        env = env_class(split=split)
        indexes = {0, 1, env.num_tasks // 2, env.num_tasks - 1}
        tasks = [env.make_task(index) for index in indexes]
        if "seed" not in tasks[0].metadata:
            names += [task.id for task in tasks]
            env.close()
            continue
        seeds = [task.metadata["seed"] for task in tasks]
        assert len(set(seeds)) == len(indexes)
        ranges.append((min(seeds), max(seeds)))
        env.close()
    assert len(set(names)) == len(names)
    ranges.sort()
    assert all(high < low for (_, high), (low, _) in zip(ranges, ranges[1:], strict=False)), ranges
