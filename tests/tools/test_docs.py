"""The pages in docs/tools: every Python block runs, and prints what the text block behind it says."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

import agent_r1_tools

PAGES = sorted((Path(__file__).parents[2] / "docs" / "tools").glob("*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_there_is_a_page_for_every_tool() -> None:
    sources = [path.read_text(encoding="utf-8") for path in Path(agent_r1_tools.__file__).parent.rglob("*.py")]
    names = {name for text in sources for name in re.findall(r'^    name = "(\w+)"$', text, re.MULTILINE)}
    assert len(names) >= 4 and {*names, "index", "your_own_tool"} <= {page.stem for page in PAGES}
    overview = (PAGES[0].parent / "index.md").read_text(encoding="utf-8")
    assert not [name for name in names if f"({name}.md)" not in overview]
