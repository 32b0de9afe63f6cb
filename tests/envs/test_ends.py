"""Ends that aren't `<answer>`: a game that is over, a user who hangs up, and what an end pays."""

import json
import math

import numpy as np
import pytest

from agent_r1 import End, Outcome, Task, Tool, ToolEnv, ToolFault, ToolResult
from agent_r1.rewards import paper_outcome
from agent_r1.tool_env import CUT, NO_ACTION_HINT
from agent_r1.vector import ToolVectorEnv


class Board(Tool):
    """Nim: take 1 to 3 of 10 matches; who takes the last one wins. It answers with one match, always."""

    name = "take"
    description = "Take 1 to 3 matches."
    parameters = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
    timeout = math.inf
    concurrency_safe = False

    def __init__(self):
        self.left = 10

    def execute(self, arguments):
        if not 1 <= arguments["count"] <= min(3, self.left):
            return ToolResult(f"Take 1 to {min(3, self.left)}.", ok=False)
        self.left -= arguments["count"]
        if self.left == 0:
            return ToolResult("You won.", data={"won": True}, done=True)
        self.left -= 1
        if self.left == 0:
            return ToolResult("I take the last one. You lost.", data={"won": False}, done=True)
        return ToolResult(f"I take 1. {self.left} are left.")

    def get_state(self):
        return self.left

    def set_state(self, state):
        self.left = 10 if state is None else state


class Nim(ToolEnv):
    instructions = "Play until somebody has won."
    outcome_term = "outcome/won"
    num_tasks = 1

    def __init__(self, **kwargs):
        super().__init__([Board()], **{"max_turns": 20, **kwargs})

    def make_task(self, index):
        return Task("nim", "There are 10 matches.", [])

    def judge_result(self, call, result):
        return End(float(result.data["won"])) if result.done else {}

    def judge_answer(self, answer):
        return 0.0, {}


class Shop(ToolEnv):
    """A customer wants one of five colours, says yes or no, and leaves at `bye`."""

    instructions = "Find out which colour the customer wants, then say bye."
    num_tasks = 1
    PROCESS_WEIGHTS = {**ToolEnv.PROCESS_WEIGHTS, "polite": 0.25}

    def __init__(self, wire=(), **kwargs):
        self.wire = list(wire)  # how often the telephone breaks
        super().__init__([Tool.from_function(stock, timeout=math.inf)], **kwargs)

    def make_task(self, index):
        return Task("shop", "I'd like a hat.", ["red"])

    def user_turn(self, text):
        self.memory["heard"] = [*self.memory.get("heard", []), text]
        if self.wire:
            raise self.wire.pop()
        if "bye" in text.lower():
            return End(float(self.memory.get("sold", False)), {"polite": 1.0}, {"turns": float(self.episode.turn)})
        self.memory["sold"] = "red" in text.lower()
        return "Yes, red." if self.memory["sold"] else "No. <|im_end|>"

    def judge_answer(self, answer):
        return 0.0, {"em": 0.0}


def stock() -> str:
    """What there is."""
    return "red, blue"


def begin(env_class, **kwargs):
    env = env_class(**kwargs)
    env.reset(seed=0)
    return env


def take(env, *counts):
    return env.dialect.write_turn(calls=[("take", {"count": count}) for count in counts])


# ---------------------------------------------------------------------- games


@pytest.mark.parametrize(("counts", "won"), [((1, 1, 2, 3), True), ((3, 1, 3), False), ((3, 2, 3), True)])
def test_a_game_ends_when_it_is_over(say, counts, won):
    env = begin(Nim, process_reward=False)
    for count in counts[:-1]:
        _, reward, terminated, _, _ = say(env, take(env, count))
        assert reward == 0.0 and not terminated
    state, reward, terminated, truncated, info = say(env, take(env, counts[-1]))
    assert (reward, terminated, truncated) == (float(won), True, False)
    assert (info["is_success"], info["answer"], info["reward_terms"]) == (won, None, {"outcome/won": float(won)})
    with pytest.raises(RuntimeError, match="after the end"):
        say(env, take(env, 1))


def test_calls_after_the_end_are_not_counted(say):
    env = begin(Nim)
    info = say(env, take(env, 3, 2, 3, 3, 9))[4]
    assert info["is_success"] and [call["ok"] for call in info["tool_calls"]] == [True] * 3


class Clocked(Nim):
    """Two moves, then the time is up."""

    def judge_result(self, call, result):
        self.memory["moves"] = self.memory.get("moves", 0) + 1
        return End(0.0, truncation_reason="time") if self.memory["moves"] == 2 else {}


def test_calls_after_the_time_is_up_have_no_answer_in_the_conversation(say):
    env = begin(Clocked)
    info = say(env, take(env, 1, 1, 1, 1))[4]
    assert info["truncation_reason"] == "time" and len(info["tool_calls"]) == 2
    calls = [message for message in env.messages if message.get("tool_calls")][-1]["tool_calls"]
    answers = [message["tool_call_id"] for message in env.messages if message["role"] == "tool"]
    assert len(calls) == 4 and answers == [call["id"] for call in calls[:2]]


@pytest.mark.parametrize(("given", "paid"), [(None, {"outcome/won": 0.5}), (0.0, {"outcome/unfinished": 0.0})])
def test_what_the_task_cut_short_is_unfinished_where_that_has_a_price(say, given, paid):
    """A learner that bootstraps there would count the score twice."""

    class Scored(Nim):
        def judge_result(self, call, result):
            return End(0.5, truncation_reason="time")

    env = begin(Scored, unfinished_reward=given)
    _, reward, terminated, truncated, info = say(env, take(env, 1))
    assert truncated and not terminated and info["reward_terms"] == paid and reward == sum(paid.values())


@pytest.mark.parametrize("dialect", ["hermes", "react", "llama3_json"])
@pytest.mark.parametrize("closed", [True, False])
def test_an_end_that_says_nothing_adds_no_message(say, dialect, closed):
    class Busy(Shop):
        def user_turn(self, text):
            return End(0.0, truncation_reason="time")

    env = begin(Busy, dialect=dialect)
    before = list(env.episode.buffer[: env.episode.length])
    state, _, _, truncated, _ = say(env, "I am looking", closed=closed)
    said = env.tokenizer.decode(state[len(before) :].tolist())
    assert truncated and said == "I am looking" + env.dialect.end_of_turn
    assert env.messages[-1] == {"role": "assistant", "content": "I am looking"}


@pytest.mark.parametrize(
    ("judged", "message"),
    [
        ((2.0, {}), "Nim returned the judgement .* the score, must be a number from 0 to 1"),
        (("1", {}), "the score, must be a number from 0 to 1"),
        ((10**400, {}), "the score, must be a number from 0 to 1"),
        ((math.nan, {}), "the score, must be a number from 0 to 1"),
        ((1.0, {"em": "x"}), "Nim returned the judgement .* the metrics, must be a dict of numbers"),
        ((1.0, {"em": "0.5"}), "the metrics, must be a dict of numbers"),
        ((1.0, {"em": math.nan}), "the metrics, must be a dict of numbers"),
        ((1.0, 3), "the metrics, must be a dict of numbers"),
        (1.0, r"Nim: judge_answer must return a pair \(score, metrics\), such as .*, got 1.0"),
        (True, r"must return a pair \(score, metrics\), such as .*, got True"),
        (None, r"must return a pair \(score, metrics\), such as .*, got None"),
        ((1.0,), r"must return a pair \(score, metrics\), such as .*, got \(1.0,\)"),
    ],
)
def test_a_judge_that_breaks_its_contract_is_told(say, monkeypatch, judged, message):
    env = begin(Nim)
    monkeypatch.setattr(env, "judge_answer", lambda answer: judged)
    with pytest.raises(ValueError, match=message):
        say(env, "<answer>x</answer>")


def test_a_judge_that_gives_a_score_alone_is_told_where_nothing_is_answered_too(say, monkeypatch):
    env = begin(Nim, max_turns=1)
    monkeypatch.setattr(env, "judge_answer", lambda answer: 1.0)
    with pytest.raises(ValueError, match="Nim: judge_answer must return a pair .*, got 1.0"):
        say(env, "well")


@pytest.mark.parametrize("early", [False, True])
def test_a_judge_may_count_in_numpy(monkeypatch, early):
    """What comes out is Python's: `info` survives JSON."""
    found = np.float32(1), {"em": np.int64(1), "all": np.bool_(True), "f1": np.float32(0.5), "none": None}
    monkeypatch.setattr(Nim, "judge_answer", lambda env, answer: found)
    monkeypatch.setattr(Nim, "slow_judge", early)
    envs = ToolVectorEnv(Nim, num_envs=1)
    envs.reset(seed=0)
    span = envs.envs[0].tokenizer.encode("<answer>x</answer>" + envs.envs[0].dialect.end_of_turn)
    envs.send([span])
    (info,) = envs.recv(1)[-1]
    assert info["metrics"] == {"em": 1.0, "all": 1.0, "f1": 0.5, "none": None} and info["is_success"]
    assert json.loads(json.dumps(info["metrics"])) == info["metrics"]
    envs.close()
    env = begin(Nim)
    monkeypatch.setattr(env, "judge_answer", lambda answer: (0.0, {"em": np.int64(0)}))
    assert json.dumps(env.cut_off()["metrics"]) == '{"em": 0.0}'


@pytest.mark.parametrize("amount", [math.nan, -math.inf, "0.5", None, 10**400])
def test_an_amount_that_is_no_number_is_told(say, monkeypatch, amount):
    """Also where its weight is 0: 0 times NaN is NaN."""
    env = begin(Nim, process_reward={"no_action": 0.0})
    monkeypatch.setattr(env, "judge_result", lambda call, result: {"no_action": amount})
    with pytest.raises(ValueError, match="Nim: the amount of 'no_action' must be a finite number, got "):
        say(env, take(env, 1))


@pytest.mark.parametrize("value", [math.nan, "1", None])
def test_a_payment_that_is_no_number_is_told(say, monkeypatch, value):
    env = begin(Nim)
    monkeypatch.setattr(env, "judge_end", lambda score, **how: value)
    with pytest.raises(ValueError, match="Nim: the value of judge_end must be a finite number, got "):
        say(env, "<answer>x</answer>")


def test_amounts_may_be_numpys(say, monkeypatch):
    env = begin(Nim, process_reward={"no_action": 1.0})
    monkeypatch.setattr(env, "judge_result", lambda call, result: {"no_action": np.float32(0.5)})
    assert json.dumps(say(env, take(env, 1))[4]["reward_terms"]) == '{"process/no_action": 0.5}'


def test_a_judge_that_returns_nothing_is_told(say, monkeypatch):
    env = begin(Nim)
    monkeypatch.setattr(env, "judge_result", lambda call, result: None)
    with pytest.raises(TypeError, match="a judge of Nim returned None"):
        say(env, take(env, 1))


def test_a_malformed_call_after_the_end_is_no_wrong_format(say):
    env = begin(Nim, process_reward=False)
    torn = env.dialect.broken_call("take", '{"count":')
    _, reward, terminated, _, info = say(env, take(env, 3, 2, 3) + "\n" + torn)
    assert terminated and info["reward_terms"] == {"outcome/won": 1.0} and reward == 1.0
    env.reset(seed=0)
    _, _, _, _, info = say(env, torn + "\n" + take(env, 3, 2, 3))  # before it, it is
    assert info["reward_terms"] == {"outcome/format": -0.5}


def test_a_game_that_is_branched_ends_in_each_branch(say):
    env = begin(Nim)
    say(env, take(env, 3, 2))
    snapshot = env.get_state()
    for count, won in ((3, True), (2, False), (3, True)):
        env.set_state(snapshot)
        _, _, terminated, _, info = say(env, take(env, count))
        assert terminated and info["is_success"] == won


# ---------------------------------------------------------------------- what an end pays


def test_equation_6_is_the_default(say):
    for score, answer_ok, calls_ok in ((1.0, True, True), (1.0, True, False), (0.0, False, True), (0.0, False, False)):
        expected = paper_outcome(score, answer_ok=answer_ok, calls_ok=calls_ok)
        assert begin(Nim).judge_end(score, answer="", answer_ok=answer_ok, calls_ok=calls_ok) == expected


class Lenient(Nim):
    """Pays what was won, and for a game that isn't over the matches that are gone; the format costs nothing."""

    def judge_end(self, score, *, answer, answer_ok, calls_ok):
        return score if answer_ok else (10 - self.tools["take"].left) / 100


def test_a_task_may_pay_an_end_otherwise(say):
    broken = "<tool_call>\n{\n</tool_call>"
    for env_class, won, unfinished in ((Nim, -0.5, -1.0), (Lenient, 1.0, 0.04)):
        env = begin(env_class, process_reward=False)
        say(env, broken)
        info = say(env, take(env, 3, 2, 3))[4]
        assert info["reward_terms"] == {"outcome/format": won} and info["is_success"]
        env = begin(env_class, process_reward=False, max_turns=2)
        say(env, broken)
        _, reward, terminated, truncated, info = say(env, take(env, 3))
        assert (reward, terminated, truncated) == (unfinished, False, True)
        assert info["reward_terms"] == {"outcome/unfinished": unfinished} and not info["is_success"]


def test_what_an_unfinished_episode_pays_is_the_users_first(say):
    env = begin(Lenient, max_turns=1, unfinished_reward=0.5)
    assert say(env, take(env, 3))[4]["reward_terms"]["outcome/unfinished"] == 0.5


def test_an_outcome_that_faults_is_asked_again(say):
    class Fails(Nim):
        failures = 1

        def judge_end(self, score, **how):
            self.failures -= 1
            if self.failures >= 0:
                raise ToolFault("the scale is broken")
            return super().judge_end(score, **how)

    assert say(begin(Fails, fault_deadline=1), "<answer>1</answer>")[1] == 0.0
    broken = say(begin(Fails, fault_deadline=0), "<answer>1</answer>")
    assert broken[1:4] == (0.0, False, True) and broken[4]["fault"] == "judge: ToolFault: the scale is broken"


# ---------------------------------------------------------------------- users


def test_a_user_replies_to_what_is_neither_call_nor_answer(say):
    env = begin(Shop)
    before = env._observation().size
    state, reward, terminated, _, info = say(env, "<think>Perhaps blue.</think>Blue?")
    assert (reward, terminated, info["reward_terms"]) == (0.0, False, {})
    assert env.memory["heard"] == ["Blue?"]  # thoughts are the policy's own
    assert env.messages[-1] == {"role": "user", "content": "No. <|im_end|>"}
    new = env.tokenizer.decode(state[before:].tolist())
    assert new.endswith("<|im_start|>user\nNo. <|im_end|><|im_end|>\n<|im_start|>assistant\n")
    assert state[before:].tolist().count(env.dialect.stop_token_ids[0]) == 2  # the policy's and the user's own end
    say(env, env.dialect.write_turn("Red, too?", [("stock", {})]))
    assert len(env.memory["heard"]) == 1 and env.messages[-1]["role"] == "tool"  # calls come first
    say(env, "Red?")
    _, reward, terminated, truncated, info = say(env, "Good bye.")
    assert (terminated, truncated, info["is_success"], info["answer"]) == (True, False, True, None)
    assert info["reward_terms"] == {"process/polite": 0.25, "outcome/score": 1.0} and reward == 1.25
    assert info["metrics"] == {"turns": 4.0}


def test_an_answer_still_ends_it_and_silence_is_no_action(say):
    env = begin(Shop)
    assert say(env, "<think>hm</think>")[4]["reward_terms"] == {"process/no_action": 0.0}
    assert env.messages[-1]["content"] == NO_ACTION_HINT and "heard" not in env.memory
    assert say(env, "bye <answer>red</answer>")[2] and "heard" not in env.memory


def test_a_user_may_hang_up_in_the_last_turn_and_not_after_it(say):
    env = begin(Shop, max_turns=2)
    say(env, "red")
    assert say(env, "bye")[2:4] == (True, False)
    env = begin(Shop, max_turns=1)
    assert say(env, "red")[4]["reward_terms"] == {"outcome/unfinished": -0.5}
    assert env.messages[-1]["content"] == "Yes, red."


def test_what_a_user_says_is_cut_to_the_room(say):
    class Talks(Shop):
        def user_turn(self, text):
            return "\ud800" + "long " * 1000

    env = begin(Talks, max_context_tokens=1_500)
    state, *_, info = say(env, "red")
    assert state.size <= 1_500 and env.messages[-1]["content"].endswith(CUT)
    assert env.messages[-1]["content"].startswith("\ufffdlong ")
    assert info["max_new_tokens"] >= 187


def test_a_user_who_cannot_be_reached_is_a_fault(say):
    env = begin(Shop, wire=[ConnectionError("engaged")])
    assert say(env, "red")[4]["reward_terms"] == {} and env.memory["heard"] == ["red"]  # tried again, as if never
    env = begin(Shop, wire=[ConnectionError("engaged")], fault_deadline=0)
    info = say(env, "red")[4]
    assert info["truncation_reason"] == "fault" and env.memory == {}


def test_users_in_a_vector_environment():
    envs = ToolVectorEnv(Shop, num_envs=3, text=True)
    envs.reset(seed=0)
    states = envs.step(["red", "blue", "bye"])
    assert [env.messages[-1]["content"] for env in envs.envs] == ["Yes, red.", "No. <|im_end|>", "bye"]
    assert states[2].tolist() == [False, False, True]
    envs.close()


class Costly(Nim):
    def judge_end(self, score, **how):
        return Outcome(super().judge_end(score, **how), besides={"spilled": -2.0} if self.memory.get("spilled") else {})

    def judge_result(self, call, result):
        self.memory["spilled"] = not result.ok
        return super().judge_result(call, result)


@pytest.mark.parametrize("last", ["<answer>enough</answer>", "nothing"])
def test_what_an_end_pays_besides(last):
    """Under a name of its own, whatever the end is called and whatever an unfinished episode pays."""
    env = Costly(max_turns=2, unfinished_reward=0.0)
    for count, besides in ((9, {"outcome/spilled": -2.0}), (1, {})):
        env.reset(seed=0)
        for text in (env.dialect.tool_call("take", {"count": count}), last):
            ids = env.tokenizer.encode(text + env.dialect.end_of_turn, add_special_tokens=False)
            _, reward, _, _, info = env.step(np.array(ids, np.int32))
        outcome = {name: value for name, value in info["reward_terms"].items() if name.startswith("outcome/")}
        assert len(outcome) == 1 + len(besides) and besides.items() <= outcome.items()
        assert reward == sum(info["reward_terms"].values())
