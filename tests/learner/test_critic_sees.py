"""--critic-sees answer of learner/ppo_llm.py: values change and stay at their positions; the policy reads no answer."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import ppo_llm
import pytest
import torch

from agent_r1.episode import Task
from llm_utils.training.forward import score
from llm_utils.value_model import (
    ANSWER_TOKENS,
    Critic,
    check_answers,
    load_critic,
    save_critic,
    score_values,
    show_answers,
    values_of,
)

ARGS = ppo_llm.Args(critic_sees="answer", microbatch_tokens=100)


@pytest.fixture
def critic(policy_folder):
    critic = Critic(str(policy_folder), ARGS, torch.float32).eval()
    torch.nn.init.normal_(critic.head.weight)
    return critic


@pytest.fixture
def run(as_run, policy, critic, make_envs):
    run = as_run(ARGS, policy, critic)
    run.envs = make_envs(1)
    return run


def with_answers(rows, *answers):
    for i, row in enumerate(rows):
        row.answers = [answers[i % len(answers)]]
    return rows


def test_values_are_those_of_the_states_behind_the_answer(run, made_up_rows):
    """Also in a batch of prefixes of different lengths, and for the last state of a truncated episode."""
    rows = with_answers(made_up_rows(groups=2, size=2), "7", "a long answer")
    show_answers(rows, run)
    assert len({len(row.critic_prefix) for row in rows}) == 2
    score_values(rows, run)
    for row in rows:
        prefix = row.critic_prefix
        with torch.no_grad():
            alone = run.critic(torch.from_numpy(np.concatenate([prefix, row.tokens])).long()[None])[0].numpy()
        np.testing.assert_allclose(row.values[1:], alone[len(prefix) : -1], atol=1e-4)
        assert row.value_last == pytest.approx(alone[-1], abs=1e-4)
    together = values_of(run.critic, [row.segments()[0] for row in rows], run.device)
    assert together.shape == (len(rows), max(len(row.tokens) for row in rows))


def test_the_critic_changes_and_the_policy_does_not(run, made_up_rows, vocab_size):
    found = []
    for answer in (None, "Paris"):
        rows = made_up_rows()
        if answer:
            show_answers(with_answers(rows, answer), run)
        score_values(rows, run)
        logprobs = score([([s for row in rows for s in row.segments()], 1)], run.policy, vocab_size, 1.0)
        ppo_llm.backward(rows, ARGS, run)
        gradients = []
        for model in (run.policy, run.critic):
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
            model.zero_grad()
        values = np.concatenate([row.values for row in rows])
        found.append((np.concatenate(list(logprobs.values())), *gradients, values))
    (logprobs, of_policy, of_critic, values), other = found
    assert np.array_equal(logprobs, other[0]) and torch.equal(of_policy, other[1]) and of_policy.any()
    assert not torch.allclose(of_critic, other[2]) and not np.allclose(values, other[3])


def test_an_answer_is_text_of_bounded_length(run, made_up_rows):
    codec = run.envs.kinds[0].dialect.codec
    control = next(iter(codec.controls))
    rows = with_answers(made_up_rows(groups=1, size=2), f"{control} x", "word " * 200)
    show_answers(rows, run)
    assert not codec.controls_in(rows[0].critic_prefix.tolist()) and len(rows[0].critic_prefix) > 5
    assert len(rows[1].critic_prefix) == ANSWER_TOKENS
    run.policy.config.max_position_embeddings = len(rows[1].tokens) + 3
    show_answers(rows[1:], run)
    assert len(rows[1].critic_prefix) == 3


def test_tasks_without_a_gold_answer_are_refused(run, made_up_rows):
    class Silent:
        def make_task(self, index):
            return Task("t", "q", [])

    class Elsewhere:
        def make_task(self, index):
            raise NotImplementedError

    check_answers(run.envs)
    for env in (Silent(), Elsewhere()):
        with pytest.raises(SystemExit, match=f"--critic-sees answer: the tasks of {type(env).__name__} have no gold"):
            check_answers(SimpleNamespace(kinds=[*run.envs.kinds, env]))
    with pytest.raises(SystemExit, match="--critic-sees answer: task None has no gold answer"):
        show_answers(made_up_rows(), run)


def test_others_refuse_a_critic_that_needs_the_answer(critic, policy, vocab_size, tmp_path):
    for sees in ("answer", "state"):
        args = replace(ARGS, critic_sees=sees)
        save_critic(critic, policy, tmp_path, args, None, vocab_size)
        if sees == "answer":
            with pytest.raises(SystemExit, match="needs the gold answer"):
                load_critic(tmp_path)
    assert load_critic(tmp_path)[1].sees == "state"


def test_runs_differ_in_their_values_only(learn, policy_folder):
    flags = ["--model", policy_folder, "--tokenizer", "byte", "--num-envs", 4, "--episodes-per-iteration", 8]
    flags += ["--env-kwargs", json.dumps({"max_turns": 2, "max_action_tokens": 8}), "--num-threads", 1]
    flags += ["--eval-episodes", 0, "--num-minibatches", 2, "--critic-warmup", 1, "--total-episodes", 16]
    rows = []
    for sees in ("state", "answer"):
        folder = learn("ppo_llm", *flags, "--critic-sees", sees, "--exp-name", sees, "--critic-learning-rate", 0.01)
        rows.append([json.loads(line) for line in (folder / "trajectories.jsonl").read_text().splitlines()])
    assert json.loads((folder / "critic" / "critic.json").read_text())["sees"] == "answer"
    for one, other in zip(*rows, strict=True):  # the policy of both iterations is the first one
        assert one["tokens"] == other["tokens"] and one["logprobs"] == other["logprobs"]
    assert [row["values"] for row in rows[0]] != [row["values"] for row in rows[1]]
