"""Full CPython from a warm fork server: the fast path for many short runs.

One process is started with an empty environment and told nothing of any task; it becomes a sandbox (namespaces, a
root with only Python's libraries, no network) and imports what programs often need. Each session is a child of it,
with its own user number (or a user namespace), resource limits, no capabilities, Landlock and seccomp.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import threading
import weakref
from pathlib import Path

from agent_r1_tools.python import layout
from agent_r1_tools.python.launch import (
    ENVIRONMENT,
    PYTHON_FLAGS,
    START_SECONDS,
    from_lasting_thread,
    kill_namespace,
    unused_uid,
)
from agent_r1_tools.python.process import GuestProcess, ProcessSandbox, guest_settings
from agent_r1_tools.python.sandbox import Limits, SandboxError

MAIN = Path(__file__).with_name("fork_server_main.py")
PRELOAD = ["ast", "collections", "ctypes", "dataclasses", "datetime", "decimal", "fractions", "functools", "heapq"]
PRELOAD += ["itertools", "json", "math", "random", "re", "statistics", "string", "typing"]
LARGE = ["numpy", "sympy"]
"""Packages that a second or third server imports beforehand: every fork of a large process costs more."""


class ForkServer(ProcessSandbox):
    """Sessions forked from a warm process, which all fork servers of this process share.

    Raises:
        SandboxError: the limits ask for network, which only bubblewrap can allow.
    """

    backend = "fork server"

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        if limits.network:
            raise SandboxError("the fork server cannot allow network; use backend='bubblewrap'")

    def start(self, code: str) -> GuestProcess:
        ours, theirs = socket.socketpair()
        reading, writing = os.pipe()
        try:
            server = _server(tuple(name for name in LARGE if name in code and layout.installed(name)))
            pidfd = server.spawn(guest_settings(self.limits) | {"uid": unused_uid()}, theirs.fileno(), writing)
        except BaseException:
            ours.close()
            os.close(reading)
            raise
        finally:
            theirs.close()
            os.close(writing)
        process = GuestProcess(ours, reading, functools.partial(kill_namespace, pidfd), None)
        process.pidfd = pidfd
        return process


class _Server:
    """The outside end of the fork server's process."""

    def __init__(self, large: tuple[str, ...]) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [layout.interpreter(), *PYTHON_FLAGS, str(MAIN)]
        try:
            process = from_lasting_thread(
                lambda: subprocess.Popen(
                    command, stdin=theirs.fileno(), cwd="/", env=ENVIRONMENT, start_new_session=True
                )
            )
        except OSError as error:
            self._socket.close()
            raise SandboxError(f"the fork server did not start: {command[0]}: {error}") from error
        finally:
            theirs.close()
        self.close = weakref.finalize(self, _end_server, self._socket, process)
        self._socket.settimeout(START_SECONDS)
        settings = {
            "library": layout.library(),
            "hidden": layout.hidden(),
            "devices": layout.DEVICES,
            "packages": layout.packages(),
            "packages_at": layout.PACKAGES_AT,
            "preload": [*PRELOAD, *large],
        }
        try:
            self._socket.send(json.dumps(settings).encode())
            answer = json.loads(self._socket.recv(1 << 16) or b'{"error": "its process ended"}')
        except OSError as error:
            answer = {"error": str(error)}
        if "error" in answer:
            self.close()
            raise SandboxError(f"the fork server did not start: {answer['error']}")

    def spawn(self, settings: dict[str, object], control: int, output: int) -> int:
        """Fork a session and return a pidfd of process 1 of its namespace."""
        try:
            with self._lock:
                socket.send_fds(self._socket, [json.dumps(settings).encode()], [control, output])
                answer, fds, _, _ = socket.recv_fds(self._socket, 1 << 10, 1)
        except OSError as error:
            self.close()  # its answer may still come, and would be taken for the next one's
            raise SandboxError(f"the fork server does not answer: {error}") from error
        if not fds:
            self.close()
            raise SandboxError("the fork server has ended")
        return fds[0]


def _end_server(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()
    process.kill()
    process.wait()


_servers: dict[tuple[str, ...], _Server] = {}
_servers_lock = threading.Lock()


def _server(large: tuple[str, ...]) -> _Server:
    """Return the server that has imported these packages; start one if there is none."""
    with _servers_lock:
        server = _servers.get(large)
        if server is None or not server.close.alive:
            server = _servers[large] = _Server(large)
        return server


def _forget_servers() -> None:
    """Forget the servers after a fork: they are the parent's."""
    global _servers_lock
    _servers_lock = threading.Lock()
    for server in _servers.values():
        server.close.detach()
    _servers.clear()


os.register_at_fork(after_in_child=_forget_servers)
