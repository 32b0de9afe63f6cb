"""Tokens that a span begins with: part of the state and of the action, but neither sampled nor trained."""

import numpy as np
import pytest
import torch

from llm_utils.sampling.rollout import Sampler, rollout
from llm_utils.sampling.transformers_engine import TransformersEngine
from llm_utils.training.forward import policy_forward, score
from llm_utils.trajectory import Trajectory, Turn

EPISODES = [(number, 3 * (number // 4)) for number in range(12)]


@pytest.fixture
def play(policy, make_envs, vocab_size):
    """play(force, **kwargs): the rows of some episodes, a vector environment, and the sampler."""

    def run(force, branch=None, **kwargs):
        envs = make_envs(4, **{"max_turns": 4, "max_action_tokens": 14, **kwargs})
        sampler = Sampler(envs, TransformersEngine(policy, 4, vocab_size), seed=1, in_order=True)
        sampler.force = force(envs.envs[0])
        if branch:
            sampler.branch(4, 2, branch)
        sampler.add(EPISODES)
        return sampler.collect([number for number, _ in EPISODES]), envs

    return run


def hints(env):
    """Another text in every turn; none in the third."""
    texts = [env.tokenizer.encode(text) for text in ("Plan: ", "ok ", "", "x")]
    return lambda row: texts[len(row.turns)]


@pytest.mark.parametrize("branch", [None, lambda row, span, spare: min(spare, len(row.turns))])
def test_forced_tokens_are_in_state_and_action_but_not_in_the_mask(policy, play, vocab_size, branch):
    rows, envs = play(hints, branch)
    force = hints(envs.envs[0])
    assert branch is None or sum(row.parent is not None for row in rows) == 6
    for row in rows:
        state, _ = envs.envs[0].reset(options={"task_index": row.task_index})
        row_mask, so_far = np.zeros(len(row.tokens), bool), Trajectory(0, 0, 0, state)
        for turn in row.turns:
            given = force(so_far)
            assert turn.forced == len(given) and row.tokens[turn.start - turn.forced : turn.start].tolist() == given
            assert len(state) == turn.start - turn.forced  # the environment takes both as one action
            state, reward, *_ = envs.envs[0].step(row.tokens[len(state) : turn.end])
            assert reward == turn.reward and turn.end - turn.start + turn.forced <= 14
            row_mask[turn.start : turn.end] = True
            so_far.turns.append(turn)
        np.testing.assert_array_equal(state, row.tokens)
        np.testing.assert_array_equal(row.action_mask, row_mask)
        assert not row.logprobs[~row_mask].any() and not row.rewards[~row_mask].any()
        assert row.record["messages"][2]["content"].startswith("Plan: ")
        other = row.after_prompt()  # --no-loss-mask
        assert all(not other[turn.start - turn.forced : turn.start].any() for turn in row.turns)
    with torch.no_grad():
        logprobs, _ = policy_forward(policy, [part for row in rows for part in row.segments()], vocab_size, 1.0)
    np.testing.assert_allclose(np.concatenate([row.logprobs[row.action_mask] for row in rows]), logprobs, atol=1e-4)
    scored = score([([part for row in rows for part in row.segments()], 1)], policy, vocab_size, 1.0)
    assert all(not scored[row.episode][~row.action_mask].any() for row in rows)


def test_without_forced_tokens_the_rollout_is_as_before(policy, play, make_envs, vocab_size):
    rows, _ = play(lambda env: lambda row: [])
    envs = make_envs(4, max_turns=4, max_action_tokens=14)
    expected = rollout(envs, TransformersEngine(policy, 4, vocab_size), EPISODES, 1, in_order=True)
    for row, other in zip(rows, expected, strict=True):
        np.testing.assert_array_equal(row.tokens, other.tokens)
        np.testing.assert_array_equal(row.logprobs, other.logprobs)


def test_at_least_one_token_is_sampled(play):
    rows, _ = play(lambda env: lambda row: env.tokenizer.encode("longer than a whole action"))
    assert {(turn.forced, turn.end - turn.start) for row in rows for turn in row.turns} == {(13, 1)}


def test_a_forced_end_of_turn_is_refused(play):
    with pytest.raises(ValueError, match=r"forced token \d+ ends the turn, so nothing would be sampled; leave it out"):
        play(lambda env: lambda row: env.dialect.stop_token_ids[:1])


def test_a_copy_up_to_a_turn_ends_before_its_forced_tokens():
    row = Trajectory(4, 9, 3, np.arange(12, dtype=np.int32))
    zeros = np.zeros(2, np.float32)
    for start in (4, 9):
        row.add(Turn(start, start + 2, 0.0, zeros, zeros.astype(np.int32), forced=1))
    assert [row.upto(turn, 5).copied for turn in (0, 1, 2)] == [3, 8, 12]
