"""Arguments of the scripts: shared flags, checks before any work, and --resume."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

from agent_r1_tools.exchange import is_address
from agent_r1_tools.text import printable
from llm_utils import distributed
from llm_utils.command_line import read as read
from llm_utils.records import tracking
from llm_utils.recovery import disk
from llm_utils.setup import environments, startup
from llm_utils.setup.code_names import check_names
from llm_utils.setup.curriculum import stages
from llm_utils.setup.environments import ONE_OR_EACH, check_mixture, check_splits, environment_spec, one_each

# Bounds of numbers. A script has some of these arguments. None is always accepted.
MINIMUM = {
    **dict.fromkeys(("num_envs", "total_episodes", "episodes_per_iteration", "num_minibatches", "update_epochs"), 1),
    **dict.fromkeys(("microbatch_tokens", "constant_length", "importance_cap"), 1),
    **dict.fromkeys(("num_steps", "batch_size", "num_demonstrations", "tokenizer_demonstrations", "episodes"), 1),
    **{"horizon_every": 1, "samples": 1, "candidates": 1},
    **dict.fromkeys(("seed", "num_threads", "num_workers", "checkpoint_every", "eval_episodes", "eval_every"), 0),
    **dict.fromkeys(("max_staleness", "lora_rank", "dynamic_sampling", "critic_warmup", "warmup_steps"), 0),
    **dict.fromkeys(("clip_coef", "clip_coef_high", "clip_coef_value", "kl_coef", "ent_coef", "weight_decay"), 0),
    **dict.fromkeys(("eval_demonstrations", "first_demonstration", "first_episode", "temperature"), 0),
    **dict.fromkeys(("dual_clip", "step_weight", "branch_beta"), 0),
    **{"beam_size": 2, "entropy_window": 1},
    **{"hidden_size": 24, "num_layers": 2, "intermediate_size": 1},  # smaller models have no room for a copying circuit
}
ABOVE_0 = {
    "max_grad_norm": "; a large value turns clipping off",
    "target_kl": "; leave it out to never stop early",
    "rm_coef": "; leave out --reward-model to train on the environment's outcome",
}
# Models by the rate that trains them; a rate of 0 trains nothing.
TRAINED_BY = {"learning_rate": "the policy", "critic_learning_rate": "the critic"}
SHARES = (
    "max_invalid", "gamma", "gae_lambda", "gamma_turn", "expert_share", "rag_share", "branch_alpha", "replay_successes",
    "rm_coef",
)  # fmt: skip
FLAGS_OF_THEIR_OWN = ("num_envs", "tokenizer", "split", "chat_template")  # arguments of an environment with own flags

MAY_GROW = ("total_episodes", "episodes")  # arguments that --resume may raise
MAY_CHANGE = (  # arguments that change the result at most by rounding: machine, memory, saved files
    "microbatch_tokens", "gradient_checkpointing", "compile", "num_envs", "preflight", "vllm_url", "api",
    "num_threads", "track", "wandb_project_name", "checkpoint_every", "save_model",
    "log_trajectories", "out",
)  # fmt: skip
ArgsT = TypeVar("ArgsT")


@dataclass
class Common:
    """Infrastructure flags around an algorithm, the same in every RL learner."""

    # run
    exp_name: str = ""
    """name of this experiment"""
    seed: int = 1
    """seed of everything: tasks, sampling, minibatches"""
    track: bool = False
    """also log to Weights & Biases"""
    wandb_project_name: str = "agent-r1"
    """name of the W&B project"""
    save_model: bool = True
    """write the trained policy, its tokenizer and a model card to runs/{run_name}/model"""
    log_trajectories: int | Literal["all"] = 8
    """episodes of each iteration to write to runs/{run_name}/trajectories.jsonl: the first that are trained on, or
    all"""
    checkpoint_every: int = 10
    """iterations between checkpoints; there is always one at the end (0: only if the run ends early)"""
    resume: str | None = None
    """run folder: continue from its checkpoint, in the same folder, with its arguments"""

    # environment
    env_id: str | list[str] = "AgentR1/MultihopWorld-v0"
    """id of the environment (your own: module:ID, where the module registers it). Several ids are learned together"""
    env_share: list[float] = dataclasses.field(default_factory=list)
    """with several ids: share of each in the drawn tasks, e.g. .5 .5 (none: equal shares)"""
    env_kwargs: str | list[str] = "{}"
    """further arguments of the environment, as JSON, e.g. '{"max_turns": 4}'. With several ids: one for all, or one for
    each"""
    data_dir: str | None = None
    """folder of the data set, for environments that read one (see docs/data.md)"""
    split: str = "train"
    """split to train on"""
    sample_by_pass_rate: str | None = None
    """file of evaluate_llm.py --samples: draw tasks in proportion to p (1 - p) of their pass rate p (None:
    uniformly)"""
    num_envs: int = 128
    """number of parallel episodes"""
    max_invalid: float = 0.5
    """maximum share of an iteration's episodes that may end in infrastructure errors (they are dropped); above it the
    run stops"""
    horizon_schedule: str | None = None
    """turn limits of an episode in stages, e.g. 4,8,12 with max_turns 12: a growing horizon (None: max_turns)"""
    horizon_every: int = 20
    """iterations of each stage of --horizon-schedule; the last stage has no end"""
    reward_model: str | None = None
    """run folder of reward_model_llm.py, with the same tokenizer: its score replaces the outcome reward (None: the
    environment's own outcome)"""
    rm_coef: float = 1.0
    """with --reward-model: share of the outcome that the score replaces, above 0 and at most 1"""

    # model
    model: str = "tiny"
    """Hugging Face name, folder, or "tiny": the policy shipped for the environment"""
    tokenizer: str | None = None
    """name or folder of a tokenizer (None: the model's own; "byte": the built-in byte tokenizer)"""
    chat_template: str | None = None
    """Jinja file that replaces the tokenizer's chat template; a base model needs one"""
    lora_rank: int = 0
    """train LoRA adapters of this rank instead of the weights (0: train the weights)"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of the models' computations (auto: float32 on a CPU, bfloat16 on a GPU); log-probabilities are float32"""
    float32_head: bool = False
    """compute the logits of a bfloat16 model in float32, in training and in sampling with transformers"""

    # engine
    engine: Literal["transformers", "vllm", "vllm-server"] = "transformers"
    """sampling engine: transformers or vLLM in this process, or running `vllm serve` processes"""
    vllm_url: str = "http://localhost:8000"
    """address of the server of --engine vllm-server"""
    max_staleness: int = 0
    """maximum age, in iterations, of the weights that sampled an episode (0: on-policy)"""
    top_p: float = 1.0
    """nucleus sampling (1: off). Below 1 the sampling distribution differs from the one that the loss assumes"""

    # evaluation
    eval_episodes: int = 256
    """held-out tasks per evaluation (0: no evaluation). With several ids: of each id"""
    eval_split: str | list[str] | None = None
    """split to evaluate on (None: test, validation or dev if there is one, else --split). With several ids: one for
    all, or one for each"""
    eval_every: int = 5
    """iterations between evaluations (there is always one at the start and one at the end)"""

    # machine
    cuda: bool = True
    """use a GPU if there is one"""
    num_threads: int = 0
    """CPU threads of torch in each process (0: as many as there are free cores)"""
    deterministic: bool = False
    """the same weights to the bit in every run: deterministic kernels, tool results in the order of the calls"""
    compile: bool = False
    """compile the layers for training, on a GPU: faster updates, but the first ones take minutes"""
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"
    """recompute activations in the backward pass: less memory, more time. auto: on if the run does not fit without"""
    microbatch_tokens: int | Literal["auto"] = "auto"
    """tokens, with padding, in one forward and backward. Fewer need less memory; the gradient is the same (except for
    rounding, in bf16). auto: 4096, and on a GPU up to 32768 if they fit"""
    preflight: bool = True
    """compute the memory that the run needs, and stop before the start if it does not fit"""


def defaults_of(kind: type) -> dict[str, Any]:
    """Return the default of each flag of a dataclass; MISSING for a required flag."""
    fields: tuple[Any, ...] = dataclasses.fields(kind)
    return {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields}


def evaluates(args: Any) -> bool:
    """Return True if a training run measures anything on held-out data."""
    if hasattr(args, "eval_episodes"):
        return args.eval_episodes > 0
    if not hasattr(args, "eval_data"):  # reward_model_llm.py always holds tasks out
        return True
    return bool(args.eval_data) if args.data else args.eval_demonstrations > 0


# Flags that other arguments disable: the condition under which a flag has an effect, and the text for the other case.
Alive = Callable[[Any], bool]
SWITCHES: dict[str, tuple[Alive, str]] = {
    "wandb_project_name": (lambda a: a.track, "without --track"),
    "vllm_url": (lambda a: a.engine == "vllm-server", "without --engine vllm-server"),
    "chat_template": (lambda a: a.tokenizer != "byte", "with --tokenizer byte, which has its own"),
    "api_model": (lambda a: a.api is not None, "without --api"),
    "candidates": (lambda a: a.decode != "plain", "with --decode plain"),
    "critic": (lambda a: a.decode != "plain", "with --decode plain"),
    "critic_warmup": (lambda a: not a.critic_only, "with --critic-only, which never trains the policy"),
    "float32_head": (lambda a: a.dtype != "float32", "with --dtype float32"),
    "horizon_every": (lambda a: "," in (a.horizon_schedule or ""), "without --horizon-schedule of several stages"),
    "group_size": (lambda a: getattr(a, "baseline", True), "without --baseline"),
    "scale_by": (lambda a: a.scale_rewards, "with --no-scale-rewards"),
    "gamma_turn": (lambda a: a.advantage == "bilevel", "without --advantage bilevel"),
    "constant_length": (lambda a: a.loss_aggregation == "constant", "without --loss-aggregation constant"),
    "kl_estimator": (lambda a: a.kl_coef > 0 and a.kl_in == "loss", "without --kl-coef above 0 and --kl-in loss"),
    "reference": (lambda a: a.kl_coef > 0, "without --kl-coef above 0"),
    **dict.fromkeys(
        ("beam_size", "branch_alpha", "branch_beta"),
        (lambda a: a.initial_episodes < a.group_size, "with --initial-episodes as large as --group-size"),
    ),
    **dict.fromkeys(
        ("entropy_window", "entropy_unit"),
        (lambda a: a.initial_episodes < a.group_size and a.branch_beta > 0, "without branches or with --branch-beta 0"),
    ),
    "rm_coef": (lambda a: a.reward_model is not None, "without --reward-model"),
    "env_share": (lambda a: isinstance(a.env_id, list) and len(a.env_id) > 1, "without several ids of --env-id"),
    "eval_split": (lambda a: a.eval_episodes > 0, "with --eval-episodes 0"),
    "eval_every": (lambda a: not a.eval_every or evaluates(a), "without an evaluation"),
    "old_logprobs": (lambda a: a.old_logprobs != "sampler" or a.loss_mask, "as sampler with --no-loss-mask"),
    "importance_cap": (  # --no-loss-mask always uses the trainer's
        lambda a: a.old_logprobs != "sampler" or not a.loss_mask, "with --old-logprobs sampler"
    ),
    **dict.fromkeys(
        ("hidden_size", "num_layers", "intermediate_size", "tokenizer_demonstrations"),
        (lambda a: a.model == "scratch", "without --model scratch"),
    ),
    **dict.fromkeys(
        ("num_demonstrations", "first_demonstration", "eval_demonstrations"),
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
    """Raise SystemExit for the first argument that is out of range, an unknown environment, or a flag without effect.

    For any script. A flag that was given its default cannot be told from one that was left out. A resumed run
    (--resume) keeps the flags that it was accepted with.
    """
    startup.imported()
    given = {name: value for name, value in vars(args).items() if value is not None}
    defaults = defaults_of(type(args))
    for name, value in given.items():
        if value in ("", []) and defaults[name] != value:
            raise SystemExit(f"{flag(name)} is empty: give a value, or leave the flag out")
    for name, minimum in (MINIMUM | dict.fromkeys(TRAINED_BY, 0)).items():
        if given.get(name) != "auto" and not given.get(name, minimum) >= minimum:  # also true for NaN
            raise SystemExit(f"{flag(name)} must be at least {minimum}")
    for name, remark in ABOVE_0.items():
        if not 0 < given.get(name, 1) < math.inf:
            raise SystemExit(f"{flag(name)} must be above 0{remark}")
    if (logged := given.get("log_trajectories", 0)) != "all" and logged < 0:
        raise SystemExit("--log-trajectories must be a number of episodes, at least 0, or all")
    for name in SHARES:
        if not 0 <= given.get(name, 0) <= 1:
            raise SystemExit(f"{flag(name)} must be between 0 and 1")
    if not 0 < given.get("top_p", 1) <= 1:
        raise SystemExit("--top-p must be above 0 and at most 1")
    for name, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise SystemExit(f"{flag(name)} must be a finite number")
    if given.get("seed", 0) >= 2**63:
        raise SystemExit("--seed must be below 2**63")
    for name in ("vllm_url", "api"):
        for url in given[name].split(",") if name in given else ():
            if not is_address(url.strip()):
                raise SystemExit(f"{flag(name)} {url}: this is not an address such as http://localhost:8000")
    if given.get("compile") and given.get("deterministic"):
        raise SystemExit("--deterministic is incompatible with --compile, which chooses kernels by their time")
    if hasattr(args, "env_kwargs"):
        check_environment(args)
        check_splits(args)
    else:  # reward_model_llm.py makes no environment
        check_template(args)
        environment_spec(args.env_id)
    check_switches(args)
    for name, model in TRAINED_BY.items():
        if given.get(name) == 0 and distributed.launched_rank() == 0:
            print(f"{flag(name)} 0: {model} keeps its weights and learns nothing", file=sys.stderr)
    warmup, steps = given.get("warmup_steps", 0), given.get("num_steps", 0)
    if warmup > steps:
        share = f"the learning rate ends at {steps / warmup:.0%} of its peak"
        print(f"--warmup-steps {warmup} is above --num-steps {steps}: {share}", file=sys.stderr)


# Flags that need an optional package: the condition, the package, and the extra with it.
PACKAGES: dict[str, tuple[Alive, str, str]] = {
    "--lora-rank": (lambda a: getattr(a, "lora_rank", 0) > 0, "peft", "lora"),
    "--adapter": (lambda a: getattr(a, "adapter", None) is not None, "peft", "lora"),
    "--engine vllm": (lambda a: getattr(a, "engine", "") == "vllm", "vllm", "vllm"),
    "--engine vllm-server": (lambda a: getattr(a, "engine", "") == "vllm-server", "httpx", "http"),
    "--api": (lambda a: getattr(a, "api", None) is not None, "httpx", "http"),
}


def check_machine(args: Any) -> None:
    """Raise SystemExit for a flag whose package, GPU or login is missing, and if the run's folder cannot be made.
    Called last."""
    if args.resume is None and not disk.writable(Path("runs")):
        raise SystemExit("runs: cannot write into this folder, which holds all runs; start in another folder")
    for name, (needs, package, extra) in PACKAGES.items():
        if needs(args) and sys.modules.get(package) is None and (package in sys.modules or find_spec(package) is None):
            on_cpu = " (on a CPU: see docs/engines.md)" if package == "vllm" else ""
            raise SystemExit(f"{name} needs {package}: pip install 'agent-r1[{extra}]'{on_cpu}")
    if getattr(args, "compile", False):
        if distributed.device(args.cuda).type == "cpu":
            raise SystemExit("--compile needs a GPU: it fuses small kernels there, and this run computes on a CPU")
        if distributed.launched_rank() == 0:
            print("--compile: the first steps compile the layers, which may take minutes", file=sys.stderr)
    if getattr(args, "track", False) and distributed.launched_rank() == 0:  # last, because it may ask a server
        tracking.check_login()


def check_switches(args: Any) -> None:
    """Raise SystemExit for flags that other arguments disable. It is called again after the defaults are filled in."""
    if getattr(args, "resume", None) is not None:
        return
    given, defaults = vars(args), defaults_of(type(args))
    for name, (has_effect, case) in SWITCHES.items():
        if given.get(name) is not None and given[name] != defaults[name] and not has_effect(args):
            raise SystemExit(f"{flag(name)} does nothing {case}")


def check_environment(args: Any) -> None:
    """Raise SystemExit for an unknown --env-id, a missing --data-dir, and --env-kwargs that no environment accepts."""
    environments.kwargs_of_each(args)
    data_dir = args.data_dir or ""
    if data_dir and "://" not in data_dir and not os.path.exists(os.path.expanduser(data_dir)):
        raise SystemExit(printable(f"--data-dir {args.data_dir}: there is no such file or folder"))
    check_template(args)
    given = {name for text in one_each("env_kwargs", args.env_kwargs, args) for name in json.loads(text)}
    if duplicates := [name for name in FLAGS_OF_THEIR_OWN if name in given]:
        raise SystemExit(f"--env-kwargs must not contain {duplicates[0]}; use {flag(duplicates[0])}")
    check_mixture(args)
    check_shaping(args)
    environment_spec(args.env_id)


def check_shaping(args: Any) -> None:
    """Raise SystemExit if `shaping` in --env-kwargs is not the learner's discount per turn, or if a learner bootstraps
    at a truncation, where the potential is 0."""
    shaping = [kwargs["shaping"] for kwargs in environments.kwargs_of_each(args) if kwargs.get("shaping") is not None]
    if not shaping or not hasattr(args, "gamma"):  # an evaluation or supervised training discounts nothing
        return
    advantage = getattr(args, "advantage", "turns")
    if advantage in ("tokens", "bilevel") and args.gamma != 1:
        remedy = "use --gamma 1 or --advantage turns"
        raise SystemExit(f"--gamma {args.gamma} discounts per token, but shaping is per turn: {remedy}")
    name = "gamma_turn" if advantage == "bilevel" else "gamma"
    if other := [value for value in shaping if value != getattr(args, name)]:
        remedy = f"use {flag(name)} {printable(str(other[0]))}, or shaping {getattr(args, name)}"
        raise SystemExit(f"shaping must be the learner's discount per turn: {remedy}")
    if getattr(args, "truncation", "outcome") == "bootstrap":
        raise SystemExit("--truncation bootstrap contradicts shaping, whose potential is 0 there: use outcome")


def check_template(args: Any) -> None:
    """Raise SystemExit for a --chat-template that is no file."""
    template = args.chat_template
    if template is not None and not os.path.isfile(template):
        cause = "there is no such file; give a file with a Jinja template"
        raise SystemExit(printable(f"--chat-template {template}: {cause}"))


def check_groups(args: Any) -> None:
    """Raise SystemExit unless an iteration consists of whole groups, of at least two episodes."""
    episodes, size = args.episodes_per_iteration, args.group_size
    if size < 2:
        raise SystemExit(f"--group-size {size} must be at least 2")
    if episodes % size:
        raise SystemExit(f"--episodes-per-iteration {episodes} must be a multiple of --group-size {size}")


def check(args: Any) -> None:
    """Raise SystemExit for arguments that are out of range, have no effect, or contradict each other, in an RL
    learner."""
    check_each(args)
    if (schedule := getattr(args, "horizon_schedule", None)) is not None:
        try:
            turns = stages(schedule)
        except ValueError as error:
            raise SystemExit(f"--horizon-schedule: {error}") from error
        iterations, last = args.total_episodes // args.episodes_per_iteration, (len(turns) - 1) * args.horizon_every
        if last >= iterations and distributed.launched_rank() == 0:  # --resume may raise both
            print(f"--horizon-schedule {schedule}: its last stage begins after {last} iterations, but the run "
                  f"has {iterations}: lower --horizon-every (now {args.horizon_every})", file=sys.stderr)  # fmt: skip
    total, count, replayed = args.total_episodes, args.episodes_per_iteration, getattr(args, "replay_successes", 0.0)
    whole = total - total % count
    contradictions = [
        (
            total % count > 0,
            f"--total-episodes {total} is not a multiple of --episodes-per-iteration {count}: "
            f"use {f'{whole} or ' if whole else ''}{whole + count}",
        ),
        (args.temperature <= 0, "--temperature must be above 0: the loss needs the sampling distribution"),
        (args.reject_ratio != 0 and not args.reject_ratio > 1, "--reject-ratio must be above 1, or 0 to turn it off"),
        (
            getattr(args, "dual_clip", 0) != 0 and not args.dual_clip > 1,
            "--dual-clip must be above 1, or 0 to turn it off",
        ),
        (
            args.reject_ratio > 0 and args.old_logprobs == "sampler",
            "--reject-ratio needs the trainer's log-probabilities: use --old-logprobs trainer",
        ),
        (replayed == 1, "--replay-successes must be below 1: new episodes fill the store"),
        (
            replayed > 0 and args.old_logprobs == "sampler",
            "--replay-successes needs the trainer's log-probabilities: use --old-logprobs trainer",
        ),
        (
            replayed > 0 and args.kl_in == "reward",
            "--replay-successes is incompatible with --kl-in reward: a stored advantage has the KL divergence of then",
        ),
        (args.num_minibatches > args.episodes_per_iteration, "--num-minibatches exceeds --episodes-per-iteration"),
        (
            args.deterministic and args.max_staleness > 0,
            "--deterministic is incompatible with --max-staleness: the episodes in flight depend on the clock",
        ),
        (
            args.max_staleness > 0 and getattr(args, "dynamic_sampling", 0) > 0,
            "--max-staleness is incompatible with --dynamic-sampling: a batch sampled ahead cannot grow",
        ),
        (
            args.deterministic and args.engine != "transformers",
            f"--deterministic is incompatible with --engine {args.engine}: use --engine transformers",
        ),
        (
            args.episodes_per_iteration // args.num_minibatches < distributed.launched(),
            f"--num-minibatches {args.num_minibatches} leaves fewer episodes per step than there are processes",
        ),
        (args.kl_in == "reward" and args.kl_coef <= 0, "--kl-in reward needs a --kl-coef above 0"),
    ]
    for wrong, message in contradictions:
        if wrong:
            raise SystemExit(message)


def same_but_context(given: str, of_run: str) -> bool:
    """Return True if a run's `--env-kwargs` are the given ones, with the model's `max_context_tokens` added."""
    try:
        kwargs, run_kwargs = json.loads(given), json.loads(of_run)
    except (ValueError, TypeError):
        return False
    return isinstance(run_kwargs, dict) and {n: v for n, v in run_kwargs.items() if n != "max_context_tokens"} == kwargs


def in_this_version(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return recorded arguments with the values of this version: --gradient-checkpointing was a switch."""
    was = saved.get("gradient_checkpointing")
    return {**saved, "gradient_checkpointing": "on" if was else "off"} if isinstance(was, bool) else dict(saved)


def resumed(args: ArgsT, saved: Mapping[str, Any], file: str) -> ArgsT:
    """Return the arguments of the run that `args.resume` names; `saved` comes from its `file`.

    The command line may repeat the run's own arguments. It may raise the number of episodes, and change arguments that
    change the result at most by rounding (MAY_CHANGE); changes are printed. Raise SystemExit for other changes, for a
    value of another type, and for names of code that are not repeated (`check_names`).
    """
    values = {name: value for name, value in in_this_version(saved).items() if hasattr(args, name)}
    words = {word.split("=")[0].replace("_", "-").replace("--no-", "--") for word in sys.argv[1:]}
    changed, run_dir, unrepeated = [], vars(args)["resume"], {}
    for name, default in defaults_of(type(args)).items():
        value, run_value = getattr(args, name), values.get(name, default)
        same_type = type(run_value) is type(default) or {type(run_value), type(default)} == {int, float}
        is_word = (name, run_value) == ("log_trajectories", "all")
        is_number = name == "microbatch_tokens" and type(run_value) is int
        is_list = isinstance(run_value, list) and all(type(one) is str for one in run_value) and name in ONE_OR_EACH
        if not (same_type or default is MISSING or None in (run_value, default) or is_word or is_number or is_list):
            raise SystemExit(f"--resume {run_dir}: {file} is damaged: its {flag(name)} is {run_value!r}")
        not_given = flag(name) not in words if "--resume" in words else value == default  # made by a program
        if name in ("env_id", "env_kwargs") and not_given:
            unrepeated[name] = run_value
        if name == "resume" or value == run_value or not_given:
            continue
        if name == "env_kwargs":
            run = SimpleNamespace(env_id=values.get("env_id"))
            if all(map(same_but_context, one_each(name, value, run), one_each(name, run_value, run))):
                continue
        if name not in MAY_GROW + MAY_CHANGE:
            raise SystemExit(
                f"--resume continues with the run's own arguments, but {flag(name)} {value} contradicts its "
                f"{printable(str(run_value))}. Leave it out, or start a new run"
            )
        if name in MAY_GROW and value < run_value:
            raise SystemExit(f"{flag(name)} {value} is less than the run's own {run_value}; --resume can only raise it")
        values[name] = value
        changed.append(f"{flag(name)} {value} (was {printable(str(run_value))})")
    check_names(run_dir, **unrepeated)
    if changed and distributed.launched_rank() == 0:
        print(f"resuming with {', '.join(changed)}", file=sys.stderr)
    return type(args)(**{**values, "resume": str(run_dir)})
