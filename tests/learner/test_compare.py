"""The comparison of runs: it reads from real event files what was written, and what it says about it is right."""

import json
import sys

import compare
import numpy as np
import pytest
from PIL import Image
from torch.utils import tensorboard

STEPS = [0, 700, 1500, 2200]  # turns so far, at the start and after each of three iterations
PLAYED = [0, 256, 512, 960]  # episodes so far: some iterations play more than they train on


def write_run(runs, exp_name, seed, values, env_id="AgentR1/MultihopWorld-v0", finished=True, **more):
    run_dir = runs / f"{exp_name}__{seed}"
    with tensorboard.SummaryWriter(str(run_dir)) as writer:
        for step, played in zip(STEPS[1:], PLAYED[1:], strict=True):
            writer.add_scalar("charts/episodes", played, step)
        for i, (step, value) in enumerate(zip(STEPS, values, strict=True)):
            writer.add_scalar("eval/em", value, step, walltime=1000 + 10 * i)
    args = {"exp_name": exp_name, "env_id": env_id, "seed": seed, "episodes_per_iteration": 256, **more}
    (run_dir / "summary.json").write_text(json.dumps({"args": args, "finished": finished}))
    return run_dir


@pytest.fixture
def runs(tmp_path):
    write_run(tmp_path, "ppo_llm", 1, [0.0, 0.2, 0.4, 0.6], gamma=1.0)
    write_run(tmp_path, "ppo_llm", 2, [0.0, 0.4, 0.8, 1.0], gamma=1.0)
    write_run(tmp_path, "grpo_llm", 1, [0.0, 0.0, 0.5, 0.5], gamma=0.9)
    write_run(tmp_path, "grpo_llm", 2, [0.0, 0.9, 0.9, 0.9], gamma=0.9, finished=False)
    write_run(tmp_path, "ppo_llm_long", 1, [1.0, 1.0, 1.0, 1.0], env_id="Other-v0", gamma=1.0)
    return tmp_path


@pytest.mark.parametrize(("x", "expected"), [("steps", STEPS), ("episodes", PLAYED)])
def test_a_curve_is_what_was_logged(runs, x, expected):
    steps, values = compare.read_curve(runs / "ppo_llm__1", "eval/em", x)
    assert steps.tolist() == expected
    assert values == pytest.approx([0.0, 0.2, 0.4, 0.6])


def test_seconds_count_from_the_first_scalar(runs):
    seconds, _ = compare.read_curve(runs / "ppo_llm__1", "eval/em", "seconds")
    assert np.diff(seconds) == pytest.approx([10, 10, 10])


def test_areas():
    curve = (np.array([0.0, 1.0, 3.0]), np.array([0.0, 1.0, 0.0]))
    assert compare.area(curve) == pytest.approx(0.5)
    assert compare.area(curve, 2.0) == pytest.approx((0.5 + 0.75) / 2)
    assert compare.area((np.array([0.0]), np.array([0.3]))) == pytest.approx(0.3)


def test_a_table_has_a_t_interval_over_seeds():
    """Three seeds of .4, .5 and .6: half of it is 4.303 * .1 / sqrt(3)."""
    curves = {("env", "ppo"): [(np.array([0.0, 1.0]), np.array([x, x])) for x in (0.4, 0.5, 0.6)]}
    assert "| 3 | 0.500 [0.252, 0.748] | 0.500 [0.252, 0.748] |" in compare.table(curves, "eval/em", "steps")
    alone = {key: group[:1] for key, group in curves.items()}
    assert "| 1 | 0.400 | 0.400 |" in compare.table(alone, "eval/em", "steps")


def run_main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["compare.py", *map(str, arguments)])
    compare.main()


def test_the_table_and_the_plot(runs, monkeypatch, capsys, tmp_path):
    plot = tmp_path / "plots" / "curves.png"
    run_main(monkeypatch, "--runs", runs, "--plot", plot)
    printed = capsys.readouterr()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.out.strip().splitlines()[2:]]
    assert [row[:3] for row in rows] == [
        ["AgentR1/MultihopWorld-v0", "grpo_llm", "1"],
        ["AgentR1/MultihopWorld-v0", "ppo_llm", "2"],
        ["Other-v0", "ppo_llm_long", "1"],
    ]
    assert rows[1][3] == "0.800 [0.000, 1.000]"  # of 0.6 and 1.0: two runs say little
    assert rows[0][3:] == ["0.500", "0.300"]  # of one run there is no interval
    assert rows[1][4].startswith("0.487 [0.000, ")
    assert "left out, as it is not finished" in printed.err and "grpo_llm__2" in printed.err
    with Image.open(plot) as image:
        assert image.format == "PNG" and image.mode == "P"  # a byte a pixel


def test_what_is_compared_can_be_chosen(runs, monkeypatch, capsys):
    choice = ["--where", "gamma=1.0", "--group-by", "gamma", "seed", "--env-ids", "Other-v0"]
    run_main(monkeypatch, "--runs", runs, *choice)
    (row,) = capsys.readouterr().out.strip().splitlines()[2:]
    assert row.startswith("| Other-v0 | 1.0, 1 | 1 | 1.000 ")
    with pytest.raises(SystemExit, match="no finished run"):
        run_main(monkeypatch, "--runs", runs, "--exp-names", "nobody")
    with pytest.raises(SystemExit, match="eval/none.*--metric"):
        run_main(monkeypatch, "--runs", runs, "--metric", "eval/none")


def test_a_group_by_that_no_run_has_is_named(runs, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="--group-by nope: no run has this argument; the runs have .*env_id"):
        compare.find_runs(runs, ["nope"], {})


def test_a_run_without_the_metric_is_left_out_and_named(runs, monkeypatch, capsys):
    run_dir = runs / "ppo_llm__3"  # one with --eval-episodes 0
    with tensorboard.SummaryWriter(str(run_dir)) as writer:
        writer.add_scalar("charts/episodes", 256, 700)
    args = json.loads((runs / "ppo_llm__2" / "summary.json").read_text())["args"]
    (run_dir / "summary.json").write_text(json.dumps({"args": {**args, "seed": 3}, "finished": True}))
    run_main(monkeypatch, "--runs", runs, "--exp-names", "ppo_llm")
    printed = capsys.readouterr()
    assert printed.out.strip().splitlines()[-1].startswith("| AgentR1/MultihopWorld-v0 | ppo_llm | 2 | 0.800 ")
    assert f"left out, as it logged no eval/em: {run_dir}" in printed.err


def test_an_experiment_that_no_run_has_and_a_plot_of_no_kind_are_named(runs, monkeypatch, capsys, tmp_path):
    run_main(monkeypatch, "--runs", runs, "--where", "gamma=1.0", "--exp-names", "ppo_llm", "gone", "away")
    said = ["no matching finished run has exp_name away", "no matching finished run has exp_name gone"]
    assert capsys.readouterr().err.splitlines() == said
    run_main(monkeypatch, "--runs", runs, "--where", "gamma=1.0", "--plot", tmp_path / "curves")
    assert capsys.readouterr().err.splitlines() == [f"written to {tmp_path / 'curves.png'}"]
    assert (tmp_path / "curves.png").is_file()
    with pytest.raises(SystemExit, match="--plot .*a.foo: .*foo"):
        run_main(monkeypatch, "--runs", runs, "--exp-names", "ppo_llm", "--plot", tmp_path / "a.foo")


def test_runs_that_are_no_seeds_of_one_experiment_are_told_apart(runs, monkeypatch, capsys):
    run_main(monkeypatch, "--runs", runs, "--where", "gamma=1.0")
    assert "differ" not in capsys.readouterr().err  # seeds 1 and 2, all else equal
    write_run(runs, "ppo_llm", 3, [0.0, 0.2, 0.4, 0.6], gamma=1.0, memory_gb=None)  # an older one
    run_main(monkeypatch, "--runs", runs, "--where", "gamma=1.0")
    assert "differ" not in capsys.readouterr().err
    write_run(runs, "again", 2, [0.0, 0.2, 0.4, 0.6], gamma=1.0, group_size=8)
    run_main(monkeypatch, "--runs", runs, "--where", "gamma=1.0", "--group-by", "gamma")
    assert capsys.readouterr().err.splitlines() == [
        "AgentR1/MultihopWorld-v0, 1.0: its runs differ in exp_name: again, ppo_llm",
        "AgentR1/MultihopWorld-v0, 1.0: its runs differ in group_size: 8, -",
        "AgentR1/MultihopWorld-v0, 1.0: 2 of its runs have seed 2",
    ]
