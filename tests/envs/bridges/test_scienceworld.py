"""ScienceWorld: gold paths reach 100, in Java processes that all draw the same random numbers."""

import contextlib
import gc
import importlib
import os
import shutil
import signal
import threading
import time
import warnings
from pathlib import Path

import pytest

pytest.importorskip("scienceworld")
if shutil.which("java") is None:
    pytest.skip("ScienceWorld needs Java", allow_module_level=True)

import psutil
from bridge_cases import act, check_others_play_the_same, check_package, forgotten, run_elsewhere

from agent_r1 import ArgumentError, ToolFault
from agent_r1.bridges.scienceworld import environment as scienceworld
from agent_r1.bridges.scienceworld import java_random
from agent_r1.bridges.scienceworld.environment import (
    SIMULATORS,
    TASKS,
    House,
    ScienceWorldEnv,
    find_scienceworld,
    variations,
)
from agent_r1.bridges.scienceworld.java_random import patched_random
from agent_r1.validation import probes

QUICK = ("boil", "use-thermometer", "power-component", "test-conductivity", "find-animal", "chemistry-mix", "melt")
QUICK += ("lifespan-longest-lived", "identify-life-stages-2", "inclined-plane-determine-angle", "grow-plant")


@pytest.fixture(scope="module")
def env():
    made = ScienceWorldEnv(tasks=QUICK, max_action_tokens=30_000)
    yield made
    made.close()


@pytest.fixture(scope="module", autouse=True)
def leave_no_process():
    yield
    SIMULATORS.clear()


@pytest.mark.parametrize("number", range(len(QUICK)))
def test_gold_paths_reach_100(env, number):
    episode = probes.play(env, number, probes.expert)
    assert env.task.id == f"{QUICK[number]}-0"
    assert episode.success and sum(episode.rewards) == pytest.approx(1)
    assert episode.infos[-1]["metrics"] == {"return": 100}


def test_the_table_is_scienceworlds():
    from scienceworld.constants import ID2TASK

    assert list(TASKS) == list(ID2TASK.values()) and len(TASKS) == 30 and sum(TASKS.values()) == 7207
    house = scienceworld.House()
    for name in ("boil", "identify-life-stages-1", "lifespan-longest-lived", "grow-fruit"):
        house.begin(name, 0, "")
        inner = house.loan.held.env
        assert inner.get_max_variations(name) == TASKS[name]
        for split, there in (
            ("train", inner.get_variations_train()), ("dev", inner.get_variations_dev()),
            ("test", inner.get_variations_test()),
        ):  # fmt: skip
            assert list(there) == list(variations(name, split))
    house.close()


def test_each_task_comes_in_turn():
    env = ScienceWorldEnv()
    assert env.num_tasks == 3592 and [name for name, _ in env._order[:30]] == list(TASKS)
    assert len(set(env._order)) == env.num_tasks
    assert ScienceWorldEnv(split="dev").num_tasks + ScienceWorldEnv(split="test").num_tasks == 7207 - 3592


def test_the_score_is_paid_as_it_comes():
    env = ScienceWorldEnv(tasks=["power-component"], process_reward={"game": 1.0})
    episode = probes.play(env, 0, probes.expert)
    terms = [info["reward_terms"].get("process/game", 0.0) for info in episode.infos]
    assert sum(terms) == pytest.approx(1) and sum(term > 0 for term in terms) > 3
    env.close()


def test_a_wrong_focus_ends_and_pays_nothing(env):
    env.reset(options={"task_index": QUICK.index("find-animal")})
    *_, reward, terminated, _, info = act(env, "focus on picture")
    assert terminated and reward == 0 and not info["is_success"] and info["metrics"] == {"return": -100}


def test_nothing_can_be_farmed(env):
    env.process_weights["game"] = 1.0
    env.reset(options={"task_index": QUICK.index("power-component"), "max_turns": 200})
    turns = env.demonstration()[:4]
    paid = 0.0
    for number in range(100):
        text = [*turns, env.act("reset task")[0]][number % 5]
        *_, reward, terminated, truncated, _ = env.step(probes.span(env, text))
        paid += reward
        assert not terminated and not truncated
    assert paid <= 1
    env.process_weights["game"] = 0.0


@pytest.mark.parametrize(
    "command",
    ["x" * 20_000, "", "  ", "\ud800", "look\x00around", "look around; rm -rf /", "!g:g\ne\n", "${jndi:ldap://x}", '"'],
)
def test_what_is_no_command_never_reaches_java(env, command):
    env.reset(options={"task_index": 0})
    *_, info = act(env, command)
    assert not info["tool_calls"][0]["ok"] and len(env.messages[-1]["content"]) < 500


@pytest.mark.parametrize("command", ["fly to the moon", "focus on", "look at look at look at", "move to to to", "999"])
def test_nonsense_gets_an_answer(env, command):
    env.reset(options={"task_index": 0})
    *_, terminated, _, info = act(env, command)
    assert not terminated and 0 < len(env.messages[-1]["content"]) < 5_000


def test_saying_nothing_and_giving_up_pay_nothing(env):
    for probe in (probes.null, probes.copying, probes.stuffing):
        episode = probes.play(env, 1, probe, max_turns=3)
        assert not episode.success and sum(episode.rewards) <= 0


def test_a_killed_process_costs_nothing_but_time(env):
    env.reset(options={"task_index": 2})
    turns = env.demonstration()
    for number, text in enumerate(turns):
        if number == 3:
            env.world.loan.held.env._gateway.java_process.kill()
        *_, info = env.step(probes.span(env, text))
    assert info["is_success"]


@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")  # the package's own
def test_a_java_that_never_says_its_port_is_a_fault(tmp_path, monkeypatch):
    SIMULATORS.clear()
    find_scienceworld()
    silent = tmp_path / "java"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(scienceworld, "CALL_TIMEOUT", 0.5)
    before, began = set(psutil.Process().children()), time.monotonic()
    with pytest.raises(ToolFault, match="Java didn't start"):
        House()
    assert time.monotonic() - began < 20 and set(psutil.Process().children()) <= before


@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")  # the package's own
def test_a_java_whose_client_fails_is_not_left(monkeypatch):
    SIMULATORS.clear()
    package, before = find_scienceworld(), set(psutil.Process().children())

    def fail(*args, **kwargs):
        raise OSError("no more sockets")

    monkeypatch.setattr(package, "JavaGateway", fail)
    with pytest.raises(ToolFault, match="no more sockets"):
        House()
    assert set(psutil.Process().children()) <= before


def test_a_java_that_hangs_while_it_is_seeded_is_a_fault(monkeypatch):
    SIMULATORS.clear()
    patched_random()
    before, plain = set(psutil.Process().children()), java_random.seed_java

    def hang(gateway, seed):
        monkeypatch.setattr(scienceworld, "CALL_TIMEOUT", 1.0)
        gateway.java_process.send_signal(signal.SIGSTOP)
        return plain(gateway, seed)

    monkeypatch.setattr(scienceworld, "seed_java", hang)
    monkeypatch.setattr(scienceworld, "CALL_TIMEOUT", 20.0)
    with pytest.raises(ToolFault, match="Java didn't start"):
        House()
    assert set(psutil.Process().children()) <= before


def test_a_java_that_hangs_is_killed_in_the_end(monkeypatch):
    monkeypatch.setattr(scienceworld, "LONGEST", 1.0)
    house = House()
    house.loan.held.env._gateway.java_process.send_signal(signal.SIGSTOP)
    with pytest.raises(ToolFault, match="the simulator was lost"):
        house.begin("boil", 0, "")
    house.close()


def test_java_random_numbers_are_seeded_again_where_their_folder_was_removed():
    SIMULATORS.clear()
    house = House()
    first = house.begin("boil", 0, "")
    house.close()
    SIMULATORS.clear()
    (Path(patched_random()) / "java/util/Random.class").unlink()  # as a cleaner of temporary files does
    house = House()
    assert house.begin("boil", 0, "") == first
    house.close()


def test_processes_that_are_killed_again_and_again_cost_the_policy_nothing(env):
    env.reset(options={"task_index": 2})
    for _ in range(7):
        env.world.loan.held.env._gateway.java_process.kill()
        *_, info = act(env, "look around")
        assert info["tool_calls"][0]["ok"] and not any(info["reward_terms"].values())


def test_two_episodes_share_nothing_and_a_snapshot_goes_on(env):
    other = ScienceWorldEnv(tasks=QUICK)
    index = QUICK.index("use-thermometer")  # its thermometer is noisy
    env.reset(options={"task_index": index})
    turns = env.demonstration()
    alone = [env.step(probes.span(env, text))[0].tolist() for text in turns]
    env.reset(options={"task_index": index})
    other.reset(options={"task_index": index})
    mixed = []
    for number, text in enumerate(turns):
        if number == len(turns) // 2:
            env.set_state(env.get_state())
        mixed.append(env.step(probes.span(env, text))[0].tolist())
        act(other, "look around")
    assert mixed == alone
    assert env.world.loan.held is not other.world.loan.held
    other.close()


def test_another_process_plays_the_same():
    check_others_play_the_same("AgentR1/ScienceWorld-v0", 0, 1, tasks=["use-thermometer", "find-animal"])


def test_a_forked_child_plays_by_itself(env):
    SIMULATORS.clear()
    scienceworld.House().loan.close()  # one waits, one is at work
    env.reset(options={"task_index": 2})
    first, *turns = env.demonstration()
    env.step(probes.span(env, first))
    waiting = len(SIMULATORS)
    if not (child := os.fork()):
        with contextlib.suppress(BaseException):
            *_, info = [env.step(probes.span(env, text)) for text in turns][-1]
            env.close()
            SIMULATORS.clear()
            gc.collect()
            os._exit(0 if info["is_success"] else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not env.memory.get("broken") and len(SIMULATORS) == waiting == 1
    *_, info = [env.step(probes.span(env, text)) for text in turns][-1]
    assert info["is_success"] and not env.memory.get("broken")
    other = scienceworld.House()
    assert len(SIMULATORS) == 0 and "hallway" in other.begin("boil", 0, "")
    other.close()


def test_the_end_of_a_program_ends_its_java():
    program = (
        "from agent_r1.bridges.scienceworld.environment import House\n"
        "house = House(); print(house.loan.held.env._gateway.java_process.pid)"
    )
    printed, _ = run_elsewhere(program)
    import psutil

    java = int(printed.split()[-1])
    assert not psutil.pid_exists(java) or psutil.Process(java).wait(timeout=20) is None


def test_simulators_are_used_again_and_only_some_wait(monkeypatch):
    SIMULATORS.clear()
    monkeypatch.setattr(SIMULATORS, "most_idle", 1)
    houses = [scienceworld.House(), scienceworld.House()]
    held = [house.loan.held for house in houses]
    for house in houses:
        house.close()
    assert [simulator.alive() for simulator in held] == [True, False]
    house = scienceworld.House()
    assert house.loan.held is held[0]
    house.close()


def test_a_simulator_in_which_a_call_is_stuck_serves_nobody_else():
    SIMULATORS.clear()
    house, done = scienceworld.House(), []
    house.begin("boil", 0, "")
    process = house.loan.held.env._gateway.java_process
    os.kill(process.pid, signal.SIGSTOP)  # it hangs
    stuck = threading.Thread(
        target=lambda: done.append(pytest.raises(ToolFault, house.act, "act", {"command": "wait"}))
    )
    stuck.start()
    while not house.loan.busy:
        time.sleep(0.01)
    house.close()
    stuck.join(timeout=60)
    assert process.poll() is not None and done and len(SIMULATORS) == 0


def test_only_the_time_is_taken_out_of_javas_random():
    with pytest.raises(ValueError, match="reads the time 0 times"):
        java_random.without_time(bytes.fromhex("cafebabe0000003d0001") + b"\x00" * 8)


def test_arguments_are_checked():
    with pytest.raises(ArgumentError, match="tasks must be some of boil, melt"):
        ScienceWorldEnv(tasks=["dance"])
    with pytest.raises(ArgumentError, match="tasks must be a list of names, got 'boil'"):
        ScienceWorldEnv(tasks="boil")
    for wrong in (None, ["easy"]):
        with pytest.raises(ArgumentError, match="simplifications must be a text"):
            ScienceWorldEnv(simplifications=wrong)
    with pytest.raises(ArgumentError, match="simplifications are easy, teleportAction"):
        ScienceWorldEnv(simplifications="easy,wings")
    env = ScienceWorldEnv(tasks=["boil"], simplifications="easy")
    assert probes.play(env, 0, probes.expert).success
    env.close()


def test_missing_things_and_another_version_are_said():
    found = [scienceworld.find_scienceworld]
    check_package(ScienceWorldEnv, found, "scienceworld", "1.2", module="scienceworld.scienceworld")
    with forgotten(*found) as patched:
        patched.setenv("PATH", "")
        with pytest.raises(ImportError, match="needs Java 17.*openjdk-17-jre-headless"):
            ScienceWorldEnv()


def test_a_java_that_does_not_fit_is_said(tmp_path):
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho Unrecognized option: --patch-module >&2\nexit 1\n")
    java.chmod(0o755)
    with forgotten(scienceworld.find_scienceworld) as patched:
        patched.setenv("PATH", f"{java.parent}:{os.environ['PATH']}")
        with pytest.raises(ImportError, match="needs Java 17.*Unrecognized option: --patch-module"):
            ScienceWorldEnv()
    with forgotten(scienceworld.find_scienceworld) as patched:
        patched.setenv("JAVA_HOME", "/nowhere")  # the one on the PATH is started
        ScienceWorldEnv().close()


@pytest.mark.filterwarnings("ignore:Exception ignored in.*__del__:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("first", [False, True])
def test_a_java_that_does_not_start_is_a_fault(monkeypatch, first):
    """Neither of the one that plays nor of the first one, in which the class for random numbers is found."""

    def launch(*args, **kwargs):
        raise ValueError("invalid literal for int() with base 10: b''")  # what py4j says then

    if first:
        java_random._patched.cache_clear()
    module = importlib.import_module("py4j.java_gateway") if first else scienceworld.find_scienceworld()
    monkeypatch.setattr(module, "launch_gateway", launch)
    scienceworld.SIMULATORS.clear()
    with pytest.raises(ToolFault, match="Java didn't start"):
        scienceworld.House()


def test_a_java_that_dies_at_its_start_is_a_fault(monkeypatch):
    from py4j.protocol import Py4JNetworkError

    started = []

    def seed(gateway, number):
        started.append(gateway.java_process)
        raise Py4JNetworkError("the connection is gone")

    monkeypatch.setattr(scienceworld, "seed_java", seed)
    scienceworld.SIMULATORS.clear()
    with pytest.raises(ToolFault, match="Java didn't start.*the connection is gone"):
        scienceworld.House()
    assert started[0].poll() is not None


def test_a_simulator_leaves_nothing_open():
    simulator = scienceworld.Simulator()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        simulator.end()
        del simulator
        gc.collect()
    assert not found
