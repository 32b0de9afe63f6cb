# docs and results: docs/learners/reward_model_llm.md
"""A reward model of whole episodes, trained on recorded ones, with controls that show what it learned.

    python learner/evaluate_llm.py --samples 8 --temperature 1 --split train --episodes 400         # records episodes
    python learner/reward_model_llm.py --data runs/EVALUATION/trajectories.jsonl                    # learns success
    python learner/grpo_llm.py --reward-model runs/RUN                                              # trains against it
"""

import llm_utils.setup.startup  # noqa: F401  isort: skip  (reports a missing package in one line)

import hashlib
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.nn import functional

from agent_r1.text.tokenizers import fingerprint, load_tokenizer
from llm_utils import arguments, distributed
from llm_utils.imitation.demonstrations import check_first_row
from llm_utils.records import run_files
from llm_utils.records.logger import open_writer, run_name
from llm_utils.records.progress import Progress
from llm_utils.recovery import checkpoint, disk, signals
from llm_utils.reward_figures import auc, by_task, report, shown
from llm_utils.reward_model import (
    Episode,
    RewardModel,
    RewardModelFacts,
    View,
    forward,
    last_logits,
    packs,
    read_episodes,
    save_reward_model,
    views,
)
from llm_utils.setup import threads
from llm_utils.setup.environments import print_defaults
from llm_utils.setup.loading import choose_dtype, read_config
from llm_utils.setup.model_checks import check_vocabulary, positions_of
from llm_utils.setup.sources import config_files, fit_environment, model_files, model_source, tokenizer_source
from llm_utils.training.optimizer import Float32AdamW
from llm_utils.value_model import Critic

Array = np.ndarray
MIN_ROWS = 300  # episodes; fewer teach a model little more than their length
HELD_OUT = 5  # every fifth task is held out


@dataclass
class Args:
    # run
    exp_name: str = Path(__file__).stem
    """name of this experiment"""
    seed: int = 1
    """seed of held-out tasks and batches"""
    track: bool = False
    """also log to Weights & Biases"""
    wandb_project_name: str = "agent-r1"
    """name of the W&B project"""
    checkpoint_every: int = 100
    """steps between checkpoints; there is always one at the end (0: only if the run ends early)"""
    resume: str | None = None
    """run folder: continue from its checkpoint, in the same folder, with its arguments"""

    # machine
    cuda: bool = True
    """use a GPU if there is one"""
    num_threads: int = 0
    """CPU threads of torch (0: as many as there are free cores)"""
    deterministic: bool = False
    """the same weights to the bit in every run, also on a GPU: deterministic kernels"""
    gradient_checkpointing: Literal["on", "off"] = "off"
    """recompute activations in the backward pass: less memory, more time"""
    microbatch_tokens: int = 4096
    """tokens with padding in a forward and backward; fewer need less memory"""

    # episodes
    env_id: str = "AgentR1/MultihopWorld-v0"
    """environment of the episodes; it names the run, and the policy of --model tiny"""
    data: str = ""
    """trajectories.jsonl of a run with --log-trajectories all, or of evaluate_llm.py (required)"""

    # model
    kind: Literal["outcome", "pairs", "values"] = "outcome"
    """outcome: learn success after the last token. pairs: learn which of two episodes of a task succeeds. values: learn
    success after the prompt and after every turn, for rewards of single turns"""
    model: str = "tiny"
    """initial backbone: Hugging Face name, folder, or "tiny" (the policy shipped for the environment)"""
    tokenizer: str | None = None
    """name or folder of a tokenizer (None: the model's own; "byte": the built-in byte tokenizer)"""
    chat_template: str | None = None
    """Jinja file that replaces the tokenizer's chat template: the one that recorded the episodes"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of the backbone's computations (auto: float32 on a CPU, bfloat16 on a GPU)"""

    # training
    num_steps: int = 120
    """optimizer steps"""
    batch_size: int = 64
    """episodes per step; with --kind pairs an even number"""
    learning_rate: float | None = None
    """initial learning rate, annealed linearly to 0 (None: 1e-3 for "tiny", 1e-5 for other models)"""
    weight_decay: float = 0.01
    """weight decay of matrices"""
    max_grad_norm: float = 1.0
    """maximum gradient norm"""
    eval_every: int = 40
    """steps between measurements on held-out tasks (there is always one at the start and one at the end; 0: only
    those)"""


def check(args: Args) -> None:
    """Raise SystemExit for arguments that are out of range, or contradict each other, before any work."""
    arguments.check_each(args)
    if args.kind == "pairs" and args.batch_size % 2:
        raise SystemExit(f"--batch-size {args.batch_size} must be even with --kind pairs: a pair has two episodes")
    if distributed.launched() > 1:
        raise SystemExit("reward_model_llm.py trains in one process: start it with python")
    if args.data and not Path(args.data).is_file():
        raise SystemExit(f"--data {args.data}: there is no such file")
    arguments.check_machine(args)


# ---------------------------------------------------------------------------------------------------------- episodes


def split(rows: Sequence[Episode], args: Args) -> tuple[list[Episode], list[Episode]]:
    """Return training and held-out episodes, which share no task. Raise SystemExit if they cannot train a model."""
    record = "record more with --log-trajectories all of a learner, or evaluate_llm.py --samples 8 --temperature 1"
    if len(rows) < MIN_ROWS:
        raise SystemExit(f"--data {args.data} has {len(rows)} episodes, fewer than {MIN_ROWS}: {record}")
    tasks = by_task(rows)
    if len(tasks) < HELD_OUT:
        raise SystemExit(f"--data {args.data} has episodes of {len(tasks)} tasks, fewer than {HELD_OUT}: {record}")
    order = np.random.default_rng(args.seed).permutation(len(tasks))
    cut = len(tasks) // HELD_OUT
    parts = [[row for i in numbers for row in tasks[i]] for numbers in (order[cut:], order[:cut])]
    for name, part in zip(("training", "held-out"), parts, strict=True):
        if len({row.is_success for row in part}) < 2:
            raise SystemExit(f"--data {args.data}: all {name} episodes succeed, or all fail. {record}")
    if args.kind == "pairs" and not any(len({row.is_success for row in task}) > 1 for task in by_task(parts[0])):
        raise SystemExit(
            f"--kind pairs needs successes and failures of one task, and --data {args.data} has none: record them with "
            "evaluate_llm.py --samples 8 --temperature 1, or use --kind outcome"
        )
    return parts[0], parts[1]


def draw(tasks: Sequence[Sequence[Episode]], step: int, args: Args) -> list[list[Episode]]:
    """Return the units of a step: single episodes, or with "pairs" a success and a failure of one task.

    They are a function of the seed and the step, so a resumed run draws the same.
    """
    rng = np.random.default_rng([args.seed, step])
    if args.kind != "pairs":
        rows = [row for task in tasks for row in task]
        return [[rows[i]] for i in rng.permutation(len(rows))[: args.batch_size]]
    mixed = [task for task in tasks if len({row.is_success for row in task}) > 1]
    units = []
    for i in rng.integers(len(mixed), size=args.batch_size // 2):
        sides = [[row for row in mixed[i] if row.is_success == success] for success in (True, False)]
        units.append([side[rng.integers(len(side))] for side in sides])
    return units


# -------------------------------------------------------------------------------------------------------------- loss


def unit_loss(scores: Sequence[torch.Tensor], unit: Sequence[Episode], kind: str) -> torch.Tensor:
    """Return the summed loss of a unit, from the logits of its episodes.

    "pairs": -log sigmoid(success - failure), the Bradley-Terry model. Otherwise the cross-entropy of success at every
    score.
    """
    if kind == "pairs":
        return -functional.logsigmoid(scores[0] - scores[1]).sum()
    target = torch.full_like(scores[0], float(unit[0].is_success))
    return functional.binary_cross_entropy_with_logits(scores[0], target, reduction="sum")


def loss(critic: Critic, units: Sequence[Sequence[Episode]], args: Args, backward: bool = False) -> float:
    """Return the mean loss over the pairs, or over the scores. With `backward` its gradient is added to the weights'.

    It does not depend on --microbatch-tokens.
    """
    read: list[list[list[View]]] = [[views(row, args.kind) for row in unit] for unit in units]
    flat = [[view for parts in unit for view in parts] for unit in read]
    total = len(units) if args.kind == "pairs" else sum(len(view.ends) for unit in flat for view in unit)
    mean = 0.0
    for pack in packs(flat, args.microbatch_tokens):
        with torch.set_grad_enabled(backward):
            scored = iter(forward(critic, [view for i in pack for view in flat[i]]))
            rows = [[torch.cat([next(scored) for _ in parts]) for parts in read[i]] for i in pack]
            part = torch.stack([unit_loss(s, units[i], args.kind) for s, i in zip(rows, pack, strict=True)]).sum()
        if backward and not torch.isfinite(part):  # one such step would destroy the weights
            raise FloatingPointError(f"the loss is {part.item()}; lower --learning-rate", [])
        if backward:
            (part / total).backward()
        mean += part.item() / total
    return mean


# -------------------------------------------------------------------------------------------------------------- main


if __name__ == "__main__":
    args = checkpoint.load_args(arguments.read(Args), Path(__file__).stem)
    check(args)
    if not args.data:
        raise SystemExit("--data is missing: give the trajectories.jsonl of a run with --log-trajectories all, or of "
                         "evaluate_llm.py --samples 8 --temperature 1")  # fmt: skip
    check_first_row("--data", args.data)
    distributed.setup(args.cuda)
    device = distributed.device(args.cuda)
    run_dir = Path(args.resume or f"runs/{run_name(args)}")
    threads.use(args)
    torch.use_deterministic_algorithms(args.deterministic)
    torch.manual_seed(args.seed)
    print_defaults(fit_environment(args), args)

    # episodes
    source = model_source(args.model, args.env_id)
    tokenizer_name = tokenizer_source(args.tokenizer, source, args.env_id)
    tokenizer = load_tokenizer(tokenizer_name, args.chat_template)
    episodes = read_episodes(args.data, len(tokenizer), tokenizer)
    train, heldout = split(episodes, args)
    longest, positions = max(len(row.tokens) for row in episodes), positions_of(read_config(source)) or math.inf
    if longest > positions:
        raise SystemExit(f"an episode has {longest} tokens, the model only {positions} positions: use another --model")
    print(f"{len(train)} episodes to train on, {len(heldout)} of other tasks held out", file=sys.stderr)

    # model
    resumed = checkpoint.find(run_dir) / "policy" if args.resume else None
    disk.check_room(run_dir, 2**22)
    critic = Critic(str(resumed or source), args, choose_dtype(args.dtype, device)).to(device).eval()
    check_vocabulary(critic.backbone, len(tokenizer))
    default = 1e-3 if args.model == "tiny" else 1e-5
    learning_rate = default if args.learning_rate is None else args.learning_rate
    modules = [critic.backbone, critic.head]
    optimizer = Float32AdamW(modules, [learning_rate] * 2, betas=(0.9, 0.98), weight_decay=args.weight_decay)
    saver = checkpoint.Checkpointer(run_dir, critic.backbone, critic.head, optimizer, max_bytes=2**26)

    # files and logs
    run: dict[str, Any] = {"iteration": 0, "train_seconds": 0.0}  # an iteration is a step
    rows_hash = hashlib.sha256(Path(args.data).read_bytes()).hexdigest()[:16]
    run["summary"] = {"model_files": model_files(args), "rows": len(episodes), "rows_hash": rows_hash}
    run["summary"]["config_files"] = config_files(source, tokenizer_name, args.chat_template)
    if args.resume:
        initial, run = run["summary"], checkpoint.load(run_dir, critic.head, optimizer)["run"]
        described = {"rows_hash": f"lines of --data {args.data}"}
        described["config_files"] = f"config or tokenizer of --model {args.model}"
        checkpoint.check_unchanged(run_dir, run["summary"], initial, **described)
    run_files.claim(run_dir)
    writer = open_writer(run_dir, args, run, run["iteration"] + 1 if args.resume else None)
    progress = Progress(args.num_steps, "step", "reward model", run["iteration"])
    train_tasks, heldout_tasks = by_task(train), by_task(heldout)
    check_units = [[row] for row in heldout] if args.kind != "pairs" else draw(heldout_tasks, 0, args)

    def summarize(**more: Any) -> None:
        content = {**run["summary"], "train_seconds": run["train_seconds"], "finished": False, "args": asdict(args)}
        run_files.write_json(run_dir / "summary.json", content | more)

    def evaluate() -> None:
        """Measure loss and AUC on held-out tasks."""
        scores = last_logits(critic, heldout, args.kind)
        successes = np.array([row.is_success for row in heldout])
        figures = {"eval/loss": loss(critic, check_units, args), "eval/auc": auc(scores, successes)}
        for name, value in figures.items():
            writer.add_scalar(name, value, run["iteration"])
        progress.write(f"step {run['iteration']}: loss {figures['eval/loss']:.4f}, AUC {figures['eval/auc']:.3f}")
        run["summary"] |= figures
        summarize()

    def boundary() -> None:
        """Remember the complete step. A run that ends during the next one resumes from here."""
        saver.boundary({"algorithm": Path(__file__).stem, "args": asdict(args), "run": run})

    with checkpoint.saving_at_exit(saver, run):
        boundary()
        if run["iteration"] == 0:
            evaluate()
        for step in range(run["iteration"] + 1, args.num_steps + 1):
            started = time.time()
            threads.follow()
            scale = 1 - (step - 1) / args.num_steps
            optimizer.scale_learning_rates(scale)
            mean = loss(critic, draw(train_tasks, step, args), args, backward=True)
            with signals.held():  # before and after, the weights are those of a boundary
                saver.begin_update()
                norm = optimizer.step(args.max_grad_norm)[0]
                run["iteration"] = step
                run["train_seconds"] += time.time() - started
                boundary()
            last = step == args.num_steps
            if step % 20 == 0 or last:
                progress.show(f"loss {mean:.3f}")
                logged = {"losses/rm_loss": mean, "losses/grad_norm": norm}
                logged["charts/learning_rate"] = learning_rate * scale
                for name, value in logged.items():
                    writer.add_scalar(name, value, step)
            progress.update()
            if last or (args.eval_every and step % args.eval_every == 0):
                evaluate()
                boundary()
            if args.checkpoint_every and (last or step % args.checkpoint_every == 0):
                saver.save()
        center = 0.0
        if args.kind == "pairs":
            center = float(last_logits(critic, train, args.kind).mean())
        facts = RewardModelFacts(
            kind=args.kind, center=center, env_id=args.env_id, tokenizer=fingerprint(tokenizer),
            vocab_size=len(tokenizer), dtype=str(critic.backbone.dtype).removeprefix("torch."),
        )  # fmt: skip
        save_reward_model(RewardModel(critic, facts), run_dir)
        run["summary"]["heldout"] = report(critic, args.kind, train, heldout, args.seed)
    summarize(finished=True)
    progress.close()
    writer.close()
    print(shown(run["summary"]["heldout"]))
    print(f"train against it with --reward-model {run_dir}")
