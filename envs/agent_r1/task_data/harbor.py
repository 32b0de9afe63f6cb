"""Terminal tasks as folders in Harbor's layout (Terminal-Bench 2): task.toml, instruction.md, environment/, tests/,
solution/.

Only tasks that need no image build can be read: their Dockerfile names a base image, a WORKDIR, and files.
"""

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
"""The maximum number and size of a task's files, in its environment and in its tests."""
MAX_TEXT, MAX_SETTINGS = 1 << 20, 64 << 10
"""The maximum size in bytes of instruction.md and solve.sh, and of task.toml and the Dockerfile."""
MAX_DOTS = 200
"""The maximum number of dots in a line of task.toml: tomllib takes minutes for a key of many parts."""
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
"""Folders of the sandbox or the tests, which cannot be a WORKDIR."""
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
        instruction: the instruction for the policy.
        folder: the folder where commands start (WORKDIR).
        start: the initial files: absolute path -> mode and content.
        tests: path in tests/ -> content; a test.sh, or Python files with functions test_*.
        solution: solution/solve.sh; "" for none.
        seconds: the time limit of the tests, from task.toml.
        steps: the commands that solve a generated task.
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
    """Return the tasks of a folder of task folders, by name, or of its folder `split`, if there is one.

    Without such a folder every split has the same tasks, and a warning is given.

    Raises: DataNotFoundError; DataFormatError (file, line and reason) also for a task that needs an image.
    """
    root = Path(data_dir)
    folder = root / split if _has_tasks(root / split) else root
    task_folders = sorted(path.parent for path in folder.glob("*/task.toml")) if folder.is_dir() else []
    if not task_folders:
        splits = ", ".join(sorted(path.name for path in root.glob("*") if any(path.glob("*/task.toml"))))
        hint = f"for the split {split!r}; there are {splits}" if splits else "(Harbor's layout)"
        raise DataNotFoundError(f"data_dir={root} has no folders with a task.toml {hint}")
    if split != "train" and folder == root:
        warnings.warn(f"data_dir={root} has no folder {split!r}: the split has the tasks of training", stacklevel=2)
    return [read_task(path) for path in task_folders]


def has_split(data_dir: str | os.PathLike[str], split: str) -> bool:
    """Return whether a folder has tasks of a split: tasks outside a folder `split` are for training."""
    return _has_tasks(Path(data_dir) / split) or split == "train"


def _has_tasks(folder: Path) -> bool:
    """Return whether a folder contains task folders, and is not a task itself."""
    return any(folder.glob("*/task.toml"))


def may_test(content: bytes) -> bool:
    """Return whether a Python file may define functions test_*, or import them from another file of the tests.

    The file is not parsed, which takes gigabytes for hostile text. This check is linear.
    """
    if TEST.search(content) or INDENTED_TEST.search(content):  # under an `if`, for example
        return True
    return any(re.search(rb"\btest_", found[0]) for found in IMPORTED.finditer(content))


def needs_a_runner(content: bytes) -> bool:
    """Return whether a Python file seems to have tests that a plain call cannot run: methods, async, with fixtures."""
    return bool(FOR_A_RUNNER.search(content) or (CLASS.search(content) and INDENTED_TEST.search(content)))


def read_task(folder: Path) -> TerminalTask:
    """Read the task in a folder; nothing outside the folder is read.

    Raises DataFormatError with file, line, and the error or unsupported feature.
    """
    try:
        return _read_task(folder)
    except (OSError, RecursionError) as error:  # a name that is too long, for example
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
        raise DataFormatError(f"{folder / 'task.toml'}: tasks of several steps are not supported")
    verifier, environment = settings.get("verifier", {}), settings.get("environment", {})
    seconds = verifier.get("timeout_sec", 60.0) if isinstance(verifier, dict) else None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < 1e6:
        raise DataFormatError(f"{folder / 'task.toml'}, [verifier] timeout_sec: expected a number of seconds")
    if not isinstance(environment, dict):
        raise DataFormatError(f"{folder / 'task.toml'}, [environment]: expected a table")
    dockerfile = folder / "environment" / "Dockerfile"
    has_dockerfile = os.path.lexists(dockerfile)
    if not has_dockerfile and ("docker_image" in environment or _has(folder / "environment")):
        raise DataFormatError(f"{folder}: it needs an image, and has no environment/Dockerfile that describes it")
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if os.path.lexists(folder / "environment" / name):
            raise DataFormatError(f"{folder / 'environment' / name}: tasks of several containers are not supported")
    workdir, start = _build(folder, dockerfile) if has_dockerfile else ("/app", {})
    tests = {path.relative_to(folder / "tests").as_posix(): _bytes(folder, path) for path in _files(folder / "tests")}
    if "test.sh" not in tests:
        in_python = {name: content for name, content in tests.items() if "/" not in name and name.endswith(".py")}
        if unsupported := [name for name, content in in_python.items() if needs_a_runner(content)]:
            reason = "methods, async functions, and functions with parameters or fixtures need a test.sh that runs them"
            raise DataFormatError(f"{folder / 'tests' / unsupported[0]}: {reason}")
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
    """Write a task as a folder that Harbor can read, too; its files are in /app."""
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
    """Return WORKDIR and the files that a Dockerfile copies into it."""
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
        raise DataFormatError(f"{dockerfile}: WORKDIR {workdir} is not available, because the sandbox uses it")
    for path in map(PurePosixPath, layout.library()):
        if path.is_relative_to(workdir) or PurePosixPath(workdir).is_relative_to(path):
            raise DataFormatError(f"{dockerfile}: WORKDIR {workdir} is not available, because Python is in {path}")
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
    """Raise DataFormatError for files that no sandbox could hold."""
    folders = {str(parent) for path in files for parent in PurePosixPath(path).parents}
    if len(files) > MAX_FILES or len(folders) > MAX_FILES or sum(len(file) for _, file in files.values()) > MAX_BYTES:
        raise DataFormatError(f"{here}: expected at most {MAX_FILES} files and folders and {MAX_BYTES >> 20} MiB")
    for path in files:
        if path in folders:
            raise DataFormatError(f"{here}: {path} would be both a file and a folder")
        if "\0" in path or len(path) > 1000 or any(len(os.fsencode(part)) > 255 for part in path.split("/")):
            raise DataFormatError(f"{here}: {path[:80]!r} is not a valid file name")


def _copy(
    folder: Path, dockerfile: Path, number: int, source: str, target: PurePosixPath, into: bool, workdir: str
) -> dict[str, tuple[int, bytes]]:
    here = f"{dockerfile}, line {number}"
    relative = PurePosixPath(source.lstrip("/"))
    source_path = dockerfile.parent / relative
    if ".." in relative.parts or not source_path.exists():
        raise DataFormatError(f"{here}: there is no {source!r} next to the Dockerfile")
    if ".." in target.parts or not target.is_relative_to(workdir):
        raise DataFormatError(f"{here}: files can be copied to WORKDIR ({workdir}) only, not to {target}")
    if source_path.is_dir():
        copied = {target / path.relative_to(source_path).as_posix(): path for path in _files(source_path)}
    else:
        inside = into or str(target) == workdir
        copied = {target / relative.name if inside else target: path for path in _files(source_path)}
    return {
        str(at): (0o755 if path.stat().st_mode & 0o100 else 0o644, _bytes(folder, path))
        for at, path in copied.items()
        if path != dockerfile
    }


def _files(folder: Path) -> list[Path]:
    """Return the files below a folder, or a file itself, in the order of their names. Links raise DataFormatError."""
    if not os.path.lexists(folder):
        return []
    too_many = DataFormatError(f"{folder}: expected at most {MAX_FILES} files and {MAX_BYTES >> 20} MiB")
    below = [folder, *islice(folder.rglob("*"), 2 * MAX_FILES)]  # with their folders
    if len(below) > 2 * MAX_FILES:
        raise too_many
    for path in below:
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise DataFormatError(f"{path}: expected a plain file, found a link or a device")
    paths = sorted(path for path in below if path.is_file())
    if len(paths) > MAX_FILES or sum(path.stat().st_size for path in paths) > MAX_BYTES:
        raise too_many
    return paths


def _has(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _text(folder: Path, name: str, max_bytes: int = MAX_TEXT) -> str:
    try:
        return _bytes(folder, folder / name, max_bytes).decode()
    except UnicodeDecodeError as error:
        raise DataFormatError(f"{folder / name}: expected UTF-8: {error}") from None


def _bytes(folder: Path, path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Read a plain file inside the folder. It follows no link, waits for no pipe, and checks the size first."""
    if os.path.realpath(path) != os.path.join(os.path.realpath(folder), path.relative_to(folder)):
        raise DataFormatError(f"{path}: expected a plain file in {folder}, found a link")
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DataFormatError(f"{path}: expected a plain file, found a folder, a pipe or a device")
            if status.st_size > max_bytes:
                raise DataFormatError(f"{path}: expected at most {max_bytes} bytes, found {status.st_size}")
            return file.read(max_bytes)
    except FileNotFoundError:
        raise DataFormatError(f"{path}: expected such a file, found none") from None
    except OSError as error:
        raise DataFormatError(f"{path}: expected a plain file: {error}") from None
