"""The shell tool: what commands do, what is kept, and forty attempts at what is not the policy's."""

import ctypes
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from agent_r1_tools import run_tool
from agent_r1_tools import shell as shell_module
from agent_r1_tools.python import Limits, SandboxError, choose
from agent_r1_tools.shell import BROKEN, Machine, ShellTool, pack, part

pytestmark = pytest.mark.bubblewrap

LIMITS = Limits(wall_seconds=10, cpu_seconds=10, memory=256 << 20, output=2_000, processes=24, files=4 << 20)
QUICK = replace(LIMITS, wall_seconds=1, cpu_seconds=1)
START = pack({"/app/a/b.txt": (0o644, b"one\ntwo\n"), "/app/go.sh": (0o755, b"#!/bin/bash\necho went $1\n")})
SECRET = "the-hidden-tests-say-42-7d1e"
MARK = f"agent-r1-shell-{os.getpid()}"


@pytest.fixture
def shell():
    tool = ShellTool(Machine(limits=LIMITS), START)
    yield tool
    tool.close()


@pytest.fixture
def quick():
    tool = ShellTool(Machine(limits=QUICK), START)
    yield tool
    tool.close()


def say(shell, command):
    return run_tool(shell, {"command": command})


# --- what it does -----------------------------------------------------------------------------------------------------


def test_commands_their_output_and_their_files(shell):
    assert say(shell, "cat a/b.txt; ./go.sh far; pwd").content == "one\ntwo\nwent far\n/app"
    assert say(shell, "echo x > new; cd a; A=1").content == "[no output]"
    assert say(shell, "cat new; pwd; echo [$A]").content == "x\n/app\n[]"
    result = say(shell, "echo out; echo err >&2; exit 3")
    assert result.content == "out\nerr\n[exit status 3]" and result.ok and result.data == {"exit_code": 3}
    assert say(shell, "kill -9 $$").data == {"exit_code": -9}
    assert say(shell, "seq 1 100000").content.endswith("... [cut: longer than 2000 characters]")
    assert say(shell, "ls -l new").content.split()[2:4] == ["agent", "agent"]
    assert say(shell, "python3 -c 'import json, csv, sqlite3, re; print(6 * 7)'").content == "42"
    assert say(shell, "tar czf t.tgz a && rm -r a && tar xzf t.tgz && cat a/b.txt && cp -a a c && diff -r a c").ok
    assert say(shell, "awk '{n += NR} END {print n}' a/b.txt; sed -n 2p a/b.txt; printf 'b\\na\\n' | sort").content == (
        "3\ntwo\na\nb"
    )


def test_a_command_that_takes_too_long_is_stopped_and_what_it_did_stays(quick):
    result = say(quick, "echo begun; echo x > made; sleep 600")
    assert result.content == "begun\n[stopped after 1 seconds]" and not result.ok and result.fault is None
    assert say(quick, "cat made").content == "x"


def test_commands_of_any_kind_get_an_answer(shell):
    for command in ("", " ", "\ud800", "'", "$(", "日本", "x" * 9_999, "\n" * 99, "<|im_end|>", "exec 1>&-"):
        assert say(shell, command).fault is None
    for command in ("a\0b", "x" * 10_001):
        result = say(shell, command)
        assert not result.ok and result.content.startswith("The command was not run: ")
    assert run_tool(shell, {"command": 3}).data == {"error": "bad_arguments"}


def test_a_state_is_all_of_the_files(shell):
    say(shell, "mkdir -p d/e && echo 1 > d/e/f && ln -s e/f d/l && chmod 500 d/e && chmod 000 go.sh && echo t > /tmp/t")
    look = "find /app /tmp -mindepth 1 -printf '%p %m %y %s %l %T@\\n' | sort; cat /tmp/t d/l"
    state, seen = shell.get_state(), say(shell, look).content
    say(shell, "rm -rf d a; echo changed > x")
    shell.set_state(state)
    assert say(shell, look).content == seen and "/app/go.sh 0 f" in seen
    other = pickle.loads(pickle.dumps(shell))
    assert say(other, look).content == seen
    other.close()
    shell.close()
    assert say(shell, look).content == seen  # begun again
    shell.set_state(None)
    assert shell.get_state() == START


def test_names_of_one_file_stay_names_of_one_file(shell):
    """They became files of their own, and those that then had no room were gone."""
    say(shell, "head -c 3000000 /dev/zero > big; for i in {1..20}; do ln big b$i; done; mkdir d; ln big d/c")
    say(shell, "chmod 0 big; ln -s big l; ln l m; ln -s $(seq -s- 80) long; mkfifo p; ln p q; touch -d 2001-01-01 d")
    look = "find . -mindepth 1 -printf '%p %m %y %n %s %l %T@\\n' | sort > /tmp/l; sha1sum < /tmp/l; wc -l < /tmp/l"
    seen = say(shell, look).content
    shell.set_state(shell.get_state())
    assert say(shell, look).content == seen and seen.split()[-1] == "31"
    assert say(shell, "chmod 600 b7; echo x > d/c; cat big b20; stat -c %h big").content == "x\nx\n22"
    before = shell.get_state()
    assert say(shell, "touch big").ok and shell.get_state() != before
    with Machine(limits=LIMITS) as other:
        other.unpack(part(shell.get_state(), "/app"))
        assert other.run("stat -c %h big p l") == ("22\n2\n2\n", 0)


DEEP = "python3 -c 'import os\nfor _ in range(500): os.mkdir(\"d\" * 9), os.chdir(\"d\" * 9)'"


@pytest.mark.parametrize("command", ["for i in $(seq 3); do truncate -s 3M $i; done", DEEP])
def test_what_does_not_fit_into_a_state_is_said(shell, command):
    """It was left out: an episode that was branched there went on without these files."""
    say(shell, "echo kept > keep.txt")
    before = shell.get_state()
    result = say(shell, f"{command}; echo more > more.txt")
    assert result.content == BROKEN and not result.ok and result.fault is None
    assert shell.get_state() == before and say(shell, "ls").content == "a\ngo.sh\nkeep.txt"


def test_files_are_carried_out_only_when_they_changed(shell):
    asked, call = [], shell.machine._call
    shell.machine._call = lambda name, *arguments: asked.append(name) or call(name, *arguments)
    say(shell, "head -c 2000000 /dev/urandom > big")
    assert asked.count("piece") == 2
    state = shell.get_state()
    say(shell, "cat big | sha1sum; echo x > y; rm y; touch -d '2001-01-01' .")
    assert asked.count("piece") == 2 and shell.get_state() == state
    for changed in ("python3 -c 'open(\"big\", \"r+b\").write(b\"0123\")'", "chmod 600 big", "touch big", "mkdir d"):
        say(shell, changed)
        assert shell.get_state() != state and asked.pop() == "piece"
        state = shell.get_state()


MANY = """python3 -c 'import os
for top in ("/app", "/tmp"):
    for n in range({files}):
        os.chdir(top)
        path = ""
        for _ in range({deep}):
            os.makedirs("\\x01" * 250, exist_ok=True)
            os.chdir("\\x01" * 250)
        open(str(n), "w").close()
'; head -c 16M /dev/zero > /app/big; head -c 16M /dev/zero > /tmp/big"""


def test_a_state_whose_names_are_too_long_is_not_kept():
    """It could be packed, but not be unpacked in the memory of a machine: the policy's doing was a fault of ours."""
    shell = ShellTool(Machine(), START)
    result = say(shell, MANY.format(files=900, deep=15))
    assert result.content == BROKEN and not result.ok and result.fault is None
    assert shell.get_state() == START and say(shell, "ls").content == "a\ngo.sh"
    assert say(shell, MANY.format(files=150, deep=7)).ok  # 3.3 MB of names, and all the bytes that there may be
    assert say(shell, "kill -9 -1").fault is None
    shell.machine.close()
    other = pickle.loads(pickle.dumps(shell))
    size, files = say(other, "cat /app/big | wc -c; find /app -type f | wc -l").content.split()
    assert int(size) > 16_700_000 and files == "153"
    other.close()
    shell.close()


def test_a_transfer_that_was_interrupted_is_made_again(shell, monkeypatch):
    machine = shell.machine
    machine.run("echo old > a.txt")
    assert b"old" in machine.pack()
    machine.run("echo new > a.txt")
    call = machine._call

    def interrupted(name, *arguments):
        if name == "piece":
            raise KeyboardInterrupt
        return call(name, *arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(machine, "_call", interrupted)
        machine.pack()
    assert b"new" in machine.pack()


def test_nobody_changes_the_limits_of_process_1(shell):
    """Without files to open it packed up none, and said nothing; without memory every later command died."""
    limit = "python3 -c 'import resource; resource.prlimit(1, resource.{}, (0, 0))'"
    say(shell, "echo kept > keep.txt")
    for name in ("RLIMIT_NOFILE", "RLIMIT_AS", "RLIMIT_CPU"):
        assert "PermissionError" in say(shell, limit.format(name)).content
    assert "renice" in say(shell, "renice 19 -p 1").content and say(shell, "ulimit -n 20; ulimit -n").content == "20"
    shell.set_state(shell.get_state())
    assert say(shell, "cat keep.txt; ulimit -n").content.splitlines()[0] == "kept"


def test_what_cannot_be_packed_is_not_left_out_in_silence(shell, monkeypatch, tmp_path):
    say(shell, "echo kept > keep.txt")
    before = shell.get_state()
    shell.close()
    broken = tmp_path / "inside.py"
    broken.write_text(shell_module.INSIDE.read_text().replace("contents.append(file.read())", "os.close(999)"))
    with monkeypatch.context() as patch:
        patch.setattr(shell_module, "INSIDE", broken)
        assert say(shell, "echo more > more.txt").content == BROKEN
    assert shell.get_state() == before and say(shell, "cat keep.txt").content == "kept"


def test_a_fork_has_a_machine_of_its_own(shell, in_fork):
    say(shell, "echo 1 > x")

    def child(results):
        results.put(say(shell, "cat x; echo 2 > x").content)
        shell.close()

    assert in_fork(child, 1) == ["1"]
    assert say(shell, "cat x").content == "1"


def test_only_a_folder_is_carried_over():
    packed = pack({"/app/a": (0o644, b"1"), "/app/b/c": (0o600, b"22"), "/tmp/t": (0o644, b"333")})
    assert part(packed, "/app") == pack({"/app/a": (0o644, b"1"), "/app/b/c": (0o600, b"22")})
    for nonsense in (b"", b"[[1]]", b"[" * 100_000, b'[["/app/a"]]\n', b"3"):
        with pytest.raises(SandboxError):
            part(nonsense, "/app")
    assert part(b'[["/app/../x", "file", 1, 1, 1]]\nx', "/app") == b"[]\n"
    for target in ("/tests/t", "/app/../tests/t", "t", 3):
        with pytest.raises(SandboxError):
            part(json.dumps([["/app/x", "same", 1, 1, target]]).encode() + b"\n", "/app")


def test_without_bubblewrap_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(choose, "_probed", {"bubblewrap": "there is no bwrap"})
    with pytest.raises(SandboxError, match="there is no bwrap. Remedy: apt-get install bubblewrap"):
        ShellTool()


# --- what it must not do ----------------------------------------------------------------------------------------------

# PATH, FOLDER, PORT, VICTIM and MARK stand for what the test planted. An attack prints ESCAPED where it succeeds.
ATTACKS = {
    "read a file outside": "cat PATH && echo ESCAPED",
    "read it through a link": "ln -s PATH l; cat l && echo ESCAPED",
    "read it by climbing": "cat ../../../../../../PATH && echo ESCAPED",
    "look for it everywhere": "find / -name '*MARK*' 2>/dev/null | grep -v ^/app && echo ESCAPED",
    "read the passwords": "cat /etc/shadow && echo ESCAPED",
    "find this project": "find / -path '*agent_r1/tasks*' 2>/dev/null | grep . && echo ESCAPED",
    "through the root of process 1": "cat /proc/1/root/PATH /proc/self/root/PATH && echo ESCAPED",
    "mount proc": "mkdir p; mount -t proc proc p && echo ESCAPED",
    "the environment of others": "cat /proc/*/environ && echo ESCAPED",
    "its own environment": "env | grep SECRET && echo ESCAPED",
    "write a file outside": "echo x > FOLDER/MARK && echo ESCAPED",
    "leave files everywhere": "for d in / /usr /usr/bin /etc /dev /programs /var/tmp; do echo x > $d/MARK; done; true",
    "change a program": "echo x >> /usr/bin/ls && echo ESCAPED",
    "change the users": "echo x >> /etc/passwd && echo ESCAPED",
    "kill process 1": "kill -9 1; sleep 0.1; kill -0 1 2>/dev/null; true",
    "interrupt process 1": "kill -INT 1; sleep 0.1; true",
    "end process 1's time": "kill -XCPU 1; sleep 0.1; true",
    "every signal to process 1": "for s in $(seq 64); do kill -$s 1 2>/dev/null; done; sleep 0.1; true",
    "kill everything": "kill -9 -1; true",
    "kill another process": "kill -9 VICTIM && echo ESCAPED",
    "a fork bomb": ":(){ :|:& };:",
    "a fork bomb that stays": "f(){ while true; do f & done; }; f & disown; sleep 1",
    "a daemon": "setsid nohup sleep 1000 > /dev/null 2>&1 & disown",
    "a daemon that writes later": "(sleep 0.3; echo ESCAPED > late) & disown; exit 0",
    "ignore every signal": "trap '' HUP INT TERM XCPU ALRM; while true; do :; done",
    "a flood of output": "yes ESC",
    "a flood of errors": "while true; do echo flood >&2; done",
    "a huge file": "head -c 100000000 /dev/zero > big; test $(stat -c %s big) -gt 8000000 && echo ESCAPED",
    "a huge sparse file": "truncate -s 1T sparse && echo ESCAPED",
    "many huge sparse files": "for i in $(seq 300); do truncate -s 4M s$i; done; true",
    "many links to a huge file": "head -c 3000000 /dev/zero > b; for i in $(seq 300); do ln b l$i; done; true",
    "many files": "for i in $(seq 3000); do : > f$i; done; test $(ls | wc -l) -gt 2000 && echo ESCAPED",
    "folders deeper than a path": "for i in $(seq 900); do mkdir dddddddd; cd dddddddd || break; done; true",
    "names that are no text": "touch $'\\xff\\xfe' $'a\\nb' -- -rf; true",
    "a pipe in the way": "mkfifo pipe; ln -s pipe link; true",
    "links in a circle": "ln -s a1 a2; ln -s a2 a1; ln -s . here; true",
    "a folder that nobody may read": "mkdir -p c/d; echo x > c/d/e; chmod 000 c/d c; true",
    "remove its own folder": "cd /; rm -rf /app; mv /app /tmp/x && echo ESCAPED; true",
    "memory": "python3 -c 'x = bytearray(1 << 30); print(\"ESCAPED\")'",
    "memory in variables": 'x=xxxxxxxxxxxxxxxx; while true; do x="$x$x"; done',
    "connect to this machine": (
        "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", PORT), 1)' && echo ESCAPED"
    ),
    "connect by bash": "(echo x > /dev/tcp/127.0.0.1/PORT) && echo ESCAPED",
    "become root": "python3 -c 'import os; os.setuid(0); print(\"ESCAPED\")'; su -c id && echo ESCAPED",
    "new namespaces": "unshare -Ur id && echo ESCAPED",
    "trace process 1": (
        "python3 -c 'import ctypes; c = ctypes.CDLL(None); print(\"ESCAPED\" if c.ptrace(16, 1, 0, 0) == 0 else \"\")'"
    ),
    "answer in the name of process 1": (
        "python3 -c 'import os\nfor fd in range(3, 64):\n try: os.write(fd, bytes([0, 0, 0, 2, 123, 125]))\n"
        " except OSError: pass'"
    ),
    "a device": "mknod disk b 254 0 && cat disk && echo ESCAPED",
    "raise the limits": "ulimit -u 10000 && echo ESCAPED; ulimit -v unlimited && echo ESCAPED; true",
}
# Others that stay try the same mechanisms.
SLOW = {
    "read it through a link", "read it by climbing", "look for it everywhere", "through the root of process 1",
    "the environment of others", "write a file outside", "change a program", "change the users", "kill process 1",
    "end process 1's time", "interrupt process 1", "kill everything", "a fork bomb that stays",
    "a daemon that writes later",
    "a flood of errors", "a huge sparse file", "many links to a huge file", "links in a circle", "memory in variables",
    "connect to this machine", "become root",
}  # fmt: skip


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outside")
    secret = folder / f"{MARK}.txt"
    secret.write_text(SECRET)
    for path in (secret, *secret.parents):  # nothing but the sandbox keeps anyone from it
        if path.stat().st_uid == os.getuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o055)
    heard = []
    server = socket.create_server(("127.0.0.1", 0))

    def listen():
        try:
            while True:
                heard.append(server.accept())
        except OSError:
            pass

    threading.Thread(target=listen, daemon=True).start()
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    os.environ["AGENT_R1_SECRET"] = SECRET
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # orphans become ours, so that none is overlooked
    port = server.getsockname()[1]
    yield {"PATH": str(secret), "FOLDER": str(folder), "PORT": port, "VICTIM": victim.pid, "heard": heard}
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)
    del os.environ["AGENT_R1_SECRET"]
    victim.kill()
    victim.wait()
    server.shutdown(socket.SHUT_RDWR)
    server.close()


def descendants():
    """The processes that come from this one, zombies too."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found, front = set(), {os.getpid()}
    while front:
        front = {pid for pid, parent in parents.items() if parent in front}
        found |= front
    return found


def test_there_are_enough():
    assert len(ATTACKS) >= 40 and set(ATTACKS) >= SLOW


@pytest.mark.parametrize("attack", [pytest.param(it, marks=[pytest.mark.slow] * (it in SLOW)) for it in ATTACKS])
def test_an_attack_is_contained(attack, quick, planted):
    before, heard = descendants(), len(planted["heard"])
    command = ATTACKS[attack]
    for name in ("PATH", "FOLDER", "PORT", "VICTIM"):
        command = command.replace(name, str(planted[name]))
    started = time.monotonic()
    result = say(quick, command.replace("MARK", MARK))
    assert time.monotonic() - started < 60
    assert "ESCAPED" not in result.content and SECRET not in result.content and len(result.content) < 2_300
    assert result.fault is None and ("process 1" not in attack or BROKEN not in result.content)
    assert len(quick.get_state()) < 4 * LIMITS.files
    after = say(quick, "sleep 0.5; cat late; echo 6 7 | awk '{print $1 * $2}'" if "later" in attack else "echo 42")
    assert after.content.endswith("42") and "ESCAPED" not in after.content
    if any(word in attack for word in ("fil", "link", "folder", "name")):  # what is left can be made again
        quick.set_state(quick.get_state())
        assert say(quick, "echo 42").content == "42"
    quick.close()
    deadline = time.monotonic() + 10
    while new := descendants() - before:
        assert time.monotonic() < deadline, new
        time.sleep(0.02)
    assert not [path for where in ("/", "/tmp", "/var/tmp", "/dev/shm") for path in Path(where).glob(f"{MARK}*")]
    assert Path(planted["PATH"]).read_text() == SECRET and len(planted["heard"]) == heard
    os.kill(planted["VICTIM"], 0)


HARMLESS = ["read a file outside", "its own environment", "connect by bash", "write a file outside"]


@pytest.mark.parametrize("attack", HARMLESS)
def test_without_a_sandbox_the_attacks_succeed(attack, planted, tmp_path):
    """Or the tests above would show nothing. (Only those that do no harm.)"""
    command = ATTACKS[attack].replace("FOLDER", str(tmp_path)).replace("MARK", MARK)
    for name in ("PATH", "PORT"):
        command = command.replace(name, str(planted[name]))
    done = subprocess.run(["/bin/bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert "ESCAPED" in done.stdout
