"""What an episode opens stays in one thread; and a tool's own bug, which can be raised."""

import asyncio
import math
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
import traceback

import gymnasium as gym
import numpy as np
import pytest

from agent_r1 import Task, Tool, ToolEnv
from agent_r1.vector import ToolVectorEnv
from agent_r1_tools.threads import OneThread


class Library(ToolEnv):
    """A data base that `start_episode` makes, a tool asks, and judges read: sqlite3 ties it to its thread."""

    PROCESS_WEIGHTS = {**ToolEnv.PROCESS_WEIGHTS, "more": 1.0}
    num_tasks = 3

    def __init__(self, slow_judge=False, timeout=20.0, **kwargs):
        self.slow_judge = slow_judge
        self.threads = set()
        tools = [Tool.from_function(self.query, timeout=timeout), Tool.from_function(nap)]
        super().__init__(tools, **kwargs)

    def query(self, sql: str) -> list:
        """Ask."""
        self.threads.add(threading.get_ident())
        return self.base.execute(sql).fetchall()

    def make_task(self, index):
        return Task(f"t{index}", "How many?", ["2"])

    def start_episode(self, task):
        self.base = sqlite3.connect(":memory:")
        self.base.execute("create table books (title)")
        self.threads = {threading.get_ident()}

    def count(self):
        self.threads.add(threading.get_ident())
        return self.base.execute("select count(*) from books").fetchone()[0]

    def judge_result(self, call, result):
        return {"more": self.count()}

    def judge_answer(self, answer):
        return float(answer == str(self.count())), {}


def nap(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "awake"


def insert(env):
    return env.unwrapped.dialect.tool_call("query", {"sql": "insert into books values ('a') returning title"})


def spans(envs, *texts):
    end = envs[0].dialect.end_of_turn
    return [np.array(envs[0].tokenizer.encode(text + end, add_special_tokens=False), np.int32) for text in texts]


@pytest.mark.parametrize("timeout", [20.0, math.inf])
def test_a_connection_of_the_episode_serves_its_calls_and_judges(say, timeout):
    env = Library(timeout=timeout)
    for seed in range(2):
        env.reset(seed=seed)
        call = insert(env)
        for number in (1, 2):
            _, reward, *_, info = say(env, call if number == 1 else call.replace("'a'", "'b'"))
            assert info["tool_calls"][0]["ok"], info
            assert reward == number and env.messages[-1]["content"] == ('[["a"]]' if number == 1 else '[["b"]]')
        _, reward, terminated, _, info = say(env, "<answer>2</answer>")
        assert terminated and info["is_success"] and len(env.threads) == 1
        assert (env.threads == {threading.get_ident()}) == (timeout == math.inf)
    env.close()


@pytest.mark.parametrize("slow_judge", [False, True])
@pytest.mark.parametrize("timeout", [20.0, math.inf])
def test_so_it_is_with_many_episodes(timeout, slow_judge):
    envs = ToolVectorEnv(Library, num_envs=8, timeout=timeout, slow_judge=slow_judge)
    for _ in range(2):
        envs.reset(seed=1)
        _, rewards, *_, infos = envs.step(spans(envs.envs, *[insert(envs.envs[0]) * 2] * 8))
        assert rewards.tolist() == [2 + 2 - 0.05] * 8, infos
        _, _, terminations, _, infos = envs.step(spans(envs.envs, *["<answer>2</answer>"] * 8))
        assert terminations.all() and infos["is_success"].all()
        assert all(len(env.threads) == 1 for env in envs.envs)
    envs.close()


def test_episodes_with_threads_do_not_wait_for_each_other():
    class Sleeps(Library):
        def query(self, sql: str) -> str:
            """Ask."""
            meeting.wait(60)
            return sql

    meeting = threading.Barrier(6)
    envs = ToolVectorEnv(Sleeps, num_envs=6, timeout=60.0)
    envs.reset(seed=1)
    *_, infos = envs.step(spans(envs.envs, *[insert(envs.envs[0])] * 6))
    assert all(calls[0]["ok"] for calls in infos["tool_calls"])
    envs.close()


def test_a_stuck_call_keeps_nobody(say):
    """It keeps its thread; judges, the next calls, the next episode and `close` go on in another."""
    end = threading.Event()

    class Stuck(Library):
        def query(self, sql: str) -> str:
            """Ask."""
            if sql == "wait":
                end.wait(60)
            return super().query(sql)

        def judge_result(self, call, result):
            return {}

        def judge_answer(self, answer):
            return 1.0, {}

    env = Stuck(timeout=0.2)
    env.reset(seed=1)
    call = env.dialect.tool_call("query", {"sql": "wait"})
    start = time.monotonic()
    *_, info = say(env, call)
    assert info["tool_calls"][0]["error"] == "Error in query: no result within 0.2 seconds"
    assert say(env, "<answer>2</answer>")[2]
    env.reset(seed=2)
    assert say(env, insert(env))[4]["tool_calls"][0]["ok"]
    say(env, call)
    env.close()
    assert time.monotonic() - start < 30
    end.set()


def test_an_episode_goes_on_from_a_snapshot_in_its_thread(say):
    class Counts(Tool):
        name, description, parameters, concurrency_safe = "count", "", {"type": "object"}, False

        def __init__(self):
            self.threads, self.counted = set(), 0

        def execute(self, arguments):
            self.threads.add(threading.get_ident())
            self.counted += 1
            return str(self.counted)

        def get_state(self):
            self.threads.add(threading.get_ident())
            return self.counted

        def set_state(self, state):
            self.threads.add(threading.get_ident())
            self.counted = state or 0

        def close(self):
            self.threads.add(threading.get_ident())

    class World(Library):
        def __init__(self, **kwargs):
            ToolEnv.__init__(self, [Counts()], **kwargs)

        def judge_result(self, call, result):
            return {}

    env, call = World(), '<tool_call>\n{"name": "count", "arguments": {}}\n</tool_call>'
    env.reset(seed=1)
    say(env, call)
    state = env.get_state()
    say(env, call)
    env.set_state(state)
    say(env, call)
    assert env.messages[-1]["content"] == "2"
    (thread,) = (t for t in threading.enumerate() if t.ident in env.tools["count"].threads)
    env.close()
    thread.join(20)
    assert not thread.is_alive()
    assert len(env.tools["count"].threads) == 1 and threading.get_ident() not in env.tools["count"].threads


# --- strict -----------------------------------------------------------------------------------------------------------


class Buggy(Library):
    """Its tool has a bug; with `timeout` inf in the caller's thread, with a batch in a thread of the pool."""

    def __init__(self, timeout=20.0, session=False, **kwargs):
        tool = Tool.from_function(forget, timeout=timeout, concurrency_safe=not session)
        ToolEnv.__init__(self, [tool], **kwargs)

    def judge_result(self, call, result):
        return {}


def forget(x: int) -> str:
    """Ask."""
    return {}[x]


CALL = '<tool_call>\n{"name": "forget", "arguments": {"x": %d}}\n</tool_call>'


@pytest.mark.parametrize("session", [False, True])
@pytest.mark.parametrize("timeout", [20.0, math.inf])
@pytest.mark.parametrize("how", ["argument", "variable"])
def test_strict_raises_a_tools_own_bug_from_step(monkeypatch, say, how, timeout, session):
    kwargs = {"timeout": timeout, "session": session}
    env = Buggy(**kwargs)
    env.reset(seed=1)
    assert "KeyError: 7" in say(env, CALL % 7)[4]["tool_calls"][0]["error"]
    if how == "argument":
        kwargs["strict"] = True
    else:
        monkeypatch.setenv("AGENT_R1_STRICT", "1")
    env, envs = Buggy(**kwargs), ToolVectorEnv(Buggy, num_envs=4, **kwargs)
    env.reset(seed=1)
    envs.reset(seed=1)
    say(env, CALL.replace("%d", '"a"'))  # bad arguments are the policy's
    for step in (lambda: say(env, CALL % 7), lambda: envs.step(spans(envs.envs, *[CALL % i for i in range(4)]))):
        with pytest.raises(KeyError) as raised:
            step()
        assert any(frame.name == "forget" for frame in traceback.extract_tb(raised.value.__traceback__))
    with pytest.raises(RuntimeError, match="call reset"):
        say(env, CALL % 7)
    with pytest.raises(RuntimeError, match="make a new vector environment"):
        envs.reset(seed=1)
    envs.close()


def test_gym_make_takes_strict(say):
    env = gym.make("AgentR1/MultihopWorld-v0", strict=True)
    env.reset(seed=1)
    assert env.unwrapped.strict and not say(env, "hm")[2]


def test_a_tool_that_fails_in_every_episode_is_warned_about_once():
    script = """
        import sqlite3, numpy as np
        from agent_r1 import Task, Tool, ToolEnv
        from agent_r1.vector import ToolVectorEnv

        class Base(ToolEnv):
            num_tasks = 1
            def __init__(self, **kwargs):
                def ask(sql: str) -> list:
                    return self.base.execute(sql).fetchall()
                super().__init__([Tool.from_function(ask)], **kwargs)
            def make_task(self, index): return Task("t", "?", ["2"])
            def start_episode(self, task): self.base = sqlite3.connect(":memory:")
            def judge_answer(self, answer): return 0.0, {}

        envs = ToolVectorEnv(Base, num_envs=16)
        for _ in range(3):
            envs.reset(seed=1)
            env = envs.envs[0]
            text = env.dialect.tool_call("ask", {"sql": "select 1"}) + env.dialect.end_of_turn
            *_, infos = envs.step([np.array(env.tokenizer.encode(text), np.int32)] * 16)
        print(infos["tool_calls"][0][0]["ok"])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", done.stderr
    assert done.stderr.count("RuntimeWarning") == 1 == done.stderr.count("created in a thread"), done.stderr


def test_an_async_caller_gets_stop_iteration_as_an_error():
    def stop():
        raise StopIteration("no more")

    async def call():
        await asyncio.wait_for(OneThread().call(stop), 5)

    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(call())
