"""learner/grpo_llm.py: advantages within groups, its losses against plain loops, and runs of the script."""

import ast
import itertools
import json
import math
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import grpo_llm
import numpy as np
import ppo_llm
import pytest
import reinforce_pp_llm
import rloo_llm
import torch
from safetensors import torch as safetensors

from llm_utils.forward import policy_forward, score
from llm_utils.loading import load_policy
from llm_utils.returns import other_groups_deviation
from llm_utils.sources import model_source
from llm_utils.trajectory import groups_with_signal, segment_numbers

LEARNER = Path(__file__).parents[2] / "learner"
SMALL = ["--env-kwargs", json.dumps({"max_turns": 2, "max_action_tokens": 10}), "--num-threads", 1, "--num-envs", 16]
SMALL += ["--episodes-per-iteration", 16, "--num-minibatches", 2, "--eval-episodes", 0]
SMALL += ["--temperature", 2.0]  # so that the episodes of a group differ
GROUPS = [*SMALL, "--group-size", 4]


# ------------------------------------------------------------------------------------------------------- advantages


def group(*rewards, **kwargs):
    return [row.tolist() for row in grpo_llm.group_advantages([np.array(r, float) for r in rewards], **kwargs)]


def test_golden_vectors_of_group_advantages():
    outcomes = [[1], [0], [0], [0]]
    assert sum(group(*outcomes), []) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert sum(group(*outcomes, scale=False), []) == pytest.approx([0.75, -0.25, -0.25, -0.25])  # Dr. GRPO
    assert group([1], [1], [1]) == [[0], [0], [0]]


def test_golden_vectors_of_turn_credit():
    # rewards to go: [3 2 2], [1 0 .], [-1 . .]; means over all three episodes: 1, 2/3, 2/3
    episodes = [1, 0, 2], [1, 0], [-1]
    assert group(*episodes, scale=False, credit="episode") == [[2, 2, 2], [0, 0], [-2]]
    expected = [[2, 4 / 3, 4 / 3], [0, -2 / 3], [-2]]
    for got, values in zip(group(*episodes, scale=False, credit="turn"), expected, strict=True):
        assert got == pytest.approx(values)
    # the deviations of the others' returns, (1, -1), (3, -1), (3, 1), and three halves of the advantages: no own share
    for got, values, spread in zip(group(*episodes, credit="turn"), expected, np.sqrt([2, 8, 2]), strict=True):
        assert got == pytest.approx([1.5 * value / spread for value in values])
    spread = np.std([3, 1, -1], ddof=1)  # as published, of the whole group
    for got, values in zip(group(*episodes, credit="turn", scale_by="group"), expected, strict=True):
        assert got == pytest.approx([value / spread for value in values], abs=1e-5)
    # gamma 1/2: to go [1.5 1 2], [1 0 .], [-1 . .]; means 0.5, 1/3, 2/3
    halved = group(*episodes, scale=False, credit="turn", gamma=0.5)
    for got, values in zip(halved, [[1, 2 / 3, 4 / 3], [0.5, -1 / 3], [-1.5]], strict=True):
        assert got == pytest.approx(values)


def test_equal_returns_earned_at_different_times_give_no_huge_advantages():
    assert sum(group([1, 0], [0, 1], credit="turn"), []) == pytest.approx([0, -2**0.5, 0, 2**0.5], abs=1e-5)
    lone = sum(group([1], *[[0]] * 15, credit="turn"), [])  # the others are all equal: their deviation says nothing
    assert lone[0] == pytest.approx(4) and max(np.abs(lone[1:])) < 0.3
    assert group([1, 0], [0, 1], credit="episode") == [[0, 0], [0, 0]]


def test_a_group_may_have_episodes_in_which_nothing_was_sampled():
    assert group([2.0, 0.0], [], scale=False, credit="turn") == [[1.0, 0.0], []]
    assert group([], []) == [[], []]


# A process of at most three turns in which the policy decides when to stop. In turns 0 and 1 action 0 stops and action
# 1 goes on; in turn 2 both end the episode. Rewards are paid on the way and at the end.
ACTIONS = [(0,), (1, 0), (1, 1, 0), (1, 1, 1)]
REWARDS = [(0.3,), (0.5, -1.0), (0.5, 0.25, 2.0), (0.5, 0.25, -0.7)]
CHANCE_OF_1 = [0.7, 0.4, 0.2]


def slopes(actions):
    """Gradients of the log-probabilities of the turns' actions with respect to the three logits."""
    out = np.zeros((len(actions), 3))
    for turn, action in enumerate(actions):
        out[turn, turn] = action - CHANCE_OF_1[turn]
    return out


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("credit", ["turn", "episode"])
def test_credit_is_unbiased_when_the_policy_decides_when_to_stop(credit, size):
    """Summed over every possible group: the expected gradient is (G - 1) / G times the true one."""
    chances = [math.prod(p if a else 1 - p for a, p in zip(acts, CHANCE_OF_1, strict=False)) for acts in ACTIONS]
    assert sum(chances) == pytest.approx(1)
    true = sum(p * sum(r) * slopes(acts).sum(0) for p, r, acts in zip(chances, REWARDS, ACTIONS, strict=True))
    expected = np.zeros(3)
    for drawn in itertools.product(range(4), repeat=size):
        rewards = [np.array(REWARDS[i]) for i in drawn]
        advantages = grpo_llm.group_advantages(rewards, credit, scale=False)
        gradient = sum(a @ slopes(ACTIONS[i]) for a, i in zip(advantages, drawn, strict=True)) / size
        expected += math.prod(chances[i] for i in drawn) * gradient
    np.testing.assert_allclose(expected, (size - 1) / size * true, atol=1e-12)
    assert np.abs(true).min() > 0.01


def test_advantages_stand_on_the_tokens_of_their_turns(make_row):
    def pair():
        return [make_row([(2, 4, 1.0), (6, 8, 2.0)], 9), make_row([(2, 3, 0.0)], 5, episode=1)]

    args = grpo_llm.Args(group_size=2, scale_rewards=False)
    rows = pair()
    grpo_llm.compute_advantages(rows, args)
    assert rows[0].advantages.tolist() == [0, 0, 1.5, 1.5, 0, 0, 1, 1, 0]
    assert rows[1].advantages.tolist() == [0, 0, -1.5, 0, 0]
    rows = pair()
    grpo_llm.compute_advantages(rows, replace(args, credit="episode"))
    assert rows[0].advantages.tolist() == [0, 0, 1.5, 1.5, 0, 0, 1.5, 1.5, 0]
    rows = pair()
    grpo_llm.compute_advantages(rows, replace(args, advantage_mask=False))  # also on what a turn was answered
    assert rows[0].advantages.tolist() == [0, 0, 1.5, 1.5, 1.5, 1.5, 1, 1, 1]
    assert rows[1].advantages.tolist() == [0, 0, -1.5, -1.5, -1.5]


def test_groups_are_told_apart_by_the_number_of_the_episode(make_row):
    rows = [make_row([(1, 2, reward)], 2, episode=i) for i, reward in enumerate((1, 0, 5, 5, 7, 9))]
    grpo_llm.compute_advantages(rows, grpo_llm.Args(group_size=2, scale_rewards=False))
    assert [row.advantages[1] for row in rows] == [0.5, -0.5, 0, 0, -1, 1]
    assert groups_with_signal(rows, 2, "turn", 1.0) == [*rows[:2], *rows[4:]]
    late, early = make_row([(1, 2, 0.0), (2, 3, 1.0)], 3), make_row([(1, 2, 1.0), (2, 3, 0.0)], 3)
    assert groups_with_signal([late, early], 2, "turn", 1.0) == [late, early]
    assert groups_with_signal([late, early], 2, "episode", 1.0) == []


@pytest.mark.parametrize("script", [grpo_llm, rloo_llm])
@pytest.mark.parametrize("credit", ["turn", "episode"])
@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_groups_with_signal_are_those_that_have_advantages(make_row, script, credit, gamma):
    """Discounted as the advantages are: the same reward a turn later is less."""
    rewards = [(0, 1), (1, 0)], [(1, 1), (1, 1)], [(0, 1), (1, -1)], [(0,), (0, 0)], [(0.5,), (0, 1)]
    rows = [
        make_row([(1 + 2 * k, 2 + 2 * k, reward) for k, reward in enumerate(turns)], 6, episode=i)
        for i, turns in enumerate(itertools.chain(*rewards))
    ]
    script.compute_advantages(rows, script.Args(group_size=2, credit=credit, gamma=gamma))
    pairs = [rows[i : i + 2] for i in range(0, len(rows), 2)]
    trained = [row for pair in pairs if any(row.advantages.any() for row in pair) for row in pair]
    assert groups_with_signal(rows, 2, credit, gamma) == trained


@pytest.mark.parametrize("size", [2, 8])
def test_a_kl_divergence_in_the_reward_is_compared_as_rewards_are(make_row, size):
    """With the mean of the others it is all of it, as RLOO's; with the mean of the group it is (G - 1) / G of that."""

    def of_kl(script, **kwargs):
        rows = [make_row([(1, 2, 0.0)], 2, episode=i) for i in range(size)]
        rows[0].old_logprobs[1] = 1.0
        script.compute_advantages(rows, script.Args(group_size=size, kl_in="reward", kl_coef=0.1, **kwargs))
        return rows[0].advantages[1]

    assert of_kl(rloo_llm) == pytest.approx(-0.1)
    for kwargs in ({}, {"scale_by": "others"}, {"scale_by": "others", "credit": "episode"}):
        assert of_kl(grpo_llm, **kwargs) == pytest.approx(-0.1)
    for kwargs in ({"scale_rewards": False}, {"scale_by": "group"}, {"credit": "episode"}):
        assert of_kl(grpo_llm, **kwargs) == pytest.approx(-0.1 * (size - 1) / size)


@pytest.mark.parametrize("script", [grpo_llm, rloo_llm])
def test_dropped_episodes_leave_smaller_groups(make_row, script):
    """Without the second, which a fault ended, the other episodes are compared; one that is left alone gets nothing."""
    rewards = {0: 1.0, 2: 0.0, 3: 0.0, 6: 1.0}  # of the first group of four, and of the second
    rows = [make_row([(1, 2, reward)], 2, episode=i) for i, reward in rewards.items()]
    script.compute_advantages(rows, script.Args(group_size=4))
    of_three = group([1], [0], [0], credit="turn") if script is grpo_llm else [[1.0], [-0.5], [-0.5]]
    assert [row.advantages[1] for row in rows] == pytest.approx([*sum(of_three, []), 0.0])


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


def test_the_noise_of_a_kl_divergence_is_not_scaled_up_in_a_solved_group(make_row):
    """All episodes of the group succeed: what is left is the KL divergence, as small as it is."""
    for script in (grpo_llm, rloo_llm, reinforce_pp_llm, ppo_llm):
        rng, rows = np.random.default_rng(0), []
        for episode in range(8):
            row = make_row([(1, 3, 0.0), (4, 6, 1.0)], 6, episode=episode)
            row.old_logprobs[row.action_mask] = rng.normal(size=4) * 0.1
            rows.append(row)
        script.compute_advantages(rows, script.Args(kl_coef=0.01, kl_in="reward"))
        largest = max(np.abs(row.advantages).max() for row in rows)
        if script is ppo_llm:  # its critic knows nothing yet: 1 is subtracted as the others' mean
            assert all(np.ptp(row.advantages[row.action_mask]) < 0.02 for row in rows)
        assert 0 < largest < 0.02, script


# ------------------------------------------------------------------------------------------------------------- loss


def slow_loss(model, rows, args, vocab_size):
    """The loss, one row and one token after the other."""
    row_losses, row_lengths = [], []
    for row in rows:
        ids = torch.from_numpy(row.tokens).long()
        logits = model(input_ids=ids[None]).logits[0, :, :vocab_size].float() / args.temperature
        new = torch.log_softmax(logits, -1)[:-1].gather(1, ids[1:, None])[:, 0]
        tokens = [t for t in range(row.prompt_length, len(ids)) if row.action_mask[t] or not args.loss_mask]
        segments = {}
        for t in tokens:
            turn = max([0] + [k for k, other in enumerate(row.turns) if t >= other.start])
            segments.setdefault({"token": t, "turn": turn, "sequence": 0}[args.ratio], []).append(t)
        losses = []
        for segment in segments.values():
            mean = sum(new[t - 1].item() - float(row.old_logprobs[t]) for t in segment) / len(segment)
            for t in segment:
                ratio = math.exp(mean) * torch.exp(new[t - 1] - new[t - 1].detach())
                clipped = torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef_high)
                advantage = float(row.advantages[t])
                loss = -torch.minimum(ratio * advantage, clipped * advantage)
                if row.action_mask[t]:
                    loss = loss * min(math.exp(row.old_logprobs[t] - row.logprobs[t]), args.importance_cap)
                if args.kl_coef and args.kl_in == "loss":
                    x = new[t - 1] - float(row.ref_logprobs[t])
                    kl = {"k1": x, "k2": x**2 / 2, "k3": torch.exp(-x) - 1 + x}[args.kl_estimator]
                    loss = loss + args.kl_coef * kl
                losses.append(loss)
        row_losses.append(sum(losses, torch.zeros(())))
        row_lengths.append(len(losses))
    if args.loss_aggregation == "token":
        return sum(row_losses) / sum(row_lengths)
    if args.loss_aggregation == "sequence":
        return sum(loss / n for loss, n in zip(row_losses, row_lengths, strict=True)) / len(rows)
    return sum(row_losses) / len(rows) / args.constant_length


def gradient_of(model):
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return flat


CASES = [
    *({"ratio": r, "loss_aggregation": a} for r in ("token", "turn", "sequence") for a in ("sequence", "constant")),
    *({"ratio": r} for r in ("token", "turn", "sequence")),
    {"loss_mask": False, "ratio": "turn"},
    {"loss_mask": False, "importance_cap": 1.05},
    {"kl_coef": 0.3, "kl_estimator": "k1"},
    {"kl_coef": 0.3, "kl_estimator": "k2", "loss_aggregation": "sequence"},
    {"kl_coef": 0.3, "kl_estimator": "k3", "temperature": 0.8},
    {"kl_coef": 0.3, "kl_in": "reward"},  # already in the advantages
    {"clip_coef": 0.05, "clip_coef_high": 0.3, "importance_cap": 0.9},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: ",".join(f"{k}={v}" for k, v in case.items()))
def test_the_loss_and_its_gradient_are_those_of_plain_loops(small_model, made_up_rows, vocab_size, as_run, case):
    """However the step is cut into microbatches."""
    model, rows = small_model("qwen2"), made_up_rows(groups=3, size=3)
    with torch.no_grad():  # ratios near 1, some of them clipped
        for row in rows:
            row.train_mask = row.after_prompt()
            score([(row.segments(), 1)], "logprobs", model, vocab_size, case.get("temperature", 1.0))
    rng = np.random.default_rng(0)
    for row in rows:
        for name in ("old_logprobs", "ref_logprobs"):
            setattr(row, name, row.logprobs + rng.normal(0, 0.2, size=len(row.tokens)).astype(np.float32))
        row.logprobs[~row.action_mask] = 0  # the sampler has none there
        row.train_mask = row.action_mask if case.get("loss_mask", True) else row.after_prompt()
    args = grpo_llm.Args(constant_length=30, group_size=3, **case)
    loss = slow_loss(model, rows, args, vocab_size)
    loss.backward()
    expected = gradient_of(model)
    for budget in (10**6, 120, 1):
        cut = replace(args, microbatch_tokens=budget)
        logs = grpo_llm.backward(rows, cut, as_run(cut, model))
        got = gradient_of(model)
        assert (got - expected).norm() / expected.norm() < 1e-5
        if case.get("kl_in", "loss") == "loss" and not case.get("kl_coef"):
            assert logs["policy_loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)


def test_segments_are_numbered_over_all_rows(make_row):
    rows = [make_row([(2, 4, 0), (6, 7, 0)], 9), make_row([(1, 3, 0)], 4), make_row([(2, 3, 0), (3, 5, 0)], 5)]
    segments = [segment for row in rows for segment in row.segments()]
    assert segment_numbers(segments, by_turn=True).tolist() == [0, 0, 1, 2, 2, 3, 4, 4]
    assert segment_numbers(segments, by_turn=False).tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    rows[1].train_mask = np.zeros(4, bool)
    assert segment_numbers(segments, by_turn=True).tolist() == [0, 0, 1, 2, 3, 3]


def test_tokens_of_a_segment_keep_their_own_advantages():
    """Credit by turn survives a ratio over the whole episode (GSPO-token, equation 14)."""
    new = torch.zeros(4, requires_grad=True)
    loss, _ = grpo_llm.policy_loss(
        new, torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, -1.0]), 0.2, 0.2, torch.zeros(4, dtype=torch.int64)
    )
    loss.sum().backward()
    assert new.grad.tolist() == [-1, -1, 1, 1]


def test_a_ratio_over_a_segment_is_a_geometric_mean():
    """With the gradient of GSPO (equation 7), where the segment has one advantage."""
    new = torch.tensor([0.1, 0.3, -0.4, 0.2], requires_grad=True)
    segments = torch.tensor([0, 0, 1, 1])
    advantages = torch.tensor([1.0, 1.0, -2.0, -2.0])
    loss, figures = grpo_llm.policy_loss(new, torch.zeros(4), advantages, 0.5, 0.5, segments)
    ratios = np.exp([0.2, 0.2, -0.1, -0.1])
    np.testing.assert_allclose(loss.detach(), [-ratios[0], -ratios[1], 2 * ratios[2], 2 * ratios[3]], rtol=1e-6)
    assert figures["clipfrac"].sum() == 0
    loss.sum().backward()
    np.testing.assert_allclose(new.grad, [-ratios[0], -ratios[1], 2 * ratios[2], 2 * ratios[3]], rtol=1e-6)


def test_a_loss_that_is_not_finite_raises_and_names_the_rows(small_model, made_up_rows, as_run):
    rows = made_up_rows()
    rows[3].advantages[:] = np.nan
    with pytest.raises(FloatingPointError, match="loss is nan") as error:
        args = grpo_llm.Args(microbatch_tokens=1)
        grpo_llm.backward(rows, args, as_run(args, small_model("qwen2")))
    assert error.value.args[1] == [rows[3]]


# ---------------------------------------------------------------------------------------------------------- scripts


def jsonl(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def scalars(run_dir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir)).Reload()
    return {name: [event.value for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def events_step(run_dir):
    """The number of turns that the axes of the log have counted."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(run_dir)).Reload().Scalars("charts/SPS")[-1].step


def test_a_run_leaves_what_is_promised(learn, monkeypatch):
    from llm_utils.logger import Logger

    monkeypatch.setattr(Logger, "TRAJECTORIES", 16)
    flags = ["--total-episodes", 32, "--save-model", "--eval-episodes", 4]
    run_dir = learn("grpo_llm", *GROUPS, *flags)
    assert run_dir.name.startswith("AgentR1_MultihopWorld-v0__grpo_llm__1__")
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["finished"] and {"eval/success_first", "eval/exact_match_last"} <= summary.keys()
    rows = jsonl(run_dir / "trajectories.jsonl")
    assert [row["iteration"] for row in rows] == [1] * 16 + [2] * 16
    assert [row["episode"] for row in rows] == list(range(32))
    for row in rows:
        lengths = {len(row[k]) for k in ("tokens", "action_mask", "rewards", "versions", "logprobs", "advantages")}
        assert lengths == {len(row["tokens"])}
        mask = np.array(row["action_mask"], bool)
        assert not mask[: row["prompt_length"]].any() and mask.any()
        for name in ("rewards", "logprobs", "advantages", "versions"):
            assert not np.array(row[name])[~mask].any()
        assert np.array_equal(np.flatnonzero(mask), np.concatenate([np.arange(a, b) for a, b in row["turns"]]))
        assert set(np.array(row["versions"])[mask]) == {row["iteration"] - 1}
        assert sum(row["rewards"]) == pytest.approx(row["stats"]["return"], abs=1e-5)
    totals = [np.array([sum(row["rewards"]) for row in rows[first : first + 4]]) for first in range(0, 32, 4)]
    deviations = [*other_groups_deviation(totals[:4]), *other_groups_deviation(totals[4:])]
    for first, deviation in zip(range(0, 32, 4), deviations, strict=True):
        of_group = rows[first : first + 4]
        assert len({tuple(row["tokens"][: row["prompt_length"]]) for row in of_group}) == 1
        turn_rewards = [np.array([sum(row["rewards"][a:b]) for a, b in row["turns"]]) for row in of_group]
        expected = grpo_llm.group_advantages(turn_rewards, "turn", deviation=deviation)
        for row, values in zip(of_group, expected, strict=True):
            for (start, end), value in zip(row["turns"], values, strict=True):
                np.testing.assert_allclose(row["advantages"][start:end], value, atol=1e-4)
    before = safetensors.load_file(model_source("tiny", "AgentR1/MultihopWorld-v0") + "/model.safetensors")
    after = safetensors.load_file(run_dir / "model" / "model.safetensors")
    assert before.keys() == after.keys() and any((before[name] != after[name]).any() for name in before)
    assert (run_dir / "model" / "tokenizer.json").is_file()
    logged = scalars(run_dir)
    assert logged["charts/staleness"] == [0, 0]
    assert all(0 <= value <= 1 for value in logged["charts/groups_with_signal"])
    assert {"losses/policy_loss", "losses/clipfrac", "losses/entropy", "losses/grad_norm"} <= logged.keys()
    assert {f"time/{name}" for name in ("rollout", "score", "train", "sync")} <= logged.keys()


@pytest.mark.parametrize(
    "options",
    [
        ["--credit", "episode", "--no-scale-rewards", "--loss-aggregation", "constant", "--constant-length", 32],
        ["--ratio", "sequence", "--loss-aggregation", "sequence", "--clip-coef", 3e-4, "--clip-coef-high", 4e-4],
        ["--ratio", "turn", "--old-logprobs", "trainer", "--gamma", 0.9, "--top-p", 0.9, "--update-epochs", 2],
        ["--no-loss-mask", "--no-advantage-mask", "--no-anneal-lr", "--microbatch-tokens", 256],
        ["--kl-coef", 0.1, "--kl-estimator", "k2", "--lora-rank", 2, "--max-grad-norm", 0.5],
        ["--gradient-checkpointing", "--max-staleness", 2],
    ],
    ids=lambda options: options[0],
)
def test_options_run(learn, options):
    run_dir = learn("grpo_llm", *GROUPS, "--total-episodes", 32, *options)
    assert all(np.isfinite(row["advantages"]).all() for row in jsonl(run_dir / "trajectories.jsonl"))
    logged = scalars(run_dir)
    assert len(logged["losses/policy_loss"]) == 2 and np.isfinite(logged["losses/grad_norm"]).all()
    assert logged["losses/grad_norm"][0] > 0


def test_log_probabilities_of_the_trainer_are_those_of_the_sampler(learn):
    """With --old-logprobs trainer on the first step of an iteration every ratio and every weight is 1."""
    flags = ["--total-episodes", 16, "--num-minibatches", 1, "--no-scale-rewards"]
    one, two = (scalars(learn("grpo_llm", *GROUPS, *flags, "--old-logprobs", x, "--exp-name", x))
                for x in ("sampler", "trainer"))  # fmt: skip
    assert one["losses/approx_kl"][0] == pytest.approx(0, abs=1e-6)
    assert two["losses/clipfrac"] == [0]
    assert one["losses/grad_norm"][0] == pytest.approx(two["losses/grad_norm"][0], rel=1e-3)


@pytest.mark.parametrize("rounds", [0, 8])
def test_dynamic_sampling_fills_the_batch_with_groups_that_differ(learn, monkeypatch, capfd, rounds):
    from llm_utils.logger import Logger

    monkeypatch.setattr(Logger, "TRAJECTORIES", 16)
    flags = ["--total-episodes", 32, "--temperature", 0.7, "--dynamic-sampling", rounds, "--group-size", 2]
    run_dir = learn("grpo_llm", *GROUPS, *flags)
    rows = jsonl(run_dir / "trajectories.jsonl")
    assert len(rows) == 32 and len({row["episode"] for row in rows}) == 32
    groups = [rows[i : i + 2] for i in range(0, 32, 2)]
    assert all(one["task_index"] == two["task_index"] for one, two in groups)
    earned = [[[sum(row["rewards"][a:]) for a, _ in row["turns"]] for row in group] for group in groups]
    even = [
        np.allclose(one[: len(two)], two[: len(one)]) and not any(one[len(two) :] + two[len(one) :])
        for one, two in earned
    ]
    logged = scalars(run_dir)
    count, total = re.findall(r"(\d+)/(\d+) \[", capfd.readouterr().err)[-1]  # of the progress bar
    assert count == total == str(int(logged["charts/episodes"][-1]))
    if rounds:
        assert not any(even)
        assert logged["charts/episodes"][-1] > 32 and events_step(run_dir) > sum(row["stats"]["turns"] for row in rows)
    else:
        assert any(even)
        assert logged["charts/groups_with_signal"] == pytest.approx([1 - np.mean(even[:8]), 1 - np.mean(even[8:])])


def bfloat16_or_skip():
    from llm_utils.loading import choose_dtype

    try:
        choose_dtype("bfloat16", torch.device("cpu"))
    except SystemExit as error:
        pytest.skip(str(error))


def test_in_bf16_no_ratio_is_clipped_before_an_update(learn):
    """Sampling and training round differently in bf16: against the sampler's log-probabilities GSPO's narrow range
    would clip most episodes at once. The default compares with the trainer's, and the gap is logged."""
    bfloat16_or_skip()
    flags = ["--total-episodes", 16, "--num-minibatches", 1, "--dtype", "bfloat16", "--ratio", "sequence"]
    flags += ["--loss-aggregation", "sequence", "--clip-coef", 3e-4, "--clip-coef-high", 4e-4]
    default, sampler = (
        scalars(learn("grpo_llm", *GROUPS, *flags, *more, "--exp-name", name))
        for name, more in (("default", []), ("sampler", ["--old-logprobs", "sampler"]))
    )
    # a few differ for the trainer, too, where an update forms other batches than the scoring
    assert default["losses/clipfrac"][0] < 0.1 and sampler["losses/clipfrac"][0] > 0.2
    assert 0 < default["sampler/gap_mean"][0] < default["sampler/gap_max"][0] < 1
    assert 0 <= default["sampler/gap_beyond"][0] < 1


def test_the_gap_is_that_of_all_rows_also_of_rejected_ones(learn):
    bfloat16_or_skip()
    flags = ["--total-episodes", 16, "--dtype", "bfloat16", "--reject-ratio", 1.0005]
    logged = scalars(learn("grpo_llm", *GROUPS, *flags))
    assert logged["charts/rejected"][0] > 0.3
    assert logged["sampler/gap_mean"][0] > 5e-4 and logged["sampler/gap_max"][0] > logged["sampler/gap_mean"][0]


def test_random_streams_have_nothing_in_common():
    """Tasks, minibatches and sampling of the same number are drawn from different streams."""
    from llm_utils.rollout import SAMPLING, TASKS
    from llm_utils.run import ORDER

    drawn = [np.random.default_rng([1, tag, 7]).random(4) for tag in (TASKS, SAMPLING, ORDER)]
    assert len({round(float(x), 9) for numbers in drawn for x in numbers}) == 12


def test_rows_far_from_the_trainer_are_rejected(make_row):
    from llm_utils.run import reject_far_rows

    rows = [make_row([(1, 4, 1.0)], 5, episode=i) for i in range(3)]
    for row, gap in zip(rows, (0.0, 0.05, -0.2), strict=True):
        row.old_logprobs = row.logprobs + np.float32(gap) * row.action_mask
    assert reject_far_rows(rows, 1.1) == pytest.approx(1 / 3)
    assert [row.train_mask.sum() for row in rows] == [3, 3, 0]


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_figures_are_means_over_tokens_whatever_the_aggregation(small_model, made_up_rows, as_run, aggregation):
    """Only the loss itself is weighted: entropy, KL divergence and clip fraction are what they are."""
    rows = made_up_rows()
    args = grpo_llm.Args(loss_aggregation=aggregation, constant_length=7, microbatch_tokens=120)
    run = as_run(args, small_model("qwen2"))
    found = grpo_llm.backward(rows, args, run)
    with torch.no_grad():
        new, entropy = policy_forward(run.policy, [s for row in rows for s in row.segments()], run.vocab_size, 1.0)
    old = np.concatenate([row.old_logprobs[row.action_mask] for row in rows])
    ratio = (new - torch.from_numpy(old)).exp()
    assert found["entropy"] == pytest.approx(entropy.mean().item(), rel=1e-4)
    assert found["old_approx_kl"] == pytest.approx(-ratio.log().mean().item(), rel=1e-3)
    assert found["clipfrac"] == pytest.approx(((ratio < 0.8) | (ratio > 1.28)).float().mean().item())


def test_staleness_occurs_and_is_bounded(learn):
    run_dir = learn("grpo_llm", *GROUPS, "--total-episodes", 64, "--max-staleness", 2)
    staleness = [
        row["iteration"] - 1 - version
        for row in jsonl(run_dir / "trajectories.jsonl")
        for version, sampled in zip(row["versions"], row["action_mask"], strict=True)
        if sampled
    ]
    assert 0 < max(staleness) <= 2 and min(staleness) >= 0
    logged = scalars(run_dir)["charts/staleness"]
    assert logged[0] == 0 and max(logged) <= 2 and logged[-1] > 0


def test_lora_trains_adapters_and_saves_them_merged(learn):
    peft = pytest.importorskip("peft")
    flags = ["--total-episodes", 32, "--lora-rank", 2, "--save-model", "--checkpoint-every", 1]
    run_dir = learn("grpo_llm", *GROUPS, *flags, "--learning-rate", 3e-3)
    source = model_source("tiny", "AgentR1/MultihopWorld-v0")
    adapters = safetensors.load_file(run_dir / "checkpoint" / "policy" / "adapter_model.safetensors")
    assert all(".lora_" in name for name in adapters) and any(x.abs().max() > 0 for x in adapters.values())
    base = load_policy(source, torch.device("cpu"))
    ids = torch.arange(40)[None]
    with torch.no_grad():
        before = base(input_ids=ids).logits
        merged = load_policy(run_dir / "model", torch.device("cpu"))(input_ids=ids).logits
        expected = peft.PeftModel.from_pretrained(base, run_dir / "checkpoint" / "policy")(input_ids=ids).logits
    torch.testing.assert_close(merged, expected, atol=1e-4, rtol=1e-4)
    assert (merged - before).abs().max() > 0.01


def test_contradicting_flags_are_named_before_any_work(learn):
    for arguments, message in (
        (["--group-size", 5], "--episodes-per-iteration must be a multiple of --group-size"),
        (["--group-size", 1], "--group-size, which is at least 2"),
        (["--max-staleness", 1, "--dynamic-sampling", 1], "--max-staleness and --dynamic-sampling contradict"),
        (["--max-staleness", 1, "--deterministic"], "--deterministic and --max-staleness contradict"),
        (["--engine", "vllm", "--deterministic"], "--deterministic and --engine vllm contradict"),
        (["--kl-in", "reward"], "--kl-in reward needs a --kl-coef above 0"),
        (["--num-minibatches", 17], "--num-minibatches exceeds --episodes-per-iteration"),
        (["--max-staleness", -1], "--max-staleness is at least 0"),
        (["--model", "./nowhere"], "no such folder"),
        (["--resume", "."], "no checkpoint"),
        (["--temperature", 0], "--temperature is above 0"),
        (["--top-p", 0], "--top-p is above 0"),
        (["--learning-rate", -1], "a learning rate is at least 0"),
        (["--num-minibatches", 0], "--num-minibatches is at least 1"),
        (["--constant-length", 0], "--constant-length is at least 1"),
        (["--num-envs", 0], "--num-envs is at least 1"),
        (["--env-kwargs", "{bad"], "--env-kwargs takes a JSON object"),
        (["--env-id", "AgentR1/Nope-v0"], "there is no such environment; there are AgentR1/"),
        (["--no-advantage-mask"], "--no-advantage-mask changes nothing without --no-loss-mask"),
        (["--max-grad-norm", -1], "--max-grad-norm is above 0"),
        (["--max-invalid", 2], "--max-invalid is between 0 and 1"),
        (["--reject-ratio", 0.5], "--reject-ratio is a factor above 1"),
        (["--reject-ratio", 2, "--old-logprobs", "sampler"], "give --old-logprobs trainer"),
        (["--memory-gb", 0.001], "this run doesn't fit"),
        (["--kl-coef", -0.5], "--kl-coef is at least 0"),
        (["--update-epochs", 0], "--update-epochs is at least 1"),
        (["--gamma", -3], "--gamma is between 0 and 1"),
        (["--importance-cap", 0.5], "--importance-cap is at least 1"),
        (["--no-scale-rewards", "--scale-by", "others"], "--scale-by does nothing"),
        (["--env-kwargs", '{"max_context_tokens": 40000}'], "the model has 32768 positions"),
    ):
        with pytest.raises(SystemExit, match=message):
            learn("grpo_llm", *GROUPS, *arguments)
    assert not Path("runs").exists()


def test_a_loss_that_is_not_finite_stops_the_run(learn):
    with pytest.raises(SystemExit, match="stopped: .*(nan|inf|finite)"):
        learn("grpo_llm", *GROUPS, "--total-episodes", 48, "--learning-rate", "1e30")
    (run_dir,) = Path("runs").iterdir()
    rows = jsonl(run_dir / "not_finite.jsonl")
    assert rows and all(row["tokens"] for row in rows)


def test_the_files_stay_short():
    """A reader sees an algorithm at a glance; what all learners share stands in llm_utils."""
    for name, most in (("grpo_llm", 330), ("rloo_llm", 330), ("reinforce_pp_llm", 330), ("ppo_llm", 390)):
        text = (LEARNER / f"{name}.py").read_text()
        (args,) = (node for node in ast.parse(text).body if getattr(node, "name", "") == "Args")
        assert len(text.splitlines()) - (args.end_lineno - args.lineno + 1) <= most, name
        assert max(map(len, text.splitlines())) <= 120, name


def test_what_tells_grpo_from_rloo_is_short():
    files = [str(LEARNER / f"{name}_llm.py") for name in ("grpo", "rloo")]
    assert len(subprocess.run(["diff", *files], capture_output=True, text=True).stdout.splitlines()) <= 130
