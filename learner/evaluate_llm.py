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
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.envs.registration import load_env_creator
from tqdm import tqdm
from transformers import PreTrainedModel

import agent_r1  # noqa: F401  (registers the environments)
from agent_r1.vector import ToolVectorEnv
from llm_utils import run_files
from llm_utils.compare import bootstrap
from llm_utils.models import arguments_of_run, check_vocabulary, load_policy, model_source, tokenizer_source
from llm_utils.naive_rag import naive_rag
from llm_utils.slots import SlotModel
from llm_utils.trajectory import Trajectory

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


# ---------------------------------------------------------------------------------------------------- generation engine


# Copied from learner/ppo_llm.py
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


# ----------------------------------------------------------------------------------------------------------- statistics


def wilson(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of a proportion from its zeros and ones (Wilson's score interval)."""
    n, share, z = len(values), float(np.mean(values)), 1.959964
    center = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * np.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, center - half), min(1.0, center + half)


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
            low, high = wilson(values) if proportion else bootstrap(values, seed, resamples=2000)
            table[shown] = {"mean": float(np.mean(values)), "low": low, "high": high}
    return table


# ----------------------------------------------------------------------------------------------------------------- main


if __name__ == "__main__":
    args = tyro.cli(Args)
    run_name = f"{args.env_id}__{args.exp_name}__{args.mode}__{args.seed}__{int(time.time())}".replace("/", "_")
    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")
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
    policy = load_policy(source, device)
    check_vocabulary(policy, vocab_size)
    engine = TransformersEngine(policy, args.num_envs, vocab_size, args.temperature, args.top_p)

    # play
    started = time.time()
    num_episodes = min(args.episodes, envs.envs[0].num_tasks)
    with tqdm(total=num_episodes, unit="episode", dynamic_ncols=True) as bar:
        sampler = Sampler(envs, engine, args.seed)
        sampler.queue.extend((i, i) for i in range(num_episodes))
        sampler.on_done = bar.update
        rows = sampler.collect(range(num_episodes))
    seconds = time.time() - started
    envs.close()

    # what came out
    table = summarize(rows, args.seed)
    run_dir = Path("runs") / run_name
    run_dir.mkdir(parents=True)
    run_files.append_rows(run_dir / "trajectories.jsonl", rows, mode=args.mode)
    result = {"model": source, "episodes": num_episodes, "seconds": seconds, "metrics": table, "args": asdict(args)}
    run_files.write_json(run_dir / "evaluation.json", result)
    print(f"{args.env_id}, {args.split}: {num_episodes} episodes of {source} as {args.mode}, {seconds:.0f} s")
    for shown, value in table.items():
        print(f"  {shown:16} {value['mean']:9.4f}   [{value['low']:.4f}, {value['high']:.4f}]")
    print(f"written to {run_dir}")
