"""Fixtures of all tests that compute with torch: one thread, and rows that are made up."""

import numpy as np
import pytest
import torch

from llm_utils.trajectory import Trajectory, Turn


@pytest.fixture(autouse=True)
def one_thread():
    """Tests run side by side; OpenMP threads that wait for each other would slow all of them down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_row():
    """make_row(turns, length): a finished episode with these turns, (first token, one past the last, reward)."""

    def make(turns, length, prompt_length=None, task=0, tokens=None, logprobs=None, episode=0, **kwargs):
        prompt_length = turns[0][0] if prompt_length is None else prompt_length
        tokens = np.zeros(length, np.int32) if tokens is None else tokens
        row = Trajectory(episode, task, prompt_length, tokens)
        logprobs = np.zeros(length, np.float32) if logprobs is None else logprobs
        for start, end, reward in turns:
            versions = np.zeros(end - start, np.int32)
            row.turns.append(Turn(int(start), int(end), float(reward), logprobs[start:end], versions))
        for name, value in kwargs.items():
            setattr(row, name, value)
        row.finalize()
        return row

    return make
