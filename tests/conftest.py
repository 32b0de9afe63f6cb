"""What several test modules share."""

import os

# Before anything reads it: where no hub can be reached, each request would wait for its timeout.
os.environ["HF_HUB_OFFLINE"] = "1"

import gc
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from made_up_data import write_made_up_data

from agent_r1_tools.python.choose import LOCAL, probe

# The learners need the extra [train]; without it their tests are left out, all of them, and the first line says so.
NOT_INSTALLED = [name for name in ("torch", "transformers", "tyro", "tensorboard") if find_spec(name) is None]
OF_LEARNERS = ["learner", *(f"benchmarks/test_{name}.py" for name in ("estimators", "evidence", "real_model"))]
collect_ignore = OF_LEARNERS if NOT_INSTALLED else []

# A shell starts background jobs with Ctrl-C ignored, and their children would inherit that; some tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run; HYPOTHESIS_PROFILE=explore looks for new ones. No deadline: machines are busy.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.register_profile("explore", deadline=None, max_examples=2_000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


# The environments whose every episode needs a sandbox.
NEEDS = {"AgentR1/Terminal-v0": "bubblewrap"}

# A file is one worker's: of those that take longest none may begin when the others are about to end.
LONGEST = ("test_python_attacks", "test_benchmarks", "test_distributed", "test_exits", "test_validate", "test_python")
LONGEST += ("test_resume", "test_mathematics", "test_grpo_runs", "test_sft_llm")


def pytest_configure(config: pytest.Config) -> None:
    for name in LOCAL:
        config.addinivalue_line("markers", f"{name}: needs this sandbox; skipped where it does not work")
    config.addinivalue_line("markers", "sandbox: takes the best sandbox that works, so it runs again with bubblewrap")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests whose parameters name a sandbox, or an environment that needs one. Put the longest files first."""
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        given = [one for one in parameters if isinstance(one, str)]
        for name in {NEEDS.get(value, value) for value in given} & LOCAL.keys():
            item.add_marker(name)
        if "auto" in given and item.path.parent.name == "python":
            item.add_marker("sandbox")
    items.sort(key=lambda item: item.path.stem not in LONGEST)  # of equals the order stays


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose sandbox does not work here."""
    for name in LOCAL:
        if item.get_closest_marker(name) and (problem := probe(name)):
            pytest.skip(f"{name}: {problem}")


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # collections leave out what was imported, and are quick; a cycle made at import is never collected


def pytest_report_header() -> list[str]:
    return [f"{', '.join(OF_LEARNERS)} are left out: {', '.join(NOT_INSTALLED)} not installed"] if NOT_INSTALLED else []


def pytest_terminal_summary(terminalreporter) -> None:
    """One line about the sandboxes that no test has tried: `make test` is green without them."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = [report.longrepr[2] for report in skipped if isinstance(report.longrepr, tuple)]
    missing = []
    for name, local in LOCAL.items():
        count = sum(name in reason for reason in reasons)
        if count and probe(name) is not None:
            missing.append(f"{name} ({count} tests; {local.remedy})")
    if missing:
        terminalreporter.write_line(f"sandboxes that don't work here: {', '.join(missing)}", yellow=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Garbage is collected between tests: at Python's recursion limit, where some go, finalizers fail, and the test
    with them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


os.register_at_fork(after_in_child=gc.enable)  # what a test forks is a program of its own


@pytest.fixture(scope="module", autouse=True)
def no_garbage_of_others() -> Iterator[None]:
    """What a module left ends with it."""
    yield
    gc.collect()


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
