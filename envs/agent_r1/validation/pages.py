"""The generated parts of docs/environments: the index, and the head of each page.

An environment is described once, in the registry and in the docstring of its class. A page shows both between two
marks below its title; the rest of the page is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from inspect import cleandoc
from pathlib import Path
from typing import cast

from gymnasium.envs.registration import load_env_creator

import agent_r1
from agent_r1 import FAMILIES, Entry, ToolEnv

BEGIN = (
    "<!-- head: written from the registry and the class docstring by "
    "python -m agent_r1.validate --index docs/environments -->"
)
END = "<!-- end of head -->"
INDEX = """\
# All environments

The {count} environments of the package, in {families} families. Each page opens with these facts.

- **data**: the source of the tasks. Only official files need a download; [Data](../data.md) names them.
- **extra**: the extra to install, as in `pip install -e ".[search]"`. [Installation](../installation.md) has further
  requirements.
- **turns**: the length of the expert's episodes.
- **observability**: *full* if the prompt holds everything that matters. It is *partial* if the policy must find some of
  it by calls.

[Validation](../validation.md) has the success of experts and baselines.
[Choose an environment](../choose_an_environment.md) compares environments by purpose.
"""


def env_class(entry: Entry) -> type[ToolEnv]:
    """Import and return the class of an environment. The package that it wraps is not imported."""
    return cast(type[ToolEnv], load_env_creator(entry.entry_point))


def docstring(entry: Entry) -> str:
    """Return the docstring of an environment's class, without its indentation and with links to papers."""
    text = cleandoc(env_class(entry).__doc__ or "")
    return re.sub(r"(?<!\[)\barXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)


def summary(entry: Entry) -> str:
    """Return the first paragraph of the docstring as one line."""
    return " ".join(docstring(entry).partition("\n\n")[0].split())


def split_names(splits: Mapping[str, str]) -> str:
    """Return the names of the splits, each with its other names in brackets."""
    named = []
    for name in dict.fromkeys(splits.values()):
        others = [f"`{other}`" for other, split in splits.items() if split == name and other != name]
        named.append(f"`{name}`" + (f" (also {', '.join(others)})" if others else ""))
    return ", ".join(named)


def index(page_names: Mapping[str, str]) -> str:
    """Return the index: one table for each family. `page_names` has the file of each id's page."""
    registry = agent_r1.ENVIRONMENTS | agent_r1.BRIDGES
    text = INDEX.format(count=len(registry), families=len(FAMILIES))
    for family in FAMILIES:
        text += f"\n## {family[0].upper()}{family[1:]}\n\n"
        text += "| id | task | data | extra | turns | observability |\n|---|---|---|---|---|---|\n"
        for env_id, entry in registry.items():
            if entry.family == family:
                short = env_id.removeprefix("AgentR1/")
                link = f"[{short}]({page_names[env_id]})" if env_id in page_names else short
                extra = f"`{entry.extra}`" if entry.extra else ""
                cells = link, summary(entry).rstrip("."), entry.data, extra, entry.horizon, entry.observability
                text += f"| {' | '.join(cells)} |\n"
    return text


def head(env_id: str, page: str) -> str:
    """Return the head of an environment's page: the summary, a table of facts, and the docstring's sections."""
    entry = (agent_r1.ENVIRONMENTS | agent_r1.BRIDGES)[env_id]
    facts = {
        "Family": entry.family,
        "Data": entry.data,
        "Extra": f"`{entry.extra}`" if entry.extra else "none",
        "Also requires": entry.requires,
        "Skills": ", ".join(entry.needs),
        "Observability": entry.observability,
        "Turns of an expert": entry.horizon,
        "Splits": split_names(env_class(entry).splits),
    }
    lines = [BEGIN, "", summary(entry), "", "| property | value |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in facts.items() if value]
    return "\n".join([*lines, "", sections(docstring(entry), page), "", END])


def sections(text: str, page: str) -> str:
    """Return a docstring after its first paragraph, with links for files of docs/.

    A last paragraph that points to this page is left out.
    """
    blocks = text.split("\n\n")[1:]
    if blocks and f"docs/environments/{page}" in blocks[-1] and not blocks[-1].startswith("#"):
        del blocks[-1]
    body = re.sub(r"^(## .*)\n(?!\n)", r"\1\n\n", "\n\n".join(blocks), flags=re.MULTILINE)
    return re.sub(r"(?<!`)\bdocs/(\S+?\.md)", lambda match: link(match[1], page), body)


def link(path: str, page: str) -> str:
    """Return the link from an environment's page to a file in docs/."""
    return "below" if path == f"environments/{page}" else f"[docs/{path}](../{path})"


def with_head(text: str, new: str) -> str:
    """Return a page with this head below its title, instead of the head that it has."""
    title, _, rest = text.partition("\n")
    if BEGIN in rest:
        rest = rest.partition(BEGIN)[2].partition(END)[2]
    return f"{title}\n\n{new}\n\n{rest.strip()}\n"


def rendered(folder: Path) -> dict[Path, str]:
    """Return the text of the index and of each environment's page as the registry and the docstrings have it.

    The title of a page is the id of its environment.
    """
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.md"))}
    ids = {path: text.partition("\n")[0].removeprefix("# ") for path, text in texts.items()}
    registry = agent_r1.ENVIRONMENTS | agent_r1.BRIDGES
    pages = {ids[path]: path.name for path in texts if ids[path] in registry}
    new = {folder / name: with_head(texts[folder / name], head(env_id, name)) for env_id, name in pages.items()}
    return {folder / "index.md": index(pages)} | new


def write(folder: Path) -> list[Path]:
    """Write the index and the heads, and return the files that changed."""
    changed = []
    for path, text in rendered(folder).items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            changed.append(path)
    return changed
