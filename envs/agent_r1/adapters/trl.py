"""The environments for TRL's `GRPOTrainer`; docs/trl.md shows a whole program.

    trainer = GRPOTrainer(
        ...,
        train_dataset=Dataset.from_list(task_rows("AgentR1/MultihopWorld-v0", range(1000))),
        environment_factory=environment_factory("AgentR1/MultihopWorld-v0", tokenizer),
        reward_funcs=environment_reward,
    )

TRL samples the turns and appends the tool results itself. An environment learns from TRL which tools are called, but
not which text was sampled. So the environment cannot compute the reward (TRL's `get_reward` takes no argument). A
reward function does it instead, because TRL passes it the tokens: `environment_reward` runs the sampled turns through
the `ToolEnv`, with the results of the calls that were made. Nothing here imports TRL. Made for TRL 1.16.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import or_
from typing import Any, ClassVar, Literal, cast

import gymnasium as gym

from agent_r1.dialects import Call
from agent_r1.episode import Made
from agent_r1.loops import take_result
from agent_r1.rewards import known
from agent_r1.text.tokenizers import control_tokens
from agent_r1.tool_env import PendingCall, ToolEnv
from agent_r1_tools import Tool, ToolResult


class TRLEnvironment:
    """An environment for TRL, which runs one episode after the other. Every tool is a public method of a subclass.

    TRL uses every public method except `reset` as a tool, so all other methods have an underscore.
    """

    _make: ClassVar[staticmethod[[], ToolEnv]]

    def __init__(self) -> None:
        self._env = env = self._make()
        self._made: list[Made] = []  # the calls of this episode: name, arguments, result
        self._names = re.compile("|".join(map(re.escape, control_tokens(env.tokenizer))))
        bridge, other = (env.dialect.bridge(True, [("tool", result)]) for result in ("result", "another"))
        stops = [i for i, token in enumerate(bridge) if token in env.dialect.stop_token_ids]
        pairs = zip(reversed(bridge), reversed(other), strict=False)
        same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        first = stops[-1] + 1 if stops else len(bridge) - same
        self._header = bridge[first:]  # the tokens before a turn of the policy
        if not self._header:
            raise ValueError("the chat template has nothing between results and a turn, so turns cannot be separated")

    def reset(self, task_index: int | None = None, **row: Any) -> None:
        """Begin the task of a row of `task_rows`."""
        if task_index is None:
            raise ValueError("the rows need a `task_index`; make the train_dataset with `task_rows`")
        self._env.reset(options={"task_index": task_index})
        self._made = []

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        result = self._run(PendingCall(Call(name, arguments), self._env.tools[name]))
        self._made.append((name, arguments, result))
        # TRL encodes results as part of the template's text. A space keeps them from becoming control tokens.
        return self._names.sub(lambda token: f"{token[0][0]} {token[0][1:]}", result.content)

    def _spans(self, completion: list[int]) -> list[list[int]]:
        """Return the sampled turns in a completion: each ends with a stop token, and the next begins after a header."""
        spans, start, size = [], 0, len(self._header)
        while start < len(completion):
            stops = (i for i in range(start, len(completion)) if completion[i] in self._env.dialect.stop_token_ids)
            end = next(stops, len(completion) - 1) + 1
            spans.append(completion[start:end])
            headers = (i for i in range(end, len(completion)) if completion[i : i + size] == self._header)
            start = next(headers, len(completion)) + size
        return spans

    def _result(self, pending: PendingCall) -> ToolResult:
        """Return the result of a call that TRL made. If TRL did not make it (after its last round), make it now."""
        call = pending.call
        # TRL may read the arguments differently ("3" for 3). It made the call anyway, so the call is not repeated.
        return take_result(self._made, call) or self._run(pending)

    def _run(self, pending: PendingCall) -> ToolResult:
        """Make a call, and retry faults until the environment's deadline."""
        results = self._env._in_order([pending]).run()
        assert results is not None
        return results[0]

    def _judge(self, completion: list[int]) -> tuple[float, dict[str, Any]]:
        """Run the turns of a completion in the environment. Return the episode's return, and the last info."""
        env, spans = self._env, self._spans(completion) or [[]]
        env.episode.max_turns = min(env.max_turns, len(spans))  # TRL ended the episode here
        total = 0.0
        for span in spans:
            turn = env._begin_turn(env._check_action(span))
            results = [self._result(pending) for pending in turn.waiting]
            _, reward, terminated, truncated, info = env._end_turn(turn, results)
            total += reward
            if terminated or truncated:
                break
        return total, info


def environment_factory(env_id: str, tokenizer: Any, **env_kwargs: Any) -> Callable[[], TRLEnvironment]:
    """Make the class for `GRPOTrainer(environment_factory=...)`: its instances run `env_id`.

    Args:
        env_id: a registered `ToolEnv`.
        tokenizer: the trainer's `processing_class`; the reward is computed from its tokens.
        env_kwargs: arguments of the environment. Set `GRPOConfig(max_tool_calling_iterations=max_turns - 1)`.

    Raises:
        ValueError: a tool's name is reserved by TRL ("reset", "get_reward", or a leading "_").
    """
    make = _maker(env_id, tokenizer=tokenizer, **env_kwargs)
    methods = {}
    for name, tool in make().tools.items():
        if name in ("reset", "get_reward") or name.startswith("_"):
            raise ValueError(f"TRL does not accept {name!r} as the name of a tool; give the tool another name")
        methods[name] = _method(tool)
    return type("TRLEnvironment", (TRLEnvironment,), {"_make": staticmethod(make), **methods})


def environment_reward(
    completion_ids: Sequence[list[int]],
    environments: Sequence[Any],
    log_metric: Callable[[str, float], None] | None = None,
    **_: Any,
) -> list[float | None]:
    """Compute the return of every episode, as the `ToolEnv` pays it, for `GRPOTrainer(reward_funcs=...)`.

    Logs `env/success` and the environment's metrics. The return is None for environments that `environment_factory` did
    not make, and for episodes that a fault ended. TRL excludes those from its baselines.
    """
    returns: list[float | None] = []
    for completion, environment in zip(completion_ids, environments, strict=True):
        if not isinstance(environment, TRLEnvironment):
            returns.append(None)
            continue
        total, info = environment._judge(list(completion))
        returns.append(None if "fault" in info else total)
        if log_metric is not None and "fault" not in info:
            for name, value in {**known(info["metrics"]), "success": float(info["is_success"])}.items():
                log_metric(f"env/{name}", value)
    return returns


def task_rows(env_id: str, task_indexes: Iterable[int], **env_kwargs: Any) -> list[dict[str, Any]]:
    """Make rows for a `train_dataset`: `prompt` (the first messages of an episode) and `task_index`.

    Pass the same `env_kwargs` as to `environment_factory`: the same split has the same tasks.
    """
    env, rows = _maker(env_id, **env_kwargs)(), []
    for index in task_indexes:
        env.reset(options={"task_index": index})
        rows.append({"prompt": env.messages, "task_index": index})
    return rows


def _maker(env_id: str, **env_kwargs: Any) -> Callable[[], ToolEnv]:
    return lambda: cast(ToolEnv, gym.make(env_id, **env_kwargs).unwrapped)


# --- tools as methods -------------------------------------------------------------------------------------------------


def _method(tool: Tool) -> Callable[..., str]:
    """Make a method with the signature and docstring of the tool's schema, which `get_json_schema` can read back."""

    def call(self: TRLEnvironment, /, **arguments: Any) -> str:
        return self._call(tool.name, arguments)

    properties = tool.parameters.get("properties", {})
    hints = {name: _hint(schema) for name, schema in properties.items()}
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
    for name, schema in properties.items():
        default = inspect.Parameter.empty if name in tool.parameters.get("required", ()) else schema.get("default")
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=hints[name], default=default)
        )
    lines = [f"    {name}: {_line(schema.get('description') or name)}" for name, schema in properties.items()]
    call.__name__ = call.__qualname__ = tool.name
    call.__doc__ = "\n".join([_line(tool.description), *(["", "Args:", *lines] if lines else [])])
    call.__annotations__ = hints
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def _line(text: str) -> str:
    return " ".join(text.split())


_TYPES = {"string": str, "integer": int, "number": float, "boolean": bool, "object": dict, "null": None}


def _hint(schema: dict[str, Any]) -> Any:
    """Return the type hint of a JSON schema. Hints have no bounds or patterns (the tool still checks them)."""
    if "enum" in schema:
        return Literal[tuple(schema["enum"])]
    if "anyOf" in schema:
        return reduce(or_, map(_hint, schema["anyOf"]))
    kind = schema.get("type")
    if isinstance(kind, list):
        return reduce(or_, [_hint({**schema, "type": member}) for member in kind])
    if kind == "array":
        return list[_hint(schema["items"])] if schema.get("items") else list  # type: ignore[misc]
    return _TYPES.get(kind, Any) if kind is not None else Any
