"""Wrappers around a `ToolEnv`: text instead of tokens, only what is new, a choice among turns, a record of episodes.

Where Gymnasium's TimeLimit, inside of one, has cut an episode off, the info has `is_success` and metrics all the same.
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
    """Text in, text out, for people and for models behind a chat API.

    The observation is the whole state as text, control tokens included (`env.unwrapped.messages` has it in chat form).
    An action is an assistant turn as text: see `encode_turn`. What was sampled as tokens should be given as tokens:
    text does not say how it was cut into tokens.
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
        """One assistant turn."""
        span = encode_turn(self.tool_env, action, self.tool_env.room)
        tokens, reward, terminated, truncated, info = self.env.step(span)
        info = _whole(self.env, info, truncated)
        return decode_state(self.tool_env, tokens), float(reward), terminated, truncated, info


class NewTokens(gym.Wrapper[Tokens, Tokens, Tokens, Tokens], gym.utils.RecordConstructorArgs):
    """The observation is only what the environment added: the prompt at reset, then what follows each span.

    Prompt, span, observation, span, observation ... one after the other are the state. (A span that didn't fit is the
    exception: its episode is over, the observation is empty, and only the part that fitted is in the state.)
    """

    def __init__(self, env: gym.Env[Tokens, Tokens]) -> None:
        gym.utils.RecordConstructorArgs.__init__(self)
        super().__init__(env)
        self.tool_env = _tool_env(env)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Tokens, dict[str, Any]]:
        """Begin an episode; the observation is the prompt."""
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Tokens) -> tuple[Tokens, float, bool, bool, dict[str, Any]]:
        """One assistant turn."""
        before = self.tool_env.episode.length
        state, reward, terminated, truncated, info = self.env.step(action)
        new = state[min(before + len(action), len(state)) :]
        return new, float(reward), terminated, truncated, _whole(self.env, info, truncated)


class ChoiceInterface(gym.Wrapper[Any, Any, Any, Any], gym.utils.RecordConstructorArgs):
    """A Discrete choice among candidate turns, a Box of their features: for learners whose policies write no tokens.

    The observation is float32 of shape (most * features,): the features of each candidate, one after the other, and
    zeros where there are fewer. Action i is candidate i; where there is none, it is an empty turn. `action_masks()`
    says which there are.

    Args:
        candidates: a function that gives the candidates of a `ToolEnv` in its present state, pairs of a turn as text
            and its features; None: the task's own `candidates`.
        shape: (most, features): how many candidates a turn may have, and how many features each has; None: the task's.

    Raises: ValueError where the task has no candidates and none are given, and, from `reset` and `step`, where there
    are none, too many, or features of another number.
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
        self._of: Any = None  # the episode whose candidates these are: `set_state` brings another

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Begin an episode."""
        _, info = self.env.reset(seed=seed, options=options)
        return self._look(), info

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Write candidate `action`. After the end of a task, and after a fault, the observation is zeros."""
        if not 0 <= (number := int(action)) < self.shape[0]:
            raise ValueError(f"a choice is a number in [0, {self.shape[0]}), got {action}")
        env, turns = self.tool_env, self._candidate_turns()
        text = env.dialect.spoken(turns[number] if number < len(turns) else "")
        _, reward, terminated, truncated, info = self.env.step(encode_turn(env, text, env.room))
        info = _whole(self.env, info, truncated)
        if terminated or "fault" in info:
            return np.zeros(self.observation_space.shape or (), np.float32), float(reward), terminated, truncated, info
        return self._look(), float(reward), terminated, truncated, info

    def action_masks(self) -> NDArray[np.bool_]:
        """Which of the numbers are candidates now, bool of shape (most,): sb3-contrib's MaskablePPO asks for it."""
        return np.arange(self.shape[0]) < len(self._candidate_turns())

    def _candidate_turns(self) -> list[str]:
        if self._of is not self.tool_env.episode:
            self._look()
        return self._turns

    def _look(self) -> NDArray[np.float32]:
        env, (most, features) = self.tool_env, self.shape
        there = self._candidates(env) if self._candidates else baselines_of(env).candidates()
        if not 0 < len(there) <= most or any(len(numbers) != features for _, numbers in there):
            raise ValueError(
                f"expected 1 to {most} candidates with {features} features each, "
                f"got {[len(numbers) for _, numbers in there]} features"
            )
        self._turns, self._of = [text for text, _ in there], self.tool_env.episode
        rows = np.zeros(self.shape, np.float32)
        rows[: len(there)] = [numbers for _, numbers in there]
        return rows.ravel()


class RecordTrajectories(gym.Wrapper[Any, Tokens, Any, Tokens], gym.utils.RecordConstructorArgs):
    """Appends every finished episode to a file of JSON lines, which `python -m agent_r1.show` prints.

    A row has `env_id`, `model`, and what `agent_r1.trajectories.episode_row` says: the task, its question, the
    messages, tokens with their mask and rewards, turns with their rewards, reward terms and tool calls, how it ended
    and what came of it. The learners write the same.

    A row is written at once, when its episode ends, so the file is whole whenever the program stops; several
    environments may write to the same file. Put it around the token environment, inside of `TextInterface`, or around
    a `ToolVectorEnv`, with text or without.

    Args:
        path: the file; its folder is made, and rows are added to what is there.
        model: what plays, for the row.

    Raises: TypeError where the actions are not tokens, and for a vector environment that is no `ToolVectorEnv`.
    """

    def __new__(cls, env: Any = None, *args: Any, **kwargs: Any) -> Any:
        """A vector environment gets a vector wrapper."""
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
        """One assistant turn; the last one of an episode writes its row."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        info = _whole(self.env, info, truncated)
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
                f"RecordTrajectories takes a ToolVectorEnv, got {type(envs.unwrapped).__name__}: wrap the environments "
                "in it instead"
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
    """The absolute path of a file whose folder is there."""
    path = os.path.abspath(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return path


def _whole(env: gym.Env[Any, Any], info: dict[str, Any], truncated: bool) -> dict[str, Any]:
    """The info, with the outcome where Gymnasium's TimeLimit has cut the episode off, which knows of none."""
    return info | _tool_env(env).cut_off() if truncated and "is_success" not in info else info


def _tool_env(env: gym.Env[Any, Any]) -> ToolEnv:
    if not isinstance(env.unwrapped, ToolEnv):
        raise TypeError(f"this wrapper needs a ToolEnv at the core, got {type(env.unwrapped).__name__}")
    return env.unwrapped
