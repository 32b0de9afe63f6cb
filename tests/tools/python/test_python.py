"""The python tool: what runs look like, sessions, snapshots, limits, and the choice of a sandbox."""

import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agent_r1_tools import run_tool
from agent_r1_tools.exchange import ExchangeError
from agent_r1_tools.python import CallError, Limits, PythonTool, SandboxError, choose, open_sandbox, probe
from agent_r1_tools.python.guest import NotLiteral, decode, encode
from agent_r1_tools.python.sandbox import Cell, State
from agent_r1_tools.python.unsafe import BareProcess
from agent_r1_tools.running import at_work

LIMITS = Limits(wall_seconds=5, cpu_seconds=5, output=400)
QUICK = Limits(wall_seconds=1.5, cpu_seconds=5)


LOCAL = list(choose.LOCAL)
FULL = [name for name, local in choose.LOCAL.items() if local.all_of_python]
NETWORK = [name for name, local in choose.LOCAL.items() if local.network]


@pytest.fixture(params=[*LOCAL, "remote", "subprocess"])
def opened(request):
    """open(limits): the backend with these limits."""

    def open_(limits=LIMITS):
        url = request.getfixturevalue("sandbox_server") if request.param == "remote" else None
        return open_sandbox(request.param, limits, unsafe=request.param == "subprocess", url=url)

    return open_


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("", ""),
        ("x = 1", ""),
        ("1 + 1", "2\n"),
        ("None", ""),
        ("'a'", "'a'\n"),
        ("print('a')\n'b'", "a\n'b'\n"),
        ("for i in range(3):\n    print(i, end=' ')", "0 1 2 "),
        ("print('ä→')", "ä→\n"),
        ("def f():\n    return 3\n\nf()  # a comment", "3\n"),
    ],
)
def test_a_run_shows_what_a_notebook_shows(opened, code, output):
    ran = opened().run(code)
    assert (ran.output, ran.status, ran.error, ran.ok) == (output, "ok", None, True)


def test_an_exception_is_a_short_traceback(opened):
    ran = opened().run("def f(x):\n    return 1 / x\n\nprint('before')\nf(0)")
    assert ran.output == (
        "before\nTraceback (most recent call last):\n  line 5, in <module>\n    f(0)\n"
        "  line 2, in f\n    return 1 / x\nZeroDivisionError: division by zero"
    )
    assert (ran.status, ran.error, ran.ok) == ("exception", "ZeroDivisionError: division by zero", False)


def test_code_that_does_not_parse_is_shown_with_its_line(opened):
    ran = opened().run("x = 1\ny = = 2")
    assert ran.status == "exception"
    assert ran.output.startswith("Traceback (most recent call last):\n  line 2\n    y = = 2\nSyntaxError: ")


def test_a_long_traceback_is_cut_in_the_middle(opened):
    ran = opened().run("def f(n):\n    return f(n - 1) if n else 1 / 0\nf(50)")
    lines = ran.output.splitlines()
    assert lines[1:3] == ["  line 3, in <module>", "    f(50)"]
    assert lines[3] == "  ... 44 more"
    assert lines[-1] == "ZeroDivisionError: division by zero"


def test_long_output_is_cut_with_a_marker(opened):
    ran = opened().run("for i in range(1000):\n    print(i)")
    assert ran.ok
    assert ran.output.startswith("0\n1\n2\n")
    assert ran.output.endswith("\n... [cut: longer than 400 characters]")
    assert len(ran.output) == 400
    ran = opened().run("print('x' * 10_000)\n1 / 0")
    assert ran.output.endswith(
        "characters]\nTraceback (most recent call last):\n  line 2, in <module>\n    1 / 0\n" + ran.error
    )


def test_too_long_is_said(opened):
    started = time.monotonic()
    ran = opened(QUICK).run("while True:\n    pass")
    assert (ran.status, ran.error) == ("timeout", "no result within 1.5 seconds")
    assert ran.output == "[no result within 1.5 seconds; the session is as it was before]"
    assert time.monotonic() - started < 10


def test_what_was_printed_before_the_end_is_shown(opened):
    ran = opened(QUICK).run("print('here')\nwhile True:\n    pass")
    assert ran.output.startswith("here\n[no result within")


# --- sessions ---------------------------------------------------------------------------------------------------------


def test_a_session_keeps_names(opened):
    with opened().session() as session:
        session.run("x = [1]")
        session.run("def add(y):\n    x.append(y)")
        session.run("add(2)\n1 / 0")
        assert session.run("x").output == "[1, 2]\n"
        assert session.call("add", [3]) is None
        assert session.run("x").ok
    assert opened().run("x").error == "NameError: name 'x' is not defined"


def test_a_run_that_fails_hard_leaves_the_session_as_it_was(opened):
    with opened(QUICK).session() as session:
        session.run("x = 1")
        assert session.run("x = 2\nwhile True:\n    pass").status == "timeout"
        assert session.run("x").output == "1\n"


def test_a_session_that_cannot_be_replayed_starts_anew(opened):
    sandbox = opened(Limits(wall_seconds=2))
    last = "while True: pass" if sandbox.backend == "monty" else "import os\nos._exit(1)"
    session = sandbox.session()
    session.set_state(State((Cell("x = 1"), Cell(last))))
    ran = session.run("y = 6 * 7\ny")
    assert ran.ok and ran.output == "[the session could not be restored; it starts anew]\n42\n"
    assert not session.run("x").ok
    assert session.run("y").output == "42\n"


@pytest.mark.parametrize("backend", [*LOCAL, "subprocess"])
def test_a_session_that_takes_too_long_to_replay_is_lost(backend):
    """One cell takes as long as any run may, but not ten of them before every next run."""
    with open_sandbox(backend, Limits(wall_seconds=0.5), unsafe=backend == "subprocess").session() as session:
        session.set_state(State((Cell("import time\ntime.sleep(0.3)"),) * 40))
        ran = session.run("y = 42\ny")
        assert ran.output == "[the session could not be restored; it starts anew]\n42\n"
        assert ran.seconds < 10
        assert session.run("y").output == "42\n"


def test_snapshots_branch(opened):
    with opened().session() as session, opened().session() as other:
        session.run("x = [1]")
        early = pickle.loads(pickle.dumps(session.get_state()))
        session.run("x.append(2)")
        late = session.get_state()
        session.set_state(early)
        session.run("x.append(3)")
        assert session.run("x").output == "[1, 3]\n"
        other.set_state(late)
        assert other.run("x").output == "[1, 2]\n"
        other.set_state(None)
        assert not other.run("x").ok


def test_a_snapshot_can_be_restored_by_another_backend(opened):
    with opened().session() as session:
        session.run("x = 41")
        state = session.get_state()
    for backend in choose.LOCAL:
        if probe(backend) is None:
            with open_sandbox(backend).session() as other:
                other.set_state(state)
                assert other.run("x + 1").output == "42\n"


def test_random_numbers_are_the_same_in_every_session(opened):
    code = "import random\n(random.random(), random.choice(range(1000)))"
    assert opened().run(code).output == opened().run(code).output


@pytest.mark.parametrize("backend", [*LOCAL, "subprocess"])
def test_functions_of_ours_can_be_called(backend):
    sandbox = open_sandbox(backend, unsafe=backend == "subprocess")
    calls = []

    def ask(*args, **kwargs):
        calls.append((args, kwargs))
        if args == ("bad",):
            raise KeyError("bad")
        return {"n": len(calls), "same": args}

    with sandbox.session() as session:
        ran = session.run("a = ask([1], key=(2, {3}))\na", {"ask": ask})
        assert ran.output == "{'n': 1, 'same': ([1],)}\n", ran
        assert calls == [(([1],), {"key": (2, {3})})]
        ran = session.run("try:\n    ask('bad')\nexcept KeyError as error:\n    print('caught', error)", {"ask": ask})
        assert ran.output.startswith("caught "), ran
        state = session.get_state()
        session.set_state(None)
        session.set_state(pickle.loads(pickle.dumps(state)))  # replayed or restored, but nobody is asked again
        assert session.run("a['n']").output == "1\n"
        assert len(calls) == 2


@pytest.mark.parametrize("backend", FULL)
def test_functions_that_call_back_too_often_run_out_of_time(backend):
    with open_sandbox(backend, QUICK).session() as session:
        ran = session.run("while True:\n    ask()", {"ask": lambda: time.sleep(0.01)})
        assert ran.status == "timeout"
        assert session.run("1").ok


def test_calls_that_fail_say_why(opened):
    code = "def slow():\n    while True:\n        pass\n\ndef bad():\n    raise ValueError('b')"
    with opened(QUICK).session() as session:
        session.run(code)
        for name, kind in (("slow", "Timeout"), ("bad", "ValueError"), ("none", "NameError")):
            with pytest.raises(CallError) as caught:
                session.call(name)
            assert caught.value.kind == kind


@pytest.mark.parametrize("backend", FULL)
def test_subclasses_arrive_as_what_they_are_made_of(backend):
    code = """
import collections, enum
def f():
    counter = collections.Counter("aab")
    pair = collections.namedtuple("P", "x y")(1, 2)
    return [counter, pair, enum.IntEnum("E", "A B").B, collections.OrderedDict(z=1), float("inf"), True]
def g():
    import numpy
    return numpy.arange(3)
"""
    with open_sandbox(backend).session() as session:
        session.run(code)
        value = session.call("f")
        assert value == [{"a": 2, "b": 1}, (1, 2), 2, {"z": 1}, float("inf"), True]
        assert [type(item) for item in value] == [dict, tuple, int, dict, float, bool]
        with pytest.raises(CallError, match="NotLiteral"):
            session.call("g")


def test_literals_survive_the_way():
    values = [None, True, 0, -(2**70), 0.1, float("-inf"), 1 + 2j, "ä\ud800", b"\0", [], (), set(), frozenset({1}), {}]
    values.append({(1, "a"): [{2: {3.5}}], None: (None,)})
    for value in values:
        back = decode(encode(value))
        assert back == value and type(back) is type(value)
    for value in (object(), [len], {1: {2: type}}):
        with pytest.raises(NotLiteral):
            encode(value)


# --- limits -----------------------------------------------------------------------------------------------------------


def test_values_with_equal_hashes_do_not_take_minutes():
    equal = [k * (2**61 - 1) for k in range(1, 50_000)]  # all have the hash 0
    for data in ({"set": equal}, {"frozenset": equal}, {"dict": [[key, 0] for key in equal]}):
        with pytest.raises(ValueError, match="hash"):
            decode(data)
    assert decode({"set": list(range(50_000))}) == set(range(50_000))


@pytest.mark.parametrize(
    "wrong", [{"wall_seconds": 0}, {"cpu_seconds": -1}, {"output": 0}, {"processes": 0}, {"files": -1}, {"memory": 1}]
)
def test_limits_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Limits(**wrong)


@pytest.mark.parametrize("backend", FULL)
def test_processes_are_counted(backend):
    code = """
import os, threading, time
pids = []
try:
    for _ in range(10):
        pid = os.fork()
        if not pid:
            time.sleep(60)
        pids.append(pid)
except OSError:
    pass
len(pids)
"""
    for allowed in (1, 3):
        assert open_sandbox(backend, Limits(processes=allowed)).run(code).output == f"{allowed - 1}\n"


@pytest.mark.parametrize("backend", FULL)
def test_processor_time_is_counted(backend):
    ran = open_sandbox(backend, Limits(wall_seconds=200, cpu_seconds=1)).run("while True:\n    pass")
    assert (ran.status, ran.error) == ("timeout", "more than 1 CPU seconds")


@pytest.mark.parametrize("backend", FULL)
def test_memory_and_files_are_counted(backend):
    sandbox = open_sandbox(backend, Limits(memory=256 << 20, files=1 << 20))
    assert sandbox.run("x = bytearray(300 << 20)").error == "MemoryError"
    assert sandbox.run("x = bytearray(50 << 20)").ok
    assert sandbox.run("open('/tmp/a', 'w').write('a' * 500_000)").output == "500000\n"
    assert sandbox.run("open('/tmp/a', 'w').write('a' * 2_000_000)").error.startswith("OSError")


@pytest.mark.parametrize("backend", FULL)
def test_sessions_do_not_see_each_others_files(backend):
    with open_sandbox(backend).session() as one, open_sandbox(backend).session() as other:
        one.run("open('/tmp/note', 'w').write('x')")
        assert one.run("import os\nos.listdir('/tmp')").output == "['note']\n"
        assert other.run("import os\nos.listdir('/tmp')").output == "[]\n"


@pytest.mark.parametrize("backend", NETWORK)
def test_network_is_there_where_it_is_allowed(backend):
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5).close()"
        assert open_sandbox(backend, Limits(network=True)).run(code).ok
        assert not open_sandbox(backend, Limits()).run(code).ok
    assert open_sandbox("auto", Limits(network=True)).backend in NETWORK
    for other in choose.LOCAL:
        if other not in NETWORK and probe(other) is None:
            with pytest.raises(SandboxError, match="network"):
                open_sandbox(other, Limits(network=True))


@pytest.mark.parametrize("backend", FULL)
def test_numpy_and_sympy_are_there(backend):
    ran = open_sandbox(backend).run("import numpy, sympy\nint(numpy.arange(4).sum()), sympy.sqrt(8)")
    assert ran.output == "(6, 2*sqrt(2))\n"


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="annotations are read when they are asked for")
@pytest.mark.parametrize("backend", FULL)
def test_annotations_are_read_unless_the_program_says_otherwise(backend):
    """The guest's own `from __future__` is not the program's."""
    with open_sandbox(backend).session() as session:
        assert "NameError" in session.run("def f(x: Missing): return x").error
        assert session.run("from __future__ import annotations\ndef f(x: Missing): return x\nf(1)").output == "1\n"


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", LOCAL)
def test_many_sessions_at_once(backend):
    sandbox = open_sandbox(backend, Limits(wall_seconds=60))

    def work(number):
        with sandbox.session() as session:
            session.run(f"x = {number}")
            return session.run("x * x").output

    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(work, range(64))) == [f"{number**2}\n" for number in range(64)]


@pytest.mark.parametrize("backend", FULL)
def test_a_session_outlives_the_thread_that_started_it(backend):
    """The kernel ends a process "with its parent", and means the thread."""
    session = open_sandbox(backend).session()
    started = []
    thread = threading.Thread(target=lambda: started.append(session.run("import os\nx = os.urandom(8)\nx").output))
    thread.start()
    thread.join()
    time.sleep(0.2)
    assert session.run("x").output == started[0]
    session.close()


@pytest.mark.parametrize("backend", [*FULL, "auto"])
def test_a_fork_of_this_process_can_have_sandboxes_too(backend, in_fork):
    """With "auto" it does without Monty, whose threads don't come along."""
    session = open_sandbox(backend).session()
    session.run("x = 1")

    def child(results):
        results.put(open_sandbox(backend).run("6 * 7").output)
        try:
            results.put(str(open_sandbox("monty").run("1")))
        except SandboxError as error:
            results.put(str(error))

    output, error = in_fork(child, 2)
    assert output == "42\n"
    assert "monty" in error
    assert session.run("x").output == "1\n"
    session.close()


@pytest.mark.parametrize("backend", FULL)
def test_a_fork_of_this_process_goes_on_with_a_session_of_its_own(backend, in_fork):
    session = open_sandbox(backend).session()
    session.run("x = 1")

    def child(results):
        results.put(session.run("x += 1\nx").output)

    assert in_fork(child, 1) == ["2\n"]
    assert session.run("x").output == "1\n"
    session.close()


@pytest.mark.parametrize("backend", FULL)
def test_a_forgotten_session_ends(backend):
    session = open_sandbox(backend).session()
    session.run("1")
    alive = session._guest.close
    assert alive.alive
    del session
    gc.collect()
    assert not alive.alive


@pytest.mark.parametrize("backend", FULL)
def test_sandboxes_end_with_their_owner(backend, tmp_path):
    """Even with one that is killed."""
    code = f"""
import threading, time
from agent_r1_tools.python import Limits, open_sandbox
session = open_sandbox({backend!r}, Limits(wall_seconds=600)).session()
session.run("1")
threading.Thread(target=session.run, args=("import time\\nopen('/tmp/x', 'w')\\ntime.sleep(600)",)).start()
time.sleep(1)
print("ready", flush=True)
time.sleep(600)
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"AGENT_R1_GROUP": "x"}) as owner:
        assert owner.stdout.readline() == b"ready\n"
        children = below(owner.pid)
        assert children
        owner.kill()
        owner.wait()
        deadline = time.monotonic() + 10
        while any(map(running, children)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not [pid for pid in children if running(pid)]


def below(root):
    """The processes that come from this one."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                pass
    found, front = set(), {root}
    while front:
        front = {pid for pid, parent in parents.items() if parent in front}
        found |= front
    return found


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- the choice -------------------------------------------------------------------------------------------------------


def test_auto_says_what_it_picked_and_never_leaves_the_sandboxes():
    working = [name for name in choose.LOCAL if probe(name) is None]
    if not working:
        with pytest.raises(SandboxError, match="no sandbox works here"):
            open_sandbox()
        return
    sandbox = open_sandbox()
    assert sandbox.run("1").backend.replace(" ", "_") in working
    assert "subprocess" not in sandbox.backend


needs_both = pytest.mark.skipif(
    probe("monty") is not None or (probe("bubblewrap") is not None and probe("fork_server") is not None),
    reason=f"needs monty and another sandbox: {probe('monty')}; {probe('bubblewrap')}; {probe('fork_server')}",
)


@needs_both
def test_auto_goes_on_in_cpython_where_monty_lacks_something():
    with open_sandbox().session() as session:
        assert session.run("x = [3, 1, 2]\nprint('once')").backend == "monty"
        ran = session.run("import heapq\nheapq.heapify(x)\nx[0]")
        assert (ran.output, ran.ok) == ("1\n", True)
        assert ran.backend != "monty"
        assert session.run("x.append(4)\nlen(x)").output == "4\n"
        branch = session.get_state()
        assert session.run("del x[0]\nlen(x)").output == "3\n"
        session.set_state(branch)
        assert session.run("len(x)").output == "4\n"


@needs_both
@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("def g():\n    yield 1\nlist(g())", "[1]\n"),
        ("class A:\n    def __repr__(self):\n        return 'me'\nA()", "me\n"),
        ("import sys\nsys.maxsize > 1", "True\n"),
        ("open('/tmp/a', 'w').write('x')", "1\n"),
        ("x = bytearray(100 << 20)\nlen(x)", "104857600\n"),
        ("sorted(globals())[:1]", "['__builtins__']\n"),
    ],
)
def test_auto_runs_what_monty_cannot(code, output):
    ran = open_sandbox().run(code)
    assert ran.ok and ran.output == output


@needs_both
@pytest.mark.parametrize("code", ["1 / 0", "nothing", "x = = 1", "[].nothing", "import no_such_module", "1 + 'a'"])
def test_auto_stays_in_monty_where_cpython_fails_alike(code):
    with open_sandbox().session() as session:
        session.run("kept = 1")
        assert session.run(code).status == "exception"
        ran = session.run("kept")
        assert (ran.output, ran.backend) == ("1\n", "monty")


@needs_both
def test_auto_calls_in_cpython_what_monty_cannot_call():
    with open_sandbox().session() as session:
        session.run("def f(x):\n    import heapq\n    return heapq.nlargest(1, x)")
        assert session.call("f", [[1, 3, 2]]) == [3]


def test_a_backend_that_is_not_there_says_what_would_help(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(choose, "_probed", {})
    with pytest.raises(SandboxError, match="apt-get install bubblewrap"):
        open_sandbox("bubblewrap")


def test_no_sandbox_at_all_is_an_error_that_lists_them(monkeypatch):
    monkeypatch.setattr(choose, "_probed", dict.fromkeys(choose.LOCAL, "not here"))
    with pytest.raises(SandboxError, match="monty: not here.*bubblewrap: not here.*fork_server: not here.*remote"):
        open_sandbox()


def test_a_row_is_all_that_another_backend_needs(monkeypatch):
    monty_works = probe("monty") is None

    class Broken(BareProcess):
        def start(self, code):
            raise SandboxError("the box has no lid")

    monkeypatch.setitem(choose.LOCAL, "mybox", choose.Backend(Broken, "buy a lid", network=True))
    monkeypatch.setattr(choose, "_probed", dict.fromkeys(choose.LOCAL, "not here"))
    choose._probed.pop("mybox")
    with pytest.raises(SandboxError, match="mybox doesn't work here: the box has no lid. Remedy: buy a lid"):
        open_sandbox("mybox")
    for limits in (Limits(), Limits(network=True)):
        with pytest.raises(SandboxError, match=r"no sandbox works here.*mybox: the box has no lid \(buy a lid\)"):
            open_sandbox("auto", limits)
    choose._probed["mybox"] = None  # as if it worked and were safe
    monkeypatch.setitem(choose.LOCAL, "mybox", choose.Backend(BareProcess, "buy a lid"))
    assert open_sandbox("mybox").run("1").output == open_sandbox("auto").run("1").output == "1\n"
    assert open_sandbox("auto").backend == BareProcess.backend
    if monty_works:
        choose._probed["monty"] = None
        assert open_sandbox("auto").backend == "monty, then subprocess"
    with pytest.raises(SandboxError, match="mybox: cannot allow network"):
        open_sandbox("auto", Limits(network=True))


def test_auto_takes_what_is_there(monkeypatch):
    working = [name for name in choose.LOCAL if probe(name) is None]
    for only in working:
        monkeypatch.setattr(choose, "_probed", {name: None if name == only else "not here" for name in choose.LOCAL})
        assert open_sandbox().backend == only.replace("_", " ")


def test_arguments_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="unknown backend 'docker'"):
        open_sandbox("docker")
    with pytest.raises(ValueError, match="unsafe=True"):
        open_sandbox("subprocess")
    with pytest.raises(ValueError, match="url="):
        open_sandbox("remote")
    with pytest.raises(ValueError, match="not an address"):
        open_sandbox("remote", url="127.0.0.1:8080")
    with pytest.raises(SandboxError, match="failed"):
        open_sandbox("remote", url="http://127.0.0.1:9")


# --- the tool ---------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["auto", "subprocess"])
def tool(request):
    if request.param == "auto" and not [name for name in choose.LOCAL if probe(name) is None]:
        pytest.skip("no sandbox works here")
    made = PythonTool(open_sandbox(request.param, unsafe=request.param == "subprocess"))
    yield made
    made.close()


def test_the_tool_shows_what_happened(tool):
    result = run_tool(tool, {"code": "print('a')\n1 + 1"})
    assert (result.content, result.ok) == ("a\n2", True)
    assert result.data["status"] == "ok" and result.data["error"] is None and result.data["seconds"] >= 0
    assert run_tool(tool, {"code": "x = 1"}).content == "[no output]"
    failed = run_tool(tool, {"code": "1 / 0"})
    assert not failed.ok and failed.data["error"] == "ZeroDivisionError: division by zero"
    assert failed.content.endswith("ZeroDivisionError: division by zero")


@pytest.mark.parametrize("arguments", [{}, {"code": 1}, {"code": None}, {"code": "1", "more": 1}, "1 + 1"])
def test_calls_that_do_not_fit_the_schema(tool, arguments):
    result = run_tool(tool, arguments)
    assert not result.ok and result.data == {"error": "bad_arguments"}


@pytest.mark.parametrize(
    "code", ["\0", "\ud800", "x = '\ud800'\nprint(x)", "(" * 5000, "#" * 200_000, "\t1\n 2", "é = 1"]
)
def test_odd_code_is_an_answer_too(tool, code):
    result = run_tool(tool, {"code": code})
    assert isinstance(result.content, str) and result.content.encode()
    assert run_tool(tool, {"code": "6 * 7"}).content == "42"


def test_the_tools_session_branches(tool):
    run_tool(tool, {"code": "x = 1"})
    state = tool.get_state()
    run_tool(tool, {"code": "x = 2"})
    tool.set_state(pickle.loads(pickle.dumps(state)))
    assert run_tool(tool, {"code": "x"}).content == "1"
    tool.set_state(None)
    assert not run_tool(tool, {"code": "x"}).ok


def test_a_stateless_tool_forgets():
    tool = PythonTool(open_sandbox("subprocess", unsafe=True), stateless=True)
    run_tool(tool, {"code": "x = 1"})
    assert not run_tool(tool, {"code": "x"}).ok
    assert tool.concurrency_safe and tool.get_state() is None


def test_a_server_that_is_gone_is_a_fault(sandbox_server, monkeypatch):
    sandbox = open_sandbox("remote", url=sandbox_server)
    tool = PythonTool(sandbox)
    assert run_tool(tool, {"code": "x = 41"}).ok
    monkeypatch.setattr(sandbox, "_endpoint", "http://127.0.0.1:9/run_code")
    monkeypatch.setattr("agent_r1_tools.python.remote.RETRIES", 0)
    result = run_tool(tool, {"code": "x"})
    assert not result.ok and result.data["error"] == "sandbox_unavailable" and "SandboxError" in result.fault
    assert "127.0.0.1" not in result.content
    monkeypatch.undo()
    assert run_tool(tool, {"code": "x + 1"}).content == "42"


@pytest.mark.parametrize("status", [413, 500])
def test_a_program_that_a_server_refuses_is_a_failed_call(sandbox_server, monkeypatch, status):
    """But only if the server takes other programs."""
    sandbox = open_sandbox("remote", url=sandbox_server)
    tool = PythonTool(sandbox)
    assert run_tool(tool, {"code": "x = 41"}).ok
    monkeypatch.setattr("agent_r1_tools.python.remote.time.sleep", lambda seconds: None)
    post, refused, all_refused = sandbox._exchange.post, [], []

    def refuse(url, body, most):
        if all_refused or b"#" * 70_000 in body:
            refused.append(status)
            return status, "identity", b"no"
        return post(url, body, most)

    monkeypatch.setattr(sandbox._exchange, "post", refuse)
    large = "x = 1  " + "#" * 70_000
    result = run_tool(tool, {"code": large})
    assert (result.ok, result.fault, result.data["status"]) == (False, None, "exception")
    assert f"status {status}" in result.content and "127.0.0.1" not in result.content
    assert len(refused) == (1 if status == 413 else 5)
    assert run_tool(tool, {"code": "x + 1"}).content == "42"  # the session is as it was
    with pytest.raises(CallError, match="Refused"):
        sandbox.session().call("f", [large])
    all_refused.append(True)
    assert "SandboxError" in run_tool(tool, {"code": "x"}).fault


@pytest.mark.parametrize("poison", ["silence", "nonsense"])
def test_a_program_that_silences_a_server_is_a_failed_call(sandbox_server, monkeypatch, poison):
    """But only if the server answers other programs."""
    sandbox = open_sandbox("remote", url=sandbox_server)
    tool = PythonTool(sandbox)
    assert run_tool(tool, {"code": "x = 41"}).ok
    monkeypatch.setattr("agent_r1_tools.python.remote.time.sleep", lambda seconds: None)
    post, silenced, all_silenced = sandbox._exchange.post, [], []

    def silence(url, body, most):
        if all_silenced or b"poison" in body:
            silenced.append(poison)
            if poison == "silence":
                raise ExchangeError("RemoteProtocolError Server disconnected without sending a response.")
            return 200, "identity", b'{"status": "Failed", "run_result": null}'
        return post(url, body, most)

    monkeypatch.setattr(sandbox._exchange, "post", silence)
    result = run_tool(tool, {"code": "'poison'"})
    assert (result.ok, result.fault, result.data["status"]) == (False, None, "exception")
    assert "it gets no answer that can be read" in result.content and "127.0.0.1" not in result.content
    assert len(silenced) == (5 if poison == "silence" else 2)
    assert run_tool(tool, {"code": "x + 1"}).content == "42"  # the session is as it was
    all_silenced.append(True)
    says = "Server disconnected" if poison == "silence" else "doesn't answer as SandboxFusion does"
    assert says in run_tool(tool, {"code": "x"}).fault


def test_a_sandbox_that_is_killed_from_outside_costs_nothing():
    tool = PythonTool(open_sandbox("subprocess", unsafe=True))
    pid = run_tool(tool, {"code": "import os\nx = 41\nos.getpid()"}).content
    os.kill(int(pid), signal.SIGKILL)
    result = run_tool(tool, {"code": "x + 1"})
    assert (result.ok, result.content, result.fault) == (True, "42", None)
    died = run_tool(tool, {"code": "os._exit(0)"})  # the code's own doing, the second time too
    assert (died.ok, died.fault, died.data["status"]) == (False, None, "died")
    assert run_tool(tool, {"code": "x"}).content == "41"
    tool.close()


def test_code_that_ends_its_process_is_tried_twice_once_in_a_session(monkeypatch):
    """A second attempt replays the session; and what has died late or before is not tried again."""
    tool = PythonTool(open_sandbox("subprocess", unsafe=True))
    run, codes = type(tool._session).run, []
    monkeypatch.setattr(type(tool._session), "run", lambda self, code: (codes.append(code), run(self, code))[1])
    monkeypatch.setattr("agent_r1_tools.python.python_tool.QUICK_SECONDS", 0.3)
    run_tool(tool, {"code": "import os, time\nx = 1"})
    late, early = "time.sleep(0.4); os._exit(0)", "os._exit(0)"
    for code, attempts in ((late, 1), (early, 2), (early, 1), ("x", 1)):
        codes.clear()
        result = run_tool(tool, {"code": code})
        assert (len(codes), result.ok, result.fault) == (attempts, code == "x", None)
    tool.set_state(None)
    run_tool(tool, {"code": "import os"})
    codes.clear()
    run_tool(tool, {"code": early})
    assert len(codes) == 2  # another episode
    tool.close()


@pytest.mark.parametrize("backend", ["monty", "subprocess"])
def test_a_run_that_the_tool_gave_up_is_left_in_its_session(backend):
    """It goes on to its own end, and the next episode doesn't see it."""
    tool = PythonTool(open_sandbox(backend, Limits(wall_seconds=30), unsafe=backend == "subprocess"))
    run_tool(tool, {"code": "import time"})
    seconds, tool.timeout = tool.timeout, 0.2
    assert "no result within" in run_tool(tool, {"code": "time.sleep(1)\nsecret = 1"}).fault
    tool.timeout = seconds
    assert at_work(tool) and tool.new_session()
    tool.set_state(None)
    assert run_tool(tool, {"code": "mine = 2"}).ok
    begun = time.monotonic()
    while at_work(tool):
        time.sleep(0.02)
    assert time.monotonic() - begun < 20  # nobody has closed what it waits for
    assert run_tool(tool, {"code": "mine"}).content == "2"
    assert "NameError" in run_tool(tool, {"code": "secret"}).data["error"]
    tool.close()


def test_a_sandbox_that_does_not_start_is_a_fault(monkeypatch):
    tool = PythonTool(open_sandbox("subprocess", unsafe=True))

    def full(*arguments, **keywords):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("socket.socketpair", full)
    result = run_tool(tool, {"code": "1"})
    assert not result.ok and "Too many open files" in result.fault
    monkeypatch.undo()
    assert run_tool(tool, {"code": "1"}).content == "1"
    tool.close()
