"""The streams of random numbers of a run. Each is a function of the run's seed, and no two share numbers.

    np.random.default_rng([seed, Stream.ORDER, iteration])
"""

from enum import IntEnum, unique

import numpy as np


@unique
class Stream(IntEnum):
    """The number of each stream. It never changes, because recorded runs were drawn with it."""

    TASKS = 1  # the tasks of an iteration
    SAMPLING = 2  # the tokens of an episode
    ORDER = 3  # the minibatches of an iteration
    ENVIRONMENT = 4  # an environment's own randomness in an episode
    CANDIDATES = 5  # the further candidates of a turn, in an episode's stream of SAMPLING
    REPLAY = 6  # the stored successes of an iteration
    BRANCHES = 7  # whether an episode branches at a turn


def episode_seed(seed: int, episode: int) -> int:
    """Return the seed of an environment's own randomness. It differs in every episode, even of the same task."""
    return int(np.random.SeedSequence([seed, Stream.ENVIRONMENT, episode]).generate_state(1)[0])
