"""Terminal: small shell tasks in Harbor's layout, run in a sandbox and judged by hidden tests."""

from agent_r1.tasks.terminal.environment import TerminalEnv

__all__ = ["TerminalEnv"]
