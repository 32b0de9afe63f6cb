"""The parts of Linux that Python has no functions for: Landlock, namespaces, mounts, privileges.

Standard library only, because the fork server runs this file before it gives everything else up.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

# --- Landlock: which files a process may touch ------------------------------------------------------------------------

LANDLOCK_READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read files, read folders
LANDLOCK_FILE_ONLY = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15


def landlock_version() -> int:
    """Return the version of Landlock in this kernel; 0 if there is none."""
    return max(0, int(libc().syscall(444, None, ctypes.c_size_t(0), 1)))


def apply_landlock(readable: list[str], writable: list[str]) -> None:
    """Allow reading beneath some paths and everything beneath others, and nothing else; also no TCP, no signals to
    processes outside. Needs `forbid_new_privileges`.
    """
    version = landlock_version()
    if version < 1:
        raise OSError("the kernel has no Landlock")
    everything = (1 << 13) - 1
    for since, bit in ((2, 13), (3, 14), (5, 15)):
        everything |= 1 << bit if version >= since else 0
    rules = struct.pack("=QQQ", everything, 0b11 if version >= 4 else 0, 0b11 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = _check("Landlock", libc().syscall(444, ctypes.c_char_p(rules), ctypes.c_size_t(size), 0))
    for paths, rights in ((readable, LANDLOCK_READ), (writable, everything)):
        for path in paths:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed = rights & everything & (~0 if os.path.isdir(path) else LANDLOCK_FILE_ONLY)
            rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, fd), 12)
            _check(f"Landlock for {path}", libc().syscall(445, ruleset, 1, rule, 0))
            os.close(fd)
    _check("Landlock", libc().syscall(446, ruleset, 0))
    os.close(ruleset)


# --- namespaces, mounts, privileges -----------------------------------------------------------------------------------

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18


def unshare(flags: int) -> None:
    _check("a new namespace", libc().unshare(flags))


def enter_pid_namespace(fd: int) -> None:
    """Start all later children in this namespace."""
    _check("the pid namespace", libc().setns(fd, CLONE_NEWPID))


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    arguments = [text.encode() if text is not None else None for text in (source, target, kind)]
    _check(f"mounting {target}", libc().mount(*arguments, ctypes.c_ulong(flags), options.encode()))


def bind_readable(source: str, target: str) -> None:
    """Mount a file or a folder at another path, read-only."""
    mount(source, target, None, MS_BIND | MS_REC)
    locked_flags = os.statvfs(target).f_flag & (MS_NOSUID | MS_NODEV | 8 | 1024 | 2048)  # those may not be taken off
    locked_flags |= 1 << 21 if os.statvfs(target).f_flag & 4096 else 0  # relatime has another number here
    mount(None, target, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | locked_flags)


def change_root(path: str) -> None:
    """Make `path` (a mount point) the root, and unmount everything else."""
    os.chdir(path)
    _check("a new root", libc().syscall({"x86_64": 155, "aarch64": 41}[platform.machine()], b".", b"."))
    _check("leaving the old root", libc().umount2(b".", 2))  # MNT_DETACH
    os.chdir("/")


def apply_seccomp(program: bytes) -> None:
    """Put this process and its children under the filter. Needs `forbid_new_privileges`."""
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    _check("seccomp", libc().prctl(22, 2, ctypes.c_char_p(header), 0, 0))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def forbid_new_privileges() -> None:
    _check("no_new_privs", libc().prctl(38, 1, 0, 0, 0))


def die_with_parent() -> None:
    _check("the death signal", libc().prctl(1, 9, 0, 0, 0))


def drop_capabilities() -> None:
    header = struct.pack("=Ii", 0x20080522, 0)
    _check("giving up capabilities", libc().capset(ctypes.c_char_p(header), ctypes.c_char_p(bytes(24))))


def libc() -> ctypes.CDLL:
    global _libc
    if _libc is None:
        _libc = ctypes.CDLL(None, use_errno=True)
    return _libc


_libc: ctypes.CDLL | None = None


def _check(call: str, result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")
    return result
