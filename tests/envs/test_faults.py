"""Faults of the machinery: tried again in the same state, never paid, and nobody else's delay."""

import json
import math
import pickle
import threading
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from agent_r1 import End, Outcome, Task, Tool, ToolEnv, ToolFault, ToolResult, faults
from agent_r1.faults import Patience, fault_line
from agent_r1.vector import ToolVectorEnv
from agent_r1.wrappers import RecordTrajectories
from agent_r1_tools.running import at_work

NUMBER = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(faults, "FIRST_PAUSE", 0.01)


class Machine:
    """What breaks: so many attempts at `what` fail before one succeeds; `inf` for ever."""

    def __init__(self, **failures):
        self.failures = failures
        self.attempts = []
        self.lock = threading.Lock()

    def try_(self, what, note=None):
        with self.lock:
            self.attempts.append(what if note is None else (what, note))
            left = self.failures.get(what, 0)
            self.failures[what] = left - 1
        if left > 0:
            raise ConnectionError(f"{what} is down")

    def count(self, what):
        return sum(attempt == what or attempt[0] == what for attempt in self.attempts)


class Ask(Tool):
    """A server that answers the number."""

    name, description, parameters, timeout = "ask", "Asks.", NUMBER, 20.0

    def __init__(self, machine):
        self.machine = machine

    def execute(self, arguments):
        self.machine.try_(self.name, arguments["x"])
        return ToolResult(f"{self.name} {arguments['x']}")

    def __eq__(self, other):
        return type(self) is type(other) and self.machine is other.machine

    def __hash__(self):
        return id(self.machine)


class Inline(Ask):
    name, timeout = "inline", math.inf


class Batch(Ask):
    """The batch itself breaks, and then the calls one by one."""

    name = "batch"

    def batch_execute(self, batch):
        raise TimeoutError("the batch is lost")


class Says(Ask):
    """Says that it is broken, for all calls of a batch."""

    name = "says"

    def execute(self, arguments):
        return self.batch_execute([arguments])[0]

    def batch_execute(self, batch):
        try:
            self.machine.try_(self.name)
        except ConnectionError:
            return [ToolResult("?", fault="the index is gone")] * len(batch)
        return [ToolResult(f"says {arguments['x']}") for arguments in batch]


class Count(Ask):
    """A session; a call counts before it breaks, so going back shows."""

    name, concurrency_safe = "count", False

    def __init__(self, machine):
        super().__init__(machine)
        self.counted = 0

    def execute(self, arguments):
        self.counted += 1
        self.machine.try_(self.name)
        return ToolResult(f"count {self.counted}", done=self.counted >= 3)

    def get_state(self):
        return [self.counted]

    def set_state(self, state):
        self.counted = state[0] if state else 0


class InlineCount(Count):
    name, timeout = "inline_count", math.inf


class Divide(Ask):
    name = "divide"

    def execute(self, arguments):
        return ToolResult(str(1 / arguments["x"]))


class World(ToolEnv):
    """Every part of it can break."""

    PROCESS_WEIGHTS = {**ToolEnv.PROCESS_WEIGHTS, "seen": 0.5, "ended": 0.25}
    num_tasks = 10

    def __init__(self, machine=None, **kwargs):
        self.machine = machine or Machine()
        tools = [tool(self.machine) for tool in (Ask, Inline, Batch, Says, Count, InlineCount, Divide)]
        super().__init__(tools, **kwargs)

    def make_task(self, index):
        self.machine.try_("task")
        return Task(f"task-{index}", f"Question {index}?", [str(index)])

    def start_episode(self, task):
        self.machine.try_("start")

    def judge_result(self, call, result):
        if not result.ok:
            return {}
        self.memory["seen"] = self.memory.get("seen", 0) + 1
        self.machine.try_("judge_result")
        if result.done:
            return End(1.0, {"ended": 1.0}, {"calls": float(self.memory["seen"])})
        return {"seen": float(self.memory["seen"])}

    def judge_end(self, score, **how):
        self.memory["ends"] = self.memory.get("ends", 0) + 1
        self.machine.try_("judge_end")
        return Outcome(super().judge_end(score, **how), {"ended": float(self.memory["ends"])})

    def judge_answer(self, answer):
        self.memory["judged"] = self.memory.get("judged", 0) + 1
        self.machine.try_("judge_answer")
        return float(answer in self.task.answers), {"judged": float(self.memory["judged"])}


class Slow(World):
    slow_judge = True


def turn(env, *calls, text=""):
    """The span that makes these calls, such as ("ask", 1), or says the text."""
    env = getattr(env, "envs", [env])[0]
    text += "\n".join(env.dialect.tool_call(name, {"x": x}) for name, x in calls) + env.dialect.end_of_turn
    return np.array(env.tokenizer.encode(text, add_special_tokens=False), np.int32)


def play(env, spans):
    """The steps of a single episode."""
    env.reset(options={"task_index": 3})
    steps = []
    for span in spans:
        state, *rest = env.step(span)
        steps.append([state.tolist(), *rest])
        if rest[1] or rest[2]:
            break
    return steps


def play_vector(env_class, spans, machine, **kwargs):
    """The same episode in a vector environment."""
    envs = ToolVectorEnv(env_class, 1, machine=machine, **kwargs)
    envs.reset(options={"task_index": 3})
    steps = []
    for span in spans:
        envs.send([span])
        _, states, *columns = envs.recv()
        reward, terminated, truncated, info = (column[0] for column in columns)
        steps.append([states[0].tolist(), float(reward), bool(terminated), bool(truncated), info])
        if terminated or truncated:
            break
    envs.close()
    return steps


ANSWER = ((), "<answer>3</answer>")
TURNS = {
    "ask": [((("ask", 1), ("ask", 2)), ""), ANSWER],
    "inline": [((("inline", 1), ("ask", 2)), ""), ANSWER],
    "batch": [((("batch", 1), ("batch", 2)), ""), ANSWER],
    "says": [((("says", 1), ("says", 2)), ""), ANSWER],
    "count": [((("count", 1), ("ask", 1), ("count", 1)), ""), ANSWER],
    "inline_count": [((("inline_count", 1), ("inline", 1)), ""), ANSWER],
    "judge_result": [((("ask", 1), ("inline", 2)), ""), ((("inline", 2),), ""), ANSWER],
    "judge_end": [((("ask", 1),), ""), ANSWER],
    "judge_answer": [((("ask", 1),), ""), ANSWER],
    "task": [ANSWER],
    "start": [ANSWER],
}


@pytest.mark.parametrize("env_class", [World, Slow])
@pytest.mark.parametrize("what", TURNS)
def test_what_passes_within_the_deadline_changes_nothing(what, env_class):
    """Rewards, states and infos are those of a clean run, in the single and in the vector environment."""
    clean = World()
    spans = [turn(clean, *calls, text=text) for calls, text in TURNS[what]]
    expected = play(clean, spans)
    assert expected[-1][2] and sum(step[1] for step in expected) > 1
    machine = Machine(**{what: 2})
    assert play(env_class(machine), spans) == expected
    machine_of_many = Machine(**{what: 2})
    assert play_vector(env_class, spans, machine_of_many) == expected
    for one in (machine, machine_of_many):
        assert one.failures[what] < 0
        assert one.count("ask") <= (4 if what == "ask" else 2)  # what succeeded wasn't made again


@pytest.mark.parametrize("env_class", [World, Slow])
@pytest.mark.parametrize("what", [what for what in TURNS if what not in ("task", "start")])
def test_what_lasts_ends_the_episode_without_a_reward(what, env_class):
    clean = World()
    spans = [turn(clean, *calls, text=text) for calls, text in TURNS[what]]
    steps = play(env_class(Machine(**{what: math.inf}), fault_deadline=0.05), spans)
    state, reward, terminated, truncated, info = steps[-1]
    assert (reward, info["reward_terms"], terminated, truncated) == (0.0, {}, False, True)
    assert info["truncation_reason"] == "fault" and not info["is_success"] and info["metrics"] == {}
    where = "judge" if what.startswith("judge") else f"tool {what}"
    why = "the index is gone" if what == "says" else f"ConnectionError: {what} is down"
    assert info["fault"] == f"{where}: {why}"
    assert json.loads(json.dumps(info)) == info
    span = spans[len(steps) - 1].tolist()
    assert state[-len(span) :] == span  # nothing behind what the policy wrote
    assert play_vector(env_class, spans, Machine(**{what: math.inf}), fault_deadline=0.05) == steps


def test_no_deadline_means_no_second_attempt():
    machine = Machine(ask=1)
    env = World(machine, fault_deadline=0)
    assert play(env, [turn(env, ("ask", 1))])[-1][4]["truncation_reason"] == "fault"
    assert machine.count("ask") == 1
    with pytest.raises(RuntimeError, match="after the end"):
        env.step(turn(env))
    with pytest.raises(ValueError, match="fault_deadline"):
        World(fault_deadline=-1)


def test_the_policys_own_errors_stay_its_own():
    machine = Machine()
    env = World(machine)
    (step,) = play(env, [turn(env, ("divide", 0), ("nothing", 1), ("ask", "x"))])
    assert step[4]["reward_terms"] == {"process/failed_call": pytest.approx(-0.15)} and not step[3]
    assert "fault" not in step[4] and "ZeroDivisionError" in step[4]["tool_calls"][0]["error"]
    assert machine.attempts == ["task", "start"]


def test_only_the_faulty_calls_of_a_turn_are_made_again():
    machine = Machine(ask=2)
    env = World(machine)
    play(env, [turn(env, ("count", 1), ("ask", 1), ("count", 1))])
    assert [a if isinstance(a, str) else a[0] for a in machine.attempts[2:]] == [
        "count", "ask", "ask", "ask", "count", "judge_result", "judge_result", "judge_result",
    ]  # fmt: skip


def test_a_session_goes_back_before_its_call_is_made_again():
    env = World(Machine(count=2))
    play(env, [turn(env, ("count", 1))])
    assert env.messages[-1]["content"] == "count 1" and env.tools["count"].counted == 1


def test_a_session_that_cannot_go_back_is_not_called_again():
    class Forgets(Count):
        def get_state(self):
            raise NotImplementedError("the game can't be saved")

    env = World(machine := Machine(count=1))
    env.tools["count"] = Forgets(machine)
    (step,) = play(env, [turn(env, ("count", 1))])
    assert step[4]["fault"] == "tool count: ConnectionError: count is down"
    assert machine.count("count") == env.tools["count"].counted == 1


def test_a_session_that_may_still_be_at_work_is_not_called_again():
    class Hangs(Count):
        timeout, timeout_is_fault = 0.05, True

        def execute(self, arguments):
            self.machine.try_("hang")
            time.sleep(1)

    env = World(machine := Machine())
    env.tools["count"] = Hangs(machine)
    (step,) = play(env, [turn(env, ("count", 1))])
    assert step[4]["fault"] == "tool count: no result within 0.05 seconds" and machine.count("hang") == 1


def test_a_session_in_which_a_failed_call_is_at_work_does_not_go_back():
    class TooSlow(Stays):
        timeout_is_fault = False

    env = World(machine := Machine(count=1))
    tool = env.tools["count"] = TooSlow(machine)
    (step,) = play(env, [turn(env, ("count", 0), ("count", 1))])
    assert step[4]["fault"] == "tool count: ConnectionError: count is down" and machine.count("count") == 1
    tool.go_on.set()


class Stays(Count):
    """A call of it goes on after its time, and counts then."""

    timeout, timeout_is_fault = 0.05, True

    def __init__(self, machine):
        super().__init__(machine)
        self.go_on = threading.Event()

    def execute(self, arguments):
        if arguments["x"] == 0:
            self.go_on.wait(20)
        return super().execute(arguments)


class Moves(Stays):
    """Its sessions are objects of their own."""

    def __init__(self, machine):
        super().__init__(machine)
        self.session = [0]

    def execute(self, arguments):
        session = self.session
        if arguments["x"] == 0:
            self.go_on.wait(20)
        session[0] += 1
        return ToolResult(f"count {session[0]}")

    def set_state(self, state):
        self.session[0] = state or 0

    def get_state(self):
        return self.session[0]

    def new_session(self):
        self.session = [0]
        return True


def left_in_a_session(tool_class, **kwargs):
    """An environment whose tool is still at work for an episode that is over."""
    env = World(**kwargs)
    tool = env.tools["count"] = tool_class(env.machine)
    env.reset(options={"task_index": 3})
    env.step(turn(env, ("count", 1)))
    state = env.get_state()
    assert env.step(turn(env, ("count", 0)))[4]["fault"] == "tool count: no result within 0.05 seconds"
    return env, tool, state


def wait_until_nothing_is_at_work_in(tool):
    tool.go_on.set()
    while at_work(tool):
        time.sleep(0.01)


def test_a_call_that_ran_out_of_time_is_left_in_the_session_of_its_episode():
    env, tool, state = left_in_a_session(Moves, fault_deadline=0)
    env.reset(options={"task_index": 3})
    env.step(turn(env, ("count", 1)))
    wait_until_nothing_is_at_work_in(tool)
    env.step(turn(env, ("count", 2)))
    assert env.messages[-1]["content"] == "count 2"
    tool.go_on.clear()
    env.step(turn(env, ("count", 0)))
    env.set_state(state)
    wait_until_nothing_is_at_work_in(tool)
    env.step(turn(env, ("count", 2)))
    assert env.messages[-1]["content"] == "count 2"


def test_a_session_that_cannot_be_left_behind_is_waited_for():
    env, tool, state = left_in_a_session(Stays, fault_deadline=20)
    threading.Timer(0.2, tool.go_on.set).start()
    env.reset(options={"task_index": 3})
    env.step(turn(env, ("count", 1)))
    assert env.messages[-1]["content"] == "count 1"
    env, tool, state = left_in_a_session(Stays, fault_deadline=0)
    for go_on in (env.reset, lambda: env.set_state(state)):
        with pytest.raises(ToolFault, match="a call of count that ran out of time is still at work in its session"):
            go_on()
    wait_until_nothing_is_at_work_in(tool)
    env.set_state(state)
    env.step(turn(env, ("count", 1)))
    assert env.messages[-1]["content"] == "count 2"


@pytest.mark.parametrize("what", ["make_task", "start_episode"])
def test_a_file_that_is_not_there_is_said_at_once(what, monkeypatch):
    """Waiting for it would not make it, and the message is the one of the missing file."""
    monkeypatch.setattr(World, what, lambda self, argument: open("/no/such/file"))
    with pytest.raises(FileNotFoundError, match="/no/such/file"):
        World().reset(seed=0)
    with pytest.raises(FileNotFoundError, match="/no/such/file"):
        ToolVectorEnv(World, 2).reset(seed=0)


@pytest.mark.parametrize("env_class", [World, Slow])
def test_an_answer_that_a_judge_trips_over_raises_at_once(env_class):
    """What an answer brings about is nothing that passes: were it a fault, such answers would be left out."""

    class Reads(env_class):
        def judge_answer(self, answer):
            if not answer:
                return 0.0, {}
            self.machine.try_("read")
            return float(Path(answer).read_text() == "42"), {}

    for answer, error in {"/no/such/file": FileNotFoundError, "/": IsADirectoryError, "x" * 300: OSError}.items():
        env = Reads()
        span = turn(env, text=f"<answer>{answer}</answer>")
        with pytest.raises(error):
            play(env, [span])
        assert env.machine.count("read") == 1
        with pytest.raises(error):
            play_vector(Reads, [span], Machine())


@pytest.mark.parametrize("what", ["task", "start"])
def test_an_episode_that_cannot_begin(what, monkeypatch):
    with pytest.raises(ToolFault, match=rf"task 3 of 'train' could not begin: ConnectionError: {what} is down"):
        World(Machine(**{what: math.inf}), fault_deadline=0.05).reset(options={"task_index": 3})
    machine = Machine(**{what: math.inf})
    envs = ToolVectorEnv(World, 3, machine=machine, fault_deadline=0.05)
    sleep, slept = time.sleep, []
    monkeypatch.setattr(time, "sleep", lambda seconds: (slept.append(seconds), sleep(seconds)))
    states, infos = envs.reset(seed=0)
    assert 0 < sum(slept) <= 0.051  # one deadline for all
    assert set(infos["fault"]) == {f"reset: ConnectionError: {what} is down"}
    assert all(len(state) for state in states)
    span = turn(envs, ("ask", 1))
    after, rewards, terminations, truncations, infos = envs.step([span] * 3)
    assert not rewards.any() and not terminations.any() and truncations.all()
    assert set(infos["truncation_reason"]) == {"fault"} and not infos["is_success"].any()
    assert set(infos["fault"]) == {f"reset: ConnectionError: {what} is down"}
    assert not machine.count("ask") and infos["reward_terms"] == {}
    assert all(new.tolist() == old.tolist() + span.tolist() for old, new in zip(states, after, strict=True))
    machine.failures[what] = 0  # and the next ones can
    envs.reset(options={"reset_mask": np.ones(3, bool)})
    envs.step([turn(envs, ("ask", 1))] * 3)
    assert machine.count("ask") == 1  # the same call, answered once
    envs.close()


def test_a_third_of_the_episodes_broken_from_the_start():
    """Through make_vec and autoreset, as a learner sees it."""

    class Third(World):
        def start_episode(self, task):
            if int(task.id[5:]) % 3 == 0:
                raise ToolFault("no world left")

    gym.register("Third/World-v0", entry_point=Third, vector_entry_point="agent_r1.vector:Third/World-v0")
    try:
        envs = gym.make_vec("Third/World-v0", num_envs=8, fault_deadline=0, autoreset_mode="SameStep", max_turns=1)
        envs.reset(seed=1)
        broken = whole = 0
        for _ in range(10):
            envs.send([turn(envs, text="<answer>x</answer>")] * 8)
            _, _, rewards, _, _, infos = envs.recv(8)
            for i, info in enumerate(info["final_info"] for info in infos):
                assert ("fault" in info) == (int(info["task_id"][5:]) % 3 == 0)
                assert rewards[i] == (0.0 if "fault" in info else 0.25)
                broken, whole = broken + ("fault" in info), whole + ("fault" not in info)
        assert broken > 10 and whole > 30
        envs.close()
    finally:
        gym.registry.pop("Third/World-v0")


class OnlySome(World):
    """Every third task is broken for good."""

    def start_episode(self, task):
        if int(task.id[5:]) % 3 == 0:
            raise ToolFault("no world left")


@pytest.mark.parametrize("mode", ["Disabled", "SameStep"])
def test_tasks_that_cannot_begin_wait_once_and_not_once_each(mode, monkeypatch):
    """A rollout frees its slots one by one; whoever begins one waits for it, and so does everybody else."""
    sleep, slept = time.sleep, []
    monkeypatch.setattr(time, "sleep", lambda seconds: (slept.append(seconds), sleep(seconds)))
    envs = ToolVectorEnv(OnlySome, 4, fault_deadline=0.05, autoreset_mode=mode)
    envs.reset(seed=1, options={"task_index": [1, 2, 4, 5]})
    span, broken = turn(envs, text="<answer>x</answer>"), 0
    for begun in range(40):
        envs.send([span], [begun % 4])
        info = envs.recv()[5][0]
        broken += "fault" in info.get("final_info", info)
        if mode == "Disabled":
            mask = np.arange(4) == begun % 4
            envs.reset(options={"reset_mask": mask, "task_index": 3 * (begun % 2) + 1 if begun % 3 else 3})
    assert broken >= 7 and 0 < sum(slept) <= 0.16  # now and then four others begin in a row
    envs.close()


def test_after_an_outage_episodes_are_waited_for_again():
    envs = ToolVectorEnv(World, 2, machine=(machine := Machine(start=math.inf)), fault_deadline=0.05)
    envs.reset(seed=0)
    machine.failures["start"] = 0
    envs.reset(seed=0)  # both begin
    machine.failures["start"] = 2
    assert "fault" not in envs.reset(seed=0)[1] and machine.failures["start"] < 0
    envs.close()


def test_a_snapshot_of_an_episode_that_could_not_begin():
    envs = ToolVectorEnv(World, 1, machine=Machine(task=math.inf), fault_deadline=0)
    envs.reset(seed=0)
    state = pickle.loads(pickle.dumps(envs.envs[0].get_state()))
    other = World(fault_deadline=0)
    other.set_state(state)
    assert other.step(turn(other))[4]["fault"] == "reset: ConnectionError: task is down"
    envs.close()


def test_a_snapshot_goes_on_as_before():
    env = World(Machine(ask=1))
    env.reset(options={"task_index": 3})
    env.step(turn(env, ("ask", 1), ("count", 1)))
    state = env.get_state()
    expected = env.step(turn(env, text="<answer>3</answer>"))
    other = World(Machine(judge_answer=1))
    other.set_state(pickle.loads(pickle.dumps(state)))
    assert other.step(turn(env, text="<answer>3</answer>"))[1:] == expected[1:]


def test_a_record_names_the_fault(tmp_path):
    env = RecordTrajectories(World(Machine(ask=1), fault_deadline=0), tmp_path / "episodes.jsonl")
    env.reset(seed=0)
    env.step(turn(env.unwrapped, ("ask", 1)))
    row = json.loads((tmp_path / "episodes.jsonl").read_text())
    assert (row["truncation_reason"], row["fault"]) == ("fault", "tool ask: ConnectionError: ask is down")


# ---------------------------------------------------------------------- many episodes


@pytest.mark.parametrize("env_class", [World, Slow])
@pytest.mark.parametrize(
    "what", ["ask", "inline", "batch", "says", "count", "inline_count", "judge_result", "judge_answer"]
)
def test_a_fault_delays_its_own_episode_only(what, env_class):
    bad, good = Machine(**{what: math.inf}), Machine()
    machines = iter([bad, good, good])
    envs = ToolVectorEnv(lambda: env_class(next(machines)), 3)
    envs.reset(options={"task_index": 3})
    spans = [turn(envs, text="<answer>3</answer>") if what == "judge_answer" else turn(envs, ("ask", 1))] * 3
    if what not in ("judge_answer", "judge_result"):
        spans = [turn(envs, (what, 1))] * 3
    envs.send(spans)
    assert envs.recv(2)[0].tolist() == [1, 2]  # without the first, which is tried again and again
    while bad.count(what) < 3:
        assert envs.recv(1, timeout=0.05)[0].tolist() == []
    bad.failures[what] = 0
    assert envs.recv(1)[0].tolist() == [0]
    for i in (0, 2):
        assert envs.envs[0].messages == envs.envs[i].messages and envs.envs[0].memory == envs.envs[i].memory
    envs.close()


def test_equal_calls_share_the_retries():
    machine = Machine(ask=2)
    envs = ToolVectorEnv(World, 4, machine=machine)
    envs.reset(seed=0)
    envs.step([turn(envs, ("ask", 1))] * 4)
    assert machine.count("ask") == 3
    assert {env.messages[-1]["content"] for env in envs.envs} == {"ask 1"}
    envs.close()


def test_a_broken_judge_for_half_of_the_episodes_pays_nobody():
    """Every answer is right; what is paid is what a working judge pays."""

    class Half(World):
        def judge_answer(self, answer):
            if self.task.id in ("task-0", "task-2"):
                self.memory["judge_error"] = "the judge model is gone"
            return super().judge_answer(answer)

    envs = ToolVectorEnv(Half, 4, fault_deadline=0.1)
    envs.reset(options={"task_index": [0, 1, 2, 3]})
    _, rewards, terminations, truncations, infos = envs.step(
        [turn(envs, text=f"<answer>{i}</answer>") for i in range(4)]
    )
    assert rewards.tolist() == [0, 1.25, 0, 1.25]
    assert terminations.tolist() == [False, True, False, True] and truncations.tolist() == [True, False, True, False]
    assert infos["_fault"].tolist() == [True, False, True, False]
    assert infos["fault"][0] == "judge: ToolFault: the judge model is gone"
    envs.close()


class Unpicklable:
    """A note that can be copied, and not pickled."""

    def __init__(self, numbers):
        self.numbers = numbers

    def __reduce_ex__(self, protocol):
        raise TypeError("cannot be pickled")

    def __deepcopy__(self, memo):
        return Unpicklable(list(self.numbers))


@pytest.mark.parametrize("notes", [(), ("own",)])
@pytest.mark.parametrize("early", [False, True])
def test_what_a_judge_noted_before_it_broke_is_taken_back(notes, early):
    """However deep it stands, and whatever else is there."""

    class Noting(World):
        slow_judge = early

        def start_episode(self, task):
            super().start_episode(task)
            own = {key: Unpicklable([0]) for key in notes}
            self.memory.update(own, list=[[1]], set={1}, pair=({"a": [1]}, 1))

        def judge_answer(self, answer):
            before = repr([self.memory["list"], self.memory["set"], self.memory["pair"]])
            assert before == "[[[1]], {1}, ({'a': [1]}, 1)]"
            assert all(own.numbers == [0] for key, own in self.memory.items() if key == "own")
            self.memory["list"][0].append(2)
            self.memory["set"].add(2)
            self.memory["pair"][0]["a"].append(2)
            for key in notes:
                self.memory[key].numbers.append(1)
            machine.try_("judge")
            return 1.0, {}

    machine = Machine(judge=2)
    env = Noting(fault_deadline=20)
    env.reset(options={"task_index": 0})
    open_turn = env._begin_turn(turn(env, text="<answer>0</answer>"))
    if early:
        env._judge_early(open_turn)
    assert env._end_turn(open_turn, [])[2] and machine.count("judge") == 3
    assert env.memory["list"] == [[1, 2]] and env.memory["pair"][0] == {"a": [1, 2]}


# ---------------------------------------------------------------------- other ends


@pytest.mark.parametrize("process_reward", [True, False])
def test_a_tool_that_is_done_ends_the_episode_where_the_task_says_so(process_reward):
    env = World(process_reward=process_reward, max_turns=2)
    spans = [turn(env, ("count", 1)), turn(env, ("count", 1), ("count", 1), ("divide", 0))]
    first, last = play(env, spans)
    state, reward, terminated, truncated, info = last
    process = {"process/seen": 1.0, "process/ended": 0.5, "process/repeated_call": -0.1, "outcome/score": 1.0}
    assert info["reward_terms"] == (process if process_reward else {"outcome/score": 1.0})
    assert (terminated, truncated, info["is_success"], info["answer"]) == (True, False, True, None)
    assert info["metrics"] == {"calls": 3.0} and "truncation_reason" not in info
    assert len(info["tool_calls"]) == 2 and state[len(first[0]) :] == spans[1].tolist()
    assert play_vector(World, spans, Machine(), process_reward=process_reward, max_turns=2) == [first, last]


def test_a_fault_counts_only_before_an_end():
    """A turn is judged in the order of its calls; what was judged before a fault leaves no trace."""
    end = [("count", 1)] * 3
    clean = play(World(), [turn(World(), *end)])
    for play_ in (
        lambda spans, machine: play(World(machine, fault_deadline=0.05), spans),
        lambda spans, machine: play_vector(World, spans, machine, fault_deadline=0.05),
    ):
        (step,) = play_([turn(World(), *end, ("ask", 1))], Machine(ask=math.inf))
        assert step[1:] == clean[0][1:] and step[2]
        (step,) = play_([turn(World(), *end[1:], ("ask", 1), ("count", 1))], Machine(ask=math.inf))
        assert step[1:4] == [0.0, False, True] and step[4]["fault"] == "tool ask: ConnectionError: ask is down"
        assert [call["ok"] for call in step[4]["tool_calls"]] == [True, True, False]
    env = World(Machine(ask=math.inf), fault_deadline=0)
    play(env, [turn(env, ("count", 1), ("ask", 1))])
    assert env.memory == {} and env.episode.seen_calls == set()


def test_an_end_pays_the_format_as_an_answer_would():
    env = World(process_reward=False)
    spans = [turn(env, text="<tool_call>\n{broken\n</tool_call>"), turn(env, *[("count", 1)] * 3)]
    assert play(env, spans)[-1][4]["reward_terms"] == {"outcome/format": -0.5}


# ---------------------------------------------------------------------- pieces


def test_patience_doubles_its_pauses_and_ends_at_the_deadline(monkeypatch):
    monkeypatch.undo()
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    patience, pauses = Patience(20), []
    while (pause := patience.next()) is not None:
        pauses.append(round(pause, 6))
        now[0] += pause
    assert pauses[:7] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0] and sum(pauses) == pytest.approx(20)
    assert Patience(0).next() is None


def test_a_fault_is_one_short_line():
    line = fault_line("tool x", OSError("two\nlines " * 1000))
    assert line.startswith("tool x: OSError: two lines two") and len(line) <= 300 and "\n" not in line


def test_a_fault_has_nothing_that_a_terminal_obeys():
    line = fault_line("tool x", "\x1b[2Jno\thost \u202eevil\u2066\x07\x9b\ud800 é")
    assert line == "tool x: \\x1b[2Jno host \\u202eevil\\u2066\\x07\\x9b\\ud800 é"
