"""Other people's simulators: an episode has one, a snapshot continues in another that has done the same."""

import math
import pickle
import random
import sys
import threading
import time

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Text

from agent_r1 import ArgumentError, ToolFault, ToolResult
from agent_r1.bridges import BridgeEnv, GymToolEnv, TextGameEnv, bridge
from agent_r1.bridges.bridge import MOST_BREAKS, digest
from agent_r1.validation import probes
from agent_r1.vector import ToolVectorEnv

ODD = {
    "nan": ("?", math.nan, False, False, {}),
    "inf": ("?", math.inf, True, False, {}),
    "four": ("?", 0.0, False, {}),
    "bytes": (b"?", 0.0, False, False, {}),
    "rich": ("?", 1e9, True, False, {}),
    "poor": ("?", -1e9, True, False, {}),
    "tenth": ("?", 0.1, False, False, {}),
    "last tenth": ("?", 0.1, True, False, {}),
}


class Lock(gym.Env):
    """A lock of three digits; each right one in its turn pays 1."""

    observation_space = action_space = Text(100)
    made, closed, broken, forgetful = 0, 0, False, False
    lost = 0  # calls that fail, as the game's process has ended

    def __init__(self):
        type(self).made += 1
        self.hook = lambda: None  # can't be pickled

    def close(self):
        type(self).closed += 1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.code = [str(digit) for digit in (random if self.forgetful else random.Random(seed)).choices("123", k=3)]
        self.opened = 0
        return f"A lock of three digits from 1 to 3, seed {seed}.", {}

    def step(self, action):
        if self.broken or self.lost:
            type(self).lost -= not self.broken
            raise OSError("the game's process has ended")
        if action == "crash":
            raise ValueError("a bug of the game")
        if action == "quit":
            sys.exit(0)
        if action == "restore":
            raise FileNotFoundError("no such saved game")
        if action == "limit":
            return "time is up", 0.0, False, True, {}
        if action == "wait":
            time.sleep(0.3)
            return "the wait is over", 0.0, True, False, {}
        if action in ODD:
            return ODD[action]
        right = action.strip() == self.code[self.opened]
        self.opened = self.opened + 1 if right else 0
        said = f"{self.opened} digits are open" if right else "it snaps shut"
        return said, float(right), self.opened == 3, False, {}


@pytest.fixture
def lock(monkeypatch):
    for name, value in {"made": 0, "closed": 0, "broken": False, "forgetful": False, "lost": 0}.items():
        monkeypatch.setattr(Lock, name, value)


def make(**kwargs):
    return GymToolEnv(make_env=Lock, max_return=3.0, **kwargs)


def code_of(env):
    return [str(digit) for digit in random.Random(env.task.metadata["seed"]).choices("123", k=3)]


def do(env, *commands):
    text = "\n".join(env.dialect.tool_call("act", {"command": command}) for command in commands)
    return env.step(np.array(env.tokenizer.encode(text + env.dialect.end_of_turn), np.int32))


def test_a_game_is_played_to_its_end(lock):
    env = make(process_reward={"game": 1.0})
    env.reset(options={"task_index": 5})
    assert env.task.question == "A lock of three digits from 1 to 3, seed 5."
    first, second, third = code_of(env)
    assert do(env, first)[1] == pytest.approx(1 / 3)
    *_, terminated, truncated, info = do(env, second)
    assert not terminated and env.messages[-1]["content"] == "2 digits are open"
    _, reward, terminated, truncated, info = do(env, third, "1", "2")  # what comes after the end doesn't count
    assert terminated and info["is_success"] and info["metrics"] == {"return": 3.0} and len(info["tool_calls"]) == 1
    assert reward == pytest.approx(1 / 3 + 1)
    env.close()


def test_what_was_earned_stays(lock):
    env = make()
    env.reset(seed=1)
    do(env, code_of(env)[0])
    answer = np.array(env.tokenizer.encode("<answer>enough</answer>" + env.dialect.end_of_turn), np.int32)
    _, reward, terminated, _, info = env.step(answer)
    assert terminated and reward == pytest.approx(1 / 3) and not info["is_success"]


def test_a_snapshot_is_played_again(lock):
    env, other = make(), make()
    env.reset(options={"task_index": 7})
    digits = code_of(env)
    do(env, digits[0])
    state = env.get_state()
    for world in (other, env, other):
        world.set_state(state)
        do(world, digits[1])
        assert do(world, digits[2])[4]["is_success"]
    assert Lock.made == 6  # the first observation, the episode, and three for the snapshot: the task is kept in `env`


def test_a_game_that_answers_otherwise_is_a_fault(lock):
    env = make()
    env.reset(options={"task_index": 7})
    do(env, *code_of(env)[:2])
    Lock.forgetful = True
    random.seed(3)
    with pytest.raises(ToolFault, match="answered differently when act was called again"):
        for _ in range(20):
            env.set_state(env.get_state())


def test_a_game_that_is_lost_is_played_again_in_another(lock, monkeypatch):
    env = make(fault_deadline=5)
    env.reset(options={"task_index": 7})
    digits = code_of(env)
    do(env, digits[0])
    world, lost = env.world.env, []

    def step(action):
        lost.append(action)
        raise ConnectionError("gone")

    world.step = step
    assert env.messages and do(env, digits[1])[4]["tool_calls"][0]["ok"] and lost == [digits[1]]
    assert do(env, digits[2])[4]["is_success"]
    env.reset(options={"task_index": 8})
    Lock.broken = True
    env.fault_deadline = 0.2
    _, reward, terminated, truncated, info = do(env, "1")
    assert truncated and reward == 0 and info["fault"].startswith("tool act: OSError: the game's process has ended")


def test_a_bug_of_a_game_is_a_failed_call_and_changes_nothing(lock):
    env = make()
    env.reset(options={"task_index": 7})
    digits = code_of(env)
    do(env, digits[0])
    info = do(env, "crash")[4]
    assert not info["tool_calls"][0]["ok"] and "process/failed_call" in info["reward_terms"]
    do(env, digits[1])
    assert do(env, digits[2])[4]["is_success"]
    info = env.reset(seed=1) and env.step(
        np.array(env.tokenizer.encode(env.dialect.tool_call("act", {"word": 3}) + env.dialect.end_of_turn), np.int32)
    )[4]
    assert not info["tool_calls"][0]["ok"]


def test_many_games_at_once(lock):
    envs = ToolVectorEnv(make, num_envs=8)
    envs.reset(seed=[3] * 4 + [4] * 4)
    for turn in range(3):
        spans = []
        for env in envs.envs:
            call = env.dialect.tool_call("act", {"command": code_of(env)[turn]}) + env.dialect.end_of_turn
            spans.append(np.array(env.tokenizer.encode(call), np.int32))
        _, rewards, terminations, _, _ = envs.step(spans)
    assert terminations.all() and rewards.tolist() == [1.0] * 8
    envs.close()


def test_what_a_late_call_does_stays_out_of_the_next_episode(lock):
    env = make(timeout=0.1, fault_deadline=0)
    env.reset(options={"task_index": 7})
    assert "no result within 0.1 seconds" in do(env, "wait")[4]["fault"]
    env.reset(options={"task_index": 8})
    digits = code_of(env)
    do(env, digits[0])
    time.sleep(0.5)  # the late call is over now, and said that its game was
    assert [call[1]["command"] for call in env.memory["log"]] == digits[:1]
    do(env, digits[1])
    assert do(env, digits[2])[4]["is_success"]
    env.close()


def test_a_game_that_quits_ends_no_training(lock):
    env = make(fault_deadline=0)
    env.reset(options={"task_index": 7})
    info = do(env, "quit")[4]
    assert not info["tool_calls"][0]["ok"] and "fault" not in info
    for digit in code_of(env):
        info = do(env, digit)[4]
    assert info["is_success"]


def test_an_error_that_a_command_brings_about_is_no_fault(lock):
    env = make()
    env.reset(options={"task_index": 7})
    info = do(env, "restore")[4]
    assert not info["tool_calls"][0]["ok"] and "fault" not in info and "process/failed_call" in info["reward_terms"]


@pytest.mark.filterwarnings("ignore:the tool act failed in:RuntimeWarning")
def test_a_game_that_breaks_again_and_again_is_not_played_for_ever(lock):
    env = make(max_turns=40)
    env.reset(options={"task_index": 7})
    do(env, code_of(env)[0])
    made = Lock.made
    for _ in range(30):
        do(env, "crash")
    assert Lock.made - made <= MOST_BREAKS and "broke too often" in env.messages[-1]["content"]
    info = env.reset(seed=1) and do(env, code_of(env)[0])[4]
    assert info["tool_calls"][0]["ok"]


def test_what_the_machinery_breaks_is_never_the_policys(lock):
    """A game that is lost once a call, more often than the policy may break it; and one that stays lost."""
    env = make(max_turns=40)
    env.reset(options={"task_index": 7})
    wrong = next(digit for digit in "123" if digit != code_of(env)[0])
    for command in [wrong] * (MOST_BREAKS + 2) + code_of(env):
        Lock.lost = 1
        *_, info = do(env, command)
        assert info["tool_calls"][0]["ok"] and "process/failed_call" not in info["reward_terms"]
    assert info["is_success"] and Lock.lost == 0
    env = make(fault_deadline=5.0)  # long enough for more tries than `MOST_BREAKS`
    env.reset(options={"task_index": 7})
    made, Lock.broken = Lock.made, True
    _, reward, _, truncated, info = do(env, "1")
    assert truncated and info["truncation_reason"] == "fault" and reward == 0 and not info["reward_terms"]
    assert "the game's process has ended" in info["fault"] and Lock.made - made > MOST_BREAKS


def test_a_game_that_cannot_be_made_again_is_a_fault(lock, monkeypatch):
    env = make(fault_deadline=0.2)
    env.reset(options={"task_index": 7})
    Lock.lost = 1

    def start():
        raise RuntimeError("could not start the engine")

    monkeypatch.setattr(env, "make_env", start)
    _, reward, _, truncated, info = do(env, "1")
    assert truncated and reward == 0 and not info["reward_terms"] and "could not start the engine" in info["fault"]
    strict = make(fault_deadline=0.2, strict=True)
    strict.reset(options={"task_index": 7})
    Lock.lost = 1
    monkeypatch.setattr(strict, "make_env", start)
    with pytest.raises(RuntimeError, match="could not start the engine"):
        do(strict, "1")


def test_a_game_made_again_too_late_stays_out_of_the_next_episode(lock, monkeypatch):
    env, wait = make(timeout=0.3, fault_deadline=0.5), threading.Event()
    env.reset(options={"task_index": 7})
    Lock.lost, plain = 1, env.make_env
    monkeypatch.setattr(env, "make_env", lambda: (wait.wait(10), plain())[1])
    do(env, "1")  # lost
    monkeypatch.setattr(env, "make_env", plain)
    env.reset(options={"task_index": 8})
    right, closed = env.world, Lock.closed
    wait.set()
    deadline = time.monotonic() + 10
    while Lock.closed == closed and time.monotonic() < deadline:
        time.sleep(0.01)
    assert Lock.closed == closed + 1 and env.world is right
    for digit in code_of(env):
        info = do(env, digit)[4]
    assert info["is_success"]
    env.close()
    assert Lock.made == Lock.closed


@pytest.mark.parametrize("timeout", [math.inf, 5.0])
def test_a_game_that_quits_when_it_is_made_again_is_a_fault(lock, monkeypatch, timeout):
    env = make(fault_deadline=0.2, timeout=timeout)
    env.reset(options={"task_index": 7})
    Lock.lost = 1
    monkeypatch.setattr(env, "make_env", lambda: sys.exit(3))
    _, reward, _, truncated, info = do(env, "1")
    assert truncated and reward == 0 and "wanted to end the process" in info["fault"] and "broken" not in env.memory


def test_a_lost_game_that_cannot_be_closed_is_a_fault(lock, monkeypatch):
    env = make(fault_deadline=0.2)
    env.reset(options={"task_index": 7})

    def close(game):
        raise RuntimeError("the pipe is closed")

    monkeypatch.setattr(Lock, "close", close)
    Lock.lost = 1
    first, *others = code_of(env)
    info = do(env, first)[4]
    assert info["tool_calls"][0]["ok"] and "fault" not in info and "broken" not in env.memory
    monkeypatch.undo()
    for digit in others:
        info = do(env, digit)[4]
    assert info["is_success"]


def test_a_judge_or_snapshot_whose_game_cannot_be_made_again_meets_a_fault(lock, monkeypatch):
    class Judging(GymToolEnv):
        def judge_answer(self, answer):
            return self.world.score, {}

    env = Judging(make_env=Lock, fault_deadline=0.2)
    env.reset(options={"task_index": 7})
    do(env, "1")
    state = env.get_state()
    env.drop_world()

    def start():
        raise RuntimeError("could not start the engine")

    monkeypatch.setattr(env, "make_env", start)
    *_, truncated, info = env.step(probes.span(env, "<answer>1</answer>"))
    assert truncated and "could not start the engine" in info["fault"]
    with pytest.raises(ToolFault, match="could not start the engine"):
        env.set_state(state)
    with pytest.raises(RuntimeError, match="could not start the engine"):  # as it is, where nothing worked before
        env.reset(options={"task_index": 7})


@pytest.mark.parametrize("end", [RuntimeError("a call is pending"), SystemExit(4)])
def test_a_game_that_does_not_close_ends_no_training(lock, monkeypatch, end):
    env = make(fault_deadline=0.2)
    env.reset(options={"task_index": 7})
    do(env, "1")

    def close(game):
        raise end

    monkeypatch.setattr(Lock, "close", close)
    info = do(env, "crash")[4]
    assert not info["tool_calls"][0]["ok"] and "fault" not in info and env.memory["broken"] == 1
    do(env, "1")
    with pytest.warns(RuntimeWarning, match="the last episode's simulator didn't close"):
        env.reset(options={"task_index": 7})  # whose first view is known
    monkeypatch.undo()
    for digit in code_of(env):
        info = do(env, digit)[4]
    assert info["is_success"]
    env.close()


def test_a_game_that_quits_at_reset_ends_no_training(lock, monkeypatch):
    env = make()
    env.reset(options={"task_index": 7})
    monkeypatch.setattr(env, "make_env", lambda: sys.exit(3))
    for index in (7, 8):
        with pytest.raises(RuntimeError, match="wanted to end the process"):
            env.reset(options={"task_index": index})


def test_a_game_that_is_ready_at_the_last_moment_stays_out_of_the_next_episode(lock, monkeypatch):
    """A thread that has seen that the episode still lasts, and puts its game there when the next one has begun."""
    env = make(timeout=0.3, fault_deadline=0.5)
    env.reset(options={"task_index": 7})
    first = env.world
    with bridge._one_at_a_time:  # between look and assignment nobody else begins an episode
        thread = threading.Thread(target=lambda: env.reset(options={"task_index": 8}))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
    thread.join(10)
    assert env.task.metadata["seed"] == 8 and env.world is not first
    env.close()


def test_a_game_that_cannot_begin_is_closed(lock, monkeypatch):
    monkeypatch.setattr(Lock, "reset", lambda game, seed: "no tuple")
    with pytest.raises(ToolFault, match="Lock.reset returned 'no tuple'"):
        make(fault_deadline=0).reset(options={"task_index": 7})
    assert Lock.made == Lock.closed > 0


@pytest.mark.parametrize("seeds", [{}, [], "", {"train": 5, "test": 5}, {"train": [], "test": [1]}, {"train": [1]},
                                   {"train": "abc", "test": "x"}, {"train": [None], "test": [1]},
                                   {"train": [[1]], "test": [1]}, {"train": range(-1, 2), "test": [1]}])
def test_seeds_are_tasks_for_both_splits(seeds):
    with pytest.raises(ArgumentError, match="seeds must have tasks for train and test"):
        GymToolEnv(make_env=Lock, seeds=seeds)


def test_an_argument_that_a_bridge_gives_itself_is_unknown():
    class Game(TextGameEnv):
        command = "such as: jump"

    for name in ("command", "timeout"):
        with pytest.raises(ArgumentError, match=f"unexpected keyword argument '{name}'") as error:
            Game(**{name: 1})
        there = str(error.value).partition("it has ")[2]
        assert "max_turns" in there and "command" not in there and "timeout" not in there
    for wrong, words in (
        ({"timeout": "long"}, "timeout must be a number of seconds"),
        ({"timeout": 0}, "timeout must be above 0 seconds"),
        ({"command": 5}, "command must be a text, got 5"),
        ({"seeds": 5}, "seeds must have tasks for train and test, got 5"),
        ({"split": ["train"]}, r"has no split \['train'\]"),
    ):
        with pytest.raises(ArgumentError, match=words):
            make(**wrong)


def test_a_call_of_a_game_has_no_arguments_but_the_command(lock):
    env = make()
    env.reset(options={"task_index": 7})
    text = env.dialect.tool_call("act", {"command": code_of(env)[0], "loud": True}) + env.dialect.end_of_turn
    *_, info = env.step(np.array(env.tokenizer.encode(text), np.int32))
    assert not info["tool_calls"][0]["ok"] and "unknown 'loud'" in env.messages[-1]["content"]
    assert "log" not in env.memory


def test_a_games_own_limit_cuts_the_episode(lock):
    env = make()
    env.reset(options={"task_index": 7})
    do(env, code_of(env)[0])
    _, reward, terminated, truncated, info = do(env, "limit")
    assert (terminated, truncated, info["truncation_reason"]) == (False, True, "game")
    assert reward == pytest.approx(1 / 3) and env.messages[-1]["content"] == "time is up"


def test_what_was_earned_is_paid_when_the_turns_run_out(lock):
    env = make(max_turns=2)
    env.reset(options={"task_index": 7})
    for digit in code_of(env)[:2]:
        _, reward, terminated, truncated, info = do(env, digit)
    assert truncated and reward == pytest.approx(2 / 3) and info["metrics"] == {"return": 2.0}
    env = make(max_turns=1, unfinished_reward=-1.0)
    env.reset(options={"task_index": 7})
    assert do(env, code_of(env)[0])[1] == -1.0


def test_ten_tenths_are_one():
    env = GymToolEnv(make_env=Lock, max_turns=10)
    env.reset(options={"task_index": 7})
    for command in ["tenth"] * 9 + ["last tenth"]:
        *_, info = do(env, command)
    assert info["is_success"] and info["metrics"] == {"return": 1.0}


@pytest.mark.parametrize("command", ["nan", "inf", "four", "bytes"])
def test_what_no_game_returns_pays_nothing(lock, command):
    env = make(fault_deadline=0, process_reward={"game": 1.0})
    env.reset(options={"task_index": 7})
    _, reward, *_, info = do(env, command)
    assert math.isfinite(reward) and reward <= 0 and not info["tool_calls"][0]["ok"]
    assert ("must return 5 values" in info.get("fault", "")) == (command in ("four", "bytes"))


@pytest.mark.parametrize(("command", "reward"), [("rich", 1.0), ("poor", 0.0)])
def test_a_score_is_from_0_to_1(lock, command, reward):
    env = make()
    env.reset(options={"task_index": 7})
    assert do(env, command)[1] == reward


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_return": 0}, "max_return must be above 0"), ({"max_return": -1.0}, "max_return must be above 0"),
        ({"max_return": math.nan}, "max_return must be a number"), ({"max_return": "3"}, "max_return must be a number"),
        ({"make_env": "Lock"}, "make_env must be a function"), ({"instructions": 5}, "instructions must be a text"),
        ({"seeds": {"train": range(3)}}, "seeds must have tasks for train and test"),
        ({"seeds": {"train": range(3), "test": range(0)}}, "seeds must have tasks for train and test"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(wrong, said):
    with pytest.raises(ArgumentError, match=said):
        GymToolEnv(**{"make_env": Lock, **wrong})


def test_the_splits_share_no_game():
    train, test = (make(split=split) for split in ("train", "test"))
    assert not set(train.seeds["train"]) & set(test.seeds["test"])


def test_a_game_is_closed_and_none_is_pickled(lock):
    env = make()
    env.reset(options={"task_index": 7})
    digits = code_of(env)
    do(env, digits[0])
    copy = pickle.loads(pickle.dumps(env))
    do(copy, digits[1])
    assert do(copy, digits[2])[4]["is_success"]
    for one in (env, copy):
        one.close()
    assert Lock.closed == Lock.made


def test_a_replay_that_pays_otherwise_is_another():
    first, second = (ToolResult("said", data={"reward": reward}) for reward in (0.0, 0.5))
    assert digest(first) != digest(second)


def test_a_world_that_gives_no_result_is_named():
    class Odd:
        def act(self, name, arguments):
            return "a text"

        def close(self):
            pass

    class OddEnv(BridgeEnv):
        def make_task(self, index):
            import agent_r1

            return agent_r1.Task("one", "Act.", [])

        def make_world(self, task):
            return Odd()

        def judge_answer(self, answer):
            return 0.0, {}

    env = OddEnv([{"name": "act", "description": "Act."}], fault_deadline=0)
    env.reset(options={"task_index": 0})
    call = env.dialect.tool_call("act", {}) + env.dialect.end_of_turn
    info = env.step(np.array(env.tokenizer.encode(call), np.int32))[4]
    assert "Odd.act returned 'a text'; it must return a ToolResult" in info["fault"]
