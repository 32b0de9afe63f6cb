"""System calls that a sandboxed program may make, and for some of them the allowed arguments.

Everything else is "not permitted": a call that uses up what the whole machine shares, or that a later kernel brings,
needs no line here. Standard library only, because the fork server runs this file before it gives everything else up.
"""

from __future__ import annotations

import platform
import struct

Numbers = tuple[int | None, int | None]
"""The number of a call on x86_64 and on aarch64; None where there is no such call."""
Wanted = tuple[tuple[int, int], ...]
"""Arguments that must all have these values: (position, value)."""
Instruction = tuple[int, int, int, int]

# What CPython, numpy and the C library need.
ALLOWED: dict[str, Numbers] = {
    # files and folders
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "pwrite64": (18, 68), "preadv": (295, 69), "pwritev": (296, 70), "preadv2": (327, 286), "pwritev2": (328, 287),
    "open": (2, None), "openat": (257, 56), "creat": (85, None), "close": (3, 57), "close_range": (436, 436),
    "lseek": (8, 62), "stat": (4, None), "fstat": (5, 80), "lstat": (6, None), "newfstatat": (262, 79),
    "statx": (332, 291), "statfs": (137, 43), "fstatfs": (138, 44), "access": (21, None), "faccessat": (269, 48),
    "faccessat2": (439, 439), "readlink": (89, None), "readlinkat": (267, 78), "getdents": (78, None),
    "getdents64": (217, 61), "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "mkdir": (83, None),
    "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None),
    "renameat": (264, 38), "renameat2": (316, 276), "link": (86, None), "linkat": (265, 37), "symlink": (88, None),
    "symlinkat": (266, 36), "mknod": (133, None), "mknodat": (259, 33), "chmod": (90, None), "fchmod": (91, 52),
    "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None), "fchown": (93, 55), "lchown": (94, None),
    "fchownat": (260, 54), "truncate": (76, 45), "ftruncate": (77, 46), "fallocate": (285, 47), "fsync": (74, 82),
    "fdatasync": (75, 83), "utime": (132, None), "utimes": (235, None), "futimesat": (261, None),
    "utimensat": (280, 88), "umask": (95, 166), "sendfile": (40, 71), "copy_file_range": (326, 285),
    "getxattr": (191, 8), "lgetxattr": (192, 9), "fgetxattr": (193, 10), "listxattr": (194, 11),
    "llistxattr": (195, 12), "flistxattr": (196, 13),
    # descriptors, and socket pairs
    "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "pipe": (22, None), "pipe2": (293, 59), "poll": (7, None),
    "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "epoll_create": (213, None),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22),
    "epoll_pwait2": (441, 441), "recvfrom": (45, 207), "shutdown": (48, 210),
    "getsockopt": (55, 209),  "getsockname": (51, 204), "getpeername": (52, 205),
    # memory
    "brk": (12, 214), "munmap": (11, 215), "mremap": (25, 216), "mprotect": (10, 226), "msync": (26, 227),
    # processes and threads
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "exit": (60, 93), "exit_group": (231, 94),
    "wait4": (61, 260), "waitid": (247, 95), "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178),
    "getpgid": (121, 155), "getpgrp": (111, None), "setpgid": (109, 154), "getsid": (124, 156), "setsid": (112, 157),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "pidfd_open": (434, 434),
    "set_tid_address": (218, 96), "set_robust_list": (273, 99), "get_robust_list": (274, 100), "futex": (202, 98),
    "rseq": (334, 293), "arch_prctl": (158, None), "restart_syscall": (219, 128), "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123), "sched_getparam": (143, 121), "sched_getscheduler": (145, 120),
    "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126), "getcpu": (309, 168),
    "getpriority": (140, 141), "getrlimit": (97, 163), "setrlimit": (160, 164), "getrusage": (98, 165),
    # users and capabilities; a guest gives its own up
    "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "getgroups": (115, 158),
    "getresuid": (118, 148), "getresgid": (120, 150), "setuid": (105, 146), "setgid": (106, 144),
    "setreuid": (113, 145), "setregid": (114, 143), "setresuid": (117, 147), "setresgid": (119, 149),
    "setgroups": (116, 159), "capget": (125, 90), "capset": (126, 91),
    # signals and time
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigsuspend": (130, 133), "rt_sigtimedwait": (128, 137), "sigaltstack": (131, 132), "pause": (34, None),
    "alarm": (37, None), "setitimer": (38, 103), "getitimer": (36, 102), "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169),
    "time": (201, None), "times": (100, 153),
    # the machine
    "uname": (63, 160), "sysinfo": (99, 179), "getrandom": (318, 278),
}  # fmt: skip
NETWORK: dict[str, Numbers] = {
    "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202), "accept4": (288, 242),
    "sendto": (44, 206), "sendmsg": (46, 211), "sendmmsg": (307, 269), "recvmsg": (47, 212), "recvmmsg": (299, 243),
    "setsockopt": (54, 208),
}  # fmt: skip
"""The calls that `network` also allows."""


def _one_of(position: int, *values: int) -> list[Wanted]:
    return [((position, value),) for value in values]


# Calls of which the arguments decide: what is allowed. Of these arguments the kernel reads the lower half alone, or
# refuses the call where the upper one isn't 0.
PRCTL, FCNTL, IOCTL, MADVISE, SOCKETPAIR = (157, 167), (72, 25), (16, 29), (28, 233), (53, 199)
PRLIMIT64, SETPRIORITY = (302, 261), (141, 140)
BY_ARGUMENTS: dict[Numbers, list[Wanted]] = {
    # The name of a thread; and what a guest does first: it forgoes huge pages (of which one byte takes 2 MiB, and
    # unmapping the rest gives nothing back).
    PRCTL: [((0, 15),), ((0, 16),), ((0, 41), (1, 1), (2, 0))],
    FCNTL: _one_of(1, 0, 1, 2, 3, 4, 1030, 1032),  # duplicates, flags, how large a pipe is; no leases, no notices
    IOCTL: _one_of(1, 0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451),  # terminal? its size; ready? waiting; on exec
    MADVISE: _one_of(2, 0, 1, 2, 3, 4, 8, *range(14, 20)),  # not what moves the pages of others, or shares them
    PRLIMIT64: _one_of(0, 0),  # a process's own limits: that which runs the others may have the same user
    SETPRIORITY: [((0, 0), (1, 0))],
    SOCKETPAIR: [((0, 1), (1, kind)) for kind in (1, 0x801, 0x80001, 0x80801)],  # streams: they reach no other process
}
LOCKS = _one_of(1, 6, 7, 37, 38)  # F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW
INTERNET: list[Wanted] = [((0, family), (2, protocol)) for family in (2, 10) for protocol in (0, 6, 17)]
"""Not the sockets of this machine's services, of its hypervisor, or of the kernel."""
MMAP, CLONE, CLONE3, FLOCK, SOCKET, SENDTO = (9, 222), (56, 220), (435, 435), (73, 32), (41, 198), (44, 206)
SETXATTR: list[Numbers] = [(188, 5), (189, 6), (190, 7)]
"""Attributes are memory of the kernel's. A file system need not have them: `cp -p` does without."""
MOUNT = (165, 40)
NEW_NAMESPACES = 0x7E020080  # every CLONE_NEW* flag
LOCKED_OR_HUGE = 0x2000 | 0x40000  # MAP_LOCKED, MAP_HUGETLB
NEWEST = 450
"""Calls with a higher number are new: a C library that hears that they don't exist does without."""

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS, EOPNOTSUPP = 1, 38, 95
LOAD, EQUAL, GREATER, ANY_BIT, GIVE = 0x20, 0x15, 0x25, 0x45, 0x06


def seccomp_filter(network: bool, also: tuple[Numbers, ...] = ()) -> bytes:
    """Return the filter in the kernel's form: an array of `struct sock_filter`.

    Args:
        network: whether internet sockets may be opened.
        also: further calls that are allowed.

    Raises:
        OSError: the processor is of another kind.
    """
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise OSError(f"the seccomp filter is written for x86_64 and aarch64, not {machine}")
    column, audit = ARCHITECTURES[machine]
    code: list[Instruction] = [
        (LOAD, 0, 0, 4),  # the architecture
        (EQUAL, 1, 0, audit),
        (GIVE, 0, 0, KILL),
        (LOAD, 0, 0, 0),  # the number of the call
    ]

    def answer(call: Numbers, *answers: Instruction) -> None:
        number = call[column]
        if number is not None:
            code.extend([(EQUAL, 0, len(answers), number), *answers])

    for call in [*also, *ALLOWED.values(), *(NETWORK.values() if network else ())]:
        answer(call, (GIVE, 0, 0, ALLOW))
    no = (GIVE, 0, 0, ERRNO | EPERM)
    # A lock is granted and not taken: databases ask for them, and no other process can see it.
    granted = ERRNO | 0
    answer(FLOCK, (GIVE, 0, 0, granted))
    for call in SETXATTR:
        answer(call, (GIVE, 0, 0, ERRNO | EOPNOTSUPP))
    for call, wanted in BY_ARGUMENTS.items():
        locks = _where(LOCKS, granted) if call == FCNTL else []
        answer(call, *locks, *_where(wanted, ALLOW), no)
    if network:
        answer(SOCKET, *_where(INTERNET, ALLOW), no)
    answer(MMAP, _load(3), (ANY_BIT, 1, 0, LOCKED_OR_HUGE), (GIVE, 0, 0, ALLOW), no)
    answer(CLONE, _load(0), (ANY_BIT, 1, 0, NEW_NAMESPACES), (GIVE, 0, 0, ALLOW), no)
    answer(CLONE3, (GIVE, 0, 0, ERRNO | ENOSYS))  # it hides its flags from a filter; a libc without it uses clone
    # To the other end of a pair, and not to an address, which is a pointer: both of its halves count.
    answer(SENDTO, _load(4), (EQUAL, 0, 3, 0), _load(4, 4), (EQUAL, 0, 1, 0), (GIVE, 0, 0, ALLOW), no)
    code += [(GREATER, 0, 1, NEWEST), (GIVE, 0, 0, ERRNO | ENOSYS), no]  # so also the x32 calls
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _where(alternatives: list[Wanted], action: int) -> list[Instruction]:
    """Return instructions that give this answer if the arguments match one of the alternatives."""
    code: list[Instruction] = []
    for wanted in alternatives:
        for index, (position, value) in enumerate(wanted):
            code += [_load(position), (EQUAL, 0, 2 * (len(wanted) - index) - 1, value)]
        code.append((GIVE, 0, 0, action))
    return code


def _load(position: int, half: int = 0) -> Instruction:
    """Read the lower half of an argument; the upper one with 4."""
    return LOAD, 0, 0, 16 + 8 * position + half
