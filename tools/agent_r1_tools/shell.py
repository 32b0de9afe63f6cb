"""The `shell` tool: it runs a policy's commands in a bubblewrap machine that has a folder and nothing to lose.

A `Machine` has the programs of this machine's /usr/bin, to be read; a work folder and /tmp, in memory; no network, no
/proc, and no processes of others. Its files can be packed and unpacked in another machine: to branch an episode, and
to run tests on its result.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from agent_r1_tools.python.bubblewrap import Bubblewrap
from agent_r1_tools.python.choose import LOCAL, probe
from agent_r1_tools.python.launch import START_SECONDS
from agent_r1_tools.python.process import ProcessSession
from agent_r1_tools.python.sandbox import CallError, Limits, SandboxError, cut
from agent_r1_tools.running import describe
from agent_r1_tools.tool import Tool, ToolResult

INSIDE = Path(__file__).with_name("shell_inside.py")
MAX_COMMAND_CHARS = 10_000
PIECE = 1 << 20
GRACE_SECONDS = 30.0
"""The extra time of the sandbox, beyond that of a command, before it counts as lost: a busy machine is slow."""
LIMITS = Limits(wall_seconds=10, cpu_seconds=10, memory=256 << 20, output=4096, processes=32, files=16 << 20)
"""For a machine: seconds of a command, bytes of memory of each of at most so many processes, bytes of files."""
BROKEN = "[the machine broke down, or its files can't be kept; they are as they were before]"
FILE = 0o644
PROGRAM = 0o755


def require_bubblewrap() -> None:
    """Raise SandboxError, with the package to install, if bubblewrap does not work."""
    problem = probe("bubblewrap")
    if problem is not None:
        remedy = LOCAL["bubblewrap"].remedy
        raise SandboxError(f"a shell needs bubblewrap, which doesn't work here: {problem}. Remedy: {remedy}")


def pack(files: Mapping[str, tuple[int, bytes]]) -> bytes:
    """Pack files, given by absolute path with their modes, for `Machine.unpack`. Their time is the year 2000."""
    folders = sorted({str(parent) for path in files for parent in PurePosixPath(path).parents} - {"/"})
    changed = 946_684_800 * 10**9
    entries: list[list[Any]] = [[path, "folder", 0o755, changed, 0] for path in folders]
    entries += [[path, "file", mode, changed, len(content)] for path, (mode, content) in files.items()]
    return json.dumps(entries).encode() + b"\n" + b"".join(content for _, content in files.values())


def part(packed: bytes, folder: str) -> bytes:
    """Return the files of one folder of packed files.

    Raises SandboxError if they are not packed files.
    """
    try:
        header, _, rest = packed.partition(b"\n")
        entries, contents, place = [], [], 0
        for entry in json.loads(header):
            path, kind, _, _, size = entry
            if _is_in(path, folder):
                if kind == "same" and not _is_in(size, folder):
                    raise ValueError(f"{path} is a name of something else")
                entries.append(entry)
                contents.append(rest[place : place + size] if kind == "file" else b"")
            place += size if kind == "file" else 0
    except (ValueError, TypeError, RecursionError) as error:
        raise SandboxError(f"the sandbox packed up nonsense: {error}") from None
    return json.dumps(entries).encode() + b"\n" + b"".join(contents)


def _is_in(path: str, folder: str) -> bool:
    return PurePosixPath(path).is_relative_to(folder) and ".." not in PurePosixPath(path).parts


class Machine:
    """A place where commands run, one after the other; nothing but files is kept from one to the next.

    Args:
        folder: where commands begin, which is empty at first. It and /tmp are packed up.
        limits: see `LIMITS`.
        files: further files, to be read only.
        writable: further folders, which are not packed up.
        hide: folders of this machine that are never shown.
    """

    def __init__(
        self,
        folder: str = "/app",
        limits: Limits = LIMITS,
        *,
        files: Mapping[str, bytes] | None = None,
        writable: Sequence[str] = (),
        hide: Sequence[str] = (),
    ) -> None:
        self.folder, self.limits = folder, limits
        outer = Limits(
            limits.wall_seconds + GRACE_SECONDS,
            limits.cpu_seconds + GRACE_SECONDS,
            limits.memory,
            limits.output,
            limits.processes + 1,  # the one that runs the others
            limits.files,
        )
        folders = [folder, "/tmp", *writable]
        self._sandbox = Bubblewrap(outer, folders=folders, programs=True, files=files, hide=hide)
        self._session: ProcessSession | None = None
        self._packed = b""

    def _call(self, name: str, *arguments: Any) -> Any:
        if self._session is None:
            self._session = self._sandbox.session()
            self._session.run(INSIDE.read_text())
        return self._session.call(name, arguments)

    def alive(self) -> bool:
        """Return True if its processes run. A machine that was not used yet has none."""
        return self._session is not None and self._session.alive()

    def run(self, command: str, variables: Mapping[str, str] | None = None) -> tuple[str, int | None]:
        """Run a command and end its processes. Return its output, cut, and its exit status (None: it ran out of time).

        Raises: CallError if the machine and its files are lost; SandboxError if it does not start.
        """
        limits = self.limits
        arguments = (command, self.folder, limits.wall_seconds, 4 * limits.output + 4, dict(variables or {}))
        written, code = self._call("run_command", *arguments)
        return cut(written.decode("utf-8", "replace"), limits.output), code

    def pack(self) -> bytes:
        """Pack all files. Raises the errors of `run`, also if packing fails; close the machine then."""
        known = hashlib.sha256(self._packed).hexdigest()
        size = self._call("pack", [self.folder, "/tmp"], self.limits.files, known)
        if size is not None:
            self._packed = b"".join(self._call("piece", start) for start in range(0, size, PIECE))
        return self._packed

    def unpack(self, packed: bytes) -> None:
        """Make these files, in a machine that has none yet. Raises as `run`."""
        for start in range(0, len(packed), PIECE):
            self._call("feed", packed[start : start + PIECE])
        self._call("unpack")

    def read(self, path: str, most: int = 1000) -> bytes | None:
        """Return the beginning of a file, None if it does not exist. Raises the errors of `run`."""
        content: bytes | None = self._call("read", path, most)
        return content

    def close(self) -> None:
        """End its processes; its files are gone."""
        if self._session is not None:
            self._session.close()
            self._session, self._packed = None, b""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_session": None, "_packed": b""}  # a process cannot be pickled or copied

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class ShellTool(Tool):
    """Runs commands in a machine of the episode, whose files are its state.

    `ToolResult.ok` says whether the command ended in time; `data` is {"exit_code": number, or None}.

    Args:
        machine: where commands run.
        start: the files that are there at first, packed.
    """

    name = "shell"
    parameters = {
        "type": "object",
        "properties": {"command": {"type": "string", "description": "The command, for bash."}},
        "required": ["command"],
        "additionalProperties": False,
    }
    concurrency_safe = False
    timeout_is_fault = True  # commands have their own limits

    def __init__(self, machine: Machine | None = None, start: bytes = b"[]\n") -> None:
        require_bubblewrap()
        self.machine = machine or Machine()
        self.start = start
        limits = self.machine.limits
        self.description = (
            f"Run a command with bash in {self.machine.folder} and read what it prints. Files stay; variables, cd and "
            f"processes end with the command, which has {limits.wall_seconds:g} seconds. There is no network."
        )
        self.timeout = 2 * (limits.wall_seconds + GRACE_SECONDS) + 2 * START_SECONDS
        self.max_result_chars = limits.output + 200
        self._state = start
        self._runs_in: int | None = None  # the process in which the machine has these files

    def begin(self, machine: Machine, start: bytes) -> None:
        """Take another machine with other initial files, for another task."""
        self.machine.close()
        self.machine, self.start = machine, start
        self.set_state(None)

    def execute(self, arguments: dict[str, Any]) -> ToolResult:
        command = arguments["command"]
        if len(command) > MAX_COMMAND_CHARS or "\0" in command:
            problem = "it has a NUL" if "\0" in command else f"it is longer than {MAX_COMMAND_CHARS} characters"
            return ToolResult(f"The command was not run: {problem}.", ok=False)
        try:
            # No code of the policy runs between two commands: a machine that ends then is an infrastructure error.
            if self._runs_in != os.getpid() or not self.machine.alive():
                self.machine.close()
                self.machine.unpack(self._state)
                self._runs_in = os.getpid()
            try:
                output, code = self.machine.run(command.encode("utf-8", "replace").decode())
                self._state = self.machine.pack()
            except CallError:
                self.set_state(self._state)
                return ToolResult(BROKEN, ok=False)
        except (SandboxError, CallError, OSError) as error:
            self.set_state(self._state)
            return ToolResult("The shell is not available at the moment.", ok=False, fault=describe(error))
        ending = "" if code == 0 else f"[exit status {code}]"
        if code is None:
            ending = f"[stopped after {self.machine.limits.wall_seconds:g} seconds]"
        newline = "\n" if output and ending and not output.endswith("\n") else ""
        content = (output + newline + ending).rstrip("\n") or "[no output]"
        return ToolResult(content, ok=code is not None, data={"exit_code": code})

    def get_state(self) -> bytes:
        """Return all files, packed, as they were after the last command."""
        return self._state

    def set_state(self, state: bytes | None) -> None:
        self.machine.close()
        self._state, self._runs_in = self.start if state is None else state, None

    def new_session(self) -> bool:
        self.machine = copy.copy(self.machine)  # whoever is at work in the old one has it
        self._state, self._runs_in = self.start, None
        return True

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_runs_in": None}

    def close(self) -> None:
        """End the machine; a later call makes it again."""
        self.set_state(self._state)
