"""What several test modules share."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from fuzz_spans import write_made_up_data
from hypothesis import settings

# A shell starts background jobs with Ctrl-C ignored, and their children would inherit that; some tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run; HYPOTHESIS_PROFILE=explore looks for new ones. No deadline: machines are busy.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.register_profile("explore", deadline=None, max_examples=2_000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(scope="session")
def made_up_data(tmp_path_factory) -> Path:
    """A folder with every data set, two made-up questions in each split, as AGENT_R1_DATA expects it."""
    return write_made_up_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def say():
    """say(env, text, closed=True): one turn of the policy, written as text."""

    def speak(env, text, closed=True):
        env = env.unwrapped
        ids = env.tokenizer.encode(text + env.dialect.end_of_turn * closed, add_special_tokens=False)
        return env.step(np.asarray(ids, np.int32))

    return speak
