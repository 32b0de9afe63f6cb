"""Terminal tasks as folders in Harbor's layout (Terminal-Bench 2): task.toml, instruction.md, environment/, tests/,
solution/. Read are those that need no image to be built: their Dockerfile names a base image, a WORKDIR, and files."""

from __future__ import annotations

import os
import re
import shlex
import stat
import tomllib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePosixPath

from agent_r1.task_data.records import DataFormatError, DataNotFoundError
from agent_r1_tools.python import layout

MAX_FILES, MAX_BYTES = 500, 8 << 20
"""What a task may have of files, in its environment and in its tests."""
MAX_TEXT, MAX_SETTINGS = 1 << 20, 64 << 10
"""Bytes of instruction.md and solve.sh; of task.toml and the Dockerfile."""
MAX_DOTS = 200
"""In a line of task.toml: tomllib takes minutes for a key of many parts."""
NAME = rb"test_[\w\x80-\xff]*"
TEST = re.compile(rb"^(?:\xef\xbb\xbf)?(?:def[ \t]+" + NAME + rb"[ \t]*\(|" + NAME + rb"[ \t]*[:=])", re.MULTILINE)
INDENTED_TEST = re.compile(rb"^[ \t]+(?:async[ \t]+)?def[ \t]+test_", re.MULTILINE)
CLASS = re.compile(rb"^[ \t]*class[ \t]", re.MULTILINE)
FOR_A_RUNNER = re.compile(
    rb"^[ \t]*(?:async[ \t]+def[ \t]+test_|def[ \t]+" + NAME + rb"[ \t]*\(\s*[\w\x80-\xff]+\s*[,:)]"
    rb"|def[ \t]+(?:setup|teardown)_(?:module|function)\b|@(?:pytest\.)?fixture\b)",
    re.MULTILINE,
)
IMPORTED = re.compile(rb"^[ \t]*from[ \t][^\n]*\bimport\b(?:[ \t]*\([^)]*|(?:\\\r?\n|[^\n])*+)", re.MULTILINE)
TAKEN = frozenset("usr bin sbin lib lib64 etc dev proc sys tmp tests logs packages programs guest.pyc".split())
"""What the sandbox has for itself, or the tests get: no place for a WORKDIR."""
DOCKERFILE = """FROM python:3.11-slim
WORKDIR /app
COPY files/ /app/
"""
Files = Mapping[str, tuple[int, bytes]]


@dataclass(frozen=True)
class TerminalTask:
    """One task.

    Attributes:
        id: the folder's name.
        instruction: what is asked.
        folder: where commands begin (WORKDIR).
        start: the files that are there at first: absolute path -> mode and content.
        tests: path inside of tests/ -> content; a test.sh, or files of Python with functions test_*.
        solution: solution/solve.sh; "" for none.
        seconds: what the tests may take, as task.toml says.
        steps: of a generated task the commands that solve it.
    """

    id: str
    instruction: str
    folder: str
    start: Files
    tests: Mapping[str, bytes]
    solution: str = ""
    seconds: float = 60.0
    steps: tuple[str, ...] = field(default=())


def load_tasks(data_dir: str | os.PathLike[str], split: str) -> list[TerminalTask]:
    """The tasks of a folder of task folders, by name; of its folder `split`, where there is one. Without such folders
    every split has the same tasks, which a warning says.

    Raises: DataNotFoundError; DataFormatError (file, line and reason) also for a task that needs an image.
    """
    root = Path(data_dir)
    folder = root / split if _has_tasks(root / split) else root
    found = sorted(path.parent for path in folder.glob("*/task.toml")) if folder.is_dir() else []
    if not found:
        there = ", ".join(sorted(path.name for path in root.glob("*") if any(path.glob("*/task.toml"))))
        which = f"for the split {split!r}; there are {there}" if there else "(Harbor's layout)"
        raise DataNotFoundError(f"data_dir={root} has no folders with a task.toml {which}")
    if split != "train" and folder == root:
        warnings.warn(f"data_dir={root} has no folder {split!r}: the split has the tasks of training", stacklevel=2)
    return [read_task(path) for path in found]


def has_split(data_dir: str | os.PathLike[str], split: str) -> bool:
    """Whether a folder has tasks of a split: those that stand in no folder `split` are for training."""
    return _has_tasks(Path(data_dir) / split) or split == "train"


def _has_tasks(folder: Path) -> bool:
    """Whether it is a folder of task folders, and not a task of that name."""
    return any(folder.glob("*/task.toml"))


def may_test(content: bytes) -> bool:
    """Whether a file of Python may have functions test_* of its own or by their names from another file of the tests.

    It isn't parsed, which takes gigabytes for hostile text; this is linear.
    """
    if TEST.search(content) or INDENTED_TEST.search(content):  # under an `if`, say
        return True
    return any(re.search(rb"\btest_", found[0]) for found in IMPORTED.finditer(content))


def needs_a_runner(content: bytes) -> bool:
    """Whether a file of Python seems to have tests that a plain call doesn't run: methods, async, with fixtures."""
    return bool(FOR_A_RUNNER.search(content) or (CLASS.search(content) and INDENTED_TEST.search(content)))


def read_task(folder: Path) -> TerminalTask:
    """The task in a folder; nothing outside of the folder is read.

    Raises DataFormatError: file, line, and what is wrong or can't be done here.
    """
    try:
        return _read_task(folder)
    except (OSError, RecursionError) as error:  # a name that is too long, say
        raise DataFormatError(f"{folder}: it can't be read: {error}") from None


def _read_task(folder: Path) -> TerminalTask:
    text = _text(folder, "task.toml", MAX_SETTINGS)
    if any(line.count(".") > MAX_DOTS for line in text.split("\n")):
        raise DataFormatError(f"{folder / 'task.toml'}: expected at most {MAX_DOTS} dots in a line")
    try:
        settings = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers of too many digits, and lists nested too deeply
        raise DataFormatError(f"{folder / 'task.toml'}: expected TOML: {error}") from None
    if "steps" in settings:
        raise DataFormatError(f"{folder / 'task.toml'}: a task of several steps can't be played here")
    verifier, environment = settings.get("verifier", {}), settings.get("environment", {})
    seconds = verifier.get("timeout_sec", 60.0) if isinstance(verifier, dict) else None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < 1e6:
        raise DataFormatError(f"{folder / 'task.toml'}, [verifier] timeout_sec: expected a number of seconds")
    if not isinstance(environment, dict):
        raise DataFormatError(f"{folder / 'task.toml'}, [environment]: expected a table")
    dockerfile = folder / "environment" / "Dockerfile"
    has_dockerfile = os.path.lexists(dockerfile)
    if not has_dockerfile and ("docker_image" in environment or _has(folder / "environment")):
        raise DataFormatError(f"{folder}: it needs an image, and has no environment/Dockerfile that says what is in it")
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if os.path.lexists(folder / "environment" / name):
            raise DataFormatError(f"{folder / 'environment' / name}: a task of several containers can't be played here")
    workdir, start = _build(folder, dockerfile) if has_dockerfile else ("/app", {})
    tests = {path.relative_to(folder / "tests").as_posix(): _bytes(folder, path) for path in _files(folder / "tests")}
    if "test.sh" not in tests:
        in_python = {name: content for name, content in tests.items() if "/" not in name and name.endswith(".py")}
        if wrong := [name for name, content in in_python.items() if needs_a_runner(content)]:
            why = "methods, async functions, and functions with parameters or fixtures need a test.sh that runs them"
            raise DataFormatError(f"{folder / 'tests' / wrong[0]}: {why}")
        if not any(map(may_test, in_python.values())):
            raise DataFormatError(f"{folder / 'tests'}: expected test.sh, or functions test_* in files of Python")
    return TerminalTask(
        folder.name,
        _text(folder, "instruction.md").strip(),
        workdir,
        start,
        tests,
        _text(folder, "solution/solve.sh") if os.path.lexists(folder / "solution" / "solve.sh") else "",
        float(seconds),
    )


def write_task(task: TerminalTask, root: Path) -> Path:
    """Write a task as a folder that Harbor takes, too; its files lie in /app."""
    folder = root / task.id
    toml = f'version = "1.0"\n\n[verifier]\ntimeout_sec = {task.seconds}\n\n[agent]\ntimeout_sec = 600.0\n'
    files: dict[str, bytes] = {
        "task.toml": toml.encode(),
        "instruction.md": (task.instruction + "\n").encode(),
        "environment/Dockerfile": DOCKERFILE.encode(),
        "solution/solve.sh": task.solution.encode(),
    }
    start = {f"environment/files{path.removeprefix(task.folder)}": file for path, file in task.start.items()}
    files |= {path: content for path, (_, content) in start.items()}
    files |= {f"tests/{path}": content for path, content in task.tests.items()}
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    for path, (mode, _) in start.items():
        (folder / path).chmod(mode)
    return folder


def _build(folder: Path, dockerfile: Path) -> tuple[str, dict[str, tuple[int, bytes]]]:
    """WORKDIR and the files that a Dockerfile copies into it."""
    workdir, copies, bases = "/app", [], 0
    text = re.sub(r"\\\n", "  ", _text(folder, "environment/Dockerfile", MAX_SETTINGS))
    for number, line in enumerate(text.splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise DataFormatError(f"{dockerfile}, line {number}: {error}") from None
        if not words:
            continue
        instruction = words[0].upper()
        bases += instruction == "FROM"
        if instruction == "WORKDIR" and len(words) == 2:
            workdir = str(PurePosixPath(workdir, words[1]))
        elif instruction in ("COPY", "ADD") and len(words) >= 3 and not words[1].startswith("-"):
            copies.append((number, words[1:-1], words[-1], workdir))
        elif instruction not in ("FROM", "LABEL", "CMD", "ENTRYPOINT") or bases > 1:
            raise DataFormatError(
                f"{dockerfile}, line {number}: {line.strip()[:80]!r} needs an image to be built; "
                "here only FROM (one), WORKDIR and COPY of files work"
            )
    parts = PurePosixPath(workdir).parts
    if len(parts) < 2 or parts[1] in TAKEN or ".." in parts or not re.fullmatch(r"[\w./-]{1,200}", workdir, re.A):
        raise DataFormatError(f"{dockerfile}: WORKDIR {workdir} can't be had here, because it is the sandbox's own")
    for path in map(PurePosixPath, layout.library()):
        if path.is_relative_to(workdir) or PurePosixPath(workdir).is_relative_to(path):
            raise DataFormatError(f"{dockerfile}: WORKDIR {workdir} can't be had here, because of Python in {path}")
    if sum(len(sources) for _, sources, _, _ in copies) > MAX_FILES:
        raise DataFormatError(f"{dockerfile}: expected at most {MAX_FILES} files")
    files: dict[str, tuple[int, bytes]] = {}
    for number, sources, target, where in copies:
        for source in sources:
            at = PurePosixPath(where, target)
            files |= _copy(folder, dockerfile, number, source, at, target.endswith("/"), workdir)
            _check(f"{dockerfile}, line {number}", files)
    return workdir, files


def _check(here: str, files: Files) -> None:
    """Refuse files that no machine could be given."""
    folders = {str(parent) for path in files for parent in PurePosixPath(path).parents}
    if len(files) > MAX_FILES or len(folders) > MAX_FILES or sum(len(file) for _, file in files.values()) > MAX_BYTES:
        raise DataFormatError(f"{here}: expected at most {MAX_FILES} files and folders and {MAX_BYTES >> 20} MiB")
    for path in files:
        if path in folders:
            raise DataFormatError(f"{here}: {path} would be a file and a folder")
        if "\0" in path or len(path) > 1000 or any(len(os.fsencode(part)) > 255 for part in path.split("/")):
            raise DataFormatError(f"{here}: {path[:80]!r} is no name for a file")


def _copy(
    folder: Path, dockerfile: Path, number: int, source: str, target: PurePosixPath, into: bool, workdir: str
) -> dict[str, tuple[int, bytes]]:
    here = f"{dockerfile}, line {number}"
    relative = PurePosixPath(source.lstrip("/"))
    found = dockerfile.parent / relative
    if ".." in relative.parts or not found.exists():
        raise DataFormatError(f"{here}: there is no {source!r} beside it")
    if ".." in target.parts or not target.is_relative_to(workdir):
        raise DataFormatError(f"{here}: files can be copied to WORKDIR ({workdir}) only, not to {target}")
    if found.is_dir():
        copied = {target / path.relative_to(found).as_posix(): path for path in _files(found)}
    else:
        inside = into or str(target) == workdir
        copied = {target / relative.name if inside else target: path for path in _files(found)}
    return {
        str(at): (0o755 if path.stat().st_mode & 0o100 else 0o644, _bytes(folder, path))
        for at, path in copied.items()
        if path != dockerfile
    }


def _files(folder: Path) -> list[Path]:
    """The files below a folder, or a file itself, in the order of their names; none of them a link."""
    if not os.path.lexists(folder):
        return []
    too_many = DataFormatError(f"{folder}: expected at most {MAX_FILES} files and {MAX_BYTES >> 20} MiB")
    below = [folder, *islice(folder.rglob("*"), 2 * MAX_FILES)]  # with their folders
    if len(below) > 2 * MAX_FILES:
        raise too_many
    for path in below:
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise DataFormatError(f"{path}: expected a plain file, found a link or a device")
    found = sorted(path for path in below if path.is_file())
    if len(found) > MAX_FILES or sum(path.stat().st_size for path in found) > MAX_BYTES:
        raise too_many
    return found


def _has(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _text(folder: Path, name: str, most: int = MAX_TEXT) -> str:
    try:
        return _bytes(folder, folder / name, most).decode()
    except UnicodeDecodeError as error:
        raise DataFormatError(f"{folder / name}: expected UTF-8: {error}") from None


def _bytes(folder: Path, path: Path, most: int = MAX_BYTES) -> bytes:
    """A plain file inside of the folder. No link is followed, no pipe waited for, and the size known before."""
    if os.path.realpath(path) != os.path.join(os.path.realpath(folder), path.relative_to(folder)):
        raise DataFormatError(f"{path}: expected a plain file in {folder}, found a link")
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise DataFormatError(f"{path}: expected a plain file, found a folder, a pipe or a device")
            if found.st_size > most:
                raise DataFormatError(f"{path}: expected at most {most} bytes, found {found.st_size}")
            return file.read(most)
    except FileNotFoundError:
        raise DataFormatError(f"{path}: expected such a file, found none") from None
    except OSError as error:
        raise DataFormatError(f"{path}: expected a plain file: {error}") from None
