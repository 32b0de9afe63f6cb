"""benchmarks/evidence/systems_parts/turns.py: its table, and which runs it makes."""

import json

from systems_parts import rows
from systems_parts import turns as systems_turns


def row(world, arm, seed, success, training):
    return {"world": world, "arm": arm, "seed": seed, "success": success, "in_training": training, "seconds": 60.0}


def test_the_table_compares_arms_with_the_same_seeds():
    rows = [row("CraftWorld", "tokens", seed, [0, 1, 0, 0], [0.1, 0.2]) for seed in (1, 2)]
    rows += [row("CraftWorld", "turns", seed, [1, 1, 1, 0], [0.2, 0.2 + seed / 10]) for seed in (1, 2)]
    rows += [row("ShopWorld", "tokens", 1, [0, 0, 0, 0], [0.1]), row("ShopWorld", "turns", 2, [1, 1, 1, 1], [0.1])]
    lines = systems_turns.table(rows).splitlines()
    turns = next(line for line in lines if line.startswith("| CraftWorld | turns"))
    # success .25 and .75; in training .15, and .25 and .3: gains .1 and .15, Student's t for one degree 12.706
    assert "| 0.750 " in turns and "| +0.500 [" in turns and "| 0.275 | +0.125 [-0.193, +0.443] |" in turns
    assert all(line.count("+") == 0 for line in lines if line.startswith("| ShopWorld"))  # other seeds


def test_recorded_rows_are_not_made_again(monkeypatch, tmp_path, capsys):
    made = []

    def measure(world, arm, seed):
        made.append((world, arm, seed))
        return row(world, arm, seed, [0, 1], [0.5])

    monkeypatch.setattr(systems_turns, "measure", measure)
    monkeypatch.setattr(rows, "require_quiet_machine", lambda force: None)
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    monkeypatch.setattr("machine.RESULTS", tmp_path)
    recorded = [row("CraftWorld", arm, seed, [1, 1], [0.5]) for arm in systems_turns.ARMS for seed in (1, 2, 3)]
    (tmp_path / "systems_turns.json").write_text(json.dumps({"results": recorded}))
    systems_turns.run()
    assert made == [("ShopWorld", arm, seed) for seed in (1, 2, 3) for arm in ("tokens", "turns")]
    assert len(json.loads((tmp_path / "systems_turns.json").read_text())["results"]) == 12
    assert "| ShopWorld | turns |" in capsys.readouterr().out
    systems_turns.run()
    assert len(made) == 6
