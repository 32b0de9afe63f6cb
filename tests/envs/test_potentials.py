"""Shaping by a potential: the best policies stay the same, because the potential is 0 at every end."""

from itertools import product

import gymnasium as gym
import pytest

import agent_r1
from agent_r1 import ArgumentError, Task, ToolEnv
from agent_r1.ids import creator
from agent_r1.potentials import HAVE_ONE
from agent_r1.rewards import shaping_term
from agent_r1.vector import ToolVectorEnv

CALL = '<tool_call>{"name": "%s", "arguments": {}}</tool_call>'


class Walk(ToolEnv):
    """Walk two steps and stop there (1.0), or stop at once (0.4). The third turn is the last."""

    num_tasks = 1
    start = 2.0  # the potential of the first state

    def __init__(self, **kwargs):
        super().__init__([self.walk, self.wait], max_turns=3, process_reward=False, **kwargs)

    def walk(self) -> str:
        """Walk."""
        return "ok"

    def wait(self) -> str:
        """Wait."""
        return "ok"

    def make_task(self, index):
        return Task("t", "Walk.", ["x"])

    def potential(self):
        return self.start + 3.0 * self.memory.get("place", 0)

    def judge_result(self, call, result):
        self.memory["place"] = self.memory.get("place", 0) + (call.name == "walk")
        return {}

    def judge_answer(self, answer):
        return {0: 0.4, 2: 1.0}.get(self.memory.get("place", 0), 0.0), {}

    def judge_end(self, score, **about):
        return score


def play(actions, shaping, gamma):
    """The discounted return of a policy, and what a potential that is not 0 at truncation would add to it."""
    env = Walk(shaping=shaping)
    env.reset(options={"task_index": 0})
    total = 0.0
    for turn, action in enumerate(actions):
        text = "<answer>x</answer>" if action == "stop" else CALL % action
        _, reward, terminated, truncated, info = env.step_message({"content": text})
        assert reward == sum(info["reward_terms"].values()) and ("shaping" in info["reward_terms"]) == bool(shaping)
        total += gamma**turn * reward
        if terminated or truncated:
            return total, gamma ** (turn + 1) * env.potential() if truncated else 0.0
    raise AssertionError


def best(values):
    return {actions for actions, value in values.items() if value > max(values.values()) - 1e-9}


@pytest.mark.parametrize("gamma", [0.9, 1.0])
def test_the_best_policies_of_a_game_stay(gamma):
    """All deterministic policies of a game are played. A potential that is not 0 at truncation changes the best."""
    policies = list(product(["walk", "wait", "stop"], repeat=3))
    plain = {actions: play(actions, None, gamma)[0] for actions in policies}
    shaped = {actions: play(actions, gamma, gamma) for actions in policies}
    for actions in policies:
        assert shaped[actions][0] == pytest.approx(plain[actions] - Walk.start)
    assert best(plain) == best({actions: value for actions, (value, _) in shaped.items()})
    assert best(plain) == {("walk", "walk", "stop")}
    wrong = {actions: value + extra for actions, (value, extra) in shaped.items()}
    assert best(wrong) == {("walk", "walk", "walk")}


def test_the_term_is_a_difference_without_the_potential_of_an_end():
    assert shaping_term(0.5, 1.0, 4.0, over=False) == 1.0
    assert shaping_term(0.5, 1.0, 4.0, over=True) == -1.0
    assert str(shaping_term(1.0, 0.0, 1.0, over=True)) == "0.0"


def test_shaping_of_a_task_sums_to_nothing_and_survives_a_snapshot():
    env, other = (gym.make("AgentR1/CraftWorld-v0", depth=2, shaping=1.0).unwrapped for _ in range(2))
    env.reset(seed=7)
    terms = []
    for text in env.demonstration():
        other.reset(seed=8)
        other.set_state(env.get_state())
        terms.append(env.step_message({"content": text})[4]["reward_terms"]["shaping"])
        assert other.step_message({"content": text})[4]["reward_terms"]["shaping"] == terms[-1]
    assert max(terms) > 0.1 and terms[-1] < -0.9 and sum(terms) == pytest.approx(0.0)


def test_an_episode_out_of_turns_pays_its_potential_back():
    env = gym.make("AgentR1/MultihopWorld-v0", shaping=1.0, max_turns=2).unwrapped
    env.reset(options={"task_index": 1234})
    terms = [env.step_message({"content": text})[4]["reward_terms"] for text in env.demonstration()[:2]]
    hops = env.task.metadata["hops"]
    assert [term["shaping"] for term in terms] == pytest.approx([1 / hops, -1 / hops])


def test_environments_with_a_potential_are_those_that_the_error_names():
    entries = agent_r1.ENVIRONMENTS
    has_one = {env_id for env_id in entries if hasattr(creator(env_id), "potential")}
    assert has_one == {f"AgentR1/{name}-v0" for name in HAVE_ONE}


@pytest.mark.parametrize(
    ("env_id", "shaping", "message"),
    [
        ("AgentR1/ShopWorld-v0", 1.0, "ShopWorldEnv has none; .* CraftWorld, MultihopWorld"),
        ("AgentR1/CraftWorld-v0", 1.5, "shaping must be from 0 to 1, got 1.5"),
        ("AgentR1/CraftWorld-v0", True, "shaping must be from 0 to 1, got True"),
    ],
)
def test_wrong_arguments_are_rejected(env_id, shaping, message):
    with pytest.raises(ArgumentError, match=message):
        gym.make(env_id, shaping=shaping)


def test_a_limit_outside_of_the_environment_is_rejected():
    """It would end an episode whose last reward has a potential."""
    envs = ToolVectorEnv(Walk, 1, shaping=1.0, max_episode_steps=1)
    envs.reset(seed=1)
    with pytest.raises(ArgumentError, match="bound episodes by the argument max_turns"):
        envs.step([envs.envs[0].encode_reply({"content": CALL % "walk"})])


def test_a_potential_must_be_a_number():
    class Endless(Walk):
        def potential(self):
            return float("inf")

    env = Endless(shaping=1.0)
    env.reset(seed=1)
    with pytest.raises(ValueError, match=r"Endless\.potential\(\) must return a finite number"):
        env.step_message({"content": CALL % "walk"})
