"""benchmarks/evidence.py: what a claim is worth, what is compared, and its parts in small."""

import sys
from argparse import Namespace

import gymnasium as gym
import numpy as np
import pytest
from evidence_parts import exploration, horizons, noise, scores, teachers

from agent_r1 import probes

RUN = "--num-envs 8 --total-episodes 8 --episodes-per-iteration 8 --num-minibatches 1 --group-size 2"


@pytest.mark.parametrize(
    ("goal", "found", "verdict"),
    [
        (0.135, (0.2, 0.15, 0.25), "shown"),
        (0.135, (0.2, 0.05, 0.25), "shown"),
        (0.135, (0.2, -0.05, 0.25), "not shown"),
        (0.135, (0.1, 0.05, 0.2), "not shown"),
        (0.135, (0.1, 0.05, 0.13), "refuted"),
        (0.0, (-0.2, -0.3, -0.1), "refuted"),
    ],
)  # fmt: skip
def test_the_verdict_of_a_claim(goal, found, verdict):
    assert scores.Claim("", goal, found).verdict == verdict
    assert scores.Claim("", goal, found, seeds=1).verdict == "one seed"


def test_noise_to_signal_of_known_noise():
    rng = np.random.default_rng(0)
    gradients = 1.0 + 2.0 * rng.normal(size=(200, 500))  # |mean|^2 = 500, trace of the covariance = 4 * 500
    louder = 1.0 + 4.0 * rng.normal(size=(200, 500))
    silent = rng.normal(size=(200, 500))
    grams = {name: g @ g.T for name, g in (("dense", gradients), ("outcome", louder), ("silent", silent))}
    found = noise.bootstrap(grams, "outcome", 200)
    assert found["dense"][0][0] == pytest.approx(1 / 4, rel=0.1)
    assert found["outcome"][0][0] == pytest.approx(1 / 16, rel=0.1)
    value, low, high = found["dense"][1]
    assert value == pytest.approx(0.75, abs=0.05) and low < value < high and found["outcome"][1] == (0, 0, 0)
    assert found["silent"][0][1] < 0 and np.isnan(found["silent"][1]).all()
    assert scores.Claim("", 0.45, found["silent"][1]).verdict == "no signal"
    assert all(np.isnan(less).all() for _, less in noise.bootstrap(grams, "silent", 50).values())


def test_steps_to_half_success_are_between_two_evaluations(monkeypatch):
    def of(at, success):
        monkeypatch.setattr(horizons, "read_curve", lambda *_: (np.array(at, float), np.array(success, float)))
        return horizons.steps_to_half(None)

    assert of([0, 100, 200], [0.1, 0.3, 0.7]) == 150
    assert of([0, 100], [0.6, 0.7]) == 0 and of([0, 100], [0.1, 0.4]) == np.inf


def test_a_new_query_is_paid_once_and_at_most_four_times():
    env = gym.make("exploring_world:AgentR1Exploring/MultihopWorld-v0", max_turns=9, process_reward={"new_query": 0.1})
    env.reset(options={"task_index": 0})
    env = env.unwrapped
    assert env.task.metadata["hops"] == 4 and env.num_tasks == 8_000
    paid = []
    for query in ("a", "a ", "A", "b", "c", "d", "e", "f"):
        *_, info = env.step(probes.span(env, env.dialect.tool_call("search", {"query": query})))
        paid.append(info["reward_terms"].get("process/new_query", 0.0))
    assert paid == pytest.approx([0.1, 0, 0, 0.1, 0.1, 0.1, 0, 0])
    test = gym.make("exploring_world:AgentR1Exploring/MultihopWorld-v0", split="test").unwrapped
    assert test.make_task(0).question not in {env.make_task(index).question for index in range(200)}


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Runs go to an empty folder."""
    for name in ("learner", "benchmarks", "envs"):
        (tmp_path / name).symlink_to(scores.ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    return Namespace(seeds=1, workers=1, episodes=4, flags=RUN)


@pytest.mark.slow
def test_teachers_in_small(small, monkeypatch):
    monkeypatch.setattr(teachers, "STEPS", dict.fromkeys(teachers.STEPS, 2))
    monkeypatch.setattr(teachers, "TRIES", 200)
    small.worlds = ["CraftWorld"]
    start = "SFT, 500 of fallible_50"
    small.rows = [start, f"{start}, successes", "GRPO", f"GRPO after {start}", teachers.SAME_TIME, teachers.OWN[0]]
    found = teachers.measure(small)["CraftWorld"]
    assert set(found["success"]) == {"shipped policy", *small.rows} and len(found["claims"]) == 12
    assert found["cost"][f"GRPO after {start}"][0] == 508 and found["cost"][teachers.OWN[0]][0] == 200
    assert "| GRPO |" in found["table"] and "one seed" in found["table"]
    assert found["cost"]["GRPO"][1] > 8 and found["cost"][f"{start}, successes"] != found["cost"]["GRPO"]


@pytest.mark.slow
def test_exploration_in_small(small, monkeypatch):
    small.places = ["MultihopWorld"]
    found = exploration.measure(small)["MultihopWorld"]
    assert set(found["success"]) == {"shipped policy", exploration.SHOWN, *exploration.PLACES["MultihopWorld"].rows}
    assert len(found["claims"]) == 5 and "4 calls or more" in found["table"]
