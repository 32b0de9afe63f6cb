"""What stands in several learners is the same."""

import ast
from itertools import combinations
from pathlib import Path

import grpo_llm
import pytest
import rloo_llm
import torch
from learners import PLAY

LEARNER = Path(__file__).parents[2] / "learner"


def functions(script):
    """The functions of a learner and the classes but Args, by name."""
    kinds = ast.FunctionDef | ast.ClassDef
    nodes = ast.parse((LEARNER / f"{script}.py").read_text()).body
    return {node.name: ast.unparse(node) for node in nodes if isinstance(node, kinds) and node.name != "Args"}


OWN = {"check", "compute_advantages"}  # of every algorithm
LONGER = {  # and what it adds
    ("ppo_llm", "backward"): "the critic, and updates of it alone; it has one aggregation",
    ("grpo_llm", "backward"): "the ratio over turns and rows",
    ("grpo_llm", "policy_loss"): "the same",
}


@pytest.mark.parametrize("pair", list(combinations(PLAY, 2)), ids="-".join)
def test_functions_of_one_name_are_equal(pair):
    """The loss stays where its reader is, so it stands in every learner: a change in one is made in all."""
    one, two = map(functions, pair)
    for name in one.keys() & two.keys() - OWN:
        if not any((script, name) in LONGER for script in pair):
            assert one[name] == two[name], name


def test_grpos_gradient_is_that_of_the_others_but_for_its_ratio(small_model, made_up_rows, as_run):
    model, found = small_model("qwen2"), []
    for script in (grpo_llm, rloo_llm):
        args = script.Args(kl_coef=0.1, importance_cap=1.1, microbatch_tokens=100)
        logs = script.backward(made_up_rows(), args, as_run(args, model))
        found.append((logs, torch.cat([p.grad.flatten() for p in model.parameters()])))
        model.zero_grad()
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])
