"""Branches: episodes that begin with a copy of a running one, from the environment's state at that point."""

import gymnasium as gym
import numpy as np
import pytest
import torch

from agent_r1 import ToolEnv
from agent_r1.vector_mix import mixed_spec
from agent_r1_tools import ToolFault
from llm_utils.sampling.rollout import Sampler, rollout
from llm_utils.sampling.transformers_engine import TransformersEngine
from llm_utils.training.forward import policy_forward
from llm_utils.trajectory import Trajectory, Turn

SIZE, ROOTS = 5, 2  # episodes of a group, and those that begin at the prompt
KWARGS = {"max_turns": 4, "max_action_tokens": 8}


def groups(first, count):
    return [(number, 3 * (number // SIZE)) for number in range(first * SIZE, (first + count) * SIZE)]


def sampler(policy, envs, vocab_size, children, roots=ROOTS):
    made = Sampler(envs, TransformersEngine(policy, envs.num_envs, vocab_size), seed=1, in_order=True)
    made.branch(SIZE, roots, children)
    return made


def sometimes(row, span, spare):
    """At most two, after some tool results."""
    return min(spare, 2) if len(row.turns) and int(span.tokens[0]) % 6 == 0 else 0


def play(made, episodes):
    made.add(episodes)
    return made.collect([number for number, _ in episodes])


def assert_same(one, two):
    for a, b in zip(one, two, strict=True):
        assert (a.episode, a.task_index, a.parent, a.copied) == (b.episode, b.task_index, b.parent, b.copied)
        for name in ("tokens", "logprobs", "rewards", "versions", "action_mask"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
        assert a.stats == b.stats and a.reward_terms == b.reward_terms and a.segment_starts == b.segment_starts


@pytest.fixture
def make_mix():
    """Two environments with one vocabulary, in one vector environment."""
    made = []

    def make(num_envs, **kwargs):
        spec = mixed_spec(["AgentR1/MultihopWorld-v0", "AgentR1/ArithmeticWorld-v0"])
        made.append(gym.make_vec(spec, num_envs=num_envs, observation="new", **kwargs))
        return made[-1]

    yield make
    for envs in made:
        envs.close()


@pytest.mark.parametrize("num_envs", [3, 16])  # with 3, branches wait for a slot
@pytest.mark.parametrize("mixed", [False, True])
def test_a_child_begins_as_its_parent_and_is_an_episode_of_its_own(
    policy, make_envs, make_mix, vocab_size, num_envs, mixed
):
    envs = (make_mix if mixed else make_envs)(num_envs, **KWARGS)
    episodes = groups(0, 6)
    if mixed:
        episodes = [(number, task + 1_000_000 * (task % 2)) for number, task in episodes]
    where = []

    def children(row, span, spare):
        assert envs.envs[span.slot].episode.length == len(row.tokens)  # the span has not been sent
        where.append((row.episode, len(row.turns)))
        return sometimes(row, span, spare)

    rows = play(sampler(policy, envs, vocab_size, children), episodes)
    assert [(row.episode, row.task_index) for row in rows] == episodes
    born = [row for row in rows if row.parent is not None]
    assert 5 < len(born) < 6 * (SIZE - ROOTS)  # and some groups had numbers left, which began at the prompt
    assert len(set(where)) == len(where)
    of = {row.episode: row for row in rows}
    for row in rows:
        parent, cut = of.get(row.parent), row.copied
        if parent:
            assert parent.episode // SIZE == row.episode // SIZE and row.record["parent"] == parent.episode
            assert row.branch_turn == sum(turn.end <= cut for turn in row.turns) > 0
            for name in ("tokens", "logprobs", "versions", "action_mask", "rewards"):
                np.testing.assert_array_equal(getattr(row, name)[:cut], getattr(parent, name)[:cut])
                assert not np.shares_memory(getattr(row, name), getattr(parent, name))
        env = next(env for env in envs.kinds if type(env).__name__ == row_class(envs, row))
        state, _ = env.reset(options={"task_index": row.task_index % 1_000_000})
        for turn in row.turns:  # play the spans again, in one environment
            assert len(state) == turn.start
            state, reward, terminated, truncated, _ = env.step(row.tokens[turn.start : turn.end])
            assert reward == turn.reward
        np.testing.assert_array_equal(state, row.tokens)
        assert (row.terminated, row.truncated) == (terminated, truncated)
        assert row.stats["turns"] == len(row.turns) == len(row.record["reward_terms"])
        assert row.stats["return"] == pytest.approx(sum(turn.reward for turn in row.turns))
        assert sum(row.reward_terms.values()) == pytest.approx(row.stats["return"])
    siblings = [row for row in born if row.copied < len(row.tokens)]
    tails = {(row.parent, row.copied, row.tokens[row.copied :].tobytes()) for row in siblings}
    assert len(tails) == len(siblings)  # each has its own random numbers
    with torch.no_grad():
        logprobs, _ = policy_forward(policy, [part for row in rows for part in row.segments()], vocab_size, 1.0)
    sampled = np.concatenate([row.logprobs[row.action_mask] for row in rows])
    np.testing.assert_allclose(sampled, logprobs.numpy(), atol=1e-4)


def row_class(envs, row):
    """The class of a row's environment."""
    env_id = row.record.get("env_id")
    return type(envs.kinds[0] if env_id is None else envs.kinds[envs.env_ids.index(env_id)]).__name__


def test_without_a_branch_the_rollout_is_as_before(policy, make_envs, vocab_size):
    episodes = groups(0, 4)
    engine = TransformersEngine(policy, 7, vocab_size)
    expected = rollout(make_envs(7, **KWARGS), engine, episodes, 1, in_order=True)
    rows = play(sampler(policy, make_envs(7, **KWARGS), vocab_size, lambda row, span, spare: 9, roots=SIZE), episodes)
    assert_same(rows, expected)
    rows = play(sampler(policy, make_envs(7, **KWARGS), vocab_size, lambda row, span, spare: 0, roots=1), episodes)
    for row, other in zip(rows, expected, strict=True):  # in other batches, so the log-probabilities are rounded
        np.testing.assert_array_equal(row.tokens, other.tokens)


def test_a_resumed_run_branches_as_one_that_went_on(policy, make_envs, vocab_size):
    whole = sampler(policy, make_envs(6, **KWARGS), vocab_size, sometimes)
    parts = [play(whole, groups(first, 3)) for first in (0, 3)]
    assert not (whole.spare or whole.open or whole.branches or whole.queue or whole.done)
    resumed = sampler(policy, make_envs(6, **KWARGS), vocab_size, sometimes)
    again = play(resumed, groups(3, 3))
    assert_same(again, parts[1])
    assert any(row.parent is not None for row in again)


@pytest.mark.parametrize("name", ["get_state", "set_state"])
def test_a_branch_that_cannot_begin_is_an_infrastructure_error(policy, make_envs, vocab_size, name, monkeypatch):
    def gone(env, *state):
        raise ToolFault("the sandbox is gone")

    monkeypatch.setattr(ToolEnv, name, gone)
    envs = make_envs(6, fault_deadline=0, **KWARGS)
    rows = play(sampler(policy, envs, vocab_size, lambda row, span, spare: spare if row.turns else 0), groups(0, 2))
    assert [row.episode for row in rows] == list(range(2 * SIZE))
    for row in rows:
        begun = row.episode % SIZE < ROOTS
        assert (row.fault is None) == begun == (row.parent is None)
        assert begun or ("the sandbox is gone" in row.record["fault"] and row.truncated and row.record["messages"])


def test_a_group_has_a_root():
    for roots in (0, SIZE + 1):
        with pytest.raises(ValueError, match=r"roots must be in \[1, 5\], the size of a group, got"):
            Sampler.branch(None, SIZE, roots, sometimes)


def test_a_copy_up_to_a_turn():
    """Two segments, of which the second begins after the second turn."""
    row = Trajectory(4, 9, 3, np.arange(20, dtype=np.int32))
    row.segment_starts.append(12)
    for start, end, calls in ((3, 5, 1), (8, 8, 0), (9, 12, 2), (15, 17, 1)):
        zeros = np.zeros(end - start, np.float32)
        row.add(Turn(start, end, 0.5, zeros, zeros.astype(np.int32), calls, 1, {"process/x": 0.5}))
    for turn, length, starts, calls in ((0, 3, [0], 0), (2, 9, [0], 1), (3, 15, [0, 12], 3), (4, 20, [0, 12], 4)):
        child = row.upto(turn, episode=7)
        assert (child.episode, child.task_index, child.prompt_length) == (7, 9, 3)
        assert (child.parent, child.branch_turn, child.copied) == (4, turn, length)
        assert child.tokens.tolist() == list(range(length)) and child.segment_starts == starts
        assert child.stats == {"return": turn / 2, "turns": turn, "tool_calls": calls, "tool_errors": turn}
        assert child.reward_terms.total() == turn / 2 and len(child.turns) == turn
    child.turns[0].logprobs[0] = child.tokens[0] = 5
    child.turns[0].reward = 7
    child.reward_terms["process/x"] = child.stats["return"] = 9
    assert row.tokens[0] == 0 == row.turns[0].logprobs[0] and row.turns[0].reward == 0.5 and row.stats["return"] == 2
    with pytest.raises(ValueError, match=r"turn must be in \[0, 4\], the turns of episode 4, got 5"):
        row.upto(5, episode=8)
    row.finalize()
    with pytest.raises(ValueError, match="episode 4 is over; copy it while it runs"):
        row.upto(1, episode=8)
