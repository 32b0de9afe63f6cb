"""Demonstrations of every environment that has an expert, also of one whose expert sometimes knows no way."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import load_env_creator

import agent_r1
from agent_r1 import Task, ToolEnv
from agent_r1.arguments import FunctionError
from agent_r1.baselines import Baselines
from agent_r1.task_data.load import DATA_SETS
from agent_r1.validation import probes
from llm_utils.imitation import demonstrations
from llm_utils.imitation.demonstrations import Demonstrations, demonstrate
from llm_utils.recovery import signals

ROOT = Path(__file__).parents[3]


class SometimesLostEnv(ToolEnv):
    """Its expert knows no way in every third task; one who makes mistakes does."""

    num_tasks = 12

    def make_task(self, index):
        return Task(f"lost-{index}", f"Say {index}.", [str(index)])

    def judge_answer(self, answer):
        return float(answer in self.task.answers), {}

    def demonstration(self, rng=None):
        index = int(self.task.answers[0])
        if rng is None and index % 3 == 0:
            raise ValueError(f"there is no way\x1b\n to {index}")
        return [f"<answer>{index if rng is None else rng.integers(90, 99)}</answer>"]


class OnlyExpertsEnv(SometimesLostEnv):
    """It has nobody who makes mistakes."""

    def demonstration(self, rng=None):
        if rng is not None:
            raise ValueError("only experts")
        return super().demonstration()


class PlainEnv(SometimesLostEnv):
    """Its demonstration takes no generator: there is only the expert."""

    def demonstration(self):
        return super().demonstration()


class SilentEnv(SometimesLostEnv):
    """It shows nothing."""

    demonstration = Baselines.demonstration


@pytest.fixture(autouse=True)
def registered():
    kinds = {"Lost/Sometimes-v0": SometimesLostEnv, "Lost/OnlyExperts-v0": OnlyExpertsEnv, "Lost/Silent-v0": SilentEnv}
    kinds["Lost/Plain-v0"] = PlainEnv
    for name in kinds:
        gym.register(name, entry_point=kinds[name])
    yield
    for name in kinds:
        gym.registry.pop(name)


def without_data():
    """The ids of ours that have an expert, and their tasks without files."""
    for env_id, entry in agent_r1.ENVIRONMENTS.items():
        data = env_id.removeprefix("AgentR1/").removesuffix("-v0").lower() in {*DATA_SETS, "rows"}
        if not data and load_env_creator(entry.entry_point).demonstration is not Baselines.demonstration:
            yield env_id


def made(env_id, share, count=8):
    return Demonstrations(env_id, "train", {}, None, 1).make(0, count, share)


def test_a_task_in_which_the_expert_knows_no_way_gives_no_row():
    rows = made("Lost/Sometimes-v0", 1.0)
    assert [row.task_index for row in rows] == [1, 2, 4, 5, 7] and all(row.is_success for row in rows)
    assert [row.task_index for row in made("Lost/Sometimes-v0", 0.0)] == list(range(8))
    mixed = {row.task_index: row.is_success for row in made("Lost/Sometimes-v0", 0.5, 12)}
    experts = {index for index in range(12) if np.random.default_rng([1, index]).random() < 0.5}
    assert experts & {0, 3, 6, 9} and {index for index, success in mixed.items() if success} == experts - {0, 3, 6, 9}


def test_what_is_left_out_is_counted_with_its_reasons(capsys, monkeypatch):
    monkeypatch.setattr(demonstrations, "TRIED", 4)  # several jobs
    made("Lost/Sometimes-v0", 1.0, 12)
    lost = r"not shown, such as: there is no way\x1b to"
    assert f"\n4 of 12 demonstrations are left out: 4 {lost} 0\n" in capsys.readouterr().err
    maker = Demonstrations("Lost/Sometimes-v0", "train", {}, None, 1, only_successes=True)
    rows = maker.make(0, 12, 0.5, kind="held-out demonstrations")
    experts = [index for index in range(12) if np.random.default_rng([1, index]).random() < 0.5]
    first = min(index for index in experts if index % 3 == 0)
    kinds = [(12 - len(experts), "ended without success"), (len(experts) - len(rows), f"{lost} {first}")]
    said = "; ".join(f"{number} {why}" for number, why in sorted(kinds, reverse=True))
    assert f"\n{12 - len(rows)} of 12 held-out demonstrations are left out: {said}\n" in capsys.readouterr().err
    maker = Demonstrations("AgentR1/MultihopWorld-v0", "train", {}, None, 1, only_successes=True)
    wrong = 12 - len(maker.make(0, 12, 1.0, rag_share=1.0))
    why = "ended without success after one turn (max_turns 1)"
    assert wrong and f"\n{wrong} of 12 demonstrations are left out: {wrong} {why}\n" in capsys.readouterr().err
    short = Demonstrations("AgentR1/CraftWorld-v0", "train", {"depth": 3, "max_turns": 2}, None, 1)
    with pytest.raises(SystemExit, match="^all of 4 demonstrations are left out: 4 cut off by max_turns 2$"):
        short.make(0, 4, 1.0)
    assert not short.make(0, 4, 1.0, kind=demonstrations.HELD_OUT)
    assert "\n4 of 4 held-out demonstrations are left out: 4 cut off by max_turns 2\n" in capsys.readouterr().err
    made("AgentR1/CraftWorld-v0", 1.0, 3)
    assert "left out" not in capsys.readouterr().err


def test_where_there_are_only_experts_mistakes_are_an_error():
    assert [row.task_index for row in made("Lost/OnlyExperts-v0", 1.0, 5)] == [1, 2, 4]
    with pytest.raises(ValueError, match="only experts"):
        made("Lost/OnlyExperts-v0", 0.0)


def test_a_demonstration_without_a_generator_is_an_experts():
    assert [row.task_index for row in made("Lost/Plain-v0", 1.0, 5)] == [1, 2, 4]
    assert Demonstrations("Lost/Plain-v0", "train", {}, None, 1).only_experts
    with pytest.raises(ValueError, match="PlainEnv has no demonstrator that makes mistakes"):
        made("Lost/Plain-v0", 0.0)


def test_an_error_of_the_reward_is_no_lost_expert():
    rows = [{"id": f"q{number}", "question": "Say a.", "answer": "a"} for number in range(2)]
    env_kwargs = {"data": rows, "reward": lambda answer, row: "yes"}
    with pytest.raises(FunctionError, match="the reward function .* returned 'yes' in row q0"):
        Demonstrations("AgentR1/Rows-v0", "train", env_kwargs, None, 1).make(0, 1, 1.0)


def test_bounds_in_tokens_are_not_for_the_bytes_of_a_vocabulary():
    maker = Demonstrations("Lost/Sometimes-v0", "train", {"max_context_tokens": 100}, None, 1)
    assert not maker.only_experts
    with pytest.raises(SystemExit, match="3 demonstrations are left out: 3 not shown, such as: the prompt of task"):
        maker.make(0, 3, 1.0)
    assert [row.task_index for row in replace(maker, limited=False).make(0, 3, 1.0)] == [1, 2]


def test_answers_alone_in_a_task_with_tools_are_told(capsys):
    data = [{"question": f"What is {number} and 1?", "answer": number + 1} for number in range(4)]
    told = "none of the 2 demonstrations calls a tool: the policy learns to answer without tools\n"
    for tools in (["calculator"], []):
        Demonstrations("AgentR1/Rows-v0", "train", {"data": data, "tools": tools}, None, 1).make(0, 2, 1.0)
        assert (told in capsys.readouterr().err) == bool(tools)
    made("AgentR1/CraftWorld-v0", 1.0, 3)
    assert "none of" not in capsys.readouterr().err


def test_a_demonstration_that_is_one_text_is_refused():
    with pytest.raises(TypeError, match="a list of texts, one for each turn"):
        demonstrate(gym.make("AgentR1/CraftWorld-v0").unwrapped, 0, lambda: "<answer>1</answer>")
    env = SimpleNamespace(demonstration=lambda: "<answer>1</answer>")
    with pytest.raises(TypeError, match="a list of texts, one for each turn"):
        probes.expert(env, np.random.default_rng(0))


WHOLE = """
import runpy, sys
from llm_utils.imitation import demonstrations
demonstrations.POOL_SECONDS = 0.0
def begin(num_workers, make=demonstrations._pool):
    pool = make(num_workers)
    print("begun", file=sys.stderr, flush=True)
    return pool
demonstrations._pool = begin
if __name__ == "__main__":
    sys.argv = ["learner/sft_llm.py", "--model", "tiny", "--num-workers", "3", "--num-demonstrations", "70000"]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
SLOW = """
import sys, time
from llm_utils.imitation import demonstrations
from llm_utils.recovery import signals
demonstrations.POOL_SECONDS = 0.0
class Slow(demonstrations.Demonstrations):
    def _make_some(self, job):
        if job[0].start:
            print("working", file=sys.stderr, flush=True)
            time.sleep(100)
        return super()._make_some(job)
if __name__ == "__main__":
    with signals.ending("nothing was trained yet: start again"):
        Slow("AgentR1/MultihopWorld-v0", "train", {}, None, 1).make(0, 400, 1.0, num_workers=3)
"""


@pytest.mark.parametrize(
    ("number", "of_all", "script", "when"),
    [
        (signal.SIGINT, True, WHOLE, "begun"),  # other processes are still importing
        (signal.SIGTERM, True, SLOW, "working"),  # one of them works, the others wait for work
        pytest.param(signal.SIGTERM, False, SLOW, "working", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, True, WHOLE, "tasks, ", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, False, WHOLE, "tasks, ", marks=pytest.mark.slow),
    ],
)
def test_what_is_interrupted_before_training_says_so_in_a_line(tmp_path, number, of_all, script, when):
    """A terminal's Ctrl-C and a scheduler's SIGTERM reach the processes that demonstrate, too."""
    (tmp_path / "begin.py").write_text(script)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "learner"), *sys.path])}
    run = subprocess.Popen([sys.executable, tmp_path / "begin.py"], cwd=ROOT, env=environment, text=True,
                           stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
    said = ""
    while when not in said and run.poll() is None:
        said += run.stderr.read(1)
    time.sleep(2)
    os.killpg(run.pid, number) if of_all else run.send_signal(number)
    try:
        said += run.communicate(timeout=60)[1]
    finally:
        run.kill()
    assert said.rstrip().endswith("nothing was trained yet: start again") and "Traceback" not in said
    assert run.returncode == 128 + number


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_came_where_nothing_can_be_raised_ends_it_too(capsys):
    class Final:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as ended, signals.ending("begin again"):
        Final()
    assert ended.value.code == 143 and "terminated; begin again" in capsys.readouterr().err


@pytest.mark.parametrize("env_id", sorted(without_data()))
def test_every_expert_without_data_can_be_imitated(env_id):
    rows = made(env_id, 1.0, 2)
    assert [row.task_index for row in rows] == [0, 1]
    for row in rows:
        assert row.is_success and row.action_mask.any() and not row.action_mask[: row.prompt_length].any()


def test_ids_without_data():
    assert len(list(without_data())) == 8


WORDS = ["--num-demonstrations", 8, "--eval-demonstrations", 2, "--num-steps", 2, "--warmup-steps", 1,
         "--batch-size", 2]
WORDS += ["--hidden-size", 32, "--num-layers", 2, "--num-workers", 0, "--num-threads", 1, "--no-cuda"]


def test_a_policy_from_nothing_where_there_are_only_experts(learn):
    """Its tokenizer is read off demonstrations, too, half of which were of one who makes mistakes."""
    folder = learn("sft_llm", "--env-id", "Lost/OnlyExperts-v0", "--expert-share", 1, *WORDS)
    assert json.loads((folder / "summary.json").read_text())["finished"]


def test_a_share_of_mistakes_that_nobody_makes_is_refused(learn, tmp_path):
    with pytest.raises(SystemExit, match="--expert-share 0.38: .*OnlyExperts-v0 has .*; use --expert-share 1"):
        learn("sft_llm", "--env-id", "Lost/OnlyExperts-v0", *WORDS)
    assert not (tmp_path / "runs").exists()


def test_nobody_to_imitate_is_one_line(learn, tmp_path):
    with pytest.raises(SystemExit, match="Silent-v0: it has no demonstrations to imitate; use --data FILE"):
        learn("sft_llm", "--env-id", "Lost/Silent-v0", *WORDS)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "flags", [["--env-id", "AgentR1/CraftWorld-v0"], ["--env-id", "Lost/Sometimes-v0"], ["--data", "rows.jsonl"]]
)
def test_passages_where_nothing_is_searched_are_refused(learn, tmp_path, flags):
    """Also where rows are given: the tokenizer from nothing is read off demonstrations."""
    (tmp_path / "rows.jsonl").write_text('{"tokens": [1, 2], "action_mask": [0, 1]}\n')
    flags = ["--env-id", "AgentR1/CraftWorld-v0", *flags] if flags[0] == "--data" else flags
    with pytest.raises(SystemExit, match=r"--rag-share 0.1: .*-v0 has no tool named search; leave the flag out"):
        learn("sft_llm", *flags, "--rag-share", 0.1, "--num-threads", 1)
    assert not (tmp_path / "runs").exists()


# ------------------------------------------------------------------------------------------------ which tasks are shown


@pytest.fixture
def shown(learn, monkeypatch, policy_folder):
    """shown(first): the tasks that are trained on and those held out, of 12, with --first-demonstration `first`."""
    flags = ["--env-id", "Lost/Sometimes-v0", "--model", policy_folder, "--tokenizer", "byte", "--num-threads", 1]
    flags += ["--num-demonstrations", 4, "--eval-demonstrations", 2, "--num-steps", 1, "--batch-size", 4]
    flags += ["--expert-share", 0, "--no-cuda"]
    made = Demonstrations.make
    found = []

    def make(self, first, count, *args, **kwargs):
        found.append(list(range(first, first + count)))
        rows = made(self, first, count, *args, **kwargs)
        assert {row.task_index for row in rows} <= {*found[-1]}
        return rows

    monkeypatch.setattr(Demonstrations, "make", make)

    def run(first):
        found.clear()
        learn("sft_llm", *flags, "--first-demonstration", first)
        return found

    return run


def test_the_first_demonstration_and_what_is_held_out_after_the_last_one(shown):
    assert shown(0) == [[0, 1, 2, 3], [4, 5]]
    assert shown(5) == [[5, 6, 7, 8], [9, 10]]
    assert shown(6) == [[6, 7, 8, 9], [10, 11]]  # the split's last tasks


def test_where_fewer_tasks_are_left_there_are_fewer_demonstrations(shown, capfd):
    assert shown(7) == [[7, 8, 9, 10], []]
    assert "the split train has 4 tasks from 7 on: 4 to train on, 0 to evaluate on" in capfd.readouterr().out
    assert shown(10)[0] == [10, 11]


@pytest.mark.parametrize("first", [12, 10**6])
def test_a_first_demonstration_that_leaves_no_task_is_refused(shown, first):
    with pytest.raises(SystemExit, match=f"--first-demonstration {first}: the split train has 12 tasks"):
        shown(first)


def test_a_teacher_shows_every_task_and_failures_can_be_left_out():
    maker = Demonstrations("AgentR1/CraftWorld-v0", "train", {"depth": 2}, None, seed=1, teacher="fallible_50")
    rows = maker.make(0, 200, expert_share=1.0)
    assert len(rows) == 200 and 0.4 < np.mean([row.is_success for row in rows]) < 0.6
    good = replace(maker, only_successes=True).make(0, 200, expert_share=0.0)
    assert [row.tokens.tolist() for row in good] == [row.tokens.tolist() for row in rows if row.is_success]
    experts = replace(maker, teacher="expert").make(0, 20, expert_share=0.0)
    own = replace(maker, teacher=None).make(0, 20, expert_share=1.0)
    assert [row.tokens.tolist() for row in experts] == [row.tokens.tolist() for row in own]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--teacher", "fallible_60"], "--teacher fallible_60: .*CraftWorld-v0 has no such teacher; it has expert"),
        (["--teacher", "fallible_50", "--expert-share", 0.5], "--expert-share does nothing with --teacher"),
        (["--env-id", "Lost/Sometimes-v0", "--teacher", "expert"], "Sometimes-v0 has no such teacher; it has none"),
        (["--data", __file__, "--teacher", "expert"], "--teacher does nothing with --data"),
        (["--teacher", "expert", "--only-successes"], "--only-successes does nothing if only the expert demonstrates"),
        (["--expert-share", 1, "--only-successes"], "--only-successes does nothing if only the expert demonstrates"),
    ],
)
def test_a_teacher_who_is_not_there_is_refused(learn, flags, said):
    with pytest.raises(SystemExit, match=said):
        learn("sft_llm", "--env-id", "AgentR1/CraftWorld-v0", *flags)


def test_an_imitation_of_a_teacher(learn):
    few = ["--num-demonstrations", 20, "--eval-demonstrations", 4, "--num-steps", 2, "--batch-size", 2]
    more = ["--model", "tiny", "--num-threads", 1, "--num-workers", 0, "--only-successes"]
    folder = learn("sft_llm", "--env-id", "AgentR1/CraftWorld-v0", "--teacher", "fallible_50", *few, *more)
    args = json.loads((folder / "summary.json").read_text())["args"]
    assert args["teacher"] == "fallible_50" and args["only_successes"]
