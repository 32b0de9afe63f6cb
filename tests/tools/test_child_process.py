"""A process that answers requests: what it is for is in test_templates.py and test_mathematics.py."""

import os
import signal
import sys

import pytest

from agent_r1.judges import mathematics
from agent_r1.text import templates
from agent_r1_tools.child_process import ChildProcess, Ended

ECHO = """
import os, sys
for line in sys.stdin.buffer:
    if line == b"leave\\n":
        sys.exit(3)
    os.write(1, line)
"""


class Echo(ChildProcess):
    def command(self):
        return [sys.executable, "-c", ECHO]


def line(pipe):
    if answer := pipe.readline():
        return answer
    raise EOFError


@pytest.fixture
def echo():
    process = Echo()
    yield process
    process.close()


def test_templates_and_answers_are_judged_by_such_processes():
    assert isinstance(templates._renderer, ChildProcess) and isinstance(mathematics.server, ChildProcess)


def test_it_starts_with_the_first_request_and_stays(echo):
    assert echo.process is None
    assert echo.exchange(b"1\n", line) == b"1\n"
    process = echo.process
    assert echo.exchange(b"2\n", line) == b"2\n" and echo.process is process


def test_how_it_ended_is_said_and_the_next_request_starts_another(echo):
    with pytest.raises(Ended) as end:
        echo.exchange(b"leave\n", line)
    assert end.value.status == 3 and echo.process is None
    assert echo.exchange(b"1\n", line) == b"1\n"
    echo.process.send_signal(signal.SIGKILL)
    with pytest.raises(Ended) as end:
        echo.exchange(b"2\n", line)
    assert end.value.status == -signal.SIGKILL
    assert echo.exchange(b"3\n", line) == b"3\n"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_answer_that_was_not_read_is_not_the_next_ones(echo, error):
    def interrupted(pipe):
        raise error

    with pytest.raises(error):
        echo.exchange(b"1\n", interrupted)
    assert echo.exchange(b"2\n", line) == b"2\n"


def test_a_program_that_is_not_there_is_an_oserror(echo, monkeypatch):
    monkeypatch.setattr(echo, "command", lambda: ["/nowhere/at/all"])
    with pytest.raises(FileNotFoundError):
        echo.exchange(b"1\n", line)
    monkeypatch.undo()
    assert echo.exchange(b"1\n", line) == b"1\n"


def test_a_fork_asks_a_process_of_its_own(echo):
    assert echo.exchange(b"1\n", line) == b"1\n"
    process = echo.process
    echo.lock.acquire()  # as if another thread were asking
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            os._exit(0 if echo.exchange(b"2\n", line) == b"2\n" and echo.process.pid != process.pid else 1)
        finally:
            os._exit(2)
    echo.lock.release()
    assert os.waitpid(child, 0)[1] == 0
    assert echo.process is process and echo.exchange(b"3\n", line) == b"3\n"
