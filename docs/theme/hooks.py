"""Hooks of the site: files of the repository that pages link become pages of the site.

A Markdown file outside docs/ becomes the page `repository/PATH`. A source file becomes a page with its code. The search
leaves out code and tables of results. A link to a folder becomes plain text. Anchors are those of GitHub.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
ALWAYS = ["CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"]
LANGUAGES = {".py": "python", ".sh": "bash", ".json": "json", ".jsonl": "json", ".toml": "toml", ".yml": "yaml"}
LINK = re.compile(r"`[^`\n]+`|(?P<before>!?\[(?P<text>[^][]*)\])\((?!\w+:)(?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
FENCE = re.compile(r"^ *(`{3,}|~{3,})")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take GitHub's anchors."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    return config


def slug(heading: str, separator: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the repository's files that pages link, and those that these link."""
    waiting = [page.src_uri for page in files.documentation_pages()]
    for name in ALWAYS:
        waiting.append(add(files, config, name))
    while waiting:
        uri = waiting.pop()
        file = files.get_file_from_path(uri)
        assert file is not None
        for name in linked(file.content_string, path_of(uri)):
            if needs_page(name) and not files.get_file_from_path(page_of(name)):
                waiting.append(add(files, config, name))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to the pages of the site."""
    uri = page.file.src_uri
    here, folder = path_of(uri), posixpath.dirname(uri)

    def rewrite(match: re.Match[str]) -> str:
        if match["target"] is None:  # code
            return match[0]
        name = resolve(match["target"], here)
        if (ROOT / name).is_dir():
            return match["text"]
        if not (ROOT / name).exists():
            return match[0]  # MkDocs reports it
        return f"{match['before']}({posixpath.relpath(page_of(name), folder)}{match['anchor'] or ''})"

    return outside_code(markdown, lambda prose: LINK.sub(rewrite, prose))


def add(files: Files, config: MkDocsConfig, name: str) -> str:
    """Add the page of a repository file, and return its path in the site."""
    text = (ROOT / name).read_text(encoding="utf-8")
    if not name.endswith(".md"):
        fence = "`" * (3 + max((len(run) for run in re.findall("`{3,}", text)), default=0))
        language = LANGUAGES.get(Path(name).suffix, "text")
        text = f"# {name}\n\n{fence}{language}\n{text}\n{fence}\n"
    if name not in ALWAYS:
        text = f"---\nsearch:\n  exclude: true\n---\n{text}"
    file = File.generated(config, page_of(name), content=text)
    file.inclusion = InclusionLevel.NOT_IN_NAV if name not in ALWAYS else InclusionLevel.INCLUDED
    files.append(file)
    return file.src_uri


def needs_page(name: str) -> bool:
    """Return True for a file of the repository that MkDocs does not show by itself."""
    text = Path(name).suffix in {"", ".md", ".cfg", ".txt", *LANGUAGES}
    return text and (ROOT / name).is_file() and page_of(name).startswith("repository/")


def page_of(name: str) -> str:
    """Return the path in the site of a file of the repository."""
    if name.startswith("docs/") and not name.endswith(".py"):
        return name.removeprefix("docs/")
    return f"repository/{name}" if name.endswith(".md") else f"repository/{name}.md"


def path_of(uri: str) -> str:
    """Return the path in the repository of a page of the site."""
    return uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"


def resolve(target: str, here: str) -> str:
    """Return the path in the repository that a link on a page leads to."""
    return os.path.normpath(posixpath.join(posixpath.dirname(here), target))


def linked(text: str, here: str) -> set[str]:
    """Return the paths that a page links, outside of code."""
    found: set[str] = set()

    def collect(match: re.Match[str]) -> str:
        if match["target"] is not None:  # else code
            found.add(resolve(match["target"], here))
        return match[0]

    if here.endswith(".md"):
        outside_code(text, lambda prose: LINK.sub(collect, prose))
    return found


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Return the text with the parts outside of code blocks changed."""
    parts: list[list[str]] = [[]]
    fence = ""
    for line in text.split("\n"):
        match = FENCE.match(line)
        if match and not fence:
            fence = match[1]
            parts.append([line])  # parts are prose and code in turn
        elif match and match[1].startswith(fence) and line.strip() == match[1]:
            fence = ""
            parts[-1].append(line)
            parts.append([])
        else:
            parts[-1].append(line)
    chunks = ["\n".join(lines) for lines in parts]
    return "\n".join(chunk if number % 2 else change(chunk) for number, chunk in enumerate(chunks))
