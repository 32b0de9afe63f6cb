"""Wrappers around a `ToolEnv`: text instead of tokens, only what is new, and a record of what happened."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from agent_r1.chat import encode_turn
from agent_r1.spaces import TokenSpan
from agent_r1.tool_env import ToolEnv

Tokens = NDArray[np.int32]
_SAMPLE_LENGTH = 32


class UnicodeText(gym.Space[str]):
    """Any text, of any length. `gymnasium.spaces.Text` needs a finite alphabet, and with all of Unicode it takes
    seconds to build; this space only samples printable ASCII (at most 32 characters), which is enough for checks."""

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(None, str, seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Text has no fixed length, so it doesn't flatten to a Box."""
        return False

    def sample(self, mask: None = None, probability: None = None) -> str:
        """At most 32 printable ASCII characters."""
        if mask is not None or probability is not None:
            raise ValueError("UnicodeText.sample takes no mask and no probability")
        length = int(self.np_random.integers(_SAMPLE_LENGTH + 1))
        return bytes(self.np_random.integers(32, 127, size=length, dtype=np.uint8)).decode()

    def contains(self, x: Any) -> bool:
        """True for a str."""
        return isinstance(x, str)

    def to_jsonable(self, sample_n: Iterable[str]) -> list[str]:
        """The texts themselves."""
        return list(sample_n)

    def from_jsonable(self, sample_n: list[Any]) -> list[str]:
        """The inverse of `to_jsonable`."""
        return [str(text) for text in sample_n]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnicodeText)

    def __repr__(self) -> str:
        return "UnicodeText()"


def decode_state(env: ToolEnv, tokens: Tokens) -> str:
    """The text of a state, control tokens included."""
    return env.tokenizer.decode(tokens.tolist(), skip_special_tokens=False)


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
        self._max_new_tokens = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode; the observation is the prompt as text."""
        tokens, info = self.env.reset(seed=seed, options=options)
        self._max_new_tokens = info["max_new_tokens"]
        return decode_state(self.tool_env, tokens), info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """One assistant turn."""
        span = encode_turn(self.tool_env, action, self._max_new_tokens)
        tokens, reward, terminated, truncated, info = self.env.step(span)
        self._max_new_tokens = info["max_new_tokens"]
        return decode_state(self.tool_env, tokens), float(reward), terminated, truncated, info


class NewTokens(gym.Wrapper[Tokens, Tokens, Tokens, Tokens], gym.utils.RecordConstructorArgs):
    """The observation is only what the environment added: the prompt at reset, then what follows each span.

    Prompt, span, observation, span, observation ... one after the other are the state. (A span that didn't fit is the
    exception: its episode is over, the observation is empty, and only the part that fitted is in the state.)
    """

    def __init__(self, env: gym.Env[Tokens, Tokens]) -> None:
        gym.utils.RecordConstructorArgs.__init__(self)
        super().__init__(env)
        self._length = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Tokens, dict[str, Any]]:
        """Begin an episode; the observation is the prompt."""
        state, info = self.env.reset(seed=seed, options=options)
        self._length = len(state)
        return state, info

    def step(self, action: Tokens) -> tuple[Tokens, float, bool, bool, dict[str, Any]]:
        """One assistant turn."""
        state, reward, terminated, truncated, info = self.env.step(action)
        new = state[min(self._length + len(action), len(state)) :]
        self._length = len(state)
        return new, float(reward), terminated, truncated, info


class RecordTrajectories(gym.Wrapper[Any, Tokens, Any, Tokens], gym.utils.RecordConstructorArgs):
    """Appends every finished episode to a file of JSON lines.

    A row has `env_id`, `task_id`, `task_index`, `seed` (of the reset, or null), `tokens` (the state at the end),
    `spans` (`{"role", "start", "end"}`; the roles are "prompt", "policy" and "environment", and together the spans
    cover the tokens), one entry a turn in `rewards`, `reward_terms` and `tool_calls`, then `terminated`, `truncated`,
    `truncation_reason`, `is_success`, `answer` and `metrics`; and `fault` where one ended the episode.

    A row is written at once, when its episode ends, so the file is whole whenever the program stops; several
    environments may write to the same file. Put it around the token environment, inside of `TextInterface`.

    Args:
        path: the file; its folder is made, and rows are added to what is there.

    Raises: TypeError where the actions are not tokens.
    """

    def __init__(self, env: gym.Env[Any, Tokens], path: str | os.PathLike[str]) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, path=str(path))
        super().__init__(env)
        if not isinstance(env.action_space, TokenSpan):
            raise TypeError("RecordTrajectories records tokens: TextInterface(RecordTrajectories(env, path))")
        self.tool_env = _tool_env(env)
        self.path = os.path.abspath(path)
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self._row: dict[str, Any] = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode. One that was under way is not recorded."""
        observation, info = self.env.reset(seed=seed, options=options)
        episode = self.tool_env.episode
        self._row = {
            "env_id": self.spec.id if self.spec else None,
            "task_id": info["task_id"],
            "task_index": episode.task_index,
            "seed": seed,
            "spans": [{"role": "prompt", "start": 0, "end": episode.length}],
            "rewards": [],
            "reward_terms": [],
            "tool_calls": [],
        }
        return observation, info

    def step(self, action: Tokens) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One assistant turn; the last one of an episode writes its row."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        episode, row = self.tool_env.episode, self._row
        start = row["spans"][-1]["end"]
        middle = min(start + len(action), episode.length)
        row["spans"].append({"role": "policy", "start": start, "end": middle})
        if middle < episode.length:
            row["spans"].append({"role": "environment", "start": middle, "end": episode.length})
        row["rewards"].append(float(reward))
        row["reward_terms"].append(info["reward_terms"])
        row["tool_calls"].append(info["tool_calls"])
        if terminated or truncated:
            outcome = ("truncation_reason", "is_success", "answer", "metrics")
            row["tokens"] = episode.buffer[: episode.length].tolist()
            row |= {"terminated": terminated, "truncated": truncated, **{key: info.get(key) for key in outcome}}
            row |= {"fault": info["fault"]} if "fault" in info else {}
            self._write(row)
        return observation, float(reward), terminated, truncated, info

    def _write(self, row: dict[str, Any]) -> None:
        # One write of one line in append mode: an interrupt comes before or after it, never in the middle.
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, json.dumps(row).encode() + b"\n")
        finally:
            os.close(file)


def _tool_env(env: gym.Env[Any, Any]) -> ToolEnv:
    if not isinstance(env.unwrapped, ToolEnv):
        raise TypeError(f"this wrapper needs a ToolEnv at the core, got {type(env.unwrapped).__name__}")
    return env.unwrapped
