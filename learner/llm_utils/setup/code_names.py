"""Names of code in a run's folder. The folder may come from a stranger, and importing a module runs it."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agent_r1.arguments import add_current_folder
from agent_r1_tools.text import printable
from llm_utils.setup.foreign import leaves

INSTALLED = {"site-packages", "dist-packages"}


def check_names(folder: str | Path, env_id: Any = None, env_kwargs: Any = None) -> None:
    """Raise SystemExit if `--env-id` or `--env-kwargs`, as a run's folder has them, name code that is not the user's
    own, or a judge, who would get the key in OPENAI_API_KEY. `folder` is the run's, or that of its model.

    Code is the user's own if it is a file in the current folder or in PYTHONPATH, and not in `folder`. Nothing is
    imported. Names on the command line are not checked.
    """
    for flag, keys, value in _texts(env_id, env_kwargs):
        remedy = f"repeat {flag} on the command line if you trust it"
        if keys[-1:] == ("judge_url",) or keys[-2:] == ("think_judge", "url"):
            cause = f"names a judge, who would get the key in OPENAI_API_KEY: {value}"
            raise SystemExit(printable(f"{folder}: the run's folder {cause}; {remedy}"))
        module, _, name = value.rpartition(":") if flag == "--env-id" else value.partition(":")
        is_text = flag == "--env-kwargs" and not re.fullmatch(r"[\w.]+", name)  # of an address, of a sentence
        if ":" in value and not _is_own(module, Path(folder), is_text):
            raise SystemExit(printable(f"{folder}: the run's folder names code: {module}; {remedy}"))


def _texts(env_id: Any, env_kwargs: Any) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Yield the flag, the keys and the value of each text."""
    for keys, value in leaves(env_id):
        if isinstance(value, str):
            yield "--env-id", keys, value
    for text in env_kwargs if isinstance(env_kwargs, list) else [env_kwargs]:
        try:
            kwargs = json.loads(text)
        except (TypeError, ValueError, RecursionError):  # rejected later
            continue
        for keys, value in leaves(kwargs):
            if isinstance(value, str):
                yield "--env-kwargs", keys, value


def _is_own(module: str, folder: Path, is_text: bool) -> bool:
    """Return True if a module is the user's own, or if an import would not find it."""
    top, *others = module.split(".")
    if top in sys.stdlib_module_names:
        return is_text  # "http://..."; importing Python's own module runs nothing of a stranger
    add_current_folder()
    importlib.invalidate_caches()
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):  # "", "__main__"
        return top == ""
    if spec is None:
        return True
    roots = [Path.cwd(), *(Path(part or ".") for part in os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if not _is_file_outside(spec, folder):
        return False
    file = Path(str(spec.origin))
    place = file.parent.parent if spec.submodule_search_locations else file.parent
    if place.resolve() not in [root.resolve() for root in roots]:
        return False
    for part in others:
        if spec is None or not spec.submodule_search_locations:
            return True  # an import fails, after that of the parent
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))  # a list needs no import
        if spec is not None and not _is_file_outside(spec, folder):
            return False
    return True


def _is_file_outside(spec: ModuleSpec, folder: Path) -> bool:
    """Return True if a module has a file (a namespace package has none), outside of the folder and not installed."""
    if not spec.has_location or spec.origin is None:
        return False
    file = Path(spec.origin).resolve()
    return folder.expanduser().resolve() not in file.parents and not INSTALLED & set(file.parts)
