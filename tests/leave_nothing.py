"""Run a command; where it leaves a process behind, name it, end it, and exit with 1.

    python tests/leave_nothing.py python -m pytest

What outlives its parent becomes a child of this process, which buries it at once. Linux only; elsewhere the command
just runs.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
SECONDS = 10.0  # in which what is ending may end


def main() -> int:
    """The command's exit status, or 1."""
    if sys.platform != "linux":
        return subprocess.call(sys.argv[1:])
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the command's
    command = subprocess.Popen(sys.argv[1:], preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    for number in (signal.SIGTERM, signal.SIGHUP):  # are the command's, too
        signal.signal(number, lambda number, _: pass_on(number, command))
    status = None
    while status is None:
        pid, ended = os.wait()
        if pid == command.pid:
            status = command.returncode = os.waitstatus_to_exitcode(ended)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):  # they run
                time.sleep(0.1)
        except ChildProcessError:  # there is none
            return status
    while found := children():  # and what they leave
        for pid, words in found:
            print(f"a process was left behind: {pid} {words}", file=sys.stderr)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return status or 1


def pass_on(number: int, command: "subprocess.Popen[bytes]") -> None:
    """Popen.send_signal looks whether the command has ended, and so might bury it before `os.wait` does."""
    if command.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(command.pid, number)


def children() -> list[tuple[int, str]]:
    """This process's children, with their commands."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has just ended
            continue
        if int(parent) == os.getpid():
            found.append((int(process.name), words[:200]))
    return found


if __name__ == "__main__":
    sys.exit(main())
