"""One turn is the degenerate case: an environment with T = 1 trains as the single-turn loss does."""

from functools import partial

import grpo_llm
import gymnasium as gym
import numpy as np
import torch

from llm_utils.sampling.rollout import rollout
from llm_utils.sampling.transformers_engine import TransformersEngine
from llm_utils.trajectory import make_groups

GROUPS, SIZE = 3, 4


def single_turn_loss(policy, prompts, replies, rewards, vocab_size):
    """GRPO as it was published for one prompt and one reply (arXiv 2402.03300, equation 3, on policy, without KL)."""
    losses = []
    for start in range(0, len(rewards), SIZE):
        scores = np.array(rewards[start : start + SIZE])
        advantages = (scores - scores.mean()) / (scores.std(ddof=1) + 1e-6)
        for prompt, reply, advantage in zip(prompts[start:], replies[start:], advantages.tolist(), strict=False):
            ids = torch.tensor([*prompt, *reply])
            logits = policy(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1, :vocab_size].float()
            new = torch.log_softmax(logits, -1).gather(1, torch.tensor(reply)[:, None])[:, 0]
            losses.append(-(advantage * (new - new.detach()).exp()).mean())
    return torch.stack(losses).mean()


def reward_of_tokens(env, score, **how):
    return float(env.episode.buffer[: env.episode.length].sum() % 7)


def test_one_turn_trains_as_the_single_turn_loss(small_model, as_run, monkeypatch):
    envs = gym.make_vec("AgentR1/MultihopWorld-v0", num_envs=4, observation="new", max_turns=1, max_action_tokens=12)
    vocab_size = envs.single_action_space.vocab_size
    for env in envs.envs:  # a random policy earns nothing: here any tokens earn something
        monkeypatch.setattr(env, "judge_end", partial(reward_of_tokens, env))
    policy = small_model("qwen2")
    engine = TransformersEngine(policy, 4, vocab_size)
    tasks = np.repeat([5, 6, 7], SIZE).tolist()
    rows = rollout(envs, engine, list(enumerate(tasks)), seed=1)
    envs.close()
    assert all(len(row.turns) == 1 and row.terminated and not row.truncated for row in rows)
    rewards = [row.turns[0].reward for row in rows]
    assert all(len(set(rewards[i : i + SIZE])) > 1 for i in range(0, len(rows), SIZE))

    args = grpo_llm.Args(group_size=SIZE, credit="episode", loss_aggregation="sequence", microbatch_tokens=4096)
    grpo_llm.compute_advantages(make_groups(rows, args.group_size, args.gamma), args)
    grpo_llm.backward(rows, args, as_run(args, policy, size=vocab_size))
    ours = torch.cat([p.grad.flatten() for p in policy.parameters()]).clone()

    policy.zero_grad()
    prompts = [row.tokens[: row.turns[0].start].tolist() for row in rows]
    replies = [row.tokens[row.turns[0].start : row.turns[0].end].tolist() for row in rows]
    single_turn_loss(policy, prompts, replies, rewards, vocab_size).backward()
    theirs = torch.cat([p.grad.flatten() for p in policy.parameters()])
    assert theirs.norm() > 0
    assert (ours - theirs).norm() / theirs.norm() < 1e-4
