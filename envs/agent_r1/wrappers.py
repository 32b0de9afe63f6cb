"""Wrappers around a `ToolEnv`: text instead of tokens, new tokens only, a choice among turns, a record of episodes.

If Gymnasium's TimeLimit inside a wrapper cuts an episode off, the info still has `is_success` and metrics.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from agent_r1.baselines import baselines_of
from agent_r1.episode import Tokens
from agent_r1.spaces import TokenSpan, UnicodeText
from agent_r1.text.chat import decode_state, encode_turn
from agent_r1.tool_env import ToolEnv
from agent_r1.trajectories import append_row, episode_row
from agent_r1.vector import ToolVectorEnv


class TextInterface(gym.Wrapper[Any, Any, Any, Any], gym.utils.RecordConstructorArgs):
    """A text interface, for people and for models behind a chat API.

    The observation is the whole state as text, control tokens included (`env.unwrapped.messages` has it in chat form).
    An action is an assistant turn as text: see `encode_turn`. Pass sampled tokens as tokens instead, because a text
    does not determine its tokens.
    """

    def __init__(self, env: gym.Env[Tokens, Tokens]) -> None:
        gym.utils.RecordConstructorArgs.__init__(self)
        super().__init__(env)
        self.tool_env = _tool_env(env)
        self.action_space = UnicodeText()
        self.observation_space = UnicodeText()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode; the observation is the prompt as text."""
        tokens, info = self.env.reset(seed=seed, options=options)
        return decode_state(self.tool_env, tokens), info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Run one assistant turn."""
        span = encode_turn(self.tool_env, action, self.tool_env.room)
        tokens, reward, terminated, truncated, info = self.env.step(span)
        info = _with_outcome(self.env, info, truncated)
        return decode_state(self.tool_env, tokens), float(reward), terminated, truncated, info


class NewTokens(gym.Wrapper[Tokens, Tokens, Tokens, Tokens], gym.utils.RecordConstructorArgs):
    """Observations of new tokens only: the prompt at reset, then the tokens that follow each span.

    The state is the sequence prompt, span, observation, span, observation ... A span that does not fit is the
    exception: its episode is over, the observation is empty, and the state holds only the part that fits.
    """

    def __init__(self, env: gym.Env[Tokens, Tokens]) -> None:
        gym.utils.RecordConstructorArgs.__init__(self)
        super().__init__(env)
        self.tool_env = _tool_env(env)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Tokens, dict[str, Any]]:
        """Begin an episode; the observation is the prompt."""
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Tokens) -> tuple[Tokens, float, bool, bool, dict[str, Any]]:
        """Run one assistant turn."""
        before = self.tool_env.episode.length
        state, reward, terminated, truncated, info = self.env.step(action)
        new = state[min(before + len(action), len(state)) :]
        return new, float(reward), terminated, truncated, _with_outcome(self.env, info, truncated)


class ChoiceInterface(gym.Wrapper[Any, Any, Any, Any], gym.utils.RecordConstructorArgs):
    """A Discrete choice among candidate turns and a Box of their features, for learners whose policies write no tokens.

    The observation is float32 of shape (most * features,): the features of each candidate, one after the other, padded
    with zeros. Action i is candidate i, and an empty turn if there is no such candidate. `action_masks()` marks the
    candidates.

    Args:
        candidates: a function that returns the candidates of a `ToolEnv` in its present state, pairs of a turn as text
            and its features; None: the task's own `candidates`.
        shape: (most, features): the maximum number of candidates, and the number of features of each; None: the task's.

    Raises: ValueError if the task has no candidates and none are given. `reset` and `step` raise ValueError for no
    candidates, too many, or a wrong number of features.
    """

    def __init__(
        self,
        env: gym.Env[Tokens, Tokens],
        candidates: Callable[[ToolEnv], Sequence[tuple[str, Sequence[float]]]] | None = None,
        shape: tuple[int, int] | None = None,
    ) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, candidates=candidates, shape=shape)
        super().__init__(env)
        self.tool_env = _tool_env(env)
        self._candidates = candidates
        shape = shape or (baselines_of(self.tool_env).choices if candidates is None else None)
        if shape is None:
            name = type(self.tool_env).__name__
            raise ValueError(
                f"{name} has no candidate turns to choose from; override `candidates` and `choices` in it, "
                "or pass candidates= and shape=(most, features)"
            )
        self.shape = shape
        self.action_space = gym.spaces.Discrete(shape[0])
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (shape[0] * shape[1],), np.float32)
        self._turns: list[str] = []
        self._turns_episode: Any = None  # the episode of these candidates: `set_state` brings another

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Begin an episode."""
        _, info = self.env.reset(seed=seed, options=options)
        return self._observe(), info

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Write candidate `action`. After the end of a task, and after a fault, the observation is zeros."""
        if not 0 <= (number := int(action)) < self.shape[0]:
            raise ValueError(f"an action must be a number in [0, {self.shape[0]}), got {action}")
        env, turns = self.tool_env, self._candidate_turns()
        text = env.dialect.spoken(turns[number] if number < len(turns) else "")
        _, reward, terminated, truncated, info = self.env.step(encode_turn(env, text, env.room))
        info = _with_outcome(self.env, info, truncated)
        if terminated or "fault" in info:
            return np.zeros(self.observation_space.shape or (), np.float32), float(reward), terminated, truncated, info
        return self._observe(), float(reward), terminated, truncated, info

    def action_masks(self) -> NDArray[np.bool_]:
        """Return True for each number that is a candidate now, bool of shape (most,), as sb3's MaskablePPO needs it."""
        return np.arange(self.shape[0]) < len(self._candidate_turns())

    def _candidate_turns(self) -> list[str]:
        if self._turns_episode is not self.tool_env.episode:
            self._observe()
        return self._turns

    def _observe(self) -> NDArray[np.float32]:
        env, (maximum, features) = self.tool_env, self.shape
        candidates = self._candidates(env) if self._candidates else baselines_of(env).candidates()
        if not 0 < len(candidates) <= maximum or any(len(numbers) != features for _, numbers in candidates):
            raise ValueError(
                f"expected 1 to {maximum} candidates with {features} features each, "
                f"got {[len(numbers) for _, numbers in candidates]} features"
            )
        self._turns, self._turns_episode = [text for text, _ in candidates], self.tool_env.episode
        rows = np.zeros(self.shape, np.float32)
        rows[: len(candidates)] = [numbers for _, numbers in candidates]
        return rows.ravel()


class RecordTrajectories(gym.Wrapper[Any, Tokens, Any, Tokens], gym.utils.RecordConstructorArgs):
    """A recorder of every finished episode in a file of JSON lines, which `python -m agent_r1.show` prints.

    A row has `env_id`, `model`, and the entries of `agent_r1.trajectories.episode_row`: the task, its question, the
    messages, tokens with their mask and rewards, turns with their rewards, reward terms, tool calls, the end and the
    outcome. The learners write the same rows.

    A row is written when its episode ends, so the file is complete whenever the program stops. Several environments
    may write to the same file. Wrap the token environment, inside `TextInterface`, or a `ToolVectorEnv`, with or
    without text.

    Args:
        path: the file; its folder is made, and rows are appended.
        model: the name of the policy, for the row.

    Raises: TypeError if the actions are not tokens, and for a vector environment that is not a `ToolVectorEnv`.
    """

    def __new__(cls, env: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return a vector wrapper for a vector environment."""
        if isinstance(env, gym.vector.VectorEnv):
            return _RecordMany(env, *args, **kwargs)
        return super().__new__(cls)

    def __init__(self, env: gym.Env[Any, Tokens], path: str | os.PathLike[str], model: str | None = None) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, path=str(path), model=model)
        super().__init__(env)
        if not isinstance(env.action_space, TokenSpan):
            raise TypeError("RecordTrajectories records tokens: TextInterface(RecordTrajectories(env, path))")
        self.tool_env = _tool_env(env)
        self.path, self.model = _file(path), model

    def step(self, action: Tokens) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Run one assistant turn; the last turn of an episode writes its row."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        info = _with_outcome(self.env, info, truncated)
        if terminated or truncated:
            _record(self, self.tool_env, info, terminated, truncated)
        return observation, float(reward), terminated, truncated, info


class _RecordMany(gym.vector.VectorWrapper):
    """`RecordTrajectories` around a `ToolVectorEnv`: with `step`, or `send` and `recv`, and any `autoreset_mode`."""

    def __init__(
        self, envs: gym.vector.VectorEnv[Any, Any, Any], path: str | os.PathLike[str], model: str | None = None
    ) -> None:
        super().__init__(envs)
        if not isinstance(envs.unwrapped, ToolVectorEnv):
            raise TypeError(
                f"RecordTrajectories takes a ToolVectorEnv, got {type(envs.unwrapped).__name__}: wrap the single "
                "environments instead"
            )
        self.path, self.model = _file(path), model
        envs.unwrapped.on_end.append(self._write)

    def __getattr__(self, name: str) -> Any:  # send, recv, envs
        if name.startswith("_") or name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)

    def _write(self, env: ToolEnv, info: dict[str, Any], terminated: bool, truncated: bool) -> None:
        _record(self, env, info, terminated, truncated)


def _record(
    wrapper: RecordTrajectories | _RecordMany, env: ToolEnv, info: dict[str, Any], terminated: bool, truncated: bool
) -> None:
    """Add the row of an episode that is over. Its rewards are the episode's own, also after `set_state`."""
    row = {"env_id": wrapper.spec.id if wrapper.spec else None, "model": wrapper.model}
    rewards = [sum(terms.values()) for terms in env.episode.rewards]
    append_row(wrapper.path, row | episode_row(env, info, rewards, terminated, truncated))


def _file(path: str | os.PathLike[str]) -> str:
    """Return the absolute path of a file, and make its folder."""
    path = os.path.abspath(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return path


def _with_outcome(env: gym.Env[Any, Any], info: dict[str, Any], truncated: bool) -> dict[str, Any]:
    """Return the info, and add the outcome if Gymnasium's TimeLimit has cut the episode off."""
    return info | _tool_env(env).cut_off() if truncated and "is_success" not in info else info


def _tool_env(env: gym.Env[Any, Any]) -> ToolEnv:
    if not isinstance(env.unwrapped, ToolEnv):
        raise TypeError(f"this wrapper needs a ToolEnv at the core, got {type(env.unwrapped).__name__}")
    return env.unwrapped
