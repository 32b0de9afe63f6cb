"""learner/arpo_llm.py: its advantages, runs beside GRPO's, resume, and what is refused. Branches: test_branching.py."""

import json
from dataclasses import replace

import arpo_llm
import grpo_llm
import numpy as np
import pytest
from safetensors import torch as safetensors

from llm_utils.trajectory import make_groups

SMALL = ["--env-id", "AgentR1/CraftWorld-v0", "--env-kwargs", json.dumps({"max_turns": 5}), "--num-envs", 12]
SMALL += ["--episodes-per-iteration", 16, "--num-minibatches", 2, "--num-threads", 1, "--eval-episodes", 0]
SMALL += ["--group-size", 8, "--save-model", "--log-trajectories", "all", "--deterministic"]


def rows(run_dir):
    return [json.loads(line) for line in (run_dir / "trajectories.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "case", [{}, {"credit": "episode", "scale_by": "others"}, {"kl_in": "reward", "kl_coef": 0.1}], ids=str
)
def test_without_branches_the_advantages_are_grpos(made_up_rows, case):
    found = []
    for script, more in ((arpo_llm, {}), (grpo_llm, {}), (arpo_llm, {"advantage": "soft"})):
        made, args = made_up_rows(), script.Args(group_size=4, **case, **more)
        script.compute_advantages(make_groups(made, 4, args.gamma), args)
        found.append(np.concatenate([row.advantages for row in made]))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found[1], found[2])


def test_soft_and_hard_differ_on_shared_turns_only_and_have_one_sum(make_row):
    """Episode 1 shares the first of its two turns with episode 0."""
    made = {}
    for form in ("soft", "hard", "tree"):
        group = [make_row([(1, 3, 0.0), (4, 6, paid)], 6, episode=i) for i, paid in enumerate((1, 0, 0.2, 0.9))]
        group[1].branches = ((0, 1),)
        args = arpo_llm.Args(group_size=4, advantage=form, credit="episode", scale_rewards=False)
        arpo_llm.compute_advantages(make_groups(group, 4, 1.0), args)
        made[form] = np.array([[row.advantages[1], row.advantages[4]] for row in group])
    np.testing.assert_allclose(made["soft"][:, 1], made["hard"][:, 1])
    assert made["hard"][0, 0] == made["hard"][1, 0] == pytest.approx(made["soft"][:2, 0].mean())
    # each path weighs a half: a shared turn against the others' mean .55, what follows against the other path
    np.testing.assert_allclose(made["tree"], [[0.225, 0.5], [-0.275, -0.5], [-0.5, -0.5], [0.55, 0.55]], atol=1e-6)


def test_as_many_roots_as_episodes_is_grpo_to_the_token(learn):
    """Same rows, same weights after two iterations."""
    flags = [*SMALL, "--total-episodes", 32]
    with_roots = learn("arpo_llm", *flags, "--initial-episodes", 8)
    of_grpo = learn("grpo_llm", *flags)
    names = ("tokens", "logprobs", "task_index", "advantages")
    for one, two in zip(rows(with_roots), rows(of_grpo), strict=True):
        assert {name: one[name] for name in names} == {name: two[name] for name in names}
    one, two = (safetensors.load_file(folder / "model" / "model.safetensors") for folder in (with_roots, of_grpo))
    assert all((one[name] == two[name]).all() for name in one)


def test_a_run_branches_and_is_resumed_to_the_bit(learn):
    flags = [*SMALL, "--entropy-unit", "deviation", "--branch-alpha", 0.7]
    whole = learn("arpo_llm", *flags, "--total-episodes", 32, "--exp-name", "whole")
    parts = learn("arpo_llm", *flags, "--total-episodes", 16, "--exp-name", "parts", "--no-anneal-lr")
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["finished"] and summary["args"]["advantage"] == "tree"
    found = rows(whole)
    assert len(found) == 32
    born = [row for row in found if row.get("parent") is not None]
    assert 4 <= len(born) <= 16 and all(row["branch_turn"] > 0 for row in born)
    whole = learn("arpo_llm", *flags, "--total-episodes", 32, "--exp-name", "again", "--no-anneal-lr")
    learn("arpo_llm", "--resume", parts, "--total-episodes", 32)
    one, two = (safetensors.load_file(folder / "model" / "model.safetensors") for folder in (whole, parts))
    assert all((one[name] == two[name]).all() for name in one)
    assert (whole / "trajectories.jsonl").read_text() == (parts / "trajectories.jsonl").read_text()


def test_what_is_refused():
    for given, message in (
        ({"initial_episodes": 1}, "--initial-episodes 1 must be between 2 and --group-size 8"),
        ({"initial_episodes": 9}, "--initial-episodes 9 must be between 2 and --group-size 8"),
        ({"scale_by": "group"}, "--scale-by group needs --advantage soft or hard"),
        ({"initial_episodes": 8, "beam_size": 3}, "--beam-size does nothing with --initial-episodes as large"),
        ({"branch_beta": 0.0, "entropy_window": 4}, "--entropy-window does nothing without branches or with"),
        ({"beam_size": 1}, "--beam-size must be at least 2"),
    ):
        with pytest.raises(SystemExit, match=message):
            args = replace(arpo_llm.Args(), **given)
            arpo_llm.check(args)
            arpo_llm.arguments.check_switches(args)
