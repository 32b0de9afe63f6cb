"""A disk that is full, or can't be written: found out before the work, and said in words."""

from __future__ import annotations

import errno
import shutil
import tempfile
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def no_room(error: BaseException) -> str | None:
    """In words what a disk is to blame for, that is full or can't be written; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in (*FULL, errno.EROFS):
        return None
    return f"{error.strerror}{f': {error.filename}' if error.filename else ''}{'; make room' * (error.errno in FULL)}"


def writable(folder: Path) -> bool:
    """Whether files can be written into a folder that is, or will be, there."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            return True
    except OSError:
        return False


def free_bytes(folder: Path) -> float:
    """What a disk can still take, where a folder is or will be."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    return shutil.disk_usage(there).free


def check_room(run_dir: Path, needed: int) -> None:
    """SystemExit where the disk can't take checkpoints of so many bytes."""
    free = free_bytes(run_dir)
    if free < needed:
        raise SystemExit(
            f"{run_dir}: {free / 1e6:.1f} MB are free there, and checkpoints take {needed / 1e6:.1f} MB; make room, or "
            "start in another folder"
        )
