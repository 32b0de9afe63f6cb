"""`--env-id module:ID` takes any registered `ToolEnv`: no vector environment, no test split and no task count needed.
What its flags get wrong ends a script with one line."""

import importlib
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import SyncVectorEnv

from agent_r1 import ArgumentError
from agent_r1.ids import creator, is_of
from agent_r1.task_data import DataNotFoundError
from agent_r1.tasks.multihop_world import MultihopWorldEnv
from agent_r1.vector import ToolVectorEnv, vector_spec
from llm_utils.setup.environments import environment_spec, evaluation_split

ROOT = Path(__file__).parents[3]
MODULE = """
import gymnasium as gym
from agent_r1 import ArgumentError, Task, ToolEnv
from agent_r1.tasks.craft_world import CraftWorldEnv


class EchoEnv(ToolEnv):
    def __init__(self, word="yes", *, loud=False, **kwargs):
        super().__init__(**kwargs)

    def make_task(self, index):
        return Task(f"echo-{index}", f"Say {index}.", [str(index)])

    def judge_answer(self, answer):
        return float(answer in self.task.answers), {}


class BrokenEnv(EchoEnv):
    def make_task(self, index):
        raise ValueError("a bug of its author")


class UnbuiltEnv(EchoEnv):
    def __init__(self, size=1, **kwargs):
        if size > 9:
            raise ArgumentError("size is at most 9")
        super().__init__(**kwargs)
        raise TypeError("a bug of its author, at a keyword argument")


class ClosedEnv(EchoEnv):
    def __init__(self, low=1):
        super().__init__()


def closed(split="train"):
    return EchoEnv(split=split)


class MyCraftEnv(CraftWorldEnv):
    pass


gym.register("Mine/Craft-v0", entry_point=MyCraftEnv)
gym.register("Mine/Echo-v0", entry_point=EchoEnv)
gym.register("Mine/Closed-v0", entry_point=ClosedEnv)
gym.register("Mine/NoClass-v0", entry_point="echo_world:Nothing")
gym.register("Mine/Vector-v0", vector_entry_point="agent_r1.vector:ToolVectorEnv")
gym.register("Mine/ClosedMaker-v0", entry_point=closed)
gym.register("Mine/Broken-v0", entry_point=BrokenEnv)
gym.register("Mine/Unbuilt-v0", entry_point=UnbuiltEnv)
"""
REGISTERS = 'import gymnasium\ngymnasium.register("Mine/Y-v0", entry_point="echo_world:EchoEnv")\n'
SMALL = ["--tokenizer", "byte", "--num-envs", 4, "--total-episodes", 8, "--episodes-per-iteration", 8]
SMALL += ["--eval-episodes", 3, "--num-minibatches", 1, "--num-threads", 1, "--no-cuda"]
SMALL += ["--env-kwargs", '{"max_turns": 2, "max_action_tokens": 8}']


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    """The module stands in the folder that a script is started in, as a user's does."""
    (tmp_path / "echo_world.py").write_text(MODULE)
    (tmp_path / "registers.py").write_text(REGISTERS)
    for folder in (tmp_path, tmp_path / "rooms"):
        folder.mkdir(exist_ok=True)
        (folder / "script.py").write_text("raise SystemExit('it ran')")
    (tmp_path / "rooms" / "__init__.py").write_text("raise SystemExit('it ran')")
    (tmp_path / "bare" / "games").mkdir(parents=True)  # without __init__.py
    (tmp_path / "bare" / "games" / "world.py").write_text("raise SystemExit('it ran')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    importlib.invalidate_caches()
    yield
    for name in ("echo_world", "registers", "guess"):
        sys.modules.pop(name, None)
    for name in [name for name in gym.registry if name.startswith("Mine/")]:
        gym.registry.pop(name)


def test_it_is_played_by_the_vector_environment():
    spec = environment_spec("echo_world:Mine/Echo-v0")
    assert isinstance(gym.make_vec(spec, num_envs=2), ToolVectorEnv)
    assert isinstance(gym.make_vec("Mine/Echo-v0", num_envs=2), SyncVectorEnv)  # what Gymnasium itself makes of it
    assert gym.spec("Mine/Echo-v0").vector_entry_point is None  # the registry isn't touched
    assert environment_spec("echo_world:Mine/Vector-v0").entry_point is None
    assert vector_spec("AgentR1/GSM8K-v0") == gym.spec("AgentR1/GSM8K-v0")


def test_only_environments_of_the_module_itself_are_named():
    environment_spec("echo_world:Mine/Echo-v0")
    assert is_of(gym.spec("Mine/Echo-v0"), "echo_world") and not is_of(gym.spec("Mine/Echo-v0"), "echo")


def test_splits_to_evaluate_on(tmp_path, monkeypatch):
    def chosen(env_id, **kwargs):
        args = SimpleNamespace(env_id=env_id, env_kwargs="{}", data_dir=kwargs.get("data_dir"), chat_template=None)
        return evaluation_split(args, "train")

    splits = {"MultihopWorld": "test", "HotpotQA": "validation", "MBPP": "test", "SQLWorld": "test", "Terminal": "test"}
    assert {name: chosen(f"AgentR1/{name}-v0") for name in splits} == splits
    assert chosen("echo_world:Mine/Echo-v0") == "train"
    for names, expected in ((["train.json", "dev.json"], "validation"), (["train.json"], "train"),
                            (["train.json", "dev.json", "test.json"], "test")):  # fmt: skip
        folder = tmp_path / expected
        folder.mkdir()
        for name in names:
            (folder / name).write_text("[]")
        assert chosen("AgentR1/SQLWorld-v0", data_dir=str(folder)) == expected
    assert chosen("AgentR1/Rows-v0", data_dir=str(tmp_path / "validation")) == "train"
    assert chosen("AgentR1/Rows-v0", data_dir=str(tmp_path / "test")) == "test"
    assert chosen("AgentR1/Rows-v0", data_dir=str(tmp_path / "train" / "train.json")) == "test"  # a file has both
    parted = EnvSpec("Mine/Parts-v0", type("Parts", (MultihopWorldEnv,), {"splits": {"a": "a", "b": "b"}}))
    monkeypatch.setitem(gym.registry, "Mine/Parts-v0", parted)
    assert chosen("Mine/Parts-v0") == "a"
    (tmp_path / "train.jsonl").write_text("")
    (tmp_path / "hotpot_train_v1.1.json").write_text("[]")
    assert chosen("AgentR1/GSM8K-v0", data_dir=str(tmp_path)) == "train"
    assert chosen("AgentR1/HotpotQA-v0", data_dir=str(tmp_path)) == "train"
    assert chosen("AgentR1/PharmaSim-v0") == "test"
    assert chosen("AgentR1/PharmaSim-v0", data_dir=str(tmp_path / "nowhere")) == "train"
    registered = EnvSpec("Mine/Split-v0", MultihopWorldEnv, kwargs={"split": "train"})
    monkeypatch.setitem(gym.registry, "Mine/Split-v0", registered)
    assert chosen("Mine/Split-v0") == "test"
    by_property = type("ByProperty", (MultihopWorldEnv,), {"splits": property(lambda self: {"train": "train"})})
    monkeypatch.setitem(gym.registry, "Mine/Property-v0", EnvSpec("Mine/Property-v0", by_property))
    assert chosen("Mine/Property-v0") == "train"
    (tmp_path / "tasks" / "one").mkdir(parents=True)
    (tmp_path / "tasks" / "one" / "task.toml").write_text("")
    assert chosen("AgentR1/Terminal-v0", data_dir=str(tmp_path / "tasks")) == "train"
    (tmp_path / "tasks" / "one").rename(tmp_path / "tasks" / "test")  # a task of that name is no split
    assert chosen("AgentR1/Terminal-v0", data_dir=str(tmp_path / "tasks")) == "train"
    (tmp_path / "tasks").rename(tmp_path / "test" / "test")
    assert chosen("AgentR1/Terminal-v0", data_dir=str(tmp_path / "test")) == "test"


@pytest.mark.parametrize("script", ["ppo_llm", "grpo_llm"])
def test_it_is_trained_and_evaluated(learn, policy_folder, capsys, script):
    words = ["--env-id", "echo_world:Mine/Echo-v0", "--model", policy_folder, *SMALL, "--save-model"]
    learn(script, *words, *(["--critic-warmup", 0] if script == "ppo_llm" else ["--group-size", 4]))
    assert "evaluations use the training tasks, split train" in capsys.readouterr().err
    (run,) = Path("runs").iterdir()
    assert run.name.startswith("echo_world_Mine_Echo-v0__")  # a colon would be no name everywhere
    summary = json.loads((run / "summary.json").read_text())
    assert summary["finished"] and summary["args"]["eval_split"] == "train"
    assert "eval/success_last" in summary
    learn("evaluate_llm", "--model", run, "--episodes", 3, "--num-threads", 1, "--no-cuda")
    assert "Mine/Echo-v0, train: 3 episodes" in capsys.readouterr().out


def test_the_commands_of_the_page_run(learn, monkeypatch, capsys):
    page = (ROOT / "docs" / "your_own_environment.md").read_text()
    (block,) = re.findall(r"```bash\nexport PYTHONPATH=docs/examples\n(.*?)```", page, re.DOTALL)
    monkeypatch.syspath_prepend(ROOT / "docs" / "examples")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "docs" / "examples"))
    commands = [shlex.split(line) for line in block.replace("\\\n", " ").splitlines()]
    runs, short = {}, ["--env-kwargs", '{"max_action_tokens": 8}']  # the policy is hardly trained, and babbles
    few = ["--episodes", 2, *short]
    small = {"sft_llm": ["--num-steps", 2, "--num-demonstrations", 16, "--tokenizer-demonstrations", 64]}
    small["sft_llm"] += ["--eval-demonstrations", 2, "--num-workers", 0, "--batch-size", 2]
    small["grpo_llm"] = ["--total-episodes", 8, "--episodes-per-iteration", 8, "--num-minibatches", 1, *short]
    small["grpo_llm"] += ["--eval-episodes", 2]
    for _, script, *words in commands:
        name, before = Path(script).stem, set(Path("runs").glob("*"))
        words = [runs.get(word, word) for word in words]
        learn(name, *words, "--no-cuda", *small.get(name, few))
        (made,) = set(Path("runs").glob("*")) - before
        runs |= {"sft_llm": {"runs/START": made}, "grpo_llm": {"runs/RUN": made}}.get(name, {})
        assert str(made) in "".join(capsys.readouterr())
    assert len(commands) == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--env-id", "nowhere:Mine/Echo-v0"], "there is no module nowhere in this folder"),
        (["--env-id", "echo_world:Mine/Eco-v0"], "echo_world registers Mine/Broken-v0, .*Mine/Vector-v0$"),
        (["--env-id", "Mine/Vending-v0"], "the module that registers it: MODULE:Mine/Vending-v0. .*: AgentR1/"),
        (["--env-id", "AgentR1/Vending-v0"], "environment; similar ids: AgentR1/.*, AgentR1/.*, AgentR1/"),
        (["--env-id", "AgentR1/hotpotQA-v1"], "environment; similar ids: AgentR1/HotpotQA-v0, "),
        (["--env-id", "ShopWorld-v0"], "MODULE:ShopWorld-v0. Similar ids without a module: AgentR1/ShopWorld-v0, "),
        (["--env-id", "json:Mine/Echo-v0"], "json registers none"),
        (["--env-id", "echo_world.py:Mine/Echo-v0"], "without .py: give echo_world:Mine/Echo-v0"),
        (["--env-id", "./echo_world.py:Mine/Echo-v0"], "without .py: give echo_world:Mine/Echo-v0$"),
        (["--env-id", "sub/echo_world.py"], "without .py: give echo_world:ID, with sub in PYTHONPATH$"),
        (["--env-id", "/abs/path/mine.py"], "without .py: give mine:ID, with /abs/path in PYTHONPATH$"),
        (["--env-id", "registers:Mine/Z-v0"], "registers registers Mine/Y-v0$"),
        (["--env-id", "registers"], "registers is a module: give registers:ID$"),
        (["--env-id", "script"], "script is a module: give script:ID$"),  # and not run
        (["--env-id", "rooms.script"], "rooms.script is a module: give rooms.script:ID$"),  # nor what it stands in
        (["--env-id", "bare.games.world"], "bare.games.world is a module: give bare.games.world:ID$"),
        (["--env-id", "bare.games"], "bare.games is a module: give bare.games:ID$"),
        (["--env-id", "__main__.x"], "the module that registers it: MODULE:__main__.x"),
        (["--env-id", "script.nothing"], "the module that registers it: MODULE:script.nothing"),
        (["--env-id", "echo_world:Mine/NoClass-v0"], "its entry point can't be found: .* has no attribute 'Nothing'$"),
        (["--env-id", "echo_world:Mine/Closed-v0"],
         r"ClosedEnv takes no split; let __init__ take \*\*kwargs and hand them to super\(\).__init__$"),
        (["--env-id", "echo_world:Mine/ClosedMaker-v0"], r"closed takes no tokenizer; let it take \*\*kwargs$"),
        (["--env-id", "echo_world:Mine/Echo-v0", "--split", "nope"], "EchoEnv has no split 'nope'; it has train"),
        (["--env-id", "echo_world:Mine/Unbuilt-v0", "--env-kwargs", '{"size": 10}'], ": size is at most 9"),
        (["--env-id", "echo_world:Mine/Craft-v0", "--env-kwargs", '{"depth": 9}'], ": depth must be None or one of 1,"),
        *[(["--env-id", "echo_world:Mine/Echo-v0", "--env-kwargs", json.dumps({name: value})], f": {message}")
          for name, value, message in [
              ("max_turns", 0, "max_turns must be at least 1, got 0"), ("dialect", "x", "unknown dialect 'x'"),
              ("fault_deadline", "x", "fault_deadline must be"), ("process_reward", 3, "process_reward must be"),
              ("process_reward", {"x": 1}, "no process reward is named 'x'")]],
        (["--env-id", "CartPole-v1"], "CartPoleEnv is not a ToolEnv"),
        (["--split", "tst"], "has no split 'tst'; it has train, test"),
        (["--env-kwargs", '{"max_turn": 4}'], "unexpected keyword argument 'max_turn'; it has .*max_turns"),
        (["--env-id", "echo_world:Mine/Echo-v0", "--env-kwargs", '{"x": 1}'], "'x'; it has word, loud, .*max_turns"),
        (["--env-id", "AgentR1/HotpotQA-v0", "--data-dir", "nowhere"], "^--data-dir nowhere: there is no such file"),
        (["--data-dir", "~nobody-of-this-name/x"], "^--data-dir ~nobody-of-this-name/x: there is no such file"),
        (["--data-dir", "s3://there"], "unexpected keyword argument 'data_dir'; it has world_seed, .*max_turns"),
    ],
)
@pytest.mark.parametrize("script", ["grpo_llm", "evaluate_llm", "sft_llm"])
def test_mistakes_end_with_one_line(learn, policy_folder, script, words, message):
    with pytest.raises(SystemExit, match=message):
        learn(script, "--model", policy_folder, "--tokenizer", "byte", "--no-cuda", *words)


def test_a_variable_that_nobody_knows_ends_with_one_line(learn, policy_folder, monkeypatch):
    monkeypatch.setenv("AGENT_R1_STRICT", "off")
    words = ["--env-id", "echo_world:Mine/Echo-v0", "--model", policy_folder, "--tokenizer", "byte", "--no-cuda"]
    with pytest.raises(SystemExit, match="AGENT_R1_STRICT must be 0, 1, true or false, got 'off'"):
        learn("evaluate_llm", *words)


def test_an_error_of_ones_own_environment_keeps_its_traceback(learn, policy_folder):
    words = ["--env-id", "echo_world:Mine/Broken-v0", "--model", policy_folder, "--tokenizer", "byte", "--no-cuda"]
    with pytest.raises(ValueError, match="a bug of its author"):
        learn("grpo_llm", *words, "--num-threads", 1)
    words[1] = "echo_world:Mine/Unbuilt-v0"
    with pytest.raises(TypeError, match="at a keyword argument"):
        learn("grpo_llm", *words, "--num-threads", 1)


def test_a_policy_from_nothing_for_few_tasks_and_no_vocabulary(learn):
    """Fewer tasks than a tokenizer is read off, and no words that it should keep whole."""
    words = ["--num-demonstrations", 30, "--eval-demonstrations", 2, "--num-steps", 2, "--warmup-steps", 1]
    words += ["--batch-size", 2, "--hidden-size", 32, "--num-layers", 2, "--num-workers", 0]
    words += ["--num-threads", 1, "--no-cuda"]
    folder = learn("sft_llm", "--env-id", "checked_environments:Checked/Right-v0", "--expert-share", 1, *words)
    assert json.loads((folder / "summary.json").read_text())["finished"]


@pytest.mark.parametrize("env_id", ["DeepSearch", "HotpotQA", "MuSiQue", "GSM8K", "MATH", "MBPP", "Rows"])
def test_a_class_has_the_splits_that_its_constructor_takes(env_id, made_up_data, tmp_path):
    """With folders of data: one that has everything, and one without the file of any split but training."""
    pytest.importorskip("math_verify")
    maker, kwargs = creator(f"AgentR1/{env_id}-v0"), {"questions": "hotpotqa"} if env_id == "DeepSearch" else {}
    folder = made_up_data / kwargs.get("questions", env_id.lower())
    train_only = tmp_path / "train_only"
    train_only.mkdir()
    for file in folder.iterdir():
        if "train" in file.name:
            shutil.copy(file, train_only)
    for data_dir in (folder, train_only) if any(train_only.iterdir()) else (folder,):
        for split in maker.splits:
            try:
                maker(split=split, data_dir=str(data_dir), **kwargs)
                takes = True
            except (ArgumentError, DataNotFoundError):
                takes = False
            assert maker.has_split(split, data_dir=str(data_dir), **kwargs) == takes, split
