"""TokenSpan as a Gymnasium space."""

import json
import pickle

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector.utils import batch_space

from agent_r1 import TokenSpan


@pytest.mark.parametrize(("min_len", "max_len"), [(0, 0), (0, 5), (3, 3), (2, 4_096), (100, 200)])
def test_samples_are_members(min_len, max_len):
    space = TokenSpan(7, max_len, min_len, seed=1)
    samples = [space.sample() for _ in range(200)]
    assert all(span in space and span.dtype == np.int32 and span.ndim == 1 for span in samples)
    lengths = {span.size for span in samples}
    assert min(lengths) == min_len and max(lengths) == min(max_len, max(64, min_len))
    if max_len:
        assert {token for span in samples for token in span.tolist()} == set(range(7))


def test_sampling_is_seeded():
    first, second = TokenSpan(50, 20, seed=3), TokenSpan(50, 20)
    second.seed(3)
    for _ in range(20):
        assert np.array_equal(first.sample(), second.sample())


def test_no_masks():
    space = TokenSpan(5, 5)
    for given in ({"mask": np.ones(5, np.int8)}, {"probability": np.ones(5) / 5}):
        with pytest.raises(ValueError, match="mask logits"):
            space.sample(**given)


@pytest.mark.parametrize(
    "member", [np.array([], np.int32), np.array([0, 9], np.int32), np.array([3], np.int64), np.array([9] * 4, np.uint8)]
)
def test_members(member):
    assert member in TokenSpan(10, 4)


@pytest.mark.parametrize(
    "stranger",
    [
        [1, 2],
        (1, 2),
        "12",
        None,
        7,
        np.int32(7),
        np.array(7),
        np.array([[1, 2]]),
        np.array([1.0, 2.0]),
        np.array([True, False]),
        np.array(["1"]),
        np.array([1, None]),
        np.array([10]),
        np.array([-1]),
        np.array([2**31 + 1]),
        np.array([2**63], np.uint64),
        np.zeros(5, np.int32),
    ],
)
def test_strangers(stranger):
    assert stranger not in TokenSpan(10, 4)


def test_too_short_is_a_stranger():
    assert np.array([1], np.int32) not in TokenSpan(10, 4, min_len=2)


@pytest.mark.parametrize("arguments", [(0, 5), (-1, 5), (5, -1), (5, 2, 3), (5, 2, -1)])
def test_impossible_spaces(arguments):
    with pytest.raises(ValueError, match="must"):
        TokenSpan(*arguments)


def test_equality_copies_and_pickle():
    space = TokenSpan(10, 4, 1, seed=5)
    copy = pickle.loads(pickle.dumps(space))
    assert copy == space and repr(copy) == repr(space) == "TokenSpan(vocab_size=10, max_len=4, min_len=1)"
    assert np.array_equal(copy.sample(), space.sample())  # the random state travels too
    for other in (TokenSpan(11, 4, 1), TokenSpan(10, 5, 1), TokenSpan(10, 4, 0), gym.spaces.Discrete(10), None):
        assert space != other


def test_json_round_trip():
    space = TokenSpan(10, 4, seed=5)
    samples = [space.sample() for _ in range(10)]
    back = space.from_jsonable(json.loads(json.dumps(space.to_jsonable(samples))))
    assert all(np.array_equal(a, b) and b.dtype == np.int32 for a, b in zip(samples, back, strict=True))


def test_batches_are_tuples():
    """Spans have no common length, so a batch of them is a tuple."""
    space = TokenSpan(10, 4, seed=5)
    batch = batch_space(space, 3)
    assert isinstance(batch, gym.spaces.Tuple) and len(batch.spaces) == 3 and not space.is_np_flattenable
    assert batch.sample() in batch
