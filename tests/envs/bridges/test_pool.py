"""The pool of simulators, each a small process: lent to one at a time, never twice, never across a fork."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from bridge_cases import run_elsewhere

from agent_r1 import ToolFault
from agent_r1.bridges.pool import Pool


class Echo:
    """A `cat`. Whoever frees the object kills it, as with other people's simulators: a forked child, too."""

    def __init__(self):
        self.process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def say(self, text):
        self.process.stdin.write(f"{text}\n")
        return self.process.stdout.readline().strip()

    def alive(self):
        return self.process.poll() is None

    def end(self):
        self.__del__()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()

    def __del__(self):
        if self.process.returncode is None:
            os.kill(self.process.pid, signal.SIGKILL)


@pytest.fixture
def pool():
    made = Pool(Echo, most_idle=1)
    yield made
    made.clear()


def say(loan, text, *lost):
    with loan.at_work(*lost) as echo:
        return echo.say(text)


def test_simulators_are_used_again_and_only_some_wait(pool):
    loans = [pool.lend(), pool.lend()]
    held = [loan.held for loan in loans]
    assert held[0] is not held[1] and [say(loan, "hello") for loan in loans] == ["hello", "hello"]
    for loan in loans:
        loan.close()
        loan.close()  # nothing more
    assert [echo.alive() for echo in held] == [True, False] and len(pool) == 1
    again = pool.lend()
    assert again.held is held[0] and len(pool) == 0
    again.close()
    pool.clear()
    assert not held[0].alive() and len(pool) == 0


def test_what_died_waiting_is_not_lent(pool):
    loan = pool.lend()
    dead = loan.held
    loan.close()
    dead.process.kill()
    dead.process.wait()
    loan = pool.lend()
    assert loan.held is not dead and say(loan, "a") == "a" and dead.process.stdin.closed
    loan.close()


def test_what_died_at_work_does_not_wait(pool):
    loan = pool.lend()
    dead = loan.held
    dead.process.kill()
    dead.process.wait()
    loan.close()
    assert len(pool) == 0 and dead.process.stdin.closed


@pytest.mark.parametrize(
    ("error", "raised"),
    [(BrokenPipeError("x"), ToolFault), (ZeroDivisionError("x"), ZeroDivisionError), (KeyboardInterrupt("x"), None)],
)
def test_a_call_that_breaks_off_ends_it(pool, error, raised):
    loan = pool.lend()
    echo = loan.held
    with pytest.raises(raised or type(error), match="x") as caught, loan.at_work(OSError):
        raise error
    assert (raised is ToolFault) == ("was lost: BrokenPipeError" in str(caught.value))
    assert not echo.alive() and loan.held is None
    loan.close()
    assert len(pool) == 0
    with pytest.raises(ToolFault, match="has ended"):
        say(loan, "a")


def test_one_in_which_a_call_is_stuck_serves_nobody_else(pool):
    loan, faults = pool.lend(), []
    echo = loan.held

    def stuck():
        with pytest.raises(ToolFault) as fault, loan.at_work(OSError) as held:
            held.process.wait()
            raise BrokenPipeError
        faults.append(fault)

    thread = threading.Thread(target=stuck)
    thread.start()
    while not loan.busy:
        time.sleep(0.01)
    loan.close()
    thread.join(timeout=30)
    assert faults and not echo.alive() and len(pool) == 0


def test_a_loan_that_nobody_closed_ends_with_the_next_one(pool):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # pipes that nobody closed, too
        for end in (lambda: pool.lend().close(), pool.clear):
            loan = pool.lend()
            echo = weakref.ref(loan.held)
            process = loan.held.process
            del loan
            gc.collect()
            assert process.poll() is None  # nothing waits where objects are freed
            end()
            gc.collect()
            assert echo() is None and process.returncode == -signal.SIGKILL and process.stdin.closed
    assert len(pool) == 0


def test_a_loan_that_garbage_closes_is_not_lent_again(pool):
    class Keeper:
        def __init__(self):
            self.loan, self.itself = pool.lend(), self

        def __del__(self):
            self.loan.close()

    process = Keeper().loan.held.process
    gc.collect()
    assert len(pool) == 0 and process.poll() is None
    pool.lend().close()
    assert process.returncode == -signal.SIGKILL


def test_many_threads_share_nothing(pool):
    pool.most_idle = 3
    at_work, seen = set(), set()

    def play(number):
        loan = pool.lend()
        assert loan.held not in at_work
        at_work.add(loan.held)
        seen.add(loan.held)
        assert say(loan, number) == str(number)
        at_work.remove(loan.held)
        loan.close()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(play, range(200)))
    assert sum(echo.alive() for echo in seen) == len(pool) <= 3


def test_a_simulator_that_does_not_start_is_no_loan():
    def make():
        raise ToolFault("it doesn't start")

    with pytest.raises(ToolFault, match="doesn't start"):
        Pool(make, most_idle=1).lend()


FORKED = """
import gc, os, sys
from test_pool import Echo, Pool, ToolFault, say

pool = Pool(Echo, most_idle=2)
loan, waiting = pool.lend(), pool.lend()
held = [loan.held, waiting.held]
waiting.close()
del held[:]
if not (child := os.fork()):
    assert len(pool) == 0
    try:
        say(loan, "parent's")
    except ToolFault:
        own = pool.lend()
        assert say(own, "child") == "child"
        for one in (own, loan):
            one.close()
        pool.clear()
        del loan, waiting
        gc.collect()
        sys.exit(0)  # what is freed at an ordinary end, too
    sys.exit(9)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(pool), loan.held.alive(), say(loan, "parent"))
again = pool.lend()
print(again.held.alive(), say(again, "waited"))
for one in (loan, again):
    one.close()
pool.clear()
"""


FORGOTTEN = """
import gc, os, sys
from test_pool import Echo, Pool

pool = Pool(Echo, most_idle=2)
lent, forgotten = pool.lend(), pool.lend()
processes = [lent.held.process, forgotten.held.process]
del forgotten
gc.collect()
if not (child := os.fork()):
    del lent
    gc.collect()
    pool.lend().close()
    pool.clear()
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), [process.poll() for process in processes])
lent.close()
pool.clear()
print([process.returncode for process in processes])
"""


def test_a_forked_child_ends_nothing_that_its_parent_forgot():
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    assert run_elsewhere(FORGOTTEN, PYTHONPATH=path) == ("0 [None, None]\n[-9, -9]\n", "")


def test_a_forked_child_leaves_its_parents_alone():
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    assert run_elsewhere(FORKED, PYTHONPATH=path) == ("0 1 True parent\nTrue waited\n", "")


def test_a_fork_in_the_middle_of_lending_leaves_the_child_a_pool():
    class Slow(int):
        def __gt__(self, other):  # asked while nobody else may change the pool
            time.sleep(0.05)
            return super().__gt__(other)

    pool, over = Pool(Echo, most_idle=Slow(1)), threading.Event()

    def lend():
        while not over.is_set():
            pool.lend().close()

    thread = threading.Thread(target=lend)
    thread.start()
    try:
        for _ in range(5):
            if not (child := os.fork()):
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(10)
                with contextlib.suppress(BaseException):
                    pool.lend().close()
                    pool.clear()
                    os._exit(0)
                os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        over.set()
        thread.join()
        pool.clear()
