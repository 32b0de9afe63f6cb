"""A run's flags in a YAML file: --config reads one, and every run writes one that repeats it.

    python learner/grpo_llm.py --config runs/RUN/config.yaml
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from datetime import date
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from agent_r1_tools.text import printable
from llm_utils.records import commands, run_files

NAME = "config.yaml"
MAX_BYTES = 1 << 20
TYPES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", NoneType: "null"}


class Loader(yaml.SafeLoader):
    """YAML of numbers, texts, lists and mappings, in which no name is given twice."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        unread = "aliases (*name)" if isinstance(event, yaml.AliasEvent) else "tags (!name)"  # aliases may grow
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) is not None:
            raise yaml.MarkedYAMLError(problem=f"{unread} are not read", problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def flatten_mapping(self, node: Any) -> None:
        """Raise an error for a name that is given twice, also by a merge (<<), and for one that is not a text."""
        names: set[str] = set()
        for name, _ in node.value:
            if not isinstance(name, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a name must be a text", problem_mark=name.start_mark)
            if name.value in names or name.tag == "tag:yaml.org,2002:merge":
                raise yaml.MarkedYAMLError(problem=f"{name.value} is given twice", problem_mark=name.start_mark)
            names.add(name.value)


class Dumper(yaml.SafeDumper):
    """The same YAML, to write."""


for kind in (Loader, Dumper):  # 1e-4 is a number, as in YAML 1.2
    kind.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+$"), list("-+0123456789"))


def read(path: str, types: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values in a file by flag. `types` has the type of every flag. Raise SystemExit with file and cause."""
    if not path:
        raise SystemExit("--config is empty: give a file")
    where, file = f"--config {path}", Path(os.path.expanduser(path))
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise SystemExit(f"{where}: the file is larger than {MAX_BYTES >> 20} MiB")
        values = yaml.load(content, Loader)
    except FileNotFoundError:
        raise SystemExit(f"{where}: there is no such file") from None
    except IsADirectoryError:
        run = f", {file / NAME}" * (file / NAME).is_file()
        raise SystemExit(f"{where}: this is a folder; give a file{run}") from None
    except OSError as error:
        raise SystemExit(f"{where}: the file cannot be read: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        cause = error.problem or "this is not YAML"
        cause = "a tab, where YAML takes spaces only" if "'\\t'" in cause else cause
        raise SystemExit(f"{where}{line}: {printable(cause)}") from None
    except Exception as error:  # yaml raises many kinds for values that are none
        raise SystemExit(f"{where}: this is not YAML: {printable(' '.join(str(error).split()))}") from None
    if not isinstance(values, dict):
        raise SystemExit(f"{where}: the file has no flags; write one on each line, such as 'seed: 2'")
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in types:
            raise SystemExit(printable(f"{where}: there is no flag {key}{_remedy(name, types)}"))
        if name == "resume":
            raise SystemExit(f"{where}: resume is no flag of a file; give --resume RUN alone, without --config")
        if name in found:
            raise SystemExit(printable(f"{where}: {key} is given twice, with - and with _"))
        try:
            found[name] = _converted(_as_text(value) if name == "env_kwargs" else value, types[name])
        except (TypeError, ValueError, OverflowError):
            taken = "a mapping" if name == "env_kwargs" else _described(types[name])
            quotes = "; put it in quotes" if taken == TYPES[str] and isinstance(value, int | float | date) else ""
            raise SystemExit(printable(f"{where}: {name} takes {taken}, not {_shown(value)}{quotes}")) from None
    return found


def _remedy(name: str, types: Mapping[str, Any]) -> str:
    """Return the end of a line about an unknown flag: the nearest name."""
    positive = name.removeprefix("no_")
    if types.get(positive) is bool:
        return f"; write {positive}: false"
    near = get_close_matches(name, types, n=1)
    return f"; did you mean {near[0]}?" if near else "; --help lists them"


def _as_text(value: Any) -> Any:
    """Return environment arguments as JSON, as the flag takes them. They may be a mapping, or a list of these."""
    if isinstance(value, list):
        return [_as_text(one) for one in value]
    return json.dumps(value, ensure_ascii=False, allow_nan=False) if isinstance(value, dict) else value


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.100}"
    except ValueError:  # Python does not write integers of more than 4,300 digits
        return "a number that is too long"


def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _converted(value: Any, hint: Any) -> Any:
    """Return a value of a flag's type. Raise TypeError for a value of another type."""
    for kind in _kinds(hint):
        if get_origin(kind) is Literal and any((type(value), value) == (type(one), one) for one in get_args(kind)):
            return value
        if get_origin(kind) is Literal and type(value) is bool and {"on", "off"} <= {*get_args(kind)}:
            return "on" if value else "off"  # YAML reads these words as truth values
        if get_origin(kind) is list and isinstance(value, list):
            return [_converted(one, get_args(kind)[0]) for one in value]
        if type(value) is kind:
            if isinstance(value, str):
                value.encode()  # raises UnicodeError, a ValueError, for half of a pair of surrogates
            return value
        if kind is float and type(value) is int:
            return float(value)
    raise TypeError


def _described(hint: Any) -> str:
    """Return a flag's type in words."""
    words: list[str] = []
    for kind in _kinds(hint):
        if get_origin(kind) is Literal:
            words += map(str, get_args(kind))
        elif get_origin(kind) is list:
            words.append(f"a list, each {_described(get_args(kind)[0])}")
        else:
            words.append(TYPES.get(kind, getattr(kind, "__name__", str(kind))))
    return " or ".join(words)


def write(folder: Path, args: Any) -> None:
    """Write the flags of a run into its folder, as they were given: another model or machine has its own defaults.
    Raise OSError."""
    command = commands.this_script("--config", str(folder / NAME))
    head = f"# Every flag of a run. Flags on the command line win over the file. To repeat the run:\n#   {command}\n"
    head += "# The bits are the same if `deterministic` is true, or if no tool depends on the clock.\n" * (
        "deterministic" in asdict(args)
    )
    values = {name: value for name, value in asdict(args).items() if name != "resume"}
    values |= getattr(args, "open_flags", {})
    if "env_kwargs" in values:
        values["env_kwargs"] = _as_mapping(values["env_kwargs"])
    text = yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)
    run_files.replace(folder / NAME, [head.encode(), text.encode()])


def _as_mapping(value: Any) -> Any:
    """Return environment arguments as mappings, which read better than JSON, if reading gives the same text again."""
    if isinstance(value, list):
        return [_as_mapping(one) for one in value]
    try:
        mapping = json.loads(value)
    except (TypeError, ValueError):
        return value
    return mapping if isinstance(mapping, dict) and _as_text(mapping) == value else value
