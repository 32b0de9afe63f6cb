# docs and results: docs/learners/ppo_llm.md
"""PPO for language models that call tools, in one file.

An episode is one growing row of tokens: prompt, sampled span, what the environment wrote, sampled span, ... The row is
never decoded and encoded again. A mask says which tokens were sampled; only those carry advantages and loss.

    python learner/ppo_llm.py                                             # tiny policy, generated world, laptop CPU
    python learner/ppo_llm.py --env-id AgentR1/HotpotQA-v0 --model Qwen/Qwen2.5-3B-Instruct   # one GPU
"""

import json
import os
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

import agent_r1  # noqa: F401  (registers the environments)
from llm_utils import checkpoint
from llm_utils.models import check_vocabulary, model_source, tokenizer_source
from llm_utils.optimizer import Float32AdamW

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
    """CPU threads of torch (0: all cores)"""
    track: bool = False
    """also log to Weights & Biases"""
    wandb_project_name: str = "agent-r1"
    """the W&B project"""
    wandb_entity: str | None = None
    """the W&B entity (team)"""
    save_model: bool = False
    """write the trained policy and its tokenizer to runs/{run_name}/model"""
    checkpoint_every: int = 0
    """iterations between checkpoints (0: only at Ctrl-C)"""
    resume: str | None = None
    """a run folder: go on from its checkpoint, in the same folder, with its arguments"""
    log_trajectories: int = 8
    """rows per iteration that are written to runs/{run_name}/trajectories.jsonl"""

    env_id: str = "AgentR1/MultihopWorld-v0"
    """the id of the environment"""
    env_kwargs: str = "{}"
    """further arguments of the environment, as JSON, e.g. '{"max_turns": 4}'"""
    split: str = "train"
    """the split that is trained on"""
    num_envs: int = 128
    """episodes that run at the same time (rows of the key-value cache)"""
    model: str = "tiny"
    """a Hugging Face name, a folder, or "tiny": the policy shipped for the environment"""
    tokenizer: str | None = None
    """a tokenizer's name or folder (None: the model's own; "byte": the built-in byte tokenizer)"""

    total_episodes: int = 5_120
    """episodes of training"""
    episodes_per_iteration: int = 256
    """episodes collected before each update"""
    temperature: float = 1.0
    """sampling temperature; the trainer's log-probabilities are taken at the same temperature"""
    top_p: float = 1.0
    """nucleus sampling (1: off). Below 1 the sampler leaves the distribution that the loss assumes"""
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
    """estimator of the KL divergence in the loss (in the reward it is k1)"""
    target_kl: float | None = None
    """stop the passes of an iteration when the approximate KL to the sampling policy exceeds this"""
    max_grad_norm: float = 1.0
    """clipping of the gradient norm, policy and critic apart"""
    old_logprobs: Literal["sampler", "trainer"] = "sampler"
    """log-probabilities of the sampling policy: as sampled, or computed again by the trainer before the update"""
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
    eval_temperature: float = 0.0
    """sampling temperature in evaluations (0: greedy)"""


# ---------------------------------------------------------------------------------------------------- trajectory row


@dataclass
class Trajectory:
    """One episode as one row of tokens. In the arrays, which `lay_out` fills, entry t belongs to token t."""

    episode: int
    task_index: int
    prompt_length: int
    tokens: Array  # int32: the prompt, then sampled spans and what the environment wrote, in turn
    terminated: bool = False
    truncated: bool = False
    turns: list[tuple[int, int, float]] = field(default_factory=list)  # first token, one past the last, reward
    span_logprobs: list[Array] = field(default_factory=list)  # the sampler's, of every turn
    stats: Counter[str] = field(default_factory=Counter)  # return, turns, success, exact match ...
    reward_terms: Counter[str] = field(default_factory=Counter)  # the named terms, summed over the episode

    action_mask: Array = field(init=False)  # bool: was the token sampled?
    logprobs: Array = field(init=False)  # the sampling policy's, 0 for tokens that were not sampled
    ref_logprobs: Array = field(init=False)  # the reference policy's, where a KL divergence is paid
    rewards: Array = field(init=False)  # a turn's reward, on the turn's last sampled token
    values: Array = field(init=False)  # the critic's value of the state before the token
    value_last: float = 0.0  # its value of the last state
    advantages: Array = field(init=False)
    returns: Array = field(init=False)  # what the critic regresses to

    def lay_out(self) -> None:
        """Lay the turns of a finished episode out over its tokens.

        An empty span has no token to carry its reward. The reward moves to the last token sampled before it, or, where
        there is none, to the end of the next span; an episode in which nothing was sampled trains nothing.
        """
        for name in ("logprobs", "ref_logprobs", "rewards", "values", "advantages", "returns"):
            setattr(self, name, np.zeros(len(self.tokens), np.float32))
        self.action_mask = np.zeros(len(self.tokens), bool)
        carried, last = 0.0, -1
        for (start, end, reward), logprobs in zip(self.turns, self.span_logprobs, strict=True):
            self.action_mask[start:end], self.logprobs[start:end] = True, logprobs
            carried, last = carried + reward, end - 1 if end > start else last
            if last >= 0:
                self.rewards[last] += carried
                carried = 0.0
        self.turns = [turn for turn in self.turns if turn[1] > turn[0]]


# ----------------------------------------------------------------------------------------------- generation engine


@contextmanager
def logits_only_at(model: PreTrainedModel, index: tuple[torch.Tensor, ...]) -> Iterator[None]:
    """Inside, `model(...).logits` is [N, vocabulary]: the head sees only the hidden states at `index` (rows, columns).

    With a large vocabulary the head costs more than the layers, and most positions predict nothing that is needed.
    """
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: (inputs[0][index],))
    try:
        yield
    finally:
        hook.remove()


class SlotCache(DynamicCache):
    """A key-value cache whose rows grow independently: token t of a slot lies in column t, so there are no holes.

    Columns past a row's length hold garbage. It is never seen: a query at position p attends to columns 0..p only, and
    column p is written before it is read.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        super().__init__()
        self.everyone = torch.arange(num_slots, device=device)
        self.slots: list[list[torch.Tensor]] = []  # per layer: keys and values, [num_slots, columns, heads, dimension]

    def place(self, rows: torch.Tensor | None, positions: torch.Tensor, width: int, capacity: int) -> None:
        """The next forward writes at `positions` [n, S] of `rows` [n] (None: all) and reads `width` columns."""
        self.rows, self.positions, self.width, self.capacity = rows, positions, width, capacity + capacity // 4
        for layer in self.slots:
            if capacity > layer[0].shape[1]:
                layer[:] = [nn.functional.pad(x, (0, 0, 0, 0, 0, self.capacity - x.shape[1])) for x in layer]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions and masks are given explicitly

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        news = [states.transpose(1, 2) for states in (key_states, value_states)]
        if layer_idx == len(self.slots):
            self.slots.append([new.new_zeros(len(self.everyone), self.capacity, *new.shape[2:]) for new in news])
        rows = self.everyone if self.rows is None else self.rows
        for store, new in zip(self.slots[layer_idx], news, strict=True):
            store[rows[:, None], self.positions] = new
        seen = [store[slice(None) if self.rows is None else rows, : self.width] for store in self.slots[layer_idx]]
        return [keys_or_values.transpose(1, 2) for keys_or_values in seen]


class TransformersEngine:
    """Samples spans for many episodes at once from a `transformers` model, whose keys and values it keeps.

    `feed` gives a slot new tokens of its episode; `step` runs one forward, either of waiting new tokens (batched) or of
    one token of every row that is writing, and returns the spans that were completed by it. No row waits for another.
    Every episode has its own random numbers, so but for rounding it does not depend on its neighbours.
    """

    NOISE = 256  # random numbers drawn at a time for a slot

    def __init__(
        self, model: PreTrainedModel, num_slots: int, vocab_size: int, temperature: float = 1.0, top_p: float = 1.0
    ) -> None:
        layers = set(getattr(model.config, "layer_types", None) or ["full_attention"])
        if layers != {"full_attention"}:
            raise ValueError(f"the transformers engine needs full attention in every layer, this model has {layers}")
        self.model, self.num_slots, self.vocab_size = model, num_slots, vocab_size
        self.temperature, self.top_p = temperature, top_p
        self.prefill_tokens = 8192  # tokens, padding counted, in one forward of new tokens
        self.release()

    def release(self) -> None:
        """Forget all episodes and free the cache."""
        n = self.num_slots
        self.cache = SlotCache(n, self.model.device)
        self.pending: dict[int, Array] = {}  # slot -> tokens that the model has not seen
        self.length = np.zeros(n, np.int64)  # tokens in the cache
        self.last = np.zeros(n, np.int64)  # the newest sampled token, not yet in the cache
        self.writing = np.zeros(n, bool)
        self.count, self.room = np.zeros(n, np.int64), np.zeros(n, np.int64)  # tokens of the span, and their bound
        self.spans, self.logprobs = np.zeros((n, 64), np.int32), np.zeros((n, 64), np.float32)
        self.stops = np.zeros(self.vocab_size, bool)
        self.generators: list[np.random.Generator | None] = [None] * n
        self.noise, self.noise_used = np.zeros((n, self.NOISE), np.float32), np.full(n, self.NOISE)

    def feed(self, slot: int, tokens: Array, max_new_tokens: int, stop_token_ids: list[int], seed: Any = None) -> None:
        """Append `tokens` to the slot's episode and have the next span sampled. `seed` begins a new episode."""
        if seed is not None:
            self.length[slot] = 0
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

    def step(self) -> list[tuple[int, Array, Array]]:
        """One forward. Returns (slot, span int32, log-probabilities float32) of the turns that it completed."""
        if self.pending and (8 * len(self.pending) >= self.num_slots or not self.writing.any()):
            return self._prefill()
        rows, width = np.flatnonzero(self.writing), int(self.length[self.writing].max()) + 1
        if 2 * len(rows) > self.num_slots:  # reading all slots in place is cheaper than copying most of them
            logits = self._forward(None, self.last[:, None], self.length[:, None], width, rows, np.zeros_like(rows))
        else:
            logits = self._forward(rows, self.last[rows, None], self.length[rows, None], width)
        self.length[rows] += 1
        return self._accept(rows, logits)

    def _prefill(self) -> list[tuple[int, Array, Array]]:
        done = []
        while self.pending:  # the longest, with all that are at least half as long
            longest = max(map(len, self.pending.values()))
            alike = [slot for slot, new in self.pending.items() if 2 * len(new) >= longest]
            rows = np.array(alike[: max(1, self.prefill_tokens // longest)])
            news = [self.pending.pop(row) for row in rows.tolist()]
            sizes = np.array([len(new) for new in news])
            tokens = np.zeros((len(rows), longest), np.int64)
            for row, new in zip(tokens, news, strict=True):
                row[: len(new)] = new
            positions = self.length[rows, None] + np.arange(longest)
            logits = self._forward(rows, tokens, positions, int(positions.max()) + 1, None, sizes - 1)
            self.length[rows] += sizes
            done += self._accept(rows, logits)
        return done

    @torch.inference_mode()
    def _forward(
        self, slots: Array | None, tokens: Array, positions: Array, width: int, rows: Any = None, columns: Any = None
    ) -> torch.Tensor:
        """Tokens [n, S] at `positions` [n, S] of `slots` [n] -> logits [N, V] at their `rows` and `columns` [N]."""
        n, device = len(tokens), self.model.device
        rows, columns = (np.arange(n) if rows is None else rows), (np.zeros(n, int) if columns is None else columns)
        ids, place, *index = (torch.from_numpy(x).to(device) for x in (tokens, positions, rows, columns))
        where = None if slots is None else torch.from_numpy(slots).to(device)
        self.cache.place(where, place, width, int(positions.max()) + 1)
        mask = torch.arange(width, device=device) <= place[:, None, :, None]
        if self.model.config._attn_implementation == "eager":  # which adds the mask to the scores
            mask = torch.where(mask, 0.0, torch.finfo(self.model.dtype).min).to(self.model.dtype)
        with logits_only_at(self.model, (index[0], index[1])):
            out = self.model(ids, attention_mask=mask, position_ids=place, past_key_values=self.cache, use_cache=True)
        return out.logits[:, : self.vocab_size].float()

    @torch.inference_mode()
    def _accept(self, rows: Array, logits: torch.Tensor) -> list[tuple[int, Array, Array]]:
        """Sample the next token of `rows` and return the spans that end with it."""
        logprobs = torch.log_softmax(logits / (self.temperature or 1.0), -1)
        chosen = logprobs.argmax(-1)
        if self.temperature > 0:
            for row in rows[self.noise_used[rows] == self.NOISE]:
                self.noise[row], self.noise_used[row] = self.generators[row].random(self.NOISE, np.float32), 0
            noise = torch.from_numpy(self.noise[rows, self.noise_used[rows]]).to(logits.device)
            self.noise_used[rows] += 1
            chosen = sample(logprobs, noise, self.top_p)
        chosen_logprobs = logprobs.gather(1, chosen[:, None])[:, 0].cpu().numpy()
        if not np.isfinite(chosen_logprobs).all():
            raise FloatingPointError("the policy's logits are not finite", [])
        tokens = chosen.cpu().numpy()
        if self.count[rows].max() == self.spans.shape[1]:
            self.spans, self.logprobs = (np.pad(x, ((0, 0), (0, x.shape[1]))) for x in (self.spans, self.logprobs))
        self.spans[rows, self.count[rows]] = self.last[rows] = tokens
        self.logprobs[rows, self.count[rows]] = chosen_logprobs
        self.count[rows] += 1
        ended = self.stops[tokens] | (self.count[rows] >= self.room[rows])
        self.writing[rows] = ~ended
        ends = [(int(row), int(self.count[row])) for row in rows[ended]]
        return [(row, self.spans[row, :count].copy(), self.logprobs[row, :count].copy()) for row, count in ends]


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


def rollout(
    envs: Any, engine: TransformersEngine, episodes: Sequence[tuple[int, int]], seed: int, bar: Any = None
) -> list[Trajectory]:
    """Play `episodes`, pairs of (episode number, task index), and return their rows in this order.

    There is no barrier: a span is sent the moment it ends, and a slot whose episode is over begins the next one.
    """
    queue, free, in_flight = deque(episodes), list(range(envs.num_envs)), 0
    live: dict[int, Trajectory] = {}
    done: dict[int, Trajectory] = {}
    while len(done) < len(episodes):
        if queue and free:  # begin episodes
            mask, tasks, begun = np.zeros(envs.num_envs, bool), [0] * envs.num_envs, []
            while queue and free:
                slot, (episode, task) = free.pop(), queue.popleft()
                mask[slot], tasks[slot] = True, task
                begun.append((slot, episode))
            states, infos = envs.reset(seed=tasks, options={"reset_mask": mask, "task_index": tasks})
            for slot, episode in begun:
                live[slot] = Trajectory(episode, tasks[slot], len(states[slot]), states[slot])
                info = {name: infos[name][slot] for name in ("max_new_tokens", "stop_token_ids")}
                engine.feed(slot, states[slot], **info, seed=[seed, episode])
        ended = engine.step() if engine.busy else []  # write
        if ended:
            for slot, span, logprobs in ended:
                start = len(live[slot].tokens)
                live[slot].turns.append((start, start + len(span), 0.0))
                live[slot].span_logprobs.append(logprobs)
                live[slot].tokens = np.concatenate([live[slot].tokens, span])
            envs.send([span for _, span, _ in ended], [slot for slot, _, _ in ended])
            in_flight += len(ended)
        if not in_flight:
            continue
        results = envs.recv(0 if engine.busy else 1, timeout=0.0 if engine.busy else None)  # read
        for slot, state, reward, terminated, truncated, info in zip(*results, strict=True):
            in_flight -= 1
            row, (start, end, _) = live[slot], live[slot].turns[-1]
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
                engine.feed(slot, state[end:], info["max_new_tokens"], info["stop_token_ids"])
                continue
            row.terminated, row.truncated = bool(terminated), bool(truncated)
            row.lay_out()
            row.stats.update(success=float(info.get("is_success", False)), truncated=float(truncated))
            row.stats.update(sampled_tokens=int(row.action_mask.sum()), tokens=len(state), **info.get("metrics", {}))
            done[row.episode] = live.pop(slot)
            free.append(slot)
            if bar is not None:
                bar.update()
    engine.release()
    return [done[episode] for episode, _ in episodes]


def mean_stats(rows: Sequence[Trajectory]) -> dict[str, float]:
    """The mean of every statistic over the rows."""
    names = dict.fromkeys(name for row in rows for name in row.stats)
    return {name: float(np.mean([row.stats[name] for row in rows])) for name in names}


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
    for t in np.flatnonzero(m)[::-1]:  # lower level: begins anew at every turn end
        if turn_end[t]:
            next_value, last = 0.0, 0.0
        last = target[t] + gamma * next_value - v[t] + gamma * lam * last
        advantages[t], returns[t], next_value = last, last + v[t], v[t]
    return advantages, returns


def train_positions(row: Trajectory, sampled_only: bool) -> Array:
    """The tokens that were sampled; or, as in rows 2 and 3 of Agent-R1's table 4, all tokens after the prompt."""
    return row.action_mask if sampled_only else np.arange(len(row.tokens)) >= row.prompt_length


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


def microbatches(rows: Sequence[Trajectory], budget: int) -> Iterator[list[Trajectory]]:
    """Rows of similar length together, each group at most `budget` tokens with padding (at least one row)."""
    group: list[Trajectory] = []
    for row in sorted(rows, key=lambda row: -len(row.tokens)):
        if group and len(group[0].tokens) * (len(group) + 1) > budget:
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def pad(arrays: Sequence[Array], device: torch.device | str = "cpu") -> torch.Tensor:
    """Arrays of different lengths -> [B, T], zeros on the right.

    With padding on the right a causal model needs no attention mask: no real token sees a padded one.
    """
    out = np.zeros((len(arrays), max(map(len, arrays))), bool if arrays[0].dtype == bool else np.int64)
    for target, array in zip(out, arrays, strict=True):
        target[: len(array)] = array
    return torch.from_numpy(out).to(device)


def policy_forward(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, vocab_size: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [N] of the N tokens of `ids` [B, T] where `mask` [B, T] is True, and all of theirs [N, V]."""
    rows, columns = mask.nonzero(as_tuple=True)
    with logits_only_at(model, (rows, columns - 1)):
        logits = model(input_ids=ids, use_cache=False).logits[:, :vocab_size].float()
    everything = torch.log_softmax(logits if temperature == 1 else logits / temperature, -1)
    return everything.gather(1, ids[rows, columns, None])[:, 0], everything


def kl_divergence(x: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimators of KL(policy || reference) from x = log policy - log reference on the policy's own samples."""
    x = x.clamp(-20, 20)
    return {"k1": x, "k2": x.square() / 2, "k3": ((-x).exp() - 1 + x).clamp(max=10)}[estimator]


def policy_loss(
    new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped objective of PPO per token [N], to be minimised, and sums over the tokens for the log."""
    logratio = (new - old).clamp(-20, 20)
    ratio = logratio.exp()
    loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    with torch.no_grad():
        clipped = (ratio < 1 - clip_low) | (ratio > 1 + clip_high)
        logs = {"policy_loss": loss, "old_approx_kl": -logratio, "approx_kl": ratio - 1 - logratio, "clipfrac": clipped}
    return loss, {name: value.sum() for name, value in logs.items()}


def value_loss(new: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, clip: float) -> torch.Tensor:
    """Half the squared error of the critic per state, the larger of the free and the clipped one. All [N]."""
    loss = (new - returns).square()
    if clip > 0:
        loss = torch.max(loss, (old + (new - old).clamp(-clip, clip) - returns).square())
    return loss / 2


def gather(rows: Sequence[Trajectory], name: str, masks: Sequence[Array], device: Any) -> torch.Tensor:
    """The entries of the rows' array `name` where `masks` are True, one row after the other: [N]."""
    return torch.from_numpy(np.concatenate([getattr(r, name)[m] for r, m in zip(rows, masks, strict=True)])).to(device)


@torch.no_grad()
def score(rows: Sequence[Trajectory], args: Args, policy: Any, critic: Any, reference: Any, vocab_size: int) -> None:
    """Before the update: the critic's values and, where they are needed, the trainer's and the reference's logprobs."""
    models = {"ref_logprobs": reference}
    if args.old_logprobs == "trainer" or not args.loss_mask:  # the sampler has none for the environment's tokens
        models["logprobs"] = policy
    for group in microbatches(rows, args.microbatch_tokens):
        ids = pad([row.tokens for row in group], policy.device)
        for row, values in zip(group, critic(ids).cpu().numpy(), strict=True):
            row.values[1:], row.value_last = values[: len(row.tokens) - 1], float(values[len(row.tokens) - 1])
        masks = [train_positions(row, args.loss_mask) for row in group]
        for name, model in models.items():
            if model is not None and any(mask.any() for mask in masks):
                logprobs, _ = policy_forward(model, ids, pad(masks, policy.device), vocab_size, args.temperature)
                parts = np.split(logprobs.cpu().numpy(), np.cumsum([mask.sum() for mask in masks])[:-1])
                for row, mask, part in zip(group, masks, parts, strict=True):
                    getattr(row, name)[mask] = part
        if args.kl_coef > 0 and args.kl_in == "reward":
            for row in group:
                row.rewards -= args.kl_coef * (row.logprobs - row.ref_logprobs) * row.action_mask


def backward(
    rows: Sequence[Trajectory], args: Args, policy: Any, critic: Any, vocab_size: int, train_policy: bool = True
) -> dict[str, float]:
    """Add the gradient of one optimizer step on `rows`, and return what is logged about it.

    Every mean is over the tokens of the whole step (sums per microbatch, divided by the step's counts), so the gradient
    does not depend on how the step is cut into microbatches.
    """
    device = policy.device
    num_tokens = max(1, sum(int(train_positions(row, args.loss_mask).sum()) for row in rows))
    num_states = max(1, sum(int(value_positions(row, args).sum()) for row in rows))
    logs: Counter[str] = Counter()
    for group in microbatches(rows, args.microbatch_tokens):
        ids = pad([row.tokens for row in group], device)
        tokens = [train_positions(row, args.loss_mask) for row in group]
        states = [value_positions(row, args) for row in group]
        sums: dict[str, torch.Tensor] = {}
        if train_policy and any(mask.any() for mask in tokens):
            new, everything = policy_forward(policy, ids, pad(tokens, device), vocab_size, args.temperature)
            old, advantages = (gather(group, name, tokens, device) for name in ("logprobs", "advantages"))
            losses, sums = policy_loss(new, old, advantages, args.clip_coef, args.clip_coef_high)
            loss = losses.sum()
            with torch.set_grad_enabled(args.ent_coef != 0):
                sums["entropy"] = -(everything.exp() * everything).sum()
            if args.ent_coef != 0:
                loss = loss - args.ent_coef * sums["entropy"]
            if args.kl_coef > 0:
                x = new - gather(group, "ref_logprobs", tokens, device)
                sums["ref_kl"] = kl_divergence(x, "k3").sum()
                if args.kl_in == "loss":
                    loss = loss + args.kl_coef * kl_divergence(x, args.kl_estimator).sum()
            if not torch.isfinite(loss):  # one such step would destroy the weights
                raise FloatingPointError(f"the policy's loss is {loss.item()}", group)
            (loss / num_tokens).backward()
        if any(mask.any() for mask in states):
            at = pad(states, device).nonzero(as_tuple=True)
            old, returns = (gather(group, name, states, device) for name in ("values", "returns"))
            loss = value_loss(critic(ids)[at[0], at[1] - 1], old, returns, args.clip_coef_value).sum()
            if not torch.isfinite(loss):
                raise FloatingPointError(f"the critic's loss is {loss.item()}", group)
            (loss / num_states).backward()
            logs["value_loss"] += loss.item() / num_states
        logs.update({name: value.item() / num_tokens for name, value in sums.items()})
    return dict(logs)


# ------------------------------------------------------------------------------------------------------------- main


def make_envs(args: Args, split: str, tokenizer: str | None) -> Any:
    kwargs = json.loads(args.env_kwargs)
    if args.truncation == "bootstrap":
        kwargs["unfinished_reward"] = 0.0
    return gym.make_vec(args.env_id, num_envs=args.num_envs, tokenizer=tokenizer, split=split, **kwargs)


if __name__ == "__main__":
    args = tyro.cli(Args)
    if args.resume:
        args = checkpoint.load_args(args.resume, args, Path(__file__).stem)
    run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}".replace("/", "_")
    run_dir = Path(args.resume) if args.resume else Path("runs") / run_name
    num_iterations = max(1, args.total_episodes // args.episodes_per_iteration)
    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # bf16 may be an illegal instruction on a CPU
    torch.set_num_threads(args.num_threads or os.cpu_count() or 1)
    torch.manual_seed(args.seed)

    # models and environments
    source = model_source(args.model, args.env_id)
    tokenizer = tokenizer_source(args.tokenizer, source, args.env_id)
    envs = make_envs(args, args.split, tokenizer)
    eval_envs = make_envs(args, args.eval_split, tokenizer) if args.eval_episodes else envs
    vocab_size, num_tasks = envs.single_action_space.vocab_size, envs.envs[0].num_tasks
    weights = checkpoint.find(run_dir) / "policy" if args.resume else source
    policy = AutoModelForCausalLM.from_pretrained(weights, dtype=dtype)
    check_vocabulary(policy, vocab_size)
    policy = policy.to(device).eval()  # eval: no dropout, in sampling and training alike
    critic = Critic(source, dtype).to(device).eval()
    first = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(device).eval() if args.kl_coef > 0 else None
    engine = TransformersEngine(policy, args.num_envs, vocab_size, args.temperature, args.top_p)
    eval_engine = TransformersEngine(policy, args.num_envs, vocab_size, args.eval_temperature)
    optimizer = Float32AdamW((policy, critic), (args.learning_rate, args.critic_learning_rate), betas=(0.9, 0.95))

    # logs
    run_dir.mkdir(parents=True, exist_ok=True)
    run: dict[str, Any] = {"iteration": 0, "global_step": 0, "train_seconds": 0.0, "summary": {}}
    if args.resume:
        run = checkpoint.load(run_dir, critic, optimizer)["run"]
        checkpoint.drop_later_rows(run_dir / "trajectories.jsonl", run["iteration"])
    saver = checkpoint.Checkpointer(run_dir, policy, critic, optimizer)
    if args.track:
        import wandb

        project, entity = args.wandb_project_name, args.wandb_entity
        wandb.init(project=project, entity=entity, name=run_dir.name, config=asdict(args), sync_tensorboard=True)
    writer = SummaryWriter(str(run_dir), purge_step=run["global_step"] + 1 if args.resume else None)
    table = "\n".join(f"|{name}|{value}|" for name, value in asdict(args).items())
    writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{table}")
    bar = tqdm(total=num_iterations * args.episodes_per_iteration, unit="episode", dynamic_ncols=True)
    bar.update(run["iteration"] * args.episodes_per_iteration)

    def evaluate() -> None:
        """Play the first tasks of the evaluation split and note what comes out."""
        tasks = [(i, i) for i in range(min(args.eval_episodes, eval_envs.envs[0].num_tasks))]
        result = mean_stats(rollout(eval_envs, eval_engine, tasks, args.seed))
        for name, value in result.items():
            writer.add_scalar(f"eval/{name}", value, run["global_step"])
        for name, key in (("exact_match", "em"), ("success", "success")):
            run["summary"].setdefault(f"eval/{name}_first", result.get(key))
            run["summary"][f"eval/{name}_last"] = result.get(key)
        text = ", ".join(f"{name} {value:.3f}" for name, value in result.items())
        bar.write(f"evaluation after {run['iteration']} iterations: {text}")

    try:
        saver.boundary({"algorithm": Path(__file__).stem, "args": asdict(args), "run": run})
        if args.eval_episodes and run["iteration"] == 0:
            evaluate()
        for iteration in range(run["iteration"] + 1, num_iterations + 1):
            started = time.time()
            rng = np.random.default_rng([args.seed, iteration])  # all randomness follows from seed and iteration
            optimizer.scale_learning_rates(1 - (iteration - 1) / num_iterations if args.anneal_lr else 1.0)

            # rollout
            tasks = rng.integers(num_tasks, size=args.episodes_per_iteration).tolist()
            episodes = list(enumerate(tasks, (iteration - 1) * args.episodes_per_iteration))
            rows = rollout(envs, engine, episodes, args.seed, bar)
            rolled_out = time.time()

            # values and advantages
            score(rows, args, policy, critic, first, vocab_size)
            compute_advantages(rows, args)
            scored = time.time()

            # update
            saver.dirty()
            logs: list[dict[str, float]] = []
            passes = [rng.permutation(len(rows)) for _ in range(args.update_epochs)]
            for part in [part for order in passes for part in np.array_split(order, args.num_minibatches)]:
                train_policy = iteration > args.critic_warmup
                logs.append(backward([rows[i] for i in part], args, policy, critic, vocab_size, train_policy))
                norms = optimizer.step(args.max_grad_norm)
                logs[-1] |= {"grad_norm": norms[0], "critic_grad_norm": norms[1]}
                if args.target_kl is not None and logs[-1].get("approx_kl", 0.0) > args.target_kl:
                    break
            trained = time.time()

            # logging
            stats = mean_stats(rows)
            num_turns, num_sampled = stats["turns"] * len(rows), stats["sampled_tokens"] * len(rows)
            num_trained = stats["tokens"] * len(rows) * len(logs) / args.num_minibatches
            run["iteration"] = iteration
            run["global_step"] += round(num_turns)
            run["train_seconds"] += trained - started
            masks = [value_positions(row, args) for row in rows]
            targets = gather(rows, "returns", masks, "cpu").numpy()
            errors = targets - gather(rows, "values", masks, "cpu").numpy()
            names = {"return": "episodic_return", "turns": "episodic_length", "em": "exact_match"}
            scalars = {f"charts/{names.get(name, name)}": value for name, value in stats.items()} | {
                "charts/learning_rate": optimizer.adam.param_groups[0]["lr"],
                "charts/SPS": num_turns / (trained - started),
                "charts/sampled_tokens_per_second": num_sampled / (rolled_out - started),
                "charts/trained_tokens_per_second": num_trained / (trained - scored),
                "losses/explained_variance": 1 - float(errors.var()) / max(float(targets.var()), 1e-8),
                "time/rollout": rolled_out - started,
                "time/score": scored - rolled_out,
                "time/train": trained - scored,
            }
            for name in sorted({name for row in rows for name in row.reward_terms}):
                scalars[f"rewards/{name}"] = float(np.mean([row.reward_terms[name] for row in rows]))
            for name in sorted({name for log in logs for name in log}):
                scalars[f"losses/{name}"] = float(np.mean([log[name] for log in logs if name in log]))
            for name, value in scalars.items():
                writer.add_scalar(name, value, run["global_step"])
            checkpoint.append_rows(run_dir / "trajectories.jsonl", rows[: args.log_trajectories], iteration=iteration)
            speed = stats["tokens"] * len(rows) / (trained - started)
            bar.set_postfix_str(f"return {stats['return']:.2f}, success {stats['success']:.2f}, {speed:.0f} tokens/s")
            due = iteration == num_iterations or (args.eval_every and iteration % args.eval_every == 0)
            if args.eval_episodes and due:
                evaluate()
            run["summary"] |= {"train_seconds": run["train_seconds"], "args": asdict(args)}
            checkpoint.write_json(run_dir / "summary.json", run["summary"])
            saver.boundary({"algorithm": Path(__file__).stem, "args": asdict(args), "run": run})
            if args.checkpoint_every and iteration % args.checkpoint_every == 0:
                saver.save()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not spoil the files
        bar.close()
        saver.save()
        print(f"\ninterrupted; go on after the last complete iteration with\n  python {sys.argv[0]} --resume {run_dir}")
        sys.exit(130)
    except FloatingPointError as error:
        bar.close()
        checkpoint.append_rows(run_dir / "not_finite.jsonl", error.args[1], iteration=run["iteration"] + 1)
        sys.exit(f"stopped: {error.args[0]}. The rows of its microbatch are in {run_dir / 'not_finite.jsonl'}")
    bar.close()
    if args.save_model:
        policy.save_pretrained(run_dir / "model")
        if tokenizer is not None:
            AutoTokenizer.from_pretrained(tokenizer).save_pretrained(run_dir / "model")
        print(f"the trained policy is in {run_dir / 'model'}")
    envs.close()
    writer.close()
