"""The process that judges mathematics crashes: that is a fault with a log line, and never the policy's doing."""

import logging

import pytest

pytest.importorskip("math_verify")

from agent_r1.judges import math_server, mathematics
from agent_r1.judges.mathematics import TOO_COSTLY, Verdict, judge

# The real server, in which one answer ends its child in some way.
SERVER = """
import os, signal, sys, time
sys.path.insert(0, {folder!r})
import math_server
compare = math_server._compare
def deep(): deep()
def broken(gold, value, *rest):
    if value == "601": deep()
    if value == "602": raise TypeError("not made\\nfor this")
    if value == "603": os.kill(os.getpid(), signal.SIGSEGV)
    if value == "604": os.abort()
    if value == "605": os._exit(3)
    if value == "606": sys.exit("over")
    if value == "607": raise MemoryError
    if value == "608": os.kill(os.getpid(), signal.SIGPROF)
    if value == "609": os.kill(os.getpid(), signal.SIGKILL)
    return compare(gold, value, *rest)
math_server._compare = broken
math_server.serve()
"""
CRASHES = {
    "601": "RecursionError: maximum recursion depth exceeded",
    "602": "TypeError: not made",
    "603": "by SIGSEGV",
    "604": "by SIGABRT",
    "605": "with exit status 3",
    "606": "SystemExit: over",
}


@pytest.fixture(scope="module")
def crashing(tmp_path_factory):
    path = tmp_path_factory.mktemp("server") / "server.py"
    path.write_text(SERVER.format(folder=math_server.__file__.rpartition("/")[0]))
    mathematics.server.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(math_server, "__file__", str(path))
        yield
        mathematics.server.close()


@pytest.mark.parametrize("answer", CRASHES)
def test_a_crash_is_a_fault_and_told_as_what_it_is(crashing, caplog, answer):
    with caplog.at_level(logging.ERROR), pytest.raises(ConnectionError, match="crashed") as raised:
        judge("6.5", answer)
    assert CRASHES[answer] in str(raised.value)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and CRASHES[answer] in record.getMessage()
    assert repr(answer) in record.getMessage() and "\n" not in record.getMessage()
    assert judge("0.5", f"1/{answer} + 1/2 - 1/{answer}") in (Verdict(True, ""), Verdict(False, math_server.UNREADABLE))


def test_what_an_answer_costs_is_no_crash(crashing, caplog):
    assert judge("6.5", "607") == judge("6.5", "608") == Verdict(False, TOO_COSTLY)
    with pytest.raises(ConnectionError, match="killed from outside"):
        judge("6.5", "609")
    assert not caplog.records


def test_an_episode_of_a_crash_ends_with_a_fault(crashing, tmp_path):
    import json

    import gymnasium as gym

    from agent_r1.wrappers import TextInterface

    row = {"question": "How many?", "answer": "It is 6.5.\n#### 6.5"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    env = TextInterface(gym.make("AgentR1/GSM8K-v0", data_dir=tmp_path, tools=("calculator",), fault_deadline=0))
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step("<answer>601</answer>")
    assert (reward, terminated, truncated) == (0, False, True) and info["truncation_reason"] == "fault"
    assert "RecursionError" in info["fault"] and not any(name.startswith("outcome") for name in info["reward_terms"])
    env.reset(seed=0)
    assert env.step("<answer>13/2</answer>")[-1]["is_success"]
