"""A bare process: time, memory and output are bounded, and nothing else is. Not a sandbox."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

from agent_r1_tools.python import layout
from agent_r1_tools.python.launch import GUEST, PYTHON_FLAGS, kill_group, start_process
from agent_r1_tools.python.process import GuestProcess, ProcessSandbox, guest_settings


class BareProcess(ProcessSandbox):
    """Sessions in plain processes of this user. They may read, write, connect and kill whatever this user may."""

    backend = "subprocess"

    def start(self, code: str) -> GuestProcess:
        folder = tempfile.mkdtemp(prefix="agent-r1-python-")
        settings = guest_settings(self.limits)
        settings |= {"path": sorted({str(Path(path).parent) for path in layout.packages()})}
        settings["processes"] += 1 << 16  # the kernel counts all processes of this user, not only ours
        command = [layout.interpreter(), *PYTHON_FLAGS, str(GUEST)]

        def end(process: subprocess.Popen[bytes]) -> None:
            kill_group(process)
            shutil.rmtree(folder, ignore_errors=True)

        process, control, output = start_process(command, cwd=folder)
        return GuestProcess(control, output, functools.partial(end, process), settings)
