"""Terminal: small shell tasks in Harbor's layout, in a sandbox; tests that the policy never meets decide."""

from agent_r1.tasks.terminal.environment import TerminalEnv

__all__ = ["TerminalEnv"]
