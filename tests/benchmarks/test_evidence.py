"""benchmarks/evidence/evidence.py: what a claim is worth, what is compared, and its parts in small."""

import hashlib
import importlib
import json
import shutil
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import evidence
import gymnasium as gym
import numpy as np
import pytest
import scores
import sweep
import tyro
from evidence_parts import exploration, horizons, noise, page, paper, runs, smollm2, standard, teachers
from safetensors.numpy import save_file
from systems_parts import replay as systems_replay

from agent_r1 import tiny_policy
from agent_r1.validation import probes
from llm_utils import arguments

RUN = "--num-envs 8 --total-episodes 8 --episodes-per-iteration 8 --num-minibatches 1 --group-size 2"


@pytest.mark.parametrize(
    ("goal", "found", "verdict"),
    [
        (0.135, (0.2, 0.15, 0.25), "shown"),
        (0.135, (0.2, 0.05, 0.25), "shown"),
        (0.135, (0.2, -0.05, 0.25), "not shown"),
        (0.135, (0.1, 0.05, 0.2), "not shown, though above zero"),
        (0.135, (0.1, 0.05, 0.13), "refuted, though above zero"),
        (0.135, (0.1, -0.01, 0.13), "refuted"),
        (0.0, (-0.2, -0.3, -0.1), "refuted"),
    ],
)  # fmt: skip
def test_the_verdict_of_a_claim(goal, found, verdict):
    assert scores.Claim("", goal, found, 3, "").verdict == verdict
    assert scores.Claim("", goal, found, 1, "").verdict == f"{verdict}, in one run"


def test_claims_are_a_line_each_with_a_column_for_each_kind_of_tasks():
    def claim(text, goal, where):
        return scores.Claim(text, goal, (0.2, 0.1, 0.3), 3, where)

    claims = [claim("A above B", 0.1, "here"), claim("A above B", 0.1, "there"), claim("A above C", 0.1, "here")]
    said = scores.claims_table([*claims, claim("A above B", 0.5, "there")])
    found = "shown: +0.200 [+0.100, +0.300]"
    assert said.splitlines()[2:] == [
        "| claim | goal | here | there |",
        "|---|---|---|---|",
        f"| A above B | +0.100 | {found} | {found} |",
        f"| A above C | +0.100 | {found} |  |",
        "| A above B | +0.500 |  | refuted, though above zero: +0.200 [+0.100, +0.300] |",
    ]
    assert "Of 4 claims" in said
    with pytest.raises(ValueError, match="two claims"):
        scores.claims_table([*claims, claims[0]])


def test_noise_to_signal_of_known_noise():
    rng = np.random.default_rng(0)
    gradients = 1.0 + 2.0 * rng.normal(size=(200, 500))  # |mean|^2 = 500, trace of the covariance = 4 * 500
    louder = 1.0 + 4.0 * rng.normal(size=(200, 500))
    silent = rng.normal(size=(200, 500))
    grams = {name: g @ g.T for name, g in (("dense", gradients), ("outcome", louder), ("silent", silent))}
    found = noise.bootstrap(grams, "outcome", 200)
    assert found["dense"][0][0] == pytest.approx(1 / 4, rel=0.1)
    assert found["outcome"][0][0] == pytest.approx(1 / 16, rel=0.1)
    value, low, high = found["dense"][1]
    assert value == pytest.approx(0.75, abs=0.05) and low < value < high and found["outcome"][1] == (0, 0, 0)
    assert found["silent"][0][1] < 0 and np.isnan(found["silent"][1]).all()
    assert scores.Claim("", 0.45, found["silent"][1], 1, "").verdict == "no signal"
    assert all(np.isnan(less).all() for _, less in noise.bootstrap(grams, "silent", 50).values())


@pytest.mark.parametrize("row", [*paper.LEARNERS, *paper.IMITATIONS])
def test_a_learner_accepts_the_flags_of_every_row(row):
    run = paper.train(paper.PLACES["MultihopWorld"], row, 1, "--num-envs 8")
    learner = importlib.import_module(run.script.removesuffix(".py"))
    getattr(learner, "check", arguments.check)(tyro.cli(learner.Args, args=[str(flag) for flag in run.flags]))


def test_an_outcome_is_paid_at_the_end_alone(make_row):
    row = make_row([(2, 4, 0.3), (5, 7, -0.1), (8, 9, 1.2)], 9, reward_terms={"process/a": 0.4, "outcome/em": 1.0})
    noise.outcome_only(row)
    assert row.turn_rewards().tolist() == [0.0, 0.0, 1.0]


def test_an_interval_covers_seeds_and_tasks():
    rng = np.random.default_rng(0)
    same = {"a": np.tile(rng.random(400) < 0.7, (3, 1)).astype(float)}  # seeds agree: tasks are all the noise
    value, low, high = scores.interval(same)
    assert value == same["a"].mean()
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(0.7 * 0.3 / 400), rel=0.15)
    assert scores.interval({"a": same["a"][:1]})[1:] == pytest.approx((low, high), abs=0.01)  # Wilson's
    apart = {"a": np.repeat([[0.0], [0.5], [1.0]], 400, axis=1)}  # tasks agree: seeds are all the noise
    assert scores.interval(apart)[1:] == pytest.approx((0, 1), abs=0.2)


def test_a_difference_compares_the_same_tasks():
    tasks = (np.random.default_rng(0).random(200) < 0.5).astype(float)
    one, other = {"a": np.tile(tasks, (3, 1)), "b": np.ones((3, 50))}, {"a": np.zeros((3, 200)), "b": np.ones((3, 50))}
    for value, low, high in (scores.interval(one, one), scores.interval(one, other, ["b"])):
        assert low < value == 0 < high  # fifty tasks that are alike don't say that all are
    value, low, high = scores.interval(one, other)
    assert value == pytest.approx(tasks.mean() / 2) and 0 < low < value < high


def test_turns_to_half_success_are_between_two_evaluations():
    assert horizons.turns_to_half([0, 100, 200], [0.1, 0.3, 0.7]) == 150
    assert horizons.turns_to_half([0, 100], [0.6, 0.7]) == 0
    assert horizons.turns_to_half([0, 100], [0.1, 0.4]) == np.inf


def test_a_difference_is_of_the_same_tasks():
    with pytest.raises(ValueError, match="needs the same tasks"):
        scores.interval({"a": np.ones((1, 3))}, {"a": np.zeros((1, 5))})


def test_a_run_is_known_by_what_it_does():
    def run(seed, *flags):
        return runs.Run("a", "sft_llm.py", seed, ("--env-id", "AgentR1/CraftWorld-v0", *flags))

    start = run(1, "--num-steps", 2)
    assert start.key == replace(start, label="another name", flags=(*start.flags[:-1], "2")).key
    after = run(1, "--model", start)
    assert after.needs == [start] and after.key != run(1, "--model", run(2, "--num-steps", 2)).key
    own = run(1, "--data", runs.Successes((start, after)))
    assert own.needs == [start, after] and own.key not in (start.key, after.key)


def test_the_weights_that_a_run_begins_with_are_in_its_key(tmp_path):
    from agent_r1 import tiny_policy

    def run(*flags):
        return runs.Run("a", "grpo_llm.py", 1, ("--env-id", "AgentR1/CraftWorld-v0", *flags)).key

    assert run() != run("--model", "tiny") and run("--model", "tiny") != run("--model", tiny_policy(teachers.SHOP))
    folder = tmp_path / "model"
    folder.mkdir()
    keys = set()
    for content in (1, 2):
        write_weights(folder, content)
        runs.weights.cache_clear()
        keys.add(run("--model", str(folder)))
    assert len(keys) == 2
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(folder / "model.safetensors", tmp_path / "elsewhere")
    assert run("--model", str(tmp_path / "elsewhere")) in keys  # where they lie doesn't matter


def write_weights(folder, content, **metadata):
    weights = {"head": np.full(3, content, np.float32)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt", **metadata})


def test_rounded_weights_have_the_key_of_what_they_were_rounded_from(tmp_path):
    write_weights(tmp_path, 1)
    exact = runs.weights(tmp_path / "model.safetensors")
    assert exact == hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()[:16]
    write_weights(tmp_path, 1.001, rounded_from=exact)
    runs.weights.cache_clear()
    assert runs.weights(tmp_path / "model.safetensors") == exact


def write_evaluation(folder, rows):
    folder.mkdir()
    (folder / "evaluation.json").write_text('{"seconds": 1.0, "args": {"decode": "plain"}}')
    stats = {"turns": 2, "tool_calls": 1, "tool_errors": 1, "sampled_tokens": 8}
    full = [{"task_index": index, "fault": fault, "stats": stats | {"success": ok, "return": ok}}
            for index, ok, fault in rows]  # fmt: skip
    (folder / "trajectories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in full))
    return folder


def commits():
    """Of this clone, the newest first; where there is none, a line has none."""
    log = ["git", "-C", str(runs.ROOT), "log", "-9", "--abbrev=10", "--format=%h"]
    said = subprocess.run(log, capture_output=True, text=True)
    return said.stdout.split() or [""]


def test_a_place_without_a_long_horizon_makes_no_claim_about_noise(monkeypatch):
    monkeypatch.setattr(horizons, "noise_of", lambda names, args: {"measured": 1})
    monkeypatch.setattr(horizons, "noise_table", lambda noise: ("| table |", []))
    args = Namespace(places=[], rows=[horizons.NOISE], used=set())
    found = horizons.measure(args, {})[horizons.TITLE]
    assert found["table"] == f"| table |\n\n{horizons.NOTE}" and found["claims"] == []


def test_what_a_fault_ended_is_no_result(tmp_path, monkeypatch):
    clean = runs.keep(write_evaluation(tmp_path / "a", [(1, True, None), (0, False, None), (2, True, None)]))
    broken = runs.keep(write_evaluation(tmp_path / "b", [(1, True, None), (0, False, "tool"), (2, True, None)]))
    assert clean["success"] == "011" and clean["tasks"] == 3 and clean["return"] == pytest.approx(2 / 3, abs=1e-4)
    assert broken["success"] == "11" and broken["tasks"] == 2 and broken["turns"] == 4 and broken["calls"] == {"1": 2}
    assert (clean["failed"], broken["failed"]) == (3, 2)

    monkeypatch.setattr(runs, "RECORD", tmp_path / "runs.jsonl")
    here = [runs.Run(name, "evaluate_llm.py", 1, ("--model", str(tmp_path / name))) for name in "abc"]
    for folder in (tmp_path / name for name in "abc"):
        folder.mkdir(exist_ok=True)
        write_weights(folder, ord(folder.name))
    for run, facts in zip(here, (clean, broken, clean), strict=True):
        runs.record(run.key, f"{run.label}, seed 1", facts, force=True)
    assert all(line["commit"].rstrip("+") in commits() for line in runs.recorded().values())
    args = Namespace(used=set(), workers=1)
    plays = {("one", "test"): [here[0], here[2]], ("two", "test"): [here[2]], ("two", "deeper"): [here[1]]}
    table = runs.table(plays, args)
    assert table["one"]["test"].tolist() == [[0, 1, 1]] * 2 and table["two"]["deeper"].tolist() == [[1, 1]]
    assert args.used == {run.key for run in here}
    with pytest.raises(SystemExit, match="test: evaluations aren't of the same tasks; b, seed 1 has 2"):
        runs.table({("one", "test"): [here[0]], ("two", "test"): [here[1]]}, args)


def test_the_recorded_command_names_what_stands_in_the_tables():
    places, rows = ["CraftWorld", "ShopWorld"], ["GRPO", "PPO"]
    half = {"CraftWorld": {"success": {"shipped policy": {}, "GRPO": {}}}}
    assert evidence.what_stands(places, rows, half) == [" --places CraftWorld --rows GRPO"]
    other = half | {"ShopWorld": {"success": dict.fromkeys(rows)}}
    assert evidence.what_stands(places, rows, other) == [" --places CraftWorld --rows GRPO", " --places ShopWorld"]
    whole = {place: {"success": dict.fromkeys(rows)} for place in places}
    assert evidence.what_stands(places, rows, whole) == [""]
    assert evidence.usual_rows(places, rows, whole) == evidence.usual_rows(["CraftWorld"], rows, half) == []
    assert evidence.usual_rows(places, rows, half) == evidence.usual_rows(places, rows, {}) == rows
    some = {horizons.TITLE: {"steps": {"a b": 1}, "rows": [horizons.NOISE]}}
    assert evidence.what_stands(["a b", "c"], horizons.ROWS, some) == [" --places 'a b' --rows noise"]
    assert evidence.usual_rows(["a b"], horizons.ROWS, some) == []
    assert evidence.usual_rows(["a b", "c"], horizons.ROWS, some) == horizons.ROWS


def record_in(folder, monkeypatch):
    """An empty record, and two runs: both are finished here, their results are left out."""
    monkeypatch.setattr(runs, "RECORD", folder / "runs.jsonl")
    monkeypatch.setattr(runs, "keep", lambda folder: {"seconds": 1.0})
    done = runs.Run("done", "sft_llm.py", 1, ("--env-id", "AgentR1/CraftWorld-v0"))
    tried = runs.Run("tried", "evaluate_llm.py", 1, ("--env-id", "AgentR1/CraftWorld-v0"))
    return done, tried, Namespace(workers=1, used=set(), begun=False, needs=None, force=True)


def test_what_cannot_begin_takes_no_line_of_others(tmp_path, monkeypatch):
    """An imitation of successes, where there are none, beside a run that is finished."""
    done, tried, args = record_in(tmp_path, monkeypatch)
    none = runs.Run("none", "sft_llm.py", 1, ("--env-id", "AgentR1/CraftWorld-v0", "--data", runs.Successes((tried,))))
    (tmp_path / "trajectories.jsonl").write_text(json.dumps({"stats": {"success": 0.0}}) + "\n")
    for module in (runs, sweep):
        monkeypatch.setattr(module, "find", lambda job: (tmp_path, True))
    with pytest.raises(SystemExit, match="no episode succeeded"):
        runs.make([none, done], args)
    assert runs.recorded().keys() == {done.key}


def test_a_line_is_written_as_soon_as_a_run_is_finished(tmp_path, monkeypatch):
    done, tried, args = record_in(tmp_path, monkeypatch)
    written = []

    def finish(jobs, workers, finished):
        for job in jobs:
            finished(job, tmp_path)
            written.append(len(runs.recorded()))
        return [tmp_path] * len(jobs)

    monkeypatch.setattr(runs, "finish", finish)
    runs.make([done, tried], args)
    assert written == [1, 2] and runs.recorded().keys() == {done.key, tried.key}


BIG = {"teachers", "paper", "exploration"}  # ten seconds to a minute
PLAYED = [part for part in evidence.PARTS if part != "smollm2"]  # its runs begin with a model that isn't here


@pytest.mark.parametrize("part", [pytest.param(one, marks=[pytest.mark.slow] * (one in BIG)) for one in PLAYED])
def test_the_tables_are_those_of_the_record(part, monkeypatch):
    """What stands in the repository comes out once more, and nothing is run for it."""

    def folders(missing, *_):
        assert not missing, f"{missing[0].label} isn't recorded"
        return []

    monkeypatch.setattr(runs, "folders", folders)
    monkeypatch.setattr(horizons, "folders", folders)
    there = json.loads((runs.RESULTS / f"evidence_{part}.json").read_text())["results"]
    asked = Namespace(places=list(evidence.PARTS[part].PLACES), rows=[], workers=1, used=set())
    vars(asked).update(next(iter(there.values()))["settings"])
    found = evidence.PARTS[part].measure(asked, there)
    told = ("table", "on", "forced")
    assert {place: [one[name] for name in told] for place, one in found.items()} == {
        place: [one[name] for name in told] for place, one in there.items()
    }


def test_a_table_names_the_machines_of_its_own_runs(tmp_path, monkeypatch):
    done, tried, args = record_in(tmp_path, monkeypatch)
    machines = {done.key: ("one core", True), tried.key: ("two cores", False)}
    lines = [{"key": key, "on": on, "forced": forced} for key, (on, forced) in machines.items()]
    runs.RECORD.write_text("".join(json.dumps(line) + "\n" for line in lines))
    runs.make([done], args)
    assert runs.made(args) == {"on": ["one core"], "forced": True}
    runs.make([tried], args)
    assert runs.made(args) == {"on": ["two cores"], "forced": False}


def test_nothing_is_out_of_domain_where_there_is_one_column():
    assert scores.domains(["a"]) == [("in domain", ["a"])]
    assert scores.domains(["a", "b", "c"]) == [("in domain", ["a"]), ("out of domain", ["b", "c"])]
    with pytest.raises(ValueError, match="at least one task"):
        scores.interval({"a": np.ones((1, 3))}, columns=[])


def test_a_flag_of_another_part_is_refused():
    words = [sys.executable, str(runs.ROOT / "benchmarks/evidence/evidence.py"), "--part", "horizons"]
    for flags, why in (
        (["--episodes", "7"], "--episodes does nothing in --part horizons"),
        (["--rows", "GRPO"], "--rows 'GRPO': --part horizons has noise; half success"),
        (["--places", "ShopWorld"], "--places 'ShopWorld': --part horizons has MultihopWorld; CraftWorld, depth 1"),
        (["--part", "paper", "--places", "CraftWorld", "--rows", "RLOO"], "--rows 'RLOO': CraftWorld has PPO; PPO, no"),
    ):
        done = subprocess.run([*words, *flags], capture_output=True, text=True)
        assert done.returncode == 2 and why in done.stderr


def test_a_new_query_is_paid_once_and_at_most_four_times():
    env = gym.make("exploring_world:AgentR1Exploring/MultihopWorld-v0", max_turns=9, process_reward={"new_query": 0.1})
    env.reset(options={"task_index": 0})
    env = env.unwrapped
    assert env.task.metadata["hops"] == 4 and env.num_tasks == 8_000
    paid = []
    for query in ("a", "a ", "A", "b", "c", "d", "e", "f"):
        *_, info = env.step(probes.span(env, env.dialect.tool_call("search", {"query": query})))
        paid.append(info["reward_terms"].get("process/new_query", 0.0))
    assert paid == pytest.approx([0.1, 0, 0, 0.1, 0.1, 0.1, 0, 0])
    test = gym.make("exploring_world:AgentR1Exploring/MultihopWorld-v0", split="test").unwrapped
    assert test.make_task(0).question not in {env.make_task(index).question for index in range(200)}


FOUND = {
    "teachers": {"success": {row: {"in domain": (0.5, 0.4, 0.6), "deeper": (0.1, 0.0, 0.2)} for row in "ab"}},
    "horizons": {"steps": {"a": 9.3}, "noise": {"a": {
        "early": {"dense": [[1, 0.5, 2], [0.2, 0.1, 0.3]], "outcome": [[1, 0.5, 2], [0, 0, 0]]},
        "late": {"dense": [[1, -0.5, 2], None], "outcome": [[0, -1, 1], None]},
    }}},
    "exploration": {"curves": {row: [[[0, 90, 200], [0, 0.1, 0.4]], [[0, 80, 190], [0, 0.2, 0.5]]] for row in "ab"}},
    "standard": {"success": {"a": {"in domain": (0.5, 0.4, 0.6)}}},
    "paper": {"success": {"a": {"in domain": (0.5, 0.4, 0.6)}}},
    "smollm2": {"success": {"a": {"success": (0.5, 0.4, 0.6)}}},
}  # fmt: skip


@pytest.mark.parametrize("part", evidence.PARTS)
def test_a_part_writes_its_plot(part, tmp_path):
    found = {place: FOUND[part] for place in ("one", "two")}
    page.write_plot(f"evidence_{part}", found, evidence.PARTS[part].PLOT, tmp_path)
    assert (tmp_path / f"images/evidence_{part}.png").stat().st_size > 5_000


def test_without_noise_there_is_no_plot_of_it(tmp_path):
    page.write_plot("evidence_horizons", {"one": {"steps": {"a": 9.3}, "noise": {}}}, horizons.PLOT, tmp_path)
    assert not (tmp_path / "images").exists()


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Runs go to an empty folder."""
    for name in ("learner", "benchmarks", "envs"):
        (tmp_path / name).symlink_to(runs.ROOT / name)
    monkeypatch.setattr(runs, "RECORD", tmp_path / "evidence_runs.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    return Namespace(seeds=1, workers=1, episodes=4, flags=RUN, force=True, used=set(), begun=False, needs=None)


@pytest.mark.slow
@pytest.mark.timeout(900)  # some twenty processes, one after the other
def test_teachers_in_small(small, monkeypatch):
    monkeypatch.setattr(teachers, "STEPS", dict.fromkeys(teachers.STEPS, 2))
    monkeypatch.setattr(teachers, "TRIES", 200)
    monkeypatch.setattr(teachers, "FEWEST", 2)
    monkeypatch.setattr(teachers, "LONG", 4)
    monkeypatch.setattr(teachers, "OWN", teachers.OWN[:1])
    monkeypatch.setattr(teachers, "ROWS", [*teachers.ROWS, *teachers.OWN])
    craft = teachers.PLACES["CraftWorld"]
    columns = {name: craft.columns[name] for name in ("in domain", "deeper")}
    monkeypatch.setattr(teachers, "PLACES", {"CraftWorld": replace(craft, columns=columns)})
    small.places = ["CraftWorld"]
    start = "SFT, 500 of fallible_50"
    small.rows = [start, f"{start}, successes", "GRPO", f"GRPO after {start}", teachers.SAME_TIME, teachers.OWN[0]]
    found = teachers.measure(small, {})["CraftWorld"]
    assert set(found["success"]) == {"shipped policy", *small.rows} and len(found["claims"]) == 24
    assert list(found["success"]["GRPO"]) == ["in domain", teachers.SAMPLED, "deeper"]
    assert found["cost"][f"GRPO after {start}"][0] == 508 and found["cost"][teachers.OWN[0]][0] == 200
    assert "| GRPO |" in found["table"] and "in one run" in found["table"]
    assert found["cost"]["GRPO"][1] > 8 and found["cost"][f"{start}, successes"][:2] == found["cost"][start][:2]

    shutil.rmtree("runs")  # another machine: what is recorded isn't made again, and stays in the table
    small.rows = ["GRPO"]
    assert teachers.measure(small, {"CraftWorld": found})["CraftWorld"] == found and not Path("runs").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_exploration_in_small(small, monkeypatch):
    small.places = ["MultihopWorld"]
    found = exploration.measure(small, {})["MultihopWorld"]
    ways = exploration.PLACES["MultihopWorld"].rows
    assert set(found["success"]) == {"shipped policy", exploration.DEMONSTRATED, *ways}
    assert len(found["claims"]) == 8 and "all four supports found" in found["table"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_paper_in_small(small):
    # PPO has no groups, and warms its critic up for an iteration.
    small.flags = RUN.replace(" --group-size 2", "").replace("--total-episodes 8", "--total-episodes 16")
    small.workers, small.places = 2, ["CraftWorld"]
    small.rows = [*paper.MASKS, "naive RAG"]  # which is of MultihopWorld alone
    found = paper.measure(small, {})["CraftWorld"]
    assert set(found["success"]) == set(paper.MASKS) and len(found["claims"]) == 2 * len(paper.EFFECTS)
    small.places, small.rows = ["MultihopWorld"], ["base tool call", "naive RAG", "GRPO", "GRPO, no mask"]
    found = paper.measure(small, {})["MultihopWorld"]
    assert list(found["success"]) == [row for row in paper.ROWS if row in small.rows] and len(found["claims"]) == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_standard_set_in_small(small, monkeypatch):
    pytest.importorskip("minigrid")
    flags = [str(flag) for flag in standard.START.flags]
    for name, value in (("--num-steps", "2"), ("--num-demonstrations", "40"), ("--tokenizer-demonstrations", "20")):
        flags[flags.index(name) + 1] = value
    monkeypatch.setattr(standard, "START", replace(standard.START, flags=(*flags, "--hidden-size", "32")))
    monkeypatch.setattr(standard, "STEPS", dict.fromkeys(standard.STEPS, 2))
    small.places, small.rows = ["GoToLocal"], ["SFT, 500 of the bot", standard.GRPO]
    found = standard.measure(small, {})["GoToLocal"]
    rows = [standard.FIRST, *small.rows, standard.TRICK]
    assert list(found["success"]) == rows == list(found["return"]) and len(found["claims"]) == 4
    assert "| GRPO |" in found["table"] and "| 8 |" in found["table"] and "| 500 |" in found["table"]


@pytest.mark.parametrize("name", smollm2.PLACES)
def test_a_learner_accepts_the_flags_of_a_chat_model(name):
    place = smollm2.PLACES[name]
    for row in place.rows:
        run = smollm2.train(place, row, 1, tiny_policy("AgentR1/MultihopWorld-v0"), "--dtype bfloat16")
        learner = importlib.import_module(run.script.removesuffix(".py"))
        flags = ["model" if isinstance(flag, runs.Run) else str(flag) for flag in run.flags]
        getattr(learner, "check", arguments.check)(tyro.cli(learner.Args, args=flags))


def test_the_runs_of_a_chat_model_are_those_of_the_record(monkeypatch):
    """A flag of one changed would have hours of it made anew."""
    monkeypatch.setattr(runs, "weights", lambda path: "a672150fb4f99d7c")  # of the model that was played
    there = runs.recorded()
    for name, place in smollm2.PLACES.items():
        model = "/a/folder"
        supervised, reinforced = (smollm2.train(place, row, 1, model, "") for row in place.rows)
        plays = [smollm2.play(place, "", 1, one) for one in (model, supervised, reinforced)]
        assert all(run.key in there for run in (supervised, reinforced, *plays))
        assert all(run.flags[run.flags.index("--split") + 1] == "test" for run in plays)
        turns = [json.loads(run.flags[3]).get("max_turns") for run in (supervised, reinforced, *plays)]
        assert turns == [16 if name.startswith("BabyAI") else None] * 5


def test_each_set_of_a_chat_model_needs_a_package_of_its_own(monkeypatch):
    needed = []

    def make(wanted, args):
        needed.append((args.needs, args.begun))
        args.begun = True
        line = {"success": "01", "requests_done": [0.0, 1.0], "tasks": 2, "tasks_hash": ""}
        return [line | {"calls": {"0": 2}, "failed": 0, "return": 0.5} for _ in wanted]

    monkeypatch.setattr(smollm2, "make", make)
    monkeypatch.setattr(runs, "make", make)
    monkeypatch.setattr(smollm2, "made", lambda args: {"on": [], "forced": False})
    args = Namespace(places=[*smollm2.PLACES], rows=[], seeds=1, model="/a", flags="", begun=False, needs=None)
    found = smollm2.measure(args, {})
    assert [need for need in needed if not need[1]] == [(place.needs, False) for place in smollm2.PLACES.values()]
    assert all("| 0.500 | 0.0 | – |" in one["table"] for one in found.values())


def test_what_is_held_out_of_bfcl_is_in_no_category_of_the_training_tasks():
    pytest.importorskip("bfcl_eval")
    import bfcl_split

    numbers = {}
    for split in ("train", "test"):
        env = gym.make("bfcl_split:AgentR1Split/BFCLMultiTurn-v0", split=split).unwrapped
        ids = [env.make_task(index).id for index in range(env.num_tasks)]
        assert len(ids) == len(set(ids)) == len(bfcl_split.tasks_of(split))
        numbers[split] = {int(name.rpartition("_")[2]) for name in ids}
    assert len(ids) == smollm2.PLACES["BFCL multi-turn"].held_out and not numbers["train"] & numbers["test"]
    env.reset(options={"task_index": 65})  # of another category than the first
    for text in env.demonstration():
        *_, done, _, info = env.step(probes.span(env, text))
    assert done and info["is_success"] and info["task_id"].startswith("multi_turn_miss_param")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", smollm2.PLACES)
def test_a_chat_model_on_standard_sets_in_small(name, small, monkeypatch):
    place = smollm2.PLACES[name]
    pytest.importorskip(place.needs[0])
    little = replace(
        place, held_out=2, supervised=("--num-steps", 2, "--num-demonstrations", 4, "--batch-size", 2),
        reinforced=("--total-episodes", 64, "--num-envs", 64), kwargs=place.kwargs | {"max_turns": 2},
    )  # fmt: skip
    monkeypatch.setattr(smollm2, "PLACES", {name: little})
    spells = "AgentR1/BabyAI-v0" if name.startswith("BabyAI") else "AgentR1/MultihopWorld-v0"
    small.model, small.places, small.flags = tiny_policy(spells), [name], ""
    small.rows = [*place.rows]
    found = smollm2.measure(small, {})[name]
    assert list(found["success"]) == [smollm2.MODEL, *place.rows]
    assert len(found["claims"]) == 2 * len(place.measured)
    assert all(words in found["table"] for words in (*place.measured, "mean return", "in one run"))


def test_the_noise_is_that_of_the_estimator_that_the_flags_name():
    """With a discount of 0 a turn is credited with what it earned itself: another gradient."""
    model, found = tiny_policy("AgentR1/MultihopWorld-v0"), []
    for flags in ((), ("--gamma", "0.0"), ("--gamma", "1.0")):
        gram = noise.gradients(model, "AgentR1/MultihopWorld-v0", {}, {"dense": {}}, 2, 2, 1, flags)["dense"]
        assert gram.shape == (2, 2)
        found.append(gram)
    assert (found[0] == found[2]).all() and not np.allclose(found[0], found[1])


def test_flags_of_the_noise_reach_the_sampler_too(monkeypatch):
    from llm_utils.sampling import transformers_engine

    engines, model = [], tiny_policy("AgentR1/MultihopWorld-v0")

    def start(*given):
        engines.append(given)
        raise RuntimeError("enough")

    monkeypatch.setattr(transformers_engine, "TransformersEngine", start)
    flags = ("--temperature", "0.5", "--top-p", "0.9")
    with pytest.raises(RuntimeError, match="enough"):
        noise.gradients(model, "AgentR1/MultihopWorld-v0", {}, {"dense": {}}, 2, 2, 1, flags)
    assert engines[0][3:] == (0.5, 0.9)


@pytest.mark.parametrize("flags", [("--lora-rank", "2"), ("--kl-coef", ".1"), ("--no-loss-mask",)])
def test_flags_of_which_the_noise_knows_nothing_are_refused(flags):
    with pytest.raises(SystemExit, match=f"{flags[0].replace('no-', '')}: noise is measured of whole policies"):
        noise.grpo_args("AgentR1/MultihopWorld-v0", flags)


def test_shares_of_replay_are_compared_with_the_recorded_rows():
    """Nothing is run for these, and a row that is not recorded has no line."""
    groups = systems_replay.rows(systems_replay.settings(force=False))
    lines = systems_replay.table({label: groups[label] for label in systems_replay.EARLIER}).splitlines()
    assert [line.split(" | ")[1][:5] for line in lines[2:5]] == ["0.729", "0.812", "0.910"]
    assert lines[2].split(" | ")[3].startswith("-0.181 [")  # GRPO minus expert iteration
    keys = [run.key for group in groups.values() for run in group]
    assert len({*keys}) == len(keys) == 18
    nothing = replace(groups["GRPO"][0], seed=99)
    assert "nothing" not in systems_replay.table({"nothing": [nothing]})
