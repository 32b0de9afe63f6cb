"""Pass rates: evaluations write them, learners draw their tasks by them."""

import json
from pathlib import Path

import numpy as np
import pytest

from llm_utils.sampling.rollout import draw_episodes
from llm_utils.setup.pass_rates import task_probabilities

ENV_ID = "AgentR1/ArithmeticWorld-v0"  # its shipped policy solves some tasks, and some not


def write(path, successes, episodes, env_id="E-v0", split="train", **more):
    found = {"env_id": env_id, "split": split, "successes": successes, "episodes": episodes}
    path.write_text(json.dumps(found | more))
    return str(path)


def test_tasks_are_drawn_in_proportion_to_the_variance_of_their_outcome(tmp_path):
    path = write(tmp_path / "rates.json", [0, 2, 4, 0], [4, 4, 4, 0])
    p = task_probabilities(path, "E-v0", "train", 6)
    weights = np.array([1 / 6 * 5 / 6, 1 / 4, 5 / 6 * 1 / 6, 0, 0, 0])
    np.testing.assert_allclose(p, weights / weights.sum())
    drawn = np.array([task for i in range(200) for _, task in draw_episodes(1, i, 64, p, group_size=4)])
    groups = drawn.reshape(-1, 4)
    assert (groups == groups[:, :1]).all()
    shares = np.bincount(groups[:, 0], minlength=6) / len(groups)
    np.testing.assert_allclose(shares, p, atol=4 * np.sqrt(0.25 / len(groups)))
    assert draw_episodes(1, 3, 64, p, 4) == draw_episodes(1, 3, 64, p, 4) != draw_episodes(2, 3, 64, p, 4)


def test_where_hardly_any_task_is_solved_those_that_were_come_up_often(tmp_path):
    path = write(tmp_path / "rates.json", [1] + [0] * 38 + [2], [2] * 40)
    p = task_probabilities(path, "E-v0", "train", 40)
    usual = 2 * 4 / 82  # successes of two more episodes of the usual outcome
    solved, not_solved, always = ((k + usual) / 4 * (1 - (k + usual) / 4) for k in (1, 0, 2))
    np.testing.assert_allclose(p / p[0], np.array([solved] + [not_solved] * 38 + [always]) / solved)
    assert p[0] > 8 * p[1] > 0 and p[39] > p[0]  # two successes of two say little where most tasks have none


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no such file"),
        ("{", "not a file of evaluate_llm.py --samples"),
        ('{"successes": "x"}', "not a file of evaluate_llm.py --samples"),
        ({"env_id": "F-v0"}, "was made with F-v0, split train, but this run uses E-v0, split train"),
        ({"split": "test"}, "was made with E-v0, split test"),
        ({"mode": "closed_book"}, "was made with --mode closed_book, but learners use tools"),
        ({"successes": [5, 1]}, "not a file of evaluate_llm.py --samples"),
        ({"successes": [0, 0], "episodes": [-1, 4]}, "not a file of evaluate_llm.py --samples"),
        ({"successes": [0.7, 1], "episodes": [1.5, 4]}, "not a file of evaluate_llm.py --samples"),
        ({"successes": [[0, 1], [1]], "episodes": [4, 4]}, "not a file of evaluate_llm.py --samples"),
        ({"successes": [0, 1], "episodes": [1.5, 4]}, "not a file of evaluate_llm.py --samples"),
        ({"successes": [0, 1], "episodes": [10**30, 4]}, "not a file of evaluate_llm.py --samples"),
        ({"successes": [0, 2**62], "episodes": [2**62, 2**62]}, "not a file of evaluate_llm.py --samples"),
        ({"successes": [True, False], "episodes": [4, 4]}, "not a file of evaluate_llm.py --samples"),
        ({"successes": [1]}, "not a file of evaluate_llm.py --samples"),
        ({"episodes": [0, 0], "successes": [0, 0]}, "0 of 2 tasks; this run has 2"),
        ({"episodes": [1, 1, 1], "successes": [0, 0, 0]}, "3 of 3 tasks; this run has 2"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path, text, message):
    path = tmp_path / "rates.json"
    if isinstance(text, dict):
        write(path, **{"successes": [0, 1], "episodes": [2, 2], **text})
    elif text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit, match=message):
        task_probabilities(str(path), "E-v0", "train", 2)


def test_tasks_that_may_be_others_are_said(tmp_path, capsys):
    path = tmp_path / "rates.json"
    rates = {"env_id": "E-v0", "split": "train", "successes": [1], "episodes": [2], "data_dir": None}
    path.write_text(json.dumps(rates | {"env_kwargs": '{"world_seed": 7}'}))
    task_probabilities(str(path), "E-v0", "train", 2, env_kwargs="{}", data_dir=None)
    assert "--env-kwargs {\"world_seed\": 7}; make sure" in capsys.readouterr().err
    task_probabilities(str(path), "E-v0", "train", 2, env_kwargs='{"world_seed":7}', data_dir=None)
    assert not capsys.readouterr().err


def test_what_an_evaluation_writes_a_learner_reads(learn, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    common = ["--env-id", ENV_ID, "--num-threads", 1, "--no-cuda", "--num-envs", 8]
    learn("evaluate_llm", *common, "--split", "train", "--episodes", 3, "--samples", 4, "--temperature", 1)
    (path,) = Path("runs").glob("*evaluate*/pass_rates.json")
    found = json.loads(path.read_text())
    rows = [json.loads(line) for line in (path.parent / "trajectories.jsonl").read_text().splitlines()]
    assert found["episodes"] == [4, 4, 4]
    solved = [sum(row["stats"]["success"] for row in rows if row["task_index"] == task) for task in range(3)]
    assert found["successes"] == solved
    batch = ["--total-episodes", 8, "--episodes-per-iteration", 8, "--num-minibatches", 1, "--eval-episodes", 0]
    sample = ["--group-size", 4, "--sample-by-pass-rate", path, "--checkpoint-every", 1]
    run_dir = learn("grpo_llm", *common, *batch, *sample)
    (rows_file,) = Path("runs").glob("*grpo*/trajectories.jsonl")
    assert {json.loads(line)["task_index"] for line in rows_file.read_text().splitlines()} <= {0, 1, 2}
    path.write_text(json.dumps(found | {"successes": [4, 1, 0], "model": "somebody"}))
    with pytest.raises(SystemExit, match="the pass rates in .* have changed since the run started"):
        learn("grpo_llm", "--resume", run_dir, "--total-episodes", 16)


def test_greedy_episodes_are_sampled_once(learn):
    with pytest.raises(SystemExit, match="--samples needs a --temperature above 0"):
        learn("evaluate_llm", "--samples", 4)
