# docs and results: docs/learners/evaluate_llm.md
"""Evaluates a policy on held-out tasks, as an agent or as one of the two baselines of Agent-R1.

    python learner/evaluate_llm.py                                         # the tiny policy as it is shipped
    python learner/evaluate_llm.py --model runs/RUN                        # what a run has learned
    python learner/evaluate_llm.py --model runs/RUN --mode base_tool_call  # what it began with
    python learner/evaluate_llm.py --model NAME --env-id AgentR1/HotpotQA-v0 --split dev --mode naive_rag
"""

import json
import os
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
from gymnasium.envs.registration import load_env_creator
from torch import nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

import agent_r1  # noqa: F401  (registers the environments)
from agent_r1.vector import ToolVectorEnv
from llm_utils import checkpoint
from llm_utils.models import arguments_of_run, check_vocabulary, model_source, tokenizer_source
from llm_utils.naive_rag import naive_rag

Array = np.ndarray


@dataclass
class Args:
    exp_name: str = Path(__file__).stem
    """the name of this experiment"""
    seed: int = 1
    """seed of sampling and of the bootstrap"""
    cuda: bool = True
    """use a GPU where there is one"""
    num_threads: int = 0
    """CPU threads of torch (0: all cores)"""

    env_id: str = "AgentR1/MultihopWorld-v0"
    """the id of the environment"""
    split: str = "test"
    """the split whose tasks are played"""
    data_dir: str | None = None
    """the folder of the data set, for environments that have one"""
    env_kwargs: str = "{}"
    """further arguments of the environment, as JSON, e.g. '{"max_turns": 4}'"""
    model: str = "tiny"
    """a Hugging Face name, a folder, a run's folder, or "tiny": the policy shipped for the environment"""
    tokenizer: str | None = None
    """a tokenizer's name or folder (None: the model's own; "byte": the built-in byte tokenizer)"""
    mode: Literal["agent", "base_tool_call", "naive_rag"] = "agent"
    """agent: with tools, as trained. base_tool_call: the same with the model that a run began with.
    naive_rag: one retrieval with the question, the passages in the prompt, one answer, no tools"""

    episodes: int = 1000
    """tasks to play, from the first of the split (fewer if it has fewer)"""
    num_envs: int = 128
    """episodes that run at the same time"""
    temperature: float = 0.0
    """sampling temperature (0: greedy)"""
    top_p: float = 1.0
    """nucleus sampling (1: off)"""


# ------------------------------------------------------------------------------------------------------- trajectory row


# Copied from learner/ppo_llm.py
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


# ---------------------------------------------------------------------------------------------------- generation engine


# Copied from learner/ppo_llm.py
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



# Copied from learner/ppo_llm.py
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



# Copied from learner/ppo_llm.py
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



# Copied from learner/ppo_llm.py
def sample(logprobs: torch.Tensor, noise: torch.Tensor, top_p: float = 1.0) -> torch.Tensor:
    """One token per row of log-probabilities [n, vocabulary] from one uniform number per row [n], by inversion."""
    probs = logprobs.exp()
    if top_p < 1:  # keep the most likely tokens until their mass reaches top_p
        ordered, order = probs.sort(-1, descending=True)
        probs = torch.zeros_like(probs).scatter(-1, order, ordered * (ordered.cumsum(-1) - ordered < top_p))
    mass = probs.cumsum(-1)
    chosen = torch.searchsorted(mass, mass[:, -1:] * noise[:, None].clamp(max=1 - 1e-6), right=True)[:, 0]
    return chosen.clamp(max=probs.shape[1] - 1)  # beyond it only where the probabilities are NaN


# -------------------------------------------------------------------------------------------------------------- rollout


# Copied from learner/ppo_llm.py
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


# ----------------------------------------------------------------------------------------------------------- statistics


def wilson(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of a proportion from its zeros and ones (Wilson's score interval)."""
    n, share, z = len(values), float(np.mean(values)), 1.959964
    center = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * np.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, center - half), min(1.0, center + half)


def bootstrap(values: Sequence[float], seed: int, resamples: int = 2000) -> tuple[float, float]:
    """The 95 % percentile interval of a mean, from resampled means."""
    rng, array = np.random.default_rng(seed), np.asarray(values, float)
    means = [array[rng.integers(len(array), size=len(array))].mean() for _ in range(resamples)]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def summarize(rows: Sequence[Trajectory], seed: int) -> dict[str, dict[str, float]]:
    """Mean and 95 % interval of every statistic of the episodes."""
    for row in rows:  # a well-formed end: one answer, and no malformed call before it
        row.stats["format"] = float(not {"outcome/format", "outcome/unfinished"} & row.reward_terms.keys())
    names = {"em": "exact_match", "f1": "f1", "success": "success", "format": "format", "return": "return"}
    names |= {name: name for row in rows for name in row.stats if name not in names}
    table = {}
    for name, shown in names.items():
        if any(name in row.stats for row in rows):
            values = [float(row.stats[name]) for row in rows]
            proportion = name in ("em", "success", "format", "truncated")
            low, high = wilson(values) if proportion else bootstrap(values, seed)
            table[shown] = {"mean": float(np.mean(values)), "low": low, "high": high}
    return table


# ----------------------------------------------------------------------------------------------------------------- main


if __name__ == "__main__":
    args = tyro.cli(Args)
    run_name = f"{args.env_id}__{args.exp_name}__{args.mode}__{args.seed}__{int(time.time())}".replace("/", "_")
    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # bf16 may be an illegal instruction on a CPU
    torch.set_num_threads(args.num_threads or os.cpu_count() or 1)

    # model and environments
    name = args.model
    if args.mode == "base_tool_call":
        name = arguments_of_run(args.model).get("model") or args.model
    source = model_source(name, args.env_id)
    tokenizer = tokenizer_source(args.tokenizer, source, args.env_id)
    kwargs = {"tokenizer": tokenizer, "split": args.split, **json.loads(args.env_kwargs)}
    if args.data_dir is not None:
        kwargs["data_dir"] = args.data_dir
    if args.mode == "naive_rag":
        env_class = load_env_creator(gym.spec(args.env_id).entry_point)
        envs = ToolVectorEnv(naive_rag(env_class), args.num_envs, **{**gym.spec(args.env_id).kwargs, **kwargs})
    else:
        envs = gym.make_vec(args.env_id, num_envs=args.num_envs, **kwargs)
    vocab_size = envs.single_action_space.vocab_size
    policy = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    check_vocabulary(policy, vocab_size)
    engine = TransformersEngine(policy.to(device).eval(), args.num_envs, vocab_size, args.temperature, args.top_p)

    # play
    started = time.time()
    num_episodes = min(args.episodes, envs.envs[0].num_tasks)
    with tqdm(total=num_episodes, unit="episode", dynamic_ncols=True) as bar:
        rows = rollout(envs, engine, [(i, i) for i in range(num_episodes)], args.seed, bar)
    seconds = time.time() - started
    envs.close()

    # what came out
    table = summarize(rows, args.seed)
    run_dir = Path("runs") / run_name
    run_dir.mkdir(parents=True)
    checkpoint.append_rows(run_dir / "trajectories.jsonl", rows, mode=args.mode)
    result = {"model": source, "episodes": num_episodes, "seconds": seconds, "metrics": table, "args": asdict(args)}
    checkpoint.write_json(run_dir / "evaluation.json", result)
    print(f"{args.env_id}, {args.split}: {num_episodes} episodes of {source} as {args.mode}, {seconds:.0f} s")
    for shown, value in table.items():
        print(f"  {shown:16} {value['mean']:9.4f}   [{value['low']:.4f}, {value['high']:.4f}]")
    print(f"written to {run_dir}")
