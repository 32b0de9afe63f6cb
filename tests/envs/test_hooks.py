"""How much of a `ToolEnv` somebody has to know: its public members, the hooks of a task, and who may leave them out."""

import ast
import re
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import agent_r1
from agent_r1 import Task, Tool, ToolEnv, ToolResult
from agent_r1.baselines import Baselines, baselines_of, has_demonstration
from agent_r1.spaces import TokenSpan
from agent_r1.validate import Report, Subject, measure
from agent_r1.vector import ToolVectorEnv
from agent_r1.wrappers import ChoiceInterface

PACKAGE = Path(agent_r1.__file__).parent
HOOKS = {"num_tasks", "make_task", "has_split"}
HOOKS |= {"start_episode", "judge_result", "user_turn", "judge_answer", "judge_end"}
OTHERS = {"reset", "close", "schemas"}  # Gymnasium's, and a property
TURN = re.compile(r"\._(begin|end|try)_turn\b|\._(in_order|takes_time|judge_early|check_action|count_tasks)\b")


def functions(class_body):
    return {node.name for node in class_body.body if isinstance(node, ast.FunctionDef)}


def members():
    module = ast.parse((PACKAGE / "tool_env.py").read_text())
    (body,) = (node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "ToolEnv")
    return functions(body) - {"__init__"}


def public_members():
    return {name for name in members() if not name.startswith("_")}


def test_tool_env_has_at_most_24_public_methods_and_properties():
    assert len(public_members()) <= 24 and HOOKS < public_members()


def test_tasks_override_no_other_hooks():
    """Of bridges, too, whose packages need not be there."""
    overridden = set()
    for file in [*(PACKAGE / "tasks").rglob("*.py"), *(PACKAGE / "bridges").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Env"):
                overridden |= functions(node) & members()
    assert overridden - OTHERS == HOOKS


def test_only_the_package_calls_the_methods_of_a_turn():
    root = PACKAGE.parents[1]
    files = [file for folder in ("learner", "benchmarks", "docs") for file in (root / folder).rglob("*.py")]
    assert files and not [file for file in files if TURN.search(file.read_text())]


# ---------------------------------------------------------------------- a class of one's own, without the mixin


class Plain(ToolEnv):
    """Say the number."""

    num_tasks = 4

    def make_task(self, index):
        return Task(f"t{index}", f"Say {index}.", [str(index)])

    def judge_answer(self, answer):
        return float(answer in self.task.answers), {}

    def demonstration(self, rng=None):
        return [f"<answer>{self.task.answers[0] if rng is None else rng.integers(4)}</answer>"]


class Wordy(Plain):
    choices, floor = (2, 1), 0.5
    demonstration = Baselines.demonstration

    @staticmethod
    def vocabulary():
        return ["Say"]

    def candidates(self):
        return [("<answer>0</answer>", [1.0]), ("<answer>1</answer>", [0.0])]


class Later(Plain):
    @property
    def floor(self):
        return 1 / len(self.task.answers)


class Silent(Plain):
    demonstration = Baselines.demonstration


@pytest.fixture
def registered(monkeypatch):
    for kind in (Plain, Wordy, Silent):
        spec = gym.envs.registration.EnvSpec(f"Mine/{kind.__name__}-v0", kind)
        monkeypatch.setitem(gym.registry, spec.id, spec)


def test_what_a_class_leaves_out_has_the_default():
    plain, wordy = Plain(), Wordy()
    plain.reset(options={"task_index": 2})
    known = baselines_of(plain)
    assert known.demonstration() == ["<answer>2</answer>"] and has_demonstration(plain)
    assert (known.vocabulary(), known.teachers, known.choices) == ([], (), None)
    assert (known.floor, dict(known.floors)) == (0.0, {})
    with pytest.raises(NotImplementedError, match=r"Plain must define candidates\(\)"):
        known.candidates()
    assert baselines_of(wordy).vocabulary() == ["Say"] and baselines_of(wordy).floor == 0.5
    assert baselines_of(Later()).vocabulary() == []  # no task has begun, of which its floor is
    for silent in (wordy, Silent()):
        assert not has_demonstration(silent)
        with pytest.raises(NotImplementedError, match=r"must define demonstration\(rng\)"):
            baselines_of(silent).demonstration()


@pytest.mark.parametrize(("kind", "expert"), [("Plain", True), ("Wordy", False), ("Silent", False)])
def test_a_plain_class_can_be_validated(kind, expert, registered):
    report = Report(f"Mine/{kind}-v0", {})
    measure(Subject(report.env_id, {}, 4), report)
    assert report.row["success"].get("expert") == (1.0 if expert else None)
    assert report.row["floor"] == (0.5 if kind == "Wordy" else 0.0)


def test_a_plain_class_may_have_candidates():
    env = ChoiceInterface(Wordy())
    env.reset(options={"task_index": 1})
    assert env.action_masks().all() and env.step(1)[4]["is_success"]
    with pytest.raises(ValueError, match="Plain has no candidate turns"):
        ChoiceInterface(Plain())


# ---------------------------------------------------------------------- the path of a span


def test_a_span_is_checked_once_and_before_anything_has_begun(monkeypatch):
    checked, read = [], TokenSpan.read
    monkeypatch.setattr(TokenSpan, "read", lambda self, action: checked.append(action) or read(self, action))
    envs = ToolVectorEnv(Plain, 2)
    envs.reset(seed=1)
    span = np.array(envs.envs[0].tokenizer.encode("<answer>0</answer>"), np.int32)
    with pytest.raises(ValueError, match="1-D array of token ids"):
        envs.send([span, [[1]]])
    assert [env.episode.turn for env in envs.envs] == [0, 0]
    checked.clear()
    envs.step([span, span])
    assert len(checked) == 2
    single = Plain()
    single.reset(seed=1)
    single.step(span)
    assert len(checked) == 3


def test_no_answer_is_judged_for_its_metrics_only():
    class Generous(Plain):
        def judge_answer(self, answer):
            return 1.0, {"length": float(len(answer))}

    for text, score in (("<answer></answer>", 0.0), ("Hm.", 0.0), ("<answer>x</answer>", 1.0)):
        env = Generous([Tool.from_function(lambda: ToolResult("ok"), name="look")], max_turns=1)
        env.reset(seed=1)
        info = env.step_message({"content": text})[4]
        assert info["is_success"] == bool(score) and info["metrics"] == {"length": score}
