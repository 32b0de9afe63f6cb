"""A horizon that grows: a pure function of the iteration, which every learner hands to its episodes."""

import json
import re
from types import SimpleNamespace

import pytest
from learners import PLAY

from llm_utils.setup.curriculum import check_reach, horizon, stages

SMALL = ["--total-episodes", 48, "--episodes-per-iteration", 16, "--num-envs", 16, "--num-minibatches", 1]
SMALL += ["--num-threads", 1, "--eval-episodes", 16, "--eval-every", 0, "--log-trajectories", "all"]


def test_the_horizon_of_an_iteration():
    turns = stages("10,20, 30")
    found = {iteration: horizon(turns, 100, iteration) for iteration in (1, 100, 101, 200, 201, 10**6)}
    assert found == {1: 10, 100: 10, 101: 20, 200: 20, 201: 30, 10**6: 30}
    assert {horizon([7], 3, iteration) for iteration in range(1, 50)} == {7}


@pytest.mark.parametrize("schedule", ["", "4,", "4,x", "0,3", "-1", "4 8", "3.5"])
def test_what_is_no_schedule_is_refused(schedule, learn):
    with pytest.raises(ValueError, match="such as 4,8,12"):
        stages(schedule)
    if schedule:
        with pytest.raises(SystemExit, match="--horizon-schedule: .*such as 4,8,12"):
            learn("grpo_llm", *SMALL, f"--horizon-schedule={schedule}")


def turns_of(run_dir):
    """The most turns of an episode of each iteration."""
    rows = [json.loads(line) for line in (run_dir / "trajectories.jsonl").read_text().splitlines()]
    found = {}
    for row in rows:
        found[row["iteration"]] = max(found.get(row["iteration"], 0), len(row["turns"]))
    return found


@pytest.mark.parametrize("script", PLAY)
def test_episodes_end_at_the_horizon_of_their_iteration(learn, script):
    run_dir = learn(script, *SMALL, "--horizon-schedule", "1,2,3", "--horizon-every", 1)
    assert turns_of(run_dir) == {1: 1, 2: 2, 3: 3}
    assert json.loads((run_dir / "summary.json").read_text())["finished"]


def test_a_run_that_goes_on_has_the_horizon_of_one_that_never_stopped(learn):
    flags = [*SMALL, "--horizon-schedule", "1,2,3", "--horizon-every", 1, "--deterministic"]
    whole = learn("grpo_llm", *flags)
    half = learn("grpo_llm", *flags[:1], 32, *flags[2:], "--exp-name", "half", "--no-anneal-lr")
    learn("grpo_llm", "--resume", half, "--total-episodes", 48)
    assert turns_of(half) == turns_of(whole)


def test_with_stale_episodes_each_has_the_horizon_of_its_own_iteration(learn):
    flags = [*SMALL, "--horizon-schedule", "1,3", "--horizon-every", 2, "--max-staleness", 1]
    assert turns_of(learn("grpo_llm", *flags)) == {1: 1, 2: 1, 3: 3}


def test_a_stage_beyond_what_the_environment_gives_is_cut_and_said(learn, capfd):
    flags = [*SMALL, "--env-kwargs", '{"max_turns": 2}', "--horizon-schedule", "1,9", "--horizon-every", 1]
    assert turns_of(learn("grpo_llm", *flags)) == {1: 1, 2: 2, 3: 2}
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("--horizon-schedule")]
    assert said == [
        "--horizon-schedule 1,9: AgentR1/MultihopWorld-v0 allows 2 turns, so longer stages are cut to that; "
        "--env-kwargs '{\"max_turns\": 9}' allows them"
    ]


@pytest.mark.parametrize(
    ("script", "schedule", "most"), [*((script, "8,12", 12) for script in PLAY), ("grpo_llm", "6", 7)]
)
def test_a_schedule_that_changes_nothing_is_refused(learn, script, schedule, most, tmp_path):
    """MultihopWorld gives 6 turns."""
    said = f"{schedule} does nothing: AgentR1/MultihopWorld-v0 allows 6 turns, and no stage is below that; "
    with pytest.raises(SystemExit, match=re.escape(f"{said}--env-kwargs '{{\"max_turns\": {most}}}' allows more")):
        learn(script, *SMALL, "--horizon-schedule", schedule)
    assert not (tmp_path / "runs").exists()


def test_a_schedule_within_what_the_environment_gives_is_no_news(learn, capfd):
    flags = [*SMALL, "--env-kwargs", '{"max_turns": 3}', "--horizon-schedule", "2,3", "--horizon-every", 1]
    assert turns_of(learn("grpo_llm", *flags)) == {1: 2, 2: 3, 3: 3}
    assert "--horizon-schedule" not in capfd.readouterr().err


def test_a_run_goes_on_with_a_schedule_that_it_was_accepted_with():
    """Before this was refused, runs had such schedules."""
    args = SimpleNamespace(env_id="Some-v0", horizon_schedule="8", resume="runs/RUN")
    check_reach(args, 6)
    with pytest.raises(SystemExit):
        check_reach(SimpleNamespace(**{**vars(args), "resume": None}), 6)


def test_further_groups_have_the_horizon_of_their_iteration(learn):
    flags = [*SMALL, "--horizon-schedule", "1,2,3", "--horizon-every", 1, "--dynamic-sampling", 1, "--group-size", 2]
    run_dir = learn("grpo_llm", *flags)
    found = turns_of(run_dir)
    assert all(turns <= iteration for iteration, turns in found.items())
    rows = (run_dir / "trajectories.jsonl").read_text().splitlines()
    assert len(rows) > 48  # some were played again


def test_a_stage_that_is_never_reached_is_named(learn, capfd):
    learn("grpo_llm", *SMALL, "--horizon-schedule", "1,2")
    assert "its last stage begins after 20 iterations, but the run has 3: lower" in capfd.readouterr().err
