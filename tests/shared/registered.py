"""The registered ids that can be made here: all of ours, and those of other people's packages that are installed."""

import gymnasium as gym
import pytest

import agent_r1


def is_installed(env_id):
    """Whether the package of a bridge is there."""
    try:
        gym.make(env_id).close()
    except ImportError:
        return False
    return True


BRIDGES = [env_id for env_id in sorted(agent_r1.BRIDGES) if is_installed(env_id)]
ENVIRONMENTS = sorted(agent_r1.ENVIRONMENTS)
AS_BRIDGES = [  # on a busy machine ScienceWorld's Java takes minutes
    pytest.param(env_id, marks=[pytest.mark.bridge, pytest.mark.timeout(900)]) for env_id in BRIDGES
]
IDS = [*ENVIRONMENTS, *AS_BRIDGES]
"""For `parametrize`. What is marked as a bridge is run by `make test-worlds`, too."""
