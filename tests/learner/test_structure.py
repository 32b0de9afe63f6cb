"""What stands in several learners is the same."""

import ast
from importlib import import_module
from itertools import combinations
from pathlib import Path

import pytest
import torch
from learners import PLAY

LEARNER = Path(__file__).parents[2] / "learner"


def functions(script):
    """The functions of a learner and the classes but Args, by name."""
    kinds = ast.FunctionDef | ast.ClassDef
    nodes = ast.parse((LEARNER / f"{script}.py").read_text()).body
    return {node.name: ast.unparse(node) for node in nodes if isinstance(node, kinds) and node.name != "Args"}


OWN = {"check", "compute_advantages"}  # of every algorithm
LONGER = {("ppo_llm", "backward"): "the critic, and updates of it alone"}


@pytest.mark.parametrize("pair", list(combinations(PLAY, 2)), ids="-".join)
def test_functions_of_one_name_are_equal(pair):
    """The loss stays where its reader is, so it stands in every learner: a change in one is made in all."""
    one, two = map(functions, pair)
    for name in one.keys() & two.keys() - OWN:
        if not any((script, name) in LONGER for script in pair):
            assert one[name] == two[name], name


@pytest.fixture
def gradient_of(small_model, as_run):
    """gradient_of(name, rows, case): the policy's gradient of a step of this learner, and the figures of the step."""
    model = small_model("qwen2")

    def compute(name, rows, case):
        script = import_module(name)
        args = script.Args(microbatch_tokens=100, constant_length=30, **case)
        critic = torch.nn.Embedding(len(model.get_input_embeddings().weight), 1) if name == "ppo_llm" else None
        run = as_run(args, model, critic and (lambda ids: critic(ids)[..., 0]))
        logs = script.backward(rows, args, run)
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        model.zero_grad()
        return gradient, {name: value for name, value in logs.items() if name != "value_loss"}

    return compute


@pytest.mark.parametrize(
    "case",
    [
        {"kl_coef": 0.1, "kl_estimator": "k3", "importance_cap": 1.1},
        *({"ratio": ratio, "dual_clip": 1.2} for ratio in ("turn", "sequence")),
        {"loss_aggregation": "sequence", "ent_coef": 0.1},
        {"loss_aggregation": "constant", "ratio": "turn"},
    ],
    ids=str,
)
def test_all_learners_have_the_gradient_of_grpo(gradient_of, made_up_rows, case):
    """To the bit, on rows with the same advantages. GRPO's is that of plain loops (test_grpo_llm.py)."""
    expected = gradient_of("grpo_llm", made_up_rows(), case)
    assert expected[0].any()
    for name in PLAY:
        gradient, figures = gradient_of(name, made_up_rows(), case)
        assert torch.equal(gradient, expected[0]) and figures == expected[1], name


@pytest.mark.parametrize("name", PLAY)
def test_before_the_first_step_ratio_and_dual_clip_change_nothing(gradient_of, made_up_rows, name):
    """The old log-probabilities are the new ones, so every ratio is 1: the gradient is that of REINFORCE."""

    def rows():
        found = made_up_rows()
        for row in found:
            row.unscored = True
        return found

    expected, _ = gradient_of(name, rows(), {})
    assert expected.any()
    for case in ({"ratio": "turn"}, {"ratio": "sequence", "dual_clip": 1.5}, {"dual_clip": 3.0}):
        assert torch.equal(gradient_of(name, rows(), case)[0], expected)
