"""The fork server's own process: becomes a sandbox, warms up, then forks one child for each session.

It is exec'd with an empty environment and told nothing but where Python's libraries are, so that its memory, which
every child inherits, holds nothing of a task. `fork_server.py` starts it and talks to it over standard input: the
settings of a session with two file descriptors (its socket and its output) are answered with {"pid": number} and a
pidfd of the child.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
if TYPE_CHECKING:
    from agent_r1_tools.python import guest, kernel, seccomp
else:  # by their bare names: there is no package in a sandbox
    import guest
    import kernel
    import seccomp


def main() -> None:
    host = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    settings = json.loads(host.recv(1 << 16))
    try:
        parent = enclose(settings)
        if parent:  # the server proper is process 1 of the namespace; this one waits, and dies with it
            host.close()
            os.waitpid(parent, 0)
            os._exit(0)
        sys.path[:] = [path for path in sys.path if path != HERE] + [settings["packages_at"]]
        warm_up(settings["preload"])
        host.send(json.dumps({"ready": True}).encode())
    except (OSError, ImportError) as error:
        host.send(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        os._exit(1)
    serve(host, [*settings["library"], settings["packages_at"]])


def enclose(settings: dict[str, Any]) -> int:
    """Put this process into new namespaces, with a root that holds only the libraries and devices.

    Returns the child's process number in the parent, and 0 in the child.
    """
    kernel.die_with_parent()
    uid, gid = os.getuid(), os.getgid()
    namespaces = kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    if uid != 0:
        kernel.unshare(kernel.CLONE_NEWUSER)
        for file, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{file}", "w") as opened:
                opened.write(text)
    kernel.unshare(namespaces | kernel.CLONE_NEWPID)
    pid = os.fork()
    if pid:
        return pid
    kernel.die_with_parent()
    global own_pid_namespace, rootless
    rootless = uid != 0
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("proc", "/proc", "proc", 0)  # of the new namespace; only to get a handle on it
    own_pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    root = "/proc"  # a folder that always exists, and is never above a library
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID, "size=1m,mode=755")
    shown = {path: path for path in [*settings["library"], *settings["devices"]]} | settings["packages"]
    for path, place in shown.items():
        target = root + place
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o666))
        kernel.bind_readable(path, target)
    for path in settings["hidden"]:
        kernel.mount("tmpfs", root + path, "tmpfs", kernel.MS_NOSUID | kernel.MS_RDONLY, "size=4k")
    for path in ("/tmp", settings["packages_at"]):
        os.makedirs(root + path, exist_ok=True)
    kernel.change_root(root)
    kernel.mount(None, "/", None, kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY | kernel.MS_NOSUID)
    return 0


def warm_up(modules: list[str]) -> None:
    """Import packages once, so that children need not import them."""
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # children that collect garbage leave the pages of these objects shared


def serve(host: socket.socket, readable: list[str]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for; who needs to know has the pidfd
    program = seccomp.seccomp_filter(network=False)
    while True:
        data, fds, _, _ = socket.recv_fds(host, 1 << 16, 2)
        if not data:
            os._exit(0)
        settings = json.loads(data)
        kernel.unshare(kernel.CLONE_NEWPID)
        pid = os.fork()
        if not pid:
            try:
                host.close()
                become_session(settings, fds[0], fds[1], readable, program)
            except BaseException as error:
                os.write(1, f"{type(error).__name__}: {error}".encode())
            finally:
                os._exit(0)
        kernel.enter_pid_namespace(own_pid_namespace)
        pidfd = os.pidfd_open(pid)
        socket.send_fds(host, [json.dumps({"pid": pid}).encode()], [pidfd])
        for fd in (*fds, pidfd):
            os.close(fd)


def become_session(settings: dict[str, Any], control: int, output: int, readable: list[str], program: bytes) -> None:
    """Give up all rights in the child, then serve the session. In its namespace the child is process 1."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(control, 3)
    os.closerange(4, 64)
    os.setsid()
    kernel.unshare(kernel.CLONE_NEWNS)
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", "/tmp", "tmpfs", flags, guest.tmp_options(settings["files"]))
    os.chdir("/tmp")
    if rootless:  # all sessions have the user's number; a namespace for each keeps their process counts apart
        kernel.unshare(kernel.CLONE_NEWUSER)
        guest.limit_resources(settings["memory"], settings["processes"], settings["files"])
    else:
        uid = settings["uid"]
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        guest.limit_resources(settings["memory"], settings["processes"], settings["files"])
        os.setresuid(uid, uid, uid)
    kernel.drop_capabilities()
    kernel.forbid_new_privileges()
    kernel.die_with_parent()
    kernel.apply_landlock([*readable, "/dev/zero", "/dev/random", "/dev/urandom"], ["/tmp", "/dev/null"])
    kernel.apply_seccomp(program)
    guest.serve(3, settings)


own_pid_namespace = -1
rootless = False

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
