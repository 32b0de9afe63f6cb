"""Programs that try to get out, to break things, or to win without solving: every sandbox contains every one.

An attack prints ESCAPED where it got what it wanted. Whatever it did: no secret is in its output, nothing outside has
changed, it took no longer than it may, no process and no file is left, and the session after it works.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from agent_r1_tools.python import (
    CallError,
    Limits,
    bubblewrap,
    choose,
    guest,
    launch,
    open_sandbox,
    process,
    remote,
)

SECRET = "the-hidden-tests-say-42-0b5c"
MARK = f"agent-r1-attack-{os.getpid()}"
LIMITS = Limits(wall_seconds=1.5, cpu_seconds=0.7, memory=512 << 20, output=2000, files=4 << 20)
BACKENDS = [*choose.LOCAL, "remote"]
FULL = [name for name, local in choose.LOCAL.items() if local.all_of_python]

# PATH, FOLDER, PORT, VICTIM, PARENT, ABSTRACT and MARK stand for what the test planted.
ATTACKS = {
    # files
    "read a file outside": "print(open(PATH).read())",
    "read a file by climbing": "print(open('../' * 20 + PATH).read())",
    "read a file through a symlink": "import os\nos.symlink(PATH, '/tmp/l')\nprint(open('/tmp/l').read())",
    "read a file through a hard link": "import os\nos.link(PATH, '/tmp/h')\nprint(open('/tmp/h').read())",
    "read a file through a file descriptor of the folder": """
import os
for fd in range(100):
    try:
        os.close(os.open(PATH.lstrip('/'), os.O_RDONLY, dir_fd=fd)); print('ESCAPED')
    except OSError:
        pass
""",
    "read the passwords": "print('ESCAPED' if open('/etc/shadow').read() else '')",
    "look for the tests everywhere": """
import os
for folder, _, files in os.walk('/'):
    for file in files:
        if file == os.path.basename(PATH):
            print('ESCAPED', folder)
""",
    "read through /proc/1/root": "print(open('/proc/1/root' + PATH).read())",
    "read through /proc/self/root": "print(open('/proc/self/root' + PATH).read())",
    "read through /proc/self/cwd": "print(open('/proc/self/cwd/../..' + PATH).read())",
    "write a file outside": "open(FOLDER + '/' + MARK, 'w').write('x')",
    "remove a file outside": "import os\nos.remove(PATH)\nprint('ESCAPED')",
    "change the rights of a file outside": "import os\nos.chmod(PATH, 0o777)\nprint('ESCAPED')",
    "write into the library": "import os\nopen(os.__file__, 'a').write('x')\nprint('ESCAPED')",
    "leave files everywhere": """
for folder in ('/tmp', '/var/tmp', '/dev/shm', '/dev', '/', '/run', '/packages', '.'):
    try:
        open(folder + '/' + MARK, 'w').write('x')
    except OSError:
        pass
""",
    "fill the disk": """
import os
size = 0
try:
    for i in range(1000):
        with open(f'/tmp/{i}', 'wb') as f:
            f.write(b'x' * 1_000_000)
        size += 1_000_000
except OSError:
    pass
if size > 5_000_000:
    print('ESCAPED', size)
""",
    "a file of a terabyte": "f = open('/tmp/s', 'wb')\nf.truncate(1 << 40)\nprint('ESCAPED')",
    "a device of its own": """
import os, stat
os.mknod('/tmp/disk', stat.S_IFBLK | 0o666, os.makedev(254, 0))
open('/tmp/disk', 'rb').read(16)
print('ESCAPED')
""",
    "the kernel's settings": "open('/proc/sys/kernel/core_pattern', 'w').write('|/bin/sh')\nprint('ESCAPED')",
    "the control groups": "import os\nos.mkdir('/sys/fs/cgroup/' + MARK)\nprint('ESCAPED')",
    "mount something": """
import ctypes
libc = ctypes.CDLL(None)
if libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None) == 0:
    print('ESCAPED')
""",
    # other processes
    "read the environment of all processes": """
import os
for pid in ['self', *os.listdir('/proc')]:
    try:
        print(open(f'/proc/{pid}/environ', 'rb').read())
    except OSError:
        pass
""",
    "read the command lines of all processes": """
import os
for pid in os.listdir('/proc'):
    try:
        if MARK in open(f'/proc/{pid}/cmdline').read():
            print('ESCAPED')
    except OSError:
        pass
""",
    "read its own environment": "import os\nprint(dict(os.environ))",
    "read the memory of the parent": """
import os
with open(f'/proc/{os.getppid()}/mem', 'rb') as f:
    for line in open(f'/proc/{os.getppid()}/maps'):
        a, b = (int(x, 16) for x in line.split()[0].split('-'))
        f.seek(a)
        f.read(b - a)
        print('ESCAPED')
""",
    "read its own memory": """
import re
with open('/proc/self/mem', 'rb') as f:
    for line in open('/proc/self/maps'):
        a, b = (int(x, 16) for x in line.split()[0].split('-'))
        if 'r' in line.split()[1] and b - a < 1 << 24:
            try:
                f.seek(a)
                found = re.search(b'the-hidden-tests' + b'-say-[0-9]+-', f.read(b - a))
                if found:
                    print('ESCAPED', found)
            except (OSError, ValueError, OverflowError):
                pass
""",
    "kill the parent": "import os\nos.kill(os.getppid(), 9)\nos.kill(PARENT, 9)",
    "kill another process": "import os\nos.kill(VICTIM, 9)\nprint('ESCAPED')",
    "kill everything": "import os\nos.kill(-1, 9)",
    "kill its group": "import os\nos.killpg(0, 9)",
    "trace another process": """
import ctypes, os
libc = ctypes.CDLL(None)
for pid in (VICTIM, PARENT, os.getppid()):
    if libc.ptrace(16, pid, 0, 0) == 0:
        print('ESCAPED')
""",
    "read another process's memory": """
import ctypes
libc = ctypes.CDLL(None)
buffer = ctypes.create_string_buffer(8)
if libc.process_vm_readv(VICTIM, buffer, 1, buffer, 1, 0) >= 0:
    print('ESCAPED')
""",
    "fork bomb": """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
    "a daemon": """
import os, time
for _ in range(2):
    if os.fork():
        os._exit(0)
    os.setsid()
time.sleep(600)
""",
    "a process in the background": "import subprocess\nsubprocess.Popen(['/bin/sleep', '600'])",
    "an interpreter of its own": """
import subprocess, sys
print(subprocess.run([sys.executable, '-c', 'print(open(' + repr(PATH) + ').read())'], capture_output=True))
""",
    "a shell": "import os\nif os.system('cat ' + PATH) == 0:\n    print('ESCAPED')",
    "a pool of processes": "import multiprocessing\nmultiprocessing.Pool(100).map(print, range(1000))",
    "threads": """
import threading, time
for _ in range(10_000):
    threading.Thread(target=time.sleep, args=(600,)).start()
""",
    "a thread that stays": """
import threading
def spin():
    while True:
        pass
threading.Thread(target=spin, daemon=True).start()
""",
    "code at exit": "import atexit, time\natexit.register(time.sleep, 600)\nraise SystemExit(0)",
    # memory, time, output
    "memory at once": "x = bytearray(1 << 40)\nprint('ESCAPED')",
    "memory bit by bit": "x = []\nwhile True:\n    x.append('x' * 1_000_000 + str(len(x)))",
    "memory through mmap": "import mmap\nx = mmap.mmap(-1, 8 << 30)\nprint('ESCAPED')",
    "memory through files in memory": """
import os
files = []
for i in range(40):
    files.append(os.memfd_create(str(i)))
    for _ in range(100):
        os.write(files[-1], b'x' * 1_000_000)
print('ESCAPED')
""",
    "huge integers": "x = 7 ** 10 ** 10\nprint('ESCAPED')",
    "huge formats": "print('%*d' % (1 << 40, 1))",
    "a regular expression that blows up": "import re\nre.match('(a|a)*$', 'a' * 64 + 'b')",
    "deep recursion": """
import sys
sys.setrecursionlimit(10 ** 9)
def f(x):
    return f((x,))
f(0)
""",
    "nested beyond the parser": "eval('(' * 100_000 + ')' * 100_000)",
    "a structure deeper than the stack": "x = []\nfor _ in range(1_000_000):\n    x = [x]\nx",
    "an endless loop": "while True:\n    pass",
    "an endless loop that catches everything": """
import signal
for number in range(1, 64):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    try:
        while True:
            pass
    except BaseException:
        pass
""",
    "go on after the run": """
import signal, sys
def handler(*a):
    frame = sys._getframe(1)
    while frame:
        if frame.f_code.co_name == '_attempt':
            return
        frame = frame.f_back
    while True:
        pass
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
""",
    "attributes of a file": """
import os
open('/tmp/x', 'w').close()
os.setxattr('/tmp/x', 'user.x', b'x' * 1000)
print('ESCAPED')
""",
    "sleep": "import time\ntime.sleep(600)",
    "wait for input": "import sys\nprint(sys.stdin.read(), input())",
    "flood the output": "while True:\n    print('flood' * 1000)",
    "flood the output past Python": "import os\nwhile True:\n    os.write(1, b'flood' * 1000)",
    "flood the errors": "import sys\nwhile True:\n    sys.stderr.write('flood' * 1000)",
    "one endless value": "'flood' * 10_000_000",
    "crash": "import ctypes\nctypes.string_at(0)",
    "abort": "import os\nos.abort()",
    # network
    "connect to this machine": """
import socket
socket.create_connection(('127.0.0.1', PORT), 1).send(b'x')
print('ESCAPED')
""",
    "send a datagram": """
import socket
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))
print('ESCAPED')
""",
    "ask over HTTP": """
import urllib.request
print(urllib.request.urlopen(f'http://127.0.0.1:{PORT}', timeout=1).read())
""",
    "resolve a name": "import socket\nsocket.getaddrinfo('example.com', 80)\nprint('ESCAPED')",
    "connect to an abstract socket": """
import socket
s = socket.socket(socket.AF_UNIX)
s.connect(chr(0) + ABSTRACT)
print('ESCAPED')
""",
    # the sandbox itself
    "import the harness": """
import sys
sys.path += ['/packages', '/usr/lib/python3/dist-packages', *[p + '/site-packages' for p in sys.path]]
import agent_r1_tools
print('ESCAPED')
""",
    "become root": """
import os
for become in (os.setuid, os.setgid, os.seteuid):
    try:
        become(0)
        open('/etc/shadow').close()
        print('ESCAPED')
    except OSError:
        pass
""",
    "new namespaces": """
import ctypes
libc = ctypes.CDLL(None)
for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000):
    if libc.unshare(flag) == 0:
        print('ESCAPED')
""",
    "raise the limits": """
import resource
for name in ('RLIMIT_AS', 'RLIMIT_NPROC', 'RLIMIT_FSIZE', 'RLIMIT_NOFILE'):
    try:
        resource.setrlimit(getattr(resource, name), (1 << 40, 1 << 40))
        print('ESCAPED', name)
    except (OSError, ValueError):
        pass
""",
    "system calls with a history": """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for number in (425, 321, 298, 323, 250):
    if libc.syscall(number, 0, 0, 0, 0, 0) >= 0 or ctypes.get_errno() != 1:
        print('ESCAPED', number)
""",
    "find os.system among the subclasses": """
for c in ().__class__.__base__.__subclasses__():
    if c.__name__ == '_wrap_close':
        if c.__init__.__globals__['system']('cat ' + PATH) == 0:
            print('ESCAPED')
""",
    "send answers of its own": r"""
import os
for fd in range(3, 64):
    for body in (b'{"id": 1, "error": null}', b'{"id": 2, "value": 1}', b'nonsense', b'[' * 100000):
        try:
            os.write(fd, len(body).to_bytes(4, 'big') + body)
        except OSError:
            pass
""",
    "announce an endless answer": """
import os
for fd in range(3, 64):
    try:
        os.write(fd, b'\\xff' * 64)
    except OSError:
        pass
""",
    "patch the guest": """
import sys
for module in list(sys.modules.values()):
    for name in ('send', 'receive', 'encode', 'to_json'):
        if hasattr(module, name) and 'Guest' in dir(module):
            setattr(module, name, lambda *a, **k: None)
frame = sys._getframe()
while frame:
    frame.f_globals.update(send=None, receive=None)
    frame = frame.f_back
""",
    "empty the builtins": "import builtins\nbuiltins.__dict__.clear()",
    "close every file": "import os\nos.closerange(0, 1000)",
    "an exception that strikes when shown": """
class E(Exception):
    def __str__(self):
        raise SystemExit(0)
raise E
""",
    "a value that strikes when shown": """
class V:
    def __repr__(self):
        while True:
            pass
V()
""",
    "leave with success": "import os\nos._exit(0)",
    "leave politely": "import sys\nsys.exit(0)",
    "code that cannot be encoded": "x = '\ud800'\nprint(x)",
    "code with a null": "print(1)\0",
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """What the attacks are after: a file, a folder, listeners, a victim, something in our environment."""
    folder = tmp_path_factory.mktemp("outside")
    secret = folder / f"{MARK}-secret.txt"
    secret.write_text(SECRET)
    for path in (secret, *secret.parents):  # nothing but the sandbox keeps anyone from reading it
        if path.stat().st_uid == os.getuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o055)
    heard = []
    tcp = socket.create_server(("127.0.0.1", 0))
    port = tcp.getsockname()[1]
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", port))
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0{MARK}")
    abstract.listen()

    def listen(listener, take):
        try:
            while True:
                take(listener)
                heard.append(listener.family)
        except OSError:
            return

    listeners = [(tcp, lambda s: s.accept()), (abstract, lambda s: s.accept()), (udp, lambda s: s.recv(100))]
    for listener, take in listeners:
        threading.Thread(target=listen, args=(listener, take), daemon=True).start()
    victim = subprocess.Popen([sys.executable, "-c", f"import time; '{MARK}'; time.sleep(3600)"])
    os.environ["AGENT_R1_SECRET"] = SECRET
    yield {"path": secret, "folder": folder, "port": port, "victim": victim, "heard": heard}
    del os.environ["AGENT_R1_SECRET"]
    victim.kill()
    victim.wait()
    for listener, _ in listeners:
        try:
            listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        listener.close()


def filled(code, planted):
    for name, value in {
        "PATH": str(planted["path"]),
        "FOLDER": str(planted["folder"]),
        "PORT": planted["port"],
        "VICTIM": planted["victim"].pid,
        "PARENT": os.getpid(),
        "ABSTRACT": MARK,
        "MARK": MARK,
    }.items():
        code = code.replace(name, repr(value))
    return code


def opened(backend, limits=LIMITS):
    return open_sandbox(backend, limits)


@pytest.fixture(params=BACKENDS, scope="module")
def sandbox(request):
    """Each backend for which a probe program ran."""
    if request.param == "remote":
        return open_sandbox("remote", replace(LIMITS, wall_seconds=4.0), url=request.getfixturevalue("sandbox_server"))
    return opened(request.param)


@pytest.fixture(scope="module", autouse=True)
def adopt_orphans():
    """Processes whose parent ends become ours, so that none of them is overlooked."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    yield
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)


def descendants():
    """The processes that come from this one, zombies too: {pid: command}."""
    parents, names = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
                names[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            parents[int(entry.name)] = int(text.rpartition(")")[2].split()[1])
    found, front = {}, {os.getpid()}
    while front:
        front = {pid for pid, parent in parents.items() if parent in front}
        found |= {pid: names.get(pid, "") for pid in front}
    return found


def left_behind(before):
    """New processes, once they have had a moment to end; servers and workers that stay by design don't count."""
    deadline = time.monotonic() + 3
    while True:
        new = {pid: name for pid, name in descendants().items() if pid not in before}
        new = {pid: name for pid, name in new.items() if not name.rstrip().endswith("monty subprocess")}
        if not new or time.monotonic() > deadline:
            return new
        time.sleep(0.02)


def marks(planted):
    folders = ["/tmp", "/var/tmp", "/dev/shm", "/run", "/", ".", str(Path.home()), str(planted["folder"])]
    return {str(path) for folder in folders for path in Path(folder).glob(f"{MARK}*")} - {str(planted["path"])}


def test_there_are_at_least_forty():
    assert len(ATTACKS) >= 40


# What is only ended by the clock takes seconds; a server's clock is the one of the sandbox in it.
ENDLESS = {"sleep", "fork bomb", "deep recursion", "huge integers", "a regular expression that blows up"}
ENDLESS |= {"an endless loop that catches everything", "flood the errors"}
CASES = [
    pytest.param(backend, attack, marks=[pytest.mark.slow] * (backend == "remote" and attack in ENDLESS))
    for backend in BACKENDS for attack in ATTACKS
]  # fmt: skip


@pytest.mark.parametrize(("sandbox", "attack"), CASES, indirect=["sandbox"])
def test_an_attack_is_contained(attack, sandbox, planted):
    sandbox.run("1")  # whatever stays by design is there now
    before = descendants()
    heard = len(planted["heard"])
    with sandbox.session() as session:
        assert session.run("kept = 6 * 7").ok
        started = time.monotonic()
        ran = session.run(filled(ATTACKS[attack], planted))
        seconds = time.monotonic() - started
        assert "ESCAPED" not in ran.output.replace("print('ESCAPED", ""), ran
        assert SECRET not in ran.output, ran
        assert len(ran.output) <= LIMITS.output + 200
        assert seconds < 30  # the wall time, and what a busy machine adds
        after = session.run("kept")
        assert after.output == "42\n", (ran, after)
    assert not left_behind(before)
    assert not marks(planted)
    assert planted["path"].read_text() == SECRET
    assert planted["victim"].poll() is None
    assert len(planted["heard"]) == heard
    assert sandbox.run("6 * 7").output == "42\n"


HARMLESS = ["read a file outside", "read its own environment", "connect to this machine", "kill another process"]
HARMLESS += ["write a file outside", "import the harness", "a process in the background"]


ENDS = {
    "its end": "1",
    "an exception": "1 / 0",
    "exit": "import os; os._exit(3)",
    "a signal of its own": "import os; os.kill(os.getpid(), 9)",
    "a signal to all": "import os; os.kill(-1, 9)",
    "too much time": "while True: pass",
    "too long a sleep": "import time; time.sleep(60)",
    "too much text": "import os\nwhile True: os.write(1, bytes(1 << 16))",
    "children": "import os, time\nfor _ in range(5): os.fork() or time.sleep(60)",
    "children and exit": "import os, time\nfor _ in range(5): os.fork() or time.sleep(60)\nos._exit(0)",
    "orphans": "import os, time\nif not os.fork(): os.setsid(); os.fork() and os._exit(0); time.sleep(60)",
    "a crash": "import os; os.abort()",
}


def zombies():
    """Processes that have ended and that we should have waited for, or that were left to us."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state == "Z" and int(parent) == os.getpid():
            found.add(entry.name)
    return found


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("backend", ["bubblewrap", "fork_server"])
def test_no_session_leaves_a_zombie(backend, end):
    """Where process 1 waits for nobody, such as a Python program in a container, each would stay for ever."""
    sandbox = opened(backend, replace(LIMITS, wall_seconds=0.7, cpu_seconds=0.7))
    sandbox.run("1")
    before = zombies()
    for _ in range(2):
        sandbox.run(ENDS[end])
    with sandbox.session() as session, sandbox.session() as branch:
        session.run("x = 1")
        branch.set_state(session.get_state())
        session.run(ENDS[end])
        branch.run("x")
    assert zombies() == before


def test_a_process_that_was_waited_for_gets_no_signal(monkeypatch):
    """Its number may be somebody else's by then."""
    ended = subprocess.Popen(["true"], start_new_session=True)
    ended.wait()
    monkeypatch.setattr(os, "killpg", lambda *given: pytest.fail(f"killpg{given}"))
    launch.kill_group(ended)


def test_a_bwrap_that_hangs_is_killed_with_its_group(monkeypatch):
    monkeypatch.setattr(bubblewrap, "END_SECONDS", 0.2)
    hangs = subprocess.Popen(["sleep", "60"], start_new_session=True)
    bubblewrap._end(hangs, [])
    assert hangs.returncode == -signal.SIGKILL


@pytest.mark.parametrize("attack", HARMLESS)
def test_without_a_sandbox_the_attacks_succeed(attack, planted, tmp_path):
    """Or the tests above would show nothing. (Only those that do no harm.)"""
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    before, heard = descendants(), len(planted["heard"])
    code = filled(ATTACKS[attack], planted | {"victim": victim, "folder": tmp_path})
    if attack == "import the harness":
        code = f"import sys\nsys.path += {sys.path!r}\n{code}"
    with open(tmp_path / "printed", "w") as printed:
        subprocess.run([sys.executable, "-c", code], stdout=printed, stderr=printed, timeout=120)
    time.sleep(0.1)
    text = (tmp_path / "printed").read_text()
    strays = {pid for pid in descendants() if pid not in before}
    for pid in strays:
        os.kill(pid, signal.SIGKILL)
    victim.kill()
    victim.wait()
    reached = len(planted["heard"]) > heard
    assert "ESCAPED" in text or SECRET in text or strays or reached or (tmp_path / MARK).exists(), text


# --- winning without solving ------------------------------------------------------------------------------------------

# Task: double(x) returns 2 * x. The official test lives in one sandbox, the candidate in another.
TEST = """
def check(candidate):
    assert candidate(1) == 2
    assert candidate([1, "a"]) == [1, "a", 1, "a"]
    assert candidate(-0.5) == -1.0
check(candidate)
"""
RIGHT = "def double(x):\n    return 2 * x"
CHEATS = {
    "equal to everything": """
class Equal:
    def __eq__(self, other):
        return True
def double(x):
    return Equal()
""",
    "a number equal to everything": """
class Equal(int):
    def __eq__(self, other):
        return True
def double(x):
    return Equal(7)
""",
    "a list whose items are equal to everything": """
class Equal(float):
    __eq__ = lambda self, other: True
    __hash__ = float.__hash__
def double(x):
    return [Equal(1.0), Equal(1.0), Equal(1.0), Equal(1.0)]
""",
    "leave before the asserts": "import os\nos._exit(0)",
    "leave in the first call": "import os\ndef double(x):\n    os._exit(0)",
    "leave politely in the first call": "import sys\ndef double(x):\n    sys.exit(0)",
    "raise SystemExit in the test": "def double(x):\n    raise SystemExit(0)",
    "raise what ends a generator": "def double(x):\n    raise StopIteration",
    "never answer": "def double(x):\n    while True:\n        pass",
    "overwrite the test": """
import builtins, sys
check = lambda candidate: None
builtins.check = check
sys.modules["__main__"].check = check
def double(x):
    sys.modules["__main__"].check = check
    return None
""",
    "patch AssertionError and isinstance": """
import builtins
builtins.AssertionError = type("Fine", (Exception,), {})
builtins.isinstance = lambda *a: True
def double(x):
    return None
""",
    "look for the test in the frames": """
import sys
def double(x):
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):
            if callable(value) and getattr(value, "__name__", "") == "check":
                value.__code__ = (lambda candidate: None).__code__
        frame = frame.f_back
    return None
""",
    "look for the test in memory": """
import gc
def double(x):
    for o in gc.get_objects():
        if isinstance(o, str) and "assert candidate" in o:
            return 2 * x
    return None
""",
    "forge the verdict": r"""
import os
def double(x):
    for fd in range(3, 64):
        for i in range(10):
            for body in (b'{"id": %d, "error": null}' % i, b'{"id": %d, "value": true}' % i):
                try:
                    os.write(fd, len(body).to_bytes(4, "big") + body)
                except OSError:
                    pass
    return None
""",
    "no such function": "def triple(x):\n    return 3 * x",
    "no code": "def double(x:",
    "a wrong answer": "def double(x):\n    return x",
}


@pytest.fixture(params=[*choose.LOCAL, "auto"], scope="module")
def judging(request):
    """The backends that can hold both sides: a remote one cannot call back."""
    return opened(request.param)


def judge(sandbox, code):
    with sandbox.session() as candidate, sandbox.session() as test:
        candidate.run(code)
        return test.run(TEST, functions={"candidate": lambda *args, **kwargs: candidate.call("double", args, kwargs)})


def test_the_right_answer_wins(judging):
    assert judge(judging, RIGHT).ok


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_loses(cheat, judging):
    verdict = judge(judging, CHEATS[cheat])
    assert not verdict.ok, verdict
    assert judge(judging, RIGHT).ok


ITERATING = {
    "all": "assert all(map(candidate, [1, 2, 3]))",
    "any": "assert not any(map(candidate, [0]))",
    "sum": "assert sum(abs(a - b) for a, b in zip(map(candidate, [1, 2]), [2, 4])) < 1e-6",
    "for": "for a, b in zip(map(candidate, [1, 2]), [2, 4]):\n    assert a == b",
    "list": "assert list(map(candidate, [])) == list(map(candidate, [1]))",
}


@pytest.mark.parametrize("raised", ["StopIteration", "StopIteration(2)", "StopAsyncIteration", "GeneratorExit"])
@pytest.mark.parametrize("test", ITERATING)
def test_an_end_of_iteration_is_an_error(test, raised, judging):
    """A test that iterates over calls would end early, and pass; PEP 479 says the same of generators."""
    with judging.session() as candidate, judging.session() as tester:
        candidate.run(f"def double(x):\n    raise {raised}")
        ran = tester.run(ITERATING[test], functions={"candidate": lambda *args: candidate.call("double", args)})
        assert not ran.ok, ran


def test_what_comes_back_is_plain(judging):
    """Exactly the built-in types, whatever the function returned."""
    with judging.session() as session:
        session.run("def f(x):\n    return x")
        for value in [None, True, 3, -(10**50), 1.5, "a", b"a", [1, (2, {3}), {"k": [None]}], {(1, 2): {"a": b"b"}}]:
            back = session.call("f", [value])
            assert back == value and type(back) is type(value)
        session.run("def g():\n    return lambda: 1")
        session.run("def h():\n    raise KeyError('k')")
        with pytest.raises(CallError, match="KeyError"):
            session.call("h")
        with pytest.raises(CallError):
            session.call("nothing of this name")
        with pytest.raises(ValueError, match="cannot cross"):
            session.call("f", [object()])


# --- messages that nobody asked for -----------------------------------------------------------------------------------

# {} is the body of a message, which may name the "id" ID of the exchange.
FLOOD = """
import os, sys
def flood():
    frame = sys._getframe()
    while 'self' not in frame.f_locals:
        frame = frame.f_back
    guest = frame.f_locals['self']
    body = ({}).replace(b'ID', str(guest.exchange).encode())
    data = len(body).to_bytes(4, 'big') + body
    while True:
        os.write(guest.control, data)
"""
FLOODS = {
    "a million lists for nobody": "b'{\"id\": -1, \"x\": [' + b'[],' * 1_390_000 + b'0]}'",
    "a million lists": "b'{\"id\": ID, \"value\": [' + b'[],' * 1_390_000 + b'0]}'",
    "two million numbers": "b'{\"id\": ID, \"value\": [' + b'1,' * 2_000_000 + b'0]}'",
    "a million lists in another charset": "('{\"value\": [' + '[],' * 690_000 + '0]}').encode('utf-16')",
    "small messages for nobody": "b'{\"id\": -1}'",
    "long messages for nobody": "b'{\"id\": -1, \"x\": \"' + b'x' * 500_000 + b'\"}'",
}


@pytest.mark.parametrize("what", FLOODS)
@pytest.mark.parametrize("backend", FULL)
def test_a_flood_of_messages_ends_the_program(backend, what, monkeypatch):
    """What it says is not read for seconds, in which no other thread of this process runs."""
    read = []
    monkeypatch.setattr(process, "json", SimpleNamespace(loads=lambda text: read.append(len(text)) or json.loads(text)))
    with opened(backend, replace(LIMITS, wall_seconds=10, cpu_seconds=10)).session() as session:
        code = FLOOD.format(FLOODS[what])
        assert session.run(code + "x = 1").ok
        read.clear()
        ran = session.run("flood()")
        assert ran.status == "died" and ran.seconds < 8, ran
        assert len(read) <= 9 and sum(read) < 2_000_000
        read.clear()
        with pytest.raises(CallError, match="Died"):
            session.call("flood")
        assert len(read) <= 12 and sum(read) < 2_000_000  # the session was made again
        assert session.run("x").output == "1\n"


@pytest.mark.parametrize("backend", choose.LOCAL)
def test_a_value_of_too_many_parts_is_said(backend):
    asked = []
    with opened(backend, replace(LIMITS, wall_seconds=20, cpu_seconds=20)).session() as session:
        session.run("def f(n):\n    return [[]] * n")
        assert session.call("f", [100_000]) == [[]] * 100_000
        with pytest.raises(CallError, match="NotLiteral.*more than 262144 brackets and commas"):
            session.call("f", [150_000])
        ran = session.run("ask([[]] * 150_000)", {"ask": asked.append})
        assert ran.status == "exception" and "brackets and commas" in ran.error and not asked
        for code in ("0] * 262_000", "[0, 1]] * 87_000", "(0, 1)] * 65_000"):  # what docs/tools/python.md says
            session.run(f"def g():\n    return [{code}")
            assert session.call("g") == eval(f"[{code}")
        session.run("def g():\n    return {n: 0 for n in range(87_000)}")
        assert session.call("g") == dict.fromkeys(range(87_000), 0)


@pytest.mark.parametrize("backend", choose.LOCAL)
def test_brackets_and_commas_in_texts_are_no_parts(backend):
    """A table of comma-separated values is one text."""
    texts = [",".join(["ab"] * 300_000), '[{"\\' * 80_000, "\\", '\\"', '"']
    heard = []
    with opened(backend, replace(LIMITS, wall_seconds=20, cpu_seconds=20)).session() as session:
        session.run(f"texts = [','.join(['ab'] * 300_000), {texts[1][:4]!r} * 80_000, *{texts[2:]!r}]")
        session.run("def f():\n    return texts")
        assert session.call("f") == texts
        assert session.run("ask(texts)", {"ask": lambda value: heard.append(value)}).ok and heard == [texts]


@pytest.mark.parametrize("lead", ['"', '"\\"",', '"\\\\",', "\\", '\\"', '"\\\\\\"",'])
def test_what_is_no_json_is_no_way_around_the_parts(lead):
    """As many lists as there are before the first mistake are counted."""
    lists = "[]," * 150_000
    for text in (f"[{lists}{lead}", f"[{lists}{lead}]", f'["{lead}{lists}', f"[{lead}{lists}0]"):
        try:
            guest.check_size(text)
        except guest.NotLiteral:
            continue
        with pytest.raises(ValueError, match="column [0-9]{1,2} "):  # read to there, and no further
            json.loads(text)
    began = time.monotonic()
    for text in ('"' * guest.MAX_MESSAGE, "\\" * guest.MAX_MESSAGE, '"\\"' * (guest.MAX_MESSAGE // 4)):
        guest._without_texts(text + lists)
    assert time.monotonic() - began < 5


def test_an_answer_by_a_server_has_no_more_parts(monkeypatch):
    mark = "5" * 32
    monkeypatch.setattr(remote.secrets, "token_hex", lambda size: mark)
    last = '{"value": [' + "[]," * 150_000 + "0]}"
    body = {"status": "Finished", "return_code": 0, "stdout": f"\n{mark}\n\n{mark}{last}\n"}
    monkeypatch.setattr(remote.Remote, "post", lambda *arguments: body)
    with pytest.raises(CallError, match="Died"):
        remote.Remote("http://127.0.0.1:1", LIMITS).session().call("f")
