"""The tools of an environment for LangChain and LangGraph; docs/agent_loops.md shows a whole program.

    env.reset(options={"task_index": 3})
    agent = create_agent(model, tools_of(env))
    out = agent.invoke({"messages": agent_r1.prompt_messages(env)})
    total, info = agent_r1.score_messages(env, out["messages"])

LangGraph plays the episode, and the environment pays it. Made for langchain-core 1.8 and LangGraph 1.2.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agent_r1.loops import call_tool
from agent_r1.tool_env import ToolEnv

try:
    from langchain_core.tools import BaseTool, StructuredTool
except ImportError as error:
    raise ImportError(f'{error}: agent_r1.adapters.langgraph needs pip install "agent-r1[langgraph]"') from error


def tools_of(env: ToolEnv) -> list[BaseTool]:
    """Return the tools of the environment, whose calls are `call_tool`: in the episode that runs at the call.

    Calls run one after the other, because LangGraph makes those of one turn in several threads. An infrastructure error
    that persists raises ToolFault out of LangGraph's loop. A `ToolNode` that handles all errors shows it to the policy
    instead; then the info of `score_messages` has "fault".
    """
    one_by_one = ThreadPoolExecutor(1, thread_name_prefix="agent_r1-langgraph")

    def function(name: str) -> Callable[..., str]:
        def call(**arguments: Any) -> str:
            return one_by_one.submit(call_tool, env, name, arguments).result().content

        return call

    return [
        StructuredTool(
            name=schema["function"]["name"],
            description=schema["function"]["description"],
            args_schema=schema["function"]["parameters"],
            func=function(schema["function"]["name"]),
        )
        for schema in env.schemas
    ]
