"""The streams of random numbers that a run draws from. All are functions of its seed, and none has a number of another.

    np.random.default_rng([seed, Stream.ORDER, iteration])
"""

from enum import IntEnum, unique

import numpy as np


@unique
class Stream(IntEnum):
    """What is drawn. A stream's number stays as it is: runs on record are drawn from it."""

    TASKS = 1  # the tasks of an iteration
    SAMPLING = 2  # the tokens of an episode
    ORDER = 3  # the minibatches of an iteration
    ENVIRONMENT = 4  # an environment's own randomness in an episode


def episode_seed(seed: int, episode: int) -> int:
    """The seed of an environment's own randomness: another one in every episode, also of the same task."""
    return int(np.random.SeedSequence([seed, Stream.ENVIRONMENT, episode]).generate_state(1)[0])
