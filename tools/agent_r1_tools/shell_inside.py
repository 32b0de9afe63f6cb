"""What runs inside of the sandbox of the `shell` tool: it runs commands, and packs up their files.

A cell of the sandbox's Python session, as text; standard library only. Its process is number 1 of its namespace, so
every process whose parent ends becomes its child, it can end them all, and a command's signals reach it only where it
has handlers: while a command runs it has none.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import select
import signal
import stat
import subprocess
import time

PIECE = 1 << 20
MAX_HEADER = 4 << 20  # bytes of names, which no file system counts
ENVIRONMENT = {"PATH": "/programs:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "TERM": "dumb"}
ENVIRONMENT |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0", "GIT_CONFIG_NOSYSTEM": "1"}
packed = b""
received = bytearray()


def run_command(
    command: str, folder: str, seconds: float, most: int, variables: dict[str, str]
) -> tuple[bytes, int | None]:
    """The beginning of what a command writes, and its exit status; None where time was up. Nothing of it stays."""
    for number in (signal.SIGINT, signal.SIGXCPU):  # no handlers; what is ignored, commands inherit
        signal.signal(number, signal.SIG_DFL)
    deadline = time.monotonic() + seconds
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    output, code, is_open = bytearray(), None, True
    try:
        process = subprocess.Popen(
            ["/bin/bash", "-c", command],
            cwd=folder,
            env=ENVIRONMENT | variables,
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=writing,
            start_new_session=True,
        )
    except OSError as error:  # its folder is gone, say
        os.close(reading)
        os.close(writing)
        return str(error).encode(), 127
    os.close(writing)
    while code is None and time.monotonic() < deadline:
        if is_open:
            select.select([reading], [], [], 0.02)
            is_open = drain(reading, output, most)
        else:
            time.sleep(0.002)
        while code is None:
            try:
                ended, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if ended == process.pid:
                code = process.returncode = os.waitstatus_to_exitcode(status)
            if not ended:
                break
    end_all()
    process.returncode = -9 if code is None else code
    while drain(reading, output, most):  # all writers are gone
        pass
    os.close(reading)
    return bytes(output), code


def drain(reading: int, output: bytearray, most: int) -> bool:
    """Keep the beginning of what is in the pipe; False at its end."""
    try:
        part = os.read(reading, 1 << 16)
    except BlockingIOError:
        return True
    output += part[: max(0, most - len(output))]
    return bool(part)


def end_all() -> None:
    """End every process but this one."""
    while True:
        try:
            os.kill(-1, 9)
        except ProcessLookupError:
            return
        try:
            while True:
                os.waitpid(-1, 0)
        except ChildProcessError:
            pass


def pack(folders: list[str], most: int, known: str) -> int | None:
    """Pack up folders: a line of JSON, [[path, kind, mode, time, size or target], ...], and the files' contents.

    Sockets and pipes are left out, and what wouldn't fit into a file system of `most` bytes for each folder: names of
    one file become files of their own, and holes are filled. The size of it, which `piece` gives; None where its
    SHA-256 is `known`: whoever asks has it. Raises ValueError where the names are longer than `MAX_HEADER`.
    """
    global packed
    entries: list[list[object]] = []
    contents: list[bytes] = []
    modes: list[tuple[str, int]] = []
    waiting = [(folder, folder) for folder in reversed(folders)]
    left = dict.fromkeys(folders, most)
    while waiting:
        path, root = waiting.pop()
        try:
            found = os.lstat(path)
            mode = stat.S_IMODE(found.st_mode)
            entry = [path, "", mode, found.st_mtime_ns]
            pages = -(-found.st_size // 4096) * 4096
            if stat.S_ISLNK(found.st_mode):
                entries.append([*entry[:1], "link", *entry[2:], os.readlink(path)])
                left[root] -= pages if found.st_size > 100 else 0  # a short one needs no page
            elif stat.S_ISDIR(found.st_mode):
                if mode & 0o700 != 0o700:
                    os.chmod(path, 0o700)
                    modes.append((path, mode))
                if path not in folders:
                    entries.append([*entry[:1], "folder", *entry[2:], 0])
                waiting += [(f"{path}/{name}", root) for name in sorted(os.listdir(path), reverse=True)]
            elif stat.S_ISREG(found.st_mode) and pages <= left[root]:
                if not mode & 0o400:
                    os.chmod(path, 0o600)
                    modes.append((path, mode))
                with open(path, "rb") as file:
                    contents.append(file.read())
                left[root] -= pages
                entries.append([*entry[:1], "file", *entry[2:], len(contents[-1])])
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:  # such a path can't be made again
                raise
    for path, mode in reversed(modes):
        os.chmod(path, mode)
    header = json.dumps(entries).encode()
    if len(header) > MAX_HEADER:
        raise ValueError("the names of all files are too long")
    packed = header + b"\n" + b"".join(contents)
    same = hashlib.sha256(packed).hexdigest() == known  # times don't tell: mapped memory is written without
    return None if same else len(packed)


def piece(start: int) -> bytes:
    return packed[start : start + PIECE]


def feed(part: bytes) -> None:
    received.extend(part)


def unpack() -> None:
    """Make the folders and files of what was fed. Links come last, so that nothing is written through one."""
    data = bytes(received)
    received.clear()
    place = data.index(b"\n") + 1
    rest = memoryview(data)  # a slice of it is no copy
    later = []
    for path, kind, mode, changed, more in json.loads(data[:place]):
        if kind == "file":
            with open(path, "wb") as file:
                file.write(rest[place : place + more])
            place += more
            os.chmod(path, mode)
            os.utime(path, ns=(changed, changed))
        elif kind == "link":
            later.append((path, kind, mode, changed, more))
        elif not os.path.isdir(path):  # what is mounted stays as it is
            os.mkdir(path)
            later.append((path, kind, mode, changed, more))
    for path, kind, _, changed, target in later:
        if kind == "link":
            os.symlink(target, path)
            os.utime(path, ns=(changed, changed), follow_symlinks=False)
    for path, kind, mode, changed, _ in reversed(later):
        if kind == "folder":
            os.utime(path, ns=(changed, changed))
            os.chmod(path, mode)


def read(path: str, most: int) -> bytes | None:
    """The beginning of a file; None where there is none."""
    try:
        with open(path, "rb") as file:
            return file.read(most)
    except OSError:
        return None
