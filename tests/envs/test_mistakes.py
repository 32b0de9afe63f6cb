"""What a class of a user's own gets wrong is said in its words: which class, what it should give, what it gave."""

import re
from functools import partial

import gymnasium as gym
import numpy as np
import pytest

from agent_r1 import ArgumentError, Outcome, Task, Tool, ToolEnv, ToolResult, UserTurn, validate
from agent_r1.baselines import baselines_of
from agent_r1.vector import ToolVectorEnv


class Right(ToolEnv):
    num_tasks = 2

    def make_task(self, index):
        return Task(f"t{index}", "Say yes.", ["yes"])

    def judge_answer(self, answer):
        return float(answer in self.task.answers), {}


def like(**members):
    return type("Mine", (Right,), members)


def play(env, text):
    env.reset(seed=1)
    return env.step(np.array(env.tokenizer.encode(text + env.dialect.end_of_turn), np.int32))


@pytest.mark.parametrize("splits", [["train"], {}, "train"])
def test_splits(splits):
    with pytest.raises(ArgumentError, match="Mine.splits must be a dict of names, such as {'train': 'train'}, got"):
        like(splits=splits)()


@pytest.mark.parametrize("member", ["instructions", "outcome_term"])
@pytest.mark.parametrize("text", [None, ["Answer."], lambda self: "a forgotten @property"])
def test_texts(member, text):
    with pytest.raises(ArgumentError, match=f"Mine.{member} must be a text, got"):
        like(**{member: text})()


@pytest.mark.parametrize("teachers", ["fallible_50", {"fallible_50": 0.5}, (50,)])
def test_teachers(teachers):
    with pytest.raises(ArgumentError, match=r"Mine.teachers must be a tuple of names, such as \('fallible_50',\), got"):
        baselines_of(like(teachers=teachers)())


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"floor": "0.3"}, "Mine.floor must be from 0 to 1, got '0.3'"),
        ({"floor": 30}, "Mine.floor must be from 0 to 1, got 30"),
        ({"floor": float("nan")}, "Mine.floor must be from 0 to 1, got nan"),
        ({"floors": {"reading": "high"}}, r"Mine.floors\['reading'\] must be from 0 to 1, got 'high'"),
        ({"floors": {"reading": 3}}, r"Mine.floors\['reading'\] must be from 0 to 1, got 3"),
        ({"floors": 0.3}, "Mine.floors must map names of heuristic baselines to shares, got 0.3"),
        ({"num_tasks": "many"}, "Mine.num_tasks must be an integer, got 'many'"),
    ],
)
def test_what_validate_reads(members, message, monkeypatch):
    made = like(**members)
    monkeypatch.setitem(gym.registry, "Wrong-v0", gym.envs.registration.EnvSpec("Wrong-v0", made))
    report = validate.validate(validate.Subject("Wrong-v0", {}, 3))
    assert re.search(message, "\n".join(report.failed.values())) and not report.row


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"x": float("nan")}, r"\['x'\] must be a number, got nan"),
        ({"x": "1"}, r"\['x'\] must be a number, got '1'"),
        (["x"], " must be a dict of numbers, got"),
    ],
)
@pytest.mark.parametrize("process_reward", [True, False, {}])
def test_process_weights(weights, message, process_reward):
    with pytest.raises(ArgumentError, match=f"Mine.PROCESS_WEIGHTS{message}"):
        like(PROCESS_WEIGHTS=weights)(process_reward=process_reward)


def test_a_text_may_need_what_the_constructor_sets_later():
    class Late(Right):
        def __init__(self, who="Bob", **kwargs):
            super().__init__(**kwargs)
            self.who = who

        @property
        def instructions(self):
            return f"You help {self.who}."

    env = Late()
    env.reset(seed=1)
    assert "You help Bob." in env.messages[0]["content"]


def test_a_forgotten_constructor(monkeypatch):
    wrong = like(__init__=lambda self: None)
    monkeypatch.setitem(gym.registry, "Forgotten-v0", gym.envs.registration.EnvSpec("Forgotten-v0", wrong))
    ways = [lambda: wrong().reset(seed=1), lambda: ToolVectorEnv(wrong)]
    ways += [lambda: gym.make("Forgotten-v0"), lambda: gym.make("Forgotten-v0", disable_env_checker=True)]
    for make in ways:
        with pytest.raises(ArgumentError, match=r"Mine.__init__ must call super\(\).__init__\(tools, \*\*kwargs\)"):
            make()


@pytest.mark.parametrize(
    "wrong",
    [{"max_turns": 0}, {"max_tunrs": 3}, {"tokenizer": 5}, {"tools": 5}, {"split": ["x"]}, {"dialect": []},
     {"reward": "..x:y"}],
)  # fmt: skip
def test_what_gymnasium_says_has_no_data_in_it(wrong):
    with pytest.raises(ArgumentError) as caught:
        gym.make("AgentR1/Rows-v0", data=[{"question": "Say yes.", "answer": "yes"}] * 1000, **wrong)
    assert next(iter(wrong)) in str(caught.value) and len(str(caught.value)) < 500


def test_an_unknown_argument_names_all_that_there_are():
    def __init__(self, low=1, *, high=2, **kwargs):
        Right.__init__(self, **kwargs)

    with pytest.raises(ArgumentError, match="argument 'hihg'; it has low, high, tokenizer, chat_template, dialect"):
        like(__init__=__init__)(hihg=3)


FUNCTION = Tool.from_function(lambda: 1, name="f", description="Say 1.")


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        (print, "the tools of Mine must be a list of Tools and functions, got"),
        (FUNCTION, "the tools of Mine must be a list of Tools and functions, got"),
        ({"a": 1}, "the tools of Mine must be a list of Tools and functions, got {'a': 1}"),
        ("ab", "the tools of Mine must be a list of Tools and functions, got 'ab'"),
        ([3], "the tools of Mine must be Tools .objects, no classes. and functions, got 3"),
        ([type(FUNCTION)], "the tools of Mine must be Tools .objects, no classes. and functions, got <class"),
        ([print], r"the tools of Mine: print\(\*args\): a tool's parameters must be plain ones"),
        ([lambda: 1], r"the tools of Mine: '<lambda>' cannot be a tool's name .* pass from_function"),
    ],
)
def test_tools(tools, message):
    with pytest.raises(ArgumentError, match=message):
        like()(tools)


def test_a_tool_without_a_description_is_warned_about_once():
    def whisper(text: str) -> str:
        return text.lower()

    with pytest.warns(UserWarning, match="the tool whisper of Mine has no description .*; write a docstring") as caught:
        env = like()([whisper])
        like()([whisper])
    assert len(caught) == 1 and env.tools["whisper"].parameters["required"] == ["text"]


@pytest.mark.parametrize(
    ("member", "value", "message"),
    [
        ("timeout", None, "timeout of the tool late must be a number of seconds above 0 .math.inf for .*, got None"),
        ("max_result_chars", 0, "max_result_chars of the tool late must be an integer, at least 1, got 0"),
    ],
)
def test_bounds_of_a_class_tool(member, value, message):
    class Late(Tool):
        name, description, parameters = "late", "", {"type": "object"}

        def execute(self, arguments):
            return ToolResult("")

    tool = Late()
    setattr(tool, member, value)
    with pytest.raises(ValueError, match=message):
        like()([tool])


@pytest.mark.parametrize(
    ("count", "message"), [(0, "at least 1, got 0"), ("3", "an integer, got '3'"), (None, "an integer, got None")]
)
def test_num_tasks(count, message):
    wrong = like(num_tasks=count)
    for make in (lambda: wrong().reset(seed=1), lambda: ToolVectorEnv(wrong)):
        with pytest.raises(ArgumentError, match=f"Mine.num_tasks must be {message}"):
            make()
    env = like()()
    env.reset(seed=1)
    type(env).num_tasks = count
    with pytest.raises(ArgumentError, match=f"Mine.num_tasks must be {message}"):
        env.set_state(env.get_state())


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (lambda: None, r"Mine.make_task\(1\) must return a Task, got None"),
        (lambda: Task(3, "q", []), "Task: id must be a text, got 3"),
        (lambda: Task("a", 7, []), "Task: question must be a text, got 7"),
        (lambda: Task("a", "q", None), "Task: answers must be a list of texts, got None"),
        (lambda: Task("a", "q", b"abc"), "Task: answers must be a list of texts, got b'abc'"),
        (lambda: Task("a", "q", [1, 2]), r"Task: answers must be a list of texts, got \[1, 2\]"),
        (lambda: Task("a", "q", [], ["x"]), "Task: metadata must be a dict, got"),
        (lambda: Task("a", "q", [], None), "Task: metadata must be a dict, got None"),
        (lambda: Task("a", "q", [], {}, ["x"]), "Task: instructions must be a text or None, got"),
    ],
)
def test_make_task(task, message):
    with pytest.raises(TypeError, match=message):
        like(make_task=lambda self, index: task())().reset(options={"task_index": 1})


@pytest.mark.parametrize("said", [3, ("x", {}), UserTurn(3)])
def test_user_turn(said):
    with pytest.raises(TypeError, match="user_turn of Mine must return a text, a UserTurn, an End or None, got"):
        play(like(user_turn=lambda self, text: said)(), "Hello.")


def test_what_an_end_pays_besides():
    with pytest.raises(TypeError, match="judge_end of Mine: besides must be a dict of amounts, got None"):
        play(like(judge_end=lambda self, score, **how: Outcome(1.0, besides=None))(), "<answer>yes</answer>")


def test_what_an_end_pays_besides_is_not_the_outcome_itself():
    with pytest.raises(ValueError, match="judge_end of Mine: besides must not contain the outcome itself, 'score'"):
        play(like(judge_end=lambda self, score, **how: Outcome(1.0, besides={"score": -3.0}))(), "<answer>yes</answer>")


@pytest.mark.parametrize("many", [False, True])
def test_a_tool_that_ends_the_task_and_no_judge_that_says_so(many):
    """The policy would play on in a world that is over."""
    done = Tool.from_function(lambda: ToolResult("Over.", done=True), name="finish", description="", parameters={})
    wrong = partial(like(), [done])
    with pytest.raises(ValueError, match=r"'finish' ended the task .done=True., but Mine.judge_result .* return End"):
        if many:
            envs = ToolVectorEnv(wrong, 1)
            envs.reset(seed=1)
            text = envs.envs[0].dialect.tool_call("finish", {}) + envs.envs[0].dialect.end_of_turn
            envs.step([np.array(envs.envs[0].tokenizer.encode(text), np.int32)])
        else:
            env = wrong()
            try:
                play(env, env.dialect.tool_call("finish", {}))
            finally:
                with pytest.raises(RuntimeError, match="after the end of the episode"):  # the turn has no end
                    env.step(np.zeros(1, np.int32))


@pytest.mark.parametrize("strict", ["no", 1, "true"])
def test_strict_is_a_truth(strict):
    with pytest.raises(ArgumentError, match="strict must be True, False or None, got"):
        gym.make("AgentR1/ArithmeticWorld-v0", strict=strict)


def test_a_variable_that_nobody_knows_is_said_at_once(monkeypatch):
    monkeypatch.setenv("AGENT_R1_STRICT", "off")
    with pytest.raises(ArgumentError, match="AGENT_R1_STRICT must be 0, 1, true or false, got 'off'"):
        Right()


def test_a_term_of_nothing_is_not_negative():
    env = like(judge_end=lambda self, score, **how: Outcome(score, {"malformed_call": 0.0}))()
    *_, info = play(env, "<answer>yes</answer>")
    assert str(info["reward_terms"]["process/malformed_call"]) == "0.0"
