# docs and results: docs/learners/arpo_llm.md
"""ARPO (arXiv 2507.19849) for language models that call tools, in one file: GRPO whose episodes branch at tool results.

The episodes of a group share a task. Some begin at the prompt, the others continue from a tool result of an episode of
the group, more often where the policy's entropy rose. A turn's advantage is its return above that of the nearest
episodes without the turn. The published forms of the advantage are biased; here they are flags.

    python learner/arpo_llm.py                                            # shipped policy, generated world, laptop CPU
    python learner/arpo_llm.py --env-id AgentR1/CraftWorld-v0 --group-size 16 --initial-episodes 8
    python learner/arpo_llm.py --initial-episodes 8                       # no branches: the episodes of grpo_llm.py
"""

import llm_utils.setup.startup  # noqa: F401  isort: skip  (reports a missing package in one line)

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch

import agent_r1  # noqa: F401  (registers the environments)
from llm_utils import arguments, distributed
from llm_utils.arguments import Common
from llm_utils.branching import Branching, mean_of_sharers, own_work, shared_turns, tree_baselines, tree_weights
from llm_utils.kl import kl_divergence
from llm_utils.ratio import mean_over_segments, segment_numbers
from llm_utils.recovery import checkpoint
from llm_utils.returns import other_groups_deviation, others_deviation, others_mean, returns_to_go
from llm_utils.run import Run, make_run, prepare, reject_far_rows, tokenizer_of
from llm_utils.sampling.rollout import draw_episodes
from llm_utils.setup.environments import env_kwargs, environment_spec, plain_errors
from llm_utils.training.forward import check_finite, policy_forward
from llm_utils.training.metrics import TokenMeans
from llm_utils.trajectory import Group, Trajectory, make_batch, make_groups, token_weights

Array = np.ndarray


@dataclass
class Args(Common):
    exp_name: str = Path(__file__).stem

    # sampling
    total_episodes: int = 5_120
    """number of training episodes"""
    episodes_per_iteration: int = 256
    """episodes collected before each update"""
    temperature: float = 1.0
    """sampling temperature; the trainer computes log-probabilities at the same temperature"""
    group_size: int = 8
    """episodes of the same task"""
    initial_episodes: int = 4
    """episodes of a group that begin at the prompt; the others begin at branches, and at the prompt if too few come"""
    beam_size: int = 2
    """most paths that leave one tool result"""
    branch_alpha: float = 0.5
    """probability of a branch at a tool result where the entropy is that of the episode's first turn ..."""
    branch_beta: float = 0.2
    """... plus this times the change of the entropy"""
    entropy_window: int = 1
    """first tokens of a turn whose mean entropy decides; with more than 1 the advantages are slightly biased"""
    entropy_unit: Literal["log-vocabulary", "deviation"] = "log-vocabulary"
    """the change is a share of the largest entropy (published), or a multiple of its deviation in the last iteration"""

    # advantages
    advantage: Literal["tree", "soft", "hard"] = "tree"
    """baseline of a turn: the nearest episodes without it (tree), or of the whole group, where a shared turn has each
    episode's own advantage (soft, published) or their mean (hard, published); both published forms are biased"""
    credit: Literal["turn", "episode"] = "turn"
    """rewards that a turn is credited with: those from this turn on, or of the whole episode (the original)"""
    gamma: float = 1.0
    """discount per turn"""
    scale_rewards: bool = True
    """divide advantages by a standard deviation of returns (Dr. GRPO: no)"""
    scale_by: Literal["auto", "others", "group"] = "auto"
    """standard deviation that scales advantages: others = over all other groups (unbiased direction), group = this
    group (as published, biased). auto: others with --credit turn, group with --credit episode"""

    # optimization
    learning_rate: float | None = None
    """learning rate (None: 3e-4 for the shipped policy, 1e-6 for other models, 1e-5 for LoRA adapters)"""
    anneal_lr: bool = True
    """anneal the learning rate linearly to 0"""
    update_epochs: int = 1
    """passes over the collected episodes"""
    num_minibatches: int = 4
    """optimizer steps per pass"""
    max_grad_norm: float = 1.0
    """maximum gradient norm"""

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
    ent_coef: float = 0.0
    """weight of the entropy bonus"""
    kl_coef: float = 0.0
    """weight of the KL divergence to the initial policy (0: no reference model is loaded)"""
    reference: str | None = None
    """policy of the KL divergence: a name or a folder, with the tokenizer of --model (None: --model)"""
    kl_in: Literal["loss", "reward"] = "loss"
    """add the KL divergence to the loss, or subtract it from the reward of every turn"""
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
    """advantages on sampled tokens only; --no-advantage-mask also puts a turn's on the environment's reply"""


def check(args: Args) -> None:
    """Raise SystemExit for arguments that contradict each other, before any work."""
    arguments.check(args)
    arguments.check_groups(args)
    roots, size = args.initial_episodes, args.group_size
    if not 2 <= roots <= size:
        why = "the baseline of a first turn is another episode's return"
        raise SystemExit(f"--initial-episodes {roots} must be between 2 and --group-size {size}: {why}")
    if args.advantage == "tree" and args.scale_by == "group":
        raise SystemExit("--scale-by group needs --advantage soft or hard: the tree form would lose its direction")
    if args.loss_mask and not args.advantage_mask:
        raise SystemExit("--no-advantage-mask has no effect without --no-loss-mask: only the loss reads advantages")


# ------------------------------------------------------------------------------------------------------- advantages


def tree_advantages(returns: Array, shared: Array, credit: str = "turn", deviation: float | None = None) -> Array:
    """Compute the advantages of one group's turns from their returns. Both are [episodes, turns].

    `shared` [episodes, episodes] counts the turns that two episodes share. An episode weighs 1, and half as much after
    each of its branches, so that a shared turn counts once. Its baseline is what the nearest episodes without the turn
    earn from there. `deviation` is of other groups. Nothing is divided by the number of episodes that began at the
    prompt, which depends on the branches. The expected gradient has the true direction if one root may branch. With
    several, a root's early end adds episodes to the baselines of others, and bends it slightly.
    """
    if credit == "episode":
        returns = np.repeat(returns[:, :1], returns.shape[1], axis=1)
    return tree_weights(shared)[:, None] * (returns - tree_baselines(returns, shared)) / (deviation or 1.0)


def group_advantages(
    returns: Array, credit: str = "episode", scale: bool = True, eps: float = 1e-6, scale_by: str = "auto",
    deviation: float | None = None,
) -> Array:  # fmt: skip
    """Compute the advantages of one group's turns from their returns. Both are [episodes, turns].

    credit "episode" is GRPO: (R - mean R) / (std R + eps), std with Bessel's correction (DeepSeekMath, section 4.1.2).
    credit "turn" compares the return from turn k on with the others' returns from there, 0 after their end. With the
    others' deviation (`deviation`: of other groups; None: of the other episodes), baseline and scale do not depend on
    the episode's own actions. Then the expected gradient has the true direction, even if the policy decides when to
    stop. The group's own deviation is biased.
    """
    totals = returns[:, :1].sum(1)
    if credit == "episode":
        returns = np.repeat(returns[:, :1], returns.shape[1], axis=1)
    if scale_by == "auto":
        scale_by = "others" if credit == "turn" else "group"
    if not scale:
        return returns - returns.mean(0)  # as published: (G - 1) / G times the difference from the others' mean
    if scale_by == "others":
        return (returns - others_mean(returns)) / (deviation or others_deviation(totals)[:, None])
    minimum = len(totals) ** -0.5 if credit == "turn" else 0.0  # equal returns may come from different turns
    spread = totals.std(ddof=1) if len(totals) > 1 else 0.0
    return (returns - returns.mean(0)) / (max(spread, minimum) + eps)


def compute_advantages(groups: Sequence[Group], args: Args) -> None:
    """Fill `advantages` of all trajectories. An episode without others in its group gets 0."""
    groups = [group for group in groups if len(group.rows) > 1]
    totals = [group.returns[:, :1].sum(1) for group in groups]

    def advantages_of(returns: Array, shared: Array, deviation: float | None, scale_by: str, scale: bool) -> Array:
        if args.advantage == "tree":
            return tree_advantages(returns, shared, args.credit, deviation if scale else 1.0)
        values = group_advantages(returns, args.credit, scale, scale_by=scale_by, deviation=deviation)
        return mean_of_sharers(values, shared) if args.advantage == "hard" else values

    for group, deviation in zip(groups, other_groups_deviation(totals), strict=True):
        shared = shared_turns(group.rows)
        advantages = advantages_of(group.returns, shared, deviation, args.scale_by, args.scale_rewards)
        if args.kl_in == "reward":  # not scaled: in a solved group scaling would amplify its noise
            costs = [-args.kl_coef * row.turn_sums(row.old_logprobs - row.ref_logprobs) for row in group.rows]
            advantages = advantages + advantages_of(returns_to_go(costs, args.gamma), shared, 1.0, "others", True)
        for row, values in zip(group.rows, advantages, strict=True):
            row.set_turn_advantages(values[: len(row.turns)], args.advantage_mask)


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


def backward(rows: Sequence[Trajectory], args: Args, run: Run) -> dict[str, float]:
    """Add the gradient of one optimizer step on `rows`, and return its logged figures.

    Every mean is over the whole step, so the gradient does not depend on the split into microbatches and processes.
    """
    lengths = [int(row.train_mask.sum()) for row in rows]
    num_tokens, num_rows = map(int, distributed.all_reduce_sum(sum(lengths), sum(map(bool, lengths))))
    means, device = TokenMeans(), run.policy.device
    for segments, scale in run.microbatches(rows):
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
        weights = token_weights(segments, args.loss_aggregation, num_tokens, num_rows, args.constant_length).to(device)
        loss = check_finite((losses * weights).sum(), segments)
        (loss * scale).backward()
        if scale:
            means.add(figures)
            means.add_loss("policy_loss", (policy_losses * weights).sum())
            means.add_gap((new - batch.sampler)[batch.sampled])
    return means.result()


# ------------------------------------------------------------------------------------------------------------- main


if __name__ == "__main__":
    args = prepare(arguments.read(Args), check)
    envs = eval_envs = None
    if distributed.rank() == 0:  # only one process runs environments
        kwargs = {"num_envs": args.num_envs, "tokenizer": tokenizer_of(args), **env_kwargs(args), "observation": "new"}
        spec = environment_spec(args.env_id)
        with plain_errors(args.env_id):
            envs = gym.make_vec(spec, split=args.split, **kwargs)
            eval_envs = gym.make_vec(spec, split=args.eval_split, **kwargs) if args.eval_episodes else None
    run = make_run(args, envs, eval_envs, entropies=True)
    count = args.episodes_per_iteration
    branching = Branching(args.group_size, args.initial_episodes, args.beam_size, args.branch_alpha, args.branch_beta,
                          args.entropy_window, math.log(run.vocab_size), args.seed)  # fmt: skip
    if run.sampler is not None:
        run.sampler.branching = branching

    def episodes(iteration: int) -> list[tuple[int, int]]:
        """Return numbers and tasks of an iteration's episodes, groups side by side."""
        return draw_episodes(args.seed, iteration, count, run.tasks, args.group_size, (iteration - 1) * count)

    with checkpoint.saving_at_exit(run.saver, run.state):
        run.start()
        for iteration in range(run.state["iteration"] + 1, run.num_iterations + 1):
            run.begin_iteration(iteration)

            # rollout
            if args.entropy_unit == "deviation":
                branching.unit = run.state.get("entropy_deviation", math.inf)  # none is known yet: no change counts
            rows = run.collect(iteration, episodes)
            groups = make_groups(rows, args.group_size, args.gamma)
            signal = sum(len(group.rows) for group in groups if group.has_signal(args.credit)) / max(1, len(rows))
            run.state["entropy_deviation"], branches = branching.figures()
            run.mark("rollout")

            # log-probabilities and advantages
            fresh, rows = rows, rows + run.replayed(rows)
            for row in rows:
                row.train_mask = row.action_mask if args.loss_mask else row.after_prompt()
            if args.kl_coef > 0:
                run.score_reference(rows)
            if args.old_logprobs == "trainer" or not args.loss_mask:  # the sampler has none for tool results
                run.score_policy(rows)
            compute_advantages(groups, args)
            if args.drop_void_turns:
                run.drop_void_turns(fresh)
            rejected = reject_far_rows(rows, args.reject_ratio) if args.reject_ratio else 0.0
            run.mark("score")

            # update
            run.saver.begin_update()
            for minibatch in run.minibatches(rows, iteration):
                metrics = backward(minibatch, args, run)
                metrics["grad_norm"] = run.optimizer.step(args.max_grad_norm, minibatch)[0]
                run.metrics.append(metrics)
            run.mark("train")
            scalars = {"charts/groups_with_signal": signal, "charts/rejected": rejected} | branches
            run.end_iteration(iteration, fresh, scalars | own_work(fresh))
        run.close()
