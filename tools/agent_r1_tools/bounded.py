"""Bounded reading of untrusted files: an endless line, or a small archive of a huge file, does not fill the memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO, AnyStr

MAX_LINE = 64 << 20
"""The most characters (or bytes, of a file that is read as such) in a line."""
MAX_RATIO = 50
"""The largest allowed ratio of a file to its archive. Text is 3 to 15 times larger, a bomb up to 1,000 times."""
ALWAYS = 32 << 20
"""An unpacked file may be so large in any case."""
SHORTEST = 256
"""A line of an archive counts as so many characters at least, because a short row takes that much memory."""


class TooLargeError(ValueError):
    """A line or an unpacked file that is larger than the bound."""


def bounded_lines(file: IO[AnyStr], path: Path | None = None) -> Iterator[AnyStr]:
    """Yield the lines of an open file. With `path`, the archive that it is unpacked from, their total is bounded too.

    Raises TooLargeError at the line that is too much.
    """
    left = None if path is None else unpacked_bound(path)
    while line := file.readline(MAX_LINE + 1):
        if len(line) > MAX_LINE:
            raise TooLargeError(f"the line has more than {MAX_LINE >> 20} MiB; write one row a line")
        if left is not None and (left := left - max(len(line), SHORTEST)) < 0:
            raise TooLargeError(f"{HUGE}; unpack it, if you trust it")
        yield line


def unpacked_bound(path: Path) -> int:
    """Return the maximum number of characters in a file that is unpacked from this archive."""
    return max(ALWAYS, MAX_RATIO * path.stat().st_size)


HUGE = f"the unpacked file is more than {MAX_RATIO} times as large as the archive"
