"""The command line of a script: an `Args` dataclass is its flags, --help shows them in groups, --config sets some."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import sys
import textwrap
from functools import partial
from itertools import pairwise, zip_longest
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro

from llm_utils import config_file

ArgsT = TypeVar("ArgsT")
VALUES = ("true", "false", "yes", "no", "on", "off", "0", "1")  # of a switch, as other programs take them
CONFIG = "YAML file of flags, such as the config.yaml of an earlier run. Flags on the command line win over the file"


def read(kind: type[ArgsT], default: ArgsT | None = None, **options: Any) -> ArgsT:
    """Read the command line into a script's `Args`, like `tyro.cli`, which takes `options`.

    Values come from the command line, else from the file of --config, else from `default`, else from the class.

    --help shows the flags in groups: the script's own first, then those of its parents. A comment right above a flag
    is the title of the group that begins there. A group is a nested dataclass for tyro, so the flags are nested here
    and flattened again.
    """
    hints, texts = get_type_hints(kind), texts_of(kind)
    initial = {} if default is None else dict(vars(default))
    parser = argparse.ArgumentParser(options.get("prog"), add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="?", const="")
    words = sys.argv[1:] if options.get("args") is None else options["args"]
    config = parser.parse_known_args(words)[0].config
    for flag, value in pairwise([*(part for word in words for part in word.split("=", 1)), "--"]):
        name = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and hints.get(name) is bool and value.lower() in VALUES:
            raise SystemExit(f"{flag} takes no value: write {flag}, or --no-{flag[2:]}")
        if flag.startswith("--") and get_origin(hints.get(name)) is Literal and value.startswith("--"):
            raise SystemExit(f"{flag} needs a value: {', '.join(get_args(hints[name]))}")
    if config is not None:
        initial |= config_file.read(config, hints)
    groups: dict[str, list[Any]] = {title: [] for _, title in texts.values()}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        value = dataclasses.field(default=field.default, default_factory=field.default_factory, kw_only=True)
        if field.name in initial:
            value = dataclasses.field(default_factory=partial(initial.get, field.name), kw_only=True)
        text, title = texts.get(field.name, (None, ""))
        metavar = "STR [STR ...]" if list[str] in get_args(hints[field.name]) else None
        hint: Any = Annotated[hints[field.name], tyro.conf.arg(help=text, metavar=metavar)]
        groups.setdefault(title, []).append((field.name, hint, value))
    file: Any = Annotated[str | None, tyro.conf.arg(help=CONFIG)]
    groups.setdefault("run", []).append(("config", file, dataclasses.field(default=None, kw_only=True)))
    flags: list[Any] = groups.pop("", [])
    for number, (title, group) in enumerate(groups.items()):
        nested: Any = dataclasses.make_dataclass(title, group)
        hint = Annotated[nested, tyro.conf.arg(name=title), tyro.conf.OmitArgPrefixes]
        flags.append((f"group_{number}", hint, dataclasses.field(kw_only=True)))
    options.setdefault("description", getattr(sys.modules.get(kind.__module__), "__doc__", None))
    values = vars(tyro.cli(dataclasses.make_dataclass(kind.__name__, flags), **options))
    for number in range(len(groups)):
        values |= vars(values.pop(f"group_{number}"))
    del values["config"]
    for name, value in values.items():
        if list[str] in get_args(hints[name]) and isinstance(value, list) and len(value) == 1:  # one environment
            values[name] = value[0]
    if config is not None and values.get("resume") is not None:
        raise SystemExit(f"--config {config} does nothing with --resume, which keeps the run's own flags; leave it out")
    return kind(**values)


def texts_of(kind: type) -> dict[str, tuple[str | None, str]]:
    """Return the help of each flag, the string below its field, and the title of its group, the last comment right
    above a field. The flags of a class come before those of its parents; a flag stays in the group of the first parent
    that has it."""
    helps: dict[str, str] = {}
    titles: list[dict[str, str]] = []
    for parent in reversed(kind.__mro__[:-1]):
        try:
            source = textwrap.dedent(inspect.getsource(parent))
        except (OSError, TypeError):  # an interactively defined class has no source: its flags have neither
            continue
        body: Any = ast.parse(source).body[0]
        lines, title, known = source.splitlines(), "", {name for block in titles for name in block}
        titles.append({})
        for field, text in zip_longest(body.body, body.body[1:]):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                above = lines[field.lineno - 2].strip()
                title = above.removeprefix("# ") if above.startswith("# ") else title
                if field.target.id not in known:
                    titles[-1][field.target.id] = title
                if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                    helps[field.target.id] = " ".join(str(text.value.value).split())
    return {name: (helps.get(name), title) for block in reversed(titles) for name, title in block.items()}
