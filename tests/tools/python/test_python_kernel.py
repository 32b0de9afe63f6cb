"""Programs that go after the kernel: what it counts for nobody, what all its users share, what outlives a process.

Every sandbox contains every one; and in a bubblewrap without the mend against it (the filter lets its calls through, or
the guest leaves a line out) it succeeds, so none is contained by accident.
"""

import fcntl
import json
import marshal
import os
import platform
import subprocess
import sys
import time
from importlib.util import MAGIC_NUMBER
from pathlib import Path

import pytest

from agent_r1_tools.python import (
    Limits,
    SandboxError,
    bubblewrap,
    choose,
    fork_server,
    layout,
    open_sandbox,
    seccomp,
)
from agent_r1_tools.python.launch import GUEST

LIMITS = Limits(wall_seconds=20, cpu_seconds=20, memory=512 << 20, output=2000, files=4 << 20)
FULL = [name for name, local in choose.LOCAL.items() if local.all_of_python]
COLUMN = 0 if platform.machine() == "x86_64" else 1
HEAD = """
import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    return libc.syscall(ctypes.c_long(number), *arguments)
def reached(result, *also):  # the filter says "not permitted"; a kernel that can't do it, something else
    if result >= 0 or ctypes.get_errno() in (22, 25, 38, 95, *also):
        print('ESCAPED')
library = os.open(os.__file__, os.O_RDONLY)
"""

# What happens: (the calls that it takes, the code). NR is the number of the first one.
ATTACKS = {
    # memory and things that no limit of the guest counts
    "pages that are pinned in a pipe": (
        [(278, 75)],
        "pages = ctypes.create_string_buffer(8192)\n"
        "reached(call(NR, os.pipe()[1], (ctypes.c_void_p * 2)(ctypes.addressof(pages), 4096), 1, 0))",
    ),
    "pages of a deleted file, in a pipe": (
        [(275, 76)],
        "f = os.open('/tmp/f', os.O_RDWR | os.O_CREAT)\n"
        "os.write(f, b'x' * 4096)\nos.lseek(f, 0, 0)\nos.remove('/tmp/f')\n"
        "reached(call(NR, f, None, os.pipe()[1], None, 4096, 0))",
    ),
    "a pipe of a megabyte": ([seccomp.FCNTL], "reached(libc.fcntl(os.pipe()[1], 1031, 1 << 20))"),
    "pages that stay in memory": ([(149, 228)], "reached(call(NR, ctypes.create_string_buffer(8192), 4096))"),
    "mapped pages that stay in memory": (
        [seccomp.MMAP],
        "libc.mmap.restype = ctypes.c_long\nreached(libc.mmap(None, ctypes.c_size_t(4096), 3, 0x2022, -1, 0), 11)",
    ),
    "huge pages that the machine has set aside": (
        [seccomp.MMAP],
        "libc.mmap.restype = ctypes.c_long\nreached(libc.mmap(None, ctypes.c_size_t(2 << 20), 3, 0x40022, -1, 0), 12)",
    ),
    "huge pages again": ([seccomp.PRCTL], "reached(libc.prctl(41, 0, 0, 0, 0))"),
    "shared memory that outlives its user": ([(29, 194)], "reached(call(NR, 0, 1 << 20, 0o1600))"),
    "messages that wait in the kernel": ([(68, 186)], "reached(call(NR, 0, 0o1600))"),
    "semaphores that outlive their user": ([(64, 190)], "reached(call(NR, 0, 1, 0o1600))"),
    "a message queue with a name": ([(240, 180)], "reached(call(NR, b'q', os.O_CREAT | os.O_RDWR, 0o600, None))"),
    "a key in the kernel": ([(248, 217)], "reached(call(NR, b'user', b'k', b'v', 1, -2))"),
    "rules of Landlock": ([(444, 444)], "reached(call(NR, (ctypes.c_uint64 * 1)(1), 8, 0))"),
    "a filter of its own": (
        [(317, 277)],
        "rule = ctypes.create_string_buffer((6).to_bytes(4, 'little') + (0x7fff0000).to_bytes(4, 'little'))\n"
        "reached(call(NR, 1, 0, (ctypes.c_uint64 * 2)(1, ctypes.addressof(rule))))",
    ),
    "a table of segments": (
        [(154, None)],
        "reached(call(NR, 1, (ctypes.c_uint32 * 4)(0, 0, 0xfffff, 0x51), 16))",
    ),
    "more descriptors than it may have, on their way": (
        [(46, 211)],
        "sender, receiver = socket.socketpair()\nheld = 0\n"
        "for _ in range(30):\n    fds = os.pipe()\n    socket.send_fds(sender, [b'x'], fds)\n"
        "    for fd in fds:\n        os.close(fd)\n    held += 2\n"
        "try:\n    while True:\n        os.pipe()\n        held += 2\n"
        "except OSError:\n    print('ESCAPED' if held > 64 else '')",
    ),
    # what all of the machine shares
    "room for input and output in the background": ([(206, 0)], "reached(call(NR, 100, (ctypes.c_uint64 * 1)()))"),
    "watch files": ([(294, 26)], "reached(call(NR, 0))"),
    "watch a file system": ([(300, 262)], "reached(call(NR, 0x200, 0))"),
    "hear when a folder is read": (
        [seccomp.FCNTL],
        "import signal\nsignal.signal(signal.SIGIO, signal.SIG_IGN)\n"  # comes when another process reads it
        "reached(libc.fcntl(os.open(os.path.dirname(os.__file__), os.O_RDONLY), 1026, 1))",
    ),
    "stop all processors": ([(324, 283)], "reached(call(NR, 1, 0, 0))"),
    "write a disk out": ([(306, 267)], "reached(call(NR, os.open('/tmp', os.O_RDONLY)))"),
    "drop what others have read": ([(221, 223)], "reached(call(NR, library, 0, 4096, 4))"),
    "have the machine read": ([(187, 213)], "reached(call(NR, library, 0, 4096))"),
    "leave the processors of its parent": (
        [(203, 122)],
        "reached(call(NR, 0, 8, (ctypes.c_uint64 * 1)(1 << min(os.sched_getaffinity(0)))))",
    ),
    "another scheduler": ([(144, 119)], "reached(call(NR, 0, 3, (ctypes.c_int * 1)(0)))"),
    "a place in the queue of a disk": ([(251, 30)], "reached(call(NR, 1, 0, 2 << 13))"),
    "which memory is taken": ([(238, 237)], "reached(call(NR, 1, (ctypes.c_uint64 * 1)(1), 64))"),
    "push pages out": (
        [seccomp.MADVISE],
        "import mmap\nm = mmap.mmap(-1, 4096)\nreached(libc.madvise(ctypes.c_void_p(ctypes.addressof("
        "ctypes.c_char.from_buffer(m))), ctypes.c_size_t(4096), 21))",
    ),
    "find out who has the same page": (
        [seccomp.MADVISE],
        "import mmap\nm = mmap.mmap(-1, 4096)\nreached(libc.madvise(ctypes.c_void_p(ctypes.addressof("
        "ctypes.c_char.from_buffer(m))), ctypes.c_size_t(4096), 12))",
    ),
    "where a file lies on its disk": (
        [seccomp.IOCTL],
        "reached(libc.ioctl(library, ctypes.c_ulong(0xC020660B), (ctypes.c_uint64 * 16)(0, 4096)))",
    ),
    "a file by its number": (
        [(303, 264)],
        "handle = ctypes.create_string_buffer((128).to_bytes(4, 'little') + bytes(132))\n"
        "reached(call(NR, -100, b'/tmp', handle, (ctypes.c_int * 1)(), 0))",
    ),
    # other sessions, and the time after the run
    "a name that other sessions find taken": (
        [(49, 200)],
        "ours, _ = socket.socketpair()\nreached(call(NR, ours.fileno(), b'\\1\\0\\0note', 7))",
    ),
    "a letter by name": (
        [(44, 206), (42, 203), (49, 200), seccomp.SOCKETPAIR],
        "ours, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\nours.bind('\\0letters')\n"
        "libc.connect(ours.fileno(), bytes(16), 16)\n"  # to nobody
        "other, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\nother.sendto(b'x', '\\0letters')\n"
        "print('ESCAPED')",
    ),
    "a timer that nobody switches off": ([(222, 107)], "reached(call(NR, 0, None, (ctypes.c_uint64 * 1)()))"),
    "outlive its parent": ([seccomp.PRCTL], "reached(libc.prctl(1, 0, 0, 0, 0))"),
    # parts of the kernel with a history
    "an old way of doing things": ([(135, 92)], "reached(call(NR, 0x0040000))"),
    "answer its own page faults": ([(323, 282)], "reached(call(NR, 1))"),
    "in which order the kernel has its files": ([(312, 272)], "reached(call(NR, os.getpid(), os.getpid(), 0, 0, 0))"),
}
ATTACKS = {name: (calls, code) for name, (calls, code) in ATTACKS.items() if calls[0][COLUMN] is not None}


@pytest.fixture(params=choose.LOCAL, scope="module")
def any_sandbox(request):
    return open_sandbox(request.param, LIMITS)


@pytest.fixture(params=FULL, scope="module")
def sandbox(request):
    return open_sandbox(request.param, LIMITS)


def test_there_are_at_least_twenty_more():
    assert len(ATTACKS) >= 30


def program(attack):
    calls, code = ATTACKS[attack]
    return HEAD + code.replace("NR", str(calls[0][COLUMN]))


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_on_the_kernel_is_contained(attack, any_sandbox):
    ran = any_sandbox.run(program(attack))
    assert "ESCAPED" not in ran.output.splitlines() and ran.status in ("ok", "exception"), ran


@pytest.mark.bubblewrap
@pytest.mark.parametrize("attack", ATTACKS)
def test_it_succeeds_where_the_filter_lets_its_calls_through(attack):
    sandbox = open_sandbox("bubblewrap", LIMITS)
    sandbox._filter = seccomp.seccomp_filter(False, (seccomp.MOUNT, *ATTACKS[attack][0]))
    ran = sandbox.run(program(attack))
    assert "ESCAPED" in ran.output.splitlines(), ran


# --- what the filter can't see ----------------------------------------------------------------------------------------

OTHERS = {
    "symbolic links without end": """
import os
made = 0
try:
    for i in range(3000):
        os.symlink('x' * 50, f'/tmp/{i}')
        made += 1
except OSError:
    pass
print('ESCAPED' if made > 2000 else '')
""",
    "folders without end": """
import os
made = 0
try:
    for i in range(3000):
        os.mkdir(f'/tmp/{i}')
        made += 1
except OSError:
    pass
print('ESCAPED' if made > 2000 else '')
""",
    "one byte of every huge page": """
import ctypes, mmap, resource
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
m = mmap.mmap(-1, 202 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
m.madvise(mmap.MADV_HUGEPAGE)
start = -ctypes.addressof(ctypes.c_char.from_buffer(m)) % (2 << 20)
for i in range(100):
    m[start + (i << 21)] = 1
print('ESCAPED' if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before > 50_000 else '')
""",
    "signals that wait": """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
for _ in range(1000):
    os.kill(os.getpid(), signal.SIGRTMIN)
waiting = 0
while signal.sigtimedwait([signal.SIGRTMIN], 0):
    waiting += 1
print('ESCAPED' if waiting > 500 else '')
""",
    "a terminal of its own": "import os\nos.openpty()\nprint('ESCAPED')",
    "look around in /proc": "import os\nprint('ESCAPED' if os.listdir('/proc') else '')",
    "what is mounted where": "print('ESCAPED' if open('/proc/self/mountinfo').read() else '')",
    "mount a folder of its own": """
import ctypes
if ctypes.CDLL(None).mount(b'tmpfs', b'/tmp', b'tmpfs', 6, b'size=1g') == 0:
    print('ESCAPED')
""",
}


@pytest.mark.parametrize("attack", OTHERS)
def test_what_no_filter_sees_is_contained(attack, any_sandbox):
    ran = any_sandbox.run(OTHERS[attack])
    assert "ESCAPED" not in ran.output.splitlines() and ran.status in ("ok", "exception"), ran


WITHOUT = {  # what is in the guest, or in the arguments of bwrap, when the mend is taken away
    "symbolic links without end": (",nr_inodes=1024", ""),
    "folders without end": (",nr_inodes=1024", ""),
    "one byte of every huge page": ('ask_kernel("prctl", 41, 1, 0, 0, 0)', "pass"),
    "signals that wait": ("(64, 64))  # for signals", "(5000, 5000))  # for signals"),
    "a terminal of its own": ["--dev", "/dev"],
    "look around in /proc": ["--proc", "/proc"],
    "what is mounted where": ["--proc", "/proc"],
}


@pytest.mark.bubblewrap
@pytest.mark.parametrize("attack", WITHOUT)
def test_what_no_filter_sees_succeeds_without_its_mend(attack, monkeypatch):
    sandbox = open_sandbox("bubblewrap", LIMITS)
    sandbox._filter = seccomp.seccomp_filter(False, (seccomp.MOUNT, seccomp.IOCTL))  # a terminal is opened by ioctl
    without = WITHOUT[attack]
    if isinstance(without, list):
        sandbox._command += without
    else:
        source = GUEST.read_text()
        assert source.count(without[0]) == 1
        code = marshal.dumps(compile(source.replace(*without), "/guest.pyc", "exec"))
        monkeypatch.setattr(bubblewrap, "compiled_guest", lambda: MAGIC_NUMBER + bytes(12) + code)
    if "huge page" in attack and "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("this machine has no huge pages")
    ran = sandbox.run(OTHERS[attack])
    assert "ESCAPED" in ran.output.splitlines(), ran


def test_locks_are_seen_by_nobody(sandbox):
    """Not by another session, and not out here; but databases get theirs."""
    name = layout.library()[0] if os.path.isfile(layout.library()[0]) else os.__file__
    lock = f"import fcntl\nf = open({name!r})\n"
    with sandbox.session() as one, sandbox.session() as other, open(name) as ours:
        for way in ("fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)", "fcntl.lockf(f, fcntl.LOCK_SH | fcntl.LOCK_NB)"):
            assert one.run(lock + way).ok
            assert other.run(lock + way).ok
        fcntl.flock(ours, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(ours, fcntl.LOCK_UN)
        asked = fcntl.fcntl(ours, fcntl.F_GETLK, b"\1" + bytes(31))  # F_WRLCK, all of the file
        assert asked[0] == fcntl.F_UNLCK
        assert other.run("fcntl.fcntl(f, fcntl.F_GETLK, bytes(32))").error.startswith("PermissionError")


# --- between runs, and after them -------------------------------------------------------------------------------------

BETWEEN = {
    "a timer": """
import _signal
_signal.signal(_signal.SIGALRM, lambda *a: None)
_signal.setitimer(_signal.ITIMER_REAL, 0.01, 0.01)
_signal.setitimer = lambda *a: None  # nobody switches it off
""",
    "a forged answer": """
import os, sys
frame = sys._getframe()
while 'self' not in frame.f_locals:
    frame = frame.f_back
guest = frame.f_locals['self']
body = ('{"id": %d, "error": null}' % guest.exchange).encode()
os.write(guest.control, len(body).to_bytes(4, 'big') + body)
while True:
    pass
""",
}


@pytest.mark.parametrize("how", BETWEEN)
def test_nothing_runs_between_runs(how, sandbox):
    with sandbox.session() as session:
        assert session.run(BETWEEN[how]).ok
        pid = Path(f"/proc/self/fdinfo/{session._guest.pidfd}").read_text().split("Pid:")[1].split()[0]
        deadline = time.monotonic() + 10  # it is stopped when it runs next
        while (state := Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) != "T":
            assert time.monotonic() < deadline, state
            time.sleep(0.01)


UNPRIVILEGED = """
import ctypes, json, os, sys
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from agent_r1_tools.python import Limits, kernel, open_sandbox, seccomp
if len(sys.argv) == 1 and os.getuid() == 0:  # as anyone else: a user namespace in which this user has another number
    kernel.unshare(kernel.CLONE_NEWUSER)
    for file, text in (("setgroups", "deny"), ("uid_map", "1000 0 1"), ("gid_map", "1000 0 1")):
        Path(f"/proc/self/{file}").write_text(text)
    os.execv(sys.executable, [sys.executable, __file__, "again"])
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # processes whose parent ends become ours
sandbox = open_sandbox("bubblewrap", Limits(wall_seconds=1))
code = "import ctypes, time\\nprint(ctypes.CDLL(None).prctl(1, 0, 0, 0, 0))\\ntime.sleep(600)"
runs = [sandbox.run(code)]
sandbox._filter = seccomp.seccomp_filter(False, (seccomp.MOUNT, seccomp.PRCTL))  # even if it could
runs.append(sandbox.run(code))
left = []
for entry in Path("/proc").glob("[0-9]*"):
    try:
        parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
    except OSError:
        continue
    if int(parent) == os.getpid():  # zombies too
        left.append(int(entry.name))
        os.kill(int(entry.name), 9)
print(json.dumps([os.getuid(), left, [ran.output.split()[0] for ran in runs], [ran.status for ran in runs]]))
"""


@pytest.mark.bubblewrap
def test_a_guest_cannot_outlive_its_run(tmp_path):
    """Also where bubblewrap has no privileges, and the guest is process 1 of its namespace."""
    (tmp_path / "unprivileged.py").write_text(UNPRIVILEGED)
    ran = subprocess.run([sys.executable, tmp_path / "unprivileged.py"], capture_output=True, text=True, timeout=200)
    if "a new namespace" in ran.stderr or "bubblewrap doesn't work here" in ran.stderr:
        pytest.skip(f"bubblewrap needs privileges here: {ran.stderr[-200:]}")
    uid, left, cleared, statuses = json.loads(ran.stdout)
    assert uid != 0
    assert left == []
    assert cleared == ["-1", "0"] and statuses == ["timeout", "timeout"]


def test_a_fork_server_whose_interpreter_cannot_be_run_leaves_nothing_open(monkeypatch):
    """As where it stands in somebody's private folder."""
    monkeypatch.setattr(layout, "interpreter", lambda: "/nowhere/python")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SandboxError, match="the fork server did not start: /nowhere/python: .*No such file"):
        fork_server._Server(())
    assert len(os.listdir("/proc/self/fd")) == before
