"""The environments for verifiers, and so for prime-rl; docs/verifiers.md has the commands.

    vf-eval agent_r1_verifiers --env.taskset.env-id AgentR1/MultihopWorld-v0 --env.taskset.split test -n 20

verifiers samples the turns and keeps their tokens. The environment reads these tokens if its tokenizer is the model's,
and otherwise the chat message. It replies with the user's next message: results, a hint, or the words of the task's
user. The module `agent_r1_verifiers` exports these classes, because ids in verifiers cannot have dots. Made for
verifiers 0.4.
"""

from __future__ import annotations

import itertools
import ssl
from collections.abc import Iterator
from functools import cache
from typing import Any, cast

import numpy as np

import agent_r1
from agent_r1.loops import new_messages, prompt_messages
from agent_r1.rewards import known
from agent_r1.tool_env import Step, ToolEnv
from agent_r1_tools import ToolFault
from agent_r1_tools.threads import OneThread

try:
    import verifiers.v1 as vf
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient, OpenAIError
    from verifiers.v1.dialects.chat import message_to_wire
except ImportError as error:
    raise ImportError(f'{error}: agent_r1.adapters.verifiers needs pip install "agent-r1[verifiers]"') from error

__all__ = ["AgentR1Env", "AgentR1Taskset", "OneReply"]  # one of each kind, as verifiers looks for them

MOST_LISTED = 200_000  # the training set with the most questions is listed, a generated world is a stream
_STOPS = {"turns": "max_turns", "context": "max_total_tokens"}  # verifiers' words for a truncation


class AgentR1Config(vf.TasksetConfig):
    """Settings of the taskset: `--env.taskset.env-id`, `--env.taskset.split`, `--env.taskset.env-kwargs`."""

    env_id: str = "AgentR1/MultihopWorld-v0"  # vf-eval makes the settings of a taskset without any, for its help
    """A registered `ToolEnv`; "module:ID" imports the module first."""
    split: str | None = None
    """The part of the tasks; None: the environment's default."""
    env_kwargs: dict[str, Any] = {}
    """Further arguments of the environment; on a command line, a JSON object."""


class AgentR1Data(vf.TaskData):
    """One task: the environment, its arguments, and the task's number in the split."""

    env_id: str
    env_kwargs: dict[str, Any]
    task_index: int


class AgentR1Task(vf.Task[AgentR1Data, vf.State, vf.TaskConfig]):
    """A task whose prompt is the environment's own, with the tools explained in text."""


class AgentR1Taskset(vf.Taskset[AgentR1Task, AgentR1Config]):
    """The tasks of one split. One environment writes all prompts, each when it is asked for."""

    def __init__(self, config: AgentR1Config) -> None:
        super().__init__(config)
        split = {} if config.split is None else {"split": config.split}
        self._env_kwargs = {**config.env_kwargs, **split}
        env = _make(config.env_id, self._env_kwargs)
        self._count = env.num_tasks
        env.close()
        if self._count > MOST_LISTED:
            self.__class__ = Stream  # not an attribute: prime-rl asks the class

    def load(self) -> Iterator[AgentR1Task]:
        """Yield the tasks in order; a stream begins again after its last task."""
        config, env = self.config, _make(self.config.env_id, self._env_kwargs)
        try:
            for number in itertools.count() if self.INFINITE else range(self._count):
                index = number % self._count
                env.reset(options={"task_index": index})
                system, *rest = prompt_messages(env, "text")
                if system["role"] != "system":
                    system, rest = {"content": None}, [system, *rest]
                data = AgentR1Data(
                    id=env.task.id,
                    name=env.task.id,
                    system_prompt=system["content"],
                    prompt=rest[0]["content"] if len(rest) == 1 else rest,
                    env_id=config.env_id,
                    env_kwargs=self._env_kwargs,
                    task_index=index,
                )
                yield AgentR1Task(data, config.task)
        finally:
            env.close()


class Stream(AgentR1Taskset):
    """A taskset that never ends: verifiers draws from it instead of listing it."""

    INFINITE = True


class AgentR1EnvConfig(vf.EnvConfig):
    """Settings of the one agent, `--env.player`. Its loop runs in this process, so it needs no sandbox."""

    player: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class AgentR1Env(vf.Env[AgentR1EnvConfig]):
    """An episode of a `ToolEnv` in its own thread, so that a tool that blocks delays this episode only."""

    async def run(self, task: AgentR1Task, agents: Any) -> None:
        """Play one task. Record every reward term as a reward, and `success` and the metrics as metrics.

        Raises ToolFault for an infrastructure error that persists: the rollout then has an error and no reward.
        """
        data, thread = task.data, OneThread()
        async with agents.player.interaction(task) as player:
            env = await thread.call(_make, data.env_id, data.env_kwargs)
            try:
                await self._play(env, thread, player, data.task_index, agents.player.config.max_turns)
            finally:
                await thread.call(env.close)

    async def _play(self, env: ToolEnv, thread: OneThread, player: Any, index: int, max_turns: int | None) -> None:
        options = {"task_index": index, "max_turns": min(env.max_turns, max_turns or env.max_turns)}
        await thread.call(lambda: env.reset(options=options))
        terms: dict[str, float] = {}
        segment = await player.turn()
        while not segment.terminated:
            _, _, terminated, truncated, info = await thread.call(_step, env, player.trace.nodes)
            _add(terms, info)
            if terminated or truncated:
                break
            segment = await player.turn(new_messages(env, "text"))
        else:  # verifiers ended the episode
            if player.trace.errors:
                return
            info = await thread.call(_unfinished, env)
            _add(terms, info)
        if reason := info.get("truncation_reason"):
            player.trace.stop(_STOPS.get(reason, reason))
        for name, amount in terms.items():
            player.trace.record_reward(name, amount)
        player.trace.record_metrics({**known(info["metrics"]), "success": float(info["is_success"])})


class OneReply(vf.Harness[vf.HarnessConfig]):
    """A harness that samples one reply in each turn, in this process. The environment runs the tools."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> vf.ProgramResult:
        """Ask the model once. verifiers records the reply on its way."""
        system, prompt = self.resolve_prompt(data)
        messages = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt
        if system is not None:
            messages = [vf.SystemMessage(content=system), *messages]
        http = DefaultAsyncHttpxClient(verify=_certificates())
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None, http_client=http) as client:
            try:
                await client.chat.completions.create(
                    model=ctx.model, messages=[message_to_wire(message) for message in messages]
                )
            except OpenAIError as error:
                return vf.ProgramResult(exit_code=1, stdout="", stderr=str(error))
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


_certificates = cache(ssl.create_default_context)  # reading them takes longer than a turn


def _make(env_id: str, env_kwargs: dict[str, Any]) -> ToolEnv:
    return cast(ToolEnv, agent_r1.factory(env_id, env_kwargs)().unwrapped)


def _step(env: ToolEnv, nodes: list[Any]) -> Step:
    """Run the last reply of a trace. Its tokens are better than its message, from which renderers drop broken calls."""
    reply = next(node for node in reversed(nodes) if node.sampled)
    asked = next(node for node in nodes if node.message.role == "user")
    if reply.token_ids and max(reply.token_ids + asked.token_ids) < len(env.tokenizer):
        read = env.tokenizer.decode(asked.token_ids)
        if isinstance(asked.message.content, str) and asked.message.content.strip() in read:  # the same tokenizer
            span = [token for token, sampled in zip(reply.token_ids, reply.mask, strict=True) if sampled]
            return env.step(np.array(span, np.int32))
    return env.step_message(reply.message)


def _unfinished(env: ToolEnv) -> dict[str, Any]:
    """End the episode with an empty turn, of which only the outcome counts. Return its info."""
    env.episode.max_turns = env.episode.turn + 1
    info = env.step(np.array([], np.int32))[4]
    terms = {name: amount for name, amount in info["reward_terms"].items() if name.startswith("outcome/")}
    return {**info, "reward_terms": terms}


def _add(terms: dict[str, float], info: dict[str, Any]) -> None:
    if "fault" in info:
        raise ToolFault(info["fault"])
    for name, amount in info["reward_terms"].items():
        terms[name] = terms.get(name, 0.0) + amount
