# docs and results: docs/learners/ppo_llm.md
"""PPO for language models that call tools, in one file.

An episode is one growing row of tokens: prompt, sampled span, tool results, sampled span, ... The row is never
re-tokenised. A mask marks the sampled tokens; only those carry advantages and loss.

    python learner/ppo_llm.py                                             # shipped policy, generated world, laptop CPU
    torchrun --nproc-per-node 4 learner/ppo_llm.py --engine vllm-server --vllm-url http://localhost:8000 ...   # GPUs
    python learner/ppo_llm.py --env-id AgentR1/HotpotQA-v0 --model Qwen/Qwen2.5-0.5B-Instruct \\
        --engine vllm                                                     # one GPU of 80 GB
"""

import llm_utils.setup.startup  # noqa: F401  isort: skip  (reports a missing package in one line)

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch

import agent_r1  # noqa: F401  (registers the environments)
from llm_utils import arguments, distributed
from llm_utils.arguments import Common
from llm_utils.kl import kl_divergence
from llm_utils.ratio import mean_over_segments, segment_numbers
from llm_utils.recovery import checkpoint
from llm_utils.returns import whiten
from llm_utils.run import Run, make_run, prepare, reject_far_rows, tokenizer_of
from llm_utils.sampling.rollout import draw_episodes
from llm_utils.setup.environments import env_kwargs, environment_spec, kwargs_of_each, plain_errors
from llm_utils.training.forward import check_finite, pad, policy_forward
from llm_utils.training.metrics import TokenMeans, explained_variance
from llm_utils.trajectory import Trajectory, make_batch, token_weights
from llm_utils.value_model import Critic, check_answers, score_values, show_answers, values_of

Array = np.ndarray


@dataclass
class Args(Common):
    exp_name: str = Path(__file__).stem
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"
    """recompute activations in the backward pass, the critic's too: less memory, more time. auto: on if the run does
    not fit without"""

    # sampling
    total_episodes: int = 5_120
    """number of training episodes"""
    episodes_per_iteration: int = 256
    """episodes collected before each update"""
    temperature: float = 1.0
    """sampling temperature; the trainer computes log-probabilities at the same temperature"""

    # advantages
    advantage: Literal["tokens", "turns", "bilevel"] = "tokens"
    """steps of GAE: action tokens, turns, or turns and then the tokens of each turn"""
    gamma: float = 1.0
    """discount per action token (per turn with --advantage turns)"""
    gae_lambda: float = 1.0
    """lambda of GAE"""
    gamma_turn: float = 1.0
    """discount per turn in the upper level of --advantage bilevel (VAGEN: 0.95, which favours short episodes)"""
    adv_norm: Literal["others", "token", "turn", "none"] = "others"
    """whitening of advantages. others: mean and deviation of the batch's other episodes (unbiased direction). token (as
    published) and turn: of the whole batch, where every action token or every turn counts the same (biased)"""
    truncation: Literal["outcome", "bootstrap"] = "outcome"
    """a truncated episode gets the environment's `outcome/unfinished` reward, or bootstraps from the critic"""

    # optimization
    learning_rate: float | None = None
    """learning rate of the policy (None: 3e-4 for tiny, 1e-6 for other models, 1e-5 for LoRA adapters)"""
    critic_learning_rate: float | None = None
    """learning rate of the critic (None: 1e-3 for the shipped policy, 1e-5 for other models)"""
    anneal_lr: bool = True
    """anneal both learning rates linearly to 0"""
    critic_sees: Literal["state", "answer"] = "state"
    """answer: the critic reads the task's gold answer before the prompt, the policy does not (an asymmetric critic)"""
    critic_warmup: int = 1
    """iterations at the start that train only the critic"""
    critic_only: bool = False
    """never train the policy: the run makes a critic of it"""
    update_epochs: int = 1
    """passes over the collected episodes"""
    num_minibatches: int = 4
    """optimizer steps per pass"""
    target_kl: float | None = None
    """end an iteration's passes when the approximate KL to the sampling policy exceeds this"""
    max_grad_norm: float = 1.0
    """maximum gradient norm, separately for policy and critic"""

    # loss
    ratio: Literal["token", "turn", "sequence"] = "token"
    """importance ratio of a token, or the geometric mean over its turn or its sequence (GSPO: sequence)"""
    loss_aggregation: Literal["token", "sequence", "constant"] = "token"
    """mean over tokens (DAPO), mean over episodes of token means (GRPO), or sum over episodes x constant (Dr. GRPO)"""
    constant_length: int = 256
    """tokens per episode that --loss-aggregation constant divides by"""
    clip_coef: float = 0.2
    """the ratio is clipped below at 1 - clip_coef ..."""
    clip_coef_high: float = 0.28
    """... and above at 1 + clip_coef_high"""
    dual_clip: float = 0.0
    """maximum ratio that counts for a negative advantage, e.g. 3 (arXiv 1912.09729; 0: no maximum)"""
    clip_coef_value: float = 0.2
    """maximum change of the value in the value loss (0: no clipping)"""
    ent_coef: float = 0.0
    """weight of the entropy bonus"""
    kl_coef: float = 0.0
    """weight of the KL divergence to the initial policy (0: no reference model is loaded)"""
    reference: str | None = None
    """policy of the KL divergence: a name or a folder, with the tokenizer of --model (None: --model)"""
    kl_in: Literal["loss", "reward"] = "loss"
    """add the KL divergence to the loss, or subtract it from the reward of every sampled token"""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """estimator in the loss: k1 has zero mean gradient, k2 the right one (--kl-in reward always uses k1)"""
    old_logprobs: Literal["auto", "sampler", "trainer"] = "auto"
    """log-probabilities in the ratio's denominator: the sampler's, or recomputed by the trainer before the update.
    auto: the trainer's, unless the sampler is the same program in float32 with the same weights"""
    importance_cap: float = 2.0
    """with --old-logprobs trainer: maximum weight trainer / sampler of a token (truncated importance sampling)"""
    reject_ratio: float = 0.0
    """with --old-logprobs trainer: drop episodes whose geometric mean of trainer / sampler is beyond this factor or its
    inverse (0: keep all)"""
    replay_successes: float = 0.0
    """share of an iteration's trained episodes that are stored successes of earlier ones (0: none)"""
    drop_void_turns: bool = False
    """leave episodes with a turn that has neither a call nor an answer out of the update (SimpleTIR)"""
    loss_mask: bool = True
    """train on sampled tokens only; --no-loss-mask also trains on the environment's (Agent-R1, table 4)"""
    advantage_mask: bool = True
    """advantages over sampled tokens only; --no-advantage-mask runs over all (Agent-R1, table 4)"""


def check(args: Args) -> None:
    """Raise SystemExit for arguments that contradict each other, before any work."""
    arguments.check(args)
    if args.advantage == "turns" and not args.advantage_mask:
        raise SystemExit("--advantage turns is incompatible with --no-advantage-mask: it runs over turns, not tokens")
    iterations = args.total_episodes // args.episodes_per_iteration
    if args.critic_warmup >= iterations and not args.critic_only:
        enough = (args.critic_warmup + 1) * args.episodes_per_iteration
        cause = f"--critic-warmup {args.critic_warmup} leaves none of the {iterations} iterations to the policy"
        raise SystemExit(f"{cause}: use a smaller one, --critic-only, or --total-episodes {enough} or more")
    unfinished = [kwargs.get("unfinished_reward", 0) for kwargs in kwargs_of_each(args)]
    if args.truncation == "bootstrap" and any(reward != 0 for reward in unfinished):
        raise SystemExit("--truncation bootstrap pays nothing for an unfinished episode: leave out unfinished_reward")


# ------------------------------------------------------------------------------------------------------- advantages


def gae_tokens(
    r: Array, v: Array, m: Array, gamma: float = 1.0, lam: float = 0.95, done: bool = True, v_last: float = 0.0
) -> tuple[Array, Array]:
    """Compute GAE over the action tokens of one row. Observation tokens neither discount nor contribute.

    `r`, `v`, `m` have an entry per token: reward, value of the state before the token, action mask. A terminated row
    (`done`) ends with value 0, a truncated one with `v_last`. Return advantages and returns, 0 outside the mask.
    """
    advantages, returns = np.zeros(len(r)), np.zeros(len(r))
    next_value, last = (0.0 if done else v_last), 0.0
    for t in np.flatnonzero(m)[::-1]:
        last = r[t] + gamma * next_value - v[t] + gamma * lam * last
        advantages[t], returns[t], next_value = last, last + v[t], v[t]
    return advantages, returns


def gae_turns(
    r_turn: Array, v_turn: Array, gamma: float = 1.0, lam: float = 0.95, done: bool = True, v_last: float = 0.0
) -> tuple[Array, Array]:
    """Compute GAE with a turn as one action. `v_turn[k]` is the value before the first sampled token of turn k."""
    advantages, next_value, last = np.zeros(len(r_turn)), (0.0 if done else v_last), 0.0
    for k in reversed(range(len(r_turn))):
        last = r_turn[k] + gamma * next_value - v_turn[k] + gamma * lam * last
        advantages[k], next_value = last, v_turn[k]
    return advantages, advantages + np.asarray(v_turn)


def gae_bilevel(
    r: Array, v: Array, m: Array, turn_end: Array, gamma: float = 1.0, lam: float = 1.0, gamma_turn: float = 1.0,
    done: bool = True, v_last: float = 0.0,
) -> tuple[Array, Array]:  # fmt: skip
    """Compute VAGEN's two-level GAE: over turn ends, whose returns become the rewards of GAE inside each turn."""
    ends, advantages, returns = np.flatnonzero(turn_end), np.zeros(len(r)), np.zeros(len(r))
    target = np.array(r, float)
    next_value, last = (0.0 if done else v_last), 0.0
    for t in ends[::-1]:  # upper level: the value of a turn is taken at its last token
        last = r[t] + gamma_turn * next_value - v[t] + gamma_turn * lam * last
        target[t], next_value = last + v[t], v[t]
    next_value, last = (0.0 if done else v_last), 0.0
    for t in np.flatnonzero(m)[::-1]:  # lower level: starts again at every turn end
        if turn_end[t]:
            next_value, last = 0.0, 0.0
        last = target[t] + gamma * next_value - v[t] + gamma * lam * last
        advantages[t], returns[t], next_value = last, last + v[t], v[t]
    return advantages, returns


def value_positions(row: Trajectory, args: Args) -> Array:
    """Return the mask of states that train the critic, at the token that follows each state."""
    if not row.train_mask.any():
        return row.train_mask
    if args.advantage == "turns":  # a turn is one action, with one state before it
        return np.isin(np.arange(len(row.tokens)), [turn.start for turn in row.turns])
    return (row.action_mask if args.advantage_mask else row.after_prompt()) & row.train_mask


def estimate(row: Trajectory, args: Args) -> tuple[Array, Array]:
    """Compute advantages and returns of a row's tokens from its rewards and values."""
    mask, gammas = row.action_mask if args.advantage_mask else row.after_prompt(), (args.gamma, args.gae_lambda)
    bootstraps = row.truncated and not row.terminated and args.truncation == "bootstrap"
    end: dict[str, Any] = {"done": not bootstraps, "v_last": row.value_last}
    if args.advantage == "turns":  # every token of a turn has the turn's advantage
        starts, lengths = [turn.start for turn in row.turns], [turn.end - turn.start for turn in row.turns]
        both = np.zeros((2, len(row.tokens)))
        turn_estimates = gae_turns(row.turn_rewards(), row.values[starts], *gammas, **end)
        both[:, row.action_mask] = np.repeat(turn_estimates, lengths, axis=1)
        return both[0], both[1]
    if args.advantage == "bilevel":
        turn_end = np.isin(np.arange(len(row.tokens)), [turn.end - 1 for turn in row.turns])
        return gae_bilevel(row.rewards, row.values, mask, turn_end, *gammas, args.gamma_turn, **end)
    return gae_tokens(row.rewards, row.values, mask, *gammas, **end)


def compute_advantages(rows: Sequence[Trajectory], args: Args) -> None:
    """Fill `advantages` and `returns` of all trajectories, with whitened advantages.

    The penalty of --kl-in reward is added after whitening, which would amplify its noise if all episodes succeed. It is
    the plain sum over the token and later ones: the gradient of the KL divergence, independent of GAE.
    """
    advantages, weights = [], []
    for row in rows:
        values, returns = estimate(row, args)
        row.returns = returns.astype(np.float32)
        advantages.append(values)
        weights.append((row.action_mask if args.advantage_mask else row.after_prompt()).astype(float))
        if args.adv_norm == "turn":
            for turn in row.turns:
                weights[-1][turn.start : turn.end] /= turn.end - turn.start
    if args.adv_norm != "none":
        advantages = whiten(advantages, weights, by_others=args.adv_norm == "others")
    for row, values, weight in zip(rows, advantages, weights, strict=True):
        if args.kl_in == "reward":
            costs = args.kl_coef * (row.old_logprobs - row.ref_logprobs) * row.action_mask
            values = values - np.cumsum(costs[::-1])[::-1] * (weight > 0)
        row.advantages = values.astype(np.float32)


# ------------------------------------------------------------------------------------------------------------- loss


def policy_loss(
    new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float,
    segments: torch.Tensor | None = None, dual_clip: float = 0.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # fmt: skip
    """Return PPO's clipped objective per token [N], to be minimised, and figures per token for the log.

    `segments` [N] numbers the parts over which the ratio is a geometric mean (None: single tokens). `dual_clip` c > 1
    bounds the loss of a negative advantage A by c |A| (arXiv 1912.09729, eq. 5); 0 does not.
    """
    logratio = (new - old).clamp(-20, 20)
    if segments is not None:
        logratio = mean_over_segments(logratio, segments)
    ratio = logratio.exp()
    loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip:
        loss = torch.where(advantages < 0, torch.min(loss, -dual_clip * advantages), loss)
    clipped = ((ratio < 1 - clip_low) | (ratio > 1 + clip_high)).float()
    return loss, {"old_approx_kl": -logratio, "approx_kl": ratio - 1 - logratio, "clipfrac": clipped}


def value_loss(new: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, clip: float) -> torch.Tensor:
    """Return half the squared error of the critic per state, the larger of the unclipped and the clipped one. All
    [N]."""
    loss = (new - returns).square()
    if clip > 0:
        loss = torch.max(loss, (old + (new - old).clamp(-clip, clip) - returns).square())
    return loss / 2


def backward(rows: Sequence[Trajectory], args: Args, run: Run, train_policy: bool = True) -> dict[str, float]:
    """Add the gradient of one optimizer step on `rows`, and return its logged figures.

    Every mean is over the whole step, so the gradient does not depend on the split into microbatches and processes.
    """
    means, device = TokenMeans(), run.policy.device
    masks = [(int(row.train_mask.sum()), bool(row.train_mask.any()), int(row.value_mask.sum())) for row in rows]
    num_tokens, num_rows, num_states = map(int, distributed.all_reduce_sum(*map(sum, zip(*masks, strict=True))))
    of_step = (args.loss_aggregation, num_tokens, num_rows, args.constant_length)
    for segments, scale in run.microbatches(rows):
        if train_policy:
            entropy_counts = args.ent_coef != 0
            new, entropy = policy_forward(run.policy, segments, run.vocab_size, args.temperature, entropy_counts)
            batch = make_batch(segments, device, new)
            parts, clip = segment_numbers(segments, args.ratio, device), (args.clip_coef, args.clip_coef_high)
            losses, figures = policy_loss(new, batch.old, batch.advantages, *clip, parts, args.dual_clip)
            losses = losses * batch.importance(args.importance_cap)
            figures["entropy"], policy_losses = entropy, losses
            if entropy_counts:
                losses = losses - args.ent_coef * entropy
            if args.kl_coef > 0:
                figures["ref_kl"] = kl_divergence(new - batch.reference, "k3")
                if args.kl_in == "loss":
                    losses = losses + args.kl_coef * kl_divergence(new - batch.reference, args.kl_estimator)
            weights = token_weights(segments, *of_step).to(device)
            loss = check_finite((losses * weights).sum(), segments)
            (loss * scale).backward()
            if scale:
                means.add(figures)
                means.add_loss("policy_loss", (policy_losses * weights).sum())
                means.add_gap((new - batch.sampler)[batch.sampled])
        batch = make_batch(segments, device)
        at = pad([row.value_mask for row in segments], device).nonzero(as_tuple=True)
        values = values_of(run.critic, segments, device)[at[0], at[1] - 1]
        losses = value_loss(values, batch.values, batch.returns, args.clip_coef_value)
        loss = check_finite(losses.sum() / max(1, num_states), segments)
        (loss * scale).backward()
        if scale:
            means.add_loss("value_loss", loss)
    return means.result()


# ------------------------------------------------------------------------------------------------------------- main


if __name__ == "__main__":
    args = prepare(arguments.read(Args), check)
    envs = eval_envs = None
    if distributed.rank() == 0:  # only one process runs environments
        kwargs = {"num_envs": args.num_envs, "tokenizer": tokenizer_of(args), **env_kwargs(args), "observation": "new"}
        of_training = {"unfinished_reward": 0.0} if args.truncation == "bootstrap" else {}
        spec = environment_spec(args.env_id)
        with plain_errors(args.env_id):
            envs = gym.make_vec(spec, split=args.split, **kwargs | of_training)
            eval_envs = gym.make_vec(spec, split=args.eval_split, **kwargs) if args.eval_episodes else None
            if args.critic_sees == "answer":
                check_answers(envs)
    run = make_run(args, envs, eval_envs, Critic)
    count = args.episodes_per_iteration

    def episodes(iteration: int) -> list[tuple[int, int]]:
        """Return numbers and tasks of an iteration's episodes."""
        return draw_episodes(args.seed, iteration, count, run.tasks, first=(iteration - 1) * count)

    with checkpoint.saving_at_exit(run.saver, run.state):
        run.start()
        for iteration in range(run.state["iteration"] + 1, run.num_iterations + 1):
            run.begin_iteration(iteration)

            # rollout
            rows = run.collect(iteration, episodes)
            run.mark("rollout")

            # values, log-probabilities, advantages
            fresh, rows = rows, rows + run.replayed(rows)
            for row in rows:
                row.train_mask = row.action_mask if args.loss_mask else row.after_prompt()
            if args.critic_sees == "answer":
                show_answers(fresh, run)
            score_values(fresh, run)
            if args.kl_coef > 0:
                run.score_reference(rows)
            if args.old_logprobs == "trainer" or not args.loss_mask:  # the sampler has none for tool results
                run.score_policy(rows)
            compute_advantages(fresh, args)
            if args.drop_void_turns:
                run.drop_void_turns(fresh)
            rejected = reject_far_rows(rows, args.reject_ratio) if args.reject_ratio else 0.0
            for row in fresh:
                row.value_mask = value_positions(row, args)
            run.mark("score")

            # update
            run.saver.begin_update()
            train_policy = iteration > args.critic_warmup and not args.critic_only
            for minibatch in run.minibatches(rows, iteration):
                metrics = backward(minibatch, args, run, train_policy)
                norms = run.optimizer.step(args.max_grad_norm, minibatch)
                run.metrics.append(metrics | {"grad_norm": norms[0], "critic_grad_norm": norms[1]})
                if args.target_kl is not None and metrics.get("approx_kl", 0.0) > args.target_kl:
                    break
            run.mark("train")
            scalars = {"charts/rejected": rejected, "losses/explained_variance": explained_variance(fresh)}
            run.end_iteration(iteration, fresh, scalars)
        run.close()
