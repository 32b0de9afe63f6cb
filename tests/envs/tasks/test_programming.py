"""HumanEval and MBPP: the official tests decide, the policy never sees them, and cheating pays nothing."""

import json
import pickle
import threading
from dataclasses import replace

import gymnasium as gym
import math_and_code_data
import numpy as np
import pytest

from agent_r1 import ArgumentError
from agent_r1.judges import programs
from agent_r1.judges.programs import Suite, check_program, judge_sandbox
from agent_r1.task_data import DataFormatError, Program, load_questions
from agent_r1.tasks.programming import complete_program, humaneval_task, mbpp_task
from agent_r1.validation.probes import expert, play, shortcuts
from agent_r1_tools.python import SandboxError, probe

NOWHERE = all(probe(name) is not None for name in ("bubblewrap", "fork_server"))
pytestmark = [pytest.mark.sandbox, pytest.mark.skipif(NOWHERE, reason="needs a sandbox with all of CPython")]

TWICE = "def times_2(x):\n    return 2 * x"
SOLUTIONS = {"HumanEval": TWICE, "MBPP": "def add_601(x):\n    return x + 601"}


@pytest.fixture(autouse=True)
def data_folder(made_up_data, monkeypatch):
    monkeypatch.setenv("AGENT_R1_DATA", str(made_up_data))


@pytest.fixture(autouse=True)
def little_time(monkeypatch):
    """Programs that hang end soon. The clock's limit stays: the machine may be busy."""
    sandbox = judge_sandbox("auto")
    monkeypatch.setattr(sandbox, "limits", replace(sandbox.limits, cpu_seconds=0.5))


@pytest.fixture(params=["HumanEval", "MBPP"])
def name(request):
    return request.param


@pytest.fixture
def env(name):
    env = gym.make(f"AgentR1/{name}-v0").unwrapped
    env.reset(options={"task_index": 0})
    return env


def run_tests(env, code):
    return env.dialect.tool_call("run_tests", {"code": code})


def mbpp(code, tests, setup=""):
    """The task of a made-up row of MBPP."""
    return mbpp_task(Program("MBPP/1", "Write it.", "", code, setup, tuple(tests)), 1)


def passes(task, code):
    return check_program(judge_sandbox("auto"), complete_program(task, code), task.metadata["hidden"]).passed


# ---------------------------------------------------------------------- what an answer is worth


def test_the_expert_tries_the_official_solution_and_answers_with_it(env, say):
    for index in range(env.num_tasks):
        env.reset(options={"task_index": index})
        turns = env.demonstration()
        outcomes = [say(env, turn) for turn in turns]
        assert len(turns) == 2 and outcomes[-1][2] and outcomes[-1][4]["is_success"]
        assert outcomes[0][4]["tool_calls"][0]["ok"] and outcomes[0][1] > 0
    with pytest.raises(ValueError, match="--expert-share 1"):
        env.demonstration(np.random.default_rng(0))


def test_the_canonical_solution_passes(env, say):
    _, reward, terminated, _, info = say(env, f"<answer>{env.task.answers[0]}</answer>")
    assert terminated and reward == 1 and info["is_success"]
    assert info["reward_terms"] == {"outcome/tests_passed": 1.0}
    assert info["metrics"] == {"em": 1.0, "shown_tests_passed": 0.0}


def test_a_program_may_be_written_in_many_ways(env, name, say):
    solution = SOLUTIONS[name]
    for answer in (solution, f"Here it is:\n```python\n{solution}\n```\n", f"import math\n\n{solution}\n\nprint(1)"):
        env.reset(options={"task_index": 0})
        assert say(env, f"<answer>\n{answer}\n</answer>")[4]["is_success"], answer


@pytest.mark.parametrize("body", ["return x * 2", "y = x\n    return y * 2", "    return x + x"])
def test_a_body_alone_continues_the_prompt_of_humaneval(body, say):
    env = gym.make("AgentR1/HumanEval-v0").unwrapped
    env.reset(options={"task_index": 0})
    assert say(env, f"<answer>{body}</answer>")[4]["is_success"]


@pytest.mark.parametrize(
    "wrong",
    [
        "def {f}(x):\n    return x",
        "def {f}(x):\n    return None",
        "def other(x): return x",
        "def {f}(x",
        "",
        "1 / 0",
        "```",
    ],
)
def test_a_wrong_program_fails(env, name, wrong, say):
    function = SOLUTIONS[name].split("(")[0].removeprefix("def ")
    _, reward, terminated, _, info = say(env, f"<answer>{wrong.replace('{f}', function)}</answer>")
    assert terminated and reward == (0 if wrong else -0.5) and not info["is_success"]


CHEATS = {
    "equal to all": "class A:\n    def __eq__(self, other): return True\ndef {f}(x): return A()",
    "equal number": "class A(int):\n    def __eq__(self, other): return True\ndef {f}(x): return A(0)",
    "exit": "import os\ndef {f}(x): os._exit(0)",
    "exit at once": "import os\nos._exit(0)",
    "sys.exit": "import sys\ndef {f}(x): sys.exit(0)",
    "patched assert": "import builtins\nbuiltins.AssertionError = Exception\ndef {f}(x): return 0",
    "reads the frames": (
        "import sys\ndef {f}(x):\n    frame = sys._getframe()\n    while frame.f_back: frame = frame.f_back\n"
        "    frame.f_globals['check'] = lambda f: None\n    frame.f_globals['{f}'] = lambda x: 2 * x\n    return 0"
    ),
    "looks for the data": (
        "import pathlib\ndef {f}(x):\n    for p in pathlib.Path('/').glob('*/HumanEval*'): return eval(p.read_text())"
    ),
    "hangs": "def {f}(x):\n    while True: pass",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheating_pays_nothing(env, name, cheat, say):
    function = SOLUTIONS[name].split("(")[0].removeprefix("def ")
    _, reward, _, _, info = say(env, f"<answer>{CHEATS[cheat].replace('{f}', function)}</answer>")
    assert reward == 0 and not info["is_success"] and "fault" not in info


def test_a_program_that_hangs_delays_its_own_episode_only():
    envs = gym.make_vec("AgentR1/HumanEval-v0", num_envs=2)
    envs.reset(seed=[1, 1], options={"task_index": 0})
    answers = [f"<answer>def times_2(x):\n    {body}</answer>" for body in ("while True: pass", "return x + x")]
    tokenizer = envs.envs[0].tokenizer
    envs.send([np.array(tokenizer.encode(answer), np.int32) for answer in answers], [0, 1])
    ids, _, rewards, terminated, _, _ = envs.recv(1)
    assert (ids.tolist(), rewards.tolist(), terminated.tolist()) == ([1], [1.0], [True])
    ids, _, rewards, *_ = envs.recv(1)
    assert (ids.tolist(), rewards.tolist()) == ([0], [0.0])
    envs.close()


def test_a_sandbox_that_breaks_is_a_fault_and_raises_nothing(env, say, monkeypatch):
    def broken(self):
        raise SandboxError("no more processes")

    monkeypatch.setattr(type(env._judge_sandbox), "session", broken)
    env.fault_deadline = 0
    _, reward, terminated, truncated, info = say(env, f"<answer>{env.task.answers[0]}</answer>")
    assert (reward, terminated, truncated, info["reward_terms"]) == (0.0, False, True, {})
    assert info["fault"] == "judge: SandboxError: no more processes" and not info["is_success"]


def test_a_sandbox_that_is_not_permitted_is_a_fault_of_run_tests(env, say, monkeypatch):
    """A program is no path: what the machine doesn't find or allow is its own doing."""

    def forbidden(self, code):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(type(env._judge_sandbox), "start", forbidden)
    env.fault_deadline = 0
    info = say(env, run_tests(env, env.task.answers[0]))[4]
    assert info["fault"] == "tool run_tests: ToolFault: PermissionError: [Errno 1] Operation not permitted"


def test_a_sandbox_that_is_not_permitted_is_a_fault_of_the_judge(env, say, monkeypatch):
    def forbidden(self, code):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(type(env._judge_sandbox), "start", forbidden)
    env.fault_deadline = 0
    info = say(env, f"<answer>{env.task.answers[0]}</answer>")[4]
    assert info["fault"] == "judge: ToolFault: PermissionError: [Errno 1] Operation not permitted"


def test_waiting_for_other_programs_is_no_fault(say, monkeypatch):
    """A program waits for a processor for longer than it may run; a judge holds one too."""
    env = gym.make("AgentR1/HumanEval-v0").unwrapped
    env.reset(options={"task_index": 0})
    lanes, held = threading.BoundedSemaphore(1), []
    check = programs._check_once
    monkeypatch.setattr(programs, "_lanes", lanes)
    monkeypatch.setattr(
        programs, "_check_once", lambda *a, **k: (held.append(not lanes.acquire(timeout=0)), check(*a, **k))[1]
    )
    monkeypatch.setattr(env.tools["run_tests"], "timeout", 2.0)
    env.fault_deadline = 0
    lanes.acquire()
    threading.Timer(2.1, lanes.release).start()
    info = say(env, run_tests(env, TWICE))[4]
    assert "fault" not in info and info["tool_calls"][0]["ok"]
    assert say(env, f"<answer>{TWICE}</answer>")[1] == 1
    assert held == [True, True] and lanes.acquire(timeout=0)


@pytest.mark.parametrize(
    ("body", "runs"),
    [("raise ValueError('Died: me')", 1), ("raise type('Died', (Exception,), {})('me')", 1), ("os._exit(0)", 2)],
)
def test_only_a_process_that_died_is_run_again(env, name, say, monkeypatch, body, runs):
    """What a program says of itself is no reason."""
    begun = []
    check = programs._check_once
    monkeypatch.setattr(programs, "_check_once", lambda *arguments: (begun.append(1), check(*arguments))[1])
    function = SOLUTIONS[name].split("(")[0].removeprefix("def ")
    assert say(env, f"<answer>import os\ndef {function}(x): {body}</answer>")[1] == 0
    assert len(begun) == runs


def test_a_judge_that_is_killed_from_outside_is_asked_again(env, say, monkeypatch):
    """The first process that runs a program dies, as if the machine had run out of memory."""
    start, victims = type(env._judge_sandbox).start, [1]

    def killed(self, code):
        guest = start(self, code)
        if victims:
            victims.pop()
            guest.close.peek()[2][2]()  # what ends its processes
        return guest

    monkeypatch.setattr(type(env._judge_sandbox), "start", killed)
    _, reward, *_ = say(env, f"<answer>{env.task.answers[0]}</answer>")
    assert reward == 1.0 and not victims


@pytest.mark.parametrize("error", [SandboxError("the fork server has ended"), OSError(24, "Too many open files")])
def test_a_candidate_sandbox_that_is_lost_during_a_test_is_a_fault(env, say, monkeypatch, error):
    """The program is right, and its process can't be asked: not a test that fails."""
    session = type(env._judge_sandbox.session())
    call, lost = session.call, [1]

    def lose(self, *arguments):
        if lost:
            lost.pop()
            raise error
        return call(self, *arguments)

    monkeypatch.setattr(session, "call", lose)
    env.fault_deadline = 0
    _, reward, terminated, truncated, info = say(env, f"<answer>{env.task.answers[0]}</answer>")
    assert (reward, terminated, truncated) == (0.0, False, True)
    assert info["fault"] == f"judge: {type(error).__name__}: {error}"
    env.fault_deadline = 10
    env.reset(options={"task_index": 0})
    lost.append(1)
    assert say(env, f"<answer>{env.task.answers[0]}</answer>")[1] == 1 and not lost  # tried again


# ---------------------------------------------------------------------- turns


def test_debugging_over_turns(env, name, say):
    solution = SOLUTIONS[name]
    broken, wrong = solution + ")", solution.replace("return", "return 1 +")
    steps = [say(env, run_tests(env, code)) for code in (broken, wrong, solution)]
    terms = [step[4]["reward_terms"] for step in steps]
    assert terms == [
        {"process/failed_call": -0.05},
        {"process/error_removed": 0.05},
        {"process/tests_passed": pytest.approx(0.3)},
    ]
    shown = [message["content"] for message in env.messages if message["role"] == "tool"]
    assert "SyntaxError" in shown[0] and shown[1].startswith("0 of 1 tests pass.\nFailed: assert ")
    assert shown[2] == "1 of 1 tests pass."
    info = say(env, f"<answer>{solution}</answer>")[4]
    assert info["is_success"] and info["metrics"]["shown_tests_passed"] == 1.0


def test_a_failed_test_says_what_came_out(say):
    env = gym.make("AgentR1/HumanEval-v0").unwrapped
    env.reset(options={"task_index": 0})
    say(env, run_tests(env, "def times_2(x):\n    return x"))
    assert "assert times_2(2) == 4\n  times_2(2) is 2" in env.messages[-1]["content"]
    say(env, run_tests(env, "def times_2(x):\n    return x['a']"))
    assert "TypeError" in env.messages[-1]["content"]


def test_passing_the_shown_tests_is_not_enough(say):
    env = gym.make("AgentR1/HumanEval-v0").unwrapped
    env.reset(options={"task_index": 0})
    cheat = "def times_2(x):\n    return 4"
    assert say(env, run_tests(env, cheat))[4]["reward_terms"] == {}
    info = say(env, f"<answer>{cheat}</answer>")[4]
    assert not info["is_success"] and info["metrics"] == {"em": 0.0, "shown_tests_passed": 1.0}


@pytest.mark.parametrize("shown_tests", [1, 2, 3])
def test_the_lookup_table_is_paid_only_where_no_test_is_hidden(shown_tests):
    env = gym.make("AgentR1/MBPP-v0", shown_tests=shown_tests).unwrapped
    played = play(env, 0, shortcuts(env)["lookup_table"])
    assert played.success == (shown_tests == 3) and played.process == pytest.approx(0.3 * (shown_tests == 3))
    assert played.infos[-1]["metrics"]["shown_tests_passed"] == 1
    assert play(env, 0, expert).process == pytest.approx(0.3)


def test_a_lookup_table_of_many_arguments_and_of_none():
    env = gym.make("AgentR1/HumanEval-v0").unwrapped
    for docstring, given, result in ((">>> f(2, [1], x='a')\n    4", "2, [1]", 4), ("Nothing.", "2", None)):
        text = f'def f(*a, **k):\n    """{docstring}\n    """\n'
        env.programs = [Program("H/0", text, "f", "pass", "", ("def check(f):\n    assert f(3) == 1",))]
        humaneval_task.cache_clear()
        env.reset(options={"task_index": 0})
        names = {}
        exec(env.shortcut_lookup_table(None)[-1].removeprefix("<answer>").removesuffix("</answer>"), names)
        assert eval(f"f({given})", names) == result


def test_some_of_the_hidden_tests_pay_their_share(say):
    env = gym.make("AgentR1/MBPP-v0").unwrapped
    env.reset(options={"task_index": 0})
    tests = (
        "assert add_601(0) == 601",
        "assert add_601(1) == 602",
        "assert add_601(0) == 601",
        "assert add_601(9) == 610",
    )
    env.programs = [replace(env.programs[0], tests=tests)]
    env.reset(options={"task_index": 0})
    half = "def add_601(x):\n    return 601 if x < 1 else 610"
    for code, pays in ((half, 0.15), (half + "\n", 0), (half + "\nx = 1", 0), (SOLUTIONS["MBPP"], 0.15)):
        terms = say(env, run_tests(env, code))[4]["reward_terms"]
        assert terms.get("process/tests_passed", 0) == pytest.approx(pays)
        assert env.messages[-1]["content"] == "1 of 1 tests pass."


CHECK = """
METADATA = {}
def check(candidate):
    assert True, "This prints if this assert fails"
    assert candidate(2) == 4, "shown"
    assert candidate( 3 ) == 6
    few = [4, 5]
    for one in few:
        assert candidate(one) == 2 * one
    import math
    assert math.isclose(candidate(2.5), 5)
    assert 14 == candidate(few[0] + 3)
    assert candidate('a') == "aa"
"""


def test_the_checks_of_humaneval_are_tests_of_their_own(say):
    env = gym.make("AgentR1/HumanEval-v0").unwrapped
    text = 'def times_2(x):\n    """Double.\n    >>> times_2(2)\n    4\n    times_2( "a" ) is aa.\n    """\n'
    env.programs = [replace(env.programs[0], text=text, tests=(CHECK,))]
    humaneval_task.cache_clear()
    env.reset(options={"task_index": 0})
    assert len(env.task.metadata["progress"].tests) == 4
    programs = ("return 6", "return 2 * x if x < 5 else 8", "import math\n    return 2 * x", "return x + x")
    paid = [say(env, run_tests(env, code))[4]["reward_terms"].get("process/tests_passed", 0) for code in programs]
    assert paid == pytest.approx([0.075, 0.075, 0.15, 0])
    humaneval_task.cache_clear()


@pytest.mark.parametrize(
    "check", ["def check(f):\n    if f(3) == 6: return\n    1 / 0", "check = lambda f: {6: 1}[f(3)]"]
)
def test_a_check_that_cannot_be_parted_is_one_test(say, check):
    env = gym.make("AgentR1/HumanEval-v0").unwrapped
    env.programs = [replace(env.programs[0], tests=(check,))]
    env.reset(options={"task_index": 0})
    assert say(env, run_tests(env, "return 4"))[4]["reward_terms"] == {}
    assert say(env, run_tests(env, TWICE))[4]["reward_terms"] == {"process/tests_passed": pytest.approx(0.3)}


def test_the_tool_alone_needs_the_shown_tests_only():
    tool = programs.RunTests(judge_sandbox("auto"))
    tool.tests = Suite(("f",), "", ("assert f(1) == 2", "assert f(2) == 5"))
    result = tool.execute({"code": "def f(x): return 2 * x"})
    assert result.content == "1 of 2 tests pass.\nFailed: assert f(2) == 5\n  f(2) is 4"
    assert result.data == {"passed": [0], "progress": [0], "error": None}


def test_tests_that_are_all_in_the_prompt_pay(say):
    env = gym.make("AgentR1/HumanEval-v0").unwrapped
    env.programs = [replace(env.programs[0], tests=("def check(f):\n    assert f(2) == 4\n",))]
    env.reset(options={"task_index": 0})
    assert env.task.metadata["progress"] == env.task.metadata["shown"]
    assert say(env, run_tests(env, "return 4"))[4]["reward_terms"] == {"process/tests_passed": pytest.approx(0.3)}


MAIN = """
if __name__ == '__main__':
    {body}
"""


@pytest.mark.parametrize(
    "body", ["int(input())", "raise SystemExit(1)", "exit()", "import sys; sys.exit(0)", "quit(3)"]
)
def test_a_main_block_does_not_run(env, name, say, body):
    program = SOLUTIONS[name] + MAIN.format(body=body)
    assert say(env, run_tests(env, program))[4]["reward_terms"] == {"process/tests_passed": pytest.approx(0.3)}
    assert say(env, f"<answer>{program}</answer>")[4]["is_success"]


def test_what_runs_outside_of_a_main_block_still_fails(env, name, say):
    for last in ("int(input())", "raise SystemExit", "if __name__ == 'builtins': exit()", "__name__.x"):
        env.reset(options={"task_index": 0})
        assert not say(env, f"<answer>{SOLUTIONS[name]}\n{last}</answer>")[4]["is_success"]


@pytest.mark.parametrize(
    "form", ["```Python\n{}\n```", "~~~\n{}", "{}\n```", "So:\r\n```py3 x=1\r\n{}\r\n```\r\nDone."]
)
def test_run_tests_reads_code_as_an_answer_is_read(env, name, say, form):
    code = "from __future__ import annotations\n" + SOLUTIONS[name]
    assert say(env, run_tests(env, form.format(code)))[4]["reward_terms"]["process/tests_passed"] > 0
    assert say(env, run_tests(env, form.format("1 +")))[4]["reward_terms"] == {"process/failed_call": -0.05}
    assert say(env, f"<answer>{form.format(code)}</answer>")[4]["is_success"]


def test_a_prompt_without_tests(say):
    env = gym.make("AgentR1/HumanEval-v0").unwrapped
    env.programs = [replace(env.programs[0], text="def f(x):\n    # Nothing is said about f.\n")]
    env.reset(options={"task_index": 0})
    info = say(env, run_tests(env, "return x"))[4]
    assert env.messages[-1]["content"] == "The program runs. The prompt has no tests." and not info["reward_terms"]


def test_every_test_of_the_prompt_is_reported(say):
    env = gym.make("AgentR1/MBPP-v0", shown_tests=3).unwrapped
    env.reset(options={"task_index": 0})
    say(env, run_tests(env, "def add_601(x):\n    return 602"))
    assert env.messages[-1]["content"].startswith("1 of 3 tests pass.\nFailed: assert add_601(0) == 601\n")
    say(env, run_tests(env, "def add_601(x):\n    while True: pass"))
    assert env.messages[-1]["content"].startswith("0 of 3 tests pass.")  # the first is run, the others count with it


def test_tests_are_paid_once(env, name, say):
    solution = SOLUTIONS[name]
    say(env, run_tests(env, solution))
    assert say(env, run_tests(env, solution + "\n"))[4]["reward_terms"] == {}


def test_the_hidden_tests_are_nowhere_before_the_end(env, name, say):
    hidden = {"HumanEval": "candidate(3) == 6", "MBPP": "add_601(2) == 603"}[name]
    assert hidden in str(env.task.metadata["hidden"])
    search = "import gc, sys\nstr(globals()) + str(gc.get_objects())[:4000] + str(sys.modules.keys())"
    infos = [say(env, text)[4] for text in (run_tests(env, "def f(): pass"), run_tests(env, search))]
    infos.append(say(env, env.dialect.tool_call("python", {"code": search}))[4])
    assert hidden.replace("candidate", "times_2") in str(env.task.metadata["progress"])
    told = json.dumps([env.messages, infos, env.tokenizer.decode(env.episode.buffer[: env.episode.length].tolist())])
    for test in (hidden, hidden.replace("candidate", "times_2")):
        assert test not in told and "def check" not in told
        assert test.encode() not in pickle.dumps(env.get_state())


def test_a_snapshot_branches_an_episode(env, name, say):
    say(env, env.dialect.tool_call("python", {"code": SOLUTIONS[name]}))
    say(env, run_tests(env, "1 +"))
    state = env.get_state()
    say(env, "<answer>pass</answer>")
    for _ in range(2):
        env.set_state(state)
        assert "process/error_removed" in say(env, run_tests(env, SOLUTIONS[name]))[4]["reward_terms"]
        call = env.dialect.tool_call("python", {"code": f"{SOLUTIONS[name].split('(')[0].removeprefix('def ')}(0)"})
        assert say(env, call)[4]["tool_calls"][0]["ok"]


# ---------------------------------------------------------------------- rows


def test_objects_and_types_run_in_one_process():
    """Rows like MBPP 367, 533, 601 and 927."""
    pair = mbpp("class P:\n  def __init__(s, a): s.a = a\ndef f(x): return x.a", ["assert f(P(3)) == 3"])
    node = mbpp("class P: pass\ndef f(x): return 1", ["assert f(root) == 1"], setup="root = P()")
    kind = mbpp("def f(x, t): return isinstance(x, t)", ["assert f(1, int) == True"])
    plain = mbpp("def f(x): return sorted(x)", ["assert f(list(range(3))) == [0, 1, 2]"])
    for task, one_process in ((pair, True), (node, True), (kind, True), (plain, False)):
        assert task.metadata["hidden"].one_process == task.metadata["shown"].one_process == one_process
        assert passes(task, task.answers[0])
        assert not passes(task, "class P:\n  def __init__(s, a=0): pass\ndef f(*a): return -1")


def test_a_program_that_only_ends_iterations_passes_no_test():
    for test in ("assert all(map(f, [1, 2]))", "for x, y in zip(map(f, [1, 2]), [2, 4]): assert x == y"):
        tests = Suite(("f",), "", (test,))
        assert check_program(judge_sandbox("auto"), "def f(x): return 2 * x", tests).passed
        assert not check_program(judge_sandbox("auto"), "def f(x): raise StopIteration", tests).passed


def test_tests_have_the_imports_of_the_official_solution():
    task = mbpp("import math\ndef f(x): return x / 3", ["assert math.isclose(f(1), 0.333, rel_tol=0.01)"])
    assert passes(task, "def f(x): return x / 3")


def test_results_that_are_containers_cross():
    task = mbpp("def f(x): return {1: (x, {2}), 'a': [b'c', 1.5, None, True]}", ["assert f(1)[1] == (1, {2})"])
    assert passes(task, task.answers[0])
    assert not passes(task, "def f(x): return {1: [x, {2}]}")  # a list is no tuple


def test_helpers_of_the_prompt_are_there_for_the_test():
    prompt = 'def helper(x):\n    return x + 1\n\n\ndef f(x):\n    """Undo helper."""\n'
    test = "def check(candidate):\n    assert candidate(helper(3)) == 3\n"
    task = humaneval_task(Program("HumanEval/0", prompt, "f", "    return x - 1\n", "", (test,)))
    assert passes(task, "return x - 1") and passes(task, "def f(x): return x - 1") and not passes(task, "return x")
    assert passes(task, "def helper(x): return 0\ndef f(x): return x - 1")  # the test has the official one


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        (">>> f(2)\n    4", ["assert f(2) == 4"]),
        (">>> f(2)\n    4\n    >>> f([1, 2])\n    [2, 4]", ["assert f(2) == 4", "assert f([1, 2]) == [2, 4]"]),
        ("f(2) == 4, of course", []),
        ("For example: f(2) => 4\n    f('a') should return 'aa'.", ["assert f(2) == 4", "assert f('a') == 'aa'"]),
        ("f(2) ➞ 4", ["assert f(2) == 4"]),
        ("f(x) == y\n    f(2) is 4", []),
    ],
)
def test_the_examples_of_a_docstring_are_the_tests_of_the_prompt(docstring, expected):
    program = Program("HumanEval/0", f'def f(x):\n    """Double.\n    {docstring}\n    """\n', "f", "pass", "", ("",))
    assert list(humaneval_task(program).metadata["shown"].tests) == expected


def test_the_splits_of_mbpp_are_ranges_of_ids():
    numbers = {}
    for split in ("prompt", "test", "validation", "train"):
        env = gym.make("AgentR1/MBPP-v0", split=split).unwrapped
        numbers[split] = [env.make_task(index).id for index in range(env.num_tasks)]
    assert numbers == {
        "prompt": ["MBPP/1", "MBPP/2"],
        "test": ["MBPP/11", "MBPP/12"],
        "validation": ["MBPP/511", "MBPP/512"],
        "train": ["MBPP/601", "MBPP/602"],
    }


def test_more_tests_in_the_prompt():
    env = gym.make("AgentR1/MBPP-v0", shown_tests=2).unwrapped
    env.reset(options={"task_index": 0})
    assert env.task.question.count("assert ") == 2 and len(env.task.metadata["hidden"].tests) == 3
    with pytest.raises(ArgumentError, match="shown_tests must be at least 1"):
        gym.make("AgentR1/MBPP-v0", shown_tests=0)


@pytest.mark.parametrize("tools", ["python", (), ("calculator",)])
def test_other_tools_are_refused(tools):
    with pytest.raises(ArgumentError, match="a tuple of 'python' or 'run_tests' or both"):
        gym.make("AgentR1/MBPP-v0", tools=tools)


@pytest.mark.parametrize(
    ("name", "row", "field"),
    [
        ("humaneval", {"task_id": "HumanEval/0", "prompt": "def f():", "canonical_solution": "  pass"}, "entry_point"),
        ("mbpp", {"task_id": "601", "text": "x"}, "task_id"),
        ("mbpp", {"task_id": 601, "text": "x", "code": "y", "test_list": []}, "test_list"),
    ],
)
def test_a_row_in_another_format_is_named(tmp_path, name, row, field):
    file = {"humaneval": "HumanEval.jsonl", "mbpp": "mbpp.jsonl"}[name]
    (tmp_path / file).write_text(json.dumps(row))
    with pytest.raises(DataFormatError, match=rf"row 0 .*field '{field}'"):
        load_questions(name, {"humaneval": "test", "mbpp": "train"}[name], tmp_path)


@pytest.mark.parametrize(
    ("tests", "found"),
    [
        (["assert f(13, 1) == 13", "assert f(3, 2) == 3"], ["first argument"]),
        (["assert f(1) == [2]", "assert f(5) == [2]"], ["result of the shown test"]),
        (["assert f(1) == 2", "assert f(2) == 3"], []),
    ],
)
def test_trivial_programs_that_pass_are_found(tests, found):
    task = mbpp("def f(x, y=0):\n    pass", tests)
    assert math_and_code_data.floors(judge_sandbox("auto"), task) == found
