"""learner/rloo_llm.py: leave-one-out advantages, the loss against plain loops, and a run."""

import json

import numpy as np
import pytest
import rloo_llm

from llm_utils.returns import returns_to_go
from llm_utils.trajectory import make_groups


def test_golden_vectors_of_leave_one_out_advantages():
    outcomes = np.array([[1.0], [0.0], [0.0], [0.0]])
    found = rloo_llm.leave_one_out_advantages(outcomes)
    assert found[:, 0] == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    # rewards to go: [3 2 2], [1 0 .], [-1 . .]; of the others in turn 0: 0, 1, 2; in turn 1: 0, 1, 1; in turn 2: 0
    episodes = [np.array(r, float) for r in ([1, 0, 2], [1, 0], [-1])]
    found = rloo_llm.leave_one_out_advantages(returns_to_go(episodes), "turn")
    assert found[0].tolist() == [3, 2, 2] and found[1, :2].tolist() == [0, -1] and found[2, 0] == -3
    found = rloo_llm.leave_one_out_advantages(returns_to_go(episodes), "episode")
    assert found[0].tolist() == [3, 3, 3] and found[1, :2].tolist() == [0, 0] and found[2, 0] == -3
    # gamma 1/2: to go [1.5 1 2], [1 0 .], [-1 . .]
    found = rloo_llm.leave_one_out_advantages(returns_to_go(episodes, 0.5), "turn")
    assert found[0].tolist() == [1.5, 1, 2] and found[1, :2].tolist() == [0.75, -0.5] and found[2, 0] == -2.25


def test_dropped_episodes_leave_smaller_groups(make_row):
    """Without the second, which a fault ended, the other episodes are compared; one that is left alone gets nothing."""
    rewards = {0: 1.0, 2: 0.0, 3: 0.0, 6: 1.0}  # of the first group of four, and of the second
    rows = [make_row([(1, 2, reward)], 2, episode=i) for i, reward in rewards.items()]
    rloo_llm.compute_advantages(make_groups(rows, 4, 1.0), rloo_llm.Args())
    assert [row.advantages[1] for row in rows] == pytest.approx([1.0, -0.5, -0.5, 0.0])


CASES = [
    *({"loss_aggregation": name} for name in ("token", "sequence", "constant")),
    {"loss_mask": False, "importance_cap": 1.05},
    {"kl_coef": 0.3, "kl_in": "loss", "kl_estimator": "k3", "temperature": 0.8},
    {"ent_coef": 0.3, "loss_aggregation": "sequence", "temperature": 0.8},
    {"clip_coef": 0.05, "clip_coef_high": 0.3, "dual_clip": 1.1},
    {"ratio": "turn", "dual_clip": 1.1},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: ",".join(f"{k}={v}" for k, v in case.items()))
def test_the_loss_and_its_gradient_are_those_of_plain_loops(compare_with_loops, case):
    compare_with_loops(rloo_llm, **case)


def test_a_run_trains_on_leave_one_out_advantages(learn):
    flags = ["--log-trajectories", 16]
    flags += ["--env-kwargs", json.dumps({"max_turns": 2, "max_action_tokens": 10}), "--num-envs", 16]
    flags += ["--episodes-per-iteration", 16, "--group-size", 4, "--num-minibatches", 2, "--eval-episodes", 0]
    run_dir = learn("rloo_llm", *flags, "--total-episodes", 16, "--num-threads", 1, "--temperature", 2.0)
    assert json.loads((run_dir / "summary.json").read_text())["finished"]
    rows = [json.loads(line) for line in (run_dir / "trajectories.jsonl").read_text().splitlines()]
    assert len(rows) == 16
    for first in range(0, 16, 4):
        group = rows[first : first + 4]
        rewards = [np.array([sum(row["rewards"][a:b]) for a, b in row["turns"]]) for row in group]
        expected = rloo_llm.leave_one_out_advantages(returns_to_go(rewards), "turn")
        for row, values in zip(group, expected, strict=True):
            for (start, end), value in zip(row["turns"], values[: len(row["turns"])], strict=True):
                np.testing.assert_allclose(row["advantages"][start:end], value, atol=1e-5)
    assert any(np.any(row["advantages"]) for row in rows)
