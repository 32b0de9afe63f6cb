"""Tools that an agent can call. They know nothing of environments, rewards or tokens.

`Tool` and `ToolResult` are the contract, `run_tool` and `run_batch` the way to make calls that always answer.
"""

from agent_r1_tools.tool import Tool, ToolResult, run_batch, run_tool

__all__ = ["Tool", "ToolResult", "run_batch", "run_tool"]
