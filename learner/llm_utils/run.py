"""The setup of every learner and the work around its algorithm: arguments, models, engine, files and logs.

    args = prepare(arguments.read(Args), check) flags of a resumed run, checks, processes, seeds, model's defaults
    envs = gym.make_vec(...)                    made by the learner itself
    run = make_run(args, envs, eval_envs)       policy, reference, critic, optimizer, engine, checkpoints, log
"""

from __future__ import annotations

import hashlib
import math
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agent_r1.text.tokenizers import load_tokenizer, same_tokens
from llm_utils import arguments, distributed, replay, void_turns
from llm_utils.records.earlier_runs import other_environment
from llm_utils.records.logger import Logger, run_name, share_of_faults
from llm_utils.records.model_card import save_with_card
from llm_utils.recovery import checkpoint
from llm_utils.reward_model import RewardModel, load_reward_model, score_rows
from llm_utils.sampling.engine import Engine
from llm_utils.sampling.make_engine import check_updates, make_engine
from llm_utils.sampling.rollout import Sampler, Tasks, all_tasks, check_playable, first_tasks, most_turns, rollout
from llm_utils.setup import memory_flags, threads
from llm_utils.setup.curriculum import check_reach, horizon, stages
from llm_utils.setup.environments import evaluation_split, ids_of, one_each, print_defaults
from llm_utils.setup.loading import choose_dtype, load_policy, read_config
from llm_utils.setup.model_checks import check_context, check_layers, check_vocabulary
from llm_utils.setup.pass_rates import task_probabilities
from llm_utils.setup.preflight import measure, preflight, unshared_prompts
from llm_utils.setup.sources import config_files, fit_environment, model_files, model_source, tokenizer_source
from llm_utils.streams import Stream
from llm_utils.training.compiled import compile_training
from llm_utils.training.forward import microbatches, score
from llm_utils.training.metrics import sampler_gap
from llm_utils.training.optimizer import Float32AdamW
from llm_utils.trajectory import Segment, Trajectory
from llm_utils.value_model import save_critic, weights_digest

Episodes = list[tuple[int, int]]  # numbers and task indexes


def prepare(args: Any, check: Callable[[Any], None] = arguments.check) -> Any:
    """Return the final arguments: those of the run that --resume names, with defaults that suit the model.

    Join torchrun's processes; set threads and seeds. Raise SystemExit for arguments that `check` rejects.
    """
    args = checkpoint.load_args(args, algorithm())
    check(args)
    arguments.check_machine(args)
    distributed.setup(args.cuda)
    threads.use(args)
    torch.use_deterministic_algorithms(args.deterministic)
    torch.manual_seed(args.seed)
    given = asdict(args)
    chosen = fit_environment(args) | fill_defaults(args)
    args.open_flags = {name: given[name] for name in chosen}  # not a flag: config.yaml leaves these open
    print_defaults(chosen, args)
    if chosen and distributed.rank() == 0:
        for name, split in zip(ids_of(args), one_each("eval_split", chosen.get("eval_split"), args), strict=True):
            if split == args.split:
                print(f"{name}: evaluations use the training tasks, split {args.split}", file=sys.stderr)
    arguments.check_switches(args)
    if (warning := other_environment(args)) and distributed.rank() == 0:
        print(warning, file=sys.stderr)
    return args


def fill_defaults(args: Any) -> dict[str, Any]:
    """Fill defaults that suit model and machine into open arguments. Return the filled values."""
    chosen: dict[str, Any] = {}
    rates = default_learning_rates(args.model, args.lora_rank)
    for name, rate in zip(("learning_rate", "critic_learning_rate"), rates, strict=True):
        if getattr(args, name, 0.0) is None:
            chosen[name] = rate
    if args.eval_split is None and args.eval_episodes:
        chosen["eval_split"] = evaluation_split(args, args.split)
    dtype = choose_dtype(args.dtype, distributed.device(args.cuda))
    if args.dtype == "auto":
        chosen["dtype"] = str(dtype).removeprefix("torch.")
    if args.old_logprobs == "auto":
        same_program = args.engine == "transformers" and not args.compile  # samples and trains
        exact = same_program and dtype == torch.float32 and not args.max_staleness and args.loss_mask
        exact = exact and not getattr(args, "replay_successes", 0)
        chosen["old_logprobs"] = "sampler" if exact and not args.reject_ratio else "trainer"
    for name, value in chosen.items():
        setattr(args, name, value)
    return chosen


def default_learning_rates(model: str, lora_rank: int) -> tuple[float, float]:
    """Return learning rates of policy and critic that suit `--model` and `--lora-rank`.

    The shipped policies are small and tolerate large steps; a pretrained model would forget.
    """
    if model == "tiny":
        return 3e-4, 1e-3
    return (1e-5 if lora_rank else 1e-6), 1e-5


def algorithm() -> str:
    """Return the name of the learner's file, without its extension."""
    return Path(sys.argv[0]).stem


def tokenizer_of(args: Any) -> str | None:
    """Return the tokenizer argument of the environment."""
    return tokenizer_source(args.tokenizer, model_source(args.model, args.env_id), args.env_id)


def reference_source(args: Any) -> str:
    """Return the model of the KL divergence. Raise SystemExit if its tokens are not those of the policy."""
    own = model_source(args.model, args.env_id)
    if args.reference is None:
        return own
    source = model_source(args.reference, args.env_id, "--reference")
    theirs = tokenizer_source(args.tokenizer, source, args.env_id)
    if not same_tokens(load_tokenizer(tokenizer_of(args)), load_tokenizer(theirs)):
        raise SystemExit(
            f"--reference {args.reference} has another tokenizer than --model {args.model}: the KL divergence compares "
            "probabilities of the same tokens. Give a model of the same family"
        )
    return source


@dataclass
class Run:
    """The state of a learner's loop. Environments, engine, sampler and log exist on rank 0 only."""

    args: Any
    folder: Path
    device: torch.device
    num_iterations: int
    tasks: Tasks
    vocab_size: int
    policy: Any
    critic: Any  # None if the algorithm has none
    reference: Any  # None without a KL penalty
    optimizer: Float32AdamW
    saver: checkpoint.Checkpointer
    in_place: bool  # the engine samples from the trainer's weights themselves
    state: dict[str, Any]  # iteration, evaluated, global_step, episodes, train_seconds; evaluations' results
    envs: Any = None
    eval_envs: Any = None
    engine: Engine | None = None
    eval_engine: Engine | None = None
    sampler: Sampler | None = None
    log: Logger | None = None
    reward_model: RewardModel | None = None  # on rank 0, with --reward-model
    queued: int = 0  # the last iteration whose episodes were queued in the sampler
    played: list[Trajectory] = field(default_factory=list)  # all of this iteration, also excluded ones
    shown: list[Trajectory] = field(default_factory=list)  # those of them that were sampled
    metrics: list[dict[str, float]] = field(default_factory=list)  # of this iteration's optimizer steps
    seconds: dict[str, float] = field(default_factory=dict)  # of each part of this iteration
    gap: dict[str, float] = field(default_factory=dict)  # from sampler to trainer, if the trainer scored
    figures: dict[str, float] = field(default_factory=dict)  # of rows that were replayed or dropped in this iteration
    successes: list[replay.Stored] = field(default_factory=list)  # with --replay-successes
    last_mark: float = 0.0

    def start(self) -> None:
        """Push the first weights, remember the first boundary, and evaluate if that is due."""
        self.push_weights()
        self.boundary()
        self.evaluate_if_due()

    def begin_iteration(self, iteration: int) -> None:
        """Start the clock and set the learning rate."""
        if self.log is not None:  # a resumed run trains the policy further, so this is no longer its model
            shutil.rmtree(self.folder / "model", ignore_errors=True)
        self.played, self.shown, self.metrics = [], [], []
        self.seconds, self.gap, self.figures, self.last_mark = {}, {}, {}, time.time()
        remaining = 1 - (iteration - 1) / self.num_iterations
        self.optimizer.scale_learning_rates(remaining if self.args.anneal_lr else 1.0)

    def mark(self, part: str) -> None:
        """End a part of the iteration, and note its time."""
        now = time.time()
        self.seconds[part], self.last_mark = now - self.last_mark, now

    # ------------------------------------------------------------------ rollout

    def collect(self, iteration: int, episodes: Callable[[int], Episodes]) -> list[Trajectory]:
        """Run `episodes(iteration)`; those of the next --max-staleness iterations start meanwhile. Return the valid
        ones, on rank 0."""
        if self.sampler is None:
            return []
        while self.queued < min(self.num_iterations, iteration + self.args.max_staleness):
            self.queued += 1
            self.sampler.add(episodes(self.queued), self.horizon(self.queued))
        return self.valid(self.sampler.collect([number for number, _ in episodes(iteration)]))

    def horizon(self, iteration: int) -> int | None:
        """Return the turn limit of this iteration's episodes, at most the environment's own; None: the environment's
        limit."""
        if getattr(self.args, "horizon_schedule", None) is None:
            return None
        turns = horizon(stages(self.args.horizon_schedule), self.args.horizon_every, iteration)
        return min(turns, most_turns(self.envs))

    def collect_more(self, episodes: Episodes) -> list[Trajectory]:
        """Run further episodes in this iteration. Return the valid ones."""
        if self.sampler is None:
            return []
        if self.log is not None:
            self.log.bar.grow(len(episodes))
        self.sampler.add(episodes, self.horizon(self.queued))
        return self.valid(self.sampler.collect([number for number, _ in episodes]))

    def valid(self, rows: list[Trajectory], sampled: bool = True) -> list[Trajectory]:
        """Count episodes in this iteration. Return them without those that ended in infrastructure errors, which tell
        nothing about the policy, and pay the scores of --reward-model. Raise RuntimeError if the share of errors
        exceeds --max-invalid.

        sampled: False for episodes that ran in another way (greedily, as a baseline). They count as episodes, but the
        charts do not include their statistics.
        """
        self.played += rows
        self.shown += rows if sampled else []
        faults = [row.fault for row in self.played if row.fault]
        share = len(faults) / max(1, len(self.played))
        if share > self.args.max_invalid:
            raise RuntimeError(
                f"{share:.0%} of the iteration's {len(self.played)} episodes failed because of infrastructure errors, "
                f"more than --max-invalid {self.args.max_invalid} allows. The last one: {faults[-1]}"
            )
        rows = [row for row in rows if not row.fault]
        if self.reward_model is not None:
            score_rows(rows, self.reward_model, self.args.rm_coef)
        return rows

    def replayed(self, rows: Sequence[Trajectory]) -> list[Trajectory]:
        """Return stored successes of earlier iterations, to train on beside `rows` in the share of
        --replay-successes. There are fewer while the store fills, and none while PPO trains only its critic."""
        share, iteration = self.replay_share, self.state["iteration"] + 1
        if not share or iteration <= getattr(self.args, "critic_warmup", 0):
            return []
        count = round(len(rows) * share / (1 - share))
        drawn = replay.draw(self.successes, count, [self.args.seed, Stream.REPLAY, iteration])
        self.figures["replay/rows"] = len(drawn)
        self.figures["replay/age"] = float(np.mean([iteration - 1 - row.versions.max() for row in drawn] or [0.0]))
        return drawn

    @property
    def replay_share(self) -> float:
        """The share of replayed rows; 0 in a learner without the flag."""
        return getattr(self.args, "replay_successes", 0.0)

    # ------------------------------------------------------------------ scoring and updates

    def score_policy(self, rows: Sequence[Trajectory]) -> None:
        """Fill `old_logprobs` with the trainer's log-probabilities of the trained tokens.

        The first optimizer step computes those of its rows, with the same weights. So these rows stay `unscored`
        until then (`minibatches`), unless something needs their log-probabilities earlier.
        """
        args, iteration = self.args, self.state["iteration"] + 1
        without_step = iteration <= getattr(args, "critic_warmup", 0) or getattr(args, "critic_only", False)
        dropping = args.reject_ratio or getattr(args, "drop_void_turns", False)
        if not (dropping or args.kl_in == "reward" or without_step):
            for i in next(self._steps([bool(row.train_mask.any()) for row in rows], iteration), ()):
                rows[i].unscored = True
                rows[i].old_logprobs = np.where(rows[i].train_mask, np.float32(np.nan), np.float32(0))
        scored = self._score([row for row in rows if not row.unscored], self.policy)
        for row in rows:
            row.old_logprobs = scored.get(row.episode, row.old_logprobs)
        if not any(row.unscored for row in rows):
            self.gap = sampler_gap(rows)  # over all, before any is rejected because of it

    def drop_void_turns(self, rows: Sequence[Trajectory]) -> None:
        """Exclude episodes with a void turn from training, and count them in log and summary."""
        dropped = void_turns.drop_void_turns(rows)
        self.figures["charts/void"] = dropped / max(1, len(rows))
        self.state["summary"]["void_episodes"] = self.state["summary"].get("void_episodes", 0) + dropped

    def score_reference(self, rows: Sequence[Trajectory]) -> None:
        """Fill `ref_logprobs` with the reference policy's log-probabilities of the trained tokens."""
        scored = self._score(rows, self.reference)
        for row in rows:
            row.ref_logprobs = scored[row.episode]

    def _score(self, rows: Sequence[Trajectory], model: Any) -> dict[int, np.ndarray]:
        """Return a model's log-probabilities by episode number, which must be unique."""
        assert len({row.episode for row in rows}) == len(rows), "two trajectories have the same episode number"
        batches = self.microbatches(distributed.scatter(rows))
        return distributed.gather(score(batches, model, self.vocab_size, self.args.temperature))

    def microbatches(self, rows: Sequence[Trajectory]) -> Iterator[tuple[list[Segment], int]]:
        """Yield microbatches, each with the factor of its loss. The sampler advances in between."""
        segments = [segment for row in rows for segment in row.segments()]
        for batch in distributed.even_passes(list(microbatches(segments, self.args.microbatch_tokens, self.device))):
            yield batch
            threads.follow()
            if self.sampler is not None and self.args.max_staleness:  # tools and servers need not wait
                self.sampler.advance(write=False)

    def minibatches(self, rows: Sequence[Trajectory], iteration: int) -> Iterator[list[Trajectory]]:
        """Yield, for every optimizer step of an iteration, the trajectories that this process trains on.

        After the first step, its `unscored` rows have the log-probabilities that it computed.
        """
        trained = distributed.broadcast([bool(row.train_mask.any()) for row in rows])
        for indices in self._steps(trained, iteration):
            own = distributed.scatter([rows[i] for i in indices] if distributed.rank() == 0 else [])
            yield own
            if any(row.unscored for row in own):  # true in all processes or in none
                computed = distributed.gather({row.episode: row.old_logprobs for row in own})
                for row in rows:
                    row.old_logprobs, row.unscored = computed.get(row.episode, row.old_logprobs), False
                self.gap = sampler_gap(rows)

    def _steps(self, trained: Sequence[bool], iteration: int) -> Iterator[np.ndarray]:
        """Yield the indices of each optimizer step's rows. `trained` tells which rows have a token to train on.

        A step without such a row is skipped: Adam would move the weights by its momentum.
        """
        rng = np.random.default_rng([self.args.seed, Stream.ORDER, iteration])
        for _ in range(self.args.update_epochs):
            for indices in np.array_split(rng.permutation(len(trained)), self.args.num_minibatches):
                if any(trained[i] for i in indices):
                    yield indices

    def push_weights(self) -> None:
        """Give the trainer's current weights to the sampling engine."""
        weights = iter(()) if self.in_place else distributed.weights(self.policy)
        if self.engine is not None:
            self.engine.update(weights, self.state["iteration"])
        deque(weights, maxlen=0)  # every process must take part in gathering them

    # ------------------------------------------------------------------ the end of an iteration

    def end_iteration(self, iteration: int, rows: Sequence[Trajectory], scalars: dict[str, float]) -> None:
        """Push the weights, log all episodes and those trained on (`rows`), evaluate and save if due."""
        self.state["iteration"] = iteration
        self.push_weights()
        self.mark("sync")
        if self.log is not None:
            if self.replay_share:
                capacity = replay.ITERATIONS * self.args.episodes_per_iteration
                self.successes = replay.remember(self.successes, rows, capacity)
                self.figures["replay/stored"] = len(self.successes)
                trained = self.state["summary"].get("replayed_episodes", 0) + self.figures.get("replay/rows", 0)
                self.state["summary"]["replayed_episodes"] = trained
            turns = sum(row.stats["turns"] for row in self.played)
            self.state["global_step"] += int(turns)
            self.state["episodes"] += len(self.played)
            self.state["train_seconds"] += sum(self.seconds.values())
            scalars |= {f"time/{name}": seconds for name, seconds in self.seconds.items()} | self.gap | self.figures
            scalars |= share_of_faults(self.played)
            scalars["charts/episodes"] = self.state["episodes"]
            if self.device.type == "cuda":
                scalars["memory/peak_gb"] = torch.cuda.max_memory_allocated(self.device) / 1e9
            if (turn_limit := self.horizon(iteration)) is not None:
                scalars["charts/horizon"] = turn_limit
            scalars["charts/learning_rate"] = self.optimizer.adam.param_groups[0]["lr"]
            scalars["charts/SPS"] = turns / sum(self.seconds.values())
            tokens = sum(row.stats["sampled_tokens"] for row in self.played)
            scalars["charts/tokens_per_second"] = tokens / sum(self.seconds.values())
            self.log.iteration(rows, self.metrics, self.state, scalars, self.shown)
        self.boundary()  # before the evaluation, which may fail
        self.evaluate_if_due()
        every = self.args.checkpoint_every
        if every and (iteration == self.num_iterations or iteration % every == 0):
            self.saver.save()

    def evaluate_if_due(self) -> None:
        """Evaluate once at the start, at the end, and every --eval-every iterations, and remember the result."""
        iteration, every = self.state["iteration"], self.args.eval_every
        due = iteration in (0, self.num_iterations) or (every and iteration % every == 0)
        if due and self.state["evaluated"] < iteration:
            self.evaluate()
            self.state["evaluated"] = iteration
            self.boundary()

    def evaluate(self) -> None:
        """Run the first tasks of the evaluation split of each environment, greedily."""
        if self.log is None or self.eval_envs is None or self.eval_engine is None:
            return
        tasks = first_tasks(self.eval_envs, self.args.eval_episodes)
        if not tasks:
            return
        rows = rollout(self.eval_envs, self.eval_engine, tasks, self.args.seed)
        if all(row.fault for row in rows):
            cause = f"failed because of infrastructure errors. The last one: {rows[-1].fault}"
            raise SystemExit(f"every episode of the evaluation {cause}")
        self.state["summary"]["eval/episodes"] = sum(not row.fault for row in rows)
        self.log.evaluation(rows, self.state)

    def boundary(self) -> None:
        """Remember the complete iteration. A run that ends during the next one resumes from here."""
        state = {"algorithm": algorithm(), "args": asdict(self.args), "run": self.state}
        self.saver.boundary(state, self.successes if self.replay_share else None)

    def close(self) -> None:
        """End the run: save the model if requested, and close engine, environments and log."""
        if self.args.save_model:
            tokenizer, summary = tokenizer_of(self.args), self.state["summary"]
            save_with_card(self.policy, self.folder / "model", tokenizer, self.args, summary)
        if self.critic is not None:
            save_critic(self.critic, self.policy, self.folder, self.args, tokenizer_of(self.args), self.vocab_size)
        if self.log is not None and self.engine is not None:
            self.engine.close()
            self.envs.close()
            if self.eval_envs is not None:
                self.eval_envs.close()
            self.log.close()
        distributed.leave()


def make_run(
    args: Any, envs: Any, eval_envs: Any, make_critic: Callable[..., Any] | None = None, entropies: bool = False
) -> Run:
    """Make models, engine, optimizer, checkpoints and log of a run. `envs` and `eval_envs` are None except on rank 0.

    `make_critic(source, args, dtype)` makes the value model if the algorithm has one. With `entropies`, spans have
    those of their tokens. All processes call this.
    """
    rank, world_size, device = distributed.rank(), distributed.world_size(), distributed.device(args.cuda)
    folder = Path(args.resume) if args.resume else distributed.broadcast(Path("runs") / run_name(args))
    source, dtype = model_source(args.model, args.env_id), choose_dtype(args.dtype, device)
    sizes: tuple[int, int, Tasks] = (0, 0, 0)
    if rank == 0:
        check_playable(envs)
        spaces = envs.single_action_space, envs.single_observation_space
        tasks: Tasks = all_tasks(envs)
        if args.sample_by_pass_rate is not None:
            tasks = task_probabilities(
                args.sample_by_pass_rate, args.env_id, args.split, envs.kinds[0].num_tasks,
                env_kwargs=args.env_kwargs, data_dir=args.data_dir,
            )  # fmt: skip
        sizes = spaces[0].vocab_size, spaces[1].max_len, tasks
        check_reach(args, most_turns(envs))
    vocab_size, longest, tasks = distributed.broadcast(sizes)
    reward_model = None
    if rank == 0 and args.reward_model is not None:
        reward_model = load_reward_model(args, tokenizer_of(args), vocab_size, device)
        check_context(reward_model.critic.backbone.config, longest)
    config, with_reference = read_config(source), args.kl_coef > 0
    referred = reference_source(args) if with_reference else None
    check_context(config, longest)
    check_updates(args.engine, config, device)
    if args.engine == "transformers":
        check_layers(config, longest)
    if rank == 0 and (cost := unshared_prompts(config, getattr(args, "group_size", 1))):
        print(cost, file=sys.stderr)
    if args.preflight:
        estimate = partial(
            preflight, config_or_source=config, device=device, critic=make_critic is not None,
            reference=with_reference, longest_row=longest, world_size=world_size,
            reference_config=read_config(referred) if referred else None,
            memory_gb=memory_flags.least_memory_gb(device),
        )  # fmt: skip
        report, smaller = memory_flags.choose(args, device, longest, estimate)
        report.refuse()
    else:
        memory_flags.use_without_preflight(args)
    engine = None
    if rank == 0 and args.engine == "vllm-server":  # a server that does not answer is found before a weight is read
        engine = make_engine(args, source, vocab_size, None, tokenizer_of(args), longest, entropies)
    loading = {"dtype": dtype, "float32_head": args.float32_head, "compiled": args.compile}
    resumed = checkpoint.find(folder) / "policy" if args.resume else None
    policy = load_policy(source, device, args, resumed, **loading)
    check_vocabulary(policy, vocab_size)
    if args.preflight and device.type == "cuda":  # measured instead of estimated, as it is quick
        bonus = getattr(args, "ent_coef", 0.0) != 0

        def measured() -> int:
            return measure(policy, args.microbatch_tokens, longest, vocab_size, args.temperature, bonus)

        memory_flags.check(args, policy, report, smaller, measured).refuse()
    critic = distributed.shard(make_critic(source, args, dtype).eval(), device) if make_critic is not None else None
    if critic is not None and args.compile:
        compile_training(critic.backbone)
    modules, rates = [policy], [args.learning_rate]
    if critic is not None:
        modules, rates = [policy, critic], [args.learning_rate, args.critic_learning_rate]
    optimizer = Float32AdamW(modules, rates, betas=(0.9, 0.95))
    reference = load_policy(referred, device, **loading) if referred else None
    if reference is not None:
        check_vocabulary(reference, vocab_size)
    state: dict[str, Any] = {"iteration": 0, "evaluated": -1, "global_step": 0, "episodes": 0, "train_seconds": 0.0}
    rates_digest = hashlib.sha256(tasks.tobytes()).hexdigest()[:16] if isinstance(tasks, np.ndarray) else None
    files = {"model_files": model_files(args), "pass_rates": rates_digest}
    files["config_files"] = config_files(source, tokenizer_of(args), args.chat_template)
    if reward_model is not None:
        files["reward_model"] = weights_digest(reward_model.critic.named_parameters())
    state["summary"] = initial = files
    if args.resume:
        state = checkpoint.load(folder, critic, optimizer)["run"]
        state.setdefault("evaluated", state["iteration"] or -1)  # missing in older versions
        unchanged = {"pass_rates": f"pass rates in {args.sample_by_pass_rate}"}
        unchanged["config_files"] = f"config or tokenizer of --model {args.model}"
        if with_reference or args.lora_rank:
            unchanged["model_files"] = f"files of --model {args.model} (names, sizes or times)"
        if reward_model is not None:
            unchanged["reward_model"] = f"weights of --reward-model {args.reward_model}"
        checkpoint.check_unchanged(folder, state["summary"], initial, **unchanged)
    run = Run(
        args=args,
        folder=folder,
        device=device,
        num_iterations=args.total_episodes // args.episodes_per_iteration,
        tasks=tasks,
        vocab_size=vocab_size,
        policy=policy,
        critic=critic,
        reference=reference,
        optimizer=optimizer,
        saver=checkpoint.Checkpointer(folder, policy, critic, optimizer, rank, with_model=args.save_model),
        # with adapters a merged copy samples, as two more products for each linear layer would slow down every token
        in_place=args.engine == "transformers" and world_size == 1 and not args.lora_rank,
        state=state,
        queued=state["iteration"],
    )
    if rank == 0:
        model = policy if run.in_place else None
        if args.engine == "transformers" and model is None:  # `start` gives it the trainer's weights
            model = load_policy(source, device, whole=True, **loading)
        run.envs, run.eval_envs, run.reward_model = envs, eval_envs, reward_model
        run.engine = engine or make_engine(args, source, vocab_size, model, tokenizer_of(args), longest, entropies)
        run.eval_engine = run.engine.twin(temperature=0.0)  # evaluations are greedy
        run.sampler = Sampler(envs, run.engine, args.seed, args.deterministic)
        run.log = Logger(folder, args, run.num_iterations * args.episodes_per_iteration, state)
        run.sampler.on_done = run.log.bar.update
        if args.resume and run.replay_share:
            run.successes = checkpoint.load_stored(folder)
    return run


def reject_far_rows(rows: Sequence[Trajectory], factor: float) -> float:
    """Exclude episodes from training if the geometric mean of trainer / sampler is beyond `factor` or its inverse.

    `old_logprobs` must be the trainer's. Return the share of rejected episodes.
    """
    rejected = 0
    for row in rows:
        gaps = (row.old_logprobs - row.logprobs)[row.action_mask]
        if len(gaps) and abs(float(gaps.mean())) > math.log(factor):
            row.train_mask = np.zeros_like(row.train_mask)
            rejected += 1
    return rejected / max(1, len(rows))
