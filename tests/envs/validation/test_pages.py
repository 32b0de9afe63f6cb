"""The generated parts of docs/environments."""

from pathlib import Path

import agent_r1
from agent_r1 import validate
from agent_r1.validation import pages

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docs" / "environments"
REGISTRY = agent_r1.ENVIRONMENTS | agent_r1.BRIDGES


def test_the_pages_are_as_the_command_writes_them():
    stale = [path.name for path, text in pages.rendered(FOLDER).items() if path.read_text(encoding="utf-8") != text]
    assert not stale, "run `python -m agent_r1.validate --index docs/environments`"


def test_every_id_has_a_page_and_a_row():
    texts = pages.rendered(FOLDER)
    assert len(texts) == len(REGISTRY) + 1
    index = texts[FOLDER / "index.md"]
    assert not [env_id for env_id in REGISTRY if f"\n| [{env_id.removeprefix('AgentR1/')}](" not in index]


def test_the_registry_is_complete():
    setup = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    for env_id, entry in REGISTRY.items():
        assert entry.family in agent_r1.FAMILIES, env_id
        assert entry.needs and entry.observability in ("full", "partial", "depends") and entry.horizon and entry.data
        assert not entry.extra or f"\n{entry.extra} =" in setup, env_id
        assert pages.summary(entry).endswith(".") and "\n" not in pages.summary(entry), env_id
    assert {entry.family for entry in REGISTRY.values()} == set(agent_r1.FAMILIES)


def test_a_head_goes_below_the_title_and_replaces_the_one_before():
    page = "# AgentR1/X-v0\n\nText.\n\n## More\n"
    once = pages.with_head(page, f"{pages.BEGIN}\n\nOne.\n\n{pages.END}")
    assert once == f"# AgentR1/X-v0\n\n{pages.BEGIN}\n\nOne.\n\n{pages.END}\n\nText.\n\n## More\n"
    assert pages.with_head(once, "Two.") == "# AgentR1/X-v0\n\nTwo.\n\nText.\n\n## More\n"
    empty = f"# AgentR1/X-v0\n\n{pages.BEGIN}\n{pages.END}\n\nText.\n"
    assert pages.with_head(empty, "Two.") == "# AgentR1/X-v0\n\nTwo.\n\nText.\n"


def test_sections_are_those_of_the_docstring():
    text = "Summary.\n\n## Description\nText; see docs/data.md and docs/environments/x.md.\n\n## Arguments\n\n"
    table = "| `a` | 1 | one |\n\nLevels take\nturns: task i has level i.\n\n```bash\n# comment\nls\n```"
    assert pages.sections(f"{text}{table}\n\nRewards: docs/environments/x.md.", "x.md") == (
        f"## Description\n\nText; see [docs/data.md](../data.md) and below.\n\n## Arguments\n\n{table}"
    )


def test_splits_have_their_other_names():
    assert pages.split_names({"train": "train", "dev": "dev", "validation": "dev"}) == (
        "`train`, `dev` (also `validation`)"
    )


def test_the_command_writes_what_is_stale(tmp_path, capsys):
    page = tmp_path / "craft.md"
    page.write_text("# AgentR1/CraftWorld-v0\n\nText.\n", encoding="utf-8")
    assert validate.main(["--index", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"wrote {tmp_path / 'index.md'}", f"wrote {page}"]
    assert "| Turns of an expert | 3 to 14 |" in page.read_text(encoding="utf-8")
    assert "](craft.md)" in (tmp_path / "index.md").read_text(encoding="utf-8")
    assert validate.main(["--index", str(tmp_path)]) == 0
    assert not capsys.readouterr().out
