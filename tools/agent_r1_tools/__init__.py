"""Tools that an agent can call. They know nothing of environments, rewards or tokens.

`Tool` and `ToolResult` are the contract, `run_tool` and `run_batch` the way to make calls that always answer.
`agent_r1_tools.search` has the retrievers.
"""

from agent_r1_tools.calculator import Calculator
from agent_r1_tools.search import LookupTool, SearchTool
from agent_r1_tools.tool import Tool, ToolResult, run_batch, run_tool

__all__ = ["Calculator", "LookupTool", "SearchTool", "Tool", "ToolResult", "run_batch", "run_tool"]
