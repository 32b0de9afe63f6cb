# docs: docs/learners/sft_llm.md
"""Supervised training on demonstrations, masked to the tokens that a policy would sample.

    python learner/sft_llm.py --out policy                                # a policy like the shipped one, from scratch
    python learner/sft_llm.py --model NAME_OR_FOLDER --expert-share 1     # any causal LM, on expert demonstrations
    python learner/sft_llm.py --model NAME_OR_FOLDER --data runs/EVALUATION/trajectories.jsonl --only-successes
"""

import llm_utils.setup.startup  # noqa: F401  isort: skip  (reports a missing package in one line)

import itertools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from agent_r1.baselines import baselines_of
from agent_r1.text.tokenizers import load_tokenizer
from llm_utils import arguments, distributed
from llm_utils.imitation.demonstrations import Demonstration, Demonstrations, check_first_row, digest, read_rows
from llm_utils.imitation.scratch import make_model, make_tokenizer
from llm_utils.records import run_files
from llm_utils.records.displays import last_lines
from llm_utils.records.earlier_runs import other_environment
from llm_utils.records.logger import open_writer, run_name
from llm_utils.records.model_card import save_with_card
from llm_utils.records.progress import Progress
from llm_utils.recovery import checkpoint, disk, signals
from llm_utils.setup import memory_flags, threads
from llm_utils.setup.environments import env_kwargs, plain_errors, print_defaults
from llm_utils.setup.loading import choose_dtype, load_policy
from llm_utils.setup.model_checks import check_vocabulary, layers_of
from llm_utils.setup.sources import config_files, fit_environment, model_files, model_source, tokenizer_source
from llm_utils.training.forward import microbatches, policy_forward
from llm_utils.training.optimizer import Float32AdamW

AGAIN = "nothing was trained yet: start again"


@dataclass
class Args:
    # run
    exp_name: str = Path(__file__).stem
    """name of this experiment"""
    seed: int = 1
    """seed of demonstrations, initial weights and batches"""
    track: bool = False
    """also log to Weights & Biases"""
    wandb_project_name: str = "agent-r1"
    """name of the W&B project"""
    out: str = ""
    """folder for the trained model and tokenizer (default: runs/{run_name}/model)"""
    checkpoint_every: int = 500
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
    compile: bool = False
    """compile the layers for training, on a GPU: faster steps, but the first ones take minutes"""

    # demonstrations
    env_id: str = "AgentR1/MultihopWorld-v0"
    """environment whose demonstrations are imitated; it needs a `demonstration` method unless --data is given"""
    env_kwargs: str = "{}"
    """further arguments of the environment, as JSON"""
    data_dir: str | None = None
    """folder of the data set, for environments that read one (see docs/data.md)"""
    split: str = "train"
    """split of the demonstrations"""
    data: str = ""
    """JSONL file of lines with `tokens` and `action_mask` instead of demonstrations: trajectories.jsonl, which
    evaluate_llm.py and the learners write"""
    eval_data: str = ""
    """with --data: held-out file on which the expert-token loss is measured"""
    expert_share: float = 0.38
    """share of expert demonstrations; the others contain mistakes (for reinforcement learning to fix)"""
    teacher: str | None = None
    """demonstrator of every task instead (except --rag-share's): a teacher of the environment, e.g. fallible_50"""
    only_successes: bool = False
    """drop failed episodes of --data (not of --eval-data), of demonstrators (an expert's always are), of --rag-share"""
    rag_share: float = 0.0
    """share of one-turn demonstrations with the naive RAG prompt. They show the policy that baseline's prompt and the
    form of an answer without search, right or wrong"""
    num_demonstrations: int = 80_000
    """tasks that are demonstrated before training (fewer if the split has fewer)"""
    first_demonstration: int = 0
    """index of the first demonstrated task in the split, e.g. another one for each seed"""
    eval_demonstrations: int = 512
    """held-out tasks whose expert demonstrations measure the loss (0: none; at most a tenth of a small split)"""
    eval_every: int = 500
    """steps between measurements (there is always one at the start and one at the end; 0: only those)"""
    num_workers: int = 2
    """processes that make demonstrations (0: this one)"""

    # model
    model: str = "scratch"
    """Hugging Face name, folder, "tiny" (the policy shipped for the environment), or "scratch": a small Granite with a
    tokenizer made for the environment"""
    tokenizer: str | None = None
    """name or folder of a tokenizer (None: the model's own; "byte": the built-in byte tokenizer)"""
    chat_template: str | None = None
    """Jinja file that replaces the tokenizer's chat template; a base model needs one"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of the computations; optimizer steps are float32. auto: float32 on a CPU and from scratch, else bfloat16"""
    lora_rank: int = 0
    """train LoRA adapters of this rank instead of the weights (0: the weights); the saved model has them merged"""
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"
    """recompute activations in the backward pass: less memory, more time. auto: on if training does not fit without"""
    hidden_size: int = 128
    """width of a model from scratch"""
    num_layers: int = 3
    """layers of a model from scratch"""
    intermediate_size: int = 256
    """width of the MLP of a model from scratch"""
    tokenizer_demonstrations: int = 3_000
    """demonstrations that give the vocabulary of a tokenizer from scratch"""

    # training
    num_steps: int = 2_500
    """optimizer steps"""
    batch_size: int = 64
    """maximum demonstrations per step; all steps of a pass have equally many, or one less"""
    microbatch_tokens: int | Literal["auto"] = "auto"
    """tokens with padding in a forward and backward; fewer need less memory (auto: 4096; on a GPU up to 32768)"""
    learning_rate: float | None = None
    """peak learning rate: linear warm-up, cosine decay to a hundredth (None: 3e-3 for "scratch" and "tiny"; 2e-5 for
    other models, 1e-4 with --lora-rank)"""
    warmup_steps: int = 100
    """steps of linear warm-up"""
    weight_decay: float = 0.01
    """weight decay of matrices"""
    max_grad_norm: float = 1.0
    """maximum gradient norm"""


def check(args: Args) -> None:
    """Raise SystemExit for arguments that are out of range, or contradict each other, before any work."""
    arguments.check_each(args)
    demonstrator = args.teacher or ("expert" if args.expert_share == 1 else "")
    only_by_expert = demonstrator == "expert" and not args.rag_share and not args.data
    contradictions = [
        (args.model == "scratch" and args.hidden_size % 8 > 0, "--hidden-size must be a multiple of 8"),
        (args.model == "scratch" and args.lora_rank > 0, "--lora-rank needs a trained --model"),
        (args.model == "scratch" and args.tokenizer is not None, "--model scratch makes its own tokenizer"),
        (args.model == "scratch" and args.chat_template is not None, "--model scratch makes its own chat template"),
        (bool(args.eval_data) and not args.data, "--eval-data needs --data"),
        (
            args.teacher is not None and args.expert_share != Args().expert_share,
            "--expert-share does nothing with --teacher, which demonstrates all of these tasks",
        ),
        (
            args.only_successes and args.resume is None and only_by_expert,
            "--only-successes does nothing if only the expert demonstrates: its failures are always dropped",
        ),
        (Path(args.out).is_file(), f"--out {args.out}: this is a file; give a folder"),
        (
            bool(args.out) and Path(args.out).is_dir() and not (Path(args.out) / "config.json").is_file()
            and any(path.name != "README.md" and path.name[0] != "." for path in Path(args.out).iterdir()),
            f"--out {args.out}: the folder has files that are not a model's; give an empty or a new folder",
        ),
        (bool(args.out) and not disk.writable(Path(args.out)), f"--out {args.out}: cannot write there"),
        (distributed.launched() > 1, "sft_llm.py trains in one process: start it with python"),
        *(
            (bool(path) and not Path(path).is_file(), f"{flag} {path}: there is no such file")
            for flag, path in (("--data", args.data), ("--eval-data", args.eval_data))
        ),
    ]
    for wrong, message in contradictions:
        if wrong:
            raise SystemExit(message)
    arguments.check_machine(args)


def default_learning_rate(args: Args) -> float:
    """Return the peak learning rate that suits the model."""
    if args.model in ("scratch", "tiny"):
        return 3e-3
    return 1e-4 if args.lora_rank else 2e-5


def schedule(step: int, args: Args) -> float:
    """Return the share of the peak learning rate at a step (from 1): linear warm-up, cosine decay to a hundredth."""
    fraction = max(0.0, (step - args.warmup_steps) / max(1, args.num_steps - args.warmup_steps))
    return min(1.0, step / max(1, args.warmup_steps)) * (0.505 + 0.495 * math.cos(math.pi * fraction))


def batches(rows: Sequence[Demonstration], batch_size: int, seed: int) -> Iterator[list[Demonstration]]:
    """Yield endless shuffled batches. Demonstrations of similar length go together to reduce padding.

    Sizes differ by at most one, so each demonstration has the same weight, regardless of length.
    """
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(rows))
        count = math.ceil(len(rows) / batch_size)
        groups = np.array_split(order, count)
        for numbers in np.array_split(range(count), max(1, count // 16)):
            block = np.concatenate([groups[number] for number in numbers])
            block = block[np.argsort([len(rows[i].tokens) for i in block], kind="stable")]
            alike = np.array_split(block, len(numbers))
            for number in rng.permutation(len(alike)):
                yield [rows[i] for i in alike[number]]


def token_loss(
    policy: Any, rows: Sequence[Demonstration], budget: int, vocab_size: int, backward: bool = False
) -> float:
    """Return the mean loss per action token over all rows, in forward passes of at most `budget` tokens.

    With `backward` its gradient is added to the weights'; it does not depend on `budget`.
    """
    num_tokens, sum_of_losses = sum(int(row.action_mask.sum()) for row in rows), 0.0
    for batch in microbatches(rows, budget, policy.device):
        with torch.set_grad_enabled(backward):
            logprobs, _ = policy_forward(policy, batch, vocab_size, temperature=1.0)
            loss = -logprobs.sum() / num_tokens
        if backward and not torch.isfinite(loss):  # one such step would destroy the weights
            raise FloatingPointError(f"the loss is {loss.item()}; lower --learning-rate", [])
        if backward:
            loss.backward()
        sum_of_losses += loss.item()
    return sum_of_losses


if __name__ == "__main__":
    args = checkpoint.load_args(arguments.read(Args), Path(__file__).stem)
    check(args)
    check_first_row("--data", args.data)
    check_first_row("--eval-data", args.eval_data)
    distributed.setup(args.cuda)
    device = distributed.device(args.cuda)
    dtype = choose_dtype("float32" if args.dtype == "auto" and args.model == "scratch" else args.dtype, device)
    run_dir = Path(args.resume or f"runs/{run_name(args)}")
    disk.check_room(run_dir, 2**22)  # for the smallest model; the actual size is checked once the model is loaded
    threads.use(args)
    torch.use_deterministic_algorithms(args.deterministic)
    torch.manual_seed(args.seed)
    print_defaults(fit_environment(args), args)
    if warning := other_environment(args):
        print(warning, file=sys.stderr)

    # model and tokenizer
    maker = Demonstrations(args.env_id, args.split, env_kwargs(args), None, args.seed)
    env: Any = None
    if not args.data or args.rag_share or (args.model == "scratch" and not args.resume):
        with plain_errors(args.env_id):
            env = maker.make_env()
    if not args.data:
        maker.check(env, args.teacher, args.expert_share)
        first, wanted = args.first_demonstration, args.num_demonstrations
        count, rest = maker.split_tasks(wanted, args.eval_demonstrations, first)
        if (count, rest) != (wanted, args.eval_demonstrations):
            available = f"the split {args.split} has {count + rest} tasks{f' from {first} on' * (first > 0)}"
            print(f"{available}: {count} to train on, {rest} to evaluate on")
    if args.rag_share and "search" not in env.tools:
        raise SystemExit(f"--rag-share {args.rag_share}: {args.env_id} has no tool named search; leave the flag out")
    if args.model == "scratch":
        source = str(run_dir / "scratch")
        if not args.resume:
            words = baselines_of(env).vocabulary()
            some_tasks = min(args.tokenizer_demonstrations, env.num_tasks)
            share = 1.0 if maker.only_experts else 0.5
            with signals.ending(AGAIN):
                whole = replace(maker, limited=False)
                samples = whole.make(0, some_tasks, share, args.rag_share, args.num_workers, "rows for the vocabulary")
            new_tokenizer = make_tokenizer(words, samples)
            model = make_model(new_tokenizer, args.hidden_size, args.num_layers, args.intermediate_size)
            checkpoint.save_policy(model, Path(source), model.state_dict())
            new_tokenizer.save_pretrained(source)
    else:
        source = model_source(args.model, args.env_id)
    if env is not None:
        env.close()
    tokenizer = tokenizer_source(args.tokenizer, source, args.env_id)
    with plain_errors(args.env_id):
        vocab_size = len(load_tokenizer(tokenizer, args.chat_template))
    resumed = checkpoint.find(run_dir) / "policy" if args.resume else None
    policy = load_policy(source, device, args, resumed, dtype=dtype, compiled=args.compile)
    check_vocabulary(policy, vocab_size)
    learning_rate = default_learning_rate(args) if args.learning_rate is None else args.learning_rate
    optimizer = Float32AdamW([policy], [learning_rate], betas=(0.9, 0.98), weight_decay=args.weight_decay)
    num_weights = sum(p.numel() for p in policy.parameters()) / 1e6
    print(f"{num_weights:.2f}M parameters in {policy.dtype}, {vocab_size} tokens, learning rate {learning_rate:g}")
    saver = checkpoint.Checkpointer(run_dir, policy, None, optimizer, max_bytes=2**26)  # steps are short

    # demonstrations; held-out ones come from tasks after the training ones
    heldout: list[Demonstration] = []
    if args.data:
        if args.chat_template:
            print(f"--chat-template must be the one that recorded {args.data}: its rows are not rendered again")
        read = partial(read_rows, vocab_size=vocab_size, tokenizer=load_tokenizer(tokenizer, args.chat_template))
        rows = read(args.data, only_successes=args.only_successes)
        heldout = read(args.eval_data) if args.eval_data else []
    else:
        maker = replace(maker, tokenizer=tokenizer, teacher=args.teacher, only_successes=args.only_successes)
        with signals.ending(AGAIN):
            rows = maker.make(first, count, args.expert_share, args.rag_share, args.num_workers)
            experts = replace(maker, teacher=None)
            heldout = experts.make(first + count, rest, 1.0, 0.0, args.num_workers, "held-out demonstrations")
    longest, positions = max(len(r.tokens) for r in rows), getattr(policy.config, "max_position_embeddings", math.inf)
    if longest > positions:
        raise SystemExit(f"a row has {longest} tokens, the model only {positions} positions; lower max_context_tokens")
    length, actions = (np.mean(x) for x in ([len(r.tokens) for r in rows], [r.action_mask.sum() for r in rows]))
    print(f"{len(rows)} rows, {length:.0f} tokens each, {actions:.0f} of them actions")
    budget = memory_flags.choose_for_rows(args, policy, source, longest, vocab_size)

    # files and logs
    run: dict[str, Any] = {"iteration": 0, "train_seconds": 0.0}  # an iteration is a step
    turns = sum(int(np.diff(row.action_mask.astype(np.int8), prepend=0).clip(0).sum()) for row in rows)
    run["summary"] = {"model_files": model_files(args), "rows": len(rows), "turns": turns, "rows_hash": digest(rows)}
    config_hash = None if args.model == "scratch" else config_files(source, tokenizer, args.chat_template)
    run["summary"]["config_files"] = config_hash
    if args.resume:
        initial, run = run["summary"], checkpoint.load(run_dir, None, optimizer)["run"]
        base = {"model_files": f"files of --model {args.model}"} if args.lora_rank else {}
        base |= {"rows_hash": "demonstrations", "config_files": f"config or tokenizer of --model {args.model}"}
        checkpoint.check_unchanged(run_dir, run["summary"], initial, **base)
    run_files.claim(run_dir)
    writer = open_writer(run_dir, args, run, run["iteration"] + 1 if args.resume else None)
    progress = Progress(args.num_steps, "step", "sft", run["iteration"])

    def summarize(**more: Any) -> None:
        content = {**run["summary"], "train_seconds": run["train_seconds"], "finished": False, "args": asdict(args)}
        run_files.write_json(run_dir / "summary.json", content | more)

    def evaluate() -> None:
        """Measure the loss on held-out expert demonstrations."""
        if heldout:
            loss = token_loss(policy, heldout, budget, vocab_size)
            writer.add_scalar("eval/expert_token_loss", loss, run["iteration"])
            progress.unpause()
            progress.write(f"step {run['iteration']}: expert-token loss {loss:.4f}, {run['train_seconds']:.0f} s")
            run["summary"].setdefault("eval/expert_token_loss_first", loss)
            run["summary"]["eval/expert_token_loss_last"] = loss
        summarize()

    def boundary() -> None:
        """Remember the complete step. A run that ends during the next one resumes from here."""
        saver.boundary({"algorithm": Path(__file__).stem, "args": asdict(args), "run": run})

    with checkpoint.saving_at_exit(saver, run):
        boundary()
        if run["iteration"] == 0:
            evaluate()
        stream = itertools.islice(batches(rows, args.batch_size, args.seed), run["iteration"], args.num_steps)
        for step, batch in enumerate(stream, run["iteration"] + 1):
            started = time.time()
            threads.follow()
            optimizer.scale_learning_rates(schedule(step, args))
            loss = token_loss(policy, batch, budget, vocab_size, backward=True)
            with signals.held():  # before and after, the weights are those of a boundary
                saver.begin_update()
                norm = optimizer.step(args.max_grad_norm)[0]
                run["iteration"] = step
                run["train_seconds"] += time.time() - started
                boundary()

            # logging
            last = step == args.num_steps
            if step % 20 == 0 or last:
                rate = learning_rate * schedule(step, args)
                progress.show(f"loss {loss:.3f}, lr {rate:.1e}")
                figures = {"losses/sft_loss": loss, "losses/grad_norm": norm, "charts/learning_rate": rate}
                for name, value in figures.items():
                    writer.add_scalar(name, value, step)
            progress.update()
            if last or (args.eval_every and step % args.eval_every == 0):
                evaluate()
                boundary()
            if args.checkpoint_every and (last or step % args.checkpoint_every == 0):
                saver.save()
        save_with_card(policy, Path(args.out or run_dir / "model"), tokenizer, args, run["summary"])
    summarize(finished=True)
    progress.close()
    writer.close()
    print(last_lines(run_dir, Path(args.out or run_dir / "model"), args, layers_of(policy.config).refused))
