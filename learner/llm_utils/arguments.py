"""Arguments of the scripts: flags that all learners share, --help, refusals before any work, and --resume."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import os
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import tyro

from agent_r1_tools.exchange import is_address
from agent_r1_tools.text import printable
from llm_utils import distributed
from llm_utils.setup.curriculum import stages
from llm_utils.setup.environments import env_kwargs, environment_spec

# Bounds of numbers; a script has some of these arguments. None is always accepted.
LEAST = {
    **dict.fromkeys(("num_envs", "total_episodes", "episodes_per_iteration", "num_minibatches", "update_epochs"), 1),
    **dict.fromkeys(("microbatch_tokens", "constant_length", "importance_cap"), 1),
    **dict.fromkeys(("num_steps", "batch_size", "num_demonstrations", "tokenizer_demonstrations", "episodes"), 1),
    "horizon_every": 1,
    **dict.fromkeys(("seed", "num_threads", "num_workers", "checkpoint_every", "eval_episodes", "eval_every"), 0),
    **dict.fromkeys(("max_staleness", "lora_rank", "dynamic_sampling", "critic_warmup", "warmup_steps"), 0),
    **dict.fromkeys(("clip_coef", "clip_coef_high", "clip_coef_value", "kl_coef", "ent_coef", "weight_decay"), 0),
    **dict.fromkeys(("eval_demonstrations", "first_demonstration", "first_episode", "temperature", "profile"), 0),
    **{"hidden_size": 24, "num_layers": 2, "intermediate_size": 1},  # smaller ones have no room for a copying circuit
}
ABOVE_0 = {"max_grad_norm": "; a large one clips nothing", "target_kl": "; without it nothing stops"}
STILL = {"learning_rate": "the policy", "critic_learning_rate": "the critic"}  # with a rate of 0
SHARES = ("max_invalid", "gamma", "gae_lambda", "gamma_turn", "expert_share", "rag_share")
FLAGS_OF_THEIR_OWN = ("num_envs", "tokenizer", "split")  # among the arguments of an environment

MAY_GROW = ("total_episodes", "episodes")  # arguments that --resume may raise
MAY_CHANGE = (  # those that change no more of what is learned than its rounding: where, in what memory, what is kept
    "microbatch_tokens", "gradient_checkpointing", "num_envs", "preflight", "vllm_url", "api",
    "num_threads", "track", "wandb_project_name", "checkpoint_every", "save_model",
    "log_trajectories", "out",
)  # fmt: skip
ArgsT = TypeVar("ArgsT")


@dataclass
class Common:
    """Flags of the machinery around an algorithm, the same in every learner that plays."""

    exp_name: str = ""
    """the name of this experiment"""
    seed: int = 1
    """seed of everything: tasks, sampling, minibatches"""
    track: bool = False
    """also log to Weights & Biases"""
    wandb_project_name: str = "agent-r1"
    """the W&B project"""
    save_model: bool = False
    """write the trained policy and its tokenizer to runs/{run_name}/model"""
    log_trajectories: int | Literal["all"] = 8
    """episodes of each iteration in runs/{run_name}/trajectories.jsonl: the first that are trained on, or all played"""
    checkpoint_every: int = 10
    """iterations between checkpoints; there is one at the end, too (0: only where something ends the run early)"""
    resume: str | None = None
    """a run folder: go on from its checkpoint, in the same folder, with its arguments"""

    env_id: str = "AgentR1/MultihopWorld-v0"
    """the id of the environment (of your own: module:ID, where the module registers it)"""
    env_kwargs: str = "{}"
    """further arguments of the environment, as JSON, e.g. '{"max_turns": 4}'"""
    data_dir: str | None = None
    """the folder of the data set, for environments that read one (see docs/data.md)"""
    split: str = "train"
    """the split that is trained on"""
    sample_by_pass_rate: str | None = None
    """a file of evaluate_llm.py --profile: draw tasks in proportion to p (1 - p) of their pass rate (None: evenly)"""
    num_envs: int = 128
    """episodes that run at the same time"""
    max_invalid: float = 0.5
    """share of an iteration's episodes that faults of the environment may end (they are dropped) before the run ends"""
    horizon_schedule: str | None = None
    """the most turns of an episode in stages, e.g. 4,8,12 of max_turns 12: a horizon that grows (None: max_turns)"""
    horizon_every: int = 20
    """iterations of a stage of --horizon-schedule; the last one lasts"""

    model: str = "tiny"
    """a Hugging Face name, a folder, or "tiny": the policy shipped for the environment"""
    tokenizer: str | None = None
    """a tokenizer's name or folder (None: the model's own; "byte": the built-in byte tokenizer)"""
    lora_rank: int = 0
    """train LoRA adapters of this rank instead of the weights (0: the weights)"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """what the models compute in (auto: float32 on a CPU, bfloat16 on a GPU); log-probabilities are float32"""
    float32_head: bool = False
    """compute the logits of a bfloat16 model in float32, when sampling with transformers and when training"""

    engine: Literal["transformers", "vllm", "vllm-server"] = "transformers"
    """what samples: transformers or vLLM in this process, or running `vllm serve` processes"""
    vllm_url: str = "http://localhost:8000"
    """address of the server of --engine vllm-server"""
    max_staleness: int = 0
    """iterations by which the weights that sampled may be older than those that train on it (0: on-policy)"""
    top_p: float = 1.0
    """nucleus sampling (1: off). Below 1 the sampler leaves the distribution that the loss assumes"""

    eval_episodes: int = 256
    """held-out tasks per evaluation (0: no evaluation)"""
    eval_split: str | None = None
    """the split that is evaluated on (None: test, validation or dev where there is one, else --split)"""
    eval_every: int = 5
    """iterations between evaluations (there is one at the start and one at the end)"""

    cuda: bool = True
    """use a GPU where there is one"""
    num_threads: int = 0
    """CPU threads of torch in each process (0: as many as others leave cores free)"""
    deterministic: bool = False
    """the same weights to the bit in every run: deterministic kernels, tool results taken in the order of the calls"""
    gradient_checkpointing: bool = False
    """compute activations again in the backward pass: less memory, more time"""
    microbatch_tokens: int = 4096
    """tokens (padding counted) in one forward and backward; smaller needs less memory, the gradient is the same
    (but for rounding, in bf16)"""
    preflight: bool = True
    """add up the memory that the run needs, and refuse before it starts what can't fit"""


# The first flag in Common of each group of --help, and its title.
GROUPS = {"exp_name": "run", "env_id": "environment", "model": "model", "engine": "engine",
          "eval_episodes": "evaluation", "cuda": "machine"}  # fmt: skip


def read(kind: type[ArgsT], default: ArgsT | None = None, **options: Any) -> ArgsT:
    """Read the command line into a script's `Args`, as `tyro.cli` does, which takes `options`.

    --help shows the script's own flags first, then those that Common has, in groups. To tyro a group is a nested
    dataclass, so they are nested here, and taken apart again.
    """
    hints, helps = get_type_hints(kind), help_texts(kind)
    flags: dict[str, tuple[str, Any, Any]] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        value = dataclasses.field(default=field.default, default_factory=field.default_factory, kw_only=True)
        if default is not None:
            value = dataclasses.field(default_factory=partial(getattr, default, field.name), kw_only=True)
        flags[field.name] = field.name, Annotated[hints[field.name], tyro.conf.arg(help=helps.get(field.name))], value
    groups: dict[str, list[Any]] = {}
    title = ""
    for field in dataclasses.fields(Common):
        title = GROUPS.get(field.name, title)
        if field.name in flags:
            groups.setdefault(title, []).append(flags.pop(field.name))
    own: list[Any] = list(flags.values())
    for title, group in groups.items():
        nested: Any = dataclasses.make_dataclass(title, group)
        hint = Annotated[nested, tyro.conf.arg(name=title), tyro.conf.OmitArgPrefixes]
        own.append((f"group_{title}", hint, dataclasses.field(kw_only=True)))
    given = vars(tyro.cli(dataclasses.make_dataclass(kind.__name__, own), **options))
    for title in groups:
        given |= vars(given.pop(f"group_{title}"))
    return kind(**given)


def help_texts(kind: type) -> dict[str, str]:
    """The help of each flag: the text below its field, of a class or of those that it inherits from."""
    found: dict[str, str] = {}
    for parent in reversed(kind.__mro__[:-1]):
        try:
            tree: Any = ast.parse(textwrap.dedent(inspect.getsource(parent)))
        except (OSError, TypeError):  # a class that was typed in has no source: its flags have no help
            continue
        for field, text in pairwise(tree.body[0].body):
            if (type(field), type(text)) == (ast.AnnAssign, ast.Expr):
                found[field.target.id] = " ".join(text.value.value.split())
    return found


def defaults_of(kind: type) -> dict[str, Any]:
    """The default of each flag of a dataclass; MISSING for a flag that has to be given."""
    fields: tuple[Any, ...] = dataclasses.fields(kind)
    return {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields}


def evaluates(args: Any) -> bool:
    """Whether a training measures anything that is held out."""
    if hasattr(args, "eval_episodes"):
        return args.eval_episodes > 0
    return bool(args.eval_data) if args.data else args.eval_demonstrations > 0


# Switches that other arguments make dead: when a switch does something, and with or without what it does nothing.
Alive = Callable[[Any], bool]
SWITCHES: dict[str, tuple[Alive, str]] = {
    "wandb_project_name": (lambda a: a.track, "without --track"),
    "vllm_url": (lambda a: a.engine == "vllm-server", "without --engine vllm-server"),
    "api_model": (lambda a: a.api is not None, "without --api"),
    "float32_head": (lambda a: a.dtype != "float32", "with --dtype float32"),
    "horizon_every": (lambda a: "," in (a.horizon_schedule or ""), "without --horizon-schedule of several stages"),
    "group_size": (lambda a: getattr(a, "baseline", True), "without --baseline"),
    "scale_by": (lambda a: a.scale_rewards, "with --no-scale-rewards"),
    "gamma_turn": (lambda a: a.advantage == "bilevel", "without --advantage bilevel"),
    "constant_length": (lambda a: a.loss_aggregation == "constant", "without --loss-aggregation constant"),
    "kl_estimator": (lambda a: a.kl_coef > 0 and a.kl_in == "loss", "without --kl-coef above 0 and --kl-in loss"),
    "eval_split": (lambda a: a.eval_episodes > 0, "with --eval-episodes 0"),
    "eval_every": (lambda a: not a.eval_every or evaluates(a), "where nothing is evaluated"),
    "old_logprobs": (lambda a: a.old_logprobs != "sampler" or a.loss_mask, "as sampler with --no-loss-mask"),
    "importance_cap": (  # --no-loss-mask takes the trainer's in any case
        lambda a: a.old_logprobs != "sampler" or not a.loss_mask, "with --old-logprobs sampler"
    ),
    **dict.fromkeys(
        ("hidden_size", "num_layers", "intermediate_size", "tokenizer_demonstrations"),
        (lambda a: a.model == "scratch", "without --model scratch"),
    ),
    **dict.fromkeys(
        ("only_successes", "num_demonstrations", "first_demonstration", "eval_demonstrations"),
        (lambda a: not a.data, "with --data"),
    ),
    **dict.fromkeys(
        ("expert_share", "teacher"), (lambda a: not a.data and a.rag_share < 1, "with --data, or with --rag-share 1")
    ),
    **dict.fromkeys(("rag_share", "num_workers"), (lambda a: not a.data or a.model == "scratch", "with --data")),
}  # fmt: skip


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check_each(args: Any) -> None:
    """Refuse what is out of range, an environment that isn't there, and switches that would do nothing, in any script.

    SystemExit names the first of them. A switch that was given its default can't be told from one that was not given. A
    run that goes on (--resume) keeps the switches that it was accepted with.
    """
    given = {name: value for name, value in vars(args).items() if value is not None}
    defaults = defaults_of(type(args))
    if given.get("track") and find_spec("wandb") is None:
        raise SystemExit("--track needs wandb: pip install 'agent-r1[track]'")
    for name, value in given.items():
        if value == "" and defaults[name] != "":
            raise SystemExit(f"{flag(name)} is empty: give a value, or leave it out")
    for name, least in LEAST.items():
        if not given.get(name, least) >= least:  # NaN is neither more nor less
            raise SystemExit(f"{flag(name)} is at least {least}")
    for name, remark in ABOVE_0.items():
        if not 0 < given.get(name, 1) < math.inf:
            raise SystemExit(f"{flag(name)} is above 0{remark}")
    if (logged := given.get("log_trajectories", 0)) != "all" and logged < 0:
        raise SystemExit("--log-trajectories is a number of episodes of an iteration, at least 0, or all")
    for name in SHARES:
        if not 0 <= given.get(name, 0) <= 1:
            raise SystemExit(f"{flag(name)} is between 0 and 1")
    for name in STILL:
        if not given.get(name, 0) >= 0:
            raise SystemExit(f"{flag(name)}: a learning rate is at least 0")
    if not 0 < given.get("top_p", 1) <= 1:
        raise SystemExit("--top-p is above 0 and at most 1")
    for name, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise SystemExit(f"{flag(name)} is a finite number")
    if given.get("seed", 0) >= 2**63:
        raise SystemExit("--seed is below 2**63")
    for name in ("vllm_url", "api"):
        for url in given[name].split(",") if name in given else ():
            if not is_address(url.strip()):
                raise SystemExit(f"{flag(name)} {url}: this is no address, such as http://localhost:8000")
    check_environment(args)
    check_switches(args)
    for name, what in STILL.items():
        if given.get(name) == 0 and distributed.launched_rank() == 0:
            print(f"{flag(name)} 0: {what} keeps its weights and learns nothing", file=sys.stderr)


def check_switches(args: Any) -> None:
    """Refuse switches that other arguments make dead; once more when what was left open is chosen."""
    if getattr(args, "resume", None) is not None:
        return
    given, defaults = vars(args), defaults_of(type(args))
    for name, (alive, otherwise) in SWITCHES.items():
        if given.get(name) is not None and given[name] != defaults[name] and not alive(args):
            raise SystemExit(f"{flag(name)} does nothing {otherwise}")


def check_environment(args: Any) -> None:
    """Refuse an --env-id or --data-dir that isn't there, and --env-kwargs that no environment takes."""
    kwargs = env_kwargs(args)
    where = args.data_dir or ""
    if where and "://" not in where and not os.path.exists(os.path.expanduser(where)):
        raise SystemExit(f"--data-dir {args.data_dir}: there is nothing of that name")
    if doubled := [name for name in FLAGS_OF_THEIR_OWN if name in kwargs]:
        raise SystemExit(f"--env-kwargs takes no {doubled[0]}; give {flag(doubled[0])}")
    if args.env_id:
        environment_spec(args.env_id)


def check_groups(args: Any) -> None:
    """Refuse an iteration that isn't whole groups, and groups of one."""
    episodes, size = args.episodes_per_iteration, args.group_size
    if size < 2 or episodes % size:
        why = f"must be a multiple of --group-size {size}, which is at least 2"
        raise SystemExit(f"--episodes-per-iteration {episodes} {why}")


def check(args: Any) -> None:
    """Refuse arguments that are out of range, do nothing, or contradict each other, in any learner that plays."""
    check_each(args)
    if (schedule := getattr(args, "horizon_schedule", None)) is not None:
        try:
            turns = stages(schedule)
        except ValueError as error:
            raise SystemExit(f"--horizon-schedule: {error}") from error
        iterations, last = args.total_episodes // args.episodes_per_iteration, (len(turns) - 1) * args.horizon_every
        if last >= iterations and distributed.launched_rank() == 0:  # --resume may raise them
            print(f"--horizon-schedule {schedule}: its last stage begins after {last} iterations, and the run has "
                  f"{iterations}: lower --horizon-every, which is {args.horizon_every}", file=sys.stderr)  # fmt: skip
    total, count = args.total_episodes, args.episodes_per_iteration
    whole = total - total % count
    contradictions = [
        (
            total % count > 0,
            f"--total-episodes {total} is no multiple of --episodes-per-iteration {count}: "
            f"give {f'{whole} or ' if whole else ''}{whole + count}",
        ),
        (args.temperature <= 0, "--temperature is above 0: the loss needs the distribution that was sampled from"),
        (args.reject_ratio != 0 and not args.reject_ratio > 1, "--reject-ratio is a factor above 1, or 0 for none"),
        (
            args.reject_ratio > 0 and args.old_logprobs == "sampler",
            "--reject-ratio compares with the trainer's log-probabilities: give --old-logprobs trainer",
        ),
        (args.num_minibatches > args.episodes_per_iteration, "--num-minibatches exceeds --episodes-per-iteration"),
        (
            args.deterministic and args.max_staleness > 0,
            "--deterministic and --max-staleness contradict each other: what is in flight depends on the clock",
        ),
        (
            args.max_staleness > 0 and getattr(args, "dynamic_sampling", 0) > 0,
            "--max-staleness and --dynamic-sampling contradict each other: a batch sampled ahead can't be filled up",
        ),
        (
            args.deterministic and args.engine != "transformers",
            f"--deterministic and --engine {args.engine} contradict each other; use --engine transformers",
        ),
        (
            args.episodes_per_iteration // args.num_minibatches < distributed.launched(),
            f"--num-minibatches {args.num_minibatches} leaves fewer episodes in a step than there are processes",
        ),
        (args.kl_in == "reward" and args.kl_coef <= 0, "--kl-in reward needs a --kl-coef above 0"),
    ]
    for wrong, why in contradictions:
        if wrong:
            raise SystemExit(why)


def resumed(args: ArgsT, saved: Mapping[str, Any], where: str) -> ArgsT:
    """The arguments of the run that `args.resume` names, `saved` in its file `where`.

    Arguments on the command line may repeat the run's own; its episodes may be more, and what is no part of the result
    may be changed (MAY_CHANGE), which is printed. SystemExit for others, and for one of another type.
    """
    known = {name: value for name, value in saved.items() if hasattr(args, name)}
    words = {word.split("=")[0].replace("_", "-").replace("--no-", "--") for word in sys.argv[1:]}
    changed, run_dir = [], vars(args)["resume"]
    for name, default in defaults_of(type(args)).items():
        given, own = getattr(args, name), known.get(name, default)
        same = type(own) is type(default) or {type(own), type(default)} == {int, float}
        if not (same or default is MISSING or None in (own, default) or (name, own) == ("log_trajectories", "all")):
            raise SystemExit(f"--resume {run_dir}: {where} is damaged: its {flag(name)} is {own!r}")
        left_out = flag(name) not in words if "--resume" in words else given == default  # or a program made `args`
        if name == "resume" or given == own or left_out:
            continue
        if name not in MAY_GROW + MAY_CHANGE:
            raise SystemExit(
                f"--resume goes on with the run's own arguments: {flag(name)} {given} contradicts its "
                f"{printable(str(own))}. Leave it out, or begin a new run"
            )
        if name in MAY_GROW and given < own:
            raise SystemExit(
                f"{flag(name)} {given} is less than the run's own {own}; with --resume it can only be raised"
            )
        known[name] = given
        changed.append(f"{flag(name)} {given} (was {printable(str(own))})")
    if changed and os.environ.get("RANK", "0") == "0":
        print(f"going on with {', '.join(changed)}", file=sys.stderr)
    return type(args)(**{**known, "resume": str(run_dir)})
