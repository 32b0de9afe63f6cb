"""Files that a sandboxed Python sees: the interpreter, its library, the C libraries, and a few packages."""

from __future__ import annotations

import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

PACKAGES = ["numpy", "sympy", "mpmath"]
"""Packages for programs besides the standard library, if they are installed."""
PACKAGES_AT = "/packages"
"""Their folder in a sandbox."""
DEVICES = ["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"]
PROGRAMS = ["/usr/bin", "/bin", "/etc/alternatives", "/usr/libexec/git-core", "/usr/share/git-core"]
PROGRAMS_AT = "/programs"
"""The folder of `python3`, which is this Python, in a sandbox with programs."""
SYSTEM = ["/usr/lib", "/usr/lib64", "/lib", "/lib64"]


def interpreter() -> str:
    """Return this Python's interpreter outside its virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@lru_cache
def library() -> list[str]:
    """Return the files and folders that Python needs, none inside another. A sandbox shows them at the same paths."""
    candidates = [interpreter(), *SYSTEM, *_standard_library()]
    candidates.append(sysconfig.get_config_var("LIBDIR") or "")  # libpython, and what a relocatable Python brings along
    paths: list[str] = []
    for path in sorted({path for path in candidates if os.path.exists(path)}, key=len):
        if not any(Path(path).is_relative_to(other) for other in paths):
            paths.append(path)
    return paths


@lru_cache
def programs() -> list[str]:
    """Return the folders that a shell needs besides `library()`; /bin only if it is not a link."""
    paths = [path for path in PROGRAMS if os.path.exists(path) and not os.path.islink(path)]
    return [path for path in paths if not _inside(path, library())]


def inside(paths: Sequence[str], folders: Sequence[str]) -> list[str]:
    """Return the folders, with links followed, that are inside one of the others."""
    return [path for path in map(os.path.realpath, paths) if _inside(path, list(folders))]


@lru_cache
def hidden() -> list[str]:
    """Return the folders inside `library()` that hold other packages. A sandbox shows them empty."""
    folders = [*site.getsitepackages(), "/usr/lib/python3/dist-packages"]
    folders += [os.path.join(path, "site-packages") for path in _standard_library()]
    shown = [path for path in folders if os.path.isdir(path) and _inside(path, library())]
    return sorted(set(shown))


@lru_cache
def packages() -> dict[str, str]:
    """Return the installed folders of PACKAGES: the path here, and the path in a sandbox."""
    folders = {}
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            continue
        folder = os.path.realpath(spec.submodule_search_locations[0])
        for path in (folder, f"{folder}.libs"):  # the second: C libraries that came in the wheel
            if os.path.isdir(path):
                folders[path] = f"{PACKAGES_AT}/{os.path.basename(path)}"
    return folders


def installed(name: str) -> bool:
    """Return True if programs find this package."""
    return f"{PACKAGES_AT}/{name}" in packages().values()


def _standard_library() -> list[str]:
    base = {"base": sys.base_prefix, "installed_base": sys.base_prefix}
    base |= {"platbase": sys.base_exec_prefix, "installed_platbase": sys.base_exec_prefix}
    return [sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")]


def _inside(path: str, folders: list[str]) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)
