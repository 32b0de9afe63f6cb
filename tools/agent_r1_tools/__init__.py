"""Tools that an agent can call. They know nothing of environments, rewards or tokens.

`Tool` and `ToolResult` are the contract, `run_tool` and `run_batch` the way to make calls that always answer, and
`ToolFault` is what a tool raises when its machinery, not the policy, is at fault. `agent_r1_tools.search` has the
retrievers.
"""

from agent_r1_tools.calculator import Calculator
from agent_r1_tools.running import run_batch, run_tool
from agent_r1_tools.search import LookupTool, SearchTool
from agent_r1_tools.tool import Tool, ToolFault, ToolResult

__all__ = ["Calculator", "LookupTool", "SearchTool", "Tool", "ToolFault", "ToolResult", "run_batch", "run_tool"]
