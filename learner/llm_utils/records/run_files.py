"""Files of a run for people and programs: JSON, and trajectories. A crash leaves either the old or the new file.

    runs/{run_name}/summary.json          figures and arguments, `finished` at the end
                    config.yaml           the flags (llm_utils.config_file)
                    trajectories.jsonl    some episodes of every iteration (--log-trajectories)
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

BEGINNING = re.compile(rb'\{"iteration": ?(\d{1,18})[,}]')  # of a line


_claimed: dict[Path, IO[bytes]] = {}


def name_of(env_id: str | Sequence[str]) -> str:
    """Return the part of a run's name for `--env-id`: the id, or several joined and cut to 80 characters."""
    if isinstance(env_id, str):
        return env_id
    return "-".join(re.sub(r"^.*[/:]|-v\d+$", "", name) for name in env_id)[:80]


def claim(folder: Path) -> None:
    """Lock a run's folder for this process until it ends, in any way.

    Raise SystemExit if another process holds the lock, or if nothing can be written there.
    """
    path = folder.absolute() / ".lock"
    if path in _claimed:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError as error:
        raise SystemExit(f"{folder}: cannot write into this folder: {error}") from None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock, it is not held by leftover child processes
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise SystemExit(f"{folder}: another process uses this folder; wait until it ends, or stop it") from None
    _claimed[path] = file  # also without a lock, as some file systems have none


def discard(folder: Path) -> None:
    """Remove the folder of a run that never began, if it holds nothing but the files of its beginning."""
    names = re.compile(r"\.lock|summary\.json|config\.yaml|events\.out\.tfevents\..*")
    paths = list(folder.iterdir()) if folder.is_dir() else []
    if all(names.fullmatch(path.name) and path.is_file() for path in paths):
        for path in paths:
            path.unlink(missing_ok=True)
        folder.rmdir()


def sync(path: Path) -> None:
    """Flush a file, or everything in a folder, to the disk. Raise OSError."""
    if path.is_dir():
        for child in path.iterdir():
            sync(child)
    sync_one(path)


def sync_one(path: Path) -> None:
    """Flush a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file atomically: an interruption leaves the old or the new file. Raise OSError."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.writelines(parts)
        sync_one(temporary)
    except OSError:
        temporary.unlink(missing_ok=True)  # the disk may be full
        raise
    os.replace(temporary, path)
    sync_one(path.parent)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically. Raise OSError."""
    replace(path, [json.dumps(content, indent=2).encode(), b"\n"])


def append_rows(path: Path, rows: Sequence[Any], **extra: Any) -> None:
    """Append trajectories to a JSONL file, each as a `line`. Raise OSError."""
    with path.open("ab") as file:
        for row in rows:
            file.write(line(row, **extra))
        file.flush()
        os.fsync(file.fileno())  # a checkpoint must not outlive the rows of its iterations


def line(row: Any, **extra: Any) -> bytes:
    """Return a trajectory as a line of JSON, in the schema of `agent_r1.trajectories`.

    A learner's own data is added: `extra`, lists with an entry per token (`versions`, `values`, `logprobs`,
    `advantages`), `stats`, and `segment_starts`, the first token of every segment (one, unless the context was
    rewritten). An episode that branched from another one has `parent`, its number, and `branch_turn`, its first turn.
    """
    content: dict[str, Any] = {**extra, "task_index": row.task_index}
    content |= row.record  # with several environments, the task's index in its own
    for name in ("episode", "prompt_length", "terminated", "truncated", "stats"):
        content[name] = getattr(row, name)
    content |= {"fault": row.fault, "segment_starts": row.segment_starts}
    content["turns"] = [[start, end] for start, end, _ in row.played]
    content["turn_rewards"] = [float(reward) for _, _, reward in row.played]
    content |= {"tokens": row.tokens.tolist(), "action_mask": row.action_mask.astype(int).tolist()}
    content["versions"] = row.versions.tolist()
    for name in ("rewards", "values", "logprobs", "advantages"):
        content[name] = getattr(row, name).astype(float).round(6).tolist()
    return json.dumps(content).encode() + b"\n"


def drop_later_rows(path: Path, iteration: int) -> None:
    """Remove lines of iterations after `iteration` from a JSONL file: a resumed run makes them again.

    The last line of a killed run may be incomplete; it is removed too. So are damaged lines before it, whose number is
    printed. Raise OSError.
    """
    if not path.is_file():
        return
    damaged = 0

    def valid_lines(file: IO[bytes]) -> Iterator[bytes]:
        nonlocal damaged
        for line in file:
            number = iteration_of(line)
            if number is not None and number <= iteration:
                yield line
            damaged += number is None and line.endswith(b"\n")

    with path.open("rb") as file:
        replace(path, valid_lines(file))
    if damaged:
        print(f"{path}: {damaged} damaged lines were removed", file=sys.stderr)


def iteration_of(line: bytes) -> int | None:
    """Return the iteration of a line; None for a damaged one. Only both ends of a learner's line are read, as it is
    long."""
    if match := BEGINNING.match(line):
        return int(match[1]) if line.endswith(b"}\n") else None
    try:
        number = json.loads(line)["iteration"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return number if isinstance(number, int) and line.endswith(b"\n") else None
