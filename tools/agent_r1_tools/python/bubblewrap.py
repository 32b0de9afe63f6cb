"""Full CPython inside bubblewrap: new namespaces, a root that holds only Python's libraries, a user of its own.

bubblewrap (`bwrap`) is what Flatpak runs programs in; it needs no daemon and no image. Started by root, every session
gets a user number that nobody else has; started by anyone else, it lives in a user namespace.
"""

from __future__ import annotations

import marshal
import os
import shutil
from functools import lru_cache
from importlib.util import MAGIC_NUMBER
from pathlib import Path

from agent_r1_tools.python import layout
from agent_r1_tools.python.kernel import seccomp_filter
from agent_r1_tools.python.process import (
    ENVIRONMENT,
    GUEST,
    PYTHON_FLAGS,
    GuestProcess,
    ProcessSandbox,
    guest_settings,
    kill_group,
    start_process,
    unused_uid,
)
from agent_r1_tools.python.sandbox import Limits, SandboxError

GUEST_AT = "/guest.pyc"


class Bubblewrap(ProcessSandbox):
    """Sessions in bubblewrap.

    Raises:
        SandboxError: there is no `bwrap` here.
    """

    backend = "bubblewrap"

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise SandboxError("there is no bwrap; install it with: apt-get install bubblewrap")
        self._command = [bwrap, *_arguments(limits)]
        self._filter = seccomp_filter(limits.network)

    def start(self, code: str) -> GuestProcess:
        root = os.getuid() == 0
        limits = self.limits
        settings = guest_settings(limits) | {"path": [layout.PACKAGES_AT], "uid": unused_uid() if root else None}
        files = [_memory_file(self._filter), _memory_file(compiled_guest())]
        try:
            command = [*self._command, "--seccomp", str(files[0]), "--ro-bind-data", str(files[1]), GUEST_AT]
            command += ["--remount-ro", "/", "--", layout.interpreter(), *PYTHON_FLAGS, GUEST_AT]
            return start_process(command, settings, kill_group, pass_fds=tuple(files))
        finally:
            for file in files:
                os.close(file)


@lru_cache
def compiled_guest() -> bytes:
    """`guest.py` as a .pyc file: compiling it takes as long as starting Python."""
    code = compile(GUEST.read_bytes(), GUEST_AT, "exec")
    return MAGIC_NUMBER + bytes(12) + marshal.dumps(code)


def _memory_file(content: bytes) -> int:
    file = os.memfd_create("agent-r1")
    os.write(file, content)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _arguments(limits: Limits) -> list[str]:
    arguments = ["--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"]
    arguments += ["--die-with-parent", "--new-session", "--clearenv"]
    if not limits.network:
        arguments.append("--unshare-net")
    if os.getuid() == 0:  # the guest becomes the user itself; inside a user namespace, root's processes aren't counted
        arguments += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        arguments += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
        arguments.append("--as-pid-1")  # else process 1 is bwrap's, with the same user, who may read and write it
    for name, value in ENVIRONMENT.items():
        arguments += ["--setenv", name, value]
    targets = [*layout.library(), *layout.packages().values()]
    for folder in sorted({str(parent) for target in targets for parent in Path(target).parents} - {"/"}):
        arguments += ["--perms", "0755", "--dir", folder]  # or bwrap makes them for its own user only
    for path in layout.library():
        arguments += ["--ro-bind", path, path]
    for path in layout.hidden():
        arguments += ["--tmpfs", path, "--remount-ro", path]
    for path, target in layout.packages().items():
        arguments += ["--ro-bind", path, target]
    arguments += ["--proc", "/proc", "--dev", "/dev"]
    if limits.network:
        for path in ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl"):
            arguments += ["--ro-bind-try", path, path]
    arguments += ["--perms", "1777", "--size", str(max(limits.files, 4096)), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    return [*arguments, "--remount-ro", "/dev"]
