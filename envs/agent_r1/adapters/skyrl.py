"""The environments for SkyRL, text in and text out; docs/skyrl.md shows a whole program.

    skyrl_gym.register(id="agent_r1", entry_point="agent_r1.adapters.skyrl:SkyRLEnv")
    rows = task_rows("AgentR1/MultihopWorld-v0", range(1000), tokenizer=model_name)

A row names its environment, its task and the environment's arguments, so one registered class runs them all. SkyRL
renders and tokenises the messages itself, without tools. So `task_rows` writes the tools into the prompt, in the words
of the chat template if possible. Made for skyrl-gym 0.4.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, cast

import gymnasium as gym

import agent_r1
from agent_r1.loops import plain, prompt_messages
from agent_r1.rewards import known
from agent_r1.text.chat import encode_turn
from agent_r1.tool_env import ToolEnv
from agent_r1_tools import ToolFault
from agent_r1_tools.threads import OneThread

try:
    from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
except ImportError as error:
    raise ImportError(f'{error}: agent_r1.adapters.skyrl needs pip install "agent-r1[skyrl]"') from error

_ = agent_r1  # registers the environments
Message = dict[str, Any]


class SkyRLEnv(BaseTextEnv):
    """One episode of a `ToolEnv`, on one thread, whichever of SkyRL's threads calls.

    Args:
        env_config: not used.
        extras: a row of `task_rows`. SkyRL adds `max_turns` (`generator.max_turns`); the smaller bound applies.

    Raises: ValueError for a row without a task. `init` and `step` raise ToolFault for an infrastructure error that
    persists: SkyRL cannot drop an episode, and it must not train on this one.
    """

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        extras = extras or {}
        if not {"env_id", "task_index"} <= extras.keys():
            raise ValueError("a row needs `env_id` and `task_index`; make the data with `task_rows`")
        self._env = _make(extras["env_id"], json.loads(extras.get("env_kwargs") or "{}"))
        self._task_index = int(extras["task_index"])
        self.max_turns = min(self._env.max_turns, int(extras.get("max_turns", self._env.max_turns)))
        self._thread = OneThread()
        self._room = 0
        self._metrics: dict[str, float] = {"unfinished": 1.0}

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        """Begin the episode. The prompt is the unchanged prompt of the row."""
        options = {"task_index": self._task_index, "max_turns": self.max_turns}
        _, info = self._thread.run(lambda: self._env.reset(options=options))
        self._room = info["max_new_tokens"]
        return prompt, info

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Run one turn of the policy, given as text. Return the next messages, its reward, and the info as metadata."""
        env = self._env
        before = len(env.episode.messages) + 1
        span = encode_turn(env, action, self._room)
        _, reward, terminated, truncated, info = self._thread.run(env.step, span)
        self.turns, self._room = info["turn"], info["max_new_tokens"]
        if "fault" in info:
            raise ToolFault(info["fault"])
        done = terminated or truncated
        if done:
            reason = info.get("truncation_reason")
            self._metrics = known(info["metrics"])
            self._metrics |= {"success": float(info["is_success"]), "unfinished": 0.0}
            self._metrics |= {f"stop_{name}": float(reason == name) for name in ("turns", "context")}
        return BaseTextEnvStepOutput(
            observations=[] if done else _shown(env, env.episode.messages[before:]),
            reward=reward,
            done=done,
            metadata=info,
        )

    def get_metrics(self) -> dict[str, float]:
        """Return `success` and the environment's metrics; only `unfinished` if SkyRL ended the episode."""
        return self._metrics

    def close(self) -> None:
        """End the tools' sessions."""
        self._thread.run(self._env.close)


def task_rows(env_id: str, task_indexes: Iterable[int], **env_kwargs: Any) -> list[dict[str, Any]]:
    """Make rows of SkyRL's data: `prompt` (the first messages of an episode, with tools), environment and task.

    Args:
        env_id: a registered `ToolEnv`.
        task_indexes: the tasks, one row each.
        env_kwargs: arguments of the environment; JSON values only. `tokenizer` is the model's name or folder.
    """
    env, kwargs, rows = _make(env_id, env_kwargs), json.dumps(env_kwargs), []
    if lost := _lost_tags(env):
        gym.logger.warn(
            f"{', '.join(lost)} are special tokens of this tokenizer. SkyRL's engines drop special tokens from text "
            "that the environment reads: use another tokenizer or another dialect (dialect=...)"
        )
    for index in task_indexes:
        env.reset(options={"task_index": index})
        row = {"env_class": "agent_r1", "env_id": env_id, "env_kwargs": kwargs, "task_index": index}
        rows.append({"prompt": prompt_messages(env, "text"), **row})
    return rows


def _make(env_id: str, env_kwargs: dict[str, Any]) -> ToolEnv:
    return cast(ToolEnv, gym.make(env_id, **env_kwargs).unwrapped)


def _lost_tags(env: ToolEnv) -> list[str]:
    """Return the tags of calls and thoughts that are lost in a text decoded without special tokens."""
    tags = [*(env.dialect.call_tags or ()), *env.dialect.think_tags]
    ids = [env.tokenizer.encode(tag, add_special_tokens=False) for tag in tags]
    return [tag for tag, i in zip(tags, ids, strict=True) if env.tokenizer.decode(i, skip_special_tokens=True) != tag]


def _shown(env: ToolEnv, new: list[Message]) -> list[Message]:
    """Return the environment's texts after a turn, as messages for the chat template."""
    if new and new[0]["role"] == "tool":
        new = env.dialect.result_messages([(message["name"], message["content"]) for message in new])
    return [plain(env, message) for message in new]
