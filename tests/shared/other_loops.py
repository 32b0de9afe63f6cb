"""An expert behind a chat API, for the loops of other packages, and counts of the calls that a tool runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
from chat_server import ChatServer, called, expert

from agent_r1_tools import ToolFault

ENV_ID = "AgentR1/ArithmeticWorld-v0"  # its expert calls the calculator and answers


def made(task_index: int = 3) -> tuple[Any, list[Any]]:
    """Return an environment at the beginning of an episode, and a list of the calls that its tool runs from now on."""
    env: Any = gym.make(ENV_ID).unwrapped
    env.reset(options={"task_index": task_index})
    return env, counted(env)


def counted(env: Any) -> list[Any]:
    calls: list[Any] = []
    execute = env.tools["calculator"].execute

    def run(arguments: Any) -> Any:
        calls.append(arguments)
        return execute(arguments)

    env.tools["calculator"].execute = run
    return calls


def break_down(env: Any) -> None:
    """Let the tool fail for a reason that is not the policy's."""
    env.fault_deadline = 0.1

    def run(arguments: Any) -> Any:
        raise ToolFault("the machine is gone", ran=True)

    env.tools["calculator"].execute = run


@contextmanager
def model_server(*turns: Any) -> Iterator[ChatServer]:
    """Serve an expert, or these turns: what `called` takes, or the text of an answer."""
    know = expert(gym.make(ENV_ID).unwrapped)

    def policy(body: dict[str, Any]) -> dict[str, Any]:
        number = sum(message["role"] == "assistant" for message in body["messages"])
        if not turns:
            message = know(body)
        else:
            turn = turns[number]
            message = called(content=turn) if isinstance(turn, str) else called(*turn)
        for i, call in enumerate(message.get("tool_calls", ())):
            call["id"] = f"call-{number}-{i}"  # the loops want ids of their own for each call
        return message

    server = ChatServer(policy)
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def stepped(messages: list[Any], task_index: int = 3) -> float:
    """Return the return of the same turns, played by `step_message`."""
    env: Any = gym.make(ENV_ID).unwrapped
    env.reset(options={"task_index": task_index})
    total, over = 0.0, False
    for message in messages:
        if message["role"] == "assistant" and not over:
            _, reward, terminated, truncated, _ = env.step_message(message)
            total, over = total + reward, terminated or truncated
    return total
