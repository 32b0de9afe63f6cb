"""The environments for verl: one agent loop plays them all, tokens in and tokens out; docs/verl.md shows a run.

    rows = task_rows("AgentR1/MultihopWorld-v0", range(1000), tokenizer=model_name)
    datasets.Dataset.from_list(rows).to_parquet("train.parquet")

    # a file of YAML for actor_rollout_ref.rollout.agent.agent_loop_config_path
    - {name: agent_r1, _target_: agent_r1.adapters.verl.AgentR1Loop}

A row names its environment, its task and the environment's arguments. The tokens that verl trains on are the state of
the `ToolEnv`; nothing is rendered or encoded again. Made for verl 0.9.1.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, cast
from uuid import uuid4

import numpy as np

from agent_r1 import factory
from agent_r1.loops import prompt_messages
from agent_r1.tool_env import PromptTooLong, ToolEnv
from agent_r1_tools import ToolFault
from agent_r1_tools.threads import OneThread

try:
    from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
    from verl.experimental.agent_loop.tool_agent_loop import SPEC_DECODE_EXTRA_KEYS
    from verl.utils.profiler import simple_timer
except ImportError as error:
    raise ImportError(f'{error}: agent_r1.adapters.verl needs pip install "agent-r1[verl]"') from error

# verl's validation appends its own values to "reward", votes by "pred", and counts a missing episode as 0 in "acc".
_RESERVED = {"reward", "pred", "acc", "acc_success_only", "success", "stop_turns", "stop_context"}


@register("agent_r1")
class AgentR1Loop(AgentLoopBase):
    """Episodes of any `ToolEnv`, each with its own environment in its own thread."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Play an episode of a row of `task_rows`.

        The prompt is the state after `reset`. The response has mask 1 and the sampler's log-probabilities on spans,
        mask 0 and 0.0 on the environment's tokens, and ends with the last span. `reward_score` is the return.

        Raises ToolFault for an infrastructure error that persists, RuntimeError if the server returns no usable span,
        and ValueError for a row without a task, or for a prompt that is longer than `rollout.prompt_length`.
        """
        if not {"env_id", "task_index"} <= row.keys():
            raise ValueError("a row needs `env_id` and `task_index`; make the data with `task_rows`")
        bounds, kwargs = self.rollout_config, json.loads(row.get("env_kwargs") or "{}")
        whole = bounds.prompt_length + bounds.response_length
        if bounds.max_model_len:
            whole = min(whole, bounds.max_model_len - 1)  # SGLang keeps one token free
        context = min(whole, kwargs.get("max_context_tokens") or whole)
        kwargs |= {"tokenizer": self.tokenizer, "max_context_tokens": context}
        request = uuid4().hex  # one request keeps the episode on one server
        if bounds.full_determinism and "priority" in row:
            request = f"det-{int(row['priority'])}"  # as verl's own loops name it: it chooses the server
        thread = OneThread()
        made: list[ToolEnv] = []

        def make() -> None:
            made.append(cast(ToolEnv, factory(row["env_id"], kwargs)().unwrapped))

        def close() -> None:  # in the thread: also what is made while the caller is cancelled
            for env in made:
                env.close()

        try:
            await thread.call(make)
            return await self._play(made[0], thread, int(row["task_index"]), sampling_params, request)
        finally:
            await thread.call(close)

    async def _play(
        self, env: ToolEnv, thread: OneThread, index: int, sampling: dict[str, Any], request: str
    ) -> AgentLoopOutput:
        bounds = self.rollout_config
        try:
            state, info = await thread.call(partial(env.reset, options={"task_index": index}))
        except PromptTooLong as error:
            raise ValueError(f"{error}, here data.max_prompt_length") from error
        prompt: list[int] = state.tolist()
        if len(prompt) > bounds.prompt_length:
            raise ValueError(
                f"the prompt of {info['task_id']!r} has {len(prompt)} tokens, and rollout.prompt_length is "
                f"{bounds.prompt_length}; increase data.max_prompt_length"
            )
        # The environment ends an episode that does not fit, so that it judges the tokens that verl trains on.
        env.max_context_tokens = min(env.max_context_tokens, len(prompt) + bounds.response_length)
        tokens, done = list(prompt), False
        mask: list[int] = []
        logprobs: list[float] | None = []
        scores: list[float] = []
        seconds: dict[str, float] = {}
        fields: list[dict[str, Any]] = []  # of the server, for each turn: versions of the weights, counts
        preempted: list[int] = []
        while not done:
            params = sampling | {"max_tokens": env.room, "stop_token_ids": info["stop_token_ids"]}
            with simple_timer("generate_sequences", seconds):
                sampled = await self.server_manager.generate(request, prompt_ids=list(tokens), sampling_params=params)
            span, span_logprobs = _span(sampled, env.room)
            with simple_timer("tool_calls", seconds):
                step = await thread.call(partial(env.step, np.array(span, np.int32)))
            state, reward, terminated, truncated, info = step
            if "fault" in info:
                raise ToolFault(info["fault"])
            done = terminated or truncated
            tokens += span
            # What follows the last span is left out: verl puts the reward on the last token.
            added = [] if done else state[len(tokens) :].tolist()
            tokens += added
            mask += [1] * len(span) + [0] * len(added)
            if logprobs is not None and span_logprobs is not None:
                logprobs += span_logprobs + [0.0] * len(added)
            else:
                logprobs = None
            scores.append(reward)
            fields.append(sampled.extra_fields)
            preempted += [] if sampled.num_preempted is None else [sampled.num_preempted]
        reason = info.get("truncation_reason")
        stops = {f"stop_{name}": float(reason == name) for name in ("turns", "context")}
        counts = {
            name: sum(of[name] for of in fields) for name in SPEC_DECODE_EXTRA_KEYS if all(name in of for of in fields)
        }
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=tokens[len(prompt) :],
            response_mask=mask,
            response_logprobs=logprobs,
            routed_experts=None if sampled.routed_experts is None else sampled.routed_experts[: len(tokens)],
            reward_score=sum(scores),
            num_turns=2 * len(scores),  # what the policy read, and its turns
            metrics=seconds | ({"num_preempted": sum(preempted)} if preempted else {}),
            extra_fields={
                "turn_scores": scores,
                "tool_rewards": [],
                "reward_extra_info": {"success": float(info["is_success"]), **stops, **_named(info["metrics"])},
                "min_global_steps": fields[0].get("min_global_steps"),
                "max_global_steps": fields[-1].get("max_global_steps"),
                **counts,
            },
        )


def task_rows(env_id: str, task_indexes: Iterable[int], **env_kwargs: Any) -> list[dict[str, Any]]:
    """Make rows of verl's data: environment and task, and the columns that verl itself reads.

    `prompt` is for verl's filter of long prompts and for its logs; the loop takes the prompt of the environment.

    Args:
        env_id: a registered `ToolEnv`; "module:id" imports the module first.
        task_indexes: the tasks, one row each.
        env_kwargs: arguments of the environment; JSON values only. `tokenizer` is the model's name or folder. It is
            not in the rows, because the loop uses the trainer's tokenizer.
    """
    env = cast(ToolEnv, factory(env_id, env_kwargs)().unwrapped)
    kwargs, rows = json.dumps({name: value for name, value in env_kwargs.items() if name != "tokenizer"}), []
    for index in task_indexes:
        env.reset(options={"task_index": index})
        own = {"agent_name": "agent_r1", "env_id": env_id, "env_kwargs": kwargs, "task_index": index}
        judged = {"style": "rule", "ground_truth": ""}  # by the environment
        of_verl = {"data_source": env_id, "reward_model": judged, "extra_info": {"index": index}}
        rows.append({"prompt": prompt_messages(env, "text"), **own, **of_verl})
    env.close()
    return rows


def _named(metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return the metrics of an environment with "env_" before the names that verl or this loop uses itself."""
    return {f"env_{name}" if name in _RESERVED else name: value for name, value in metrics.items()}


def _span(sampled: Any, room: int) -> tuple[list[int], list[float] | None]:
    """Return the tokens of a turn and their log-probabilities, cut to the room.

    Raises RuntimeError if there are none, or if the server broke off: no policy decided that.
    """
    span, logprobs = list(sampled.token_ids), sampled.log_probs or None  # asynchronous clients return [] for none
    if not span or sampled.stop_reason in ("aborted", "abort"):
        raise RuntimeError(f"verl's server returned {len(span)} tokens with stop_reason {sampled.stop_reason!r}")
    if logprobs is not None and len(logprobs) != len(span):
        raise RuntimeError(f"verl's server returned {len(logprobs)} log-probabilities for {len(span)} tokens")
    return span[:room], None if logprobs is None else list(logprobs[:room])
