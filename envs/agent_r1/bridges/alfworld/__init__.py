"""ALFWorld: household tasks in text, in generated rooms or in the official games."""

from agent_r1.bridges.alfworld.environment import ALFWorldEnv

__all__ = ["ALFWorldEnv"]
