"""The filter of system calls: the same on every processor, wide enough for programs, with network for the internet."""

import os
import platform
import socket
import struct

import pytest

from agent_r1_tools.python import Limits, choose, layout, open_sandbox, seccomp

FULL = [name for name, local in choose.LOCAL.items() if local.all_of_python]


def answer(program, number, *arguments, audit):
    """What a filter says to a call: a machine for its language, as far as it uses it."""
    data = struct.pack("=IIQ6Q", number, audit, 0, *arguments, *[0] * (6 - len(arguments)))
    code = list(struct.iter_unpack("=HBBI", program))
    at, value = 0, 0
    while True:
        operation, then, otherwise, operand = code[at]
        at += 1
        if operation == seccomp.LOAD:
            value = int.from_bytes(data[operand : operand + 4], "little")
        elif operation == seccomp.GIVE:
            return operand
        else:
            compare = {seccomp.EQUAL: int.__eq__, seccomp.GREATER: int.__gt__, seccomp.ANY_BIT: int.__and__}
            at += then if compare[operation](value, operand) else otherwise


@pytest.mark.parametrize("machine", seccomp.ARCHITECTURES)
def test_the_filter_says_the_same_on_every_processor(machine, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    column, audit = seccomp.ARCHITECTURES[machine]
    plain, network = seccomp.seccomp_filter(False), seccomp.seccomp_filter(True)
    assert max(len(plain), len(network)) // 8 <= 4096  # as many as the kernel takes

    def says(call, *arguments, program=plain):
        given = answer(program, call[column], *arguments, audit=audit)
        words = {seccomp.ERRNO | 0: "granted", seccomp.ERRNO | 1: "no", seccomp.ERRNO | 38: "none"}
        words[seccomp.ERRNO | 95] = "not supported"
        return (words | {seccomp.ALLOW: "yes"})[given]

    assert {says(call) for call in seccomp.ALLOWED.values() if call[column] is not None} == {"yes"}
    sends = {"sendto": "yes"}  # to nobody
    assert {name: says(call) for name, call in seccomp.NETWORK.items()} == dict.fromkeys(seccomp.NETWORK, "no") | sends
    assert {says(call, program=network) for call in seccomp.NETWORK.values()} == {"yes"}
    assert says(seccomp.SENDTO, 3, 0, 0, 0, 1) == says(seccomp.SENDTO, 3, 0, 0, 0, 1 << 32) == "no"
    assert says(seccomp.SOCKET, 2, 1, 6) == says(seccomp.SOCKET, 1, 1, 0, program=network) == "no"
    assert says(seccomp.SOCKET, 10, 1, 6, program=network) == "yes"
    assert says(seccomp.PRCTL, 41, 1, 0) == says(seccomp.FCNTL, 3, 1030) == says(seccomp.MADVISE, 0, 0, 4) == "yes"
    assert says(seccomp.PRCTL, 41, 1, 2) == says(seccomp.PRCTL, 1, 0) == says(seccomp.PRCTL, 22, 2) == "no"
    assert says(seccomp.PRLIMIT64, 0, 7) == says(seccomp.SETPRIORITY, 0, 0, 19) == "yes"
    assert says(seccomp.PRLIMIT64, 1, 7) == says(seccomp.SETPRIORITY, 0, 1) == says(seccomp.SETPRIORITY, 2, 0) == "no"
    assert says(seccomp.FCNTL, 3, 6) == says(seccomp.FLOCK, 3, 2) == "granted"
    assert {says(call) for call in seccomp.SETXATTR} == {"not supported"}
    assert says(seccomp.FCNTL, 3, 1024) == says(seccomp.MADVISE, 0, 0, 100) == says(seccomp.MOUNT) == "no"
    assert says(seccomp.SOCKETPAIR, 1, 0x80001) == "yes" and says(seccomp.SOCKETPAIR, 1, 2) == "no"
    assert says(seccomp.MMAP, 0, 4096, 3, 0x22) == "yes" and says(seccomp.MMAP, 0, 4096, 3, 0x40022) == "no"
    assert says(seccomp.CLONE, 0x3D0F00) == "yes" and says(seccomp.CLONE, 0x10000011) == "no"
    assert says(seccomp.CLONE3) == says((9999, 9999)) == "none"
    others = {number: says((number, number)) for number in range(seccomp.NEWEST + 1)}
    allowed = {call[column] for call in seccomp.ALLOWED.values()} | {seccomp.CLONE[column], seccomp.MMAP[column]}
    by_arguments = (seccomp.SENDTO, seccomp.FCNTL, seccomp.MADVISE, seccomp.PRLIMIT64, seccomp.SETPRIORITY)
    allowed |= {call[column] for call in by_arguments}  # with arguments of 0
    assert {number for number, said in others.items() if said == "yes"} == allowed - {None, 452}
    assert answer(plain, 0, audit=audit ^ 1) == seccomp.KILL


@pytest.mark.bubblewrap
def test_where_a_guest_may_not_mount_nothing_can_be_written():
    sandbox = open_sandbox("bubblewrap")
    sandbox._filter = seccomp.seccomp_filter(False)
    assert sandbox.run("open('/tmp/a', 'w')").error.startswith("OSError: [Errno 30]")
    assert sandbox.run("6 * 7").output == "42\n"


# Each uses calls that programs need, and would end with "not permitted" if the filter were too narrow.
USES = {
    "asyncio": "import asyncio\nasyncio.run(asyncio.sleep(0, 3))",
    "a database": """
import sqlite3
db = sqlite3.connect('/tmp/a.db')
db.execute('create table t (x)')
db.execute('insert into t values (3)')
db.commit()
sqlite3.connect('/tmp/a.db').execute('select x from t').fetchone()[0]
""",
    "files": """
import os, shutil, tempfile
folder = tempfile.mkdtemp()
open(folder + '/a', 'w').write('xxx')
shutil.copy(folder + '/a', '/tmp/b')
shutil.copytree(folder, '/tmp/e')
shutil.make_archive('/tmp/z', 'zip', folder)
os.utime('/tmp/b', (1, 1))
os.rename('/tmp/b', '/tmp/c')
shutil.rmtree(folder)
os.path.getsize('/tmp/c')
""",
    "a process": """
import subprocess, sys
print(subprocess.check_output([sys.executable, '-c', 'print(3)'], text=True).strip())
""",
    "threads": """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(2) as pool:
    print(sum(pool.map(len, ['ab', 'c'])))
""",
    "a fork": """
import multiprocessing
context = multiprocessing.get_context('fork')
a, b = context.Pipe()
p = context.Process(target=b.send, args=(3,))
p.start()
print(a.recv())
p.join()
""",
    "selectors": """
import os, selectors
a, b = os.pipe()
os.write(b, b'x')
selector = selectors.DefaultSelector()
selector.register(a, 1)
os.set_blocking(a, False)
len(selector.select(1)) + 2
""",
    "mapped files": """
import mmap
open('/tmp/m', 'wb').write(b'x' * 5000)
with open('/tmp/m', 'r+b') as f:
    m = mmap.mmap(f.fileno(), 0)
m[:1] = b'3'
m.flush()
m.madvise(mmap.MADV_DONTNEED)
int(m[:1])
""",
    "numpy": """
import numpy as np
np.save('/tmp/a.npy', np.eye(3))
int(np.linalg.det(np.load('/tmp/a.npy', mmap_mode='r')) * 3)
""",
    "time": """
import os, time
time.sleep(0.001)
time.tzset()
os.nice(1)
time.process_time() and 3
""",
}


@pytest.mark.parametrize("backend", FULL)
def test_what_programs_use_works(backend):
    sandbox = open_sandbox(backend, Limits(wall_seconds=100, cpu_seconds=100, processes=4))
    found = {name: sandbox.run(code) for name, code in USES.items() if name != "numpy" or layout.installed("numpy")}
    assert {name: ran.output for name, ran in found.items() if ran.output != "3\n"} == {}


@pytest.mark.bubblewrap
@pytest.mark.parametrize("family", ["UNIX", "NETLINK", "PACKET", "VSOCK", "ALG"])
def test_network_is_the_internet_and_nothing_else(family):
    """The sockets of this machine's own services often ask nobody who he is."""
    sandbox = open_sandbox("bubblewrap", Limits(network=True))
    ran = sandbox.run(f"import socket\nsocket.socket(socket.AF_{family}, socket.SOCK_RAW)")
    assert ran.error.startswith("PermissionError"), ran
    if family == "UNIX":
        with socket.socket(socket.AF_UNIX) as service:
            service.bind(f"\0agent-r1-service-{os.getpid()}")
            service.listen()
            code = f"import socket\nsocket.socket(socket.AF_UNIX).connect({service.getsockname().decode()!r})"
            assert not sandbox.run(code).ok
    assert sandbox.run("import socket\nsocket.socket().close()").ok
