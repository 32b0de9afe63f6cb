"""The parts of Linux that Python has no functions for: seccomp filters, Landlock, namespaces, mounts.

Standard library only, because the fork server runs this file before it gives everything else up.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

# --- seccomp: what no sandboxed program may ask the kernel for --------------------------------------------------------

# Name: number on (x86_64, aarch64); None where the kernel lacks it. All are answered with "not permitted".
DENIED = {
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    # namespaces, mounts, files by handle
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
    # memory and messages that no limit counts, or that outlive the process
    "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    # parts of the kernel with a history
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "personality": (135, 92),
    # the machine itself
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "acct": (163, 89), "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "clock_adjtime": (305, 266), "syslog": (103, 116), "quotactl": (179, 60),
}  # fmt: skip
SOCKET, CLONE, CLONE3 = (41, 198), (56, 220), (435, 435)
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS = 1, 38

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
NEW_NAMESPACES = 0x7E020080  # every CLONE_NEW* flag


def seccomp_filter(network: bool) -> bytes:
    """The filter as the kernel reads it: an array of `struct sock_filter`. Sockets only with `network`.

    Raises:
        OSError: the processor is of another kind.
    """
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise OSError(f"the seccomp filter is written for x86_64 and aarch64, not {machine}")
    column, audit = ARCHITECTURES[machine]
    load, jump_equal, jump_greater, jump_set, give = 0x20, 0x15, 0x35, 0x45, 0x06
    code: list[tuple[int, int, int, int]] = [
        (load, 0, 0, 4),  # the architecture
        (jump_equal, 1, 0, audit),
        (give, 0, 0, KILL),
        (load, 0, 0, 0),  # the number of the call
    ]
    if machine == "x86_64":  # the x32 calls have numbers of their own
        code += [(jump_greater, 0, 1, 0x40000000), (give, 0, 0, ERRNO | ENOSYS)]
    for numbers in [*DENIED.values(), *([] if network else [SOCKET])]:
        code += [(jump_equal, 0, 1, numbers[column]), (give, 0, 0, ERRNO | EPERM)]
    # clone3 hides its flags from a filter; a libc that is told that there is none uses clone.
    code += [(jump_equal, 0, 1, CLONE3[column]), (give, 0, 0, ERRNO | ENOSYS)]
    code += [(jump_equal, 0, 3, CLONE[column]), (load, 0, 0, 16), (jump_set, 0, 1, NEW_NAMESPACES)]
    code += [(give, 0, 0, ERRNO | EPERM), (give, 0, 0, ALLOW)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def apply_seccomp(program: bytes) -> None:
    """Put this process, and all that it starts, under the filter; needs `forbid_new_privileges`."""
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    _check("seccomp", libc().prctl(22, 2, ctypes.c_char_p(header), 0, 0))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


# --- Landlock: which files a process may touch ------------------------------------------------------------------------

LANDLOCK_READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read files, read folders
LANDLOCK_FILE_ONLY = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15


def landlock_version() -> int:
    """The version of Landlock in this kernel; 0 where there is none."""
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

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18


def unshare(flags: int) -> None:
    _check("a new namespace", libc().unshare(flags))


def enter_pid_namespace(fd: int) -> None:
    """Children that are started from now on are in this namespace."""
    _check("the pid namespace", libc().setns(fd, CLONE_NEWPID))


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    arguments = [text.encode() if text is not None else None for text in (source, target, kind)]
    _check(f"mounting {target}", libc().mount(*arguments, ctypes.c_ulong(flags), options.encode()))


def bind_readable(source: str, target: str) -> None:
    """Show a file or a folder at another place, where nobody can write to it."""
    mount(source, target, None, MS_BIND | MS_REC)
    kept = os.statvfs(target).f_flag & (MS_NOSUID | MS_NODEV | 8 | 1024 | 2048)  # those may not be taken off
    kept |= 1 << 21 if os.statvfs(target).f_flag & 4096 else 0  # relatime has another number here
    mount(None, target, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | kept)


def change_root(path: str) -> None:
    """Make `path` (a mount point) the root, and let go of everything else."""
    os.chdir(path)
    _check("a new root", libc().syscall({"x86_64": 155, "aarch64": 41}[platform.machine()], b".", b"."))
    _check("leaving the old root", libc().umount2(b".", 2))  # MNT_DETACH
    os.chdir("/")


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


def _check(what: str, result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result
