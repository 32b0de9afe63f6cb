"""README.md and docs/: every Python block runs, links lead somewhere, and commands name scripts that exist.

A page's blocks run one after the other, as a reader would run them. Where a ```text block follows, it is what the
code prints. A block that needs data or a model has the line `<!-- no-run -->` before it. (docs/tools has its own test.)
"""

import ast
import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    page
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if page.exists()
]
LEARNERS = [page for page in PAGES if page.parent.name == "learners"]
FENCE = r"^(?P<{0}>`{{3,}})(?P<{1}>\w*)\n(?P<{2}>.*?)^(?P={0})$"
BLOCK = re.compile(
    r"(?P<skip>^<!-- no-run -->\n+)?"
    + FENCE.format("fence", "language", "code")
    + rf"(?:\n+(?={FENCE.format('next_fence', 'next', 'printed')}))?",
    re.MULTILINE | re.DOTALL,
)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent.name != "tools"], ids=name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "docs"}
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        if block["language"] != "python" or block["skip"]:
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block["code"], page.name, "exec"), names)
        if block["next"] == "text":
            assert printed.getvalue() == block["printed"]


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


def options(script: Path) -> set[str]:
    """The options of a learner: the fields of its `Args`."""
    tree = ast.parse(script.read_text(encoding="utf-8"))
    (args,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args")
    fields = [node for node in args.body if isinstance(node, ast.AnnAssign)]
    switches = {f"no_{node.target.id}" for node in fields if ast.unparse(node.annotation) == "bool"}
    return {field.replace("_", "-") for field in switches | {node.target.id for node in fields}}


@pytest.mark.parametrize("page", LEARNERS, ids=name)
def test_options_of_the_learners_exist(page):
    known = {"help"}.union(*(options(script) for script in (ROOT / "learner").glob("*_llm.py")))
    for line in page.read_text(encoding="utf-8").splitlines():
        line = re.sub(r"(torchrun|vllm serve|python benchmarks/\S+)( --?\S+ \d+)*", "", line)
        assert set(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*)", line)) <= known, line


def commands(path: Path) -> list[tuple[Path, list[str]]]:
    """The commands of a page, or of a script's header, that start a learner: the script and the words after it."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    start = r" *(?:[A-Z_]+=\S+ )*(?:python|torchrun .*?) (learner/\w+_llm\.py)(?= |$)(.*)"
    found = (re.fullmatch(start, line) for line in text.replace("\\\n", " ").splitlines())
    return [(ROOT / line[1], shlex.split(line[2].replace("...", ""), comments=True)) for line in found if line]


@pytest.mark.parametrize("path", [*PAGES, *sorted((ROOT / "learner").glob("*_llm.py"))], ids=name)
def test_commands_have_options_of_their_learner(path):
    for script, words in commands(path):
        named = {word[2:].split("=")[0] for word in words if word.startswith("--")}
        assert named <= options(script) | {"help"}, words
        if re.search("HotpotQA|2Wiki|MuSiQue", " ".join(words)):
            assert "dev" in words, f"these sets have no split test: {words}"


def test_every_metric_is_explained():
    sources = [*(ROOT / "learner").glob("*_llm.py"), *(ROOT / "learner" / "llm_utils").glob("*.py")]
    source = "".join(path.read_text(encoding="utf-8") for path in sources)
    metrics = set(re.findall(r'"((?:charts|losses|sampler)/\w+)"', source))
    metrics |= {f"losses/{key}" for key in re.findall(r'(?:figures|metrics)\["(\w+)"\]', source)}
    metrics |= {f"time/{key}" for key in re.findall(r'\.mark\("(\w+)"\)', source)}
    assert len(metrics) > 15
    text = "".join((ROOT / "docs" / "learners" / f"{page}.md").read_text() for page in ("metrics", "sft_llm"))
    assert not [metric for metric in sorted(metrics) if f"`{metric}`" not in text]


def test_extras_that_are_named_exist():
    setup = (ROOT / "setup.cfg").read_text()
    extras = set(re.findall(r"^(\w+) =$", setup.partition("[options.extras_require]")[2], re.MULTILINE))
    assert {"search", "train", "dev"} <= extras
    sources = [*PAGES, *(path for folder in ("envs", "tools", "learner") for path in (ROOT / folder).rglob("*.py"))]
    for path in sources:
        for named in re.findall(r"agent-r1\[([\w,]+)\]", path.read_text(encoding="utf-8")):
            assert set(named.split(",")) <= extras, f"{name(path)} names the extra [{named}]"


def test_block_pattern():
    page = """
<!-- no-run -->
```python
a
```

```python
b
```

```text
c
```
Text.
````text
```python
d
```
````

```bash
e
```
"""
    found = [(bool(b["skip"]), b["language"], b["code"], b["printed"]) for b in BLOCK.finditer(page)]
    assert found == [
        (True, "python", "a\n", "b\n"),
        (False, "python", "b\n", "c\n"),
        (False, "text", "c\n", None),
        (False, "text", "```python\nd\n```\n", "e\n"),
        (False, "bash", "e\n", None),
    ]
