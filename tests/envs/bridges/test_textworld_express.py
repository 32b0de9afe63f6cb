"""docs/bridges.md shows how somebody else's games are played: TextWorld-Express."""

import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("textworld_express")
if shutil.which("java") is None:
    pytest.skip("TextWorld-Express needs Java", allow_module_level=True)


def test_the_page_says_what_it_prints(capfd):
    page = (Path(__file__).parents[3] / "docs/bridges.md").read_text().partition("## TextWorld-Express")[2]
    program, printed = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", page, re.DOTALL).groups()
    exec(compile(program, "bridges.md", "exec"), {})
    assert capfd.readouterr().out == printed
