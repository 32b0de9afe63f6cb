"""The pages in docs/tools: every Python block runs, and prints what the text block behind it says."""

import contextlib
import importlib
import io
import pkgutil
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import agent_r1_tools
from agent_r1_tools import Tool

PAGES = sorted((Path(__file__).parents[2] / "docs" / "tools").glob("*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


NEEDS = {"shell": [pytest.mark.bubblewrap]}


@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem, marks=NEEDS.get(page.stem, [])) for page in PAGES])
def test_the_examples_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.stem == "mcp":
        pytest.importorskip("mcp")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": page.stem}
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    assert any(language == "python" for language, _ in blocks)
    for (language, code), (following, expected) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if language == "python" and not code.startswith("# needs the server"):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, page.name, "exec"), names)
            assert printed.getvalue() == (expected if following == "text" else "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]*)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def subclasses(cls: type) -> list[type]:
    return [cls, *(found for one in cls.__subclasses__() for found in subclasses(one))]


def test_there_is_a_page_for_every_tool() -> None:
    """Under its name, or that of a file with several tools."""
    for module in pkgutil.walk_packages(agent_r1_tools.__path__, "agent_r1_tools."):
        with contextlib.suppress(ImportError):  # of an extra, which no tool needs to be imported
            importlib.import_module(module.name)
    ours: list[Any] = [cls for cls in subclasses(Tool) if cls.__module__.startswith("agent_r1_tools.")]
    ours = [cls for cls in ours if isinstance(getattr(cls, "name", None), str)]
    modules = Counter(cls.__module__ for cls in ours)
    pages = {cls: cls.name if modules[cls.__module__] == 1 else cls.__module__.rpartition(".")[2] for cls in ours}
    assert len(pages) >= 4 and {*pages.values(), "index", "mcp", "your_own_tool"} == {page.stem for page in PAGES}
    overview = (PAGES[0].parent / "index.md").read_text(encoding="utf-8")
    assert not [
        cls for cls, page in pages.items() if f"| [`{cls.__name__}`]({page}.md) | `{cls.name}(" not in overview
    ]
