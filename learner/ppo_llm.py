# docs and results: docs/learners/ppo_llm.md
"""PPO for language models that call tools, in one file.

An episode is one growing row of tokens: prompt, sampled span, what the environment wrote, sampled span, ... The row is
never decoded and encoded again. A mask says which tokens were sampled; only those carry advantages and loss.

    python learner/ppo_llm.py                                             # tiny policy, generated world, laptop CPU
    python learner/ppo_llm.py --env-id AgentR1/HotpotQA-v0 --model Qwen/Qwen2.5-3B-Instruct   # one GPU
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import deque
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

import agent_r1

sys.path.insert(0, str(Path(__file__).resolve().parent))  # llm_utils lies beside this file
from llm_utils import checkpoint as checkpoints


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

    total_episodes: int = 20_000
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
    microbatch_tokens: int = 8192
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
    """where the KL divergence is paid"""
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
    eval_every: int = 20
    """iterations between evaluations (there is one at the start and one at the end)"""
    eval_temperature: float = 0.0
    """sampling temperature in evaluations (0: greedy)"""


# ---------------------------------------------------------------------------------------------------- trajectory row


@dataclass
class Trajectory:
    """One episode as one row of tokens. Arrays have the length of `tokens`; entry t belongs to token t."""

    episode: int
    task_index: int
    tokens: np.ndarray
    """int32: prompt, then sampled spans and what the environment wrote, in turn"""
    prompt_length: int
    terminated: bool = False
    truncated: bool = False
    turns: list[tuple[int, int]] = field(default_factory=list)
    """(first token, one past the last token) of every sampled span that is not empty"""
    action_mask: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    """True where the policy sampled the token"""
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """the sampler's log-probability, 0 where the mask is False"""
    ref_logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """the reference policy's, where a KL divergence is paid"""
    rewards: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """a turn's reward, on the turn's last sampled token"""
    values: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """the critic's value of the state before token t"""
    value_last: float = 0.0
    """the critic's value of the last state"""
    advantages: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    returns: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """what the critic regresses to"""
    stats: dict[str, float] = field(default_factory=dict)
    """return, turns, success, exact match, ... of the episode"""
    reward_terms: dict[str, float] = field(default_factory=dict)
    """the environment's named reward terms, summed over the episode"""


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

    def __init__(self, num_slots: int) -> None:
        super().__init__()
        self.num_slots = num_slots
        self.slots: list[list[torch.Tensor]] = []  # per layer: keys and values, [num_slots, columns, heads, dimension]

    def place(self, rows: torch.Tensor | None, positions: torch.Tensor, width: int) -> None:
        """Say where the next forward writes: `rows` [n] (None: all slots), `positions` [n, S]; it reads `width` columns."""
        self.rows, self.positions, self.width = rows, positions, width
        if self.slots and width > self.slots[0][0].shape[1]:
            for layer in self.slots:
                for i, old in enumerate(layer):
                    layer[i] = old.new_zeros(old.shape[0], width + width // 2, *old.shape[2:])
                    layer[i][:, : old.shape[1]] = old

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions and masks are given explicitly

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        if layer_idx == len(self.slots):
            shape = (self.num_slots, self.width + self.width // 2, key_states.shape[1])
            self.slots.append([new.new_zeros(*shape, new.shape[3]) for new in (key_states, value_states)])
        seen = []
        for store, new in zip(self.slots[layer_idx], (key_states, value_states), strict=True):
            if self.rows is None:
                store[torch.arange(self.num_slots, device=new.device)[:, None], self.positions] = new.transpose(1, 2)
                seen.append(store[:, : self.width].transpose(1, 2))
            else:
                store[self.rows[:, None], self.positions] = new.transpose(1, 2)
                seen.append(store[self.rows, : self.width].transpose(1, 2))
        return seen


class TransformersEngine:
    """Samples spans for many episodes at once from a `transformers` model, and keeps their keys and values.

    `feed` gives a slot new tokens of its episode; `step` runs one forward, either of waiting new tokens (batched) or of
    one token of every row that is writing, and returns the spans that were completed by it. No row waits for another.
    Every episode has its own random numbers, so what it samples does not depend on its neighbours.
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
        self.cache = SlotCache(n)
        self.pending: dict[int, np.ndarray] = {}  # slot -> tokens that the model has not seen
        self.length = np.zeros(n, np.int64)  # tokens in the cache
        self.last = np.zeros(n, np.int64)  # the newest sampled token, not yet in the cache
        self.writing = np.zeros(n, bool)
        self.count, self.room = np.zeros(n, np.int64), np.zeros(n, np.int64)  # tokens of the span, and their bound
        self.spans, self.logprobs = np.zeros((n, 64), np.int32), np.zeros((n, 64), np.float32)
        self.stops = np.zeros(self.vocab_size, bool)
        self.generators: list[np.random.Generator | None] = [None] * n
        self.noise, self.noise_used = np.zeros((n, self.NOISE), np.float32), np.full(n, self.NOISE)

    def feed(self, slot: int, tokens: np.ndarray, max_new_tokens: int, stops: list[int], seed: Any = None) -> None:
        """Append `tokens` to the slot's episode and have the next span sampled. `seed` begins a new episode."""
        if seed is not None:
            self.length[slot] = 0
            self.generators[slot], self.noise_used[slot] = np.random.default_rng(seed), self.NOISE
        else:  # the last sampled token ended the span: the model has not seen it yet
            tokens = np.concatenate([self.last[slot : slot + 1], tokens])
        self.pending[slot] = tokens
        self.count[slot], self.room[slot] = 0, max_new_tokens
        self.stops[:] = False
        self.stops[stops] = True

    @property
    def busy(self) -> bool:
        """Is there anything to do for `step`?"""
        return bool(self.pending) or bool(self.writing.any())

    def step(self) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """One forward. Returns (slot, span int32, log-probabilities float32) of the turns that it completed."""
        if self.pending and (8 * len(self.pending) >= self.num_slots or not self.writing.any()):
            return self._prefill()
        rows = np.flatnonzero(self.writing)
        everyone = 2 * len(rows) > self.num_slots  # reading all slots in place is cheaper than copying most of them
        which = np.arange(self.num_slots) if everyone else rows
        zeros = np.zeros(len(which), np.int64)
        width = int(self.length[rows].max()) + 1
        logits = self._forward(None if everyone else which, self.last[which, None], self.length[which, None], zeros, width)
        self.length[rows] += 1
        return self._accept(rows, logits[torch.from_numpy(rows).to(logits.device)] if everyone else logits)

    def _prefill(self) -> list[tuple[int, np.ndarray, np.ndarray]]:
        waiting = sorted(self.pending, key=lambda slot: len(self.pending[slot]))
        done = []
        while waiting:
            size = max(1, min(len(waiting), self.prefill_tokens // len(self.pending[waiting[-1]])))
            slots, waiting = waiting[-size:], waiting[:-size]
            rows, news = np.array(slots), [self.pending.pop(slot) for slot in slots]
            sizes = np.array([len(new) for new in news])
            tokens = np.zeros((size, sizes.max()), np.int64)
            for row, new in zip(tokens, news, strict=True):
                row[: len(new)] = new
            positions = self.length[rows, None] + np.arange(sizes.max())
            logits = self._forward(rows, tokens, positions, sizes - 1, int(positions.max()) + 1)
            self.length[rows] += sizes
            done += self._accept(rows, logits)
        return done

    @torch.inference_mode()
    def _forward(
        self, rows: np.ndarray | None, tokens: np.ndarray, positions: np.ndarray, last: np.ndarray, width: int
    ) -> torch.Tensor:
        """Tokens [n, S] at `positions` [n, S] of `rows` -> float32 logits [n, vocabulary] of the columns `last` [n]."""
        device = self.model.device
        place = torch.from_numpy(positions).to(device)
        index = torch.arange(len(tokens), device=device), torch.from_numpy(last).to(device)
        mask = torch.arange(width, device=device) <= place[:, None, :, None]
        self.cache.place(None if rows is None else torch.from_numpy(rows).to(device), place, int(positions.max()) + 1)
        self.cache.width = width
        with logits_only_at(self.model, index):
            ids = torch.from_numpy(tokens).to(device)
            out = self.model(ids, attention_mask=mask, position_ids=place, past_key_values=self.cache, use_cache=True)
        return out.logits[:, : self.vocab_size].float()

    @torch.inference_mode()
    def _accept(self, rows: np.ndarray, logits: torch.Tensor) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """Sample the next token of `rows` and return the spans that end with it."""
        if self.temperature > 0:
            for row in rows[self.noise_used[rows] == self.NOISE]:
                self.noise[row], self.noise_used[row] = self.generators[row].random(self.NOISE, np.float32), 0
            noise = torch.from_numpy(self.noise[rows, self.noise_used[rows]]).to(logits.device)
            self.noise_used[rows] += 1
            logprobs = torch.log_softmax(logits / self.temperature, -1)
            chosen = sample(logprobs, noise, self.top_p)
        else:
            logprobs = torch.log_softmax(logits, -1)
            chosen = logprobs.argmax(-1)
        tokens = chosen.cpu().numpy()
        if self.count[rows].max() == self.spans.shape[1]:
            self.spans = np.concatenate([self.spans, np.zeros_like(self.spans)], 1)
            self.logprobs = np.concatenate([self.logprobs, np.zeros_like(self.logprobs)], 1)
        self.spans[rows, self.count[rows]] = self.last[rows] = tokens
        self.logprobs[rows, self.count[rows]] = logprobs.gather(1, chosen[:, None])[:, 0].cpu().numpy()
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
    return torch.searchsorted(mass, mass[:, -1:] * noise[:, None].clamp(max=1 - 1e-6), right=True)[:, 0]


# ---------------------------------------------------------------------------------------------------------- rollout


def rollout(
    envs: Any, engine: TransformersEngine, episodes: Sequence[tuple[int, int]], seed: int, progress: Any = None
) -> list[Trajectory]:
    """Play `episodes`, pairs of (episode number, task index); return their rows in the order of the numbers.

    There is no barrier: a span is sent the moment it ends, and a slot whose episode is over begins the next one.
    """
    queue, free, in_flight = deque(episodes), list(range(envs.num_envs)), 0
    live: dict[int, Trajectory] = {}
    spans: dict[int, list[tuple[int, np.ndarray, np.ndarray, float]]] = {}  # start, span, log-probabilities, reward
    rows: list[Trajectory] = []
    while len(rows) < len(episodes):
        if queue and free:
            mask, seeds, tasks = np.zeros(envs.num_envs, bool), [0] * envs.num_envs, [0] * envs.num_envs
            begun = {}
            while queue and free:
                slot, (episode, task) = free.pop(), queue.popleft()
                mask[slot], seeds[slot], tasks[slot], begun[slot] = True, episode, task, episode
            states, infos = envs.reset(seed=seeds, options={"reset_mask": mask, "task_index": tasks})
            for slot, episode in begun.items():
                state, info = states[slot], infos[slot]
                live[slot], spans[slot] = Trajectory(episode, tasks[slot], state, len(state)), []
                live[slot].stats = dict.fromkeys(("return", "turns", "tool_calls", "tool_errors"), 0.0)
                engine.feed(slot, state, info["max_new_tokens"], info["stop_token_ids"], seed=[seed, episode])
        ended = engine.step() if engine.busy else []
        if ended:
            for slot, span, logprobs in ended:
                spans[slot].append((len(live[slot].tokens), span, logprobs, 0.0))
            envs.send([span for _, span, _ in ended], [slot for slot, _, _ in ended])
            in_flight += len(ended)
        if not in_flight:
            continue
        results = envs.recv(min_batch=0 if engine.busy else 1, timeout=0.0 if engine.busy else None)
        for slot, state, reward, terminated, truncated, info in zip(*results, strict=True):
            in_flight -= 1
            row, (start, span, logprobs, _) = live[slot], spans[slot][-1]
            end = start + len(span)
            if not (np.array_equal(state[:start], row.tokens) and np.array_equal(state[start:end], span)):
                raise RuntimeError(
                    f"episode {row.episode} (task {info.get('task_id')}): the new state does not begin with the old state "
                    "and the sampled span. A wrapper or environment that edits its context cannot be trained as one row"
                )
            spans[slot][-1] = (start, span, logprobs, float(reward))
            row.tokens = state
            count_turn(row, float(reward), info)
            if not (terminated or truncated):
                engine.feed(slot, state[end:], info["max_new_tokens"], info["stop_token_ids"])
                continue
            row.terminated, row.truncated = bool(terminated), bool(truncated)
            rows.append(finish(live.pop(slot), spans.pop(slot), info))
            free.append(slot)
            if progress is not None:
                progress.update()
    engine.release()
    return sorted(rows, key=lambda row: row.episode)


def count_turn(row: Trajectory, reward: float, info: dict[str, Any]) -> None:
    """Add one turn to the row's statistics."""
    calls = info.get("tool_calls", [])
    row.stats["return"] += reward
    row.stats["turns"] += 1
    row.stats["tool_calls"] += len(calls)
    row.stats["tool_errors"] += sum(not call["ok"] for call in calls)
    for name, value in info.get("reward_terms", {}).items():
        row.reward_terms[name] = row.reward_terms.get(name, 0.0) + value


def finish(row: Trajectory, spans: list[tuple[int, np.ndarray, np.ndarray, float]], info: dict[str, Any]) -> Trajectory:
    """Lay the turns of a finished episode out over its tokens.

    The reward of a turn sits on the turn's last sampled token. The reward of an empty span, which has none, moves to the
    last token sampled before it, and where nothing was sampled before it, to the first turn after it.
    """
    size = len(row.tokens)
    row.action_mask = np.zeros(size, bool)
    row.logprobs, row.rewards = np.zeros(size, np.float32), np.zeros(size, np.float32)
    carried = 0.0
    for start, span, logprobs, reward in spans:
        end = start + len(span)
        if len(span):
            row.turns.append((start, end))
            row.action_mask[start:end], row.logprobs[start:end] = True, logprobs
        if row.turns:
            row.rewards[row.turns[-1][1] - 1] += reward + carried
            carried = 0.0
        else:
            carried += reward
    row.stats |= {
        "success": float(info.get("is_success", False)),
        "truncated": float(row.truncated),
        "sampled_tokens": float(row.action_mask.sum()),
        "tokens": float(size),
    }
    names = {"em": "exact_match", "f1": "f1"}
    row.stats |= {names[k]: float(v) for k, v in info.get("metrics", {}).items() if k in names}
    return row


def mean_stats(rows: Sequence[Trajectory]) -> dict[str, float]:
    """The mean of every statistic over the rows that have it."""
    names = sorted({name for row in rows for name in row.stats})
    return {name: float(np.mean([row.stats[name] for row in rows if name in row.stats])) for name in names}


# ------------------------------------------------------------------------------------------------------- advantages


def gae_tokens(
    r: np.ndarray, v: np.ndarray, m: np.ndarray, gamma: float = 1.0, lam: float = 0.95, done: bool = True, v_last: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
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
    r_turn: np.ndarray, v_turn: np.ndarray, gamma: float = 1.0, lam: float = 0.95, done: bool = True, v_last: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """GAE in which a turn is one action; `v_turn[k]` is the value before the first sampled token of turn k."""
    advantages, next_value, last = np.zeros(len(r_turn)), (0.0 if done else v_last), 0.0
    for k in reversed(range(len(r_turn))):
        last = r_turn[k] + gamma * next_value - v_turn[k] + gamma * lam * last
        advantages[k], next_value = last, v_turn[k]
    return advantages, advantages + np.asarray(v_turn)


def gae_bilevel(
    r: np.ndarray,
    v: np.ndarray,
    m: np.ndarray,
    turn_end: np.ndarray,
    gamma: float = 1.0,
    lam: float = 1.0,
    gamma_turn: float = 0.95,
    done: bool = True,
    v_last: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
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


def advantage_positions(row: Trajectory, args: Args) -> np.ndarray:
    """The tokens that GAE runs over: the sampled ones (with --no-advantage-mask all after the prompt)."""
    return row.action_mask if args.advantage_mask else np.arange(len(row.tokens)) >= row.prompt_length


def loss_positions(row: Trajectory, args: Args) -> np.ndarray:
    """The tokens that the policy is trained on: the sampled ones (with --no-loss-mask all after the prompt)."""
    return row.action_mask if args.loss_mask else np.arange(len(row.tokens)) >= row.prompt_length


def value_positions(row: Trajectory, args: Args) -> np.ndarray:
    """The states that the critic is trained on, named by the token after them."""
    mask = advantage_positions(row, args) & loss_positions(row, args)
    if args.advantage == "turns":  # a turn is one action: its value is that of its first state
        starts = np.zeros_like(mask)
        starts[[start for start, _ in row.turns]] = True
        mask = starts
    return mask


def compute_advantages(rows: Sequence[Trajectory], args: Args) -> None:
    """Fill `advantages` and `returns` of all rows, then whiten the advantages over the whole batch."""
    masks, weights = [], []
    for row in rows:
        mask, done = advantage_positions(row, args), not (row.truncated and args.truncation == "bootstrap")
        if args.advantage == "turns":
            r_turn = np.array([row.rewards[start:end].sum() for start, end in row.turns])
            v_turn = np.array([row.values[start] for start, _ in row.turns])
            turn_adv, turn_ret = gae_turns(r_turn, v_turn, args.gamma, args.gae_lambda, done, row.value_last)
            advantages, returns = np.zeros(len(row.tokens)), np.zeros(len(row.tokens))
            for (start, end), a, g in zip(row.turns, turn_adv, turn_ret, strict=True):
                advantages[start:end], returns[start:end] = a, g
        elif args.advantage == "bilevel":
            turn_end = np.zeros(len(row.tokens), bool)
            turn_end[[end - 1 for _, end in row.turns]] = True
            gammas = (args.gamma, args.gae_lambda, args.gamma_turn)
            advantages, returns = gae_bilevel(row.rewards, row.values, mask, turn_end, *gammas, done, row.value_last)
        else:
            gammas = (args.gamma, args.gae_lambda)
            advantages, returns = gae_tokens(row.rewards, row.values, mask, *gammas, done, row.value_last)
        row.advantages, row.returns = advantages.astype(np.float32), returns.astype(np.float32)
        weight = mask.astype(float)
        if args.adv_norm == "turn":
            for start, end in row.turns:
                weight[start:end] /= end - start
        masks.append(mask)
        weights.append(weight)
    if args.adv_norm == "none" or not rows:
        return
    everything, weight = np.concatenate([row.advantages for row in rows]).astype(float), np.concatenate(weights)
    mean = (weight * everything).sum() / max(weight.sum(), 1e-8)
    std = np.sqrt((weight * (everything - mean) ** 2).sum() / max(weight.sum(), 1e-8) + 1e-8)
    for row, mask in zip(rows, masks, strict=True):
        row.advantages = (np.where(mask, row.advantages - mean, 0.0) / std).astype(np.float32)


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


def pad(arrays: Sequence[np.ndarray], device: torch.device | str = "cpu") -> torch.Tensor:
    """Arrays of different lengths -> [B, T], zeros on the right.

    With padding on the right a causal model needs no attention mask: no real token sees a padded one.
    """
    out = np.zeros((len(arrays), max(map(len, arrays))), arrays[0].dtype)
    for target, array in zip(out, arrays, strict=True):
        target[: len(array)] = array
    return torch.from_numpy(out).to(device)


def policy_forward(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, vocab_size: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [N] and entropies [N], float32, of the N tokens of `ids` [B, T] where `mask` [B, T] is True."""
    rows, columns = mask.nonzero(as_tuple=True)
    with logits_only_at(model, (rows, columns - 1)):
        logits = model(input_ids=ids.long(), use_cache=False).logits
    logprobs = torch.log_softmax(logits[:, :vocab_size].float() / temperature, -1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, ids[rows, columns].long()[:, None])[:, 0], entropy


def kl_divergence(x: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimators of KL(policy || reference) from x = log policy - log reference on the policy's own samples."""
    x = x.clamp(-20, 20)
    return {"k1": x, "k2": x.square() / 2, "k3": ((-x).exp() - 1 + x).clamp(max=10)}[estimator]


def policy_loss(
    new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped objective of PPO per token, to be minimised, and what is logged about it. All [N]."""
    logratio = (new - old).clamp(-20, 20)
    ratio = logratio.exp()
    loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    with torch.no_grad():
        clipped = (ratio < 1 - clip_low) | (ratio > 1 + clip_high)
        logged = {"old_approx_kl": -logratio, "approx_kl": ratio - 1 - logratio, "clipfrac": clipped.float()}
    return loss, logged


def value_loss(new: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, clip: float) -> torch.Tensor:
    """Half the squared error of the critic per state, the larger of the free and the clipped one. All [N]."""
    loss = (new - returns).square()
    if clip > 0:
        loss = torch.max(loss, (old + (new - old).clamp(-clip, clip) - returns).square())
    return loss / 2


@torch.no_grad()
def score(rows: Sequence[Trajectory], args: Args, policy: Any, critic: Any, reference: Any, vocab_size: int) -> None:
    """Before the update: the critic's values and, where asked for, the trainer's and the reference's log-probabilities."""
    device = policy.device
    for group in microbatches(rows, args.microbatch_tokens):
        ids = pad([row.tokens for row in group], device)
        values = critic(ids).float().cpu().numpy()
        for row, value in zip(group, values, strict=True):
            row.values = np.concatenate([[0.0], value[: len(row.tokens) - 1]]).astype(np.float32)
            row.value_last = float(value[len(row.tokens) - 1])
        positions = [loss_positions(row, args) for row in group]
        for model, name in ((policy, "logprobs"), (reference, "ref_logprobs")):
            if model is None or (name == "logprobs" and args.old_logprobs == "sampler" and args.loss_mask):
                continue
            logprobs, _ = policy_forward(model, ids, pad(positions, device), vocab_size, args.temperature)
            parts = np.split(logprobs.cpu().numpy(), np.cumsum([mask.sum() for mask in positions])[:-1])
            for row, mask, part in zip(group, positions, parts, strict=True):
                full = np.zeros(len(row.tokens), np.float32)
                full[mask] = part
                setattr(row, name, full)
        if reference is not None and args.kl_in == "reward":
            for row in group:
                row.rewards = row.rewards - args.kl_coef * (row.logprobs - row.ref_logprobs) * row.action_mask


def gather(rows: Sequence[Trajectory], name: str, masks: Sequence[np.ndarray], device: Any) -> torch.Tensor:
    """The entries of the rows' array `name` where `masks` are True, one after the other: [N]."""
    return torch.from_numpy(np.concatenate([getattr(r, name)[m] for r, m in zip(rows, masks, strict=True)])).to(device)


def backward(
    rows: Sequence[Trajectory], args: Args, policy: Any, critic: Any, vocab_size: int, train_policy: bool = True
) -> dict[str, float]:
    """Add the gradient of one optimizer step on `rows`, in microbatches, and return what is logged about it.

    Every mean is over the tokens of the whole step (sums per microbatch, divided by the step's counts), so the gradient
    does not depend on how the step is cut into microbatches.
    """
    device = policy.device
    num_tokens = max(1, sum(int(loss_positions(row, args).sum()) for row in rows))
    num_states = max(1, sum(int(value_positions(row, args).sum()) for row in rows))
    logged: dict[str, float] = {}
    for group in microbatches(rows, args.microbatch_tokens):
        ids = pad([row.tokens for row in group], device)
        tokens, states = [loss_positions(row, args) for row in group], [value_positions(row, args) for row in group]
        sums = {}
        if train_policy and any(mask.any() for mask in tokens):
            new, entropy = policy_forward(policy, ids, pad(tokens, device), vocab_size, args.temperature)
            old, advantages = gather(group, "logprobs", tokens, device), gather(group, "advantages", tokens, device)
            loss, logs = policy_loss(new, old, advantages, args.clip_coef, args.clip_coef_high)
            total = loss.sum() - args.ent_coef * entropy.sum()
            sums = {"policy_loss": loss.sum(), "entropy": entropy.sum()} | {k: v.sum() for k, v in logs.items()}
            if args.kl_coef > 0:
                x = new - gather(group, "ref_logprobs", tokens, device)
                sums["ref_kl"] = kl_divergence(x.detach(), "k3").sum()
                if args.kl_in == "loss":
                    total = total + args.kl_coef * kl_divergence(x, args.kl_estimator).sum()
            sums = {name: value / num_tokens for name, value in sums.items()}
            check_finite(total, group, "the policy's loss")
            (total / num_tokens).backward()
        if any(mask.any() for mask in states):
            at = pad(states, device).nonzero(as_tuple=True)
            old, returns = gather(group, "values", states, device), gather(group, "returns", states, device)
            loss = value_loss(critic(ids)[at[0], at[1] - 1], old, returns, args.clip_coef_value).sum() / num_states
            sums["value_loss"] = loss
            check_finite(loss, group, "the critic's loss")
            loss.backward()
        for name, value in sums.items():
            logged[name] = logged.get(name, 0.0) + float(value.detach())
    return logged


class NotFinite(RuntimeError):
    """A loss became NaN or infinite; `rows` are the trajectories of the microbatch."""

    rows: list[Trajectory]


def check_finite(loss: torch.Tensor, rows: list[Trajectory], what: str) -> None:
    """Stop the run rather than train on: one such step destroys the weights."""
    if not torch.isfinite(loss):
        error = NotFinite(f"{what} is {loss.item()}")
        error.rows = rows
        raise error


# ------------------------------------------------------------------------------------------------------------- main


def make_envs(args: Args, split: str, tokenizer: str | None) -> Any:
    """`num_envs` episodes that run at the same time, their tool calls together."""
    kwargs = json.loads(args.env_kwargs)
    if args.truncation == "bootstrap":
        kwargs["unfinished_reward"] = 0.0
    return gym.make_vec(args.env_id, num_envs=args.num_envs, tokenizer=tokenizer, split=split, **kwargs)


def resolve_model(args: Args) -> str:
    """The name or folder of the model, checked before any work is done."""
    name = agent_r1.tiny_policy(args.env_id) if args.model == "tiny" else args.model
    if os.path.isdir(name) and not os.path.isfile(os.path.join(name, "config.json")):
        raise SystemExit(f"--model {name}: the folder holds no config.json; give a folder saved by save_pretrained()")
    if not os.path.isdir(name) and (os.path.isabs(name) or name.count("/") > 1):
        raise SystemExit(f"--model {name}: there is no such folder")
    return name


def check_vocabulary(model: PreTrainedModel, vocab_size: int) -> None:
    """The tokenizer may be shorter than the embedding (its rows beyond are never sampled), but not longer."""
    rows = model.get_input_embeddings().num_embeddings
    if vocab_size > rows:
        raise SystemExit(
            f"the tokenizer has {vocab_size} tokens but the model's embedding only {rows}: they don't belong together. "
            "Give the model's own tokenizer, or resize the embedding and train it first"
        )


def write_rows(path: Path, rows: Sequence[Trajectory], iteration: int) -> None:
    """Append rows to a JSONL file; lists have one entry per token."""
    with path.open("a") as file:
        for row in rows:
            content: dict[str, Any] = {"iteration": iteration, "episode": row.episode, "task_index": row.task_index}
            content |= {"terminated": row.terminated, "truncated": row.truncated}
            content |= {"stats": row.stats, "reward_terms": row.reward_terms}
            for name in ("tokens", "action_mask", "rewards", "values", "logprobs", "advantages"):
                content[name] = [round(x, 6) for x in getattr(row, name).astype(float).tolist()]
            content |= {name: [int(x) for x in content[name]] for name in ("tokens", "action_mask")}
            file.write(json.dumps(content) + "\n")


def evaluate(envs: Any, engine: TransformersEngine, args: Args) -> dict[str, float]:
    """Play the first `eval_episodes` tasks of the evaluation split."""
    tasks = [(i, i % envs.num_tasks) for i in range(args.eval_episodes)]
    return mean_stats(rollout(envs, engine, tasks, args.seed))


if __name__ == "__main__":
    args = tyro.cli(Args)
    run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}".replace("/", "_")
    if args.resume:
        run_name, args = Path(args.resume).name, checkpoints.load_args(args.resume, args)
    run_dir = Path(args.resume).parent / run_name if args.resume else Path("runs") / run_name
    num_iterations = max(1, args.total_episodes // args.episodes_per_iteration)
    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # bf16 may be an illegal instruction on a CPU
    torch.set_num_threads(args.num_threads or os.cpu_count() or 1)
    random.seed(args.seed)
    torch.manual_seed(args.seed)

    # model, critic, environments
    model_name = resolve_model(args)
    source = run_dir / "checkpoint" / "policy" if args.resume else model_name
    policy = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(device).eval()  # eval: no dropout
    critic = Critic(model_name, dtype).to(device).eval()
    reference = None
    if args.kl_coef > 0:
        reference = AutoModelForCausalLM.from_pretrained(model_name, dtype=dtype).to(device).eval()
    tokenizer = None if args.tokenizer == "byte" else args.tokenizer or model_name
    envs = make_envs(args, args.split, tokenizer)
    eval_envs = make_envs(args, args.eval_split, tokenizer) if args.eval_episodes else None
    vocab_size = envs.single_action_space.vocab_size
    check_vocabulary(policy, vocab_size)
    engine = TransformersEngine(policy, args.num_envs, vocab_size, args.temperature, args.top_p)
    eval_engine = TransformersEngine(policy, args.num_envs, vocab_size, args.eval_temperature)

    # Adam's steps are taken in float32: bf16 weights would swallow small ones
    groups = [list(policy.parameters()), list(critic.parameters())]
    masters = [[p if p.dtype == torch.float32 else p.detach().float() for p in group] for group in groups]
    rates = [args.learning_rate, args.critic_learning_rate]
    optimizer = torch.optim.AdamW(
        [{"params": m, "lr": lr} for m, lr in zip(masters, rates, strict=True)], betas=(0.9, 0.95), weight_decay=0.0
    )
    run = {"iteration": 0, "global_step": 0, "train_seconds": 0.0, "summary": {}}
    if args.resume:
        run = checkpoints.load(args.resume, critic, optimizer, masters)["run"]
        checkpoints.drop_later_rows(run_dir / "trajectories.jsonl", run["iteration"])
    saver = checkpoints.Checkpointer(run_dir, policy, critic, optimizer, masters)

    # logging
    run_dir.mkdir(parents=True, exist_ok=True)
    if args.track:
        import wandb

        wandb.init(
            project=args.wandb_project_name,
            entity=args.wandb_entity,
            sync_tensorboard=True,
            config=asdict(args),
            name=run_name,
            save_code=True,
        )
    writer = SummaryWriter(str(run_dir), purge_step=run["global_step"] if args.resume else None)
    table = "\n".join(f"|{name}|{value}|" for name, value in asdict(args).items())
    writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{table}")
    bar = tqdm(total=num_iterations * args.episodes_per_iteration, unit="episode", dynamic_ncols=True)
    bar.update(run["iteration"] * args.episodes_per_iteration)

    def log_evaluation(when: str) -> None:
        """Evaluate, and write what came out to TensorBoard and summary.json."""
        if eval_envs is None:
            return
        result = evaluate(eval_envs, eval_engine, args)
        for name, value in result.items():
            writer.add_scalar(f"eval/{name}", value, run["global_step"])
        for name in ("exact_match", "success"):
            if name in result:
                run["summary"].setdefault(f"eval/{name}_first", result[name])
                run["summary"][f"eval/{name}_last"] = result[name]
        bar.write(f"evaluation {when}: " + ", ".join(f"{name} {value:.3f}" for name, value in result.items()))

    try:
        if not args.resume:
            log_evaluation("at the start")
        saver.boundary({"algorithm": args.exp_name, "args": asdict(args), "run": run})
        for iteration in range(run["iteration"] + 1, num_iterations + 1):
            started = time.time()
            rng = np.random.default_rng([args.seed, iteration])  # everything random follows from seed and iteration
            progress = (iteration - 1) / num_iterations if args.anneal_lr else 0.0
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * (1 - progress)

            # rollout
            first = (iteration - 1) * args.episodes_per_iteration
            tasks = rng.integers(envs.num_tasks, size=args.episodes_per_iteration).tolist()
            rows = rollout(envs, engine, list(enumerate(tasks, first)), args.seed, bar)
            rollout_seconds = time.time() - started

            # values and advantages
            score(rows, args, policy, critic, reference, vocab_size)
            compute_advantages(rows, args)
            score_seconds = time.time() - started - rollout_seconds

            # update
            saver.dirty()
            train_policy, trained, stop = iteration > args.critic_warmup, 0, False
            logged: list[dict[str, float]] = []
            for _ in range(args.update_epochs):
                for part in np.array_split(rng.permutation(len(rows)), args.num_minibatches):
                    minibatch = [rows[i] for i in part]
                    logged.append(backward(minibatch, args, policy, critic, vocab_size, train_policy))
                    norms = []
                    for weights, targets in zip(groups, masters, strict=True):
                        norms.append(float(nn.utils.clip_grad_norm_(weights, args.max_grad_norm)))
                        for weight, target in zip(weights, targets, strict=True):
                            target.grad = None if weight.grad is None else weight.grad.to(target.dtype)
                    optimizer.step()
                    for weights, targets in zip(groups, masters, strict=True):
                        for weight, target in zip(weights, targets, strict=True):
                            weight.grad = None
                            if weight is not target:
                                weight.data.copy_(target.data)
                    logged[-1] |= {"grad_norm": norms[0], "critic_grad_norm": norms[1]}
                    trained += sum(len(row.tokens) for row in minibatch)
                    if args.target_kl is not None and logged[-1].get("approx_kl", 0.0) > args.target_kl:
                        stop = True
                        break
                if stop:
                    break
            train_seconds = time.time() - started - rollout_seconds - score_seconds
            run["iteration"] = iteration
            run["train_seconds"] += time.time() - started

            # logging
            stats = mean_stats(rows)
            num_turns, num_sampled = stats["turns"] * len(rows), stats["sampled_tokens"] * len(rows)
            run["global_step"] += int(num_turns)
            targets = np.concatenate([row.returns[value_positions(row, args)] for row in rows])
            values = np.concatenate([row.values[value_positions(row, args)] for row in rows])
            scalars = {
                "charts/episodic_return": stats["return"],
                "charts/episodic_length": stats["turns"],
                "charts/learning_rate": optimizer.param_groups[0]["lr"],
                "charts/SPS": num_turns / (time.time() - started),
                "charts/sampled_tokens_per_second": num_sampled / rollout_seconds,
                "charts/trained_tokens_per_second": trained / train_seconds,
                "losses/explained_variance": 1 - np.var(targets - values) / max(np.var(targets), 1e-8),
                "time/rollout": rollout_seconds,
                "time/score": score_seconds,
                "time/train": train_seconds,
            }
            for name in ("success", "exact_match", "f1", "truncated", "tool_calls", "tool_errors", "sampled_tokens"):
                if name in stats:
                    scalars[f"charts/{name}"] = stats[name]
            for name in sorted({name for row in rows for name in row.reward_terms}):
                scalars[f"rewards/{name}"] = float(np.mean([row.reward_terms.get(name, 0.0) for row in rows]))
            for name in sorted({name for logs in logged for name in logs}):
                scalars[f"losses/{name}"] = float(np.mean([logs[name] for logs in logged if name in logs]))
            for name, value in scalars.items():
                writer.add_scalar(name, value, run["global_step"])
            write_rows(run_dir / "trajectories.jsonl", rows[: args.log_trajectories], iteration)
            bar.set_postfix(
                {
                    "return": f"{stats['return']:.2f}",
                    "success": f"{stats['success']:.2f}",
                    "tokens/s": f"{stats['tokens'] * len(rows) / (time.time() - started):.0f}",
                }
            )
            if iteration == num_iterations:
                log_evaluation("at the end")
            elif args.eval_every and iteration % args.eval_every == 0:
                log_evaluation(f"after {iteration} iterations")
            run["summary"] |= {"train_seconds": run["train_seconds"], "args": asdict(args)}
            checkpoints.write_json(run_dir / "summary.json", run["summary"])
            saver.boundary({"algorithm": args.exp_name, "args": asdict(args), "run": run})
            if args.checkpoint_every and iteration % args.checkpoint_every == 0:
                saver.save()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not spoil the file
        bar.close()
        saver.save()
        again = f"python {sys.argv[0]} --resume {run_dir}"
        print(f"\ninterrupted; the state after the last complete iteration is in {run_dir}. Go on with:\n    {again}")
        raise SystemExit(130) from None
    except NotFinite as error:
        bar.close()
        write_rows(run_dir / "not_finite.jsonl", error.rows, run["iteration"] + 1)
        raise SystemExit(f"stopped: {error}. The rows are in {run_dir / 'not_finite.jsonl'}") from error
    bar.close()
    if args.save_model:
        policy.save_pretrained(run_dir / "model")
        if tokenizer is not None:
            AutoTokenizer.from_pretrained(tokenizer).save_pretrained(run_dir / "model")
        print(f"the trained policy is in {run_dir / 'model'}")
    envs.close()
    writer.close()
