"""GSM8K and MATH: the official answers, the tools, and what a result and an answer are worth."""

import copy
import json
import pickle
import re
import time

import gymnasium as gym
import numpy as np
import pytest

pytest.importorskip("math_verify")

from agent_r1 import ArgumentError, Task
from agent_r1.judges.mathematics import COPIED, UNREADABLE
from agent_r1.task_data import DataFormatError, load_questions
from agent_r1.tasks import mathematics


@pytest.fixture(autouse=True)
def data_folder(made_up_data, monkeypatch):
    monkeypatch.setenv("AGENT_R1_DATA", str(made_up_data))


@pytest.fixture
def gsm8k():
    env = gym.make("AgentR1/GSM8K-v0").unwrapped
    env.reset(options={"task_index": 1})  # 600 and 600
    return env


def python(env, code):
    return env.dialect.tool_call("python", {"code": code})


@pytest.mark.parametrize(
    ("env_id", "split", "answers"),
    [
        ("GSM8K", "train", ["4", "1200"]),
        ("GSM8K", "test", ["4", "1200"]),
        ("MATH", "train", ["\\frac{3}{2}", "\\frac{5}{2}"]),
        ("MATH", "test", ["\\frac{3}{2}", "\\frac{5}{2}"]),
        ("MATH", "math500", ["\\frac{3}{2}", "\\frac{5}{2}"]),
    ],
)
def test_the_official_answer_is_right(env_id, split, answers, say):
    env = gym.make(f"AgentR1/{env_id}-v0", split=split).unwrapped
    assert env.num_tasks == 2 and set(env.tools) == {"python", "calculator"}
    for index, answer in enumerate(answers):
        env.reset(options={"task_index": index})
        assert env.task.answers == [answer]
        _, reward, terminated, _, info = say(env, f"<answer>{answer}</answer>")
        assert terminated and reward == 1 and info["is_success"] and info["metrics"] == {"em": 1.0}
        assert info["reward_terms"] == {"outcome/correct": 1.0} and "fault" not in info


@pytest.mark.parametrize(
    ("answer", "reward", "error"),
    [
        ("1,200", 1, None),
        ("$1200", 1, None),
        ("\\boxed{1200}", 1, None),
        ("1199", 0, None),
        ("1100 or 1200", 0, None),
        ("1100, 1200", 0, None),
        ("1200 | 1100", 0, UNREADABLE),
        ("9" * 1_000, 0, "longer than"),
        (" ", -0.5, None),
    ],
)
def test_what_an_answer_is_worth(gsm8k, say, answer, reward, error):
    _, got, terminated, _, info = say(gsm8k, f"<answer>{answer}</answer>")
    assert terminated and got == reward and info["is_success"] == (reward == 1)
    assert error in gsm8k.memory["unreadable"] if error else "unreadable" not in gsm8k.memory
    assert "fault" not in info  # whatever is written


def test_copying_the_question_is_no_answer(say, tmp_path):
    row = {"problem": "Compute $99^2+99+1$.", "level": "Level 1", "type": "Algebra", "solution": "\\boxed{9901}"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    env = gym.make("AgentR1/MATH-v0", data_dir=tmp_path).unwrapped
    for answer, reward in (("99^2+99+1", 0), ("9901", 1), ("99 \\cdot 100 + 1", 1)):
        env.reset(options={"task_index": 0})
        assert say(env, f"<answer>{answer}</answer>")[1] == reward
        assert env.memory.get("unreadable", COPIED) == COPIED


def test_process_terms_of_code(gsm8k, say):
    terms = [
        say(gsm8k, python(gsm8k, code))[4]["reward_terms"] for code in ("1 / 0", "x = 600", "x + 600", "x + 601", "x +")
    ]
    failed = {"process/failed_call": -0.05, "process/code_failed": -0.05}
    assert terms == [failed, {"process/code_ran": 0.05}, {}, {}, failed]
    assert gsm8k.messages[-1]["content"].count("SyntaxError")
    # 1201 was computed and is used nowhere
    assert say(gsm8k, "<answer>1200</answer>")[4]["reward_terms"] == {
        "outcome/correct": 1.0,
        "process/unused_result": -0.02,
    }


def test_a_result_that_a_later_call_uses_is_used(gsm8k, say):
    say(gsm8k, gsm8k.dialect.tool_call("calculator", {"expression": "400 + 7"}))
    say(gsm8k, gsm8k.dialect.tool_call("calculator", {"expression": "407 * 3"}))
    assert say(gsm8k, "<answer>1221</answer>")[4]["reward_terms"] == {"outcome/correct": 0.0}


@pytest.mark.parametrize(
    ("turn", "unused"),
    [
        ("<think>407 it is</think>", 1),
        ("I note 407.", 1),
        ("<think>407</think><answer>5</answer>", 1),
        ("407 <answer>5</answer>", 1),
        ("<answer>5</answer> or rather <answer>6</answer>", 1),
        ("<answer>1,5</answer>", 1),
        ("<answer>407.0</answer>", 0),
        ("<answer>$407$</answer>", 0),
        ("{call: 407 - 1}", 1),  # what it gives is unused then
        ("<think>x</think>{call: 407.0 / 1}", 1),
        ("<think>407</think>{call: 2 * 4}", 2),
        ("{call: broken 407}", 1),
        ("{call: 407 - 1}{call: 2 * 3}", 2),  # calls of one turn do not read each other's results
        ("{call: 2 * 3}{call: 6 * 1}", 3),
    ],
)
def test_only_a_later_call_or_the_answer_uses_a_result(gsm8k, say, turn, unused):
    def call(expression):
        return gsm8k.dialect.tool_call("calculator", {"expression": expression})

    say(gsm8k, call("400 + 7"))
    broken = gsm8k.dialect.broken_call("calculator", "407")
    turn = turn.replace("{call: broken 407}", broken)
    terms = say(gsm8k, re.sub(r"\{call: (.*?)\}", lambda match: call(match[1]), turn))[4]["reward_terms"]
    if "<answer>" not in turn:
        terms = say(gsm8k, "<answer>5</answer>")[4]["reward_terms"]
    assert terms.get("process/unused_result", 0) == pytest.approx(-0.02 * unused)


def test_an_answer_with_a_comma_uses_a_result(gsm8k, say):
    say(gsm8k, gsm8k.dialect.tool_call("calculator", {"expression": "600 + 600"}))
    assert say(gsm8k, "<answer>1,200</answer>")[4]["reward_terms"] == {"outcome/correct": 1.0}


STEPS = (
    "Half of 48 is <<48/2=24>>24, an eighth of that <<24/8=3.0>>3, or <<6/2=3>>3, so <<3+24.5=27.5>>27.5.\n#### 27.5"
)


@pytest.fixture
def stepwise(tmp_path):
    rows = [{"question": "What is half of 48, and an eighth of that, and .5?", "answer": STEPS},
            {"question": "How much is 1,000 and 5?", "answer": "<<1000*1=1,000>>1000, <<1000+5=$1,005>>\n#### 1005"},
            {"question": "What is 4?", "answer": "<<2+2=4>>4\n#### 4"},
            {"question": "At 1,5 and -7?", "answer": "<<1+4=5>>5, <<7-14=-7>>-7, <<9-0=9>>9, <<8*2=16>>\n#### 16"},
            {"question": "From 3 to $.50?", "answer": "<<1-8=-7>>-7, <<1/2=.5>>, <<9-2=7>>7\n#### 7"},
            {"question": "What is ten million?", "answer": "<<2500000*4=10000000>>\n#### 10000000"}]  # fmt: skip
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    env = gym.make("AgentR1/GSM8K-v0", data_dir=tmp_path, process_reward={"step_found": 0.6}, max_turns=12).unwrapped
    env.reset(options={"task_index": 0})
    return env


def step_found(env, say, expression):
    terms = say(env, env.dialect.tool_call("calculator", {"expression": expression}))[4]["reward_terms"]
    return terms.get("process/step_found")


def test_each_result_of_an_annotated_step_is_paid_once(stepwise, say):
    paid = [step_found(stepwise, say, e) for e in ("48 / 3", "12 + 12", "96 / 4", "24/8", "9 - 6")]
    assert paid == [None, pytest.approx(0.2), None, pytest.approx(0.2), None]
    assert say(stepwise, "<answer>27.5</answer>")[4]["metrics"] == {"em": 1.0, "step_recall": pytest.approx(2 / 3)}


@pytest.mark.parametrize("expression", ["24", "24 + 0", "24.0 * 1", "23.9 + 0.05", "-48 / 2", "24.0001 * 1.0", "1×24"])
def test_a_call_that_has_the_number_in_it_and_a_number_beside_it_find_nothing(stepwise, say, expression):
    assert step_found(stepwise, say, expression) is None


def test_a_neighbour_of_a_large_number_is_another_one(stepwise, say):
    stepwise.reset(options={"task_index": 5})
    assert [step_found(stepwise, say, e) for e in ("5000000 * 2 + 1", "5000000 * 2")] == [None, 0.6]


def test_only_the_first_results_find_a_step(stepwise, say):
    """Twice as many as there are steps: one who lists numbers finds few."""
    paid = [step_found(stepwise, say, f"{number} + 1") for number in [*range(100, 107), 23, 2]]
    assert paid == [None] * 7 + [pytest.approx(0.2), None]


@pytest.mark.parametrize("code", ["for n in range(99): print(n)", "print(20 + 4, 3)", "'2,4'", "print(' 2_4')", "'٢٤'"])
def test_what_isn_t_one_number_in_digits_finds_no_step(stepwise, say, code):
    assert "process/step_found" not in say(stepwise, python(stepwise, code))[4]["reward_terms"]
    paid = say(stepwise, python(stepwise, "48 / 2"))[4]["reward_terms"]
    assert paid["process/step_found"] == pytest.approx(0.2)


def test_a_first_program_that_finds_a_step_is_paid_for_both(stepwise, say):
    paid = say(stepwise, python(stepwise, "48 / 2"))[4]["reward_terms"]
    assert paid == {"process/code_ran": 0.05, "process/step_found": pytest.approx(0.2)}


@pytest.mark.parametrize(
    "index, expressions, paid, metrics",
    [
        (1, ["500 * 2", "995 + 10"], [None, 0.6], {"step_recall": 1.0}),  # 1,000 is in the question
        (2, ["2 + 2"], [None], {}),
        (4, ["1 / 2", "-7 * 1", "2 - 9", "5 + 2"], [None, None, 0.3, 0.3], {"step_recall": 1.0}),  # .5 is read
        (3, ["1 + 4", "3 - 10", "3 * 3", "8 * 2"], [None, None, None, 0.6], {"step_recall": 1.0}),  # 9 is in its own
    ],
)
def test_what_can_be_copied_is_no_step_s_result(stepwise, say, index, expressions, paid, metrics):
    stepwise.reset(options={"task_index": index})
    assert [step_found(stepwise, say, e) for e in expressions] == paid
    assert say(stepwise, "<answer>0</answer>")[4]["metrics"] == {"em": 0.0, **metrics}


@pytest.mark.parametrize("solution", [None, 5, "no steps", "<<1+1=>>", "<<1+1=two>>", "<<1=" + "9" * 400 + ">>"])
@pytest.mark.parametrize("process_reward", [True, {"step_found": 0.6}])
def test_solutions_without_steps_pay_none(tmp_path, say, solution, process_reward):
    class Own(mathematics.GSM8KEnv):
        def make_task(self, index):
            return Task("0", "How many?", ["2"], {} if solution is None else {"solution": solution})

    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "?", "answer": "#### 2"}))
    env = Own(data_dir=tmp_path, process_reward=process_reward)
    env.reset(seed=0)
    assert step_found(env, say, "1 + 1") is None and say(env, "<answer>2</answer>")[4]["metrics"] == {"em": 1.0}


def test_the_expert_finds_every_step_also_from_a_snapshot(stepwise, say):
    first, *rest, answer = stepwise.demonstration()  # two steps come to 3
    assert say(stepwise, first)[4]["reward_terms"] == {"process/step_found": pytest.approx(0.2)}
    state = stepwise.get_state()
    for _ in range(2):
        stepwise.set_state(state)
        assert [say(stepwise, turn)[1] for turn in rest] == [pytest.approx(0.2), 0.0, pytest.approx(0.2)]
        assert say(stepwise, answer)[4]["metrics"] == {"em": 1.0, "step_recall": 1.0}


def test_steps_are_paid_by_choice(gsm8k, say):
    assert gsm8k.process_weights["step_found"] == 0 and step_found(gsm8k, say, "600 + 600") is None
    assert say(gsm8k, "<answer>1200</answer>")[4]["metrics"] == {"em": 1.0}
    with pytest.raises(ValueError, match="no process reward is named 'step_found'"):
        gym.make("AgentR1/MATH-v0", process_reward={"step_found": 1.0})


def test_no_process_terms_where_none_are_wanted(say):
    env = gym.make("AgentR1/GSM8K-v0", process_reward=False).unwrapped
    env.reset(seed=0)
    assert say(env, python(env, "1 / 0"))[4]["reward_terms"] == {}


def test_a_snapshot_branches_a_live_python_session(gsm8k, say):
    """Also into another environment, and also after CPython took over from Monty."""
    other = gym.make("AgentR1/GSM8K-v0").unwrapped
    for code in ("x = [1]", "import collections, heapq; heapq.heapify(x)"):
        say(gsm8k, python(gsm8k, code))
        state = gsm8k.get_state()
        say(gsm8k, python(gsm8k, "x.append(2)"))
        for env in (other, gsm8k):
            env.set_state(state)
            say(env, python(env, "x.append(3); x"))
            assert env.messages[-1]["content"] == "[1, 3]"
        gsm8k.set_state(state)


@pytest.mark.parametrize("code", ["x = 5", "import heapq; x = 5"])
def test_a_live_session_is_pickled_and_copied(gsm8k, say, code):
    say(gsm8k, python(gsm8k, code))
    for env in (pickle.loads(pickle.dumps(gsm8k)), copy.deepcopy(gsm8k), gsm8k):
        say(env, python(env, "x += 1; x"))
        assert env.messages[-1]["content"] == "6"


def test_a_new_episode_has_a_new_session(gsm8k, say):
    say(gsm8k, python(gsm8k, "x = 5"))
    gsm8k.reset(seed=1)
    assert not say(gsm8k, python(gsm8k, "x"))[4]["tool_calls"][0]["ok"]


def test_closing_ends_the_session_and_a_program_in_flight():
    envs = gym.make_vec("AgentR1/GSM8K-v0", num_envs=2)
    envs.reset(seed=0)
    tokenizer = envs.envs[0].tokenizer
    codes = ["import heapq\nwhile True: pass", "import heapq\n1"]
    envs.send([np.array(tokenizer.encode(python(envs.envs[0], code)), np.int32) for code in codes])
    assert envs.recv(1)[0].tolist() == [1]
    start = time.monotonic()
    envs.close()
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("tools", [("calculator",), ("python",), ("python", "calculator")])
def test_tools_by_choice(tools):
    assert tuple(gym.make("AgentR1/MATH-v0", tools=tools).unwrapped.tools) == tools


@pytest.mark.parametrize("tools", ["python", (), ("search",)])
def test_other_tools_are_refused(tools):
    with pytest.raises(ArgumentError, match="a tuple of 'calculator' or 'python' or both"):
        gym.make("AgentR1/GSM8K-v0", tools=tools)


@pytest.mark.parametrize(
    ("name", "line", "field"),
    [
        ("gsm8k", '{"question": "How many?", "answer": "Seven."}', "answer"),
        ("gsm8k", '{"question": " ", "answer": "#### 7"}', "question"),
        ("math", '{"problem": "How many?", "solution": "It is $7$."}', "solution"),
    ],
)
def test_a_row_in_another_format_is_named(tmp_path, name, line, field):
    (tmp_path / "train.jsonl").write_text(line)
    with pytest.raises(DataFormatError, match=rf"row 0 .*field '{field}'"):
        load_questions(name, "train", tmp_path)


SOLUTION = (
    "Weng earns 12/60 = $<<12/60=0.2>>0.2 per minute.\n"
    "Working 50 minutes, she earned 0.2 x 50 = $<<0.2*50=10>>10.\n"
    "#### 10"
)
PLAIN = "Weng earns 12/60 = $0.2 per minute. Working 50 minutes, she earned 0.2 x 50 = $10."


@pytest.fixture
def annotated(tmp_path):
    rows = [{"question": "How much did Weng earn?", "answer": SOLUTION}, {"question": "How old?", "answer": "#### 7"}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_annotated_steps_are_demonstrated_as_calculator_calls(annotated, say):
    env = gym.make("AgentR1/GSM8K-v0", data_dir=annotated, tools=("calculator",)).unwrapped
    env.reset(options={"task_index": 0})
    turns = env.demonstration()
    assert turns == [
        "<think>Weng earns 12/60 = $</think>" + env.dialect.tool_call("calculator", {"expression": "12/60"}),
        "<think>0.2 per minute. Working 50 minutes, she earned 0.2 x 50 = $</think>"
        + env.dialect.tool_call("calculator", {"expression": "0.2*50"}),
        "<think>10.</think><answer>10</answer>",
    ]
    for turn in turns:
        _, reward, terminated, _, info = say(env, turn)
    assert terminated and info["is_success"] and reward == 1
    assert [message["content"] for message in env.messages if message["role"] == "tool"] == ["0.2", "10"]


@pytest.mark.parametrize(
    ("tools", "index", "turns"),
    [
        (("python",), 0, [f"<think>{PLAIN}</think><answer>10</answer>"]),
        (("calculator",), 1, ["<answer>7</answer>"]),
    ],
)
def test_without_calculator_or_annotation_the_solution_is_one_turn(annotated, tools, index, turns):
    env = gym.make("AgentR1/GSM8K-v0", data_dir=annotated, tools=tools).unwrapped
    env.reset(options={"task_index": index})
    assert env.demonstration() == turns


def test_an_expert_with_few_turns_makes_several_calls_in_one(tmp_path, say):
    steps = "".join(f"That makes {i}+1=<<{i}+1={i + 1}>>{i + 1}. " for i in range(7))
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "How much?", "answer": f"{steps}#### 7"}) + "\n")
    for max_turns, counts in ((6, [1, 1, 1, 1, 3, 0]), (9, [1] * 7 + [0]), (2, [7, 0])):
        env = gym.make("AgentR1/GSM8K-v0", data_dir=tmp_path, tools=("calculator",), max_turns=max_turns).unwrapped
        env.reset(options={"task_index": 0})
        calls = []
        for turn in env.demonstration():
            _, _, terminated, _, info = say(env, turn)
            calls.append(len(info["tool_calls"]))
        assert terminated and info["is_success"] and calls == counts


@pytest.mark.parametrize("env_id", ["GSM8K", "MATH"])
def test_the_expert_is_right_and_there_is_no_other(env_id, say):
    env = gym.make(f"AgentR1/{env_id}-v0").unwrapped
    for index in range(env.num_tasks):
        env.reset(options={"task_index": index})
        for turn in env.demonstration():
            _, _, terminated, _, info = say(env, turn)
        assert terminated and info["is_success"]
    with pytest.raises(ValueError, match="--expert-share 1"):
        env.demonstration(np.random.default_rng(0))
