"""Actions, observations and states of the protocol, and the client."""

from __future__ import annotations

from typing import Any

try:
    from openenv.core.client_types import StepResult
    from openenv.core.env_client import EnvClient
    from openenv.core.env_server.types import Action, Observation, State
    from pydantic import StrictInt
except ImportError as error:
    raise ImportError(f'{error}: agent_r1.adapters.openenv needs pip install "agent-r1[openenv]"') from error


class OpenEnvAction(Action):
    """One turn of the policy: either `message` or `tokens`.

    Attributes:
        message: the turn as text in the environment's dialect, or a chat API's reply with `content` and `tool_calls`.
        tokens: the sampled token ids, end of turn included.
    """

    message: str | dict[str, Any] | None = None
    tokens: list[StrictInt] | None = None


class OpenEnvObservation(Observation):
    """The prompt after `reset`, or what a step added to the conversation.

    `metadata` has the environment's `info`: `task_id`, `reward_terms`, `tool_calls`, and at the end `is_success`,
    `metrics` and `truncation_reason`. Its entry `truncated` separates a cut episode from a finished one.

    Attributes:
        messages: after `reset` the conversation so far, afterwards the messages that follow the policy's turn.
        tools: the schemas of the tools, after `reset` only.
        tokens: the ids that are new in the state: all of them after `reset`, afterwards the turn and what follows it.
            The state is the concatenation of all `tokens`.
        num_action_tokens: how many of `tokens`, from the first, are the policy's turn.
        max_new_tokens: the room of the next turn, in tokens. A longer turn is cut.
        stop_token_ids: the tokens that end a turn.
    """

    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] = []
    tokens: list[int] = []
    num_action_tokens: int = 0
    max_new_tokens: int = 0
    stop_token_ids: list[int] = []


class OpenEnvState(State):
    """The state of a session. `reset(injected_state=state.injected_state)` plays the episode again up to here."""

    task_id: str | None = None
    injected_state: dict[str, Any] | None = None


class OpenEnvClient(EnvClient[OpenEnvAction, OpenEnvObservation, OpenEnvState]):
    """A session on such a server: `reset`, `step` and `state`, to be awaited in async code (see OpenEnv's `EnvClient`).

    `message_timeout_s` (60) is the patience for an answer in seconds. It must exceed the duration of a turn's tools,
    retries included (`fault_deadline`). Raises RuntimeError with the server's message for an error of the server, and
    so for an infrastructure error.
    """

    def _step_payload(self, action: OpenEnvAction) -> dict[str, Any]:
        return action.model_dump(exclude_defaults=True)

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[OpenEnvObservation]:
        reward, done = payload["reward"], payload["done"]
        seen = OpenEnvObservation(**payload["observation"], reward=reward, done=done)
        return StepResult(seen, reward, done, seen.metadata)

    def _parse_state(self, payload: dict[str, Any]) -> OpenEnvState:
        return OpenEnvState(**payload)
