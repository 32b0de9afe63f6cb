"""The loss: what is trained on, and that the gradient does not depend on how a step is cut."""

from dataclasses import replace

import numpy as np
import ppo_llm
import pytest
import torch

from llm_utils.kl import kl_divergence
from llm_utils.sampling.rollout import rollout
from llm_utils.sampling.transformers_engine import TransformersEngine
from llm_utils.training.forward import microbatches, score

ARGS = ppo_llm.Args(ent_coef=0.01, kl_coef=0.1, microbatch_tokens=4096)


@pytest.fixture
def rows(policy, make_envs, vocab_size):
    """Real episodes of different lengths, with made-up advantages."""
    engine = TransformersEngine(policy, 4, vocab_size)
    rows = rollout(make_envs(4), engine, [(i, i) for i in range(6)], seed=3)
    rng = np.random.default_rng(0)
    for i, row in enumerate(rows):
        if i % 2:  # a shorter one
            row.tokens, row.turns = row.tokens[: row.turns[0].end + 3], row.turns[:1]
            row.finalize()
        for name in ("advantages", "returns", "values", "ref_logprobs"):
            getattr(row, name)[row.action_mask] = rng.normal(size=row.action_mask.sum())
        row.old_logprobs[row.action_mask] += rng.normal(size=row.action_mask.sum()) * 0.2
    return rows


@pytest.fixture
def critic(policy_folder):
    critic = ppo_llm.Critic(str(policy_folder), ARGS, torch.float32).eval()
    torch.nn.init.normal_(critic.head.weight)
    return critic


@pytest.fixture
def backward(as_run):
    """backward(rows, args, policy, critic): the gradient of a step, in one process."""

    def run(rows, args, policy, critic, **kwargs):
        for row in rows:
            row.train_mask = row.action_mask if args.loss_mask else row.after_prompt()
            row.value_mask = ppo_llm.value_positions(row, args)
        return ppo_llm.backward(rows, args, as_run(args, policy, critic), **kwargs)

    return run


def gradients(*modules):
    grads = [p.grad.flatten() for module in modules for p in module.parameters() if p.grad is not None]
    for module in modules:
        module.zero_grad()
    return torch.cat(grads)


@pytest.mark.parametrize("advantage", ["tokens", "turns"])
def test_the_gradient_does_not_depend_on_the_microbatches(rows, policy, critic, vocab_size, advantage, backward):
    args = replace(ARGS, advantage=advantage)
    results = []
    for budget in (10**6, 1_500, 1):  # all rows at once, some, one by one
        logs = backward(rows, replace(args, microbatch_tokens=budget), policy, critic)
        results.append((gradients(policy, critic), logs))
    for gradient, logs in results[1:]:
        assert (gradient - results[0][0]).norm() / results[0][0].norm() < 1e-5
        assert logs == pytest.approx(results[0][1], abs=1e-4)


def test_microbatches_hold_every_row_once_and_keep_to_the_budget(rows):
    groups = list(microbatches(rows, 1_500))
    assert sorted(id(row) for group in groups for row in group) == sorted(map(id, rows))
    assert len(groups) > 1
    for group in groups:
        assert len(group) == 1 or len(group) * max(len(row.tokens) for row in group) <= 1_500


@pytest.mark.parametrize("sampled_only", [True, False])
def test_exactly_the_masked_tokens_are_trained_on(rows, policy, critic, vocab_size, sampled_only, backward):
    """The gradient that reaches the states before the head: none but where a trained token is predicted."""
    seen = []

    def watch(module, inputs):
        inputs[0].retain_grad()
        seen.append(inputs[0])

    handle = policy.get_output_embeddings().register_forward_pre_hook(watch)
    backward(rows, replace(ARGS, microbatch_tokens=10**6, loss_mask=sampled_only), policy, critic)
    handle.remove()
    ordered = [row for group in microbatches(rows, 10**6) for row in group]
    (states,) = seen
    touched = states.grad.abs().sum(-1) > 0
    for row, got in zip(ordered, touched.numpy(), strict=True):
        mask = row.action_mask if sampled_only else np.arange(len(row.tokens)) >= row.prompt_length
        np.testing.assert_array_equal(got[: len(mask) - 1], mask[1:])  # position t-1 predicts token t
        assert not got[len(mask) - 1 :].any()


def test_embedding_rows_beyond_the_tokenizer_get_no_gradient(rows, policy, critic, vocab_size, backward):
    weights = policy.get_output_embeddings().weight
    assert weights.shape[0] > vocab_size
    backward(rows, ARGS, policy, critic)
    assert not weights.grad[vocab_size:].any()
    assert weights.grad[:vocab_size].any()


@pytest.mark.parametrize("advantage", ["tokens", "turns"])
def test_the_critic_learns_states_before_sampled_tokens(rows, policy, critic, vocab_size, advantage, backward):
    args = replace(ARGS, advantage=advantage)
    expected = torch.zeros(())
    count = 0
    for row in rows:
        values = critic(torch.from_numpy(row.tokens[None]).long())[0]
        tokens = [t for t in np.flatnonzero(row.action_mask) if advantage == "tokens" or not row.action_mask[t - 1]]
        for t in tokens:
            old, target = float(row.values[t]), float(row.returns[t])
            new = values[t - 1]
            clipped = old + (new - old).clamp(-args.clip_coef_value, args.clip_coef_value)
            expected = expected + torch.maximum((new - target) ** 2, (clipped - target) ** 2) / 2
            count += 1
    logs = backward(rows, args, policy, critic, train_policy=False)
    assert logs == {"value_loss": pytest.approx((expected / count).item(), rel=1e-4)}
    assert all(p.grad is None for p in policy.parameters())  # critic warm-up


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"ent_coef": 0.1, "temperature": 0.8},
        {"loss_mask": False, "importance_cap": 1.05},
        {"kl_coef": 0.3, "kl_estimator": "k2", "importance_cap": 0.9},
        {"kl_coef": 0.3, "kl_in": "reward"},  # already in the advantages
    ],
    ids=str,
)
def test_the_policys_loss_is_that_of_plain_loops(policy, critic, made_up_rows, vocab_size, case, backward):
    """Mean over tokens of clipped objective times truncated importance weight, entropy and KL divergence."""
    args = ppo_llm.Args(microbatch_tokens=100, **case)
    rows = made_up_rows(groups=2, size=3)
    for row in rows:
        row.train_mask = row.after_prompt()
        scored = score([(row.segments(), 1)], policy, vocab_size, args.temperature)
        row.logprobs[row.train_mask] = scored[row.episode][row.train_mask]
    rng, losses = np.random.default_rng(0), []
    for row in rows:
        for name in ("old_logprobs", "ref_logprobs"):
            setattr(row, name, row.logprobs + rng.normal(0, 0.2, size=len(row.tokens)).astype(np.float32))
        row.logprobs[~row.action_mask] = 0  # the sampler has none there
        ids = torch.from_numpy(row.tokens).long()
        logits = policy(input_ids=ids[None]).logits[0, :, :vocab_size].float() / args.temperature
        for t in range(row.prompt_length, len(ids)):
            if args.loss_mask and not row.action_mask[t]:
                continue
            everything = torch.log_softmax(logits[t - 1], -1)
            new, old, advantage = everything[ids[t]], float(row.old_logprobs[t]), float(row.advantages[t])
            ratio = torch.exp(new - old)
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            if row.action_mask[t]:
                loss = loss * min(np.exp(old - row.logprobs[t]), args.importance_cap)
            loss = loss + args.ent_coef * (everything.exp() * everything).sum()
            if args.kl_in == "loss":
                loss = loss + args.kl_coef * (new - float(row.ref_logprobs[t])) ** 2 / 2
            losses.append(loss)
    (sum(losses) / len(losses)).backward()
    expected = gradients(policy)
    backward(rows, args, policy, critic)
    got = gradients(policy)
    assert (got - expected).norm() / expected.norm() < 1e-5


def test_the_clipped_objective():
    old, advantages = torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, -1.0])
    new = torch.log(torch.tensor([2.0, 0.5, 2.0, 0.5])).requires_grad_()
    loss, logs = ppo_llm.policy_loss(new, old, advantages, 0.2, 0.28)
    torch.testing.assert_close(loss.detach(), torch.tensor([-1.28, -0.5, 2.0, 0.8]))
    assert logs["clipfrac"].tolist() == [1, 1, 1, 1]
    loss.sum().backward()
    assert (new.grad != 0).tolist() == [False, True, True, False]
    far = ppo_llm.policy_loss(torch.tensor([200.0]), torch.tensor([0.0]), torch.tensor([-1.0]), 0.2, 0.28)[0]
    assert torch.isfinite(far).all()


def test_the_kl_estimators():
    x = torch.tensor([0.5, -0.3, 0.0], requires_grad=True)
    for name, values, slopes in (
        ("k1", x, torch.ones(3)),
        ("k2", x**2 / 2, x),
        ("k3", torch.exp(-x) - 1 + x, 1 - torch.exp(-x)),
    ):
        got = kl_divergence(x, name)
        torch.testing.assert_close(got, values)
        torch.testing.assert_close(torch.autograd.grad(got.sum(), x)[0], slopes.detach())
    assert torch.isfinite(kl_divergence(torch.tensor([-500.0, 500.0]), "k3")).all()


def test_a_loss_that_is_not_finite_raises_and_names_the_rows(rows, policy, critic, vocab_size, backward):
    rows[1].advantages[rows[1].action_mask] = np.nan
    with pytest.raises(FloatingPointError, match="loss is nan") as error:
        backward(rows, replace(ARGS, microbatch_tokens=1), policy, critic)
    assert error.value.args[1] == [rows[1]]
