"""Checks for a full or read-only disk, before the work and in error messages."""

from __future__ import annotations

import errno
import shutil
import tempfile
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def no_room(error: BaseException) -> str | None:
    """Describe an error of a full or read-only disk; return None for any other error."""
    if not isinstance(error, OSError) or error.errno not in (*FULL, errno.EROFS):
        return None
    return f"{error.strerror}{f': {error.filename}' if error.filename else ''}{'; make room' * (error.errno in FULL)}"


def writable(folder: Path) -> bool:
    """Return True if files can be written into a folder, which need not exist yet."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return True
    except OSError:
        return False


def free_bytes(folder: Path) -> float:
    """Return the free bytes of the disk for a folder, which need not exist yet."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    return shutil.disk_usage(existing).free


def check_room(run_dir: Path, checkpoints: int, model: int = 0) -> None:
    """Raise SystemExit if the disk has no room for checkpoints and a saved model of these bytes."""
    free = free_bytes(run_dir)
    if free < checkpoints + model:
        content = f"checkpoints take {checkpoints / 1e6:.1f} MB"
        content += f" and the saved model {model / 1e6:.1f} MB" if model else ""
        raise SystemExit(
            f"{run_dir}: only {free / 1e6:.1f} MB are free there, but {content}; make room, or start in another folder"
            + (", or leave the model out: --no-save-model" if model else "")
        )
