"""ALFWorld: household tasks in text, in rooms drawn from the floor plans of its wheel, or in the official games."""

from agent_r1.bridges.alfworld.environment import ALFWorldEnv

__all__ = ["ALFWorldEnv"]
