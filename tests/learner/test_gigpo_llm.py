"""learner/gigpo_llm.py: states, advantages within them, the loss against plain loops, and a run that is resumed."""

import json

import gigpo_llm
import grpo_llm
import numpy as np
import pytest

from llm_utils.returns import returns_to_go
from llm_utils.trajectory import make_groups

# Three episodes. Turns 0 share the prompt "p". State "a" is visited by episode 0 in turns 1 and 2, and by episode 1 in
# turn 1. State "b" is visited by episode 2 alone.
REWARDS = [[1, 0, 2], [1, 0], [-1, 0]]
STATES = [[b"p", b"a", b"a"], [b"p", b"a"], [b"p", b"b"]]


def advantages(rewards=REWARDS, states=STATES, gamma=1.0, **kwargs):
    """Advantages of the turns of these episodes, and whether their states are shared."""
    rewards = [np.array(r, float) for r in rewards]
    totals, args = np.array([r.sum() for r in rewards]), gigpo_llm.Args(**kwargs)
    table, shared = gigpo_llm.gigpo_advantages(returns_to_go(rewards, gamma), totals, states, args)
    lengths = list(map(len, rewards))
    return [row[:n].tolist() for row, n in zip(table, lengths, strict=True)], [
        row[:n].tolist() for row, n in zip(shared, lengths, strict=True)
    ]


def test_golden_vectors_of_the_unbiased_form():
    """Returns from each turn on: [3 2 2], [1 0 .], [-1 0 .]. Above the others' means at the same turn: [3 2 2],
    [0 -1 .], [-3 -1 .]. Above the others' means in the same state: [3 2 2], [0 -2 .], [-3 - .]."""
    found, shared = advantages(scale_rewards=False)
    assert shared == [[True] * 3, [True] * 2, [True, False]]
    assert found == [[3, 2, 2], [0, -1.5], [-3, -1]]  # the mean of both, and the first where nobody else was
    found, _ = advantages(scale_rewards=False, step_weight=3.0)
    assert found == [[3, 2, 2], [0, -1.75], [-3, -1]]
    scaled, _ = advantages()  # by the deviation of the other episodes' returns, (1, -1), (3, -1), (3, 1)
    for row, values, spread in zip(scaled, [[3, 2, 2], [0, -1.5], [-3, -1]], np.sqrt([2, 8, 2]), strict=True):
        assert row == pytest.approx(np.array(values) / spread)


def test_golden_vectors_of_the_published_form():
    """Totals 3, 1, -1, with mean 1 and deviation 2. In "p" the returns 3, 1, -1; in "a" 2, 2, 0, with mean 4/3 and
    deviation 2 / sqrt(3); in "b" one alone."""
    found, _ = advantages(form="published", scale_rewards=False)
    assert sum(found, []) == pytest.approx([2 + 2, 2 + 2 / 3, 2 + 2 / 3, 0, -4 / 3, -2 - 2, -2])
    found, _ = advantages(form="published", step_weight=0.5)
    within = np.array([2 / 3, 2 / 3, -4 / 3]) / (2 / 3**0.5)
    expected = [1.5, 1 + within[0] / 2, 1 + within[1] / 2, 0, within[2] / 2, -1.5, -1]
    assert sum(found, []) == pytest.approx(expected, abs=1e-5)
    found, _ = advantages(form="published", scale_rewards=False, gamma=0.5)  # returns 1.5, 1, 2; 1, 0; -1, 0
    assert found[0] == pytest.approx([2 + 1, 2 + 0, 2 + 1])  # totals are not discounted


def test_states_are_the_prompt_and_tool_results(make_row):
    """Not the history: equal tool results after different spans are one state, whatever the turn."""
    tokens = [[1, 2, 50, 7, 8, 51, 9, 52], [1, 2, 60, 61, 9, 62, 7, 8, 63]]
    rows = [
        make_row([(2, 3, 0), (5, 6, 0), (7, 8, 1)], 8, tokens=np.array(tokens[0], np.int32)),
        make_row([(2, 4, 0), (5, 6, 0), (8, 9, 0)], 9, tokens=np.array(tokens[1], np.int32)),
    ]
    one, two = map(gigpo_llm.states, rows)
    assert one[0] == two[0] and one[1] == two[2] and one[2] == two[1] and len({*one, *two}) == 3
    rows[0].segment_starts = [0, 6]  # the context of the last turn was rewritten
    assert gigpo_llm.states(rows[0]) == one
    rows[0].segment_starts = [0, 3]
    assert [np.frombuffer(state, np.int32).tolist() for state in gigpo_llm.states(rows[0])] == [[1, 2], [7, 8], [9]]


@pytest.mark.parametrize(
    ("case", "of_grpo"), [({}, {}), ({"gamma": 0.9}, {"gamma": 0.9}), ({"kl_in": "reward", "kl_coef": 0.1},) * 2]
)
def test_without_a_weight_of_states_it_is_grpo(made_up_rows, case, of_grpo):
    found = []
    for script, given in ((gigpo_llm, {"step_weight": 0.0, **case}), (grpo_llm, of_grpo)):
        rows, args = made_up_rows(), script.Args(group_size=4, **given)
        script.compute_advantages(make_groups(rows, 4, args.gamma), args)
        found.append(np.concatenate([row.advantages for row in rows]))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)


def test_the_figures_tell_whether_there_is_a_signal_and_a_shared_state(make_row):
    def row(episode, *rewards, tokens):
        return make_row([(1, 2, rewards[0]), (3, 4, rewards[1])], 4, episode=episode, tokens=np.array(tokens, np.int32))

    rows = [row(0, 0, 1, tokens=[1, 5, 2, 6]), row(1, 0, 0, tokens=[1, 5, 2, 7])]  # shared, with a signal
    rows += [row(2, 0, 1, tokens=[3, 5, 2, 6]), row(3, 0, 1, tokens=[3, 5, 4, 6])]  # neither
    args = gigpo_llm.Args(group_size=2)
    figures = gigpo_llm.compute_advantages(make_groups(rows, 2, 1.0), args)
    assert figures == {"charts/groups_with_signal": 0.5, "charts/shared_states": 0.5}
    assert rows[0].advantages[1] > 0 > rows[1].advantages[1] and not rows[2].advantages.any()
    alone = [row(0, 0, 1, tokens=[1, 5, 2, 6])]  # the others were dropped because of infrastructure errors
    assert gigpo_llm.compute_advantages(make_groups(alone, 2, 1.0), args)["charts/groups_with_signal"] == 0
    assert not alone[0].advantages.any()


@pytest.mark.parametrize("case", [{}, {"ratio": "turn", "loss_aggregation": "constant", "dual_clip": 1.1}], ids=str)
def test_the_loss_and_its_gradient_are_those_of_plain_loops(compare_with_loops, case):
    compare_with_loops(gigpo_llm, **case)


def test_a_run_trains_on_its_advantages_and_is_resumed(learn):
    flags = ["--env-kwargs", json.dumps({"max_turns": 3, "max_action_tokens": 10}), "--num-envs", 16]
    flags += ["--episodes-per-iteration", 16, "--group-size", 4, "--num-minibatches", 2, "--eval-episodes", 0]
    run_dir = learn(
        "gigpo_llm", *flags, "--total-episodes", 16, "--num-threads", 1, "--temperature", 2.0, "--log-trajectories", 16
    )
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["finished"] and summary["args"]["form"] == "unbiased"
    rows = [json.loads(line) for line in (run_dir / "trajectories.jsonl").read_text().splitlines()]
    assert any(np.any(row["advantages"]) for row in rows)
    for first in range(0, 16, 4):
        group = rows[first : first + 4]
        rewards = [[sum(row["rewards"][a:b]) for a, b in row["turns"]] for row in group]
        states = []
        for row in group:
            ends = [0, *(b for _, b in row["turns"])]
            between = zip(ends, row["turns"], strict=False)
            states.append([str(row["tokens"][end:start]).encode() for end, (start, _) in between])
        expected, _ = advantages(rewards, states, scale_rewards=False)
        found = [[row["advantages"][start] for start, _ in row["turns"]] for row in group]
        for values, unscaled in zip(found, expected, strict=True):
            assert np.sign(np.round(values, 5)).tolist() == np.sign(np.round(unscaled, 5)).tolist()
    learn("gigpo_llm", "--resume", run_dir, "--total-episodes", 32)
    lines = (run_dir / "trajectories.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1] * 16 + [2] * 16


def test_what_is_refused():
    for given, message in (({"group_size": 1}, "--group-size 1 must"), ({"step_weight": -1.0}, "--step-weight must")):
        with pytest.raises(SystemExit, match=message):
            gigpo_llm.check(gigpo_llm.Args(**given))
