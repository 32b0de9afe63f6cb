"""Several environments in one run: draws, the direction of the gradient, a run that resumes, and what is refused."""

import itertools
import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import evaluate_llm
import numpy as np
import pytest
from estimators import ESTIMATORS, cosine, expected_gradients, stopping_game, true_gradient
from interrupted import interrupted_after
from safetensors import torch as safetensors

from agent_r1 import tiny_policy
from llm_utils import arguments
from llm_utils.records import earlier_runs, run_files
from llm_utils.recovery import checkpoint
from llm_utils.sampling.rollout import draw_episodes
from llm_utils.setup.environments import env_kwargs, evaluation_split

IDS = ["AgentR1/MultihopWorld-v0", "AgentR1/ArithmeticWorld-v0"]
BY_NAME = {entry.name: entry for entry in ESTIMATORS}
MIXTURE = [(0.75, range(100)), (0.25, range(100, 1_000_100))]


def test_each_group_draws_its_environment_by_share_and_then_its_task():
    drawn = [draw_episodes(1, iteration, 64, MIXTURE, group_size=4) for iteration in range(50)]
    for episodes in drawn:
        assert len({(number // 4, task) for number, task in episodes}) == 16
    tasks = np.array([task for episodes in drawn for _, task in episodes[::4]])
    assert np.mean(tasks < 100) == pytest.approx(0.75, abs=0.05)
    assert np.mean(tasks[tasks < 100]) == pytest.approx(50, abs=4) and len(Counter(tasks[tasks < 100])) == 100
    assert np.mean(tasks[tasks >= 100]) == pytest.approx(500_000, rel=0.1)
    again = draw_episodes(1, 3, 64, MIXTURE, 4)
    assert again == drawn[3] != draw_episodes(2, 3, 64, MIXTURE, 4)
    assert draw_episodes(1, 3, 64, MIXTURE, 4, 64, attempt=1)[0][1] != again[0][1]


def test_one_environment_draws_what_it_always_drew():
    assert draw_episodes(1, 3, 8, 1000, 4, 16, 1) == list(enumerate([304] * 4 + [855] * 4, 16))


@pytest.mark.parametrize(
    ("name", "group_size", "groups"),
    [
        ("GRPO turn, scale of the others (default)", 3, 2),
        ("RLOO turn (default)", 2, 2),
        ("GiGPO turn (default)", 3, 2),
        ("REINFORCE++ turn, by the others (default)", 1, 4),
        ("PPO tokens, λ 1, V = 0, by the others", 1, 4),
    ],
)
def test_the_expected_gradient_has_the_direction_of_the_mean_return_over_shares(name, group_size, groups):
    """Exactly, where one environment pays five times as much. Each has a parameter of its own."""
    games = [stopping_game(0.3, (0.4, 0.7), (0, 2)), stopping_game(0.6, (5.0, 1.0), (0, 1), certain=True)]
    shares = [0.7, 0.3]
    truth = np.array([share * true_gradient(game)[0] for share, game in zip(shares, games, strict=True)])

    def found(estimator):
        gradient = np.zeros(2)
        for drawn in itertools.product(range(2), repeat=groups):
            parts = expected_gradients([games[place] for place in drawn], estimator, group_size)["sum"]
            for place, part in zip(drawn, parts, strict=True):
                gradient[place] += np.prod([shares[i] for i in drawn]) * part[0]
        return gradient

    assert cosine(found(BY_NAME[name].estimator), truth) > 1 - 1e-9
    if name.startswith("GRPO"):  # a scale of each environment's own would weigh the environments
        assert cosine(found(BY_NAME["GRPO turn, scale of the group's others"].estimator), truth) < 0.998


# ---------------------------------------------------------------------------------------------------------------- runs

KWARGS = ['{"max_turns": 2, "max_action_tokens": 10}', '{"max_turns": 3, "max_action_tokens": 10}']
FLAGS = ["--env-id", *IDS, "--env-share", 0.6, 0.4, "--env-kwargs", *KWARGS, "--num-envs", 6, "--num-threads", 1]
FLAGS += ["--num-minibatches", 2, "--temperature", 2.0, "--tokenizer", "byte", "--learning-rate", "1e-3"]


@pytest.fixture
def start(learn, policy_folder):
    def run(script, *more):
        return learn(script, *FLAGS, "--model", policy_folder, *more)

    return run


def jsonl(run_dir):
    return [json.loads(line) for line in (run_dir / "trajectories.jsonl").read_text().splitlines()]


def test_a_run_on_two_environments_tells_them_apart_and_resumes_to_the_same_bits(start, learn, monkeypatch, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = ["--episodes-per-iteration", 24, "--group-size", 4, "--total-episodes", 48, "--eval-episodes", 3]
    flags += ["--deterministic", "--log-trajectories", "all", "--checkpoint-every", 1, "--save-model"]
    flags += ["--dynamic-sampling", 1, "--horizon-schedule", "1,3", "--horizon-every", 1]
    whole = start("grpo_llm", *flags, "--exp-name", "whole")
    assert whole.name.startswith("MultihopWorld-ArithmeticWorld__whole__1__")
    said = capsys.readouterr()
    assert "--eval-split test" in said.err and re.search(r"\nArithmeticWorld-v0: 3 tasks\n", said.out)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "Checkpointer", interrupted_after(1))
        with pytest.raises(SystemExit):
            start("grpo_llm", *flags, "--exp-name", "stopped")
    (stopped,) = Path("runs").glob("*stopped*")
    learn("grpo_llm", "--resume", stopped)
    one, two = (safetensors.load_file(folder / "model" / "model.safetensors") for folder in (whole, stopped))
    assert one.keys() == two.keys() and all((one[name] == two[name]).all() for name in one)
    assert (whole / "trajectories.jsonl").read_text() == (stopped / "trajectories.jsonl").read_text()

    rows = jsonl(whole)
    assert {row["env_id"] for row in rows} == set(IDS) and max(row["task_index"] for row in rows) < 1_000_000
    groups = {row["episode"] // 4: (row["env_id"], row["task_index"], row["question"]) for row in rows}
    assert all(groups[row["episode"] // 4] == (row["env_id"], row["task_index"], row["question"]) for row in rows)
    turns = Counter((row["iteration"], row["env_id"], len(row["turns"])) for row in rows)
    assert {n for i, _, n in turns if i == 1} == {1}  # the horizon; later each environment's own limit
    assert max(n for i, env_id, n in turns if (i, env_id) == (2, IDS[0])) == 2
    assert max(n for i, env_id, n in turns if (i, env_id) == (2, IDS[1])) == 3

    events = EventAccumulator(str(whole)).Reload()
    curves = {name: [event.value for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    played = [row for row in rows if row["iteration"] == 1]
    for env_id in IDS:
        of_env = [row["stats"] for row in played if row["env_id"] == env_id]
        name = env_id.removeprefix("AgentR1/")
        for shown, key in (("episodic_return", "return"), ("success", "success"), ("tokens", "tokens")):
            expected = np.mean([stats[key] for stats in of_env])
            assert curves[f"charts/{name}/{shown}"][0] == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert any(tag.startswith(f"rewards/{name}/") for tag in curves) and len(curves[f"eval/{name}/success"]) == 2
    summary = json.loads((whole / "summary.json").read_text())
    of_both = [summary[f"eval/{name}/success_last"] for name in ("MultihopWorld-v0", "ArithmeticWorld-v0")]
    assert summary["eval/success_last"] == pytest.approx(np.mean(of_both)) and summary["args"]["env_id"] == IDS


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        pytest.param("ppo_llm", ["--truncation", "bootstrap", "--max-staleness", 1], marks=pytest.mark.slow),
        pytest.param("rloo_llm", ["--group-size", 4], marks=pytest.mark.slow),
        pytest.param("reinforce_pp_llm", ["--engine", "transformers"], marks=pytest.mark.slow),
    ],
)
def test_every_learner_takes_several(start, script, flags):
    run_dir = start(script, *flags, "--episodes-per-iteration", 16, "--total-episodes", 32, "--eval-episodes", 2)
    assert json.loads((run_dir / "summary.json").read_text())["finished"]
    assert {row["env_id"] for row in jsonl(run_dir)} == set(IDS)


def test_what_several_environments_do_not_take_ends_before_any_work(start, learn, tmp_path):
    for flags, message in (
        (["--env-share", 1], "--env-share: there are 1 shares for 2 environments"),
        (["--env-share", 1, 0], "--env-share: a share must be above 0"),
        (["--env-share", 1, "nan"], "--env-share: a share must be a number"),
        (["--env-id", IDS[0], IDS[0]], f"--env-id names {IDS[0]} twice"),
        (["--env-id", IDS[0], "AgentR1/Nope-v0"], "--env-id AgentR1/Nope-v0: there is no such environment"),
        (["--env-id", IDS[0]], "--env-kwargs has 2 values for 1 environment: put the JSON in quotes"),
        (["--env-id", IDS[0], "--env-kwargs", "{}"], "--env-share does nothing without several ids"),
        (["--env-id"], "--env-id is empty"),
        (["--env-kwargs", "{}", "[1]"], r"--env-kwargs takes a JSON object, .*, got \[1\]"),
        (["--env-kwargs", "{}", "{}", "{}"], "--env-kwargs has 3 values for 2 environments"),
        (["--env-kwargs", "{}", '{"nope": 1}'], rf"unexpected keyword .* \(this is the environment {IDS[1]}\)$"),
        (["--eval-split", "test", "dev", "dev"], "--eval-split has 3 values for 2 environments"),
        (["--data-dir", tmp_path], "--data-dir is the folder of one environment"),
        (["--sample-by-pass-rate", tmp_path / "rates"], "--sample-by-pass-rate needs one environment"),
        (["--horizon-schedule", "9"], f"{IDS[0]}, {IDS[1]} allow 3 turns, and no stage is below that"),
        (["--model", "tiny"], "--model tiny is the policy of one environment"),
    ):
        with pytest.raises(SystemExit, match=message):
            start("grpo_llm", *flags)
    assert not Path("runs").exists()


def test_splits_of_evaluations_are_chosen_for_each(made_up_data, monkeypatch):
    monkeypatch.setenv("AGENT_R1_DATA", str(made_up_data))
    args = SimpleNamespace(env_kwargs="{}", data_dir=None, chat_template=None)
    args.env_id = ["AgentR1/HotpotQA-v0", "AgentR1/GSM8K-v0"]
    assert evaluation_split(args, "train") == ["validation", "test"]
    args.env_id = ["AgentR1/HotpotQA-v0", "AgentR1/MuSiQue-v0"]
    assert evaluation_split(args, "train") == "validation"
    args.env_share = []
    assert env_kwargs(args) == {"each": [{}, {}], "share": []}


def test_a_run_on_several_is_evaluated_on_one_that_is_named(tmp_path):
    run_dir = tmp_path / "run"
    (run_dir / "model").mkdir(parents=True)
    (run_dir / "model" / "config.json").touch()
    args = {"model": tiny_policy(IDS[0]), "env_id": IDS, "env_kwargs": KWARGS, "env_share": [1, 2]}
    args["eval_split"] = "test"
    (run_dir / "summary.json").write_text(json.dumps({"args": args, "finished": True}))
    with pytest.raises(SystemExit, match=f"^--env-id is missing: .* trained on {IDS[0]}, {IDS[1]}; name"):
        earlier_runs.fill_environment(evaluate_llm.Args(model=str(run_dir)))
    one = evaluate_llm.Args(model=str(run_dir), env_id=IDS[1])
    said = earlier_runs.fill_environment(one)
    assert (one.env_id, one.env_kwargs, one.split) == (IDS[1], KWARGS[1], "test") and len(said) == 1
    other = evaluate_llm.Args(model=str(run_dir), env_id="AgentR1/CraftWorld-v0")
    assert f"trained on {', '.join(IDS)}, but is evaluated on" in earlier_runs.fill_environment(other)[0]
    assert other.env_kwargs == "{}"


def test_names_of_runs_are_short_and_safe():
    assert run_files.name_of("AgentR1/MATH-v0") == "AgentR1/MATH-v0"
    assert run_files.name_of(["AgentR1/MATH-v0", "my.module:Own/Game-v12"]) == "MATH-Game"
    assert len(run_files.name_of([f"AgentR1/Environment{i}-v0" for i in range(40)])) == 80


def test_a_resumed_run_takes_lists_of_names_only():
    import grpo_llm

    saved = {"env_id": IDS, "env_kwargs": KWARGS, "env_share": [0.5, 0.5], "eval_split": ["test", "test"]}
    args = arguments.resumed(grpo_llm.Args(resume="runs/RUN"), saved, "the checkpoint")
    assert (args.env_id, args.env_kwargs, args.eval_split) == (IDS, KWARGS, ["test", "test"])
    for damaged in ({"env_id": [1]}, {"model": ["a"]}, {"env_share": "a"}):
        with pytest.raises(SystemExit, match="the checkpoint is damaged: its --"):
            arguments.resumed(grpo_llm.Args(resume="runs/RUN"), saved | damaged, "the checkpoint")


def test_sweeps_and_comparisons_read_runs_on_several(tmp_path, monkeypatch):
    import compare
    import sweep

    command = ["python", str(Path(__file__).parents[2] / "learner" / "grpo_llm.py"), "--env-id", *IDS]
    job = sweep.make_job([*command, "--model", tiny_policy(IDS[0])])
    assert job.name == "MultihopWorld-ArithmeticWorld__grpo_llm__1" and job.model_files()
    assert sweep.make_job(command).model_files() is None  # --model tiny: the run itself refuses it
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps({"args": job.args, "finished": True}))
    both = " ".join(IDS)
    assert compare.find_runs(tmp_path, ["exp_name"], {"env_id": [both]}) == {(both, "grpo_llm"): [folder]}
    monkeypatch.setattr(sweep, "RUNS", tmp_path)
    assert sweep.find(job) == (folder, True)
    assert sweep.find(sweep.make_job([*command, "--env-share", "2", "1"])) == (None, False)
