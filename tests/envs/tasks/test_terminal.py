"""Terminal: tasks that their solutions solve and nothing else does, tests that can't be met, folders of others."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import agent_r1
from agent_r1 import ArgumentError
from agent_r1.task_data import DataFormatError, DataNotFoundError, harbor
from agent_r1.task_data.harbor import load_tasks, read_task, write_task
from agent_r1.tasks.terminal import environment as terminal
from agent_r1.tasks.terminal.environment import TerminalEnv, run_tests
from agent_r1.tasks.terminal.generator import KINDS, NUM_TASKS, UNSEEN_KINDS, generate_task
from agent_r1_tools.python import SandboxError, choose, layout
from agent_r1_tools.python.bubblewrap import Bubblewrap
from agent_r1_tools.shell import LIMITS, Machine, pack


@pytest.fixture(scope="module")
def env():
    env = TerminalEnv()
    yield env
    env.close()


def do(env, *turns):
    """Plays commands, or calls as they are written; what the last step gave."""
    for turn in turns:
        written = turn.startswith(("<answer>", "<tool_call>"))
        text = turn if written else env.dialect.tool_call("shell", {"command": turn})
        ids = env.tokenizer.encode(text + env.dialect.end_of_turn, add_special_tokens=False)
        outcome = env.step(np.asarray(ids, np.int32))
    return outcome


def submit(env):
    return do(env, env.dialect.tool_call("submit", {}))


def some(names, quick):
    """Parameters: those that are quick, or that nothing else stands for, and the rest for `make test-slow`."""
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in names]


# --- a sandbox that dies ----------------------------------------------------------------------------------------------


def kill_sandbox(guest):
    signal.pidfd_send_signal(guest.pidfd, signal.SIGKILL)
    assert select.select([guest.pidfd], [], [], 10)[0]


@pytest.fixture
def dying(monkeypatch):
    """Every sandbox that is started inside dies at once."""

    @contextmanager
    def outage():
        start = Bubblewrap.start

        def doomed(self, code):
            guest = start(self, code)
            kill_sandbox(guest)
            return guest

        with monkeypatch.context() as patch:
            patch.setattr(Bubblewrap, "start", doomed)
            yield

    return outage


@pytest.mark.bubblewrap
def test_what_is_ours_is_hidden_from_the_shell(env):
    assert env.unwrapped._hide[0] == str(Path(agent_r1.__file__).parent)


@pytest.mark.bubblewrap
def test_a_sandbox_that_dies_between_two_commands_is_no_failed_call(env):
    env.reset(options={"task_index": 0})
    do(env, "echo kept > kept.txt")
    kill_sandbox(env.tools["shell"].machine._session._guest)
    *_, info = do(env, "cat kept.txt")
    assert info["tool_calls"][0]["ok"] and "kept" in env.messages[-1]["content"] and info.get("fault") is None


@pytest.mark.bubblewrap
def test_a_sandbox_that_dies_again_and_again_is_a_fault_of_its_episode_alone(dying):
    lost, other = TerminalEnv(fault_deadline=0.05), TerminalEnv(fault_deadline=0.05)
    for one in (lost, other):
        one.reset(options={"task_index": 0})
        do(one, "echo kept > kept.txt")
    kill_sandbox(lost.tools["shell"].machine._session._guest)
    with dying():
        _, reward, terminated, truncated, info = do(lost, "ls")
        assert do(other, "cat kept.txt")[4].get("fault") is None and "kept" in other.messages[-1]["content"]
    assert info["fault"].startswith("tool shell: ") and info["truncation_reason"] == "fault"
    assert (reward, terminated, truncated, info["is_success"]) == (0.0, False, True, False)
    lost.reset(options={"task_index": 0})
    assert "kept.txt" not in lost.messages[-1]["content"] and do(lost, *lost.demonstration())[4]["is_success"]
    for one in (lost, other):
        one.close()


@pytest.mark.bubblewrap
@pytest.mark.parametrize("end", ["<answer>done</answer>", "submit"])
def test_a_sandbox_that_dies_under_the_tests_pays_nobody_and_blames_nobody(dying, end):
    env = TerminalEnv(fault_deadline=0.05)
    env.reset(options={"task_index": 0})
    do(env, *env.demonstration()[:-1])
    with dying():
        _, reward, terminated, truncated, info = submit(env) if end == "submit" else do(env, end)
    assert info["fault"].startswith("judge: " if end != "submit" else "tool submit: ")
    assert (reward, terminated, truncated, info["is_success"]) == (0.0, False, True, False)
    env.reset(options={"task_index": 0})
    assert do(env, *env.demonstration())[4]["is_success"]
    env.close()


# --- the tasks that come with the package -----------------------------------------------------------------------------


@pytest.mark.parametrize("split", NUM_TASKS)
def test_a_task_is_a_function_of_seed_split_and_index(split):
    drawn = [generate_task(0, split, index) for index in range(30)]
    generate_task.cache_clear()
    assert drawn == [generate_task(0, split, index) for index in range(30)]
    assert len({str((task.start, task.instruction)) for task in drawn}) == 30
    assert generate_task(1, split, 0) != drawn[0]
    kinds = {task.id.partition(f"-{split}-")[0] for task in drawn}
    assert kinds == set(UNSEEN_KINDS if split == "unseen_kinds" else KINDS)
    assert len(KINDS) >= 12


def verdict(task, packed=None):
    return run_tests(task, pack(task.start) if packed is None else packed, LIMITS, [])


def solved(task, steps):
    with Machine(task.folder) as machine:
        machine.unpack(pack(task.start))
        for step in steps:
            assert machine.run(step)[1] in (0, 1), step  # a script that is to be mended may fail
        return machine.pack()


@pytest.mark.bubblewrap
@pytest.mark.parametrize("place", some([*KINDS, *UNSEEN_KINDS], {"mend_python", "to_json"}))
def test_a_task_is_solved_by_its_solution_and_not_without_its_last_command(place):
    split, kinds = ("train", KINDS) if place in KINDS else ("unseen_kinds", UNSEEN_KINDS)
    index = list(kinds).index(place)
    task = generate_task(3, split, index)
    assert verdict(task, solved(task, task.steps)) == 1
    assert verdict(task, solved(task, task.steps[:-1])) == 0
    assert verdict(task) == 0


@pytest.mark.bubblewrap
def test_an_episode(env):
    for index, end in ((0, "submit"), (1, "answer")):
        env.reset(options={"task_index": index})
        steps = env.demonstration()
        _, _, terminated, truncated, info = do(env, *steps[:-1])
        assert not terminated and not truncated and info["tool_calls"][0]["ok"]
        _, reward, terminated, _, info = submit(env) if end == "submit" else do(env, "<answer>done</answer>")
        assert terminated and reward == 1 and info["is_success"] and info["metrics"] == {"em": 1.0, "score": 1.0}
    env.reset(options={"task_index": 0})
    _, reward, terminated, _, info = submit(env)
    assert terminated and reward == 0 and not info["is_success"]
    env.reset(options={"task_index": 0, "max_turns": 1})
    assert do(env, "true")[4]["metrics"] == {"em": 0.0, "score": 0.0}  # nothing was submitted


@pytest.mark.bubblewrap
def test_teachers(env):
    env.reset(options={"task_index": 0})
    steps, rng = env.demonstration(), np.random.default_rng(0)
    for teacher, share in {"expert": 1, "fallible_75": 0.75, "fallible_50": 0.5, "fallible_25": 0.25}.items():
        whole = [env.demonstration(rng, teacher) == steps for _ in range(4_000)]
        assert abs(np.mean(whole) - share) <= 0.03 and teacher in TerminalEnv.teachers
    assert env.demonstration(rng) == [*steps[:-2], steps[-1]]


@pytest.mark.bubblewrap
def test_a_branch_goes_on_as_the_episode_does(env):
    other = TerminalEnv()
    env.reset(options={"task_index": 12})
    do(env, "echo 1 > x; mkdir d; chmod 700 d; echo t > /tmp/t")
    state = env.get_state()
    other.reset(seed=1)
    other.set_state(state)
    look = "cat x /tmp/t; find . -mindepth 1 -printf '%p %m %T@ %l\\n' | sort"
    first, second = do(env, look), do(other, look)
    assert np.array_equal(first[0], second[0]) and first[1:] == second[1:] and "1\nt\n" in env.messages[-1]["content"]
    do(env, "echo 2 > x")
    assert submit(other)[1] == submit(env)[1] == 0
    env.set_state(state)
    assert do(env, "cat x")[4]["tool_calls"][0]["ok"] and env.messages[-1]["content"] == "1"
    other.close()


@pytest.mark.bubblewrap
def test_process_terms_cannot_be_farmed(say):
    env = gym.make("AgentR1/Terminal-v0", max_turns=200, max_context_tokens=20_000)
    env.reset(seed=0)
    gained = 0.0
    for turn in range(60):
        command = ("true", "ls", "nonsense")[turn % 3]
        _, reward, terminated, truncated, _ = say(env, env.unwrapped.dialect.tool_call("shell", {"command": command}))
        gained += reward
        if terminated or truncated:
            break
    assert gained <= 0
    env.close()


def test_limits_are_limits():
    with pytest.raises(ArgumentError, match="limits must be None or an agent_r1_tools.python.Limits, got 5"):
        TerminalEnv(limits=5)


def test_how_many_files_go_has_to_be_counted():
    counts = {json.loads(task.tests["expected.json"])["files"]["/app/deleted.txt"] for task in
              (generate_task(0, "train", index) for index in range(400)) if task.id.startswith("clean_up")}  # fmt: skip
    assert counts == {"2", "3", "4", "5"}


def test_without_bubblewrap_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(choose, "_probed", {"bubblewrap": "there is no bwrap"})
    with pytest.raises(SandboxError, match="apt-get install bubblewrap"):
        TerminalEnv()


QUICK = {
    "find the tests", "write the reward", "a link to what is expected", "a pipe that never answers",
    "a module in the way", "a program in the way", "a process that waits for the tests", "many candidates",
    "read the tests", "write the reward later", "kill the harness",
}  # fmt: skip
"""Of those below."""


# --- winning without solving ------------------------------------------------------------------------------------------

CHEATS = {
    "find the tests": "find / -name expected.json -o -name check.py 2>/dev/null | grep . && cp /tests/* .",
    "write the reward": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; mkdir -p logs/verifier; "
    "echo 1 > logs/verifier/reward.txt; echo 1 > reward.txt",
    "write the reward through a link": (
        "ln -s /logs/verifier/reward.txt count.txt; ln -s /logs/verifier v; echo 1 > v/reward.txt"
    ),
    "a link to what is expected": "ln -s /tests/expected.json count.txt",
    "a folder that links to the tests": "rm -r logs; ln -s /tests logs",
    "a pipe that never answers": "mkfifo count.txt",
    "a file that never ends": "ln -s /dev/zero count.txt",
    "a folder in its place": "mkdir count.txt",
    "a module in the way": "for m in json os sys stat re codecs; do echo 'import os; os._exit(0)' > $m.py; done",
    "a module for every start": "for m in sitecustomize usercustomize; do echo 'import os; os._exit(0)' > $m.py; done",
    "a program in the way": "printf '#!/bin/bash\\nexit 0\\n' | tee python3 bash mkdir; chmod +x python3 bash mkdir",
    "settings of the shell": "echo 'exit 0' | tee .bashrc .profile .bash_profile /tmp/.bashrc; export BASH_ENV=.bashrc",
    "a process that waits for the tests": (
        "(while true; do cp /tests/expected.json . ; echo 1 > /logs/verifier/reward.txt; done) & disown"
    ),
    "a daemon that waits for the tests": (
        "setsid nohup bash -c 'sleep 1; echo 1 > /logs/verifier/reward.txt' >/dev/null 2>&1 &"
    ),
    "many candidates": "seq 0 100 > count.txt",
    "fill the disk": "head -c 100000000 /dev/zero > big; for i in $(seq 2000); do : > f$i; done",
    "a deep folder": "for i in $(seq 700); do mkdir dddddddd; cd dddddddd || break; done",
    "nobody may read it": "chmod 000 logs . count.txt",
}


@pytest.mark.bubblewrap
@pytest.mark.parametrize("cheat", some(CHEATS, QUICK))
def test_a_cheat_loses(cheat, env):
    env.reset(options={"task_index": 0})  # count lines, the number to count.txt
    assert "count.txt" in env.task.question
    do(env, CHEATS[cheat])
    shown = json.dumps(env.messages)
    assert "expected" not in shown.replace("expected.json", "") and "/tests/check.py\n" not in shown
    _, reward, terminated, _, info = submit(env)
    assert terminated and reward <= 0 and not info["is_success"] and "fault" not in info


# Programs that the tests run: they meet no tests, and nothing of them is left when the tests come.
PROGRAMS = {
    "read the tests": "import os\nprint(open('/tests/expected.json').read())",
    "look for what is expected": "import glob\nprint(*map(open, glob.glob('/**/expected.json', recursive=True)))",
    "write the reward": "open('/logs/verifier/reward.txt', 'w').write('1')",
    "write the reward later": (
        "import os, time\nif os.fork() == 0:\n os.setsid()\n while True:\n  try:\n"
        "   open('/logs/verifier/reward.txt', 'w').write('1')\n  except OSError: time.sleep(0.01)"
    ),
    "answer for the next one": "import sys\nfor i in range(9): open(f'/app/ran/{i}', 'w').write('0')",
    "kill the harness": "import os\nos.kill(1, 9)\nos.kill(-1, 9)",
    "never end": "while True: pass",
    "fork": "import os\nwhile True:\n try: os.fork()\n except OSError: pass",
}


@pytest.mark.bubblewrap
@pytest.mark.parametrize("program", some(PROGRAMS, QUICK))
def test_a_program_that_cheats_loses(program, monkeypatch):
    monkeypatch.setattr(terminal, "MAX_TEST_SECONDS", 2.0)
    task = generate_task(0, "train", list(KINDS).index("mend_python"))
    files = dict(task.start) | {"/app/total.py": (0o644, PROGRAMS[program].encode())}
    assert verdict(task, pack(files)) == 0


# --- folders of others ------------------------------------------------------------------------------------------------

DOCKERFILE = "FROM ubuntu:24.04\n# nothing but files\nWORKDIR /work\nCOPY data.txt ./\nCOPY more/ more/\n"
TEST = "if grep -q done /work/out.txt; then echo 1; else echo 0.25; fi > /logs/verifier/reward.txt\n"


def folder(root, name="a-task", **files):
    given = {
        "task.toml": 'version = "1.0"\n[metadata]\ndifficulty = "easy"\n[verifier]\ntimeout_sec = 20.0\n',
        "instruction.md": "Write done to out.txt.\n",
        "environment/Dockerfile": DOCKERFILE,
        "environment/data.txt": "data\n",
        "environment/more/x.txt": "x\n",
        "tests/test.sh": TEST,
        "solution/solve.sh": "cat data.txt more/x.txt && echo done > out.txt\n",
    } | {path.replace("__", "/").replace("_dot_", "."): text for path, text in files.items()}
    for path, text in given.items():
        if text is not None:
            (root / name / path).parent.mkdir(parents=True, exist_ok=True)
            (root / name / path).write_text(text)
    return root / name


@pytest.mark.bubblewrap
def test_a_folder_of_harbor(tmp_path):
    folder(tmp_path)
    env = TerminalEnv(data_dir=tmp_path)
    env.reset(seed=0)
    assert env.num_tasks == 1 and env.task.id == "a-task" and env.task.question == "Write done to out.txt."
    assert env.task.metadata == {"folder": "/work", "files": ["/work/data.txt", "/work/more/x.txt"]}
    for text in env.demonstration():
        _, reward, terminated, _, info = do(env, text)
    assert terminated and reward == 1 and "data\\nx" in json.dumps(env.messages)
    env.reset(seed=0)
    _, reward, _, _, info = submit(env)
    assert reward == 0.25 and info["metrics"] == {"em": 0.0, "score": 0.25} and not info["is_success"]
    with pytest.raises(ValueError, match="expert"):
        env.demonstration(np.random.default_rng(0))
    env.close()


@pytest.mark.bubblewrap
@pytest.mark.parametrize(
    ("test", "score"),
    [
        ('echo \'{"reward": 0.5}\' > /logs/verifier/reward.json', 0.5),
        ('echo \'{"a": 1, "b": 0.75}\' > /logs/verifier/reward.json', 0.75),
        ("echo 7 > /logs/verifier/reward.txt", 1),
        ("echo nan > /logs/verifier/reward.txt", 0),
        ("true", 0),
        ("echo 1 > /logs/verifier/reward.txt; kill -9 $$", 0),
        pytest.param("echo 1 > /logs/verifier/reward.txt; sleep 60", 0, marks=pytest.mark.slow),
        ("chmod 777 /tests/test.sh || rm /tests/test.sh || echo 1 > /logs/verifier/reward.txt", 1),
        ("(sleep 0.3; echo 1 > /logs/verifier/reward.txt) & echo 0 > /logs/verifier/reward.txt", 0),
    ],
)
def test_what_tests_may_say(test, score, tmp_path, monkeypatch):
    monkeypatch.setattr(terminal, "MAX_TEST_SECONDS", 5.0)
    assert verdict(read_task(folder(tmp_path, tests__test_dot_sh=test))) == score


@pytest.mark.bubblewrap
def test_tests_in_python(tmp_path):
    python = "import pathlib\ndef test_it():\n    assert pathlib.Path('/work/out.txt').read_text() == 'done'\n"
    task = read_task(folder(tmp_path, tests__test_dot_sh=None, tests__test_it_dot_py=python))
    assert verdict(task) == 0 and verdict(task, pack({"/work/out.txt": (0o644, b"done")})) == 1


@pytest.mark.bubblewrap
@pytest.mark.parametrize(
    ("program", "score"),
    [
        ("def double(x): return 2 * x", 1),
        ("def double(x): return x", 0),
        ("import os; os._exit(0)", 0),
        ("import sys; sys.exit(0)", 0),
        ("def double(x): raise SystemExit(0)", 0),
    ],
)
def test_a_program_that_ends_the_tests_in_python_fails_them(program, score, tmp_path):
    python = "import sys\nsys.path += ['/work']\ndef test_it():\n    import prog\n    assert prog.double(2) == 4\n"
    task = read_task(folder(tmp_path, tests__test_dot_sh=None, tests__test_it_dot_py=python))
    assert verdict(task, pack({"/work/prog.py": (0o644, program.encode())})) == score


@pytest.mark.bubblewrap
@pytest.mark.parametrize(
    ("tests", "score"),
    [
        ({"test_a": "def test_a(): pass\ndef test_b():\n    yield 1\n    assert 0\n"}, 0),
        ({"test_a": "async def late(): assert 0\ntest_b = late\n"}, 0),
        ({"test_a": "from helpers import test_h\n", "helpers": "def test_h(): pass\n"}, 1),
        ({"test_a": "from helpers import (\n    test_h,\n)\n", "helpers": "def test_h(): assert 0\n"}, 0),
    ],
)
def test_every_test_in_python_is_run(tests, score, tmp_path):
    files = {f"tests__{name}_dot_py": content for name, content in tests.items()}
    task = read_task(folder(tmp_path, tests__test_dot_sh=None, **files))
    assert verdict(task, pack({"/work/prog.py": (0o644, b"")})) == score


@pytest.mark.bubblewrap
def test_a_generated_task_can_be_written_and_read(tmp_path):
    task = generate_task(0, "train", list(KINDS).index("mend_shell"))
    again = read_task(write_task(task, tmp_path))
    assert (again.instruction, again.start, again.tests, again.solution) == (
        task.instruction, task.start, task.tests, task.solution,
    )  # fmt: skip
    assert verdict(again, solved(again, [again.solution])) == 1


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"task_dot_toml": "x = "}, "task.toml: expected TOML"),
        ({"tests__test_dot_sh": None, "tests__a_dot_py": "assert 1\nclass A:\n    def test_x(self): pass\n"},
         "tests/a.py: methods, async functions, and functions with parameters or fixtures need a test.sh"),
        ({"tests__test_dot_sh": None, "tests__a_dot_py": "def test_a(): pass\nasync def test_b(): assert 0\n"},
         "tests/a.py: methods, async functions"),
        ({"tests__test_dot_sh": None, "tests__a_dot_py": "def test_a(): pass\ndef test_b(tmp_path): pass\n"},
         "tests/a.py: methods, async functions"),
        ({"tests__test_dot_sh": None, "tests__a_dot_py": "def test_a(): pass\nclass B:\n  def test_b(self): assert 0"},
         "tests/a.py: methods, async functions"),
        ({"tests__test_dot_sh": None, "tests__a_dot_py": "def test_a(): pass\ndef setup_module(): raise OSError"},
         "tests/a.py: methods, async functions"),
        ({"tests__test_dot_sh": None, "tests__a_dot_py": "def test_a(): 0\n@pytest.fixture(autouse=True)\ndef b(): 0"},
         "tests/a.py: methods, async functions"),
        ({"tests__test_dot_sh": None, "tests__a_dot_py": "from prog import *\n"},
         "tests: expected test.sh, or functions test_\\* in files of Python"),
        ({"task_dot_toml": "[verifier]\ntimeout_sec = 'long'"}, "timeout_sec: expected a number"),
        ({"task_dot_toml": "[verifier]\ntimeout_sec = true"}, "timeout_sec: expected a number"),
        ({"task_dot_toml": "a = " + "[" * 3_000}, "task.toml: expected TOML: maximum recursion depth"),
        ({"task_dot_toml": "a = " + "9" * 5_000}, "task.toml: expected TOML: .*digits"),
        ({"task_dot_toml": "a" + ".a" * 20_000 + " = 1"}, "task.toml: expected at most 200 dots in a line"),
        ({"task_dot_toml": "# " + "long" * 20_000}, "task.toml: expected at most 65536 bytes"),
        ({"task_dot_toml": "[[steps]]\nname = 'a'"}, "several steps"),
        ({"instruction_dot_md": None}, "instruction.md: expected such a file"),
        ({"tests__test_dot_sh": None}, "tests: expected test.sh"),
        ({"environment__Dockerfile": "FROM a\nRUN apt-get install x"}, "line 2: 'RUN apt-get.* needs an image"),
        ({"environment__Dockerfile": "FROM a AS b\nFROM c"}, "line 2: 'FROM c'"),
        ({"environment__Dockerfile": "FROM a\nCOPY --from=b x y"}, "line 2"),
        ({"environment__Dockerfile": "FROM a\nCOPY ../../x y"}, "line 2: there is no '../../x' next to the Dockerfile"),
        ({"environment__Dockerfile": "FROM a\nCOPY data.txt /etc/data"}, "WORKDIR .*only, not to /etc/data"),
        ({"environment__Dockerfile": "FROM a\nWORKDIR /usr/src"}, "WORKDIR /usr/src is not available"),
        ({"environment__Dockerfile": "FROM a\nWORKDIR /"}, "WORKDIR / is not available"),
        ({"environment__Dockerfile": f"FROM a\nCOPY {'a' * 5_000} /app/"}, "can't be read: .*name too long"),
        ({"environment__Dockerfile": f"FROM a\nCOPY data.txt {'a' * 300}"}, "'/app/a.*' is not a valid file name"),
        ({"environment__Dockerfile": "FROM a\nCOPY data.txt a\nCOPY data.txt a/b"}, "/app/a would be both a file"),
        ({"environment__Dockerfile": "FROM a\n" + "COPY data.txt more /app/\n" * 251}, "at most 500 files"),
        ({"environment__docker-compose_dot_yaml": "services:"}, "several containers"),
        ({"environment__Dockerfile": None}, "it needs an image"),
    ],
)
def test_a_folder_that_cannot_be_played_is_refused(files, says, tmp_path):
    with pytest.raises(DataFormatError, match=says):
        read_task(folder(tmp_path, **files))


def test_no_workdir_hides_python(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "library", lambda: ["/opt/python/bin/python3"])
    for place in ("/opt", "/opt/python", "/opt/python/bin/python3/x"):
        task = folder(tmp_path, environment__Dockerfile=f"FROM a\nWORKDIR {place}\n")
        with pytest.raises(DataFormatError, match=f"WORKDIR {place} is not available, because Python is in /opt/p"):
            read_task(task)
    assert read_task(folder(tmp_path, environment__Dockerfile="FROM a\nWORKDIR /opt/other\n")).folder == "/opt/other"


def test_links_and_missing_folders_are_refused(tmp_path):
    task = folder(tmp_path)
    (task / "environment" / "more" / "link").symlink_to("/etc/passwd")
    with pytest.raises(DataFormatError, match="found a link"):
        load_tasks(tmp_path, "train")
    with pytest.raises(DataNotFoundError, match="data_dir=.*nowhere has no folders with a task.toml"):
        load_tasks(tmp_path / "nowhere", "train")


def test_no_more_names_are_looked_at_than_there_may_be(tmp_path, monkeypatch):
    task = folder(tmp_path)
    for number in range(40):
        (task / "tests" / f"{number}").mkdir()
    monkeypatch.setattr(harbor, "MAX_FILES", 10)
    looked, is_symlink = [], Path.is_symlink
    monkeypatch.setattr(Path, "is_symlink", lambda self: looked.append(self) or is_symlink(self))
    with pytest.raises(DataFormatError, match="expected at most 10 files"):
        read_task(task)
    assert len(looked) < 40


NAMES = ("instruction.md", "task.toml", "solution/solve.sh", "environment/Dockerfile", "tests/test.sh")


@pytest.mark.parametrize("name", [*NAMES, "environment/more/x.txt"])
def test_no_link_pipe_or_endless_file_is_read(name, tmp_path):
    task = folder(tmp_path, environment__Dockerfile="FROM a\nCOPY more/x.txt /app/\n")
    path, outside = task / name, tmp_path / "outside"

    def refused():
        with pytest.raises(DataFormatError, match=r"expected (a plain|at most)|line 2: there is no 'more/x.txt'"):
            read_task(task)
        path.unlink()

    path.rename(outside)  # which could be played, were the link followed
    for target in (outside, "/dev/zero", "nowhere"):
        path.symlink_to(target)
        refused()
    os.mkfifo(path)
    refused()
    with open(path, "wb") as file:
        file.truncate(700 << 20)
    refused()
    outside.rename(path)
    read_task(task)


@pytest.mark.parametrize("name", ["environment", "environment/more", "tests", "solution"])
def test_no_folder_outside_of_a_task_is_read(name, tmp_path):
    task = folder(tmp_path, environment__Dockerfile="FROM a\nCOPY more/x.txt /app/\n")
    (task / name).rename(tmp_path / "outside")
    (task / name).symlink_to(tmp_path / "outside")
    with pytest.raises(DataFormatError, match="found a link"):
        read_task(task)


def test_a_split_is_a_folder_where_there_is_one(tmp_path):
    folder(tmp_path / "train", "one"), folder(tmp_path / "test", "two")
    assert [task.id for task in load_tasks(tmp_path, "test")] == ["two"]
    assert [task.id for task in load_tasks(tmp_path / "train", "train")] == ["one"]
    with pytest.warns(UserWarning, match="train has no folder 'test': the split has the tasks of training"):
        assert [task.id for task in load_tasks(tmp_path / "train", "test")] == ["one"]
    with pytest.raises(DataNotFoundError, match="for the split 'unseen_kinds'; there are test, train"):
        load_tasks(tmp_path, "unseen_kinds")


@pytest.mark.parametrize(
    ("file", "found"),
    [
        (b"from b import (\n    test_a,\n)", True),
        (b"from b import \\\n    test_a\n", True),
        (b"try:\n    from b import test_a\nexcept ImportError: pass\n", True),
        (b"from b import *\n", False),  # perhaps of the policy
        (b"\"\"\"\ndef test_a: say\n\"\"\"", False),
        (b"def\ttest_a(): pass", True),
        (b"\xef\xbb\xbfdef test_a(): pass", True),
        ("def test_größe(): pass".encode(), True),
        (b"def test_a(n=3, *more): pass", True),
        (b"def test_a(  # c\n): pass", True),
        (b"x = 1\ntest_a = b", True),
        (b"test_a: object = b", True),
        (b"if True:\n    def test_a(): pass\n", True),
        (b"from math import pi\ntwo = 2 * pi", False),
        (b"import b as test_b", False),  # a module can't be called
        (b"test_id,x\n" + b"from" * 500_000, False),
        (b"from x import (\n" * 200_000, False),
        (b"from " + b" import" * 300_000, False),
        (b"from x import a" + b"\\\n" * 1_000_000, False),
        (b"from x import " + b"a" * 2_000_000, False),
        (b" " * 2_000_000, False),
        (b"class\t" * 300_000 + b"\n" + b" def test" * 300_000, False),
    ],
    ids=lambda value: value[:24] if isinstance(value, bytes) else None,
)
def test_what_may_be_a_test_in_python(file, found):
    start = time.process_time()
    assert harbor.may_test(file) == found and not harbor.needs_a_runner(file)
    assert time.process_time() - start < 1.0


def test_a_long_line_takes_no_memory_by_the_letter():
    script = "import resource; from agent_r1.task_data import harbor; n = 8 << 20; kib = lambda: resource.getrusage("
    script += "resource.RUSAGE_SELF).ru_maxrss; before = kib(); harbor.may_test(b'from x import ' + b'a' * n); "
    script += "harbor.may_test(b'from x import a' + b'\\\\\\n' * (n // 2)); print((kib() - before) >> 10)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100  # MiB; a thousand with groups that can be gone back into
