"""Scores of a run: by the number of the episode, and only of rows that the first optimizer step doesn't compute."""

from importlib import import_module
from types import SimpleNamespace

import grpo_llm
import numpy as np
import ppo_llm
import pytest
import torch
from learners import PLAY

from llm_utils.training import forward
from llm_utils.trajectory import make_batch


def test_rows_that_share_an_episode_number_are_not_scored(as_run, policy, made_up_rows):
    rows = made_up_rows()
    run = as_run(SimpleNamespace(microbatch_tokens=4096, temperature=1.0, max_staleness=0), policy)
    with pytest.raises(AssertionError, match="the same episode number"):
        run._score([*rows, rows[0]], policy)
    assert run._score(rows, policy).keys() == {row.episode for row in rows}


@pytest.fixture
def update(as_run, small_model, policy_folder, made_up_rows, monkeypatch):
    """update(script, iteration, **arguments): score and train as a learner does, with plain gradient steps.

    Returns the rows, the gap, the gradients of all steps, and how many rows each scoring forward had.
    """

    def run_update(script, iteration=2, **case):
        torch.manual_seed(0)
        critic = ppo_llm.Critic(policy_folder, ppo_llm.Args(), torch.float32).eval() if script == "ppo_llm" else None
        learner, model = import_module(script), small_model("qwen2")
        args = learner.Args(old_logprobs="trainer", microbatch_tokens=150, **case)
        run, rows, passes, gradients = as_run(args, model, critic), made_up_rows(), [], []
        run.state = {"iteration": iteration - 1}
        for row in rows:
            row.train_mask = row.action_mask if args.loss_mask else row.after_prompt()

        def counted(model, batch, *more):
            passes.append(len(batch))
            return forward_of_module(model, batch, *more)

        forward_of_module = forward.policy_forward
        with monkeypatch.context() as patch:
            patch.setattr(forward, "policy_forward", counted)
            run.score_policy(rows)
        more = {"train_policy": iteration > args.critic_warmup} if critic is not None else {}
        for minibatch in run.minibatches(rows, iteration):
            learner.backward(minibatch, args, run, **more)
            if not more or more["train_policy"]:
                gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
                with torch.no_grad():
                    for weight in model.parameters():
                        weight -= 1e-2 * weight.grad
            model.zero_grad()
        return rows, run.gap, gradients, passes

    return run_update


@pytest.mark.parametrize("script", PLAY)
@pytest.mark.parametrize(
    ("case", "scored"),
    [
        ({}, 9),  # of 12 rows; the first of 4 steps has 3
        ({"num_minibatches": 1}, 0),
        ({"update_epochs": 2, "num_minibatches": 3}, 8),
        ({"loss_mask": False}, 9),
        ({"kl_coef": 0.1}, 9),
    ],
)
def test_rows_of_the_first_step_are_not_scored_and_all_else_is_the_same(update, script, case, scored):
    rows, gap, gradients, passes = update(script, **case)
    assert sum(passes) == scored
    all_rows, all_gap, expected, passes = update(script, **case, reject_ratio=9.0)
    assert sum(passes) == len(rows) == 12  # what rejects rows needs their log-probabilities
    for row, other in zip(rows, all_rows, strict=True):
        assert not row.unscored and row.old_logprobs.dtype == np.float32
        np.testing.assert_allclose(row.old_logprobs, other.old_logprobs, atol=1e-5)
    assert gap == pytest.approx(all_gap, abs=1e-5) and gap["sampler/gap_mean"] > 0.1
    assert len(gradients) == len(expected) == case.get("num_minibatches", 4) * case.get("update_epochs", 1)
    for one, other in zip(gradients, expected, strict=True):
        assert (one - other).norm() < 1e-5 * other.norm()


def test_all_rows_are_scored_where_their_log_probabilities_count_before_the_update(update):
    for script, case in [("reinforce_pp_llm", {"kl_coef": 0.1, "kl_in": "reward"}), ("ppo_llm", {"iteration": 1})]:
        rows, gap, _, passes = update(script, **case)  # the first iteration of PPO trains its critic only
        assert sum(passes) == len(rows) and gap


def test_a_batch_without_new_log_probabilities_has_none_for_rows_left_unscored(as_run, small_model, made_up_rows):
    """So a learner of one's own that forgets them in `make_batch` stops, as its loss isn't finite."""
    run, rows = as_run(grpo_llm.Args(microbatch_tokens=4096), small_model("qwen2")), made_up_rows()
    run.state = {"iteration": 0}
    run.score_policy(rows)
    for minibatch in run.minibatches(rows, 1):
        segments = [segment for row in minibatch for segment in row.segments()]
        assert make_batch(segments, "cpu").old.isnan().all() and len(minibatch) == 3
        new = torch.arange(sum(int(row.train_mask.sum()) for row in minibatch)) / 100
        assert torch.equal(make_batch(segments, "cpu", new.requires_grad_()).old, new)
        break
    assert not any(np.isnan(row.old_logprobs).any() for row in rows)
