# docs and results: docs/learners/ppo_llm.md
"""PPO for language models that call tools, in one file.

An episode is one growing row of tokens: prompt, sampled span, what the environment wrote, sampled span, ... The row is
never decoded and encoded again. A mask says which tokens were sampled; only those carry advantages and loss.

    python learner/ppo_llm.py                                             # tiny policy, generated world, laptop CPU
    python learner/ppo_llm.py --env-id AgentR1/HotpotQA-v0 --model Qwen/Qwen2.5-3B-Instruct --engine vllm   # one GPU
    torchrun --nproc-per-node 4 learner/ppo_llm.py --engine vllm-server --vllm-url http://localhost:8000 ...   # more
"""

import json
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import nn
from transformers import AutoModel, PreTrainedModel

import agent_r1  # noqa: F401  (registers the environments)
from llm_utils import arguments, checkpoint, distributed
from llm_utils.forward import gather, microbatches, pad, policy_forward, score
from llm_utils.logger import Logger
from llm_utils.models import check_vocabulary, load_policy, model_source, tokenizer_source, vllm_engine
from llm_utils.optimizer import Float32AdamW
from llm_utils.slots import SlotModel
from llm_utils.trajectory import Trajectory, train_positions

Array = np.ndarray


@dataclass
class Args:
    exp_name: str = Path(__file__).stem
    """the name of this experiment"""
    seed: int = 1
    """seed of everything: tasks, sampling, minibatches"""
    cuda: bool = True
    """use a GPU where there is one"""
    num_threads: int = 0
    """CPU threads of torch in each process (0: all cores, shared by the processes)"""
    deterministic: bool = False
    """the same weights to the bit in every run: deterministic kernels, tool results taken in the order of the calls"""
    track: bool = False
    """also log to Weights & Biases"""
    wandb_project_name: str = "agent-r1"
    """the W&B project"""
    save_model: bool = False
    """write the trained policy and its tokenizer to runs/{run_name}/model"""
    checkpoint_every: int = 10
    """iterations between checkpoints; there is one at the end, too (0: only where something ends the run early)"""
    resume: str | None = None
    """a run folder: go on from its checkpoint, in the same folder, with its arguments"""

    env_id: str = "AgentR1/MultihopWorld-v0"
    """the id of the environment"""
    env_kwargs: str = "{}"
    """further arguments of the environment, as JSON, e.g. '{"max_turns": 4}'"""
    split: str = "train"
    """the split that is trained on"""
    num_envs: int = 128
    """episodes that run at the same time"""
    model: str = "tiny"
    """a Hugging Face name, a folder, or "tiny": the policy shipped for the environment"""
    tokenizer: str | None = None
    """a tokenizer's name or folder (None: the model's own; "byte": the built-in byte tokenizer)"""
    lora_rank: int = 0
    """train LoRA adapters of this rank instead of the weights (0: the weights)"""
    gradient_checkpointing: bool = False
    """compute activations again in the backward pass: less memory, more time"""

    engine: Literal["transformers", "vllm", "vllm-server"] = "transformers"
    """what samples: transformers or vLLM in this process, or running `vllm serve` processes"""
    vllm_url: str = "http://localhost:8000"
    """address of the server of --engine vllm-server"""
    max_staleness: int = 0
    """iterations by which the weights that sampled may be older than those that train on it (0: on-policy)"""
    temperature: float = 1.0
    """sampling temperature; the trainer's log-probabilities are taken at the same temperature"""
    top_p: float = 1.0
    """nucleus sampling (1: off). Below 1 the sampler leaves the distribution that the loss assumes"""

    total_episodes: int = 5_120
    """episodes of training"""
    episodes_per_iteration: int = 256
    """episodes collected before each update"""
    truncation: Literal["outcome", "bootstrap"] = "outcome"
    """a truncated episode is paid `outcome/unfinished` by the environment, or bootstraps from the critic"""

    learning_rate: float = 3e-4
    """learning rate of the policy"""
    critic_learning_rate: float = 1e-3
    """learning rate of the critic"""
    anneal_lr: bool = True
    """anneal both learning rates linearly to 0"""
    critic_warmup: int = 1
    """iterations at the start in which only the critic learns"""
    update_epochs: int = 1
    """passes over the collected episodes"""
    num_minibatches: int = 4
    """optimizer steps in a pass"""
    microbatch_tokens: int = 4096
    """tokens (padding counted) in one forward and backward; smaller needs less memory, the gradient is the same"""
    advantage: Literal["tokens", "turns", "bilevel"] = "tokens"
    """what GAE runs over: action tokens, turns, or turns and then the tokens of each turn"""
    gamma: float = 1.0
    """discount per action token (per turn with --advantage turns)"""
    gae_lambda: float = 1.0
    """lambda of GAE"""
    gamma_turn: float = 0.95
    """discount per turn of the upper level of --advantage bilevel"""
    adv_norm: Literal["token", "turn", "none"] = "token"
    """whitening over the whole batch: every action token counts the same, every turn counts the same, or none"""
    clip_coef: float = 0.2
    """the ratio is clipped at 1 - clip_coef ..."""
    clip_coef_high: float = 0.28
    """... and at 1 + clip_coef_high"""
    clip_coef_value: float = 0.2
    """range in which the new value may move from the old one in the value loss (0: no clipping)"""
    ent_coef: float = 0.0
    """weight of the entropy bonus"""
    kl_coef: float = 0.0
    """weight of the KL divergence to the first policy (0: no reference model is loaded)"""
    kl_in: Literal["loss", "reward"] = "loss"
    """is the KL divergence added to the loss, or taken from the reward of every sampled token?"""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """estimator in the loss; k1 has no gradient on average, k2 the right one (in the reward it is always k1)"""
    target_kl: float | None = None
    """stop the passes of an iteration when the approximate KL to the sampling policy exceeds this"""
    max_grad_norm: float = 1.0
    """clipping of the gradient norm, policy and critic apart"""
    old_logprobs: Literal["sampler", "trainer"] = "sampler"
    """log-probabilities in the ratio's denominator: as sampled, or computed again by the trainer before the update"""
    importance_cap: float = 2.0
    """with --old-logprobs trainer: bound of the weight trainer / sampler of a token (truncated importance sampling)"""
    loss_mask: bool = True
    """train on sampled tokens only; --no-loss-mask also trains on the environment's (Agent-R1, table 4)"""
    advantage_mask: bool = True
    """advantages over sampled tokens only; --no-advantage-mask runs over all (Agent-R1, table 4)"""

    eval_episodes: int = 256
    """held-out tasks per evaluation (0: no evaluation)"""
    eval_split: str = "test"
    """the split that is evaluated on"""
    eval_every: int = 5
    """iterations between evaluations (there is one at the start and one at the end)"""


# ----------------------------------------------------------------------------------------------- generation engine


class TransformersEngine:
    """Samples spans for many episodes at once from a `transformers` model, whose keys and values it keeps.

    `feed` gives a slot new tokens of its episode; `step` runs one forward, either of waiting new tokens (batched) or of
    one token of every row that is writing, and returns the spans that were completed by it. No row waits for another.
    Every episode has its own random numbers, so but for rounding it does not depend on its neighbours.
    """

    NOISE = 256  # random numbers drawn at a time for a slot
    overlaps = False  # a step is work for this process, so there is no use in one while the trainer works

    def __init__(
        self, model: PreTrainedModel, num_slots: int, vocab_size: int, temperature: float = 1.0, top_p: float = 1.0
    ) -> None:
        self.slots, self.temperature, self.top_p = SlotModel(model, num_slots, vocab_size), temperature, top_p
        self.version = 0  # iterations that the weights have been trained for
        self.release()

    def release(self) -> None:
        """Forget all episodes."""
        n = self.slots.num_slots
        self.slots.clear()
        self.pending: dict[int, Array] = {}  # slot -> tokens that the model has not seen
        self.last = np.zeros(n, np.int64)  # the newest sampled token, not yet in the cache
        self.writing = np.zeros(n, bool)
        self.count, self.room = np.zeros(n, np.int64), np.zeros(n, np.int64)  # tokens of the span, and their bound
        self.written = [np.zeros((n, 64), kind) for kind in (np.int32, np.float32, np.int32)]  # span, logprob, version
        self.stops = np.zeros(self.slots.vocab_size, bool)
        self.generators: list[np.random.Generator | None] = [None] * n
        self.noise, self.noise_used = np.zeros((n, self.NOISE), np.float32), np.full(n, self.NOISE)

    def twin(self, temperature: float) -> "TransformersEngine":
        """Another engine on the same weights, with episodes of its own."""
        return TransformersEngine(self.slots.model, self.slots.num_slots, self.slots.vocab_size, temperature)

    @torch.no_grad()
    def update(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """New weights. Episodes go on under them; keys and values that older weights computed stay until they end."""
        own = dict(self.slots.model.named_parameters())
        for name, weight in weights:
            own[name].copy_(weight)
        self.version = version

    def feed(self, slot: int, tokens: Array, max_new_tokens: int, stop_token_ids: list[int], seed: Any = None) -> None:
        """Append `tokens` to the slot's episode and have the next span sampled. `seed` begins a new episode."""
        if seed is not None:
            self.slots.length[slot] = 0
            self.generators[slot], self.noise_used[slot] = np.random.default_rng(seed), self.NOISE
        else:  # the last sampled token ended the span: the model has not seen it yet
            tokens = np.concatenate([self.last[slot : slot + 1], tokens])
        self.pending[slot] = tokens
        self.count[slot], self.room[slot] = 0, max_new_tokens
        self.stops[:] = False
        self.stops[stop_token_ids] = True

    @property
    def busy(self) -> bool:
        return bool(self.pending) or bool(self.writing.any())

    def step(self) -> list[tuple[int, Array, Array, Array]]:
        """One forward. Returns (slot, span, log-probabilities, weight versions) of the turns that it completed."""
        if self.pending and (8 * len(self.pending) >= len(self.last) or not self.writing.any()):
            return [span for slots, logits in self.slots.prefill(self.pending) for span in self._accept(slots, logits)]
        rows = np.flatnonzero(self.writing)
        return self._accept(rows, self.slots.decode(rows, self.last[rows]))

    @torch.inference_mode()
    def _accept(self, rows: Array, logits: torch.Tensor) -> list[tuple[int, Array, Array, Array]]:
        """Sample the next token of `rows` and return the spans that end with it."""
        logprobs = torch.log_softmax(logits if self.temperature in (0, 1) else logits / self.temperature, -1)
        if self.temperature == 0:
            chosen = logprobs.argmax(-1)
        else:
            for row in rows[self.noise_used[rows] == self.NOISE]:
                self.noise[row], self.noise_used[row] = self.generators[row].random(self.NOISE, np.float32), 0
            noise = torch.from_numpy(self.noise[rows, self.noise_used[rows]]).to(logits.device)
            self.noise_used[rows] += 1
            chosen = sample(logprobs, noise, self.top_p)
        chosen_logprobs = logprobs.gather(1, chosen[:, None])[:, 0].cpu().numpy()
        if not np.isfinite(chosen_logprobs).all():
            raise FloatingPointError("the policy's logits are not finite", [])
        tokens = chosen.cpu().numpy()
        if self.count[rows].max() == self.written[0].shape[1]:
            self.written = [np.pad(x, ((0, 0), (0, x.shape[1]))) for x in self.written]
        for store, value in zip(self.written, (tokens, chosen_logprobs, self.version), strict=True):
            store[rows, self.count[rows]] = value
        self.last[rows] = tokens
        self.count[rows] += 1
        ended = self.stops[tokens] | (self.count[rows] >= self.room[rows])
        self.writing[rows] = ~ended
        return [(int(row), *(x[row, : self.count[row]].copy() for x in self.written)) for row in rows[ended]]


def sample(logprobs: torch.Tensor, noise: torch.Tensor, top_p: float = 1.0) -> torch.Tensor:
    """One token per row of log-probabilities [n, vocabulary] from one uniform number per row [n], by inversion."""
    probs = logprobs.exp()
    if top_p < 1:  # keep the most likely tokens until their mass reaches top_p
        ordered, order = probs.sort(-1, descending=True)
        probs = torch.zeros_like(probs).scatter(-1, order, ordered * (ordered.cumsum(-1) - ordered < top_p))
    mass = probs.cumsum(-1)
    chosen = torch.searchsorted(mass, mass[:, -1:] * noise[:, None].clamp(max=1 - 1e-6), right=True)[:, 0]
    return chosen.clamp(max=probs.shape[1] - 1)  # beyond it only where the probabilities are NaN


# ---------------------------------------------------------------------------------------------------------- rollout


class Sampler:
    """Plays episodes. There is no barrier: a span is sent the moment it ends, and a slot whose episode is over begins
    the next one that waits. What is in flight stays so between iterations (`--max-staleness`)."""

    def __init__(self, envs: Any, engine: Any, seed: int, in_order: bool = False) -> None:
        self.envs, self.engine, self.seed, self.in_order = envs, engine, seed, in_order
        self.on_done: Callable[[], Any] = lambda: None  # called when an episode is over
        self.queue: deque[tuple[int, int]] = deque()  # episode number, task index
        self.free = list(range(envs.num_envs))
        self.live: dict[int, Trajectory] = {}  # slot -> its episode
        self.acting: list[int] = []  # slots whose span is with the environment, in the order of sending
        self.done: dict[int, Trajectory] = {}  # episode number -> row

    def collect(self, numbers: Sequence[int]) -> list[Trajectory]:
        """Play on until these episodes are over, and return their rows in this order."""
        missing = set(numbers) - self.done.keys()
        while missing:
            self.advance()
            missing -= self.done.keys()
        if not self.live:  # as at the start of the run, so that a resumed one is the same to the bit
            self.free.sort()
            self.engine.release()
        return [self.done.pop(number) for number in numbers]

    def advance(self, write: bool = True) -> None:
        """One round: begin episodes, write (one engine step), act. With write=False nothing is waited for."""
        if write and self.queue and self.free:
            self._begin()
        ended = self.engine.step() if self.engine.busy and (write or self.engine.overlaps) else []
        if ended:
            for slot, span, logprobs, versions in ended:
                row, start = self.live[slot], len(self.live[slot].tokens)
                row.turns.append((start, start + len(span), 0.0))
                row.span_logprobs.append(logprobs)
                row.span_versions.append(versions)
                row.tokens = np.concatenate([row.tokens, span])
            self.envs.send([span for _, span, *_ in ended], [slot for slot, *_ in ended])
            self.acting += [slot for slot, *_ in ended]
        if not self.acting:
            return
        if self.in_order:  # all of them, or what the engine computes next would depend on the tools' speed
            results = self.envs.recv(len(self.acting))
        else:
            wait = write and not self.engine.busy
            results = self.envs.recv(int(wait), timeout=None if wait else 0.0)
        for result in sorted(zip(*results, strict=True), key=lambda result: self.acting.index(result[0])):
            self._act(*result)

    def _begin(self) -> None:
        mask, tasks, begun = np.zeros(self.envs.num_envs, bool), [0] * self.envs.num_envs, {}
        while self.queue and self.free:
            slot, (episode, task) = self.free.pop(), self.queue.popleft()
            mask[slot], tasks[slot], begun[slot] = True, task, episode
        states, infos = self.envs.reset(seed=tasks, options={"reset_mask": mask, "task_index": tasks})
        for slot, episode in begun.items():
            self.live[slot] = Trajectory(episode, tasks[slot], len(states[slot]), states[slot])
            info = {name: infos[name][slot] for name in ("max_new_tokens", "stop_token_ids")}
            self.engine.feed(slot, states[slot], **info, seed=[self.seed, episode])

    def _act(self, slot: int, state: Array, reward: float, terminated: bool, truncated: bool, info: Any) -> None:
        self.acting.remove(slot)
        row, (start, end, _) = self.live[slot], self.live[slot].turns[-1]
        if not np.array_equal(state[:end], row.tokens):
            raise RuntimeError(
                f"task {info.get('task_id')}: the new state doesn't begin with the old state and the sampled span. "
                "An environment or wrapper that edits its context can't be trained as one row"
            )
        row.tokens, row.turns[-1] = state, (start, end, float(reward))
        calls = info.get("tool_calls", [])
        errors = sum(not call["ok"] for call in calls)
        row.stats.update({"return": reward, "turns": 1, "tool_calls": len(calls), "tool_errors": errors})
        row.reward_terms.update(info.get("reward_terms", {}))
        if not (terminated or truncated):
            self.engine.feed(slot, state[end:], info["max_new_tokens"], info["stop_token_ids"])
            return
        row.terminated, row.truncated = bool(terminated), bool(truncated)
        row.lay_out()
        row.stats.update(success=float(info.get("is_success", False)), truncated=float(truncated))
        row.stats.update(sampled_tokens=int(row.action_mask.sum()), tokens=len(state), **info.get("metrics", {}))
        self.done[row.episode] = self.live.pop(slot)
        self.free.append(slot)
        self.on_done()


def rollout(envs: Any, engine: Any, episodes: Sequence[tuple[int, int]], seed: int) -> list[Trajectory]:
    """Play `episodes`, pairs of (episode number, task index), and return their rows in this order."""
    sampler = Sampler(envs, engine, seed)
    sampler.queue.extend(episodes)
    return sampler.collect([episode for episode, _ in episodes])


# ------------------------------------------------------------------------------------------------------- advantages


def gae_tokens(
    r: Array, v: Array, m: Array, gamma: float = 1.0, lam: float = 0.95, done: bool = True, v_last: float = 0.0
) -> tuple[Array, Array]:
    """GAE over the action tokens of one row: observation tokens neither discount nor contribute.

    `r`, `v`, `m` have an entry per token: reward, value of the state before the token, action mask. A terminated row
    (`done`) ends with value 0, a truncated one with `v_last`. Returns advantages and returns, 0 off the mask.
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
    """GAE in which a turn is one action; `v_turn[k]` is the value before the first sampled token of turn k."""
    advantages, next_value, last = np.zeros(len(r_turn)), (0.0 if done else v_last), 0.0
    for k in reversed(range(len(r_turn))):
        last = r_turn[k] + gamma * next_value - v_turn[k] + gamma * lam * last
        advantages[k], next_value = last, v_turn[k]
    return advantages, advantages + np.asarray(v_turn)


def gae_bilevel(
    r: Array, v: Array, m: Array, turn_end: Array, gamma: float = 1.0, lam: float = 1.0, gamma_turn: float = 0.95,
    done: bool = True, v_last: float = 0.0,
) -> tuple[Array, Array]:  # fmt: skip
    """VAGEN's GAE on two levels: over turn ends, whose returns become the rewards of GAE inside each turn."""
    ends, advantages, returns = np.flatnonzero(turn_end), np.zeros(len(r)), np.zeros(len(r))
    target = np.array(r, float)
    next_value, last = (0.0 if done else v_last), 0.0
    for t in ends[::-1]:  # upper level: the value of a turn is taken at its last token
        last = r[t] + gamma_turn * next_value - v[t] + gamma_turn * lam * last
        target[t], next_value = last + v[t], v[t]
    next_value, last = (0.0 if done else v_last), 0.0
    for t in np.flatnonzero(m)[::-1]:  # lower level: begins anew at every turn end
        if turn_end[t]:
            next_value, last = 0.0, 0.0
        last = target[t] + gamma * next_value - v[t] + gamma * lam * last
        advantages[t], returns[t], next_value = last, last + v[t], v[t]
    return advantages, returns


def value_positions(row: Trajectory, args: Args) -> Array:
    """The states that the critic is trained on, each named by the token that follows it."""
    if args.advantage == "turns":  # a turn is one action: it begins in one state
        return np.isin(np.arange(len(row.tokens)), [start for start, _, _ in row.turns])
    return train_positions(row, args.advantage_mask) & train_positions(row, args.loss_mask)


def compute_advantages(rows: Sequence[Trajectory], args: Args) -> None:
    """Fill `advantages` and `returns` of all rows, then whiten the advantages over the whole batch."""
    weights = []  # how much a token counts in the statistics
    for row in rows:
        mask, gammas = train_positions(row, args.advantage_mask), (args.gamma, args.gae_lambda)
        end: dict[str, Any] = {"done": not (row.truncated and args.truncation == "bootstrap"), "v_last": row.value_last}
        weights.append(mask.astype(float))
        if args.adv_norm == "turn":
            for start, stop, _ in row.turns:
                weights[-1][start:stop] /= stop - start
        if args.advantage == "turns":  # every token of a turn has the turn's advantage
            r_turn = np.array([row.rewards[start:stop].sum() for start, stop, _ in row.turns])
            v_turn = np.array([row.values[start] for start, _, _ in row.turns])
            lengths = [stop - start for start, stop, _ in row.turns]
            advantages, returns = gae_turns(r_turn, v_turn, *gammas, **end)
            row.advantages[row.action_mask] = np.repeat(advantages, lengths)
            row.returns[row.action_mask] = np.repeat(returns, lengths)
        elif args.advantage == "bilevel":
            turn_end = np.isin(np.arange(len(row.tokens)), [stop - 1 for _, stop, _ in row.turns])
            estimates = gae_bilevel(row.rewards, row.values, mask, turn_end, *gammas, args.gamma_turn, **end)
            row.advantages, row.returns = (x.astype(np.float32) for x in estimates)
        else:
            estimates = gae_tokens(row.rewards, row.values, mask, *gammas, **end)
            row.advantages, row.returns = (x.astype(np.float32) for x in estimates)
    weight, advantages = np.concatenate(weights), np.concatenate([row.advantages for row in rows])
    if args.adv_norm == "none" or not weight.any():
        return
    mean = np.average(advantages, weights=weight)
    std = np.sqrt(np.average((advantages - mean) ** 2, weights=weight) + 1e-8)
    for row, weight in zip(rows, weights, strict=True):
        row.advantages = np.where(weight > 0, (row.advantages - mean) / std, 0.0).astype(np.float32)


# ------------------------------------------------------------------------------------------------------------- loss


class Critic(nn.Module):
    """A value head on a backbone of its own, which begins as the policy's."""

    def __init__(self, folder: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.backbone = AutoModel.from_pretrained(folder, dtype=dtype)
        self.head = nn.Linear(self.backbone.config.hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Tokens [B, T] -> values [B, T]: entry t is the value of the state that ends with token t."""
        return self.head(self.backbone(input_ids=ids, use_cache=False).last_hidden_state.float())[..., 0]


def kl_divergence(x: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimators of KL(policy || reference) from x = log policy - log reference on the policy's own samples."""
    x = x.clamp(-20, 20)
    return {"k1": x, "k2": x.square() / 2, "k3": ((-x).exp() - 1 + x).clamp(max=10)}[estimator]


def policy_loss(
    new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped objective of PPO per token [N], to be minimised, and figures per token for the log."""
    logratio = (new - old).clamp(-20, 20)
    ratio = logratio.exp()
    loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    clipped = ((ratio < 1 - clip_low) | (ratio > 1 + clip_high)).float()
    return loss, {"old_approx_kl": -logratio, "approx_kl": ratio - 1 - logratio, "clipfrac": clipped}


def value_loss(new: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, clip: float) -> torch.Tensor:
    """Half the squared error of the critic per state, the larger of the free and the clipped one. All [N]."""
    loss = (new - returns).square()
    if clip > 0:
        loss = torch.max(loss, (old + (new - old).clamp(-clip, clip) - returns).square())
    return loss / 2


@torch.no_grad()
def score_values(rows: Sequence[Trajectory], critic: Critic, budget: int, device: Any) -> None:
    """Fill `values` and `value_last` of all rows."""
    batches = list(microbatches(rows, budget))
    for i in range(distributed.most(len(batches))):  # every process takes part in every forward
        batch = batches[min(i, len(batches) - 1)]
        for row, values in zip(batch, critic(pad([row.tokens for row in batch], device)).cpu().numpy(), strict=True):
            row.values[1:], row.value_last = values[: len(row.tokens) - 1], float(values[len(row.tokens) - 1])


def backward(
    rows: Sequence[Trajectory], args: Args, policy: Any, critic: Critic, vocab_size: int, train_policy: bool = True,
    between: Callable[[], Any] = lambda: None,
) -> dict[str, float]:  # fmt: skip
    """Add the gradient of one optimizer step on `rows`, and return what is logged about it.

    Every mean is over the tokens of the whole step, so the gradient does not depend on how the step is cut into
    microbatches and processes. `between` is called after each microbatch.
    """
    device = policy.device
    trained = {id(row): (train_positions(row, args.loss_mask), value_positions(row, args)) for row in rows}
    num_tokens, num_states = distributed.total(*(sum(int(m[i].sum()) for m in trained.values()) for i in (0, 1)))
    batches, logs = list(microbatches(rows, args.microbatch_tokens)), Counter[str]()
    for i in range(distributed.most(len(batches))):  # every process takes part in every forward and backward
        batch, repeated = batches[min(i, len(batches) - 1)], i >= len(batches)
        tokens, states = zip(*(trained[id(row)] for row in batch), strict=True)
        share = 0 if repeated else distributed.world_size()  # gradients are averaged over processes
        figures: dict[str, torch.Tensor] = {}
        if train_policy:
            entropy_counts = args.ent_coef != 0
            new, entropy = policy_forward(policy, batch, tokens, vocab_size, args.temperature, entropy_counts)
            names = ("old_logprobs", "logprobs", "advantages", "ref_logprobs", "action_mask")
            old, sampler, advantages, reference, sampled = (gather(batch, name, tokens, device) for name in names)
            losses, figures = policy_loss(new, old, advantages, args.clip_coef, args.clip_coef_high)
            losses = losses * torch.where(sampled, (old - sampler).exp().clamp(max=args.importance_cap), 1.0)
            figures |= {"policy_loss": losses, "entropy": entropy}
            if entropy_counts:
                losses = losses - args.ent_coef * entropy
            if args.kl_coef > 0:
                figures["ref_kl"] = kl_divergence(new - reference, "k3")
                if args.kl_in == "loss":
                    losses = losses + args.kl_coef * kl_divergence(new - reference, args.kl_estimator)
            loss = losses.sum() / max(1, num_tokens)
            if not torch.isfinite(loss):  # one such step would destroy the weights
                raise FloatingPointError(f"the policy's loss is {loss.item()}", batch)
            (loss * share).backward()
        at = pad(states, device).nonzero(as_tuple=True)
        old, returns = (gather(batch, name, states, device) for name in ("values", "returns"))
        values = critic(pad([row.tokens for row in batch], device))[at[0], at[1] - 1]
        loss = value_loss(values, old, returns, args.clip_coef_value).sum() / max(1, num_states)
        if not torch.isfinite(loss):
            raise FloatingPointError(f"the critic's loss is {loss.item()}", batch)
        (loss * share).backward()
        if not repeated:
            logs.update({name: float(value.detach().sum()) / max(1, num_tokens) for name, value in figures.items()})
            logs["value_loss"] += loss.item()
        between()
    return dict(zip(logs, distributed.total(*logs.values()), strict=True))


# ------------------------------------------------------------------------------------------------------------- main


if __name__ == "__main__":
    args = checkpoint.load_args(tyro.cli(Args), Path(__file__).stem)
    arguments.check(args)
    rank, world_size, device = distributed.setup(args.cuda)
    run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}".replace("/", "_")
    run_dir = Path(args.resume) if args.resume else distributed.from_first(Path("runs") / run_name)
    num_iterations = max(1, args.total_episodes // args.episodes_per_iteration)
    torch.set_num_threads(args.num_threads or max(1, (os.cpu_count() or 1) // distributed.local_world_size()))
    torch.use_deterministic_algorithms(args.deterministic)
    torch.manual_seed(args.seed)

    # environments, models, engine
    source = model_source(args.model, args.env_id)
    tokenizer = tokenizer_source(args.tokenizer, source, args.env_id)
    if rank == 0:
        kwargs = {"num_envs": args.num_envs, "tokenizer": tokenizer, **json.loads(args.env_kwargs)}
        if args.truncation == "bootstrap":
            kwargs["unfinished_reward"] = 0.0
        envs = gym.make_vec(args.env_id, split=args.split, **kwargs)
        eval_envs = gym.make_vec(args.env_id, split=args.eval_split, **kwargs) if args.eval_episodes else envs
        num_tasks = envs.envs[0].num_tasks
    vocab_size = distributed.from_first(envs.single_action_space.vocab_size if rank == 0 else 0)
    policy = load_policy(source, device, args, checkpoint.find(run_dir) / "policy" if args.resume else None)
    check_vocabulary(policy, vocab_size)
    critic = distributed.shard(Critic(source, policy.dtype).eval(), device)
    reference = load_policy(source, device) if args.kl_coef > 0 else None
    optimizer = Float32AdamW((policy, critic), (args.learning_rate, args.critic_learning_rate), betas=(0.9, 0.95))
    in_place = args.engine == "transformers" and world_size == 1  # the engine samples from the trained weights
    if rank == 0:
        if args.engine == "transformers":
            model = policy if in_place else load_policy(source, device, whole=True)
            engine: Any = TransformersEngine(model, args.num_envs, vocab_size, args.temperature, args.top_p)
        else:
            engine = vllm_engine(args, source, vocab_size)
        eval_engine = engine.twin(temperature=0.0)  # evaluations are greedy
        sampler = Sampler(envs, engine, args.seed, args.deterministic)

    # files and logs
    run: dict[str, Any] = {"iteration": 0, "global_step": 0, "train_seconds": 0.0, "summary": {}}
    if args.resume:
        run = checkpoint.load(run_dir, critic, optimizer)["run"]
    saver = checkpoint.Checkpointer(run_dir, policy, critic, optimizer, rank)
    if rank == 0:
        log = Logger(run_dir, args, num_iterations * args.episodes_per_iteration, run)
        sampler.on_done = log.bar.update

    def push_weights() -> None:
        """Give the sampling engine the weights that the trainer has now."""
        weights = iter(()) if in_place else distributed.weights(policy)
        if rank == 0:
            engine.update(weights, run["iteration"])
        deque(weights, maxlen=0)  # every process takes part in collecting them

    def poll() -> None:
        """Called between microbatches: neither tools nor servers wait for the trainer."""
        if rank == 0 and args.max_staleness:
            sampler.advance(write=False)

    def evaluate() -> None:
        """Play the first tasks of the evaluation split."""
        if rank == 0 and args.eval_episodes:
            tasks = [(i, i) for i in range(min(args.eval_episodes, eval_envs.envs[0].num_tasks))]
            log.evaluation(rollout(eval_envs, eval_engine, tasks, args.seed), run)

    def episodes(iteration: int) -> list[tuple[int, int]]:
        """Numbers and tasks of an iteration's episodes: a function of the seed."""
        tasks = np.random.default_rng([args.seed, iteration]).integers(num_tasks, size=args.episodes_per_iteration)
        return list(enumerate(tasks.tolist(), (iteration - 1) * args.episodes_per_iteration))

    queued = run["iteration"]
    with checkpoint.saving_at_exit(saver, run):
        push_weights()
        saver.boundary({"algorithm": Path(__file__).stem, "args": asdict(args), "run": run})
        if run["iteration"] == 0:
            evaluate()
        for iteration in range(run["iteration"] + 1, num_iterations + 1):
            started = time.time()
            optimizer.scale_learning_rates(1 - (iteration - 1) / num_iterations if args.anneal_lr else 1.0)

            # rollout
            rows: list[Trajectory] = []
            if rank == 0:
                while queued < min(num_iterations, iteration + args.max_staleness):
                    queued += 1
                    sampler.queue.extend(episodes(queued))
                rows = sampler.collect([number for number, _ in episodes(iteration)])
            rolled_out = time.time()

            # values, log-probabilities, advantages
            mine = distributed.scatter(rows)
            score_values(mine, critic, args.microbatch_tokens, device)
            scorers = {"ref_logprobs": reference} if args.kl_coef > 0 else {}
            if args.old_logprobs == "trainer" or not args.loss_mask:  # the sampler has none for what tools wrote
                scorers["old_logprobs"] = policy
            for name, model in scorers.items():
                masks = [train_positions(row, args.loss_mask) for row in mine]
                score(mine, masks, name, model, args.microbatch_tokens, vocab_size, args.temperature, poll)
            rows = distributed.gather(mine)
            if args.kl_in == "reward":
                for row in rows:
                    row.rewards -= args.kl_coef * (row.old_logprobs - row.ref_logprobs) * row.action_mask
            if rank == 0:
                compute_advantages(rows, args)
            scored = time.time()

            # update
            saver.begin_update()
            logs: list[dict[str, float]] = []
            rng, num_rows = np.random.default_rng([args.seed, iteration]), distributed.from_first(len(rows))
            orders = [rng.permutation(num_rows) for _ in range(args.update_epochs)]
            for part in [part for order in orders for part in np.array_split(order, args.num_minibatches)]:
                mine = distributed.scatter([rows[i] for i in part] if rank == 0 else [])
                train_policy = iteration > args.critic_warmup
                logs.append(backward(mine, args, policy, critic, vocab_size, train_policy, poll))
                norms = optimizer.step(args.max_grad_norm, mine)
                logs[-1] |= {"grad_norm": norms[0], "critic_grad_norm": norms[1]}
                if args.target_kl is not None and logs[-1].get("approx_kl", 0.0) > args.target_kl:
                    break
            trained = time.time()
            run["iteration"] = iteration
            push_weights()

            # logging
            if rank == 0:
                masks = [value_positions(row, args) for row in rows]
                targets = gather(rows, "returns", masks, "cpu").numpy()
                errors = targets - gather(rows, "values", masks, "cpu").numpy()
                num_turns = sum(row.stats["turns"] for row in rows)
                run["global_step"] += int(num_turns)
                run["train_seconds"] += time.time() - started
                scalars = {
                    "time/rollout": rolled_out - started,
                    "time/score": scored - rolled_out,
                    "time/train": trained - scored,
                    "time/sync": time.time() - trained,
                    "losses/explained_variance": 1 - float(errors.var()) / max(float(targets.var()), 1e-8),
                    "charts/learning_rate": optimizer.adam.param_groups[0]["lr"],
                    "charts/SPS": num_turns / (trained - started),
                }
                log.iteration(rows, logs, run, scalars)
            if iteration == num_iterations or (args.eval_every and iteration % args.eval_every == 0):
                evaluate()
            saver.boundary({"algorithm": Path(__file__).stem, "args": asdict(args), "run": run})
            if args.checkpoint_every and (iteration % args.checkpoint_every == 0 or iteration == num_iterations):
                saver.save()
        if args.save_model:
            checkpoint.save_model(policy, run_dir / "model", tokenizer)
    if rank == 0:
        envs.close()
        log.close()
    distributed.leave()
