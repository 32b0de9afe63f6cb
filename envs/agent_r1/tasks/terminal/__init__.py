"""Terminal: small shell tasks in Harbor's layout, in a sandbox, graded by hidden tests."""

from agent_r1.tasks.terminal.environment import TerminalEnv

__all__ = ["TerminalEnv"]
