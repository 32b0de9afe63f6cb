"""Start and end of a sandbox's processes."""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from agent_r1_tools.python import guest
from agent_r1_tools.python.sandbox import SandboxError

START_SECONDS = 60.0
"""The time that a sandbox may take to start; a busy machine is slow."""
GUEST = Path(guest.__file__)
ENVIRONMENT = {"PATH": "/usr/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"} | dict.fromkeys(
    ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"], "1"
)
"""The environment variables of a program. One thread, because more count as processes."""
PYTHON_FLAGS = ["-S", "-s", "-P", "-B"]  # not -I: it would ignore PYTHONHASHSEED, and sets would change from run to run
_T = TypeVar("_T")


def unused_uid() -> int:
    """Return an unused user number. The kernel counts processes by it and lets its processes signal one another."""
    return (1 << 30) + secrets.randbelow(1 << 29)


def start_process(
    command: list[str], *, cwd: str = "/", pass_fds: tuple[int, ...] = ()
) -> tuple[subprocess.Popen[bytes], socket.socket, int]:
    """Start a guest. Return its process, its socket (standard input), and the pipe of its output."""
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=theirs.fileno(),
            stdout=writing,
            stderr=writing,
            cwd=cwd,
            env=ENVIRONMENT,
            pass_fds=pass_fds,
            start_new_session=True,
        )

    try:
        return from_lasting_thread(start), ours, reading
    except OSError as error:
        ours.close()
        os.close(reading)
        raise SandboxError(f"{command[0]} could not be started: {error}") from error
    finally:
        theirs.close()
        os.close(writing)


def kill_namespace(pidfd: int) -> None:
    """Kill process 1 of a namespace, and so all its processes. Return when they are gone. Closes the pidfd."""
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        pass
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll(START_SECONDS * 1000)
    os.close(pidfd)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process group and its leader. Do nothing if the leader was waited for already."""
    if process.returncode is None:  # else its number may be another group's by now
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


_starter: ThreadPoolExecutor | None = None
_starter_lock = threading.Lock()


def from_lasting_thread(function: Callable[[], _T]) -> _T:
    """Call a function in a thread that runs as long as this process.

    The kernel ends a child "with its parent" when the thread that started it ends; tools are called in short ones.
    """
    global _starter
    with _starter_lock:
        if _starter is None:
            _starter = ThreadPoolExecutor(1, thread_name_prefix="sandbox-starter")
    return _starter.submit(function).result()


def _forget_starter() -> None:
    global _starter, _starter_lock
    _starter, _starter_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_starter)
