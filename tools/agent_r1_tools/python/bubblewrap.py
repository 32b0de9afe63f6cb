"""Full CPython inside bubblewrap: new namespaces, a root that holds only Python's libraries, its own user.

Flatpak runs programs in bubblewrap (`bwrap`). It needs no daemon and no image. If root starts it, every session gets an
unused user number. If another user starts it, it is in a user namespace.
"""

from __future__ import annotations

import functools
import marshal
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.util import MAGIC_NUMBER
from pathlib import Path

from agent_r1_tools.python import layout
from agent_r1_tools.python.launch import (
    ENVIRONMENT,
    GUEST,
    PYTHON_FLAGS,
    kill_group,
    kill_namespace,
    start_process,
    unused_uid,
)
from agent_r1_tools.python.process import END_SECONDS, GuestProcess, ProcessSandbox, guest_settings
from agent_r1_tools.python.sandbox import Limits, SandboxError
from agent_r1_tools.python.seccomp import MOUNT, seccomp_filter

GUEST_AT = "/guest.pyc"


class Bubblewrap(ProcessSandbox):
    """Sessions in bubblewrap.

    Args:
        limits: what a program may use.
        folders: those that it can write to, each in memory and bounded by `limits.files`; it begins in the first.
        programs: whether it finds the machine's /usr/bin as well. The guest is then process 1: no process inside can
            end it, and signals from inside reach it only where it has handlers.
        files: further files, by path, which are there to be read.
        hide: folders of this machine that it must not see, should they lie inside of what it sees.

    Raises:
        SandboxError: there is no `bwrap` here.
    """

    backend = "bubblewrap"

    def __init__(
        self,
        limits: Limits,
        *,
        folders: Sequence[str] = ("/tmp",),
        programs: bool = False,
        files: Mapping[str, bytes] | None = None,
        hide: Sequence[str] = (),
    ) -> None:
        super().__init__(limits)
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise SandboxError("there is no bwrap; install it with: apt-get install bubblewrap")
        self._command = [bwrap, *_arguments(limits, folders, programs, hide)]
        self._folders, self._programs, self._files = list(folders), programs, dict(files or {})
        self._filter = seccomp_filter(limits.network, (MOUNT,))

    def start(self, code: str) -> GuestProcess:
        uid = unused_uid() if os.getuid() == 0 else None
        apart = uid is not None and not self._programs  # process 1 stays root's, and the guest is its child
        settings = guest_settings(self.limits) | {"path": [layout.PACKAGES_AT], "uid": uid, "mounts": self._folders}
        settings["child"] = apart
        told, tells = os.pipe()
        files = [_memory_file(self._filter), _memory_file(compiled_guest()), tells]
        try:
            command = [*self._command, "--seccomp", str(files[0]), "--ro-bind-data", str(files[1]), GUEST_AT]
            command += ["--info-fd", str(tells)]
            for path, content in (self._files | (_users(uid) if self._programs else {})).items():
                files.append(_memory_file(content))
                command += [*_folders([path]), "--perms", "0555", "--file", str(files[-1]), path]
            command += ["--remount-ro", "/", "--", layout.interpreter(), *PYTHON_FLAGS, GUEST_AT]
            process, control, output = start_process(command, pass_fds=tuple(files))
        except BaseException:
            os.close(told)
            raise
        finally:
            for file in files:
                os.close(file)
        with open(told) as answer:
            match = re.search(r'"child-pid": (\d+)', answer.read())
        first = int(match[1]) if match else 0  # where bwrap has failed; it then prints why
        pidfds = _pidfd(first, process.pid)
        guest = GuestProcess(control, output, functools.partial(_end, process, pidfds), settings)
        try:
            if apart:
                pidfds += _pidfd(int(Path(f"/proc/{first}/task/{first}/children").read_text()), first)
            guest.pidfd = pidfds[-1]
        except (OSError, ValueError, IndexError) as error:
            guest.close()
            raise SandboxError(f"/proc does not show the processes of bubblewrap: {error}") from error
        return guest


def _pidfd(pid: int, parent: int) -> list[int]:
    """Return a pidfd of this process, or None if it has ended (another process may then have its number)."""
    try:
        pidfd = os.pidfd_open(pid)
    except (OSError, ValueError):
        return []
    try:
        if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == parent:
            return [pidfd]
    except OSError:
        pass
    os.close(pidfd)
    return []


def _end(process: subprocess.Popen[bytes], pidfds: list[int]) -> None:
    for pidfd in pidfds:
        kill_namespace(pidfd)
    # Only the outer bwrap waits for process 1 of the namespace. Killed before that, it leaves a zombie to process 1 of
    # the machine, which never waits for it if that is a Python program in a container.
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        kill_group(process)


@lru_cache
def compiled_guest() -> bytes:
    """Return `guest.py` as a .pyc file: compiling it takes as long as starting Python."""
    code = compile(GUEST.read_bytes(), GUEST_AT, "exec")
    return MAGIC_NUMBER + bytes(12) + marshal.dumps(code)


def _memory_file(content: bytes) -> int:
    file = os.memfd_create("agent-r1")
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(file, rest) :]
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _users(uid: int | None) -> dict[str, bytes]:
    """Return a file of users with a name for this user. Its number differs every time."""
    number = 65534 if uid is None else uid
    users = f"root:x:0:0::/:/bin/bash\nagent:x:{number}:{number}::/tmp:/bin/bash\n"
    return {"/etc/passwd": users.encode(), "/etc/group": f"root:x:0:\nagent:x:{number}:\n".encode()}


def _folders(paths: Sequence[str]) -> list[str]:
    """Return arguments that make the parent folders of these paths. Otherwise bwrap makes them for its user only."""
    folders = sorted({str(parent) for path in paths for parent in Path(path).parents} - {"/"})
    return [word for folder in folders for word in ("--perms", "0755", "--dir", folder)]


def _arguments(limits: Limits, folders: Sequence[str], programs: bool, hide: Sequence[str]) -> list[str]:
    arguments = ["--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"]
    arguments += ["--die-with-parent", "--new-session", "--clearenv"]
    if not limits.network:
        arguments.append("--unshare-net")
    # The guest mounts its /tmp (bwrap can't bound how many files it has) before it gives this up.
    arguments += ["--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"]
    if os.getuid() == 0:  # the guest becomes the user itself; inside a user namespace, root's processes aren't counted
        arguments += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        arguments += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    # bwrap's own process 1 would be the guest's user's where we aren't root, who may read and write it; and the outer
    # bwrap ends before it when the guest ends, so that no process waits for it.
    arguments.append("--as-pid-1")
    for name, value in ENVIRONMENT.items():
        arguments += ["--setenv", name, value]
    shown = layout.library() + (layout.programs() if programs else [])
    arguments += _folders([*shown, *layout.packages().values(), *layout.DEVICES, *folders])
    for path in shown:
        arguments += ["--ro-bind", path, path]
    if programs:
        arguments += ["--perms", "0755", "--dir", layout.PROGRAMS_AT]
        arguments += ["--symlink", layout.interpreter(), f"{layout.PROGRAMS_AT}/python3"]
        if os.path.islink("/bin"):
            arguments += ["--symlink", "usr/bin", "/bin"]
    for path in [*layout.hidden(), *layout.inside(hide, shown)]:
        arguments += ["--tmpfs", path, "--remount-ro", path]
    for path, target in layout.packages().items():
        arguments += ["--ro-bind", path, target]
    for path in layout.DEVICES:
        arguments += ["--dev-bind", path, path]
    if limits.network:
        for path in ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl"):
            arguments += ["--ro-bind-try", path, path]
    for path in folders:
        arguments += ["--dir", path]
    return [*arguments, "--chdir", folders[0]]
