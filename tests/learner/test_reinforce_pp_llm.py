"""learner/reinforce_pp_llm.py: advantages over the batch, the loss against plain loops, and a run."""

import json

import numpy as np
import pytest
import reinforce_pp_llm
from reinforce_pp_llm import batch_advantages


def test_golden_vectors_of_batch_advantages():
    rewards = [np.array(r, float) for r in ([1, 2], [0], [-1])]  # to go: [3 2], [0], [-1]
    lengths = [np.array(n) for n in ([1, 1], [2], [4])]  # tokens
    plain = batch_advantages(rewards, lengths, whitened=False)
    assert [row.tolist() for row in plain] == [[3, 2], [0], [-1]]
    # over all tokens: mean (3 + 2 + 2 * 0 - 4) / 8 = 1/8, variance (9 + 4 + 4) / 8 - 1/64 = 135/64
    found = batch_advantages(rewards, lengths, by_others=False)
    expected = (np.array([3, 2, 0, -1]) - 1 / 8) / np.sqrt(135 / 64)
    assert np.concatenate(found) == pytest.approx(expected)
    # of the others: mean -2/3 and variance 2/9, below the least deviation 3 ** -1/2; 1/6 and 89/36; 5/4 and 27/16
    found = batch_advantages(rewards, lengths)
    least = 3**-0.5
    assert found[0] == pytest.approx([(3 + 2 / 3) / least, (2 + 2 / 3) / least])
    assert found[1] == pytest.approx([-(1 / 6) / np.sqrt(17 / 6 - 1 / 36)])
    assert found[2] == pytest.approx([-(9 / 4) / np.sqrt(13 / 4 - 25 / 16)])


def test_golden_vectors_of_the_baseline_within_groups():
    rewards = [np.array(r, float) for r in ([1, 2], [0], [5], [3])]  # to go: [3 2], [0 .], [5 .], [3 .]
    found = batch_advantages(rewards, [np.ones(len(r)) for r in rewards], [0, 0, 1, 1], whitened=False)
    assert [row.tolist() for row in found] == [[3, 2], [-3], [2], [-2]]
    by_mean = batch_advantages(rewards, [np.ones(len(r)) for r in rewards], [0, 0, 1, 1], "episode", 1.0, False, False)
    assert [row.tolist() for row in by_mean] == [[1.5, 1.5], [-1.5], [1], [-1]]


def test_an_episode_without_its_group_changes_nothing_in_reinforce_pp_baseline(make_row):
    """Its raw return says how hard its task is, not how good it was."""
    rewards = {0: 1.0, 1: 0.0, 2: 1.0, 4: 0.0, 5: 1.0, 9: 1.0}  # groups of four; the last one stands alone
    rows = [make_row([(1, 3, reward)], 3, episode=i) for i, reward in rewards.items()]
    for norm in ("others", "batch"):
        args = reinforce_pp_llm.Args(baseline=True, group_size=4, adv_norm=norm)
        reinforce_pp_llm.compute_advantages(rows[:-1], args)
        expected = [row.advantages[1] for row in rows[:-1]]
        reinforce_pp_llm.compute_advantages(rows, args)
        assert rows[-1].advantages.tolist() == [0, 0, 0]
        assert np.sign([row.advantages[1] for row in rows[:-1]]).tolist() == np.sign(expected).tolist()


CASES = [
    *({"loss_aggregation": name} for name in ("token", "sequence", "constant")),
    {"loss_mask": False, "importance_cap": 1.05},
    {"kl_coef": 0.3, "kl_in": "loss", "kl_estimator": "k2", "temperature": 0.8},
    {"ent_coef": 0.3, "loss_aggregation": "sequence", "temperature": 0.8},
    {"clip_coef": 0.05, "clip_coef_high": 0.3, "dual_clip": 1.1},
    {"ratio": "turn", "dual_clip": 1.1},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: ",".join(f"{k}={v}" for k, v in case.items()))
def test_the_loss_and_its_gradient_are_those_of_plain_loops(compare_with_loops, case):
    compare_with_loops(reinforce_pp_llm, **case)


def test_a_run_trains_on_advantages_over_the_batch(learn):
    flags = ["--log-trajectories", 16]
    flags += ["--env-kwargs", json.dumps({"max_turns": 2, "max_action_tokens": 10}), "--num-envs", 16]
    flags += ["--episodes-per-iteration", 16, "--group-size", 4, "--num-minibatches", 2, "--eval-episodes", 0]
    flags += ["--total-episodes", 16, "--num-threads", 1, "--temperature", 2.0, "--baseline"]
    run_dir = learn("reinforce_pp_llm", *flags)
    assert json.loads((run_dir / "summary.json").read_text())["finished"]
    rows = [json.loads(line) for line in (run_dir / "trajectories.jsonl").read_text().splitlines()]
    assert len(rows) == 16
    rewards = [np.array([sum(row["rewards"][a:b]) for a, b in row["turns"]]) for row in rows]
    lengths = [np.array([b - a for a, b in row["turns"]]) for row in rows]
    expected = batch_advantages(rewards, lengths, [row["episode"] // 4 for row in rows])
    for row, values in zip(rows, expected, strict=True):
        for (start, end), value in zip(row["turns"], values, strict=True):
            np.testing.assert_allclose(row["advantages"][start:end], value, atol=1e-4)
    assert any(np.any(row["advantages"]) for row in rows)
