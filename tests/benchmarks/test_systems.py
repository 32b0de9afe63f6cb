"""The parts of systems.py: the tables are those of the record, and a complete record makes no run."""

import json

import pytest
from machine import RESULTS
from systems_parts import arpo, hybrid, reward_model, turns


@pytest.mark.parametrize("part", [arpo, hybrid, reward_model, turns], ids=lambda part: part.NAME)
def test_the_recorded_table_is_that_of_the_recorded_rows(part, capsys, monkeypatch, tmp_path):
    record = json.loads((RESULTS / f"{part.NAME}.json").read_text())
    shown = part.table(record["results"])
    assert (RESULTS / f"{part.NAME}.md").read_text().endswith(f"\n\n{shown}\n")
    monkeypatch.chdir(tmp_path)  # `run` changes the folder: it is put back
    part.run()
    assert capsys.readouterr().out.strip() == shown
