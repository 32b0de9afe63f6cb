"""MCP: the tools of any server of the Model Context Protocol, for the policy."""

from agent_r1_tools.mcp.server import MCPServer, MCPTool

__all__ = ["MCPServer", "MCPTool"]
