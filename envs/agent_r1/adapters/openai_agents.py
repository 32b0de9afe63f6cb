"""The tools of an environment for the OpenAI Agents SDK; docs/agent_loops.md shows a whole program.

    env.reset(options={"task_index": 3})
    agent = Agent(name="player", tools=tools_of(env), model=model)
    result = Runner.run_sync(agent, agent_r1.prompt_messages(env))
    total, info = agent_r1.score_messages(env, messages_of(result))

The SDK plays the episode, and the environment pays it. Made for openai-agents 0.24.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agent_r1.loops import call_tool
from agent_r1.tool_env import ToolEnv

try:
    from agents import FunctionTool, ItemHelpers, RunErrorDetails
    from agents.models.chatcmpl_converter import Converter
    from agents.result import RunResultBase
except ImportError as error:
    needed = 'agent_r1.adapters.openai_agents needs pip install "agent-r1[openai-agents]"'
    raise ImportError(f"{error}: {needed}") from error


def tools_of(env: ToolEnv) -> list[FunctionTool]:
    """Return the tools of the environment, whose calls are `call_tool`: in the episode that runs at the call.

    Calls run one after the other in a thread, in the order of the turn. An infrastructure error that persists ends the
    run: it raises ToolFault, or the SDK's UserError that is caused by it.
    """
    one_by_one = ThreadPoolExecutor(1, thread_name_prefix="agent_r1-agents")

    def function(name: str) -> Callable[[Any, str], Awaitable[str]]:
        async def call(context: Any, text: str) -> str:
            try:
                arguments = json.loads(text or "{}")
            except (ValueError, RecursionError):
                arguments = text  # the policy reads an error
            run = asyncio.get_running_loop().run_in_executor
            return (await run(one_by_one, call_tool, env, name, arguments)).content

        return call

    return [
        FunctionTool(
            name=schema["function"]["name"],
            description=schema["function"]["description"],
            params_json_schema=schema["function"]["parameters"],
            on_invoke_tool=function(schema["function"]["name"]),
            strict_json_schema=False,  # the environment checks the arguments
        )
        for schema in env.schemas
    ]


def messages_of(result: RunResultBase | RunErrorDetails) -> list[dict[str, Any]]:
    """Return the conversation of a run as chat messages, which `score_messages` takes.

    `result` is what `Runner` returns, or `run_data` of its error, such as MaxTurnsExceeded. Several agents are one
    policy.
    """
    items = ItemHelpers.input_to_new_input_list(result.input)
    items += [item.to_input_item() for item in result.new_items]
    return [dict(message) for message in Converter.items_to_messages(items)]
