"""The program inside the sandbox of the `shell` tool. It runs commands and packs their files.

A cell of the sandbox's Python session, as text; standard library only. Its process is number 1 of its namespace, so
every process whose parent ends becomes its child, it can end them all, and a command's signals reach it only where it
has handlers: while a command runs it has none.
"""

from __future__ import annotations

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
    """Run a command, then end its processes. Return the beginning of its output, and its exit status; None: timeout."""
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

    A further name of a file is of kind "same", with the first name as its target. Holes are filled; sockets, on which
    no process listens any more, are left out. Return the size, for `piece`; None if its SHA-256 is `known`: the caller
    has it already.

    Raises:
        ValueError: the names are longer than `MAX_HEADER`, or the files, without holes, wouldn't fit into a file system
            of `most` bytes for each folder.
        OSError: a path is too long to be made again.
    """
    global packed
    entries: list[list[object]] = []
    contents: list[bytes] = []
    modes: list[tuple[str, int]] = []
    waiting = [(folder, folder) for folder in reversed(folders)]
    left = dict.fromkeys(folders, max(1, -(-most // 4096)))  # pages
    names: dict[tuple[int, int], str] = {}
    while waiting:
        path, root = waiting.pop()
        entry = os.lstat(path)
        mode, changed = stat.S_IMODE(entry.st_mode), entry.st_mtime_ns
        if stat.S_ISSOCK(entry.st_mode):
            continue
        first = names.setdefault((entry.st_dev, entry.st_ino), path)
        if first != path:
            entries.append([path, "same", 0, 0, first])
        elif stat.S_ISLNK(entry.st_mode):
            entries.append([path, "link", mode, changed, os.readlink(path)])
            left[root] -= entry.st_blocks // 8  # a short one has none
        elif stat.S_ISDIR(entry.st_mode):
            if mode & 0o700 != 0o700:
                os.chmod(path, 0o700)
                modes.append((path, mode))
            if path not in folders:
                entries.append([path, "folder", mode, changed, 0])
            waiting += [(f"{path}/{name}", root) for name in sorted(os.listdir(path), reverse=True)]
        elif stat.S_ISFIFO(entry.st_mode):
            entries.append([path, "pipe", mode, changed, 0])
        else:
            left[root] -= -(-entry.st_size // 4096)
            if left[root] < 0 or not stat.S_ISREG(entry.st_mode):
                raise ValueError(f"there is no room for {path}, or it is a device")
            if not mode & 0o400:
                os.chmod(path, 0o600)
                modes.append((path, mode))
            with open(path, "rb") as file:
                contents.append(file.read())
            entries.append([path, "file", mode, changed, len(contents[-1])])
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
        if kind in ("file", "pipe"):
            if kind == "pipe":
                os.mkfifo(path)
            else:
                with open(path, "wb") as file:
                    file.write(rest[place : place + more])
                place += more
            os.chmod(path, mode)
            os.utime(path, ns=(changed, changed))
        elif kind in ("link", "same"):
            later.append((path, kind, mode, changed, more))
        elif not os.path.isdir(path):  # what is mounted stays as it is
            os.mkdir(path)
            later.append((path, kind, mode, changed, more))
    for path, kind, _, changed, target in later:
        if kind == "link":
            os.symlink(target, path)
            os.utime(path, ns=(changed, changed), follow_symlinks=False)
        elif kind == "same":
            os.link(target, path, follow_symlinks=False)
    for path, kind, mode, changed, _ in reversed(later):
        if kind == "folder":
            os.utime(path, ns=(changed, changed))
            os.chmod(path, mode)


def read(path: str, most: int) -> bytes | None:
    """Return the beginning of a file, None if it does not exist."""
    try:
        with open(path, "rb") as file:
            return file.read(most)
    except OSError:
        return None
