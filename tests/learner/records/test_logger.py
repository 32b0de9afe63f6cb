"""The figures of an iteration: which episodes they are of, and how steps are put together."""

import json
import tempfile
from pathlib import Path

import grpo_llm
import numpy as np
import pytest

from llm_utils.records import run_files
from llm_utils.records.logger import Logger


@pytest.fixture
def log(tmp_path):
    """log(rows, logs, played): the scalars of an iteration."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def iteration(rows, logs=(), played=None):
        run = {"iteration": 0, "global_step": 0, "train_seconds": 0.0, "summary": {}}
        folder = Path(tempfile.mkdtemp(dir=tmp_path))  # two files of one second are read in any order
        logger = Logger(folder, grpo_llm.Args(), 8, run)
        run |= {"iteration": 1, "global_step": 20}
        logger.iteration(rows, logs, run, {"charts/SPS": 3.0}, played)
        logger.evaluation(rows if played is None else played, run)
        logger.close()
        events = EventAccumulator(str(folder)).Reload()
        return {name: events.Scalars(name)[-1].value for name in events.Tags()["scalars"]}

    return iteration


@pytest.fixture
def played(made_up_rows):
    """Eight episodes with 0 to 5 calls and returns of 0 to 7; a fault broke two of them."""
    rows = made_up_rows(2, 4)
    for number, (row, calls) in enumerate(zip(rows, (0, 1, 1, 2, 3, 4, 5, 5), strict=True)):
        row.stats.update({"tool_calls": calls, "turns": 2, "success": 0})
        row.stats["return"] = float(number)
        row.reward_terms["outcome/exact_match"] = float(number)
        row.fault = "search" if number in (2, 7) else None
    return rows


def test_episodes_with_a_fault_are_in_no_mean_and_are_counted_by_their_calls(log, played):
    valid = [row for row in played if not row.fault]
    scalars = log(valid[:3], played=played)
    assert scalars["charts/episodic_return"] == scalars["eval/return"] == np.mean([0, 1, 3, 4, 5, 6]).astype(np.float32)
    assert scalars["rewards/outcome/exact_match"] == scalars["charts/episodic_return"]
    assert scalars["charts/invalid"] == scalars["eval/invalid"] == 0.25
    shares = {name[-2:].strip("_"): value for name, value in scalars.items() if "invalid_calls" in name}
    assert shares == {"0": 0, "1": 0.5, "2": 0, "3+": 0.25}


def test_without_faults_the_means_are_of_what_was_played(log, played):
    for row in played:
        row.fault = None
        row.stats["tool_calls"] = 2
    scalars = log(played[:2], played=played)
    assert scalars["charts/episodic_return"] == 3.5 and scalars["charts/invalid"] == 0
    assert [name for name in scalars if "invalid_calls" in name] == ["charts/invalid_calls_2"]
    assert "eval/invalid" not in scalars
    assert log(played[:2])["charts/episodic_return"] == 0.5  # `played` is `rows` where it isn't given


def test_the_names_of_charts_are_ours(log, played):
    for row in played:
        row.fault = None
        row.stats |= {"episodic_return": 99.0, "em": 1.0, "exact_match": 0.0}
    scalars = log(played)
    assert scalars["charts/episodic_return"] == 3.5 and scalars["charts/exact_match"] == 1


def test_an_iteration_without_a_valid_episode_is_logged(log, played):
    for row in played:
        row.fault = "search"
    scalars = log([], played=played)
    assert scalars["charts/invalid"] == 1 and "charts/episodic_return" not in scalars


def test_figures_of_the_steps(log, played):
    logs = [
        {"policy_loss": 1.0, "ratio_max": 1.5, "gap_mean": 0.1, "gap_max": 0.2},
        {"policy_loss": 2.0, "ratio_max": 1.2, "gap_mean": 5.0, "gap_max": 6.0, "critic_loss": 3.0, "gap_late": 1.0},
    ]
    scalars = log(played, logs)
    found = {name: value for name, value in scalars.items() if name.startswith(("losses/", "sampler/"))}
    assert found == pytest.approx(
        {
            "losses/policy_loss": 1.5,
            "losses/ratio_max": 1.5,
            "losses/critic_loss": 3.0,
            "sampler/gap_mean": 0.1,
            "sampler/gap_max": 0.2,
        }
    )


def test_rows_carry_faults_turns_and_segments(tmp_path, played, make_row):
    played[0].played, played[0].segment_starts = [(5, 9, 1.0)], [0, 7]
    expected = [[turn.start, turn.end] for turn in played[2].turns]
    with_empty_span = make_row([(2, 4, 0.5), (6, 6, -0.25), (8, 10, 1.0)], 10)
    run_files.append_rows(tmp_path / "rows.jsonl", [*played, with_empty_span], iteration=1)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert rows[0]["turns"] == [[5, 9]] and rows[0]["segment_starts"] == [0, 7] and rows[0]["fault"] is None
    assert rows[2]["turns"] == expected and rows[2]["segment_starts"] == [0] and rows[2]["fault"] == "search"
    # an entry for each turn, also where nothing was sampled; its reward is paid on the turn before
    assert rows[-1]["turns"] == [[2, 4], [6, 6], [8, 10]] and rows[-1]["turn_rewards"] == [0.5, -0.25, 1.0]
    assert rows[-1]["rewards"] == [0, 0, 0, 0.25, 0, 0, 0, 0, 0, 1.0]


def test_at_the_end_a_run_says_whether_it_got_better(tmp_path, made_up_rows, capsys):
    run = {"iteration": 0, "global_step": 0, "train_seconds": 0.0, "summary": {}}
    logger, rows = Logger(tmp_path, grpo_llm.Args(), 8, run), made_up_rows(1, 4)
    for success in (1, 0):
        for row in rows:
            row.stats["success"] = success
        logger.evaluation(rows, run)
    logger.close()
    assert "success in evaluations, greedy: 1.000 before, 0.000 after" in capsys.readouterr().out


def test_warnings_depend_on_the_advantages_of_trained_tokens(tmp_path, made_up_rows, capsys):
    """A KL penalty or an entropy bonus has a gradient of its own."""
    rows = made_up_rows(2, 4)
    for row in rows:
        row.train_mask = row.action_mask
        row.stats["success"] = 0
    for number, factor in enumerate((1.0, 0.0), 1):
        for row in rows:
            row.advantages = row.advantages * factor
        run = {"iteration": 0, "global_step": 0, "train_seconds": 0.0, "summary": {}}
        logger = Logger(tmp_path / str(number), grpo_llm.Args(dynamic_sampling=2), 8, run)
        run |= {"iteration": 1}
        logger.iteration(rows, [{"policy_loss": 0.0, "grad_norm": 0.001}], run, {"charts/groups_with_signal": 0.0})
        logger.close()
        assert ("have equal returns" in capsys.readouterr().err) == (factor == 0)
