"""The environments that `--env-id` names: any registered `ToolEnv`, ours or the user's own."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cache
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from agent_r1 import ArgumentError, ToolEnv
from agent_r1.ids import HELD_OUT, creator, find_environment
from agent_r1.remote import RemoteEnv, server_task_counts
from agent_r1.task_data import DataFormatError, DataNotFoundError
from agent_r1.text.tokenizers import DamagedTokenizerError, TokenizerNotFoundError
from agent_r1.vector import vector_spec
from agent_r1.vector_mix import environment_shares, mixed_spec
from agent_r1_tools.text import printable
from llm_utils import distributed

ONE_OR_EACH = ("env_id", "env_kwargs", "eval_split")  # arguments that may be a list, for several environments


def ids_of(args: Any) -> list[str]:
    """Return the ids that `--env-id` names. With several, a run learns them all."""
    return list(args.env_id) if isinstance(args.env_id, list) else [args.env_id]


def words(value: Any) -> str:
    """Return a flag's value as it is typed: the entries of a list with spaces between them."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def quoted(value: Any) -> str:
    """Return a flag's value as it is typed in a shell."""
    return shlex.join(map(str, value if isinstance(value, list) else [value]))


def print_defaults(chosen: Mapping[str, Any], args: Any) -> None:
    """Print the flags that a script chose for the user, as they are typed. Only rank 0 prints."""
    if chosen and distributed.launched_rank() == 0:
        flags = " ".join(f"--{name.replace('_', '-')} {quoted(value)}" for name, value in chosen.items())
        line = f"defaults for --model {args.model} and --env-id {words(args.env_id)}: {flags}"
        print(printable(line), file=sys.stderr)


def one_each(name: str, value: Any, args: Any) -> list[Any]:
    """Return the value of a flag for each id of `--env-id`: its own, or the same for all. Raise SystemExit if there
    are too few or too many."""
    count = len(ids_of(args))
    if isinstance(value, list) and len(value) != count:
        flag, ids = f"--{name.replace('_', '-')}", f"{count} environment{'s' * (count > 1)}"
        remedy = "put the JSON in quotes" if count == 1 else "give one for each --env-id, or one for all"
        raise SystemExit(f"{flag} has {len(value)} values for {ids}: {remedy}")
    return value if isinstance(value, list) else [value] * count


def environment_spec(env_id: str | Sequence[str]) -> EnvSpec:
    """Return the spec that `gym.make_vec` takes for `--env-id`, whether or not it was registered with a vector
    environment. Several ids have one spec, that of a `MixedVectorEnv`.

    "module:id" imports the module first; the working directory is searched too. Raise SystemExit if the module or the
    environment does not exist, if it is not an environment of tokens, or if it rejects the learners' arguments.
    """
    ids, names = [env_id] if isinstance(env_id, str) else list(env_id), []
    for one in ids:
        try:
            names.append(find_environment(one).id)
        except ArgumentError as error:
            raise SystemExit(printable(f"--env-id {one}: {error}")) from None
    return vector_spec(names[0]) if len(names) == 1 else mixed_spec(names)


def evaluation_split(args: Any, split: str) -> str | list[str]:
    """Return the split to evaluate on if none is named: test, validation or dev if the environment has one of them,
    else `split`, else its first split. If several environments differ in it, return a list."""
    each = zip(ids_of(args), kwargs_of_each(args), strict=True)
    splits = [_evaluation_split(env_id, kwargs, split) for env_id, kwargs in each]
    return splits[0] if len(set(splits)) == 1 else splits


def _evaluation_split(env_id: str, kwargs: dict[str, Any], split: str) -> str:
    spec = environment_spec(env_id)
    maker, kwargs = creator(spec.id), {**spec.kwargs, **kwargs}
    kwargs.pop("split", None)  # the registered split; this function looks for another one
    if not isinstance(maker, type) or not issubclass(maker, ToolEnv) or not isinstance(maker.splits, Mapping):
        return split  # a function, or a property of the instance: unknown before it is made
    with plain_errors(env_id):
        wanted = (*HELD_OUT, split, *maker.splits)
        return next((name for name in wanted if maker.has_split(name, **kwargs)), split)


def check_splits(args: Any) -> None:
    """Raise SystemExit for a split that one of our environments does not have, under its flag. A remote one asks its
    server. The user's own environment may make its splits when it is made."""
    if getattr(args, "data", None):  # with --data sft_llm.py makes no environment
        return
    eval_splits = one_each("eval_split", getattr(args, "eval_split", None), args)
    for env_id, kwargs, eval_split in zip(ids_of(args), kwargs_of_each(args), eval_splits, strict=True):
        spec = environment_spec(env_id)
        try:
            maker = creator(spec.id)
        except ImportError:  # making the environment reports it
            continue
        splits = getattr(maker, "splits", None)
        if not maker.__module__.startswith("agent_r1.") or not isinstance(splits, Mapping):
            continue
        kwargs = {name: value for name, value in {**spec.kwargs, **kwargs}.items() if name != "split"}
        for flag, split in (("--split", args.split), ("--eval-split", eval_split)):
            if split is None or split in splits:
                continue
            with plain_errors(env_id):
                has_split = maker.has_split(split, **kwargs)
            if not has_split:
                if issubclass(maker, RemoteEnv):
                    splits = server_task_counts(**kwargs)
                problem = f"{env_id} has no split {split!r}; it has {', '.join(splits)}"
                raise SystemExit(printable(f"{flag} {split}: {problem}"))


def kwargs_of_each(args: Any) -> list[dict[str, Any]]:
    """Return the arguments of each environment that a script's flags name: `--env-kwargs`, `--data-dir` and
    `--chat-template`. Raise SystemExit if `--env-kwargs` is not a JSON object, or has not one for each."""
    each = []
    for text in one_each("env_kwargs", args.env_kwargs, args):
        try:
            kwargs = json.loads(text)
        except (ValueError, TypeError):
            kwargs = None
        if not isinstance(kwargs, dict):
            got = printable(str(text))
            raise SystemExit(f"--env-kwargs takes a JSON object, such as '{{\"max_turns\": 4}}', got {got}")
        flags = {"data_dir": args.data_dir, "chat_template": args.chat_template}
        each.append(kwargs | {name: value for name, value in flags.items() if value is not None})
    return each


def env_kwargs(args: Any) -> dict[str, Any]:
    """Return the arguments that `gym.make_vec` takes for a script's flags: `kwargs_of_each` of one environment, or
    those of a `MixedVectorEnv`."""
    each = kwargs_of_each(args)
    return each[0] if len(each) == 1 else {"each": each, "share": args.env_share}


def check_mixture(args: Any) -> None:
    """Raise SystemExit for flags that contradict several ids of `--env-id`."""
    ids = [name.rpartition(":")[2] for name in ids_of(args)]
    if len(ids) == 1:
        return
    if twice := sorted({name for name in ids if ids.count(name) > 1}):
        raise SystemExit(printable(f"--env-id names {twice[0]} twice: name each once; --env-share weighs them"))
    try:
        environment_shares(args.env_share, len(ids))
    except ArgumentError as error:
        raise SystemExit(f"--env-share: {error}") from None
    if args.data_dir is not None:
        remedy = "give each its data_dir in --env-kwargs, or set AGENT_R1_DATA"
        raise SystemExit(f"--data-dir is the folder of one environment: for several, {remedy}")
    if args.sample_by_pass_rate is not None:
        raise SystemExit("--sample-by-pass-rate needs one environment: leave it out, or use --env-share for several")


def smaller_context(args: Any, tokenizer: str | None, positions: int | None) -> str | list[str] | None:
    """Return `--env-kwargs` with a `max_context_tokens` of the model's positions, if the environment's default is
    larger. Return None if it fits, or if the user named a value (`check_context` rejects one that is too large)."""
    if positions is None or positions >= 32_768:  # no environment's default is larger
        return None
    given = one_each("env_kwargs", args.env_kwargs, args)
    fitted = []
    for env_id, text, kwargs in zip(ids_of(args), given, kwargs_of_each(args), strict=True):
        named = kwargs.get("max_context_tokens") is not None
        fits = named or context_of(env_id, args.split, tokenizer, json.dumps(kwargs)) <= positions
        fitted.append(text if fits else json.dumps({**json.loads(text), "max_context_tokens": positions}))
    if fitted == given:
        return None
    return fitted if isinstance(args.env_id, list) else fitted[0]


@cache
def context_of(env_id: str, split: str, tokenizer: str | None, kwargs: str) -> int:
    """Return the bound on the state of an environment, in tokens: that of one which is made for this."""
    with plain_errors(env_id):
        made: Any = {"num_envs": 1, "tokenizer": tokenizer, "split": split, **json.loads(kwargs)}
        with closing(gym.make_vec(environment_spec(env_id), **made)) as envs:
            return getattr(envs.single_observation_space, "max_len", 0)  # texts have none, and are rejected later


@contextmanager
def plain_errors(env_id: str | Sequence[str]) -> Iterator[None]:
    """Turn configuration errors (unknown split or argument, missing data) into a one-line SystemExit.

    Other errors of the user's own environment keep their traceback. For our environments, missing packages and rejected
    arguments are one-liners too.
    """
    try:
        yield
    except (TokenizerNotFoundError, DamagedTokenizerError) as error:
        raise SystemExit(f"--model, or --tokenizer: {printable(str(error))}") from None
    except (ImportError, OSError, TypeError, ValueError) as error:
        ids = [env_id] if isinstance(env_id, str) else list(env_id)
        makers = [getattr(creator(one.rpartition(":")[2]), "__module__", "") for one in ids]
        explains_itself = isinstance(error, ArgumentError | DataFormatError | DataNotFoundError)
        if not explains_itself and not all(maker.startswith("agent_r1.") for maker in makers):
            raise
        notes = [f" ({note})" for note in getattr(error, "__notes__", ())]  # the one of several
        raise SystemExit(printable(f"--env-id {words(ids)}: {error}{''.join(notes)}")) from None
