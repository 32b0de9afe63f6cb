"""README.md and docs/: every Python block runs, links lead somewhere, and commands name scripts that exist.

A page's blocks run one after the other, as a reader would run them. Where a ```text block follows, it is what the
code prints. A block that needs data or a model has the line `<!-- no-run -->` before it. (docs/tools has its own test.)
"""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    page
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if page.exists()
]
BLOCK = re.compile(
    r"^(<!-- no-run -->\n+)?```(\w*)\n(.*?)^```$(?:\n+^```(text)\n(.*?)^```$)?", re.MULTILINE | re.DOTALL
)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent.name != "tools"], ids=name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "docs"}
    for skip, language, code, following, expected in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language != "python" or skip:
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page.name, "exec"), names)
        if following:
            assert printed.getvalue() == expected


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?://|mailto:)([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_name_scripts_that_exist(page):
    text = page.read_text(encoding="utf-8")
    for script in re.findall(r"\b(?:python3?|torchrun(?: --\S+)*) ((?:learner|benchmarks|tests)/\S+\.py)", text):
        assert (ROOT / script).is_file(), script
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^ *make ([a-z-]+)", text, re.MULTILINE)) <= targets


def test_extras_that_are_named_exist():
    setup = (ROOT / "setup.cfg").read_text()
    extras = set(re.findall(r"^(\w+) =$", setup.partition("[options.extras_require]")[2], re.MULTILINE))
    assert {"search", "train", "dev"} <= extras
    sources = [*PAGES, *(path for folder in ("envs", "tools", "learner") for path in (ROOT / folder).rglob("*.py"))]
    for path in sources:
        for named in re.findall(r"agent-r1\[([\w,]+)\]", path.read_text(encoding="utf-8")):
            assert set(named.split(",")) <= extras, f"{name(path)} names the extra [{named}]"


def test_block_pattern():
    page = "<!-- no-run -->\n```python\na\n```\n\n```python\nb\n```\n\n```text\nc\n```\n\n```bash\nd\n```\n"
    assert [(bool(skip), language, code, expected) for skip, language, code, _, expected in BLOCK.findall(page)] == [
        (True, "python", "a\n", ""),
        (False, "python", "b\n", "c\n"),
        (False, "bash", "d\n", ""),
    ]
