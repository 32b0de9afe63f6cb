"""Tools that an agent can call. They know nothing about environments, rewards or tokens.

`Tool` and `ToolResult` are the contract. `run_tool` and `run_batch` make calls and always answer. A tool raises
`ToolFault` for an infrastructure error, which is not the policy's. `agent_r1_tools.search` has the retrievers.
"""

from agent_r1_tools.calculator import Calculator
from agent_r1_tools.running import run_batch, run_tool
from agent_r1_tools.search import LookupTool, SearchTool
from agent_r1_tools.tool import Tool, ToolFault, ToolResult

__all__ = ["Calculator", "LookupTool", "SearchTool", "Tool", "ToolFault", "ToolResult", "run_batch", "run_tool"]
