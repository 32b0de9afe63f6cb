"""The calls beyond the expert's number cost something, in a success only."""

import gymnasium as gym
import pytest

from agent_r1 import ArgumentError, Task, ToolEnv
from agent_r1.baselines import Baselines

WEIGHT = {"extra_call": -0.1}
LOOK = '<tool_call>{"name": "inventory", "arguments": {}}</tool_call>'


def last_terms(env, texts):
    return [env.step_message({"content": text})[4] for text in texts][-1]


@pytest.fixture
def craft():
    env = gym.make("AgentR1/CraftWorld-v0", depth=2, process_reward=WEIGHT).unwrapped
    env.reset(seed=7)
    return env


def test_the_experts_calls_cost_nothing(craft):
    assert "process/extra_call" not in last_terms(craft, craft.demonstration())["reward_terms"]


@pytest.mark.parametrize("looks", [[LOOK, LOOK], [LOOK + LOOK], [LOOK, LOOK.replace("inventory", "look")]])
def test_each_further_call_costs_its_weight_at_the_end(craft, looks):
    """Whether calls are made in one turn or in several, and whether their tool exists."""
    info = last_terms(craft, [*looks, *craft.demonstration()])
    assert info["is_success"] and info["reward_terms"]["process/extra_call"] == pytest.approx(-0.2)
    assert all("process/extra_call" not in terms for terms in craft.episode.rewards[:-1])


def test_a_failure_pays_nothing_for_its_calls(craft):
    calls = [LOOK] * 10
    assert "process/extra_call" not in last_terms(craft, [*calls, "<answer>stuck</answer>"])["reward_terms"]


def test_a_snapshot_keeps_the_experts_number(craft):
    other = gym.make("AgentR1/CraftWorld-v0", depth=2, process_reward=WEIGHT).unwrapped
    turns = craft.demonstration()
    last_terms(craft, [LOOK, *turns[:-1]])
    other.reset(seed=1)
    other.set_state(craft.get_state())
    assert last_terms(other, turns[-1:])["reward_terms"]["process/extra_call"] == pytest.approx(-0.1)


def test_without_a_weight_no_expert_is_asked(monkeypatch):
    env = gym.make("AgentR1/CraftWorld-v0").unwrapped
    monkeypatch.setattr(type(env), "demonstration", None)
    env.reset(seed=1)


class Silent(ToolEnv):
    num_tasks = 1

    def make_task(self, index):
        return Task("t", "Say x.", ["x"])

    def judge_answer(self, answer):
        return 1.0, {}


class Mixed(Baselines, Silent):
    """A class with the mixin, whose own demonstration only raises."""


class Unsolved(Silent):
    def demonstration(self):
        raise ValueError("no solution")


def test_a_task_without_an_expert_is_rejected():
    with pytest.raises(ArgumentError, match=r"extra_call needs an expert, and Silent has none; define demonstration"):
        Silent(process_reward=WEIGHT)
    with pytest.raises(ArgumentError, match=r"extra_call needs an expert, and Mixed has none"):
        Mixed(process_reward=WEIGHT)
    Silent(process_reward={"extra_call": 0})


def test_a_task_without_a_solution_pays_nothing():
    env = Unsolved(process_reward=WEIGHT)
    env.reset(seed=1)
    texts = [LOOK, "<answer>x</answer>"]
    assert "process/extra_call" not in last_terms(env, texts)["reward_terms"]
