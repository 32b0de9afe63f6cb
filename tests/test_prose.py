"""The style of pages and docstrings, as far as a program can check it (CONTRIBUTING.md, "Style")."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOP = [ROOT / f"{page}.md" for page in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG")]
PAGES = [*TOP, *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").glob("*/README.md"))]
LAYERS = ("envs", "tools", "learner")
OPENERS = re.compile(r"(What|Who|Whose|Where|Whether|How|That|Those|Inside)\b")
ARTICLES = re.compile(r"(A|An|The)\b")
# A phrase, and the better one.
PHRASES = {
    r"stands? (in|on|above|below|beside|behind|there|nowhere|once|twice)": "is in",
    r"go(es)? on|going on": "continues",
    r"comes? to": "reaches",
    r"sa(y|ys|id) so": "reports",
    r"anew": "again",
    r"in place of": "instead of",
    r"but for": "except",
    r"of (its|their|one's|your|our|his|her) own": "its own ...",
    r"(isn't|aren't|is not|are not) shown|(nothing|gain|difference|claim|improvement) is shown|is shown of": (
        "no significant difference"
    ),
    r"machinery": "infrastructure",
    r"nobody|somebody who": "no one, or the name",
    r"mend(s|ed|ing)?": "fix",
    r"fulfils?|fulfill(s|ed)?": "meet",
    r"further on": "later",
    r"up from": "above",
    r"(is|are|was|were) refused": "is rejected",
    r"what (is|are|was|were|isn't|aren't) (not )?there": "the name of it",
    r"cheap tricks?": "heuristic baseline",
    r"own successes": "expert iteration",
}
# Uses that are right: the page, and the text with the phrase. At most a handful.
ALLOWED: dict[str, list[str]] = {"docs/learners/ppo_llm.md": ["stop or go on"]}  # the name of a game
HEADINGS = {"How it works"}
# Docstrings that a policy reads: they are texts of an environment and stay as they are.
SPOKEN = {"envs/agent_r1/tasks/deep_search/environment.py:open"}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def lines(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page outside code, tables and comments, with their numbers and without inline code."""
    fenced = False
    for number, line in enumerate(page.read_text(encoding="utf-8").split("\n"), 1):
        if re.match(r" *(```|~~~)", line):
            fenced = not fenced
        elif not fenced and not line.lstrip().startswith(("|", "<!--")):
            yield number, re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "`x`", line))


def paragraphs(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of a page as single lines, with the number of their first line."""
    first, words = 0, []
    for number, line in [*lines(page), (0, "")]:
        starts = re.match(r" *([-*]|\d+\.) |#", line)
        if words and (not line.strip() or starts):
            yield first, " ".join(words)
            words = []
        if line.strip():
            first = first if words else number
            words.append(line.strip())


@cache
def definitions(layer: str) -> list[tuple[str, bool, str]]:
    """Return the public definitions of a layer and its files: name, whether it is a function, docstring.

    A property does not count as a function. Docstrings that a policy reads are left out.
    """
    found = []
    for path in sorted((ROOT / layer).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                called = f"{name(path)}:{getattr(node, 'name', path.stem)}"
                public = node is tree or not getattr(node, "name", "").startswith("_")
                if public and called not in SPOKEN and (text := ast.get_docstring(node)):
                    decorators = [ast.unparse(decorator) for decorator in getattr(node, "decorator_list", [])]
                    is_property = any(re.search(r"property|setter", decorator) for decorator in decorators)
                    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_property
                    found.append((called, is_function, text))
    return found


def phrases(text: str) -> Iterator[str]:
    """Yield the phrases of PHRASES in a text, each with a better one."""
    for phrase, better in PHRASES.items():
        for match in re.finditer(rf"\b({phrase})\b", text, re.IGNORECASE):
            yield f"{match[0]!r}: write {better!r}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_pages_use_plain_words(page):
    hits = []
    for number, text in paragraphs(page):
        if text.startswith("#"):
            continue
        for allowed in ALLOWED.get(name(page), []):
            text = text.replace(allowed, "")
        hits += [f"{name(page)}:{number}: {hit}" for hit in phrases(text)]
    assert not hits, "\n".join(hits)


def test_few_uses_are_allowed():
    assert sum(map(len, ALLOWED.values())) <= 8
    for page, texts in ALLOWED.items():
        prose = " ".join(text for _, text in paragraphs(ROOT / page))
        assert not [text for text in texts if text not in prose], page


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_headings_name_things(page):
    titles = [text.lstrip("# ") for _, text in lines(page) if text.startswith("#")]
    assert not [title for title in titles if OPENERS.match(title) and title not in HEADINGS]


@pytest.mark.parametrize("layer", LAYERS)
def test_docstrings_begin_with_a_verb_or_a_noun(layer):
    hits = []
    for called, is_function, text in definitions(layer):
        if OPENERS.match(text) or (is_function and ARTICLES.match(text)):
            hits.append(f"{called}: {text.splitlines()[0]}")
    assert not hits, "\n".join(hits)


@pytest.mark.parametrize("layer", LAYERS)
def test_docstrings_use_plain_words(layer):
    hits = []
    for called, _, text in definitions(layer):
        hits += [f"{called}: {hit}" for hit in phrases(re.sub(r"`[^`]*`", "`x`", text))]
    assert not hits, "\n".join(hits)


def test_texts_for_a_policy_exist():
    for called in SPOKEN:
        path, _, function = called.partition(":")
        assert f"def {function}(" in (ROOT / path).read_text(encoding="utf-8"), called


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(text) <= 110 and max(map(len, text)) <= 160


def test_paragraphs_leave_out_code_and_tables(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A title\n\nOne `code`\nline.\n- [two](x.md)\n\n| nobody |\n\n```\nnobody\n```\nEnd.\n", encoding="utf-8"
    )
    assert list(paragraphs(page)) == [(1, "# A title"), (3, "One `x` line."), (5, "- [two]"), (12, "End.")]
