"""Each check of `python -m agent_r1.validate` passes on an environment that is right and finds one that is not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import checked_environments
import gymnasium as gym
import numpy as np
import pytest
from registered import AS_BRIDGES

import agent_r1
from agent_r1 import Tool, ToolResult, validate
from agent_r1.validate import CHECKS, Failed, Report, Subject, above
from agent_r1.validation import probes
from agent_r1.validation import record as validation_record
from agent_r1_tools import running

ROOT = Path(__file__).parents[3]
FOUND = {
    "gymnasium": ["Unspeakable"],
    "farming": ["Farmable", "FarmableInPairs"],
    "injection": ["ListensToTools", "ListensToToolsOfAnEpisode", "ListensToQuestions", "KeepsResultsBack"],
    "splits": ["HoldsNothingOut", "HoldsShiftedOut", "HoldsTheLastOut", "HoldsMostlyNothingOut", "HoldsNoArraysOut"],
    "determinism": ["DependsOnHashes", "DependsOnTheClock", "DependsOnGlobalRandomNumbers"],
    "snapshot": ["ForgetsInSnapshots"],
    "demonstrations": ["ShowsSome"],
    "careless": ["Stumbles", "RefusesSome"],
    "global state": ["DrawsGlobalRandomNumbers"],
    "broken spans": ["Breaks", "NeedsItsArguments", "NeedsANumber", "Unjson"],
}
MEASURED = {
    "expert": "Unsolvable",
    "random": "TakesAnything",
    "reading": "HasATrick",
    "stuffing": "TakesWhatContainsIt",
    "copying": "TakesTheQuestion",
    "fallible_25": "TeachesTooWell",
    "floors": "FloorOfNoTrick",
}


def subject(one, tasks=30):
    return Subject(f"checked_environments:Checked/{one}-v0", {}, tasks)


def test_every_check_is_tried_here():
    assert set(FOUND) == set(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_what_is_right_passes(name):
    CHECKS[name](subject("Right", 5))


def test_rows_whose_demonstrations_cannot_be_written_are_found():
    call = {"function": {"name": "lone", "arguments": {}}}
    user, said = {"role": "user", "content": "Which?"}, {"role": "assistant", "content": "a"}
    rows = [{"messages": [user, {**said, "tool_calls": [call]}, {**said, "role": "tool"}, said], "answer": "a"}] * 3
    tools = [Tool.from_function(loan)]
    with pytest.raises(Failed, match="ValueError in 2 of 2 tasks, such as: row #1: .* there is no tool 'lone'"):
        CHECKS["demonstrations"](Subject("AgentR1/Rows-v0", {"data": rows, "tools": tools}, 5))
    closed = [{"question": "Which?"}] * 3
    CHECKS["demonstrations"](Subject("AgentR1/Rows-v0", {"data": closed, "reward": lambda answer, row: 1.0}, 5))


def loan() -> str:
    """Return a book."""
    return "a book"


@pytest.mark.parametrize("one", ["HoldsSomeOut", "HoldsArraysOut"])
def test_splits_may_share_a_task_and_have_two_names(one):
    CHECKS["splits"](subject(one, 5))


@pytest.mark.parametrize("one", ["RefusesAll", "HasOnlyAnExpert", "ShowsNothing"])
def test_nobody_needs_a_careless_demonstrator(one):
    CHECKS["careless"](subject(one, 5))


@pytest.mark.parametrize("one", ["FailsOnOtherPlaces", "FailsOnMostWords"])
def test_calls_that_fail_are_no_injection(one):
    CHECKS["injection"](subject(one))


def test_a_module_that_prints_when_it_is_imported_passes(tmp_path):
    """The environment of docs/bridges.md, saved as a file, plays an episode and prints how it ended."""
    page = (ROOT / "docs" / "bridges.md").read_text()
    (tmp_path / "lock.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    run = [sys.executable, "-m", "agent_r1.validate", "lock:Mine/Lock-v0", "--tasks", "5"]
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(run, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}, cwd=tmp_path)
    assert done.returncode == 0 and "Mine/Lock-v0: pass" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(("name", "one"), [(name, one) for name, some in FOUND.items() for one in some])
def test_what_is_wrong_is_found(name, one):
    with pytest.raises(Exception) as found:
        CHECKS[name](subject(one, 5))
    assert name in ("gymnasium", "broken spans") or isinstance(found.value, Failed), found.value


def test_what_a_snapshot_forgets_is_named():
    with pytest.raises(Failed, match=r"after turn 1 changes the episode: `state` in turn 2 is .*, expected .*Keep"):
        CHECKS["snapshot"](subject("ForgetsInSnapshots", 5))


def test_calls_of_a_random_player_are_no_bug_of_a_tool(monkeypatch, recwarn):
    monkeypatch.setattr(running, "_warned", set())
    validate.validate(subject("FailsOnMostWords", 5))
    assert not [warning for warning in recwarn if "of its last" in str(warning.message)]


def test_figures_of_what_is_right():
    report = Report("x")
    validate.measure(subject("Right"), report)
    assert not report.failed
    ignorant = dict.fromkeys(("null", "random", "stuffing", "many answers", "copying"), 0.0)
    chance = {name: report.row["success"][name] for name in ("random", "stuffing")}
    assert report.row["success"] == {"expert": 1.0, **ignorant, **chance} and max(chance.values()) <= 0.2
    assert report.row["tasks"] == 50 and report.row["played"] == 30 and report.row["steps_per_second"] > 0


@pytest.mark.parametrize(("name", "one"), MEASURED.items())
def test_figures_that_should_not_be(name, one):
    report = Report("x")
    validate.measure(subject(one), report)
    assert name in report.failed


def test_why_an_expert_fails_is_said():
    report = Report("x")
    validate.measure(Subject("AgentR1/CraftWorld-v0", {"depth": 2, "max_turns": 2}, 10), report)
    assert report.failed["expert"] == "the expert succeeds in 0.000 of 10 episodes; 10 cut off by max_turns 2"
    report = Report("x")
    validate.measure(Subject("AgentR1/CraftWorld-v0", {"max_turns": 4}, 20), report)
    share = report.row["success"]["expert"]
    said = f"the expert succeeds in {share:.3f} of 20 episodes; {round(20 * (1 - share))} cut off by max_turns 4"
    assert 0 < share < 1 and report.failed["expert"] == said


def test_an_end_without_success_in_words():
    def failure(**info):
        return probes.failure(gym.make("AgentR1/CraftWorld-v0", max_context_tokens=900).unwrapped, info)

    assert failure(is_success=True) == ""
    assert failure() == "demonstrations end before the episode"
    assert failure(is_success=False) == "ended without success"
    assert failure(is_success=False, truncation_reason="fault", fault="it burns") == "cut off by a fault: it burns"
    limits = "cut off by max_context_tokens 900 or max_action_tokens 512"
    assert failure(is_success=False, truncation_reason="context") == limits
    assert failure(is_success=False, truncation_reason="time") == "cut off by time"


@pytest.mark.parametrize(
    ("env_id", "tasks"),
    [(f"AgentR1/{name}-v0", 2) for name in ("ArithmeticWorld", "CraftWorld", "MultihopWorld", "PharmaSim")]
    + [pytest.param(env_id, 20, marks=pytest.mark.slow) for env_id in agent_r1.generated_worlds()],
)
def test_the_worlds_pass(env_id, tasks):
    report = validate.validate(Subject(env_id, {}, tasks))
    assert not report.failed and not report.missing


@pytest.mark.parametrize("env_id", AS_BRIDGES)
def test_the_bridges_pass(env_id):
    report = validate.validate(Subject(env_id, {}, 5))
    assert not report.failed and not report.missing


def test_one_without_tools_is_validated():
    report = validate.validate(subject("WithoutTools", 5))
    assert not report.failed and report.row["success"]["expert"] == 1.0


def test_a_mistake_in_a_constructor_is_a_line():
    report = validate.validate(subject("WithoutSuper", 5))
    assert "WithoutSuper.__init__ must call super().__init__(tools, **kwargs)" in report.failed["build"]


def test_calls_of_the_expert_that_fail_are_said(capsys):
    assert validate.main(["checked_environments:Checked/ExpertFails-v0", "--tasks", "4"]) == 0
    said = "note: calls of the expert fail in 4 of 4 episodes, such as read: Error in read: KeyError: 1\n"
    assert said in capsys.readouterr().out


def test_chance_is_not_counted_as_a_trick():
    assert above(0.2, 0.0, 100) and not above(0.0, 0.0, 100) and not above(0.12, 0.1, 100) and above(0.3, 0.1, 100)


def test_the_command(tmp_path, capsys):
    one = "checked_environments:Checked/Right-v0"
    assert validate.main([one, "--tasks", "4", "--write", str(tmp_path / "t.md")]) == 0
    out = capsys.readouterr().out
    assert f"{one}: pass" in out and "note:" not in out
    table = (tmp_path / "t.md").read_text()
    assert table in out and "| checked_environments:Checked/Right-v0 | 50 | 4 | " in table
    (row,) = json.loads((tmp_path / "t.json").read_text())
    assert row["row"]["success"]["expert"] == 1.0 and row["failed"] == {}


@pytest.mark.parametrize("name", ["nowhere/t.md", "t.json", "t"])
def test_where_rows_can_not_be_written_nothing_is_played(name, tmp_path, capsys):
    with pytest.raises(SystemExit):
        validate.main(["AgentR1/ArithmeticWorld-v0", "--tasks", "4", "--write", str(tmp_path / name)])
    assert "must end in .md, in an existing folder" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_rows_that_are_not_measured_stay(tmp_path, monkeypatch, capsys):
    """With their commands; a row that can't be measured here doesn't take the place of one that was."""
    success = dict.fromkeys(("null", "random", "stuffing", "many answers", "copying"), 0.0)
    figures = {"tasks": 9, "splits": 1, "success": success, "steps_per_second": 1.0, "build_ms": 1.0}
    measured = lambda one: Report(one.env_id, {**figures, "played": one.num_tasks})  # noqa: E731
    monkeypatch.setattr(validate, "validate", measured)
    words = ["--write", str(tmp_path / "t.md"), "--tasks"]
    first, second = "AgentR1/ArithmeticWorld-v0", "AgentR1/CraftWorld-v0"
    for ids, tasks in (([first, second], "2"), ([first], "3")):
        assert validate.main([*ids, *words, tasks]) == 0
    read, command = validation_record.read(tmp_path / "t.md"), "python -m agent_r1.validate"
    assert [(row.env_id, row.row["played"]) for row in read] == [(first, 3), (second, 2)]
    assert [row.command for row in read] == [f"{command} {first} --tasks 3", f"{command} {second} --tasks 2"]
    assert all("cores" in row.machine for row in read)
    assert [line[:28] for line in (tmp_path / "t.md").read_text().splitlines()[2:]] == [
        "| ArithmeticWorld-v0 | 9 | 3", "| CraftWorld-v0 | 9 | 2 | 1 "]  # fmt: skip
    validation_record.write(tmp_path / "t.md", [Report(first, missing=ImportError("no such package"))])
    assert validation_record.read(tmp_path / "t.md") == read
    (tmp_path / "t.json").write_text("[{")
    with pytest.raises(SystemExit):
        validate.main([first, *words, "1"])
    assert "t.json: " in capsys.readouterr().err


def test_what_was_measured_stays_where_the_next_is_interrupted(tmp_path, monkeypatch, capsys):
    path, first = tmp_path / "t.md", "AgentR1/ArithmeticWorld-v0"

    def measured(one):
        if one.env_id != first:
            raise KeyboardInterrupt
        return Report(one.env_id, failed={"farming": "it pays"})

    monkeypatch.setattr(validate, "validate", measured)
    assert validate.main([first, "AgentR1/CraftWorld-v0", "--write", str(path)]) == 130
    out, err = capsys.readouterr()
    assert "AgentR1/CraftWorld-v0: stopped" in err and "| ArithmeticWorld-v0 |" in out and "Craft" not in out
    assert [row.env_id for row in validation_record.read(path)] == [first] and "failed: farming" in path.read_text()


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "t.md"
    validation_record.write(path, [Report("A", failed={"farming": ""})])
    before = {one.name: one.read_text() for one in tmp_path.iterdir()}
    assert set(before) == {"t.md", "t.json"}

    def full(file, text):
        with open(file, "w") as half:
            half.write(text[:5])
        raise OSError("no space")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space"):
        validation_record.write(path, [Report("B", failed={"farming": ""})])
    monkeypatch.undo()
    assert {one.name: one.read_text() for one in tmp_path.iterdir()} == before


def test_the_machine_has_the_cores_that_this_process_may_use(monkeypatch):
    """As benchmarks/common/machine.py counts them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 5}, raising=False)
    assert validation_record.machine().startswith("3 cores (")
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert validation_record.machine().startswith("7 cores (")


def test_what_fails_is_said_and_the_status_is_one(capsys):
    assert validate.main(["checked_environments:Checked/Farmable-v0", "--tasks", "5"]) == 1
    assert "farming: task 0: 200 turns of" in capsys.readouterr().out


def test_a_package_that_is_missing_is_named_by_its_extra():
    error = ImportError('BM25 search needs bm25s and PyStemmer: pip install "agent-r1[search]"')
    assert Report("AgentR1/X-v0", missing=error).lacks == "agent-r1[search]"
    assert Report("Mine/X-v0", missing=ImportError("no module mine")).lacks == "a package"


def test_data_that_is_missing_is_no_failure_unless_it_was_asked_for(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("AGENT_R1_DATA", str(tmp_path))
    monkeypatch.setitem(sys.modules, "datasets", None)
    words = ["AgentR1/HotpotQA-v0", "--tasks", "3", "--write", str(tmp_path / "table.md")]
    assert validate.main(words) == 1
    assert str(tmp_path) in capsys.readouterr().out  # where it was looked for is said, and not written
    for name in ("table.md", "table.json"):
        written = (tmp_path / name).read_text()
        assert "its data" in written and str(tmp_path) not in written


@pytest.mark.parametrize("words", [["Nobody/Has-v0"], ["--tasks", "0"], ["--env-kwargs", "[]"], ["nomodule:X-v0"]])
def test_a_command_that_is_wrong(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        validate.main(words)
    assert stopped.value.code == 2 and capsys.readouterr().err.count("\n") <= 8


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("Mine/Vending-v0", "give the module that registers it: MODULE:Mine/Vending-v0"),
        ("nomodule:X-v0", "no module nomodule"),
        ("vending.py", "without .py: give vending:ID"),
        ("vending.py:Mine/Vending-v0", "without .py: give vending:Mine/Vending-v0"),
        ("CartPole-v1", "CartPoleEnv is not a ToolEnv"),
        ("checked_environments:Checked/Closed-v0", "Closed takes no split; let __init__ take **kwargs and hand"),
        ("checked_environments:Checked/Rihgt-v0", "checked_environments registers Checked/"),
    ],
)
def test_an_id_that_is_not_there_is_answered_with_a_remedy(env_id, message, capsys):
    with pytest.raises(SystemExit):
        validate.main([env_id])
    assert message in capsys.readouterr().err


def test_random_values_fit_their_schema():
    schema = {
        "type": "object",
        "properties": {
            "count": {"type": "integer", "minimum": 3, "maximum": 4},
            "kind": {"enum": ["a", "b"]},
            "names": {"type": "array", "items": {"type": "string", "minLength": 4, "maxLength": 6}, "minItems": 1},
            "either": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "share": {"type": "number", "minimum": 0, "maximum": 1},
        },
        "required": ["count", "kind", "names", "either", "share"],
    }
    tool = Tool.from_function(lambda: ToolResult("x"), name="t", description="d", parameters=schema)
    env = checked_environments.Right()
    env.reset(seed=0)
    rng = np.random.default_rng(0)
    values = [probes.random_value(schema, env, rng) for _ in range(200)]
    assert not [value for value in values if tool.validate(value)]
    assert {value["count"] for value in values} == {3, 4} and {value["kind"] for value in values} == {"a", "b"}


def test_random_calls_know_what_a_schema_refers_to():
    """As pydantic writes it."""
    place = {"type": "object", "properties": {"side": {"$ref": "#/$defs/Side"}}, "required": ["side"]}
    schema = {
        "type": "object",
        "properties": {"places": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/Place"}}},
        "required": ["places"],
        "$defs": {"Place": place, "Side": {"enum": ["left"]}},
    }
    value = probes.random_value(schema, None, np.random.default_rng(0))
    assert value["places"] and all(found == {"side": "left"} for found in value["places"])
