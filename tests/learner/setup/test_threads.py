"""The number of threads that torch computes with: given, or what others leave free, from the start to the end."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from llm_utils.setup import cgroups, threads

HOG = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"  # it ends with whoever started it


@pytest.fixture(autouse=True)
def given_again(monkeypatch):
    """OMP_NUM_THREADS, which bounds the number, isn't set; at the end nothing is followed any more."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    yield
    threads.use(SimpleNamespace(num_threads=1))


@pytest.fixture
def hogs():
    """Two busy processes for every core that we may use."""
    count = 2 * len(threads.Load().cpus)
    command = [sys.executable, "-c", HOG, str(os.getpid())]
    processes = [subprocess.Popen(command) for _ in range(count)]
    time.sleep(0.5)
    yield
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.skipif(not threads.STAT.exists(), reason="the load is known on Linux only")
def test_beside_busy_processes_there_is_one_thread(hogs, capsys):
    """With one on every core they would wait for each other, spinning."""
    torch.set_num_threads(7)
    threads.use(SimpleNamespace(num_threads=0))
    assert torch.get_num_threads() == 1
    said = capsys.readouterr().err
    assert said.startswith("torch uses 1 thread (") and "the number follows them" in said


@pytest.mark.skipif(not threads.STAT.exists(), reason="the load is known on Linux only")
def test_the_number_follows_the_load(hogs, monkeypatch):
    monkeypatch.setattr(threads, "SECONDS", 0.3)
    threads.use(SimpleNamespace(num_threads=0))
    torch.set_num_threads(7)  # as if the machine had been quiet at the start
    threads.follow()  # too early to say
    assert torch.get_num_threads() == 7
    time.sleep(0.4)
    threads.follow()
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(("deterministic", "why"), [(False, "of 1 core (OMP_NUM_THREADS=1)"), (True, "1 core, 1 p")])
def test_one_core_is_one(monkeypatch, capsys, deterministic, why):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    threads.use(SimpleNamespace(num_threads=0, deterministic=deterministic))
    assert f"({why}" in capsys.readouterr().err


def test_a_number_that_is_given_stays(capsys):
    threads.use(SimpleNamespace(num_threads=3))
    assert torch.get_num_threads() == 3 and "torch uses 3 threads (--num-threads)" in capsys.readouterr().err
    assert threads._followed is None


@pytest.mark.parametrize(("others", "free"), [(0.0, 8), (0.2, 8), (0.5, 7), (1.3, 6), (7.0, 1), (40.0, 1)])
def test_a_thread_for_every_core_that_is_free(others, free):
    load = threads.Load()
    load.cpus, load.cores = set(range(8)), 8
    assert load.threads(others) == free
    load.cores = 2  # as a container's limit on a larger machine has it
    assert load.threads(others) == min(2, free)


def test_what_a_process_may_use_is_the_bound(tmp_path, monkeypatch):
    """Of the cores that there are: its own, those of a container's limit, and OMP_NUM_THREADS."""
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    load = threads.Load()
    load.cpus = set(range(64))
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    assert cgroups.cores() == 1.5 and threads.Load().cores <= 2
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cgroups.cores() == float("inf")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert threads.Load().cores == 1
    if hasattr(os, "sched_setaffinity"):
        monkeypatch.delenv("OMP_NUM_THREADS")
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(before)})
        try:
            assert threads.Load().cores == 1
        finally:
            os.sched_setaffinity(0, before)


def test_reproducible_runs_and_those_of_torchrun_do_not_look_at_the_load(monkeypatch, hogs):
    cores = threads.Load().cores
    threads.use(SimpleNamespace(num_threads=0, deterministic=True))
    assert torch.get_num_threads() == cores and threads._followed is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    threads.use(SimpleNamespace(num_threads=0))
    assert torch.get_num_threads() == max(1, cores // 2) and threads._followed is None
