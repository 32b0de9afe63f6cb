"""What is asked of several bridges in the same way."""

import contextlib
import json
import os
import re
import subprocess
import sys
import warnings

import pytest

from agent_r1.bridges import bridge
from agent_r1.validation import probes

PLAY = """
import hashlib, json, sys
import agent_r1, gymnasium as gym
from agent_r1.validation import probes

env = gym.make(sys.argv[1], **json.loads(sys.argv[2])).unwrapped
found = {int(index): probes.play(env, int(index), probes.expert).states for index in sys.argv[3:]}
print(hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest())
env.close()
"""


def act(env, command):
    """A turn of a `TextGameEnv` that gives one command."""
    return env.step(probes.span(env, *env.act(command)))


def call(env, name, /, **arguments):
    """A turn of one call."""
    return env.step(probes.span(env, env.dialect.tool_call(name, arguments)))


def say(env, text):
    """A turn of these words."""
    return env.step(probes.span(env, text))


def run_elsewhere(program, *arguments, **environment):
    """What a program prints in another process, which knows little of our environment, and what it complains of."""
    known = {"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    run = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(run, capture_output=True, text=True, env={**known, **environment}, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def check_others_play_the_same(env_id, *indices, environment=None, **kwargs):
    """In other processes, whose hashes differ, and in another order, the expert's episodes are the same. What the
    processes complained of."""
    orders = {"0": indices, "1": indices[::-1]}
    runs = [
        run_elsewhere(PLAY, env_id, json.dumps(kwargs), *order, PYTHONHASHSEED=seed, **(environment or {}))
        for seed, order in orders.items()
    ]
    assert len({printed for printed, _ in runs}) == 1
    return "".join(said for _, said in runs)


@contextlib.contextmanager
def forgotten(*found):
    """What was found out about installed packages is found out again, and once more afterwards. With a monkeypatch."""
    caches = (*found, bridge.check_version)
    try:
        with pytest.MonkeyPatch.context() as patched:
            for cache in caches:
                cache.cache_clear()
            yield patched
    finally:
        for cache in caches:
            cache.cache_clear()


def check_package(make, found, extra, series, module=None, package=None):
    """`make()` says what to install where there is no `module`, and once that another version than `series` of
    `package` is there; the cached functions of `found` look for the package."""
    with forgotten(*found) as patched:
        patched.setitem(sys.modules, module or extra, None)
        with pytest.raises(ImportError, match=re.escape(f'pip install "agent-r1[{extra}]"')):
            make()
    with forgotten(*found) as patched:
        patched.setattr(bridge.metadata, "version", lambda package: "9.9")
        with pytest.warns(UserWarning, match=f"{package or extra} 9.9 wasn't checked; {re.escape(series)} was"):
            make()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            make()  # said once
