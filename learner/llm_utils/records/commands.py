"""Commands for people to copy, in one line each: the programs as a shell finds them, the words in quotes."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from agent_r1_tools.text import printable
from llm_utils import distributed


def this_script(*words: str) -> str:
    """Return the command that runs this script with other flags, by the same launcher."""
    return _line([*distributed.launcher(), sys.argv[0], *words])


def script_beside(name: str, *words: str) -> str:
    """Return the command that runs the script `name`, which is next to this one, in a single process."""
    return _line([_python(), str(Path(sys.argv[0]).with_name(name)), *words])


def resume(run_dir: Path | str, *words: str) -> str:
    """Return the command that resumes a run."""
    return this_script("--resume", str(run_dir), *words)


def show(run_dir: Path | str) -> str:
    """Return the command that prints a run's episodes."""
    return _line([_python(), "-m", "agent_r1.show", str(run_dir)])


def _python() -> str:
    return distributed.shell_name(Path(sys.executable))


def _line(words: list[str]) -> str:
    return printable(shlex.join(words)).replace("\n", "\\n")
