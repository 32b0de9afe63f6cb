# docs and results: docs/learners/gigpo_llm.md
"""GiGPO for language models that call tools, in one file.

The episodes of a group share a task, and many of their turns share a state: the last tool result. A turn's advantage is
its return above the returns of the other episodes, and above their returns from the same state. There is no critic. The
default keeps the direction of the gradient; the published form, --form published, is biased.

    python learner/gigpo_llm.py                                           # shipped policy, generated world, laptop CPU
    torchrun --nproc-per-node 4 learner/gigpo_llm.py --engine vllm-server --vllm-url http://localhost:8000 ...   # GPUs
    python learner/gigpo_llm.py --env-id AgentR1/HotpotQA-v0 --model Qwen/Qwen2.5-3B-Instruct \\
        --engine vllm --lora-rank 16                                      # one GPU of 80 GB
"""

import llm_utils.setup.startup  # noqa: F401  isort: skip  (reports a missing package in one line)

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

    # advantages
    form: Literal["unbiased", "published"] = "unbiased"
    """unbiased: compare with other episodes only, and take the weighted mean of both advantages in shared states.
    published: compare with the own group and state, and take the sum (biased)"""
    step_weight: float = 1.0
    """weight of the advantage within equal states, relative to that within the group (0: as GRPO)"""
    gamma: float = 1.0
    """discount per turn (published: 0.95, in the advantage within equal states)"""
    scale_rewards: bool = True
    """divide advantages by a standard deviation of returns"""

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
    if args.loss_mask and not args.advantage_mask:
        raise SystemExit("--no-advantage-mask has no effect without --no-loss-mask: only the loss reads advantages")


# ------------------------------------------------------------------------------------------------------- advantages


def states(row: Trajectory) -> list[bytes]:
    """Return the state of each turn: the tokens of the environment before it, so the prompt or the last tool result.

    After a wrapper rewrote the context, the state of the next turn is the rewritten context.
    """
    found, end = [], 0
    for turn in row.turns:
        start = max(end, *(begin for begin in row.segment_starts if begin <= turn.start))
        found.append(row.tokens[start : turn.start].tobytes())
        end = turn.end
    return found


def centered(values: Array, scale: bool, eps: float = 1e-6) -> Array:
    """Subtract the mean. With `scale`, divide by the standard deviation (Bessel's correction)."""
    spread = values.std(ddof=1) + eps if scale and len(values) > 1 else 1.0
    return (values - values.mean()) / spread


def gigpo_advantages(
    returns: Array, totals: Array, of_turns: Sequence[Sequence[bytes]], args: Args, deviation: float | None = None
) -> tuple[Array, Array]:
    """Compute the advantages of one group's turns from their returns and states. Both are [episodes, turns].

    `totals` [episodes] are the sums of rewards, without discount. Also return a mask [episodes, turns]: True if another
    episode visits the turn's state.

    The published form (arXiv 2505.10978) is A_E + w A_S. A_E compares the episode's total within the group, A_S the
    turn's return within its state. Both means contain the episode itself, and turns with a shared state count more. The
    unbiased form compares with other episodes only. It is (A_E + w A_S) / (1 + w) in shared states and A_E elsewhere,
    where A_E is that of the turn's return. So it is this return less a baseline that the turn's action cannot change,
    divided by the deviation of other groups (`deviation`; None: of the group's other episodes).
    """
    visits: dict[bytes, list[tuple[int, int]]] = {}
    for i, of_episode in enumerate(of_turns):
        for k, state in enumerate(of_episode):
            visits.setdefault(state, []).append((i, k))
    step, shared = np.zeros(returns.shape), np.zeros(returns.shape, bool)
    for at in visits.values():
        episodes, turns = np.array(at).T
        values = returns[episodes, turns]
        if args.form == "published":
            step[episodes, turns] = centered(values, args.scale_rewards)
        for i, k in at:
            others = values[episodes != i]
            shared[i, k] = len(others) > 0
            if args.form == "unbiased" and len(others):
                step[i, k] = returns[i, k] - others.mean()
    if args.form == "published":
        return centered(totals, args.scale_rewards)[:, None] + args.step_weight * step, shared
    whole = returns - others_mean(returns)
    advantages = np.where(shared, (whole + args.step_weight * step) / (1 + args.step_weight), whole)
    if args.scale_rewards:
        advantages = advantages / (deviation or others_deviation(returns[:, :1].sum(1))[:, None])
    return advantages, shared


def compute_advantages(groups: Sequence[Group], args: Args) -> dict[str, float]:
    """Fill `advantages` of all trajectories. An episode without others in its group gets 0.

    Return figures for the log: the share of episodes in groups with a signal, and the share of turns after the first
    whose state another episode of the group visits.
    """
    num_rows = sum(len(group.rows) for group in groups)
    num_turns = sum(max(0, len(row.turns) - 1) for group in groups for row in group.rows)
    groups = [group for group in groups if len(group.rows) > 1]
    deviations = other_groups_deviation([group.returns[:, :1].sum(1) for group in groups])
    with_signal = num_shared = 0
    for group, deviation in zip(groups, deviations, strict=True):
        totals = np.array([row.turn_rewards().sum() for row in group.rows])
        of_turns = [states(row) for row in group.rows]
        advantages, shared = gigpo_advantages(group.returns, totals, of_turns, args, deviation)
        with_signal += len(group.rows) * bool(advantages.round(6).any())
        num_shared += int(shared[:, 1:].sum())
        if args.kl_in == "reward":  # not scaled: in a solved group scaling would amplify its noise
            costs = [-args.kl_coef * row.turn_sums(row.old_logprobs - row.ref_logprobs) for row in group.rows]
            to_go = returns_to_go(costs, args.gamma)
            advantages = advantages + to_go - others_mean(to_go)
        for row, values in zip(group.rows, advantages, strict=True):
            row.set_turn_advantages(values[: len(row.turns)], args.advantage_mask)
    return {
        "charts/groups_with_signal": with_signal / max(1, num_rows),
        "charts/shared_states": num_shared / max(1, num_turns),
    }


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
    run = make_run(args, envs, eval_envs)
    count = args.episodes_per_iteration

    def episodes(iteration: int) -> list[tuple[int, int]]:
        """Return numbers and tasks of an iteration's episodes, groups side by side."""
        return draw_episodes(args.seed, iteration, count, run.tasks, args.group_size, (iteration - 1) * count)

    with checkpoint.saving_at_exit(run.saver, run.state):
        run.start()
        for iteration in range(run.state["iteration"] + 1, run.num_iterations + 1):
            run.begin_iteration(iteration)

            # rollout
            rows = run.collect(iteration, episodes)
            groups = make_groups(rows, args.group_size, args.gamma)
            run.mark("rollout")

            # log-probabilities and advantages
            fresh, rows = rows, rows + run.replayed(rows)
            for row in rows:
                row.train_mask = row.action_mask if args.loss_mask else row.after_prompt()
            if args.kl_coef > 0:
                run.score_reference(rows)
            if args.old_logprobs == "trainer" or not args.loss_mask:  # the sampler has none for tool results
                run.score_policy(rows)
            figures = compute_advantages(groups, args)
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
            run.end_iteration(iteration, fresh, figures | {"charts/rejected": rejected})
        run.close()
